"""What a grid of linear probes costs, against one probe on the same features: side by side in one run.

python benchmarks/probe_grid.py [--steps 1500] [--rounds 5] [--encoder RUN --train SHARDS]

- grid: 8 learning rates x 4 weight decays, trained together by `fit_linear_grids`, its products in bfloat16 where the device
  has it, as scripts/linear_probe.py does it to choose.
- one: one setting, in float32, by the same function.

Without an encoder, on made features of 50,000 samples, 192 wide, 10 classes; with one, on its mean patch token after the last
block. The goal is below 3 x. Nothing else should run meanwhile.
"""

import argparse
import itertools
import statistics

import torch

from benchmarks.interleave import interleave, machine, median_ratio
from data.sources import open_dataset
from finetune.probe import Setting, fit_linear_grids
from models.formats import load_encoder
from training.features import extract_features, feature_cache
from training.machine import best_device, native_bfloat16

LRS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
WEIGHT_DECAYS = (0.0, 1e-2, 1e-1, 1.0)


def main() -> None:
    """Prints milliseconds per step of each way and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=50000)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--encoder", default="")
    parser.add_argument("--train", default="", help="labelled images, with --encoder")
    args = parser.parse_args()
    if bool(args.encoder) != bool(args.train):
        parser.error("--encoder and --train belong together")

    device = best_device()
    if args.encoder:
        found = extract_features(
            load_encoder(args.encoder), open_dataset(args.train, labelled=True), 1, device, cache=feature_cache()
        )
        values, labels = next(part for name, part in found.views.items() if name.startswith("mean/")), found.labels
    else:
        labels = torch.arange(args.samples) % args.classes
        values = torch.randn(args.samples, args.width) + torch.randn(args.classes, args.width)[labels]
    values, labels = values.to(device), labels.to(device)
    rows, num_classes = torch.arange(len(labels), device=device), int(labels.max()) + 1

    grid_dtype = torch.bfloat16 if native_bfloat16(device.type) else torch.float32

    def fit(settings: list[Setting], dtype: torch.dtype) -> None:
        fit_linear_grids(
            {"mean/1": values}, labels, rows, num_classes, {"mean/1": ("mean/1",)}, settings, args.steps, args.batch, 0, dtype
        )

    grid = [Setting(lr, decay) for lr, decay in itertools.product(LRS, WEIGHT_DECAYS)]
    seconds = interleave(
        {"grid": lambda: fit(grid, grid_dtype), "one": lambda: fit([Setting(1e-2, 0.0)], torch.float32)}, args.rounds, warmup=1
    )
    print(f"{machine()}; {len(labels):,} samples, {values.shape[1]} wide, {num_classes} classes")
    for name, times in seconds.items():
        print(f"{name:>5}: {statistics.median(times) / args.steps * 1000:7.3f} ms a step")
    ratio = median_ratio(seconds, "grid", "one")
    print(f"a grid of {len(grid)} costs {ratio:.2f} x one setting: {args.steps} steps of {args.batch} samples")


if __name__ == "__main__":
    main()

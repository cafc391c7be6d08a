"""What the exact shortcuts save: whole training steps, side by side in one run.

python benchmarks/fast_path.py [--preset tiny4|base16] [--batch 64] [--rounds 7]

- fast: `MaskedAutoencoder.forward` as it is.
- plain: `plain_forward`, the textbook formulation, with the same attention.
- plain, fused attention: the textbook formulation with torch's fused attention call, as timm computes it.

Loss and gradients of all three are equal (tests/unit/test_models.py).
"""

import argparse
import statistics
from collections.abc import Callable
from unittest import mock

import torch

from benchmarks.interleave import interleave, machine, median_ratio
from models.mae import MAEConfig, build_mae
from models.plain import plain_forward
from training.machine import native_bfloat16
from training.optim import OptimConfig, build_adamw, parameter_groups

PRESETS = {
    "tiny4": MAEConfig(
        name="tiny", img_size=(32, 32), patch_size=4, decoder_embed_dim=128, decoder_depth=2, decoder_num_heads=4
    ),
    "base16": MAEConfig(name="base"),
}


def main() -> None:
    """Prints images/s of each way and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="tiny4")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = PRESETS[args.preset]
    model = build_mae(config).to(device)
    optimizer = build_adamw(parameter_groups(model, 0.05), OptimConfig())
    images = torch.randn(args.batch, config.in_chans, *config.img_size, device=device)
    noise = torch.rand(args.batch, model.encoder.num_patches, device=device)
    bfloat16 = native_bfloat16(device)

    def step(loss: Callable[[], torch.Tensor]) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    def plain_fused() -> torch.Tensor:
        with mock.patch("models.attention.prefers_plain_attention", return_value=False):
            return plain_forward(model, images, noise).loss

    ways = {
        "fast": lambda: step(lambda: model(images, noise).loss),
        "plain": lambda: step(lambda: plain_forward(model, images, noise).loss),
        "plain, fused attention": lambda: step(plain_fused),
    }
    seconds = interleave(ways, args.rounds)
    print(f"{machine()}, {'bfloat16' if bfloat16 else 'float32'}; {args.preset}, batch {args.batch}, {args.rounds} rounds")
    for name, times in seconds.items():
        ratio = median_ratio(seconds, name, "fast")
        print(f"{name:>24}: {args.batch / statistics.median(times):7.1f} images/s, {ratio:.2f} x the time of fast")


if __name__ == "__main__":
    main()

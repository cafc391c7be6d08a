"""What checkpoints cost a run: how long a save holds up the training, in the background and without it.

The model is a ViT-Base/16 at 224 px with the paper's decoder, with the state of AdamW: all that a checkpoint holds. Measured
are the copy to memory, for the first time and with its memory used again; hashing and writing, flushed to the disk, in the
background; and both together, as a save that waits for its file takes. Then what the background takes from training beside
it: the time of real steps of the same model with and without a write going on. On a machine that does other work too, the time
of processors says what the copy alone takes.

Command: python benchmarks/checkpoint.py [--folder A_FOLDER_OF_THE_DISK_THAT_RUNS_WRITE_TO]
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from benchmarks.interleave import machine
from models.mae import MAEConfig, MaskedAutoencoder, build_mae
from training.checkpoint import training_tensors
from training.machine import best_device
from training.optim import OptimConfig, build_adamw, parameter_groups, set_lr
from training.saving import CheckpointWriter, HostCopy


@dataclass(frozen=True)
class CheckpointBenchmark:
    """What is saved, where, and how often."""

    folder: Path | None = None
    """Where checkpoints go; None: the system's folder for temporary files."""
    rounds: int = 5
    """Saves of each kind that are timed; the middle one counts."""
    every_steps: int = 100
    """Optimizer steps between two checkpoints."""
    step_s: float = 0.25
    """Seconds of a step of the run that the shares are for besides the one measured here, as of a GPU."""
    batch_size: int = 4
    """Images of the steps that are done here."""


def one_step(model: MaskedAutoencoder, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> float:
    """Does one training step; gives its seconds."""
    start = time.perf_counter()
    noise = torch.rand(len(images), model.encoder.num_patches, device=images.device)
    model(images, noise).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if images.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def steps_during_a_write(
    writer: CheckpointWriter, step: int, train: Callable[[], float], tensors: dict[str, torch.Tensor]
) -> list[float]:
    """Seconds of the steps that begin and end while a checkpoint is written."""
    writer.save(step, {}, tensors)
    seconds = []
    while writer.writing is not None:
        seconds.append(train())
    writer.wait()
    return seconds[:-1] or seconds


def main(config: CheckpointBenchmark) -> None:
    """Measures and prints."""
    device = best_device()
    described = MAEConfig(name="base")
    model, size_px = build_mae(described).to(device), described.img_size
    optimizer = build_adamw(parameter_groups(model, 0.05), OptimConfig())
    set_lr(optimizer, 1e-4)
    images = torch.rand(config.batch_size, 3, *size_px, device=device)
    train = functools.partial(one_step, model, optimizer, images)
    for _ in range(2):
        train()
    tensors = training_tensors(model, optimizer)
    size = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{machine()}; {size / 1e9:.2f} GB in {len(tensors)} tensors")

    with tempfile.TemporaryDirectory(dir=config.folder) as folder:
        writer = CheckpointWriter(Path(folder), keep=2)
        start = time.perf_counter()
        HostCopy().take(tensors)
        print(f"copy for the first time           {time.perf_counter() - start:7.3f} s")
        blocking, background, waiting, processor = [], [], [], []
        for number in range(config.rounds + 1):
            start, start_cpu = time.perf_counter(), time.process_time()
            writer.save(number, {}, tensors)
            copied, copied_cpu = time.perf_counter(), time.process_time()
            writer.wait()
            if number:
                blocking.append(copied - start)
                processor.append(copied_cpu - start_cpu)
                background.append(time.perf_counter() - copied)
                waiting.append(time.perf_counter() - start)
        alone = [train() for _ in range(config.rounds)]
        beside = steps_during_a_write(writer, config.rounds + 1, train, tensors)
    copy_s, write_s, sync_s, step_s = map(statistics.median, (blocking, background, waiting, alone))
    print(
        f"copy, memory used again           {copy_s:7.3f} s  holds up the training; fastest {min(blocking):.3f} s, "
        f"time of processors {statistics.median(processor):.3f} s"
    )
    print(f"hash, write, flush, rename        {write_s:7.3f} s  in the background; fastest {min(background):.3f} s")
    print(f"a save that waits for its file    {sync_s:7.3f} s  fastest {min(waiting):.3f} s")
    print(f"a step here, batch {config.batch_size:<4}           {step_s:7.3f} s")
    print(f"{len(beside)} steps during a write took      {sum(beside):7.3f} s")
    slowed = max(0.0, sum(beside) - len(beside) * step_s) / (config.every_steps * step_s)
    print(f"of {config.every_steps} steps here, a write takes {slowed:.2%} by slowing them down")
    for each_s in (step_s, config.step_s):
        total_s = config.every_steps * each_s
        shares = f"held up {copy_s / total_s:.2%}, waiting for the file {sync_s / total_s:.2%}"
        print(f"of {config.every_steps} steps of {each_s:.2f} s: {shares}")


if __name__ == "__main__":
    main(tyro.cli(CheckpointBenchmark, config=(tyro.conf.FlagConversionOff,)))

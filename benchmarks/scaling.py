"""What a run would cost on many GPUs: measured here, counted, and derived from both by stated assumptions.

python -m benchmarks.scaling [--shards FOLDER] [--model base] [--gpus 8 64 1024] [--global_batch_sizes 4096 65536] ...

- Counted, exactly: parameters, floating-point operations of an image, forward and backward, bytes of gradients and checkpoint.
- Measured, on this machine: those operations per second, the copy and the writing of a checkpoint, and, where --shards names
  a data set, bytes of an image and how many images one core reads, decodes and crops.
- Assumed, as flags: everything about GPUs, network, storage and cores of a machine that is not here.
- Derived: the table. A step takes as long as the slower of two things that run side by side: reading its images, and
  computing them followed by what is left of the all-reduce that did not fit beside the last backward pass.

The all-reduce between nodes is that of a ring: every node sends and receives 2 (n - 1) / n times the gradients.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.interleave import machine
from data.config import DataConfig
from data.shards import open_shards
from data.throughput import measure_stages
from models.encoder import EncoderName, count_parameters
from models.mae import MAEConfig, build_mae
from training.checkpoint import checkpoint_path, training_tensors
from training.machine import native_bfloat16
from training.optim import OptimConfig, build_adamw, parameter_groups
from training.saving import CheckpointWriter

IMAGENET_IMAGES = 1_281_167
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class ScalingBenchmark:
    """What to measure, and what to assume of machines that are not here."""

    model: EncoderName = "base"
    """The model that is measured; all three of the paper's are counted."""
    batch_size: int = 8
    """Images of a measured step."""
    rounds: int = 3
    """Measured steps."""
    shards: Path | None = None
    """A data set to measure reading on; None: bytes_per_image and images_per_core_s are assumed."""
    views_per_image: int = 1
    """Crops of each image that is read."""
    seconds: float = 10.0
    """How long to measure reading."""
    gpus: tuple[int, ...] = (8, 64, 1024)
    """Numbers of GPUs."""
    global_batch_sizes: tuple[int, ...] = (4096, 65536)
    """Images of an optimizer step."""
    images_at_once: int = 256
    """Images that a GPU takes at once; more are accumulated."""
    num_images: int = IMAGENET_IMAGES
    """Of the data set that epochs are counted on."""
    gpu_tflops: float = 989.0
    """Assumed: bfloat16 of a GPU in 10^12 operations per second, without sparsity (H100 SXM's data sheet)."""
    utilisation: float = 0.35
    """Assumed: share of that which training reaches."""
    gpus_per_node: int = 8
    """Assumed."""
    node_gbit_s: float = 400.0
    """Assumed: network of a node, in 10^9 bits per second."""
    network_share: float = 0.8
    """Assumed: share of it that an all-reduce reaches."""
    nvlink_gb_s: float = 350.0
    """Assumed: what an all-reduce inside a node reaches, in 10^9 bytes per second of each GPU."""
    gradient_bytes: int = 4
    """Of one parameter, as they travel; 4 is what this program does."""
    cores_per_gpu: int = 12
    """Assumed: cores of a node for each of its GPUs, all of them readers."""
    bytes_per_image: float = 110_000
    """Assumed where no shards are given."""
    images_per_core_s: float = 400.0
    """Assumed where no shards are given: images that one core reads, decodes and crops in a second."""
    storage_gb_s: float = 2.0
    """Assumed: what the first process writes a checkpoint with, in 10^9 bytes per second."""
    save_every_steps: int = 500
    """Optimizer steps between two checkpoints."""


@dataclass(frozen=True)
class Model:
    """What is counted of a model."""

    name: EncoderName
    parameters: int
    flops: float
    """Of one image, forward and backward; a multiply-add is two."""


@dataclass(frozen=True)
class Reading:
    """What reading costs."""

    bytes_per_image: float
    """Of a file, for each view that is made of it."""
    images_per_core_s: float
    """Views counted."""


@dataclass(frozen=True)
class Step:
    """One optimizer step, derived; seconds."""

    compute_s: float
    all_reduce_s: float
    exposed_s: float
    """What of the all-reduce the model waits for."""
    reading_s: float
    global_batch_size: int
    gpus: int

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max(self.compute_s + self.exposed_s, self.reading_s)

    @property
    def wall(self) -> str:
        """What the step waits for most."""
        costs = {"compute": self.compute_s, "network": self.exposed_s, "reading": self.reading_s}
        if self.reading_s > self.compute_s + self.exposed_s:
            return "reading"
        return max(("compute", "network"), key=costs.__getitem__)


def count(name: EncoderName) -> Model:
    """Counts a model at 224 px on shapes alone."""
    with torch.device("meta"):
        model = build_mae(MAEConfig(name=name))
        images, noise = torch.empty(1, 3, 224, 224), torch.empty(1, model.encoder.num_patches)
        with FlopCounterMode(display=False) as counter:
            model(images, noise).loss.backward()
    return Model(name, count_parameters(model), float(counter.get_total_flops()))


def derive(model: Model, reading: Reading, gpus: int, global_batch_size: int, config: ScalingBenchmark) -> Step:
    """Works out a step from what was counted and measured and what is assumed."""
    images_per_gpu = global_batch_size / gpus
    compute_s = images_per_gpu * model.flops / (config.gpu_tflops * 1e12 * config.utilisation)
    num_nodes = -(-gpus // config.gpus_per_node)
    gradients = config.gradient_bytes * model.parameters
    on_node = min(gpus, config.gpus_per_node)
    inside_s = 2 * (on_node - 1) / on_node * gradients / (config.nvlink_gb_s * 1e9)
    between_s = 2 * (num_nodes - 1) / num_nodes * gradients / (config.node_gbit_s / 8 * 1e9 * config.network_share)
    all_reduce_s = max(inside_s, between_s)  # pieces of the gradients are in both at once
    # Only the last micro-batch's backward pass, two thirds of its time, is there to hide it; accumulated ones send nothing.
    beside_s = compute_s * 2 / 3 * min(1.0, config.images_at_once / images_per_gpu)
    reading_s = images_per_gpu / (config.cores_per_gpu * reading.images_per_core_s)
    return Step(compute_s, all_reduce_s, max(0.0, all_reduce_s - beside_s), reading_s, global_batch_size, gpus)


def measure_compute(model: Model, config: ScalingBenchmark) -> tuple[float, float]:
    """Times steps on this machine's CPU: seconds of an image, forward and backward, by the clock and of processor time."""
    mae = build_mae(MAEConfig(name=model.name))
    images, noise = torch.rand(config.batch_size, 3, 224, 224), torch.rand(config.batch_size, mae.encoder.num_patches)
    seconds, processor = [], []
    for _ in range(1 + config.rounds):
        start, begun = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=native_bfloat16("cpu")):
            loss = mae(images, noise).loss
        loss.backward()
        mae.zero_grad()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - begun)
    return statistics.median(seconds[1:]) / config.batch_size, statistics.median(processor[1:]) / config.batch_size


def measure_checkpoint(model: Model) -> tuple[int, float, float]:
    """Writes a checkpoint of the model with AdamW's state: bytes of the file, seconds of the copy, seconds of the writing."""
    mae = build_mae(MAEConfig(name=model.name))
    optimizer = build_adamw(parameter_groups(mae, 0.05), OptimConfig())
    for parameter in mae.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(Path(folder), keep=1)
        for step in (1, 2):  # the first one also gets the memory
            start = time.perf_counter()
            writer.save(step, {}, training_tensors(mae, optimizer))
            copied = time.perf_counter()
            writer.wait()
        return checkpoint_path(Path(folder), 2).stat().st_size, copied - start, time.perf_counter() - copied


def measure_reading(config: ScalingBenchmark) -> Reading:
    """Times one core on the shards, or takes what is assumed."""
    if config.shards is None:
        print(f"  assumed   images of {config.bytes_per_image / 1e3:.0f} kB; {config.images_per_core_s:.0f} images/s of a core")
        return Reading(config.bytes_per_image, config.images_per_core_s)
    data = DataConfig(batch_size_per_process=16 * config.views_per_image, views_per_image=config.views_per_image)
    start, begun = time.perf_counter(), time.process_time()
    measured = measure_stages(open_shards(config.shards), data, (224, 224), 3, config.seconds)
    # On a machine that other programs use too, the clock counts their time; on one that is free both are the same.
    rate = measured.rate * (time.perf_counter() - start) / (time.process_time() - begun)
    kilobytes = measured.mean_bytes / 1e3
    print(
        f"  measured  images of {kilobytes:.0f} kB, {config.views_per_image} view(s) of each; read, decode, crop, collate: "
        f"{measured.rate:.0f} views/s of a core by the clock, {rate:.0f} by processor time, which counts below; "
        f"{rate * kilobytes / 1e3 / config.views_per_image:.0f} MB/s of a core"
    )
    return Reading(measured.mean_bytes / config.views_per_image, rate)


def print_table(models: list[Model], reading: Reading, config: ScalingBenchmark) -> None:
    """Prints what follows for every model, number of GPUs and batch."""
    print(
        f"  assumed   {config.gpu_tflops:g} TFLOP/s x {config.utilisation:.0%} a GPU, {config.images_at_once} images at once; "
        f"{config.gpus_per_node} GPUs a node; {config.node_gbit_s:g} Gbit/s a node x {config.network_share:.0%}, "
        f"{config.nvlink_gb_s:g} GB/s inside; {config.cores_per_gpu} cores a GPU; storage {config.storage_gb_s:g} GB/s"
    )
    print(
        "| model | GPUs | batch | step | images/s | compute | all-reduce | waited for | cores a GPU | GB/s a node | "
        "epochs a day | checkpoint | wall |\n" + "|---|" + "---:|" * 11 + "---|"
    )
    for model in models:
        for gpus in config.gpus:
            for batch in config.global_batch_sizes:
                step = derive(model, reading, gpus, batch, config)
                fed = batch / (step.compute_s + step.exposed_s)  # images/s that GPUs and network would take
                write_s = 12 * model.parameters / (config.storage_gb_s * 1e9)
                on_node = fed / gpus * min(gpus, config.gpus_per_node) * reading.bytes_per_image / 1e9
                print(
                    f"| {model.name} | {gpus:,} | {batch:,} | {step.seconds * 1e3:.1f} ms | {batch / step.seconds:,.0f} | "
                    f"{step.compute_s * 1e3:.1f} ms | {step.all_reduce_s * 1e3:.1f} ms | {step.exposed_s * 1e3:.1f} ms | "
                    f"{fed / gpus / reading.images_per_core_s:.1f} | {on_node:.2f} | "
                    f"{SECONDS_PER_DAY * batch / step.seconds / config.num_images:,.0f} | "
                    f"{write_s / (config.save_every_steps * step.seconds):.1%} | {step.wall} |"
                )


def main(config: ScalingBenchmark) -> None:
    """Measures, counts, derives and prints."""
    print(f"{machine()}, {'bfloat16' if native_bfloat16('cpu') else 'float32'}")
    models = [count(name) for name in ("base", "large", "huge")]
    for model in models:
        print(
            f"  counted   {model.name}: {model.parameters / 1e6:.1f} M parameters with decoder, {model.flops / 1e9:.1f} GFLOPs "
            f"an image forward and backward; gradients {config.gradient_bytes * model.parameters / 1e9:.2f} GB, checkpoint "
            f"{12 * model.parameters / 1e9:.2f} GB"
        )
    measured = next((model for model in models if model.name == config.model), None) or count(config.model)
    seconds, processor_s = measure_compute(measured, config)
    print(
        f"  measured  {config.model}: {seconds * 1e3:.0f} ms an image on the CPU, {measured.flops / seconds / 1e9:.0f} GFLOP/s "
        f"by the clock; {measured.flops / processor_s / 1e9:.0f} GFLOP/s of a core by processor time"
    )
    size, copy_s, write_s = measure_checkpoint(measured)
    print(
        f"  measured  {config.model}: checkpoint of {size / 1e9:.2f} GB ({size / measured.parameters:.2f} bytes a parameter), "
        f"copied in {copy_s:.2f} s, hashed and written in {write_s:.1f} s ({size / write_s / 1e9:.2f} GB/s)"
    )
    print_table(models, measure_reading(config), config)


if __name__ == "__main__":
    main(tyro.cli(ScalingBenchmark, description=__doc__))

"""Says how fast this machine reads a data set, which stage costs most, and how many reader processes a training needs.

python scripts/measure_throughput.py --data.train photo-shards --images_per_second 2000
"""

from dataclasses import dataclass, field

from data.config import DataConfig, open_source
from data.errors import DataError
from data.throughput import Measurement, measure_loader, measure_stages, workers_needed
from training.cli import parse_args, user_errors
from training.machine import available_cores
from training.one_process import require_one_process


@dataclass(frozen=True)
class ThroughputConfig:
    """Reads, decodes, crops and collates images as a training would, and trains nothing."""

    data: DataConfig = field(default_factory=DataConfig)
    """The images, as for training: crops, views and batch size change what reading costs."""
    img_size: tuple[int, int] = (224, 224)
    """Height and width of the images in a batch, in pixels."""
    in_chans: int | None = None
    """Channels of the images; None takes what the data set has."""
    images_per_second: float | None = None
    """What the model can take (a training's log line says it): the number of workers that feed it is printed, above 0."""
    seconds: float = 10.0
    """How long each measurement takes, above 0. There are two, and one more for each of `workers`."""
    workers: tuple[int, ...] = (available_cores(),)
    """Numbers of reader processes whose speed together is measured."""

    def __post_init__(self) -> None:
        if not self.data.train:
            raise DataError("no data given: name what to read with --data.train FOLDER")
        if min(self.img_size) < 1 or not self.seconds > 0 or min(self.workers, default=1) < 0:
            raise ValueError("img_size must be at least 1, seconds above 0, workers at least 0")
        if self.images_per_second is not None and not self.images_per_second > 0:
            raise ValueError(f"images_per_second must be above 0, not {self.images_per_second}")


def main() -> None:
    """Measures as the command line says."""
    with user_errors():
        require_one_process("scripts/measure_throughput.py")
        config = parse_args(ThroughputConfig, prog="scripts/measure_throughput.py")
        shards = open_source(config.data.train, config.data)
        num_channels = config.in_chans or shards.manifest.num_channels or 3
        measured = measure_stages(shards, config.data, config.img_size, num_channels, config.seconds)
        print("\n".join(describe(measured, config)))
        for num_workers in config.workers:
            rate = measure_loader(shards, config.data, config.img_size, num_channels, num_workers, config.seconds)
            readers = f"{num_workers} reader processes" if num_workers else "no reader process"
            print(
                f"{readers}: {rate:,.0f} images/s, {rate * measured.mean_bytes / config.data.views_per_image / 1e6:,.1f} MB/s"
            )


def describe(measured: Measurement, config: ThroughputConfig) -> list[str]:
    """The table of the stages, and what follows from it."""
    lines = [
        f"images of {measured.mean_bytes / 1000:,.1f} kB on average, {config.data.views_per_image} view(s) of each; one core:",
        f"  {'stage':<28}{'images/s':>10}{'share of time':>15}",
    ]
    lines += [
        *(f"  {stage.name:<28}{stage.rate:>10,.0f}{measured.rate / stage.rate:>15.0%}" for stage in measured.stages),
        f"  {'all of it':<28}{measured.rate:>10,.0f}",
        f"  {'(decode whole, no crop)':<28}{measured.whole_decode.rate:>10,.0f}",
    ]
    read_bytes = measured.rate * measured.mean_bytes / config.data.views_per_image
    lines.append(f"one core, doing all of it, reads {read_bytes / 1e6:,.1f} MB/s; files held in memory are read faster")
    if measured.num_faults:
        lines.append(f"warning: {measured.num_faults} samples could not be read; `python scripts/check_shards.py` names them")
    if config.images_per_second is not None:
        needed = workers_needed(measured, config.images_per_second)
        lines.append(
            f"{config.images_per_second:,.0f} images/s need {needed} reader processes with a core each: "
            f"--data.num_workers {needed} on one training process, or as many over all processes of a machine together"
        )
    return lines


if __name__ == "__main__":
    main()

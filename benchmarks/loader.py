"""Images per second and memory of three loaders on the same photographs: ours, webdataset with Pillow, and ImageFolder.

All crop at random to 224 pixels (area 0.2 .. 1, bicubic), flip, and give batches of 64 with as many reader processes;
the peers give normalised float32, as their users write it, ours uint8, which the device normalises. Every round starts each
loader anew, lets it warm up, and times it alone. Memory is that of the reader processes, shared pages divided among them (PSS).

Command: python benchmarks/loader.py PHOTOS (a folder of class folders)
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import psutil
import torch
import tyro
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from webdataset.compat import WebDataset

from benchmarks.interleave import machine
from data.config import DataConfig
from data.loader import BatchLoader
from data.shards import open_shards
from data.stream import BatchPlan, SampleOrder
from data.transforms import IMAGENET_MEAN, IMAGENET_STD
from data.writer import list_images, write_shards

Loader = Callable[[], Iterator[Any]]


@dataclass(frozen=True)
class LoaderBenchmark:
    """What is read, and how long."""

    photos: Annotated[Path, tyro.conf.Positional]
    """Folder of class folders of photographs."""
    batch_size: int = 64
    num_workers: int = 2
    batches: int = 15
    """Timed in each round, after as many as the readers had prepared ahead."""
    rounds: int = 5


def plain_transform() -> transforms.Compose:
    """What users of torchvision write."""
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(224, scale=(0.2, 1.0), interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )


def ours(folder: Path, config: LoaderBenchmark, views: int = 1) -> Iterator[Any]:
    """Our loader, on an endless stream."""
    shards = open_shards(folder)
    data = DataConfig(batch_size_per_process=config.batch_size, num_workers=config.num_workers, views_per_image=views)
    order = SampleOrder(shards.first_sample, 0, data.shuffle_window, data.lanes)
    plan = BatchPlan(config.batch_size, 1, 1, 0, views)
    return (batch.images for batch in BatchLoader(shards, data, plan, order, (224, 224), 3, 0, 2**31))


def with_webdataset(folder: Path, config: LoaderBenchmark) -> Iterator[Any]:
    """The pipeline of webdataset's own documentation."""
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    images = (
        cast(Any, WebDataset(urls, shardshuffle=len(urls), seed=0))
        .repeat()
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg")
        .map_tuple(plain_transform())
        .batched(config.batch_size, partial=False)
    )
    loader = DataLoader(images, batch_size=None, num_workers=config.num_workers, prefetch_factor=4)
    return (batch[0] for batch in loader)


def with_image_folder(folder: Path, config: LoaderBenchmark) -> Iterator[Any]:
    """Torchvision's class folders, epoch after epoch."""
    images = ImageFolder(str(folder), plain_transform())
    loader = DataLoader(
        images, config.batch_size, shuffle=True, num_workers=config.num_workers, drop_last=True, prefetch_factor=4,
        persistent_workers=config.num_workers > 0,
    )  # fmt: skip

    def endless() -> Generator[Any, None, None]:
        while True:
            for batch in loader:
                yield batch[0]

    return endless()


def time_loader(make: Loader, config: LoaderBenchmark) -> tuple[float, float]:
    """Images per second of a loader, and MiB of its readers' memory."""
    batches = make()
    for _ in range(4 * max(1, config.num_workers) + 1):  # what was prepared ahead would count as if it took no time
        next(batches)
    start = time.perf_counter()
    for _ in range(config.batches):
        next(batches)
    rate = config.batches * config.batch_size / (time.perf_counter() - start)
    readers = psutil.Process().children(recursive=True)
    memory = sum(reader.memory_full_info().pss for reader in readers) / 2**20
    del batches  # ends its readers
    return rate, memory


def main() -> None:
    """Prints a table: images per second, the ratio to ours, memory."""
    config = tyro.cli(LoaderBenchmark)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder) / "shards"
        write_shards(list_images(config.photos), shards, samples_per_shard=100, num_workers=0)
        loaders: dict[str, Loader] = {
            "ours": lambda: ours(shards, config),
            "ours, 4 views of an image": lambda: ours(shards, config, views=4),
            "webdataset + Pillow": lambda: with_webdataset(shards, config),
            "ImageFolder": lambda: with_image_folder(config.photos, config),
        }
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
        for _ in range(config.rounds):
            for name, make in loaders.items():
                results[name].append(time_loader(make, config))
    print(f"{machine()}; {config.num_workers} reader processes, median of {config.rounds} rounds")
    print(f"{'loader':<28}{'images/s':>10}{'ours is faster':>16}{'readers, MiB':>14}")
    for name, rounds in results.items():
        ratio = statistics.median(mine[0] / other[0] for mine, other in zip(results["ours"], rounds, strict=True))
        rate, memory = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(f"{name:<28}{rate:>10.0f}{ratio:>15.2f}x{memory:>14.0f}")


if __name__ == "__main__":
    main()

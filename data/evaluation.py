"""Every sample of a data set exactly once, whole and in order: what measuring needs, as `loader.py` is what training needs.

Shapes: B images per batch, C channels, H W pixels.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.decode import MAX_PIXELS, decode_image
from data.errors import BadImage, DataError
from data.loader import batches_of, leave_signals_to_parent
from data.reader import ShardReader
from data.shards import ShardSet
from data.transforms import center_crop_resized


class EvaluationBatch(NamedTuple):
    """Consecutive samples; the last batch of a data set may be short."""

    images: Tensor
    """(B, C, H, W) uint8, resized to cover the size and cropped at the centre."""
    labels: Tensor
    """(B,) int64; -1 where a sample has none."""
    indices: Tensor
    """(B,) int64: which samples these are."""
    sources: list[tuple[str, str]]
    """B times the name of the shard and the key in it."""


class _Batches(IterableDataset):
    """The batches of one process, every `num_parts`-th of which each of its reader processes reads."""

    def __init__(
        self,
        shards: ShardSet,
        batches: list[Sequence[int]],
        img_size: tuple[int, int],
        num_channels: int,
        crop_pct: float,
        max_pixels: int,
    ) -> None:
        self.shards = shards
        self.batches = batches
        self.img_size = img_size
        self.num_channels = num_channels
        self.crop_pct = crop_pct
        self.max_pixels = max_pixels

    def __iter__(self) -> Iterator[EvaluationBatch | DataError]:
        worker = get_worker_info()
        part, num_parts = (worker.id, worker.num_workers) if worker else (0, 1)
        with ShardReader(self.shards) as reader:
            for batch in self.batches[part::num_parts]:
                try:
                    yield self._batch(reader, batch)
                except DataError as error:
                    yield DataError(str(error))  # as a value: raised here, torch would put the reader's traceback around it
                    return

    def _batch(self, reader: ShardReader, indices: Sequence[int]) -> EvaluationBatch:
        samples = [reader.read(index) for index in indices]
        images = []
        for sample in samples:
            try:
                image = decode_image(sample.data, self.num_channels, max_pixels=self.max_pixels)
            except BadImage as error:
                # A replacement, as in training, would be counted as what it is not.
                raise DataError(f"{sample.shard}: {sample.key}: {error}; take it out: write the shards anew") from error
            images.append(center_crop_resized(image, self.img_size, self.crop_pct))
        labels = torch.tensor([sample.label for sample in samples])
        sources = [(sample.shard, sample.key) for sample in samples]
        return EvaluationBatch(torch.stack(images), labels, torch.tensor(list(indices)), sources)


def share_of_process(count: int, batch_size: int, rank: int, world_size: int) -> range:
    """Which of `count` samples a process reads: consecutive whole batches, of which only the very last may be short."""
    num_batches = -(-count // batch_size)
    first, stop = (number * num_batches // world_size for number in (rank, rank + 1))
    return range(first * batch_size, min(stop * batch_size, count))


def evaluation_batches(
    shards: ShardSet,
    img_size: tuple[int, int],
    num_channels: int,
    batch_size: int,
    num_workers: int,
    rank: int = 0,
    world_size: int = 1,
    samples: Sequence[int] | None = None,
    crop_pct: float = 1.0,
    max_pixels: int = MAX_PIXELS,
) -> Iterator[EvaluationBatch]:
    """Reads this process's batches of a data set: over all processes every sample exactly once.

    The batches are the same whatever the number of processes. Nothing random is drawn: reading in the middle of a training
    leaves the training as it is.

    Args:
        shards: the data set.
        img_size: (H, W) in pixels.
        num_channels: C.
        batch_size: B, at least 1.
        num_workers: reader processes; 0 reads in this one.
        rank: number of this process.
        world_size: number of processes.
        samples: which samples, in this order, in place of all.
        crop_pct: share of the resized image that is cut out, in (0, 1].
        max_pixels: an image of more counts as unreadable.

    Raises:
        DataError: a sample cannot be read; unlike in training nothing is replaced.
    """
    chosen = range(len(shards)) if samples is None else samples
    share = share_of_process(len(chosen), batch_size, rank, world_size)
    batches = [chosen[start : min(start + batch_size, share.stop)] for start in share[::batch_size]]
    loader = DataLoader(
        _Batches(shards, batches, img_size, num_channels, crop_pct, max_pixels),
        batch_size=None,
        num_workers=num_workers,
        generator=torch.Generator(),  # torch draws a seed for its reader processes, by default from the global state
        worker_init_fn=leave_signals_to_parent,
    )
    for batch in batches_of(loader):
        if isinstance(batch, DataError):
            raise batch
        yield batch

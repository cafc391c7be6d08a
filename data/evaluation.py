"""Every sample of a data set exactly once, whole and in order: what measuring needs, as `loader.py` is what training needs.

Shapes: B images per batch, C channels, H W pixels.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data.decode import MAX_PIXELS, decode_image
from data.errors import BadImage, DataError
from data.shards import ShardReader, ShardSet
from data.transforms import center_crop_resized


class EvaluationBatch(NamedTuple):
    """Consecutive samples of one process; the last batch may be short."""

    images: Tensor
    """(B, C, H, W) uint8, resized to cover the size and cropped at the centre."""
    labels: Tensor
    """(B,) int64; -1 where a sample has none."""
    indices: Tensor
    """(B,) int64: which samples these are."""


class _Samples(IterableDataset):
    """One reader process's batches: every `num_parts`-th of the range."""

    def __init__(self, shards: ShardSet, span: range, batch_size: int, img_size: tuple[int, int], num_channels: int) -> None:
        self.shards = shards
        self.span = span
        self.batch_size = batch_size
        self.img_size = img_size
        self.num_channels = num_channels

    def __iter__(self) -> Iterator[EvaluationBatch | DataError]:
        worker = get_worker_info()
        part, num_parts = (worker.id, worker.num_workers) if worker else (0, 1)
        with ShardReader(self.shards) as reader:
            for start in range(part * self.batch_size, len(self.span), num_parts * self.batch_size):
                try:
                    yield self._batch(reader, self.span[start : start + self.batch_size])
                except DataError as error:
                    yield DataError(str(error))  # as a value: raised here, torch would put the reader's traceback around it
                    return

    def _batch(self, reader: ShardReader, span: range) -> EvaluationBatch:
        samples = [reader.read(index) for index in span]
        images = []
        for sample in samples:
            try:
                image = decode_image(sample.data, self.num_channels, max_pixels=MAX_PIXELS)
            except BadImage as error:
                # A replacement, as in training, would be counted as what it is not.
                raise DataError(f"{sample.shard}: {sample.key}: {error}; take it out: write the shards anew") from error
            images.append(center_crop_resized(image, self.img_size))
        labels = torch.tensor([sample.label for sample in samples])
        return EvaluationBatch(torch.stack(images), labels, torch.tensor(list(span)))


def evaluation_batches(
    shards: ShardSet,
    img_size: tuple[int, int],
    num_channels: int,
    batch_size: int,
    num_workers: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[EvaluationBatch]:
    """Reads this process's part of a data set: over all processes every sample exactly once.

    Args:
        shards: the data set.
        img_size: (H, W) in pixels.
        num_channels: C.
        batch_size: B, at least 1.
        num_workers: reader processes; 0 reads in this one.
        rank: number of this process.
        world_size: number of processes.

    Raises:
        DataError: a sample cannot be read; unlike in training nothing is replaced.
    """
    span = range(len(shards) * rank // world_size, len(shards) * (rank + 1) // world_size)
    samples = _Samples(shards, span, batch_size, img_size, num_channels)
    for batch in DataLoader(samples, batch_size=None, num_workers=num_workers):
        if isinstance(batch, DataError):
            raise batch
        yield batch

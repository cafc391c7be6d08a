"""DataConfig -> batches: the planned stream, read, decoded, cropped and collated by a webdataset pipeline.

Shapes: B images per micro-batch of one process, C channels, H W pixels.
"""

import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from webdataset.filters import batched
from webdataset.pipeline import DataPipeline

from data.config import DataConfig
from data.crops import random_crops
from data.decode import decode_image
from data.errors import BadImage, DataError
from data.faults import CHECK_COMMAND, Fault, count_causes, describe_counts
from data.reader import ShardReader
from data.shards import ShardSet
from data.stream import BatchPlan, Order
from data.transforms import center_crop_resized

MAX_BAD_IN_A_ROW = 100
"""So many neighbouring unreadable samples end the run: the data, not a sample, is broken."""


class Batch(NamedTuple):
    """One micro-batch of one process."""

    images: Tensor
    """(B, C, H, W) uint8."""
    seeds: Tensor
    """(B,) int64: seed of each image's mask."""
    indices: Tensor
    """(B,) int64: which sample stands in each place, replacements of unreadable ones included."""
    labels: Tensor
    """(B,) int64: class numbers, -1 where a sample has none."""
    faults: list[Fault]
    """The samples that could not be read and were replaced."""


Augment = Callable[[Tensor, int], Tensor]
"""(C, H, W) uint8 and a seed -> (C, H, W) uint8."""


class WorkerFailure(NamedTuple):
    """A message that ends the run, on its way from a reader process to the training process."""

    message: str


LOOK_AHEAD = 8192
"""So many samples ahead of the one that is read, shards from elsewhere are fetched, at least."""


class PlannedSamples(IterableDataset):
    """The source of the pipeline: raw samples in the order of the plan, in webdataset's form.

    Picklable; every reader process opens its own files. Its part of the plan follows from the number that torch's DataLoader
    gives it; rank and number of processes stand in the plan.
    """

    def __init__(self, shards: ShardSet, order: Order, plan: BatchPlan, start_step: int, stop_step: int, max_open: int) -> None:
        self.shards = shards
        self.order = order
        self.plan = plan
        self.start_step = start_step
        self.stop_step = stop_step
        self.max_open = max_open

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        part, num_parts = (worker.id, worker.num_workers) if worker else (0, 1)
        with ShardReader(self.shards, max_open=self.max_open) as reader:
            looked_until = self.start_step
            for batch in self.plan.micro_batches(self.order.lanes, self.start_step, self.stop_step, part, num_parts):
                if self.shards.cache is not None and batch.step >= looked_until:
                    num_steps = -(-LOOK_AHEAD // (self.plan.batch_size_per_process * self.plan.accum_steps))
                    looked_until = batch.step + num_steps
                    reader.prefetch(self.samples_of(batch.step, min(looked_until + num_steps, self.stop_step)))
                part_of_stream = self.order.resolve(batch.positions, self.plan.views_per_image)
                for index, seeds in zip(part_of_stream.indices.tolist(), part_of_stream.seeds.tolist(), strict=True):
                    yield read_sample(reader, index) | {"seeds": seeds}

    def samples_of(self, start_step: int, stop_step: int) -> np.ndarray:
        """The samples that this process reads in some steps: (n,) int64, in the order in which it comes to them."""
        batches = self.plan.micro_batches(self.order.lanes, start_step, stop_step)
        return self.order.resolve(np.concatenate([batch.positions for batch in batches])).indices


def read_sample(reader: ShardReader, index: int) -> dict[str, Any]:
    """Reads one sample into webdataset's dictionary form."""
    sample = reader.read(index)
    return {"__key__": sample.key, "__url__": sample.shard, "index": index, "image": sample.data, "label": sample.label}


class DecodeAndCrop:
    """Pipeline stage: encoded images -> random crops. An unreadable image is replaced by its next readable neighbour.

    The slot keeps its seed, so that a replacement depends on the files alone and all processes keep the same number of steps.
    """

    def __init__(
        self,
        shards: ShardSet,
        order: Order,
        config: DataConfig,
        img_size: tuple[int, int],
        num_channels: int,
        augment: Augment | None = None,
    ) -> None:
        self.shards = shards
        self.order = order
        self.config = config
        self.img_size = img_size
        self.num_channels = num_channels
        self.augment = augment

    def __call__(self, samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Decodes a stream of samples, and crops every view of each."""
        with ShardReader(self.shards) as reader:
            for sample in samples:
                yield from self.decode(sample, reader)

    def decode(self, sample: dict[str, Any], reader: ShardReader) -> list[dict[str, Any]]:
        """Decodes one sample, or its replacement, and crops its views.

        Raises:
            DataError: MAX_BAD_IN_A_ROW neighbours cannot be read either.
        """
        seeds, faults = sample["seeds"], list[Fault]()
        for _ in range(min(MAX_BAD_IN_A_ROW, self.order.num_samples)):
            try:
                crops = random_crops(
                    sample["image"], self.num_channels, seeds, self.img_size, self.config.crop_scale,
                    self.config.flip_probability, max_pixels=self.config.max_pixels,
                )  # fmt: skip
            except BadImage as error:
                faults.append(Fault(error.cause, sample["__url__"], sample["__key__"], str(error), sample["index"]))
                sample = read_sample(reader, self.order.next_to(sample["index"]))
                continue
            if self.augment is not None:
                crops = [self.augment(crop, seed) for crop, seed in zip(crops, seeds, strict=True)]
            about = {"index": sample["index"], "label": sample["label"], "faults": ()}
            views = [about | {"image": crop, "seed": seed} for crop, seed in zip(crops, seeds, strict=True)]
            views[0]["faults"] = faults
            return views
        raise DataError(
            f"{len(faults)} samples in a row cannot be read ({describe_counts(count_causes(faults))}); the first: {faults[0]}; "
            f"`{CHECK_COMMAND}` says what else is wrong"
        )


def collate(samples: list[dict[str, Any]]) -> Batch:
    """Stacks decoded samples."""
    return Batch(
        images=torch.stack([sample["image"] for sample in samples]),
        seeds=torch.tensor([sample["seed"] for sample in samples], dtype=torch.int64),
        indices=torch.tensor([sample["index"] for sample in samples], dtype=torch.int64),
        labels=torch.tensor([sample["label"] for sample in samples], dtype=torch.int64),
        faults=[fault for sample in samples for fault in sample["faults"]],
    )


def failures_as_values(batches: Iterable[Batch]) -> Iterator[Batch | WorkerFailure]:
    """Pipeline stage: hands a DataError on as a value, for torch would bury its message under the reader's traceback."""
    try:
        yield from batches
    except DataError as error:
        yield WorkerFailure(str(error))


def leave_signals_to_parent(_worker: int) -> None:
    """In a reader process: signals reach the whole process group, but only the training process decides on them.

    Of Ctrl-C, SIGTERM, SIGUSR1 (SLURM's warning) and SIGHUP (a closed terminal) it finishes its step first, for which it needs
    its readers; they end with it.
    """
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):  # Windows knows no SIGUSR1 and no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def batches_of(loader: DataLoader) -> Generator[Any, None, None]:
    """Passes on what a loader reads; whichever way this ends, its reader processes end too.

    They ignore SIGTERM (`leave_signals_to_parent`). After an error whose traceback still holds the loader, Python would send
    them one at its exit, and wait for ever.
    """
    batches = iter(loader)
    try:
        yield from batches
    finally:
        shut_down = getattr(batches, "_shutdown_workers", None)  # absent where this process reads for itself
        if shut_down is not None:
            shut_down()


class BatchLoader:
    """An iterable over this process's micro-batches, from a step to the end of the run, across epoch edges.

    There is one pass of the reader processes for the whole run: they persist, and read ahead across the edge of an epoch.

    Args:
        shards: the data set.
        config: how it is read.
        plan: which part of the stream this process takes.
        order: the stream.
        img_size: (H, W) of the batches, in pixels.
        num_channels: C.
        start_step: first optimizer step to deliver.
        stop_step: where to end, excluded.
        pin_memory: put batches into page-locked memory, for a copy to a GPU that does not block.
        augment: what happens to each crop after the flip; none in pretraining.
    """

    def __init__(
        self,
        shards: ShardSet,
        config: DataConfig,
        plan: BatchPlan,
        order: Order,
        img_size: tuple[int, int],
        num_channels: int,
        start_step: int,
        stop_step: int,
        pin_memory: bool = False,
        augment: Augment | None = None,
    ) -> None:
        self.num_micro_batches = (stop_step - start_step) * plan.accum_steps
        pipeline = DataPipeline(
            # A lane's window may lie across the edge of two shards.
            PlannedSamples(shards, order, plan, start_step, stop_step, max_open=2 * config.lanes + 1),
            DecodeAndCrop(shards, order, config, img_size, num_channels, augment),
            batched(plan.batch_size_per_process, collation_fn=collate, partial=False),
            failures_as_values,
        )
        self._loader = DataLoader(
            cast(IterableDataset, pipeline),  # it is one, behind an import that type checkers do not follow
            batch_size=None,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_batches if config.num_workers else None,
            pin_memory=pin_memory,
            worker_init_fn=leave_signals_to_parent,
        )

    def __len__(self) -> int:
        return self.num_micro_batches

    def __iter__(self) -> Generator[Batch, None, None]:
        """Yields micro-batches in the order of the plan.

        Raises:
            DataError: the data can not be read.
        """
        for batch in batches_of(self._loader):
            if isinstance(batch, WorkerFailure):
                raise DataError(batch.message)
            yield batch


def preview_images(shards: ShardSet, img_size: tuple[int, int], num_channels: int, count: int, max_pixels: int) -> Tensor:
    """Reads a few samples, evenly spread over the data set, whole and centred: what pictures are made of.

    Of shards from elsewhere only the first one is used: a picture is not worth waiting for more.

    Returns:
        (at most `count`, C, H, W) uint8; samples that cannot be read are left out.
    """
    images = []
    num_samples = len(shards)
    if shards.cache is not None:
        num_samples = int(shards.first_sample[shards.first_sample > 0][0])  # of the first shard that has any
    with ShardReader(shards) as reader:
        for index in np.linspace(0, num_samples - 1, min(count, num_samples)).round().astype(int).tolist():
            try:
                image = decode_image(reader.read(index).data, num_channels, max_pixels=max_pixels)
            except BadImage:
                continue  # a picture can do without; the run itself counts and names it
            images.append(center_crop_resized(image, img_size))
    if not images:
        measured = shards.manifest.num_channels
        hint = "" if measured in (None, num_channels) else f"; its images have {measured}: set --model.in_chans {measured}"
        raise DataError(f"none of {count} samples spread over {shards.root} can be read as {num_channels}-channel images{hint}")
    return torch.stack(images)

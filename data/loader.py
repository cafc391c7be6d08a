"""DataConfig -> batches: the planned stream, read, decoded, cropped and collated by a webdataset pipeline.

Shapes: B images per micro-batch of one process, C channels, H W pixels.
"""

import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from webdataset.filters import batched
from webdataset.pipeline import DataPipeline

from data.cache import shard_cache
from data.crops import crop_backend, random_crops
from data.decode import decode_image
from data.errors import BadImage, DataError
from data.faults import CHECK_COMMAND, Fault, count_causes, describe_counts
from data.protocols import FetchConfig
from data.reader import ShardReader
from data.shards import ShardSet
from data.sources import open_dataset
from data.stream import LANES, BatchPlan, MixedOrder, Order, SampleOrder
from data.transforms import Normalization, center_crop_resized, default_normalization

MAX_BAD_IN_A_ROW = 100
"""So many neighbouring unreadable samples end the run: the data, not a sample, is broken."""


@dataclass(frozen=True)
class DataConfig:
    """Where the images come from and how they are read."""

    train: str = ""
    """Folder of images, table of images, or shards (scripts/make_shards.py makes them): a folder, here or at a URL (https://,
    s3://, ...), a pattern over one ("set/{000..099}.tar"), a .txt list of them; several of these with :: between; or "digits":
    scikit-learn's 1,797 handwritten digits."""
    weights: tuple[float, ...] = ()
    """Of several sources, the share of each in what is trained on, above 0; each is then repeated as often as it takes, and an
    epoch is as many samples as all have together. Empty: every sample of every source once an epoch."""
    cache_dir: str = ""
    """Folder that keeps shards from elsewhere, shared by all processes of a machine; empty: `shards` in the user's cache."""
    cache_gib: float = 0.0
    """What that folder may hold, in GiB; 0: 100, or half of what its disk has room for."""
    read_timeout_s: float = 60.0
    """Longest silence of a server that shards are fetched from, in seconds, above 0."""
    allow_pipe: bool = False
    """Whether commands may be run: a source "pipe:COMMAND {name}" is what COMMAND prints."""
    batch_size_per_process: int = 64
    """Images that one process feeds its model at once, at least 1."""
    num_workers: int = 2
    """Reader processes of each training process; 0 reads in the training process itself."""
    prefetch_batches: int = 4
    """Micro-batches that each reader prepares ahead, at least 1."""
    shuffle_window: int = 16384
    """Samples shuffled together, at least 1, shared by all lanes. The shards themselves are permuted every epoch; a larger
    window mixes more of them and keeps more of them open."""
    lanes: int = LANES
    """Places of the data set that are read side by side, at least 1: so many distant samples meet in a batch, and so many
    processes read without sharing a shard. Fewer keep fewer shards open, which a small cache of remote shards needs."""
    views_per_image: int = 1
    """Crops of each image that is read, each with a mask of its own, at least 1; divides batch_size_per_process. Batches,
    epochs and learning rates count crops: reading and decoding cost so many times less, and a pass over all images counts as
    so many epochs."""
    crop_scale: tuple[float, float] = (0.2, 1.0)
    """Smallest and largest area of the random crop, as a share of the image's area: 0 < smallest <= largest <= 1."""
    flip_probability: float = 0.5
    """Chance of a left-right flip, 0..1 (0 for digits, letters, and wherever left and right differ)."""
    mean: tuple[float, ...] = ()
    """Mean per channel in units of the 0..1 range (empty: ImageNet's for 3 channels, else as measured by make_shards)."""
    std: tuple[float, ...] = ()
    """Standard deviation per channel in the same units (empty: as for mean)."""
    max_pixels: int = 2**26
    """An image of more pixels than this counts as unreadable; checked before it is decoded."""
    max_bad_share: float = 0.01
    """Share of the samples read so far that may be unreadable, 0..1; beyond it the run saves a checkpoint and ends. Looked at
    once a log interval, and only where at least 32 are unreadable: bad luck at the start ends no run. Until then each is
    replaced by its neighbour, counted and listed in faults.jsonl of the run folder."""

    def __post_init__(self) -> None:
        _check_range("data.batch_size_per_process", self.batch_size_per_process, 1)
        _check_range("data.num_workers", self.num_workers, 0)
        _check_range("data.prefetch_batches", self.prefetch_batches, 1)
        _check_range("data.shuffle_window", self.shuffle_window, 1)
        _check_range("data.lanes", self.lanes, 1)
        _check_range("data.cache_gib", self.cache_gib, 0)
        _check_range("data.read_timeout_s", self.read_timeout_s, 0.001)
        _check_range("data.views_per_image", self.views_per_image, 1)
        if self.batch_size_per_process % self.views_per_image:
            raise ValueError(
                f"data.batch_size_per_process must be a multiple of data.views_per_image, {self.views_per_image}, not "
                f"{self.batch_size_per_process}"
            )
        _check_range("data.max_pixels", self.max_pixels, 1)
        _check_range("data.max_bad_share", self.max_bad_share, 0, 1)
        _check_range("data.flip_probability", self.flip_probability, 0, 1)
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"data.crop_scale must hold 0 < smallest <= largest <= 1, not {self.crop_scale}")


def _check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    if not low <= value <= high:
        limit = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
        raise ValueError(f"{name} must be {limit}, not {value}")


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


def choose_normalization(config: DataConfig, shards: ShardSet, num_channels: int) -> Normalization:
    """The mean and std to use: the user's where given, else by `default_normalization`.

    Raises:
        DataError: only one of the two is given, or a length is not `num_channels`.
    """
    if not config.mean and not config.std:
        measured = (tuple(shards.manifest.mean), tuple(shards.manifest.std))
        return default_normalization(num_channels, measured)
    if len(config.mean) != num_channels or len(config.std) != num_channels or min(config.std) <= 0:
        raise DataError(
            f"data.mean and data.std need {num_channels} numbers each (one per channel, std above 0); "
            f"given: mean {list(config.mean)}, std {list(config.std)}"
        )
    return Normalization(config.mean, config.std)


def open_source(source: str, config: DataConfig, *, labelled: bool = False) -> ShardSet:
    """Opens a source of images, with the patience and the cache of the config for what lies elsewhere.

    Args:
        source: as of `open_dataset`.
        config: settings.
        labelled: every sample must have a label.

    Raises:
        DataError: see `open_dataset`.
    """
    fetch = FetchConfig(read_timeout_s=config.read_timeout_s, allow_pipe=config.allow_pipe)
    return open_dataset(source, labelled=labelled, cache=shard_cache(config.cache_dir, config.cache_gib, fetch))


def build_order(shards: ShardSet, config: DataConfig, seed: int) -> SampleOrder | MixedOrder:
    """The order of a data set, or of a mixture where its sources have weights.

    Args:
        shards: the data set.
        config: window, lanes, weights.
        seed: of the run.

    Raises:
        DataError: the weights do not fit the sources.
    """
    if not config.weights:
        return SampleOrder(shards.first_sample, seed, config.shuffle_window, config.lanes)
    if len(config.weights) != len(shards.parts):
        raise DataError(
            f"data.weights has {len(config.weights)} numbers for {len(shards.parts)} source(s); expected one for each, in the "
            "order of --data.train A::B"
        )
    parts = []
    for first, stop in shards.parts:
        shard_range = slice(*np.searchsorted(shards.first_sample, [first, stop]))
        edges = np.append(shards.first_sample[shard_range], stop) - first
        parts.append(SampleOrder(edges, seed, config.shuffle_window, config.lanes))
    try:
        return MixedOrder(tuple(parts), tuple(first for first, _ in shards.parts), config.weights, seed)
    except ValueError as error:
        raise DataError(f"data.weights: {error}") from error


def describe_reading(shards: ShardSet, config: DataConfig, num_processes: int) -> str:
    """One line on how a run reads its images."""
    facts = [f"{config.num_workers * num_processes} reader process(es)", f"JPEG by {crop_backend()}"]
    if config.views_per_image > 1:
        facts.append(
            f"{config.views_per_image} views of each image: reading all images once counts as {config.views_per_image} epochs"
        )
    if config.weights:
        facts.append("sources mixed " + " : ".join(f"{weight / sum(config.weights):.1%}" for weight in config.weights))
    if shards.cache is not None:
        facts.append(f"shards from elsewhere kept in {shards.cache.folder}, at most {shards.cache.max_bytes / 2**30:.3g} GiB")
    return ", ".join(facts)


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
    """In a reader process: Ctrl-C and SIGTERM reach the whole process group, but only the training process decides on them.

    It finishes its step first, for which it needs its readers; they end with it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


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

    Returns:
        (at most `count`, C, H, W) uint8; samples that cannot be read are left out.
    """
    images = []
    with ShardReader(shards) as reader:
        for index in np.linspace(0, len(shards) - 1, min(count, len(shards))).round().astype(int).tolist():
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

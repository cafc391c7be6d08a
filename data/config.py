"""The settings of a data set's reading, and what follows from them: the opened data set, its order, its normalisation."""

from dataclasses import dataclass

import numpy as np

from data.cache import shard_cache
from data.crops import crop_backend
from data.errors import DataError
from data.protocols import FetchConfig
from data.shards import ShardSet
from data.sources import open_dataset
from data.stream import LANES, MixedOrder, SampleOrder
from data.transforms import Normalization, default_normalization


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

"""How fast images get from shards into batches on this machine: each stage on one core, and all of it by reader processes."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from data.config import DataConfig
from data.decode import decode_image
from data.errors import BadImage, DataError
from data.loader import BatchLoader, DecodeAndCrop, collate, read_sample
from data.reader import ShardReader
from data.shards import ShardSet
from data.stream import BatchPlan, SampleOrder

Result = TypeVar("Result")


class Stage(NamedTuple):
    """One stage of reading, timed on one core."""

    name: str
    images: int
    """How many went through it; of a stage that makes several views of an image, the views."""
    seconds: float

    @property
    def rate(self) -> float:
        """Images per second of one core."""
        return self.images / self.seconds if self.seconds else float("inf")


class Measurement(NamedTuple):
    """What a data set costs to read."""

    stages: list[Stage]
    """In the order in which an image passes through them."""
    whole_decode: Stage
    """Decoding the whole image, as evaluation does; training decodes what its crop needs."""
    mean_bytes: float
    """Of an image's file."""
    num_faults: int
    """Samples that could not be read, and were replaced."""

    @property
    def rate(self) -> float:
        """Images per second of one core through all stages."""
        return 1 / sum(1 / stage.rate for stage in self.stages)


def measure_stages(
    shards: ShardSet, config: DataConfig, img_size: tuple[int, int], num_channels: int, seconds: float
) -> Measurement:
    """Times every stage on one core, on the samples that a run of this config would read first.

    Args:
        shards: the data set.
        config: how it is read.
        img_size: (H, W) of the batches, in pixels.
        num_channels: C.
        seconds: how long to measure, at least one batch.

    Raises:
        DataError: the data cannot be read.
    """
    order = SampleOrder(shards.first_sample, 0, config.shuffle_window, config.lanes)
    plan = BatchPlan(config.batch_size_per_process, 1, 1, 0, config.views_per_image)
    decode_and_crop = DecodeAndCrop(shards, order, config, img_size, num_channels)
    spent: dict[str, float] = dict.fromkeys(("read", "whole", "crop", "collate"), 0.0)
    num_images = num_decoded = num_views = num_bytes = num_faults = 0

    def timed(stage: str, work: Callable[[], Result]) -> Result:
        start = time.perf_counter()
        result = work()
        spent[stage] += time.perf_counter() - start
        return result

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    try:
        with ShardReader(shards) as reader:
            for batch in plan.micro_batches(order.lanes, 0, 1 + 2**31):
                part = order.resolve(batch.positions, config.views_per_image)
                planned = list(zip(part.indices.tolist(), part.seeds.tolist(), strict=True))
                samples = timed("read", lambda: [read_sample(reader, index) | {"seeds": seeds} for index, seeds in planned])  # noqa: B023
                num_decoded += timed("whole", lambda: _count_decoded(samples, num_channels, config.max_pixels))  # noqa: B023
                views = timed("crop", lambda: [view for sample in samples for view in decode_and_crop.decode(sample, reader)])  # noqa: B023
                timed("collate", lambda: collate(views))  # noqa: B023
                num_images += len(samples)
                num_views += len(views)
                num_bytes += sum(len(sample["image"]) for sample in samples)
                num_faults += sum(len(view["faults"]) for view in views)
                if time.perf_counter() - begun > seconds:
                    break
    finally:
        torch.set_num_threads(num_threads)
    # A pass over an image gives all of its views: reading costs each of them a part.
    stages = [
        Stage("read", num_views, spent["read"]),
        Stage("decode and crop", num_views, spent["crop"]),
        Stage("collate", num_views, spent["collate"]),
    ]
    return Measurement(stages, Stage("decode whole", num_decoded, spent["whole"]), num_bytes / num_images, num_faults)


def _count_decoded(samples: list[dict[str, Any]], num_channels: int, max_pixels: int) -> int:
    count = 0
    for sample in samples:
        try:
            decode_image(sample["image"], num_channels, max_pixels=max_pixels)
        except BadImage:
            continue  # counted and named by the stage that replaces it
        count += 1
    return count


def measure_loader(
    shards: ShardSet, config: DataConfig, img_size: tuple[int, int], num_channels: int, num_workers: int, seconds: float
) -> float:
    """Times the loader as a run uses it, its consumer doing nothing.

    Args:
        shards: the data set.
        config: how it is read.
        img_size: (H, W) of the batches, in pixels.
        num_channels: C.
        num_workers: reader processes, in place of the config's.
        seconds: how long to measure; the first batch of every reader is not counted.

    Returns:
        Images per second.

    Raises:
        DataError: the data cannot be read.
    """
    config = dataclasses.replace(config, num_workers=num_workers)
    order = SampleOrder(shards.first_sample, 0, config.shuffle_window, config.lanes)
    plan = BatchPlan(config.batch_size_per_process, 1, 1, 0, config.views_per_image)
    batches = iter(BatchLoader(shards, config, plan, order, img_size, num_channels, 0, 2**31))
    try:
        # What was prepared ahead before the clock starts would count as if it took no time: it is used up first.
        for _ in range(max(1, num_workers) * (config.prefetch_batches + 1)):
            next(batches)
        num_images, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds or not num_images:
            num_images += len(next(batches).images)
        return num_images / (time.perf_counter() - start)
    finally:
        batches.close()


def workers_needed(measurement: Measurement, images_per_second: float) -> int:
    """How many reader processes, each with a core of its own, deliver so many images per second.

    Raises:
        DataError: images_per_second is not above 0.
    """
    if not images_per_second > 0:
        raise DataError(f"images_per_second must be above 0, not {images_per_second}")
    return math.ceil(images_per_second / measurement.rate - 1e-6)  # a rate that fits exactly must not round up

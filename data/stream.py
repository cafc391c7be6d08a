"""Which sample comes next: the order of an endless stream, and the part of it that a process and a worker read.

The stream is one epoch after the other. An epoch is every sample exactly once, in an order that is a pure function of
(seed, epoch, shard sizes). Step t of a run takes the stream's positions [t * G, (t + 1) * G), G the global batch size, with no
regard to epoch edges: no tail is dropped, every process takes the same number of steps by construction, and the whole state of
the data is the step number. Another number of processes or workers reads the same global batches in the same order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

_U64 = np.uint64


class StreamSlice(NamedTuple):
    """Consecutive positions of the stream, resolved. All (n,) int64."""

    epochs: np.ndarray
    """Epoch each position belongs to, from 0."""
    indices: np.ndarray
    """Index of the sample in the shard set."""
    seeds: np.ndarray
    """Seed of all that is random about this sample in this epoch: crop, flip, mask."""


class MicroBatch(NamedTuple):
    """What one process feeds its model at once: a range of the stream."""

    step: int
    micro_step: int
    start: int
    stop: int


def mix64(values: np.ndarray) -> np.ndarray:
    """Scrambles (n,) uint64 one to one. Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def sample_seeds(seed: int, epochs: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Gives every (epoch, sample) of a run its own seed, the same on any process, worker and machine.

    Args:
        seed: of the run.
        epochs: (n,) int64.
        indices: (n,) int64.

    Returns:
        (n,) int64, over the whole range.
    """
    state = mix64(np.full(len(indices), seed % 2**64, dtype=_U64) + _U64(0x9E3779B97F4A7C15))
    state = mix64(state ^ epochs.astype(_U64))
    return mix64(state ^ indices.astype(_U64)).view(np.int64)


def _permutation(key: tuple[int, ...], length: int) -> np.ndarray:
    """A random order of range(length), from raw 64-bit draws: those never change between versions of numpy."""
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(length)
    return np.argsort(bits, kind="stable")


@dataclass(frozen=True)
class SampleOrder:
    """The order of the samples in every epoch.

    Shards are permuted, laid end to end, and samples are shuffled inside consecutive windows of that line. So a reader has a
    few shards open at a time, whatever the size of the data set, and any position is found without computing what is before.

    Args:
        first_sample: (num_shards + 1,) int64, where each shard starts in the numbering of all samples.
        seed: of the run, at least 0.
        window: samples shuffled together, at least 1.
    """

    first_sample: np.ndarray
    seed: int
    window: int
    _blocks: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return int(self.first_sample[-1])

    def next_to(self, index: int) -> int:
        """The sample that follows a sample; the first one follows the last."""
        return (index + 1) % self.num_samples

    def resolve(self, start: int, stop: int) -> StreamSlice:
        """Says which samples stand at positions [start, stop) of the stream."""
        epochs, places = np.divmod(np.arange(start, stop, dtype=np.int64), self.num_samples)
        blocks, offsets = np.divmod(places, self.window)
        indices = np.empty(stop - start, dtype=np.int64)
        for epoch, block in sorted(set(zip(epochs.tolist(), blocks.tolist(), strict=True))):
            here = (epochs == epoch) & (blocks == block)
            indices[here] = self._block(epoch, block)[offsets[here]]
        return StreamSlice(epochs, indices, sample_seeds(self.seed, epochs, indices))

    def _block(self, epoch: int, block: int) -> np.ndarray:
        """Sample indices of one window, shuffled."""
        if (epoch, block) not in self._blocks:
            if len(self._blocks) >= 4:  # a batch touches a window or two: keep the newest few
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[epoch, block] = self._shuffled_block(epoch, block)
        return self._blocks[epoch, block]

    def _shuffled_block(self, epoch: int, block: int) -> np.ndarray:
        shards = _permutation((self.seed, epoch, 0), len(self.first_sample) - 1)
        sizes = np.diff(self.first_sample)[shards]
        line_starts = np.concatenate([[0], np.cumsum(sizes)])  # where each permuted shard starts on the line
        places = np.arange(block * self.window, min((block + 1) * self.window, self.num_samples))
        shard = np.searchsorted(line_starts, places, side="right") - 1
        indices = self.first_sample[shards[shard]] + places - line_starts[shard]
        return indices[_permutation((self.seed, epoch, 1 + block), len(indices))]


@dataclass(frozen=True)
class SubsetOrder:
    """The order of chosen samples: as SampleOrder's, over these alone.

    Args:
        rows: (n,) int64, the chosen samples, sorted.
        first_sample: (num_shards + 1,) int64, where each shard starts in the numbering of all samples.
        seed: of the run, at least 0.
        window: samples shuffled together, at least 1.
    """

    rows: np.ndarray
    first_sample: np.ndarray
    seed: int
    window: int

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return len(self.rows)

    def next_to(self, index: int) -> int:
        """The chosen sample that follows a chosen sample; the first one follows the last."""
        return int(self.rows[(int(np.searchsorted(self.rows, index)) + 1) % len(self.rows)])

    @cached_property
    def _places(self) -> SampleOrder:
        return SampleOrder(np.searchsorted(self.rows, self.first_sample), self.seed, self.window)

    def resolve(self, start: int, stop: int) -> StreamSlice:
        """Says which samples stand at positions [start, stop) of the stream."""
        places = self._places.resolve(start, stop)
        indices = self.rows[places.indices]
        return StreamSlice(places.epochs, indices, sample_seeds(self.seed, places.epochs, indices))


@dataclass(frozen=True)
class BatchPlan:
    """Which range of the stream each process reads at each step.

    Args:
        batch_size_per_process: images that one process feeds its model at once.
        accum_steps: micro-batches of one optimizer step.
        world_size: number of processes.
        rank: number of this process.
    """

    batch_size_per_process: int
    accum_steps: int
    world_size: int
    rank: int

    @property
    def global_batch_size(self) -> int:
        """Images of one optimizer step, over all processes and micro-batches."""
        return self.batch_size_per_process * self.accum_steps * self.world_size

    def micro_batches(self, start_step: int, stop_step: int, part: int = 0, num_parts: int = 1) -> Iterator[MicroBatch]:
        """Lists this process's micro-batches of steps [start_step, stop_step): every `num_parts`-th one, from `part` on.

        The parts are the loader's workers, which torch's DataLoader asks in turn: together they give the whole list in order.
        """
        for number in range(start_step * self.accum_steps + part, stop_step * self.accum_steps, num_parts):
            start = (number * self.world_size + self.rank) * self.batch_size_per_process
            step, micro_step = divmod(number, self.accum_steps)
            yield MicroBatch(step, micro_step, start, start + self.batch_size_per_process)


def num_steps_for_epochs(epochs: float, num_samples: int, global_batch_size: int) -> int:
    """Counts the optimizer steps that deliver at least `epochs` times every sample."""
    return -int(-epochs * num_samples // global_batch_size)

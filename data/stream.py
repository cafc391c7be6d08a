"""Which sample comes next: the order of an endless stream, and the part of it that a process and a worker read.

The stream is one epoch after the other. An epoch is every sample exactly once, in an order that is a pure function of
(seed, epoch, shard sizes). Step t of a run takes the stream's positions [t * n, (t + 1) * n), n the images of a global batch,
with no regard to epoch edges: no tail is dropped, every process takes the same number of steps by construction, and the whole
state of the data is the step number. Another number of processes or workers reads the same global batches in the same order.

How an epoch is ordered: the shards are permuted and laid end to end; this line is cut into lanes of equal length, whatever the
sizes of the shards; the lanes advance side by side, and each is shuffled inside a window. So a batch mixes as many distant
places of the data set as there are lanes, a reader has a few shards of each lane open, and each process, which takes its own
lanes, reads its own part of the shards in an epoch rather than all of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

LANES = 64
"""Parts of an epoch that are read side by side: as many processes can read without sharing a shard."""

MIN_LANE_WINDOW = 64
"""A lane shuffles at least so many samples together: with a smaller window there are fewer lanes."""

ORDER_VERSION = 2
"""Raised whenever the same settings would give another order: a run goes on only in the order that it began with."""

_U64 = np.uint64


class StreamSlice(NamedTuple):
    """Positions of the stream, resolved; n of them, V views of each image."""

    epochs: np.ndarray
    """(n,) int64: epoch each position belongs to, from 0."""
    indices: np.ndarray
    """(n,) int64: index of the sample in the shard set."""
    seeds: np.ndarray
    """(n, V) int64: seed of all that is random about each view of this sample in this epoch: crop, flip, mask."""


class MicroBatch(NamedTuple):
    """What one process feeds its model at once."""

    step: int
    micro_step: int
    positions: np.ndarray
    """(n,) int64, ascending: which positions of the stream."""


def mix64(values: np.ndarray) -> np.ndarray:
    """Scrambles (n,) uint64 one to one. Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))


def sample_seeds(seed: int, epochs: np.ndarray, indices: np.ndarray, num_views: int = 1) -> np.ndarray:
    """Gives every (epoch, sample, view) of a run its own seed, the same on any process, worker and machine.

    Args:
        seed: of the run.
        epochs: (n,) int64.
        indices: (n,) int64.
        num_views: V, at least 1. The first views have the same seeds whatever V is.

    Returns:
        (n, V) int64, over the whole range.
    """
    state = mix64(np.full(len(indices), seed % 2**64, dtype=_U64) + _U64(0x9E3779B97F4A7C15))
    state = mix64(state ^ epochs.astype(_U64))
    state = mix64(state ^ indices.astype(_U64))
    views = [state, *(mix64(state + _U64(view)) for view in range(1, num_views))]
    return np.stack(views, axis=1).view(np.int64)


def _permutation(key: tuple[int, ...], length: int) -> np.ndarray:
    """A random order of range(length), from raw 64-bit draws: those never change between versions of numpy."""
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(length)
    return np.argsort(bits, kind="stable")


class Order(Protocol):
    """An endless stream of samples."""

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        ...

    def next_to(self, index: int) -> int:
        """The sample that stands in for one that cannot be read."""
        ...

    def lanes(self, positions: np.ndarray) -> np.ndarray:
        """In which lane positions of the stream lie: (n,) int64 -> (n,) int64, 0 .. LANES - 1."""
        ...

    def resolve(self, positions: np.ndarray, num_views: int = 1) -> StreamSlice:
        """Says which samples stand at positions of the stream, (n,) int64 from 0 on."""
        ...


class _Line(NamedTuple):
    """The shards of one epoch, permuted and laid end to end."""

    first_sample: np.ndarray
    """(num_shards,) int64: number of each shard's first sample."""
    starts: np.ndarray
    """(num_shards,) int64: where each shard starts on the line."""


@dataclass(frozen=True)
class SampleOrder:
    """The order of the samples in every epoch.

    A data set of no more samples than the window is shuffled whole. Of a larger one each lane has its share of the window, of
    MIN_LANE_WINDOW samples at least: a smaller window has fewer lanes.
    Any position is found without computing what is before it.

    Args:
        first_sample: (num_shards + 1,) int64, where each shard starts in the numbering of all samples.
        seed: of the run, at least 0.
        window: samples shuffled together, over all lanes; at least 1.
        num_lanes: parts of the line that are read side by side, at least 1.
    """

    first_sample: np.ndarray
    seed: int
    window: int
    num_lanes: int = LANES
    _lines: dict[int, _Line] = field(default_factory=dict, repr=False, compare=False)
    _blocks: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return int(self.first_sample[-1])

    @cached_property
    def _num_lanes(self) -> int:
        if self.num_samples <= self.window:
            return 1
        return max(1, min(self.num_lanes, self.window // MIN_LANE_WINDOW))

    @cached_property
    def _lane_window(self) -> int:
        return self.window // self._num_lanes

    def next_to(self, index: int) -> int:
        """The sample that follows a sample; the first one follows the last."""
        return (index + 1) % self.num_samples

    def lanes(self, positions: np.ndarray) -> np.ndarray:
        """In which lane positions of the stream lie: (n,) int64 -> (n,) int64, 0 .. num_lanes - 1."""
        return positions % self.num_samples % self._num_lanes

    def resolve(self, positions: np.ndarray, num_views: int = 1) -> StreamSlice:
        """Says which samples stand at positions of the stream, (n,) int64 from 0 on."""
        epochs, places = np.divmod(positions, self.num_samples)
        offsets, lanes = np.divmod(places, self._num_lanes)
        blocks, offsets = np.divmod(offsets, self._lane_window)
        indices = np.empty(len(positions), dtype=np.int64)
        keys, which = np.unique(np.stack([epochs, lanes, blocks]), axis=1, return_inverse=True)
        which = which.reshape(-1)  # numpy 2.0.0 alone gives it another shape
        by_block = np.argsort(which, kind="stable")
        edges = np.searchsorted(which[by_block], np.arange(keys.shape[1] + 1))
        for key, start, stop in zip(keys.T.tolist(), edges[:-1], edges[1:], strict=True):
            here = by_block[start:stop]
            indices[here] = self._block(*key)[offsets[here]]
        return StreamSlice(epochs, indices, sample_seeds(self.seed, epochs, indices, num_views))

    def _block(self, epoch: int, lane: int, block: int) -> np.ndarray:
        """Sample indices of one window of a lane, shuffled."""
        key = (epoch, lane, block)
        if key not in self._blocks:
            if len(self._blocks) >= 2 * self._num_lanes:  # a batch touches a window or two of each lane
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[key] = self._shuffled_block(epoch, lane, block)
        return self._blocks[key]

    def _shuffled_block(self, epoch: int, lane: int, block: int) -> np.ndarray:
        # Position p of an epoch is place p // num_lanes of lane p % num_lanes, so the first lanes may be one place longer.
        share, rest = divmod(self.num_samples, self._num_lanes)
        lane_start = lane * share + min(lane, rest)
        lane_stop = lane_start + share + (lane < rest)
        start = lane_start + block * self._lane_window
        places = np.arange(start, min(start + self._lane_window, lane_stop))
        line = self._line(epoch)
        shard = np.searchsorted(line.starts, places, side="right") - 1
        indices = line.first_sample[shard] + places - line.starts[shard]
        return indices[_permutation((self.seed, epoch, 1, lane, block), len(indices))]

    def _line(self, epoch: int) -> _Line:
        if epoch not in self._lines:
            if len(self._lines) >= 2:  # a batch may lie on the edge of two epochs
                self._lines.pop(next(iter(self._lines)))
            shards = _permutation((self.seed, epoch, 0), len(self.first_sample) - 1)
            sizes = np.diff(self.first_sample)[shards]
            self._lines[epoch] = _Line(self.first_sample[shards], np.cumsum(sizes) - sizes)
        return self._lines[epoch]


@dataclass(frozen=True)
class SubsetOrder:
    """The order of chosen samples: as SampleOrder's, over these alone.

    Args:
        rows: (n,) int64, the chosen samples, sorted.
        first_sample: (num_shards + 1,) int64, where each shard starts in the numbering of all samples.
        seed: of the run, at least 0.
        window: samples shuffled together, at least 1.
        num_lanes: parts that are read side by side, at least 1.
    """

    rows: np.ndarray
    first_sample: np.ndarray
    seed: int
    window: int
    num_lanes: int = LANES

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return len(self.rows)

    def next_to(self, index: int) -> int:
        """The chosen sample that follows a chosen sample; the first one follows the last."""
        return int(self.rows[(int(np.searchsorted(self.rows, index)) + 1) % len(self.rows)])

    @cached_property
    def _places(self) -> SampleOrder:
        return SampleOrder(np.searchsorted(self.rows, self.first_sample), self.seed, self.window, self.num_lanes)

    def lanes(self, positions: np.ndarray) -> np.ndarray:
        """In which lane positions of the stream lie: (n,) int64 -> (n,) int64."""
        return self._places.lanes(positions)

    def resolve(self, positions: np.ndarray, num_views: int = 1) -> StreamSlice:
        """Says which samples stand at positions of the stream, (n,) int64 from 0 on."""
        places = self._places.resolve(positions)
        indices = self.rows[places.indices]
        return StreamSlice(places.epochs, indices, sample_seeds(self.seed, places.epochs, indices, num_views))


MIX_PERIOD = 1000
"""Weights of a mixture are kept to a thousandth: of so many neighbouring positions each source has its exact share."""


@dataclass(frozen=True)
class MixedOrder:
    """Several data sets in one stream, each with a share of its positions, each without replacement within its own epochs.

    Args:
        parts: an order for each data set, numbering its samples from 0.
        offsets: number of each data set's first sample in the numbering of all.
        weights: share of each, above 0; their sum does not matter.
        seed: of the run, at least 0.

    Raises:
        ValueError: a weight is below half a thousandth of their sum, or the numbers do not fit.
    """

    parts: tuple[SampleOrder, ...]
    offsets: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        if not len(self.parts) == len(self.offsets) == len(self.weights) or not self.parts:
            raise ValueError(f"{len(self.parts)} data sets and {len(self.weights)} weights; expected one weight for each")
        if min(self.weights) <= 0:
            raise ValueError(f"weights must be above 0, not {list(self.weights)}")
        if self._slots.min() < 1:
            raise ValueError(f"weights {list(self.weights)}: the smallest must be at least a thousandth of their sum")

    @property
    def num_samples(self) -> int:
        """Positions counted as one epoch: the samples of all data sets together."""
        return sum(part.num_samples for part in self.parts)

    @cached_property
    def _slots(self) -> np.ndarray:
        """(number of parts,) int64: positions of each part in every MIX_PERIOD, by largest remainder."""
        shares = np.array(self.weights) / sum(self.weights) * MIX_PERIOD
        slots = np.floor(shares).astype(np.int64)
        most_short = np.argsort(slots - shares, kind="stable")
        slots[most_short[: MIX_PERIOD - slots.sum()]] += 1
        return slots

    def next_to(self, index: int) -> int:
        """The sample that follows a sample within its data set."""
        part = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return self.offsets[part] + self.parts[part].next_to(index - self.offsets[part])

    def lanes(self, positions: np.ndarray) -> np.ndarray:
        """In which lane of their data sets positions lie, (n,) int64 -> (n,) int64: a process gets its share of each set."""
        part_of, own = self._split(positions)
        lanes = np.empty(len(positions), dtype=np.int64)
        for number, part in enumerate(self.parts):
            lanes[part_of == number] = part.lanes(own[part_of == number])
        return lanes

    def resolve(self, positions: np.ndarray, num_views: int = 1) -> StreamSlice:
        """Says which samples stand at positions of the stream; epochs are each data set's own."""
        part_of, own = self._split(positions)
        epochs, indices = (np.empty(len(positions), dtype=np.int64) for _ in range(2))
        for number, part in enumerate(self.parts):
            here = part_of == number
            resolved = part.resolve(own[here])
            epochs[here], indices[here] = resolved.epochs, resolved.indices + self.offsets[number]
        return StreamSlice(epochs, indices, sample_seeds(self.seed, epochs, indices, num_views))

    def _split(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Says which data set each position goes to, and which position of that set's own stream it is."""
        periods, places = np.divmod(positions, MIX_PERIOD)
        part_of, own = (np.empty(len(positions), dtype=np.int64) for _ in range(2))
        for period in np.unique(periods).tolist():
            here = periods == period
            pattern = np.repeat(np.arange(len(self.parts)), self._slots)[_permutation((self.seed, 2, period), MIX_PERIOD)]
            # earlier[i, p]: positions of part p before place i of this period
            earlier = np.cumsum(pattern[:, None] == np.arange(len(self.parts)), axis=0) - 1
            part_of[here] = pattern[places[here]]
            own[here] = period * self._slots[part_of[here]] + earlier[places[here], part_of[here]]
        return part_of, own


@dataclass(frozen=True)
class BatchPlan:
    """Which positions of the stream each process reads at each step.

    Args:
        batch_size_per_process: images that one process feeds its model at once, each view counted.
        accum_steps: micro-batches of one optimizer step.
        world_size: number of processes.
        rank: number of this process.
        views_per_image: crops of each image that is read; divides batch_size_per_process.
    """

    batch_size_per_process: int
    accum_steps: int
    world_size: int
    rank: int
    views_per_image: int = 1

    @property
    def global_batch_size(self) -> int:
        """Images of one optimizer step, over all processes and micro-batches, each view counted."""
        return self.batch_size_per_process * self.accum_steps * self.world_size

    def micro_batches(
        self,
        lanes: Callable[[np.ndarray], np.ndarray],
        start_step: int,
        stop_step: int,
        part: int = 0,
        num_parts: int = 1,
    ) -> Iterator[MicroBatch]:
        """Lists this process's micro-batches of steps [start_step, stop_step): every `num_parts`-th one, from `part` on.

        The parts are the loader's workers, which torch's DataLoader asks in turn: together they give the whole list in order.
        The processes share a global batch by lanes: each takes as many positions, the first process those of the first lanes.

        Args:
            lanes: positions -> their lanes, as `Order.lanes`.
            start_step: first step.
            stop_step: where to end, excluded.
            part: number of this part.
            num_parts: how many parts.
        """
        per_batch = self.batch_size_per_process // self.views_per_image
        per_process = per_batch * self.accum_steps
        per_step = per_process * self.world_size
        for number in range(start_step * self.accum_steps + part, stop_step * self.accum_steps, num_parts):
            step, micro_step = divmod(number, self.accum_steps)
            positions = np.arange(step * per_step, (step + 1) * per_step)
            by_lane = np.argsort(lanes(positions), kind="stable")
            own = np.sort(positions[by_lane[self.rank * per_process : (self.rank + 1) * per_process]])
            yield MicroBatch(step, micro_step, own[micro_step * per_batch : (micro_step + 1) * per_batch])


def num_steps_for_epochs(epochs: float, num_samples: int, global_batch_size: int) -> int:
    """Counts the optimizer steps that deliver at least `epochs` times as many images as there are samples."""
    return -int(-epochs * num_samples // global_batch_size)

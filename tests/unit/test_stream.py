import itertools
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.stream import (
    BatchPlan,
    MixedOrder,
    Order,
    SampleOrder,
    StreamSlice,
    SubsetOrder,
    num_steps_for_epochs,
    sample_seeds,
)


def make_order(sizes: list[int], seed: int = 0, window: int = 16, num_lanes: int = 64) -> SampleOrder:
    return SampleOrder(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), seed, window, num_lanes)


def resolve(order: Order, start: int, stop: int, num_views: int = 1) -> StreamSlice:
    return order.resolve(np.arange(start, stop), num_views)


# Small and large shards, empty ones too; more than MIN_LANE_WINDOW * 2 samples are needed to see two lanes at work.
shard_sizes = st.lists(st.integers(0, 400), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 0)
orders = st.builds(
    make_order, shard_sizes, seed=st.integers(0, 2**32), window=st.integers(1, 3000), num_lanes=st.integers(1, 70)
)


@given(order=orders, epoch=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_every_epoch_holds_every_sample_once(order: SampleOrder, epoch: int) -> None:
    total = order.num_samples
    part = resolve(order, epoch * total, (epoch + 1) * total)
    assert np.array_equal(np.sort(part.indices), np.arange(total))
    assert set(part.epochs.tolist()) == {epoch}


@given(order=orders, data=st.data())
@settings(max_examples=100, deadline=None)
def test_position_is_found_without_what_is_before(order: SampleOrder, data: st.DataObject) -> None:
    total = order.num_samples
    whole = resolve(order, 0, 2 * total)
    start = data.draw(st.integers(0, 2 * total - 1))
    stop = data.draw(st.integers(start, 2 * total))
    fresh = SampleOrder(order.first_sample, order.seed, order.window, order.num_lanes)
    for one, other in zip(resolve(fresh, start, stop), whole, strict=True):
        assert np.array_equal(one, other[start:stop])


def test_order_depends_on_seed_and_epoch() -> None:
    def epoch_of(seed: int, epoch: int) -> list[int]:
        return resolve(make_order([100], seed), epoch * 100, (epoch + 1) * 100).indices.tolist()

    epochs = [epoch_of(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(one != other for one, other in itertools.combinations(epochs, 2))
    assert epoch_of(1, 1) == epochs[3]


def test_order_is_the_same_on_every_version_of_numpy() -> None:
    """Frozen: a run that is continued after an upgrade must see the order that it began with. Or raise ORDER_VERSION."""
    assert resolve(make_order([5, 4, 3], seed=7, window=8), 0, 12).indices.tolist() == [10, 0, 11, 6, 5, 9, 7, 8, 1, 4, 3, 2]
    lanes = resolve(make_order([100, 50, 3, 200], seed=7, window=192), 0, 353).indices
    assert lanes[:9].tolist() == [202, 295, 140, 154, 290, 8, 197, 291, 142]
    assert sample_seeds(7, np.array([0, 1]), np.array([3, 3]), 2).tolist() == [
        [-3346640678069125, 3825262513673595466],
        [3762866057679306497, 5281655914663833890],
    ]


def test_a_window_touches_few_shards() -> None:
    """256 samples of shards of 10 in two lanes of 128: each lane's part lies in 14 shards at most, in any window."""
    order = make_order([10] * 300, window=256, num_lanes=2)
    for start in range(0, 3000 - 256, 256):
        indices = resolve(order, start, start + 256).indices
        assert len(set((indices // 10).tolist())) <= 28


@pytest.mark.parametrize(("window", "num_lanes"), [(1000, 64), (640, 10)])
def test_shuffle_mixes_class_sorted_shards(window: int, num_lanes: int) -> None:
    """Ten shards of one class each: every batch of 50 has nearly all classes, whole or in lanes."""
    order = make_order([100] * 10, window=window, num_lanes=num_lanes)
    for start in range(0, 1000, 50):
        classes = set((resolve(order, start, start + 50).indices // 100).tolist())
        assert len(classes) >= 8


def test_lanes_mix_what_a_window_alone_does_not() -> None:
    """A hundred shards of one class each, a window of a hundredth of the data: with lanes every batch has many classes."""
    num_classes = {}
    for num_lanes in (1, 16):
        order = make_order([1000] * 100, window=1024, num_lanes=num_lanes)
        batches = resolve(order, 0, 100_000).indices.reshape(-1, 100) // 1000
        num_classes[num_lanes] = np.mean([len(set(batch)) for batch in batches.tolist()])
    assert num_classes[1] < 3
    assert num_classes[16] > 14


def test_seeds_differ_between_samples_epochs_views_and_runs() -> None:
    epochs, indices = np.divmod(np.arange(5_000), 500)
    seeds = np.concatenate([sample_seeds(run, epochs, indices, 2) for run in (0, 1)])
    assert len(np.unique(seeds)) == 20_000
    bits = (seeds.reshape(-1).view(np.uint64)[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02  # 20,000 draws: standard error 0.0035


def test_the_first_views_are_the_same_however_many_there_are() -> None:
    epochs, indices = np.divmod(np.arange(20), 7)
    assert np.array_equal(sample_seeds(3, epochs, indices, 4)[:, :2], sample_seeds(3, epochs, indices, 2))


# --------------------------------------------------------------------------------------------------------------------
# Processes and workers


class Launch(NamedTuple):
    """How many read a global batch of 48 images."""

    world_size: int
    accum_steps: int
    num_workers: int


launches = st.builds(Launch, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3]))


def read(order: Order, launch: Launch, steps: range, views: int = 1) -> dict[int, list[tuple[int, int, tuple[int, ...]]]]:
    """Step -> what all processes and workers of a launch read in it, sorted: epoch, sample, seeds."""
    per_process = 48 // launch.world_size // launch.accum_steps
    batches: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {step: [] for step in steps}
    for rank in range(launch.world_size):
        plan = BatchPlan(per_process, launch.accum_steps, launch.world_size, rank, views)
        assert plan.global_batch_size == 48
        counts = dict.fromkeys(steps, 0)
        for part in range(launch.num_workers):
            for batch in plan.micro_batches(order.lanes, steps.start, steps.stop, part, launch.num_workers):
                assert len(batch.positions) == per_process // views
                part_of_stream = order.resolve(batch.positions, views)
                batches[batch.step].extend(
                    (epoch, index, tuple(seeds))
                    for epoch, index, seeds in zip(*map(np.ndarray.tolist, part_of_stream), strict=True)
                )
                counts[batch.step] += 1
        assert set(counts.values()) == {launch.accum_steps}  # every process takes part in every step alike
    return {step: sorted(batch) for step, batch in batches.items()}


@given(order=orders, first=launches, second=launches, third=launches, start=st.integers(0, 50), views=st.sampled_from([1, 2]))
@settings(max_examples=100, deadline=None)
def test_a_run_continued_by_others_reads_what_an_uninterrupted_one_reads(
    order: SampleOrder, first: Launch, second: Launch, third: Launch, start: int, views: int
) -> None:
    """Worlds and workers change twice, at any step; every global batch holds the same samples, crops and masks."""
    straight = read(order, Launch(1, 1, 1), range(start, start + 12), views)
    stops = [start, start + 3, start + 7, start + 12]
    resumed = {}
    for launch, one, other in zip((first, second, third), stops[:-1], stops[1:], strict=True):
        resumed |= read(order, launch, range(one, other), views)
    assert resumed == straight


@given(order=orders, launch=launches)
@settings(max_examples=50, deadline=None)
def test_processes_and_workers_read_disjoint_parts(order: SampleOrder, launch: Launch) -> None:
    num_steps = num_steps_for_epochs(2, order.num_samples, 48)
    read_samples = Counter(
        (epoch, index) for batch in read(order, launch, range(num_steps)).values() for epoch, index, _ in batch
    )
    assert set(read_samples.values()) == {1}
    assert {(epoch, index) for epoch in range(2) for index in range(order.num_samples)} <= read_samples.keys()


def test_processes_read_different_shards() -> None:
    """What lanes are for: of 256 shards each of 4 processes touches about a quarter in an epoch, not all."""
    order = make_order([100] * 256, window=2048, num_lanes=16)
    touched = []
    for rank in range(4):
        plan = BatchPlan(16, 1, 4, rank)
        positions = [batch.positions for batch in plan.micro_batches(order.lanes, 0, 400)]
        touched.append(set((order.resolve(np.concatenate(positions)).indices // 100).tolist()))
    assert all(len(shards) < 256 / 4 + 8 for shards in touched)
    assert len(set.union(*touched)) == 256


def test_workers_take_turns() -> None:
    order = make_order([1000])
    plan = BatchPlan(4, 2, 2, 1)

    def listed(part: int, num_parts: int) -> list[tuple[int, int, list[int]]]:
        batches = plan.micro_batches(order.lanes, 2, 7, part, num_parts)
        return [(batch.step, batch.micro_step, batch.positions.tolist()) for batch in batches]

    in_turn = [batch for turn in itertools.zip_longest(*(listed(part, 3) for part in range(3))) for batch in turn if batch]
    assert in_turn == listed(0, 1)


def test_steps_deliver_at_least_the_epochs() -> None:
    assert num_steps_for_epochs(1, 50_000, 256) == 196
    assert num_steps_for_epochs(2, 512, 256) == 4
    assert num_steps_for_epochs(0.5, 512, 256) == 1
    assert num_steps_for_epochs(3, 10, 256) == 1


# --------------------------------------------------------------------------------------------------------------------
# Subsets and mixtures


@given(order=orders, data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_subset_is_read_once_an_epoch_too(order: SampleOrder, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, order.num_samples - 1), min_size=1, max_size=300))
    rows = np.array(sorted(chosen))
    subset = SubsetOrder(rows, order.first_sample, order.seed, order.window, order.num_lanes)
    for epoch in range(2):
        part = resolve(subset, epoch * len(rows), (epoch + 1) * len(rows))
        assert np.array_equal(np.sort(part.indices), rows)


def make_mixture(weights: tuple[float, ...], sizes: tuple[int, ...] = (500, 70, 300)) -> MixedOrder:
    parts = tuple(make_order([size // 2, size - size // 2], seed=4, window=128) for size in sizes)
    return MixedOrder(parts, tuple(np.cumsum((0, *sizes[:-1])).tolist()), weights, seed=4)


@given(weights=st.tuples(*[st.floats(0.05, 1.0)] * 3), start=st.integers(0, 5000), launch=launches)
@settings(max_examples=50, deadline=None)
def test_a_mixture_gives_each_data_set_its_share_without_replacement(
    weights: tuple[float, ...], start: int, launch: Launch
) -> None:
    order = make_mixture(weights)
    stream = resolve(order, 0, 6000)
    part_of = np.searchsorted(order.offsets, stream.indices, side="right") - 1
    for number, (part, offset) in enumerate(zip(order.parts, order.offsets, strict=True)):
        of_part = part_of == number
        share = weights[number] / sum(weights)
        for period in range(6):
            assert abs(of_part[period * 1000 : (period + 1) * 1000].mean() - share) <= 0.001
        own = resolve(part, 0, int(of_part.sum()))  # the part's own stream, whole and in order
        assert np.array_equal(stream.indices[of_part], own.indices + offset)
        assert np.array_equal(stream.epochs[of_part], own.epochs)
    later = resolve(order, start, start + 100)  # found without what is before
    if start + 100 <= 6000:
        assert np.array_equal(later.indices, stream.indices[start : start + 100])
    assert read(order, launch, range(3, 6)) == read(order, Launch(1, 1, 1), range(3, 6))


def test_a_mixture_spreads_its_data_sets_over_the_processes() -> None:
    """All processes get every data set, so that none waits for one that reads the largest images alone."""
    order = make_mixture((1.0, 1.0, 2.0), sizes=(5000, 5000, 5000))
    for rank in range(4):
        positions = [batch.positions for batch in BatchPlan(64, 1, 4, rank).micro_batches(order.lanes, 0, 20)]
        part_of = np.searchsorted(order.offsets, order.resolve(np.concatenate(positions)).indices, side="right") - 1
        assert np.bincount(part_of, minlength=3) / len(part_of) == pytest.approx([0.25, 0.25, 0.5], abs=0.08)


def test_a_bad_sample_of_a_mixture_is_replaced_within_its_data_set() -> None:
    order = make_mixture((1.0, 1.0, 1.0))
    assert [order.next_to(index) for index in (0, 499, 500, 569, 869)] == [1, 0, 501, 500, 570]


@pytest.mark.parametrize(
    ("weights", "message"),
    [((1.0, 1.0), "one weight for each"), ((1.0, 0.0, 1.0), "above 0"), ((1.0, 1e-5, 1.0), "at least a thousandth")],
)
def test_weights_that_make_no_mixture_are_refused(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_mixture(weights)

import itertools

import numpy as np
import pytest

from data.stream import BatchPlan, SampleOrder, num_steps_for_epochs, sample_seeds


def make_order(sizes: list[int], seed: int = 0, window: int = 16) -> SampleOrder:
    return SampleOrder(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), seed, window)


@pytest.mark.parametrize("sizes", [[53], [10, 10, 10, 10, 10, 3], [1, 40, 2, 7, 0, 3], [1]])
@pytest.mark.parametrize("window", [1, 7, 16, 1000])
def test_every_epoch_holds_every_sample_once(sizes: list[int], window: int) -> None:
    order = make_order(sizes, window=window)
    total = sum(sizes)
    for epoch in range(3):
        part = order.resolve(epoch * total, (epoch + 1) * total)
        assert sorted(part.indices.tolist()) == list(range(total))
        assert set(part.epochs.tolist()) == {epoch}


def test_position_is_found_without_what_is_before() -> None:
    whole = make_order([10, 3, 20]).resolve(0, 99)
    for start in range(0, 99, 5):
        part = make_order([10, 3, 20]).resolve(start, min(start + 7, 99))
        for name in ("epochs", "indices", "seeds"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[start : start + 7]), name


def test_order_depends_on_seed_and_epoch() -> None:
    def epoch_of(seed: int, epoch: int) -> list[int]:
        return make_order([100], seed).resolve(epoch * 100, (epoch + 1) * 100).indices.tolist()

    orders = [epoch_of(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(one != other for one, other in itertools.combinations(orders, 2))
    assert epoch_of(1, 1) == orders[3]


def test_order_is_the_same_on_every_version_of_numpy() -> None:
    """Frozen: a run that is continued after an upgrade must see the order that it began with."""
    assert make_order([5, 4, 3], seed=7, window=8).resolve(0, 12).indices.tolist() == [
        5,
        8,
        7,
        9,
        10,
        6,
        11,
        0,
        2,
        3,
        1,
        4,
    ]
    assert sample_seeds(7, np.array([0, 1]), np.array([3, 3])).tolist() == [-3346640678069125, 3762866057679306497]


def test_a_window_touches_few_shards() -> None:
    """32 samples of shards of 10 lie in five shards at most, in any window."""
    order = make_order([10] * 50, window=32)
    for block in range(500 // 32):
        indices = order.resolve(block * 32, (block + 1) * 32).indices
        assert len(set((indices // 10).tolist())) <= 5


def test_shuffle_mixes_class_sorted_shards() -> None:
    """Ten shards of one class each, window of the whole set: every batch of 50 has nearly all classes."""
    order = make_order([100] * 10, window=1000)
    for start in range(0, 1000, 50):
        classes = set((order.resolve(start, start + 50).indices // 100).tolist())
        assert len(classes) >= 8


def test_seeds_differ_between_samples_epochs_and_runs() -> None:
    epochs, indices = np.divmod(np.arange(10_000), 1000)
    seeds = np.concatenate([sample_seeds(run, epochs, indices) for run in (0, 1)])
    assert len(np.unique(seeds)) == 20_000
    bits = (seeds.view(np.uint64)[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02  # 20,000 draws: standard error 0.0035


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accum_steps", [1, 2])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_global_batches_do_not_depend_on_processes_workers_or_accumulation(
    world_size: int, accum_steps: int, num_workers: int
) -> None:
    global_batch_size, steps = 16, range(3, 8)
    per_process = global_batch_size // world_size // accum_steps
    positions: dict[int, list[int]] = {step: [] for step in steps}
    for rank in range(world_size):
        plan = BatchPlan(per_process, accum_steps, world_size, rank)
        assert plan.global_batch_size == global_batch_size
        counts = dict.fromkeys(steps, 0)
        for part in range(num_workers):
            for batch in plan.micro_batches(steps.start, steps.stop, part, num_workers):
                positions[batch.step].extend(range(batch.start, batch.stop))
                counts[batch.step] += 1
        assert set(counts.values()) == {accum_steps}  # every process takes part in every step alike
    for step in steps:
        assert sorted(positions[step]) == list(range(step * 16, (step + 1) * 16))


def test_workers_take_turns() -> None:
    plan = BatchPlan(4, 2, 2, 1)
    straight = list(plan.micro_batches(2, 7))
    parts = [list(plan.micro_batches(2, 7, part, 3)) for part in range(3)]
    in_turn = [batch for turn in itertools.zip_longest(*parts) for batch in turn if batch is not None]
    assert in_turn == straight


def test_steps_deliver_at_least_the_epochs() -> None:
    assert num_steps_for_epochs(1, 50_000, 256) == 196
    assert num_steps_for_epochs(2, 512, 256) == 4
    assert num_steps_for_epochs(0.5, 512, 256) == 1
    assert num_steps_for_epochs(3, 10, 256) == 1

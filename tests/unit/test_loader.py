import contextlib
import dataclasses
import itertools
import multiprocessing
import signal
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from data.cache import shard_cache
from data.config import DataConfig, build_order, choose_normalization, open_source
from data.errors import DataError
from data.indexing import index_tars
from data.loader import Augment, Batch, BatchLoader, leave_signals_to_parent, preview_images
from data.reader import Sample, ShardReader
from data.shards import ShardSet, open_shards
from data.stream import BatchPlan, SampleOrder
from data.transforms import IMAGENET_MEAN
from data.writer import list_images, write_shards
from tests.conftest import write_pictures
from training.meters import WaitClock

CONFIG = DataConfig(num_workers=0, shuffle_window=16)


def load(
    shards: ShardSet, plan: BatchPlan, start_step: int, stop_step: int, config: DataConfig = CONFIG, channels: int = 3
) -> list[Batch]:
    order = SampleOrder(shards.first_sample, 0, config.shuffle_window)
    return list(BatchLoader(shards, config, plan, order, (16, 16), channels, start_step, stop_step))


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("images", "seeds", "indices"))


def test_one_epoch_through_two_processes_with_two_workers_delivers_every_key_once(picture_shards: ShardSet) -> None:
    """53 samples in batches of 2 x 5: the sixth step goes 7 samples into the next epoch."""
    config = dataclasses.replace(CONFIG, num_workers=2)
    keys: Counter[str] = Counter()
    with ShardReader(picture_shards) as reader:
        slots = [[], []]
        for rank in (0, 1):
            batches = load(picture_shards, BatchPlan(5, 1, 2, rank), 0, 6, config)
            assert len(batches) == 6
            slots[rank] = [batch.indices for batch in batches]
        stream = torch.cat([torch.cat(step) for step in zip(*slots, strict=True)])
        for index in stream[:53].tolist():
            sample = reader.read(index)
            keys[sample.key] += 1
    assert len(keys) == 53
    assert set(keys.values()) == {1}


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # on machines of one or two cores
@pytest.mark.parametrize("num_workers", [1, 3])
def test_number_of_workers_changes_nothing(picture_shards: ShardSet, num_workers: int) -> None:
    plan = BatchPlan(4, 2, 1, 0)
    alone = load(picture_shards, plan, 0, 4)
    together = load(picture_shards, plan, 0, 4, dataclasses.replace(CONFIG, num_workers=num_workers))
    assert len(alone) == len(together) == 8
    assert all(map(same, alone, together))


def test_starting_in_the_middle_gives_what_a_straight_run_gives(picture_shards: ShardSet) -> None:
    plan = BatchPlan(8, 1, 1, 0)
    straight = load(picture_shards, plan, 0, 15)
    assert all(map(same, straight[9:], load(picture_shards, plan, 9, 15)))


def test_more_processes_read_the_same_global_batches(picture_shards: ShardSet) -> None:
    one = load(picture_shards, BatchPlan(8, 1, 1, 0), 0, 5)
    two = [load(picture_shards, BatchPlan(4, 1, 2, rank), 0, 5) for rank in (0, 1)]
    for step in range(5):
        for name in ("images", "seeds", "indices"):
            joined = torch.cat([getattr(two[rank][step], name) for rank in (0, 1)])
            assert torch.equal(joined, getattr(one[step], name)), name


def test_pictures_differ_between_epochs(picture_shards: ShardSet) -> None:
    batches = load(picture_shards, BatchPlan(53, 1, 1, 0), 0, 2)
    first, second = (batch.indices.argsort() for batch in batches)
    assert torch.equal(batches[0].indices[first], batches[1].indices[second])
    assert not torch.equal(batches[0].indices, batches[1].indices)
    assert not torch.equal(batches[0].images[first], batches[1].images[second])
    assert not (batches[0].seeds[first] == batches[1].seeds[second]).any()


@pytest.fixture
def damaged_shards(tmp_path: Path) -> ShardSet:
    """24 pictures of which numbers 3, 4 and 10 (in storage order) are not pictures."""
    write_pictures(tmp_path / "source", 24)
    write_shards(list_images(tmp_path / "source"), tmp_path / "shards", samples_per_shard=12, num_workers=0)
    shards = open_shards(tmp_path / "shards")
    for number in (3, 4, 10):
        place = shards.locate(number)
        with Path(str(shards.place(place.shard_number))).open("r+b") as file:
            file.seek(place.offset)
            file.write(b"\0" * place.size)
    return shards


def test_unreadable_samples_are_replaced_in_their_slots_named_and_counted(damaged_shards: ShardSet) -> None:
    clean_slots = {index for index in range(24) if index not in (3, 4, 10)}
    batches = load(damaged_shards, BatchPlan(8, 1, 1, 0), 0, 3)
    assert [len(batch.images) for batch in batches] == [8, 8, 8]
    delivered = Counter(index for batch in batches for index in batch.indices.tolist())
    assert delivered == Counter(clean_slots) + Counter({5: 2, 11: 1})
    faults = [fault for batch in batches for fault in batch.faults]
    assert len(faults) == 4  # sample 3 leads to 4, which leads to 5
    with ShardReader(damaged_shards) as reader:
        key = reader.read(10).key
    assert {fault.sample for fault in faults} == {3, 4, 10}
    assert {fault[:3] for fault in faults if fault.sample == 10} == {("not_an_image", "000000.tar", key)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_that_cannot_be_read_at_all_ends_in_one_clear_error(tmp_path: Path, num_workers: int) -> None:
    """Also through reader processes, whose traceback torch would put around the message."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("x.jpg", "y.jpg"):
            (tmp_path / name).write_bytes(b"not a picture")
            tar.add(tmp_path / name, name)
    index_tars([tmp_path / "a.tar"], tmp_path)
    with pytest.raises(DataError) as caught:
        load(open_shards(tmp_path), BatchPlan(2, 1, 1, 0), 0, 2, dataclasses.replace(CONFIG, num_workers=num_workers))
    assert str(caught.value).startswith("2 samples in a row cannot be read (2 not_an_image); the first: a.tar: ")
    assert "Traceback" not in str(caught.value)


def test_shard_that_is_lost_on_the_way_ends_in_one_clear_error(damaged_shards: ShardSet) -> None:
    Path(str(damaged_shards.place(1))).unlink()
    with pytest.raises(DataError, match=damaged_shards.manifest.shards[1].name):
        load(damaged_shards, BatchPlan(8, 1, 1, 0), 0, 3)


def test_channels_follow_the_model(picture_shards: ShardSet) -> None:
    assert load(picture_shards, BatchPlan(2, 1, 1, 0), 0, 1, channels=1)[0].images.shape == (2, 1, 16, 16)


def test_normalisation_is_the_users_or_imagenets_or_measured(picture_shards: ShardSet) -> None:
    assert choose_normalization(DataConfig(), picture_shards, 3).mean == IMAGENET_MEAN
    assert choose_normalization(DataConfig(mean=(0.1,), std=(0.2,)), picture_shards, 1) == ((0.1,), (0.2,))
    for mean, std in [((0.1,), (0.2,)), ((0.1, 0.1, 0.1), ()), ((0.1,) * 3, (0.2, 0.0, 0.2))]:
        with pytest.raises(DataError, match="3 numbers each"):
            choose_normalization(DataConfig(mean=mean, std=std), picture_shards, 3)


def test_preview_leaves_unreadable_samples_out(damaged_shards: ShardSet) -> None:
    assert preview_images(damaged_shards, (16, 16), 3, count=24, max_pixels=10**6).shape == (21, 3, 16, 16)
    with pytest.raises(DataError, match="none of 4 samples"):
        preview_images(damaged_shards, (16, 16), 3, count=4, max_pixels=5)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size_per_process": 0},
        {"num_workers": -1},
        {"crop_scale": (0.5, 0.2)},
        {"max_bad_share": 1.5},
        {"flip_probability": 1.5},
    ],
)
def test_settings_out_of_range_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        DataConfig(**changes)


def test_flips_and_crops_follow_the_settings(picture_shards: ShardSet) -> None:
    plan = BatchPlan(8, 1, 1, 0)
    whole = dataclasses.replace(CONFIG, crop_scale=(1.0, 1.0), flip_probability=0.0)
    plain = load(picture_shards, plan, 0, 1, whole)[0]
    mirrored = load(picture_shards, plan, 0, 1, dataclasses.replace(whole, flip_probability=1.0))[0]
    assert torch.equal(mirrored.images, plain.images.flip(-1))
    small = load(picture_shards, plan, 0, 1, dataclasses.replace(whole, crop_scale=(0.1, 0.1)))[0]
    # A tenth of the random pixels, enlarged, is smoother than all of them, shrunk.
    roughness = [(batch.images.float().diff(dim=-1) ** 2).mean().item() for batch in (plain, small)]
    assert roughness[1] < 0.6 * roughness[0]


def test_readers_leave_signals_to_the_training_process(monkeypatch: pytest.MonkeyPatch) -> None:
    handled = {}
    monkeypatch.setattr("signal.signal", lambda number, handler: handled.update({number: handler}))
    leave_signals_to_parent(0)
    assert handled == dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), signal.SIG_IGN)


def failing(_image: Tensor, _seed: int) -> Tensor:
    raise RuntimeError("a bug")


def test_readers_end_with_an_error_and_with_a_loop_that_is_left(picture_shards: ShardSet) -> None:
    """Readers ignore SIGTERM: one that is left over would keep a program that crashed from ending, for ever."""
    order = SampleOrder(picture_shards.first_sample, 0, 16)
    config = dataclasses.replace(CONFIG, num_workers=1)

    def loader(augment: Augment | None) -> BatchLoader:
        return BatchLoader(picture_shards, config, BatchPlan(4, 1, 1, 0), order, (16, 16), 3, 0, 50, augment=augment)

    with pytest.raises(RuntimeError, match="a bug") as caught:
        list(loader(failing))
    assert caught.tb is not None  # it holds every frame, as at the end of a program that crashed
    assert multiprocessing.active_children() == []

    batches = WaitClock().watch(iter(loader(None)))
    next(batches)
    assert len(multiprocessing.active_children()) == 1
    batches.close()
    assert multiprocessing.active_children() == []


# --------------------------------------------------------------------------------------------------------------------
# Several sources, and sources elsewhere


def united(folder: Path) -> str:
    """Two data sets, of 30 and 12 pictures, as one source."""
    for name, count in (("many", 30), ("few", 12)):
        write_pictures(folder / name, count, size=(6, 6))
        write_shards(list_images(folder / name), folder / f"{name}-shards", samples_per_shard=5, num_workers=0)
    return f"{folder}/many-shards::{folder}/few-shards"


def read_indices(shards: ShardSet, config: DataConfig, stop_step: int) -> Tensor:
    order = build_order(shards, config, 0)
    batches = BatchLoader(shards, config, BatchPlan(6, 1, 1, 0), order, (8, 8), 3, 0, stop_step)
    return torch.cat([batch.indices for batch in batches])


def test_without_weights_every_sample_of_every_source_comes_once(tmp_path: Path) -> None:
    shards = open_source(united(tmp_path), CONFIG)
    assert sorted(read_indices(shards, CONFIG, 7).tolist()) == list(range(42))


def test_weights_set_the_share_of_each_source(tmp_path: Path) -> None:
    source = united(tmp_path)
    config = dataclasses.replace(CONFIG, weights=(1.0, 3.0))
    indices = read_indices(open_source(source, config), config, 500)
    of_few = indices >= 30
    assert of_few.float().mean().item() == pytest.approx(0.75, abs=1e-6)
    counts = torch.bincount(indices[of_few] - 30)
    assert counts.max() - counts.min() <= 1  # without replacement within its own epochs
    for weights, message in (((1.0,), "1 numbers for 2 source"), ((1.0, -1.0), "above 0")):
        with pytest.raises(DataError, match=message):
            build_order(open_source(source, config), dataclasses.replace(config, weights=weights), 0)


def test_shards_from_elsewhere_are_asked_for_ahead_of_their_first_sample(
    picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shard that is read was asked for in an earlier step, or in the first."""
    asked: list[list[int]] = []
    read: list[tuple[int, int]] = []  # shard, and how many requests there were by then

    class Recorder(ShardReader):
        def prefetch(self, indices: Sequence[int] | np.ndarray) -> None:
            asked.append(self.shards.shard_numbers(indices).tolist())

        def read(self, index: int) -> Sample:
            read.append((self.shards.locate(index).shard_number, len(asked)))
            return super().read(index)

    monkeypatch.setattr("data.loader.ShardReader", Recorder)
    monkeypatch.setattr("data.loader.LOOK_AHEAD", 8)
    elsewhere = dataclasses.replace(picture_shards, cache=shard_cache(tmp_path))
    load(elsewhere, BatchPlan(4, 1, 1, 0), 0, 12)
    assert len(asked) == 6
    for shard, num_asked in read:
        assert shard in {number for request in asked[:num_asked] for number in request}
    ahead = [(shard, num_asked) for shard, num_asked in read if num_asked > 1]
    assert all(shard in {number for request in asked[: num_asked - 1] for number in request} for shard, num_asked in ahead)
    asked.clear()
    load(picture_shards, BatchPlan(4, 1, 1, 0), 0, 3)  # what lies here is not asked for
    assert not asked


def test_a_reader_holds_no_more_memory_the_longer_it_reads(picture_shards: ShardSet) -> None:
    """Over thirty epochs; descriptors neither."""
    config = dataclasses.replace(CONFIG, num_workers=1, lanes=2, shuffle_window=32)
    order = build_order(picture_shards, config, 0)
    others = set(psutil.Process().children())
    with contextlib.closing(
        iter(BatchLoader(picture_shards, config, BatchPlan(16, 1, 1, 0), order, (8, 8), 3, 0, 1000))
    ) as batches:
        for _ in itertools.islice(batches, 30):
            pass
        (reader,) = set(psutil.Process().children()) - others
        held, num_open = reader.memory_info().rss, reader.num_fds()
        for _ in itertools.islice(batches, 120):
            pass
        assert reader.memory_info().rss - held < 4 * 2**20
        assert reader.num_fds() <= num_open + 8  # all six shards may be open now, and were not then


def test_pictures_of_shards_from_elsewhere_wait_for_one_shard(
    picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    class Recorder(ShardReader):
        def read(self, index: int) -> Sample:
            read.append(self.shards.locate(index).shard_number)
            return super().read(index)

    monkeypatch.setattr("data.loader.ShardReader", Recorder)
    for shards, expected in ((picture_shards, 4), (dataclasses.replace(picture_shards, cache=shard_cache(tmp_path)), 1)):
        read.clear()
        assert preview_images(shards, (8, 8), 3, 4, 2**20).shape == (4, 3, 8, 8)
        assert len(set(read)) == expected

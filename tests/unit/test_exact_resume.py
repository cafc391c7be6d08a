"""A run that stops and goes on, on whatever number of processes and workers, reads what an uninterrupted run reads."""

import dataclasses
import hashlib
import multiprocessing
from typing import NamedTuple

import pytest

import data.loader
from data.config import DataConfig
from data.loader import BatchLoader
from data.reader import ShardReader
from data.shards import ShardSet, open_shards
from data.stream import BatchPlan, SampleOrder
from data.writer import list_images, write_shards
from tests.conftest import write_pictures

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on machines of one or two cores

NUM_SAMPLES, GLOBAL_BATCH = 300, 24
CONFIG = DataConfig(num_workers=0, shuffle_window=128, lanes=2, views_per_image=2)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    folder = tmp_path_factory.mktemp("many")
    write_pictures(folder / "source", NUM_SAMPLES, size=(10, 8))
    write_shards(list_images(folder / "source"), folder / "shards", samples_per_shard=70, num_workers=0)
    return open_shards(folder / "shards")


class View(NamedTuple):
    """One image as a model sees it."""

    key: str
    crop: str
    mask_seed: int


class Launch(NamedTuple):
    world_size: int
    num_workers: int


def read(shards: ShardSet, launch: Launch, start: int, stop: int, config: DataConfig = CONFIG) -> list[list[View]]:
    """The global batch of every step, sorted: what the processes of a launch feed their models together."""
    steps: list[list[View]] = [[] for _ in range(stop - start)]
    config = dataclasses.replace(config, num_workers=launch.num_workers)
    order = SampleOrder(shards.first_sample, 3, config.shuffle_window, config.lanes)
    with ShardReader(shards) as reader:
        for rank in range(launch.world_size):
            plan = BatchPlan(GLOBAL_BATCH // launch.world_size, 1, launch.world_size, rank, config.views_per_image)
            batches = list(BatchLoader(shards, config, plan, order, (8, 8), 3, start, stop))
            assert len(batches) == stop - start
            for step, batch in zip(steps, batches, strict=True):
                crops = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in batch.images]
                keys = [reader.read(index).key for index in batch.indices.tolist()]
                step.extend(map(View, keys, crops, batch.seeds.tolist()))
    return [sorted(step) for step in steps]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Launch(4, 0), Launch(2, 1)),
        (Launch(2, 3), Launch(4, 0)),
        (Launch(1, 1), Launch(4, 1)),
        (Launch(1, 0), Launch(1, 3)),
    ],
)
def test_another_number_of_processes_and_workers_goes_on_in_mid_epoch(shards: ShardSet, first: Launch, second: Launch) -> None:
    """The run stops in its second epoch, which the batches do not divide: the edge lies inside a batch."""
    straight = read(shards, Launch(1, 0), 0, 40)
    assert read(shards, first, 20, 33) + read(shards, second, 33, 40) == straight[20:]
    assert len({view.mask_seed for step in straight for view in step}) == 40 * GLOBAL_BATCH


def test_every_view_of_an_image_is_another_crop_of_it(shards: ShardSet) -> None:
    steps = read(shards, Launch(1, 0), 0, 25)  # 600 views, two of each image
    views = [view for step in steps for view in step]
    assert len({view.key for view in views}) == NUM_SAMPLES
    assert len({(view.key, view.crop) for view in views}) > 1.9 * NUM_SAMPLES
    alone = dataclasses.replace(CONFIG, views_per_image=1)
    once = [view for step in read(shards, Launch(1, 0), 0, 12, alone) for view in step]
    assert set(once) <= set(views)  # the first view is the one that a run of single views sees


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_decodes_just_what_it_delivers(
    shards: ShardSet, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 90 % of the first epoch to the end of the run: nothing before the position is read, nothing after the end."""
    decode, count = data.loader.random_crops, multiprocessing.Value("i", 0)

    def counting(*arguments: object, **options: object) -> object:
        with count.get_lock():
            count.value += 1
        return decode(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(data.loader, "random_crops", counting)
    images_per_step = GLOBAL_BATCH // CONFIG.views_per_image
    start = round(0.9 * NUM_SAMPLES / images_per_step)
    delivered = read(shards, Launch(1, num_workers), start, start + 5)
    assert sum(map(len, delivered)) == 5 * GLOBAL_BATCH
    assert count.value == 5 * images_per_step


def test_views_must_fill_the_batch() -> None:
    with pytest.raises(ValueError, match=r"multiple of data\.views_per_image, 3, not 64"):
        DataConfig(views_per_image=3)

import math
import subprocess
import sys

import pytest
import torch

from data.config import DataConfig
from data.errors import DataError
from data.shards import ShardSet
from data.throughput import Measurement, Stage, measure_loader, measure_stages, workers_needed

CONFIG = DataConfig(num_workers=0, batch_size_per_process=8, prefetch_batches=1)


@pytest.mark.parametrize("views", [1, 2])
def test_every_stage_is_timed_on_the_same_images(picture_shards: ShardSet, views: int) -> None:
    config = DataConfig(num_workers=0, batch_size_per_process=8, views_per_image=views)
    threads = torch.get_num_threads()
    measured = measure_stages(picture_shards, config, (16, 16), 3, seconds=1e-6)
    assert torch.get_num_threads() == threads
    assert [stage.name for stage in measured.stages] == ["read", "decode and crop", "collate"]
    assert [stage.images for stage in measured.stages] == [8, 8, 8]  # one batch, whatever the time
    assert measured.whole_decode.images == 8 // views
    assert measured.num_faults == 0
    assert measured.mean_bytes == pytest.approx(1500, rel=0.1)  # 24 x 20 random colours: PNG can not compress them
    assert 0 < measured.rate < min(stage.rate for stage in measured.stages)


def test_longer_measurements_see_more_images(picture_shards: ShardSet) -> None:
    assert measure_stages(picture_shards, CONFIG, (16, 16), 3, seconds=0.3).stages[0].images > 8


def test_bad_samples_are_counted_not_hidden(picture_shards: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of pixels below every image: nothing can be read, which is said as in training."""
    config = DataConfig(num_workers=0, batch_size_per_process=8, max_pixels=24 * 20 - 1)
    with pytest.raises(DataError, match="in a row"):
        measure_stages(picture_shards, config, (16, 16), 3, seconds=0.1)


def test_workers_follow_from_the_time_of_all_stages() -> None:
    measured = Measurement(
        [Stage("read", 100, 0.1), Stage("decode and crop", 100, 0.8), Stage("collate", 100, 0.1)], Stage("", 1, 1), 1000.0, 0
    )
    assert measured.rate == pytest.approx(100)
    assert [workers_needed(measured, rate) for rate in (50, 100, 101, 1000)] == [1, 1, 2, 10]
    for rate in (0, -1, math.nan):
        with pytest.raises(DataError, match="above 0"):
            workers_needed(measured, rate)


def test_the_loader_is_timed_with_and_without_readers(picture_shards: ShardSet) -> None:
    for num_workers in (0, 2):
        assert measure_loader(picture_shards, CONFIG, (16, 16), 3, num_workers, seconds=0.05) > 0


def test_the_command_says_how_many_readers_feed_a_training(picture_shards: ShardSet) -> None:
    command = [
        sys.executable, "scripts/measure_throughput.py", "--data.train", str(picture_shards.root), "--seconds", "0.1",
        "--images_per_second", "1e6", "--img_size", "16", "16", "--workers", "1", "--data.batch_size_per_process", "8",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for expected in ("read ", "decode and crop", "collate", "1,000,000 images/s need", "1 reader process", "MB/s"):
        assert expected in done.stdout, done.stdout
    done = subprocess.run([*command[:2], "--data.train", "nowhere"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "nowhere does not exist" in done.stderr
    assert "Traceback" not in done.stderr

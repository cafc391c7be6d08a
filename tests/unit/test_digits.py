"""data/digits.py: the data set that is always there."""

import io
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from data.digits import digits_shards
from data.errors import DataError
from data.reader import ShardReader
from data.shards import open_shards


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAE_VIT_CACHE", str(cache))


@pytest.mark.parametrize(
    ("part", "span", "num_shards"),
    [("digits", (0, 1797), 4), ("digits-train", (0, 1437), 4), ("digits-test", (1437, 1797), 1)],
)
def test_digits_are_scikit_learns(cache: Path, part: str, span: tuple[int, int], num_shards: int) -> None:
    folder = digits_shards(part)
    assert folder == cache / f"{part}-v1"
    shards = open_shards(folder)
    assert shards.manifest.class_names == tuple("0123456789")
    assert shards.manifest.num_channels == 1
    assert len(shards.manifest.shards) == num_shards
    found = []
    with ShardReader(shards) as reader:
        for index in range(len(shards)):
            sample = reader.read(index)
            pixels = np.asarray(Image.open(io.BytesIO(sample.data)))
            found.append((sample.label, *pixels.reshape(-1).tolist()))
    pixels, labels = load_digits(return_X_y=True)
    scaled = np.floor(pixels * 255 / 16 + 0.5).astype(int)
    assert scaled.max() == 255
    expected = [(int(label), *row) for label, row in zip(labels, scaled.tolist(), strict=True)]
    assert sorted(found) == sorted(expected[slice(*span)])


def test_second_call_writes_nothing(cache: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in digits_shards().iterdir()}
    assert {path: path.stat().st_mtime_ns for path in digits_shards().iterdir()} == before


def test_processes_that_start_together_share_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path / "new" / "cache"))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        folders = {future.result() for future in [pool.submit(digits_shards) for _ in range(2)]}
    assert folders == {tmp_path / "new" / "cache" / "digits-v1"}
    assert len(open_shards(folders.pop())) == 1797
    assert [path.name for path in (tmp_path / "new" / "cache").iterdir()] == ["digits-v1"]


def test_losing_the_race_uses_the_winners_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    winner = digits_shards()
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path))
    real_rename = Path.rename

    def rename_after_another(self: Path, target: Path) -> Path:
        target.mkdir()
        for file in winner.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return real_rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_after_another)
    assert digits_shards() == tmp_path / "digits-v1"
    assert [path.name for path in tmp_path.iterdir()] == ["digits-v1"]


def test_damaged_cache_says_what_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path))
    (tmp_path / "digits-v1").mkdir()
    with pytest.raises(DataError, match=f"delete {tmp_path / 'digits-v1'}"):
        digits_shards()


def test_cache_that_can_not_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="can not be written"):
        digits_shards()


def test_cache_folder_follows_the_environment(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits_shards()
    monkeypatch.delenv("MAE_VIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "mae-vit").symlink_to(cache)
    assert digits_shards() == tmp_path / "mae-vit" / "digits-v1"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    (tmp_path / "home" / ".cache" / "mae-vit").symlink_to(cache)
    assert digits_shards() == tmp_path / "home" / ".cache" / "mae-vit" / "digits-v1"

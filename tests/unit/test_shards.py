"""data/shards.py: manifest, index, and reading samples by number."""

import dataclasses
import io
import json
import os
import pickle
import shutil
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.errors import DataError
from data.indexing import index_tars
from data.reader import ShardReader
from data.shards import (
    INDEX_NAME,
    MANIFEST_NAME,
    NO_LABEL,
    SAMPLE_DTYPE,
    Manifest,
    describe_manifest,
    open_shards,
    split_name,
)
from data.writer import list_images, write_shards
from tests.shard_files import image_bytes, make_tar

NUM_IMAGES, NUM_CLASSES = 23, 3


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 labelled images in 5 shards; the colour of image n is (n, label, 0)."""
    source = tmp_path_factory.mktemp("source")
    for number in range(NUM_IMAGES):
        label = number % NUM_CLASSES
        folder = source / f"class{label}"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), (number, label, 0)).save(folder / f"{number}.png")
    output = tmp_path_factory.mktemp("shards") / "made"
    write_shards(list_images(source), output, samples_per_shard=5)
    return output


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def rewrite_manifest(folder: Path, **changes: object) -> None:
    fields = json.loads((folder / MANIFEST_NAME).read_text()) | changes
    (folder / MANIFEST_NAME).write_text(json.dumps(fields))


def test_every_sample_is_where_the_index_says(written: Path) -> None:
    shards = open_shards(written)
    assert len(shards) == NUM_IMAGES
    assert shards.first_sample.tolist() == [0, 5, 10, 15, 20, 23]
    assert shards.first_sample.dtype == np.int64
    seen = set()
    with ShardReader(shards) as reader:
        for index in range(len(shards)):
            sample = reader.read(index)
            location = shards.locate(index)
            whole = (written / sample.shard).read_bytes()
            assert sample.data == whole[location.offset : location.offset + location.size]
            assert sample.shard == f"{index // 5:06d}.tar"
            assert sample.key == f"{index:09d}"
            assert sample.index == index
            colour = Image.open(io.BytesIO(sample.data)).getpixel((0, 0))
            assert isinstance(colour, tuple)
            assert colour[1] == sample.label == shards.labels[index] == location.label
            seen.add(colour[0])
    assert seen == set(range(NUM_IMAGES))


@pytest.mark.parametrize("index", [-1, NUM_IMAGES])
def test_numbers_beyond_the_data_set_are_refused(written: Path, index: int) -> None:
    with pytest.raises(IndexError, match=str(NUM_IMAGES)):
        open_shards(written).locate(index)


def test_index_is_mapped_not_read(written: Path) -> None:
    shards = open_shards(written / MANIFEST_NAME)
    rows = shards.rows_of(shards.pieces[0])
    assert isinstance(rows, np.memmap)
    assert rows.dtype == SAMPLE_DTYPE
    assert isinstance(shards.labels, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = (0, 0, 0)


def test_manifest_round_trip(written: Path) -> None:
    text = (written / MANIFEST_NAME).read_text()
    manifest = Manifest.load(written / MANIFEST_NAME)
    assert manifest.to_json() == text
    assert manifest.class_names == ("class0", "class1", "class2")
    assert manifest.shards[0].suffixes == ("cls", "json", "png")
    assert json.loads(text)["hash"] == manifest.hash


def test_hash_identifies_the_data_set(written: Path) -> None:
    manifest = Manifest.load(written / MANIFEST_NAME)
    for change in ({"index_sha256": "0"}, {"class_names": ()}, {"shards": manifest.shards[::-1]}, {"mean": (0.5,)}):
        assert dataclasses.replace(manifest, **change).hash != manifest.hash
    assert dataclasses.replace(manifest).hash == manifest.hash


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"format": "other"}, "'other'"),
        ({"num_samples": 24}, "changed after it was written"),
        ({"hash": "0" * 64}, "changed after it was written"),
        ({"surprise": 1}, "surprise"),
        ({"shards": [{"name": "000000.tar"}]}, "num_bytes"),
        ({"shards": [5]}, "damaged"),
    ],
)
def test_wrong_manifests_are_refused_by_name(folder: Path, changes: dict[str, object], message: str) -> None:
    rewrite_manifest(folder, **changes)
    with pytest.raises(DataError, match=message) as caught:
        open_shards(folder)
    assert str(folder / MANIFEST_NAME) in str(caught.value)


@pytest.mark.parametrize("field", ["num_samples", "class_names", "index_sha256", "shards", "hash", "version"])
def test_manifest_without_a_field_is_refused(folder: Path, field: str) -> None:
    fields = json.loads((folder / MANIFEST_NAME).read_text())
    del fields[field]
    (folder / MANIFEST_NAME).write_text(json.dumps(fields))
    with pytest.raises(DataError, match="index_shards"):
        open_shards(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_manifest_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / MANIFEST_NAME).write_text(text)
    with pytest.raises(DataError, match="manifest"):
        open_shards(folder)


def test_folders_that_are_no_data_set_name_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_shards(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is empty"):
        open_shards(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match="neither"):
        open_shards(tmp_path)
    with pytest.raises(DataError, match="is a file"):
        open_shards(tmp_path / "notes.txt")
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "a.JPG").touch()
    with pytest.raises(DataError, match=f"make_shards.py --source {tmp_path} --output"):
        open_shards(tmp_path)
    (tmp_path / "0.tar").touch()
    with pytest.raises(DataError, match=f"index_shards.py {tmp_path}"):
        open_shards(tmp_path)


def test_missing_and_changed_shards_are_found_at_the_start(folder: Path) -> None:
    shard = folder / "000002.tar"
    with shard.open("ab") as file:
        file.write(bytes(512))
    with pytest.raises(DataError, match=r"000002\.tar has .*index_shards"):
        open_shards(folder)
    shard.unlink()
    with pytest.raises(DataError, match=r"000002\.tar is missing"):
        open_shards(folder)


def test_wrong_index_is_found_at_the_start(folder: Path) -> None:
    index = np.load(folder / INDEX_NAME)
    for wrong in (index[:-1], index["offset"]):
        np.save(folder / INDEX_NAME, wrong)
        with pytest.raises(DataError, match="does not fit"):
            open_shards(folder)
    for field, value in (("offset", 2**63), ("size", 10**9)):
        beyond = index.copy()
        beyond[field][3] = value
        np.save(folder / INDEX_NAME, beyond)
        with pytest.raises(DataError, match="points outside its shards"):
            open_shards(folder)
    (folder / INDEX_NAME).write_bytes(b"no array")
    with pytest.raises(DataError, match="index_shards"):
        open_shards(folder)
    (folder / INDEX_NAME).unlink()
    with pytest.raises(DataError, match="index_shards"):
        open_shards(folder)


@pytest.mark.parametrize("where", ["header", "size"])
def test_reader_refuses_a_shard_that_was_changed_after_indexing(folder: Path, where: str) -> None:
    shards = open_shards(folder)
    location = shards.locate(6)
    if where == "header":
        with (folder / "000001.tar").open("r+b") as file:
            file.seek(location.offset - 512)
            file.write(b"x")
    else:
        index = np.load(folder / INDEX_NAME)
        index[6]["size"] += 1
        np.save(folder / INDEX_NAME, index)
        shards = open_shards(folder)
    with ShardReader(shards) as reader:
        reader.read(5)
        with pytest.raises(DataError, match=r"000001\.tar was changed .*sample 6 .*index_shards"):
            reader.read(6)


def test_reader_refuses_a_shard_that_was_cut_or_removed_while_it_trains(folder: Path) -> None:
    shards = open_shards(folder)
    os.truncate(folder / "000004.tar", shards.locate(20).offset + 5)
    (folder / "000000.tar").unlink()
    with ShardReader(shards) as reader:
        with pytest.raises(DataError, match=r"000004.tar"):
            reader.read(20)
        with pytest.raises(DataError, match=r"000004.tar"):
            reader.read(22)
        with pytest.raises(DataError, match=r"000000.tar can not be opened"):
            reader.read(0)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path would list names that are gone by then


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_reader_keeps_few_shards_open_and_closes_them(written: Path) -> None:
    shards = open_shards(written)  # its index stays mapped
    before = open_descriptors()
    with ShardReader(shards, max_open=2) as reader:
        for index in [0, 5, 10, 15, 20, 1, 6, 22, 3]:
            assert reader.read(index).key == f"{index:09d}"
            assert open_descriptors() <= before + 2
        assert open_descriptors() == before + 2
    assert open_descriptors() == before


def test_reader_closes_the_shard_unused_for_longest(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, flags: opened.append(Path(path).name) or real_open(path, flags))
    with ShardReader(open_shards(written), max_open=2) as reader:
        for index in [0, 5, 0, 10, 0, 5]:
            reader.read(index)
    assert opened == ["000000.tar", "000001.tar", "000002.tar", "000001.tar"]


_in_child: list[ShardReader] = []


def _keep(reader: ShardReader) -> None:
    _in_child.append(reader)


def _read_in_child() -> tuple[str, bool, int]:
    reader = _in_child[0]
    return reader.read(12).key, isinstance(reader.shards.labels, np.memmap), len(reader._descriptors)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_reader_opens_its_own_descriptors_in_each_process(written: Path, method: str) -> None:
    with ShardReader(open_shards(written)) as reader:
        for index in (0, 5, 10):
            reader.read(index)
        with get_context(method).Pool(1, _keep, (reader,)) as pool:
            assert pool.apply(_read_in_child) == ("000000012", True, 1)
        assert reader.read(0).key == "000000000"
        assert len(reader._descriptors) == 3


def test_pickle_is_cheap_and_whole(written: Path) -> None:
    shards = open_shards(written)
    size = len(pickle.dumps(dataclasses.replace(shards)))
    assert len(shards.labels) == shards.first_sample[-1]  # both are cached now
    assert len(pickle.dumps(shards)) == size
    assert size < 4000
    again = pickle.loads(pickle.dumps(shards))
    assert again.manifest.hash == shards.manifest.hash
    assert again.locate(22) == shards.locate(22)


def test_unlabelled_samples_have_no_label(tmp_path: Path) -> None:
    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    write_shards(list_images(tmp_path), tmp_path / "out")
    assert open_shards(tmp_path / "out").labels.tolist() == [NO_LABEL]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("000.jpg", ("000", "jpg")),
        ("a.b/c.left.JPG", ("a.b/c", "left.jpg")),
        ("./x.cls", ("./x", "cls")),
        ("plain", ("plain", "")),
    ],
)
def test_split_name_follows_webdataset(name: str, parts: tuple[str, str]) -> None:
    assert split_name(name) == parts


def test_description_says_what_is_there_and_how_to_train_on_it(written: Path) -> None:
    manifest = open_shards(written).manifest
    colour = describe_manifest(Path("shards/a"), dataclasses.replace(manifest, num_channels=3))
    assert colour[-1] == "next: accelerate launch pretrain/main.py --data.train shards/a --output_dir runs/a"
    many = describe_manifest(Path("a"), dataclasses.replace(manifest, num_channels=5, mean=(0.1,) * 5, std=(0.2,) * 5))
    assert "--model.in_chans 5" in many[-1]
    assert "height x width x channels" in many[1]
    mixed = describe_manifest(Path("a"), dataclasses.replace(manifest, num_channels=None, mean=(), std=()))
    assert mixed[1].startswith("warning: the images have different numbers of channels")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_thousand_shards_leave_no_descriptor(tmp_path: Path) -> None:
    """Few stay open at a time, and none in the end."""
    index_tars([make_tar(tmp_path / f"{number:03d}.tar", [("0.png", image_bytes())]) for number in range(1000)], tmp_path)
    shards = open_shards(tmp_path)  # its index stays mapped
    before = open_descriptors()
    with ShardReader(shards, max_open=40) as reader:
        for index in range(1000):
            assert reader.read(index).data == image_bytes()
            assert open_descriptors() <= before + 41
    assert open_descriptors() <= before

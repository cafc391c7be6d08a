"""data/indexing.py: describing shards, those of other tools above all."""

import errno
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from webdataset.writer import ShardWriter

from data import indexing
from data.errors import DataError
from data.indexing import index_tars, map_tasks
from data.shards import INDEX_NAME, MANIFEST_NAME, open_shards
from data.writer import list_images, write_shards
from tests.shard_files import contents, image_bytes, make_files, make_tar, read_all

PNG = image_bytes()


def test_webdataset_writer_is_understood(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "%03d.tar"), maxcount=4, verbose=0) as shard_writer:
        for number in range(10):
            shard_writer.write({"__key__": f"k{number}", "png": image_bytes(number), "cls": number % 3})
    paths = sorted(tmp_path.glob("*.tar"))
    manifest = index_tars(paths, tmp_path, class_names=("a", "b", "c"))
    assert [shard.num_samples for shard in manifest.shards] == [4, 4, 2]
    assert manifest.class_names == ("a", "b", "c")
    assert manifest.num_channels == 1
    assert read_all(tmp_path) == [(f"k{number}", number % 3, image_bytes(number)) for number in range(10)]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_dialects_and_long_names(tmp_path: Path, tar_format: int) -> None:
    folder = "./" + "long" * 22
    members = [(f"{folder}/{number}-\u00fc.png", image_bytes(number)) for number in range(3)]
    index_tars([make_tar(tmp_path / "a.tar", members, tar_format)], tmp_path)
    assert [data for _, _, data in read_all(tmp_path)] == [content for _, content in members]


def test_very_long_names_of_gnu_and_pax(tmp_path: Path) -> None:
    for number, tar_format in enumerate([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]):
        make_tar(tmp_path / f"{number}.tar", [("x" * 300 + f"{n}.png", image_bytes(n)) for n in range(2)], tar_format)
    index_tars(sorted(tmp_path.glob("*.tar")), tmp_path)
    assert [data for _, _, data in read_all(tmp_path)] == [image_bytes(0), image_bytes(1)] * 2


def test_labels_come_from_cls_then_from_json(tmp_path: Path) -> None:
    members = [
        ("0.png", PNG), ("0.cls", b" 7\n"), ("0.json", b'{"label": 1}'),
        ("1.json", b'{"label": 2, "caption": "x"}'), ("1.png", PNG), ("1.txt", b"x"),
        ("2.png", PNG), ("2.json", b'{"label": "cat"}'),
        ("3.png", PNG), ("3.json", b'{"label": true}'),
        ("4.png", PNG), ("4.json", b"[1]"),
        ("5.PNG", PNG),
    ]  # fmt: skip
    manifest = index_tars([make_tar(tmp_path / "a.tar", members)], tmp_path)
    assert open_shards(tmp_path).labels.tolist() == [7, 2, -1, -1, -1, -1]
    assert manifest.shards[0].suffixes == ("cls", "json", "png", "txt")


def test_hidden_members_folders_and_members_without_suffix_are_passed_over(tmp_path: Path) -> None:
    make_tar(tmp_path / "a.tar", [("d/._0.png", b"mac"), ("README", b"x"), ("d/0.png", PNG), ("d/0.cls", b"1")])
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        folder = tarfile.TarInfo("d/deep.er")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    index_tars([tmp_path / "a.tar"], tmp_path)
    assert read_all(tmp_path) == [("d/0", 1, PNG)]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("0.png", PNG), ("1.cls", b"1"), ("2.png", PNG)], r"sample '1': of its members \['cls'\], none are images"),
        ([("0.left.jpg", PNG)], "none are images"),
        ([("0.png", PNG), ("0.jpg", PNG)], r"\['jpg', 'png'\] are images"),
        ([("0.png", PNG), ("0.png", PNG)], "sample '0': the key comes twice"),
        ([("0.png", PNG), ("1.png", PNG), ("0.cls", b"1"), ("1.cls", b"1")], "sample '0': the key comes twice"),
        ([("0.JPG", PNG), ("0.jpg", PNG)], "sample '0': the key comes twice"),
        ([("a.1.png", PNG), ("a.2.png", PNG)], "sample 'a'.*none are images"),
        ([("0.png", PNG), ("0.cls", b"cat")], "sample '0': no label .* b'cat'"),
        ([("0.png", PNG), ("0.cls", b"\xff")], "sample '0': no label"),
        ([("0.png", PNG), ("0.json", b"{")], "sample '0': no label"),
        ([("0.png", PNG), ("0.cls", b"2")], "sample '0': label 2 is no number of a class; there are 2 class names"),
        ([("0.png", PNG), ("0.cls", b"-2")], "label -2"),
        ([], "hold no samples"),
    ],
)
def test_samples_that_can_not_be_told_apart_are_refused(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    path = make_tar(tmp_path / "bad.tar", members)
    with pytest.raises(DataError, match=message) as caught:
        index_tars([path], tmp_path, class_names=("a", "b"))
    assert str(path) in str(caught.value) or "hold no samples" in str(caught.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bad.tar"]


def test_a_label_that_is_no_number_of_any_class_is_refused(tmp_path: Path) -> None:
    """More digits than a row of the index has room for."""
    path = make_tar(tmp_path / "bad.tar", [("0.png", PNG), ("0.cls", b"9" * 30)])
    with pytest.raises(DataError, match=r"label 9+ is no number of a class; classes are 0"):
        index_tars([path], tmp_path)


# Two samples of one block of header and one block of data each, then the mark of the end, filled up to 10240 bytes.
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda tar: b"",
    "compressed": lambda tar: b"\x1f\x8b\x08" + tar,
    "cut in a header": lambda tar: tar[:1100],
    "cut in the data": lambda tar: tar[:1540],
    "cut between members": lambda tar: tar[:1024],
    "no end": lambda tar: tar[:2048],
    "damaged header": lambda tar: tar[:1024] + b"\xff" * 100 + tar[1124:],
    "zeros within": lambda tar: tar[:1024] + bytes(512) + tar[1024:],
    "two in a row": lambda tar: tar + tar,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tars_are_refused(tmp_path: Path, damage: str) -> None:
    whole = make_tar(tmp_path / "a.tar", [("0.png", PNG), ("1.png", PNG)]).read_bytes()
    (tmp_path / "a.tar").write_bytes(DAMAGES[damage](whole))
    with pytest.raises(DataError, match=r"a\.tar"):
        index_tars([tmp_path / "a.tar"], tmp_path)


def test_wrong_paths_are_refused(tmp_path: Path) -> None:
    make_tar(tmp_path / "a.tar", [("0.png", PNG)])
    with pytest.raises(DataError, match="no tar shards"):
        index_tars([], tmp_path)
    with pytest.raises(DataError, match="does not lie in"):
        index_tars([tmp_path / "a.tar"], tmp_path / "other")
    with pytest.raises(DataError, match="does not exist"):
        index_tars([tmp_path / "b.tar"], tmp_path)


def test_index_of_our_own_shards_is_the_one_they_came_with(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [f"c{number % 2}/{number}.png" for number in range(7)])
    made = write_shards(list_images(source), tmp_path / "out", samples_per_shard=3).manifest
    before = contents(tmp_path / "out")
    paths = sorted((tmp_path / "out").glob("*.tar"))
    assert index_tars(paths, tmp_path / "out", class_names=made.class_names, num_workers=2) == made
    assert contents(tmp_path / "out") == before


def test_unreadable_images_do_not_stop_indexing(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", [("0.png", PNG[:40]), ("1.png", image_bytes(51))])
    manifest = index_tars([path], tmp_path)
    assert manifest.num_samples == 2
    assert manifest.mean == pytest.approx([0.2])


def test_measured_images_are_few_and_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    real_measure = indexing.measure_image
    monkeypatch.setattr(indexing, "measure_image", lambda pixels: measured.append(int(pixels.max())) or real_measure(pixels))
    monkeypatch.setattr(indexing, "NUM_MEASURED", 4)
    for shard in range(8):
        make_tar(tmp_path / f"{shard}.tar", [(f"{n}.png", image_bytes(10 * shard + n)) for n in range(3)])
    index_tars(sorted(tmp_path.glob("*.tar")), tmp_path)
    assert [value // 10 for value in measured] == [0, 2, 4, 7]


@pytest.mark.parametrize("name", [INDEX_NAME, MANIFEST_NAME])
def test_a_failed_index_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = make_tar(tmp_path / "a.tar", [("0.png", PNG)])
    index_tars([path], tmp_path)
    before = contents(tmp_path)
    real_replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target.name == name:
            raise OSError(errno.ENOSPC, "No space left")
        return real_replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(DataError, match="No space left"):
        index_tars([path], tmp_path)
    assert contents(tmp_path) == before


def test_a_killed_worker_is_explained() -> None:
    with pytest.raises(DataError, match="fewer num_workers"):
        list(map_tasks(os._exit, [1], num_workers=1))

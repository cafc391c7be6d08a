"""data/sources.py: what a data flag means."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from data import sources
from data.errors import DataError
from data.reader import ShardReader
from data.shards import NO_LABEL, ShardSet
from data.sources import open_dataset
from data.writer import list_images, write_shards
from tests.shard_files import make_files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_files(tmp_path / "photos", ["cat/0.png", "dog/1.png", "dog/2.png"])


def read_all(shards: ShardSet) -> set[tuple[int, bytes]]:
    with ShardReader(shards) as reader:
        return {(sample.label, sample.data) for sample in map(reader.read, range(len(shards)))}


def packs(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "packed").iterdir())


# --------------------------------------------------------------------------------------------------------------------
# The kinds of sources


def test_class_folders_are_opened_with_their_labels(photos: Path) -> None:
    shards = open_dataset(str(photos), labelled=True)
    assert shards.manifest.class_names == ("cat", "dog")
    expected = {(0, photos / "cat" / "0.png"), (1, photos / "dog" / "1.png"), (1, photos / "dog" / "2.png")}
    assert read_all(shards) == {(label, path.read_bytes()) for label, path in expected}


def test_flat_folders_and_mixed_ones_are_opened_without_labels(tmp_path: Path) -> None:
    for name, files in (("flat", ["0.png", "1.png"]), ("mixed", ["0.png", "deep/er/1.png"])):
        shards = open_dataset(str(make_files(tmp_path / name, files)))
        assert shards.labels.tolist() == [NO_LABEL, NO_LABEL]


def test_tables_are_opened_with_and_without_labels(photos: Path) -> None:
    for name, text, labels in (
        ("labels.csv", "path,label\ncat/0.png,x\ndog/1.png,y\n", [0, 1]),
        ("plain.csv", "path\ncat/0.png\n", [NO_LABEL]),
        ("ids.csv", "path,label\ncat/0.png,123456\n", [NO_LABEL]),
    ):
        (photos / name).write_text(text)
        assert sorted(open_dataset(str(photos / name)).labels.tolist()) == labels
    assert len(open_dataset(str(photos / "labels.csv"), labelled=True)) == 2


def test_shards_are_opened_where_they_lie(photos: Path, tmp_path: Path, cache: Path) -> None:
    write_shards(list_images(photos), tmp_path / "shards")
    make_files(tmp_path / "shards", ["preview.png"])
    for source in (tmp_path / "shards", tmp_path / "shards" / "manifest.json"):
        shards = open_dataset(str(source), labelled=True)
        assert shards.root == tmp_path / "shards"
        assert len(shards) == 3
    assert not cache.exists()
    (tmp_path / "shards" / "000000.tar").unlink()
    with pytest.raises(DataError, match=r"000000\.tar is missing, but the manifest lists it"):
        open_dataset(str(tmp_path / "shards"))


@pytest.mark.parametrize(("name", "num_samples"), [("digits", 1797), ("digits-train", 1437), ("digits-test", 360)])
def test_digits_are_opened_by_name(name: str, num_samples: int, cache: Path) -> None:
    shards = open_dataset(name, labelled=True)
    assert shards.root == cache / f"{name}-v1"
    assert len(shards) == num_samples


def test_a_folder_named_like_the_digits_is_meant_by_its_path(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos.parent)
    photos.rename("digits")
    assert len(open_dataset("./digits")) == 3


# --------------------------------------------------------------------------------------------------------------------
# What is refused


def notes(folder: Path) -> Path:
    folder.mkdir()
    (folder / "notes.txt").touch()
    return folder


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: folder / "nowhere", "nowhere does not exist"),
        (lambda folder: (folder / "empty").mkdir() or folder / "empty", "empty is empty"),
        (lambda folder: notes(folder / "text"), "text holds no images: of 1 files"),
        (lambda folder: make_files(folder, ["a.png"]) / "a.png", r"a\.png is one image"),
        (lambda folder: "", "no data was named"),
    ],
)
def test_sources_that_are_no_data_set_say_what_is_accepted(
    tmp_path: Path, cache: Path, make: Callable[[Path], object], problem: str
) -> None:
    source = str(make(tmp_path))
    for labelled in (False, True):
        with pytest.raises(DataError, match=problem) as caught:
            open_dataset(source, labelled=labelled)
        message = str(caught.value)
        assert message.count("expected") == 1
        assert "expected a folder of shards, a folder of images (in class folders" in message
        assert "a CSV table" in message
        assert "digits, digits-train, digits-test" in message
        assert "\n" not in message
    assert not cache.exists()


def test_tars_without_manifest_are_to_be_indexed(tmp_path: Path) -> None:
    folder = make_files(tmp_path / "tars", ["preview.png"])
    (folder / "0.tar").touch()
    with pytest.raises(DataError, match=f"holds tar files but no manifest.json; index them with .*index_shards.py {folder}"):
        open_dataset(str(folder))
    with pytest.raises(DataError, match=f"is one tar file; give its folder, {folder}, .*index_shards.py {folder}"):
        open_dataset(str(folder / "0.tar"))


def test_a_wrong_table_is_told_once_and_for_all(photos: Path) -> None:
    (photos / "table.csv").write_text("path\ngone.png\n")
    with pytest.raises(DataError, match=r"row 1: the file 'gone\.png' does not exist in .*photos$"):
        open_dataset(str(photos / "table.csv"))
    (photos / "table.csv").write_text("")
    with pytest.raises(DataError, match=r"has the columns \[\]; expected a header with `path`, and perhaps `label`$"):
        open_dataset(str(photos / "table.csv"))


def test_sources_that_can_not_be_read_say_why(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos / "table.csv").write_text("path\ncat/0.png\n")

    def refuse(self: Path, *_: object, **__: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    for name, source in (("iterdir", photos), ("open", photos / "table.csv")):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refuse)
            with pytest.raises(DataError, match=f"{source} can not be read: Permission denied; expected a folder"):
                open_dataset(str(source))


def test_where_labels_are_needed_every_sample_needs_one(photos: Path, tmp_path: Path, cache: Path) -> None:
    flat = make_files(tmp_path / "flat", ["0.png", "1.png"])
    (photos / "gaps.csv").write_text("path,label\ncat/0.png,x\ndog/1.png,\n")
    for source, counts in ((flat, "2 of 2"), (photos / "gaps.csv", "1 of 2")):
        with pytest.raises(DataError, match=f"{source}: {counts} samples have no label; .* class folders, .* column label"):
            open_dataset(str(source), labelled=True)
    assert not cache.exists(), "it is refused before anything is packed"
    make_files(photos, ["0.png"])
    with pytest.raises(DataError, match="1 images directly and 3 in folders"):
        open_dataset(str(photos), labelled=True)
    write_shards(list_images(flat), tmp_path / "shards")
    with pytest.raises(DataError, match="2 of 2 samples have no label"):
        open_dataset(str(tmp_path / "shards"), labelled=True)
    assert len(open_dataset(str(tmp_path / "shards"))) == 2


# --------------------------------------------------------------------------------------------------------------------
# Packing


def test_images_are_packed_once(photos: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = open_dataset(str(photos))
    told = capfd.readouterr()
    (folder,) = (cache / "packed").iterdir()
    assert first.root == folder
    assert folder.name.startswith("photos-")
    line, *progress = told.err.splitlines()
    assert f"packing the 3 images of {photos} into {folder}, once" in line
    assert f"`python scripts/make_shards.py --source {photos} --output {photos}-shards`" in line
    assert any("3/3" in bar and "image/s" in bar for bar in progress)
    assert told.out == ""

    before = {path: path.stat().st_mtime_ns for path in (folder.parent, *folder.iterdir())}
    again = open_dataset(str(photos), labelled=True)
    assert again.manifest.hash == first.manifest.hash
    assert {path: path.stat().st_mtime_ns for path in (folder.parent, *folder.iterdir())} == before, "nothing is written"
    assert capfd.readouterr().err == ""
    assert packs(cache) == [folder.name]


@pytest.mark.parametrize("files", [["cat/0.png"], ["0.png", "deep/1.png"]])
def test_the_command_that_is_named_makes_the_same_shards(
    tmp_path: Path, files: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    source = make_files(tmp_path / "a b's", files)
    packed = open_dataset(str(source))
    command = capfd.readouterr().err.split("`")[1].replace("python ", f"{sys.executable} ", 1) + " --num_workers 0"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    made = open_dataset(str(tmp_path / "a b's-shards"))
    assert made.root == tmp_path / "a b's-shards"
    assert made.manifest.hash == packed.manifest.hash


def add(photos: Path) -> None:
    make_files(photos, ["cat/3.png"])


def grow(photos: Path) -> None:
    path = photos / "cat" / "0.png"
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_bytes(path.read_bytes() + b"x")
    os.utime(path, ns=times)


def touch(photos: Path) -> None:
    os.utime(photos / "dog" / "1.png", (1, 1))


def add_class(photos: Path) -> None:
    (photos / "elk").mkdir()


CHANGES: list[Callable[[Path], object]] = [
    add,
    grow,
    touch,
    add_class,
    lambda photos: (photos / "cat" / "0.png").unlink(),
    lambda photos: (photos / "dog" / "1.png").rename(photos / "cat" / "1.png"),
    lambda photos: (photos / "cat").rename(photos / "bird"),
    lambda photos: (photos / "cat" / "0.png").rename(photos / "cat" / "00.png"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_folders_are_packed_anew(photos: Path, cache: Path, change: Callable[[Path], object]) -> None:
    old = open_dataset(str(photos)).root
    change(photos)
    new = open_dataset(str(photos))
    assert new.root != old
    assert read_all(new) == {
        (new.manifest.class_names.index(path.parent.name), path.read_bytes()) for path in photos.rglob("*.png")
    }
    assert len(packs(cache)) == 2


def test_changed_tables_are_packed_anew(photos: Path) -> None:
    roots = set()
    for labels in ("xy", "yx", "xz", "xx"):
        (photos / "table.csv").write_text("path,label\ncat/0.png,{}\ndog/1.png,{}\n".format(*labels))
        roots.add(open_dataset(str(photos / "table.csv")).root)
    assert len(roots) == 4


def test_equal_folders_in_two_places_are_two_and_two_names_of_one_are_one(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_dataset(str(photos)).root
    shutil.copytree(photos, tmp_path / "elsewhere" / "photos")
    assert open_dataset(str(tmp_path / "elsewhere" / "photos")).root != first
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(photos)
    assert open_dataset("photos").root == first
    assert open_dataset("link").root == first


def test_unreadable_and_ignored_files_are_named(photos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (photos / "cat" / "page.jpg").write_bytes(b"<html>")
    (photos / "cat" / "gone.png").symlink_to("nowhere")
    (photos / "notes.txt").touch()
    assert len(open_dataset(str(photos))) == 3
    told = capfd.readouterr().err
    assert "ignored 1 file(s)" in told
    assert "left out 2 unreadable image(s)" in told
    assert "cat/page.jpg: " in told


def test_many_images_are_packed_by_many_processes(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def note(*args: object, num_workers: int, **flags: object) -> object:
        asked.append(num_workers)
        return write_shards(list_images(photos), Path(str(args[1])))

    monkeypatch.setattr(sources, "write_shards", note)
    monkeypatch.setattr(sources, "_num_cores", lambda: 7)
    open_dataset(str(photos))
    monkeypatch.setattr(sources, "NUM_PACKED_ALONE", 2)
    add_class(photos)
    open_dataset(str(photos))
    assert asked == [0, 7]


def test_one_packs_while_the_others_wait(
    photos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    packing, go_on = threading.Event(), threading.Event()
    writers = []

    def slow_write(*args: object, **flags: object) -> object:
        writers.append(threading.current_thread())
        packing.set()
        assert go_on.wait(60)
        return write_shards(list_images(photos), Path(str(args[1])))

    monkeypatch.setattr(sources, "write_shards", slow_write)
    opened: list[ShardSet] = []
    threads = [threading.Thread(target=lambda: opened.append(open_dataset(str(photos)))) for _ in range(3)]
    threads[0].start()
    assert packing.wait(60)
    for rank, thread in enumerate(threads[1:]):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert writers == threads[:1]
    assert {shards.root for shards in opened} == {opened[0].root}
    assert len(opened) == 3
    assert packs(cache) == [opened[0].root.name]
    told = capfd.readouterr().err
    assert told.count("packing the 3 images") == 1
    assert told.count(f"waiting for another process, which packs the images of {photos}") == 1


def test_processes_that_start_together_share_one_pack(photos: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        opened = [future.result() for future in [pool.submit(open_dataset, str(photos)) for _ in range(2)]]
    assert packs(cache) == [opened[0].root.name]
    assert len(read_all(opened[1])) == 3
    assert capfd.readouterr().err.count("packing the 3 images") == 1


@pytest.mark.parametrize("without", ["module", "support"])
def test_without_locks_the_first_to_finish_wins(
    photos: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    if without == "module":
        monkeypatch.setattr(sources, "fcntl", None)
    else:

        def no_locks(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr("data.sources.fcntl.flock", no_locks)
    write_shards(list_images(photos), tmp_path / "winner")
    real_rename = Path.rename

    def rename_after_another(self: Path, target: Path) -> Path:
        shutil.copytree(tmp_path / "winner", target)
        return real_rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_after_another)
    shards = open_dataset(str(photos))
    assert len(shards) == 3
    assert packs(cache) == [shards.root.name]


def test_damaged_packs_say_what_to_delete(photos: Path) -> None:
    folder = open_dataset(str(photos)).root
    Path(str(folder), "000000.tar").unlink()
    with pytest.raises(DataError, match=f"delete {folder}, and it is made again"):
        open_dataset(str(photos))


def test_a_failed_packing_leaves_nothing_and_can_be_tried_again(
    photos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in photos.rglob("*.png"):
        path.write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"none of the 3 images .* is readable"):
        open_dataset(str(photos))
    assert packs(cache) == []
    make_files(photos, ["cat/0.png"])
    assert len(open_dataset(str(photos))) == 1
    monkeypatch.setenv("MAE_VIT_CACHE", str(photos / "cat" / "0.png"))
    with pytest.raises(DataError, match="can not be written"):
        open_dataset(str(photos))


def test_a_disk_without_room_is_told_before_the_work(photos: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(photos)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5000))
    with pytest.raises(DataError, match=r"needs 0\.0 GiB in .* set MAE_VIT_CACHE .*make_shards\.py --source"):
        open_dataset(str(photos))
    assert packs(cache) == []


def test_what_a_killed_program_left_is_removed_after_a_day(photos: Path, cache: Path) -> None:
    for name, age_s in (("killed", 25 * 3600), ("working", 3600)):
        folder = cache / "packed" / f".{name}.partial-7-00000000"
        make_files(folder, ["000000.tar"])
        mtime = folder.stat().st_mtime - age_s
        os.utime(folder, (mtime, mtime))
    (cache / "packed" / ".finished.partial-7-00000000").symlink_to("renamed")  # between the listing and the look at it
    shards = open_dataset(str(photos))
    assert packs(cache) == [".finished.partial-7-00000000", ".working.partial-7-00000000", shards.root.name]


@pytest.mark.parametrize("name", [".photos", "photos.tar", "f\u00f6tos " + "lang" * 60])
def test_folders_may_have_any_name(photos: Path, name: str) -> None:
    folder = open_dataset(str(photos.rename(photos.with_name(name)))).root
    assert folder.name[0] in "pf", "hidden names are those of unfinished work"

"""data/writer.py: listing images and writing shards."""

import errno
import json
import os
import tarfile
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pytest
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from data import writer
from data.decode import decode_image, sniff_suffix
from data.errors import DataError
from data.reader import ShardReader
from data.shards import NO_LABEL, ShardSet, open_shards
from data.writer import ImageFile, list_images, write_shards
from tests.shard_files import contents, image_bytes, make_files, read_all

# --------------------------------------------------------------------------------------------------------------------
# list_images


def test_class_folders_are_numbered_by_name(tmp_path: Path) -> None:
    make_files(tmp_path, ["b/1.png", "a/deeper/2.JPEG", "a/0.png", ".git/x.png", "b/.hidden.png"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "b" / "notes.txt").touch()
    images = list_images(tmp_path)
    assert images.class_names == ("a", "b", "empty")
    assert images.files == [ImageFile("a/0.png", 0), ImageFile("a/deeper/2.JPEG", 0), ImageFile("b/1.png", 1)]
    assert images.num_ignored == 1


def test_flat_folder_and_labelled_false_have_no_labels(tmp_path: Path) -> None:
    flat = list_images(make_files(tmp_path / "flat", ["1.png", "0.png"]))
    assert flat.class_names == ()
    assert flat.files == [ImageFile("0.png", NO_LABEL), ImageFile("1.png", NO_LABEL)]
    tree = list_images(make_files(tmp_path / "tree", ["x.png", "c/y.png"]), labelled=False)
    assert tree.files == [ImageFile("c/y.png", NO_LABEL), ImageFile("x.png", NO_LABEL)]


def test_linked_class_folders_are_followed(tmp_path: Path) -> None:
    make_files(tmp_path / "elsewhere", ["1.png"])
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "cat").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert list_images(tmp_path / "source").files == [ImageFile("cat/1.png", 0)]


def test_folders_that_can_not_be_listed_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="does not exist"):
        list_images(tmp_path / "nowhere")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match="holds no images: of 1 files"):
        list_images(tmp_path)
    make_files(tmp_path, ["x.png", "c/y.png"])
    with pytest.raises(DataError, match="1 images directly and 1 in folders"):
        list_images(tmp_path)

    def refuse(path: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="can not be read: Permission denied"):
        list_images(tmp_path)


def table(folder: Path, text: str) -> Path:
    make_files(folder, ["0.png", "d/1.png", "2.png"])
    (folder / "table.csv").write_text(text, encoding="utf-8")
    return folder / "table.csv"


@pytest.mark.parametrize(
    ("text", "labels", "class_names"),
    [
        ("path\n0.png\nd/1.png\n", [-1, -1], ()),
        ("path,label\n0.png,dog\nd/1.png,cat\n2.png,dog\n", [1, 0, 1], ("cat", "dog")),
        ("\ufefflabel,other,path\n2,x,0.png\n0,y,d/1.png\n", [2, 0], ("0", "1", "2")),
        ("path,label\n0.png,10\nd/1.png,9a\n", [0, 1], ("10", "9a")),
        ("path,label\n0.png,cat\nd/1.png,\n", [0, -1], ("cat",)),
        ('path,label\n"0.png","big, cat"\n', [0], ("big, cat",)),
    ],
)
def test_tables(tmp_path: Path, text: str, labels: list[int], class_names: tuple[str, ...]) -> None:
    images = list_images(table(tmp_path, text))
    assert [file.label for file in images.files] == labels
    assert images.class_names == class_names
    assert all((images.root / file.name).is_file() for file in images.files)
    assert {file.label for file in list_images(tmp_path / "table.csv", labelled=False).files} == {NO_LABEL}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a header with `path`"),
        ("file,label\n0.png,1\n", r"columns \['file', 'label'\]; expected a header with `path`"),
        ("path,label\n", "no rows"),
        ("path\n0.png\ngone.png\n", r"row 2: the file 'gone.png' does not exist"),
        ("label,path\n1\n", "row 1: the file None"),
        ("path,label\n0.png,123456\n", "label 123456 in 1 rows"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list_images(table(tmp_path, text))


def test_table_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes("path\n\xe4.png\n".encode("latin-1"))
    with pytest.raises(DataError, match="can not be read as a CSV"):
        list_images(tmp_path / "table.csv")


# --------------------------------------------------------------------------------------------------------------------
# write_shards


def test_every_image_is_written_once_unchanged_with_label_and_origin(tmp_path: Path) -> None:
    names = [f"class{number % 3}/{number}.png" for number in range(20)]
    source = make_files(tmp_path / "source", names)
    result = write_shards(list_images(source), tmp_path / "out", samples_per_shard=6)
    assert [shard.num_samples for shard in result.manifest.shards] == [6, 6, 6, 2]
    assert result.unreadable == ()
    found = {}
    for number in range(4):
        with (tmp_path / "out" / f"{number:06d}.tar").open("rb") as shard:
            for sample in group_by_keys(tar_file_expander([{"url": shard.name, "stream": shard}])):
                found[json.loads(sample["json"])["path"]] = (sample["png"], int(sample["cls"]))
    assert found == {name: ((source / name).read_bytes(), int(name[5])) for name in names}
    assert sorted((label, data) for _, label, data in read_all(tmp_path / "out")) == sorted(
        (label, data) for data, label in found.values()
    )


def test_images_are_mixed_over_all_shards_by_the_seed(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [f"class{number // 20}/{number:02d}.png" for number in range(40)])
    orders = []
    for seed in (0, 1):
        write_shards(list_images(source), tmp_path / f"out{seed}", samples_per_shard=10, seed=seed)
        labels = open_shards(tmp_path / f"out{seed}").labels.tolist()
        assert all(0 < sum(labels[start : start + 10]) < 10 for start in range(0, 40, 10))
        orders.append(read_all(tmp_path / f"out{seed}"))
    assert orders[0] != orders[1]


def test_same_seed_gives_the_same_bytes_with_any_number_of_workers(tmp_path: Path) -> None:
    images = list_images(make_files(tmp_path / "source", [f"c{number % 2}/{number}.png" for number in range(12)]))
    for number, path in enumerate((tmp_path / "source").rglob("*.png")):
        os.utime(path, (number, number))
        path.chmod(0o600 + number)
    for num_workers in (0, 2):
        write_shards(images, tmp_path / f"{num_workers}", samples_per_shard=5, num_workers=num_workers)
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


def test_suffix_follows_the_content(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "really_a_jpeg.png").write_bytes(image_bytes(0, "JPEG"))
    result = write_shards(list_images(tmp_path / "source"), tmp_path / "out")
    assert result.manifest.shards[0].suffixes == ("jpg", "json")


def test_shards_close_at_the_byte_limit(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(256, size=(600, 600), dtype=np.uint8)  # 0.35 MiB as .npy
    for number in range(7):
        np.save(tmp_path / f"{number}.npy", noise)
    result = write_shards(list_images(tmp_path), tmp_path / "out", max_shard_mib=1)
    assert [shard.num_samples for shard in result.manifest.shards] == [2, 2, 2, 1]


def test_unreadable_images_are_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "NUM_MEASURED", 1)
    source = make_files(tmp_path / "source", [f"{number}.png" for number in range(6)])
    (source / "cut.png").write_bytes(image_bytes()[:45])
    (source / "page.jpg").write_bytes(b"<html>")
    images = list_images(source)
    (source / "3.png").unlink()
    result = write_shards(images, tmp_path / "out", samples_per_shard=1)
    assert {(bad.name, bad.cause) for bad in result.unreadable} == {
        ("cut.png", "truncated"),
        ("page.jpg", "not_an_image"),
        ("3.png", "file"),
    }
    assert result.manifest.num_samples == 5 == len(read_all(tmp_path / "out"))
    assert len(result.manifest.shards) == 5, "a shard with no readable image is not written"
    assert len(list((tmp_path / "out").glob("*.tar"))) == 5


def test_without_verify_what_begins_like_an_image_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "NUM_MEASURED", 1)
    source = make_files(tmp_path / "source", [f"{number}.png" for number in range(6)])
    (source / "cut.png").write_bytes(image_bytes()[:45])
    (source / "page.jpg").write_bytes(b"<html>")
    result = write_shards(list_images(source), tmp_path / "out", verify=False)
    assert [bad.name for bad in result.unreadable] == ["page.jpg"]
    assert result.manifest.num_samples == 7


def test_no_readable_image_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "page.jpg").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"none of the 1 images .* is readable; the first, page\.jpg"):
        write_shards(list_images(tmp_path / "source"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_existing_output_is_refused_and_untouched(tmp_path: Path) -> None:
    images = list_images(make_files(tmp_path / "source", ["0.png"]))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(DataError, match="not an empty folder"):
        write_shards(images, tmp_path / "out")
    assert contents(tmp_path / "out") == {"precious": b"x"}
    (tmp_path / "empty").mkdir()
    write_shards(images, tmp_path / "empty")
    assert len(open_shards(tmp_path / "empty")) == 1
    with pytest.raises(DataError, match="can not be written"):
        write_shards(images, tmp_path / "source" / "0.png" / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bug"), OSError(errno.ENOSPC, "No space left")])
def test_output_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    images = list_images(make_files(tmp_path / "source", [f"{number}.png" for number in range(6)]))
    real_scan = writer.scan_shard

    def fail_at_the_third(path: Path) -> Any:
        if path.name == "000002.tar":
            assert (path.parent / "000000.tar").exists()
            raise error
        return real_scan(path)

    monkeypatch.setattr(writer, "scan_shard", fail_at_the_third)
    with pytest.raises(DataError if isinstance(error, OSError) else type(error)):
        write_shards(images, tmp_path / "out", samples_per_shard=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_statistics_are_means_over_images(tmp_path: Path) -> None:
    (tmp_path / "small.png").write_bytes(image_bytes(0, size=2))
    (tmp_path / "large.png").write_bytes(image_bytes(204, size=50))
    manifest = write_shards(list_images(tmp_path), tmp_path / "grey").manifest
    assert manifest.num_channels == 1
    assert manifest.mean == pytest.approx([0.4])
    assert manifest.std == pytest.approx([0.4])
    (tmp_path / "colour.png").write_bytes(image_bytes(255, mode="RGB"))
    manifest = write_shards(list_images(tmp_path, labelled=False), tmp_path / "mixed").manifest
    assert manifest.num_channels == 3
    assert manifest.mean == pytest.approx([0.6, 0.8 / 3, 0.8 / 3], abs=1e-5)


def test_statistics_are_unknown_for_mixed_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2, 4), np.uint8))
    assert write_shards(list_images(tmp_path), tmp_path / ".four").manifest.num_channels == 4
    np.save(tmp_path / "b.npy", np.zeros((2, 2, 5), np.uint8))
    manifest = write_shards(list_images(tmp_path), tmp_path / "mixed").manifest
    assert (manifest.num_channels, manifest.mean, manifest.std) == (None, (), ())


def test_few_images_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    real_measure = writer.measure_image
    monkeypatch.setattr(writer, "measure_image", lambda pixels: measured.append(1) or real_measure(pixels))
    monkeypatch.setattr(writer, "NUM_MEASURED", 4)
    source = make_files(tmp_path / "source", [f"{number}.png" for number in range(40)])
    write_shards(list_images(source), tmp_path / "out", samples_per_shard=10)
    assert len(measured) == 4


def test_large_images_are_stored_smaller_and_upright_all_others_as_they_are(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    ramp = np.linspace(0, 255, 90 * 60 * 3).reshape(90, 60, 3) + random.normal(0, 20, (90, 60, 3))
    photo = Image.fromarray(ramp.clip(0, 255).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter: upright it is 60 high and 90 wide
    source = tmp_path / "source"
    source.mkdir()
    photo.save(source / "large.png", exif=exif)
    photo.convert("L").save(source / "grey.tif")
    photo.resize((30, 40)).save(source / "small.jpg")
    np.save(source / "array.npy", np.asarray(photo))
    sets = []
    for num_workers in (0, 2):
        folder = tmp_path / f"shards{num_workers}"
        write_shards(list_images(source), folder, samples_per_shard=2, num_workers=num_workers, max_short_side=30)
        sets.append(open_shards(folder))
    assert sets[0].manifest.hash == sets[1].manifest.hash
    stored = {}
    with ShardReader(sets[0]) as reader:
        for index in range(4):
            sample = reader.read(index)
            origin = json.loads(read_members(sets[0], sample.shard)[f"{sample.key}.json"])["path"]
            stored[origin] = sample.data
    for name in ("small.jpg", "array.npy"):
        assert stored[name] == (source / name).read_bytes()
    assert decode_image(stored["large.png"], None).shape == (3, 30, 45)
    assert decode_image(stored["grey.tif"], None).shape == (1, 45, 30)
    assert all(sniff_suffix(stored[name]) == "jpg" for name in ("large.png", "grey.tif"))
    whole = decode_image((source / "large.png").read_bytes(), 3).float()
    shrunk = decode_image(stored["large.png"], 3).float()
    assert (shrunk.mean((1, 2)) - whole.mean((1, 2))).abs().max() < 2


def read_members(shards: ShardSet, shard: str) -> dict[str, bytes]:
    with tarfile.open(Path(str(shards.root)) / shard) as tar:
        return {member.name: cast(IO[bytes], tar.extractfile(member)).read() for member in tar}

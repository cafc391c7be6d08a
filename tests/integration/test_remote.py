"""Data sets that lie elsewhere, from the flag to the batch, over real connections on this machine."""

import hashlib
import json
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from data.cache import ShardCache, shard_cache
from data.config import DataConfig
from data.errors import DataError
from data.indexing import index_tars
from data.loader import Batch, BatchLoader
from data.protocols import FetchConfig
from data.reader import ShardReader
from data.shards import ShardSet, open_shards
from data.sources import open_dataset
from data.stream import BatchPlan, SampleOrder
from scripts import index_shards
from tests.file_server import Fault, FileServer
from tests.shard_files import image_bytes, make_tar

QUICK = FetchConfig(read_timeout_s=5, num_attempts=3, first_pause_s=0.01)
BUCKET = "images"


@pytest.fixture(scope="module")
def local(picture_shards: ShardSet) -> Path:
    return Path(str(picture_shards.root))


@pytest.fixture
def server(local: Path) -> Iterator[FileServer]:
    with FileServer(local.parent) as running:
        yield running


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardCache:
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path / "cache"))
    return shard_cache(fetch=QUICK)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    pytest.importorskip("s3fs")
    running = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


def forget_connections() -> None:
    """fsspec keeps file systems by their arguments, of which the environment is none."""
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3(moto: str, local: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the data set in a bucket."""
    forget_connections()
    for name, value in {
        "AWS_ENDPOINT_URL": moto,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    client = pytest.importorskip("boto3").client("s3")
    client.create_bucket(Bucket=BUCKET)
    for file in local.iterdir():
        client.put_object(Bucket=BUCKET, Key=f"set/{file.name}", Body=file.read_bytes())
    client.close()
    return f"s3://{BUCKET}/set"


def batches(shards: ShardSet, num_workers: int, num_steps: int = 13) -> list[Batch]:
    config = DataConfig(num_workers=num_workers, batch_size_per_process=4, prefetch_batches=2, shuffle_window=16, lanes=2)
    order = SampleOrder(shards.first_sample, 0, config.shuffle_window, config.lanes)
    return list(BatchLoader(shards, config, BatchPlan(4, 1, 1, 0), order, (16, 16), 3, 0, num_steps))


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.labels, other.labels)
        assert list(one.faults) == list(other.faults) == []


def read_all(shards: ShardSet) -> list[tuple[str, int, bytes]]:
    with ShardReader(shards) as reader:
        samples = [reader.read(index) for index in range(len(shards))]
    return [(sample.key, sample.label, sample.data) for sample in samples]


# --------------------------------------------------------------------------------------------------------------------
# The same batches from anywhere


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_by_http_are_those_of_the_local_folder(
    server: FileServer, local: Path, cache: ShardCache, num_workers: int
) -> None:
    server.faults["shards/000001.tar"] = [Fault(num_sent=700), Fault(status=503)]
    shards = open_dataset(f"{server.url}/shards", labelled=True, cache=cache)
    assert shards.manifest.hash == open_dataset(str(local)).manifest.hash
    assert_same(batches(shards, num_workers), batches(open_dataset(str(local)), 0))
    counts = server.counts()
    assert counts.pop("shards/000001.tar") == 3
    assert counts == {
        f"shards/{name}": 1 for name in ("manifest.json", "index.npy", *(f"00000{n}.tar" for n in (0, 2, 3, 4, 5)))
    }


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_from_s3_are_those_of_the_local_folder(s3: str, local: Path, cache: ShardCache, num_workers: int) -> None:
    shards = open_dataset(s3, cache=cache)  # the parent has used its connections when it forks
    read_all(open_dataset(f"{s3}/000000.tar", cache=cache))
    assert_same(batches(shards, num_workers), batches(open_dataset(str(local)), 0))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_cache_of_two_shards_is_slow_and_right(server: FileServer, local: Path, cache: ShardCache) -> None:
    largest = max(path.stat().st_size for path in local.glob("*.tar"))
    small = ShardCache(cache.folder, 2 * largest, QUICK)
    assert_same(batches(open_dataset(f"{server.url}/shards", cache=small), 2), batches(open_dataset(str(local)), 0))
    assert sum(path.stat().st_size for path in cache.folder.glob("*.tar*")) <= small.max_bytes


def test_a_shard_that_can_not_be_fetched_ends_the_run(server: FileServer, cache: ShardCache) -> None:
    shards = open_dataset(f"{server.url}/shards", cache=cache)
    server.faults["shards/000003.tar"] = [Fault(status=500)] * 99
    with pytest.raises(DataError, match=r"shards/000003\.tar can not be read: 3 attempts failed, .* 500") as caught:
        batches(shards, 2)
    assert "\n" not in str(caught.value)


@pytest.fixture
def bucket_that_fails(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Stands for S3, as far as reading goes."""
    forget_connections()
    shutil.copytree(local, tmp_path / "served" / BUCKET / "set")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with FileServer(tmp_path / "served") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


def test_a_stalling_bucket_is_noticed(bucket_that_fails: FileServer, cache: ShardCache) -> None:
    path = f"{BUCKET}/set/000000.tar"
    shards = open_shards(f"s3://{BUCKET}/set", cache)
    bucket_that_fails.faults[path] = [Fault(num_sent=100, stalls=True)]
    with ShardReader(shards) as reader:
        assert reader.read(0).key == "000000000"
    assert bucket_that_fails.counts()[path] == 2


def test_a_bucket_is_asked_as_often_as_it_is_said(bucket_that_fails: FileServer, cache: ShardCache) -> None:
    path = f"{BUCKET}/set/000001.tar"
    shards = open_shards(f"s3://{BUCKET}/set", cache)
    bucket_that_fails.faults[path] = [Fault(status=503)] * 99
    with ShardReader(shards) as reader, pytest.raises(DataError, match=r"000001\.tar can not be read: 3 attempts failed"):
        reader.read(10)
    assert bucket_that_fails.counts()[path] == 3


def test_commands_are_a_place_too(local: Path, cache: ShardCache) -> None:
    source = f"pipe:cat {local}/{{name}}"
    with pytest.raises(DataError, match=r"--data\.allow_pipe"):
        open_dataset(source, cache=cache)
    allowed = ShardCache(cache.folder, cache.max_bytes, FetchConfig(allow_pipe=True))
    assert read_all(open_dataset(source, cache=allowed)) == read_all(open_dataset(str(local)))


def test_prefetched_shards_are_there_when_they_are_read(server: FileServer, local: Path, cache: ShardCache) -> None:
    shards = open_dataset(f"{server.url}/shards", cache=cache)
    server.faults["shards/000004.tar"] = [Fault(status=404)]
    with ShardReader(shards) as reader:
        reader.prefetch([51, 40, 50, 30, 31])
        with ShardReader(shards) as other:
            other.prefetch(np.array([50, 30]))
            paths = [
                cache.path_of(shards.root / f"00000{n}.tar", shards.manifest.shards[n].sha256)  # pyright: ignore[reportArgumentType]
                for n in (5, 3)
            ]
            while not (all(path.exists() for path in paths) and server.counts().get("shards/000004.tar")):
                time.sleep(0.01)
        counts = server.counts()
        assert (counts["shards/000005.tar"], counts["shards/000003.tar"]) == (1, 1)
        assert reader.read(40).key == "000000040"  # it failed in the background, and is fetched now
        assert reader.read(50).key == "000000050"
    assert server.counts() == counts | {"shards/000004.tar": 2}
    with ShardReader(open_dataset(str(local))) as reader:
        reader.prefetch([0, 10])


def fetch_ahead(reader: ShardReader, path: Path) -> None:
    reader.prefetch([10])
    while not path.exists():
        time.sleep(0.01)
    reader.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_reader_fetches_ahead_by_itself(server: FileServer, cache: ShardCache) -> None:
    shards = open_dataset(f"{server.url}/shards", cache=cache)
    with ShardReader(shards) as reader:
        reader.prefetch([0])
        path = cache.path_of(shards.root / "000001.tar", shards.manifest.shards[1].sha256)  # pyright: ignore[reportArgumentType]
        child = multiprocessing.get_context("fork").Process(target=fetch_ahead, args=(reader, path))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        reader.prefetch([20])
        while len(list(cache.folder.glob("*.tar"))) < 3:
            time.sleep(0.01)


def test_at_most_half_of_the_cache_is_filled_ahead(server: FileServer, cache: ShardCache) -> None:
    shards = open_dataset(f"{server.url}/shards", cache=cache)
    sizes = [info.num_bytes for info in shards.manifest.shards]
    small = ShardCache(cache.folder, 2 * (sizes[0] + sizes[1]), QUICK)
    reader = ShardReader(open_shards(f"{server.url}/shards", small))
    reader.prefetch(range(53))
    while len(list(cache.folder.glob("*.tar"))) < 2:
        time.sleep(0.01)
    reader.close()
    assert server.counts().keys() == {f"shards/{name}" for name in ("manifest.json", "index.npy", "000000.tar", "000001.tar")}


# --------------------------------------------------------------------------------------------------------------------
# Some shards, and several sets


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("{000001..000003}.tar", [1, 2, 3]),
        ("00000[05].tar", [0, 5]),
        ("*.tar", [0, 1, 2, 3, 4, 5]),
        ("00000{4,0,2,0}.tar", [0, 2, 4]),
        ("000002.tar", [2]),
    ],
)
def test_patterns_choose_shards_here_and_elsewhere(
    server: FileServer, s3: str, local: Path, cache: ShardCache, pattern: str, numbers: list[int]
) -> None:
    whole = open_dataset(str(local))
    expected = [sample for n in numbers for sample in read_all(whole)[10 * n : 10 * n + 10]]
    hashes = set()
    for folder in (local, f"{server.url}/shards", s3):
        shards = open_dataset(f"{folder}/{pattern}", labelled=True, cache=cache)
        assert read_all(shards) == expected
        assert [label for _, label, _ in expected] == shards.labels.tolist()
        assert shards.first_sample.tolist() == np.cumsum([0, *(whole.manifest.shards[n].num_samples for n in numbers)]).tolist()
        assert shards.parts == ((0, len(expected)),)
        hashes.add(shards.manifest.hash)
    assert len(hashes) == 1
    assert (hashes == {whole.manifest.hash}) is (len(numbers) == 6)


def test_shards_that_were_not_chosen_need_not_be_there(local: Path, tmp_path: Path) -> None:
    shutil.copytree(local, tmp_path / "set")
    (tmp_path / "set" / "000000.tar").unlink()
    assert len(open_dataset(f"{tmp_path}/set/00000[1-5].tar")) == 43
    with pytest.raises(DataError, match=r"000000\.tar is missing"):
        open_dataset(f"{tmp_path}/set/0*.tar")


def test_lists_name_shards_patterns_and_folders(server: FileServer, local: Path, cache: ShardCache, tmp_path: Path) -> None:
    shutil.copytree(local, tmp_path / "set")
    (tmp_path / "shards.txt").write_text(
        f"# two here, some elsewhere\nset/00000{{0,3}}.tar\n\n{server.url}/shards/000001.tar  # one\n"
    )
    shards = open_dataset(str(tmp_path / "shards.txt"), cache=cache)
    samples = read_all(open_dataset(str(local)))
    assert read_all(shards) == samples[:10] + samples[30:40] + samples[10:20]
    assert shards.parts == ((0, 30),)
    assert shards.shard_name(0) == f"{tmp_path}/set/000000.tar"
    assert shards.shard_name(2) == f"{server.url}/shards/000001.tar"
    (tmp_path / "all.txt").write_text("set\n")
    assert read_all(open_dataset(str(tmp_path / "all.txt"))) == samples
    for name, text, message in (("empty", "# none\n", "names no shards"), ("deep", "all.txt\n", "names another list")):
        (tmp_path / f"{name}.txt").write_text(text)
        with pytest.raises(DataError, match=message):
            open_dataset(str(tmp_path / f"{name}.txt"))


def test_lists_lie_elsewhere_too(server: FileServer, local: Path, cache: ShardCache) -> None:
    (local.parent / "some.txt").write_text("shards/00000*.tar\n")
    assert read_all(open_dataset(f"{server.url}/some.txt", cache=cache)) == read_all(open_dataset(str(local)))
    (local.parent / "some.txt").unlink()


def test_patterns_in_the_folders_name_find_folders(s3: str, local: Path, cache: ShardCache, tmp_path: Path) -> None:
    for name in ("a1", "a2", "b1"):
        shutil.copytree(local, tmp_path / "sets" / name)
    (tmp_path / "sets" / "a3").mkdir()
    samples = read_all(open_dataset(str(local)))
    assert read_all(open_dataset(f"{tmp_path}/sets/a*/000000.tar")) == samples[:10] * 2
    assert read_all(open_dataset(f"{tmp_path}/sets/{{b1,a1}}/000000.tar")) == samples[:10] * 2
    assert read_all(open_dataset(s3.replace("/set", "/s*") + "/000000.tar", cache=cache)) == samples[:10]
    with pytest.raises(DataError, match=r"finds no folder with a manifest\.json"):
        open_dataset(f"{tmp_path}/sets/c*/000000.tar")
    with pytest.raises(DataError, match="can not be listed by http"):
        open_dataset("http://127.0.0.1:9/a*/000000.tar")


def test_names_that_fit_no_shard_are_told(server: FileServer, local: Path, cache: ShardCache) -> None:
    for folder in (str(local), f"{server.url}/shards"):
        with pytest.raises(
            DataError, match=r"000006\.tar fits none of the 6 shards in .* \(000000\.tar \.\. 000005\.tar\), nor do 3"
        ):
            open_dataset(f"{folder}/{{000004..000009}}.tar", cache=cache)
        with pytest.raises(DataError, match=r"9\*\.tar fits none"):
            open_dataset(f"{folder}/9*.tar", cache=cache)


def test_several_sources_are_one_set_with_parts(server: FileServer, local: Path, cache: ShardCache, tmp_path: Path) -> None:
    shutil.copytree(local, tmp_path / "set")
    source = f"{local}/000005.tar::{server.url}/shards::{tmp_path}/set/{{000000..000001}}.tar"
    shards = open_dataset(source, labelled=True, cache=cache)
    samples = read_all(open_dataset(str(local)))
    assert read_all(shards) == samples[50:] + samples + samples[:20]
    assert shards.parts == ((0, 3), (3, 56), (56, 76))
    assert shards.first_sample.tolist() == [0, 3, 13, 23, 33, 43, 53, 56, 66, 76]
    assert shards.labels.tolist() == [label for _, label, _ in samples[50:] + samples + samples[:20]]
    assert len({shards.shard_name(number) for number in range(9)}) == 9
    assert str(shards.root) == source
    assert shards.manifest.class_names == ("even", "odd")
    other = open_dataset(f"{local}/000005.tar::{local}::{local}/{{000000..000001}}.tar")
    assert other.manifest.hash == shards.manifest.hash, "wherever they lie"
    assert open_dataset(f"{local}::{local}/000005.tar").manifest.hash != shards.manifest.hash
    assert_same(batches(shards, 2), batches(other, 0))


def make_set(folder: Path, values: list[int], class_names: tuple[str, ...] = (), mode: str = "L") -> Path:
    folder.mkdir()
    members = [(f"{n}.{kind}", data) for n, v in enumerate(values) for kind, data in
               (("png", image_bytes(v, mode=mode)), ("cls", str(n % 2).encode()))]  # fmt: skip
    index_tars([make_tar(folder / "0.tar", members)], folder, class_names=class_names)
    return folder


def test_statistics_of_several_sources_are_those_of_all_images(tmp_path: Path) -> None:
    make_set(tmp_path / "a", [0, 51, 102])
    make_set(tmp_path / "b", [255])
    make_set(tmp_path / "ab", [0, 51, 102, 255])
    both, one = (open_dataset(source).manifest for source in (f"{tmp_path}/a::{tmp_path}/b", f"{tmp_path}/ab"))
    assert both.num_channels == one.num_channels == 1
    assert both.mean == pytest.approx(one.mean, abs=1e-5)
    assert both.std == pytest.approx(one.std, abs=1e-5)
    make_set(tmp_path / "colour", [255], mode="RGB")
    mixed = open_dataset(f"{tmp_path}/a::{tmp_path}/colour").manifest
    assert mixed.num_channels == 3
    assert mixed.mean == pytest.approx((0.4, 0.15, 0.15), abs=1e-5)


def test_classes_of_several_sources_must_agree(tmp_path: Path) -> None:
    make_set(tmp_path / "a", [0, 1], ("cat", "dog"))
    make_set(tmp_path / "b", [0, 1], ("cat", "cow"))
    make_set(tmp_path / "one", [0], ("cat",))
    make_set(tmp_path / "none", [0, 1])
    with pytest.raises(DataError, match=r"the classes of .*/a and .*/b differ \(dog and cow\)"):
        open_dataset(f"{tmp_path}/a::{tmp_path}/b")
    with pytest.raises(DataError, match=r"differ \(2 and 1\)"):
        open_dataset(f"{tmp_path}/a::{tmp_path}/one")
    assert open_dataset(f"{tmp_path}/none::{tmp_path}/a").manifest.class_names == ("cat", "dog")
    with pytest.raises(DataError, match=r"none has the label 1, and .*/one names 1 classes"):
        open_dataset(f"{tmp_path}/one::{tmp_path}/none")


# --------------------------------------------------------------------------------------------------------------------
# Opening


def test_a_changed_manifest_or_index_is_refused(server: FileServer, local: Path, cache: ShardCache) -> None:
    server.faults["shards/index.npy"] = [Fault(garbles=True)] * 9
    with pytest.raises(DataError, match=r"index\.npy can not be read: 3 attempts failed, .* has the sha256"):
        open_dataset(f"{server.url}/shards", cache=cache)
    server.faults["shards/manifest.json"] = [Fault(garbles=True)]
    with pytest.raises(DataError, match=r"manifest\.json can not be read as JSON"):
        open_dataset(f"{server.url}/shards", cache=cache)


def test_shards_elsewhere_without_a_manifest_say_how_to_index_them(server: FileServer, cache: ShardCache) -> None:
    for source in ("nowhere", "nowhere/{0..3}.tar", "nowhere/manifest.json"):
        with pytest.raises(
            DataError, match=r"404 .*index_shards\.py '.*/nowhere/\{000000\.\.000099\}\.tar' --output FOLDER"
        ) as caught:
            open_dataset(f"{server.url}/{source}", cache=cache)
        assert "\n" not in str(caught.value)


def test_a_manifest_can_not_have_commands_run(local: Path, tmp_path: Path) -> None:
    shutil.copytree(local, tmp_path / "set")
    file = tmp_path / "set" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text().replace('"000000.tar"', '"pipe:touch x; cat {name}"'))))
    with pytest.raises(DataError, match="names a command as a shard"):
        open_dataset(str(tmp_path / "set"), cache=shard_cache(fetch=FetchConfig(allow_pipe=True)))


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_shards_elsewhere_are_indexed_into_a_folder_here(
    server: FileServer, s3: str, local: Path, cache: ShardCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pattern = f"{server.url}/shards/{{000000..000005}}.tar" if kind == "http" else f"{s3}/*.tar"
    (tmp_path / "names.txt").write_text("even\nodd\n")
    flags = ["--output", str(tmp_path / "here"), "--num_workers", "0", "--class_names", str(tmp_path / "names.txt")]
    monkeypatch.setattr("sys.argv", ["index_shards.py", pattern, *flags])
    index_shards.main()
    assert sorted(file.name for file in (tmp_path / "here").iterdir()) == ["index.npy", "manifest.json"]
    shards, original = open_dataset(str(tmp_path / "here"), cache=cache), open_dataset(str(local))
    assert shards.manifest.shards[1].name == f"{server.url if kind == 'http' else s3.removesuffix('/set')}/" + (
        "shards/000001.tar" if kind == "http" else "set/000001.tar"
    )
    assert [info.sha256 for info in shards.manifest.shards] == [info.sha256 for info in original.manifest.shards]
    assert (shards.manifest.mean, shards.manifest.index_sha256) == (original.manifest.mean, original.manifest.index_sha256)
    assert_same(batches(shards, 2), batches(original, 0))
    assert len(open_dataset(f"{tmp_path}/here/00000[12].tar", cache=cache)) == 20


def test_shards_elsewhere_need_a_folder_for_their_index(tmp_path: Path) -> None:
    places = index_shards.find_tars(("https://host/{08..11}.tar",))
    assert [str(place) for place in places] == [f"https://host/{n}.tar" for n in ("08", "09", "10", "11")]
    with pytest.raises(DataError, match=r"https://host/08.tar lies elsewhere; give a folder .* --output"):
        index_shards.choose_folder(places, None)
    with pytest.raises(DataError, match="can not be listed by https"):
        index_shards.find_tars(("https://host/*.tar",))
    with pytest.raises(DataError, match="can not be listed by https"):
        index_shards.find_tars(("https://host/set",))
    for n in range(3):
        (tmp_path / f"{n}.tar").touch()
    assert index_shards.find_tars((f"{tmp_path}/[01].tar", f"{tmp_path}/2.tar")) == [tmp_path / f"{n}.tar" for n in range(3)]


def test_the_content_of_a_copy_is_verified(server: FileServer, cache: ShardCache) -> None:
    shards = open_dataset(f"{server.url}/shards", cache=cache)
    server.faults["shards/000000.tar"] = [Fault(garbles=True)]
    with ShardReader(shards) as reader:
        reader.read(0)
    copy = next(cache.folder.glob("*-000000.tar"))
    assert hashlib.sha256(copy.read_bytes()).hexdigest() == shards.manifest.shards[0].sha256

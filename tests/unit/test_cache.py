"""data/cache.py: a bounded folder of shards that all processes share."""

import contextlib
import errno
import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import cache as cache_module
from data.cache import ShardCache, cache_folder, shard_cache
from data.errors import DataError
from data.fetch import Stopped
from data.places import Place
from data.protocols import FetchConfig
from tests.file_server import Fault, FileServer

QUICK = FetchConfig(read_timeout_s=2, num_attempts=2, first_pause_s=0.001)
SIZE = 1000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    (tmp_path / "served").mkdir()
    for number in range(10):
        (tmp_path / "served" / f"{number}.tar").write_bytes(content(number))
    with FileServer(tmp_path / "served") as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def read(cache: ShardCache, server_url: str, number: int) -> bytes:
    with cache.open(Place(f"{server_url}/{number}.tar"), SIZE, hashlib.sha256(content(number)).hexdigest()) as descriptor:
        return os.pread(descriptor, SIZE, 0)


def kept(folder: Path) -> list[int]:
    """Numbers of the shards in the cache."""
    return sorted(int(path.name.partition("-")[2][0]) for path in folder.glob("*-?.tar"))


def total(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in folder.iterdir())
    return total(folder)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path would list names that are gone by then


# --------------------------------------------------------------------------------------------------------------------
# Keeping and removing


def test_a_shard_is_fetched_once_and_read_from_the_disk_after_that(server: FileServer, folder: Path) -> None:
    cache = ShardCache(folder, 10 * SIZE, QUICK)
    for _ in range(3):
        assert read(cache, server.url, 1) == content(1)
    assert server.counts() == {"1.tar": 1}
    assert read(ShardCache(folder, 10 * SIZE, QUICK), server.url, 1) == content(1)
    assert server.counts() == {"1.tar": 1}


def test_what_was_not_used_for_longest_goes_first(server: FileServer, folder: Path) -> None:
    cache = ShardCache(folder, 3 * SIZE, QUICK)
    for number in (0, 1, 2, 0, 3, 4):
        read(cache, server.url, number)
        time.sleep(0.01)
        assert total(folder) <= 3 * SIZE
    assert kept(folder) == [0, 3, 4]


def test_names_hold_the_whole_place_and_the_content(folder: Path) -> None:
    cache = ShardCache(folder, 1)
    places = ["https://a/set/0.tar", "https://b/set/0.tar", "https://a/other/0.tar", "s3://a/set/0.tar"]
    paths = {cache.path_of(Place(url), digest) for url in places for digest in ("x", "y")}
    assert len(paths) == 8
    assert all(path.name.endswith("-0.tar") for path in paths)
    assert cache.path_of(Place("https://a/0.tar?key=1"), "x") == cache.path_of(Place("https://a/0.tar?key=2"), "x")


def test_files_of_others_are_left_alone(server: FileServer, folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tar").write_bytes(bytes(9 * SIZE))
    cache = ShardCache(folder, SIZE, QUICK)
    for number in range(3):
        read(cache, server.url, number)
    assert kept(folder) == [2]
    assert (folder / "thesis.tar").exists()


def test_a_shard_that_is_being_read_is_not_removed(server: FileServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ShardCache(folder, 2 * SIZE, QUICK)
    place, digest = Place(f"{server.url}/0.tar"), hashlib.sha256(content(0)).hexdigest()
    with cache.open(place, SIZE, digest) as descriptor:
        for number in range(1, 4):
            read(cache, server.url, number)
            assert total(folder) <= 2 * SIZE
        assert kept(folder) == [0, 3]
        with cache.open(Place(f"{server.url}/3.tar"), SIZE, hashlib.sha256(content(3)).hexdigest()):
            monkeypatch.setattr(cache_module, "WAIT_S", 0.1)
            with pytest.raises(DataError, match=r"no room for .*/4\.tar: all .* may hold are in use; give another folder"):
                read(cache, server.url, 4)
        assert os.pread(descriptor, SIZE, 0) == content(0)
    assert read(cache, server.url, 4) == content(4)


def test_who_needs_room_waits_for_readers(server: FileServer, folder: Path) -> None:
    cache = ShardCache(folder, SIZE, QUICK)
    with cache.open(Place(f"{server.url}/0.tar"), SIZE, hashlib.sha256(content(0)).hexdigest()):
        thread = threading.Thread(target=read, args=(cache, server.url, 1))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert kept(folder) == [0]
    thread.join(10)
    assert kept(folder) == [1]


def test_who_needs_room_waits_for_fetches_as_long_as_they_take(
    server: FileServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "WAIT_S", 0.1)
    cache = ShardCache(folder, SIZE, FetchConfig(read_timeout_s=0.6, first_pause_s=0.001))
    server.faults["0.tar"] = [Fault(num_sent=10, stalls=True)]
    first = threading.Thread(target=read, args=(cache, server.url, 0))
    first.start()
    while not any(path.stat().st_size == SIZE for path in folder.glob("*.partial")):
        time.sleep(0.01)
    assert read(cache, server.url, 1) == content(1)
    first.join()
    assert server.counts()["0.tar"] >= 2


def test_a_shard_that_was_cut_on_the_disk_is_fetched_again(server: FileServer, folder: Path) -> None:
    cache = ShardCache(folder, 3 * SIZE, QUICK)
    read(cache, server.url, 1)
    os.truncate(next(folder.glob("*-1.tar")), 10)
    assert read(cache, server.url, 1) == content(1)
    assert server.counts() == {"1.tar": 2}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limit=st.integers(1, 4), wanted=st.lists(st.integers(0, 9), max_size=12), num_threads=st.integers(1, 3))
def test_the_bound_always_holds(server: FileServer, folder: Path, limit: int, wanted: list[int], num_threads: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    cache = ShardCache(folder, limit * SIZE + 7, QUICK)
    largest, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            largest[0] = max(largest[0], total(folder))

    wrong: list[int] = []

    def work(numbers: list[int]) -> None:
        wrong.extend(number for number in numbers if read(cache, server.url, number) != content(number))

    watcher = threading.Thread(target=watch)
    threads = [threading.Thread(target=work, args=(wanted[part::num_threads],)) for part in range(num_threads)]
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert wrong == []
    assert max(largest[0], total(folder)) <= cache.max_bytes


# --------------------------------------------------------------------------------------------------------------------
# Several processes


def read_in_process(cache: ShardCache, url: str, numbers: list[int], answers: "multiprocessing.Queue[bool]") -> None:
    answers.put(all(read(cache, url, number) == content(number) for number in numbers))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_that_want_the_same_shards_fetch_each_once(server: FileServer, folder: Path, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    cache, answers = ShardCache(folder, 10 * SIZE, QUICK), context.Queue()
    # Slow enough that the others come meanwhile.
    server.faults["0.tar"] = [Fault(num_sent=10, stalls=True)]
    arguments = (cache, server.url, [0, 1, 2], answers)
    processes = [context.Process(target=read_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    assert all(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert server.counts() == {"0.tar": 2, "1.tar": 1, "2.tar": 1}  # the stall is one of the first file's


def test_who_waited_for_a_fetch_that_failed_fetches_for_himself(server: FileServer, folder: Path) -> None:
    cache = ShardCache(folder, 10 * SIZE, FetchConfig(read_timeout_s=0.5, num_attempts=2, first_pause_s=0.001))
    server.faults["0.tar"] = [Fault(num_sent=10, stalls=True), Fault(status=404)]
    answers: list[bytes | str] = []

    def fetch() -> None:
        try:
            answers.append(read(cache, server.url, 0))
        except DataError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("404" in answer for answer in answers if isinstance(answer, str)) == 1
    assert answers.count(content(0)) == 2
    assert server.counts() == {"0.tar": 3}
    assert total(folder) == SIZE


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_a_killed_process_left_is_removed_and_nobody_waits_for_it(server: FileServer, folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    cache = ShardCache(folder, 2 * SIZE, FetchConfig(read_timeout_s=60))
    server.faults["0.tar"] = [Fault(num_sent=10, stalls=True)]
    process = context.Process(target=read_in_process, args=(cache, server.url, [0], context.Queue()))
    process.start()
    while not any(path.stat().st_size == SIZE for path in folder.glob("*.partial")):
        time.sleep(0.01)
    read(cache, server.url, 1)
    assert len(list(folder.glob("*.partial"))) == 1, "its process lives"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    read(cache, server.url, 2)
    assert list(folder.glob("*.partial")) == []
    assert kept(folder) == [1, 2]
    assert read(cache, server.url, 0) == content(0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_does_not_keep_its_parents_locks(server: FileServer, folder: Path) -> None:
    cache = ShardCache(folder, 2 * SIZE, QUICK)
    server.faults["0.tar"] = [Fault(num_sent=10, stalls=True), *[Fault(status=404)] * 9]
    failures: list[str] = []

    def fetch() -> None:
        try:
            read(cache, server.url, 0)
        except DataError as error:
            failures.append(str(error))

    thread = threading.Thread(target=fetch)
    thread.start()
    while not any(path.stat().st_size == SIZE for path in folder.glob("*.partial")):
        time.sleep(0.01)
    partial = next(folder.glob("*.partial"))
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    # What the parent was fetching when it forked is given up; a link keeps the file within reach.
    os.link(partial, folder / "witness")
    thread.join(20)
    assert "404" in failures[0]
    with (folder / "witness").open() as file:
        assert cache_module._try_lock(file.fileno())
    child.kill()
    child.join()


# --------------------------------------------------------------------------------------------------------------------
# What goes wrong


def test_a_bound_below_one_shard_is_told(server: FileServer, folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"0\.tar has .* GiB, and the cache .* may hold .* in all; give more .*--data\.cache_gib"
    ):
        read(ShardCache(folder, SIZE - 1, QUICK), server.url, 0)
    assert server.requests == []


def test_a_failed_fetch_leaves_nothing(server: FileServer, folder: Path) -> None:
    server.faults["0.tar"] = [Fault(num_sent=10)] * 2
    cache = ShardCache(folder, 3 * SIZE, QUICK)
    server.ignores_ranges = True
    with pytest.raises(DataError, match="2 attempts failed"):
        read(cache, server.url, 0)
    assert total(folder) == 0
    assert read(cache, server.url, 0) == content(0)


def test_a_full_disk_is_told_and_old_shards_make_room_first(
    server: FileServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ShardCache(folder, 10 * SIZE, QUICK)
    read(cache, server.url, 0)
    usage = shutil.disk_usage(server.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=SIZE - 1))
    read(cache, server.url, 1)
    assert kept(folder) == [1]
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=r"it needs .* where .* GiB are free; give another folder with --data\.cache_dir"):
        read(cache, server.url, 2)
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device; give another folder"):
        read(cache, server.url, 2)
    assert total(folder) == 0


def test_a_folder_that_can_not_be_written_is_told(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"can not be written: .*; give another folder"):
        read(ShardCache(tmp_path / "file" / "cache", 3 * SIZE, QUICK), server.url, 0)


def test_a_cache_that_is_too_small_for_what_is_read_warns_once(
    server: FileServer, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache_module, "_warned", threading.Event())
    cache = ShardCache(folder, SIZE, QUICK)
    for number in (0, 1, 0, 1, 0):
        read(cache, server.url, number)
    told = capfd.readouterr().err
    assert told.count("is fetched again") == 1
    assert "--data.cache_gib" in told


@pytest.mark.parametrize("without", ["module", "support"])
def test_without_locks_all_that_is_read_is_right(
    server: FileServer, folder: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    if without == "module":
        monkeypatch.setattr(cache_module, "fcntl", None)
    else:

        def no_locks(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr("data.cache.fcntl.flock", no_locks)
    cache = ShardCache(folder, 2 * SIZE, QUICK)
    threads = [threading.Thread(target=read, args=(cache, server.url, 0)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    abandoned = next(folder.glob("*-0.tar")).with_suffix(".tar.partial-7-00000000")
    working = abandoned.with_suffix(".partial-8-00000000")
    for path, age_s in ((abandoned, 25 * 3600), (working, 3600)):
        path.touch()
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    for number in range(3):
        assert read(cache, server.url, number) == content(number)
    assert kept(folder) == [1, 2]
    assert [path.name for path in folder.glob("*.partial*")] == [working.name]


def test_nobody_waits_once_it_is_stopped(server: FileServer, folder: Path) -> None:
    cache = ShardCache(folder, SIZE, QUICK)
    place, digest = Place(f"{server.url}/1.tar"), hashlib.sha256(content(1)).hexdigest()
    stop = threading.Event()
    with cache.open(Place(f"{server.url}/0.tar"), SIZE, hashlib.sha256(content(0)).hexdigest()):
        threading.Timer(0.1, stop.set).start()
        with pytest.raises(Stopped):
            cache.bring(place, SIZE, digest, stop)
    cache.bring(place, SIZE, digest)
    assert kept(folder) == [1]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_descriptors_are_lost(server: FileServer, folder: Path) -> None:
    cache = ShardCache(folder, 3 * SIZE, QUICK)
    read(cache, server.url, 0)
    before = open_descriptors()
    for number in [*range(10)] * 3:
        read(cache, server.url, number)
    server.faults["9.tar"] = [Fault(status=404)]
    for _ in range(3):
        read(cache, server.url, 7)
    assert open_descriptors() <= before + 2  # of the server's threads, which share this process


# --------------------------------------------------------------------------------------------------------------------
# Indices and defaults


def test_indices_are_verified_kept_beside_and_removed_when_they_are_old(server: FileServer, folder: Path) -> None:
    cache = ShardCache(folder, 1, QUICK)
    digest = hashlib.sha256(content(3)).hexdigest()
    path = cache.bring_index(Place(f"{server.url}/3.tar"), digest)
    assert path.read_bytes() == content(3)
    assert cache.bring_index(Place(f"{server.url}/3.tar"), digest) == path
    assert server.counts() == {"3.tar": 1}
    with pytest.raises(DataError, match="has the sha256"):
        cache.bring_index(Place(f"{server.url}/4.tar"), "0" * 64)
    old = path.with_name("old.npy")
    old.touch()
    os.utime(old, (0, 0))
    cache.bring_index(Place(f"{server.url}/3.tar"), digest)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_defaults_follow_the_environment_and_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path / "mine"))
    usage = shutil.disk_usage(tmp_path)
    for free_gib, expected in ((1000, 100.0), (50, 25.0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free_gib: usage._replace(free=free * 2**30))
        cache = shard_cache()
        assert cache.folder == cache_folder() / "shards" == tmp_path / "mine" / "shards"
        assert cache.max_bytes == expected * 2**30
    assert not (tmp_path / "mine").exists()
    assert shard_cache(tmp_path, 0.5) == ShardCache(tmp_path, 2**29)
    with pytest.raises(DataError, match="expected more than 0"):
        shard_cache(cache_gib=-1)

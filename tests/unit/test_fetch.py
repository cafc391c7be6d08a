"""data/fetch.py and data/protocols.py: reads from a server that fails in every way."""

import errno
import hashlib
import io
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from data import protocols
from data.errors import DataError
from data.fetch import NotFound, Stopped, download, fetch_bytes, list_remote
from data.places import Place
from data.protocols import FetchConfig
from tests.file_server import Fault, FileServer

QUICK = FetchConfig(read_timeout_s=0.3, num_attempts=3, first_pause_s=0.001, max_pause_s=0.002)
CONTENT = bytes(range(256)) * 400
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "0.tar").write_bytes(CONTENT)
    with FileServer(tmp_path / "served") as running:
        yield running


def fetch(place: str, config: FetchConfig = QUICK, sha256: str | None = SHA256) -> bytes:
    target = io.BytesIO()
    download(Place(place), target, config, num_bytes=len(CONTENT), sha256=sha256)
    return target.getvalue()


def failure(place: str, config: FetchConfig = QUICK) -> str:
    with pytest.raises(DataError) as caught:
        fetch(place, config)
    assert "\n" not in str(caught.value)
    assert place.partition("?")[0] in str(caught.value)
    return str(caught.value)


# --------------------------------------------------------------------------------------------------------------------
# HTTP


@pytest.mark.parametrize(
    ("fault", "resumes_at"),
    [
        (Fault(num_sent=1000), 1000),
        (Fault(num_sent=1000, stalls=True), 1000),
        (Fault(num_sent=0, stalls=True), None),
        (Fault(num_sent=0), None),
        (Fault(stated_length=5000), 5000),
        (Fault(status=503), None),
        (Fault(status=500), None),
        (Fault(status=429, headers={"Retry-After": "7"}), None),
        (Fault(garbles=True), None),
    ],
)
def test_one_failure_is_overcome_and_what_came_is_kept(server: FileServer, fault: Fault, resumes_at: int | None) -> None:
    server.faults["0.tar"] = [fault]
    assert fetch(f"{server.url}/0.tar") == CONTENT
    first, *others = [extent for _, extent, _ in server.requests]
    assert first is None
    assert others == [None if resumes_at is None else f"bytes={resumes_at}-"]


def test_what_is_whole_needs_no_second_request_whatever_length_is_stated(server: FileServer) -> None:
    server.faults["0.tar"] = [Fault(stated_length=len(CONTENT) + 9)]
    assert fetch(f"{server.url}/0.tar") == CONTENT
    assert len(server.requests) == 1
    server.faults["0.tar"] = [Fault(num_sent=10)] * 2
    assert fetch_bytes(Place(f"{server.url}/0.tar"), QUICK) == CONTENT
    server.faults["0.tar"] = [Fault(num_sent=0)] * 9
    with pytest.raises(DataError, match="closed the connection after 0 of 102400 bytes"):
        fetch_bytes(Place(f"{server.url}/0.tar"), QUICK)


def test_a_download_that_breaks_twice_goes_on_twice(server: FileServer) -> None:
    server.faults["0.tar"] = [Fault(num_sent=1000), Fault(num_sent=2000)]
    assert fetch(f"{server.url}/0.tar") == CONTENT
    assert [extent for _, extent, _ in server.requests] == [None, "bytes=1000-", "bytes=3000-"]


def test_a_server_without_ranges_sends_all_again(server: FileServer) -> None:
    server.ignores_ranges = True
    server.faults["0.tar"] = [Fault(num_sent=1000)]
    assert fetch(f"{server.url}/0.tar") == CONTENT


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(num_sent=0, stalls=True), "nothing came for 0.3 s"),
        (Fault(num_sent=0), "it ended after 0 of 102400 bytes"),
        (Fault(status=503), "the server answered 503 Service Unavailable"),
    ],
)
def test_after_the_last_attempt_the_reason_is_told(server: FileServer, fault: Fault, reason: str) -> None:
    server.faults["0.tar"] = [fault] * 9
    message = failure(f"{server.url}/0.tar")
    assert "3 attempts failed" in message
    assert reason in message
    assert len(server.requests) == 3


def test_every_read_has_the_timeout_that_is_set(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    real_open = urllib.request.urlopen
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda request, timeout: asked.append(timeout) or real_open(request, timeout=timeout)
    )
    fetch(f"{server.url}/0.tar", FetchConfig(read_timeout_s=7.5))
    assert asked == [7.5]


@pytest.mark.parametrize("status", [404, 403, 401, 410])
def test_what_is_missing_or_forbidden_is_not_asked_for_again(server: FileServer, status: int) -> None:
    server.faults["0.tar"] = [Fault(status=status)] * 9
    with pytest.raises(DataError, match=f"the server answered {status}") as caught:
        fetch(f"{server.url}/0.tar")
    assert isinstance(caught.value, NotFound) is (status in (404, 410))
    assert len(server.requests) == 1


def test_wrong_content_is_fetched_twice_more_and_then_told(server: FileServer) -> None:
    server.faults["0.tar"] = [Fault(garbles=True)] * 9
    message = failure(f"{server.url}/0.tar", FetchConfig(num_attempts=9, first_pause_s=0.001))
    assert f"has the sha256 {hashlib.sha256(bytes(b ^ 1 for b in CONTENT)).hexdigest()}, expected {SHA256}" in message
    assert "3 attempts failed" in message
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("size", "reason"), [(len(CONTENT) + 1, "more than the 102400 bytes"), (100, "no more than 100 bytes")]
)
def test_a_file_of_another_length_is_not_taken(server: FileServer, size: int, reason: str) -> None:
    (server.root / "0.tar").write_bytes((CONTENT + b"x")[:size])
    assert reason in failure(f"{server.url}/0.tar", FetchConfig(num_attempts=6, first_pause_s=0.001))


def test_nobody_listens_and_nobody_knows_the_host() -> None:
    assert "Connection refused" in failure("http://127.0.0.1:9/0.tar")
    assert "3 attempts failed" in failure("http://no-such-host.invalid/0.tar")
    assert "is no URL of a file" in failure("http://127.0.0.1:port/0.tar")


def test_passwords_go_to_the_server_and_into_no_message(server: FileServer) -> None:
    host = server.url.removeprefix("http://")
    assert fetch(f"http://me:p%40ss@{host}/0.tar?sig=1") == CONTENT
    path, _, authorization = server.requests[0]
    assert path == "/0.tar?sig=1"
    assert authorization == "Basic bWU6cEBzcw=="
    server.faults["0.tar"] = [Fault(status=403)]
    with pytest.raises(DataError) as caught:
        fetch(f"http://me:p%40ss@{host}/0.tar?sig=1")
    assert "p%40ss" not in str(caught.value)
    assert "sig" not in str(caught.value)


def test_passwords_do_not_follow_to_another_host(server: FileServer) -> None:
    with FileServer(server.root) as other:
        server.faults["0.tar"] = [Fault(status=302, headers={"Location": f"{other.url}/0.tar"})]
        assert fetch(f"http://me:pw@{server.url.removeprefix('http://')}/0.tar") == CONTENT
        assert server.requests[0][2] is not None
        assert other.requests == [("/0.tar", None, None)]


def test_a_part_that_was_not_asked_for_is_not_taken(server: FileServer) -> None:
    server.faults["0.tar"] = [Fault(num_sent=1000), Fault(content_range=f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}")]
    assert fetch(f"{server.url}/0.tar") == CONTENT
    assert [extent for _, extent, _ in server.requests] == [None, "bytes=1000-", None]


def test_small_files_come_whole_and_empty_ones_too(server: FileServer) -> None:
    (server.root / "empty").touch()
    server.faults["0.tar"] = [Fault(num_sent=10)]
    assert fetch_bytes(Place(f"{server.url}/0.tar"), QUICK) == CONTENT
    assert fetch_bytes(Place(f"{server.url}/empty"), QUICK) == b""


def test_a_download_stops_when_nobody_wants_it(server: FileServer) -> None:
    server.faults["0.tar"] = [Fault(status=503)] * 99
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(Stopped):
        download(Place(f"{server.url}/0.tar"), io.BytesIO(), FetchConfig(first_pause_s=60, max_pause_s=60), stop=stop)


class FullDisk(io.BytesIO):
    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_no_failure_of_the_network(server: FileServer) -> None:
    with pytest.raises(DataError, match="No space left on device; make room"):
        download(Place(f"{server.url}/0.tar"), FullDisk(), QUICK)
    assert len(server.requests) == 1


class SlowDisk(io.BytesIO):
    def write(self, block: Any) -> int:
        return super().write(block[:777])


def test_a_disk_that_takes_parts_gets_all(server: FileServer) -> None:
    target = SlowDisk()
    download(Place(f"{server.url}/0.tar"), target, QUICK)
    assert target.getvalue() == CONTENT


def test_pauses_grow_up_to_their_limit(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: pauses.append(timeout or 0) or False)
    monkeypatch.setattr("data.fetch.random.uniform", lambda low, high: high)
    with pytest.raises(DataError, match="6 attempts failed"):
        download(Place("http://127.0.0.1:9/0.tar"), io.BytesIO(), FetchConfig(first_pause_s=1, max_pause_s=5, num_attempts=6))
    assert pauses == [1, 2, 4, 5, 5]


# --------------------------------------------------------------------------------------------------------------------
# fsspec


class Slow:
    """Stands for a file system whose reads fail as they are told to."""

    retries = 5
    sleep_s = 0.0
    errors: tuple[Exception, ...] = ()
    asked: tuple[tuple[int, int], ...] = ()

    def info(self, path: str) -> dict[str, int]:
        return {"size": len(CONTENT)}

    def cat_file(self, path: str, start: int = 0, end: int = 0) -> bytes:
        type(self).asked += ((start, end),)
        if self.errors and start:
            error, *rest = self.errors
            type(self).errors = tuple(rest)
            raise error
        time.sleep(self.sleep_s)
        return CONTENT[start:end]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    class Mine(Slow):
        pass

    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: (Mine(), url))
    monkeypatch.setattr(protocols, "BLOCK_BYTES", 60_000)
    return Mine


def test_other_protocols_are_read_in_blocks_and_resumed(slow: type[Slow]) -> None:
    slow.errors = (OSError("reset"), RuntimeError("odd"))
    assert fetch("abc://host/0.tar") == CONTENT
    assert slow.asked == ((0, 60_000), *[(60_000, 102_400)] * 3)


def test_reads_of_other_protocols_have_a_timeout(slow: type[Slow]) -> None:
    slow.sleep_s = 1.0
    assert "nothing came for 0.3 s" in failure("abc://host/0.tar")


def test_missing_files_and_credentials_are_final_everywhere(slow: type[Slow]) -> None:
    no_credentials = type("NoCredentialsError", (Exception,), {})
    for error in (FileNotFoundError("gone"), PermissionError("no"), no_credentials("Unable to locate\ncredentials")):
        slow.errors, slow.asked = (error,) * 9, ()
        message = failure("abc://host/0.tar")
        assert type(error).__name__ in message
        assert ("FSSPEC_S3_ANON" in message) is isinstance(error, no_credentials)
        assert len(slow.asked) == 2


def test_memory_is_a_protocol_too() -> None:
    with fsspec.open("memory://set/0.tar", "wb") as file:
        file.write(CONTENT)  # pyright: ignore[reportAttributeAccessIssue]
    assert fetch("memory://set/0.tar") == CONTENT
    assert list_remote(Place("memory://set/*.tar"), QUICK) == [Place("memory:///set/0.tar")]
    with pytest.raises(NotFound, match="FileNotFoundError"):
        fetch("memory://set/1.tar")


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert failure("gs://bucket/0.tar").endswith(
        "gs:// needs a package that is not installed; install it with `pip install gcsfs`"
    )
    assert "ftq:// is no protocol that fsspec knows" in failure("ftq://host/0.tar")


@pytest.mark.parametrize("place", ["https://host/*.tar", "pipe:cat {name}"])
def test_http_and_commands_have_no_listing(place: str) -> None:
    with pytest.raises(DataError, match=r"can not be listed by .* write the names with braces"):
        list_remote(Place(place), QUICK)


# --------------------------------------------------------------------------------------------------------------------
# Commands

ALLOWED = FetchConfig(read_timeout_s=5, num_attempts=2, first_pause_s=0.001, allow_pipe=True)


def test_commands_are_run_only_when_they_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "a b.tar").write_bytes(CONTENT)
    place = Place(f"pipe:cat {tmp_path}/{{name}}; touch {tmp_path}/ran") / "a b.tar"
    assert "--data.allow_pipe" in failure(place.url)
    assert not (tmp_path / "ran").exists()
    assert fetch(place.url, ALLOWED) == CONTENT


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("echo out of luck >&2; exit 3", "status 3 and said: out of luck"),
        ("false | cat", "ended with status 1"),
        ("echo x", "ended after 2 of 102400 bytes"),
        ("yes", "more than the 102400 bytes"),
        ("exit 0", "ended after 0 of"),
    ],
)
def test_commands_that_fail_are_told(command: str, reason: str) -> None:
    message = failure(f"pipe:{command}", ALLOWED)
    assert reason in message
    assert "2 attempts failed" in message


def test_commands_have_timeouts_and_are_ended_with_all_that_they_started(tmp_path: Path) -> None:
    start = f"echo x; (sleep 1; touch {tmp_path}/alive) | cat"
    assert "nothing came for 0.2 s" in failure(
        f"pipe:{start}", FetchConfig(read_timeout_s=0.2, num_attempts=1, allow_pipe=True)
    )
    limited = FetchConfig(read_timeout_s=9, pipe_timeout_s=0.2, num_attempts=1, allow_pipe=True)
    assert "did not end within 0.2 s" in failure(f"pipe:{start}", limited)
    assert "did not end within 0.2 s" in failure(f"pipe:exec >&-; sleep 30; true {start}", limited)
    time.sleep(1.3)
    assert not (tmp_path / "alive").exists()

"""Reads a file by HTTP, by any protocol that fsspec knows, or from a command: in blocks, with a timeout for each read.

HTTP is read with Python's own client and a socket that has a timeout, not with fsspec's: that one needs aiohttp and a thread
of its own, and reader processes are forked, which no thread survives. For all other protocols fsspec is asked. It starts its
thread anew in a forked process, and refuses file systems that were made before; so none is kept here.
"""

import contextlib
import http.client
import os
import queue
import select
import shutil
import signal
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec
import fsspec.core
from fsspec.registry import known_implementations

from data.places import PIPE, Place

BLOCK_BYTES = 8 * 2**20
"""So much is asked of fsspec at once."""

_FINAL_STATUS = frozenset({400, 401, 403, 404, 405, 407, 410, 451})  # asking again would not help
_FINAL_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError)
# Of packages that need not be installed, hence by name.
_FINAL_ERROR_NAMES = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "UnauthorizedSSOTokenError"}
)

Result = TypeVar("Result")
Blocks = Iterator[tuple[int, bytes]]
"""Pieces of a file with the position of each, without gaps. The first says where it begins: where it was asked to, or at 0."""


@dataclass(frozen=True)
class FetchConfig:
    """How long is waited, and how often is tried."""

    read_timeout_s: float = 60.0
    """Longest silence of a server, in connecting and in every read; above 0. For all but HTTP a read is of 8 MiB."""
    num_attempts: int = 6
    """Of each file in all, at least 1."""
    first_pause_s: float = 1.0
    """Before the second attempt; it doubles with each one."""
    max_pause_s: float = 30.0
    """Longest pause."""
    allow_pipe: bool = False
    """Whether commands of `pipe:` places may be run."""
    pipe_timeout_s: float = 3600.0
    """Longest time that one command may take for one file."""


class Refused(Exception):  # noqa: N818 - what happened to the request
    """There is no such file, or it may not be read: another attempt would end the same way.

    Args:
        reason: for the user.
        is_missing: the server is there, and has no such file.
    """

    def __init__(self, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing


class WrongContent(Exception):  # noqa: N818 - what came
    """The file came, but it is not the one that was expected."""


class Broken(OSError):  # noqa: N818 - what happened to the transfer
    """The transfer ended early.

    Args:
        reason: for the user.
        pause_s: the server asks to wait so long.
    """

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


def read_blocks(place: Place, start: int, num_bytes: int | None, config: FetchConfig, *, fresh: bool) -> Blocks:
    """Reads a file from a position on.

    Args:
        place: the file.
        start: where to begin; servers and commands that can not do so begin at 0.
        num_bytes: length that is expected, None when it is not known.
        config: timeouts, and whether commands may be run.
        fresh: make new connections, because the old ones may be what is broken.

    Yields:
        (position, bytes), one after the other until the end.

    Raises:
        Refused: there is no such file, or it may not be read.
        WrongContent: the file has another length than expected.
        OSError, http.client.HTTPException: the transfer ended early; `Broken` and TimeoutError are OSErrors.
    """
    if place.scheme == "pipe":
        return _pipe_blocks(place, config)
    if place.is_http:
        return _http_blocks(place, start, num_bytes, config)
    return _fsspec_blocks(place, start, num_bytes, config, fresh=fresh)


# --------------------------------------------------------------------------------------------------------------------
# HTTP


def _http_blocks(place: Place, start: int, num_expected: int | None, config: FetchConfig) -> Blocks:
    try:
        # The scheme is http or https: no other is taken for HTTP. The timeout is that of the socket, so of every read.
        response = urllib.request.urlopen(_request(place, start), timeout=config.read_timeout_s)  # noqa: S310
    except urllib.error.HTTPError as error:
        with error:
            _raise_status(error, start)
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise Refused(f"its certificate is not trusted ({error.reason.verify_message})") from error
        raise
    except (ValueError, http.client.InvalidURL) as error:
        raise Refused(f"it is no URL of a file ({error})") from error
    with response:
        position = _first_position(response, start)
        length = response.headers.get("Content-Length", "")
        # Where the length is known already, what the server states is neither needed nor believed.
        expected = position + int(length) if num_expected is None and length.isdigit() else None
        while block := response.read1(2**20):
            yield position, block
            position += len(block)
        if expected is not None and position < expected:
            raise Broken(f"the server closed the connection after {position} of {expected} bytes")
        if position == 0:
            yield 0, b""


def _request(place: Place, start: int) -> urllib.request.Request:
    parts = urlsplit(place.url)
    user, _, host = parts.netloc.rpartition("@")
    # What a server compresses on the way has another length, and can not be taken up in the middle.
    headers = {"User-Agent": "mae-vit", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(parts._replace(netloc=host, fragment="").geturl(), headers=headers)  # noqa: S310
    if user:
        token = b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")  # it is meant for this host alone
    return request


def _raise_status(error: urllib.error.HTTPError, start: int) -> NoReturn:
    reason = f"the server answered {error.code} {error.reason}"
    if error.code == 416 and start:
        raise WrongContent(f"it has no more than {start} bytes") from error
    if error.code in _FINAL_STATUS:
        raise Refused(reason, is_missing=error.code in (404, 410)) from error
    wait = error.headers.get("Retry-After", "")
    raise Broken(reason, float(wait) if wait.isdigit() else 0.0) from error


def _first_position(response: http.client.HTTPResponse, start: int) -> int:
    """Where the answer begins: servers may ignore that a part was asked for."""
    if response.status != 206:
        return 0
    unit, _, extent = response.headers.get("Content-Range", "").partition(" ")
    if unit != "bytes" or extent.partition("-")[0] != str(start):
        raise WrongContent(f"the server sent {unit} {extent!r} when it was asked for bytes from {start} on")
    return start


# --------------------------------------------------------------------------------------------------------------------
# All protocols that fsspec knows


def open_filesystem(place: Place, config: FetchConfig, *, fresh: bool = False) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns fsspec's file system for a place, and the path in it.

    Args:
        place: a file or folder.
        config: its timeout is handed on, where it is known how.
        fresh: make new connections.

    Raises:
        Refused: the protocol is not known, or its package is not installed.
    """
    options: dict[str, Any] = {"skip_instance_cache": True} if fresh else {}
    if place.scheme in ("s3", "s3a"):
        # Attempts are counted here, not there as well: 6 times 5 times 5 would be hours.
        limits = {
            "connect_timeout": config.read_timeout_s,
            "read_timeout": config.read_timeout_s,
            "retries": {"max_attempts": 0},
        }
        options["config_kwargs"] = limits
    try:
        filesystem, path = fsspec.core.url_to_fs(place.url, **options)
    except ImportError as error:
        known = known_implementations.get(place.scheme, {})
        package = str(known.get("class", "")).partition(".")[0]
        remedy = f"install it with `pip install {package}`" if package not in ("", "fsspec") else known.get("err", str(error))
        raise Refused(f"{place.scheme}:// needs a package that is not installed; {remedy}") from error
    except ValueError as error:
        raise Refused(f"{place.scheme}:// is no protocol that fsspec knows ({error})") from error
    if place.scheme in ("s3", "s3a"):
        filesystem.retries = 1
    return filesystem, path


def _fsspec_blocks(place: Place, start: int, num_expected: int | None, config: FetchConfig, *, fresh: bool) -> Blocks:
    filesystem, path = open_filesystem(place, config, fresh=fresh)
    size = ask(lambda: filesystem.info(path)["size"], config)
    if size is None:
        yield 0, _cat(filesystem, path, config)
        return
    if num_expected is not None and size != num_expected:
        raise WrongContent(f"it has {size} bytes, expected {num_expected}")
    if size == 0:
        yield 0, b""
    position = start
    while position < size:
        stop = min(position + BLOCK_BYTES, size)
        block = _cat(filesystem, path, config, position, stop)
        if len(block) != stop - position:
            raise Broken(f"{len(block)} bytes came when {stop - position} were asked for")
        yield position, block
        position = stop


def _cat(
    filesystem: fsspec.AbstractFileSystem, path: str, config: FetchConfig, start: int | None = None, stop: int | None = None
) -> bytes:
    content = ask(lambda: filesystem.cat_file(path, start=start, end=stop), config)
    assert isinstance(content, bytes)
    return content


def ask(function: Callable[[], Result], config: FetchConfig) -> Result:
    """Calls what waits for a network, for no longer than the timeout allows.

    Raises:
        Refused: there is no such file, or it may not be read.
        Broken: anything else went wrong.
        TimeoutError: it took too long; the call is left behind in a thread of its own, whatever becomes of it.
    """
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((function(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=call, daemon=True, name="fetch").start()
    try:
        answer, error = answers.get(timeout=config.read_timeout_s)
    except queue.Empty:
        raise TimeoutError from None
    if error is None:
        return answer
    text = " ".join(str(error).split()) or "it was refused"
    if type(error).__name__ == "NoCredentialsError":
        text += "; give them in ~/.aws or in the environment, or set FSSPEC_S3_ANON=true for a public bucket"
    if isinstance(error, _FINAL_ERRORS) or type(error).__name__ in _FINAL_ERROR_NAMES:
        raise Refused(f"{type(error).__name__}: {text}", is_missing=isinstance(error, FileNotFoundError)) from error
    if isinstance(error, TimeoutError):
        raise error
    raise Broken(f"of {type(error).__name__}: {text[:300]}") from error


# --------------------------------------------------------------------------------------------------------------------
# Commands


def _pipe_blocks(place: Place, config: FetchConfig) -> Blocks:
    command = place.url.removeprefix(PIPE)
    if not config.allow_pipe:
        raise Refused("it is a command, and commands are not run unless --data.allow_pipe is given; give it if you trust it")
    bash = shutil.which("bash")
    if bash is None:
        raise Refused("it is a command, and there is no bash on this machine to run it")
    deadline = time.monotonic() + config.pipe_timeout_s
    position, status = 0, None
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(  # noqa: S603 - the user's own command, and allowed by him
            [bash, "-o", "pipefail", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # so that it can be ended with all that it started
        ) as process,
    ):
        try:
            while block := _read_pipe(process, deadline, config):
                yield position, block
                position += len(block)
            status = process.wait(max(deadline - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired as error:
            raise Broken(f"the command did not end within {config.pipe_timeout_s:g} s") from error
        finally:
            if status is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)
        if status:
            errors.seek(max(errors.seek(0, os.SEEK_END) - 300, 0))
            said = " ".join(errors.read().decode(errors="replace").split())
            raise Broken(f"the command ended with status {status}" + (f" and said: {said}" if said else ""))
    if position == 0:
        yield 0, b""


def _read_pipe(process: subprocess.Popen[bytes], deadline: float, config: FetchConfig) -> bytes:
    assert process.stdout is not None
    wait_s = min(config.read_timeout_s, max(deadline - time.monotonic(), 0.0))
    if not select.select([process.stdout], [], [], wait_s)[0]:
        if wait_s < config.read_timeout_s:
            raise Broken(f"the command did not end within {config.pipe_timeout_s:g} s")
        raise TimeoutError
    return os.read(process.stdout.fileno(), 2**20)

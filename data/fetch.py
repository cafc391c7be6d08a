"""Fetches files from elsewhere: whole, verified, and with patience.

Every read has a limit of time, so that a server which stalls in the middle of a file is noticed. What breaks off is taken up
where it broke, where the server can; what fails is tried again, a stated number of times, with growing pauses. Whatever fails
in the end is an error: no part of a data set is left out because a network was down.
"""

import hashlib
import http.client
import random
import tempfile
import threading
import urllib.error
from typing import Any, BinaryIO

from data.errors import DataError
from data.places import Place
from data.protocols import Broken, FetchConfig, Refused, WrongContent, ask, open_filesystem, read_blocks

MAX_RETRIES_OF_WRONG = 2
"""So often a file that came whole, but with other content than expected, is fetched once more."""


class NotFound(DataError):  # noqa: N818 - as HTTP calls it
    """There is no such file."""


class Stopped(Exception):  # noqa: N818 - nothing failed
    """Nobody wants the file any more."""


def fetch_bytes(place: Place, config: FetchConfig) -> bytes:
    """Reads a small file whole.

    Raises:
        DataError: see `download`.
    """
    with tempfile.SpooledTemporaryFile(2**26) as target:
        download(place, target, config)
        target.seek(0)
        return target.read()


def download(
    place: Place,
    target: Any,
    config: FetchConfig,
    *,
    num_bytes: int | None = None,
    sha256: str | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Writes a file from elsewhere into an open binary file, from its start.

    Args:
        place: the file.
        target: seekable binary file open for writing.
        config: how patiently.
        num_bytes: its length; where it is None, the length that the server states.
        sha256: of its content, hexadecimal; unchecked where it is None.
        stop: set by another thread to have the download given up.

    Raises:
        NotFound: the file is missing; it is a DataError.
        DataError: it is forbidden, all attempts failed, its content is wrong, or the disk is full.
        Stopped: `stop` was set.
    """
    stop = stop or threading.Event()
    received = _Received(target, num_bytes, sha256, stop)
    attempt, num_wrong, reason = 0, 0, ""
    for attempt in range(1, config.num_attempts + 1):
        pause_s = min(config.first_pause_s * 2 ** (attempt - 1), config.max_pause_s)
        try:
            for position, block in read_blocks(place, received.num_bytes, num_bytes, config, fresh=attempt > 1):
                received.add(position, block)
            received.check()
            return
        except Refused as error:
            kind = NotFound if error.is_missing else DataError
            raise kind(f"{place} can not be read: {error}") from error
        except WrongContent as error:
            received.restart()
            num_wrong += 1
            reason = str(error)
        except (OSError, http.client.HTTPException) as error:
            reason = _describe(error, config)
            pause_s = max(pause_s, min(getattr(error, "pause_s", 0.0), config.max_pause_s))
        if num_wrong > MAX_RETRIES_OF_WRONG or attempt == config.num_attempts:
            break
        # Not from a seed: it keeps processes that failed together from asking again together.
        if stop.wait(pause_s * random.uniform(0.5, 1.0)):  # noqa: S311 - no secret
            raise Stopped
    advice = "copy or index the data set again" if num_wrong else "check the network and the server, and start again"
    raise DataError(f"{place} can not be read: {attempt} attempts failed, the last because {reason}; {advice}")


def list_remote(pattern: Place, config: FetchConfig) -> list[Place]:
    """Lists the files that a pattern without braces stands for, sorted.

    Raises:
        DataError: the protocol has no listing, or the listing failed; it is not tried again.
    """
    if pattern.is_http or pattern.scheme == "pipe":
        raise DataError(
            f"{pattern} can not be listed by {pattern.scheme}; write the names with braces, as in {{0000..0099}}.tar"
        )
    try:
        filesystem, path = open_filesystem(pattern, config)
        found = ask(lambda: filesystem.glob(path), config)
    except (Refused, OSError) as error:
        raise DataError(f"{pattern} can not be listed: {error or 'nothing came in time'}") from error
    return [Place(filesystem.unstrip_protocol(str(name))) for name in sorted(found)]


class _Received:
    """What has come of a file so far."""

    def __init__(self, target: BinaryIO, num_expected: int | None, sha256: str | None, stop: threading.Event) -> None:
        self.target = target
        self.num_expected = num_expected
        self.sha256 = sha256
        self.stop = stop
        self.restart()

    def restart(self) -> None:
        """Forgets all of it."""
        self.num_bytes = 0
        self.digest = hashlib.sha256()

    def add(self, position: int, block: bytes) -> None:
        """Takes a piece; one from position 0 starts over."""
        if self.stop.is_set():
            raise Stopped
        if position == 0:
            self.restart()
        assert position == self.num_bytes, "pieces come in order"
        if self.num_expected is not None and self.num_bytes + len(block) > self.num_expected:
            raise WrongContent(f"it has more than the {self.num_expected} bytes that were expected")
        try:
            self.target.seek(position)
            left = memoryview(block)
            while left:  # a raw file may take a part, as it does when the disk is nearly full
                left = left[self.target.write(left) :]
        except OSError as error:  # the disk's fault, not the network's: another attempt would meet the same
            raise DataError(
                f"what is read from elsewhere can not be written: {error.strerror}; make room on that disk"
            ) from error
        self.digest.update(block)
        self.num_bytes += len(block)

    def check(self) -> None:
        """Raises what is wrong with the whole."""
        if self.num_expected is not None and self.num_bytes < self.num_expected:
            raise Broken(f"it ended after {self.num_bytes} of {self.num_expected} bytes")
        if self.sha256 is not None and self.digest.hexdigest() != self.sha256:
            raise WrongContent(f"its content has the sha256 {self.digest.hexdigest()}, expected {self.sha256}")
        self.target.truncate(self.num_bytes)
        self.target.flush()


def _describe(error: Exception, config: FetchConfig) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception) else error
    if isinstance(cause, TimeoutError):
        return f"nothing came for {config.read_timeout_s:g} s"
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    text = " ".join(text.split()) or type(cause).__name__
    return text if isinstance(cause, Broken) else f"of {type(cause).__name__}: {text[:300]}"

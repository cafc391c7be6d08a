"""Shards from elsewhere, kept on this machine's disk: a folder with a bound that all processes of the machine share.

A shard is fetched whole when it is first needed, verified, and renamed into its place, so that what has a shard's name is one.
Its name is made of where it comes from and of the hash of its content: what changes gets another name. When the bound is
reached, the shards that were not used for longest go.

Processes agree by locks on the files themselves (flock), which the system takes back from a process that is killed:
- whoever fetches a shard locks its partial file, and the others wait for it. The partial file has the full length from the
  start, so that it counts against the bound before it is filled;
- whoever reads a shard locks it together with all other readers, and a locked shard is not removed. A reader holds it for one
  read only and waits for nothing meanwhile, so nobody can wait for a reader who waits for him;
- whoever makes room locks the folder.

Where there are no locks (Windows, some network disks), processes may fetch a shard twice, and the bound may be passed for a
while; what they read is right all the same.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from tqdm import tqdm

from data.errors import DataError
from data.fetch import FetchConfig, Stopped, download
from data.places import Place

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

DEFAULT_GIB = 100.0
"""The bound where none is given, or half of what is free on the disk where that is less."""
WAIT_S = 600.0
"""So long is waited for others to finish reading what fills the cache, which takes them milliseconds."""
POLL_S = 0.05
ABANDONED_AFTER_S = 24 * 3600
"""Where there are no locks, a partial file that did not change for so long belongs to a program that was killed."""
OLD_INDEX_AFTER_S = 90 * 24 * 3600
"""An index that no data set was opened with for so long is removed."""
THRASH_S = 600.0
"""A shard that has to be fetched again after so short a time was removed too early."""

_OURS = re.compile(r"[0-9a-f]{32}-.*")  # names that may be removed; the folder may hold files of others
_PARTIAL = ".partial"
LOCK_NAME = ".lock"

_held_partials: set[int] = set()  # descriptors of partial files of this process
_last_had: dict[Path, float] = {}  # when this process last had a shard
_warned = threading.Event()


def _forget_partials() -> None:
    """In a forked child: gives up its copies, or the lock would stay when the parent, which fetches, is killed."""
    for descriptor in _held_partials:
        with contextlib.suppress(OSError):  # the parent was just closing it
            os.close(descriptor)
    _held_partials.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_partials)


def cache_folder() -> Path:
    """The user's cache: `$MAE_VIT_CACHE`, else `$XDG_CACHE_HOME/mae-vit`, else `~/.cache/mae-vit`."""
    if chosen := os.environ.get("MAE_VIT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mae-vit"


def shard_cache(cache_dir: str | Path = "", cache_gib: float = 0.0, fetch: FetchConfig | None = None) -> "ShardCache":
    """Describes the cache that a data set from elsewhere is read through; nothing is made before it is used.

    Args:
        cache_dir: its folder; "" takes `shards` in the user's cache (`cache_folder`).
        cache_gib: its bound; 0 takes 100 GiB, or half of what the disk has for it where that is less.
        fetch: how patiently files are fetched.

    Raises:
        DataError: the bound is negative.
    """
    if cache_gib < 0:
        raise DataError(f"the cache of shards can not hold {cache_gib:g} GiB; expected more than 0, or 0 for the default")
    folder = Path(cache_dir) if cache_dir else cache_folder() / "shards"
    max_bytes = int(cache_gib * 2**30) if cache_gib else min(int(DEFAULT_GIB * 2**30), _room_for(folder) // 2)
    return ShardCache(folder, max_bytes, fetch or FetchConfig())


def _room_for(folder: Path) -> int:
    """Bytes that are free on the folder's disk, or taken by the cache already."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path())
    return shutil.disk_usage(existing).free + sum(entry.num_bytes for entry in _entries(folder))


@dataclass(frozen=True)
class _Entry:
    path: Path
    num_bytes: int
    num_written: int
    """Bytes on the disk: less than `num_bytes` for a partial file."""
    last_use: float

    @property
    def is_partial(self) -> bool:
        return _PARTIAL in self.path.suffix


def _entries(folder: Path) -> list[_Entry]:
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
        for file in files:
            if _OURS.fullmatch(file.name):
                with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
                    status = file.stat()
                    written = min(getattr(status, "st_blocks", status.st_size) * 512, status.st_size)
                    found.append(_Entry(Path(file.path), status.st_size, written, status.st_mtime))
    return found


@dataclass(frozen=True)
class ShardCache:
    """The cache's folder and its bound; made by `shard_cache`. Picklable: it holds no open files."""

    folder: Path
    max_bytes: int
    fetch: FetchConfig = field(default_factory=FetchConfig)

    @contextlib.contextmanager
    def open(self, place: Place, num_bytes: int, sha256: str) -> Iterator[int]:
        """Opens a shard for one read, and fetches it first where it is not here.

        Args:
            place: where it comes from.
            num_bytes: its length.
            sha256: of its content, hexadecimal.

        Yields:
            A descriptor, open for reading; meanwhile the shard is not removed.

        Raises:
            DataError: it can not be fetched, or there is no room for it.
        """
        path = self.path_of(place, sha256)
        while (descriptor := self._open_kept(path, num_bytes)) is None:
            self._fetch(place, path, num_bytes, sha256)
        _last_had[path] = time.monotonic()
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def bring(self, place: Place, num_bytes: int, sha256: str, stop: threading.Event | None = None) -> None:
        """Fetches a shard where it is not here.

        Raises:
            DataError: it can not be fetched, or there is no room for it.
            Stopped: `stop` was set by another thread.
        """
        path = self.path_of(place, sha256)
        while not path.exists():
            self._fetch(place, path, num_bytes, sha256, stop)

    def bring_index(self, place: Place, sha256: str) -> Path:
        """Returns the local copy of an index, and fetches it where it is not here.

        Indices lie in the folder `indices` of the cache, do not count against the bound (24 bytes for each sample), and go
        after 90 days without use.

        Raises:
            DataError: it can not be fetched or is not the one with this hash.
        """
        folder = self.folder / "indices"
        path = folder / f"{sha256}.npy"
        while not path.exists():
            self._fetch(place, path, None, sha256)
        with contextlib.suppress(OSError):  # somebody else's file: he sees to it
            os.utime(path)
        for old in folder.glob("*.npy"):
            with contextlib.suppress(OSError):  # another process was faster
                if time.time() - old.stat().st_mtime > OLD_INDEX_AFTER_S:
                    old.unlink()
        return path

    def path_of(self, place: Place, sha256: str) -> Path:
        """Where a shard lies once it is here. What follows a question mark is no part of the name: keys in it expire."""
        digest = hashlib.sha256(f"{place}\n{sha256}".encode()).hexdigest()
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", place.name)[-60:]
        return self.folder / f"{digest[:32]}-{readable}"

    def _open_kept(self, path: Path, num_bytes: int) -> int | None:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataError(f"{path} can not be opened: {error.strerror}; it is only a copy: delete it") from error
        try:
            _lock(descriptor, exclusive=False)
            if _is_at(descriptor, path) and os.fstat(descriptor).st_size == num_bytes:
                with contextlib.suppress(OSError):  # of another user: then it goes earlier than it need
                    os.utime(path)
                kept, descriptor = descriptor, -1
                return kept
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if path.exists() and path.stat().st_size != num_bytes:  # cut by somebody else
            path.unlink(missing_ok=True)
        return None

    # ----------------------------------------------------------------------------------------------------------------
    # Fetching

    def _fetch(self, place: Place, path: Path, num_bytes: int | None, sha256: str, stop: threading.Event | None = None) -> None:
        """Brings a file to its path, or waits until another process has brought it or failed to: the caller looks again."""
        if num_bytes is not None and num_bytes > self.max_bytes:
            raise DataError(
                f"{place} has {num_bytes / 2**30:.3g} GiB, and the cache {self.folder} may hold {self.max_bytes / 2**30:.3g} "
                f"GiB in all; give more with --data.cache_gib, best room for all shards that are read at a time"
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            locked = _has_locks(self.folder)
            partial = path.with_name(f"{path.name}{_PARTIAL}{'' if locked else f'-{os.getpid()}-{secrets.token_hex(4)}'}")
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise DataError(f"{path.parent} can not be written: {error.strerror}; {_ELSEWHERE}") from error
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            _held_partials.add(descriptor)
            try:
                if not _wait_for_turn(descriptor, partial, stop):
                    return  # another process brought it, or failed to
                renamed = False
                try:
                    if not path.exists():
                        self._fill(place, path, file, num_bytes, sha256, stop)
                        # Under the lock: who adds up what is here could meet neither the old name nor the new one.
                        with _locked(self.folder / LOCK_NAME):
                            partial.rename(path)
                        renamed = True
                except OSError as error:
                    raise DataError(f"{path} can not be written: {error.strerror}; {_ELSEWHERE}") from error
                finally:
                    if not renamed:  # while it is locked: then the name can not be another process's
                        partial.unlink(missing_ok=True)
            finally:
                _held_partials.discard(descriptor)

    def _fill(
        self, place: Place, path: Path, file: IO[bytes], num_bytes: int | None, sha256: str, stop: threading.Event | None
    ) -> None:
        os.ftruncate(file.fileno(), 0)  # a killed program may have left it at its full length
        if num_bytes is not None:
            self._reserve(place, file.fileno(), num_bytes, stop)
            self._warn_of_thrashing(place, path)
        download(place, file, self.fetch, num_bytes=num_bytes, sha256=sha256, stop=stop)
        os.fsync(file.fileno())  # a machine that loses power must not keep a shard's name without its content

    def _warn_of_thrashing(self, place: Place, path: Path) -> None:
        age_s = time.monotonic() - _last_had.get(path, -THRASH_S)
        if age_s < THRASH_S and not _warned.is_set():
            _warned.set()
            tqdm.write(
                f"warning: {place} is fetched again, {age_s:.0f} s after it was read, because the cache {self.folder} may hold "
                f"only {self.max_bytes / 2**30:.3g} GiB; give more with --data.cache_gib, or read fewer shards at a time",
                file=sys.stderr,
            )

    # ----------------------------------------------------------------------------------------------------------------
    # The bound

    def _reserve(self, place: Place, descriptor: int, num_bytes: int, stop: threading.Event | None) -> None:
        """Makes room for a shard and gives its partial file the full length.

        Raises:
            DataError: the disk is full, or others hold what fills the cache for too long.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            with _locked(self.folder / LOCK_NAME):
                problem, others = self._make_room(num_bytes)
                if problem is None:
                    os.ftruncate(descriptor, num_bytes)
                    return
            if others == "fetch":  # that ends by itself, one way or the other
                deadline = time.monotonic() + WAIT_S
            elif others == "nothing" or time.monotonic() > deadline:
                raise DataError(f"there is no room for {place}: {problem}; {_ELSEWHERE}")
            _pause(stop)

    def _make_room(self, num_needed: int) -> tuple[str | None, Literal["nothing", "read", "fetch"]]:
        """Removes what was not used for longest until there is room.

        Returns:
            What keeps the shard out, None when there is room; and what others do that will make room when they are done.
        """
        entries = sorted((entry for entry in _entries(self.folder) if not _is_stale(entry)), key=lambda entry: entry.last_use)
        total = sum(entry.num_bytes for entry in entries)
        # What others have been promised but have not written yet.
        free = shutil.disk_usage(self.folder).free - sum(entry.num_bytes - entry.num_written for entry in entries)
        for entry in entries:
            if total + num_needed <= self.max_bytes and num_needed <= free:
                return None, "nothing"
            if not entry.is_partial and _remove_unused(entry.path):
                total -= entry.num_bytes
                free += entry.num_written
        if total + num_needed <= self.max_bytes and num_needed <= free:
            return None, "nothing"
        if num_needed > free:
            problem = f"it needs {num_needed / 2**30:.3g} GiB in {self.folder}, where {max(free, 0) / 2**30:.3g} GiB are free"
        else:
            problem = f"all {self.max_bytes / 2**30:.3g} GiB that {self.folder} may hold are in use"
        if any(entry.path.suffix == _PARTIAL and entry.num_bytes for entry in entries):
            return problem, "fetch"
        return problem, "read" if total else "nothing"


_ELSEWHERE = "give another folder with --data.cache_dir, or another bound with --data.cache_gib"


def _is_stale(entry: _Entry) -> bool:
    """Removes a partial file that nobody fills any more, and says so."""
    if not entry.is_partial:
        return False
    if entry.path.suffix == _PARTIAL:
        return _remove_unused(entry.path)
    is_old = time.time() - entry.last_use > ABANDONED_AFTER_S
    if is_old:
        entry.path.unlink(missing_ok=True)
    return is_old


def _remove_unused(path: Path) -> bool:
    """Removes a file, unless some process uses it."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:  # of another user, who removes it
        return False
    try:
        if not _try_lock(descriptor) or not _is_at(descriptor, path):
            return False
        path.unlink(missing_ok=True)
        return True
    except PermissionError:  # Windows: it is open
        return False
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------------------------
# Locks


def _lock(descriptor: int, *, exclusive: bool) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)


def _try_lock(descriptor: int) -> bool:
    """Locks a file if nobody else has; True also where there are no locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return True


def _has_locks(folder: Path) -> bool:
    if fcntl is None:
        return False
    with (folder / LOCK_NAME).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        _lock(file.fileno(), exclusive=True)
        yield


def _wait_for_turn(descriptor: int, partial: Path, stop: threading.Event | None) -> bool:
    """Waits for the lock of a partial file; False when the file was renamed or removed meanwhile."""
    while not _try_lock(descriptor):
        _pause(stop)
    return _is_at(descriptor, partial)


def _is_at(descriptor: int, path: Path) -> bool:
    """Says whether an open file still has its name: another one may have it by now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _pause(stop: threading.Event | None) -> None:
    if stop is None:
        time.sleep(POLL_S)
    elif stop.wait(POLL_S):
        raise Stopped

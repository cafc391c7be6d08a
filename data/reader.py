"""Samples by number: reads at known offsets, from shards that lie here or are fetched when they are first needed."""

import contextlib
import os
import tarfile
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from data.cache import ShardCache
from data.errors import DataError
from data.fetch import Stopped
from data.manifest import INDEX_COMMAND, ShardInfo
from data.places import Place
from data.shards import ShardSet, split_name


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as it is stored."""

    index: int
    """Number within the data set."""
    key: str
    """The image member's name without its suffix; cut off at 100 characters in GNU and PAX archives."""
    shard: str
    """Name of the shard: of its file, with the folder where the set has several."""
    label: int
    """Class number, `NO_LABEL` when there is none."""
    data: bytes
    """The image file."""


class ShardReader:
    """Reads samples by number, and keeps the local shards that were used last open.

    Each process opens its own descriptors: they are no part of a pickle, and a forked child starts with none. Not for
    several threads at once: one could close the shard that another is about to read.

    Shards from elsewhere are opened in the cache for each read and closed after it. That costs microseconds, and the cache
    may remove what nobody reads just then: how many shards are open says nothing about how much it must hold.

    Args:
        shards: the data set.
        max_open: how many shards stay open; the one unused for longest is closed first.
    """

    def __init__(self, shards: ShardSet, *, max_open: int = 32) -> None:
        self.shards = shards
        self.max_open = max_open
        self._descriptors: OrderedDict[int, int] = OrderedDict()  # by shard number, the last one used last
        self._ahead: _Prefetcher | None = None
        self._owner = os.getpid()

    def read(self, index: int) -> Sample:
        """Returns sample `index` (0 .. len - 1), by one read of its tar header and its data.

        Raises:
            DataError: the shard was changed or damaged after it was indexed, or can not be opened or fetched.
            IndexError: there is no such sample.
        """
        location = self.shards.locate(index)
        block = self._read_block(location.shard_number, tarfile.BLOCKSIZE + location.size, location.offset - tarfile.BLOCKSIZE)
        header, data = block[: tarfile.BLOCKSIZE], block[tarfile.BLOCKSIZE :]
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise self._changed(location.shard_number, index, f"no tar header before its data ({error})") from error
        if not member.size == location.size == len(data):
            what = f"{member.size} bytes by its header, {location.size} by the index"
            raise self._changed(location.shard_number, index, what)
        key, _ = split_name(member.name)
        return Sample(index, key, self.shards.shard_name(location.shard_number), location.label, data)

    def prefetch(self, indices: Sequence[int] | np.ndarray) -> None:
        """Fetches the shards of samples that will be read soon, in the background, in the order given.

        What an earlier call asked for and is not begun yet is forgotten. Shards that lie here already, or in the cache, cost
        a look. At most half of the cache is filled ahead, so that this does not push out what is being read. Failures are
        left to the read that needs the shard: it tries again, and reports.

        Args:
            indices: (n,) integers, samples 0 .. len - 1, the next one first.
        """
        if self.shards.cache is None:
            return
        numbers, firsts = np.unique(self.shards.shard_numbers(indices), return_index=True)
        wanted, num_bytes = [], 0
        for number in numbers[np.argsort(firsts)].tolist():
            place, info = self.shards.place(number), self.shards.manifest.shards[number]
            if isinstance(place, Place):
                num_bytes += info.num_bytes
                if num_bytes > self.shards.cache.max_bytes // 2:
                    break
                wanted.append((place, info))
        self._leave_parents_things()
        if self._ahead is None:
            self._ahead = _Prefetcher(self.shards.cache)
        self._ahead.want(wanted)

    def close(self) -> None:
        """Closes all shards and ends what goes on in the background; reading on opens them again."""
        self._leave_parents_things()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": OrderedDict(), "_ahead": None}

    def _leave_parents_things(self) -> None:
        """In a forked child: closes its copies of descriptors, which leaves the parent's open; its threads are not here."""
        if self._owner != os.getpid():
            self._owner = os.getpid()
            self._ahead = None
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def _read_block(self, shard_number: int, num_bytes: int, offset: int) -> bytes:
        place = self.shards.place(shard_number)
        if isinstance(place, Path):
            return os.pread(self._open(shard_number, place), num_bytes, offset)
        assert self.shards.cache is not None, "sets with places elsewhere have one"
        info = self.shards.manifest.shards[shard_number]
        with self.shards.cache.open(place, info.num_bytes, info.sha256) as descriptor:
            return os.pread(descriptor, num_bytes, offset)

    def _open(self, shard_number: int, shard: Path) -> int:
        self._leave_parents_things()
        if shard_number in self._descriptors:
            self._descriptors.move_to_end(shard_number)
            return self._descriptors[shard_number]
        if len(self._descriptors) >= self.max_open:
            os.close(self._descriptors.popitem(last=False)[1])
        try:
            descriptor = os.open(shard, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"shard {shard} can not be opened: {error.strerror}") from error
        self._descriptors[shard_number] = descriptor
        return descriptor

    def _changed(self, shard_number: int, index: int, what: str) -> DataError:
        return DataError(
            f"shard {self.shards.place(shard_number)} was changed after it was indexed: sample {index} has {what}; "
            f"index it again with `{INDEX_COMMAND} {self.shards.folder(shard_number)}`"
        )


class _Prefetcher:
    """A thread that fetches shards of a list; belongs to the process that made it."""

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache
        self._wanted: deque[tuple[Place, ShardInfo]] = deque()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="prefetch")
        self._thread.start()

    def want(self, shards: Iterable[tuple[Place, ShardInfo]]) -> None:
        with self._changed:
            self._wanted = deque(shards)
            self._changed.notify()

    def close(self) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify()
        # It ends at the next block that comes. Where none does, it is left behind: it can do no harm.
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._stop.is_set())
                if self._stop.is_set():
                    return
                place, info = self._wanted.popleft()
            with contextlib.suppress(Stopped, DataError):  # the read that needs it tries again, and reports
                self._cache.bring(place, info.num_bytes, info.sha256, self._stop)

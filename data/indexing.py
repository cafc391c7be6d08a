"""Tar shards -> manifest and index.

`index_tars` describes shards that another tool wrote, so that `data/shards.py` opens them. The steps it is made of serve
`data/writer.py`, too: every shard is read back with `scan_shard`, so an index always says what is in the file, whoever
wrote it.
"""

import dataclasses
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import signal
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from data.decode import decode_image
from data.errors import BadImage, DataError
from data.fetch import download
from data.manifest import INDEX_NAME, MANIFEST_NAME, Manifest, ShardInfo
from data.places import AnyPlace, Place, as_place
from data.protocols import FetchConfig
from data.shards import IMAGE_SUFFIXES, NO_LABEL, SAMPLE_DTYPE, split_name

# Mean and standard deviation are measured on about this many images; their error is then below 0.01 for photographs.
NUM_MEASURED = 2000

MAX_LABEL = 2**31
"""Classes are numbered below this; a larger number is none."""

Task = TypeVar("Task")
Result = TypeVar("Result")


# --------------------------------------------------------------------------------------------------------------------
# Reading shards back


class ScannedShard(NamedTuple):
    """What `scan_shard` found."""

    info: ShardInfo
    rows: np.ndarray  # (num_samples,), SAMPLE_DTYPE


class _IndexTask(NamedTuple):
    place: AnyPlace
    folder: Path  # where a shard from elsewhere is kept while it is looked at
    fetch: FetchConfig
    num_classes: int | None  # None: class numbers have no upper limit
    num_measured: int  # images that mean and std are measured on


def index_tars(
    paths: Sequence[str | AnyPlace],
    output_folder: str | Path,
    *,
    class_names: Sequence[str] = (),
    num_workers: int = 0,
    progress: bool = False,
    fetch: FetchConfig | None = None,
) -> Manifest:
    """Describes tar shards that exist already, and writes the manifest and the index: beside them where they lie here.

    Shards from elsewhere are fetched one after the other by each process, and kept in the output folder only while they are
    looked at. The manifest names them by their URLs, so that the folder is a data set, without its shards.

    Tars of webdataset, img2dataset, GNU tar and PAX are understood. The label of a sample is its `.cls` member, else
    the integer "label" of its `.json` member; hidden members and members without a suffix are passed over.

    Args:
        paths: the shards, in the order that the index shall have: URLs, or paths directly in `output_folder`.
        output_folder: where the shards lie; for shards from elsewhere a folder, which is made where there is none.
        class_names: name of class 0, 1, ...
        num_workers: processes that read shards; 0 reads in this process.
        progress: show a progress bar.
        fetch: how patiently shards are fetched.

    Raises:
        DataError: a shard is no tar, is cut off, or holds samples that a reader could not tell apart or that have no
            image; a label has no class name; a shard can not be fetched; the folder can not be written.
    """
    folder = Path(output_folder)
    places = [as_place(path) if isinstance(path, str) else path for path in paths]
    if not places:
        raise DataError(f"no tar shards were given for {folder}")
    for path in places:
        if isinstance(path, Place):
            _make_folder(folder)
            continue
        if path.resolve().parent != folder.resolve():
            raise DataError(f"{path} does not lie in {folder}; move it there, or link to it")
        if not path.is_file():
            raise DataError(f"{path} does not exist")
    scans: list[ScannedShard] = []
    moments: list[np.ndarray] = []
    tasks = _plan_indexing(places, folder, len(class_names) or None, fetch or FetchConfig())
    with tqdm(total=len(tasks), desc="indexing", unit="shard", disable=not progress) as bar:
        for scan, shard_moments in map_tasks(_index_shard, tasks, num_workers):
            scans.append(scan)
            moments.extend(shard_moments)
            bar.update()
    try:
        return write_description(folder, scans, moments, tuple(class_names))
    except OSError as error:
        raise DataError(f"{folder} can not be written: {error}") from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} can not be written: {error.strerror}") from error


def _plan_indexing(places: list[AnyPlace], folder: Path, num_classes: int | None, fetch: FetchConfig) -> list[_IndexTask]:
    measured_shards = set(spread(len(places), NUM_MEASURED).tolist())
    num_per_shard = NUM_MEASURED // len(measured_shards)
    return [
        _IndexTask(place, folder, fetch, num_classes, num_per_shard if number in measured_shards else 0)
        for number, place in enumerate(places)
    ]


def _index_shard(task: _IndexTask) -> tuple[ScannedShard, list[np.ndarray]]:
    """Scans one shard and measures some of its images; runs in a worker process."""
    if isinstance(task.place, Path):
        return _scan_and_measure(task.place, task)
    if task.place.scheme == "pipe":
        raise DataError(f"{task.place} is a command, which a manifest must not name; index the shards where they lie")
    with tempfile.NamedTemporaryFile(dir=task.folder, prefix=".indexing-") as file:
        download(task.place, file, task.fetch)
        scan, moments = _scan_and_measure(Path(file.name), task)
    return scan._replace(info=dataclasses.replace(scan.info, name=task.place.url)), moments


def _scan_and_measure(path: Path, task: _IndexTask) -> tuple[ScannedShard, list[np.ndarray]]:
    scan = scan_shard(path, task.num_classes, task.place)
    moments: list[np.ndarray] = []
    with path.open("rb") as file:
        for row in scan.rows[spread(len(scan.rows), task.num_measured)]:
            file.seek(row["offset"])
            try:
                moments.append(measure_image(decode_image(file.read(row["size"]), None).numpy()))
            except BadImage:
                continue  # it is met again, and counted, when it is read for training
    return scan, moments


def scan_shard(path: Path, num_classes: int | None = None, place: AnyPlace | None = None) -> ScannedShard:
    """Reads a tar from its first to its last byte and finds its samples.

    Args:
        path: the tar.
        num_classes: labels are below this; None sets no limit.
        place: what it is called in messages, where that is not its path.

    Raises:
        DataError: see `index_tars`.
    """
    name = place or path
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                rows, suffixes = _scan_members(tar, name, num_classes)
                # Where the last member ends. tarfile takes a damaged header, and any end of the file that lies on a
                # block boundary, for the end of the archive; so what follows is looked at here.
                end = tar.offset
        except tarfile.TarError as error:
            raise DataError(f"shard {name} is no sound, uncompressed tar file: {error}") from error
        file.seek(end)
        tail = file.read()
    if len(tail) < tarfile.BLOCKSIZE:
        raise DataError(
            f"shard {name} ends without the mark of a tar's end, after {end} bytes and {len(rows)} samples: it was cut "
            f"off while it was written or copied; write or copy it again"
        )
    if tail.count(0) != len(tail):
        raise DataError(
            f"shard {name} is damaged, or several tars in a row: what follows after {end} bytes and {len(rows)} "
            f"samples can not be read; write or copy it again"
        )
    info = ShardInfo(path.name, end + len(tail), sha256, len(rows), tuple(sorted(suffixes)))
    return ScannedShard(info, np.array(rows, dtype=SAMPLE_DTYPE))


def _scan_members(tar: tarfile.TarFile, name: AnyPlace, num_classes: int | None) -> tuple[list[tuple[int, int, int]], set[str]]:
    """Returns the rows of the index, and the suffixes of all members."""
    rows: list[tuple[int, int, int]] = []
    all_suffixes: set[str] = set()
    keys: set[str] = set()
    visible = (member for member in tar if member.isfile() and _is_visible(member.name))
    for key, group in itertools.groupby(visible, lambda member: split_name(member.name)[0]):
        where = f"shard {name}, sample {key!r}"
        named_members = [(split_name(member.name)[1], member) for member in group]
        members = dict(named_members)
        if key in keys or len(members) < len(named_members):
            raise DataError(
                f"{where}: the key comes twice, or with others in between; members of one sample must follow one "
                f"another, under a key (the name up to the first dot) of their own; `tar --sort=name` packs so"
            )
        images = sorted(members.keys() & IMAGE_SUFFIXES)
        if len(images) != 1:
            raise DataError(f"{where}: of its members {sorted(members)}, {images or 'none'} are images by suffix; expected one")
        label = _read_label(tar, members, where)
        if label < NO_LABEL or label >= (MAX_LABEL if num_classes is None else num_classes):
            known = f"there are {num_classes} class names" if num_classes is not None else f"classes are 0 .. {MAX_LABEL - 1}"
            raise DataError(f"{where}: label {label} is no number of a class; {known}")
        image = members[images[0]]
        rows.append((image.offset_data, image.size, label))
        all_suffixes |= members.keys()
        keys.add(key)
    return rows, all_suffixes


def _is_visible(member_name: str) -> bool:
    base = member_name.rpartition("/")[2]
    return not base.startswith(".") and "." in base


def _read_label(tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo], where: str) -> int:
    """Returns the class number from `cls`, else from `json`, else `NO_LABEL`."""
    suffix = "cls" if "cls" in members else "json"
    file = tar.extractfile(members[suffix]) if suffix in members else None
    if file is None:
        return NO_LABEL
    content = file.read()
    try:
        if suffix == "cls":
            return int(content.decode().strip())
        fields = json.loads(content)
    except ValueError as error:
        raise DataError(f"{where}: no label can be read from its {suffix} member, {content[:40]!r}") from error
    label = fields.get("label") if isinstance(fields, dict) else None
    return label if isinstance(label, int) and not isinstance(label, bool) else NO_LABEL


# --------------------------------------------------------------------------------------------------------------------
# Describing a data set


def measure_image(pixels: np.ndarray) -> np.ndarray:
    """Returns (2, C): mean and mean square of each channel of a uint8 image (C, H, W), on the scale 0..1."""
    scaled = pixels.astype(np.float32) / 255
    return np.stack([scaled.mean(axis=(1, 2), dtype=np.float64), (scaled**2).mean(axis=(1, 2), dtype=np.float64)])


def _summarize(moments: list[np.ndarray]) -> tuple[int | None, tuple[float, ...], tuple[float, ...]]:
    """Returns num_channels, mean and std as the manifest states them, from the moments (2, C) of each measured image.

    Every image has the same weight, whatever its size, because training crops them all to one size.
    """
    channel_counts = {moment.shape[1] for moment in moments}
    if not channel_counts or (len(channel_counts) > 1 and channel_counts != {1, 3}):
        return None, (), ()
    num_channels = max(channel_counts)
    mean, mean_square = np.mean([np.broadcast_to(moment, (2, num_channels)) for moment in moments], axis=0)
    std = np.sqrt(np.maximum(mean_square - mean**2, 0))
    return num_channels, tuple(mean.round(6).tolist()), tuple(std.round(6).tolist())


def write_description(
    folder: Path, scans: list[ScannedShard], moments: list[np.ndarray], class_names: tuple[str, ...]
) -> Manifest:
    """Writes index and manifest for shards that lie in the folder.

    Args:
        folder: where the shards lie.
        scans: of all shards, in the order that the index shall have.
        moments: (2, C) of each measured image, see `measure_image`.
        class_names: name of class 0, 1, ...

    Raises:
        DataError: the shards hold no samples.
        OSError: the folder can not be written; it has the old index and manifest still.
    """
    index = np.concatenate([scan.rows for scan in scans])
    if not len(index):
        raise DataError(f"the {len(scans)} shards in {folder} hold no samples")
    buffer = io.BytesIO()
    np.save(buffer, index, allow_pickle=False)
    num_channels, mean, std = _summarize(moments)
    manifest = Manifest(
        num_samples=len(index),
        num_channels=num_channels,
        mean=mean,
        std=std,
        class_names=class_names,
        shards=tuple(scan.info for scan in scans),
        index_sha256=hashlib.sha256(buffer.getvalue()).hexdigest(),
    )
    # The manifest comes last: whoever finds it finds the index that it speaks of.
    _write_atomically(folder / INDEX_NAME, buffer.getvalue())
    _write_atomically(folder / MANIFEST_NAME, manifest.to_json().encode())
    return manifest


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------------------
# Sharing the work


def map_tasks(function: Callable[[Task], Result], tasks: Sequence[Task], num_workers: int) -> Iterator[Result]:
    """Yields the results in the order of the tasks, computed by processes, or here when `num_workers` is 0.

    Raises:
        DataError: a process was killed.
    """
    if num_workers == 0:
        yield from map(function, tasks)
        return
    # forkserver: the caller may hold threads (torch, tqdm), which a plain fork would copy in the middle of their work.
    context = multiprocessing.get_context("forkserver")
    num_workers = min(num_workers, len(tasks))
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_leave_interrupts_to_parent)
    try:
        yield from pool.map(function, tasks)
    except BrokenProcessPool as error:
        raise DataError(
            f"one of {num_workers} worker processes was killed, most often for want of memory; give fewer num_workers"
        ) from error
    finally:  # shards that are being written are waited for, so that nobody writes into a folder that is removed
        pool.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def spread(num_items: int, num_wanted: int) -> np.ndarray:
    """Returns at most `num_wanted` of the positions 0 .. num_items - 1, evenly spread."""
    return np.unique(np.linspace(0, num_items - 1, min(num_items, num_wanted)).astype(np.int64))

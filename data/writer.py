"""Images -> tar shards, and tar shards -> manifest and index.

Two ways lead to a data set that `data/shards.py` opens: `write_shards` packs image files into new shards, and
`index_tars` describes shards that another tool wrote. Both read every shard back with `_scan_shard`, so an index always
says what is in the file, whoever wrote it. What a folder or a table of images holds, `list_images` finds out.
"""

import csv
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from data.decode import decode_image, sniff_suffix
from data.errors import BadImage, DataError
from data.shards import (
    IMAGE_SUFFIXES,
    INDEX_NAME,
    MAKE_COMMAND,
    MANIFEST_NAME,
    NO_LABEL,
    SAMPLE_DTYPE,
    Manifest,
    ShardInfo,
    split_name,
)

# Mean and standard deviation are measured on about this many images; their error is then below 0.01 for photographs.
NUM_MEASURED = 2000
NUM_NAMED = 5  # unreadable images that `describe_left_out` names

Task = TypeVar("Task")
Result = TypeVar("Result")


# --------------------------------------------------------------------------------------------------------------------
# Which images there are


class ImageFile(NamedTuple):
    """One image to be packed."""

    name: str  # path from the list's root, or an absolute path
    label: int  # class number, or NO_LABEL


@dataclass(frozen=True)
class ImageList:
    """The images of a folder or a table."""

    root: Path
    """Where the names of the files start."""
    files: list[ImageFile]
    """In a fixed order: sorted by name, or as the table lists them."""
    class_names: tuple[str, ...]
    """Name of class 0, 1, ...; empty without labels."""
    num_ignored: int
    """Files in the folder whose suffix is not that of an image."""


def list_images(source: str | Path, *, labelled: bool = True) -> ImageList:
    """Finds the images of a folder or a CSV table.

    Args:
        source: one of
            a folder of class folders, which are numbered in the order of their sorted names; images may lie deeper;
            a folder with images directly in it, which have no labels;
            a CSV table whose header has `path` (from the table's folder) and perhaps `label` (names, or class numbers
            if all are integers; an empty cell means no label).
        labelled: False takes all images without labels, however deep they lie.

    Raises:
        DataError: the source does not exist, holds no images or several of these forms at once, or the table is wrong.
    """
    source = Path(source)
    if source.is_file():
        return _list_table(source, labelled)
    if not source.is_dir():
        raise DataError(f"{source} does not exist; expected a folder of images or a CSV table")
    names, num_ignored = _find_images(source)
    if not names:
        raise DataError(f"{source} holds no images: of {num_ignored} files in it, none ends in one of {sorted(IMAGE_SUFFIXES)}")
    num_direct = sum("/" not in name for name in names)
    if not labelled or num_direct == len(names):
        return ImageList(source, [ImageFile(name, NO_LABEL) for name in names], (), num_ignored)
    if num_direct:
        raise DataError(
            f"{source} holds {num_direct} images directly and {len(names) - num_direct} in folders, so it is not clear "
            f"what the classes are; move all into class folders, or pack without labels: `{MAKE_COMMAND} --labelled False`"
        )
    # A class folder without images keeps its number: a validation split may lack a class that the training split has.
    class_names = sorted(entry.name for entry in source.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    class_numbers = {name: number for number, name in enumerate(class_names)}
    files = [ImageFile(name, class_numbers[name.split("/", 1)[0]]) for name in names]
    return ImageList(source, files, tuple(class_names), num_ignored)


def _find_images(folder: Path) -> tuple[list[str], int]:
    """Returns the sorted paths of all images from `folder`, and the number of other files; both without hidden ones."""
    names: list[str] = []
    num_ignored = 0
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in files:
            if file.startswith("."):
                continue
            if file.rpartition(".")[2].lower() in IMAGE_SUFFIXES:
                names.append(Path(parent, file).relative_to(folder).as_posix())
            else:
                num_ignored += 1
    return sorted(names), num_ignored


def _refuse_folder(error: OSError) -> None:
    # os.walk would pass over the folder in silence, and its images would be missing.
    raise DataError(f"the folder {error.filename} can not be read: {error.strerror}") from error


def _list_table(table: Path, labelled: bool) -> ImageList:
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            rows = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table} can not be read as a CSV table: {error}") from error
    if "path" not in columns:
        raise DataError(f"{table} has the columns {list(columns)}; expected a header with `path`, and perhaps `label`")
    if not rows:
        raise DataError(f"{table} has a header and no rows")
    for number, row in enumerate(rows, start=1):
        if not row["path"] or not (table.parent / row["path"]).is_file():
            raise DataError(f"{table} row {number}: the file {row['path']!r} does not exist in {table.parent}")
    if not labelled or "label" not in columns:
        return ImageList(table.parent, [ImageFile(row["path"], NO_LABEL) for row in rows], (), 0)
    labels, class_names = _number_labels(table, [(row["label"] or "").strip() for row in rows])
    files = [ImageFile(row["path"], label) for row, label in zip(rows, labels, strict=True)]
    return ImageList(table.parent, files, class_names, 0)


def _number_labels(table: Path, cells: list[str]) -> tuple[list[int], tuple[str, ...]]:
    """Returns the class number of each cell and the class names; empty cells have no label."""
    given = {cell for cell in cells if cell}
    if all(cell.isdecimal() for cell in given):
        numbers = {cell: int(cell) for cell in given}
        largest = max(numbers.values(), default=-1)
        # Class numbers size the classifier's last layer: a number far beyond the rows is an id, or a typing error.
        if largest >= 1000 + 10 * len(cells):
            raise DataError(
                f"{table} has the label {largest} in {len(cells)} rows; expected class numbers from 0, or class names"
            )
        class_names = tuple(str(number) for number in range(largest + 1))
    else:
        class_names = tuple(sorted(given))
        numbers = {name: number for number, name in enumerate(class_names)}
    return [numbers[cell] if cell else NO_LABEL for cell in cells], class_names


# --------------------------------------------------------------------------------------------------------------------
# Writing shards


class Unreadable(NamedTuple):
    """An image that was left out."""

    name: str
    cause: str  # one word, see data/errors.py; "file" when the file itself could not be read
    reason: str


@dataclass(frozen=True)
class WriteResult:
    """What `write_shards` made."""

    manifest: Manifest
    unreadable: tuple[Unreadable, ...]


@dataclass(frozen=True)
class _ShardTask:
    """All that a worker process needs to write one shard."""

    path: Path
    root: Path
    files: list[ImageFile]
    first_position: int
    verify: bool
    measured: frozenset[int]
    """Positions (in the whole shuffled list) of the images that mean and std are measured on."""


class _WrittenShard(NamedTuple):
    scan: "_ScannedShard | None"  # None: every image of it was unreadable
    moments: list[np.ndarray]
    unreadable: list[Unreadable]


def write_shards(
    images: ImageList,
    output: str | Path,
    *,
    samples_per_shard: int = 1000,
    max_shard_mib: int = 256,
    seed: int = 0,
    num_workers: int = 0,
    verify: bool = True,
    progress: bool = False,
) -> WriteResult:
    """Packs images into tar shards with a manifest and an index.

    The images are shuffled over the whole set first, so that every shard holds a fair mixture. Their bytes are copied
    unchanged. The same images and seed give the same bytes, whatever the number of workers. The output folder is
    complete or does not exist: everything is written beside it, into a folder that takes its name at the end.

    Args:
        images: what to pack.
        output: the new folder; it may exist if it is empty.
        samples_per_shard: at most this many images in a shard.
        max_shard_mib: at most this many MiB of images in a shard, unless one image alone is larger.
        seed: of the shuffle.
        num_workers: processes that write shards; 0 writes in this process.
        verify: decode every image and leave out the ones that fail. False copies whatever begins like an image.
        progress: show a progress bar.

    Returns:
        The manifest, and the images that were left out because they are unreadable.

    Raises:
        DataError: the output exists, can not be written, or no image is readable.
    """
    output = Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise DataError(f"{output} exists and is not an empty folder; give another output, or remove it first")
    # The name says who writes it, and the random part keeps containers apart that share a folder and have equal pids.
    partial = output.parent / f".{output.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
        tasks = _plan_shards(images, partial, samples_per_shard, max_shard_mib * 2**20, seed, verify)
        result = _write_all(images, partial, tasks, num_workers, progress)
        partial.rename(output)
    except OSError as error:
        raise DataError(f"{output} can not be written: {error}; nothing was kept") from error
    finally:  # whatever happened, an interrupt included; after the rename there is nothing to remove
        shutil.rmtree(partial, ignore_errors=True)
    return result


def describe_left_out(images: ImageList, result: WriteResult) -> list[str]:
    """Says which files of the source are not in the shards, one fact a line; nothing where all are."""
    lines = []
    if images.num_ignored:
        lines.append(f"ignored {images.num_ignored} file(s) that are not images by their suffix")
    if result.unreadable:
        causes = Counter(bad.cause for bad in result.unreadable)
        counts = ", ".join(f"{count} {cause}" for cause, count in causes.most_common())
        lines.append(f"left out {len(result.unreadable)} unreadable image(s): {counts}")
        lines += [f"  {bad.name}: {bad.reason}" for bad in result.unreadable[:NUM_NAMED]]
        if len(result.unreadable) > NUM_NAMED:
            lines.append(f"  and {len(result.unreadable) - NUM_NAMED} more")
    return lines


def _plan_shards(
    images: ImageList, folder: Path, samples_per_shard: int, max_shard_bytes: int, seed: int, verify: bool
) -> list[_ShardTask]:
    """Decides what goes into which shard, from the list alone: an unreadable image makes its shard shorter by one."""
    sizes = [_file_size(images.root / file.name) for file in images.files]
    order = np.random.default_rng(seed).permutation(len(sizes)).tolist()
    starts = [0]
    num_bytes = 0
    for position, number in enumerate(order):
        num_bytes += sizes[number]
        if position > starts[-1] and (position - starts[-1] == samples_per_shard or num_bytes > max_shard_bytes):
            starts.append(position)
            num_bytes = sizes[number]
    measured = _spread(len(order), NUM_MEASURED)
    return [
        _ShardTask(
            path=folder / f"{shard_number:06d}.tar",
            root=images.root,
            files=[images.files[number] for number in order[start:stop]],
            first_position=start,
            verify=verify,
            measured=frozenset(measured[(measured >= start) & (measured < stop)].tolist()),
        )
        for shard_number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(order)], strict=True))
    ]


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reported as unreadable when its turn comes
        return 0


def _spread(num_items: int, num_wanted: int) -> np.ndarray:
    """Returns at most `num_wanted` of the positions 0 .. num_items - 1, evenly spread."""
    return np.unique(np.linspace(0, num_items - 1, min(num_items, num_wanted)).astype(np.int64))


def _write_all(images: ImageList, folder: Path, tasks: list[_ShardTask], num_workers: int, progress: bool) -> WriteResult:
    written: list[_WrittenShard] = []
    with tqdm(total=len(images.files), desc="packing", unit="image", disable=not progress) as bar:
        for task, shard in zip(tasks, _map(_write_shard, tasks, num_workers), strict=True):
            written.append(shard)
            bar.update(len(task.files))
    unreadable = tuple(bad for shard in written for bad in shard.unreadable)
    if len(unreadable) == len(images.files):
        raise DataError(
            f"none of the {len(unreadable)} images in {images.root} is readable; the first, {unreadable[0].name}: "
            f"{unreadable[0].reason}"
        )
    scans = [shard.scan for shard in written if shard.scan is not None]
    moments = [moment for shard in written for moment in shard.moments]
    return WriteResult(_write_description(folder, scans, moments, images.class_names), unreadable)


def _write_shard(task: _ShardTask) -> _WrittenShard:
    """Writes one shard; runs in a worker process."""
    moments: list[np.ndarray] = []
    unreadable: list[Unreadable] = []
    with tarfile.open(task.path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for position, file in enumerate(task.files, start=task.first_position):
            try:
                data = (task.root / file.name).read_bytes()
                suffix = _check_image(data, position, task, moments)
            except BadImage as error:
                unreadable.append(Unreadable(file.name, error.cause, str(error)))
            except OSError as error:
                unreadable.append(Unreadable(file.name, "file", str(error)))
            else:
                _add_sample(tar, f"{position:09d}", suffix, data, file)
    if len(unreadable) == len(task.files):
        task.path.unlink()
        return _WrittenShard(None, [], unreadable)
    return _WrittenShard(_scan_shard(task.path), moments, unreadable)


def _check_image(data: bytes, position: int, task: _ShardTask, moments: list[np.ndarray]) -> str:
    """Returns the suffix for an image, and adds its moments where they are wanted; raises BadImage."""
    suffix = sniff_suffix(data)
    if task.verify or position in task.measured or suffix is None:
        pixels = decode_image(data, None).numpy()
        if position in task.measured:
            moments.append(_measure(pixels))
    assert suffix is not None, "decode_image accepts what sniff_suffix does not know"
    return suffix


def _add_sample(tar: tarfile.TarFile, key: str, suffix: str, data: bytes, file: ImageFile) -> None:
    members = {suffix: data}
    if file.label != NO_LABEL:
        members["cls"] = str(file.label).encode()
    members["json"] = json.dumps({"path": file.name}).encode()
    for member_suffix, content in members.items():
        # Owner, time and mode stay at tarfile's constants, so that the bytes do not depend on who packs and when.
        member = tarfile.TarInfo(f"{key}.{member_suffix}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def _map(function: Callable[[Task], Result], tasks: Sequence[Task], num_workers: int) -> Iterator[Result]:
    """Yields the results in the order of the tasks, computed by processes, or here when `num_workers` is 0."""
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


# --------------------------------------------------------------------------------------------------------------------
# Reading shards back


class _ScannedShard(NamedTuple):
    info: ShardInfo
    rows: np.ndarray  # (num_samples,), SAMPLE_DTYPE


class _IndexTask(NamedTuple):
    path: Path
    num_classes: int | None  # None: class numbers have no upper limit
    num_measured: int  # images that mean and std are measured on


def index_tars(
    paths: Sequence[str | Path],
    output_folder: str | Path,
    *,
    class_names: Sequence[str] = (),
    num_workers: int = 0,
    progress: bool = False,
) -> Manifest:
    """Describes tar shards that lie in a folder already, and writes the manifest and the index beside them.

    Tars of webdataset, img2dataset, GNU tar and PAX are understood. The label of a sample is its `.cls` member, else
    the integer "label" of its `.json` member; hidden members and members without a suffix are passed over.

    Args:
        paths: the shards, in the order that the index shall have; all directly in `output_folder`.
        output_folder: where the shards lie.
        class_names: name of class 0, 1, ...
        num_workers: processes that read shards; 0 reads in this process.
        progress: show a progress bar.

    Raises:
        DataError: a shard is no tar, is cut off, or holds samples that a reader could not tell apart or that have no
            image; a label has no class name; the folder can not be written.
    """
    folder = Path(output_folder)
    shard_paths = [Path(path) for path in paths]
    if not shard_paths:
        raise DataError(f"no tar shards were given for {folder}")
    for path in shard_paths:
        if path.resolve().parent != folder.resolve():
            raise DataError(f"{path} does not lie in {folder}; move it there, or link to it")
        if not path.is_file():
            raise DataError(f"{path} does not exist")
    scans: list[_ScannedShard] = []
    moments: list[np.ndarray] = []
    tasks = _plan_indexing(shard_paths, len(class_names) or None)
    with tqdm(total=len(tasks), desc="indexing", unit="shard", disable=not progress) as bar:
        for scan, shard_moments in _map(_index_shard, tasks, num_workers):
            scans.append(scan)
            moments.extend(shard_moments)
            bar.update()
    try:
        return _write_description(folder, scans, moments, tuple(class_names))
    except OSError as error:
        raise DataError(f"{folder} can not be written: {error}") from error


def _plan_indexing(paths: list[Path], num_classes: int | None) -> list[_IndexTask]:
    measured_shards = set(_spread(len(paths), NUM_MEASURED).tolist())
    num_per_shard = NUM_MEASURED // len(measured_shards)
    return [
        _IndexTask(path, num_classes, num_per_shard if number in measured_shards else 0) for number, path in enumerate(paths)
    ]


def _index_shard(task: _IndexTask) -> tuple[_ScannedShard, list[np.ndarray]]:
    """Scans one shard and measures some of its images; runs in a worker process."""
    scan = _scan_shard(task.path, task.num_classes)
    moments: list[np.ndarray] = []
    with task.path.open("rb") as file:
        for row in scan.rows[_spread(len(scan.rows), task.num_measured)]:
            file.seek(row["offset"])
            try:
                moments.append(_measure(decode_image(file.read(row["size"]), None).numpy()))
            except BadImage:
                continue  # it is met again, and counted, when it is read for training
    return scan, moments


def _scan_shard(path: Path, num_classes: int | None = None) -> _ScannedShard:
    """Reads a tar from its first to its last byte and finds its samples.

    Raises:
        DataError: see `index_tars`.
    """
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                rows, suffixes = _scan_members(tar, path, num_classes)
                # Where the last member ends. tarfile takes a damaged header, and any end of the file that lies on a
                # block boundary, for the end of the archive; so what follows is looked at here.
                end = tar.offset
        except tarfile.TarError as error:
            raise DataError(f"shard {path} is no sound, uncompressed tar file: {error}") from error
        file.seek(end)
        tail = file.read()
    if len(tail) < tarfile.BLOCKSIZE:
        raise DataError(
            f"shard {path} ends without the mark of a tar's end, after {end} bytes and {len(rows)} samples: it was cut "
            f"off while it was written or copied; write or copy it again"
        )
    if tail.count(0) != len(tail):
        raise DataError(
            f"shard {path} is damaged, or several tars in a row: what follows after {end} bytes and {len(rows)} "
            f"samples can not be read; write or copy it again"
        )
    info = ShardInfo(path.name, end + len(tail), sha256, len(rows), tuple(sorted(suffixes)))
    return _ScannedShard(info, np.array(rows, dtype=SAMPLE_DTYPE))


def _scan_members(tar: tarfile.TarFile, path: Path, num_classes: int | None) -> tuple[list[tuple[int, int, int]], set[str]]:
    """Returns the rows of the index, and the suffixes of all members."""
    rows: list[tuple[int, int, int]] = []
    all_suffixes: set[str] = set()
    keys: set[str] = set()
    visible = (member for member in tar if member.isfile() and _is_visible(member.name))
    for key, group in itertools.groupby(visible, lambda member: split_name(member.name)[0]):
        where = f"shard {path}, sample {key!r}"
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
        if label < NO_LABEL or (num_classes is not None and label >= num_classes):
            raise DataError(f"{where}: label {label} is no number of a class; there are {num_classes} class names")
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


def _measure(pixels: np.ndarray) -> np.ndarray:
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


def _write_description(
    folder: Path, scans: list[_ScannedShard], moments: list[np.ndarray], class_names: tuple[str, ...]
) -> Manifest:
    """Writes index and manifest for shards that lie in the folder."""
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

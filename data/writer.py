"""Images -> tar shards that `data/shards.py` opens.

`list_images` finds out what a folder or a table of images holds, `write_shards` packs it. Shards that another tool wrote
are described by `data/indexing.py`.
"""

import csv
import io
import json
import os
import secrets
import shutil
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F
from tqdm import tqdm

from data.decode import decode_image, sniff_suffix
from data.errors import BadImage, DataError
from data.indexing import NUM_MEASURED, ScannedShard, map_tasks, measure_image, scan_shard, spread, write_description
from data.shards import IMAGE_SUFFIXES, MAKE_COMMAND, NO_LABEL, Manifest

NUM_NAMED = 5  # unreadable images that `describe_left_out` names


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
    max_short_side: int | None
    measured: frozenset[int]
    """Positions (in the whole shuffled list) of the images that mean and std are measured on."""


class _WrittenShard(NamedTuple):
    scan: ScannedShard | None  # None: every image of it was unreadable
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
    max_short_side: int | None = None,
    progress: bool = False,
) -> WriteResult:
    """Packs images into tar shards with a manifest and an index.

    The images are shuffled over the whole set first, so that every shard holds a fair mixture. Their bytes are copied
    unchanged, but for images that are shrunk (see `max_short_side`). The same images and seed give the same bytes, whatever
    the number of workers. The output folder is complete or does not exist: everything is written beside it, into a folder
    that takes its name at the end.

    Args:
        images: what to pack.
        output: the new folder; it may exist if it is empty.
        samples_per_shard: at most this many images in a shard.
        max_shard_mib: at most this many MiB of images in a shard, unless one image alone is larger.
        seed: of the shuffle.
        num_workers: processes that write shards; 0 writes in this process.
        verify: decode every image and leave out the ones that fail. False copies whatever begins like an image.
        max_short_side: images whose shorter side is longer than this, in pixels, are stored at that size, upright, as JPEG
            files of quality 95: they are decoded many times in a training. Arrays, and all other images, stay as they are.
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
        tasks = _plan_shards(images, partial, samples_per_shard, max_shard_mib * 2**20, seed, verify, max_short_side)
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
    images: ImageList,
    folder: Path,
    samples_per_shard: int,
    max_shard_bytes: int,
    seed: int,
    verify: bool,
    max_short_side: int | None,
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
    measured = spread(len(order), NUM_MEASURED)
    return [
        _ShardTask(
            path=folder / f"{shard_number:06d}.tar",
            root=images.root,
            files=[images.files[number] for number in order[start:stop]],
            first_position=start,
            verify=verify,
            max_short_side=max_short_side,
            measured=frozenset(measured[(measured >= start) & (measured < stop)].tolist()),
        )
        for shard_number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(order)], strict=True))
    ]


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reported as unreadable when its turn comes
        return 0


def _write_all(images: ImageList, folder: Path, tasks: list[_ShardTask], num_workers: int, progress: bool) -> WriteResult:
    written: list[_WrittenShard] = []
    with tqdm(total=len(images.files), desc="packing", unit="image", disable=not progress) as bar:
        for task, shard in zip(tasks, map_tasks(_write_shard, tasks, num_workers), strict=True):
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
    return WriteResult(write_description(folder, scans, moments, images.class_names), unreadable)


def _write_shard(task: _ShardTask) -> _WrittenShard:
    """Writes one shard; runs in a worker process."""
    moments: list[np.ndarray] = []
    unreadable: list[Unreadable] = []
    with tarfile.open(task.path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for position, file in enumerate(task.files, start=task.first_position):
            try:
                data = (task.root / file.name).read_bytes()
                suffix = _check_image(data, position, task, moments)
                if task.max_short_side is not None and suffix != "npy":
                    data, suffix = shrink(data, suffix, task.max_short_side)
            except BadImage as error:
                unreadable.append(Unreadable(file.name, error.cause, str(error)))
            except OSError as error:
                unreadable.append(Unreadable(file.name, "file", str(error)))
            else:
                _add_sample(tar, f"{position:09d}", suffix, data, file)
    if len(unreadable) == len(task.files):
        task.path.unlink()
        return _WrittenShard(None, [], unreadable)
    return _WrittenShard(scan_shard(task.path), moments, unreadable)


def _check_image(data: bytes, position: int, task: _ShardTask, moments: list[np.ndarray]) -> str:
    """Returns the suffix for an image, and adds its moments where they are wanted; raises BadImage."""
    suffix = sniff_suffix(data)
    if task.verify or position in task.measured or suffix is None:
        pixels = decode_image(data, None).numpy()
        if position in task.measured:
            moments.append(measure_image(pixels))
    assert suffix is not None, "decode_image accepts what sniff_suffix does not know"
    return suffix


def shrink(data: bytes, suffix: str, max_short_side: int) -> tuple[bytes, str]:
    """Stores a large image smaller.

    Args:
        data: an image file.
        suffix: of its format.
        max_short_side: in pixels.

    Returns:
        A JPEG file of quality 95 whose shorter side is just so long, upright, and its suffix; what was given where the image
        is no larger, or its file would not become smaller.

    Raises:
        BadImage: the file can not be decoded.
    """
    pixels = decode_image(data, None)
    if min(pixels.shape[1:]) <= max_short_side:
        return data, suffix
    pixels = F.resize(pixels, [max_short_side], interpolation=InterpolationMode.BICUBIC, antialias=True)
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).numpy()).save(buffer, format="JPEG", quality=95)
    smaller = buffer.getvalue()
    return (smaller, "jpg") if len(smaller) < len(data) else (data, suffix)


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

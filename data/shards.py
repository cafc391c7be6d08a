"""What a data set is: a folder of tar shards, with a manifest that describes them and an index of every sample.

```
folder/
  000000.tar ...   plain webdataset shards: the members of one sample share a key ("0001.jpg", "0001.cls")
  manifest.json    the shards with their sizes and hashes, and what is known of the images: `Manifest`
  index.npy        one row per sample, in shard order: `SAMPLE_DTYPE`
```
The index makes a sample a matter of one read at a known place, so any order of samples costs the same code; it is
memory-mapped, so ten million rows open at once and all workers of a machine share them. `data/writer.py` writes both, and
`data/reader.py` reads samples.

The folder may lie elsewhere: then manifest and index are fetched when it is opened, and shards when they are first read
(`data/cache.py`). Or it lies here and the manifest names URLs.
"""

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.cache import ShardCache, shard_cache
from data.errors import DataError
from data.fetch import NotFound, fetch_bytes
from data.manifest import INDEX_COMMAND, INDEX_NAME, MANIFEST_NAME, Manifest, ShardInfo
from data.places import AnyPlace, Place, as_place, is_remote, join

# offset: where the image's data starts in its shard, in bytes; its tar header is the block just before.
# size: of the image's data, in bytes. label: class number, NO_LABEL when the sample has none.
SAMPLE_DTYPE = np.dtype([("offset", "<u8"), ("size", "<u8"), ("label", "<i8")])
NO_LABEL = -1

# A member of a sample with one of these suffixes (in lower case) is its image.
IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "tif", "tiff", "bmp", "ppm", "gif", "avif", "npy"})

MAKE_COMMAND = "python scripts/make_shards.py"


# --------------------------------------------------------------------------------------------------------------------
# The data set


class Location(NamedTuple):
    """Where a sample's image lies."""

    shard_number: int
    offset: int  # bytes from the start of the shard to the image's data
    size: int  # bytes
    label: int


class Piece(NamedTuple):
    """Shards that follow one another in one folder's manifest, and so do their rows in its index."""

    folder: AnyPlace
    """What the names of the shards are relative to."""
    index_file: Path
    """The index of all of the folder's shards; on this machine."""
    first_row: int
    """Row of the first sample."""
    num_rows: int
    """Samples in all shards of the piece."""
    num_shards: int
    """How many shards it has."""


@dataclasses.dataclass(frozen=True)
class ShardSet:
    """A data set that was opened and checked: a folder's shards, some of them, or those of several folders.

    Made by `open_shards`, and by `choose_shards` and `unite_shards` of `data/selection.py` from others.

    A pickle of it holds the paths and the manifest. Each process maps the index for itself, when it first needs it, and
    the operating system keeps one copy of the pages for all of them.
    """

    root: AnyPlace
    """What the set is called in messages: its folder, or the pattern or the sources that were given."""
    manifest: Manifest
    """Of these shards; where they come from several folders, names may repeat: `shard_name` tells them apart."""
    pieces: tuple[Piece, ...]
    """Where the shards lie, in their order."""
    parts: tuple[tuple[int, int], ...]
    """(first, stop) of the samples of each source that was named, in the order of the sources; one for a single source."""
    cache: ShardCache | None = None
    """Where shards from elsewhere are kept; None when all lie on this machine."""

    def __len__(self) -> int:
        return self.manifest.num_samples

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @cached_property
    def first_sample(self) -> np.ndarray:
        """(num_shards + 1,), int64: shard s holds the samples first_sample[s] .. first_sample[s + 1] - 1."""
        return np.cumsum([0, *(shard.num_samples for shard in self.manifest.shards)], dtype=np.int64)

    @cached_property
    def labels(self) -> np.ndarray:
        """(num_samples,), int64: class numbers, `NO_LABEL` where there is none.

        Mapped read-only from the file where the shards follow one another in one index; else 8 bytes a sample, copied.
        """
        columns = [self.rows_of(piece)["label"] for piece in self.pieces]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    def rows_of(self, piece: Piece) -> np.ndarray:
        """(num_rows,), `SAMPLE_DTYPE`: the index of a piece's samples, mapped read-only from the file."""
        return self._map(piece.index_file)[piece.first_row : piece.first_row + piece.num_rows]

    def locate(self, index: int) -> Location:
        """Returns where sample `index` (0 .. len - 1) lies.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        shard_number = int(self.shard_numbers([index])[0])
        number = bisect_right(self._piece_samples, index) - 1
        piece = self.pieces[number]
        offset, size, label = self._map(piece.index_file)[piece.first_row + index - self._piece_samples[number]].item()
        return Location(shard_number, offset, size, label)

    def shard_numbers(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """(n,) sample numbers -> (n,) int64: the shard that each lies in."""
        return np.searchsorted(self.first_sample, np.asarray(indices, dtype=np.int64), side="right") - 1

    def folder(self, shard_number: int) -> AnyPlace:
        """The folder that a shard's name is relative to."""
        return self.pieces[bisect_right(self._piece_shards, shard_number) - 1].folder

    def place(self, shard_number: int) -> AnyPlace:
        """Where a shard is read from."""
        return join(self.folder(shard_number), self.manifest.shards[shard_number].name)

    def shard_name(self, shard_number: int) -> str:
        """What a shard is called in messages: its name where the set has one folder, else where it lies."""
        name = self.manifest.shards[shard_number].name
        return str(self.place(shard_number)) if self._has_folders or is_remote(name) else name

    @cached_property
    def _has_folders(self) -> bool:
        return len({piece.folder for piece in self.pieces}) > 1

    @cached_property
    def _piece_samples(self) -> list[int]:
        """First sample of each piece."""
        return [0, *itertools.accumulate(piece.num_rows for piece in self.pieces)][:-1]

    @cached_property
    def _piece_shards(self) -> list[int]:
        """First shard of each piece."""
        return [0, *itertools.accumulate(piece.num_shards for piece in self.pieces)][:-1]

    @cached_property
    def _maps(self) -> dict[Path, np.ndarray]:
        return {}

    def _map(self, index_file: Path) -> np.ndarray:
        if index_file not in self._maps:
            self._maps[index_file] = np.load(index_file, mmap_mode="r", allow_pickle=False)
        return self._maps[index_file]


def describe_manifest(folder: Path, manifest: Manifest) -> list[str]:
    """Says what a data set holds, one fact a line, and last the command that trains on it."""
    num_bytes = sum(shard.num_bytes for shard in manifest.shards)
    lines = [
        f"{folder}: {manifest.num_samples:,} samples in {len(manifest.shards)} shard(s), {num_bytes / 2**20:.1f} MiB, "
        f"{len(manifest.class_names) or 'no'} class names"
    ]
    channels = manifest.num_channels
    if channels is None:
        lines.append(
            "warning: the images have different numbers of channels, or none could be measured; training replaces those that "
            "do not fit --model.in_chans by others, and says so"
        )
    else:
        order = "" if channels in (1, 3) else " (arrays are taken as height x width x channels)"
        statistics = [", ".join(f"{value:.4g}" for value in values) for values in (manifest.mean, manifest.std)]
        lines.append(f"{channels} channel(s){order}, mean {statistics[0]}, std {statistics[1]}")
    in_chans = "" if channels in (None, 3) else f" --model.in_chans {channels}"
    lines.append(f"next: accelerate launch pretrain/main.py --data.train {folder}{in_chans} --output_dir runs/{folder.name}")
    return lines


# --------------------------------------------------------------------------------------------------------------------
# Opening


def open_shards(path: str | AnyPlace, cache: ShardCache | None = None) -> ShardSet:
    """Opens a data set and checks what can be checked without reading its shards: for local ones, that all are there.

    Args:
        path: the folder, or the manifest in it; a URL of either, or a `pipe:` command that prints the files of the folder.
        cache: where shards from elsewhere are kept; `shard_cache()` where it is None.

    Raises:
        DataError: there is no data set, or its files are not those that the manifest describes.
    """
    shards = open_folder(path, cache)
    check_shards(shards)
    return shards


def open_folder(path: str | AnyPlace, cache: ShardCache | None = None) -> ShardSet:
    """Opens a data set as `open_shards` does, without a look at its shards."""
    place = as_place(path) if isinstance(path, str) else path
    root = place.parent if place.name == MANIFEST_NAME else place
    if isinstance(root, Place):
        cache = cache or shard_cache()
        manifest = _fetch_manifest(root, cache)
        index_file = cache.bring_index(root / INDEX_NAME, manifest.index_sha256)
    else:
        _check_folder(root)
        manifest = Manifest.load(root / MANIFEST_NAME)
        index_file = root / INDEX_NAME
        has_remote = any(is_remote(info.name) for info in manifest.shards)
        cache = (cache or shard_cache()) if has_remote else None
    piece = Piece(root, index_file, 0, manifest.num_samples, len(manifest.shards))
    shards = ShardSet(root, manifest, (piece,), ((0, manifest.num_samples),), cache)
    _check_index(shards, root / INDEX_NAME)
    return shards


def _fetch_manifest(root: Place, cache: ShardCache) -> Manifest:
    place = root / MANIFEST_NAME
    try:
        return Manifest.parse(fetch_bytes(place, cache.fetch), place)
    except NotFound as error:
        raise DataError(
            f"{error}; expected a folder of tar shards with a {MANIFEST_NAME}. Shards that have none are described in a folder "
            f"of yours with `{INDEX_COMMAND} '{root}/{{000000..000099}}.tar' --output FOLDER` (names in braces); give FOLDER"
        ) from error


def check_shards(shards: ShardSet) -> None:
    """Looks whether all shards on this machine are there, with their sizes; those elsewhere are checked when they come.

    Raises:
        DataError: one is missing or has another size.
    """
    for number, info in enumerate(shards.manifest.shards):
        place = shards.place(number)
        if isinstance(place, Path):
            _check_shard(place, info)


def _check_folder(root: Path) -> None:
    if not root.is_dir():
        problem = "is a file" if root.exists() else "does not exist"
        raise DataError(f"{root} {problem}; expected a folder of tar shards with a {MANIFEST_NAME}")
    if not (root / MANIFEST_NAME).is_file():
        raise DataError(_explain_missing_manifest(root))


def _explain_missing_manifest(root: Path) -> str:
    # A look at the first files is enough to say what the folder is; a tree of millions is not walked for a message.
    suffixes = {file.suffix[1:].lower() for file in itertools.islice(root.rglob("*"), 1000)}
    if not any(root.iterdir()):
        return f"{root} is empty; expected a folder of tar shards with a {MANIFEST_NAME}"
    if "tar" in suffixes:
        return f"{root} holds tar files but no {MANIFEST_NAME}; index them with `{INDEX_COMMAND} {root}`"
    if suffixes & IMAGE_SUFFIXES:
        return (
            f"{root} holds images, not tar shards; pack them with "
            f"`{MAKE_COMMAND} --source {root} --output {root}-shards` and give {root}-shards"
        )
    return f"{root} holds neither tar shards nor images; expected a folder of tar shards with a {MANIFEST_NAME}"


def _check_shard(shard: Path, info: ShardInfo) -> None:
    try:
        num_bytes = shard.stat().st_size
    except FileNotFoundError as error:
        raise DataError(
            f"shard {shard} is missing, but the manifest lists it; copy it there, "
            f"or describe what is left with `{INDEX_COMMAND} {shard.parent}`"
        ) from error
    if num_bytes != info.num_bytes:
        raise DataError(
            f"shard {shard} has {num_bytes} bytes, and had {info.num_bytes} when it was indexed; copy it again if the "
            f"copy was cut off, or index the changed file with `{INDEX_COMMAND} {shard.parent}`"
        )


def _check_index(shards: ShardSet, source: AnyPlace) -> None:
    remedy = f"write it anew with `{INDEX_COMMAND} {shards.root}`"
    try:
        index = shards._map(shards.pieces[0].index_file)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{source} can not be read: {error}; {remedy}") from error
    if index.dtype != SAMPLE_DTYPE or index.shape != (len(shards),) or shards.first_sample[-1] != len(shards):
        raise DataError(
            f"{source} has {index.shape} rows of {index.dtype}, which does not fit the manifest's {len(shards)} samples; "
            f"{remedy}"
        )
    num_bytes = np.array([info.num_bytes for info in shards.manifest.shards], dtype=np.uint64)
    limits = np.repeat(num_bytes, np.diff(shards.first_sample))
    if (index["size"] > limits).any() or (index["offset"] > limits - index["size"]).any():
        raise DataError(f"{source} points outside its shards; {remedy}")


def split_name(member_name: str) -> tuple[str, str]:
    """Splits a member's name into key and suffix, by webdataset's rule: at the first dot of the base name.

    Returns:
        ("train/0001", "left.jpg") for "train/0001.left.JPG"; the suffix is in lower case, "" when there is none.
    """
    folder, slash, base = member_name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, suffix.lower()

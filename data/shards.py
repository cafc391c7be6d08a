"""What a data set is: a folder of tar shards, with a manifest that describes them and an index of every sample.

```
folder/
  000000.tar ...   plain webdataset shards: the members of one sample share a key ("0001.jpg", "0001.cls")
  manifest.json    the shards with their sizes and hashes, and what is known of the images: `Manifest`
  index.npy        one row per sample, in shard order: `SAMPLE_DTYPE`
```
The index makes a sample a matter of one read at a known place, so any order of samples costs the same code; it is
memory-mapped, so ten million rows open at once and all workers of a machine share them. `data/writer.py` writes both.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import tarfile
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from data.errors import DataError

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.npy"
FORMAT = "mae-vit-shards"
VERSION = 1

# offset: where the image's data starts in its shard, in bytes; its tar header is the block just before.
# size: of the image's data, in bytes. label: class number, NO_LABEL when the sample has none.
SAMPLE_DTYPE = np.dtype([("offset", "<u8"), ("size", "<u8"), ("label", "<i8")])
NO_LABEL = -1

# A member of a sample with one of these suffixes (in lower case) is its image.
IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "tif", "tiff", "bmp", "ppm", "gif", "avif", "npy"})

INDEX_COMMAND = "python scripts/index_shards.py"
MAKE_COMMAND = "python scripts/make_shards.py"


# --------------------------------------------------------------------------------------------------------------------
# The manifest


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """One tar file of a data set."""

    name: str
    """File name within the data set's folder."""
    num_bytes: int
    """Size of the whole file."""
    sha256: str
    """Hash of the whole file, hexadecimal."""
    num_samples: int
    """How many samples it holds."""
    suffixes: tuple[str, ...]
    """The suffixes of its members, sorted: ("cls", "jpg", "json")."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What is known of a data set without reading its shards."""

    num_samples: int
    """Samples in all shards together."""
    num_channels: int | None
    """Channels of the images as they are stored; 3 when grey and colour are mixed, None when there is no one number."""
    mean: tuple[float, ...]
    """Of each channel, 0..1: the mean over images of each image's mean. Empty when unknown."""
    std: tuple[float, ...]
    """Of each channel, 0..1: around `mean`, every image with the same weight. Empty when unknown."""
    class_names: tuple[str, ...]
    """Name of class 0, 1, ...; empty when there are no labels, or no names."""
    shards: tuple[ShardInfo, ...]
    """In the order in which the index lists their samples."""
    index_sha256: str
    """Hash of the index file, hexadecimal."""

    @cached_property
    def hash(self) -> str:
        """Identifies the data set: a sha256 over everything in the manifest, shards and index included."""
        canonical = json.dumps(self._to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the text of the manifest file."""
        return json.dumps({**self._to_dict(), "hash": self.hash}, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads and checks a manifest.

        Raises:
            DataError: the file is missing, is no manifest of a version we read, or was changed after it was written.
        """
        remedy = f"write it anew with `{INDEX_COMMAND} {path.parent}`"
        fields = _read_json_object(path)
        kind = (fields.pop("format", None), fields.pop("version", None))
        if kind != (FORMAT, VERSION):
            raise DataError(
                f"{path} has format {kind[0]!r} version {kind[1]!r}, expected {FORMAT!r} version {VERSION}; {remedy}"
            )
        stated_hash = fields.pop("hash", None)
        try:
            fields["shards"] = [ShardInfo(**_with_tuples(shard)) for shard in fields.get("shards", [])]
            manifest = cls(**_with_tuples(fields))
        except (TypeError, AttributeError) as error:
            raise DataError(f"{path} is damaged: {error}; {remedy}") from error
        if manifest.hash != stated_hash:
            raise DataError(
                f"{path} was changed after it was written: its hash is {manifest.hash}, stated is {stated_hash}; {remedy}"
            )
        return manifest

    def _to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except (ValueError, OSError) as error:
        raise DataError(f"{path} can not be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{path} holds a JSON {type(fields).__name__}, expected an object")
    return fields


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


# --------------------------------------------------------------------------------------------------------------------
# The data set


class Location(NamedTuple):
    """Where a sample's image lies."""

    shard_number: int
    offset: int  # bytes from the start of the shard to the image's data
    size: int  # bytes
    label: int


@dataclasses.dataclass(frozen=True)
class ShardSet:
    """A data set that was opened and checked; made by `open_shards`.

    A pickle of it holds the path and the manifest. Each process maps the index for itself, when it first needs it, and
    the operating system keeps one copy of the pages for all of them.
    """

    root: Path
    manifest: Manifest

    def __len__(self) -> int:
        return self.manifest.num_samples

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "manifest": self.manifest}

    @cached_property
    def index(self) -> np.ndarray:
        """(num_samples,), `SAMPLE_DTYPE`, mapped read-only from the file."""
        return np.load(self.root / INDEX_NAME, mmap_mode="r", allow_pickle=False)

    @cached_property
    def first_sample(self) -> np.ndarray:
        """(num_shards + 1,), int64: shard s holds the samples first_sample[s] .. first_sample[s + 1] - 1."""
        return np.cumsum([0, *(shard.num_samples for shard in self.manifest.shards)], dtype=np.int64)

    @property
    def labels(self) -> np.ndarray:
        """(num_samples,), int64: class numbers, `NO_LABEL` where there is none; mapped read-only from the file."""
        return self.index["label"]

    def locate(self, index: int) -> Location:
        """Returns where sample `index` (0 .. len - 1) lies.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        shard_number = int(np.searchsorted(self.first_sample, index, side="right")) - 1
        offset, size, label = self.index[index].item()
        return Location(shard_number, offset, size, label)


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


def open_shards(path: str | Path) -> ShardSet:
    """Opens a data set and checks what can be checked without reading it: that all files are there, with their sizes.

    Args:
        path: the folder, or the manifest in it.

    Raises:
        DataError: there is no data set, or its files are not those that the manifest describes.
    """
    path = Path(path)
    root = path.parent if path.name == MANIFEST_NAME else path
    if not root.is_dir():
        problem = "is a file" if root.exists() else "does not exist"
        raise DataError(f"{root} {problem}; expected a folder of tar shards with a {MANIFEST_NAME}")
    if not (root / MANIFEST_NAME).is_file():
        raise DataError(_explain_missing_manifest(root))
    shards = ShardSet(root, Manifest.load(root / MANIFEST_NAME))
    for info in shards.manifest.shards:
        _check_shard(root, info)
    _check_index(shards)
    return shards


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


def _check_shard(root: Path, info: ShardInfo) -> None:
    shard = root / info.name
    try:
        num_bytes = shard.stat().st_size
    except FileNotFoundError as error:
        raise DataError(
            f"shard {shard} is missing, but the manifest lists it; copy it there, "
            f"or describe what is left with `{INDEX_COMMAND} {root}`"
        ) from error
    if num_bytes != info.num_bytes:
        raise DataError(
            f"shard {shard} has {num_bytes} bytes, and had {info.num_bytes} when it was indexed; copy it again if the "
            f"copy was cut off, or index the changed file with `{INDEX_COMMAND} {root}`"
        )


def _check_index(shards: ShardSet) -> None:
    remedy = f"write it anew with `{INDEX_COMMAND} {shards.root}`"
    try:
        index = shards.index
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{shards.root / INDEX_NAME} can not be read: {error}; {remedy}") from error
    if index.dtype != SAMPLE_DTYPE or index.shape != (len(shards),) or shards.first_sample[-1] != len(shards):
        raise DataError(
            f"{shards.root / INDEX_NAME} has {index.shape} rows of {index.dtype}, which does not fit the manifest's "
            f"{len(shards)} samples; {remedy}"
        )
    num_bytes = np.array([info.num_bytes for info in shards.manifest.shards], dtype=np.uint64)
    limits = np.repeat(num_bytes, np.diff(shards.first_sample))
    if (index["size"] > limits).any() or (index["offset"] > limits - index["size"]).any():
        raise DataError(f"{shards.root / INDEX_NAME} points outside its shards; {remedy}")


# --------------------------------------------------------------------------------------------------------------------
# Reading


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One sample as it is stored."""

    index: int
    """Number within the data set."""
    key: str
    """The image member's name without its suffix; cut off at 100 characters in GNU and PAX archives."""
    shard: str
    """File name of the shard."""
    label: int
    """Class number, `NO_LABEL` when there is none."""
    data: bytes
    """The image file."""


class ShardReader:
    """Reads samples by number, and keeps the shards that were used last open.

    Each process opens its own descriptors: they are no part of a pickle, and a forked child starts with none. Not for
    several threads at once: one could close the shard that another is about to read.

    Args:
        shards: the data set.
        max_open: how many shards stay open; the one unused for longest is closed first.
    """

    def __init__(self, shards: ShardSet, *, max_open: int = 32) -> None:
        self.shards = shards
        self.max_open = max_open
        self._descriptors: OrderedDict[int, int] = OrderedDict()  # by shard number, the last one used last
        self._owner = os.getpid()

    def read(self, index: int) -> Sample:
        """Returns sample `index` (0 .. len - 1), by one read of its tar header and its data.

        Raises:
            DataError: the shard was changed or damaged after it was indexed, or can not be opened.
            IndexError: there is no such sample.
        """
        location = self.shards.locate(index)
        name = self.shards.manifest.shards[location.shard_number].name
        descriptor = self._open(location.shard_number)
        block = os.pread(descriptor, tarfile.BLOCKSIZE + location.size, location.offset - tarfile.BLOCKSIZE)
        header, data = block[: tarfile.BLOCKSIZE], block[tarfile.BLOCKSIZE :]
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise self._changed(name, index, f"no tar header before its data ({error})") from error
        if not member.size == location.size == len(data):
            raise self._changed(name, index, f"{member.size} bytes by its header, {location.size} by the index")
        key, _ = split_name(member.name)
        return Sample(index, key, name, location.label, data)

    def close(self) -> None:
        """Closes all shards; reading on opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": OrderedDict()}

    def _open(self, shard_number: int) -> int:
        if self._owner != os.getpid():  # a forked child: close its copies, which leaves the parent's open
            self.close()
            self._owner = os.getpid()
        if shard_number in self._descriptors:
            self._descriptors.move_to_end(shard_number)
            return self._descriptors[shard_number]
        if len(self._descriptors) >= self.max_open:
            os.close(self._descriptors.popitem(last=False)[1])
        shard = self.shards.root / self.shards.manifest.shards[shard_number].name
        try:
            descriptor = os.open(shard, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"shard {shard} can not be opened: {error.strerror}") from error
        self._descriptors[shard_number] = descriptor
        return descriptor

    def _changed(self, shard_name: str, index: int, what: str) -> DataError:
        root = self.shards.root
        return DataError(
            f"shard {root / shard_name} was changed after it was indexed: sample {index} has {what}; "
            f"index it again with `{INDEX_COMMAND} {root}`"
        )


def split_name(member_name: str) -> tuple[str, str]:
    """Splits a member's name into key and suffix, by webdataset's rule: at the first dot of the base name.

    Returns:
        ("train/0001", "left.jpg") for "train/0001.left.JPG"; the suffix is in lower case, "" when there is none.
    """
    folder, slash, base = member_name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, suffix.lower()

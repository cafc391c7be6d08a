"""The manifest of a data set: its shards with their sizes and hashes, and what is known of the images."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from data.errors import DataError
from data.places import PIPE, AnyPlace

MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.npy"
FORMAT = "mae-vit-shards"
VERSION = 1

INDEX_COMMAND = "python scripts/index_shards.py"


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """One tar file of a data set."""

    name: str
    """File name within the data set's folder, or the whole URL of a shard that lies elsewhere."""
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
        try:
            return cls.parse(path.read_bytes(), path)
        except FileNotFoundError as error:
            raise DataError(f"{path} does not exist") from error
        except OSError as error:
            raise DataError(f"{path} can not be read: {error.strerror}") from error

    @classmethod
    def parse(cls, text: bytes, path: AnyPlace) -> Self:
        """Checks the content of a manifest.

        Args:
            text: of the file.
            path: where it comes from, for messages.

        Raises:
            DataError: it is no manifest of a version we read, or was changed after it was written.
        """
        remedy = f"write it anew with `{INDEX_COMMAND} {path.parent}`"
        fields = _parse_json_object(text, path)
        kind = (fields.pop("format", None), fields.pop("version", None))
        if kind != (FORMAT, VERSION):
            raise DataError(
                f"{path} has format {kind[0]!r} version {kind[1]!r}, expected {FORMAT!r} version {VERSION}; {remedy}"
            )
        stated_hash = fields.pop("hash", None)
        try:
            fields["shards"] = [ShardInfo(**_with_tuples(shard)) for shard in fields.get("shards", [])]
            manifest = cls(**_with_tuples(fields))
            commands = [shard.name for shard in manifest.shards if shard.name.startswith(PIPE)]
        except (TypeError, AttributeError) as error:
            raise DataError(f"{path} is damaged: {error}; {remedy}") from error
        if commands:  # whoever may write a manifest must not thereby run commands here
            raise DataError(f"{path} names a command as a shard, {commands[0]!r}; expected names of files or URLs; {remedy}")
        if manifest.hash != stated_hash:
            raise DataError(
                f"{path} was changed after it was written: its hash is {manifest.hash}, stated is {stated_hash}; {remedy}"
            )
        return manifest

    def _to_dict(self) -> dict[str, Any]:
        # By hand, because dataclasses.asdict copies deeply: a second for ten thousand shards.
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"format": FORMAT, "version": VERSION, **fields, "shards": [vars(shard) for shard in self.shards]}


def combine_statistics(manifests: Iterable[Manifest]) -> tuple[int | None, tuple[float, ...], tuple[float, ...]]:
    """Returns num_channels, mean and std of several data sets together: every image with the same weight.

    Grey counts as colour where both occur, as in one data set. Mean and std are empty where one of the sets lacks them.
    """
    manifests = list(manifests)
    counts = {manifest.num_channels for manifest in manifests}
    if None in counts or (len(counts) > 1 and counts != {1, 3}):
        return None, (), ()
    num_channels = max(count for count in counts if count is not None)
    if not all(manifest.mean and manifest.std for manifest in manifests):
        return num_channels, (), ()
    weights = np.array([manifest.num_samples for manifest in manifests]) / sum(manifest.num_samples for manifest in manifests)
    means = np.stack([np.broadcast_to(manifest.mean, num_channels) for manifest in manifests])  # (sets, C)
    stds = np.stack([np.broadcast_to(manifest.std, num_channels) for manifest in manifests])  # (sets, C)
    mean = weights @ means
    std = np.sqrt(np.maximum(weights @ (stds**2 + means**2) - mean**2, 0))
    return num_channels, tuple(mean.round(6).tolist()), tuple(std.round(6).tolist())


def _parse_json_object(text: bytes, path: AnyPlace) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path} can not be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{path} holds a JSON {type(fields).__name__}, expected an object")
    return fields


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

"""Some shards of a data set, by pattern or list, and several data sets as one."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.fetch import fetch_bytes, list_remote
from data.manifest import MANIFEST_NAME, Manifest, combine_statistics
from data.places import (
    AnyPlace,
    Place,
    as_place,
    base_name,
    expand_braces,
    has_glob,
    has_pattern,
    is_remote,
    matches,
    parse_list,
    split_name_pattern,
)
from data.protocols import FetchConfig
from data.shards import Piece, ShardSet

LIST_SUFFIX = ".txt"


class Selection(NamedTuple):
    """What is taken of one folder of shards."""

    folder: str
    """Path or URL."""
    patterns: tuple[str, ...]
    """Names of shards, or patterns without braces; empty for all shards."""


def is_selection(source: str) -> bool:
    """Says whether a source names shards, by a pattern or one by one, or a list of them, rather than a data set."""
    name = as_place(source).name
    return has_pattern(source) or name.endswith((".tar", LIST_SUFFIX))


def read_selections(source: str, config: FetchConfig) -> list[Selection]:
    """Resolves a source to folders, and to what is taken of each.

    Args:
        source: the name or pattern of shards; a text file with one such line after the other, or with folders, relative to
            where it lies, where "#" begins a comment; or a folder.
        config: how patiently remote lists are fetched.

    Raises:
        DataError: a list can not be read or is empty, or a pattern in a folder's name finds nothing.
    """
    names: dict[str, list[str]] = {}  # by folder, in the order of their first mention
    for folder, name in _resolve(source, config):
        names.setdefault(folder, []).append(name)
    return [Selection(folder, () if "" in found else tuple(found)) for folder, found in names.items()]


def _resolve(source: str, config: FetchConfig) -> Iterator[tuple[str, str]]:
    """Yields folders with the name or pattern of a shard in it, "" for all."""
    if not is_selection(source):
        yield source, ""
    elif has_pattern(source) or not as_place(source).name.endswith(LIST_SUFFIX):
        for text in expand_braces(source):
            folder, name = split_name_pattern(text)
            for found in _find_folders(folder, config) if has_glob(folder) else [folder]:
                yield found, name
    else:
        place = as_place(source)
        lines = parse_list(_read_text(place, config))
        if not lines:
            raise DataError(f"{place} names no shards; expected one shard or pattern a line")
        for line in lines:
            entry = line if is_remote(line) else _beside(place, line)
            if entry.endswith(LIST_SUFFIX):
                raise DataError(f"{place} names another list, {line}; expected shards, patterns and folders")
            yield from _resolve(entry, config)


def _read_text(place: AnyPlace, config: FetchConfig) -> str:
    try:
        return (place.read_bytes() if isinstance(place, Path) else fetch_bytes(place, config)).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is no text; expected one shard or pattern a line") from error


def _beside(file: AnyPlace, name: str) -> str:
    if isinstance(file, Path):
        return str(file.parent / name)
    folder = file.parent
    # Not by `/`, which takes the name for that of a file and would quote the signs of a pattern.
    url, mark, query = folder.url.partition("?") if folder.is_http else (folder.url, "", "")
    return f"{url.rstrip('/')}/{name}{mark}{query}"


def _find_folders(pattern: str, config: FetchConfig) -> list[str]:
    """Returns the folders with a manifest that a pattern without braces stands for, sorted."""
    if is_remote(pattern):
        found = [file.parent.url for file in list_remote(Place(f"{pattern.rstrip('/')}/{MANIFEST_NAME}"), config)]
    else:
        path = Path(pattern)
        parts = path.relative_to(path.anchor).as_posix()
        found = [str(file.parent) for file in sorted(Path(path.anchor).glob(f"{parts}/{MANIFEST_NAME}"))]
    if not found:
        raise DataError(f"{pattern} finds no folder with a {MANIFEST_NAME}; expected folders of shards")
    return found


def choose_shards(shards: ShardSet, patterns: Sequence[str], root: AnyPlace) -> ShardSet:
    """Takes some shards of a data set, in the order of its manifest.

    Mean and standard deviation stay those of the whole set.

    Args:
        shards: of one folder, whole, as `open_folder` returns it.
        patterns: names of shards, or patterns without braces; none takes all shards.
        root: what the chosen ones are called in messages.

    Raises:
        DataError: a name is none of a shard, or a pattern fits none.
    """
    manifest, whole = shards.manifest, shards.pieces[0]
    numbers = sorted(_find(manifest, patterns, shards.root)) if patterns else range(len(manifest.shards))
    if len(numbers) == len(manifest.shards):
        return shards if not patterns else dataclasses.replace(shards, root=root)
    pieces: list[Piece] = []
    for number in numbers:
        first, num_rows = int(shards.first_sample[number]), manifest.shards[number].num_samples
        last = pieces[-1] if pieces else None
        if last is not None and last.first_row + last.num_rows == first:
            pieces[-1] = last._replace(num_rows=last.num_rows + num_rows, num_shards=last.num_shards + 1)
        else:
            pieces.append(whole._replace(first_row=first, num_rows=num_rows, num_shards=1))
    chosen = tuple(manifest.shards[number] for number in numbers)
    num_samples = sum(info.num_samples for info in chosen)
    if not num_samples:
        raise DataError(f"the {len(chosen)} chosen shards of {shards.root} hold no samples; choose more")
    reduced = dataclasses.replace(manifest, shards=chosen, num_samples=num_samples)
    return ShardSet(root, reduced, tuple(pieces), ((0, num_samples),), shards.cache)


def _find(manifest: Manifest, patterns: Sequence[str], folder: AnyPlace) -> set[int]:
    by_name: dict[str, list[int]] = {}
    for number, info in enumerate(manifest.shards):
        by_name.setdefault(base_name(info.name), []).append(number)
    found: set[int] = set()
    missing = []
    for pattern in patterns:
        if pattern in by_name:
            found.update(by_name[pattern])
            continue
        fitting = [number for name in by_name if has_glob(pattern) and matches(name, pattern) for number in by_name[name]]
        found.update(fitting)
        if not fitting:
            missing.append(pattern)
    if missing:
        names = sorted(by_name)
        raise DataError(
            f"{missing[0]} fits none of the {len(names)} shards in the {MANIFEST_NAME} of {folder} ({names[0]} .. {names[-1]})"
            f"{f', nor do {len(missing) - 1} more names' if len(missing) > 1 else ''}; give names or patterns of those"
        )
    return found


def unite_shards(sets: Sequence[ShardSet], root: AnyPlace, *, one_part: bool = False) -> ShardSet:
    """Puts data sets one after the other.

    The rows of their indices stay where they are. Two data sets are the same together when each is.

    Args:
        sets: at least one; class names must be the same where there are any.
        root: what they are called together in messages.
        one_part: they are one source, as the folders of a list are, and no sources of a mixture.

    Raises:
        DataError: their classes differ.
    """
    manifests = [shards.manifest for shards in sets]
    class_names = _common_class_names(sets)
    num_channels, mean, std = combine_statistics(manifests)
    manifest = Manifest(
        num_samples=sum(map(len, sets)),
        num_channels=num_channels,
        mean=mean,
        std=std,
        class_names=class_names,
        shards=tuple(info for each in manifests for info in each.shards),
        index_sha256=hashlib.sha256("\n".join(each.hash for each in manifests).encode()).hexdigest(),
    )
    edges = np.cumsum([0, *map(len, sets)]).tolist()
    parts = ((0, edges[-1]),) if one_part else tuple(itertools.pairwise(edges))
    cache = next((shards.cache for shards in sets if shards.cache is not None), None)
    return ShardSet(root, manifest, tuple(piece for shards in sets for piece in shards.pieces), parts, cache)


def _common_class_names(sets: Sequence[ShardSet]) -> tuple[str, ...]:
    named = [shards for shards in sets if shards.manifest.class_names]
    if not named:
        return ()
    names = named[0].manifest.class_names
    for shards in named[1:]:
        theirs = shards.manifest.class_names
        if theirs != names:
            pairs = zip(names, theirs, strict=False)
            ours, other = next((pair for pair in pairs if pair[0] != pair[1]), (len(names), len(theirs)))
            raise DataError(
                f"the classes of {named[0].root} and {shards.root} differ ({ours} and {other}); expected the same "
                f"names in the same order: write both from the same class folders, or without labels"
            )
    for shards in sets:
        if not shards.manifest.class_names and shards.labels.max() >= len(names):
            raise DataError(
                f"{shards.root} has the label {shards.labels.max()}, and {named[0].root} names {len(names)} classes; expected "
                f"the same classes in both: index the first with --class_names"
            )
    return names

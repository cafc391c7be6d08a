"""What a data flag means: shards here or elsewhere, the digits, or images as they lie, which are packed on first use."""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from data.cache import ShardCache, cache_folder, shard_cache
from data.digits import DIGITS, digits_shards, open_cached
from data.errors import DataError
from data.manifest import INDEX_COMMAND, MANIFEST_NAME
from data.places import Place, as_place, has_pattern, is_remote, split_sources
from data.selection import LIST_SUFFIX, choose_shards, is_selection, read_selections, unite_shards
from data.shards import IMAGE_SUFFIXES, MAKE_COMMAND, NO_LABEL, ShardSet, check_shards, open_folder, open_shards
from data.writer import ImageList, describe_left_out, list_images, write_shards

try:
    import fcntl
except ImportError:  # Windows: there, processes that start together may all pack
    fcntl = None

ACCEPTED = (
    "expected a folder of shards, a folder of images (in class folders, where labels are needed), a CSV table with the columns "
    f"path and perhaps label, or one of {', '.join(DIGITS)}; shards may lie elsewhere (https://..., s3://...)"
)

# Part of every packed folder's name: raise it when the same images would become other shards.
PACK_VERSION = 1
# So many images are packed in less time than it takes to start processes for them.
NUM_PACKED_ALONE = 1000
# Headers, padding and the members with label and origin, for each image: what shards take beyond the images' bytes.
OVERHEAD_BYTES = 3072
# After so long without a new shard, a half-packed folder belongs to a program that was killed.
ABANDONED_AFTER_S = 24 * 3600


def open_dataset(source: str, *, labelled: bool = False, cache: ShardCache | None = None) -> ShardSet:
    """Opens what a program's data flag names.

    Images that are not in shards yet are packed, once, into the folder `packed` of the user's cache (`cache_folder`), and
    anew when a file is added, removed or changed, or its class. Processes of one machine that start together wait for
    the first of them to pack. Machines that share no cache each pack for themselves: for many machines, or many images,
    shards of one's own (scripts/make_shards.py) are the better way.

    Args:
        source: one of
            a folder of shards, or the manifest in it; here, or elsewhere: "https://host/set", "s3://bucket/set", any
                protocol of fsspec, "pipe:aws s3 cp s3://bucket/set/{name} -" (see `FetchConfig.allow_pipe`);
            some shards of such a folder: "set/{000000..000015}.tar", "set/0000*.tar", "s3://bucket/{a,b}/*.tar";
            a text file that names shards, patterns or folders, one a line, relative to where it lies;
            "digits", "digits-train" or "digits-test" (data/digits.py); a folder of such a name is "./digits";
            a folder of images: class folders, or images anywhere in it where no labels are needed;
            a CSV table with the columns `path` and perhaps `label`;
            several of these with "::" between them: one data set, of which `parts` says what comes from where.
            What exists under the whole name is meant by it, whatever signs it has.
        labelled: every sample must have a label.
        cache: where shards from elsewhere are kept; `shard_cache()` where it is None.

    Raises:
        DataError: the source is none of these or can not be read, lacks labels, or the cache can not be written.
    """
    if not source:
        raise DataError(f"no data was named; {ACCEPTED}")
    names = [source] if os.path.exists(source) else split_sources(source)  # noqa: PTH110 - Path raises where a name is too long
    sets = [_open_source(name, labelled, cache) for name in names]
    return sets[0] if len(sets) == 1 else unite_shards(sets, Place(source))


def _open_source(source: str, labelled: bool, cache: ShardCache | None) -> ShardSet:
    if source in DIGITS:
        return open_shards(digits_shards(source))
    try:
        if is_remote(source) or _names_shards(source):
            shards = _open_selected(source, cache or shard_cache())
        elif _holds_shards(Path(source)):
            shards = open_shards(source, cache)
        else:
            path = Path(source)
            _check_kind(path)
            shards = _open_images(path, labelled)
    except OSError as error:
        raise DataError(f"{error.filename or source} can not be read: {error.strerror}; {ACCEPTED}") from error
    if labelled:
        _check_labels(str(shards.root), int((shards.labels == NO_LABEL).sum()), len(shards))
    return shards


def _names_shards(source: str) -> bool:
    """Says whether a local source is a pattern, one shard of a data set, or a list of shards."""
    if not os.path.exists(source):  # noqa: PTH110 - Path raises where a name is too long
        return has_pattern(source)
    path = Path(source)
    if path.suffix == LIST_SUFFIX and path.is_file():
        with path.open(errors="replace") as file:
            return "path" not in file.readline().strip().split(",")  # otherwise it is a table
    return path.suffix == ".tar" and path.is_file() and (path.parent / MANIFEST_NAME).exists()


def _open_selected(source: str, cache: ShardCache) -> ShardSet:
    root = as_place(source)
    if isinstance(root, Place) and (root.scheme == "pipe" or root.name == MANIFEST_NAME or not is_selection(source)):
        shards = open_shards(root, cache)
    else:
        sets = []
        for folder, patterns in read_selections(source, cache.fetch):
            sets.append(choose_shards(open_folder(folder, cache), patterns, root))
            check_shards(sets[-1])
        shards = sets[0] if len(sets) == 1 else unite_shards(sets, root, one_part=True)
    if shards.cache is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        num_bytes = sum(info.num_bytes for info in shards.manifest.shards)
        tqdm.write(
            f"{shards.root}: {len(shards.manifest.shards):,} shards of {num_bytes / 2**30:.3g} GiB are fetched when they are "
            f"needed, into {shards.cache.folder}, which may hold {shards.cache.max_bytes / 2**30:.3g} GiB",
            file=sys.stderr,
        )
    return shards


def _holds_shards(path: Path) -> bool:
    """Says whether this is the business of `open_shards`, which also explains why tars are no data set yet."""
    return path.name == MANIFEST_NAME or (path / MANIFEST_NAME).exists() or next(path.glob("*.tar"), None) is not None


def _check_kind(path: Path) -> None:
    if not path.exists():
        raise DataError(f"{path} does not exist; {ACCEPTED}")
    if path.is_dir() and not any(path.iterdir()):
        raise DataError(f"{path} is empty; {ACCEPTED}")
    if path.is_file() and path.suffix == ".tar":
        raise DataError(
            f"{path} is one tar file; give its folder, {path.parent}, after indexing it with `{INDEX_COMMAND} {path.parent}`"
        )
    if path.is_file() and path.suffix[1:].lower() in IMAGE_SUFFIXES:
        raise DataError(f"{path} is one image; {ACCEPTED}")


def _check_labels(source: str, num_unlabelled: int, num_samples: int) -> None:
    if num_unlabelled:
        raise DataError(
            f"{source}: {num_unlabelled} of {num_samples} samples have no label; expected one for each: sort the images into "
            "class folders, or fill in the column label of a table; where these are shards, write them anew from that"
        )


def _open_images(path: Path, labelled: bool) -> ShardSet:
    try:
        images, has_classes = _list(path, labelled)
    except DataError as error:
        if path.is_file():  # what is wrong with the table is said already
            raise
        raise DataError(f"{error}; {ACCEPTED}") from error
    if labelled:  # nobody waits for a packing that ends in a refusal
        _check_labels(str(path), sum(file.label == NO_LABEL for file in images.files), len(images.files))
    name, num_bytes = _fingerprint(path, images)
    folder = cache_folder() / "packed" / name
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(folder.with_name(f".{name}.lock"), path):
                if not folder.exists():  # otherwise another process packed while this one waited
                    _pack(path, images, folder, num_bytes, _make_command(path, has_classes))
        except OSError as error:
            raise DataError(f"{folder} can not be written: {error}") from error
    return open_cached(folder)


def _list(path: Path, labelled: bool) -> tuple[ImageList, bool]:
    """Lists images with their classes where these can be told, and says whether they could.

    Classes are taken even where nobody asks for labels, so that pretraining and fine-tuning share one packed folder.
    """
    try:
        return list_images(path), True
    except DataError:
        if labelled:
            raise
        return list_images(path, labelled=False), False


def _fingerprint(path: Path, images: ImageList) -> tuple[str, int]:
    """Returns a name that is another one when any of the images changed, and the bytes of all of them."""
    digest = hashlib.sha256(json.dumps([PACK_VERSION, str(path.resolve()), images.class_names]).encode())
    num_bytes = 0
    for file in images.files:
        try:
            status = (images.root / file.name).stat()
            size, mtime_ns = status.st_size, status.st_mtime_ns
        except OSError:  # named as unreadable when it is packed
            size, mtime_ns = 0, 0
        digest.update(json.dumps([file.name, file.label, size, mtime_ns]).encode())
        num_bytes += size
    # The source's own name tells a person who tidies the cache, or reads it in a message, what this is; without the dot of
    # a hidden folder, which marks unfinished work here.
    return f"{path.resolve().name.lstrip('.')[:40]}-{digest.hexdigest()[:24]}", num_bytes


@contextlib.contextmanager
def _one_at_a_time(lock: Path, source: Path) -> Iterator[None]:
    """Keeps others from packing the same images meanwhile: the disk would have to hold them as often as there are processes.

    It saves work, and nothing depends on it: file systems without locks are gone past, and whoever packs second finds the
    first one's folder in place.
    """
    if fcntl is None:
        yield
        return
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if os.environ.get("LOCAL_RANK", "0") == "0":  # of processes that were launched together, one speaks
                tqdm.write(f"waiting for another process, which packs the images of {source}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _make_command(path: Path, has_classes: bool) -> str:
    resolved = path.resolve()
    output = resolved.with_name(f"{resolved.stem if path.is_file() else resolved.name}-shards")
    unlabelled = "" if has_classes else " --labelled False"
    return f"{MAKE_COMMAND} --source {shlex.quote(str(resolved))} --output {shlex.quote(str(output))}{unlabelled}"


def _pack(path: Path, images: ImageList, folder: Path, num_bytes: int, command: str) -> None:
    _remove_abandoned(folder.parent)
    needed, free = num_bytes + OVERHEAD_BYTES * len(images.files), shutil.disk_usage(folder.parent).free
    if needed > free:
        raise DataError(
            f"packing {path} needs {needed / 2**30:.1f} GiB in {folder.parent}, where {free / 2**30:.1f} GiB are free; set "
            f"MAE_VIT_CACHE to a folder on a larger disk, or pack to a place of your own with `{command}` and give that"
        )
    tqdm.write(
        f"packing the {len(images.files):,} images of {path} into {folder}, once as long as they stay the same; "
        f"`{command}` would do it at a place of your own",
        file=sys.stderr,
    )
    num_workers = _num_cores() if len(images.files) > NUM_PACKED_ALONE else 0
    try:
        result = write_shards(images, folder, num_workers=num_workers, progress=True)
    except DataError:
        if not folder.exists():  # otherwise another process was first, where there are no locks
            raise
        return
    for line in describe_left_out(images, result):
        tqdm.write(line, file=sys.stderr)


def _remove_abandoned(packed: Path) -> None:
    for partial in packed.glob(".*.partial-*"):
        with contextlib.suppress(FileNotFoundError):  # another program has just finished it
            if time.time() - partial.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(partial, ignore_errors=True)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # what a scheduler or container grants; not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

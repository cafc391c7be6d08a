"""Looks through tar shards for everything that a reader would trip over, and goes on past damage.

`data/indexing.py` refuses a shard at its first fault. Here all faults of all shards are listed, each under a rule of
`data/lint_rules.py`, so that a person can mend them in one go. Shards are walked by their headers (`data/tar_walk.py`);
images are read as far as their first bytes, or decoded where that is asked for.
"""

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.decode import MAX_PIXELS, decode_image, sniff_suffix
from data.errors import BadImage, DataError
from data.faults import printable
from data.indexing import map_tasks
from data.lint_rules import RULE_OF_CAUSE, RULES
from data.places import is_remote
from data.shards import (
    IMAGE_SUFFIXES,
    INDEX_NAME,
    MANIFEST_NAME,
    NO_LABEL,
    SAMPLE_DTYPE,
    Manifest,
    ShardInfo,
    split_name,
)
from data.tar_walk import Damage, Member, walk_tar

NUM_EXAMPLES = 20  # findings of a rule that are kept, of each shard and of the whole
MAX_LABEL_BYTES = 2**20  # a .cls, .json or .txt member of more bytes is no label
NUM_SNIFFED = 32  # bytes by which the format of an image is told
_SAME_FORMAT = {"jpeg": "jpg", "tiff": "tif"}
_MAGIC_OF_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstandard"}
_RANGE_OF_LABELS = np.iinfo(SAMPLE_DTYPE["label"])


class Finding(NamedTuple):
    """One thing that is wrong."""

    rule: str
    """A name in `data.lint_rules.RULES`."""
    shard: str
    key: str
    """Of the sample, or the name of the member; empty where the finding is about the whole shard."""
    reason: str


@dataclass
class Findings:
    """Counts of findings per rule, with the first few of each: memory does not grow with the faults."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Finding]] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Counts a finding."""
        self.counts[finding.rule] += 1
        examples = self.examples.setdefault(finding.rule, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append(finding)

    def merge(self, other: "Findings") -> None:
        """Adds those of another."""
        self.counts += other.counts
        for rule, found in other.examples.items():
            kept = self.examples.setdefault(rule, [])
            kept += found[: NUM_EXAMPLES - len(kept)]

    def num(self, severity: str) -> int:
        """Counts the findings of one severity."""
        return sum(count for rule, count in self.counts.items() if RULES[rule].severity == severity)


@dataclass
class LintReport:
    """What was found, in one shard or in several."""

    findings: Findings = field(default_factory=Findings)
    num_shards: int = 0
    num_bytes: int = 0
    num_samples: int = 0
    """Samples with one image."""
    num_labelled: int = 0
    """Of them, those with a label."""
    num_decoded: int = 0
    """Images that were decoded, with or without success."""
    channels: Counter[int] = field(default_factory=Counter)
    """Decoded images by their number of channels."""

    def merge(self, other: "LintReport") -> None:
        """Adds another's findings and numbers."""
        self.findings.merge(other.findings)
        self.num_shards += other.num_shards
        self.num_bytes += other.num_bytes
        self.num_samples += other.num_samples
        self.num_labelled += other.num_labelled
        self.num_decoded += other.num_decoded
        self.channels += other.channels


class LintTask(NamedTuple):
    """All that a worker process needs to look through one shard."""

    path: Path
    decode_share: float
    """Share of the images that are decoded, 0..1, evenly spread."""
    max_pixels: int
    num_classes: int | None
    """None: class numbers have no upper limit."""
    info: ShardInfo | None
    """What the manifest says of it; None without a manifest."""
    first_row: int | None
    """Where its part of the index beside it starts; None without an index."""


def lint_shard(task: LintTask) -> LintReport:
    """Looks through one shard; never raises for what is in it, or where it can not be read."""
    try:
        with task.path.open("rb") as file:
            return _ShardLint(task, file).run()
    except OSError as error:
        report = LintReport(num_shards=1)
        rule = "missing_shard" if isinstance(error, FileNotFoundError) else "unreadable_file"
        report.findings.add(Finding(rule, task.path.name, "", error.strerror or str(error)))
        return report


class _ShardLint:
    """The state of looking through one shard."""

    def __init__(self, task: LintTask, file: BufferedReader) -> None:
        self.task = task
        self.file = file
        self.report = LintReport(num_shards=1)
        self.rows: list[tuple[int, int, int]] = []
        self.group: list[Member] = []
        """Members of the sample that is being read."""
        self.seen: dict[str, set[str]] = {}
        """Key -> suffixes, of all samples that were read."""
        self.spellings: dict[str, str] = {}
        """Key in lower case -> as it was first read."""
        self.incomplete: dict[str, Finding] = {}
        """Samples without an image: said at the end, for the image may come later, with others in between."""
        self.damages: list[tuple[Damage, int, str]] = []
        """With the number of samples before it, and the key of the last one."""

    def add(self, rule: str, key: str, reason: str) -> None:
        self.report.findings.add(Finding(rule, self.task.path.name, printable(key), printable(reason)))

    def run(self) -> LintReport:
        """Reads the shard from its first byte to its last, past damage, and returns what was found; call it once."""
        self.report.num_bytes = num_bytes = self.file.seek(0, os.SEEK_END)
        self.file.seek(0)
        head = self.file.read(NUM_SNIFFED)
        compression = next((name for magic, name in _MAGIC_OF_COMPRESSED.items() if head.startswith(magic)), None)
        if not num_bytes:
            self.add("empty_file", "", "it has 0 bytes")
        elif compression:
            self.add("compressed", "", f"it begins like a file of {compression}")
        else:
            self._walk()
        if self.task.info is not None:
            self._compare(self.task.info)
        return self.report

    def _walk(self) -> None:
        for item in walk_tar(self.file):
            if isinstance(item, Damage):
                last = split_name(self.group[-1].name)[0] if self.group else ""
                self._close_group()
                self.damages.append((item, len(self.rows), last))
            elif self._is_part(item):
                if self.group and split_name(self.group[-1].name)[0] != split_name(item.name)[0]:
                    self._close_group()
                self.group.append(item)
        self._close_group()
        for finding in self.incomplete.values():
            self.report.findings.add(finding)
        self.report.num_samples = len(self.rows)
        for damage, num_before, last in self.damages:
            place = f"at byte {damage.offset:,}" + (f", after sample {last!r}" if last else "")
            counts = f"{num_before} samples before it, {len(self.rows) - num_before} after, {damage.num_bytes:,} bytes between"
            self.add(damage.kind, damage.name and split_name(damage.name)[0], f"{place}: {damage.reason}; {counts}")
        if not self.seen and not self.damages:
            self.add("empty_shard", "", "it holds no samples")

    def _is_part(self, member: Member) -> bool:
        """Says whether a member belongs to a sample, by the rule of `data/indexing.py`."""
        if member.is_extended:
            self.add("extended_header", member.name, "a pax or GNU header stands before it")
        if member.is_long:
            self.add("long_name", member.name, f"its name has {len(member.name)} characters")
        if member.kind == "folder":
            self.add("folder", member.name, "it is a folder")
        elif member.kind == "link":
            self.add("link", member.name, "it is a link")
        elif member.kind == "special":
            self.add("special_member", member.name, "it is neither a plain file, nor a folder or a link")
        else:
            base = member.name.rpartition("/")[2]
            if base.startswith("."):
                self.add("hidden", member.name, "macOS writes such files" if base.startswith("._") else "it is hidden")
            elif "." not in base:
                self.add("no_suffix", member.name, "its name has no suffix")
            else:
                return True
        return False

    def _close_group(self) -> None:
        if not self.group:
            return
        group, self.group = self.group, []
        key = split_name(group[0].name)[0]
        suffixes = [split_name(member.name)[1] for member in group]
        before = self.seen.get(key)
        if before is not None or len(set(suffixes)) < len(suffixes):
            twice = sorted({suffix for suffix in suffixes if suffixes.count(suffix) > 1 or suffix in (before or ())})
            if twice:
                self.add("duplicate_key", key, f"its members {twice} come twice")
            else:
                self.add("interleaved", key, f"its members {sorted(suffixes)} stand apart from {sorted(before or ())}")
        self.seen[key] = {*(before or ()), *suffixes}
        if before is not None:
            self.incomplete.pop(key, None)
            return
        spelling = self.spellings.setdefault(key.lower(), key)
        if spelling != key:
            self.add("case_clash", key, f"another sample is {spelling!r}")
        self._check_sample(key, dict(zip(suffixes, group, strict=True)))

    def _check_sample(self, key: str, members: dict[str, Member]) -> None:
        images = sorted(members.keys() & IMAGE_SUFFIXES)
        label = self._check_label(key, members)
        if not images:
            dotted = sorted(suffix for suffix in members if suffix.rpartition(".")[2] in IMAGE_SUFFIXES)
            rule, reason = "no_image", f"its members {sorted(members)} are no images by suffix"
            if dotted:
                rule, reason = "dots_in_name", f"the first dot ends its key, so {dotted} are no suffixes of images"
            self.incomplete[key] = Finding(rule, self.task.path.name, printable(key), reason)
            return
        if len(images) > 1:
            self.add("several_images", key, f"{images} are images by suffix")
            return
        image = members[images[0]]
        self.rows.append((image.offset, image.size, NO_LABEL if label is None else label))
        self.report.num_labelled += label is not None and label >= 0
        self._check_image(key, images[0], image)

    def _check_label(self, key: str, members: dict[str, Member]) -> int | None:
        """Returns the class number as `data/indexing.py` reads it; None where there is none."""
        suffix = "cls" if "cls" in members else "json"
        if suffix not in members:
            text = self._read_text(members["txt"]) if "txt" in members else ""
            if text.strip().isdecimal():
                self.add("unused_label", key, f"its txt member holds {text.strip()[:40]!r}, and there is no cls member")
            return None
        try:
            content = self._read_text(members[suffix])
            label = int(content.strip()) if suffix == "cls" else json.loads(content)
        except (ValueError, RecursionError) as error:
            self.add("bad_label", key, f"its {suffix} member can not be read: {' '.join(str(error).split())[:100]}")
            return None
        if suffix == "json":
            label = label.get("label") if isinstance(label, dict) else None
            if not isinstance(label, int) or isinstance(label, bool):
                if label is not None:
                    self.add("unused_label", key, f"its json member has the label {str(label)[:40]!r}, which is no number")
                return None
        if not _RANGE_OF_LABELS.min <= label <= _RANGE_OF_LABELS.max:
            self.add("bad_label", key, "its label does not fit into 64 bits")
            return None
        if label < NO_LABEL:
            self.add("negative_label", key, f"its label is {label}")
        elif self.task.num_classes is not None and label >= self.task.num_classes:
            self.add("label_beyond_classes", key, f"its label is {label}, and there are {self.task.num_classes} class names")
        return label

    def _read_text(self, member: Member) -> str:
        if member.size > MAX_LABEL_BYTES:
            raise ValueError(f"it has {member.size} bytes")
        return self._read(member, member.size).decode()

    def _read(self, member: Member, num_bytes: int) -> bytes:
        self.file.seek(member.offset)
        return self.file.read(min(num_bytes, member.size))

    def _check_image(self, key: str, suffix: str, member: Member) -> None:
        number, share = len(self.rows) - 1, self.task.decode_share
        format_by_content = sniff_suffix(self._read(member, NUM_SNIFFED))
        if format_by_content is not None and format_by_content != _SAME_FORMAT.get(suffix, suffix):
            self.add("wrong_suffix", key, f"its suffix is {suffix}, its content {format_by_content}")
        if format_by_content is not None and int((number + 1) * share) == int(number * share):
            return  # not one of those that are decoded
        self.report.num_decoded += format_by_content is not None
        # What is no image by its first bytes is given to the decoder too: it says why.
        try:
            image = decode_image(self._read(member, member.size), None, max_pixels=self.task.max_pixels)
        except BadImage as error:
            self.add(RULE_OF_CAUSE[error.cause], key, str(error))
            return
        self.report.channels[len(image)] += 1

    def _compare(self, info: ShardInfo) -> None:
        """Holds the shard against what the manifest and the index say of it."""
        num_bytes, num_samples = self.report.num_bytes, len(self.rows)
        if num_bytes != info.num_bytes:
            self.add("size_differs", "", f"it has {num_bytes:,} bytes, the manifest says {info.num_bytes:,}")
        else:
            self.file.seek(0)
            sha256 = hashlib.file_digest(self.file, "sha256").hexdigest()
            if sha256 != info.sha256:
                self.add("hash_differs", "", f"its sha256 is {sha256[:12]}..., the manifest says {info.sha256[:12]}...")
        if num_samples != info.num_samples:
            self.add("count_differs", "", f"it has {num_samples} samples with one image, the manifest says {info.num_samples}")
        elif self.task.first_row is not None:
            index = np.load(self.task.path.with_name(INDEX_NAME), mmap_mode="r", allow_pickle=False)
            self._compare_rows(index[self.task.first_row :][:num_samples])

    def _compare_rows(self, index: np.ndarray) -> None:
        rows = np.array(self.rows, dtype=SAMPLE_DTYPE)
        differing = np.flatnonzero(rows != index)
        if len(differing):
            first = int(differing[0])
            found, stated = rows[first].item(), index[first].item()
            names = ", ".join(SAMPLE_DTYPE.names or ())
            self.add(
                "index_differs",
                "",
                f"{len(differing)} of its {len(rows)} samples, the first is number {first}: ({names}) are {found} in the "
                f"tar, {stated} in the index",
            )


# --------------------------------------------------------------------------------------------------------------------
# Several shards


def lint_tars(
    paths: Sequence[Path],
    *,
    decode_share: float = 0.0,
    max_pixels: int = MAX_PIXELS,
    num_workers: int = 0,
) -> Iterator[tuple[str, LintReport]]:
    """Looks through tars, with or without a manifest beside them.

    Args:
        paths: the tars, at least one; where all of them lie in one folder with a manifest, they are held against it.
        decode_share: share of the images that are decoded, 0..1.
        max_pixels: an image of more counts as a fault.
        num_workers: processes that read; 0 reads in this one.

    Yields:
        The name and the report of each shard, in order, and at last one of the name "" with what concerns all of them.
    """
    whole, known, first_rows, num_classes = _read_description(paths)
    tasks = [
        LintTask(path, decode_share, max_pixels, num_classes, known.get(path.name), first_rows.get(path.name)) for path in paths
    ]
    total = LintReport()
    for path, report in zip(paths, map_tasks(lint_shard, tasks, num_workers), strict=True):
        total.merge(report)
        yield path.name, report
    for name in sorted(known.keys() - {path.name for path in paths}):
        if is_remote(name):
            whole.findings.add(Finding("remote_shard", name, "", "it lies elsewhere and was not looked at"))
        elif not (paths[0].parent / name).exists():
            whole.findings.add(Finding("missing_shard", name, "", "the file does not exist"))
    if not total.num_samples:
        whole.findings.add(Finding("no_samples", "", "", f"{len(paths)} tars hold no samples with one image"))
    if 0 < total.num_labelled < total.num_samples:
        num_unlabelled = total.num_samples - total.num_labelled
        whole.findings.add(Finding("some_unlabelled", "", "", f"{num_unlabelled} of {total.num_samples} samples have no label"))
    if len(total.channels) > 1:
        counts = ", ".join(f"{count} of {channels}" for channels, count in sorted(total.channels.items()))
        whole.findings.add(Finding("mixed_channels", "", "", f"images by their channels: {counts}"))
    yield "", whole


def _read_description(
    paths: Sequence[Path],
) -> tuple[LintReport, dict[str, ShardInfo], dict[str, int], int | None]:
    """Reads manifest and index where the tars are a data set.

    Returns:
        Findings about them; what they say of each shard, and where its part of the index starts, by name; the number of
        classes.
    """
    report, folder = LintReport(), paths[0].parent
    if any(path.parent != folder for path in paths) or not (folder / MANIFEST_NAME).is_file():
        return report, {}, {}, None
    try:
        manifest = Manifest.load(folder / MANIFEST_NAME)
    except DataError as error:
        report.findings.add(Finding("bad_manifest", "", "", str(error)))
        return report, {}, {}, None
    known = {info.name: info for info in manifest.shards}
    for path in paths:
        if path.name not in known:
            report.findings.add(Finding("unlisted_shard", path.name, "", f"{MANIFEST_NAME} does not list it"))
    first_rows: dict[str, int] = {}
    try:
        index_path = folder / INDEX_NAME
        with index_path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        index = np.load(index_path, mmap_mode="r", allow_pickle=False)
        if sha256 != manifest.index_sha256 or index.dtype != SAMPLE_DTYPE or index.shape != (manifest.num_samples,):
            report.findings.add(Finding("bad_manifest", "", "", f"{INDEX_NAME} is not the index that {MANIFEST_NAME} names"))
        else:
            starts = itertools.accumulate((info.num_samples for info in manifest.shards), initial=0)
            first_rows = dict(zip(known, starts, strict=False))
    except (OSError, ValueError, EOFError) as error:
        report.findings.add(Finding("bad_manifest", "", "", f"{INDEX_NAME} can not be read: {error}"))
    return report, known, first_rows, len(manifest.class_names) or None

"""Every fault of a shard, made as a real tar: what the checker says, what indexing does, and what a training reads.

No fault hangs a reader, and none makes it read less in silence: a shard is refused when it is indexed; or its sound samples
are read, the others are replaced and counted, by two processes in the same number of steps; or the reading ends loudly.
"""

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from data.config import DataConfig
from data.errors import DataError
from data.evaluation import evaluation_batches
from data.indexing import index_tars
from data.lint import LintReport, lint_tars
from data.loader import Batch, BatchLoader
from data.shards import ShardSet, open_shards
from data.stream import BatchPlan, SampleOrder
from tests.shard_files import header_only, image_bytes, make_tar, tar_bytes

PNG = image_bytes()
LARGE = image_bytes(size=300)
JPEG = image_bytes(image_format="JPEG", size=64)
TEN = [(f"{number}.{suffix}", content) for number in range(10) for suffix, content in (("png", PNG), ("cls", b"1"))]
SOUND = tar_bytes(TEN)
SAMPLE = 2048  # bytes of each of the ten: header and data of two members
CONFIG = DataConfig(num_workers=0, shuffle_window=4, max_pixels=200 * 200)
NUM_STEPS = 6


class Case(NamedTuple):
    """A faulty shard."""

    content: bytes
    rules: set[str]
    """What the checker calls it."""
    refused: str | None = None
    """What indexing says, which names the shard and the sample; None where it takes the shard."""
    keys: str = ""
    """Where it is taken: the samples that are in the index."""
    causes: tuple[str, ...] = ()
    """Why samples of them are replaced in training."""


def with_pngs(keys: str, *more: tuple[str, bytes]) -> list[tuple[str, bytes]]:
    return [(f"{key}.png", PNG) for key in keys] + list(more)


CASES = {
    "cut in a header": Case(SOUND[: 5 * SAMPLE + 100], {"truncated"}, "cut off|damaged|no sound"),
    "cut in the data": Case(SOUND[: 5 * SAMPLE + 520], {"truncated"}, "no sound|cut off"),
    "cut between members": Case(SOUND[: 5 * SAMPLE], {"no_end_mark"}, "after 10240 bytes and 5 samples: it was cut off"),
    "cut between members of a sample": Case(
        SOUND[: 5 * SAMPLE + 1024], {"no_end_mark", "some_unlabelled"}, "after 11264 bytes and 6 samples: it was cut off"
    ),
    "bad checksum": Case(
        SOUND[: 5 * SAMPLE + 148] + b"000000" + SOUND[5 * SAMPLE + 154 :],
        {"bad_header", "no_image"},
        "after 10240 bytes and 5 samples can not be read",
    ),
    "0xff header": Case(
        SOUND[: 5 * SAMPLE] + b"\xff" * 512 + SOUND[5 * SAMPLE + 512 :], {"bad_header", "no_image"}, "and 5 samples can not"
    ),
    "zero block": Case(SOUND[: 5 * SAMPLE] + bytes(512) + SOUND[5 * SAMPLE :], {"zero_block"}, "and 5 samples can not"),
    "two in a row": Case(SOUND + tar_bytes(with_pngs("xyz")), {"concatenated", "some_unlabelled"}, "several tars in a row"),
    "garbage after the end": Case(SOUND + b"<html>", {"garbage_after_end"}, "and 10 samples can not be read"),
    "empty file": Case(b"", {"empty_file", "no_samples"}, "no sound"),
    "compressed": Case(b"\x1f\x8b\x08" + SOUND, {"compressed", "no_samples"}, "no sound"),
    "no tar": Case(b"<html>" * 999, {"not_a_tar", "no_samples"}, "no sound"),
    "empty tar": Case(tar_bytes([]), {"empty_shard", "no_samples"}, "hold no samples"),
    "interleaved": Case(
        tar_bytes(with_pngs("ab", ("a.cls", b"1"), ("b.cls", b"1"))), {"interleaved"}, "sample 'a': the key comes twice"
    ),
    "duplicate key": Case(tar_bytes(with_pngs("aba")), {"duplicate_key"}, "sample 'a': the key comes twice"),
    "dots": Case(
        tar_bytes([("x.1.jpg", JPEG), ("x.2.jpg", JPEG), ("x.1.cls", b"1")]), {"dots_in_name", "no_samples"}, "sample 'x'"
    ),
    "case of the key": Case(tar_bytes([("a.JPG", JPEG), ("A.cls", b"1")]), {"case_clash", "no_image"}, "sample 'A'"),
    "no image": Case(tar_bytes(with_pngs("a", ("b.cls", b"1"))), {"no_image"}, r"sample 'b': of its members \['cls'\]"),
    "two images": Case(tar_bytes(with_pngs("ab", ("b.jpg", JPEG))), {"several_images"}, r"sample 'b'.*\['jpg', 'png'\]"),
    "no label in cls": Case(tar_bytes(with_pngs("a", ("a.cls", b"cat"))), {"bad_label"}, "sample 'a': no label .*b'cat'"),
    "cut json": Case(tar_bytes(with_pngs("a", ("a.json", b"{"))), {"bad_label"}, "sample 'a': no label"),
    "negative label": Case(tar_bytes(with_pngs("a", ("a.cls", b"-2"))), {"negative_label"}, "sample 'a': label -2"),
    "a link": Case(
        header_only("l.png", tarfile.SYMTYPE, "a.png") + tar_bytes(with_pngs("ab", ("b.cls", b"-1"))), {"link"}, keys="ab"
    ),
    "foreign headers": Case(
        header_only("d/", tarfile.DIRTYPE)
        + tar_bytes([("\u00fc.png", PNG), ("x" * 150 + ".png", PNG), ("b.png", PNG)], tar_format=tarfile.PAX_FORMAT),
        {"folder", "extended_header", "long_name"},
        keys="\u00fcxb",
    ),
    "hidden and without suffix": Case(
        tar_bytes(with_pngs("ab", ("._a.png", b"mac"), (".hidden.png", PNG), ("README", b""))),
        {"hidden", "no_suffix"},
        keys="ab",
    ),
    "labels of some, and as text": Case(
        tar_bytes(
            with_pngs("a", ("a.cls", b"0"), ("b.png", PNG), ("b.json", b'{"label": "x"}'), ("c.png", PNG), ("c.txt", b"1"))
        ),
        {"unused_label", "some_unlabelled"},
        keys="abc",
    ),
    "mixed channels": Case(
        tar_bytes(with_pngs("ab", ("c.png", image_bytes(mode="RGB")))), {"mixed_channels"}, keys="abc"
    ),
    "wrong suffix": Case(tar_bytes(with_pngs("a", ("b.jpg", PNG))), {"wrong_suffix"}, keys="ab"),
    "no picture": Case(
        tar_bytes(with_pngs("ab", ("c.jpg", b"<html>"))), {"not_an_image"}, keys="abc", causes=("not_an_image",)
    ),
    "empty picture": Case(tar_bytes(with_pngs("ab", ("c.jpg", b""))), {"not_an_image"}, keys="abc", causes=("not_an_image",)),
    "cut picture": Case(tar_bytes(with_pngs("a", ("b.jpg", JPEG[:-200]))), {"image_cut_off"}, keys="ab", causes=("truncated",)),
    "damaged picture": Case(
        tar_bytes(with_pngs("a", ("b.png", PNG[:20] + bytes(20) + PNG[40:]))), {"image_corrupt"}, keys="ab", causes=("corrupt",)
    ),
    "large picture": Case(
        tar_bytes(with_pngs("a", ("b.png", LARGE))), {"too_many_pixels"}, keys="ab", causes=("too_many_pixels",)
    ),
}  # fmt: skip


def check(*paths: Path) -> LintReport:
    total = LintReport()
    for _, report in lint_tars(paths, decode_share=1.0, max_pixels=CONFIG.max_pixels):
        total.merge(report)
    return total


def read_as_two_processes(shards: ShardSet) -> list[Batch]:
    """What two processes read in so many steps, which each of them makes to the end."""
    batches = []
    for rank in (0, 1):
        order = SampleOrder(shards.first_sample, 0, CONFIG.shuffle_window)
        read = list(BatchLoader(shards, CONFIG, BatchPlan(2, 2, 2, rank), order, (8, 8), 3, 0, NUM_STEPS))
        assert [len(batch.images) for batch in read] == [2] * 2 * NUM_STEPS
        batches += read
    return batches


@pytest.mark.parametrize("name", CASES)
def test_fault_that_was_there_before(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = tmp_path / "bad.tar"
    path.write_bytes(case.content)
    assert check(path).findings.counts.keys() == case.rules
    if case.refused is not None:
        with pytest.raises(DataError, match=case.refused) as caught:
            index_tars([path], tmp_path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value) or "hold no samples" in str(caught.value)
        assert [file.name for file in tmp_path.iterdir()] == ["bad.tar"]
        return
    index_tars([path], tmp_path)
    shards = open_shards(tmp_path)
    assert len(shards) == len(case.keys)
    batches = read_as_two_processes(shards)
    faults = [fault for batch in batches for fault in batch.faults]
    assert {fault.cause for fault in faults} == set(case.causes)
    bad = {fault.sample for fault in faults}
    assert all(fault.shard == "bad.tar" and fault.key == case.keys[fault.sample] for fault in faults)
    delivered = {index for batch in batches for index in batch.indices.tolist()}
    assert delivered == set(range(len(shards))) - bad
    assert len(bad) == len(case.causes)


# Damage of a file that was indexed as sound, which leaves its size as it is.
LATER: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {  # what is done, what the checker says, what the reader says
    "checksum": (lambda tar: tar[: 3 * SAMPLE + 148] + b"000000" + tar[3 * SAMPLE + 154 :], "bad_header", "no tar header"),
    "0xff header": (lambda tar: tar[: 3 * SAMPLE] + b"\xff" * 512 + tar[3 * SAMPLE + 512 :], "bad_header", "no tar header"),
    "hole": (lambda tar: tar[: 3 * SAMPLE] + bytes(1500) + tar[3 * SAMPLE + 1500 :], "zero_block", "no tar header"),
    "out of step": (lambda tar: tar[: 3 * SAMPLE] + b"\0" + tar[3 * SAMPLE : -1], "bad_header", "no tar header"),
    "another sample": (
        lambda tar: tar[: 3 * SAMPLE] + tar_bytes([("3.png", bytes(1500))], end=False)[:SAMPLE] + tar[4 * SAMPLE :],
        "hash_differs",
        f"1500 bytes by its header, {len(PNG)} by the index",
    ),
}


@pytest.fixture
def indexed(tmp_path: Path) -> ShardSet:
    """20 samples in two shards."""
    paths = [make_tar(tmp_path / f"{name}.tar", TEN) for name in "ab"]
    index_tars(paths, tmp_path, class_names=("x", "y"))
    assert dict(check(*paths).findings.counts) == {}
    return open_shards(tmp_path)


@pytest.mark.parametrize("name", LATER)
def test_damage_of_a_tar_after_it_was_indexed_ends_loudly(indexed: ShardSet, tmp_path: Path, name: str) -> None:
    damage, rule, message = LATER[name]
    path = tmp_path / "b.tar"
    path.write_bytes(damage(path.read_bytes()))
    shards = open_shards(tmp_path)  # the size is right
    with pytest.raises(DataError, match=message) as caught:
        read_as_two_processes(shards)
    assert f"shard {path} was changed after it was indexed" in str(caught.value)
    assert f"index_shards.py {tmp_path}`" in str(caught.value)
    assert check(tmp_path / "a.tar", path).findings.counts[rule] >= 1


@pytest.mark.parametrize("num_bytes", [0, 3 * SAMPLE, 3 * SAMPLE + 100, 3 * SAMPLE + 520, 9 * SAMPLE + 520])
def test_short_shard_is_a_fault_and_not_an_end(indexed: ShardSet, tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "b.tar"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DataError, match="was changed after it was indexed") as caught:  # it was opened before
        read_as_two_processes(indexed)
    assert str(path) in str(caught.value)
    with pytest.raises(DataError, match=rf"b\.tar has {num_bytes} bytes, and had 30720 when it was indexed"):
        open_shards(tmp_path)


def test_lost_shard_ends_loudly(indexed: ShardSet, tmp_path: Path) -> None:
    (tmp_path / "b.tar").unlink()
    with pytest.raises(DataError, match=r"b\.tar can not be opened"):
        read_as_two_processes(indexed)
    with pytest.raises(DataError, match=r"b\.tar is missing"):
        open_shards(tmp_path)


def test_image_that_was_damaged_later_is_replaced_and_named_and_measuring_refuses_it(indexed: ShardSet, tmp_path: Path) -> None:
    path = tmp_path / "b.tar"
    tar = path.read_bytes()
    path.write_bytes(tar[: 3 * SAMPLE + 512] + bytes(len(PNG)) + tar[3 * SAMPLE + 512 + len(PNG) :])
    batches = read_as_two_processes(open_shards(tmp_path))
    faults = [fault for batch in batches for fault in batch.faults]
    assert {fault[:3] for fault in faults} == {("not_an_image", "b.tar", "3")}
    assert 13 not in {index for batch in batches for index in batch.indices.tolist()}
    with pytest.raises(DataError, match=r"^b\.tar: 3: no known image format starts with.*take it out") as caught:
        list(evaluation_batches(indexed, (8, 8), 3, batch_size=4, num_workers=0))
    assert "\n" not in str(caught.value)


def test_the_same_replacement_whatever_the_number_of_processes(indexed: ShardSet, tmp_path: Path) -> None:
    path = tmp_path / "b.tar"
    tar = bytearray(path.read_bytes())
    for number in (2, 3, 7):
        tar[number * SAMPLE + 512 : number * SAMPLE + 512 + len(PNG)] = bytes(len(PNG))
    path.write_bytes(tar)

    def stream(world_size: int) -> tuple[list[list[int]], list[set]]:
        steps, faults = [[] for _ in range(NUM_STEPS)], [set() for _ in range(NUM_STEPS)]
        for rank in range(world_size):
            order = SampleOrder(indexed.first_sample, 0, CONFIG.shuffle_window)
            plan = BatchPlan(4 // world_size, 1, world_size, rank)
            for step, batch in enumerate(BatchLoader(indexed, CONFIG, plan, order, (8, 8), 3, 0, NUM_STEPS)):
                steps[step] += batch.indices.tolist()
                faults[step] |= set(batch.faults)
        return [sorted(step) for step in steps], faults

    assert stream(1) == stream(2) == stream(4)
    assert sum(map(len, stream(1)[1])) > 3  # 2 leads to 3, which is bad too

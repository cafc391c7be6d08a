"""data/tar_walk.py and data/lint.py: every fault is found under its name, and all of them in one go."""

import dataclasses
import hashlib
import io
import random
import tarfile
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from data.errors import Cause, DataError
from data.indexing import index_tars
from data.lint import NUM_EXAMPLES, Finding, LintReport, lint_tars
from data.lint_rules import RULE_OF_CAUSE, RULES
from data.shards import INDEX_NAME, MANIFEST_NAME, Manifest
from data.tar_walk import Damage, Member, find_header, walk_tar
from data.writer import list_images, write_shards
from tests.shard_files import header_only, image_bytes, make_files, make_tar, tar_bytes

PNG = image_bytes()
TEN = [(f"{number}.{suffix}", content) for number in range(10) for suffix, content in (("png", PNG), ("cls", b"1"))]
SAMPLE = 2048  # bytes of one of the ten: header and data of two members


def check(*paths: Path, decode_share: float = 1.0, max_pixels: int = 2**26, num_workers: int = 0) -> LintReport:
    total = LintReport()
    for _, report in lint_tars(paths, decode_share=decode_share, max_pixels=max_pixels, num_workers=num_workers):
        total.merge(report)
    return total


def check_bytes(folder: Path, content: bytes, decode_share: float = 1.0, max_pixels: int = 2**26) -> LintReport:
    (folder / "a.tar").write_bytes(content)
    return check(folder / "a.tar", decode_share=decode_share, max_pixels=max_pixels)


def only(report: LintReport, rule: str) -> Finding:
    assert dict(report.findings.counts) == {rule: 1}
    return report.findings.examples[rule][0]


def walk(content: bytes) -> list[Member | Damage]:
    return list(walk_tar(io.BytesIO(content)))


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_sound_tars_are_walked_as_tarfile_walks_them(tar_format: int) -> None:
    names = ["0.png", "d/1.png", "./2-\u00fc.png", "x" * 90 + "/" + "y" * 60 + "/3.png", "empty.cls"]
    names += ["z" * 300 + ".png"] if tar_format != tarfile.USTAR_FORMAT else []
    content = tar_bytes([(name, PNG if name.endswith("png") else b"") for name in names], tar_format=tar_format)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        expected = [(member.name, member.offset_data, member.size) for member in tar]
    members = [member for member in walk(content) if isinstance(member, Member)]
    assert [(member.name, member.offset, member.size) for member in members] == expected
    assert [member.name for member in members] == names
    assert {member.kind for member in members} == {"file"}
    assert [member.is_long for member in members if len(member.name) > 250] == [True] * (len(names) - 5)


def test_sparse_files_are_walked_past() -> None:
    header = bytearray(tarfile.TarInfo("0.png").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[124:136] = b"%011o\0" % 512
    header[482] = 1  # one block of extents follows
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * ord(" ") + sum(header[156:]))
    content = bytes(header) + bytes(512) + b"x" * 512 + tar_bytes(TEN[:1])
    sparse, plain = walk(content)
    assert isinstance(sparse, Member)
    assert (sparse.kind, sparse.offset, sparse.size) == ("special", 1024, 512)
    assert isinstance(plain, Member)
    assert plain.name == "0.png"


DAMAGES = {  # what is done to a tar of ten samples -> rule, samples before it and after it
    "in a header": (lambda tar: tar[: 5 * SAMPLE + 100], "truncated", 5, 0),
    "in the data": (lambda tar: tar[: 5 * SAMPLE + 520], "truncated", 5, 0),
    "between members": (lambda tar: tar[: 5 * SAMPLE], "no_end_mark", 5, 0),
    "all but the end": (lambda tar: tar[: 10 * SAMPLE], "no_end_mark", 10, 0),
    "checksum": (lambda tar: tar[: 5 * SAMPLE + 148] + b"000000" + tar[5 * SAMPLE + 154 :], "bad_header", 5, 4),
    "0xff header": (lambda tar: tar[: 5 * SAMPLE] + b"\xff" * 512 + tar[5 * SAMPLE + 512 :], "bad_header", 5, 4),
    "zero block": (lambda tar: tar[: 5 * SAMPLE] + bytes(512) + tar[5 * SAMPLE :], "zero_block", 5, 5),
    "a hole": (lambda tar: tar[: 5 * SAMPLE] + bytes(1500) + tar[5 * SAMPLE + 1500 :], "zero_block", 5, 4),
    "two in a row": (lambda tar: tar + tar_bytes([(f"b{name}", data) for name, data in TEN]), "concatenated", 10, 10),
    "garbage": (lambda tar: tar + b"<html>" * 500, "garbage_after_end", 10, 0),
    "lost in between": (lambda tar: tar[: 2 * SAMPLE + 700] + tar[4 * SAMPLE + 100 :], "bad_header", 2, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_what_lies_before_and_after_it_is_counted(tmp_path: Path, name: str) -> None:
    damage, rule, num_before, num_after = DAMAGES[name]
    report = check_bytes(tmp_path, damage(tar_bytes(TEN)))
    assert report.findings.counts[rule] == 1
    finding = report.findings.examples[rule][0]
    assert finding.shard == "a.tar"
    # "lost in between": the data of 2.png swallows what follows, so this sample is there, and damaged.
    swallowed = name == "lost in between"
    assert f"{num_before + swallowed} samples before it, {num_after} after" in finding.reason
    assert report.num_samples == num_before + num_after + swallowed
    assert f"after sample '{num_before - 1 + swallowed}'" in finding.reason


def test_several_damages_of_one_shard_are_all_found(tmp_path: Path) -> None:
    tar = bytearray(tar_bytes(TEN))
    for number in (2, 5, 8):
        tar[number * SAMPLE : number * SAMPLE + 512] = b"\xff" * 512
    report = check_bytes(tmp_path, bytes(tar[:-700]))
    counts = report.findings.counts
    assert (counts["bad_header"], counts["no_end_mark"], report.num_samples) == (3, 1, 7)
    assert counts["no_image"] == 3  # their .cls members are left


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_refused_at_index_time_is_named_here(tmp_path: Path, seed: int) -> None:
    """Random bytes, holes, cuts and insertions; nothing of it hangs or ends in another error."""
    draw = random.Random(seed)
    tar = bytearray(tar_bytes(TEN, tar_format=draw.choice([tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])))
    for _ in range(draw.randint(0, 3)):
        place, length = draw.randrange(len(tar)), draw.choice([1, 7, 100, 512, 1500])
        filling = draw.choice([b"", b"\xff" * length, bytes(length), draw.randbytes(length), bytes(tar[place:][:length])])
        tar[place : place + draw.choice([0, length])] = filling
    (tmp_path / "a.tar").write_bytes(tar)
    report = check(tmp_path / "a.tar")
    try:
        num_indexed = index_tars([tmp_path / "a.tar"], tmp_path).num_samples
    except DataError:
        assert report.findings.num("error") > 0
    else:
        assert num_indexed == report.num_samples


def test_headers_are_found_at_any_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.tar_walk.CHUNK", 1000)
    header = tar_bytes([("0.png", b"")], end=False)
    for place in (0, 1, 255, 488, 511, 512, 999, 1000, 1001, 2600):
        content = b"ustar" * 2000
        content = content[:place] + header + content[place:]
        assert find_header(io.BytesIO(content), 0, len(content)) == place
    assert find_header(io.BytesIO(b"ustar" * 2000 + header[:511]), 0, 10511) is None


MEMBERS = {  # members -> rule, and key
    "interleaved": ([("a.png", PNG), ("b.png", PNG), ("a.cls", b"1"), ("b.cls", b"1")], "interleaved", "a"),
    "image comes later": ([("a.cls", b"1"), ("b.png", PNG), ("a.png", PNG)], "interleaved", "a"),
    "twice": ([("a.png", PNG), ("a.png", PNG)], "duplicate_key", "a"),
    "twice, apart": ([("a.png", PNG), ("b.png", PNG), ("a.png", PNG)], "duplicate_key", "a"),
    "twice by case of the suffix": ([("a.png", PNG), ("a.PNG", PNG)], "duplicate_key", "a"),
    "dots": ([("a.1.png", PNG), ("a.2.png", PNG), ("a.cls", b"1")], "dots_in_name", "a"),
    "case": ([("a.PNG", PNG), ("A.png", PNG)], "case_clash", "A"),
    "no image": ([("a.cls", b"1"), ("b.png", PNG), ("b.cls", b"1")], "no_image", "a"),
    "two images": ([("a.png", PNG), ("a.jpg", PNG), ("b.png", PNG)], "several_images", "a"),
    "label is text": ([("a.png", PNG), ("a.cls", b"cat")], "bad_label", "a"),
    "label is no text": ([("a.png", PNG), ("a.cls", b"\xff")], "bad_label", "a"),
    "label is empty": ([("a.png", PNG), ("a.cls", b"")], "bad_label", "a"),
    "label is huge": ([("a.png", PNG), ("a.cls", b"9" * 30)], "bad_label", "a"),
    "label has no end": ([("a.png", PNG), ("a.cls", b"1" + b" " * 2**21)], "bad_label", "a"),
    "json is cut off": ([("a.png", PNG), ("a.json", b'{"label": 1')], "bad_label", "a"),
    "json is deep": ([("a.png", PNG), ("a.json", b"[" * 10**5)], "bad_label", "a"),
    "negative label": ([("a.png", PNG), ("a.cls", b"-2")], "negative_label", "a"),
    "label is a name": ([("a.png", PNG), ("a.json", b'{"label": "cat"}')], "unused_label", "a"),
    "label in txt": ([("a.png", PNG), ("a.txt", b" 7\n")], "unused_label", "a"),
    "some unlabelled": ([("a.png", PNG), ("a.cls", b"1"), ("b.png", PNG), ("b.cls", b"-1")], "some_unlabelled", ""),
    "hidden": ([("a.png", PNG), ("d/.hidden.png", PNG)], "hidden", "d/.hidden.png"),
    "macos": ([("._a.png", b"mac"), ("a.png", PNG)], "hidden", "._a.png"),
    "no suffix": ([("a.png", PNG), ("README", b"")], "no_suffix", "README"),
    "wrong suffix": ([("a.jpg", PNG)], "wrong_suffix", "a"),
    "no picture": ([("a.png", b"<html>")], "not_an_image", "a"),
    "empty picture": ([("a.png", b"")], "not_an_image", "a"),
    "cut picture": ([("a.jpg", image_bytes(0, "JPEG", 64)[:-300])], "image_cut_off", "a"),
    "corrupt picture": ([("a.png", PNG[:20] + bytes(20) + PNG[40:])], "image_corrupt", "a"),
    "large picture": ([("a.png", image_bytes(0, size=100))], "too_many_pixels", "a"),
    "mixed": ([("a.png", PNG), ("b.png", image_bytes(mode="RGB"))], "mixed_channels", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMBERS)
def test_samples_that_a_reader_would_trip_over_are_named(tmp_path: Path, name: str) -> None:
    members, rule, key = MEMBERS[name]
    report = check_bytes(tmp_path, tar_bytes(members), max_pixels=80 * 80)
    report.findings.counts.pop("no_samples", None)
    if rule in ("interleaved", "duplicate_key"):  # as many as there are keys, and their labels are lost with them
        report.findings.counts.pop("some_unlabelled", None)
        report.findings.counts[rule] = min(1, report.findings.counts[rule])
    assert only(report, rule)[1:3] == ("a.tar" if key else "", key)


def test_members_that_are_no_plain_files_are_named(tmp_path: Path) -> None:
    content = header_only("d/", tarfile.DIRTYPE) + header_only("l.png", tarfile.SYMTYPE, "a.png")
    content += header_only("h.png", tarfile.LNKTYPE, "a.png") + header_only("f.png", tarfile.FIFOTYPE) + tar_bytes(TEN)
    report = check_bytes(tmp_path, content)
    assert dict(report.findings.counts) == {"folder": 1, "link": 2, "special_member": 1}
    assert report.num_samples == 10
    pax = tar_bytes([("\u00fc.png", PNG), ("x" * 200 + ".png", PNG)], tar_format=tarfile.PAX_FORMAT)
    assert dict(check_bytes(tmp_path, pax).findings.counts) == {"extended_header": 2, "long_name": 1}


def test_files_that_are_no_tars_are_named(tmp_path: Path) -> None:
    counts = {"empty_file": b"", "compressed": b"\x1f\x8b\x08" + bytes(99), "not_a_tar": b"<html>" * 999}
    for rule, content in counts.items():
        report = check_bytes(tmp_path, content)
        assert dict(report.findings.counts) == {rule: 1, "no_samples": 1}
    report = check_bytes(tmp_path, tar_bytes([]))
    assert dict(report.findings.counts) == {"empty_shard": 1, "no_samples": 1}
    assert dict(check(make_tar(tmp_path / "b.tar", TEN), tmp_path / "a.tar").findings.counts) == {"empty_shard": 1}


def test_share_of_decoded_images_is_spread_and_exact(tmp_path: Path) -> None:
    members = [(f"{number}.png", PNG[:40]) for number in range(40)]
    assert check_bytes(tmp_path, tar_bytes(members), decode_share=0).num_decoded == 0
    report = check_bytes(tmp_path, tar_bytes(members), decode_share=0.25)
    assert report.num_decoded == 10
    [rule] = report.findings.counts
    assert report.findings.counts[rule] == 10
    assert [int(finding.key) for finding in report.findings.examples[rule]] == list(range(3, 40, 4))


def test_examples_are_few_and_counts_are_whole(tmp_path: Path) -> None:
    paths = [make_tar(tmp_path / f"{name}.tar", [(f"{n}.png", b"") for n in range(50)]) for name in "ab"]
    alone, together = check(*paths), check(*paths, num_workers=2)
    assert alone == together
    assert alone.findings.counts["not_an_image"] == 100
    assert len(alone.findings.examples["not_an_image"]) == NUM_EXAMPLES


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    source = make_files(tmp_path / "source", [f"c{number % 2}/{number}.png" for number in range(12)])
    write_shards(list_images(source), tmp_path / "shards", samples_per_shard=4)
    return tmp_path / "shards"


def test_our_own_shards_are_clean(ours: Path) -> None:
    report = check(*sorted(ours.glob("*.tar")))
    assert dict(report.findings.counts) == {}
    assert (report.num_shards, report.num_samples, report.num_labelled, report.num_decoded) == (3, 12, 12, 12)


def test_shards_are_held_against_the_manifest(ours: Path) -> None:
    first, second, third = sorted(ours.glob("*.tar"))
    content = first.read_bytes()
    first.write_bytes(content.replace(b'{"path": "c', b'{"path": "d', 1))
    assert only(check(first, second, third), "hash_differs").shard == "000000.tar"
    first.write_bytes(content + tar_bytes(TEN[:2]))
    counts = check(first, second, third).findings.counts
    assert dict(counts) == {"concatenated": 1, "size_differs": 1, "count_differs": 1}
    first.write_bytes(content)
    third.unlink()
    assert only(check(first, second), "missing_shard").shard == "000002.tar"
    assert only(check(first, second, third), "missing_shard").shard == "000002.tar"


def test_index_is_held_against_the_tars(ours: Path) -> None:
    paths = sorted(ours.glob("*.tar"))
    index = np.load(ours / INDEX_NAME)
    index["label"][5] += 1
    np.save(ours / INDEX_NAME, index)
    assert "index.npy is not the index" in only(check(*paths), "bad_manifest").reason
    # The one that the manifest names, and wrong all the same.
    digest = hashlib.sha256((ours / INDEX_NAME).read_bytes()).hexdigest()
    manifest = dataclasses.replace(Manifest.load(ours / MANIFEST_NAME), index_sha256=digest)
    (ours / MANIFEST_NAME).write_text(manifest.to_json())
    finding = only(check(*paths), "index_differs")
    assert finding.shard == "000001.tar"
    assert "1 of its 4 samples, the first is number 1" in finding.reason


def test_manifest_that_can_not_be_used_is_said_and_the_tars_are_checked_all_the_same(ours: Path) -> None:
    (ours / MANIFEST_NAME).write_text("{")
    report = check(*ours.glob("*.tar"))
    assert MANIFEST_NAME in only(report, "bad_manifest").reason
    assert report.num_samples == 12


def test_unlisted_shards_and_labels_beyond_the_classes_are_named(ours: Path) -> None:
    make_tar(ours / "more.tar", [("a.png", PNG), ("a.cls", b"2")])
    report = check(*sorted(ours.glob("*.tar")))
    assert dict(report.findings.counts) == {"unlisted_shard": 1, "label_beyond_classes": 1}


def test_shards_that_lie_elsewhere_are_named_as_not_checked(ours: Path) -> None:
    manifest = Manifest.load(ours / MANIFEST_NAME)
    shards = (*manifest.shards[:2], dataclasses.replace(manifest.shards[2], name="https://example.org/000002.tar"))
    (ours / MANIFEST_NAME).write_text(dataclasses.replace(manifest, shards=shards).to_json())
    report = check(*sorted(ours.glob("*.tar"))[:2])
    assert only(report, "remote_shard").shard == "https://example.org/000002.tar"


def test_every_cause_has_a_rule_and_every_rule_says_what_to_do() -> None:
    assert RULE_OF_CAUSE.keys() == set(get_args(Cause))
    assert set(RULE_OF_CAUSE.values()) <= RULES.keys()
    assert all(rule.meaning and rule.remedy for rule in RULES.values())

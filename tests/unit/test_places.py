"""data/places.py: names and patterns."""

from pathlib import Path

import pytest

from data import places
from data.errors import DataError
from data.places import (
    Place,
    as_place,
    base_name,
    expand_braces,
    has_glob,
    has_pattern,
    is_remote,
    join,
    matches,
    parse_list,
    split_name_pattern,
    split_sources,
)


@pytest.mark.parametrize(
    ("text", "remote"),
    [
        ("https://host/set", True), ("s3://bucket/set", True), ("hf://datasets/a/b", True), ("pipe:cat {name}", True),
        ("set", False), ("/data/set", False), ("./a:b", False), ("C:\\set", False), ("file:///data/set", False),
    ],
)  # fmt: skip
def test_urls_and_commands_are_elsewhere(text: str, remote: bool) -> None:
    assert is_remote(text) is remote
    assert isinstance(as_place(text), Place) is remote


def test_file_urls_are_paths() -> None:
    assert as_place("file:///data/my%20set") == Path("/data/my set")


@pytest.mark.parametrize(
    ("folder", "name", "joined"),
    [
        ("https://host/set", "0.tar", "https://host/set/0.tar"),
        ("https://host/set/", "a b#1.tar", "https://host/set/a%20b%231.tar"),
        ("https://host/set?key=x/y", "0.tar", "https://host/set/0.tar?key=x/y"),
        ("https://host", "0.tar", "https://host/0.tar"),
        ("s3://bucket/set/", "a b?.tar", "s3://bucket/set/a b?.tar"),
        ("pipe:cat /d/{name} | head", "a b;c.tar", "pipe:cat /d/'a b;c.tar' | head"),
        ("https://host/set", "s3://other/0.tar", "s3://other/0.tar"),
    ],
)
def test_names_are_resolved_against_the_folder(folder: str, name: str, joined: str) -> None:
    assert join(Place(folder), name) == Place(joined)


def test_names_of_files_come_back_out_of_their_places() -> None:
    place = Place("https://host/set?key") / "a b.tar"
    assert place.name == "a b.tar"
    assert place.parent == Place("https://host/set?key")
    assert Place("s3://bucket/set/0.tar").name == base_name("s3://bucket/set/0.tar") == base_name("0.tar") == "0.tar"
    assert Place("s3://bucket/set/0.tar").parent == Place("s3://bucket/set")
    assert join(Path("here"), "0.tar") == Path("here/0.tar")
    assert join(Path("here"), "https://host/0.tar") == Place("https://host/0.tar")


def test_messages_hold_no_secrets() -> None:
    assert str(Place("https://me:secret@host/set/0.tar?sig=secret")) == "https://host/set/0.tar"
    assert str(Place("https://me:secret@host/a::s3://k:s@bucket/b")) == "https://host/a::s3://bucket/b"


def test_commands_must_say_where_the_name_goes() -> None:
    with pytest.raises(DataError, match=r"lacks \{name\}"):
        as_place("pipe:cat x")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a::b::c", ["a", "b", "c"]),
        ("a", ["a"]),
        ("http://[fe80::1]:8000/set::http://[::1]/b", ["http://[fe80::1]:8000/set", "http://[::1]/b"]),
    ],
)
def test_sources_are_split_as_open_clip_does_but_not_within_addresses(text: str, parts: list[str]) -> None:
    assert split_sources(text) == parts


@pytest.mark.parametrize("text", ["a::", "::a", "a::::b"])
def test_empty_sources_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="empty source"):
        split_sources(text)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("plain.tar", ["plain.tar"]),
        ("{0..2}.tar", ["0.tar", "1.tar", "2.tar"]),
        ("{008..011}.tar", ["008.tar", "009.tar", "010.tar", "011.tar"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{00..10..5}", ["00", "05", "10"]),
        ("{a..c}", ["a", "b", "c"]),
        ("{a,b}/{0..1}", ["a/0", "a/1", "b/0", "b/1"]),
        ("x{a,{1..2}}y", ["xay", "x1y", "x2y"]),
        ("{,b}x", ["x", "bx"]),
        ("{a..3}", ["{a..3}"]),
        ("{name} {0..1}", ["{name} 0", "{name} 1"]),
        ("{a", ["{a"]),
        ("{}{1..2}", ["{}1", "{}2"]),
    ],
)
def test_braces_are_expanded_as_a_shell_does(pattern: str, names: list[str]) -> None:
    assert expand_braces(pattern) == names


def test_too_large_patterns_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_EXPANDED", 1000)
    with pytest.raises(DataError, match="more than 1,000 names"):
        expand_braces("{0..999999}{0..999999}.tar")
    assert len(expand_braces("{0..999}")) == 1000


@pytest.mark.parametrize(
    ("text", "glob", "pattern"),
    [
        ("a*.tar", True, True), ("a?.tar", True, True), ("[ab].tar", True, True), ("a.tar", False, False),
        ("a[].tar", False, False),
        ("https://host/a.tar?x=*", False, False), ("https://[::1]/a.tar", False, False), ("https://host/a*.tar?x", True, True),
        ("s3://b/a?.tar", True, True), ("{0..1}", False, True), ("pipe:cat {a,b}/{name}", False, False),
    ],
)  # fmt: skip
def test_patterns_are_told_from_names(text: str, glob: bool, pattern: bool) -> None:
    assert has_glob(text) is glob
    assert has_pattern(text) is pattern


def test_patterns_are_split_into_folder_and_name() -> None:
    assert split_name_pattern("https://host/set/0*.tar?key") == ("https://host/set?key", "0*.tar")
    assert split_name_pattern("s3://bucket/set/0?.tar") == ("s3://bucket/set", "0?.tar")
    assert split_name_pattern("/data/set/0.tar") == ("/data/set", "0.tar")
    assert split_name_pattern("*.tar") == (".", "*.tar")


def test_shards_match_by_their_base_names() -> None:
    assert matches("https://host/set/0007.tar?key", "0*.tar")
    assert matches("[a].tar", "[a].tar")
    assert not matches("0.TAR", "*.tar")


def test_lists_have_comments_and_blank_lines() -> None:
    assert parse_list("# all\n0.tar\n\n  {1..2}.tar  # two\nhttps://host/a#b.tar\n") == [
        "0.tar", "{1..2}.tar", "https://host/a#b.tar",
    ]  # fmt: skip

"""Names of files and folders that lie anywhere: local paths, URLs, commands that print a file, and patterns over them.

Nothing here touches a disk or a network.
"""

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from data.errors import DataError

PIPE = "pipe:"
"""Marks a place whose files a command prints: "pipe:aws s3 cp s3://bucket/set/{name} -"."""

MAX_EXPANDED = 1_000_000
"""A pattern that stands for more names than this is a typing error."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")


@dataclass(frozen=True)
class Place:
    """A file or folder that is not on this machine, or several sources at once: what `url` says.

    Its text (`str`) is for messages: it leaves out passwords and what follows a question mark, which is often a secret too.
    """

    url: str
    """As it was given: "https://host/set", "s3://bucket/set/000000.tar", "pipe:ssh host cat set/{name}", "set::other"."""

    @property
    def scheme(self) -> str:
        """What comes before "://", in lower case; "pipe" for commands."""
        return "pipe" if self.url.startswith(PIPE) else self.url.partition("://")[0].lower()

    @property
    def is_http(self) -> bool:
        """Whether it is read by HTTP; a question mark is part of such a URL, and no pattern."""
        return self.scheme in ("http", "https")

    @property
    def name(self) -> str:
        """The last part of the path, as a file is called; the last word for commands."""
        if self.is_http:
            return unquote(urlsplit(self.url).path.rstrip("/").rpartition("/")[2])
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> "Place":
        """The folder of a file; the query of a URL stays."""
        if not self.is_http:
            return Place(self.url.rstrip("/").rpartition("/")[0])
        parts = urlsplit(self.url)
        return Place(parts._replace(path=parts.path.rstrip("/").rpartition("/")[0]).geturl())

    def __truediv__(self, name: str) -> "Place":
        if self.scheme == "pipe":
            return Place(self.url.replace("{name}", shlex.quote(name)))
        if not self.is_http:
            return Place(f"{self.url.rstrip('/')}/{name}")
        parts = urlsplit(self.url)
        return Place(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}").geturl())

    def __str__(self) -> str:
        if self.scheme == "pipe" or "::" in self.url:
            return "::".join(str(Place(part)) for part in split_sources(self.url)) if "::" in self.url else self.url
        shown = re.sub(r"(://)[^/@]*@", r"\1", self.url)
        return shown.partition("?")[0] if self.is_http else shown


AnyPlace = Path | Place


def is_remote(text: str) -> bool:
    """Says whether a name is a URL or a command rather than a local path; "file://" is local."""
    return (_URL.match(text) is not None or text.startswith(PIPE)) and not text.lower().startswith("file://")


def as_place(text: str) -> AnyPlace:
    """Takes a name for what it is: a `Path` on this machine, or a `Place` elsewhere.

    Raises:
        DataError: it is a command that does not say where the name of a file goes.
    """
    if text.lower().startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    if text.startswith(PIPE) and "{name}" not in text:
        raise DataError(f"{text} lacks {{name}}, which stands for the name of the file that the command is to print")
    return Place(text) if is_remote(text) else Path(text)


def join(folder: AnyPlace, name: str) -> AnyPlace:
    """Resolves a shard's name against the folder of its data set; a URL stands for itself."""
    return as_place(name) if is_remote(name) else folder / name


def base_name(name: str) -> str:
    """Returns the file name of a shard that is called by its name or by its URL."""
    return Place(name).name if is_remote(name) else name.rpartition("/")[2]


# --------------------------------------------------------------------------------------------------------------------
# Patterns


def split_sources(text: str) -> list[str]:
    """Splits "A::B::C" into its sources; the colons in the brackets of an IPv6 address stay together.

    Raises:
        DataError: one of several sources is empty.
    """
    parts = re.split(r"::(?![^\[\]]*\])", text)
    if len(parts) > 1 and not all(parts):
        raise DataError(f"{text} names an empty source; expected sources with :: between them")
    return parts


def expand_braces(pattern: str) -> list[str]:
    """Expands braces as a shell does: "{000..015}" with its zeros, "{0..9..3}", "{a,b}", any of them nested.

    Other braces are left alone.

    Raises:
        DataError: it stands for more than MAX_EXPANDED names.
    """
    names = list(itertools.islice(_expand(pattern), MAX_EXPANDED + 1))
    if len(names) > MAX_EXPANDED:
        raise DataError(f"{pattern} stands for more than {MAX_EXPANDED:,} names; expected a smaller range in its braces")
    return names


def _expand(text: str) -> Iterator[str]:
    for opening in (match.start() for match in re.finditer(r"\{", text)):
        closing = _matching_brace(text, opening)
        choices = None if closing is None else _choices(text[opening + 1 : closing])
        if closing is None or choices is None:
            continue
        for choice in choices:
            # What stands before was seen to hold no pattern, so only the rest is looked at again.
            for rest in _expand(text[closing + 1 :]):
                yield f"{text[:opening]}{choice}{rest}"
        return
    yield text


def _matching_brace(text: str, opening: int) -> int | None:
    depth = 0
    for position in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None


def _choices(inside: str) -> Iterator[str] | None:
    """What a pair of braces stands for; None when it is no pattern."""
    if match := _RANGE.fullmatch(inside):
        return _range(*match.groups())
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(inside[start:position])
            start = position + 1
    return (name for part in [*parts, inside[start:]] for name in _expand(part)) if parts else None


def _range(first: str, last: str, step: str | None) -> Iterator[str] | None:
    if first.isalpha() != last.isalpha():
        return None
    numeric = not first.isalpha()
    start, stop = (int(first), int(last)) if numeric else (ord(first), ord(last))
    stride = (abs(int(step or 1)) or 1) * (1 if start <= stop else -1)
    padded = numeric and any(len(end.lstrip("-")) > 1 and end.lstrip("-").startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    numbers = range(start, stop + (1 if stride > 0 else -1), stride)
    return (f"{number:0{width}d}" if numeric else chr(number) for number in numbers)


def has_glob(text: str) -> bool:
    """Says whether a name holds "*", "?" or "[...]"; in a URL of HTTP "?" begins the query, and the host may have brackets."""
    if is_remote(text) and Place(text).is_http:
        text = urlsplit(text).path
    return re.search(r"[*?]|\[[^]]+\]", text) is not None


def has_pattern(text: str) -> bool:
    """Says whether a name stands for several, by braces or by a glob."""
    return not text.startswith(PIPE) and (has_glob(text) or next(iter(_expand(text))) != text)


def split_name_pattern(text: str) -> tuple[str, str]:
    """Splits the name or pattern of a shard into its folder and what is looked for in it.

    Returns:
        ("https://host/set?key", "0*.tar") for "https://host/set/0*.tar?key"; the folder of a bare name is ".".
    """
    if is_remote(text):
        place = Place(text)
        return place.parent.url, place.name
    path = as_place(text)
    return str(path.parent), path.name


def matches(name: str, pattern: str) -> bool:
    """Says whether the base name of a shard fits a pattern without braces; upper and lower case differ."""
    base = base_name(name)
    return base == pattern or fnmatchcase(base, pattern)


def parse_list(text: str) -> list[str]:
    """Returns the lines of a list of shards, without what follows a "#" at the start of a line or after a blank."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]

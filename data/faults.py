"""What is told of a sample that can not be read, from the reader process that met it to the log of the run."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from data.errors import Cause

CHECK_COMMAND = "python scripts/check_shards.py FOLDER --decode 1"
"""Lists all that is wrong with shards."""


class Fault(NamedTuple):
    """A sample that could not be read and was replaced by a neighbour."""

    cause: Cause
    """The word under which it is counted."""
    shard: str
    key: str
    reason: str
    """One sentence for the user."""
    sample: int
    """Its number in the data set: keys of GNU and PAX archives are cut off, and may be equal."""

    def __str__(self) -> str:
        return printable(f"{self.shard}: {self.key}: {self.reason}")


def printable(text: str) -> str:
    """Escapes what a terminal does not show, or can not be written to it: names in a tar may be any bytes."""
    return text if text.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def describe_counts(counts: Counter[Cause] | Counter[str]) -> str:
    """Says how many faults there are of each cause, the most frequent first: "3 corrupt, 1 truncated"."""
    return ", ".join(f"{count:,} {cause}" for cause, count in counts.most_common())


def count_causes(faults: Iterable[Fault]) -> Counter[Cause]:
    """Counts faults by their cause."""
    return Counter(fault.cause for fault in faults)

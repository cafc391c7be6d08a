"""Walks a tar file member by member, and goes on behind damage where tar's own readers take it for the end.

`data/indexing.py` reads with tarfile, which stops at the first thing it does not understand. To say what is wrong with a
file, and how much of it is left, one has to see what comes after. Only headers are read here: memory stays small, and the
data of a member is passed over by seeking.

Format: POSIX.1-2001 (pax), and GNU tar's manual, "Basic Tar Format".
"""

import os
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple

BLOCK = tarfile.BLOCKSIZE
CHUNK = 2**20  # bytes that are searched at once
MAX_EXTENDED = 2**20  # a pax or GNU header of more bytes than this is taken for damage
MAGIC = b"ustar"
MAGIC_OFFSET = 257  # of MAGIC in a header
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_SPARSE_FLAG = 482  # of a GNU sparse header: 1 where a block of extents follows; in those blocks it stands at 504
_SPARSE_FLAG_OF_BLOCK = 504

Kind = Literal["file", "folder", "link", "special"]
DamageKind = Literal["truncated", "no_end_mark", "bad_header", "zero_block", "concatenated", "garbage_after_end", "not_a_tar"]


class Member(NamedTuple):
    """A member whose header is sound and whose data is all there."""

    name: str
    kind: Kind
    offset: int
    """Where its data starts, in bytes."""
    size: int
    """Bytes of its data."""
    is_extended: bool
    """A pax or GNU header stands before its own."""
    is_long: bool
    """Its name came from that header, because it does not fit into its own."""


class Damage(NamedTuple):
    """A place where a reader of tars stops."""

    kind: DamageKind
    offset: int
    """Where it begins, in bytes."""
    num_bytes: int
    """Bytes until the next member that can be read, or until the end of the file."""
    name: str
    """Of the member that is hit, where it is known, else ""."""
    reason: str


class _Pending(NamedTuple):
    """What extended headers say of the member that follows."""

    seen: bool = False
    name: str | None = None
    size: int | None = None
    is_sparse: bool = False


def walk_tar(file: BinaryIO) -> Iterator[Member | Damage]:
    """Lists members and damages in the order of the file.

    After damage it goes on at the next header with a right checksum, wherever that stands: a file that was cut off and
    added to is out of step with tar's blocks of 512 bytes. Headers older than POSIX (1988) are not found so.

    Args:
        file: seekable; its position is moved.
    """
    num_bytes = file.seek(0, os.SEEK_END)
    offset, found = 0, None
    while len(block := _read(file, offset, BLOCK)) == BLOCK:
        found, offset = _look(file, offset, block, found if isinstance(found, _Pending) else _Pending(), num_bytes)
        if found is None:
            return
        if not isinstance(found, _Pending):
            yield found
    if block or not isinstance(found, Damage):  # otherwise what was said last went on to the end
        yield _end_of_file(offset, block, found if isinstance(found, _Pending) else _Pending())


def _look(
    file: BinaryIO, offset: int, block: bytes, pending: _Pending, num_bytes: int
) -> tuple[Member | Damage | _Pending | None, int]:
    """Says what stands where a header is expected, None at the end of the archive, and where the next header is expected."""
    if block.count(0) == BLOCK:
        damage = _look_behind_zeros(file, offset, num_bytes)
        return damage, offset + (damage.num_bytes if damage else 0)
    header = _parse(block)
    start = "its checksum is wrong" if header is None else _read_extended(file, offset, header, num_bytes, pending)
    if header is None or isinstance(start, str):
        damage = _bad_header(file, offset, num_bytes, str(start))
        return damage, offset + damage.num_bytes
    if isinstance(start, _Pending):
        return start, offset + BLOCK + _padded(header.size)
    member = _member(header, start, pending)
    if not header.isreg() and header.type in tarfile.SUPPORTED_TYPES:  # it has no data, whatever its size says
        return member, start
    if start + member.size > num_bytes:
        damage = _cut_off(file, start, num_bytes, member)
        return damage, start + damage.num_bytes
    return member, start + _padded(member.size)


def _read(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _parse(block: bytes) -> tarfile.TarInfo | None:
    """Returns a header, or None where this is none."""
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return header if header.size >= 0 else None


def _member(header: tarfile.TarInfo, offset: int, pending: _Pending) -> Member:
    kind: Kind = "special"
    if header.type == tarfile.GNUTYPE_SPARSE or pending.is_sparse:
        pass
    elif header.isreg():
        kind = "file"
    elif header.isdir():
        kind = "folder"
    elif header.issym() or header.islnk():
        kind = "link"
    size = header.size if pending.size is None else pending.size
    is_long = pending.name is not None and len(pending.name.encode("utf-8", "surrogateescape")) > tarfile.LENGTH_NAME
    return Member(pending.name or header.name, kind, offset, size, pending.seen, is_long)


def _read_extended(
    file: BinaryIO, offset: int, header: tarfile.TarInfo, num_bytes: int, pending: _Pending
) -> _Pending | int | str:
    """Reads what belongs to a header beside its block.

    Returns:
        What an extended header says of the member after it; for the header of a member, where its data starts; or, in words,
        what is wrong.
    """
    start = offset + BLOCK
    if header.type == tarfile.GNUTYPE_SPARSE:
        flag = _read(file, offset + _SPARSE_FLAG, 1)
        while flag == b"\1" and start < num_bytes:
            flag = _read(file, start + _SPARSE_FLAG_OF_BLOCK, 1)
            start += BLOCK
    if header.type not in _EXTENDED:
        return start
    if header.size > MAX_EXTENDED:
        return f"it announces an extended header of {header.size} bytes"
    content = _read(file, start, header.size)
    if len(content) < header.size:
        return "its extended header is cut off"
    if header.type == tarfile.GNUTYPE_LONGNAME:
        return pending._replace(seen=True, name=content.split(b"\0", 1)[0].decode("utf-8", "surrogateescape"))
    if header.type in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
        return pending._replace(seen=True)
    try:
        fields = _pax_fields(content)
        return pending._replace(
            seen=True,
            name=fields.get("path", pending.name),
            size=int(fields["size"]) if "size" in fields else pending.size,
            is_sparse=any(name.startswith("GNU.sparse.") for name in fields),
        )
    except ValueError:
        return "its pax header can not be read"


def _pax_fields(content: bytes) -> dict[str, str]:
    """Reads records, each a length, a space, name=value and a line feed; raises ValueError where they are none."""
    fields: dict[str, str] = {}
    while content.strip(b"\0"):
        length = int(content[: content.index(b" ")])
        record = content[:length]
        name, equals, value = record.partition(b" ")[2].partition(b"=")
        if length < 5 or not equals or not value.endswith(b"\n"):
            raise ValueError("no record")
        fields[name.decode("utf-8", "surrogateescape")] = value[:-1].decode("utf-8", "surrogateescape")
        content = content[length:]
    return fields


# --------------------------------------------------------------------------------------------------------------------
# Damage


def _end_of_file(offset: int, rest: bytes, pending: _Pending) -> Damage:
    if rest.strip(b"\0"):
        return Damage("truncated", offset, len(rest), "", f"it ends {len(rest)} bytes into a header of {BLOCK}")
    if pending.seen:
        return Damage("truncated", offset, len(rest), pending.name or "", "it ends between an extended header and its member")
    return Damage("no_end_mark", offset, len(rest), "", "it ends behind a member, without the mark of a tar's end")


def _cut_off(file: BinaryIO, offset: int, num_bytes: int, member: Member) -> Damage:
    following = find_header(file, offset, num_bytes)
    until = num_bytes if following is None else following
    reason = f"{member.size} bytes of data are announced, and {num_bytes - offset} are left in the file"
    return Damage("truncated", offset, until - offset, member.name, reason)


def _bad_header(file: BinaryIO, offset: int, num_bytes: int, what: str) -> Damage:
    following = find_header(file, offset + 1, num_bytes)
    until = num_bytes if following is None else following
    kind = "not_a_tar" if offset == 0 and following is None else "bad_header"
    return Damage(kind, offset, until - offset, "", f"no header of a member can be read: {what}")


def _look_behind_zeros(file: BinaryIO, offset: int, num_bytes: int) -> Damage | None:
    """Says what comes after a block of zeros; None where it is the end of the archive."""
    position = offset
    while chunk := _read(file, position, CHUNK):
        if filled := chunk.lstrip(b"\0"):
            position += len(chunk) - len(filled)
            break
        position += len(chunk)
    else:
        return None
    num_zero_blocks = (position - offset) // BLOCK
    start = offset + num_zero_blocks * BLOCK  # of the block with the first byte that is not zero
    if num_zero_blocks > 1 and _parse(_read(file, start, BLOCK)) is not None:
        return Damage(
            "concatenated", offset, start - offset, "", "another archive, or the rest of this one, follows after zeros"
        )
    following = find_header(file, start, num_bytes)
    if following is None and num_zero_blocks > 1:
        reason = f"{num_bytes - start} bytes that are no tar follow after the mark of the end"
        return Damage("garbage_after_end", offset, num_bytes - offset, "", reason)
    until = num_bytes if following is None else following
    return Damage("zero_block", offset, until - offset, "", f"{num_zero_blocks} block(s) of zeros stand amid the members")


def find_header(file: BinaryIO, start: int, stop: int) -> int | None:
    """Returns where the first header with a right checksum stands, at `start` or after it."""
    position = start
    while position < stop:
        chunk = _read(file, position, CHUNK + BLOCK)
        found = chunk.find(MAGIC, MAGIC_OFFSET)
        while found != -1:
            header = found - MAGIC_OFFSET
            if len(chunk) - header < BLOCK:
                break  # it is whole in the next chunk, or cut off by the end of the file
            if _parse(chunk[header : header + BLOCK]) is not None:
                return position + header
            found = chunk.find(MAGIC, found + 1)
        if len(chunk) < CHUNK + BLOCK:
            return None
        position += CHUNK
    return None

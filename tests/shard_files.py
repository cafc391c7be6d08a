"""Images and tars that tests of data/ write and read back."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from data.reader import ShardReader
from data.shards import open_shards


def image_bytes(value: int = 0, image_format: str = "PNG", size: int = 4, mode: str = "L") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (size, size), value if mode == "L" else (value, 0, 0)).save(buffer, image_format)
    return buffer.getvalue()


def make_files(folder: Path, names: Iterable[str]) -> Path:
    """Writes one grey PNG under each name; the pixels of the n-th have value n."""
    for value, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(image_bytes(value))
    return folder


def make_tar(path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    content = tar_bytes(members, tar_format=tar_format)
    path.write_bytes(content + bytes(-len(content) % tarfile.RECORDSIZE))
    return path


def tar_bytes(members: Iterable[tuple[str, bytes]], end: bool = True, tar_format: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tar in memory; without its end it holds the members alone, each a header and data in blocks of 512 bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        length = tar.offset
    return buffer.getvalue()[:length] + bytes(2 * tarfile.BLOCKSIZE if end else 0)


def header_only(name: str, kind: bytes, link: str = "") -> bytes:
    """The header of a member that has no data: a folder, a link, a device."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member.tobuf(tarfile.USTAR_FORMAT)


def read_all(folder: Path) -> list[tuple[str, int, bytes]]:
    shards = open_shards(folder)
    with ShardReader(shards) as reader:
        samples = [reader.read(index) for index in range(len(shards))]
    return [(sample.key, sample.label, sample.data) for sample in samples]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}

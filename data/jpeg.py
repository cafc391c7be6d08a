"""JPEG files by their header: how large they are, how they are turned, and pixels by simplejpeg where it is installed.

Only what is common goes this way. Whatever is odd gives None, and the caller leaves it to Pillow, which then decides by the
rules of `data/decode.py`. simplejpeg and Pillow hold the same libjpeg-turbo, so their pixels are equal.

Shape letters: C channels, H W pixels.
"""

import functools
import io
import math
import threading
from types import ModuleType
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image

FACTORS = (8, 4, 2)
"""By how much a JPEG can be reduced while it is decoded, at a gain. libjpeg-turbo also knows 7/8 .. 3/8, but has no fast code
for them: 7/8, 6/8 and 5/8 take longer than the whole image, 3/8 as long as 1/2."""

MIN_REDUCED_PX = 64
"""Narrower images are decoded whole: nothing is gained, and factors differ by less than a pixel."""

UPRIGHT = {
    1: (False, False, False),
    2: (False, True, False),
    3: (True, True, False),
    4: (True, False, False),
    5: (False, False, True),
    6: (True, False, True),
    7: (True, True, True),
    8: (False, True, True),
}
"""EXIF orientation -> whether rows are flipped, columns are flipped, and then rows and columns swapped."""

_MAX_SCRATCH_BYTES = 16 * 2**20
"""Larger images get memory of their own, which is given back."""


class JpegHeader(NamedTuple):
    """What is known of a JPEG file before it is decoded."""

    height: int
    """Of the stored picture, in pixels, before it is turned upright."""
    width: int
    is_grey: bool
    """One channel; otherwise three, and RGB is what becomes of them."""
    orientation: int
    """EXIF's, 1..8; 1 also where there is none, or one that means nothing."""
    height_offset: int | None
    """Where in the file the height stands, or None where rows at the bottom can not be left out."""
    block_rows: int
    """The picture is stored in stripes of so many rows: 8, or 16 where colours have half the rows."""


def exif_orientation(image: Image.Image) -> int:
    """Returns 1..8, by the metadata of an opened image; 1 where nothing usable is known."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    # Broken metadata around a sound picture makes Pillow raise almost anything: nothing is known, nothing turned.
    except Exception:
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


# Markers (ITU-T T.81, table B.1)
_START_OF_SCAN, _RESTART_INTERVAL = 0xDA, 0xDD
_SEQUENTIAL, _PROGRESSIVE = (0xC0, 0xC1), 0xC2
_FRAMES = (*_SEQUENTIAL, _PROGRESSIVE)
_TABLES = (0xC4, 0xDB)  # Huffman, quantisation
_JFIF, _PROFILE, _ADOBE, _COMMENT = 0xE0, 0xE2, 0xEE, 0xFE


class _Segment(NamedTuple):
    marker: int
    offset: int
    body: bytes

    @property
    def says_nothing_of_the_picture(self) -> bool:
        """Whether Pillow finds neither an orientation nor a fault in it."""
        if self.marker == _JFIF:
            return self.body.startswith(b"JFIF\0") and len(self.body) >= 14
        if self.marker == _ADOBE:
            return self.body.startswith(b"Adobe") and len(self.body) >= 12
        if self.marker == _PROFILE:
            return self.body.startswith(b"ICC_PROFILE\0") and len(self.body) >= 14
        return self.marker in (*_FRAMES, *_TABLES, _COMMENT, _RESTART_INTERVAL, _START_OF_SCAN)


def read_jpeg_header(data: bytes) -> JpegHeader | None:
    """Reads the segments before the first scan; None for what is no common JPEG: CMYK, 12 bits, damaged, ...

    Pillow reads the metadata wherever there is more than the plain JFIF header, so that a file whose metadata it refuses or
    understands differently is never treated otherwise here.
    """
    segments = _segments(data)
    frames = [segment for segment in segments if segment.marker in _FRAMES]
    if len(frames) != 1 or len(frames[0].body) < 6:
        return None
    frame, scan = frames[0], segments[-1]
    height, width = int.from_bytes(frame.body[1:3]), int.from_bytes(frame.body[3:5])
    num_bits, num_components = frame.body[0], frame.body[5]
    blocks = [sampling & 15 for sampling in frame.body[7::3]]  # down a stripe, for each component
    if num_bits != 8 or not height or not width or num_components not in (1, 3) or len(blocks) != num_components:
        return None
    if not all(1 <= number <= 4 for number in blocks):
        return None
    if Image.MAX_IMAGE_PIXELS is not None and height * width > 2 * Image.MAX_IMAGE_PIXELS:
        return None  # Pillow's own limit, which nothing goes round
    # Only where one scan holds everything and nothing but its end follows can it be told, from what libjpeg says of the
    # rows left out, that they are there (see `decode_jpeg`).
    can_leave_rows_out = (
        frame.marker in _SEQUENTIAL
        and scan.body[:1] == bytes([num_components])
        and all(segment.marker != _RESTART_INTERVAL for segment in segments)
    )
    orientation = 1
    if not all(segment.says_nothing_of_the_picture for segment in segments):
        orientation = _orientation_by_pillow(data, (width, height))
        if orientation is None:
            return None
    height_offset = frame.offset + 5 if can_leave_rows_out else None
    block_rows = 8 if num_components == 1 else 8 * max(blocks)  # a single component is stored block by block
    return JpegHeader(height, width, num_components == 1, orientation, height_offset, block_rows)


def _segments(data: bytes) -> list[_Segment]:
    """Those up to the start of the first scan; empty where there are no such segments in a row."""
    if data[:2] != b"\xff\xd8":
        return []
    segments, offset = [], 2
    while data[offset : offset + 1] == b"\xff":
        marker, end = data[offset + 1 : offset + 2], offset + 2 + int.from_bytes(data[offset + 2 : offset + 4])
        body = data[offset + 4 : end]
        if len(body) != end - offset - 4 or end < offset + 4:
            break
        segments.append(_Segment(marker[0], offset, body))
        if marker[0] == _START_OF_SCAN:
            return segments
        offset = end
    return []


def _orientation_by_pillow(data: bytes, size: tuple[int, int]) -> int | None:
    try:
        image = Image.open(io.BytesIO(data), formats=["JPEG"])
    # Whatever is wrong (see `data.decode._load` for what Pillow raises), decoding it whole will name it.
    except Exception:
        return None
    return exif_orientation(image) if image.size == size else None


# --------------------------------------------------------------------------------------------------------------------
# Pixels


class Scratch(threading.local):
    """Memory that is used again. Fresh memory costs page faults for every image."""

    def __init__(self) -> None:
        self.blocks: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns an array of uint8 with any content, overwritten by the next call with this name in this thread."""
        num_bytes = math.prod(shape)
        if num_bytes > _MAX_SCRATCH_BYTES:
            return np.empty(shape, np.uint8)
        block = self.blocks.get(name)
        if block is None or len(block) < num_bytes:
            block = self.blocks[name] = np.empty(num_bytes, np.uint8)
        return block[:num_bytes].reshape(shape)


scratch = Scratch()
"""Of this project's decoding and cropping."""


_ROWS_LEFT_OUT = "extraneous bytes before marker 0xd9"
"""libjpeg's words where the rows that it was told of are complete and codes are left before the end of the picture."""


@functools.cache
def load_simplejpeg() -> ModuleType | None:
    """Returns the module, or None where it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def decode_jpeg(data: bytes, header: JpegHeader, factor: int = 1, bottom: int | None = None) -> np.ndarray | None:
    """Decodes a JPEG of which `header` was read, in its stored orientation.

    Args:
        data: the whole file.
        header: what `read_jpeg_header` returned.
        factor: the picture is reduced by this, 1 or one of `FACTORS`, in the decoder's inverse cosine transform.
        bottom: rows from here on, counted in the unreduced picture, are not needed.

    Returns:
        (H, W, C) uint8 with C = 1 for grey files and 3 (RGB) otherwise, W = ceil(width / factor), and H the same of the height
        or less where rows were left out. It lives in memory that the thread's next call overwrites. None where simplejpeg is
        not installed, refuses the file or warns of it.
    """
    simplejpeg = load_simplejpeg()
    if simplejpeg is None:
        return None
    height, source = header.height, data
    if bottom is not None and header.height_offset is not None:
        # Where colours are stored at fewer rows, the next of them takes part in the row above.
        bottom += header.block_rows - 8
        height = min(height, -(-bottom // header.block_rows) * header.block_rows)
        if height < header.height:
            # The decoder believes in a lower picture and stops after its last row: most of its time goes into reading codes.
            source = bytearray(data)
            source[header.height_offset : header.height_offset + 2] = height.to_bytes(2)
    shape = (-(-height // factor), -(-header.width // factor), 1 if header.is_grey else 3)
    minimum = {"min_height": shape[0], "min_width": shape[1], "min_factor": factor} if factor > 1 else {}
    array = scratch.take("pixels", shape)
    try:
        if simplejpeg.decode_jpeg_header(source, **minimum)[:2] != shape[:2]:
            return None
        simplejpeg.decode_jpeg(source, "GRAY" if header.is_grey else "RGB", buffer=array, **minimum)
    except ValueError as error:
        # libjpeg keeps the first complaint. Of a sound file whose rows were left out this is that bytes are left before the
        # end; a damaged row, or an end that is missing, would have come first.
        if height == header.height or _ROWS_LEFT_OUT not in str(error):
            return None
    return array

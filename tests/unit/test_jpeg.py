"""data/jpeg.py: what a header tells, and rows that are not decoded."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.jpeg import decode_jpeg, read_jpeg_header


def picture(height: int, width: int, num_channels: int = 3) -> np.ndarray:
    """(height, width, 3) or (height, width) of noise: every row and every colour differs from its neighbours."""
    shape = (height, width, 3) if num_channels == 3 else (height, width)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def encode(pixels: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=92, **options)
    return buffer.getvalue()


def test_odd_headers_are_left_to_pillow() -> None:
    data = encode(picture(50, 40))
    frame = data.index(b"\xff\xc0")
    changes = {
        "12 bits": (4, 12),
        "no height": (6, 0),
        "no sampling": (11, 0x10),
        "two frames": (1, 0xC9),
        "5 components": (9, 5),
    }
    assert read_jpeg_header(data) == (50, 40, False, 1, frame + 5, 16)
    for name, (offset, value) in changes.items():
        changed = bytearray(data)
        changed[frame + offset] = value
        assert read_jpeg_header(bytes(changed)) is None, name
    for mode, image_format in (("CMYK", "JPEG"), ("RGB", "PNG")):
        buffer = io.BytesIO()
        Image.new(mode, (40, 50)).save(buffer, image_format)
        assert read_jpeg_header(buffer.getvalue()) is None
    for length in (0, 1, 2, 3, 4, 30, frame + 3, frame + 12):
        assert read_jpeg_header(data[:length]) is None


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("stored_channels", [1, 3])
def test_rows_above_the_bottom_do_not_feel_what_is_left_out(subsampling: int, stored_channels: int) -> None:
    pytest.importorskip("simplejpeg")
    data = encode(picture(100, 70, stored_channels), subsampling=subsampling)
    header = read_jpeg_header(data)
    assert header is not None
    for factor in (1, 2, 4, 8):
        whole = decode_jpeg(data, header, factor)
        assert whole is not None
        whole = whole.copy()
        for bottom in range(1, 101):
            part = decode_jpeg(data, header, factor, bottom)
            assert part is not None
            rows = -(-bottom // factor)
            np.testing.assert_array_equal(part[:rows], whole[:rows])
            assert len(part) * factor < bottom + header.block_rows * 2

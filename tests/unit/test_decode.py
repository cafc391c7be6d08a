"""data/decode.py: right picture or BadImage, whatever the bytes are."""

import io
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data.decode import decode_image, sniff_suffix
from data.errors import BadImage, DataError

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encode(image: Image.Image | np.ndarray, image_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    if image_format == "npy":
        np.save(buffer, np.asarray(image))
    else:
        image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
        image.save(buffer, image_format, **options)
    return buffer.getvalue()


def gradient(height: int = 24, width: int = 40) -> np.ndarray:
    """(height, width, 3), smooth, so that lossy formats keep it."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 255 // height, columns * 255 // width, 128 + rows * 0], axis=2).astype(np.uint8)


def pixel(tensor: torch.Tensor, row: int = 0, column: int = 0) -> tuple[int, ...]:
    return tuple(tensor[:, row, column].tolist())


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "PPM", "GIF", "AVIF", "npy"])
def test_every_format_is_known_by_its_content(image_format: str) -> None:
    data = encode(gradient(), image_format)
    decoded = decode_image(data, 3)
    assert decoded.dtype == torch.uint8
    assert decoded.shape == (3, 24, 40)
    difference = np.abs(decoded.permute(1, 2, 0).numpy().astype(int) - gradient())
    assert difference.mean() < 8
    suffixes = {"JPEG": "jpg", "TIFF": "tif"}
    assert sniff_suffix(data) == suffixes.get(image_format, image_format.lower())


def test_result_is_writable_and_owned() -> None:
    decoded = decode_image(encode(gradient()), 3)
    decoded[:] = 0  # numpy over Pillow's own memory would warn, or change it
    assert decoded.sum() == 0


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_exif_orientation_is_applied(orientation: int, image_format: str) -> None:
    # What each orientation does to the stored rows and columns (EXIF 2.3, tag 0x0112), written out independently.
    upright = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: np.rot90(a, 1),
    }[orientation](gradient())
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode_image(encode(gradient(), image_format, exif=exif), 3)
    assert decoded.shape == (3, *upright.shape[:2])
    assert np.abs(decoded.permute(1, 2, 0).numpy().astype(int) - upright).mean() < 8


@pytest.mark.parametrize("orientation", [1, 4, 5, 6])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}])
@pytest.mark.parametrize("is_grey", [False, True])
def test_simplejpegs_pixels_are_pillows(
    orientation: int, options: dict[str, Any], is_grey: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("simplejpeg")
    noise = np.random.default_rng(0).integers(0, 256, (37, 50) if is_grey else (37, 50, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(noise, "JPEG", exif=exif, **options)
    by_simplejpeg = [decode_image(data, num_channels) for num_channels in (1, 3, None)]
    monkeypatch.setattr("data.decode.decode_jpeg", lambda *_: None)
    by_pillow = [decode_image(data, num_channels) for num_channels in (1, 3, None)]
    for mine, expected in zip(by_simplejpeg, by_pillow, strict=True):
        assert mine.shape == expected.shape
        # Equal where both hold the same libjpeg-turbo; Pillow of a Linux distribution may hold another.
        assert (mine.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("exif", [b"MM\0*\0\0\0\x08\xff\xff\x01\x12", b"no TIFF header", b"II*\0"])
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_does_not_lose_the_picture(exif: bytes, image_format: str) -> None:
    data = encode(gradient(), image_format, exif=b"Exif\0\0" + exif)
    assert decode_image(data, 3).shape == (3, 24, 40)


def test_cmyk_becomes_rgb() -> None:
    data = encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)
    red, green, blue = pixel(decode_image(data, 3))
    assert red > 240
    assert green < 15
    assert blue < 15


def test_transparency_is_laid_on_white() -> None:
    rgba = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    rgba.putpixel((1, 0), (0, 0, 0, 0))
    decoded = decode_image(encode(rgba), 3)
    assert pixel(decoded, 0, 0) == RED
    assert pixel(decoded, 0, 1) == WHITE
    grey_alpha = Image.new("LA", (1, 1), (0, 128))
    assert pixel(decode_image(encode(grey_alpha), 1)) == (127,)
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([*BLUE, *GREEN])
    palette.putpixel((1, 0), 1)
    for transparency in (1, bytes([255, 0])):
        decoded = decode_image(encode(palette, transparency=transparency), 3)
        assert pixel(decoded, 0, 0) == BLUE
        assert pixel(decoded, 0, 1) == WHITE
    key_colour = Image.new("RGB", (2, 1), GREEN)
    key_colour.putpixel((1, 0), BLUE)
    decoded = decode_image(encode(key_colour, transparency=GREEN), 3)
    assert pixel(decoded, 0, 0) == WHITE
    assert pixel(decoded, 0, 1) == BLUE


@pytest.mark.parametrize("image_format", ["PNG", "TIFF", "PPM", "npy"])
def test_16_bit_is_scaled_not_clipped(image_format: str) -> None:
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    assert decode_image(encode(values, image_format), 1).tolist() == [[[0, 1, 128, 255]]]


def test_16_bit_transparency_is_white() -> None:
    values = np.array([[0, 300, 65535]], dtype=np.uint16)
    assert decode_image(encode(values, transparency=300), 1).tolist() == [[[0, 255, 255]]]


def test_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, GREEN, BLUE)]
    for image_format in ("GIF", "PNG"):
        data = encode(frames[0], image_format, save_all=True, append_images=frames[1:])
        assert pixel(decode_image(data, 3)) == RED


def test_channels_follow_the_request_or_the_file() -> None:
    colour, grey = encode(Image.new("RGB", (2, 2), GREEN)), encode(Image.new("L", (2, 2), 70))
    assert pixel(decode_image(colour, 1)) == (150,)  # ITU-R 601: 0.587 * 255
    assert pixel(decode_image(grey, 3)) == (70, 70, 70)
    assert decode_image(colour, None).shape[0] == 3
    assert decode_image(grey, None).shape[0] == 1
    assert decode_image(encode(np.zeros((2, 2, 5), np.uint8), "npy"), None).shape[0] == 5


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_any_channels(dtype: str, order: Any) -> None:
    values = np.arange(2 * 3 * 5).reshape(2, 3, 5)
    array = np.asarray(values * (1 if dtype == "u1" else 257), dtype=dtype, order=order)
    assert decode_image(encode(array, "npy"), 5).permute(1, 2, 0).tolist() == values.tolist()


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def object_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([[{}]], dtype=object), allow_pickle=True)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "num_channels", "cause"),
    [
        pytest.param(b"", 3, "not_an_image", id="empty"),
        pytest.param(b"<!DOCTYPE html><html>not found", 3, "not_an_image", id="html"),
        pytest.param(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 3, "not_an_image", id="eps"),
        pytest.param(b"\xff\xd8\xff" + bytes(90), 3, "corrupt", id="jpeg_start_only"),
        pytest.param(cut(encode(gradient(), "JPEG")), 3, "truncated", id="cut_jpeg"),
        pytest.param(cut(encode(gradient(), "PNG")), 3, "truncated", id="cut_png"),
        pytest.param(cut(encode(gradient(), "TIFF")), 3, "truncated", id="cut_tiff"),
        pytest.param(cut(encode(gradient(), "npy")), 3, "truncated", id="cut_npy"),
        pytest.param(cut(encode(gradient(), "WEBP")), 3, "corrupt", id="cut_webp"),
        pytest.param(encode(np.zeros((2, 2), np.float32), "TIFF"), 1, "pixel_type", id="float_tiff"),
        pytest.param(encode(np.full((2, 2), 70000, np.int32), "TIFF"), 1, "pixel_type", id="wide_integers"),
        pytest.param(encode(np.zeros((2, 2), np.float32), "npy"), 1, "pixel_type", id="float_npy"),
        pytest.param(encode(np.zeros((2, 0), np.uint8), "npy"), 1, "pixel_type", id="no_pixels"),
        pytest.param(encode(np.zeros(7, np.uint8), "npy"), 1, "pixel_type", id="one_dimension"),
        pytest.param(object_array(), 1, "pixel_type", id="pickled_npy"),
        pytest.param(encode(np.zeros((2, 2, 5), np.uint8), "npy"), 3, "channels", id="npy_channels"),
        pytest.param(encode(gradient()), 5, "channels", id="ordinary_with_5_channels"),
    ],
)
def test_bad_images_are_refused_with_their_cause(data: bytes, num_channels: int, cause: str) -> None:
    with pytest.raises(BadImage) as caught:
        decode_image(data, num_channels)
    assert caught.value.cause == cause
    assert "0x" not in str(caught.value), "a message must not change from run to run"


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "npy"])
def test_pixel_limit_is_checked_before_decoding(image_format: str) -> None:
    noise = np.random.default_rng(0).integers(256, size=(10, 20), dtype=np.uint8)
    data = encode(noise, image_format)
    assert decode_image(data, 1, max_pixels=200).shape == (1, 10, 20)
    headers_only = data[:-100]
    for whole_or_cut in (data, headers_only):
        with pytest.raises(BadImage, match="10 x 20") as caught:
            decode_image(whole_or_cut, 1, max_pixels=199)
        assert caught.value.cause == "too_many_pixels"


def test_pillows_own_limit_neither_warns_nor_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(np.zeros((10, 20), np.uint8))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 150)  # Pillow warns above it, and refuses above twice as many
    assert decode_image(data, 1).shape == (1, 10, 20)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90)
    with pytest.raises(BadImage) as caught:
        decode_image(data, 1)
    assert caught.value.cause == "too_many_pixels"


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "PPM", "GIF", "AVIF", "npy"])
def test_damaged_bytes_give_a_picture_or_bad_image(image_format: str) -> None:
    data = encode(gradient(), image_format)
    random = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(60):
            damaged = bytearray(data[: random.integers(1, len(data) + 1)])
            for position in random.integers(0, min(len(damaged), 200), size=3):
                damaged[position] = random.integers(256)
            try:
                decoded = decode_image(bytes(damaged), 3, max_pixels=2**20)
            except BadImage:
                continue
            assert decoded.shape[0] == 3


def test_bad_image_survives_the_way_from_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(BadImage("cut off", "truncated")))
    assert (str(error), error.cause) == ("cut off", "truncated")
    assert isinstance(error, DataError)

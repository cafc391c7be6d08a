"""The bytes of an image file -> uint8 tensor (C, H, W), by one set of rules for every odd image.

The rules: the content decides the format, never the name; the picture stands upright (EXIF orientation is applied);
transparency is laid on white; 16-bit values are scaled to 8 bits, not clipped; of an animation, the first frame is
taken; a file that is cut off is refused, never filled up. Whatever can not follow them is a `BadImage` with a cause to
count.

Shape letters: C channels, H W pixels.
"""

import io
import warnings
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from data.errors import BadImage
from data.jpeg import UPRIGHT, decode_jpeg, exif_orientation, read_jpeg_header

# 8192 x 8192. Pillow refuses by itself above 2 * Image.MAX_IMAGE_PIXELS = 179 million, so a higher limit ends there.
MAX_PIXELS = 2**26


class _Signature(NamedTuple):
    suffix: str
    pillow_format: str  # empty: not for Pillow
    offset: int
    magic: bytes


_SIGNATURES = (
    _Signature("jpg", "JPEG", 0, b"\xff\xd8\xff"),
    _Signature("png", "PNG", 0, b"\x89PNG\r\n\x1a\n"),
    _Signature("webp", "WEBP", 8, b"WEBP"),
    _Signature("tif", "TIFF", 0, b"II*\0"),
    _Signature("tif", "TIFF", 0, b"MM\0*"),
    _Signature("tif", "TIFF", 0, b"II+\0"),  # BigTIFF
    _Signature("tif", "TIFF", 0, b"MM\0+"),
    _Signature("gif", "GIF", 0, b"GIF87a"),
    _Signature("gif", "GIF", 0, b"GIF89a"),
    _Signature("bmp", "BMP", 0, b"BM"),
    _Signature("avif", "AVIF", 4, b"ftypavif"),
    _Signature("avif", "AVIF", 4, b"ftypavis"),
    _Signature("avif", "AVIF", 4, b"ftypmif1"),
    *(_Signature("ppm", "PPM", 0, b"P%d" % kind) for kind in range(1, 7)),
    _Signature("npy", "", 0, b"\x93NUMPY"),
)

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def sniff_suffix(data: bytes) -> str | None:
    """Returns the file suffix that fits the content, such as "jpg", or None when it is no format we read."""
    signature = _find_signature(data)
    return signature.suffix if signature else None


def decode_image(data: bytes, num_channels: int | None, *, max_pixels: int = MAX_PIXELS) -> torch.Tensor:
    """Decodes an image file or a `.npy` array to a uint8 tensor (C, H, W).

    Pillow does the work; common JPEG files, whose pixels are the same then, are left to simplejpeg where it is installed.

    Args:
        data: the whole file.
        num_channels: C of the result. Ordinary images become luminance (1) or RGB (3); an array must have just as
            many channels. None keeps what the file has: 1 for grey images, 3 for all others, C for an array.
        max_pixels: an image of more pixels (H * W by its header) is refused before it is decoded.

    Returns:
        (C, H, W), uint8, 0..255. A view of memory in the order (H, W, C), which torchvision resizes nearly twice as
        fast as a contiguous tensor.

    Raises:
        BadImage: the bytes are no image, are cut off or damaged, have too many pixels, or there is no defined way from
            their pixels to `num_channels` channels of 8 bits.
    """
    signature = _find_signature(data)
    if signature is None:
        reason = "the file is empty" if not data else f"no known image format starts with {data[:8]!r}"
        raise BadImage(reason, "not_an_image")
    # Pillow and numpy warn about odd metadata and sizes. A warning tells a training run nothing: what matters becomes
    # BadImage, and the rest concerns the metadata only.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if signature.suffix == "npy":
            array = _decode_npy(data, num_channels, max_pixels)
        elif (array := _decode_common_jpeg(data, num_channels, max_pixels)) is None:
            array = _decode_with_pillow(data, signature.pillow_format, num_channels, max_pixels)
    return torch.from_numpy(array).permute(2, 0, 1)  # (C, H, W)


def _find_signature(data: bytes) -> _Signature | None:
    return next((s for s in _SIGNATURES if data.startswith(s.magic, s.offset)), None)


def check_pixels(height: int, width: int, max_pixels: int) -> None:
    """Raises BadImage for an image of more than `max_pixels`."""
    if height * width > max_pixels:
        raise BadImage(f"{height} x {width} pixels are more than the limit of {max_pixels}", "too_many_pixels")


# --------------------------------------------------------------------------------------------------------------------
# Ordinary images


def _decode_common_jpeg(data: bytes, num_channels: int | None, max_pixels: int) -> np.ndarray | None:
    """Returns (H, W, C), uint8, writable; None for everything that Pillow must judge."""
    header = read_jpeg_header(data)
    # Luminance of colours is Pillow's, from RGB: a JPEG's own differs where colours had to be clipped.
    if header is None or num_channels not in ((1, 3, None) if header.is_grey else (3, None)):
        return None
    check_pixels(header.height, header.width, max_pixels)
    pixels = decode_jpeg(data, header)
    if pixels is None:
        return None
    flips_rows, flips_columns, swaps_axes = UPRIGHT[header.orientation]
    pixels = pixels[:: -1 if flips_rows else 1, :: -1 if flips_columns else 1]
    if swaps_axes:
        pixels = pixels.swapaxes(0, 1)
    return np.repeat(pixels, num_channels or 1, axis=2) if header.is_grey else pixels.copy()


def _decode_with_pillow(data: bytes, pillow_format: str, num_channels: int | None, max_pixels: int) -> np.ndarray:
    """Returns (H, W, C), uint8, writable."""
    if num_channels not in (1, 3, None):
        raise BadImage(
            f"an ordinary image gives 1 or 3 channels, and {num_channels} were asked for; "
            f"store images of {num_channels} channels as .npy arrays of shape (H, W, {num_channels})",
            "channels",
        )
    image = _load(data, pillow_format, max_pixels)
    image = _flatten(_to_8_bit(_turn_upright(image)))
    if num_channels is None:
        num_channels = 1 if image.mode in ("1", "L") else 3
    try:
        image = image.convert("L" if num_channels == 1 else "RGB")
    except ValueError as error:
        raise BadImage(f"pixels of mode {image.mode} can not become grey or RGB: {error}", "pixel_type") from error
    array = np.array(image)  # a copy: torch wants writable memory
    return array[:, :, None] if num_channels == 1 else array


def _load(data: bytes, pillow_format: str, max_pixels: int) -> Image.Image:
    """Returns the decoded first frame, in the mode that the file has."""
    try:
        # One named format: an unexpected one (EPS starts a Ghostscript process) is never tried.
        image = Image.open(io.BytesIO(data), formats=[pillow_format])
        check_pixels(image.height, image.width, max_pixels)
        image.load()
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage(str(error), "too_many_pixels") from error
    except UnidentifiedImageError as error:
        raise BadImage(f"the header of this {pillow_format} file is damaged", "corrupt") from error
    # Damaged files make Pillow's plugins raise almost anything: OSError, SyntaxError, ValueError, struct.error,
    # KeyError, EOFError, ... One bad file must not end a run of weeks.
    except Exception as error:
        is_truncated = isinstance(error, EOFError) or "truncated" in str(error).lower()
        reason = f"Pillow can not read this {pillow_format} file: {error}"
        raise BadImage(reason, "truncated" if is_truncated else "corrupt") from error
    return image


def _turn_upright(image: Image.Image) -> Image.Image:
    """Returns the picture as it was seen through the camera, by its EXIF orientation."""
    method = _UPRIGHT.get(exif_orientation(image))
    return image if method is None else image.transpose(method)


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Returns images of integer pixels (Pillow's modes I;16, I) as 8-bit grey; others unchanged.

    Mode I is 32 bits wide, but what is found in it are 16-bit values (PGM, 16-bit TIFF).
    """
    if image.mode == "F":
        reason = "pixels are floating-point numbers, whose range is unknown; store them as 8 or 16 bits"
        raise BadImage(reason, "pixel_type")
    if not image.mode.startswith("I"):
        return image
    pixels = np.asarray(image)
    if pixels.min() < 0 or pixels.max() > 65535:
        raise BadImage(f"pixel values {pixels.min()}..{pixels.max()} do not fit into 16 bits", "pixel_type")
    grey = _scale_16_bit(pixels)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[pixels == transparent] = 255
    return Image.fromarray(grey)


def _scale_16_bit(pixels: np.ndarray) -> np.ndarray:
    """Returns values 0..65535 as uint8 0..255, rounded to nearest."""
    return ((pixels.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)


def _flatten(image: Image.Image) -> Image.Image:
    """Returns the image with whatever transparency it has laid on white."""
    if not image.has_transparency_data:
        return image
    is_grey = image.mode in ("1", "L", "LA", "La")
    if image.mode == "La":
        image = image.convert("LA")  # the only way that Pillow has from premultiplied grey
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, "white")
    return Image.alpha_composite(white, layer).convert("L" if is_grey else "RGB")


# --------------------------------------------------------------------------------------------------------------------
# Arrays


def _decode_npy(data: bytes, num_channels: int | None, max_pixels: int) -> np.ndarray:
    """Returns (H, W, C), uint8, writable."""
    try:
        shape, dtype = _read_npy_header(data)
        if len(shape) not in (2, 3) or 0 in shape or dtype.kind != "u" or dtype.itemsize > 2:
            raise BadImage(
                f"the array has shape {shape} and type {dtype}; expected (H, W) or (H, W, C) of uint8 or uint16",
                "pixel_type",
            )
        check_pixels(shape[0], shape[1], max_pixels)
        # numpy reserves memory by the header, so a header that promises too much must not reach it.
        if dtype.itemsize * int(np.prod(shape)) > len(data):
            raise BadImage(f"the array of shape {shape} is cut off after {len(data)} bytes", "truncated")
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except BadImage:
        raise
    # The header is a Python literal: a damaged one ends in ValueError, SyntaxError, TokenError, TypeError, ...
    except Exception as error:
        raise BadImage(f"numpy can not read this .npy file: {error}", "corrupt") from error
    array = array.reshape(*shape[:2], -1)  # (H, W, C)
    if num_channels is not None and array.shape[2] != num_channels:
        raise BadImage(
            f"the array has {array.shape[2]} channels, and {num_channels} were asked for; "
            f"ask for {array.shape[2]}, or store arrays of shape (H, W, {num_channels})",
            "channels",
        )
    array = array if dtype.itemsize == 1 else _scale_16_bit(array)
    return np.ascontiguousarray(array)


def _read_npy_header(data: bytes) -> tuple[tuple[int, ...], np.dtype]:
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise BadImage(f".npy format version {version} is not used for plain arrays", "pixel_type")
    return shape, dtype

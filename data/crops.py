"""Random crops of encoded images: decodes no more of a file than its crops show.

The crops are those of `transforms.random_resized_crop_flip` on the whole upright image: the same boxes, the same flips. What
is chosen first here is the box; then a common JPEG is decoded at the smallest of the sizes 1, 1/2, 1/4, 1/8 that still has
enough pixels for every crop, and no further down than the lowest crop reaches. Everything else is decoded whole, as
`data/decode.py` does it.

Two back ends give the same boxes and nearly the same pixels: simplejpeg and opencv, the extra `fast`, and Pillow, which is
always there (see `crop_backend`). Measured by `benchmarks/decode.py`.

Shape letters: C channels, H W pixels.
"""

import functools
import io
import math
import os
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data.decode import check_pixels, decode_image
from data.jpeg import FACTORS, MIN_REDUCED_PX, UPRIGHT, JpegHeader, decode_jpeg, load_simplejpeg, read_jpeg_header, scratch
from data.transforms import CropBox, draw_crop, random_resized_crop_flip

MAX_FAST_REDUCTION = 2.7
"""Opencv's resize is used up to here: a blur over three pixels prepares for no more."""


def crop_backend() -> str:
    """Names what decodes and resizes common JPEG files in this installation."""
    return "simplejpeg + opencv" if load_opencv() and load_simplejpeg() else "Pillow"


@functools.cache
def load_opencv() -> ModuleType | None:
    """Returns the module, held to one thread, or None where it is not installed."""
    # Its OpenBLAS, which nothing here needs, would start a thread per core in every reader process.
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        import cv2
    except ImportError:
        return None
    finally:
        if before is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = before
    cv2.setNumThreads(1)  # reader processes share the cores already; without threads a fork is safe, too
    return cv2


class _View(NamedTuple):
    """One crop in terms of the stored picture: cut out the box, resize it, flip it, and swap its axes if need be."""

    box: CropBox
    size: tuple[int, int]
    """(height, width) of the resized box, in pixels, before the axes are swapped."""
    flips_rows: bool
    flips_columns: bool
    swaps_axes: bool


def random_crops(
    data: bytes,
    num_channels: int,
    seeds: Sequence[int],
    size: tuple[int, int],
    scale: tuple[float, float],
    flip_probability: float,
    *,
    max_pixels: int,
) -> list[Tensor]:
    """Crops an encoded image at random, once for every seed; it is decoded once.

    Args:
        data: the whole file: an image or a `.npy` array.
        num_channels: C of the result, see `decode_image`.
        seeds: any int64 each; one makes the box and the flip of `random_resized_crop_flip` on the whole upright image.
        size: (height, width) of the results, in pixels.
        scale: area of a crop as a share of the image's.
        flip_probability: chance of a left-right flip, 0..1.
        max_pixels: an image of more pixels (H * W by its header) is refused before it is decoded.

    Returns:
        As many uint8 tensors (C, *size) as there are seeds.

    Raises:
        BadImage: where `decode_image` raises it, with the same cause.
    """
    # Whatever Pillow warns of concerns metadata, or becomes BadImage (see `decode_image`).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        header = read_jpeg_header(data) if num_channels in (1, 3) else None
        if header is not None:
            check_pixels(header.height, header.width, max_pixels)
            views = [_view(header, draw, size, scale, flip_probability) for draw in seeds]
            crops = _crops_of_jpeg(data, header, num_channels, views)
            if crops is not None:
                return crops
    image = decode_image(data, num_channels, max_pixels=max_pixels)
    return [random_resized_crop_flip(image, seed, size, scale, flip_probability) for seed in seeds]


def _view(header: JpegHeader, seed: int, size: tuple[int, int], scale: tuple[float, float], flip_probability: float) -> _View:
    """Draws a crop of the upright picture and finds it in the stored one."""
    flips_rows, flips_columns, swaps_axes = UPRIGHT[header.orientation]
    height, width = (header.width, header.height) if swaps_axes else (header.height, header.width)
    box, is_flipped = draw_crop(seed, height, width, scale, flip_probability)
    top, left, height, width = box
    if swaps_axes:
        top, left, height, width, size = left, top, width, height, (size[1], size[0])
    if flips_rows:
        top = header.height - top - height
    if flips_columns:
        left = header.width - left - width
    # A left-right flip comes last: where the axes are swapped, it is one of the stored rows.
    flips_rows ^= is_flipped and swaps_axes
    flips_columns ^= is_flipped and not swaps_axes
    return _View(CropBox(top, left, height, width), size, flips_rows, flips_columns, swaps_axes)


def _crops_of_jpeg(data: bytes, header: JpegHeader, num_channels: int, views: list[_View]) -> list[Tensor] | None:
    """Decodes what the views need, and cuts them out; None for what must be decoded whole, by Pillow."""
    factor = _reduction(header, views)
    cv2 = load_opencv() if load_simplejpeg() else None
    if cv2:
        bottom = max((view.box.top + view.box.height for view in views), default=0)
        pixels = decode_jpeg(data, header, factor, bottom)
    else:
        pixels = _decode_reduced_by_pillow(data, header, factor) if factor > 1 else None
    if pixels is None:
        return None
    return [_finish(_cut_and_resize(pixels, view, factor, num_channels, cv2), view, num_channels, cv2) for view in views]


def _reduction(header: JpegHeader, views: list[_View]) -> int:
    """Returns the largest factor at which every view's box still has as many pixels as its result, each way."""
    if min(header.height, header.width) < MIN_REDUCED_PX:
        return 1
    room = min((min(v.box.height / v.size[0], v.box.width / v.size[1]) for v in views), default=1)
    return next((factor for factor in FACTORS if room >= factor), 1)


def _decode_reduced_by_pillow(data: bytes, header: JpegHeader, factor: int) -> np.ndarray | None:
    """Returns (H, W, C) uint8, of the size that `decode_jpeg` returns without leaving rows out; None where it can not."""
    try:
        image = Image.open(io.BytesIO(data), formats=["JPEG"])
        image.draft(None, (header.width // factor, header.height // factor))
        image.load()
    # Whatever is wrong (see `data.decode._load` for what Pillow raises), decoding it whole will name it.
    except Exception:
        return None
    expected = ("L" if header.is_grey else "RGB", (-(-header.width // factor), -(-header.height // factor)))
    return np.atleast_3d(np.asarray(image)) if (image.mode, image.size) == expected else None


def _cut_and_resize(pixels: np.ndarray, view: _View, factor: int, num_channels: int, cv2: Any) -> np.ndarray:
    """Returns the view's box of pixels (H, W, C), resized to its size: (h, w) for one channel, else (h, w, 3)."""
    top, left, height, width = (value / factor for value in view.box)
    first_row, first_column = int(top), int(left)
    region = pixels[first_row : math.ceil(top + height), first_column : math.ceil(left + width)]
    if region.shape[2] == 1:
        region = region[:, :, 0]
    elif num_channels == 1:
        region = np.asarray(Image.fromarray(region).convert("L"))  # the rule for luminance is Pillow's
    if cv2 and factor == 1 and max(height / view.size[0], width / view.size[1]) <= MAX_FAST_REDUCTION:
        return _resize_by_opencv(region, view.size, cv2)
    # The box of a reduced picture begins and ends within pixels, which Pillow takes into account.
    top, left = top - first_row, left - first_column
    box = (left, top, left + width, top + height)
    return np.asarray(Image.fromarray(region).resize((view.size[1], view.size[0]), Image.Resampling.BICUBIC, box=box))


def _resize_by_opencv(region: np.ndarray, size: tuple[int, int], cv2: Any) -> np.ndarray:
    """Resizes (H, W) or (H, W, 3): bicubic, after a blur that stands for the antialiasing which opencv's bicubic lacks.

    The blur's strength was fitted to torch's antialiased bicubic on 40 photographs. For reductions of 1.1 to 2.66 the best was
    0.36 to 0.50 times (1 - 1 / reduction), at 42 to 50 dB; without the blur it is 44 down to 28 dB.
    The result lives in memory that the next call overwrites.
    """
    weights = [max(0.0, 0.43 * (1 - new / old)) for new, old in zip(size, region.shape[:2], strict=True)]
    if max(weights) > 0:
        down, across = (np.array([weight, 1 - 2 * weight, weight], np.float32) for weight in weights)
        blurred = scratch.take("blurred", region.shape)
        region = cv2.sepFilter2D(region, -1, across, down, blurred, borderType=cv2.BORDER_REPLICATE)
    resized = scratch.take("resized", (*size, *region.shape[2:]))
    return cv2.resize(region, size[::-1], resized, interpolation=cv2.INTER_CUBIC)


_FLIP_CODES = {(True, False): 0, (False, True): 1, (True, True): -1}
"""(rows, columns) -> what opencv calls it."""


def _finish(crop: np.ndarray, view: _View, num_channels: int, cv2: Any) -> Tensor:
    """Turns (h, w) or (h, w, 3) upright, flips it, and copies it to a tensor (C, H, W) of its own."""
    flips = (view.flips_rows, view.flips_columns)
    if cv2 and crop.ndim == 3 and not view.swaps_axes:  # the common case, in half the time
        result = np.empty((3, *view.size), np.uint8)
        cv2.split(cv2.flip(crop, _FLIP_CODES[flips]) if any(flips) else crop, list(result))
        return torch.from_numpy(result)
    crop = crop[:: -1 if flips[0] else 1, :: -1 if flips[1] else 1]
    if view.swaps_axes:
        crop = crop.swapaxes(0, 1)
    result = np.empty((num_channels, *crop.shape[:2]), np.uint8)
    result[:] = crop if crop.ndim == 2 else crop.transpose(2, 0, 1)  # grey becomes three equal channels where asked for
    return torch.from_numpy(result)

"""Crops and flips of uint8 images on the CPU, normalisation on the device; the one place for mean and std.

Shapes: B batch, C channels, H W pixels.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Normalization(NamedTuple):
    """Mean and standard deviation per channel, in units of the 0..1 range."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, images: Tensor) -> Tensor:
        """Turns (B, C, H, W) uint8 into float32 of mean 0 and standard deviation 1, on the images' device."""
        mean, std = _on_device(self, images.device)
        return (images.to(torch.float32) - mean * 255.0) / (std * 255.0)

    def invert(self, images: Tensor) -> Tensor:
        """Turns normalised (B, C, H, W) back into uint8, clipped to 0..255."""
        mean, std = _on_device(self, images.device)
        return ((images * std + mean) * 255.0).round().clamp(0, 255).to(torch.uint8)

    def to(self, other: "Normalization", images: Tensor) -> Tensor:
        """Turns images (B, C, H, W) normalised by this into images normalised by the other."""
        (mean, std), (other_mean, other_std) = _on_device(self, images.device), _on_device(other, images.device)
        return (images * std + mean - other_mean) / other_std


@functools.lru_cache(maxsize=8)
def _on_device(normalization: Normalization, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and std as (1, C, 1, 1), copied to the device once: a copy makes the host wait for the device."""
    with torch.inference_mode(False):  # whoever asks first must not leave inference tensors to a training step
        mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in normalization)
    return mean, std


def default_normalization(num_channels: int, measured: tuple[tuple[float, ...], tuple[float, ...]]) -> Normalization:
    """Chooses mean and std where the user gave none.

    Colour images take ImageNet's, so that encoders can be exchanged with the field's. Other images take what was measured
    when their shards were written; where nothing was measured, 0.5 and 0.25.

    Args:
        num_channels: C.
        measured: mean and std of the data set, each of length C, or empty.
    """
    if num_channels == 3:
        return Normalization(IMAGENET_MEAN, IMAGENET_STD)
    mean, std = measured
    if len(mean) == len(std) == num_channels:
        return Normalization(tuple(mean), tuple(max(value, 1 / 255) for value in std))  # a constant channel has std 0
    return Normalization((0.5,) * num_channels, (0.25,) * num_channels)


class CropBox(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def random_crop_box(
    random: np.random.Generator,
    height: int,
    width: int,
    scale: tuple[float, float] = (0.2, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> CropBox:
    """Draws a rectangle of random area and aspect ratio, as torchvision's RandomResizedCrop does.

    Ten tries at an area and a ratio that fit into the image; then the largest centred rectangle of a ratio in range.

    Args:
        random: source of all randomness.
        height: of the image, in pixels.
        width: of the image, in pixels.
        scale: smallest and largest area as a share of the image's, in (0, 1].
        ratio: smallest and largest width over height; drawn uniformly in its logarithm.

    Source: torchvision transforms `RandomResizedCrop.get_params` (same distribution; the test compares the two).
    """
    log_ratio = (math.log(ratio[0]), math.log(ratio[1]))
    for _ in range(10):
        area = height * width * random.uniform(*scale)
        aspect = math.exp(random.uniform(*log_ratio))
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(random.integers(0, height - crop_height + 1))
            left = int(random.integers(0, width - crop_width + 1))
            return CropBox(top, left, crop_height, crop_width)
    crop_width = min(width, round(height * ratio[1]))
    crop_height = min(height, round(width / ratio[0]))
    return CropBox((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)


def draw_crop(seed: int, height: int, width: int, scale: tuple[float, float], flip_probability: float) -> tuple[CropBox, bool]:
    """Draws what `random_resized_crop_flip` does to an image of this size: the box, and whether it is flipped.

    Args:
        seed: any int64.
        height: of the upright image, in pixels.
        width: of the upright image, in pixels.
        scale: area of the crop as a share of the image's.
        flip_probability: chance of a left-right flip, 0..1.
    """
    random = np.random.Generator(np.random.Philox(key=seed % 2**64))
    box = random_crop_box(random, height, width, scale)
    return box, random.random() < flip_probability


def random_resized_crop_flip(
    image: Tensor, seed: int, size: tuple[int, int], scale: tuple[float, float], flip_probability: float
) -> Tensor:
    """Crops at random, resizes (bicubic, antialiased) and flips; a pure function of image and seed.

    `data.crops.random_crops` makes the same crops from an encoded image, with less work.

    Args:
        image: (C, H, W) uint8.
        seed: any int64.
        size: (height, width) of the result, in pixels.
        scale: area of the crop as a share of the image's.
        flip_probability: chance of a left-right flip, 0..1.

    Returns:
        (C, *size) uint8.
    """
    box, is_flipped = draw_crop(seed, image.shape[-2], image.shape[-1], scale, flip_probability)
    image = F.resized_crop(image, *box, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)
    return image.flip(-1) if is_flipped else image


def center_crop_resized(image: Tensor, size: tuple[int, int], crop_pct: float = 1.0) -> Tensor:
    """Resizes an image and cuts out the centre: (C, H, W) -> (C, *size) uint8; bicubic, antialiased.

    Args:
        image: (C, H, W) uint8.
        size: (height, width) of the result, in pixels.
        crop_pct: the resized image just covers size / crop_pct, in (0, 1].
    """
    height, width = image.shape[-2:]
    factor = max(size[0] / height, size[1] / width) / crop_pct
    covered = [max(size[0], round(height * factor)), max(size[1], round(width * factor))]
    image = F.resize(image, covered, interpolation=InterpolationMode.BICUBIC, antialias=True)
    return F.center_crop(image, list(size))

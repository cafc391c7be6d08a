"""What fine-tuning does to images: RandAugment on uint8 crops, by image and seed; erasing and mixing on batches."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import posterize, rand_augment_transform
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.nn import functional as F

from data.errors import DataError
from finetune.config import AugmentConfig


class RandAugment:
    """timm's RandAugment; equal seeds give equal pictures, on any worker.

    Args:
        spec: timm's description of strength and kind, as "rand-m9-mstd0.5-inc1".
        img_size: (H, W) of the crops in pixels.
        mean: of the channels, 0..1: fills what a rotation uncovers.

    Raises:
        DataError: the images have neither 1 nor 3 channels, or the description is not one of timm's.

    Source: Cubuk et al. 2020; timm/data/auto_augment.py; settings of facebookresearch/mae FINETUNE.md.
    """

    def __init__(self, spec: str, img_size: tuple[int, int], mean: tuple[float, ...]) -> None:
        if len(mean) not in (1, 3):
            raise DataError(
                f"augment.rand_augment {spec}: is for images of 1 or 3 channels, these have {len(mean)}; "
                'set --augment.rand_augment ""'
            )
        fill = tuple(round(255 * value) for value in mean)
        hints = {
            "translate_const": int(min(img_size) * 0.45),
            "img_mean": fill if len(fill) == 3 else fill[0],
            "interpolation": Image.Resampling.BICUBIC,
        }
        try:
            self._transform = rand_augment_transform(spec, hints)
            for operation in self._transform.ops:
                if "Posterize" in operation.name:
                    operation.aug_fn = _posterize
        except (AssertionError, ValueError, KeyError, IndexError) as error:
            raise DataError(
                f"augment.rand_augment {spec}: is no description that timm understands ({error}); "
                "an example: rand-m9-mstd0.5-inc1"
            ) from error

    def __call__(self, image: Tensor, seed: int) -> Tensor:
        """(1 or 3, H, W) uint8 -> the same shape, uint8."""
        grey = image.shape[0] == 1
        pixels = image[0] if grey else image.permute(1, 2, 0)
        picture = Image.fromarray(np.ascontiguousarray(pixels.numpy()))
        with seeded(seed):
            augmented = torch.from_numpy(np.array(self._transform(picture)))
        return augmented.unsqueeze(0) if grey else augmented.permute(2, 0, 1)


def _posterize(picture: Image.Image, bits_to_keep: int, **hints: object) -> Image.Image:
    """Timm's own, but for 0 bits: the strongest level asks for them, and Pillow refuses."""
    return posterize(picture, max(1, bits_to_keep), **hints)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators that timm's augmentations draw from, and puts them back as they were."""
    # timm knows no other generators than these.
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


class Mixing:
    """What happens to a batch on the device: random erasing, then mixup or cutmix; and the targets that belong to it.

    Args:
        augment: which of them, and how strong.
        num_classes: of the data.
        device: of the batches.
    """

    def __init__(self, augment: AugmentConfig, num_classes: int, device: torch.device) -> None:
        self.smoothing = augment.label_smoothing
        self.erase = RandomErasing(augment.erase_probability, mode="pixel", max_count=1, device=str(device))
        self.mix = None
        if augment.mixes:
            self.mix = Mixup(
                augment.mixup, augment.cutmix, prob=augment.mix_probability, label_smoothing=self.smoothing,
                num_classes=num_classes,
            )  # fmt: skip

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) normalised and (B,) labels -> images and targets, (B, classes) where images are mixed."""
        if self.erase.probability > 0:
            images = self.erase(images)
        return (images, labels) if self.mix is None else self.mix(images, labels)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy; mixed targets hold their smoothing already."""
        return F.cross_entropy(logits, targets, label_smoothing=self.smoothing if self.mix is None else 0.0)

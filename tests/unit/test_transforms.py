import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import RandomResizedCrop

from data.transforms import (
    IMAGENET_MEAN,
    Normalization,
    center_crop_resized,
    default_normalization,
    random_crop_box,
    random_resized_crop_flip,
)


@pytest.mark.parametrize(("height", "width"), [(200, 300), (300, 40), (20, 400)])
def test_crops_have_torchvisions_distribution(height: int, width: int) -> None:
    """Same means and spreads of all four numbers of the box, over 4,000 draws of each; also where most tries do not fit."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    transform = RandomResizedCrop(224, scale=(0.2, 1.0))
    image = torch.empty(3, height, width)
    theirs = np.array(
        [[transform.make_params([image])[name] for name in ("top", "left", "height", "width")] for _ in range(4000)]
    )
    ours = np.array([random_crop_box(random, height, width) for _ in range(4000)])
    scale = np.array([height, width, height, width])
    np.testing.assert_allclose(ours.mean(0) / scale, theirs.mean(0) / scale, atol=0.02)
    np.testing.assert_allclose(ours.std(0) / scale, theirs.std(0) / scale, atol=0.02)
    for box in ours:
        assert 0 <= box[0] <= height - box[2]
        assert 0 <= box[1] <= width - box[3]


def test_crop_is_a_function_of_image_and_seed() -> None:
    image = torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8)
    crops = [random_resized_crop_flip(image, seed, (16, 24), (0.2, 1.0), 0.5) for seed in (1, 1, 2, -(2**63))]
    assert crops[0].shape == (3, 16, 24)
    assert crops[0].dtype == torch.uint8
    assert torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[0], crops[2])
    assert not torch.equal(crops[2], crops[3])


def test_flips_happen_as_often_as_asked() -> None:
    image = torch.arange(0, 250, 10, dtype=torch.uint8).view(1, 1, 25).expand(1, 25, 25)

    def share(probability: float) -> float:
        crops = [random_resized_crop_flip(image, seed, (8, 8), (0.9, 1.0), probability) for seed in range(400)]
        return sum(int(crop[0, 0, 0] > crop[0, 0, -1]) for crop in crops) / 400

    assert share(0.0) == 0.0
    assert share(1.0) == 1.0
    assert share(0.5) == pytest.approx(0.5, abs=0.1)


def test_normalisation_and_its_inverse() -> None:
    images = torch.randint(0, 256, (4, 3, 9, 9), dtype=torch.uint8)
    normalization = default_normalization(3, ((), ()))
    assert normalization.mean == IMAGENET_MEAN
    normalized = normalization.apply(images)
    expected = (images / 255 - torch.tensor(normalization.mean).view(3, 1, 1)) / torch.tensor(normalization.std).view(3, 1, 1)
    torch.testing.assert_close(normalized, expected)
    assert torch.equal(normalization.invert(normalized), images)


def test_default_normalisation_of_other_channel_counts() -> None:
    measured = ((0.1, 0.2), (0.3, 0.0))
    assert default_normalization(2, measured) == Normalization((0.1, 0.2), (0.3, 1 / 255))
    assert default_normalization(1, measured) == Normalization((0.5,), (0.25,))


@pytest.mark.parametrize(("size", "expected"), [((40, 80), (20, 20)), ((10, 10), (20, 20)), ((33, 47), (20, 31))])
def test_centre_crop_covers_and_centres(size: tuple[int, int], expected: tuple[int, int]) -> None:
    image = torch.zeros(1, *size, dtype=torch.uint8)
    image[:, :, size[1] // 2 :] = 200
    crop = center_crop_resized(image, expected)
    assert crop.shape == (1, *expected)
    assert crop[0, :, : expected[1] // 2 - 2].max() <= 10
    assert crop[0, :, expected[1] // 2 + 2 :].min() >= 190


def test_normalisation_first_used_in_inference_mode_serves_training_too() -> None:
    normalization = Normalization((0.123,), (0.456,))
    images = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)
    with torch.inference_mode():
        normalization.apply(images)
    weight = torch.ones(1, requires_grad=True)
    normalization.invert(normalization.apply(images) * weight)  # multiplies what needs a gradient by mean and std

"""What decoding and cropping costs: encoded photographs -> random crops, images per second of one core.

python -m benchmarks.decode FOLDER [--images 400] [--size 224] [--rounds 5]

- plain: as pretraining scripts do it. Pillow decodes to RGB; torchvision's RandomResizedCrop (scale 0.2..1, bicubic), flip,
  ToTensor, Normalize. It ends in float32, normalised.
- ours: `data.crops.random_crops` with the extra `fast`. It ends in uint8: batches are normalised on the device, where it costs
  next to nothing, and a quarter of the bytes travel there.
- ours, normalised: the same, and then what the plain way does on the CPU, for comparison at equal results.
- ours, Pillow: without the extra.
- 2 (4) views: so many crops of every image, which is decoded once by either way.

Every way draws its boxes from the same distribution. All run in turn on one thread, with the files in memory.
"""

import argparse
import io
import statistics
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from PIL import Image
from torchvision import transforms

from benchmarks.interleave import interleave, machine, median_ratio
from data.crops import crop_backend, random_crops
from data.decode import MAX_PIXELS, decode_image
from data.jpeg import decode_jpeg, read_jpeg_header
from data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalization, random_resized_crop_flip

SCALE = (0.2, 1.0)


def main() -> None:
    """Prints images/s of each way, and its ratio to the plain way of as many views."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    torch.set_num_threads(1)
    files = [path.read_bytes() for path in sorted(args.folder.rglob("*.*"))[: args.images] if path.is_file()]
    normalization = Normalization(IMAGENET_MEAN, IMAGENET_STD)
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(args.size, SCALE, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(*normalization),
        ]
    )

    def plain(num_views: int = 1) -> None:
        for data in files:
            image = Image.open(io.BytesIO(data)).convert("RGB")
            for _ in range(num_views):
                transform(image)

    def ours(num_views: int = 1, normalize: bool = False) -> None:
        for number, data in enumerate(files):
            seeds = range(number, number + num_views)
            for crop in random_crops(data, 3, seeds, (args.size, args.size), SCALE, 0.5, max_pixels=MAX_PIXELS):
                if normalize:
                    normalization.apply(crop[None])

    def ours_by_pillow() -> None:
        with mock.patch("data.crops.load_opencv", return_value=None):
            ours()

    ways: dict[str, Callable[[], None]] = {
        "plain": plain,
        "ours": ours,
        "ours, normalised": lambda: ours(normalize=True),
        "ours, Pillow": ours_by_pillow,
        "plain, 2 views": lambda: plain(num_views=2),
        "ours, 2 views": lambda: ours(num_views=2),
        "plain, 4 views": lambda: plain(num_views=4),
        "ours, 4 views": lambda: ours(num_views=4),
    }
    seconds = interleave(ways, args.rounds, warmup=1)
    print(f"{machine()}; ours by {crop_backend()}; {len(files)} files, {args.size} px, {args.rounds} rounds")
    for name, times in seconds.items():
        views = name.partition(", ")[2] if name.endswith("views") else ""
        ratio = median_ratio(seconds, f"plain, {views}" if views else "plain", name)
        print(f"{name:>16}: {len(files) / statistics.median(times):7.1f} images/s per core, {ratio:.2f} x the plain way")
    print_parts(files, args.rounds)
    print_likeness(files, args.size)


def print_parts(files: list[bytes], rounds: int) -> None:
    """What decoding alone costs, whole and at an eighth of the size: the difference is all that a smaller picture can save."""
    headers = [(data, header) for data in files if (header := read_jpeg_header(data)) is not None]

    def decode(factor: int) -> None:
        for data, header in headers:
            decode_jpeg(data, header, factor)

    ways = {"decoded alone, whole": lambda: decode(1), "decoded alone, at an eighth": lambda: decode(8)}
    for name, times in interleave(ways, rounds, warmup=1).items():
        print(f"{name}: {1000 * statistics.median(times) / len(headers):.2f} ms an image")


def print_likeness(files: list[bytes], size: int) -> None:
    """How near our crops come to the full decode, cropped and resized by torch (bicubic, antialiased)."""
    likeness = []
    for seed, data in enumerate(files):
        (fast,) = random_crops(data, 3, [seed], (size, size), SCALE, 0.5, max_pixels=MAX_PIXELS)
        full = random_resized_crop_flip(decode_image(data, 3), seed, (size, size), SCALE, 0.5)
        error = (fast.float() - full.float()).square().mean().clamp_min(1e-3)
        likeness.append((10 * torch.log10(255**2 / error)).item())
    print(f"likeness to a full decode: {statistics.mean(likeness):.1f} dB in the mean, {min(likeness):.1f} dB at worst")


if __name__ == "__main__":
    main()

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
from data.decode import MAX_PIXELS
from data.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalization

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


if __name__ == "__main__":
    main()

"""Packs a folder of images, or the images of a CSV table, into the tar shards that training reads.

python scripts/make_shards.py --source photos --output photo-shards
"""

from dataclasses import dataclass
from pathlib import Path

from data.errors import DataError
from data.shards import describe_manifest
from data.writer import ImageList, WriteResult, describe_left_out, list_images, write_shards
from training.cli import parse_args, user_errors
from training.machine import available_cores
from training.one_process import require_one_process


@dataclass(frozen=True)
class MakeShardsConfig:
    """Packs images into tar shards; the bytes of the images are copied unchanged unless max_short_side says otherwise."""

    source: Path
    """Folder of class folders, folder of images, or CSV table with the columns path and perhaps label."""
    output: Path
    """New folder for the shards; complete or absent, whatever happens on the way."""
    labelled: bool = True
    """False: take all images in the source without labels, however deep they lie."""
    samples_per_shard: int = 1000
    """At most this many images in a shard, 1 or more."""
    max_shard_mib: int = 256
    """At most this many MiB of images in a shard, 1 or more."""
    seed: int = 0
    """Seed of the shuffle over all images, 0 or more."""
    num_workers: int = available_cores()
    """Processes that write; 0 writes in the main process. The result does not depend on it."""
    max_short_side: int | None = None
    """Store images whose shorter side is longer than this, in pixels, at that size, as JPEG of quality 95: training decodes
    them every epoch. Twice the training's img_size is enough for its smallest crops. None copies all images byte for byte."""
    verify: bool = True
    """Decode every image, and leave out and report the unreadable ones. False is faster and copies them."""

    def __post_init__(self) -> None:
        for name, least in (("samples_per_shard", 1), ("max_shard_mib", 1), ("seed", 0), ("num_workers", 0)):
            if getattr(self, name) < least:
                raise DataError(f"{name} is {getattr(self, name)}; expected {least} or more")
        if self.max_short_side is not None and self.max_short_side < 1:
            raise DataError(f"max_short_side is {self.max_short_side}; expected 1 or more")


def main() -> None:
    """Packs images as the command line says."""
    with user_errors():
        require_one_process("scripts/make_shards.py")
        config = parse_args(MakeShardsConfig, prog="scripts/make_shards.py")
        images = list_images(config.source, labelled=config.labelled)
        result = write_shards(
            images,
            config.output,
            samples_per_shard=config.samples_per_shard,
            max_shard_mib=config.max_shard_mib,
            seed=config.seed,
            num_workers=config.num_workers,
            verify=config.verify,
            max_short_side=config.max_short_side,
            progress=True,
        )
        print(summarize(config.output, images, result))


def summarize(output: Path, images: ImageList, result: WriteResult) -> str:
    """Returns what was made, one fact a line, and the command that uses it."""
    *lines, command = describe_manifest(output, result.manifest)
    return "\n".join([*lines, *describe_left_out(images, result), command])


if __name__ == "__main__":
    main()

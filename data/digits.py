"""The data set that is always there: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, as labelled shards.

It needs no download, so that a first run, an example or a test can start anywhere.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from data.errors import DataError
from data.shards import open_shards
from data.writer import list_images, write_shards

# Several shards, so that even this data set is split over processes and workers like a large one.
SAMPLES_PER_SHARD = 450


def digits_shards() -> Path:
    """Returns the folder of the digits' shards, and makes it on first use.

    It lies in `$MAE_VIT_CACHE`, else `$XDG_CACHE_HOME/mae-vit`, else `~/.cache/mae-vit`. Processes that start together
    may all make it: each writes a folder of its own, the first to finish gives it the final name, the others use that.

    Raises:
        DataError: the folder can not be written, or was damaged since.
    """
    folder = cache_folder() / "digits-v1"
    if not folder.exists():
        try:
            _write_digits(folder)
        except DataError:
            if not folder.exists():  # otherwise another process was first
                raise
    try:
        open_shards(folder)
    except DataError as error:
        raise DataError(f"{error}. This folder is only a cache: delete {folder}, and it is made again") from error
    return folder


def cache_folder() -> Path:
    """The user's cache: `$MAE_VIT_CACHE`, else `$XDG_CACHE_HOME/mae-vit`, else `~/.cache/mae-vit`."""
    if chosen := os.environ.get("MAE_VIT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mae-vit"


def _write_digits(folder: Path) -> None:
    from sklearn.datasets import load_digits  # slow to import, and needed only once per machine

    pixels, labels = load_digits(return_X_y=True)  # (1797, 64), 0..16
    images = np.round(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    with tempfile.TemporaryDirectory() as source:
        for label in range(10):
            Path(source, str(label)).mkdir()
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            Image.fromarray(image).save(Path(source, str(label), f"{number:04d}.png"))
        write_shards(list_images(source), folder, samples_per_shard=SAMPLES_PER_SHARD)

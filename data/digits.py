"""The data set that is always there: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, as labelled shards.

It needs no download, so that a first run, an example or a test can start anywhere. The digits lie writer after writer, so
training and test part are cut, not drawn: the last 252 of the test part are by writers whom the training part does not
hold. The cut goes through the writer before these: 22 of his digits are the last for training, 108 the first for testing.
"""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from data.cache import cache_folder
from data.errors import DataError
from data.shards import ShardSet, open_shards
from data.writer import list_images, write_shards

NUM_TRAIN = 1437
DIGITS = {"digits": slice(None), "digits-train": slice(NUM_TRAIN), "digits-test": slice(NUM_TRAIN, None)}
"""Name of a part -> which of the 1,797 digits, in scikit-learn's order."""

# Several shards, so that even this data set is split over processes and workers like a large one.
SAMPLES_PER_SHARD = 450


def digits_shards(part: str = "digits") -> Path:
    """Returns the folder of the digits' shards, and makes it on first use.

    It lies in `$MAE_VIT_CACHE`, else `$XDG_CACHE_HOME/mae-vit`, else `~/.cache/mae-vit`. Processes that start together
    may all make it: each writes a folder of its own, the first to finish gives it the final name, the others use that.

    Args:
        part: "digits" for all 1,797, "digits-train" for the first 1,437, "digits-test" for the last 360: nearly all by
            other writers than the first, see above.

    Raises:
        DataError: the folder can not be written, or was damaged since.
    """
    folder = cache_folder() / f"{part}-v1"
    if not folder.exists():
        try:
            _write_digits(folder, DIGITS[part])
        except DataError:
            if not folder.exists():  # otherwise another process was first
                raise
    open_cached(folder)
    return folder


def open_cached(folder: Path) -> ShardSet:
    """Opens shards that lie in the cache.

    Raises:
        DataError: they were damaged; the message says that they can be deleted.
    """
    try:
        return open_shards(folder)
    except DataError as error:
        raise DataError(f"{error}. This folder is only a cache: delete {folder}, and it is made again") from error


def _write_digits(folder: Path, part: slice) -> None:
    from sklearn.datasets import load_digits  # slow to import, and needed only once per machine

    pixels, labels = load_digits(return_X_y=True)  # (1797, 64), 0..16
    images = np.round(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    with tempfile.TemporaryDirectory() as source:
        for label in range(10):
            Path(source, str(label)).mkdir()
        for number in range(len(images))[part]:
            Image.fromarray(images[number]).save(Path(source, str(labels[number]), f"{number:04d}.png"))
        write_shards(list_images(source), folder, samples_per_shard=SAMPLES_PER_SHARD)

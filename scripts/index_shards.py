"""Describes tar shards that another tool wrote (webdataset, img2dataset, tar), so that training can read them.

python scripts/index_shards.py shards
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from data.errors import DataError
from data.indexing import index_tars
from data.shards import describe_manifest
from training.cli import parse_args, user_errors
from training.machine import available_cores


@dataclass(frozen=True)
class IndexShardsConfig:
    """Writes manifest.json and index.npy beside tar shards; the shards are only read."""

    shards: tyro.conf.Positional[tuple[Path, ...]]
    """A folder, of which all *.tar are taken in the order of their names; or the tars themselves, all in one folder."""
    class_names: Path | None = None
    """Text file with the name of class 0, 1, ... one a line; without it the classes have numbers only."""
    num_workers: int = available_cores()
    """Processes that read; 0 reads in the main process."""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise DataError(f"num_workers is {self.num_workers}; expected 0 or more")


def main() -> None:
    """Indexes tars as the command line says."""
    with user_errors():
        config = parse_args(IndexShardsConfig, prog="scripts/index_shards.py")
        paths = find_tars(config.shards)
        folder = paths[0].parent
        class_names = read_class_names(config.class_names) if config.class_names else ()
        manifest = index_tars(paths, folder, class_names=class_names, num_workers=config.num_workers, progress=True)
        print("\n".join(describe_manifest(folder, manifest)))


def find_tars(given: tuple[Path, ...]) -> list[Path]:
    """Returns the tars that are meant by one folder, or by the paths of tars.

    Raises:
        DataError: nothing was given, or the folder holds no tars.
    """
    if len(given) != 1 or not given[0].is_dir():
        if not given:
            raise DataError("no shards were given; expected a folder, or the paths of tar files")
        return list(given)
    paths = sorted(given[0].glob("*.tar"))
    if not paths:
        raise DataError(f"{given[0]} holds no *.tar files; expected a folder of tar shards")
    return paths


def read_class_names(file: Path) -> tuple[str, ...]:
    """Returns the lines of a text file, which must exist."""
    try:
        return tuple(file.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the class names in {file} can not be read: {error}") from error


if __name__ == "__main__":
    main()

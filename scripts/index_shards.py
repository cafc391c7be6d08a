"""Describes tar shards that another tool wrote (webdataset, img2dataset, tar), so that training can read them.

python scripts/index_shards.py shards
python scripts/index_shards.py "https://host/set/{0000..0099}.tar" --output folder
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from data.errors import DataError
from data.fetch import list_remote
from data.indexing import index_tars
from data.places import AnyPlace, Place, as_place, expand_braces, has_glob, has_pattern
from data.protocols import FetchConfig
from data.shards import describe_manifest
from training.cli import parse_args, user_errors
from training.machine import available_cores
from training.one_process import require_one_process


@dataclass(frozen=True)
class IndexShardsConfig:
    """Writes manifest.json and index.npy beside tar shards, or for shards elsewhere; the shards are only read."""

    shards: tyro.conf.Positional[tuple[str, ...]]
    """A folder, of which all *.tar are taken in the order of their names; or tars, all in one folder; or URLs of tars.
    Patterns stand for several: {0000..0099}.tar anywhere, *.tar for local shards and where the protocol has listings."""
    output: Path | None = None
    """Folder for the manifest and the index of shards that lie elsewhere; it is then the data set. Local shards have theirs
    beside them."""
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
        require_one_process("scripts/index_shards.py")
        config = parse_args(IndexShardsConfig, prog="scripts/index_shards.py")
        places = find_tars(config.shards)
        folder = choose_folder(places, config.output)
        class_names = read_class_names(config.class_names) if config.class_names else ()
        manifest = index_tars(places, folder, class_names=class_names, num_workers=config.num_workers, progress=True)
        print("\n".join(describe_manifest(folder, manifest)))


def find_tars(given: tuple[str, ...]) -> list[AnyPlace]:
    """Returns the tars that are meant by one folder, or by paths, URLs and patterns.

    Raises:
        DataError: nothing was given, or the folder or a pattern holds no tars.
    """
    if not given:
        raise DataError("no shards were given; expected a folder, or the paths or URLs of tar files")
    return [place for name in given for place in _find(name)]


def _find(name: str) -> list[AnyPlace]:
    path = as_place(name)
    if isinstance(path, Path) and path.is_dir():
        tars = sorted(path.glob("*.tar"))
        if not tars:
            raise DataError(f"{path} holds no *.tar files; expected a folder of tar shards")
        return [*tars]
    if isinstance(path, Path) and path.exists():
        return [path]
    if isinstance(path, Place) and not has_pattern(name) and not path.name.endswith(".tar"):
        name = f"{name.rstrip('/')}/*.tar"
    found: list[AnyPlace] = []
    for text in expand_braces(name):
        place = as_place(text)
        if not has_glob(text):
            found.append(place)
        elif isinstance(place, Place):
            found += list_remote(place, FetchConfig())
        else:
            found += sorted(Path(place.anchor).glob(str(place.relative_to(place.anchor))))
    if not found:
        raise DataError(f"{path} finds no tar files; expected a folder of tar shards, or a pattern that fits some")
    return found


def choose_folder(places: list[AnyPlace], output: Path | None) -> Path:
    """Returns where the manifest belongs.

    Raises:
        DataError: shards lie elsewhere and no folder was given for their manifest.
    """
    remote = next((place for place in places if isinstance(place, Place)), None)
    if output is None and remote is not None:
        raise DataError(f"{remote} lies elsewhere; give a folder for its manifest and index with --output")
    first = places[0]
    return output or (first.parent if isinstance(first, Path) else Path())


def read_class_names(file: Path) -> tuple[str, ...]:
    """Returns the lines of a text file, which must exist."""
    try:
        return tuple(file.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the class names in {file} can not be read: {error}") from error


if __name__ == "__main__":
    main()

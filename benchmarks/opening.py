"""How long it takes to open a data set of very many shards, and to find samples in it.

The shards are empty files of the right length, which take no room: opening looks at their sizes and reads the index only.

Command: python benchmarks/opening.py
"""

import hashlib
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from benchmarks.interleave import machine
from data.manifest import MANIFEST_NAME, Manifest, ShardInfo
from data.shards import INDEX_NAME, SAMPLE_DTYPE
from data.sources import open_dataset


@dataclass(frozen=True)
class OpeningBenchmark:
    """The data set."""

    num_shards: int = 10_000
    samples_per_shard: int = 1000
    rounds: int = 5


def write_empty_set(folder: Path, config: OpeningBenchmark) -> None:
    """Writes manifest and index of a data set whose shards hold nothing."""
    num_bytes = 1024 * config.samples_per_shard
    for number in range(config.num_shards):
        with (folder / f"{number:06d}.tar").open("wb") as file:
            file.truncate(num_bytes)
    rows = np.zeros(config.num_shards * config.samples_per_shard, dtype=SAMPLE_DTYPE)
    rows["offset"] = np.tile(512 + 1024 * np.arange(config.samples_per_shard), config.num_shards)
    rows["size"] = 512
    np.save(folder / INDEX_NAME, rows, allow_pickle=False)
    with (folder / INDEX_NAME).open("rb") as file:
        index_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    shards = tuple(
        ShardInfo(f"{number:06d}.tar", num_bytes, "0" * 64, config.samples_per_shard, ("jpg",))
        for number in range(config.num_shards)
    )
    manifest = Manifest(len(rows), 3, (0.5,) * 3, (0.25,) * 3, (), shards, index_sha256)
    (folder / MANIFEST_NAME).write_text(manifest.to_json())


def main() -> None:
    """Prints the median time of opening, and of finding a sample."""
    config = tyro.cli(OpeningBenchmark)
    with tempfile.TemporaryDirectory() as name:
        write_empty_set(Path(name), config)
        shards, opening, finding = open_dataset(name), [], []
        for _ in range(config.rounds):
            start = time.perf_counter()
            shards = open_dataset(name)
            opening.append(time.perf_counter() - start)
            wanted = np.random.default_rng(0).integers(0, len(shards), 10_000).tolist()
            start = time.perf_counter()
            for index in wanted:
                shards.locate(index)
            finding.append((time.perf_counter() - start) / len(wanted))
    print(machine())
    print(f"{len(shards.manifest.shards):,} shards, {len(shards):,} samples, median of {config.rounds} rounds:")
    print(
        f"opened in {statistics.median(opening):.2f} s; a sample found in {statistics.median(finding) * 1e6:.1f} microseconds"
    )


if __name__ == "__main__":
    main()

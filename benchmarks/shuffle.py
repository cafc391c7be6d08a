"""How well the order of samples mixes: on a data set sorted by class, the worst there is, by window and lanes.

Nothing is read: the order is a function of the shards' sizes. Prints, for one epoch of shards of one class after the other,

- classes in a batch: how many different ones, and the share of what a full shuffle would have;
- from one shard: the share of a batch's samples that come from the shard of another of its samples;
- shards in use: how many different shards any window of the stream touches, which is what a reader keeps open, and what a
  cache of remote shards must hold.

Command: python benchmarks/shuffle.py
"""

import itertools
from dataclasses import dataclass

import numpy as np
import tyro

from data.stream import SampleOrder


@dataclass(frozen=True)
class ShuffleBenchmark:
    """The data set and what is tried."""

    num_classes: int = 1000
    samples_per_class: int = 1280
    samples_per_shard: int = 1000
    batch_size: int = 1024
    windows: tuple[int, ...] = (1024, 4096, 16384, 65536)
    lanes: tuple[int, ...] = (1, 16, 64)
    num_batches: int = 100
    """Batches looked at, evenly spread over the epoch."""


def main() -> None:
    """Prints one row for each window and number of lanes."""
    config = tyro.cli(ShuffleBenchmark)
    total = config.num_classes * config.samples_per_class
    shard_edges = np.append(np.arange(0, total, config.samples_per_shard), total).astype(np.int64)
    share_absent = (1 - 1 / config.num_classes) ** config.batch_size
    at_random = config.num_classes * (1 - share_absent)
    print(
        f"{total:,} samples in {len(shard_edges) - 1:,} shards; a full shuffle: {at_random:.0f} classes in {config.batch_size}"
    )
    print(f"{'window':>8}{'lanes':>7}{'classes':>9}{'of full':>9}{'from one shard':>16}{'shards in use':>15}")
    starts = np.linspace(0, total - config.batch_size, config.num_batches).astype(np.int64)
    for window, num_lanes in itertools.product(config.windows, config.lanes):
        order = SampleOrder(shard_edges, 0, window, num_lanes)
        classes, shared = [], []
        for start in starts.tolist():
            indices = order.resolve(np.arange(start, start + config.batch_size)).indices
            classes.append(len(np.unique(indices // config.samples_per_class)))
            counts = np.unique(indices // config.samples_per_shard, return_counts=True)[1]
            shared.append(counts[counts > 1].sum() / config.batch_size)
        in_use = [
            len(np.unique(order.resolve(np.arange(start, min(start + window, total))).indices // config.samples_per_shard))
            for start in starts[:: max(1, len(starts) // 10)].tolist()
        ]
        print(
            f"{window:>8}{num_lanes:>7}{np.mean(classes):>9.0f}{np.mean(classes) / at_random:>9.0%}"
            f"{np.mean(shared):>16.0%}{max(in_use):>15}"
        )


if __name__ == "__main__":
    main()

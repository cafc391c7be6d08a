"""Running means that stay on the device, and clocks: one host synchronisation per log interval."""

import contextlib
import time
from collections.abc import Callable, Generator
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


class Meters:
    """Means of scalars over a log interval, added up on the device without waiting for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def update(self, **values: Tensor) -> None:
        """Adds one value of each name (scalars on the device)."""
        for name, value in values.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self, mean_over_processes: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Gives the means since the last call and starts anew.

        The one place where the host waits for the device, and the one collective of a log interval.

        Args:
            mean_over_processes: averages a tensor over all processes.
        """
        names = list(self._sums)
        means = torch.stack([self._sums[name] / self._counts[name] for name in names])
        self._sums, self._counts = {}, {}
        return dict(zip(names, mean_over_processes(means).tolist(), strict=True))


class WaitClock:
    """Measures how long an iterator makes its consumer wait."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def watch(self, items: Generator[Item, None, None]) -> Generator[Item, None, None]:
        """Passes items on, adding up the time until each arrives; closed, it closes their source."""
        with contextlib.closing(items):
            while True:
                start = time.perf_counter()
                try:
                    item = next(items)
                except StopIteration:
                    return
                self.waited_s += time.perf_counter() - start
                yield item

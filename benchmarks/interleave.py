"""Times two or more ways of doing the same thing, in turn, so that a machine whose speed drifts is fair to all."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from training.machine import available_cores


def interleave(ways: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Runs every way once a round.

    Args:
        ways: name -> what to time.
        rounds: counted rounds.
        warmup: rounds before, not counted.

    Returns:
        Name -> seconds of each counted round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(warmup + rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """Median over the rounds of slow / fast: how many times faster `fast` is."""
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def machine() -> str:
    """One line on what the numbers were measured on."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()
    return f"{name}, {available_cores()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"

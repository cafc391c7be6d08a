"""What is told of a run and ends nothing: losses that jump, and readers that have fallen silent."""

import contextlib
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Generator
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from training.launch import here

Item = TypeVar("Item")

STALL_S = 120.0
"""So long a process waits for a batch before it says so."""

SPIKE_WINDOW = 32
"""So many log intervals a new one is compared with."""
SPIKE_MIN = 8
"""So many there must be before."""
SPIKE_RATIO = 1.5
SPIKE_DEVIATIONS = 6.0
"""A spike is above the median by this factor, and by so many deviations: small losses scatter more."""
FIRST_RATIO = 10.0
"""Before there are SPIKE_MIN entries, a spike is above the first by this factor."""


class SpikeWatch:
    """Compares the loss of each log interval with the median of those before it.

    A spike is a loss above SPIKE_RATIO times the median and SPIKE_DEVIATIONS robust deviations above it (1.48 times the median
    distance from the median, which is the standard deviation of a normal distribution). It is told when it begins, the 1st, the
    2nd, the 4th, 8th, ... time. A loss that stays high is the new median before long. A resumed run begins with an empty
    window. While that holds too few entries for a median, a spike is a loss above FIRST_RATIO times the first.
    """

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self.jumped_from: float | None = None
        """What the loss was before a spike, until it has come back to SPIKE_RATIO times that; None where there is none."""
        self._inside = False
        self._count = 0

    def add(self, loss: float) -> "Spike":
        """Takes the loss of the next log interval."""
        ratio = warning = None
        if len(self._window) >= SPIKE_MIN:
            median = statistics.median(self._window)
            deviation = 1.48 * statistics.median(abs(value - median) for value in self._window)
            ratio = loss / median if median > 0 else 1.0
            is_spike, before = ratio > SPIKE_RATIO and loss > median + SPIKE_DEVIATIONS * deviation, median
            told = f"{ratio:.2g} times the median of the last {len(self._window)} entries ({median:.4g})"
        else:
            before = self._window[0] if self._window else loss
            is_spike, told = loss > FIRST_RATIO * before, f"from {before:.4g} at the start"
        if is_spike and not self._inside:
            self._count += 1
            if self._count & (self._count - 1) == 0:
                warning = (
                    f"the loss jumped to {loss:.4g}, {told}; jump no. {self._count}. Where it does not come back: stop the "
                    "run, rename the checkpoints since then to *.suspect, and go on with --resume auto and a lower "
                    "--optim.base_lr or --optim.clip_grad_norm 1"
                )
        if self.jumped_from is None:
            self.jumped_from = before if is_spike else None
        elif loss <= SPIKE_RATIO * self.jumped_from:
            self.jumped_from = None
        self._inside = is_spike
        self._window.append(loss)
        return Spike(ratio, warning)


class Spike(NamedTuple):
    """What a loss is to those before it."""

    over_median: float | None
    """Loss over median; None while there are too few before it."""
    warning: str | None
    """A line for the user; None where there is nothing to tell."""


class StallWatch:
    """Says so while this process waits long for its next batch; it never ends the run.

    A thread looks now and then, and tells on stderr after `limit_s`, then each time that the waiting has doubled, and once more
    when the batch has come. The other processes wait in the meantime for this one, and end after `run.timeout_minutes`.

    Args:
        limit_s: None: STALL_S.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = STALL_S if limit_s is None else limit_s
        self._since: float | None = None
        self._tell_at = self.limit_s
        self._ended = threading.Event()

    def watch(self, items: Generator[Item, None, None]) -> Generator[Item, None, None]:
        """Passes items on, watching how long each takes to come; closed, it closes their source."""
        thread = threading.Thread(target=self._look, name="stalls", daemon=True)
        thread.start()
        try:
            with contextlib.closing(items):
                while True:
                    self._tell_at, self._since = self.limit_s, time.monotonic()
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                    waited_s, self._since = time.monotonic() - self._since, None
                    if self._tell_at > self.limit_s:
                        self._tell(f"the batch came after {waited_s:.0f} s")
                    yield item
        finally:
            self._ended.set()
            thread.join()

    def _look(self) -> None:
        while not self._ended.wait(self.limit_s / 8):
            since = self._since
            waited_s = 0.0 if since is None else time.monotonic() - since
            if waited_s >= self._tell_at:
                self._tell_at *= 2
                self._tell(
                    f"no batch of images for {waited_s:.0f} s: the readers wait for the storage, or hang; the run goes on when "
                    "one comes"
                )

    @staticmethod
    def _tell(message: str) -> None:
        tqdm.write(f"warning ({here()}): {message}", file=sys.stderr)

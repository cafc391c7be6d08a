"""Unreadable samples of a run, over all its processes: how many of which cause, which they are, and when they are too many."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, get_args

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from data.errors import Cause, DataError
from data.faults import CHECK_COMMAND, Fault, describe_counts
from data.stream import BatchPlan
from training.checkpoint import replacing
from training.cli import user_errors

CAUSES: tuple[Cause, ...] = get_args(Cause)
FILE_NAME = "faults.jsonl"
MIN_BAD = 32
"""So many unreadable samples it takes before their share is looked at."""
MAX_LISTED = 100_000
"""So many samples are listed in the file of a run; more are only counted."""
MAX_SENT = 1000
"""So many newly met ones a process sends to the first one at once; the others follow at the next entry."""
NUM_NAMED = 3


class FaultLog:
    """Counts the unreadable samples of all processes, lists each once, and ends a run that meets too many.

    A sample that is met again, in another epoch or by another process, is counted again: the share that the limit is about
    is that of replaced samples among those read. The list holds it once. Only the first process writes.

    A resumed run goes on counting from the entry of metrics.jsonl at its checkpoint, and listing in the same file; what the
    interrupted run met after the checkpoint is dropped from both, for it is met again. Without that entry it counts from
    where it starts.

    Args:
        accelerator: of the run.
        folder: of the run.
        start_step: optimizer steps done before.
        plan: how many samples are read in a step; the views of one count once.
        max_bad_share: what share of them may be unreadable, 0..1.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, start_step: int, plan: BatchPlan, max_bad_share: float) -> None:
        self.accelerator = accelerator
        self.path = folder / FILE_NAME
        self.samples_per_step = plan.global_batch_size // plan.views_per_image
        self.max_bad_share = max_bad_share
        self.counts: Counter[Cause] = Counter()
        """Over all processes, up to the last `gather`."""
        self.num_read = 0
        """Samples that all processes read while these were counted."""
        self.first: list[str] = []
        """The first few of the list, for messages."""
        self._start_step = self._last_step = start_step
        self._counted_from_step = start_step
        self._mine: Counter[Cause] = Counter()
        self._seen: set[int] = set()
        self._unsent: list[Fault] = []
        self._warn_at = 1
        self._file: IO[str] | None = None

    def open(self, counted: Mapping[str, int] | None) -> None:
        """Opens the list; on the first process.

        Args:
            counted: the counts of the interrupted run at the start step; None where there are none.
        """
        if counted is not None:
            self._counted_from_step = 0
            self._mine.update({cause: counted.get(cause, 0) for cause in CAUSES})
            self._warn_at = 2 * max(1, sum(counted.values()))
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        kept = [entry for entry in map(_parse, lines) if entry is not None and entry["step"] <= self._start_step]
        self._seen.update(entry["sample"] for entry in kept)
        self.first = [str(Fault(**{name: entry[name] for name in Fault._fields})) for entry in kept[:NUM_NAMED]]
        if lines:
            with replacing(self.path) as temporary:
                temporary.write_text("".join(f"{json.dumps(entry)}\n" for entry in kept), encoding="utf-8")

    def extend(self, faults: Iterable[Fault]) -> None:
        """Adds what this process met."""
        for fault in faults:
            self._mine[fault.cause] += 1
            if fault.sample not in self._seen and len(self._seen) < MAX_LISTED:
                self._seen.add(fault.sample)
                self._unsent.append(fault)

    def gather(self, step: int) -> None:
        """Brings the counts of all processes together, and writes what is new; all processes must call it at the same step.

        One small reduction; and where a process met new ones, one exchange of these.

        Args:
            step: optimizer steps done.
        """
        self._last_step = step
        is_main = self.accelerator.is_main_process
        numbers = [self._mine[cause] for cause in CAUSES]
        # The first process alone knows what was counted before a resumption: the sum brings it to the others.
        numbers += [len(self._unsent), self._counted_from_step if is_main else 0]
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.accelerator.device)
        summed = self.accelerator.reduce(tensor, "sum")
        assert isinstance(summed, Tensor)
        *counts, num_unsent, counted_from_step = summed.tolist()
        self.counts = Counter({cause: count for cause, count in zip(CAUSES, counts, strict=True) if count})
        self.num_read = (step - counted_from_step) * self.samples_per_step
        newest = None
        if num_unsent:
            sent, self._unsent = self._unsent[:MAX_SENT], self._unsent[MAX_SENT:]
            newest = self._list(step, gather_object([(self.accelerator.process_index, fault) for fault in sent]))
        if is_main and self.counts.total() >= self._warn_at:
            self._warn_at = 2 * self.counts.total()  # a line each time that they have doubled: the log stays readable
            self._warn(newest)

    def _list(self, step: int, found: list[tuple[int, Fault]]) -> Fault:
        """Notes newly met ones, and writes them on the first process; returns one of them."""
        listed: set[int] = set()
        for process, fault in found:
            mine = process == self.accelerator.process_index
            if fault.sample in listed or (not mine and fault.sample in self._seen):
                continue  # several processes met it
            listed.add(fault.sample)
            self._seen.add(fault.sample)
            self.first = [*self.first, str(fault)][:NUM_NAMED]
            self._write({"step": step, "process": process, **fault._asdict()})
        if self._file is not None:
            self._file.flush()
        return found[0][1]

    def _write(self, entry: dict[str, Any]) -> None:
        if not self.accelerator.is_main_process:
            return
        if self._file is None:  # a run without faults leaves no empty file
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(entry) + "\n")

    def _warn(self, newest: Fault | None) -> None:
        example = f"; one of the newest is {newest}" if newest else ""
        tqdm.write(f"warning: {self.describe()}{example}")

    def describe(self) -> str:
        """Says how many there are, of what, and where they are listed."""
        return (
            f"{self.counts.total():,} of {self.num_read:,} samples read so far could not be read and were replaced by their "
            f"neighbours ({describe_counts(self.counts)}), listed in {self.path}"
        )

    @property
    def too_many(self) -> bool:
        """Says whether the limit is passed, by the last `gather`; the same on all processes."""
        num_bad = self.counts.total()
        return num_bad >= MIN_BAD and num_bad > self.max_bad_share * self.num_read

    def end_run(self) -> None:
        """Ends all processes together, with one message; nothing is left to do but this.

        Raises:
            SystemExit: with the exit status of a user's mistake.
        """
        try:
            with user_errors():
                raise DataError(
                    f"{self.describe()}: {self.counts.total() / self.num_read:.2%}, and --data.max_bad_share allows "
                    f"{self.max_bad_share:.2%}. The first: {' | '.join(self.first)}. `{CHECK_COMMAND}` says what else is "
                    "wrong; take the unreadable samples out and start anew, or go on from here with --resume auto and a higher "
                    "--data.max_bad_share"
                )
        finally:
            # Launchers kill all others when one process ends: it must not be one before the message is out.
            self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Writes what was not gathered yet, as far as the first process met it, and closes the file."""
        for fault in self._unsent:  # under the next step: a run that goes on from here meets them again
            self._write({"step": self._last_step + 1, "process": self.accelerator.process_index, **fault._asdict()})
        if self._file is not None:
            self._file.close()


def _parse(line: bytes) -> dict[str, Any] | None:
    """An entry of the list; None for a line that is none, because a crash cut it off or left what is no text."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and entry.keys() >= {"step", *Fault._fields} else None

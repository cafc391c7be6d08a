"""When a run saves, and how: a copy in memory while it waits, the file while it trains on."""

import concurrent.futures
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm import tqdm

from training.checkpoint import (
    SetAside,
    checkpoint_path,
    newest_sound,
    prune_checkpoints,
    set_suspects_aside,
    training_tensors,
    write_checkpoint,
)
from training.cli import EXIT_USER_ERROR, user_errors
from training.knn import is_due
from training.parallel import whole
from training.run import RunConfig

_ALIGNMENT = 64
"""Bytes: every tensor of a copy begins at a multiple of it, as every type of number may."""


class HostCopy:
    """Copies of tensors in the CPU's memory, in one buffer that is used again for the next copy.

    The buffer has the size of a checkpoint (of a ViT-Base with decoder and AdamW: 1.3 GB) and stays for the whole run. Where
    tensors come from a GPU it is page-locked, which makes copying several times faster; PyTorch rounds page-locked memory up
    to a power of two.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies tensors as they are now; the copies of the last call are gone.

        Args:
            tensors: of any device; what was computed before the call is in the copy, nothing of what comes after it.
                Sharded ones are gathered one by one, see `gather_along`.

        Returns:
            Under the same names: contiguous, in the CPU's memory.
        """
        starts, size = [], 0
        for tensor in tensors.values():
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        copies = {}
        for (name, tensor), start in zip(tensors.items(), starts, strict=True):
            place = self._buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = place.copy_(whole(tensor.detach()), non_blocking=True)
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            torch.accelerator.synchronize()
        return copies


def gather_along(tensors: dict[str, Tensor]) -> None:
    """Lets another process copy tensors: gathers the sharded ones in the same order as `HostCopy.take`, and keeps nothing."""
    for tensor in tensors.values():
        whole(tensor.detach())


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, one at a time.

    A save copies the tensors, which takes well under a second, and returns; hashing, writing, flushing, renaming and then the
    deletion of older checkpoints happen while the training goes on. A save that comes before the last one is written waits for
    it. Python itself does not end before a write has.

    Args:
        folder: of the checkpoints, made if absent.
        keep: how many of the newest stay besides milestones, at least 1. While a checkpoint is written there is one more; of a
            sick run, the newest sound one stays, too.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._copy = HostCopy()
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._sound = newest_sound(folder)
        self._pending: tuple[int, Future[None]] | None = None

    @property
    def writing(self) -> int | None:
        """Step of the checkpoint that is being written; None where none is."""
        return self._pending[0] if self._pending and not self._pending[1].done() else None

    @property
    def failure(self) -> BaseException | None:
        """Why the last write failed, as long as `wait` has not told; None while it goes on, and where it did not fail."""
        return self._pending[1].exception() if self._pending is not None and self._pending[1].done() else None

    def settle(self) -> None:
        """Waits for the write without telling how it ended."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending[1]])

    def wait(self) -> None:
        """Waits for the write.

        Raises:
            UserError: it failed.
        """
        self.settle()
        if self._pending is not None:
            (_, future), self._pending = self._pending, None
            future.result()

    def save(
        self,
        step: int,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        is_milestone: bool = False,
        is_sound: bool = True,
    ) -> None:
        """Copies a checkpoint, and begins to write it.

        Args:
            step: optimizer steps done.
            config: the run's identity by dotted names.
            tensors: see `training_tensors`; they may change as soon as this returns.
            is_milestone: stays for ever.
            is_sound: False where the run is sick: the newest one that is sound stays beside the others.

        Raises:
            UserError: the write before this one failed.
        """
        self.wait()
        copies = self._copy.take(tensors)
        path = checkpoint_path(self.folder, step, is_milestone)
        self._pending = step, self._pool.submit(self._write, path, step, config, copies, is_sound)

    def _write(self, path: Path, step: int, config: dict[str, Any], tensors: dict[str, Tensor], is_sound: bool) -> None:
        prune_checkpoints(self.folder, path, self.keep, self._sound)  # more than `keep` where it was set lower: makes room
        write_checkpoint(path, step, config, tensors, is_sound)
        if is_sound:
            self._sound = path
        prune_checkpoints(self.folder, path, self.keep, self._sound)


class Saver:
    """The checkpoints of a run: says at which steps they are due, and writes them on the first process.

    Used as a context around the training, inside that of the log: leaving it, in whatever way, waits for the write.

    Args:
        config: of the run.
        folder: of the checkpoints.
        epochs_per_step: passes over the data that a step makes.
        accelerator: of the run.
    """

    def __init__(self, config: RunConfig, folder: Path, epochs_per_step: float, accelerator: Accelerator) -> None:
        self.config = config
        self.epochs_per_step = epochs_per_step
        self.accelerator = accelerator
        self._writer = CheckpointWriter(folder, config.keep_checkpoints)
        self._last_time = time.monotonic()
        self._has_warned = False

    def __enter__(self) -> "Saver":
        self._last_time = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self._writer.settle()
            if any(gather_object([self._writer.failure is not None])):
                self._end_run()
            return
        self._writer.settle()
        if self._writer.failure is not None:  # what ended the run is told by its own error, and must not be hidden by this one
            tqdm.write(f"warning: {self._writer.failure}", file=sys.stderr)

    def notes(self) -> tuple[bool, bool]:
        """What only the first process knows, to be agreed upon: that the clock asks for a checkpoint, that a write failed."""
        minutes = self.config.save_every_minutes
        if not self.accelerator.is_main_process:
            return False, False
        return minutes is not None and time.monotonic() - self._last_time >= 60 * minutes, self._writer.failure is not None

    def is_due(self, step: int, by_clock: bool, has_failed: bool) -> bool:
        """Says whether a checkpoint is due after a step; all processes must ask at the same step.

        Args:
            step: optimizer steps done.
            by_clock: some process's first note.
            has_failed: some process's second note.

        Raises:
            SystemExit: the last checkpoint could not be written; the first process has told why, in one line.
        """
        if has_failed:
            self._end_run()
        return by_clock or step % self.config.save_every_steps == 0 or self._is_milestone(step)

    def _is_milestone(self, step: int) -> bool:
        every = self.config.milestone_every_epochs
        return every is not None and is_due(step, self.epochs_per_step, every)

    def save(
        self,
        step: int,
        identity: dict[str, Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: dict[str, Tensor] | None = None,
        is_sound: bool = True,
    ) -> None:
        """Saves a checkpoint: returns as soon as it is copied.

        All processes must call it: the first one writes, the others hand it their parts of what is sharded. Where the last
        write failed, nothing is saved: all processes learn of it together, at the next step or at the end.

        Args:
            step: optimizer steps done.
            identity: of the run, see `training.resume.identity`.
            model: without any wrapper.
            optimizer: over the model's parameters.
            extra: further tensors, under names with a prefix of their own.
            is_sound: see `CheckpointWriter.save`.
        """
        tensors = training_tensors(model, optimizer, extra)
        if self.accelerator.is_main_process and self._is_free(step):
            self._writer.save(step, identity, tensors, self._is_milestone(step), is_sound)
        else:
            gather_along(tensors)
        self._last_time = time.monotonic()

    def _is_free(self, step: int) -> bool:
        """Waits until nothing is written; says whether the last write was a good one."""
        earlier = self._writer.writing
        if earlier is not None and not self._has_warned:
            self._has_warned = True
            tqdm.write(
                f"warning: the checkpoint of step {step} has to wait until that of step {earlier} is written: where this "
                "comes often, save less often (--run.save_every_steps, --run.save_every_minutes) or on a faster disk"
            )
        self._writer.settle()
        return self._writer.failure is None

    def set_suspects_aside(self) -> SetAside:
        """Makes a sick run go on from the newest checkpoint of a sound one, see `training.checkpoint.set_suspects_aside`."""
        self._writer.settle()
        return set_suspects_aside(self._writer.folder)

    def _end_run(self) -> None:
        """Ends all processes together, after the first has told why.

        Raises:
            SystemExit: with the exit status of a user's mistake.
        """
        try:
            with tqdm.external_write_mode(file=sys.stderr), user_errors():  # the line stands alone, above the progress bar
                self._writer.wait()
        finally:
            # Launchers kill all others when one process ends: it must not be one before the message is out.
            self.accelerator.wait_for_everyone()
        raise SystemExit(EXIT_USER_ERROR)

"""What a run tells while it goes on: progress bar, TensorBoard, metrics.jsonl, warnings about the data."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from training.checkpoint import replacing
from training.faults import FaultLog
from training.machine import memory_mib
from training.meters import WaitClock


class MetricsFile:
    """`metrics.jsonl`: one JSON object per log interval, with its step.

    Args:
        path: of the file.
        first_step: entries of later steps, left by a run that went on after its last checkpoint, are dropped.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        lines = path.read_bytes().splitlines() if path.exists() else []  # bytes: a power cut may leave what is no text
        kept = [line for line in lines if _step_of(line) <= first_step]
        self.last: dict[str, Any] = {}
        """What the entries that were kept say under each name, the newest."""
        for line in kept:
            self.last |= json.loads(line)
        with replacing(path) as temporary:
            temporary.write_bytes(b"".join(line + b"\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends one entry, visible to other programs at once."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _step_of(line: bytes) -> float:
    """The step of an entry; infinity for a line that is none (a crash cut it off), which is dropped with what came after."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # no JSON, or no text at all; no entry
        return float("inf")


class RunLog:
    """The logs of a run, which the first process alone writes.

    Args:
        accelerator: of the run.
        folder: of the run.
        start_step: optimizer steps done before.
        num_steps: where the run ends.
        global_batch_size: images per step.
        clock: measures the waiting for data.
        faults: the unreadable samples.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        start_step: int,
        num_steps: int,
        global_batch_size: int,
        clock: WaitClock,
        faults: FaultLog,
    ) -> None:
        self.accelerator = accelerator
        self.folder = folder
        self.num_steps = num_steps
        self.global_batch_size = global_batch_size
        self.clock = clock
        self.faults = faults
        self.last_step = self._start_step = start_step
        """Step of the last entry."""
        self._last_time = time.perf_counter()

    def __enter__(self) -> "RunLog":
        # Entries of steps that are done again replace those of the interrupted run.
        purge = {"tensorboard": {"purge_step": self._start_step + 1}}
        self.accelerator.init_trackers("tensorboard", init_kwargs=purge)
        if self.accelerator.is_main_process:
            self._metrics = MetricsFile(self.folder / "metrics.jsonl", self._start_step)
            self.faults.open(self._metrics.last.get("faults"))
        self.bar = tqdm(
            total=self.num_steps, initial=self._start_step, unit="step", dynamic_ncols=True,
            disable=not self.accelerator.is_main_process,
        )  # fmt: skip
        self._last_time = time.perf_counter()
        return self

    @property
    def resumed(self) -> Mapping[str, Any]:
        """What the newest entries up to the start step say, by name; on the first process only, elsewhere nothing."""
        return self._metrics.last if self.accelerator.is_main_process else {}

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        self.faults.close()
        if self.accelerator.is_main_process:
            self._metrics.close()
            # Not `end_training`, which takes the processes apart: the end of a run has things to agree on still.
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def write(self, step: int, values: dict[str, float], headline: str) -> None:
        """Writes one entry; adds images/s over all processes, share of waiting for data, memory, and unreadable samples.

        All processes must call it at the same step.

        Args:
            step: optimizer steps done.
            values: what to write.
            headline: what the progress bar shows of it.
        """
        elapsed_s = time.perf_counter() - self._last_time
        values = values | {
            "images_per_s": (step - self.last_step) * self.global_batch_size / elapsed_s,
            "data_wait": self.clock.waited_s / elapsed_s,
            "memory_mib": memory_mib(self.accelerator.device),
        }
        self.faults.gather(step)
        if self.accelerator.is_main_process:
            self._metrics.write({"step": step, **values, "faults": dict(self.faults.counts)})
            speed = f"{values['images_per_s']:.0f} images/s, data wait {values['data_wait']:.0%}"
            self.bar.set_postfix_str(f"{headline}, {speed}", refresh=False)
            self.bar.update(step - self.last_step)
        self.accelerator.log(values | {f"faults/{cause}": count for cause, count in self.faults.counts.items()}, step=step)
        self.last_step, self._last_time, self.clock.waited_s = step, time.perf_counter(), 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Takes the time of something that is no training out of images/s and of the share of waiting for data."""
        if self.accelerator.device.type != "cpu":
            torch.accelerator.synchronize()  # steps that the device still has to do are training
        start = time.perf_counter()
        yield
        self._last_time += time.perf_counter() - start

    def write_measured(self, step: int, values: dict[str, float], headline: str) -> None:
        """Writes an entry of its own for what was measured now and then; the entries of the training are not touched.

        Args:
            step: optimizer steps done.
            values: what to write.
            headline: a line for the terminal.
        """
        if self.accelerator.is_main_process:
            self._metrics.write({"step": step, **values})
            tqdm.write(f"step {step}: {headline}")
        self.accelerator.log(values, step=step)

    def end_run(self) -> None:
        """Ends the run for its unreadable samples: all processes together, with one line of its own; see `FaultLog.end_run`."""
        self.bar.close()
        self.faults.end_run()

    def add_picture(self, name: str, picture: Image.Image, step: int) -> None:
        """Shows a picture in TensorBoard; on the first process only."""
        writer = cast(SummaryWriter, self.accelerator.get_tracker("tensorboard", unwrap=True))
        writer.add_image(name, np.asarray(picture), global_step=step, dataformats="HWC")

"""Pretraining runs that note what they learn from, and that are killed where it hurts.

Commands: python tests/killed_run.py kills FOLDER SEED COUNT   (a straight run, and one that is killed COUNT times)
          python tests/killed_run.py one NOTES STOP_AFTER_STEP MAIN'S FLAGS...   (one run; 0: to its end)
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

import pretrain.loop
import training.checkpoint
import training.log
import training.saving
from data.loader import Batch
from pretrain.main import main
from training.checkpoint import newest_checkpoint

NUM_STEPS = 60
MOST_STEPS = 4
"""Steps that an attempt does at most: COUNT attempts must not reach the end."""
FLAGS = (
    "--data.train", "digits", "--model.name", "tiny", "--model.img_size", "16", "16", "--model.patch_size", "4",
    "--model.in_chans", "1", "--model.embed_dim", "16", "--model.depth", "1", "--model.num_heads", "2",
    "--model.decoder_embed_dim", "16", "--model.decoder_depth", "1", "--model.decoder_num_heads", "2",
    "--optim.warmup_epochs", "0.1", "--optim.base_lr", "1e-2", "--run.dtype", "float32", "--run.device", "cpu",
    "--run.cpu_threads", "1", "--run.log_every_steps", "1", "--data.num_workers", "0", "--resume", "auto",
)  # fmt: skip
KILLED_FLAGS = (
    *FLAGS, "--data.batch_size_per_process", "16", "--num_steps", str(NUM_STEPS), "--run.save_every_steps", "2",
    "--run.milestone_every_epochs", "0.25",
)  # fmt: skip

PLACES = ("step", "log", "copied", "written", "renamed", "pruned", "clock")
"""Where a run is killed: before a step, in the middle of a log line, when a checkpoint is copied, in the middle of its file,
before or after older ones are deleted, and by the clock, from outside."""


class Kill(NamedTuple):
    """When a run dies."""

    place: str
    time: int
    """The how many-th time that the run comes there, from 1."""
    share: float
    """0..1: how much of the file or of the line is written; by the clock, how much of 0.1 s has passed since the first step."""


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived SIGKILL")


class Watch:
    """Notes the samples of every step, makes writing slow, and kills this process at its place.

    Args:
        notes: file of the notes, which are appended.
        kill: when to die; None: never.
        stop_after: step after which the process sends itself SIGTERM; 0: never.
    """

    def __init__(self, notes: Path, kill: Kill | None, stop_after: int = 0) -> None:
        self.notes, self.kill, self.stop_after = notes, kill, stop_after
        self.counts = Counter[str]()
        self.step: int | None = None

    def at(self, place: str) -> bool:
        """Says whether the process is to die here and now."""
        self.counts[place] += 1
        return self.kill is not None and self.kill.place == place and self.counts[place] == self.kill.time

    def install(self) -> None:
        """Puts itself into the functions that it watches."""
        train_step, write_line = pretrain.loop.train_step, training.log.MetricsFile.write
        take, save_file = training.saving.HostCopy.take, training.checkpoint.save_file
        flush_names, prune = training.checkpoint._flush_names, training.saving.prune_checkpoints

        def noted_step(run: pretrain.loop.Pretraining, batches: Iterator[Batch], *rest: Any) -> None:
            self.step = run.start_step + 1 if self.step is None else self.step + 1
            if self.at("step") or (self.kill and self.step > run.start_step + MOST_STEPS):
                die()
            train_step(run, self._noted(batches, run.accelerator.process_index), *rest)
            if self.step == self.stop_after and run.accelerator.is_main_process:
                os.kill(os.getpid(), signal.SIGTERM)

        def torn_line(file: training.log.MetricsFile, values: dict[str, Any]) -> None:
            if self.at("log"):
                line = json.dumps(values)
                file._file.write(line[: int(self.share * len(line))])
                file._file.flush()
                die()
            write_line(file, values)

        def copied(copy: training.saving.HostCopy, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            copies = take(copy, tensors)
            if self.at("copied"):
                die()
            return copies

        def slow_file(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
            time.sleep(0.03)  # the training goes on meanwhile, and changes what is not copied
            save_file(tensors, path, metadata)
            if self.at("written"):
                os.truncate(path, int(self.share * path.stat().st_size))
                die()

        def renamed(folder: Path) -> None:
            if self.at("renamed"):
                die()
            flush_names(folder)

        def pruned(*args: Any) -> None:
            prune(*args)
            if self.at("pruned"):
                die()

        pretrain.loop.train_step = noted_step
        training.log.MetricsFile.write = torn_line  # pyright: ignore[reportAttributeAccessIssue]
        training.saving.HostCopy.take = copied  # pyright: ignore[reportAttributeAccessIssue]
        training.checkpoint.save_file = slow_file
        training.checkpoint._flush_names = renamed
        training.saving.prune_checkpoints = pruned

    @property
    def share(self) -> float:
        return self.kill.share if self.kill else 1.0

    def _noted(self, batches: Iterator[Batch], process: int) -> Iterator[Batch]:
        for batch in batches:
            note = {"step": self.step, "process": process, "samples": batch.indices.tolist(), "masks": batch.seeds.tolist()}
            with self.notes.open("a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")
            yield batch


def run_here(notes: Path, kill: Kill | None, stop_after: int, flags: list[str]) -> int:
    """Runs the program in this process; gives its exit status."""
    Watch(notes, kill, stop_after).install()
    sys.argv = ["main.py", *flags]
    try:
        return main()
    except SystemExit as ended:
        return int(ended.code or 0)


def fork_run(folder: Path, kill: Kill | None) -> tuple[int, str]:
    """Runs the program in a copy of this process, to its end or death; gives the exit status, below 0 for a signal's number."""
    notes, output = folder / "notes.jsonl", folder / "output.txt"
    num_notes = notes.read_bytes().count(b"\n") if notes.exists() else 0
    child = os.fork()
    if child == 0:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = run_here(notes, kill, 0, ["--output_dir", str(folder / "run"), *KILLED_FLAGS])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if kill is not None and kill.place == "clock":
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if notes.exists() and notes.read_bytes().count(b"\n") > num_notes:
                time.sleep(0.1 * kill.share)
                os.kill(child, signal.SIGKILL)
                break
            time.sleep(0.001)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), output.read_text(encoding="utf-8")


def newest_step(folder: Path) -> int:
    checkpoint, complaints = newest_checkpoint(folder)
    assert not complaints
    return checkpoint.step if checkpoint else 0


def kills(folder: Path, seed: int, count: int) -> None:
    """Prints a line of JSON for each attempt of the run that is killed."""
    for name in ("straight", "killed"):
        (folder / name).mkdir()
    status, text = fork_run(folder / "straight", None)
    assert status == 0, text
    draw = random.Random(seed)
    checkpoints = folder / "killed" / "run" / "checkpoints"
    for number in range(count + 1):
        place = PLACES[number % len(PLACES)]
        often = place in ("step", "log", "clock")
        kill = Kill(place, draw.randint(1, MOST_STEPS if often else 2), draw.random()) if number < count else None
        before = newest_step(checkpoints)
        status, text = fork_run(folder / "killed", kill)
        files = sorted(path.name for path in checkpoints.iterdir()) if checkpoints.exists() else []
        attempt = {"kill": kill, "status": status, "before": before, "after": newest_step(checkpoints), "files": files}
        print(json.dumps(attempt | {"text": text}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "kills":
        kills(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(run_here(Path(sys.argv[2]), None, int(sys.argv[3]), sys.argv[4:]))

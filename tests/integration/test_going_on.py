"""Runs that go on otherwise than they began: longer, from a good checkpoint after a bad time, without one, without a reader."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

import pretrain.loop
from data.errors import DataError
from data.shards import ShardSet
from pretrain.main import main
from tests.integration.test_sick_runs import TINY_RUN
from training.checkpoint import checkpoint_path, read_checkpoint
from training.launch import EXIT_LOST_CONTACT


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def command(output: Path, data: ShardSet, *flags: str) -> list[str]:
    return ["pretrain/main.py", "--output_dir", str(output), "--data.train", str(data.root), *TINY_RUN, *flags]


class Program:
    """The program in this process, in one run folder."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], output: Path, data: ShardSet
    ) -> None:
        self.monkeypatch, self.capfd, self.output, self.data = monkeypatch, capfd, output, data

    def __call__(self, *flags: str) -> tuple[int, str]:
        """Exit status, and what it printed."""
        self.monkeypatch.setattr(sys, "argv", command(self.output, self.data, *flags))
        try:
            status = main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        out, err = self.capfd.readouterr()
        assert "Traceback" not in out + err
        return status, out + err

    def entries(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.output / "checkpoints").iterdir())


@pytest.fixture
def program(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, picture_shards: ShardSet
) -> Program:
    return Program(monkeypatch, capfd, tmp_path / "run", picture_shards)


def test_a_run_is_trained_longer(program: Program) -> None:
    """Also a finished one; its learning rate is from then on that of the longer run."""
    assert program("--num_steps", "4")[0] == 0
    status, text = program("--num_steps", "4", "--resume", "auto")
    assert (status, len(program.entries())) == (0, 4)
    assert "the run was at its end, after step 4: to train on, give more --epochs or --num_steps" in text
    status, text = program("--num_steps", "8", "--resume", "auto")
    assert status == 0
    assert "warning: the run goes on, but not as an uninterrupted one would: num_steps 4 -> 8" in text
    config = program.output / "config.yaml"
    assert f"the run is 8 steps now, not 4; where that is not meant: --config {config} --resume auto" in text
    entries = program.entries()
    assert [entry["step"] for entry in entries] == list(range(1, 9))
    assert entries[4]["lr"] == pytest.approx(entries[0]["lr"] / 2)  # in the middle of the cosine
    assert entries[7]["loss"] < entries[3]["loss"]
    assert read_checkpoint(checkpoint_path(program.output / "checkpoints", 8)).config["num_steps"] == 8
    status, text = program("--num_steps", "6", "--resume", "auto")
    assert status == 2
    assert "is of a run of 8 steps, which cannot be cut to 6: give more --epochs or --num_steps, or continue it as" in text
    assert len(program.entries()) == 8
    assert "num_steps: 8" in (program.output / "config.yaml").read_text()
    history = [json.loads(line) for line in (program.output / "history.jsonl").read_text().splitlines()]
    assert [(start["step"], start["changed"]) for start in history] == [(0, []), (4, []), (4, ["num_steps 4 -> 8"])]


def test_a_diverged_run_goes_on_from_before_it_diverged(program: Program) -> None:
    """The advice of the diagnosis can be followed, though the last checkpoints are of no use."""
    flags = ("--num_steps", "40", "--run.save_every_steps", "2", "--run.keep_checkpoints", "1")
    assert program("--num_steps", "6", *flags[2:])[0] == 0
    # So high that weights run away and losses overflow, with finite ones between.
    status, text = program(*flags, "--resume", "auto", "--optim.base_lr", "1e5")
    assert status == 2
    assert "checkpoint(s) of the sick run are set aside as *.suspect; step_00000006.safetensors is good: go on from it" in text
    assert [name for name in program.checkpoints() if name.endswith(".safetensors")] == ["step_00000006.safetensors"]
    assert len(program.checkpoints()) > 1
    status, text = program(*flags, "--resume", "auto", "--optim.base_lr", "1e-3")
    assert status == 0
    assert "step_00000006.safetensors" in text
    assert program.entries()[-1]["loss"] < program.entries()[0]["loss"]


def test_a_run_without_a_checkpoint_says_that_it_starts_anew(program: Program) -> None:
    assert program("--num_steps", "2")[0] == 0
    checkpoint_path(program.output / "checkpoints", 2).unlink()
    status, text = program("--num_steps", "2", "--resume", "auto")
    assert status == 0
    assert f"warning: {program.output} holds a run, but no checkpoint of it: it starts anew, and so do its logs" in text
    assert [entry["step"] for entry in program.entries()] == [1, 2]


def test_what_cannot_be_shown_or_measured_costs_no_checkpoint(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("show_restored", "measure"):

        def fail(_run: object, _log: object, step: int) -> None:
            if step == 2:  # where a checkpoint is due
                raise DataError("an image is gone")

        with monkeypatch.context() as patch:
            patch.setattr(pretrain.loop, name, fail)
            status, text = program("--num_steps", "2", "--resume", "auto")
        assert status == 2
        assert "an image is gone" in text
        assert program.checkpoints() == ["step_00000002.safetensors"]
        checkpoint_path(program.output / "checkpoints", 2).unlink()


def test_a_killed_reader_ends_the_run_in_one_line(tmp_path: Path, picture_shards: ShardSet) -> None:
    """As the kernel kills when the memory is full."""
    output = tmp_path / "run"
    flags = ("--data.num_workers", "1", "--num_steps", "100000", "--run.save_every_steps", "2")
    process = subprocess.Popen(
        [sys.executable, *command(output, picture_shards, *flags)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        while not checkpoint_path(output / "checkpoints", 2).exists() and process.poll() is None:
            time.sleep(0.01)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        readers = [child for child in children if "main.py" in Path(f"/proc/{child}/cmdline").read_text()]
        assert len(readers) == 1
        os.kill(int(readers[0]), signal.SIGKILL)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == EXIT_LOST_CONTACT
    assert "Traceback" not in text
    (line,) = (line for line in text.replace("\r", "\n").splitlines() if line.startswith("error"))
    assert re.search(r"a reader process was lost \(DataLoader worker \(pid(\(s\))? \d+\) ", line)
    assert "take fewer --data.num_workers" in line
    assert re.search(r"with --resume auto; the last checkpoint is step_\d+.safetensors", line)

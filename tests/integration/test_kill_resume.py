"""Nothing that was saved is lost, and what is computed again is the same: runs that are killed, full disks, foreign files."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import training.checkpoint
from tests.integration.test_pretrain import LAUNCH, TINY_RUN, fresh_accelerator, refused, run_here  # noqa: F401
from tests.killed_run import FLAGS, KILLED_FLAGS, NUM_STEPS, PLACES
from training.checkpoint import checkpoint_path, newest_checkpoint, read_checkpoint
from training.run import lock_run_folder

NUM_KILLS = 20
PROGRAM = "tests/killed_run.py"
ENVIRONMENT = os.environ | {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
SAME = ("step", "loss", "explained", "grad_norm", "lr", "epoch")


def kill_and_resume(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Trains straight, and with kills; gives a record of each attempt, the last of which ends well."""
    command = [sys.executable, PROGRAM, "kills", str(folder), str(seed), str(NUM_KILLS)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def learnt_from(notes: Path) -> dict[int, list[tuple[int, int]]]:
    """Step -> sample and mask seed of every image of its global batch; equal however often the step was done."""
    attempts: dict[tuple[int, int], list[list[tuple[int, int]]]] = {}
    for note in lines(notes):
        views = list(zip(note["samples"], note["masks"], strict=True))
        attempts.setdefault((note["step"], note["process"]), []).append(views)
    found: dict[int, list[tuple[int, int]]] = {}
    for (step, _), views in sorted(attempts.items()):
        assert all(again == views[0] for again in views), step
        found.setdefault(step, []).extend(views[0])
    return found


def final_tensors(run: Path) -> dict[str, Tensor]:
    return read_checkpoint(checkpoint_path(run / "checkpoints", NUM_STEPS)).tensors


def check_kills(folder: Path, attempts: list[dict[str, Any]]) -> None:
    *killed, last = attempts
    assert [attempt["status"] for attempt in killed] == [-signal.SIGKILL] * NUM_KILLS, attempts
    assert last["status"] == 0, last
    assert {attempt["kill"][0] for attempt in killed} == set(PLACES)
    assert sum(attempt["after"] > attempt["before"] for attempt in killed) > NUM_KILLS // 3  # most get somewhere
    for attempt in killed:
        # A killed write costs no checkpoint, and what it left is cleared away by the next one.
        assert attempt["after"] >= attempt["before"]
        files = [name for name in attempt["files"] if "milestone" not in name]
        assert len([name for name in files if name.endswith(".tmp")]) <= 1
        assert len([name for name in files if name.endswith(".safetensors")]) <= 3
    for attempt in attempts:
        resumed_at = f"step_{attempt['before']:08d}."
        assert ("resume  " in attempt["text"]) == (attempt["before"] > 0)
        assert attempt["before"] == 0 or resumed_at in attempt["text"]
        assert "set aside" not in attempt["text"]  # nothing is ever damaged
        assert "Traceback" not in attempt["text"]
    straight, resumed = folder / "straight", folder / "killed"
    names = [sorted(path.name for path in (at / "run" / "checkpoints").iterdir()) for at in (straight, resumed)]
    assert names[0] == names[1]


def check_same_result(folder: Path) -> None:
    straight, resumed = folder / "straight", folder / "killed"
    entries = [[[entry[name] for name in SAME] for entry in lines(at / "run" / "metrics.jsonl")] for at in (straight, resumed)]
    assert [entry[0] for entry in entries[0]] == list(range(1, NUM_STEPS + 1))
    assert entries[0] == entries[1]
    assert learnt_from(straight / "notes.jsonl") == learnt_from(resumed / "notes.jsonl")
    one, two = final_tensors(straight / "run"), final_tensors(resumed / "run")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_twenty_kills_in_a_row_change_nothing(tmp_path: Path) -> None:
    """Losses, samples, masks and weights are bit for bit those of an uninterrupted run.

    Killed before and between steps, in the middle of a log line and of a checkpoint's file, before and after its renaming, and
    by the clock; while every write is slow, so that training goes on meanwhile.
    """
    attempts = kill_and_resume(tmp_path, seed=1)
    check_kills(tmp_path, attempts)
    check_same_result(tmp_path)
    milestones = [name for name in attempts[-1]["files"] if "milestone" in name]
    assert milestones == ["step_00000029.milestone.safetensors", "step_00000057.milestone.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_more_kills_at_other_moments_change_nothing(tmp_path: Path, seed: int) -> None:
    check_kills(tmp_path, kill_and_resume(tmp_path, seed))
    check_same_result(tmp_path)


@pytest.mark.slow
def test_twenty_restarts_of_whole_programs_with_readers_change_nothing(tmp_path: Path) -> None:
    """The program itself, killed from outside while its reader process lives on, as by a machine that runs out of memory."""
    flags = [*KILLED_FLAGS, "--data.num_workers", "1", "--data.batch_size_per_process", "64", "--run.save_every_steps", "3"]
    folders = {name: tmp_path / name for name in ("straight", "killed")}

    def start(name: str) -> subprocess.Popen[bytes]:
        folders[name].mkdir(exist_ok=True)
        command = [sys.executable, PROGRAM, "one", str(folders[name] / "notes.jsonl"), "0"]
        with (folders[name] / "output.txt").open("wb") as output:  # no pipe: the readers of a killed program hold it open
            return subprocess.Popen(
                [*command, "--output_dir", str(folders[name] / "run"), *flags], env=ENVIRONMENT, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    assert start("straight").wait(300) == 0
    draw = random.Random(5)
    notes, printed = folders["killed"] / "notes.jsonl", folders["killed"] / "output.txt"
    for number in range(NUM_KILLS):
        wanted = (len(lines(notes)) if notes.exists() else 0) + draw.randint(1, 4)
        process = start("killed")
        deadline = time.monotonic() + 120
        while (not notes.exists() or notes.read_bytes().count(b"\n") < wanted) and time.monotonic() < deadline:
            assert process.poll() is None, (number, printed.read_text())
            time.sleep(0.002)
        time.sleep(0.05 * draw.random())
        process.kill()
        process.wait()
    assert start("killed").wait(300) == 0, printed.read_text()
    assert "resume  " in printed.read_text()
    check_same_result(tmp_path)


def run_processes(folder: Path, count: int, stop_after: int, flags: list[str]) -> tuple[int, str]:
    """Trains with several processes until a step; gives the exit status, and what they printed."""
    launcher = [sys.executable]
    if count > 1:
        launcher = [*LAUNCH, "--multi_gpu", "--num_machines", "1", "--num_processes", str(count), "--mixed_precision", "no",
                    "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip
    folder.mkdir(exist_ok=True)
    command = [*launcher, PROGRAM, "one", str(folder / "notes.jsonl"), str(stop_after), "--output_dir", str(folder / "run")]
    each = ["--data.batch_size_per_process", str(48 // count)]
    done = subprocess.run([*command, *flags, *each], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    text = done.stdout + done.stderr
    assert stop_after == 0 or f"stopped after step {stop_after}" in text, text
    return done.returncode, text


@pytest.mark.slow
def test_one_two_four_and_one_process_go_on_with_the_same_global_batches(tmp_path: Path) -> None:
    """Stopped and continued with other numbers of processes; batches equal, losses equal up to the order of float32 sums."""
    flags = [*FLAGS, "--num_steps", "40"]
    assert run_processes(tmp_path / "straight", 1, 0, flags)[0] == 0
    for count, stop_after in ((1, 9), (2, 20), (4, 31)):
        status, text = run_processes(tmp_path / "changed", count, stop_after, flags)
        assert status != 0
        assert "set aside" not in text
    assert run_processes(tmp_path / "changed", 1, 0, flags)[0] == 0
    one, many = (lines(tmp_path / name / "run" / "metrics.jsonl") for name in ("straight", "changed"))
    assert [entry["step"] for entry in one] == [entry["step"] for entry in many] == list(range(1, 41))
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(one, many, strict=True)) < 1e-5
    assert learnt_from(tmp_path / "straight" / "notes.jsonl") == learnt_from(tmp_path / "changed" / "notes.jsonl")


@pytest.mark.slow
def test_two_processes_end_together_when_a_checkpoint_cannot_be_written_or_the_folder_is_in_use(tmp_path: Path) -> None:
    """One line from the first process; none of them is left alone in the middle of a collective."""
    flags = [*FLAGS, "--num_steps", "400", "--run.save_every_steps", "2"]
    run_processes(tmp_path, 1, 1, flags)
    folder = tmp_path / "run" / "checkpoints"
    shutil.rmtree(folder)
    folder.write_text("a file where the folder should be")
    status, text = run_processes(tmp_path, 2, 0, flags)
    assert status != 0
    assert text.count("error: cannot write the checkpoint") == 1, text
    assert "RuntimeError" not in text
    with lock_run_folder(tmp_path / "run"):
        status, text = run_processes(tmp_path, 2, 0, flags)
    assert status != 0
    assert text.count("is in use by another program") == 1, text
    assert "RuntimeError" not in text


# ------------------------------------------------------------------------------------ what users meet: one line, exit status 2

SHORT = ("--data.batch_size_per_process", "8", "--data.num_workers", "0", "--num_steps", "6", "--run.save_every_steps", "2",
         "--optim.warmup_epochs", "0")  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.usefixtures("fresh_accelerator")
def test_a_full_disk_ends_the_run_and_the_run_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], step: int
) -> None:
    """At a step in the middle, and at the last one: then the end has to wait for the write to learn of it."""
    folder = tmp_path / "run" / "checkpoints"

    def full(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        time.sleep(0.05)
        if path.name.startswith(f".{checkpoint_path(folder, step).name}"):
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path, metadata)

    monkeypatch.setattr(training.checkpoint, "save_file", full)
    message = refused(capfd, monkeypatch, "--output_dir", str(tmp_path / "run"), *TINY_RUN, *SHORT)
    assert message.startswith(f"error: cannot write the checkpoint {checkpoint_path(folder, step)}: [Errno 28] No space left")
    assert sorted(contents(folder)) == [checkpoint_path(folder, earlier).name for earlier in (2, 4) if earlier < step]
    monkeypatch.setattr(training.checkpoint, "save_file", save_file)
    assert run_here(monkeypatch, tmp_path / "run", *SHORT, "--resume", "auto") == 0
    assert f"resume  {checkpoint_path(folder, step - 2)}" in capfd.readouterr().out


@pytest.fixture
def short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Path:
    assert run_here(monkeypatch, tmp_path / "run", *SHORT) == 0
    capfd.readouterr()
    return tmp_path / "run"


@pytest.mark.usefixtures("fresh_accelerator")
def test_checkpoints_of_newer_programs_and_other_models_end_in_a_clear_line_and_stay(
    short_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = short_run / "checkpoints"
    wider = ("--model.embed_dim", "64")
    assert run_here(monkeypatch, tmp_path / "wider", *SHORT, *wider) == 0
    capfd.readouterr()
    checkpoint_path(folder, 8).write_bytes(checkpoint_path(tmp_path / "wider" / "checkpoints", 6).read_bytes())
    again = ("--output_dir", str(short_run), *TINY_RUN, *SHORT, "--resume", "auto")
    before = contents(folder)
    message = refused(capfd, monkeypatch, *again)
    assert "is of another model: with other shapes" in message
    assert "start a new run with another --output_dir" in message
    assert contents(folder) == before

    newer = {"checkpoint": json.dumps({"version": 2, "layout": "unheard of"})}
    save_file({"weights": torch.zeros(3)}, checkpoint_path(folder, 8), metadata=newer)
    before = contents(folder)
    message = refused(capfd, monkeypatch, *again)
    assert "step_00000008.safetensors: has format 2, this program reads up to 1: continue with the newer version" in message
    assert contents(folder) == before


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_second_program_is_refused_before_it_touches_a_damaged_checkpoint(
    short_run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = short_run / "checkpoints"
    newest = checkpoint_path(folder, 6)
    newest.write_bytes(newest.read_bytes()[:-1])
    before = contents(folder)
    again = ("--output_dir", str(short_run), *TINY_RUN, *SHORT, "--resume", "auto")
    program = (
        "import sys; from pathlib import Path; from training.run import lock_run_folder; "
        "lock = lock_run_folder(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(short_run)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    first.stdout.readline()
    assert "is in use by another program" in refused(capfd, monkeypatch, *again)
    assert contents(folder) == before
    first.communicate()
    assert run_here(monkeypatch, short_run, *SHORT, "--resume", "auto") == 0
    assert "set aside as step_00000006.damaged" in capfd.readouterr().out
    assert newest_checkpoint(folder)[1] == {}


@pytest.mark.usefixtures("fresh_accelerator")
def test_the_clock_asks_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--run.save_every_steps", "100", "--run.save_every_minutes", "1e-9", "--run.keep_checkpoints", "9")
    assert run_here(monkeypatch, tmp_path / "run", *SHORT, *flags) == 0
    assert len(contents(tmp_path / "run" / "checkpoints")) == 6
    capfd.readouterr()

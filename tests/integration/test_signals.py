"""Signals that reach a launcher, and not its processes; a second one in the middle of a write; output that nobody reads; a
terminal that is closed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.test_many_machines import descendants
from training.checkpoint import checkpoint_path, newest_checkpoint

ROOT = Path(__file__).parent.parent.parent
TINY_RUN = (
    "--data.train", "digits", "--model.name", "tiny", "--model.img_size", "16", "16", "--model.patch_size", "4",
    "--model.in_chans", "1", "--model.embed_dim", "16", "--model.depth", "1", "--model.num_heads", "2",
    "--model.decoder_embed_dim", "16", "--model.decoder_depth", "1", "--model.decoder_num_heads", "2",
    "--optim.warmup_epochs", "0", "--run.dtype", "float32", "--run.device", "cpu", "--run.log_every_steps", "1",
    "--data.num_workers", "0", "--data.batch_size_per_process", "16",
)  # fmt: skip
FOREVER = ("--num_steps", "1000000", "--run.save_every_steps", "1000000")
ENVIRONMENT = os.environ | {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no",
              "--dynamo_backend", "no")  # fmt: skip
LAUNCHERS = {
    "accelerate launch, 1 process": (*ACCELERATE, "--num_processes", "1"),
    "accelerate launch, 2 processes": (*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}


@pytest.fixture(autouse=True)
def hangup_is_not_ignored() -> Iterator[None]:
    """Where the tests run under nohup, what they start would ignore SIGHUP too; of a handler it inherits nothing."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


def command(
    output: Path, *flags: str, launcher: tuple[str, ...] = (sys.executable,), program: str = "pretrain/main.py"
) -> list[str]:
    return [*launcher, program, "--output_dir", str(output), *TINY_RUN, *flags]


def steps(output: Path) -> list[int]:
    """Of the complete lines: the program may be writing."""
    path = output / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def wait_until(what: str, is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert process.poll() is None, f"ended before: {what}"
        assert time.monotonic() < deadline, f"not in two minutes: {what}"
        time.sleep(0.02)


def wait_for_end(pids: list[int]) -> None:
    """Waits for processes that are not this one's children any more."""
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill_all(pids: list[int]) -> None:
    for pid in filter(is_alive, pids):
        os.kill(pid, signal.SIGKILL)


def end_by(process: subprocess.Popen[bytes], output: Path, send: Callable[[int], None], number: signal.Signals) -> None:
    """Sends a signal when the run has done three steps; returns when the launcher and all that it has started have ended."""
    below: list[int] = []
    try:
        wait_until("step 3", lambda: len(steps(output)) >= 3, process)
        below = descendants(process.pid)
        send(number)
        process.wait(60)
        wait_for_end(below)
    finally:
        kill_all([process.pid, *below])
        process.wait()


# ------------------------------------------------------------------------------------------------------------- the launcher


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("accelerate launch, 1 process", signal.SIGTERM),  # which ends it, and is not handed on
        pytest.param("accelerate launch, 1 process", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("accelerate launch, 1 process", signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("accelerate launch, 1 process", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("accelerate launch, 1 process", signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param("accelerate launch, 2 processes", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("accelerate launch, 2 processes", signal.SIGINT, marks=pytest.mark.slow),
        ("accelerate launch, 2 processes", signal.SIGUSR1),
        pytest.param("torchrun", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("torchrun", signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("torchrun", signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param("torchrun", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_launcher_alone_lets_the_run_save_and_end(
    tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    output, printed = tmp_path / "run", tmp_path / "printed.txt"
    with printed.open("wb") as file:
        process = subprocess.Popen(
            command(output, *FOREVER, launcher=LAUNCHERS[launcher]), env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    end_by(process, output, process.send_signal, number)
    text = printed.read_text(encoding="utf-8")
    last = steps(output)[-1]
    assert f"stopped after step {last}; the same command with --resume auto goes on from there" in text, text
    assert "ended at once" not in text
    assert checkpoint_path(output / "checkpoints", last).exists()
    handed_on = number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) and launcher != "accelerate launch, 1 process"
    assert ("the launcher has ended without its processes" in text) == (not handed_on), text


def test_ctrl_c_in_a_terminal_is_one_request_though_the_launcher_ends_of_it(tmp_path: Path) -> None:
    """It reaches the launcher and the run; the launcher's end must not count as the second one, however long the save takes."""
    program = tmp_path / "program.py"
    program.write_text(SLOW_PROGRAM.format(root=str(ROOT), folder=str(tmp_path), seconds=4.0, whole=0))
    output, printed = tmp_path / "run", tmp_path / "printed.txt"
    with printed.open("wb") as file:
        process = subprocess.Popen(
            command(output, *FOREVER, launcher=LAUNCHERS["accelerate launch, 1 process"], program=str(program)),
            env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    end_by(process, output, lambda number: os.killpg(process.pid, number), signal.SIGINT)
    text = printed.read_text(encoding="utf-8")
    assert "ended at once" not in text
    assert f"stopped after step {steps(output)[-1]}" in text, text
    assert checkpoint_path(output / "checkpoints", steps(output)[-1]).exists()


# ------------------------------------------------------------------------------------ a second request in the middle of a write

SLOW_PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
import training.openmp
from pathlib import Path
import training.checkpoint
from pretrain.main import main

save_file, written = training.checkpoint.save_file, 0

def slow(tensors, path, metadata):  # half of it is there, then the disk is slow
    global written
    save_file(tensors, path, metadata)
    written += 1
    if written > {whole}:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        Path({folder!r}, "half").touch()
        time.sleep({seconds})
        path.write_bytes(content)

training.checkpoint.save_file = slow
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_second_request_in_the_middle_of_a_write_costs_no_earlier_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    """The first request waits for the write, to save once more; the second does not. The run goes on from the one before."""
    program = tmp_path / "program.py"
    program.write_text(SLOW_PROGRAM.format(root=str(ROOT), folder=str(tmp_path), seconds=600.0, whole=1))
    output, printed = tmp_path / "run", tmp_path / "printed.txt"
    every = ("--run.save_every_steps", "4", "--run.keep_checkpoints", "1", "--num_steps", "30", "--resume", "auto")
    with printed.open("wb") as file:
        process = subprocess.Popen(
            command(output, *every, program=str(program)), env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT
        )
    folder = output / "checkpoints"
    try:
        wait_until("half of the second checkpoint", (tmp_path / "half").exists, process)
        (rubbish,) = folder.glob(".*.tmp")
        earlier = checkpoint_path(folder, 4).read_bytes()
        process.send_signal(number)
        time.sleep(1)
        assert process.poll() is None  # it waits for the write
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        kill_all([process.pid])
        process.wait()
    assert f"{number.name} again: ended at once" in printed.read_text(encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir()) == [rubbish.name, checkpoint_path(folder, 4).name]
    assert checkpoint_path(folder, 4).read_bytes() == earlier
    newest, complaints = newest_checkpoint(folder)
    assert newest is not None
    assert (newest.step, complaints) == (4, {})

    done = subprocess.run(command(output, *every), env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"resume  {checkpoint_path(folder, 4)}" in done.stdout
    assert steps(output) == list(range(1, 31))
    assert [path.name for path in folder.iterdir()] == [checkpoint_path(folder, 30).name]


# ------------------------------------------------------------------------------------------------ output that nobody reads


@pytest.mark.parametrize("how", ["the reader has ended", "the reader ends of the same Ctrl-C"])
def test_a_run_whose_output_nobody_reads_goes_on_and_saves(tmp_path: Path, how: str) -> None:
    """`python pretrain/main.py 2>&1 | tee log`, and Ctrl-C: tee is gone before the run has saved."""
    output = tmp_path / "run"
    status = tmp_path / "status"
    shell = '"$@" 2>&1 | tee "$LOG"; echo "${PIPESTATUS[0]}" > "$STATUS"'
    process = subprocess.Popen(
        ["bash", "-c", f"trap : INT; {shell}", "shell", *command(output, *FOREVER)],
        env=ENVIRONMENT | {"LOG": str(tmp_path / "log"), "STATUS": str(status)}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    below: list[int] = []
    try:
        wait_until("step 3", lambda: len(steps(output)) >= 3, process)
        below = descendants(process.pid)
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in below}
        (tee,) = (pid for pid, name in names.items() if name == "tee")
        (run,) = (pid for pid, name in names.items() if name.startswith("python"))
        if how == "the reader has ended":
            os.kill(tee, signal.SIGTERM)
            so_far = len(steps(output))
            wait_until("ten steps more", lambda: len(steps(output)) >= so_far + 10, process)
            os.kill(run, signal.SIGINT)
        else:
            os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        wait_for_end(below)
    finally:
        kill_all([process.pid, *below])
        process.wait()
    assert status.read_text() == f"{128 + signal.SIGINT}\n"
    assert checkpoint_path(output / "checkpoints", steps(output)[-1]).exists()


# --------------------------------------------------------------------------------------------------- a terminal that is closed

TERMINAL = """
import os, pty, sys, threading
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
def show():
    while text := os.read(terminal, 1000):
        os.write(1, text)
threading.Thread(target=show, daemon=True).start()
sys.stdin.read()
os.dup2(os.open(os.devnull, os.O_RDONLY), terminal)
print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
"""Runs a command in a terminal of its own, which it closes at the end of its input."""


@pytest.mark.parametrize("goes_on", [False, True], ids=["python", "nohup python"])
def test_a_run_whose_terminal_is_closed_saves_and_ends_unless_it_was_told_to_go_on(tmp_path: Path, goes_on: bool) -> None:
    output, printed = tmp_path / "run", tmp_path / "printed.txt"
    nohup = ("nohup",) if goes_on else ()
    run = command(
        output, *FOREVER, "--data.num_workers", "2", launcher=(*nohup, sys.executable), program=str(ROOT / "pretrain/main.py")
    )
    with printed.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", TERMINAL, *run],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            cwd=tmp_path,
        )
    below: list[int] = []
    try:
        wait_until("step 3", lambda: len(steps(output)) >= 3, process)
        below = descendants(process.pid)
        (leader,) = (pid for pid in below if os.getsid(pid) == pid)
        assert len(below) == 3  # the readers are in the terminal's group too
        assert process.stdin is not None
        process.stdin.close()
        time.sleep(0.5)
        if is_alive(leader):
            os.killpg(leader, signal.SIGHUP)  # a shell sends it once more, to all of the group
        if goes_on:
            so_far = len(steps(output))
            wait_until("ten steps more", lambda: len(steps(output)) >= so_far + 10, process)
            os.kill(leader, signal.SIGINT)
        process.wait(60)
        wait_for_end(below)
    finally:
        kill_all([process.pid, *below])
        process.wait()
    status = 128 + (signal.SIGINT if goes_on else signal.SIGHUP)
    assert printed.read_text(encoding="utf-8", errors="replace").endswith(f"status {status}\n")
    assert checkpoint_path(output / "checkpoints", steps(output)[-1]).exists()

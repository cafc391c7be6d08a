"""Launches that went wrong are refused in one line; a lost process is told from other errors."""

import errno
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist
from accelerate import Accelerator

import training.unattended
from data.errors import DataError
from pretrain.config import PretrainConfig
from training.cli import EXIT_USER_ERROR, UserError, user_errors
from training.launch import (
    EXIT_LOST_CONTACT,
    check_launch,
    code_hash,
    contact,
    describe_differences,
    facts_of_launch,
    facts_of_start,
    lost_contact,
    mistakes_of_one,
    taken_apart,
)
from training.one_process import OTHER_LAUNCHERS, require_one_process
from training.storage import private_folder
from training.unattended import LastingOutput, has_launcher, unattended

ROOT = Path(__file__).parent.parent.parent

GLOO_CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error [10.0.0.7]:34567: Connection reset by peer. This "
    "may indicate a possible application crash on rank 1 or a network set up issue."
)
GLOO_LATE = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WORLD_SIZE": "4"}, "started 4 processes (WORLD_SIZE), but this one belongs to a group of 1"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, "srun started 8 copies of this program (SLURM_STEP_NUM_TASKS)"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started 2 copies"),
    ],
)
def test_copies_that_believe_to_be_alone_are_refused(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        check_launch(1, environment)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_launch_that_is_right_is_not_refused() -> None:
    assert check_launch(1, {}) is None
    assert check_launch(4, {"WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}) is None  # a task per machine
    assert check_launch(1, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}) is None
    warning = check_launch(1, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"})  # in a batch script, without srun
    assert warning is not None
    assert "has 8 tasks, but this run is one process" in warning


@pytest.mark.parametrize("name", ["WORLD_SIZE", *OTHER_LAUNCHERS])
def test_copies_of_a_program_that_is_one_process_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("WORLD_SIZE", *OTHER_LAUNCHERS):
        monkeypatch.delenv(other, raising=False)
    require_one_process("scripts/x.py")
    for value in ("1", "no number"):
        monkeypatch.setenv(name, value)
        require_one_process("scripts/x.py")
    monkeypatch.setenv(name, "3")
    with pytest.raises(UserError) as caught:
        require_one_process("scripts/x.py")
    assert f"started 3 copies of scripts/x.py ({name}), and each would do the same work" in str(caught.value)
    assert "start it as `python scripts/x.py`" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_machine_may_have_of_its_own_is_no_fact_of_the_launch() -> None:
    facts = facts_of_launch(PretrainConfig())
    assert "--optim.base_lr" in facts
    assert "--run.log_every_steps" in facts  # an entry of the log is a collective
    assert not {"--data.train", "--run.cpu_threads", "--data.cache_dir"} & facts.keys()
    assert {"version of torch", "program (hash of its files)", "decoder of JPEG files"} <= facts.keys()
    start = facts_of_start({"manifest_hash": "a", "data.train": "/here"}, 100, 7)
    assert start == {"manifest_hash": "a", "number of steps": 100, "step to start from": 7}


def test_the_hash_of_the_program_changes_with_any_of_its_files(tmp_path: Path) -> None:
    for room in ("models", "training"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("x = 1\n")
    before = code_hash(tmp_path)
    assert code_hash(tmp_path) == before
    shutil.copytree(tmp_path, tmp_path / "elsewhere")
    assert code_hash(tmp_path / "elsewhere") == before
    (tmp_path / "training" / "a.py").write_text("x = 2\n")
    assert code_hash(tmp_path) != before


def test_differences_name_the_fact_the_processes_and_their_machines() -> None:
    everyone = [
        ("node1", {"--optim.base_lr": 0.1, "manifest_hash": "a"}),
        ("node1", {"--optim.base_lr": 0.1, "manifest_hash": "a"}),
        ("node2", {"--optim.base_lr": 0.2, "manifest_hash": "a"}),
    ]
    assert describe_differences(everyone) == "--optim.base_lr: 0.1 (process 0 on node1 and 1 more), 0.2 (process 2 on node2)"
    many = [("a", {str(number): 0 for number in range(9)}), ("b", {str(number): 1 for number in range(9)})]
    assert describe_differences(many).endswith("; and 6 more")
    assert describe_differences([("a", {"new": 1}), ("b", {})]) == "new: 1 (process 0 on a), nothing (process 1 on b)"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (GLOO_CLOSED, "connection reset by peer, [10.0.0.7]:34567"),
        (GLOO_LATE, "timed out waiting"),
        ("[/gloo/pair.cc:5] Application timeout caused pair closure", "timeout caused pair closure"),  # nobody has closed it
        ("Gloo connectFullMesh failed with [/gloo/pair.cc:1] no error", "connectfullmesh failed"),
        ("NCCL error in: x.cpp:1, remote process exited or there was a network error", "remote process exited"),
        ("The size of tensor a (3) must match the size of tensor b (4)", None),
        ("CUDA error: the launch timed out and was terminated; timed out waiting", None),
    ],
)
def test_a_lost_process_is_told_from_other_errors(monkeypatch: pytest.MonkeyPatch, message: str, expected: str | None) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lost_contact(RuntimeError(message)) == expected
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert lost_contact(RuntimeError(message)) is None


def test_lost_contact_is_one_line_with_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "checkpoints").mkdir()
    for step in (10, 20):
        (tmp_path / "checkpoints" / f"step_{step:08d}.safetensors").touch()
    with pytest.raises(SystemExit) as caught, contact(tmp_path, 10):
        raise RuntimeError(GLOO_CLOSED)
    assert caught.value.code == EXIT_LOST_CONTACT == 75
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error (process 1 on {socket.gethostname()}): lost contact with another process")
    assert "--resume auto; the last checkpoint is step_00000020.safetensors" in line
    with pytest.raises(SystemExit), contact(None, 7.5):
        raise RuntimeError(GLOO_LATE)
    line = capfd.readouterr().err
    assert "waited 7.5 minutes" in line
    assert "--run.timeout_minutes" in line
    with pytest.raises(RuntimeError, match="a bug"), contact(tmp_path, 10):
        raise RuntimeError("a bug")


@pytest.mark.parametrize(("name", "expected"), [("accelerate", True), ("accelerate-launch", True), ("wrapper.py", False)])
def test_only_a_launcher_s_end_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: bool) -> None:
    """A run that a shell or a scheduler's script has started goes on when that ends."""
    if not Path("/proc/self/cmdline").exists():
        pytest.skip("the parent's command cannot be read here")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    (tmp_path / name).write_text("print(flush=True); input()")
    command = [sys.executable, str(tmp_path / name), "launch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # it is no copy of this process any more
        monkeypatch.setattr("training.unattended.os.getppid", lambda: parent.pid)
        assert has_launcher() == expected
        parent.communicate(b"\n")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert has_launcher()


def test_output_whose_reader_has_gone_leads_nowhere_for_all_who_write_to_it() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        output = LastingOutput(stream)
        for _ in range(2):
            assert output.write("lost") == 4
            output.flush()
        os.write(writer, b"past the stream")
        assert output.fileno() == writer  # all else is the stream's


def test_a_reader_that_is_slow_loses_one_text_and_no_more() -> None:
    written = list[str]()

    class Slow(io.StringIO):
        def write(self, text: str, /) -> int:
            if not written:
                written.append("nothing")
                raise BlockingIOError
            written.append(text)
            return len(text)

    output = LastingOutput(Slow())
    assert [output.write(text) for text in ("lost", "read")] == [4, 4]
    assert written == ["nothing", "read"]


def test_a_launcher_that_ends_while_a_run_is_put_together_is_missed_when_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr("training.unattended.LOOK_S", 0.02)
    training.unattended._launcher.cache_clear()
    launcher = os.getppid()
    with unattended():
        monkeypatch.setattr("training.unattended.os.getppid", lambda: 1)
    assert launcher != 1
    asked = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: asked.set())
    try:
        with unattended():
            assert asked.wait(30)
    finally:
        signal.signal(signal.SIGUSR1, before)
        training.unattended._launcher.cache_clear()


def test_output_is_made_to_last_once_and_put_back() -> None:
    before = sys.stdout, sys.stderr
    with unattended():
        inside = sys.stdout, sys.stderr
        assert all(isinstance(stream, LastingOutput) for stream in inside)
        with unattended():
            assert (sys.stdout, sys.stderr) == inside
    assert (sys.stdout, sys.stderr) == before


def test_a_mistake_that_only_one_process_meets_is_told_by_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first process of a machine speaks at once, by `user_errors`; another waits first."""
    waited = list[float]()
    monkeypatch.setattr("training.launch.time.sleep", waited.append)
    mistakes = {
        "no shard": DataError("no shard"),
        "Permission denied: /x": PermissionError(errno.EACCES, "Permission denied", "/x"),
    }
    for number, (text, mistake) in enumerate(mistakes.items()):
        for rank, start in (("0", "error: "), ("1", f"error (process 1 on {socket.gethostname()}): ")):
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("LOCAL_RANK", rank)
            with pytest.raises(SystemExit) as caught, user_errors(), mistakes_of_one():
                raise mistake
            assert caught.value.code == EXIT_USER_ERROR
            assert capfd.readouterr().err == f"{start}{text}\n"
            assert waited == [3.0] * (number + int(rank))
    with pytest.raises(OSError, match="a bug"), user_errors(), mistakes_of_one():
        raise OSError("a bug")


class FirstProcess:
    """Of two machines."""

    num_processes = 2
    is_main_process = True


def test_the_file_that_all_look_for_does_not_stay_whatever_happens_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run folder that is not empty would be refused at the next start."""
    first = cast(Accelerator, FirstProcess())
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("training.storage.broadcast_object_list", lambda token: None)

    def lost(found: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
        assert found[0][0]
        assert list(tmp_path.iterdir())
        raise RuntimeError(GLOO_CLOSED)

    monkeypatch.setattr("training.storage.gather_object", lost)
    with pytest.raises(RuntimeError, match="reset by peer"):
        private_folder(tmp_path, first)
    assert not list(tmp_path.iterdir())

    monkeypatch.setattr("training.storage.gather_object", lambda found: [*found, (False, "node2")])
    warning = private_folder(tmp_path / "run", first)
    assert warning is not None
    assert "is not seen by 1 of 2 processes (process 1 on node2)" in warning

    def forbidden(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "exists", forbidden)
    assert private_folder(tmp_path / "run", first) is None  # whoever writes to the folder will tell


def test_a_group_of_processes_is_taken_apart_when_the_start_fails(tmp_path: Path) -> None:
    for error, is_left in ((SystemExit(2), False), (KeyError("a bug"), True)):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
        try:
            with pytest.raises(type(error)), taken_apart():
                raise error
            assert dist.is_initialized() == is_left
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def together(tmp_path: Path, body: str) -> list[tuple[int, str]]:
    """Runs a body on two real processes that are joined by Gloo; gives the exit status and stderr of each."""
    program = tmp_path / "program.py"
    head = f"""
        import os, sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from training.cli import UserError, user_errors
        from training.launch import contact, require_agreement
        from training.run import RunConfig, build_accelerator
        rank = int(os.environ["RANK"])
        with user_errors(every_process=True), contact(None, 0.2):
            accelerator = build_accelerator(RunConfig(device="cpu", timeout_minutes=0.2), Path({str(tmp_path)!r}))
    """
    program.write_text(textwrap.dedent(head) + textwrap.indent(textwrap.dedent(body), "    "))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                           "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(program)], env=common | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def test_processes_learn_together_what_differs_and_none_is_left_to_wait_for_one_that_ended(tmp_path: Path) -> None:
    results = together(
        tmp_path,
        """
        require_agreement(accelerator, {"--optim.base_lr": 0.1})
        try:
            require_agreement(accelerator, {"--optim.base_lr": 0.1, "step to start from": rank * 100})
        except UserError as error:
            print("refused:", error, file=sys.stderr)
        if rank == 1:
            raise KeyError("a bug")
        require_agreement(accelerator, {})
        """,
    )
    host = socket.gethostname()
    for _, error in results:
        (told,) = (line for line in error.splitlines() if line.startswith("refused:"))
        assert f"do not agree on step to start from: 0 (process 0 on {host}), 100 (process 1 on {host})" in told
        assert "base_lr" not in told
    assert [status for status, _ in results] == [EXIT_LOST_CONTACT, 1]
    survivor, failed = (error for _, error in results)
    assert "lost contact with another process" in survivor
    assert "Traceback" not in survivor
    assert "a bug" in failed


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_one_that_waits_for_it(tmp_path: Path) -> None:
    results = together(
        tmp_path,
        """
        if rank == 1:
            import time
            time.sleep(20)
            os._exit(0)
        require_agreement(accelerator, {})
        """,
    )
    status, error = results[0]
    assert status == EXIT_LOST_CONTACT, error
    assert "waited 0.2 minutes for another process" in error
    assert "Traceback" not in error

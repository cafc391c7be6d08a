"""A run on two machines, one of which is lost: by the commands of docs/cluster.md, on pretended machines.

The machines are network namespaces, joined by a pair of virtual network cards, where this is allowed (root on Linux); so one
can be cut off as if its cable were pulled. Elsewhere both are this machine's loopback, and only killing is tested.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BATCH, STEPS = 64, 60
TINY_RUN = (
    "--data.train", "digits", "--model.name", "tiny", "--model.img_size", "16", "16", "--model.patch_size", "4",
    "--model.in_chans", "1", "--model.embed_dim", "32", "--model.depth", "2", "--model.num_heads", "2",
    "--model.decoder_embed_dim", "32", "--model.decoder_depth", "2", "--model.decoder_num_heads", "2",
    "--optim.warmup_epochs", "0.1", "--optim.base_lr", "1e-2", "--run.dtype", "float32", "--run.device", "cpu",
    "--run.log_every_steps", "1", "--data.num_workers", "0", "--data.batch_size_per_process", "16",
    "--run.save_every_steps", "10", "--num_steps", str(STEPS), "--global_batch_size", str(BATCH),
)  # fmt: skip
TIMEOUT_MINUTES = 0.5
"""Of collectives: a machine that was cut off is missed for so long."""
SLACK_S = 90
"""For everything that is not waiting: starting Python on a busy machine, ending it."""


@dataclass
class Machine:
    """A pretended machine."""

    number: int
    address: str
    card: str
    """Name of its network card."""
    namespace: str | None = None
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, command: str, port: int, head: str, prepare: str = "", **variables: str) -> subprocess.Popen[str]:
        """Starts a command of the shell, with what docs/cluster.md says about each machine in variables."""
        environment = os.environ | variables | {
            "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": self.card, "OMP_NUM_THREADS": "1", "MACHINE": str(self.number),
            "HEAD": head, "PORT": str(port), "IS_HEAD": str(int(self.number == 0)), "ADDRESS": self.address,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        process = subprocess.Popen(
            [*inside, "bash", "-c", prepare + command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def kill(self) -> None:
        """Switches the machine off: launchers and training processes end at once, without a word."""
        for process in self.processes:
            for pid in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def set_link(self, state: str) -> None:
        assert self.namespace is not None
        subprocess.run(["ip", "-n", self.namespace, "link", "set", self.card, state], check=True)


def descendants(pid: int) -> list[int]:
    """All processes below a process."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


def joined_namespaces() -> tuple[Machine, Machine] | None:
    """Two namespaces joined by a cable; None where that is not allowed."""
    if shutil.which("ip") is None:
        return None
    names = [f"mae{os.getpid()}{letter}" for letter in "ab"]
    cards = [f"v{os.getpid()}{letter}" for letter in "ab"]
    commands = [f"netns add {names[0]}", f"netns add {names[1]}", f"link add {cards[0]} type veth peer name {cards[1]}"]
    for number, (name, card) in enumerate(zip(names, cards, strict=True)):
        commands += [
            f"link set {card} netns {name}", f"-n {name} addr add 10.77.0.{number + 1}/24 dev {card}",
            f"-n {name} link set {card} up", f"-n {name} link set lo up",
        ]  # fmt: skip
    for command in commands:
        if subprocess.run(["ip", *command.split()], capture_output=True).returncode != 0:
            remove(names)
            return None
    one, two = (Machine(number, f"10.77.0.{number + 1}", cards[number], names[number]) for number in range(2))
    return one, two


def remove(namespaces: list[str]) -> None:
    """A namespace takes its network card with it, and a card its peer."""
    for name in namespaces:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    pair = joined_namespaces() or (Machine(0, "127.0.0.1", "lo"), Machine(1, "127.0.0.1", "lo"))
    yield pair
    for machine in pair:
        machine.kill()
        for process in machine.processes:
            process.communicate()
    remove([machine.namespace for machine in pair if machine.namespace])


def documented(first_word: str, output: Path, *flags: str) -> str:
    """The command of docs/cluster.md that starts so, with other flags for the program."""
    blocks = re.findall(r"```bash\n(.*?)```", Path("docs/cluster.md").read_text(encoding="utf-8"), re.DOTALL)
    command = next(block for block in blocks if re.search(rf"^{first_word} ", block, re.MULTILINE))
    launcher = command[: command.index("pretrain/main.py")]
    return f"{launcher} pretrain/main.py --output_dir {output} --resume auto {' '.join((*TINY_RUN, *flags))}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_both(
    machines: tuple[Machine, Machine], command: str, prepare: tuple[str, str] = ("", "")
) -> list[subprocess.Popen[str]]:
    port, head = free_port(), machines[0].address
    return [machine.start(command, port, head, text) for machine, text in zip(machines, prepare, strict=True)]


def finish(process: subprocess.Popen[str], timeout_s: float) -> tuple[int, str]:
    text, _ = process.communicate(timeout=timeout_s)
    return process.returncode, text


def losses(output: Path) -> dict[int, float]:
    """Of the complete lines: the program may be writing."""
    path = output / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return {int(entry["step"]): entry["loss"] for entry in map(json.loads, lines)}


def wait_for_step(output: Path, step: int, process: subprocess.Popen[str]) -> None:
    for _ in range(1800):
        if max(losses(output), default=0) >= step:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached in three minutes")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run of one process that nothing disturbs."""
    output = tmp_path_factory.mktemp("straight") / "run"
    command = [sys.executable, "pretrain/main.py", "--output_dir", str(output), *TINY_RUN]
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return losses(output)


def assert_same(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-4


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_when_a_machine_is_lost_the_others_end_in_time_and_the_run_goes_on(
    machines: tuple[Machine, Machine], straight: dict[int, float], tmp_path: Path, how: str
) -> None:
    output = tmp_path / "run"
    if how == "cut off" and machines[1].namespace is None:
        pytest.skip("network namespaces are not allowed here: nothing can be cut off")
    command = documented("accelerate launch", output, "--run.timeout_minutes", str(TIMEOUT_MINUTES))
    first, second = start_both(machines, command)
    wait_for_step(output, 22, first)
    if how == "killed":
        machines[1].kill()
    else:
        machines[1].set_link("down")
    status, text = finish(first, 60 * TIMEOUT_MINUTES + SLACK_S)
    assert status != 0
    assert re.search(
        r"^.*error \(process [01] on .*--resume auto; the last checkpoint is step_000000[2-5]0", text, re.MULTILINE
    ), text
    stopped_at = max(losses(output))
    assert stopped_at < STEPS, "lost too late to show anything"
    status, text = finish(second, 60 * TIMEOUT_MINUTES + SLACK_S)
    assert status != 0
    if how == "cut off":
        machines[1].set_link("up")

    for process in start_both(machines, command):
        status, text = finish(process, 180)
        assert status == 0, text
    assert_same(losses(output), straight)


def test_an_elastic_run_goes_on_with_one_machine(
    machines: tuple[Machine, Machine], straight: dict[int, float], tmp_path: Path
) -> None:
    """Half the processes take twice the micro-batches: the same run."""
    output = tmp_path / "run"
    command = documented("torchrun", output, "--run.timeout_minutes", str(TIMEOUT_MINUTES))
    first, _ = start_both(machines, command)
    wait_for_step(output, 22, first)
    machines[1].kill()
    status, text = finish(first, 60 * TIMEOUT_MINUTES + 3 * SLACK_S)
    assert status == 0, text
    assert "64 = 16 per process x 4 processes x 1 accumulated" in text
    assert "64 = 16 per process x 2 processes x 2 accumulated" in text
    assert re.search(r"resume  .*step_000000[2-5]0.safetensors", text), text
    assert_same(losses(output), straight)


def test_machines_that_do_not_share_the_run_folder_say_so_and_go_on_from_the_same_step_only(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """Each machine has a folder of its own under the same path."""
    if machines[1].namespace is None:
        pytest.skip("network namespaces are not allowed here: both machines see the same folders")
    output = tmp_path / "storage" / "run"
    output.parent.mkdir()
    private = tmp_path / "private"
    private.mkdir()
    prepare = ("", f"mount --bind {private} {output.parent} && ")  # seen in this namespace alone
    short = ("--run.timeout_minutes", str(TIMEOUT_MINUTES), "--num_steps")
    command = documented("accelerate launch", output, *short, "12")
    texts = [finish(process, 180) for process in start_both(machines, command, prepare)]
    assert [status for status, _ in texts] == [0, 0], texts
    assert re.search(r"warning: .*storage.* is not seen by 2 of 4 processes \(process 2 on ", texts[0][1]), texts[0][1]
    assert (output / "checkpoints" / "step_00000012.safetensors").exists()
    assert not (private / "run" / "checkpoints").exists()

    command = documented("accelerate launch", output, *short, "12")
    texts = [finish(process, 180) for process in start_both(machines, command, prepare)]
    assert all(status != 0 for status, _ in texts)
    assert "checkpoints of different steps there (12, 12, None, None)" in texts[0][1], texts[0][1]

    shutil.copytree(output, private / "run")
    texts = [finish(process, 180) for process in start_both(machines, command, prepare)]
    assert [status for status, _ in texts] == [0, 0], texts

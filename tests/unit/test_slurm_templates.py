"""The templates for SLURM, run by a pretended srun and scontrol that start the nodes' processes on this machine.

There is no SLURM here: that the real srun hands USR1 on to all processes of a step is taken from its manual.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.test_many_machines import descendants
from training.checkpoint import checkpoint_path

TEMPLATES = Path("scripts/slurm")
SBATCH = sorted(path.name for path in TEMPLATES.glob("*.sbatch"))

SRUN = """
import os, signal, subprocess, sys
from pathlib import Path
arguments = sys.argv[1:]
while arguments[0].startswith("-"):
    arguments.pop(0)
nodes = [
    subprocess.Popen(arguments, start_new_session=True,
                     env=os.environ | {"SLURM_NODEID": str(number), "SLURMD_NODENAME": f"node{number}"})
    for number in range(int(os.environ["SLURM_JOB_NUM_NODES"]))
]

def tell(number, node):  # every process of a node, as slurmstepd does: here they share a session
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(path.read_text().rsplit(")", 1)[1].split()[3])
            if session == node.pid:
                os.kill(int(path.parent.name), number)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has just ended

def tell_all(number, _frame):
    for node in nodes:
        tell({signal.SIGUSR2: signal.SIGTERM}.get(number, number), node)

def end(*_):
    tell_all(signal.SIGKILL, None)

signal.signal(signal.SIGUSR1, tell_all)
signal.signal(signal.SIGUSR2, tell_all)  # this test's word for preemption, of which srun itself is not told
signal.signal(signal.SIGTERM, end)
print("srun is ready", flush=True)
statuses = []
for node in nodes:
    statuses.append(abs(node.wait()))
    tell(signal.SIGKILL, node)  # what a task leaves behind
sys.exit(max(statuses))
"""

SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print(os.environ.get("HOSTNAMES", "node0 node1").replace(" ", chr(10)))
elif sys.argv[1] == "requeue":
    print(f"requeued {sys.argv[2]}", flush=True)
else:
    sys.exit(f"scontrol {sys.argv[1:]}")
"""

LAUNCHER = """
import json, os, sys
with open(os.environ["RECORD"] + os.environ["SLURM_NODEID"], "w") as file:
    json.dump({"argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "env": dict(os.environ)}, file)
sys.exit(int(os.environ.get("LAUNCHER_STATUS", "0")))
"""

STUBBORN = """
import os, signal, subprocess, sys, time
training = [subprocess.Popen([sys.executable, "-c", '''
import signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("training", flush=True)
time.sleep(60)
''']) for _ in range(2)]
for process in training:
    process.wait()
time.sleep(5)  # an elastic launcher starts others; it is to be ended before
print("starting again", flush=True)
"""


def program(folder: Path, name: str, code: str) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{code}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes, with pretended programs first in PATH."""
    shims = tmp_path / "shims"
    shims.mkdir()
    program(shims, "srun", SRUN)
    program(shims, "scontrol", SCONTROL)
    for launcher in ("accelerate", "torchrun"):
        program(shims, launcher, LAUNCHER)
    job = {
        "PATH": f"{shims}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(Path.cwd()), "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "8",
        "RECORD": str(tmp_path / "node"), "SHIMS": str(shims),
    }  # fmt: skip
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | job


def submit(template: str, cluster: dict[str, str], *flags: str) -> subprocess.Popen[str]:
    """Starts a batch script as slurmd does: a copy of it, elsewhere."""
    copy = Path(cluster["SHIMS"]) / "slurm_script"
    copy.write_text((TEMPLATES / template).read_text(encoding="utf-8"), encoding="utf-8")
    return subprocess.Popen(
        ["bash", str(copy), *flags], cwd="/", env=cluster, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def finish(job: subprocess.Popen[str], timeout_s: float = 30) -> tuple[int, str]:
    """Waits for a job; gives its exit status and what it printed. One that does not end is killed with all below it."""
    try:
        text, _ = job.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)  # the pretended srun then kills its nodes
        text, _ = job.communicate()
        raise AssertionError(f"the job did not end in {timeout_s} s: {text}") from None
    return job.returncode, text


def recorded(cluster: dict[str, str], node: int) -> tuple[list[str], dict[str, str]]:
    record = json.loads(Path(f"{cluster['RECORD']}{node}").read_text())
    return record["argv"], record["env"]


@pytest.mark.parametrize("name", [*SBATCH, "stoppable.sh"])
def test_the_shell_reads_them(name: str) -> None:
    result = subprocess.run(["bash", "-n", str(TEMPLATES / name)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", SBATCH)
def test_a_job_may_be_requeued_and_is_told_before_its_end(name: str) -> None:
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    for option in ("--requeue", "--open-mode=append", "--signal=B:USR1@120", "--ntasks-per-node=1"):
        assert f"#SBATCH {option}\n" in text


FLAGS = ("--data.train", "/shared/my photos", "--output_dir", "runs/$HOME's")


def value_of(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_many_nodes_start_one_launcher_each_with_its_own_rank(cluster: dict[str, str]) -> None:
    status, text = finish(submit("many_nodes.sbatch", cluster, *FLAGS))
    assert status == 0, text
    for node in (0, 1):
        argv, env = recorded(cluster, node)
        assert argv[:2] == ["accelerate", "launch"]
        expected = {
            "--num_machines": "2", "--machine_rank": str(node), "--num_processes": "8", "--main_process_ip": "node0",
            "--main_process_port": "24567",
        }  # fmt: skip
        assert {flag: value_of(argv, flag) for flag in expected} == expected
        assert argv[argv.index("pretrain/main.py") :] == ["pretrain/main.py", "--resume", "auto", *FLAGS]
        assert env["PWD"] == str(Path.cwd())


def test_one_node_starts_its_gpus(cluster: dict[str, str]) -> None:
    cluster["SLURM_JOB_NUM_NODES"] = "1"
    assert finish(submit("one_node.sbatch", cluster, *FLAGS))[0] == 0
    argv, _ = recorded(cluster, 0)
    assert "--multi_gpu" in argv
    assert value_of(argv, "--num_processes") == "4"
    assert argv[argv.index("pretrain/main.py") :] == ["pretrain/main.py", "--resume", "auto", *FLAGS]
    cluster["SLURM_GPUS_ON_NODE"] = "1"
    assert finish(submit("one_node.sbatch", cluster, *FLAGS))[0] == 0
    argv, _ = recorded(cluster, 0)
    assert "--multi_gpu" not in argv


def test_an_elastic_job_is_content_with_fewer_nodes(cluster: dict[str, str]) -> None:
    cluster["MIN_NODES"] = "1"
    assert finish(submit("elastic.sbatch", cluster, *FLAGS))[0] == 0
    for node in (0, 1):
        argv, env = recorded(cluster, node)
        expected = {
            "--nnodes": "1:2", "--nproc-per-node": "4", "--rdzv-backend": "c10d", "--rdzv-id": "1234567",
            "--rdzv-endpoint": "node0:24567", "--local-addr": f"node{node}",
        }  # fmt: skip
        assert argv[0] == "torchrun"
        assert {flag: value_of(argv, flag) for flag in expected} == expected
        assert argv[argv.index("pretrain/main.py") :] == ["pretrain/main.py", "--resume", "auto", *FLAGS]
        assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize("name", SBATCH)
def test_a_failure_is_the_job_s_and_queues_nothing(cluster: dict[str, str], name: str) -> None:
    cluster["LAUNCHER_STATUS"] = "3"
    status, text = finish(submit(name, cluster, *FLAGS))
    assert status == 3, text
    assert "requeued" not in text


@pytest.mark.parametrize("name", SBATCH)
def test_gpus_that_were_not_asked_for_are_missed(cluster: dict[str, str], name: str) -> None:
    del cluster["SLURM_GPUS_ON_NODE"]
    status, text = finish(submit(name, cluster, *FLAGS))
    assert status != 0
    assert "ask for them with --gpus-per-node" in text


@pytest.mark.parametrize("name", SBATCH)
def test_usr1_stops_the_training_and_queues_the_job_again(cluster: dict[str, str], name: str) -> None:
    """All processes of the step get USR1; the training processes end by themselves, their launcher is ended after them."""
    num_nodes = 1 if name.startswith("one") else 2
    cluster["SLURM_JOB_NUM_NODES"] = str(num_nodes)
    for launcher in ("accelerate", "torchrun"):
        program(Path(cluster["SHIMS"]), launcher, STUBBORN)
    job = submit(name, cluster)
    assert job.stdout is not None
    printed = ""
    while printed.count("training") < 2 * num_nodes:
        line = job.stdout.readline()
        assert line, printed
        printed += line
    job.send_signal(signal.SIGUSR1)
    status, text = finish(job)
    assert text.count("saved") == 2 * num_nodes, text
    assert "starting again" not in text
    assert status == 0
    assert text.endswith("requeued 1234567\n"), text


@pytest.mark.parametrize("name", SBATCH)
def test_sigterm_to_all_processes_lets_the_training_save_though_the_launcher_ends_of_it(
    cluster: dict[str, str], name: str
) -> None:
    """As when a job is preempted without USR1; what is left of a step is killed when its first process ends."""
    num_nodes = 1 if name.startswith("one") else 2
    cluster["SLURM_JOB_NUM_NODES"] = str(num_nodes)
    for launcher in ("accelerate", "torchrun"):
        program(Path(cluster["SHIMS"]), launcher, STUBBORN)
    job = submit(name, cluster)
    assert job.stdout is not None
    printed = ""
    while printed.count("training") < 2 * num_nodes:
        line = job.stdout.readline()
        assert line, printed
        printed += line
    (srun,) = (pid for pid in descendants(job.pid) if b"/srun" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(srun, signal.SIGUSR2)
    status, text = finish(job)
    assert text.count("saved") == 2 * num_nodes, text
    assert status != 0
    assert "requeued" not in text  # by SLURM itself, where its preemption means that


TINY_RUN = (
    "--data.train", "digits", "--model.name", "tiny", "--model.img_size", "16", "16", "--model.patch_size", "4",
    "--model.in_chans", "1", "--model.embed_dim", "32", "--model.depth", "1", "--model.num_heads", "2",
    "--model.decoder_embed_dim", "32", "--model.decoder_depth", "1", "--model.decoder_num_heads", "2",
    "--optim.warmup_epochs", "0", "--run.dtype", "float32", "--run.device", "cpu", "--run.log_every_steps", "1",
    "--data.num_workers", "0", "--data.batch_size_per_process", "16", "--run.save_every_steps", "100000",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SBATCH)
def test_a_training_is_stopped_saved_queued_again_and_goes_on(cluster: dict[str, str], tmp_path: Path, name: str) -> None:
    """The real launchers and the real program, one process a node; two on the single node."""
    num_nodes = 1 if name.startswith("one") else 2
    for launcher in ("accelerate", "torchrun"):
        (Path(cluster["SHIMS"]) / launcher).unlink()
    cluster |= {
        "PATH": f"{cluster['SHIMS']}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PROCESSES_PER_NODE": str(3 - num_nodes),
        "SLURM_JOB_NUM_NODES": str(num_nodes), "HOSTNAMES": "127.0.0.1 127.0.0.1", "LOCAL_ADDR": "127.0.0.1",
        "SLURM_JOB_ID": str(os.getpid()), "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "MIN_NODES": "2",
    }  # fmt: skip
    output = tmp_path / "run"
    stopped_at = 0
    for _ in range(2):  # the job, and the same job when its turn comes again
        job = submit(name, cluster, "--output_dir", str(output), *TINY_RUN, "--num_steps", "100000")
        wait_for_steps(output, stopped_at + 5, job)
        job.send_signal(signal.SIGUSR1)
        status, text = finish(job, timeout_s=120)
        assert status == 0, text
        assert f"requeued {os.getpid()}" in text, text
        assert stopped_at == 0 or f"resume  {checkpoint_path(output / 'checkpoints', stopped_at)}" in text
        stopped_at = last_step(output)
        assert f"stopped after step {stopped_at}" in text
        assert checkpoint_path(output / "checkpoints", stopped_at).exists()


def last_step(output: Path) -> int:
    """Of the complete lines: the program may be writing."""
    path = output / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_for_steps(output: Path, step: int, job: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if last_step(output) >= step:
            return
        assert job.poll() is None, finish(job)
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached in two minutes: {finish(job, timeout_s=0)}")

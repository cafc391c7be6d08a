"""How the processes of a run find each other: launches that went wrong are refused, and a lost process ends the others.

What a launcher starts is checked in three places:
- `check_launch`, by each process alone: did the launcher mean one run or several? (Programs that are one process ask
  `training.one_process`.)
- `require_agreement`, by all together: same command, same program, same data, same step?
- `contact`, for as long as the run lasts: a process that ends takes the others with it, and each says so in one line.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from data.crops import crop_backend
from data.errors import DataError
from training.cli import EXIT_USER_ERROR, UserError, flat_config, user_errors
from training.one_process import OTHER_LAUNCHERS, num_copies
from training.parallel import sharding_asked
from training.unattended import unattended

EXIT_LOST_CONTACT = 75
"""Exit status of a process that lost another one, or a reader: EX_TEMPFAIL of sysexits.h, "try again"."""

MAY_DIFFER = {
    "data.train", "data.val", "data.num_workers", "data.prefetch_batches", "data.cache_dir", "data.cache_gib",
    "data.read_timeout_s", "run.cpu_threads",
}  # fmt: skip
"""Settings that belong to a machine: the data are compared by their manifest, not by where they lie."""

_PACKAGES = ("torch", "accelerate", "timm", "torchvision", "numpy", "webdataset")
_NUM_NAMED = 3
_ALONE_S = 3.0
"""So long a process waits before it tells of a mistake that the first process of its machine did not meet."""

_CLOSED = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|remote process exited|likely closed|"
    r"connectFullMesh failed",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(
    r"timed out waiting|wait timeout|timed out after|collective operation timeout|connect timeout|timeout caused pair closure",
    re.IGNORECASE,
)
_READER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: [\w ]+|exited unexpectedly)")
_ADDRESS = re.compile(r"\[[0-9a-fA-F.:%]+\]:\d+")
"""As Gloo names the other end of a connection: [127.0.0.1]:34567."""


def here() -> str:
    """Names this process and its machine in messages: "process 3 on node7"."""
    return f"process {os.environ.get('RANK', '0')} on {socket.gethostname()}"


def check_launch(num_processes: int, environment: Mapping[str, str]) -> str | None:
    """Compares how many processes a launcher started with how many belong to this run.

    Args:
        num_processes: of the run, as accelerate sees it.
        environment: variables of this process.

    Returns:
        A warning; None where nothing is suspicious.

    Raises:
        UserError: each of the processes believes that it is alone, and all would do the same work.
    """
    launched = int(environment.get("WORLD_SIZE", "1"))
    if num_processes != launched:
        raise UserError(
            f"the launcher started {launched} processes (WORLD_SIZE), but this one belongs to a group of {num_processes}: on "
            "CPUs start them with --run.device cpu or ACCELERATE_USE_CPU=true; see the README on starting several processes"
        )
    if num_processes > 1:
        return None
    for name, launcher in OTHER_LAUNCHERS.items():
        copies = num_copies(environment, name)
        if copies > 1:
            raise UserError(
                f"{launcher} started {copies} copies of this program ({name}), and each would do the whole run: let {launcher} "
                "start one `accelerate launch` on each machine, with --num_machines, --machine_rank and --num_processes; or, "
                f"where separate runs are meant, `env -u {name}`"
            )
    tasks = num_copies(environment, "SLURM_NTASKS")
    if tasks > 1:
        return f"the SLURM job has {tasks} tasks, but this run is one process: the others' share of the machines lies idle"
    return None


def facts_of_launch(config: Any) -> dict[str, Any]:
    """What all processes must share before they do anything together: settings, program, and the packages that it uses.

    Args:
        config: of the run, a dataclass.
    """
    settings = {f"--{name}": value for name, value in flat_config(config).items() if name not in MAY_DIFFER}
    packages = {f"version of {name}": version(name) for name in _PACKAGES}
    return settings | packages | {
        "version of Python": platform.python_version(),
        "decoder of JPEG files": crop_backend(),
        "sharding of the model": str(sharding_asked(os.environ)),
        "program (hash of its files)": code_hash(Path(__file__).parent.parent),
    }  # fmt: skip


def facts_of_start(identity: Mapping[str, Any], num_steps: int, start_step: int) -> dict[str, Any]:
    """What all processes must share before the first step: data, dtype, plan, and where they start.

    Args:
        identity: of the run, see `training.resume.identity`.
        num_steps: where the run ends.
        start_step: where it starts.
    """
    facts = {name: value for name, value in identity.items() if name not in MAY_DIFFER}
    return facts | {"number of steps": num_steps, "step to start from": start_step}


def code_hash(root: Path) -> str:
    """Identifies the program: a hash over the Python files of its rooms.

    Args:
        root: folder of the rooms.
    """
    digest = hashlib.sha256()
    for room in ("models", "data", "training", "pretrain", "finetune"):
        for path in sorted((root / room).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def require_agreement(accelerator: Accelerator, facts: Mapping[str, Any]) -> None:
    """Makes sure that facts are the same on all processes; all must call it.

    One number travels from each process; the facts themselves only where the numbers differ.

    Args:
        accelerator: of the run.
        facts: name -> value, as messages show it; what JSON can hold.

    Raises:
        UserError: they differ; on all processes, naming what differs and where.
    """
    if accelerator.num_processes == 1:
        return
    text = json.dumps(facts, sort_keys=True)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    numbers = cast(Tensor, accelerator.gather(torch.tensor([number], dtype=torch.int64, device=accelerator.device)))
    if len(set(numbers.tolist())) > 1:
        everyone = gather_object([(socket.gethostname(), json.loads(text))])
        raise UserError(
            f"the processes do not agree on {describe_differences(everyone)}; start all of them with the same command, on the "
            "same data, run folder and installation"
        )


def describe_differences(everyone: list[tuple[str, dict[str, Any]]]) -> str:
    """Says which facts differ, and which processes have which value.

    Args:
        everyone: host and facts of each process, by number.
    """
    names = sorted({name for _, facts in everyone for name in facts})
    differing = []
    for name in names:
        owners: dict[str, list[str]] = {}
        for rank, (host, facts) in enumerate(everyone):
            owners.setdefault(str(facts.get(name, "nothing")), []).append(f"process {rank} on {host}")
        if len(owners) > 1:
            values = sorted(owners.items(), key=lambda item: -len(item[1]))  # the most common one first
            parts = [
                f"{value} ({who[0]}{f' and {len(who) - 1} more' if len(who) > 1 else ''})" for value, who in values[:_NUM_NAMED]
            ]
            differing.append(f"{name}: {', '.join(parts)}")
    more = f"; and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
    return "; ".join(differing[:_NUM_NAMED]) + more


@contextlib.contextmanager
def contact(folder: Path | None, timeout_minutes: float) -> Iterator[None]:
    """Ends this process in one line, without a traceback, when another process of the run, or one of its readers, is lost.

    The loss shows where processes do something together: a closed connection at once, a process that hangs after the time
    limit of collectives. What ended the other one, its own output says. Where the launcher or a reader of the output is lost,
    the run is not: see `unattended`.

    Args:
        folder: of the run; None while it is put together.
        timeout_minutes: time limit of collectives.

    Raises:
        SystemExit: with EXIT_LOST_CONTACT.
    """
    try:
        with unattended():
            yield
    except RuntimeError as error:
        what = lost_reader(error) or lost_process(error, timeout_minutes)
        if what is None:
            raise
        checkpoints = sorted((folder / "checkpoints").glob("step_*.safetensors")) if folder else []
        advice = "then start all processes again"
        if checkpoints:
            advice += f" with --resume auto; the last checkpoint is {checkpoints[-1].name}"
        tqdm.write(f"error ({here()}): {what}; {advice}", file=sys.stderr)
        sys.stderr.flush()
        raise SystemExit(EXIT_LOST_CONTACT) from None


@contextlib.contextmanager
def taken_apart() -> Iterator[None]:
    """Takes the group of processes apart where putting a run together ends in an error, after that was told.

    Left to the interpreter's end, torch's store now and then aborts the process, and its status is lost. Later on, it is left
    to that all the same: gradients may be on their way to a process that hangs, and taking apart would wait for them.
    """
    try:
        yield
    except SystemExit as ended:
        if ended.code == EXIT_USER_ERROR and dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()
        raise


def lost_reader(error: RuntimeError) -> str | None:
    """Says what an error of torch's DataLoader tells of a reader process that was killed; None for any other error."""
    found = _READER.search(str(error))
    if found is None:
        return None
    return (
        f"a reader process was lost ({found.group()}): mostly the memory was full, the kernel's log says so (dmesg), or the "
        "shared memory (/dev/shm); take fewer --data.num_workers or a lower --data.prefetch_batches"
    )


def lost_process(error: RuntimeError, timeout_minutes: float) -> str | None:
    """Says what an error tells of a lost process of the run; None for any other error."""
    reason = lost_contact(error)
    if reason is None:
        return None
    if _TIMED_OUT.search(str(error)):
        return (
            f"waited {timeout_minutes:g} minutes for another process, which hangs or has ended ({reason}); where it was only "
            "slow, raise --run.timeout_minutes"
        )
    return f"lost contact with another process ({reason}), whose own output says why"


def lost_contact(error: RuntimeError) -> str | None:
    """Says in a few words how an error came of a lost process; None where it tells of something else.

    Gloo reports plain RuntimeErrors, NCCL and the store errors of their own, which are RuntimeErrors too: the text decides.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "CUDA error" in str(error):
        return None
    found = _TIMED_OUT.search(str(error)) or _CLOSED.search(str(error))
    address = _ADDRESS.search(str(error))
    return f"{found.group().lower()}{f', {address.group()}' if address else ''}" if found else None


@contextlib.contextmanager
def mistakes_of_one() -> Iterator[None]:
    """Lets a mistake be told that only this process has met, while the run is put together; used inside `user_errors`.

    There the first process of each machine speaks for all, because mostly all meet the same mistake. Another one waits a
    little: where the first one met it too, the launcher ends this process in the meantime. Else it is told here.

    Raises:
        SystemExit: with the exit status of a user's mistake.
    """
    try:
        yield
    except (UserError, DataError, OSError):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        time.sleep(_ALONE_S)
        with user_errors(every_process=True):
            raise

"""One run: its processes, its folder, its signals, its logs."""

import contextlib
import errno
import math
import multiprocessing
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
    patch_environment,
    set_seed,
)
from tqdm import tqdm

from training.checkpoint import replacing
from training.cli import NoSettingsError, UserError, config_to_yaml, flat_config, flatten, is_main_process, read_yaml
from training.launch import check_launch, here
from training.machine import best_device, cores_per_process, native_bfloat16
from training.parallel import sharding_asked
from training.storage import private_folder

try:
    import fcntl
except ImportError:  # Windows: there nothing keeps two programs apart
    fcntl = None


@dataclass(frozen=True)
class RunConfig:
    """How a run is carried out: nothing here changes what is learnt, but for seed and dtype."""

    seed: int = 0
    """Seed of everything random: initial weights, order of samples, crops, masks; 0 .. 2^32 - 1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the matrix products. auto: bfloat16 where the device computes in it natively, else float32."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the accelerator where there is one, else the CPU."""
    cpu_threads: int = 0
    """Threads of each process for computing on the CPU; 0: the machine's cores divided among its processes."""
    compile: bool = False
    """Compile the model with torch.compile: slower to start, faster per step."""
    log_every_steps: int = 10
    """Optimizer steps between two entries in TensorBoard, metrics.jsonl and the progress bar, at least 1."""
    picture_every_steps: int = 500
    """Optimizer steps between two pictures in TensorBoard; 0: only at the end."""
    save_every_steps: int = 500
    """Optimizer steps between two checkpoints, at least 1."""
    save_every_minutes: float | None = None
    """Longest time between two checkpoints, in minutes, above 0: a crash loses no more than that. It goes by the clock of the
    first process."""
    timeout_minutes: float = 10.0
    """Longest time that a process waits for the others where all do something together, in minutes, above 0; then the run ends.
    More than the slowest needs to read its first images, or the first one to make a picture."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay, at least 1; while one is written there is one more, and of a sick run the newest
    good one stays, too."""
    milestone_every_epochs: float | None = None
    """Passes over the data set between two checkpoints that stay for ever, above 0; they come on top of keep_checkpoints."""

    def __post_init__(self) -> None:
        if min(self.log_every_steps, self.save_every_steps, self.keep_checkpoints) < 1:
            raise ValueError("run.log_every_steps, run.save_every_steps and run.keep_checkpoints must be at least 1")
        if min(self.picture_every_steps, self.cpu_threads) < 0:
            raise ValueError("run.picture_every_steps and run.cpu_threads must be at least 0")
        for name, period in (
            ("save_every_minutes", self.save_every_minutes), ("milestone_every_epochs", self.milestone_every_epochs),
        ):  # fmt: skip
            if period is not None and not 0 < period < math.inf:
                raise ValueError(f"run.{name} must be above 0 and finite, not {period}")
        if not 0 < self.timeout_minutes <= 10_000:
            raise ValueError(f"run.timeout_minutes must be above 0 and at most 10,000, not {self.timeout_minutes}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"run.seed must lie in 0 .. 2^32 - 1, not {self.seed}")

    @property
    def timeout(self) -> timedelta:
        """`timeout_minutes` as torch takes it."""
        return timedelta(minutes=self.timeout_minutes)


def build_accelerator(config: RunConfig, folder: Path) -> Accelerator:
    """Sets up the processes and their devices, and seeds each.

    Raises:
        UserError: the launcher started several processes, but each believes that it is alone; or it asks for another way of
            distribution than DDP and FSDP2.
        RuntimeError: not all processes came within `run.timeout_minutes`.
    """
    sharding_asked(os.environ)  # its mistakes come before anything else
    for name in ("DEEPSPEED", "MEGATRON_LM"):  # on CPUs accelerate would pass over them in silence
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise UserError(
                f"the launcher asks for {name} (ACCELERATE_USE_{name}), this program distributes by DDP or FSDP2: launch it "
                "with --multi_gpu, or --use_fsdp --fsdp_version 2 (`accelerate launch` also reads the file that "
                "`accelerate env` names)"
            )
    device_type = "cpu" if config.device == "cpu" else best_device().type
    bfloat16 = config.dtype == "bfloat16" or (config.dtype == "auto" and native_bfloat16(device_type))
    with patch_environment(ACCELERATE_USE_FSDP="false"):  # models are sharded by `Distributed`, not by accelerate
        accelerator = Accelerator(
            cpu=device_type == "cpu",
            mixed_precision="bf16" if bfloat16 else "no",
            log_with="tensorboard",
            project_dir=str(folder),
            dynamo_backend="no",  # compiled by --run.compile alone, whatever the launcher's environment says
            kwargs_handlers=[
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
                InitProcessGroupKwargs(timeout=config.timeout),
            ],
        )
    # Accumulation is counted by the loop, which divides the loss itself: the launcher's setting would divide it again.
    accelerator.gradient_accumulation_steps = 1
    if accelerator.device.type == "cpu":
        # `accelerate launch` sets OMP_NUM_THREADS=1 where nothing is said of it, which leaves the other cores idle.
        torch.set_num_threads(config.cpu_threads or cores_per_process())
    warning = check_launch(accelerator.num_processes, os.environ)
    if warning:
        tqdm.write(f"warning: {warning}")
    set_seed(config.seed)  # the same on every process: the weights must agree, and every other draw has a seed of its own
    return accelerator


HISTORY_NAME = "history.jsonl"
"""What every start of a run is noted in, before its config is written: see `training/history.py`."""


def check_run_folder(folder: Path, config: Any, resume: Literal["never", "auto"], may_change: Iterable[str]) -> None:
    """Makes sure that a run folder is new, or holds this very run and is to be continued. Changes nothing.

    Args:
        folder: of the run.
        config: of this run, a dataclass.
        resume: "auto" to continue what the folder holds.
        may_change: dotted names of settings that may differ when a run is continued.

    Raises:
        UserError: the folder holds a run that is not to be continued, a run of another config or without one, or other files.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir {folder} is a file: choose another --output_dir")
    saved = folder / "config.yaml"
    if not saved.exists():
        if _checkpoints(folder):
            raise UserError(f"output_dir {folder} holds checkpoints but no config.yaml: {_way_back(folder)}")
        if folder.exists() and not all(map(_is_leftover, folder.iterdir())):
            raise UserError(f"output_dir {folder} holds other files: choose a new or empty folder with --output_dir")
        return
    if resume == "never":
        raise UserError(
            f"output_dir {folder} already holds a run: continue it with --resume auto, or choose another --output_dir"
        )
    differing = changed_settings(folder, config)
    refused = [change for key, change in differing.items() if key not in set(may_change)]
    if refused:
        changes = ", ".join(refused)
        raise UserError(
            f"output_dir {folder} holds a run of another config ({changes}): continue it as it was "
            f"(--config {saved} --resume auto), or choose another --output_dir"
        )


def _is_leftover(path: Path) -> bool:
    """Says whether a file is what a program leaves that was killed before it had written `config.yaml`."""
    is_temporary = path.name.startswith(".") and path.name.endswith(".tmp")  # of `replacing`
    return is_temporary or path.name in (".lock", HISTORY_NAME)


def changed_settings(folder: Path, config: Any) -> dict[str, str]:
    """Compares a config with the one that a run folder was last used with.

    Returns:
        Dotted name -> "name before -> now" for every setting that differs; nothing for a new folder.

    Raises:
        UserError: the folder's config cannot be read, or is none.
    """
    saved = folder / "config.yaml"
    if not saved.exists():
        return {}
    try:
        old, new = flatten(read_yaml(saved)), flat_config(config)
    except NoSettingsError as error:
        raise UserError(f"{error}; {_way_back(folder)}") from error
    if not old:
        raise UserError(f"{saved} is empty: {_way_back(folder)}")
    return {key: f"{key} {old.get(key)} -> {value}" for key, value in new.items() if value != old.get(key)}


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, the newest last; whether they are whole is not looked at."""
    return sorted((folder / "checkpoints").glob("step_*.safetensors"))


def _way_back(folder: Path) -> str:
    """Says how a run folder gets its config again: from the header of a checkpoint, by a command that writes the file."""
    checkpoints = _checkpoints(folder)
    if not checkpoints:
        return "there is no checkpoint to go on from, choose another --output_dir"
    newest, saved = shlex.quote(str(checkpoints[-1])), shlex.quote(str(folder / "config.yaml"))
    return (
        "put it back (each checkpoint holds the settings in its header: `python -c 'import json, sys, safetensors, yaml; "
        'print(yaml.safe_dump(json.loads(safetensors.safe_open(sys.argv[1], "np").metadata()["checkpoint"])["config"]))\' '
        f"{newest} > {saved}`), or choose another --output_dir"
    )


_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


def lock_run_folder(folder: Path) -> IO[str]:
    """Keeps a second program from writing to the same run folder; makes the folder if it is absent.

    Warns where its storage has no locks: some network file systems have none.

    Returns:
        The open lock file. Closing it gives the lock back; so does the end of the process, however it ends.

    Raises:
        UserError: another program has the lock.
        OSError: the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("w")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(
            f"output_dir {folder} is in use by another program: wait for its end, or choose another --output_dir"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
        tqdm.write(
            f"warning: the storage of output_dir {folder} has no locks ({error.strerror}): nothing keeps a second program from "
            "writing to it at the same time"
        )
    if hasattr(os, "register_at_fork"):  # reader processes would hold the lock for seconds after this process was killed
        os.register_at_fork(after_in_child=file.close)
    return file


def lock_for_run(folder: Path, accelerator: Accelerator) -> AbstractContextManager[object]:
    """Locks a run folder on the first process, before anything in it is looked at; all processes must call it.

    Warns where the machines of a run do not share the folder.

    Returns:
        What keeps the lock until it is left; on the other processes nothing.

    Raises:
        UserError: another program has the lock, or the folder cannot be made; on all processes.
    """
    warning = private_folder(folder, accelerator)
    if warning and accelerator.is_main_process:
        tqdm.write(f"warning: {warning}")
    lock: AbstractContextManager[object] = contextlib.nullcontext()
    message = ""
    if accelerator.is_main_process:
        try:
            lock = lock_run_folder(folder)
        except UserError as error:
            message = str(error)
        except OSError as error:
            message = f"cannot write to output_dir {folder}: {error.strerror}"
    shared = [message]
    broadcast_object_list(shared)
    if shared[0]:
        raise UserError(shared[0])
    return lock


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Makes the run folder, and makes a failure to write to it a UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot write to output_dir {folder}: {error.strerror}") from error


def save_config(folder: Path, config: Any) -> None:
    """Makes the run folder and writes `config.yaml`, which is itself a valid `--config`."""
    with writing_to(folder), replacing(folder / "config.yaml") as temporary:
        temporary.write_text(config_to_yaml(config), encoding="utf-8")


_REQUESTS = (signal.SIGINT, signal.SIGTERM)
_WARNINGS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGHUP") if hasattr(signal, name))
"""What SLURM's --signal=USR1@SECONDS sends before the time is over, and what comes when a terminal or its ssh connection is
closed; Windows knows neither."""
_TWIN_S = 0.5
"""Two requests within this time are one: a launcher passes on what the terminal has sent to the whole group already."""

_listening = False


def _forget_wakeup() -> None:
    """In a forked child: its signals are not its parent's."""
    if _listening:
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_wakeup)


class StopRequest:
    """Notes Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP, so that the loop can finish its step and save.

    A second Ctrl-C or SIGTERM ends the program at once: a thread hears it, for in the middle of a step, or while it waits for
    another process, Python itself calls no handler. SIGUSR1 and SIGHUP are warnings and never the second: a SIGTERM that
    follows them is the first. The exit status is 128 + the signal's number in either case: 130, 143, 138 for SIGUSR1, 129 for
    SIGHUP. A program that was started to ignore SIGHUP (nohup) goes on ignoring it.

    Args:
        timeout: limit of the collective in `agreed`; None: that of Gloo, 30 minutes.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.signal: signal.Signals | None = None
        # Gloo beside the run's own backend: NCCL would make the host wait for the device at every step.
        several = dist.is_initialized() and dist.get_world_size() > 1
        group = dist.new_group(backend="gloo", timeout=timeout) if several else None
        self._group = cast(dist.ProcessGroup | None, group)

    def __enter__(self) -> "StopRequest":
        global _listening
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        ignored = {number for number in _WARNINGS if number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN}
        numbers = [number for number in (*_REQUESTS, *_WARNINGS) if number not in ignored]
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        self._previous_wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        _listening = True
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        global _listening
        _listening = False
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._write.shutdown(socket.SHUT_RDWR)  # ends the thread, even where a forked child still holds the socket
        self._thread.join()
        self._write.close()
        self._read.close()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)

    def _listen(self) -> None:
        """Hears every signal that comes, as a byte of its number."""
        told, first_s = False, math.inf
        while numbers := self._read.recv(64):
            for number in numbers:
                if number in _REQUESTS and time.monotonic() - first_s > _TWIN_S:
                    self._end_at_once(number)
                if number in _REQUESTS:
                    first_s = min(first_s, time.monotonic())
                if number in (*_REQUESTS, *_WARNINGS) and not told and is_main_process():
                    told = True
                    name = signal.Signals(number).name
                    self._tell(f"{name}: the step is finished and saved; Ctrl-C or SIGTERM from now on ends the run at once")

    @staticmethod
    def _tell(message: str) -> None:
        # Where nobody reads it any more (a closed terminal, `| tee` that is gone), this thread still has signals to hear.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{message}\n".encode())  # the main thread may hold the lock of sys.stderr

    def _end_at_once(self, number: int) -> None:
        where = f" ({here()})" if self._group is not None else ""
        self._tell(
            f"{signal.Signals(number).name} again: ended at once{where}; nothing was saved since the last checkpoint, go on "
            "from there with --resume auto"
        )
        for reader in multiprocessing.active_children():
            reader.kill()
        os._exit(128 + number)

    def agreed(self, *notes: bool) -> list[bool]:
        """Says whether any process has noted a signal; all processes must ask at the same step, and get the same answer.

        Of many processes the asking is a collective between their CPUs: the devices are not waited for.

        Args:
            notes: further things to agree upon, as many on every process.

        Returns:
            Whether any process has noted a signal, then of each note whether any process makes it.
        """
        noted = [self.signal is not None, *notes]
        if self._group is None:
            return noted
        flags = torch.tensor(noted, dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in flags.tolist()]

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as shells report it; 0 where no signal came."""
        return 0 if self.signal is None else 128 + self.signal

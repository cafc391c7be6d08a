"""One run: its processes, its folder, its signals, its logs."""

import json
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed

from training.checkpoint import replacing
from training.cli import UserError, config_to_yaml, flat_config
from training.machine import best_device, cores_per_process, native_bfloat16


@dataclass(frozen=True)
class RunConfig:
    """How a run is carried out: nothing here changes what is learnt, but for seed and dtype."""

    seed: int = 0
    """Seed of everything random: initial weights, order of samples, crops, masks; at least 0."""
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
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay, at least 1."""

    def __post_init__(self) -> None:
        if min(self.log_every_steps, self.save_every_steps, self.keep_checkpoints) < 1:
            raise ValueError("run.log_every_steps, run.save_every_steps and run.keep_checkpoints must be at least 1")
        if min(self.seed, self.picture_every_steps, self.cpu_threads) < 0:
            raise ValueError("run.seed, run.picture_every_steps and run.cpu_threads must be at least 0")


def build_accelerator(config: RunConfig, folder: Path) -> Accelerator:
    """Sets up the processes and their devices, and seeds each.

    Raises:
        UserError: the launcher started several processes, but each believes that it is alone.
    """
    device_type = "cpu" if config.device == "cpu" else best_device().type
    bfloat16 = config.dtype == "bfloat16" or (config.dtype == "auto" and native_bfloat16(device_type))
    accelerator = Accelerator(
        cpu=device_type == "cpu",
        mixed_precision="bf16" if bfloat16 else "no",
        log_with="tensorboard",
        project_dir=str(folder),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    if accelerator.device.type == "cpu":
        # `accelerate launch` sets OMP_NUM_THREADS=1 where nothing is said of it, which leaves the other cores idle.
        torch.set_num_threads(config.cpu_threads or cores_per_process())
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UserError(
            f"the launcher started {launched} processes, but this one belongs to a group of {accelerator.num_processes}; "
            "see the README on starting several processes"
        )
    set_seed(config.seed)  # the same on every process: the weights must agree, and every other draw has a seed of its own
    return accelerator


def check_run_folder(folder: Path, config: Any, resume: Literal["never", "auto"], may_change: Iterable[str]) -> None:
    """Makes sure that a run folder is new, or holds this very run and is to be continued. Changes nothing.

    Args:
        folder: of the run.
        config: of this run, a dataclass.
        resume: "auto" to continue what the folder holds.
        may_change: dotted names, or their beginnings, of settings that may differ when a run is continued.

    Raises:
        UserError: the folder holds a run that is not to be continued, a run of another config, or other files.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir {folder} is a file: choose another --output_dir")
    saved = folder / "config.yaml"
    if not saved.exists():
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"output_dir {folder} holds other files: choose a new or empty folder with --output_dir")
        return
    if resume == "never":
        raise UserError(
            f"output_dir {folder} already holds a run: continue it with --resume auto, or choose another --output_dir"
        )
    old = _flatten_yaml(yaml.safe_load(saved.read_text(encoding="utf-8")))
    new = flat_config(config)
    allowed = tuple(may_change)
    differing = [key for key in new if new[key] != old.get(key) and not key.startswith(allowed)]
    if differing:
        changes = ", ".join(f"{key} {old.get(key)} -> {new[key]}" for key in differing)
        raise UserError(
            f"output_dir {folder} holds a run of another config ({changes}): "
            f"continue it with --config {saved}, or choose another --output_dir"
        )


def _flatten_yaml(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        flat |= _flatten_yaml(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def save_config(folder: Path, config: Any) -> None:
    """Makes the run folder and writes `config.yaml`, which is itself a valid `--config`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "config.yaml") as temporary:
            temporary.write_text(config_to_yaml(config), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to output_dir {folder}: {error.strerror}") from error


class StopRequest:
    """Notes Ctrl-C and SIGTERM, so that the loop can finish its step and save; a second one ends the program at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            sys.exit(128 + number)
        self.signal = signal.Signals(number)

    @property
    def exit_status(self) -> int:
        """128 + the signal's number, as shells report it; 0 where no signal came."""
        return 0 if self.signal is None else 128 + self.signal


class MetricsFile:
    """`metrics.jsonl`: one JSON object per log interval, with its step.

    Args:
        path: of the file.
        first_step: entries of later steps, left by a run that went on after its last checkpoint, are dropped.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if _step_of(line) <= first_step]
        with replacing(path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: dict[str, float | int]) -> None:
        """Appends one entry, visible to other programs at once."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _step_of(line: str) -> float:
    """The step of an entry; infinity for a line that a crash cut off, which is dropped with what came after."""
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return float("inf")

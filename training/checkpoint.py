"""Checkpoints: one safetensors file each, written whole or not at all, verified when read.

A file `step_00000300.safetensors` holds `model/<parameter>`, `optimizer/<parameter>/<entry>` and, in its header, a JSON record
with the step, the config and a hash over all tensors. Nothing in it depends on the number of processes.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from training.cli import UserError

FORMAT_VERSION = 1
_PATTERN = "step_*.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole."""

    path: Path
    step: int
    """Optimizer steps done."""
    config: dict[str, Any]
    """The run's config by dotted names."""
    tensors: dict[str, Tensor]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under a prefix, by their names without it."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}.safetensors"


def save_checkpoint(
    folder: Path,
    step: int,
    config: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    keep: int,
    extra: dict[str, Tensor] | None = None,
) -> Path:
    """Writes a checkpoint, then deletes all but the newest `keep`.

    The file is written under another name, flushed to the disk and renamed: a crash leaves the older checkpoints alone.

    Args:
        folder: made if absent.
        step: optimizer steps done.
        config: the run's config by dotted names.
        model: without any wrapper.
        optimizer: over the model's parameters.
        keep: how many checkpoints stay, at least 1.
        extra: further tensors, under names with a prefix of their own ("ema/...").

    Raises:
        UserError: the file cannot be written (full disk, no permission); older checkpoints are intact.
    """
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= optimizer_tensors(model, optimizer) | (extra or {})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    record = {"version": FORMAT_VERSION, "step": step, "config": config, "hash": _hash(tensors)}
    path = checkpoint_path(folder, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"checkpoint": json.dumps(record)})
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the checkpoint {path}: {error}; earlier checkpoints are intact") from error
    _tidy(folder, path, keep)
    return path


def _tidy(folder: Path, newest: Path, keep: int) -> None:
    """Deletes checkpoints older than the newest `keep`, and what interrupted writes left behind; never a later one."""
    older = sorted(path for path in folder.glob(_PATTERN) if path.name <= newest.name)
    for path in [*older[:-keep], *folder.glob(f".{_PATTERN}.*.tmp")]:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside `path` to write to; on success flushes it to the disk and renames it into place.

    On any failure the temporary file is removed and `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()  # with the permissions that the user's umask gives; safetensors would make it private
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state under the names of the parameters: "optimizer/<parameter>/<entry>" -> tensor."""
    return {
        f"optimizer/{name}/{entry}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Raises:
        UserError: not a checkpoint, of a newer format, torn, or its content does not match its hash.
    """
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {})["checkpoint"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as a checkpoint, it may be cut off ({error})") from error
    except (KeyError, json.JSONDecodeError):
        raise UserError(f"{path}: is a safetensors file, but not a checkpoint of this program") from None
    version = record.get("version", 0)
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path}: has format {version}, this program reads up to {FORMAT_VERSION}: "
            "continue with the newer version of the program that wrote it"
        )
    if record.get("hash") != _hash(tensors):
        raise UserError(f"{path}: is damaged, its content does not match its hash")
    return Checkpoint(path, record["step"], record["config"], tensors)


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Finds the newest valid checkpoint.

    Returns:
        The checkpoint (None where the folder has none), and what is wrong with each newer one that had to be passed over.

    Raises:
        UserError: there are checkpoints, but none is valid.
    """
    complaints: dict[Path, str] = {}
    for path in sorted(folder.glob(_PATTERN), reverse=True):
        try:
            return read_checkpoint(path), complaints
        except UserError as error:
            complaints[path] = str(error)
    if complaints:
        raise UserError(f"no valid checkpoint in {folder}: {'; '.join(complaints.values())}")
    return None, {}


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts a checkpoint's tensors into a model and its optimizer, on the devices where they are.

    Raises:
        UserError: the checkpoint is of another model.
    """
    try:
        model.load_state_dict(checkpoint.part("model/"), strict=True)
    except RuntimeError as error:
        raise UserError(f"{checkpoint.path}: is of another model: {' '.join(str(error).split())}") from error
    state: dict[nn.Parameter, dict[str, Tensor]] = {}
    parameters = dict(model.named_parameters())
    for key, tensor in checkpoint.part("optimizer/").items():
        name, entry = key.rsplit("/", 1)
        state.setdefault(parameters[name], {})[entry] = tensor
    # Through load_state_dict, which moves and casts as each optimizer needs it; it numbers the parameters in group order.
    numbered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    packed = {number: state[parameter] for number, parameter in enumerate(numbered) if parameter in state}
    optimizer.load_state_dict({"state": packed, "param_groups": optimizer.state_dict()["param_groups"]})


def _hash(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

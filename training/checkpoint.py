"""Checkpoints: one safetensors file each, written whole or not at all, verified when read.

A file `step_00000300.safetensors` holds `model/<parameter>`, `optimizer/<parameter>/<entry>` and, in its header, a JSON record
with the format's version, the step, the config, a hash over all tensors, and whether the run was sound. Nothing in it depends
on the number of processes.
A file `step_00000300.milestone.safetensors` is the same, and is never deleted. When they are written: `training/saving.py`.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from training.cli import UserError

FORMAT_VERSION = 1
_PATTERN = "step_*.safetensors"
_MILESTONE = ".milestone.safetensors"
_NUM_NAMED = 3
"""So many tensors are named in a message."""


class DamagedCheckpointError(UserError):
    """A checkpoint's content is not what was written: an earlier one is to be used."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole."""

    path: Path
    step: int
    """Optimizer steps done."""
    config: dict[str, Any]
    """The run's config by dotted names."""
    tensors: dict[str, Tensor]
    is_sound: bool
    """False where the run was sick when it was saved."""

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under a prefix, by their names without it."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def checkpoint_path(folder: Path, step: int, is_milestone: bool = False) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}{_MILESTONE if is_milestone else '.safetensors'}"


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """What a checkpoint holds, where it lies: the tensors that the next step changes, not copies of them.

    Args:
        model: without any wrapper.
        optimizer: over the model's parameters.
        extra: further tensors, under names with a prefix of their own ("ema/...").
    """
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    return tensors | optimizer_tensors(model, optimizer) | dict(extra or {})


def write_checkpoint(path: Path, step: int, config: dict[str, Any], tensors: dict[str, Tensor], is_sound: bool = True) -> None:
    """Writes a checkpoint whole or not at all.

    The file is written under another name, flushed to the disk and renamed: a crash leaves the older checkpoints alone. What
    interrupted writes left in the folder is deleted first: it may take the room that this one needs.

    Args:
        path: of the file, see `checkpoint_path`; its folder is made if absent.
        step: optimizer steps done.
        config: the run's identity by dotted names.
        tensors: in the CPU's memory and contiguous; nobody changes them until they are written.
        is_sound: False where the run is sick, see `Health`.

    Raises:
        UserError: the file cannot be written (full disk, no permission); nothing is left of it.
    """
    record = {"version": FORMAT_VERSION, "step": step, "config": config, "hash": _hash(tensors), "is_sound": is_sound}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f".{_PATTERN}.*.tmp"):
            leftover.unlink(missing_ok=True)
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"checkpoint": json.dumps(record)})
        _flush_names(path.parent)
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
        raise UserError(
            f"cannot write the checkpoint {path}: {error} (it takes {size:,.0f} MiB; {_free(path.parent)}). Earlier "
            "checkpoints are intact: make room or make the folder writable, and go on from the newest with --resume auto"
        ) from error


def _free(folder: Path) -> str:
    """Says how much room the disk of a folder has, where it can be asked."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free there"
    except OSError as error:
        return f"the folder cannot be looked at: {error.strerror}"


def _flush_names(folder: Path) -> None:
    """Makes a renaming last: a power cut must not bring back the old names after older checkpoints were deleted."""
    if os.name == "nt":  # there folders cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do it unasked, and know no such call
            raise
    finally:
        os.close(descriptor)


def prune_checkpoints(folder: Path, newest: Path, keep: int, spared: Path | None = None) -> None:
    """Deletes checkpoints older than the newest `keep`.

    Milestones are neither deleted nor counted, nor is a checkpoint later than `newest` touched.

    Args:
        folder: of the checkpoints.
        newest: the one that was just written, and is in its place; or the one to be written next.
        keep: how many stay, at least 1.
        spared: stays however old it is; None: no such one.

    Raises:
        UserError: one cannot be deleted.
    """
    older = sorted(path for path in folder.glob(_PATTERN) if path.name <= newest.name and not path.name.endswith(_MILESTONE))
    for path in older[:-keep]:
        if path == spared:
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot delete the checkpoint {path} ({error.strerror}), and they would fill the disk: make the folder "
                "writable, and go on from the newest with --resume auto"
            ) from error


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
        DamagedCheckpointError: it is cut off, or its content does not match its hash.
        UserError: it cannot be opened, is not a checkpoint of this program, or is of a newer format: it may well be whole.
    """
    try:
        with safe_open(path, framework="pt") as file:
            record = _record(path, file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise DamagedCheckpointError(f"{path}: cannot be read as a checkpoint, it may be cut off ({error})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if record.get("hash") != _hash(tensors):
        raise DamagedCheckpointError(f"{path}: is damaged, its content does not match its hash")
    return Checkpoint(path, record["step"], record["config"], tensors, record.get("is_sound", True))


def _record(path: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    """What the header of a checkpoint says, of a format that this program reads."""
    try:
        record = json.loads((metadata or {})["checkpoint"])
        version = record.get("version", 0)
    except (KeyError, AttributeError, json.JSONDecodeError):
        raise UserError(
            f"{path}: is a safetensors file, but not a checkpoint of this program: move it out of the folder"
        ) from None
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path}: has format {version}, this program reads up to {FORMAT_VERSION}: "
            "continue with the newer version of the program that wrote it, or start a new run with another --output_dir"
        )
    return record


def newest_checkpoint(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Finds the newest valid checkpoint.

    Returns:
        The checkpoint (None where the folder has none), and what is wrong with each newer one that is damaged.

    Raises:
        UserError: there are checkpoints, but all are damaged; or one that is newer than any valid one cannot be judged, see
            `read_checkpoint`: going on from an earlier one would in time delete it.
    """
    complaints: dict[Path, str] = {}
    for path in sorted(folder.glob(_PATTERN), reverse=True):
        try:
            return read_checkpoint(path), complaints
        except DamagedCheckpointError as error:
            complaints[path] = str(error)
    if complaints:
        raise UserError(f"no valid checkpoint in {folder}: {'; '.join(complaints.values())}")
    return None, {}


def newest_sound(folder: Path) -> Path | None:
    """The newest checkpoint that a sound run has saved, by what its header says; None where there is none."""
    for path in sorted(folder.glob(_PATTERN), reverse=True):
        try:
            with safe_open(path, framework="pt") as file:
                record = _record(path, file.metadata())
        except (SafetensorError, OSError, UserError):  # whoever reads it will tell
            continue
        if record.get("is_sound", True):
            return path
    return None


class SetAside(NamedTuple):
    """What became of the checkpoints of a sick run."""

    sound: Path | None
    """The newest sound one, which a run is continued from; None where there is none."""
    num_renamed: int
    """How many after it were renamed: "step_7.suspect"."""
    left: list[Path]
    """Those that could not be renamed."""


def set_suspects_aside(folder: Path) -> SetAside:
    """Renames the checkpoints after the newest sound one, so that a run is continued from there."""
    sound, count, left = newest_sound(folder), 0, list[Path]()
    for path in sorted(folder.glob(_PATTERN)):
        if sound is not None and path.name <= sound.name:
            continue
        try:
            path.rename(path.with_suffix(".suspect"))
            count += 1
        except OSError:  # told by its name, see `left`
            left.append(path)
    return SetAside(sound, count, left)


def _require_same_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Makes sure that a checkpoint's weights fit a model, before anything of it is touched.

    Raises:
        UserError: names or shapes differ.
    """
    there, here = checkpoint.part("model/"), model.state_dict()

    def some(names: list[str]) -> str:
        return f"{len(names)} ({', '.join(names[:_NUM_NAMED])}{', ...' if len(names) > _NUM_NAMED else ''})"

    missing, unknown = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    shapes = [
        f"{name}: {tuple(there[name].shape)} in the file, {tuple(here[name].shape)} now"
        for name in sorted(here.keys() & there.keys())
        if here[name].shape != there[name].shape
    ]
    found = [
        f"{what} {some(names)}"
        for what, names in (("without weights", missing), ("with unknown weights", unknown), ("with other shapes", shapes))
        if names
    ]
    if found:
        raise UserError(
            f"{checkpoint.path}: is of another model: {', '.join(found)}; continue with the model that it was trained with, or "
            "start a new run with another --output_dir"
        )


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts a checkpoint's tensors into a model and its optimizer, on the devices where they are.

    Raises:
        UserError: the checkpoint is of another model.
    """
    _require_same_model(checkpoint, model)
    model.load_state_dict(checkpoint.part("model/"), strict=True)
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

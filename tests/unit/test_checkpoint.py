"""Checkpoints: whole or not there, found again, and no more of them than are wanted; when they are written: test_saving.py."""

import contextlib
import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import training.checkpoint
import training.resume
import training.saving
from models.mae import MAEConfig, MaskedAutoencoder, build_mae
from training.checkpoint import (
    checkpoint_path,
    newest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    restore,
    set_suspects_aside,
    training_tensors,
    write_checkpoint,
)  # fmt: skip
from training.cli import UserError
from training.optim import OptimConfig, build_adamw, parameter_groups, set_lr
from training.run import lock_run_folder
from training.saving import CheckpointWriter


def train_more(model: MaskedAutoencoder, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    set_lr(optimizer, 1e-3)
    torch.manual_seed(seed)
    model(torch.randn(2, 3, 32, 32), torch.rand(2, 16)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(model: MaskedAutoencoder) -> torch.optim.Optimizer:
    optimizer = build_adamw(parameter_groups(model, 0.05), OptimConfig())
    for seed in range(2):
        train_more(model, optimizer, seed)
    return optimizer


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    keep: int = 9,
    is_milestone: bool = False,
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint to its end."""
    writer = CheckpointWriter(folder, keep)
    writer.save(step, config or {}, training_tensors(model, optimizer), is_milestone)
    writer.wait()
    return checkpoint_path(folder, step, is_milestone)


def bytes_of(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    """Values, to be compared with later ones."""
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


class Gate:
    """Holds every write until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        monkeypatch.setattr(training.saving, "write_checkpoint", self._write)

    def _write(self, path: Path, step: int, config: dict[str, Any], tensors: dict[str, Tensor], is_sound: bool) -> None:
        self.reached.set()
        assert self.opened.wait(30)
        write_checkpoint(path, step, config, tensors, is_sound)


def fail_with(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Makes every write fail in the middle of the file."""

    def half(_tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(training.checkpoint, "save_file", half)


# ---------------------------------------------------------------------------------------------------------------- the file


def test_checkpoint_restores_weights_and_optimizer_bit_for_bit(
    tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder, tmp_path: Path
) -> None:
    optimizer = trained(tiny_mae)
    checkpoint = read_checkpoint(save(tmp_path, 2, tiny_mae, optimizer, config={"seed": 3}))
    assert (checkpoint.step, checkpoint.config) == (2, {"seed": 3})

    other = build_mae(tiny_config)
    other_optimizer = build_adamw(parameter_groups(other, 0.05), OptimConfig())
    restore(checkpoint, other, other_optimizer)
    for model, its_optimizer in ((tiny_mae, optimizer), (other, other_optimizer)):  # one more step, the same on both
        train_more(model, its_optimizer, 9)
    assert bytes_of(tiny_mae.state_dict()) == bytes_of(other.state_dict())


def test_newest_valid_checkpoint_is_found_past_torn_and_damaged_ones(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    optimizer = trained(tiny_mae)
    for step in (1, 2, 3):
        save(tmp_path, step, tiny_mae, optimizer)
    torn = checkpoint_path(tmp_path, 3)
    torn.write_bytes(torn.read_bytes()[:-100])
    damaged = checkpoint_path(tmp_path, 2)
    content = bytearray(damaged.read_bytes())
    content[-50] ^= 1
    damaged.write_bytes(content)
    checkpoint, complaints = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert list(complaints) == [torn, damaged]
    assert "cut off" in complaints[torn]
    assert "does not match its hash" in complaints[damaged]
    checkpoint_path(tmp_path, 1).write_bytes(b"")
    with pytest.raises(UserError, match="no valid checkpoint"):
        newest_checkpoint(tmp_path)
    assert newest_checkpoint(tmp_path / "none") == (None, {})


def rewrite_header(path: Path, metadata: dict[str, str] | None) -> None:
    save_file(load_file(path), path, metadata=metadata)


def test_foreign_and_newer_files_are_refused_and_not_taken_for_damaged(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    """To go on from the older one would in time delete the newer."""
    optimizer = trained(tiny_mae)
    save(tmp_path, 1, tiny_mae, optimizer)
    path = save(tmp_path, 2, tiny_mae, optimizer)
    rewrite_header(path, None)
    with pytest.raises(UserError, match="not a checkpoint of this program: move it out of the folder"):
        newest_checkpoint(tmp_path)
    rewrite_header(path, {"checkpoint": json.dumps({"version": 99, "layout": "unheard of"})})
    with pytest.raises(UserError, match=r"has format 99, this program reads up to 1: continue with the newer version"):
        newest_checkpoint(tmp_path)
    path.unlink()
    path.mkdir()  # something that cannot be opened: who knows what it holds
    with pytest.raises(UserError, match="cannot be read"):
        newest_checkpoint(tmp_path)
    path.rmdir()
    assert newest_checkpoint(tmp_path)[0] is not None


def test_checkpoint_of_another_model_is_refused_and_changes_nothing(
    tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder, tmp_path: Path
) -> None:
    checkpoint = read_checkpoint(save(tmp_path, 2, tiny_mae, trained(tiny_mae)))
    wider = build_mae(dataclasses.replace(tiny_config, decoder_embed_dim=32, depth=3))
    before = bytes_of(wider.state_dict())
    optimizer = build_adamw(parameter_groups(wider, 0.05), OptimConfig())
    with pytest.raises(UserError) as caught:
        restore(checkpoint, wider, optimizer)
    message = str(caught.value)
    assert "is of another model: without weights 12 (encoder.blocks.2." in message
    assert "mask_token: (1, 1, 16) in the file, (1, 1, 32) now" in message or ", ...)" in message
    assert "unknown" not in message
    assert "\n" not in message
    assert len(message) < 700
    assert bytes_of(wider.state_dict()) == before
    assert not optimizer.state


def test_the_file_holds_nothing_but_tensors_and_a_record(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    path = save(tmp_path, 2, tiny_mae, trained(tiny_mae))
    with safe_open(path, framework="pt") as file:
        assert set(json.loads(file.metadata()["checkpoint"])) == {"version", "step", "config", "hash", "is_sound"}
        names = set(file.keys())
    assert {name.split("/")[0] for name in names} == {"model", "optimizer"}
    assert path.stat().st_size < 1.2 * sum(tensor.nbytes for tensor in load_file(path).values()) + 20_000


def test_checkpoints_can_be_read_by_whom_the_umask_lets(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = save(tmp_path, 1, tiny_mae, trained(tiny_mae))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


# ----------------------------------------------------------------------------------------------------------- which ones stay


def test_only_the_newest_checkpoints_stay_and_all_milestones(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    optimizer = trained(tiny_mae)
    for step in range(1, 8):
        save(tmp_path, step, tiny_mae, optimizer, keep=2, is_milestone=step in (2, 7))
    assert sorted(tmp_path.iterdir()) == [
        checkpoint_path(tmp_path, 2, is_milestone=True), checkpoint_path(tmp_path, 5), checkpoint_path(tmp_path, 6),
        checkpoint_path(tmp_path, 7, is_milestone=True),
    ]  # fmt: skip
    newest, _ = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.step == 7  # a milestone is a checkpoint like others


def test_the_checkpoint_just_written_stays_whatever_lies_beside_it(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    later = checkpoint_path(tmp_path, 200)
    later.write_bytes(b"torn")
    rubbish = tmp_path / ".step_00000300.safetensors.123.tmp"
    rubbish.write_bytes(b"half")
    path = save(tmp_path, 150, tiny_mae, trained(tiny_mae), keep=1)
    assert sorted(tmp_path.iterdir()) == [path, later]


def test_older_ones_are_deleted_only_when_the_new_one_is_in_place_for_good(
    tiny_mae: MaskedAutoencoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content flushed, then renamed, then the name flushed, then deleted: a power cut at any moment leaves a valid one."""
    optimizer = trained(tiny_mae)
    save(tmp_path, 1, tiny_mae, optimizer)
    done: list[str] = []
    fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

    def noted_fsync(descriptor: int) -> None:
        done.append("flush folder" if Path(f"/proc/self/fd/{descriptor}").resolve() == tmp_path else "flush file")
        fsync(descriptor)

    def noted_replace(path: Path, target: Path) -> Path:
        done.append("rename")
        return replace(path, target)

    def noted_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            done.append(f"delete {path.name}")
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    monkeypatch.setattr(Path, "unlink", noted_unlink)
    save(tmp_path, 2, tiny_mae, optimizer, keep=1)
    assert done == ["flush file", "rename", "flush folder", "delete step_00000001.safetensors"]


def test_of_a_sick_run_the_newest_sound_checkpoint_stays_and_is_gone_back_to(
    tiny_mae: MaskedAutoencoder, tmp_path: Path
) -> None:
    tensors = training_tensors(tiny_mae, trained(tiny_mae))
    writer = CheckpointWriter(tmp_path, keep=1)
    for step, is_sound in ((1, True), (2, True), (3, False), (4, False)):
        writer.save(step, {}, tensors, is_sound=is_sound)
    writer.wait()
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, 2), checkpoint_path(tmp_path, 4)]
    assert [read_checkpoint(path).is_sound for path in sorted(tmp_path.iterdir())] == [True, False]
    resumed = CheckpointWriter(tmp_path, keep=1)  # which goes on from step 4, and knows of step 2
    resumed.save(5, {}, tensors, is_sound=False)
    resumed.wait()
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, 2), checkpoint_path(tmp_path, 5)]
    checkpoint_path(tmp_path, 6).write_bytes(b"torn")
    assert set_suspects_aside(tmp_path) == (checkpoint_path(tmp_path, 2), 2, [])
    newest, complaints = newest_checkpoint(tmp_path)
    assert newest is not None
    assert (newest.step, complaints) == (2, {})
    assert {path.name for path in tmp_path.glob("*.suspect")} == {"step_00000005.suspect", "step_00000006.suspect"}

    recovered = CheckpointWriter(tmp_path, keep=1)
    recovered.save(7, {}, tensors)
    recovered.wait()
    assert list(tmp_path.glob("*.safetensors")) == [checkpoint_path(tmp_path, 7)]


def test_a_sick_run_without_a_sound_checkpoint_starts_again(
    tiny_mae: MaskedAutoencoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, _target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    writer = CheckpointWriter(tmp_path, keep=2)
    writer.save(1, {}, training_tensors(tiny_mae, trained(tiny_mae)), is_milestone=True, is_sound=False)
    writer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        assert set_suspects_aside(tmp_path) == (None, 0, [checkpoint_path(tmp_path, 1, is_milestone=True)])
    assert set_suspects_aside(tmp_path) == (None, 1, [])
    assert newest_checkpoint(tmp_path) == (None, {})


def test_fewer_checkpoints_make_room_before_the_next_is_written(
    tiny_mae: MaskedAutoencoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = trained(tiny_mae)
    for step in (1, 2):
        save(tmp_path, step, tiny_mae, optimizer, keep=2)
    fail_with(monkeypatch, errno.ENOSPC)
    with pytest.raises(UserError, match="No space left on device"):
        save(tmp_path, 3, tiny_mae, optimizer, keep=1)
    assert list(tmp_path.iterdir()) == [checkpoint_path(tmp_path, 2)]


def test_an_undeletable_checkpoint_is_a_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        checkpoint_path(tmp_path, step).write_bytes(b"")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match=r"cannot delete the checkpoint .*step_00000001.* \(Permission denied\)"):
        prune_checkpoints(tmp_path, checkpoint_path(tmp_path, 2), keep=1)


# ------------------------------------------------------------------------------------------------- what cannot be written


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_failed_write_is_one_clear_line_and_costs_no_earlier_checkpoint(
    tiny_mae: MaskedAutoencoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    optimizer = trained(tiny_mae)
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(1, {}, training_tensors(tiny_mae, optimizer))
    writer.wait()
    fail_with(monkeypatch, number)
    writer.save(2, {}, training_tensors(tiny_mae, optimizer))
    writer.settle()
    assert writer.failure is not None
    with pytest.raises(UserError) as caught:
        writer.wait()
    message = str(caught.value)
    assert "\n" not in message
    for part in (f"cannot write the checkpoint {checkpoint_path(tmp_path, 2)}", os.strerror(number), "MiB are free there",
                 "Earlier checkpoints are intact", "--resume auto"):  # fmt: skip
        assert part in message
    assert writer.failure is None  # it was told
    assert list(tmp_path.iterdir()) == [checkpoint_path(tmp_path, 1)]
    assert newest_checkpoint(tmp_path)[1] == {}


def test_a_file_larger_than_may_be_written_leaves_nothing(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    """A real failure in the middle of a file, as a full disk's: the kernel refuses what goes beyond a limit."""
    optimizer = trained(tiny_mae)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write the checkpoint .*File too large"):
            save(tmp_path, 2, tiny_mae, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """A file system of `size` bytes in memory."""
    folder = Path(tempfile.mkdtemp())  # not below pytest's own: what is left of an interrupted test must not stop its tidying
    try:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("mounting takes an administrator")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)  # tensors that were read may still be mapped
    finally:
        folder.rmdir()


def test_a_full_and_a_read_only_disk_keep_what_they_hold(tiny_mae: MaskedAutoencoder) -> None:
    """Real ones: with room for one checkpoint only, and then remounted."""
    optimizer = trained(tiny_mae)
    size = sum(tensor.nbytes for tensor in training_tensors(tiny_mae, optimizer).values())
    with small_disk(int(1.6 * size)) as folder:
        (folder / ".step_00000001.safetensors.123.tmp").write_bytes(bytes(size))  # a killed program's, which takes the room
        save(folder, 1, tiny_mae, optimizer)
        with pytest.raises(UserError, match=r"step_00000002.* No space left on device"):
            save(folder, 2, tiny_mae, optimizer, keep=1)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.raises(UserError, match=r"step_00000002.* Read-only file system"):
            save(folder, 2, tiny_mae, optimizer, keep=1)
        assert list(folder.iterdir()) == [checkpoint_path(folder, 1)]
        newest, complaints = newest_checkpoint(folder)
        assert newest is not None
        assert (newest.step, complaints) == (1, {})


def test_a_file_in_place_of_the_folder_is_a_users_error(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        save(tmp_path / "file", 1, tiny_mae, trained(tiny_mae))


# ------------------------------------------------------------------------------------------------------------- the lock


def test_readers_of_a_killed_program_do_not_hold_its_lock(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path; from training.run import lock_run_folder\n"
        "lock = lock_run_folder(Path(sys.argv[1]))\n"
        "reader = os.fork()\n"
        "if reader == 0: time.sleep(60)\n"
        "print(reader, flush=True); time.sleep(60)\n"
    )
    held = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    reader = int(held.stdout.readline())
    try:
        with pytest.raises(UserError, match="in use by another program"):
            lock_run_folder(tmp_path)
        held.kill()
        held.wait()
        lock_run_folder(tmp_path).close()
    finally:
        os.kill(reader, signal.SIGKILL)
        held.stdout.close()

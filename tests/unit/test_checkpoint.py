import contextlib
import dataclasses
import errno
import itertools
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
from accelerate import Accelerator
from accelerate.state import AcceleratorState
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
from training.run import RunConfig, lock_run_folder
from training.saving import CheckpointWriter, HostCopy, Saver


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


# ------------------------------------------------------------------------------------------------------ in the background


def test_what_is_written_is_the_moment_of_the_save_though_training_goes_on(
    tiny_mae: MaskedAutoencoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    optimizer = trained(tiny_mae)
    writer = CheckpointWriter(tmp_path, keep=2)
    before = bytes_of(training_tensors(tiny_mae, optimizer))
    writer.save(2, {}, training_tensors(tiny_mae, optimizer))
    assert gate.reached.wait(30)
    assert writer.writing == 2
    train_more(tiny_mae, optimizer)  # in place, as optimizers do
    after = bytes_of(training_tensors(tiny_mae, optimizer))
    assert all(before[name] != after[name] for name in before if name.endswith(("exp_avg", "/step")))
    assert not list(tmp_path.iterdir())
    gate.opened.set()
    writer.wait()
    assert writer.writing is None
    assert bytes_of(read_checkpoint(checkpoint_path(tmp_path, 2)).tensors) == before


def test_one_write_at_a_time_and_the_next_save_waits_for_it(
    tiny_mae: MaskedAutoencoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy's memory is used again: it must not be overwritten before it is in the file."""
    gate = Gate(monkeypatch)
    optimizer = trained(tiny_mae)
    writer = CheckpointWriter(tmp_path, keep=2)
    states = []

    def save_both() -> None:
        for step in (2, 3):
            states.append(bytes_of(training_tensors(tiny_mae, optimizer)))
            writer.save(step, {}, training_tensors(tiny_mae, optimizer))
            train_more(tiny_mae, optimizer)

    training_thread = threading.Thread(target=save_both)
    training_thread.start()
    assert gate.reached.wait(30)
    training_thread.join(0.3)
    assert training_thread.is_alive()
    assert writer.writing == 2
    gate.opened.set()
    training_thread.join(30)
    writer.wait()
    for step, state in zip((2, 3), states, strict=True):
        assert bytes_of(read_checkpoint(checkpoint_path(tmp_path, step)).tensors) == state


def test_the_memory_of_a_copy_is_used_again_and_is_no_more_than_a_checkpoint(tiny_mae: MaskedAutoencoder) -> None:
    tensors = training_tensors(tiny_mae, trained(tiny_mae))
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(7), "half": torch.ones(3, dtype=torch.bfloat16)}
    tensors["turned"] = torch.arange(6.0).reshape(2, 3).T
    copy = HostCopy()
    places = [{name: taken.data_ptr() for name, taken in copy.take(tensors).items()} for _ in range(2)]
    assert places[0] == places[1]
    assert copy._buffer.nbytes <= sum(tensor.nbytes for tensor in tensors.values()) + 64 * len(tensors)
    for name, taken in copy.take(tensors).items():
        assert taken.dtype == tensors[name].dtype
        assert torch.equal(taken, tensors[name])
        assert taken.is_contiguous()
        assert taken.numel() == 0 or taken.data_ptr() != tensors[name].data_ptr()


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


# ----------------------------------------------------------------------------------------------------- when a run saves


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def due_steps(saver: Saver, num_steps: int) -> list[int]:
    return [step for step in range(1, num_steps + 1) if saver.is_due(step, *saver.notes())]


def test_checkpoints_are_due_by_steps_by_epochs_and_by_the_clock(
    tiny_mae: MaskedAutoencoder, tmp_path: Path, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(save_every_steps=5, milestone_every_epochs=0.7)
    optimizer = trained(tiny_mae)
    with Saver(config, tmp_path, 0.1, accelerator) as saver:
        assert due_steps(saver, 20) == [5, 7, 10, 14, 15, 20]
        for step in (5, 7):
            saver.save(step, {}, tiny_mae, optimizer)
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, 5), checkpoint_path(tmp_path, 7, is_milestone=True)]

    seconds = itertools.count(start=1000, step=10)  # ten between two looks at the clock
    monkeypatch.setattr("training.saving.time.monotonic", lambda: float(next(seconds)))
    with Saver(RunConfig(save_every_steps=100, save_every_minutes=0.5), tmp_path, 0.1, accelerator) as saver:
        assert due_steps(saver, 4) == [3, 4]
        saver.save(4, {}, tiny_mae, optimizer)
        assert due_steps(saver, 4) == [3, 4]  # every save counts
        assert saver.is_due(1, True, False)
        saver.accelerator = SecondProcess()  # pyright: ignore[reportAttributeAccessIssue]
        assert due_steps(saver, 9) == []  # the first process's clock counts, and is made known by `StopRequest.agreed`


class SecondProcess:
    is_main_process = False

    def wait_for_everyone(self) -> None:
        pass


def test_only_the_first_process_writes(tiny_mae: MaskedAutoencoder, tmp_path: Path, accelerator: Accelerator) -> None:
    with Saver(RunConfig(), tmp_path, 0.1, accelerator) as saver:
        saver.accelerator = SecondProcess()  # pyright: ignore[reportAttributeAccessIssue]
        saver.save(5, {}, tiny_mae, trained(tiny_mae))
        assert saver.notes() == (False, False)
        with pytest.raises(SystemExit) as caught:  # told by the first one that its write failed
            saver.is_due(6, False, True)
    assert caught.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_machines_that_see_different_folders_are_told(
    tmp_path: Path, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would go on from another step, and wait for the others for ever."""
    monkeypatch.setattr(training.resume, "gather_object", lambda found: [*found, 300])
    with pytest.raises(UserError, match=r"checkpoints of different steps there \(None, 300\): put --output_dir on a disk that"):
        training.resume._find(tmp_path, accelerator)


@pytest.mark.parametrize("name", ["save_every_minutes", "milestone_every_epochs"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_periods_must_be_periods(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"run.{name} must be above 0 and finite, not {value}"):
        dataclasses.replace(RunConfig(), **{name: value})


def test_leaving_a_run_waits_for_its_last_checkpoint(
    tiny_mae: MaskedAutoencoder, tmp_path: Path, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end, and on the way out of an error or of a second Ctrl-C."""
    gate = Gate(monkeypatch)
    optimizer = trained(tiny_mae)
    for step, error in ((1, None), (2, ValueError("bug")), (3, SystemExit(130))):
        gate.opened.clear()
        threading.Timer(0.2, gate.opened.set).start()
        with contextlib.suppress(ValueError, SystemExit), Saver(RunConfig(), tmp_path, 0.1, accelerator) as saver:
            saver.save(step, {}, tiny_mae, optimizer)
            if error:
                raise error
        assert checkpoint_path(tmp_path, step).exists()


def test_a_failed_write_ends_the_run_at_the_next_step_in_one_line(
    tiny_mae: MaskedAutoencoder,
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    optimizer = trained(tiny_mae)
    fail_with(monkeypatch, errno.ENOSPC)

    def failed_write(saver: Saver) -> None:
        saver.save(5, {}, tiny_mae, optimizer)
        saver._writer.settle()

    def at_the_next_step(saver: Saver) -> None:
        failed_write(saver)
        saver.save(6, {}, tiny_mae, optimizer)  # not here: the other processes would wait for this one in vain
        saver.is_due(7, *saver.notes())
        raise AssertionError("the run went on")

    for what in (at_the_next_step, failed_write):
        with pytest.raises(SystemExit) as caught, Saver(RunConfig(), tmp_path, 0.1, accelerator) as saver:
            what(saver)
        assert caught.value.code == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith(f"error: cannot write the checkpoint {checkpoint_path(tmp_path, 5)}: [Errno 28] No space left")
        assert err.count("\n") == 1

    def with_a_bug() -> None:
        with Saver(RunConfig(), tmp_path, 0.1, accelerator) as saver:
            failed_write(saver)
            raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):  # which must not be hidden
        with_a_bug()
    assert capfd.readouterr().err.startswith("warning: cannot write the checkpoint")


def test_waiting_for_a_slow_disk_is_said_once(
    tiny_mae: MaskedAutoencoder,
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    gate = Gate(monkeypatch)
    optimizer = trained(tiny_mae)
    with Saver(RunConfig(), tmp_path, 0.1, accelerator) as saver:
        for step in (1, 2, 3):
            gate.opened.clear()
            threading.Timer(0.2, gate.opened.set).start()
            saver.save(step, {}, tiny_mae, optimizer)
    assert capfd.readouterr().out.count("warning: the checkpoint of step 2 has to wait until that of step 1 is written") == 1
    assert len(list(tmp_path.iterdir())) == 2


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

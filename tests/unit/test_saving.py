"""When a run saves: a copy in memory while it waits, the file while it trains on."""

import contextlib
import dataclasses
import errno
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import training.checkpoint
import training.resume
import training.saving
from models.mae import MaskedAutoencoder
from tests.unit.test_checkpoint import Gate, bytes_of, fail_with, train_more, trained
from training.checkpoint import checkpoint_path, read_checkpoint, training_tensors
from training.cli import UserError
from training.run import RunConfig
from training.saving import CheckpointWriter, HostCopy, Saver

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

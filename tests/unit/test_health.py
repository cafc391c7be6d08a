"""Steps that are not sound change nothing; what is told of a run that does not recover; spikes and stalls."""

import errno
import math
import os
import re
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from data.loader import Batch
from data.shards import ShardSet
from models.mae import MaskedAutoencoder
from training.checkpoint import SetAside
from training.diagnosis import first_not_finite
from training.health import MAX_SKIPPED_IN_A_ROW, Health
from training.meters import Meters
from training.optim import LARS
from training.parallel import Distributed
from training.watch import SpikeWatch, StallWatch


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def batch_of(*values: float) -> Batch:
    """A batch of one image for each value, of nothing else."""
    images = torch.tensor(values)[:, None]  # (B, 1)
    indices = torch.arange(len(values))
    return Batch(images, indices, indices, indices, [])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def lars(model: nn.Module) -> torch.optim.Optimizer:
    return LARS(model.parameters(), lr=0.1)


class Trained:
    """A small model with a BatchNorm, trained by hand.

    An image of value x is a row of ones times x; the loss is computed as the loop's would be.
    """

    def __init__(self, folder: Path, shards: ShardSet, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.accelerator = Accelerator(cpu=True)
        distributed = Distributed(self.model, optimizer(self.model), self.accelerator)
        self.optimizer: Any = distributed.optimizer
        self.batches = [batch_of(1.0, 2.0)]
        self.health = Health(
            self.accelerator, folder, distributed, 0, shards, lambda _: self.batches, self.set_suspects_aside,
            lambda _model, batch, *_: self.loss(batch),
        )  # fmt: skip
        self.meters = Meters()
        self.sound: Path | None = None
        self.left = list[Path]()

    def set_suspects_aside(self) -> SetAside:
        return SetAside(self.sound, 2, self.left)

    def loss(self, batch: Batch) -> Tensor:
        return self.model(batch.images).square().mean()

    def step(self, *batches: Batch, factor: float = 1.0) -> None:
        self.batches = list(batches)
        for batch in batches:
            self.health.backward(self.loss(batch) * factor, len(batches), batch)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf)
        self.health.update(norm, self.meters)

    def state(self) -> dict[str, Tensor]:
        """Copies of all that a step changes: weights, running statistics, moments, the optimizer's own count of steps."""
        moments = self.optimizer.state_dict()["state"]
        named = {f"{number}/{name}": value for number, entry in moments.items() for name, value in entry.items()}
        return {name: torch.as_tensor(tensor).clone() for name, tensor in (self.model.state_dict() | named).items()}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


GOOD = batch_of(1.0, -2.0, 0.5)
SICK = batch_of(1.0, math.nan, 0.5)


@pytest.mark.parametrize("optimizer", [adamw, lars])
@pytest.mark.parametrize(
    "sick",
    [
        lambda trained: trained.step(SICK),
        lambda trained: trained.step(GOOD, SICK),
        lambda trained: trained.step(SICK, GOOD),
        lambda trained: trained.step(GOOD, factor=math.inf),
        lambda trained: trained.step(GOOD, factor=1e25),  # finite gradients, of which the squares are not
    ],
)
def test_a_step_that_is_not_sound_changes_nothing_and_the_next_goes_on(
    tmp_path: Path,
    picture_shards: ShardSet,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    sick: Callable[[Trained], None],
) -> None:
    trained = Trained(tmp_path, picture_shards, optimizer)
    trained.step(GOOD)
    before = trained.state()
    sick(trained)
    assert equal(trained.state(), before)
    assert all(parameter.grad is None for parameter in trained.model.parameters())
    trained.step(GOOD)
    after = trained.state()
    assert not equal(after, before)
    AcceleratorState._reset_state(reset_partial_state=True)

    never_sick = Trained(tmp_path, picture_shards, optimizer)
    never_sick.step(GOOD)
    never_sick.step(GOOD)
    assert equal(after, never_sick.state())


def test_a_loss_that_is_not_finite_skips_the_step_even_where_its_gradient_is_finite(
    tmp_path: Path, picture_shards: ShardSet
) -> None:
    """A process whose own loss is sick must bring it to all others, which see only the gradients."""
    trained = Trained(tmp_path, picture_shards)
    before = trained.state()
    loss = trained.model(GOOD.images).mean() + torch.tensor(math.inf)  # the gradient of a sum does not see what is added
    trained.health.backward(loss, 1, GOOD)
    assert not any(parameter.grad.isfinite().all() for parameter in trained.model.parameters() if parameter.grad is not None)
    norm = torch.nn.utils.clip_grad_norm_(trained.model.parameters(), 1.0)
    trained.health.update(norm, trained.meters)
    after = trained.state()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_norm_of_which_the_square_overflows_is_infinite_to_the_optimizer(tmp_path: Path, picture_shards: ShardSet) -> None:
    """Where squares are added up in float64 the norm is finite, and AdamW's mean of squares would be infinite for ever."""
    trained = Trained(tmp_path, picture_shards)
    trained.health.backward(trained.loss(GOOD), 1, GOOD)
    before = trained.state()
    trained.health.update(torch.tensor(1e25), trained.meters)
    after = trained.state()
    assert all(torch.equal(after[name], before[name]) for name in before if "running" not in name and "tracked" not in name)


def test_means_are_over_the_steps_that_counted(tmp_path: Path, picture_shards: ShardSet) -> None:
    trained = Trained(tmp_path, picture_shards)
    first = trained.loss(GOOD).item()
    trained.step(SICK)
    assert trained.health.take(trained.meters) == {}
    trained.step(SICK)
    trained.step(GOOD)
    means = trained.health.take(trained.meters)
    assert means["loss"] == pytest.approx(first)
    assert math.isfinite(means["grad_norm"])


def test_skipped_steps_are_counted_over_a_resumption(
    tmp_path: Path, picture_shards: ShardSet, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = Trained(tmp_path, picture_shards)
    trained.health.count_on({"loss": 1.0, "skipped_steps": 7.0})
    trained.step(GOOD)
    assert trained.health.entries(1, 0.5) == {"skipped_steps": 7.0}
    assert capfd.readouterr().out == ""
    for step in (2, 3):
        trained.step(SICK)
        trained.health.check(step)
    assert trained.health.entries(3, None) == {"skipped_steps": 9.0}
    assert trained.health.in_a_row == 2
    told = capfd.readouterr().out
    assert "step 2: 8 step(s) of this run were skipped so far" in told
    assert told.count("warning") == 1  # the next when they have doubled
    trained.step(GOOD)
    trained.health.check(4)
    assert trained.health.in_a_row == 0


def test_a_run_that_does_not_recover_ends_with_a_diagnosis(
    tmp_path: Path, picture_shards: ShardSet, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = Trained(tmp_path, picture_shards)
    trained.step(GOOD)
    trained.sound = tmp_path / "step_1.safetensors"
    for step in range(2, 1 + MAX_SKIPPED_IN_A_ROW):
        trained.step(GOOD, SICK)
        trained.health.check(step)
    trained.step(GOOD, SICK)
    with pytest.raises(SystemExit) as caught:
        trained.health.check(11)
    assert caught.value.code == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("error:"))
    assert "step 11: the last 10 steps were skipped" in line
    assert "loss nan, gradient norm nan on process 0 on " in line
    assert "the input of 0 (Linear) is the first to be not finite" in line
    assert "2 checkpoint(s) of the sick run are set aside as *.suspect; step_1.safetensors is good: go on from it with" in line
    assert line.endswith("with --resume auto and a lower --optim.base_lr or --optim.clip_grad_norm 1")  # it is float32 already
    path = tmp_path / "sick_step_00000011.json"
    assert str(path) in line
    assert re.search(r'"shard": ".*\.tar",\s+"key": ".+"', path.read_text())


def test_what_is_known_is_told_though_nothing_can_be_written(
    tmp_path: Path, picture_shards: ShardSet, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = Trained(tmp_path, picture_shards)

    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("training.health.replacing", full)
    trained.left = [tmp_path / "step_2.safetensors"]
    with pytest.raises(SystemExit):
        trained.health.require_sound_weights(1)
    line = capfd.readouterr().err
    assert "step 1: no step since step 0 has given a finite loss" in line
    assert "could not be listed in" in line
    assert "No space left on device" in line
    assert f"{tmp_path / 'step_2.safetensors'} could not be: delete what is left of these; no good checkpoint" in line


def test_a_checkpoint_is_a_suspect_after_many_skipped_steps_and_in_a_spike(tmp_path: Path, picture_shards: ShardSet) -> None:
    trained = Trained(tmp_path, picture_shards)
    step = 0

    def after(*batches: Batch) -> bool:
        nonlocal step
        for batch in batches:
            trained.step(batch)
        step += len(batches)
        return trained.health.require_sound_weights(step)

    assert after(SICK, *[GOOD] * 9)
    assert not after(SICK, SICK, *[GOOD] * 8)
    assert not after(GOOD)  # the last ten steps count at least
    assert after(*[GOOD] * 9)
    assert after(SICK, GOOD)  # a single one is none
    assert not after(SICK, GOOD)
    assert after(*[GOOD] * 20)
    assert not after(GOOD, SICK)  # but where it is the last
    assert after(*[GOOD] * 20)
    for loss in [1.0] * 8:
        trained.health.entries(step, loss)
    assert after(GOOD)
    assert "loss_jumped_from" not in trained.health.entries(step, 1.0)
    for loss in [5.0] * 40:  # a new median, and no better for that
        assert trained.health.entries(step, loss)["loss_jumped_from"] == 1.0
    assert not after(GOOD)

    resumed = Trained(tmp_path, picture_shards)
    resumed.health.count_on({"skipped_steps": 3.0, "loss_jumped_from": 1.0})
    resumed.step(GOOD)
    assert resumed.health.entries(1, 5.0)["loss_jumped_from"] == 1.0
    assert not resumed.health.require_sound_weights(1)

    assert trained.health.entries(step, 1.4)["loss_jumped_from"] == 0.0  # told once
    assert after(GOOD)
    assert "loss_jumped_from" not in trained.health.entries(step, 1.4)
    resumed.health.count_on({"skipped_steps": 3.0, "loss_jumped_from": 0.0})
    resumed.step(GOOD)
    assert resumed.health.require_sound_weights(2)


def test_sick_weights_are_not_saved(tmp_path: Path, picture_shards: ShardSet, capfd: pytest.CaptureFixture[str]) -> None:
    trained = Trained(tmp_path, picture_shards)
    trained.step(GOOD)
    before = trained.state()
    trained.health.require_sound_weights(1)
    assert equal(trained.state(), before)  # looking changes nothing
    trained.step(SICK)
    trained.health.require_sound_weights(2)  # a sick batch does not make the weights sick
    with torch.no_grad():
        next(trained.model[2].parameters()).mul_(1e30)  # finite, and of no use
    with pytest.raises(SystemExit):
        trained.health.require_sound_weights(3)
    line = capfd.readouterr().err
    assert "step 3: the new weights give no finite loss (" in line
    assert "no good checkpoint is there: start again with --resume auto" in line


def weight_of(value: float) -> Callable[[Any], object]:
    return lambda module: module.weight.data.fill_(value)


def sick_backward(module: nn.Module) -> object:
    return module.register_full_backward_hook(lambda _, into, __: (into[0] * math.nan,))


@pytest.mark.parametrize(
    ("name", "spoil", "expected"),
    [
        ("encoder.blocks.1.norm1", weight_of(math.nan), "the weight encoder.blocks.1.norm1.weight"),
        ("decoder.decoder_blocks.0.mlp.fc1", weight_of(3e38), "the output of decoder.decoder_blocks.0.mlp.fc1 (Linear)"),
        ("encoder.blocks.1", sick_backward, "the gradient that reaches the output of encoder.blocks.0 "),
    ],
)
def test_the_first_module_that_is_not_finite_is_found(
    tiny_mae: MaskedAutoencoder, name: str, spoil: Callable[[Any], object], expected: str
) -> None:
    images, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)
    assert first_not_finite(tiny_mae, lambda: tiny_mae(images, noise).loss) == ""
    spoil(tiny_mae.get_submodule(name))
    assert first_not_finite(tiny_mae, lambda: tiny_mae(images, noise).loss).startswith(expected)
    assert all(parameter.grad is None for parameter in tiny_mae.parameters())
    assert not any(module._forward_hooks for module in tiny_mae.modules())


def test_spikes_are_told_from_noise_and_from_slow_changes() -> None:
    watch = SpikeWatch()
    assert all(watch.add(loss) == (None, None) for loss in [1.0] * 8)
    assert watch.add(1.2) == (1.2, None)
    ratio, warning = watch.add(2.0)
    assert ratio == 2.0
    assert warning is not None
    assert "jumped to 2, 2 times the median of the last 9 entries (1); jump no. 1" in warning
    assert watch.add(2.0).warning is None  # still the same
    assert watch.add(1.0).warning is None
    assert "jump no. 2" in str(watch.add(3.0).warning)
    watch.add(1.0)
    assert watch.add(3.0).warning is None  # the third is not told, the fourth is
    watch.add(1.0)
    assert "jump no. 4" in str(watch.add(3.0).warning)

    noisy = SpikeWatch()  # a small loss scatters by factors
    told = [noisy.add(0.01 * (1 + number % 4)).warning for number in range(60)]
    assert set(told) == {None}
    diverging = SpikeWatch()  # before there is a median
    told = [diverging.add(loss).warning for loss in (2.0, 1.9, 15.0, 25.0, 400.0, 2.0)]
    assert [warning is not None for warning in told] == [False, False, False, True, False, False]
    assert "jumped to 25, from 2 at the start; jump no. 1" in str(told[3])
    falling = SpikeWatch()
    assert {falling.add(1.0 / (1 + number)).warning for number in range(60)} == {None}


def test_a_stall_is_told_while_it_lasts_and_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    closed = list[bool]()

    def slow() -> Generator[int, None, None]:
        try:
            yield 0
            deadline = time.monotonic() + 30
            text = ""
            while text.count("no batch of images") < 2 and time.monotonic() < deadline:  # told twice before the batch comes
                time.sleep(0.01)
                text += capfd.readouterr().err
            told.append(text)
            yield 1
            yield 2
        finally:
            closed.append(True)

    told = list[str]()
    assert list(StallWatch(limit_s=0.1).watch(slow())) == [0, 1, 2]
    assert closed == [True]
    source = slow()  # held here: Python does not close it by itself
    watched = StallWatch(limit_s=10.0).watch(source)
    assert next(watched) == 0
    watched.close()
    assert closed == [True, True]  # and its readers end, though it was not at its end
    assert told[0].count("no batch of images for") == 2
    assert "warning (process 0 on " in told[0]
    assert capfd.readouterr().err.count("the batch came after") == 1
    assert list(StallWatch(limit_s=10.0).watch(iter_of(3))) == [0, 1, 2]
    assert capfd.readouterr().err == ""


def iter_of(count: int) -> Generator[int, None, None]:
    yield from range(count)

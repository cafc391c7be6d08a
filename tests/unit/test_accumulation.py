"""A global batch may be cut in any way: over processes, and into micro-batches of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from data.config import DataConfig
from data.faults import Fault
from data.loader import BatchLoader
from data.shards import ShardSet
from data.stream import BatchPlan
from pretrain.config import PretrainConfig
from pretrain.loop import set_up, train_step
from tests.conftest import TINY
from training.batches import plan_batches
from training.cli import UserError
from training.meters import Meters
from training.optim import OptimConfig
from training.run import RunConfig, build_accelerator


def config_of(total: int | None, limit: int, views: int = 1, accum_steps: int = 1) -> PretrainConfig:
    data = DataConfig(batch_size_per_process=limit, views_per_image=views)
    return PretrainConfig(global_batch_size=total, data=data, optim=OptimConfig(accum_steps=accum_steps))


def plan_of(config: PretrainConfig, num_processes: int, in_pairs: bool = False) -> BatchPlan:
    return plan_batches(config.global_batch_size, config.data, config.optim.accum_steps, num_processes, 0, in_pairs)


@pytest.mark.parametrize(
    ("config", "num_processes", "expected"),
    [
        (config_of(None, 16, accum_steps=3), 2, (16, 3)),
        (config_of(4096, 64), 64, (64, 1)),
        (config_of(4096, 64), 32, (64, 2)),
        (config_of(4096, 64), 128, (32, 1)),
        (config_of(4096, 100), 32, (64, 2)),  # two of 64 rather than one of 100 and one of 28
        (config_of(96, 20), 1, (16, 6)),
        (config_of(7, 4), 1, (1, 7)),
        (config_of(96, 24, views=4), 2, (24, 2)),
        (config_of(56, 24, views=4), 1, (8, 7)),  # 14 images with 4 views each; 6 at once, so 2
    ],
)
def test_a_global_batch_is_cut_for_the_processes_at_hand(
    config: PretrainConfig, num_processes: int, expected: tuple[int, int]
) -> None:
    plan = plan_of(config, num_processes)
    assert (plan.batch_size_per_process, plan.accum_steps) == expected
    assert plan.batch_size_per_process <= config.data.batch_size_per_process
    if config.global_batch_size is not None:
        assert plan.global_batch_size == config.global_batch_size


def test_a_global_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(UserError, match=r"4096 cannot be shared evenly by 56 processes: .* give 4088 or 4144"):
        plan_of(config_of(4096, 64), 56)
    with pytest.raises(UserError, match=r"4 cannot be shared evenly by 8 processes: .* give 8"):
        plan_of(config_of(4, 64), 8)
    with pytest.raises(UserError, match=r"36 cannot be .* by 2 processes, each taking all 4 views of an image: .* 32 or 40"):
        plan_of(config_of(36, 8, views=4), 2)
    with pytest.raises(UserError, match=r"50 cannot be .* by 2 processes, each mixing pairs of images: .* 48 or 52"):
        plan_of(config_of(50, 64), 2, in_pairs=True)
    with pytest.raises(ValueError, match="give one of the two"):
        config_of(64, 16, accum_steps=2)
    with pytest.raises(ValueError, match="global_batch_size must be at least 1"):
        config_of(0, 16)


def test_pairs_of_images_are_not_cut_apart() -> None:
    plans = [plan_of(config_of(36, 10), 1, in_pairs) for in_pairs in (False, True)]
    assert [(plan.batch_size_per_process, plan.accum_steps) for plan in plans] == [(9, 4), (6, 6)]


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def gradients(
    shards: ShardSet, folder: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Tensor], BatchPlan]:
    """What the program's own step gives the optimizer, for the first global batch of 24 images."""
    config = PretrainConfig(
        output_dir=str(folder), num_steps=2, global_batch_size=24, model=TINY, optim=OptimConfig(warmup_epochs=0),
        data=DataConfig(train=str(shards.root), batch_size_per_process=limit, num_workers=0),
        run=RunConfig(device="cpu", dtype="float32"),
    )  # fmt: skip
    run = set_up(config)
    found: dict[str, Tensor] = {}

    def note() -> None:
        found.update(
            {name: parameter.grad.clone() for name, parameter in run.model.named_parameters() if parameter.grad is not None}
        )

    monkeypatch.setattr(run.distributed.optimizer, "step", note)
    loader = BatchLoader(run.shards, config.data, run.plan, run.order, TINY.img_size, TINY.in_chans, 0, 1)
    faults: list[Fault] = []
    with run.lock:
        train_step(run, iter(loader), Meters(), faults)  # pyright: ignore[reportArgumentType] (a list takes faults, too)
    fresh = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    assert found.keys() == fresh
    AcceleratorState._reset_state(reset_partial_state=True)
    return found, run.plan


def test_accumulated_gradients_are_those_of_one_batch(
    picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same samples under the same masks."""
    whole, plan = gradients(picture_shards, tmp_path / "whole", 24, monkeypatch)
    assert (plan.batch_size_per_process, plan.accum_steps) == (24, 1)
    cut, plan = gradients(picture_shards, tmp_path / "cut", 7, monkeypatch)
    assert (plan.batch_size_per_process, plan.accum_steps) == (6, 4)
    assert max(gradient.abs().max().item() for gradient in whole.values()) > 1e-2
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["DEEPSPEED", "MEGATRON_LM"])
def test_other_ways_of_distribution_are_refused_rather_than_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(UserError, match=f"asks for {name} .* by DDP or FSDP2"):
        build_accelerator(RunConfig(device="cpu"), tmp_path)

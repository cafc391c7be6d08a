import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn import functional as F

from data.errors import DataError
from data.evaluation import evaluation_batches
from data.shards import ShardSet
from data.stream import BatchPlan
from data.transforms import Normalization
from models.mae import MaskedAutoencoder
from training.cli import UserError
from training.faults import FaultLog
from training.knn import OnlineProbe, ProbeConfig, evenly_spread, gather_rows, is_due, knn_accuracy
from training.log import RunLog
from training.meters import WaitClock


@pytest.fixture
def accelerator(tmp_path: Path) -> Iterator[Accelerator]:
    yield Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    AcceleratorState._reset_state(reset_partial_state=True)


def online_probe(accelerator: Accelerator, train: str, test: str, num_workers: int = 0, **settings: int) -> OnlineProbe:
    config = ProbeConfig(train=train, test=test, **settings)
    return OnlineProbe(config, (32, 32), 3, Normalization((0.5,) * 3, (0.25,) * 3), 8, num_workers, accelerator)


@pytest.mark.parametrize(
    ("epochs_per_step", "every_epochs", "expected"),
    [
        (0.25, 1.0, [0, 4, 8, 12]),
        (0.4, 1.0, [0, 3, 5, 8, 10]),
        (0.7, 2.1, [0, 3, 6, 9, 12]),
        (0.5, 0.01, list(range(13))),
        (0.1, 50.0, [0]),
    ],
)
def test_periods_of_epochs_are_met_at_the_first_step_that_completes_them(
    epochs_per_step: float, every_epochs: float, expected: list[int]
) -> None:
    assert [step for step in range(13) if is_due(step, epochs_per_step, every_epochs)] == expected


def test_samples_are_spread_over_the_whole_data_set() -> None:
    assert evenly_spread(5, 9) == [0, 1, 2, 3, 4]
    assert evenly_spread(10, 4) == [0, 2, 5, 7]
    spread = evenly_spread(1797, 1000)
    assert len(set(spread)) == 1000
    assert max(np.diff([*spread, 1797])) == 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_chosen_samples_are_divided_among_processes_and_put_together_again(world_size: int, picture_shards: ShardSet) -> None:
    """Four samples for up to five processes: parts are unequal, and one may be empty."""
    chosen = [3, 4, 20, 52]
    parts = [
        torch.cat([torch.empty(0, dtype=torch.int64), *(batch.indices for batch in batches)])
        for batches in (
            evaluation_batches(picture_shards, (8, 8), 3, 2, 0, rank, world_size, chosen) for rank in range(world_size)
        )
    ]
    assert torch.cat(parts).tolist() == chosen

    class Together:
        """Gives what all processes send: the number of their rows, then the rows themselves."""

        def gather(self, tensor: torch.Tensor) -> torch.Tensor:
            longest = max(len(part) for part in parts)
            if tensor.shape == (1,):
                return torch.tensor([len(part) for part in parts])
            assert tensor.shape == (longest, 1)
            return torch.cat([F.pad(part.unsqueeze(1), (0, 0, 0, longest - len(part)), value=-1) for part in parts])

    whole = gather_rows(parts[0].unsqueeze(1), cast(Accelerator, Together()))
    assert whole.squeeze(1).tolist() == chosen


@pytest.mark.parametrize("num_workers", [0, 1])
def test_measuring_leaves_no_trace(
    num_workers: int, picture_shards: ShardSet, tiny_mae: MaskedAutoencoder, accelerator: Accelerator
) -> None:
    """Modes, gradients, weights and every random state are as they were."""
    root = str(picture_shards.root)
    probe = online_probe(accelerator, root, root, num_workers, k=1)
    modes_seen: list[tuple[bool, bool]] = []
    tiny_mae.encoder.norm.register_forward_pre_hook(
        lambda module, _: modes_seen.append((module.training, torch.is_grad_enabled()))
    )
    for training in (True, False):
        tiny_mae.train(training)
        before = {name: tensor.clone() for name, tensor in tiny_mae.state_dict().items()}
        states = (torch.get_rng_state(), random.getstate(), str(np.random.get_state(legacy=False)))  # noqa: NPY002
        values = probe.measure(tiny_mae.encoder)
        after = (torch.get_rng_state(), random.getstate(), str(np.random.get_state(legacy=False)))  # noqa: NPY002
        assert torch.equal(states[0], after[0])
        assert states[1:] == after[1:]
        assert all(module.training == training for module in tiny_mae.modules())
        assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_mae.state_dict().items())
        assert all(parameter.grad is None for parameter in tiny_mae.parameters())
        assert values == {"knn/mean": 1.0, "knn/cls": 1.0}  # every picture is its own nearest neighbour
    assert set(modes_seen) == {(False, False)}


def test_normalization_serves_training_after_measuring(
    picture_shards: ShardSet, tiny_mae: MaskedAutoencoder, accelerator: Accelerator
) -> None:
    """The same object is used by both; tensors that it keeps must not be bound to the measuring."""
    root = str(picture_shards.root)
    normalization = Normalization((0.5,) * 3, (0.25,) * 3)
    probe = OnlineProbe(ProbeConfig(train=root, test=root), (32, 32), 3, normalization, 8, 0, accelerator)
    probe.measure(tiny_mae.encoder)
    images = normalization.apply(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).requires_grad_()
    tiny_mae.encoder.forward_features(images).sum().backward()
    assert images.grad is not None


def test_the_tokens_measured_are_those_of_the_final_norm(
    picture_shards: ShardSet, tiny_mae: MaskedAutoencoder, accelerator: Accelerator
) -> None:
    """Equal to nearest neighbours among features that are computed here."""
    root = str(picture_shards.root)
    probe = online_probe(accelerator, root, root, max_train=20, max_test=15, k=3)
    (batch,) = evaluation_batches(picture_shards, (32, 32), 3, 53, 0)
    with torch.no_grad():
        tokens = tiny_mae.encoder.forward_features((batch.images / 255 - 0.5) / 0.25)
    train, test = evenly_spread(53, 20), evenly_spread(53, 15)
    for name, features in (("mean", tokens[:, 1:].mean(1)), ("cls", tokens[:, 0])):
        expected = knn_accuracy(features[train], batch.labels[train], features[test], batch.labels[test], 2, (3,))[3]
        assert 0 < expected < 1
        assert probe.measure(tiny_mae.encoder)[f"knn/{name}"] == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": "digits"}, "probe.train and probe.test belong together"),
        ({"test": "digits"}, "probe.train and probe.test belong together"),
        ({"every_epochs": 0.0}, "probe.every_epochs must be above 0"),
        ({"every_epochs": float("inf")}, "probe.every_epochs must be above 0"),
        ({"max_train": 0}, "must be at least 1"),
        ({"max_test": 0}, "must be at least 1"),
        ({"k": 0}, "must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProbeConfig(**settings)


def test_data_that_does_not_fit_is_refused_at_once(picture_shards: ShardSet, accelerator: Accelerator) -> None:
    pictures = str(picture_shards.root)
    with pytest.raises(DataError, match="/nowhere"):
        online_probe(accelerator, pictures, "/nowhere")
    with pytest.raises(UserError, match="differ: number 0 is even in the first, 0 in the second"):
        online_probe(accelerator, pictures, "digits")


def test_paused_time_is_not_counted(accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("training.log.time.perf_counter", lambda: now)
    monkeypatch.setattr("training.log.tqdm.write", lambda _: None)
    clock = WaitClock()
    faults = FaultLog(accelerator, tmp_path, 0, BatchPlan(5, 1, 1, 0), 1.0)
    with RunLog(accelerator, tmp_path, 0, 20, 5, clock, faults) as log:
        written: list[dict[str, float]] = []
        monkeypatch.setattr(log._metrics, "write", written.append)
        now += 1
        with log.paused():
            now += 1000
        log.write_measured(3, {"knn/mean": 0.5}, "half")
        now += 1
        clock.waited_s = 0.5
        log.write(10, {"loss": 1.0}, "")
    assert written[0] == {"step": 3, "knn/mean": 0.5}
    assert written[1]["images_per_s"] == 10 * 5 / 2
    assert written[1]["data_wait"] == 0.25

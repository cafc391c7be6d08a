"""Nearest neighbours during pretraining, in whole runs on the digits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.writer import list_images, write_shards
from tests.integration.test_pretrain import TINY_RUN, fresh_accelerator, metrics, refused, run, run_here, two_processes  # noqa: F401
from training.checkpoint import checkpoint_path, read_checkpoint

PROBE = ("--probe.train", "digits-train", "--probe.test", "digits-test")
# 1,797 digits in batches of 64: an epoch is 28.08 steps.
FLAGS = ("--data.batch_size_per_process", "64", "--num_steps", "40", "--optim.base_lr", "3e-2", "--run.save_every_steps", "10")


def split(output: Path) -> tuple[list[dict[str, float]], dict[int, dict[str, float]]]:
    """Entries of the training, and step -> what the probe measured."""
    entries = metrics(output)
    measured = [entry for entry in entries if "knn/mean" in entry]
    assert all(entry.keys() == {"step", "knn/mean", "knn/cls"} for entry in measured)
    return [entry for entry in entries if "loss" in entry], {int(entry["step"]): entry for entry in measured}


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("probed") / "run"
    return output, run(output, *FLAGS, *PROBE, "--probe.every_epochs", "0.5")


def test_accuracy_is_measured_at_the_start_every_period_and_at_the_end(probed: tuple[Path, str]) -> None:
    output, text = probed
    _, measured = split(output)
    assert list(measured) == [0, 15, 29, 40]
    assert "20-NN accuracy every 0.5 epochs: 360 images" in text
    assert "1,437 of" in text
    assert f"step 29: 20-NN accuracy {measured[29]['knn/mean']:.1%} by the mean of the patches" in text
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    for name in ("knn/mean", "knn/cls"):
        recorded = {event.step: event.value for event in events.Scalars(name)}
        assert recorded == {step: pytest.approx(entry[name]) for step, entry in measured.items()}


def test_accuracy_is_far_above_chance_and_follows_the_weights(probed: tuple[Path, str]) -> None:
    """Chance is 0.1; that training makes it rise is no matter of 40 steps."""
    _, measured = split(probed[0])
    assert min(min(entry["knn/mean"], entry["knn/cls"]) for entry in measured.values()) > 0.25
    assert len({entry["knn/mean"] for entry in measured.values()}) > 2


def test_the_training_is_the_same_bit_for_bit_with_and_without_the_probe(probed: tuple[Path, str], tmp_path: Path) -> None:
    run(tmp_path / "run", *FLAGS)
    with_probe, without = split(probed[0])[0], split(tmp_path / "run")[0]
    same = ("step", "loss", "explained", "grad_norm", "lr", "epoch")
    assert [[entry[name] for name in same] for entry in with_probe] == [[entry[name] for name in same] for entry in without]
    one, two = (read_checkpoint(checkpoint_path(at / "checkpoints", 40)).tensors for at in (probed[0], tmp_path / "run"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_two_processes_measure_what_one_does(probed: tuple[Path, str], tmp_path: Path) -> None:
    text = run(
        tmp_path / "run", *FLAGS, *PROBE, "--probe.every_epochs", "0.5", "--data.batch_size_per_process", "32",
        launcher=two_processes(),
    )  # fmt: skip
    assert text.count("20-NN accuracy every") == 1
    one, two = split(probed[0])[1], split(tmp_path / "run")[1]
    assert one.keys() == two.keys()
    assert all(
        two[step][name] == pytest.approx(one[step][name], abs=2 / 360) for step in one for name in ("knn/mean", "knn/cls")
    )


@pytest.mark.usefixtures("fresh_accelerator")
def test_the_probe_may_be_changed_or_left_out_when_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--data.batch_size_per_process", "8", "--num_steps", "6", "--data.num_workers", "0", "--run.save_every_steps", "3",
             "--optim.warmup_epochs", "0", "--run.cpu_threads", "1", "--resume", "auto")  # fmt: skip
    probe = (*PROBE, "--probe.max_train", "50", "--probe.max_test", "20", "--probe.every_epochs", "0.001")
    output = tmp_path / "run"
    assert run_here(monkeypatch, output, *flags, *probe) == 0
    first = split(output)[1]
    assert list(first) == list(range(7))
    checkpoint_path(output / "checkpoints", 6).unlink()
    assert run_here(monkeypatch, output, *flags, *probe, "--probe.k", "1") == 0
    again = split(output)[1]
    assert list(again) == list(range(7))
    assert [again[step] for step in range(4)] == [first[step] for step in range(4)]  # not measured anew
    checkpoint_path(output / "checkpoints", 6).unlink()
    assert run_here(monkeypatch, output, *flags) == 0
    assert list(split(output)[1]) == [0, 1, 2, 3]
    capfd.readouterr()


@pytest.mark.parametrize("missing", ["train", "test"])
@pytest.mark.usefixtures("fresh_accelerator")
def test_data_that_cannot_be_opened_is_refused_before_anything_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    message = refused(
        capfd, monkeypatch, "--output_dir", str(tmp_path / "run"), *TINY_RUN, *PROBE, f"--probe.{missing}", "/nowhere"
    )
    assert "/nowhere" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("fresh_accelerator")
def test_images_that_cannot_be_read_end_the_run_before_its_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five channels in the probe, one in the training: seen by reading, and not after hours."""
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        np.save(tmp_path / "images" / name / "1.npy", np.zeros((8, 8, 5), dtype=np.uint8))
    write_shards(list_images(tmp_path / "images"), tmp_path / "shards", num_workers=0)
    flags = ("--output_dir", str(tmp_path / "run"), *TINY_RUN, "--probe.train", str(tmp_path / "shards"),
             "--probe.test", str(tmp_path / "shards"))  # fmt: skip
    message = refused(capfd, monkeypatch, *flags, "--data.num_workers", "0")
    assert "000000.tar" in message
    assert metrics(tmp_path / "run") == []

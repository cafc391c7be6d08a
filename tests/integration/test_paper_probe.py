"""The paper's probe on features that are computed once is the one that finetune/configs/linear_probe.yaml trains on images."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.config import DataConfig
from data.sources import open_dataset
from data.stream import SubsetOrder
from data.transforms import Normalization
from finetune.main import main
from finetune.paper_probe import PaperRecipe, paper_probe
from models.formats import load_encoder
from models.mae import build_mae
from pretrain.report import export_encoder
from tests.integration.test_finetune import TINY
from training.features import extract_features

EPOCHS, WARMUP_EPOCHS, BASE_LR, BATCH_SIZE = 4, 0.5, 10.0, 64


def same_start(weight: Tensor, std: float, **_: object) -> Tensor:
    """In place of the initial weights of both."""
    with torch.no_grad():
        return weight.copy_(std * torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)))


def test_cached_and_full_probe_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without augmentation, from the same weights, in the same order: the same accuracy."""
    torch.manual_seed(0)
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    export_encoder(encoder, build_mae(TINY), TINY, Normalization((0.3,), (0.4,)))
    monkeypatch.setattr(nn.init, "trunc_normal_", same_start)
    flags = [
        "--config", "finetune/configs/linear_probe.yaml", "--encoder", str(encoder), "--data.train", "digits-train",
        "--data.val", "digits-test", "--data.crop_scale", "1", "1", "--data.flip_probability", "0", "--data.eval_crop_pct", "1",
        "--epochs", str(EPOCHS), "--optim.warmup_epochs", str(WARMUP_EPOCHS), "--optim.base_lr", str(BASE_LR),
        "--data.batch_size_per_process", str(BATCH_SIZE), "--data.num_workers", "0", "--run.dtype", "float32", "--run.device",
        "cpu", "--output_dir", str(tmp_path / "run"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["finetune/main.py", *flags])
    assert main() == 0
    full = json.loads((tmp_path / "run" / "evaluation.json").read_text())["top1"]

    train, test = open_dataset("digits-train"), open_dataset("digits-test")
    features = [extract_features(load_encoder(str(encoder)), images, 1, torch.device("cpu")) for images in (train, test)]
    order = SubsetOrder(np.arange(len(train)), train.first_sample, 0, DataConfig().shuffle_window)
    epochs = iter(range(100))

    def epoch_of_the_run(num_samples: int, **_: object) -> Tensor:
        start = next(epochs) * num_samples
        return torch.from_numpy(order.resolve(np.arange(start, start + num_samples)).indices)

    monkeypatch.setattr(torch, "randperm", epoch_of_the_run)
    labels = [torch.from_numpy(np.array(images.labels)) for images in (train, test)]
    views = [of_set.views["cls/2"] for of_set in features]

    def cached(base_lr: float) -> float:
        recipe = PaperRecipe(EPOCHS, WARMUP_EPOCHS, base_lr, BATCH_SIZE)
        return paper_probe(views[0], labels[0], views[1], labels[1], 10, recipe, seed=0)

    assert cached(BASE_LR) == pytest.approx(full, abs=1.5 / len(test))  # rounding may turn one image
    assert full > 0.2  # something was learnt

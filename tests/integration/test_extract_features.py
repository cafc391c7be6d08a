"""scripts/extract_features.py as a user runs it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.shards import ShardSet
from data.transforms import Normalization
from models.mae import MAEConfig, build_mae
from pretrain.report import export_encoder
from scripts import extract_features
from tests.conftest import write_pictures


@pytest.fixture
def common(tiny_config: MAEConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of an untrained encoder and an output; the cache is the test's own."""
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run").mkdir()
    torch.manual_seed(0)
    export_encoder(tmp_path / "run", build_mae(tiny_config), tiny_config, Normalization((0.5,) * 3, (0.25,) * 3))
    return ["--encoder", str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--num_workers", "0", "--device", "cpu"]


def extract(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["extract_features.py", *flags])
    extract_features.main()


def test_shards_with_labels(
    common: list[str],
    picture_shards: ShardSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    extract(monkeypatch, *common, "--data", str(picture_shards.root), "--tokens", "both", "--dtype", "float32")
    out, err = capfd.readouterr()
    assert "53 samples in 1 file(s), after block 2 of 2, float32: cls 32, patches 4 x 4 x 32" in out
    assert "53/53" in err  # the progress bar
    command = out.splitlines()[-1].split("read with safetensors.torch.")[1]
    arrays = eval(command, {"load_file": load_file})  # what the last line says works as it stands
    assert arrays["patches"].shape == (53, 4, 4, 32)
    assert arrays["labels"].tolist() == picture_shards.labels.tolist()


def test_pictures_as_they_lie(
    common: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No shards, no labels, a format of numpy."""
    write_pictures(tmp_path / "pictures", 5)
    (tmp_path / "table.csv").write_text("path\npictures/even/000.png\npictures/odd/001.png\n")
    extract(monkeypatch, *common, "--data", str(tmp_path / "table.csv"), "--format", "npz")
    with np.load(tmp_path / "out" / "000000.npz", allow_pickle=False) as file:
        assert file["cls"].shape == (2, 32)
        assert file["cls"].dtype == np.float16
        assert file["labels"].tolist() == [-1, -1]
    assert "numpy.load(" in capfd.readouterr().out
    assert json.loads((tmp_path / "out" / "index.json").read_text())["tokens"] == {"cls": [32]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--encoder", "no_such_model"], "is no run folder"),
        (["--data", "/nowhere"], "/nowhere does not exist"),
        (["--block", "3"], "block 3: the encoder has the blocks 1 .. 2"),
        (["--output", "tests"], "output tests is not empty"),
    ],
)
def test_mistakes_end_in_one_line(
    common: list[str],
    picture_shards: ShardSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as caught:
        extract(monkeypatch, *common, "--data", str(picture_shards.root), *flags)
    assert caught.value.code == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "out").exists()

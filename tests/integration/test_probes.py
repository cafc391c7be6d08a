"""The probe scripts as a user runs them, on an encoder that was exported."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.shards import ShardSet
from data.transforms import Normalization
from finetune import probe
from finetune.probe import FewShotResult, ProbeResult, Setting, ViewResult
from models.mae import MAEConfig, build_mae
from pretrain.report import export_encoder
from scripts import few_shot_probe, knn_probe, linear_probe
from tests.conftest import write_pictures


@pytest.fixture
def common(tiny_config: MAEConfig, picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of both scripts: an untrained encoder, and pictures that are test and training set at once."""
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    export_encoder(tmp_path, build_mae(tiny_config), tiny_config, Normalization((0.5,) * 3, (0.25,) * 3))
    data = str(picture_shards.root)
    return [
        "--encoders",
        str(tmp_path),
        "--train",
        data,
        "--test",
        data,
        "--num_workers",
        "0",
        "--output",
        f"{tmp_path}/out.json",
    ]


def test_linear_probe_prints_a_table_and_writes_its_results(
    common: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--random_baseline", "True", "--seeds", "2", "--num_steps", "200", "--lrs", "1e-2", "1e-1", "--weight_decays", "0"]
    monkeypatch.setattr(sys, "argv", ["linear_probe.py", *common, *flags, "--logistic_regression", "True", "--paper_recipe"])
    linear_probe.main()
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:3] == ["encoder", "view", "test"]
    trained, random = json.loads((tmp_path / "out.json").read_text())["results"]
    views = [f"{pooling}/{span}" for span in ("1", "2", "1-2") for pooling in ("cls", "mean", "both")]
    # The encoder has two blocks, less than the four that are tried where there are as many.
    rows = [line.removeprefix(trained["encoder"]).split() for line in table[1:]]
    assert rows[0][0] == "chosen:"
    assert [row[0] for row in rows[1:10]] == views
    chosen = trained["seeds"][0]["chosen"]["view"]
    assert [row[:3] for row in rows[10:12]] == [[chosen, "(paper", "recipe)"], [chosen, "(logistic", "regression)"]]
    assert len(trained["paper_recipe"]["test_accuracy"]) == 2
    assert sum("(random weights)" in line for line in table) == 12
    assert random["encoder"].endswith("(random weights)")
    for number, seed in enumerate(trained["seeds"]):
        assert seed["seed"] == number
        assert {result["view"] for result in seed["views"]} == set(views)
        best = max(result["held_out_accuracy"] for result in seed["views"])
        assert seed["chosen"]["held_out_accuracy"] == best
        # 53 random pictures that are in the training set too: 32 numbers are enough to know nearly all by heart.
        assert seed["chosen"]["test_accuracy"] > 0.8
    mean = sum(seed["chosen"]["test_accuracy"] for seed in trained["seeds"]) / 2
    assert f"{mean:.2%} +-" in table[1]


def test_a_row_says_what_the_seeds_chose() -> None:
    def result(view: str, lr: float, test_accuracy: float) -> ViewResult:
        return ViewResult(view, Setting(lr, 0.0), 0.5, test_accuracy)

    runs = [
        ProbeResult(result(view, lr, test), [result("cls/2", 1.0, 0.1), result("mean/2", 1.0, 0.2)])
        for view, lr, test in (("cls/2", 0.1, 0.6), ("mean/2", 0.1, 0.7), ("mean/2", 0.3, 0.8))
    ]
    chosen, _, mean = linear_probe.table_rows("e", runs, ["cls/2", "mean/2"])
    assert chosen == {
        "encoder": "e", "view": "chosen: mean/2 (2), cls/2 (1)", "test accuracy": "70.00% +- 10.00%",
        "held-out accuracy": "50.00% +- 0.00%", "lr": "0.1 (2), 0.3 (1)", "weight decay": "0",
    }  # fmt: skip
    assert (mean["view"], mean["test accuracy"], mean["lr"]) == ("mean/2", "20.00% +- 0.00%", "1")


def test_knn_probe_finds_each_picture_in_the_training_set(
    common: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["knn_probe.py", *common, "--ks", "1", "53"])
    knn_probe.main()
    assert "1-NN" in capsys.readouterr().out
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["accuracy"]["1"] for result in results] == [1.0, 1.0]


def test_few_shot_probe_uses_so_many_labels_and_no_more(
    common: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Tensor] = []

    def few_shot_accuracy(train: Tensor, labels: Tensor, *rest: Any) -> FewShotResult:
        assert len(train) == len(labels)
        assert torch.bincount(labels).unique().numel() == 1  # as many of each class
        seen.append(train)
        return probe.few_shot_accuracy(train, labels, *rest)

    monkeypatch.setattr(few_shot_probe, "few_shot_accuracy", few_shot_accuracy)
    flags = ["--shots", "1", "5", "20", "--seeds", "3", "--random_baseline", "True"]
    monkeypatch.setattr(sys, "argv", ["few_shot_probe.py", *common, *flags])
    few_shot_probe.main()
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 2 * 2 * 3  # encoders, views, shots
    assert [len(train) for train in seen[:9]] == [2] * 3 + [10] * 3 + [40] * 3
    for one, five, twenty in zip(seen[:3], seen[3:6], seen[6:9], strict=True):
        assert all((five == row).all(dim=1).any() for row in one)  # the draws of one seed are nested
        assert all((twenty == row).all(dim=1).any() for row in five)
    assert not torch.equal(seen[3], seen[4])
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["shots"] for result in results] == [1, 5, 20] * 4
    assert results[0].keys() == {"encoder", "view", "shots", "logistic_regression", "nearest_class_mean"}
    assert len(results[0]["logistic_regression"]) == len(results[0]["nearest_class_mean"]) == 3
    assert results[0]["logistic_regression"] != results[0]["nearest_class_mean"]
    scores = results[2]["nearest_class_mean"]
    assert f"{sum(scores) / 3:.2%} +- {torch.tensor(scores).std():.2%}" == table[3][-len("99.99% +- 9.99%") :].strip()

    few_shot_probe.main()
    assert json.loads((tmp_path / "out.json").read_text())["results"] == results


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--shots", "1", "27"],
            "shots 27: {train}: class 1 has 26 samples, 27 are wanted of every class; give smaller --shots",
        ),
        (["--shots", "0"], "shots must be at least 1"),
        (["--strength", "0"], "strength above 0"),
    ],
)
def test_few_shot_mistakes_end_in_one_line_before_anything_is_encoded(
    common: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["few_shot_probe.py", *common, *flags])
    monkeypatch.setattr(few_shot_probe, "probed_encoders", lambda *_: pytest.fail("encoded"))
    with pytest.raises(SystemExit) as caught:
        few_shot_probe.main()
    assert caught.value.code == 2
    assert message.format(train=common[common.index("--train") + 1]) in capfd.readouterr().err


def test_one_class_cannot_be_told_apart(
    common: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path / "pictures", 2)
    (tmp_path / "pictures" / "table.csv").write_text("path,label\neven/000.png,0\nodd/001.png,0\n")
    monkeypatch.setattr(sys, "argv", ["few_shot_probe.py", *common, "--train", str(tmp_path / "pictures" / "table.csv")])
    with pytest.raises(SystemExit):
        few_shot_probe.main()
    assert "has one class only; expected at least two" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--encoders", "no_such_model"], "is no run folder"),
        (["--train", "/nowhere"], "/nowhere does not exist"),
        (["--last_blocks", "3"], "has only 2 blocks"),
        (["--train", "digits"], "differ: number 0 is 0 in the first, even in the second"),
    ],
)
def test_mistakes_end_in_one_line(
    common: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["knn_probe.py", *common, *flags])
    with pytest.raises(SystemExit) as caught:
        knn_probe.main()
    assert caught.value.code == 2
    assert message in capfd.readouterr().err


def test_pictures_without_labels_are_refused(
    common: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path / "pictures", 2)
    (tmp_path / "pictures" / "table.csv").write_text("path\neven/000.png\n")
    monkeypatch.setattr(sys, "argv", ["knn_probe.py", *common, "--test", str(tmp_path / "pictures" / "table.csv")])
    with pytest.raises(SystemExit):
        knn_probe.main()
    assert "table.csv: 1 of 1 samples have no label" in capfd.readouterr().err


SCRIPTS = sorted(path.name for path in Path("scripts").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_launcher_s_copies_of_a_script_are_refused_before_they_write_the_same_files(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first of a machine speaks for all; there are no flags: nothing else is looked at before."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", [name])
    for rank, expected in (("0", f"error: the launcher started 2 copies of scripts/{name} (WORLD_SIZE)"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            importlib.import_module(f"scripts.{name.removesuffix('.py')}").main()
        assert caught.value.code == 2
        out, err = capfd.readouterr()
        assert err.startswith(expected)
        assert (out, err.count("\n")) == ("", int(rank == "0"))

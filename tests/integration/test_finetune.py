"""Stage two as its users start it: whole programs, on real images."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.transforms import Normalization
from finetune.main import main
from models.mae import MAEConfig, build_mae
from pretrain.report import export_encoder
from tests.conftest import write_pictures

LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")

TINY = MAEConfig(
    name="tiny", img_size=(16, 16), patch_size=4, in_chans=1, embed_dim=32, depth=2, num_heads=2,
    decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=2,
)  # fmt: skip

RUN = [
    "--data.train", "digits-train", "--data.val", "digits-test", "--data.num_workers", "0", "--data.crop_scale", "0.8", "1.0",
    "--data.batch_size_per_process", "32", "--run.dtype", "float32", "--run.device", "cpu", "--run.log_every_steps", "1",
    "--optim.base_lr", "2e-2", "--optim.warmup_epochs", "0.05", "--num_steps", "8",
]  # fmt: skip
PLAIN = [
    "--augment.rand_augment", "", "--augment.mixup", "0", "--augment.cutmix", "0", "--augment.erase_probability", "0",
    "--model.drop_path_rate", "0",
]  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained encoder as a run leaves it."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    export_encoder(folder, build_mae(TINY), TINY, Normalization((0.3,), (0.4,)))
    return str(folder)


def finetune(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """Runs the program in this process."""
    monkeypatch.setattr(sys, "argv", ["finetune/main.py", *flags])
    return main()


def entries(folder: Path) -> list[dict[str, float]]:
    """All lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[float, float]:
    """Step -> training loss."""
    return {entry["step"]: entry["loss"] for entry in entries(folder) if "loss" in entry}


def test_a_run_learns_and_leaves_a_classifier_that_timm_loads(
    encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    flags = [*RUN, *PLAIN, "--num_steps", "120", "--eval_every_epochs", "1", "--optim.layer_decay", "1"]
    assert finetune(monkeypatch, "--encoder", encoder, "--output_dir", str(folder), *flags) == 0
    printed = capsys.readouterr().out
    assert "1,437 of 1,437 images, 10 classes" in printed

    measured = [entry for entry in entries(folder) if "val/top1" in entry]
    assert [entry["step"] for entry in measured] == [45, 90, 120]
    assert measured[-1]["val/top1"] > 0.25  # ten classes, 120 steps
    summary = json.loads((folder / "evaluation.json").read_text())
    assert summary["num_samples"] == 360
    assert summary["top1"] == measured[-1]["val/top1"]
    best = json.loads((folder / "best_classifier.json").read_text())
    assert best["top1"] == max(entry["val/top1"] for entry in measured)
    with Image.open(folder / "confusion.png") as picture:
        assert picture.width > 300

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert {"loss", "lr", "val/top1", "val/top5", "val/loss"} <= set(events.Tags()["scalars"])
    assert {"input", "confusion"} <= set(events.Tags()["images"])

    # The lines that the run prints, as a user types them.
    start = printed.index("import json, pathlib, timm, torch")
    code = "\n".join(line.strip() for line in printed[start:].splitlines())
    scope: dict[str, object] = {"images": torch.zeros(2, 1, 16, 16)}
    exec(code, scope)
    probabilities = scope["probabilities"]
    assert isinstance(probabilities, torch.Tensor)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(2))

    # Measuring again gives the same counts, and writes them beside the classifier.
    assert finetune(monkeypatch, "--eval_only", "True", "--encoder", str(folder), "--data.val", "digits-test",
                    "--run.dtype", "float32", "--data.num_workers", "0") == 0  # fmt: skip
    again = json.loads((folder / "evaluation" / "digits-test" / "evaluation.json").read_text())
    assert {key: again[key] for key in ("num_samples", "top1", "top5")} == {
        key: summary[key] for key in ("num_samples", "top1", "top5")
    }
    assert (folder / "evaluation" / "digits-test" / "confusion.csv").read_text() == (folder / "confusion.csv").read_text()


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything random on: drop path, RandAugment, erasing, mixup, cutmix; with the moving average, too."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    flags = [
        "--encoder", encoder, *RUN, "--run.save_every_steps", "3", "--run.keep_checkpoints", "9", "--ema_decay", "0.9",
        "--model.drop_path_rate", "0.5", "--optim.accum_steps", "2",
    ]  # fmt: skip
    assert finetune(monkeypatch, "--output_dir", str(straight), *flags) == 0
    shutil.copytree(straight, resumed)
    for step in (6, 8):
        (resumed / "checkpoints" / f"step_{step:08d}.safetensors").unlink()
    assert finetune(monkeypatch, "--output_dir", str(resumed), *flags, "--resume", "auto") == 0

    assert losses(straight) == losses(resumed)
    last = "step_00000008.safetensors"
    ours, theirs = (load_file(folder / "checkpoints" / last) for folder in (resumed, straight))
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("ema/") for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ema = {name.removeprefix("ema/vit."): tensor for name, tensor in ours.items() if name.startswith("ema/")}
    exported = load_file(resumed / "classifier.safetensors")
    assert all(torch.equal(exported[name], ema[name]) for name in exported)  # what is exported is the average


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.val", ""], "it learnt from other images of the same data"),
        (["--data.val", "digits-train"], "it was measured on other images than --data.val names now"),
        (["--encoder", "other"], "it was built on another encoder than --encoder names now"),
        (["--data.per_class", "3"], "data.per_class None -> 3"),
    ],
)
def test_a_run_is_not_resumed_as_another(
    encoder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    export_encoder(other, build_mae(TINY), TINY, Normalization((0.9,), (0.4,)))  # for another normalisation
    flags = [str(other) if flag == "other" else flag for flag in flags]
    start = ["--encoder", encoder, "--output_dir", str(run), *RUN, *PLAIN, "--num_steps", "2", "--optim.warmup_epochs", "0"]
    assert finetune(monkeypatch, *start) == 0
    with pytest.raises(SystemExit) as caught:
        finetune(monkeypatch, *start, "--resume", "auto", *flags)
    assert caught.value.code == 2
    assert message in capfd.readouterr().err


def launched(processes: int, *flags: str) -> str:
    """Runs the program through the launcher, and gives what it printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [
        *LAUNCH, "--multi_gpu", "--num_machines", "1", "--num_processes", str(processes), "--mixed_precision", "no",
        "--dynamo_backend", "no", "--main_process_port", port, "finetune/main.py", *flags,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_processes_train_as_one(encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    flags = ["--encoder", encoder, *RUN, *PLAIN, "--num_steps", "4"]
    assert finetune(monkeypatch, "--output_dir", str(one), *flags) == 0
    launched(2, "--output_dir", str(two), *flags, "--data.batch_size_per_process", "8", "--global_batch_size", "32")
    for step, loss in losses(one).items():
        assert losses(two)[step] == pytest.approx(loss, abs=1e-5), step
    assert (one / "confusion.csv").read_text() == (two / "confusion.csv").read_text()


def test_two_processes_end_with_the_same_statistics(encoder: str, tmp_path: Path) -> None:
    """BatchNorm's are the first process's: they are shared after the last step, when the logs are closed already."""
    head = ["--model.frozen", "True", "--model.batchnorm", "True", "--optim.name", "lars", "--optim.layer_decay", "1"]
    launched(2, "--output_dir", str(tmp_path / "run"), "--encoder", encoder, *RUN, *PLAIN, *head, "--num_steps", "2")
    summary = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert summary["num_samples"] == 360
    assert summary["top1"] == [entry for entry in entries(tmp_path / "run") if "val/top1" in entry][-1]["val/top1"]


def test_three_processes_measure_as_one(encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    assert finetune(monkeypatch, "--encoder", encoder, "--output_dir", str(run), *RUN, *PLAIN) == 0
    launched(
        3, "--eval_only", "True", "--encoder", str(run), "--data.val", "digits-test", "--data.eval_batch_size", "50",
        "--run.dtype", "float32", "--output_dir", str(tmp_path / "three"), "--data.num_workers", "0",
    )  # fmt: skip
    assert (tmp_path / "three" / "confusion.csv").read_text() == (run / "confusion.csv").read_text()
    assert json.loads((tmp_path / "three" / "evaluation.json").read_text())["num_samples"] == 360


@pytest.mark.parametrize(
    "flags",
    [
        ("--model.pooling", "mean", "--from_scratch", "True", "--model.patch_size", "8"),
        ("--model.frozen", "True", "--model.batchnorm", "True", "--optim.name", "lars", "--optim.layer_decay", "1"),
        ("--model.frozen", "True", "--model.pooling", "attentive"),
        ("--model.img_size", "24", "32", "--model.grad_checkpointing", "True"),
    ],
)
def test_every_kind_of_head_trains(
    encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    output = tmp_path / "run"
    assert finetune(monkeypatch, "--encoder", encoder, "--output_dir", str(output), *RUN, *PLAIN, *flags) == 0
    how = json.loads((output / "classifier.json").read_text())
    model = timm.create_model(
        how["timm_model"], checkpoint_path=str(output / "classifier.safetensors"), **how["timm_arguments"]
    )
    assert model(torch.zeros(1, 1, *how["timm_arguments"]["img_size"])).shape == (1, 10)
    before = load_file(Path(encoder) / "encoder.safetensors")["blocks.0.mlp.fc1.weight"]
    after = load_file(output / "classifier.safetensors")["blocks.0.mlp.fc1.weight"]
    assert torch.equal(before, after) == ("--model.frozen" in flags)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_student_learns_from_a_teacher(
    encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """From a fine-tuned run, and from any timm model with a file of weights."""
    teacher = tmp_path / "teacher"
    start = ["--output_dir", str(teacher), *RUN, *PLAIN, "--num_steps", "2", "--optim.warmup_epochs", "0"]
    assert finetune(monkeypatch, "--encoder", encoder, *start) == 0
    flags = ["--encoder", encoder, *RUN, "--num_steps", "2", "--optim.warmup_epochs", "0", "--distill.kind", kind]
    output = tmp_path / "student"
    assert finetune(monkeypatch, "--output_dir", str(output), *flags, "--distill.teacher", str(teacher)) == 0
    assert {"dist_token", "head_dist.weight"} <= load_file(output / "classifier.safetensors").keys()
    assert (
        finetune(
            monkeypatch, "--eval_only", "True", "--encoder", str(output), "--data.val", "digits-test", "--run.dtype", "float32"
        )
        == 0
    )
    # Another teacher of the same name and classes is another run.
    weights = load_file(teacher / "classifier.safetensors")
    with safe_open(teacher / "classifier.safetensors", framework="pt") as file:
        header = file.metadata()
    save_file({name: tensor + 1 for name, tensor in weights.items()}, teacher / "classifier.safetensors", metadata=header)
    with pytest.raises(SystemExit):
        finetune(monkeypatch, "--output_dir", str(output), *flags, "--distill.teacher", str(teacher), "--resume", "auto")
    assert "it learnt from another teacher" in capfd.readouterr().err
    # A distilled classifier is an encoder, too: its distillation token is left out.
    again = ["--encoder", str(output), "--output_dir", str(tmp_path / "again"), *RUN, "--num_steps", "1"]
    assert finetune(monkeypatch, *again, "--optim.warmup_epochs", "0", "--model.pooling", "mean") == 0
    # The tables of a training run are not overwritten by measuring elsewhere.
    with pytest.raises(SystemExit):
        finetune(monkeypatch, "--eval_only", "--encoder", str(output), "--data.val", "digits-test", "--output_dir", str(output),
                 "--run.dtype", "float32")  # fmt: skip
    assert "holds a training run, whose own tables would be lost" in capfd.readouterr().err
    colour = timm.create_model("resnet10t", num_classes=10, in_chans=3)
    torch.save(colour.state_dict(), tmp_path / "resnet.pth")
    with pytest.raises(SystemExit):  # a teacher for colour, digits are grey
        finetune(monkeypatch, "--output_dir", str(tmp_path / "no"), *flags, "--distill.teacher", "resnet10t",
                 "--distill.teacher_weights", str(tmp_path / "resnet.pth"))  # fmt: skip


def test_class_folders_and_few_labels(encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures as they lie, with their classes as folders; three of each class to learn from."""
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path / "cache"))
    write_pictures(tmp_path / "pictures", 24)
    output = tmp_path / "run"
    flags = [*RUN, *PLAIN, "--data.train", str(tmp_path / "pictures"), "--data.val", "", "--data.per_class", "3"]
    flags += ["--data.held_out", "0.25", "--num_steps", "2", "--optim.warmup_epochs", "0", "--data.batch_size_per_process", "4"]
    assert finetune(monkeypatch, "--encoder", encoder, "--output_dir", str(output), *flags) == 0
    assert json.loads((output / "classifier.json").read_text())["class_names"] == ["even", "odd"]
    assert json.loads((output / "evaluation.json").read_text())["num_samples"] == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--encoder", ""], "no encoder given"),
        (["--encoder", "no_such_thing"], "is no run folder"),
        (["--data.train", ""], "no labelled data given"),
        (["--data.train", "/nowhere"], "/nowhere"),
        (["--data.per_class", "1000"], "1000 are wanted of every class"),
        (["--model.img_size", "18", "16"], "not a multiple of the encoder's patches of 4 px"),
        (["--model.patch_size", "8"], "only from scratch"),
        (["--augment.rand_augment", "dance-m9"], "no description that timm understands"),
        (["--distill.teacher", "nobody"], "timm has no model of this name"),
        (["--optim.warmup_epochs", "5"], "not shorter than the run"),
        (["--data.mean", "0.5"], "data.mean and data.std need 1 numbers each"),
        (["--eval_only", "True"], "classifier"),
        (["--eval_only", "True", "--data.val", ""], "give --encoder RUN_FOLDER and --data.val IMAGES"),
    ],
)
def test_mistakes_end_in_one_line(
    encoder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    output = tmp_path / "run"
    with pytest.raises(SystemExit) as caught:
        finetune(monkeypatch, "--encoder", encoder, "--output_dir", str(output), *RUN, *flags)
    assert caught.value.code == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert not output.exists()


def test_a_classifier_is_not_measured_on_other_classes(
    encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    assert (
        finetune(
            monkeypatch,
            "--encoder",
            encoder,
            "--output_dir",
            str(run),
            *RUN,
            *PLAIN,
            "--num_steps",
            "1",
            "--optim.warmup_epochs",
            "0",
        )
        == 0
    )
    write_pictures(tmp_path / "pictures", 4)
    capfd.readouterr()
    with pytest.raises(SystemExit) as caught:
        finetune(
            monkeypatch,
            "--eval_only",
            "True",
            "--encoder",
            str(run),
            "--data.val",
            str(tmp_path / "pictures"),
            "--run.dtype",
            "float32",
        )
    assert caught.value.code == 2
    assert "only the first has 0, 1, 2, 3, 4 and 5 more; only the second has even, odd" in capfd.readouterr().err
    assert not (run / "evaluation").exists()


def test_the_whole_chain_by_the_commands_that_the_programs_print(tmp_path: Path) -> None:
    """Pretrain, probe, fine-tune, measure on the digits: each command as printed by the program before, only made shorter."""
    brief = ["--num_steps", "20", "--optim.warmup_epochs", "0.1"]
    short = {
        "knn_probe.py": [], "linear_probe.py": ["--num_steps", "50"], "finetune/main.py": brief,
        "--eval_only": [],
    }  # fmt: skip
    environment = os.environ | {"MAE_VIT_CACHE": str(tmp_path / "cache"), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}

    def run(command: str, flags: list[str]) -> str:
        words = shlex.split(command)
        start = [sys.executable] if words[0] == "python" else list(LAUNCH)
        done = subprocess.run(
            [*start, *words[1 if words[0] == "python" else 2 :], *flags],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, command + done.stdout + done.stderr
        return done.stdout

    printed = run("accelerate launch pretrain/main.py", ["--output_dir", str(tmp_path / "run"), *brief])
    for kind in ("knn_probe.py", "linear_probe.py", "finetune/main.py", "--eval_only"):
        (line,) = (line for line in printed.splitlines() if kind in line)
        command = line[line.index("accelerate launch") if "accelerate launch" in line else line.index("python ") :]
        output = run(command, [*short[kind], *(["--output", str(tmp_path / "out.json")] if "probe" in kind else [])])
        printed = output if kind == "finetune/main.py" else printed
        assert "%" in output
    assert (
        json.loads((tmp_path / "run-finetuned" / "evaluation" / "digits-test" / "evaluation.json").read_text())["num_samples"]
        == 360
    )

"""Stage one as its users start it: whole programs, on real images."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file

from data.shards import ShardSet
from pretrain.main import main
from training.checkpoint import checkpoint_path, read_checkpoint

TINY_RUN = [
    "--data.train", "digits", "--model.name", "tiny", "--model.img_size", "16", "16", "--model.patch_size", "4",
    "--model.in_chans", "1", "--model.embed_dim", "32", "--model.depth", "2", "--model.num_heads", "2",
    "--model.decoder_embed_dim", "32", "--model.decoder_depth", "2", "--model.decoder_num_heads", "2",
    "--optim.warmup_epochs", "0.1", "--optim.base_lr", "1e-2", "--run.dtype", "float32", "--run.device", "cpu",
    "--run.log_every_steps", "1", "--data.num_workers", "1", "--num_steps", "12",
]  # fmt: skip


def start(output: Path, *flags: str, launcher: tuple[str, ...] = (sys.executable,)) -> subprocess.Popen[str]:
    """Starts the program in a new process group, as a shell does."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [*launcher, "pretrain/main.py", "--output_dir", str(output), *TINY_RUN, *flags]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def run(output: Path, *flags: str, launcher: tuple[str, ...] = (sys.executable,)) -> str:
    """Runs the program to its end, which must be a good one, and gives what it printed."""
    process = start(output, *flags, launcher=launcher)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    return text


def metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> dict[int, float]:
    return {int(entry["step"]): entry["loss"] for entry in metrics(output)}


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An uninterrupted run of 12 steps of 64 images, and what it printed."""
    output = tmp_path_factory.mktemp("straight") / "run"
    launcher = (sys.executable, "-m", "accelerate.commands.launch")
    return output, run(output, "--data.batch_size_per_process", "64", launcher=launcher)


def test_a_run_learns_and_leaves_what_a_person_needs(straight_run: tuple[Path, str]) -> None:
    output, text = straight_run
    entries = metrics(output)
    assert [entry["step"] for entry in entries] == list(range(1, 13))
    assert entries[-1]["loss"] < 0.7 * entries[0]["loss"]
    assert entries[-1]["explained"] > entries[0]["explained"]
    assert entries[0]["lr"] == 0.0
    for name in ("grad_norm", "images_per_s", "memory_mib"):
        assert entries[-1][name] > 0
    assert 0 <= entries[-1]["data_wait"] <= 1
    for asked in (
        "1,797 images in 4 shards",
        "16 patches, 4 visible",
        "GFLOPs",
        "peak 0.0025",
        "cpu, float32",
        "explained",
    ):
        assert asked in text
    with Image.open(output / "reconstruction.png") as picture:
        assert picture.width > 600
    assert list((output / "tensorboard").glob("events.*"))
    assert read_checkpoint(checkpoint_path(output / "checkpoints", 12)).step == 12


def test_printed_commands_work(straight_run: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python lines printed at the end build the encoder."""
    output, text = straight_run
    code = text[text.index("model = timm.create_model") :].split("\n\n")[0]
    space = {"timm": timm}
    exec(code, space)
    features = space["model"].forward_features(torch.zeros(1, 1, 16, 16))  # pyright: ignore[reportAttributeAccessIssue]
    assert features.shape == (1, 17, 32)
    exported = load_file(output / "encoder.safetensors")
    checkpoint = read_checkpoint(checkpoint_path(output / "checkpoints", 12)).tensors
    assert all(torch.equal(tensor, checkpoint[f"model/encoder.{name}"]) for name, tensor in exported.items())


def test_two_processes_give_the_same_losses_as_one(straight_run: tuple[Path, str], tmp_path: Path) -> None:
    launcher = (
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "2",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
    )  # fmt: skip
    text = run(tmp_path / "run", "--data.batch_size_per_process", "32", launcher=launcher)
    assert "64 = 32 per process x 2 processes" in text
    assert text.count("1,797 images") == 1  # one process speaks
    one, two = losses(straight_run[0]), losses(tmp_path / "run")
    assert one.keys() == two.keys()
    assert max(abs(one[step] - two[step]) for step in one) < 1e-5


def test_accumulated_micro_batches_give_the_same_losses_as_one_batch(straight_run: tuple[Path, str], tmp_path: Path) -> None:
    run(tmp_path / "run", "--data.batch_size_per_process", "16", "--optim.accum_steps", "4")
    one, four = losses(straight_run[0]), losses(tmp_path / "run")
    assert max(abs(one[step] - four[step]) for step in one) < 1e-5


def wait_for_step(output: Path, step: int) -> None:
    for _ in range(600):
        if (output / "metrics.jsonl").exists() and any(entry["step"] >= step for entry in metrics_so_far(output)):
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached in a minute")


def metrics_so_far(output: Path) -> list[dict[str, float]]:
    """Complete lines only: the program may be writing."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().split("\n")[:-1]]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_goes_on_where_it_was_stopped_and_gives_what_an_uninterrupted_run_gives(
    tmp_path: Path, how: signal.Signals
) -> None:
    """60 steps are two passes over the digits: stopped in the middle of an epoch, continued, equal bit for bit."""
    flags = ("--data.batch_size_per_process", "64", "--num_steps", "60", "--run.save_every_steps", "10")
    run(tmp_path / "whole", *flags)
    process = start(tmp_path / "stopped", *flags)
    wait_for_step(tmp_path / "stopped", 22)
    os.killpg(process.pid, how)
    text, _ = process.communicate(timeout=60)
    stopped_at = max(losses(tmp_path / "stopped"))
    assert stopped_at < 60, "stopped too late to show anything"
    if how == signal.SIGINT:
        assert process.returncode == 130, text
        assert f"stopped after step {stopped_at}" in text
        assert checkpoint_path(tmp_path / "stopped" / "checkpoints", stopped_at).exists()
    text = run(tmp_path / "stopped", *flags, "--resume", "auto")
    resumed_at = stopped_at if how == signal.SIGINT else stopped_at // 10 * 10
    assert f"step_{resumed_at:08d}.safetensors" in text
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    whole, stopped = (
        read_checkpoint(checkpoint_path(tmp_path / name / "checkpoints", 60)).tensors for name in ("whole", "stopped")
    )
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *flags: str) -> str:
    """The message with which the program refuses flags, in one line and with status 2."""
    monkeypatch.setattr(sys, "argv", ["main.py", *flags])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capfd.readouterr()
    assert caught.value.code == 2, out + err
    assert "Traceback" not in out + err
    messages = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, out + err
    return messages[0]


MISTAKES = [
    (["--model.patch_size", "5"], "patch_size 5 does not divide img_size 16 x 16; patch sizes that do: 2, 4, 8, 16"),
    (["--model.mask_ratio", "1.2"], "mask_ratio must lie between 0 and 1 (both excluded), not 1.2"),
    (["--data.train", "/nowhere"], "/nowhere"),
    (["--data.train", ""], "no data given: --data.train FOLDER"),
    (["--optim.warmup_epochs", "40"], "lower --optim.warmup_epochs or train longer"),
    (["--data.mean", "0.5", "0.5", "0.5"], "1 numbers each"),
]


@pytest.mark.parametrize(("flags", "expected"), MISTAKES)
@pytest.mark.usefixtures("fresh_accelerator")
def test_mistakes_end_in_one_clear_line(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    expected: str,
) -> None:
    message = refused(capfd, monkeypatch, "--output_dir", str(tmp_path / "run"), *TINY_RUN, *flags)
    assert expected in message
    assert not (tmp_path / "run").exists()  # nothing is written before everything is checked


@pytest.mark.usefixtures("fresh_accelerator")
def test_empty_folder_and_folder_of_pictures_are_refused_with_the_way_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--output_dir", str(tmp_path / "run"), *TINY_RUN, "--data.train"]
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capfd, monkeypatch, *common, str(tmp_path / "empty"))
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "pictures" / "a.png")
    assert "scripts/make_shards.py" in refused(capfd, monkeypatch, *common, str(tmp_path / "pictures"))


@pytest.mark.usefixtures("fresh_accelerator")
def test_broken_checkpoints_are_refused_or_passed_over(
    straight_run: tuple[Path, str],
    picture_shards: ShardSet,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, _ = straight_run
    common = ["--output_dir", str(output), *TINY_RUN, "--data.batch_size_per_process", "64"]
    assert "already holds a run" in refused(capfd, monkeypatch, *common)
    resumed = [*common, "--resume", "auto"]
    assert "run.seed 0 -> 1" in refused(capfd, monkeypatch, *resumed, "--run.seed", "1")
    assert "global batch of 64, now it would be 32" in refused(
        capfd, monkeypatch, *resumed, "--data.batch_size_per_process", "32"
    )
    assert "other data" in refused(capfd, monkeypatch, *resumed, "--data.train", str(picture_shards.root))
    checkpoint = checkpoint_path(output / "checkpoints", 12)
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[: len(content) // 2])
    try:
        assert "cut off" in refused(capfd, monkeypatch, *resumed)
    finally:
        checkpoint.write_bytes(content)


@pytest.mark.parametrize(
    "shape",
    [
        ["--model.img_size", "96", "160", "--model.patch_size", "16", "--model.in_chans", "1"],
        ["--model.pos_embed", "learned", "--optim.clip_grad_norm", "1.0", "--run.dtype", "bfloat16"],
    ],
)
def test_other_shapes_and_settings_train(tmp_path: Path, shape: list[str]) -> None:
    run(tmp_path / "run", *shape, "--num_steps", "2", "--optim.warmup_epochs", "0", "--data.batch_size_per_process", "4")
    assert len(losses(tmp_path / "run")) == 2

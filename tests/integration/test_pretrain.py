"""Stage one as its users start it: whole programs, on real images."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.shards import ShardSet
from pretrain.main import main
from tests.conftest import write_pictures
from training.checkpoint import checkpoint_path, read_checkpoint

TINY_RUN = [
    "--data.train", "digits", "--model.name", "tiny", "--model.img_size", "16", "16", "--model.patch_size", "4",
    "--model.in_chans", "1", "--model.embed_dim", "32", "--model.depth", "2", "--model.num_heads", "2",
    "--model.decoder_embed_dim", "32", "--model.decoder_depth", "2", "--model.decoder_num_heads", "2",
    "--optim.warmup_epochs", "0.1", "--optim.base_lr", "1e-2", "--run.dtype", "float32", "--run.device", "cpu",
    "--run.log_every_steps", "1", "--data.num_workers", "1", "--num_steps", "12",
]  # fmt: skip


LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")


def two_processes() -> tuple[str, ...]:
    """The launcher of two processes on the CPU, on a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return (
        *LAUNCH, "--multi_gpu", "--num_machines", "1", "--num_processes", "2", "--mixed_precision", "no",
        "--dynamo_backend", "no", "--main_process_port", port,
    )  # fmt: skip


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
    return output, run(output, "--data.batch_size_per_process", "64", launcher=LAUNCH)


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


def test_printed_commands_work(straight_run: tuple[Path, str]) -> None:
    """The Python lines printed at the end build the encoder."""
    output, text = straight_run
    code = textwrap.dedent(text[text.index("  import json, pathlib, timm") :])
    space = {"images": torch.zeros(1, 1, 16, 16)}
    exec(code, space)
    assert space["features"].shape == (1, 17, 32)
    exported = load_file(output / "encoder.safetensors")
    checkpoint = read_checkpoint(checkpoint_path(output / "checkpoints", 12)).tensors
    assert all(torch.equal(tensor, checkpoint[f"model/encoder.{name}"]) for name, tensor in exported.items())


def test_two_processes_give_the_same_losses_as_one(straight_run: tuple[Path, str], tmp_path: Path) -> None:
    text = run(tmp_path / "run", "--data.batch_size_per_process", "32", launcher=two_processes())
    assert "Warning" not in text
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


STOPPABLE = ("--data.batch_size_per_process", "64", "--num_steps", "60", "--run.save_every_steps", "10")
"""60 steps are two passes over the digits."""


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    run(output, *STOPPABLE)
    return output


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_goes_on_where_it_was_stopped_and_gives_what_an_uninterrupted_run_gives(
    whole_run: Path, tmp_path: Path, how: signal.Signals
) -> None:
    """Stopped in the middle of an epoch with its readers (the signal reaches the group), continued, equal bit for bit."""
    output = tmp_path / "run"
    process = start(output, *STOPPABLE)
    wait_for_step(output, 22)
    os.killpg(process.pid, how)
    text, _ = process.communicate(timeout=60)
    stopped_at = max(losses(output))
    assert stopped_at < 60, "stopped too late to show anything"
    if how == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM, text
        assert f"stopped after step {stopped_at}" in text
        assert "Traceback" not in text
        assert checkpoint_path(output / "checkpoints", stopped_at).exists()
    text = run(output, *STOPPABLE, "--resume", "auto")
    resumed_at = stopped_at if how == signal.SIGTERM else stopped_at // 10 * 10
    assert f"step_{resumed_at:08d}.safetensors" in text
    assert losses(output) == losses(whole_run)
    whole, stopped = (read_checkpoint(checkpoint_path(at / "checkpoints", 60)).tensors for at in (whole_run, output))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


def test_two_processes_stop_at_the_same_step_when_their_launcher_is_told_to(tmp_path: Path) -> None:
    """Ctrl-C on the launcher: torchrun passes SIGTERM or SIGINT on to each process."""
    output = tmp_path / "run"
    flags = ("--data.batch_size_per_process", "32", "--num_steps", "400", "--run.log_every_steps", "5")
    process = start(output, *flags, launcher=two_processes())
    wait_for_step(output, 10)
    os.killpg(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    stopped_at = max(losses(output))
    assert stopped_at < 400
    assert f"stopped after step {stopped_at}" in text, text
    assert checkpoint_path(output / "checkpoints", stopped_at).exists()


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
def test_an_empty_folder_is_refused_with_the_way_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    flags = ("--output_dir", str(tmp_path / "run"), *TINY_RUN, "--data.train", str(tmp_path / "empty"))
    message = refused(capfd, monkeypatch, *flags)
    assert "empty is empty; expected a folder of shards, a folder of images" in message


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
    assert "data.lanes 64 -> 2" in refused(capfd, monkeypatch, *resumed, "--data.lanes", "2")
    with monkeypatch.context() as later:
        later.setattr("training.resume.ORDER_VERSION", 99)
        assert "reads the samples in another order (2, now 99)" in refused(capfd, monkeypatch, *resumed)
    checkpoint = checkpoint_path(output / "checkpoints", 12)
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[: len(content) // 2])
    try:
        assert "cut off" in refused(capfd, monkeypatch, *resumed)
    finally:
        checkpoint.write_bytes(content)


def run_here(monkeypatch: pytest.MonkeyPatch, output: Path, *flags: str) -> int:
    """Runs the program in this process, which is faster than a new one; gives its exit status."""
    monkeypatch.setattr(sys, "argv", ["main.py", "--output_dir", str(output), *TINY_RUN, *flags])
    return main()


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_run_that_goes_on_by_another_decoder_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("training.resume.crop_backend", lambda: "one")
    flags = ("--num_steps", "2", "--optim.warmup_epochs", "0")
    assert run_here(monkeypatch, tmp_path, *flags) == 0
    capfd.readouterr()
    monkeypatch.setattr("training.resume.crop_backend", lambda: "another")
    assert run_here(monkeypatch, tmp_path, *flags, "--resume", "auto") == 0
    assert "jpeg_backend one -> another" in "".join(capfd.readouterr())


@pytest.mark.usefixtures("fresh_accelerator")
def test_views_of_an_image_count_as_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As many steps, epochs and the same learning rates as without; the run says what a pass over the images counts for."""
    logged = []
    for views in ("1", "2"):
        output = tmp_path / views
        flags = ["--num_steps", "4", "--run.log_every_steps", "1", "--optim.warmup_epochs", "0.05"]
        assert run_here(monkeypatch, output, *flags, "--data.views_per_image", views) == 0
        logged.append([(entry["step"], entry["epoch"], entry["lr"]) for entry in metrics(output) if "lr" in entry])
    assert logged[0] == logged[1]
    assert len(logged[0]) == 4
    assert "2 views of each image: reading all images once counts as 2 epochs" in "".join(capfd.readouterr())


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_folder_of_pictures_trains_directly_and_a_resumed_run_finds_it_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MAE_VIT_CACHE", str(tmp_path / "cache"))
    write_pictures(tmp_path / "pictures", 12)
    flags = ("--data.train", str(tmp_path / "pictures"), "--model.in_chans", "3", "--data.batch_size_per_process", "4",
             "--data.num_workers", "0", "--optim.warmup_epochs", "0", "--num_steps", "3")  # fmt: skip
    assert run_here(monkeypatch, tmp_path / "run", *flags) == 0
    told = capfd.readouterr()
    assert f"packing the 12 images of {tmp_path / 'pictures'}" in told.err
    assert "12 images in 1 shards" in told.out
    whole = losses(tmp_path / "run")
    assert len(whole) == 3
    checkpoint_path(tmp_path / "run" / "checkpoints", 3).unlink()
    assert run_here(monkeypatch, tmp_path / "run", *flags, "--resume", "auto") == 0
    assert "packing" not in capfd.readouterr().err
    assert losses(tmp_path / "run") == whole


@pytest.mark.usefixtures("fresh_accelerator")
def test_settings_of_the_run_do_what_they_say(
    picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Seeds, clipping, smallest lr, TensorBoard with pictures; then a resume leaves no step twice."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")  # a launcher's setting that must not count
    common = ("--data.train", str(picture_shards.root), "--model.in_chans", "3", "--data.batch_size_per_process", "8",
              "--num_steps", "6", "--data.num_workers", "0", "--run.log_every_steps", "2", "--run.picture_every_steps", "2",
              "--optim.min_lr", "1e-4", "--optim.warmup_epochs", "0")  # fmt: skip
    assert run_here(monkeypatch, tmp_path / "a", *common) == 0
    assert run_here(monkeypatch, tmp_path / "seed", *common, "--run.seed", "1") == 0
    assert run_here(monkeypatch, tmp_path / "clip", *common, "--optim.clip_grad_norm", "1e-3") == 0
    assert (
        run_here(monkeypatch, tmp_path / "accum", *common, "--data.batch_size_per_process", "4", "--optim.accum_steps", "2")
        == 0
    )

    entries = metrics(tmp_path / "a")
    assert [entry["step"] for entry in entries] == [2, 4, 6]
    peak = 1e-2 * 8 / 256
    assert entries[-1]["lr"] == pytest.approx(1e-4 + (peak - 1e-4) * 0.5 * (1 + math.cos(math.pi * 5 / 6)))
    assert metrics(tmp_path / "seed")[0]["loss"] != entries[0]["loss"]
    clipped = metrics(tmp_path / "clip")
    assert clipped[0]["grad_norm"] > 0.1  # the norm before clipping
    assert clipped[-1]["loss"] != entries[-1]["loss"]
    for one, two in zip(entries, metrics(tmp_path / "accum"), strict=True):
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)

    checkpoint_path(tmp_path / "a" / "checkpoints", 6).unlink()
    assert run_here(monkeypatch, tmp_path / "a", *common, "--resume", "auto") == 0
    events = EventAccumulator(str(tmp_path / "a" / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(entries[0]) - {"step", "faults"}
    assert [event.step for event in events.Scalars("loss")] == [2, 4, 6]
    assert {event.step for event in events.Images("reconstruction")} == {2, 4, 6}
    assert events.Images("reconstruction")[0].width > 600
    capfd.readouterr()


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--output_dir", str(tmp_path / "run"), *TINY_RUN, "--data.batch_size_per_process", "8", "--data.num_workers", "0",
             "--num_steps", "50", "--run.log_every_steps", "10", "--run.save_every_steps", "3")  # fmt: skip
    message = refused(capfd, monkeypatch, *flags, "--optim.base_lr", "1e30", "--optim.warmup_epochs", "0")
    assert "step 3: the new weights give no finite loss (loss nan" in message
    assert "no good checkpoint is there: start again with --resume auto and a lower --optim.base_lr" in message
    assert not (tmp_path / "run" / "checkpoints").exists()
    # The advice can be followed: another learning rate, and the same command with --resume auto.
    monkeypatch.setattr(sys, "argv", ["main.py", *flags, "--optim.warmup_epochs", "0", "--resume", "auto"])
    assert main() == 0
    capfd.readouterr()


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_run_goes_on_from_an_older_checkpoint_when_the_newest_is_damaged(
    picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--data.train", str(picture_shards.root), "--model.in_chans", "3", "--data.batch_size_per_process", "8",
             "--num_steps", "4", "--data.num_workers", "0", "--run.save_every_steps", "2")  # fmt: skip
    folder = tmp_path / "run" / "checkpoints"
    assert run_here(monkeypatch, tmp_path / "run", *flags) == 0
    whole = losses(tmp_path / "run")
    newest = checkpoint_path(folder, 4)
    newest.write_bytes(newest.read_bytes()[:-9])
    assert run_here(monkeypatch, tmp_path / "run", *flags, "--resume", "auto") == 0
    assert "set aside as step_00000004.damaged" in capfd.readouterr().out
    assert losses(tmp_path / "run") == whole
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_00000002.safetensors", "step_00000004.damaged", "step_00000004.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["a: [", "- 1", "\udcff"])
@pytest.mark.usefixtures("fresh_accelerator")
def test_a_broken_saved_config_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    message = refused(capfd, monkeypatch, "--output_dir", str(tmp_path), *TINY_RUN, "--resume", "auto")
    assert f"{tmp_path}/config.yaml" in message


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

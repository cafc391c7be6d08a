"""A model of which each process holds a part (FSDP2): the run is that of whole models (DDP), and so is what it leaves."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file

from data.transforms import Normalization
from models.mae import MAEConfig, build_mae
from pretrain.main import main
from pretrain.report import export_encoder
from training.checkpoint import checkpoint_path, read_checkpoint
from training.cli import UserError
from training.launch import EXIT_LOST_CONTACT
from training.parallel import Sharding, sharding_asked

ROOT = Path(__file__).parent.parent.parent
# Older versions of accelerate have no such flag: there --use_fsdp says no version.
FSDP = ["--use_fsdp", *(["--fsdp_version", "2"] if "--fsdp_version" in launch_command_parser()._option_string_actions else [])]
DDP = ["--multi_gpu"]

TINY_RUN = [
    "--data.train", "digits", "--model.name", "tiny", "--model.img_size", "16", "16", "--model.patch_size", "4",
    "--model.in_chans", "1", "--model.embed_dim", "32", "--model.depth", "2", "--model.num_heads", "2",
    "--model.decoder_embed_dim", "32", "--model.decoder_depth", "2", "--model.decoder_num_heads", "2",
    "--optim.warmup_epochs", "0.1", "--optim.base_lr", "1e-2", "--run.dtype", "float32", "--run.device", "cpu",
    "--run.log_every_steps", "1", "--data.num_workers", "0", "--global_batch_size", "64", "--optim.clip_grad_norm", "1",
    "--run.save_every_steps", "4", "--run.keep_checkpoints", "9", "--probe.train", "digits-train", "--probe.test",
    "digits-test", "--probe.max_train", "200", "--probe.max_test", "101", "--probe.every_epochs", "0.25", "--num_steps", "12",
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | more


def launch(way: list[str], program: str, output: Path, *flags: str) -> str:
    """Runs a program on two processes by accelerate's launcher, to a good end; gives what it printed."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", *way, "--num_machines", "1", "--num_processes", "2",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port(), program,
        "--output_dir", str(output), *flags,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def entries(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def assert_same_curves(one: Path, two: Path, *names: str) -> None:
    """The runs logged the same numbers at the same steps, within 1e-5."""
    for name in names:
        curves = [{entry["step"]: entry[name] for entry in entries(output) if name in entry} for output in (one, two)]
        assert curves[0].keys() == curves[1].keys()
        assert len(curves[0]) > 1
        assert max(abs(curves[0][step] - curves[1][step]) for step in curves[0]) < 1e-5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes that each hold the whole model."""
    output = tmp_path_factory.mktemp("ddp") / "run"
    assert "FSDP2" not in launch(DDP, "pretrain/main.py", output, *TINY_RUN, "--data.batch_size_per_process", "32")
    return output


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes that each hold a half, and take their share in two micro-batches."""
    output = tmp_path_factory.mktemp("fsdp") / "run"
    text = launch(FSDP, "pretrain/main.py", output, *TINY_RUN, "--data.batch_size_per_process", "16")
    assert "each process holds 1/2 of the model (FSDP2)" in text
    assert "64 = 16 per process x 2 processes x 2 accumulated" in text
    return output


def test_a_sharded_run_is_that_of_whole_models(whole: Path, sharded: Path) -> None:
    """Losses, gradients, accuracies, checkpoints, encoder and picture, with accumulated and clipped gradients."""
    assert_same_curves(whole, sharded, "loss", "grad_norm", "knn/mean", "knn/cls")
    assert max(entry["grad_norm"] for entry in entries(whole) if "loss" in entry) > 2  # so they were clipped
    for step in (4, 8, 12):
        ours, theirs = (read_checkpoint(checkpoint_path(output / "checkpoints", step)).tensors for output in (sharded, whole))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
    weights = read_checkpoint(checkpoint_path(sharded / "checkpoints", 12)).part("model/encoder.")
    exported = load_file(sharded / "encoder.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exported.items())
    ours, theirs = (np.asarray(Image.open(output / "reconstruction.png")).astype(int) for output in (sharded, whole))
    assert abs(ours - theirs).max() <= 2


def test_a_sharded_run_goes_on_in_one_process(
    whole: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    shutil.copytree(sharded, output)
    for step in (8, 12):
        checkpoint_path(output / "checkpoints", step).unlink()
    flags = ["--output_dir", str(output), *TINY_RUN, "--data.batch_size_per_process", "64", "--resume", "auto"]
    monkeypatch.setattr(sys, "argv", ["pretrain/main.py", *flags])
    assert main() == 0
    assert_same_curves(whole, output, "loss", "grad_norm")


def test_a_run_of_whole_models_goes_on_sharded(whole: Path, tmp_path: Path) -> None:
    """The optimizer's state is shared out too: a step from empty moments is another one."""
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    for step in (8, 12):
        checkpoint_path(output / "checkpoints", step).unlink()
    way = [*FSDP, "--fsdp_reshard_after_forward", "false"] if len(FSDP) > 1 else FSDP  # another way to the same numbers
    text = launch(way, "pretrain/main.py", output, *TINY_RUN, "--data.batch_size_per_process", "32", "--resume", "auto")
    assert "step_00000004.safetensors" in text
    assert_same_curves(whole, output, "loss", "grad_norm")


def test_a_sharded_fine_tuning_is_that_of_whole_models(tmp_path: Path) -> None:
    """With everything random on, and with the moving average, which is what is measured and exported."""
    config = MAEConfig(
        name="tiny", img_size=(16, 16), patch_size=4, in_chans=1, embed_dim=32, depth=2, num_heads=2,
        decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    export_encoder(tmp_path, build_mae(config), config, Normalization((0.3,), (0.4,)))
    flags = [
        "--encoder", str(tmp_path), "--data.train", "digits-train", "--data.val", "digits-test", "--data.num_workers", "0",
        "--data.batch_size_per_process", "16", "--optim.accum_steps", "2", "--run.dtype", "float32", "--run.device", "cpu",
        "--run.log_every_steps", "1", "--optim.base_lr", "2e-2", "--optim.warmup_epochs", "0.05", "--num_steps", "8",
        "--ema_decay", "0.9", "--model.drop_path_rate", "0.5", "--eval_every_epochs", "0.2",
    ]  # fmt: skip
    outputs = tmp_path / "ddp", tmp_path / "fsdp"
    for output, way in zip(outputs, (DDP, FSDP), strict=True):
        text = launch(way, "finetune/main.py", output, *flags)
        assert ("each process holds 1/2 of the model (FSDP2)" in text) == (way is FSDP)
    assert_same_curves(*outputs, "loss", "grad_norm", "val/loss", "val/top1")
    ours, theirs = (read_checkpoint(checkpoint_path(output / "checkpoints", 8)).tensors for output in outputs)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("ema/") for name in ours)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)
    exported = load_file(outputs[1] / "classifier.safetensors")
    assert all(torch.equal(exported[name.removeprefix("ema/vit.")], theirs[name]) for name in theirs if "ema/" in name)


def two_programs(folder: Path, body: str, *flags: str) -> list[tuple[int, str]]:
    """Runs a changed program on two processes without a launcher, which would end one with the other: status and output."""
    program = folder / "program.py"
    head = f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        import torch
        from torch.distributed.tensor import DTensor
        import pretrain.loop
        from pretrain.main import main
        from training.parallel import own_part
        rank, steps = os.environ["RANK"], 0
        train_step, compute_output = pretrain.loop.train_step, pretrain.loop.compute_output
    """
    program.write_text(textwrap.dedent(head) + textwrap.dedent(body) + "sys.exit(main())\n")
    command = [sys.executable, str(program), "--output_dir", str(folder / "run"), *TINY_RUN, *flags]
    common = environment(
        ACCELERATE_USE_FSDP="true", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()
    )
    processes = [
        subprocess.Popen(
            command,
            env=common | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


def test_a_sick_step_of_one_process_is_skipped_by_all_and_a_sick_run_ends_with_a_diagnosis(tmp_path: Path) -> None:
    """Process 1 alone meets what is not finite; each process holds a half of weights and moments, and sends gradients once."""
    results = two_programs(
        tmp_path,
        """
        micro_steps = 0
        def sick_output(run, model, batch):
            global micro_steps
            output = compute_output(run, model, batch)
            trains = model is run.wrapped and torch.is_grad_enabled()
            if trains:
                micro_steps += 1
            if trains and micro_steps % 2 == 0:
                print("sent before the last micro-batch:", any(isinstance(p.grad, DTensor) for p in run.model.parameters()))
            if trains and rank == "1" and (steps == 2 or steps > 4):
                output.loss.data.fill_(float("nan"))
            if rank == "1" and model is not run.wrapped and steps > 10:
                output.loss.data.fill_(float("nan"))
            return output
        def counted(run, *args):
            global steps
            train_step(run, *args)
            steps += 1
            state = [value for entry in run.distributed.optimizer.state.values() for value in entry.values()]
            for name, tensors in (("weights", list(run.model.parameters())), ("moments", state)):
                held, whole = sum(own_part(t).numel() for t in tensors), sum(t.numel() for t in tensors)
                print(f"{name} held by process {rank}: {held / whole:.2f}")
        pretrain.loop.compute_output, pretrain.loop.train_step = sick_output, counted
        """,
        "--num_steps", "40", "--data.batch_size_per_process", "16",
    )  # fmt: skip
    for rank, (status, text) in enumerate(results):
        assert status == 2, text
        assert "Traceback" not in text
        assert text.count("sent before the last micro-batch: False") == 15
        assert "sent before the last micro-batch: True" not in text
        for name in ("weights", "moments"):
            shares = {
                float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} held by process {rank}")
            }
            assert shares
            assert all(0.45 < share < 0.55 for share in shares)
    (line,) = (line for line in results[0][1].splitlines() if line.startswith("error: "))
    assert "step 15: the last 10 steps were skipped" in line
    assert "the loss is the first to be not finite" in line
    assert (
        "2 checkpoint(s) of the sick run are set aside as *.suspect; step_00000004.safetensors is good: go on from it" in line
    )
    skipped = {entry["step"]: entry["skipped_steps"] for entry in entries(tmp_path / "run") if "skipped_steps" in entry}
    assert [skipped[step] for step in range(1, 7)] == [0, 0, 1, 1, 1, 2]
    folder = tmp_path / "run" / "checkpoints"
    for path in folder.glob("*.suspect"):
        path.rename(path.with_suffix(".safetensors"))
    tensors = {step: read_checkpoint(checkpoint_path(folder, step)).tensors for step in (4, 8, 12)}
    assert all(torch.equal(tensors[12][name], tensors[8][name]) for name in tensors[8])
    assert not torch.equal(tensors[8]["model/encoder.cls_token"], tensors[4]["model/encoder.cls_token"])
    assert tensors[8]["optimizer/encoder.cls_token/step"].item() == 4


def test_a_lost_process_ends_the_others_in_one_line(tmp_path: Path) -> None:
    (status, text), (killed, _) = two_programs(
        tmp_path,
        """
        def end(*args):
            global steps
            if steps == 6 and rank == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(*args)
            steps += 1
        pretrain.loop.train_step = end
        """,
        "--data.batch_size_per_process", "32", "--run.timeout_minutes", "0.5",
    )  # fmt: skip
    assert (status, killed) == (EXIT_LOST_CONTACT, -signal.SIGKILL)
    assert "lost contact with another process" in text
    assert "--resume auto; the last checkpoint is step_00000004.safetensors" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "1"}, None),
        ({"ACCELERATE_USE_FSDP": "true"}, Sharding(True)),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, Sharding(False)),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "--fsdp_version 2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}, "--fsdp_offload_params false"),
    ],
)
def test_the_launcher_decides(variables: dict[str, str], expected: Sharding | str | None) -> None:
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            sharding_asked(variables)
    else:
        assert sharding_asked(variables) == expected

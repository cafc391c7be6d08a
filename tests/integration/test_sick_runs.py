"""Runs that become sick or lose a process: as their users meet them, in whole programs."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

import finetune.main
import pretrain.loop
from data.loader import Batch
from data.shards import ShardSet
from data.transforms import Normalization
from models.mae import build_mae
from pretrain.main import main
from pretrain.report import export_encoder
from tests.conftest import TINY, write_pictures
from training.checkpoint import checkpoint_path, read_checkpoint
from training.launch import EXIT_LOST_CONTACT

ROOT = Path(__file__).parent.parent.parent

TINY_RUN = [
    "--model.name", "tiny", "--model.img_size", "16", "16", "--model.patch_size", "4", "--model.embed_dim", "32",
    "--model.depth", "2", "--model.num_heads", "2", "--model.decoder_embed_dim", "32", "--model.decoder_depth", "1",
    "--model.decoder_num_heads", "2", "--optim.warmup_epochs", "0", "--optim.base_lr", "1e-2", "--run.dtype", "float32",
    "--run.device", "cpu", "--run.log_every_steps", "1", "--data.num_workers", "0", "--data.batch_size_per_process", "8",
]  # fmt: skip


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def run_here(monkeypatch: pytest.MonkeyPatch, output: Path, data: ShardSet, *flags: str) -> int:
    """Runs the program in this process; gives its exit status."""
    monkeypatch.setattr(
        sys, "argv", ["main.py", "--output_dir", str(output), "--data.train", str(data.root), *TINY_RUN, *flags]
    )
    try:
        return main()
    except SystemExit as ended:
        return int(ended.code or 0)


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def make_sick(monkeypatch: pytest.MonkeyPatch, is_sick: Callable[[int], bool]) -> list[list[int]]:
    """Lets the loss of some steps be NaN; gives what is trained on, a list for each step."""
    seen: list[list[int]] = []
    compute = pretrain.loop.compute_output

    def compute_output(run: Any, model: torch.nn.Module, batch: Batch) -> Any:
        output = compute(run, model, batch)
        if not torch.is_grad_enabled() or model is not run.wrapped:
            return output
        seen.append(batch.indices.tolist())
        return output._replace(loss=output.loss * math.nan) if is_sick(len(seen)) else output

    monkeypatch.setattr("pretrain.loop.compute_output", compute_output)
    return seen


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_skipped_step_changes_nothing_and_counts_as_a_step(
    picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights and moments of a checkpoint after sick steps are those before; schedule and data go on."""
    flags = ("--run.save_every_steps", "1", "--run.keep_checkpoints", "9", "--num_steps", "6")
    with monkeypatch.context() as patch:
        whole = make_sick(patch, lambda step: False)
        assert run_here(patch, tmp_path / "whole", picture_shards, *flags) == 0
    with monkeypatch.context() as patch:
        seen = make_sick(patch, lambda step: step in (3, 4))
        assert run_here(patch, tmp_path / "sick", picture_shards, *flags) == 0
    assert seen == whole
    folder = tmp_path / "sick" / "checkpoints"
    after = {step: read_checkpoint(checkpoint_path(folder, step)).tensors for step in range(2, 7)}
    for step in (3, 4):
        assert all(torch.equal(after[step][name], after[2][name]) for name in after[2])
    assert not torch.equal(
        after[5]["model/encoder.blocks.0.attn.qkv.weight"], after[2]["model/encoder.blocks.0.attn.qkv.weight"]
    )
    assert after[6]["optimizer/encoder.cls_token/step"].item() == 4  # Adam corrects its moments by the updates that were made
    entries = metrics(tmp_path / "sick")
    assert [entry["skipped_steps"] for entry in entries] == [0, 0, 1, 2, 2, 2]
    assert [entry["lr"] for entry in entries] == [entry["lr"] for entry in metrics(tmp_path / "whole")]
    assert ["loss" in entry for entry in entries] == [True, True, False, False, True, True]
    text = capfd.readouterr().out
    assert text.count("warning: step 3: 1 step(s) of this run were skipped so far") == 1

    checkpoint_path(folder, 6).unlink()
    assert run_here(monkeypatch, tmp_path / "sick", picture_shards, *flags, "--resume", "auto") == 0
    assert metrics(tmp_path / "sick")[-1]["skipped_steps"] == 2  # goes on counting


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_run_that_does_not_recover_ends_and_goes_on_from_its_last_checkpoint(
    picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--run.save_every_steps", "4", "--num_steps", "30")
    with monkeypatch.context() as patch:
        make_sick(patch, lambda step: step > 9)
        assert run_here(patch, tmp_path / "run", picture_shards, *flags, "--run.save_every_steps", "9") == 2
    out, err = capfd.readouterr()
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert "step 19: the last 10 steps were skipped" in line
    assert "loss nan" in line
    # Sick batches, but the weights gave a finite loss; half of the steps since the one before were skipped, though, or all.
    assert (
        "1 checkpoint(s) of the sick run are set aside as *.suspect; step_00000009.safetensors is good: go on from it" in line
    )
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step_00000009.safetensors", "step_00000018.suspect"
    ]  # fmt: skip
    assert "Traceback" not in out + err
    (samples,) = json.loads((tmp_path / "run" / "sick_step_00000019.json").read_text())["samples"].values()
    assert len(samples) == 8
    assert all(sample["shard"].endswith(".tar") and sample["key"] for sample in samples)
    assert run_here(monkeypatch, tmp_path / "run", picture_shards, *flags, "--resume", "auto", "--optim.base_lr", "1e-3") == 0


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_loss_that_jumps_and_a_reader_that_stalls_are_told(
    picture_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    step, compute = 0, pretrain.loop.compute_output

    def compute_output(run: Any, model: torch.nn.Module, batch: Batch) -> Any:
        nonlocal step
        step += model is run.wrapped and torch.is_grad_enabled()
        output = compute(run, model, batch)
        return output._replace(loss=output.loss * 5) if step == 10 else output

    monkeypatch.setattr("pretrain.loop.compute_output", compute_output)
    decode = pretrain.loop.BatchLoader.__iter__

    def slow(self: Any) -> Iterator[Batch]:
        for batch in decode(self):
            yield batch
            deadline = time.monotonic() + 30
            while "no batch of images" not in "".join(told) and time.monotonic() < deadline:
                time.sleep(0.01)
                told.append(capfd.readouterr().err)

    told: list[str] = []
    monkeypatch.setattr("pretrain.loop.BatchLoader.__iter__", slow)
    monkeypatch.setattr("training.watch.STALL_S", 0.2)
    assert run_here(monkeypatch, tmp_path / "run", picture_shards, "--num_steps", "11") == 0
    assert f"warning (process 0 on {socket.gethostname()}): no batch of images for" in "".join(told)
    assert "warning: step 10: the loss jumped to" in capfd.readouterr().out
    ratios = {entry["step"]: entry.get("loss_over_median", 0.0) for entry in metrics(tmp_path / "run")}
    assert ratios[8] == 0  # too few before it
    assert ratios[10] > 3 > 1.5 > ratios[9]


def start(
    output: Path, data: ShardSet, *flags: str, program: str = "pretrain/main.py", processes: int = 1
) -> subprocess.Popen[str]:
    """Starts the program in a process group of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port)
    command = [
        sys.executable, *(launcher if processes > 1 else ()), program, "--output_dir", str(output), "--data.train",
        str(data.root), *TINY_RUN, *flags,
    ]  # fmt: skip
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for_step(output: Path, step: int) -> None:
    path = output / "metrics.jsonl"
    for _ in range(1200):
        if path.exists() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached in two minutes")


def program_with(tmp_path: Path, body: str) -> str:
    """The program with something changed before it starts."""
    path = tmp_path / "program.py"
    head = f"""
        import os, signal, sys, time
        sys.path.insert(0, {str(ROOT)!r})
        import training.openmp
        import pretrain.loop
        from data.errors import DataError
        from pretrain.main import main
        rank, train_step, steps = os.environ.get("RANK", "0"), pretrain.loop.train_step, 0
    """
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body) + "sys.exit(main())\n")
    return str(path)


def test_a_warning_saves_and_the_second_request_ends_at_once(picture_shards: ShardSet, tmp_path: Path) -> None:
    """SLURM's warning first; then a run that hangs in the middle of a step, where Python calls no handler."""
    process = start(tmp_path / "run", picture_shards, "--num_steps", "100000")
    wait_for_step(tmp_path / "run", 3)
    os.kill(process.pid, signal.SIGUSR1)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1, text
    stopped_at = metrics(tmp_path / "run")[-1]["step"]
    assert "SIGUSR1: the step is finished and saved" in text
    assert f"stopped after step {stopped_at}" in text
    assert checkpoint_path(tmp_path / "run" / "checkpoints", stopped_at).exists()

    program = program_with(
        tmp_path,
        """
        import ctypes
        def hang(*args):
            global steps
            train_step(*args)
            steps += 1
            if steps == 3:
                ctypes.CDLL(None).sleep(600)
                ctypes.CDLL(None).sleep(600)
                ctypes.CDLL(None).sleep(600)
        pretrain.loop.train_step = hang
        """,
    )
    process = start(tmp_path / "hangs", picture_shards, "--num_steps", "9", program=program)
    wait_for_step(tmp_path / "hangs", 2)
    time.sleep(1)  # the third step has begun to hang
    os.kill(process.pid, signal.SIGUSR1)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None  # a warning and a request: not yet two requests
    os.kill(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, text
    assert "SIGINT again: ended at once; nothing was saved since the last checkpoint" in text
    assert not (tmp_path / "hangs" / "checkpoints").exists()


ENDS = {
    "an error of the user's": ('raise DataError("a shard is gone")', "a shard is gone"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
}


@pytest.mark.parametrize("how", [pytest.param("an error of the user's", marks=pytest.mark.slow), "killed"])
def test_a_process_that_ends_takes_the_others_with_it_in_one_line(picture_shards: ShardSet, tmp_path: Path, how: str) -> None:
    """Also: a sick loss on one process alone lets both skip the step; both go on with the same weights."""
    code, expected = ENDS[how]
    program = program_with(
        tmp_path,
        f"""
        compute_output = pretrain.loop.compute_output
        def sick_output(run, model, batch):
            output = compute_output(run, model, batch)
            if rank == "1" and model is run.wrapped and steps == 1:
                output.loss.data.fill_(float("nan"))
            return output
        def end(*args):
            global steps
            if steps == 5 and rank == "1":
                {code}
            train_step(*args)
            steps += 1
        pretrain.loop.compute_output, pretrain.loop.train_step = sick_output, end
        """,
    )
    flags = ("--num_steps", "100000", "--run.save_every_steps", "4", "--run.timeout_minutes", "0.5")
    process = start(tmp_path / "run", picture_shards, *flags, program=program, processes=2)
    text, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    lines = text.replace("\r", "\n").splitlines()
    (line,) = (line for line in lines if "lost contact with another process" in line)
    assert f"error (process 0 on {socket.gethostname()}): " in line
    assert "start all processes again with --resume auto; the last checkpoint is step_00000004.safetensors" in line
    assert not [line for line in lines if line.startswith("[rank0]")]  # no traceback of the survivor
    assert any(expected in line for line in lines)
    assert [entry["skipped_steps"] for entry in metrics(tmp_path / "run")] == [0, 1, 1, 1, 1]


# ------------------------------------------------------------------------------------- measuring (--eval_only) on two processes


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, picture_shards: ShardSet) -> str:
    """A fine-tuned run folder, of one step."""
    folder = tmp_path_factory.mktemp("classifier")
    export_encoder(folder, build_mae(TINY), TINY, Normalization((0.5,) * 3, (0.25,) * 3))
    flags = ["--encoder", str(folder), "--output_dir", str(folder / "run"), "--data.train", str(picture_shards.root)]
    flags += ["--num_steps", "1", "--optim.warmup_epochs", "0", "--data.num_workers", "0", "--run.device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["finetune/main.py", *flags, "--run.dtype", "float32", "--data.batch_size_per_process", "8"])
        assert finetune.main.main() == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    return str(folder / "run")


def measure_together(
    tmp_path: Path, classifier: str, flags_of: tuple[list[str], list[str]], body: str
) -> list[tuple[int, str]]:
    """Measures on two processes without a launcher, which would end one with the other; gives status and output of each."""
    program = tmp_path / "measure.py"
    head = f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        import finetune.measure
        from data.errors import DataError
        from finetune.main import main
        rank, evaluate = os.environ["RANK"], finetune.measure.evaluate
    """
    program.write_text(textwrap.dedent(head) + textwrap.dedent(body) + "sys.exit(main())\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [
        sys.executable, str(program), "--eval_only", "--encoder", classifier, "--output_dir", str(tmp_path / "tables"),
        "--run.dtype", "float32", "--run.device", "cpu", "--data.num_workers", "0", "--run.timeout_minutes", "1",
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            [*command, *flags], env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank, flags in enumerate(flags_of)
    ]  # fmt: skip
    texts = [process.communicate(timeout=120)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


@pytest.mark.parametrize("how", ["killed", "an error of the user's"])
def test_measuring_ends_in_one_line_when_a_process_is_lost(
    classifier: str, picture_shards: ShardSet, tmp_path: Path, how: str
) -> None:
    """And the lost one's own mistake is told, though it is not the first process of its machine."""
    code, expected = ENDS[how]
    flags = ["--data.val", str(picture_shards.root)]
    body = f"""
        def end(*args):
            if rank == "1":
                {code}
            return evaluate(*args)
        finetune.measure.evaluate = end
    """
    (status, text), (lost_status, lost_text) = measure_together(tmp_path, classifier, (flags, flags), body)
    assert status == EXIT_LOST_CONTACT, text
    (line,) = (line for line in text.splitlines() if "lost contact with another process" in line)
    assert line.startswith(f"error (process 0 on {socket.gethostname()}): ")
    assert "Traceback" not in text + lost_text
    assert not (tmp_path / "tables").exists()
    if how == "killed":
        assert lost_status == -signal.SIGKILL
    else:
        assert lost_status == 2
        assert f"error (process 1 on {socket.gethostname()}): {expected}" in lost_text


@pytest.mark.parametrize("what", ["settings", "data", "classifier"])
def test_processes_that_would_measure_different_things_are_refused(
    classifier: str, picture_shards: ShardSet, tmp_path: Path, what: str
) -> None:
    """Data may lie elsewhere on each machine, but must be the same."""
    flags = ["--data.val", str(picture_shards.root)]
    others, expected, body = flags, "", ""
    if what == "settings":
        others, expected = [*flags, "--data.eval_batch_size", "7"], "--data.eval_batch_size: 256 (process 0 on"
    elif what == "data":
        write_pictures(tmp_path / "others", 10)
        others, expected = ["--data.val", str(tmp_path / "others")], "data (hash of the manifest): "
    else:
        expected = "classifier (hash of its weights): "
        body = """
            load = finetune.measure.load_classifier
            def load_another(source):
                trained = load(source)
                trained.model.head.bias.data[0] += int(rank)
                return trained
            finetune.measure.load_classifier = load_another
        """
    for status, text in measure_together(tmp_path, classifier, (flags, others), body):
        assert status == 2, text
        assert "Traceback" not in text
        assert f"the processes do not agree on {expected}" in text, text
    assert not (tmp_path / "tables").exists()

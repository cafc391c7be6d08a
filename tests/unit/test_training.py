import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from models.mae import MAEConfig, MaskedAutoencoder, build_mae
from pretrain.config import MAY_CHANGE_ON_RESUME, PretrainConfig
from training.checkpoint import checkpoint_path, newest_checkpoint, read_checkpoint, replacing, restore, save_checkpoint
from training.cli import UserError, parse_args
from training.log import MetricsFile
from training.machine import available_cores, cores_per_process, memory_mib, native_bfloat16
from training.meters import Meters, WaitClock
from training.optim import OptimConfig, build_adamw, parameter_groups, set_lr
from training.run import StopRequest, changed_settings, check_run_folder, lock_run_folder, save_config
from training.schedule import Horizon, plan_horizon, scale_lr, warmup_cosine


def test_schedule_starts_at_zero_peaks_after_warmup_and_ends_at_the_minimum() -> None:
    assert warmup_cosine(0, 10, 100, 1.0, 0.1) == 0.0
    assert warmup_cosine(10, 10, 100, 1.0, 0.1) == 1.0
    assert warmup_cosine(100, 10, 100, 1.0, 0.1) == pytest.approx(0.1)
    assert warmup_cosine(0, 0, 100, 1.0, 0.1) == 1.0
    assert scale_lr(1.5e-4, 4096) == pytest.approx(2.4e-3)


def test_horizon_counts_steps_and_refuses_a_warmup_longer_than_the_run() -> None:
    def plan(epochs: float, num_steps: int | None, warmup_epochs: float | None) -> Horizon:
        return plan_horizon(epochs, num_steps, warmup_epochs, num_samples=1000, global_batch_size=100)

    assert plan(2, None, 0.5) == Horizon(20, 5.0)
    assert plan(800, 7, 0.5).num_steps == 7
    assert plan(2, None, None) == Horizon(20, 1.0)
    with pytest.raises(UserError, match=r"warm-up .* 5 steps.* is not shorter than the run .* 5 steps"):
        plan(800, 5, 0.5)


def test_groups_follow_the_model_and_leave_fixed_tables_out(tiny_mae: MaskedAutoencoder) -> None:
    without, with_decay = parameter_groups(tiny_mae, 0.05)
    assert (without["weight_decay"], with_decay["weight_decay"]) == (0.0, 0.05)
    assert all(parameter.ndim == 1 for parameter in without["params"])
    assert all(parameter.ndim > 1 and parameter.requires_grad for parameter in with_decay["params"])
    assert any(parameter is tiny_mae.encoder.cls_token for parameter in with_decay["params"])
    grouped = len(without["params"]) + len(with_decay["params"])
    assert grouped == sum(parameter.requires_grad for parameter in tiny_mae.parameters())


def test_fused_adamw_is_adamw(tiny_mae: MaskedAutoencoder) -> None:
    optimizer = build_adamw(parameter_groups(tiny_mae, 0.3), OptimConfig())
    twin = {name: parameter.detach().clone() for name, parameter in tiny_mae.named_parameters() if parameter.requires_grad}
    exempt = tiny_mae.no_weight_decay()
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in twin.items()}
    torch.manual_seed(0)
    for step in range(1, 4):
        lr = 0.01 * step
        set_lr(optimizer, lr)
        for name, parameter in tiny_mae.named_parameters():
            if name in twin:
                parameter.grad = torch.randn_like(parameter)
                mean, square = moments[name]
                mean.mul_(0.9).add_(0.1 * parameter.grad)
                square.mul_(0.95).add_(0.05 * parameter.grad**2)
                twin[name] *= 1 - lr * (0.0 if name in exempt else 0.3)
                denominator = (square / (1 - 0.95**step)).sqrt() + 1e-8
                twin[name] -= lr * (mean / (1 - 0.9**step)) / denominator
        optimizer.step()
    for name, parameter in tiny_mae.named_parameters():
        if name in twin:
            torch.testing.assert_close(parameter.detach(), twin[name], atol=1e-6, rtol=1e-5)


def test_lr_scale_of_a_group_multiplies_the_schedule() -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1], "lr_scale": 0.5}, {"params": weights[1:]}], lr=1.0)
    set_lr(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def trained(model: MaskedAutoencoder, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = build_adamw(parameter_groups(model, 0.05), OptimConfig())
    for step in range(steps):
        set_lr(optimizer, 1e-3)
        torch.manual_seed(step)
        model(torch.randn(2, 3, 32, 32), torch.rand(2, 16)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_checkpoint_restores_weights_and_optimizer_bit_for_bit(
    tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder, tmp_path: Path
) -> None:
    optimizer = trained(tiny_mae)
    path = save_checkpoint(tmp_path, 2, {"seed": 3}, tiny_mae, optimizer, keep=2)
    checkpoint = read_checkpoint(path)
    assert (checkpoint.step, checkpoint.config) == (2, {"seed": 3})

    other = build_mae(tiny_config)
    other_optimizer = build_adamw(parameter_groups(other, 0.05), OptimConfig())
    restore(checkpoint, other, other_optimizer)
    for model, its_optimizer in ((tiny_mae, optimizer), (other, other_optimizer)):  # one more step, the same on both
        set_lr(its_optimizer, 1e-3)
        torch.manual_seed(9)
        model(torch.randn(2, 3, 32, 32), torch.rand(2, 16)).loss.backward()
        its_optimizer.step()
    for (name, one), (_, two) in zip(tiny_mae.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(one, two), name


def test_newest_valid_checkpoint_is_found_past_torn_and_damaged_ones(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    optimizer = trained(tiny_mae)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, {}, tiny_mae, optimizer, keep=9)
    torn = checkpoint_path(tmp_path, 3)
    torn.write_bytes(torn.read_bytes()[:-100])
    damaged = checkpoint_path(tmp_path, 2)
    content = bytearray(damaged.read_bytes())
    content[-50] ^= 1
    damaged.write_bytes(content)
    checkpoint, complaints = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert list(complaints) == [torn, damaged]
    assert "cut off" in complaints[torn]
    assert "does not match its hash" in complaints[damaged]
    checkpoint_path(tmp_path, 1).write_bytes(b"")
    with pytest.raises(UserError, match="no valid checkpoint"):
        newest_checkpoint(tmp_path)
    assert newest_checkpoint(tmp_path / "none") == (None, {})


def test_foreign_and_newer_files_are_refused(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    foreign = tmp_path / "step_00000001.safetensors"
    save_file({"a": torch.zeros(1)}, foreign)
    with pytest.raises(UserError, match="not a checkpoint"):
        read_checkpoint(foreign)
    path = save_checkpoint(tmp_path, 2, {}, tiny_mae, trained(tiny_mae), keep=9)
    record = {"version": 99, "step": 2, "config": {}, "hash": ""}
    save_file(load_file(path), path, metadata={"checkpoint": json.dumps(record)})
    with pytest.raises(UserError, match="format 99"):
        read_checkpoint(path)


def test_checkpoint_of_another_model_is_refused(tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(save_checkpoint(tmp_path, 2, {}, tiny_mae, trained(tiny_mae), keep=1))
    wider = build_mae(dataclasses.replace(tiny_config, decoder_embed_dim=32))
    with pytest.raises(UserError, match="another model"):
        restore(checkpoint, wider, build_adamw(parameter_groups(wider, 0.05), OptimConfig()))


def test_only_the_newest_checkpoints_stay(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    optimizer = trained(tiny_mae)
    for step in range(1, 6):
        save_checkpoint(tmp_path, step, {}, tiny_mae, optimizer, keep=2)
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, 4), checkpoint_path(tmp_path, 5)]


def test_the_checkpoint_just_written_stays_whatever_lies_beside_it(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    optimizer = trained(tiny_mae)
    later = checkpoint_path(tmp_path, 200)
    later.write_bytes(b"torn")
    rubbish = tmp_path / ".step_00000300.safetensors.123.tmp"
    rubbish.write_bytes(b"half")
    path = save_checkpoint(tmp_path, 150, {}, tiny_mae, optimizer, keep=1)
    assert sorted(tmp_path.iterdir()) == [path, later]


def test_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write_until_full() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half of the ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        write_until_full()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_checkpoints_can_be_read_by_whom_the_umask_lets(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = save_checkpoint(tmp_path, 1, {}, tiny_mae, trained(tiny_mae), keep=1)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def test_unwritable_place_is_a_users_error(tiny_mae: MaskedAutoencoder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the checkpoint"):
        save_checkpoint(tmp_path / "file", 1, {}, tiny_mae, trained(tiny_mae), keep=1)


def test_meters_give_means_since_the_last_time() -> None:
    meters = Meters()
    for value in (1.0, 2.0, 6.0):
        meters.update(loss=torch.tensor(value))
    meters.update(norm=torch.tensor(5.0))
    assert meters.take(lambda means: means * 10) == {"loss": 30.0, "norm": 50.0}
    meters.update(loss=torch.tensor(4.0))
    assert meters.take(lambda means: means) == {"loss": 4.0}


def test_clock_measures_waiting_only() -> None:
    clock = WaitClock()

    def slow() -> Generator[int, None, None]:
        time.sleep(0.05)
        yield 1
        time.sleep(0.05)
        yield 2

    for _ in clock.watch(slow()):
        time.sleep(0.2)
    assert 0.1 <= clock.waited_s < 0.2
    assert memory_mib(torch.device("cpu")) > 50


def config_for(folder: Path, *flags: str) -> PretrainConfig:
    return parse_args(PretrainConfig, ["--output_dir", str(folder), *flags], prog="main.py")


def test_run_folder_is_never_silently_reused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_for(folder)
    check_run_folder(folder, config, "never", MAY_CHANGE_ON_RESUME)
    assert not folder.exists()
    save_config(folder, config)
    with pytest.raises(UserError, match="already holds a run: continue it with --resume auto"):
        check_run_folder(folder, config, "never", MAY_CHANGE_ON_RESUME)
    harmless = config_for(folder, "--run.log_every_steps", "3", "--data.num_workers", "0")
    check_run_folder(folder, harmless, "auto", MAY_CHANGE_ON_RESUME)
    changed = config_for(folder, "--model.depth", "3", "--optim.base_lr", "0.1")
    with pytest.raises(UserError, match=r"model.depth None -> 3, optim.base_lr 0.00015 -> 0.1\)"):
        check_run_folder(folder, changed, "auto", MAY_CHANGE_ON_RESUME)
    assert set(changed_settings(folder, changed)) == {"model.depth", "optim.base_lr"}
    assert changed_settings(tmp_path / "new", changed) == {}


def test_foreign_folders_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(UserError, match="holds other files"):
        check_run_folder(tmp_path, PretrainConfig(), "auto", ())
    with pytest.raises(UserError, match="is a file"):
        check_run_folder(tmp_path / "thesis.txt", PretrainConfig(), "never", ())


def test_metrics_after_the_last_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    for step in (10, 20, 30):
        first.write({"step": step, "loss": 1.0 / step})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 40, "lo')
    again = MetricsFile(path, 20)
    again.write({"step": 30, "loss": 5.0})
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == 5.0


def test_first_signal_is_noted_and_the_second_ends_the_program() -> None:
    with StopRequest() as stop:
        assert (stop.signal, stop.exit_status) == (None, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.signal, stop.exit_status) == (signal.SIGTERM, 143)
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGINT)
        assert caught.value.code == 130
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_bfloat16_is_chosen_only_where_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert native_bfloat16("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, "avx512_bf16": False}, raising=False)
    assert not native_bfloat16("cpu")
    assert not native_bfloat16("mps")


def test_cores_are_divided_among_the_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.machine.available_cores", lambda: 8)
    for processes, cores in (("1", 8), ("3", 2), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert cores_per_process() == cores
    assert available_cores() >= 1


def test_a_run_folder_in_use_is_locked(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from training.run import lock_run_folder; "
        "lock = lock_run_folder(Path(sys.argv[1]))"
    )
    held = subprocess.Popen([sys.executable, "-c", f"{program}; print('held', flush=True); sys.stdin.read()", str(tmp_path)],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert held.stdout is not None
    assert held.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="is in use by another program"):
        lock_run_folder(tmp_path)
    held.kill()
    held.communicate()
    with lock_run_folder(tmp_path):  # a killed program leaves no lock
        pass
    lock_run_folder(tmp_path).close()  # nor one that has ended its run
    check_run_folder(tmp_path, PretrainConfig(), "never", ())  # nor does the file count as somebody's

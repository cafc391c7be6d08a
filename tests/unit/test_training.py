import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from models.mae import MaskedAutoencoder
from pretrain.config import MAY_CHANGE_ON_RESUME, PretrainConfig
from training.checkpoint import checkpoint_path, replacing, write_checkpoint
from training.cli import UserError, flat_config, parse_args
from training.history import note_start
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


TORN = [
    b'{"step": 4, "lo',
    b'{"step": 4, "\xff\xfe": 0}\n',
    b"\0" * 9,
    b'\0\0{"step": 4}\n',
    b'\xef\xbb\xbf{"step"\n',
    b'{"step\xf0',
]
"""What a crash or a power cut may leave as the last line of a file."""


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


def test_a_kill_before_the_config_was_written_leaves_the_folder_usable(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    program = (
        "import os, sys; from pathlib import Path; from training.checkpoint import replacing\n"
        "with replacing(Path(sys.argv[1])) as temporary: temporary.write_text('output'); os._exit(9)"
    )
    (tmp_path / "run").mkdir()
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run" / "config.yaml")], check=False)
    assert killed.returncode == 9
    assert len(list((tmp_path / "run").iterdir())) == 1
    for resume in ("never", "auto"):
        check_run_folder(tmp_path / "run", config, resume, ())
    (tmp_path / "run" / "thesis.tmp").touch()
    with pytest.raises(UserError, match="holds other files"):
        check_run_folder(tmp_path / "run", config, "auto", ())


def refusal(folder: Path, config: PretrainConfig, resume: Literal["never", "auto"] = "auto") -> str:
    """What a run folder is refused with."""
    with pytest.raises(UserError) as caught:
        check_run_folder(folder, config, resume, ())
    (line,) = str(caught.value).splitlines()
    return line


def test_a_lost_config_is_put_back_from_a_checkpoint_by_the_command_that_the_message_names(tmp_path: Path) -> None:
    folder = tmp_path / "it's a run"
    config = config_for(folder, "--optim.base_lr", "1e-5", "--model.img_size", "96", "160")
    save_config(folder, config)
    identity = flat_config(config) | {"manifest_hash": "0", "order_version": 1}
    for step in (1, 2):
        path = checkpoint_path(folder / "checkpoints", step)
        write_checkpoint(path, step, identity | {"epochs": float(step)}, {"model/weight": torch.zeros(1)})
    saved = folder / "config.yaml"
    saved.unlink()
    messages = [refusal(folder, config, "never"), refusal(folder, config, "auto")]
    for text in ("", "- 1", "# nothing\n", "\0\0\0"):  # what a power cut may leave of it
        saved.write_text(text)
        messages.append(refusal(folder, config))
    assert "holds checkpoints but no config.yaml: put it back" in messages[0]
    assert f"{saved} is empty: put it back" in messages[2]
    assert f"{saved}: expected keys and values, found a list; put it back" in messages[3]
    for message in messages:
        saved.unlink(missing_ok=True)
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", message.split("`")[1]], env=environment, check=True)
        newest = config_for(folder, "--optim.base_lr", "1e-5", "--model.img_size", "96", "160", "--epochs", "2")
        assert changed_settings(folder, newest) == {}
        check_run_folder(folder, newest, "auto", ())


def test_an_empty_config_without_checkpoints_is_refused_in_a_few_words(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    message = refusal(tmp_path, config_for(tmp_path))
    assert message == f"{tmp_path}/config.yaml is empty: there is no checkpoint to go on from, choose another --output_dir"


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def test_every_start_of_a_run_is_noted_with_what_had_changed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = datetime.now(UTC).replace(microsecond=0)
    note_start(folder, config_for(folder), 0, 2)
    changed = config_for(folder, "--optim.base_lr", "0.1", "--run.log_every_steps", "3")
    note_start(folder, changed, 300, 4)
    note_start(folder, changed, 500, 4)
    assert parse_args(PretrainConfig, ["--config", str(folder / "config.yaml")]) == changed
    first, second, third = history(folder)
    assert before <= datetime.fromisoformat(first.pop("started")) <= datetime.now(UTC)
    assert first == {
        "step": 0, "num_processes": 2, "changed": [], "torch": torch.__version__, "host": socket.gethostname(),
    }  # fmt: skip
    assert (second["step"], second["num_processes"], third["step"]) == (300, 4, 500)
    assert sorted(second["changed"]) == ["optim.base_lr 0.00015 -> 0.1", "run.log_every_steps 10 -> 3"]
    assert third["changed"] == []


@pytest.mark.parametrize("torn", TORN)
def test_a_start_after_a_torn_line_has_a_line_of_its_own(tmp_path: Path, torn: bytes) -> None:
    note_start(tmp_path, config_for(tmp_path), 0, 1)
    whole = (tmp_path / "history.jsonl").read_bytes()
    (tmp_path / "history.jsonl").write_bytes(whole + torn)
    note_start(tmp_path, config_for(tmp_path), 7, 1)
    left, last = (tmp_path / "history.jsonl").read_bytes()[:-1].rsplit(b"\n", 1)
    assert left == whole + torn.removesuffix(b"\n")
    assert json.loads(last)["step"] == 7


def test_a_kill_between_the_note_of_a_start_and_the_config_costs_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    for flags, step, changes in (((), 0, []), (("--optim.base_lr", "0.1"), 5, ["optim.base_lr 0.00015 -> 0.1"])):
        config = config_for(folder, *flags)
        with monkeypatch.context() as patched:
            patched.setattr("training.history.save_config", killed)
            with pytest.raises(KeyboardInterrupt):
                note_start(folder, config, step, 1)
        check_run_folder(folder, config, "auto", ("optim.base_lr",))
        note_start(folder, config, step, 1)
        assert [entry["changed"] for entry in history(folder)[-2:]] == [changes, changes]


def test_a_folder_that_cannot_be_written_to_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").mkdir()
    with pytest.raises(UserError, match=f"cannot write to output_dir {tmp_path}: Is a directory"):
        note_start(tmp_path, config_for(tmp_path), 0, 1)
    (tmp_path / "file").touch()
    for write in (save_config, lambda folder, config: note_start(folder, config, 0, 1)):
        with pytest.raises(UserError, match=f"cannot write to output_dir {tmp_path}/file/run: Not a directory"):
            write(tmp_path / "file" / "run", config_for(tmp_path))


@pytest.mark.parametrize("torn", TORN)
def test_metrics_after_the_last_checkpoint_are_dropped_on_resume(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    for step in (10, 20, 30):
        first.write({"step": step, "loss": 1.0 / step})
    first.close()
    with path.open("ab") as file:
        file.write(torn)
    again = MetricsFile(path, 20)
    assert again.last == {"step": 20, "loss": 1 / 20}
    again.write({"step": 30, "loss": 5.0})
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == 5.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_noted_and_handlers_are_given_back(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)  # the tests themselves may run under nohup
    with StopRequest() as stop:
        assert (stop.signal, stop.exit_status) == (None, 0)
        os.kill(os.getpid(), number)
        assert (stop.signal, stop.exit_status) == (number, 128 + number)
    assert signal.signal(number, before) == signal.default_int_handler


def test_a_closed_terminal_is_no_concern_of_a_program_that_ignores_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert (stop.signal, stop.exit_status) == (None, 0)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_ends_at_once_though_nobody_reads_what_it_says() -> None:
    program = (
        "import time; from training.run import StopRequest\n"
        "with StopRequest():\n"
        "    print('listens', flush=True)\n"
        "    while True: time.sleep(0.1)"
    )
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writer, text=True)
    os.close(writer)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        process.send_signal(signal.SIGINT)
        time.sleep(1)  # two at once are one
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.communicate()


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


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_storage_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("training.run.fcntl.flock", flock)
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(number)):
            lock_run_folder(tmp_path)
        return
    with lock_run_folder(tmp_path):
        pass
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: the storage of output_dir {tmp_path} has no locks ({os.strerror(number)}): nothing keeps")

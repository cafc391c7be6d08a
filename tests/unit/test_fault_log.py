"""training/faults.py: what a run tells of unreadable samples; several processes are in tests/integration/test_bad_data.py."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from data.errors import Cause
from data.faults import Fault, printable
from data.stream import BatchPlan
from training import faults as module
from training.faults import FaultLog
from training.log import RunLog
from training.meters import WaitClock

PLAN = BatchPlan(8, 2, 1, 0)


@pytest.fixture
def accelerator(tmp_path: Path) -> Iterator[Accelerator]:
    yield Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    AcceleratorState._reset_state(reset_partial_state=True)


def fault(sample: int, cause: Cause = "corrupt") -> Fault:
    return Fault(cause, "a.tar", f"k{sample}", "it is broken", sample)


def listed(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def start(accelerator: Accelerator, folder: Path, step: int = 0, share: float = 0.01) -> RunLog:
    log = FaultLog(accelerator, folder, step, PLAN, share)
    return RunLog(accelerator, folder, step, 1000, PLAN.global_batch_size, WaitClock(), log)


def test_each_is_counted_every_time_and_listed_once(accelerator: Accelerator, tmp_path: Path) -> None:
    with start(accelerator, tmp_path) as log:
        log.faults.extend([fault(3), fault(4, "truncated")])
        log.write(10, {}, "")
        log.faults.extend([fault(3), fault(3), fault(5)])
        log.write(20, {}, "")
        log.write(30, {}, "")
    assert log.faults.num_read == 30 * 16
    assert [entry["faults"] for entry in metrics(tmp_path)] == [
        {"corrupt": 1, "truncated": 1},
        {"corrupt": 4, "truncated": 1},
        {"corrupt": 4, "truncated": 1},
    ]
    assert listed(tmp_path) == [
        {"step": step, "process": 0, **found._asdict()}
        for step, found in [(10, fault(3)), (10, fault(4, "truncated")), (20, fault(5))]
    ]
    assert listed(tmp_path)[0]["reason"] == "it is broken"


def test_a_run_without_faults_says_so_and_leaves_no_list(accelerator: Accelerator, tmp_path: Path) -> None:
    with start(accelerator, tmp_path) as log:
        log.write(10, {"loss": 1.0}, "")
    assert metrics(tmp_path)[0]["faults"] == {}
    assert not (tmp_path / "faults.jsonl").exists()


def test_warnings_come_each_time_that_the_count_has_doubled(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr("training.faults.tqdm.write", lines.append)
    with start(accelerator, tmp_path) as log:
        for step in range(1, 101):
            log.faults.extend([fault(step)])
            log.write(step, {}, "")
    assert len(lines) == 7  # at 1, 2, 4, ... 64
    assert lines[2] == (
        "warning: 4 of 64 samples read so far could not be read and were replaced by their neighbours (4 corrupt), listed in "
        f"{tmp_path / 'faults.jsonl'}; one of the newest is a.tar: k4: it is broken"
    )


def test_limit_needs_a_share_and_a_number(accelerator: Accelerator, tmp_path: Path) -> None:
    with start(accelerator, tmp_path, share=0.5) as log:
        log.faults.extend([fault(0)] * 31)
        log.write(1, {}, "")  # 31 of 16 samples
        assert not log.faults.too_many
        log.faults.extend([fault(0)])
        log.write(4, {}, "")  # 32 of 64: not more than half
        assert not log.faults.too_many
        log.faults.extend([fault(1)])
        log.write(4, {}, "")
        assert log.faults.too_many


def test_views_of_a_sample_are_one(accelerator: Accelerator, tmp_path: Path) -> None:
    log = FaultLog(accelerator, tmp_path, 0, BatchPlan(8, 2, 1, 0, views_per_image=4), 0.5)
    log.gather(10)
    assert log.num_read == 40


def test_end_names_counts_samples_file_and_ways_on(
    accelerator: Accelerator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(accelerator, tmp_path) as log:
        log.faults.extend([fault(number) for number in range(30)] + [fault(40, "not_an_image")] * 10)
        log.write(10, {}, "")
        assert log.faults.too_many
        with pytest.raises(SystemExit) as caught:
            log.end_run()
    assert caught.value.code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    for part in (
        "40 of 160 samples",
        "(30 corrupt, 10 not_an_image)",
        str(tmp_path / "faults.jsonl"),
        "25.00%",
        "--data.max_bad_share allows 1.00%",
        "a.tar: k0: it is broken | a.tar: k1: it is broken | a.tar: k2: it is broken",
        "check_shards.py",
        "--resume auto",
    ):
        assert part in line
    assert "k3" not in line


def test_a_resumed_run_goes_on_counting_and_listing(accelerator: Accelerator, tmp_path: Path) -> None:
    with start(accelerator, tmp_path) as log:
        log.faults.extend([fault(1), fault(2, "truncated")])
        log.write(10, {}, "")
        log.write_measured(10, {"knn": 0.5}, "")
        log.faults.extend([fault(1), fault(3)])
        log.write(20, {}, "")
        log.faults.extend([fault(4)])  # the run is interrupted before its next entry
    assert [entry["step"] for entry in listed(tmp_path)] == [10, 10, 20, 21]
    with start(accelerator, tmp_path, step=10) as log:
        assert [entry["sample"] for entry in listed(tmp_path)] == [1, 2]
        log.faults.extend([fault(1), fault(3)])
        log.write(20, {}, "")
    assert log.faults.counts == {"corrupt": 3, "truncated": 1}
    assert log.faults.num_read == 20 * 16
    assert [entry["sample"] for entry in listed(tmp_path)] == [1, 2, 3]
    assert log.faults.first[:2] == ["a.tar: k1: it is broken", "a.tar: k2: it is broken"]
    with start(accelerator, tmp_path, step=20) as log:
        log.write(30, {}, "")
    assert log.faults.counts == {"corrupt": 3, "truncated": 1}


@pytest.mark.parametrize("torn", [b'{"step": 10, "sam', b'{"step": 10, "sam\xff', b"\0" * 9])
def test_without_an_entry_to_go_on_from_counting_starts_at_the_start(
    accelerator: Accelerator, tmp_path: Path, torn: bytes
) -> None:
    (tmp_path / "faults.jsonl").write_bytes(torn)
    with start(accelerator, tmp_path, step=10) as log:
        log.faults.extend([fault(1)])
        log.write(12, {}, "")
    assert log.faults.counts == {"corrupt": 1}
    assert log.faults.num_read == 2 * 16
    assert [entry["sample"] for entry in listed(tmp_path)] == [1]


def test_list_is_bounded(accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTED", 10)
    monkeypatch.setattr(module, "MAX_SENT", 4)
    with start(accelerator, tmp_path, share=1.0) as log:
        log.faults.extend([fault(number) for number in range(50)])
        for step, num_listed in ((1, 4), (2, 8), (3, 10), (4, 10)):
            log.write(step, {}, "")
            assert len(listed(tmp_path)) == num_listed
    assert log.faults.counts == {"corrupt": 50}


def test_names_of_any_bytes_can_be_written(accelerator: Accelerator, tmp_path: Path) -> None:
    name = b"\xff\n\x1b[31m\xc3\xbc".decode("utf-8", "surrogateescape")
    assert printable(name) == r"\udcff\n\x1b[31mü"
    with start(accelerator, tmp_path) as log:
        log.faults.extend([Fault("corrupt", "a.tar", name, name, 0)])
        log.write(1, {}, "")
    assert listed(tmp_path)[0]["key"] == name
    assert log.faults.first[0].isprintable()

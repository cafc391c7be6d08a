"""Training on data of which a part can not be read, as its users start it."""

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.config import DataConfig
from data.faults import Fault
from data.indexing import index_tars
from data.loader import BatchLoader
from data.shards import ShardSet, open_shards
from data.stream import BatchPlan, SampleOrder
from data.transforms import Normalization
from data.writer import list_images, write_shards
from finetune.main import main as finetune_main
from models.mae import build_mae
from pretrain.report import export_encoder
from tests.conftest import png, write_pictures
from tests.integration.test_finetune import TINY
from tests.integration.test_pretrain import metrics, run, start, two_processes
from training.checkpoint import checkpoint_path

NUM_STEPS = 12
BAD = {3: "not_an_image", 4: "corrupt", 10: "corrupt", 15: "not_an_image", 20: "corrupt"}
FLAGS = ["--data.shuffle_window", "8", "--run.log_every_steps", "3", "--run.picture_every_steps", "0"]


@pytest.fixture(scope="module")
def bad_shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """24 pictures in two shards; some were damaged after they were indexed."""
    folder = tmp_path_factory.mktemp("bad")
    write_pictures(folder / "source", 24)
    write_shards(list_images(folder / "source"), folder / "shards", samples_per_shard=12)
    shards = open_shards(folder / "shards")
    for sample, cause in BAD.items():
        place = shards.locate(sample)
        with (folder / "shards" / shards.manifest.shards[place.shard_number].name).open("r+b") as file:
            file.seek(place.offset + (0 if cause == "not_an_image" else 20))
            file.write(bytes(20))
    return shards


def met(shards: ShardSet, world_size: int, num_steps: int) -> list[Fault]:
    """What so many processes meet, read in this one."""
    config = DataConfig(num_workers=0, shuffle_window=8)
    order = SampleOrder(shards.first_sample, 0, config.shuffle_window, config.lanes)
    faults = []
    for rank in range(world_size):
        plan = BatchPlan(16 // world_size, 1, world_size, rank)
        for batch in BatchLoader(shards, config, plan, order, (16, 16), 1, 0, num_steps):
            faults += batch.faults
    return faults


def flags(shards: ShardSet, num_processes: int, *more: str) -> list[str]:
    batch = ["--data.batch_size_per_process", str(16 // num_processes)]
    return ["--data.train", str(shards.root), *batch, *FLAGS, *more]


def test_two_processes_count_together_and_list_each_sample_once(bad_shards: ShardSet, tmp_path: Path) -> None:
    output = tmp_path / "run"
    text = run(output, *flags(bad_shards, 2, "--data.max_bad_share", "1"), launcher=two_processes())
    expected = [dict(Counter(fault.cause for fault in met(bad_shards, 2, step))) for step in (3, 6, 9, 12)]
    assert [entry["faults"] for entry in metrics(output)] == expected
    assert sum(expected[-1].values()) > len(BAD)  # several epochs: each is met again

    lines = [json.loads(line) for line in (output / "faults.jsonl").read_text().splitlines()]
    assert sorted((line["sample"], line["cause"]) for line in lines) == sorted(BAD.items())
    assert {line["process"] for line in lines} == {0, 1}
    assert {line["step"] for line in lines} <= {3, 6, 9, 12}
    assert all(line["shard"].endswith(".tar") and line["key"] == f"{line['sample']:09d}" and line["reason"] for line in lines)

    events = EventAccumulator(str(output / "tensorboard")).Reload()
    for cause in ("corrupt", "not_an_image"):
        scalars = [(event.step, event.value) for event in events.Scalars(f"faults/{cause}")]
        assert scalars == [(step, counts[cause]) for step, counts in zip((3, 6, 9, 12), expected, strict=True)]
    assert "faults/truncated" not in events.Tags()["scalars"]
    warnings = [line for line in text.splitlines() if line.startswith("warning: ")]
    assert 1 <= len(warnings) <= 4
    assert f"{sum(expected[0].values())} of 48 samples read so far" in warnings[0]
    assert "one of the newest is 00000" in warnings[0]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_too_many_end_all_processes_in_one_line_and_the_run_goes_on_with_a_higher_limit(
    bad_shards: ShardSet, tmp_path: Path, num_processes: int
) -> None:
    output = tmp_path / "run"
    launcher = {} if num_processes == 1 else {"launcher": two_processes()}
    process = start(output, *flags(bad_shards, num_processes, "--data.max_bad_share", "0.05"), **launcher)
    text, _ = process.communicate(timeout=120)
    end = next(step for step in (3, 6, 9, 12) if len(met(bad_shards, num_processes, step)) >= 32)
    assert end < NUM_STEPS
    if num_processes == 1:
        assert process.returncode == 2, text
        assert "Traceback" not in text
    else:
        assert process.returncode != 0
        assert "exitcode  : 2" in text
    [line] = [line for line in text.splitlines() if line.startswith("error: ")]
    faults = met(bad_shards, num_processes, end)
    counts = Counter(fault.cause for fault in faults)
    assert f"{len(faults)} of {16 * end} samples" in line
    assert ", ".join(f"{count} {cause}" for cause, count in counts.most_common()) in line
    assert str(output / "faults.jsonl") in line
    assert checkpoint_path(output / "checkpoints", end).exists()

    launcher = {} if num_processes == 1 else {"launcher": two_processes()}
    run(output, *flags(bad_shards, num_processes, "--data.max_bad_share", "1", "--resume", "auto"), **launcher)
    entries = metrics(output)
    assert [entry["step"] for entry in entries] == [3, 6, 9, 12]
    assert entries[-1]["faults"] == dict(Counter(fault.cause for fault in met(bad_shards, num_processes, NUM_STEPS)))
    lines = [json.loads(line) for line in (output / "faults.jsonl").read_text().splitlines()]
    assert sorted(line["sample"] for line in lines) == sorted(BAD)


def test_fine_tuning_counts_lists_and_ends_too(
    bad_shards: ShardSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    (tmp_path / "encoder").mkdir()
    export_encoder(tmp_path / "encoder", build_mae(TINY), TINY, Normalization((0.3,), (0.4,)))
    output = tmp_path / "run"
    command = [
        "finetune/main.py", "--encoder", str(tmp_path / "encoder"), "--output_dir", str(output), "--data.train",
        str(bad_shards.root), "--data.held_out", "0", "--data.num_workers", "0", "--data.batch_size_per_process", "16",
        "--run.device", "cpu", "--run.dtype", "float32", "--run.log_every_steps", "3", "--num_steps", "12",
        "--data.max_bad_share", "0.05",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as caught:
        finetune_main()
    assert caught.value.code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    step = metrics(output)[-1]["step"]
    counts = metrics(output)[-1]["faults"]
    assert isinstance(counts, dict)
    assert f"{sum(counts.values())} of {16 * int(step)} samples" in line
    assert sum(counts.values()) >= 32
    assert {json.loads(line)["sample"] for line in (output / "faults.jsonl").read_text().splitlines()} == set(BAD)
    assert checkpoint_path(output / "checkpoints", int(step)).exists()

    monkeypatch.setattr("sys.argv", [*command, "--resume", "auto", "--data.max_bad_share", "1"])
    assert finetune_main() == 0
    assert metrics(output)[-1]["step"] == 12


@pytest.mark.slow
def test_fifty_thousand_samples_of_which_one_in_a_hundred_is_bad(tmp_path: Path) -> None:
    """Two processes read an epoch: as many steps each, every sample once, and the count of the bad ones is exact."""
    folder = tmp_path / "shards"
    folder.mkdir()
    picture = png(np.arange(64, dtype=np.uint8).reshape(8, 8))
    for shard in range(50):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as tar:
            for number in range(1000):
                member = tarfile.TarInfo(f"{number:04d}.png")
                member.size = len(picture)
                tar.addfile(member, io.BytesIO(picture))
    index_tars(sorted(folder.glob("*.tar")), folder)
    shards = open_shards(folder)
    for sample in range(50, 50_000, 100):
        place = shards.locate(sample)
        with (folder / shards.manifest.shards[place.shard_number].name).open("r+b") as file:
            file.seek(place.offset)
            file.write(bytes(20))
    output = tmp_path / "run"
    more = [
        "--data.train",
        str(folder),
        "--num_steps",
        "100",
        "--data.batch_size_per_process",
        "250",
        "--data.max_bad_share",
        "0.02",
    ]
    run(output, *more, "--run.log_every_steps", "100", "--data.shuffle_window", "4096", launcher=two_processes())
    assert [entry["faults"] for entry in metrics(output) if entry["step"] == 100] == [{"not_an_image": 500}]
    lines = [json.loads(line) for line in (output / "faults.jsonl").read_text().splitlines()]
    assert sorted(line["sample"] for line in lines) == list(range(50, 50_000, 100))

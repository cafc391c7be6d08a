"""scripts/make_shards.py and scripts/index_shards.py, as a user runs them."""

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from PIL import Image

from data.shards import open_shards

REPOSITORY = Path(__file__).parents[2]


def run(script: str, *flags: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"scripts/{script}.py", *map(str, flags)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)


def make_images(folder: Path, num_images: int) -> Path:
    for number in range(num_images):
        (folder / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(folder / f"class{number % 2}" / f"{number}.png")
    return folder


def test_images_become_shards_and_are_summarized(tmp_path: Path) -> None:
    source = make_images(tmp_path / "source", 12)
    for number in range(7):
        (source / "class0" / f"bad{number}.jpg").write_bytes(b"<html>")
    (source / "notes.txt").touch()
    done = run(
        "make_shards",
        "--source",
        source,
        "--output",
        tmp_path / "out",
        "--samples_per_shard",
        "5",
        "--num_workers",
        "2",
    )
    assert done.returncode == 0, done.stderr
    assert "12 samples in 4 shard(s)" in done.stdout
    assert "ignored 1 file(s)" in done.stdout
    assert "left out 7 unreadable image(s): 7 not_an_image" in done.stdout
    assert "and 2 more" in done.stdout
    assert done.stdout.endswith(
        f"next: accelerate launch pretrain/main.py --data.train {tmp_path / 'out'} --output_dir runs/out\n"
    )
    assert "image/s" in done.stderr
    assert len(open_shards(tmp_path / "out")) == 12


def test_foreign_tars_become_a_data_set(tmp_path: Path) -> None:
    source = make_images(tmp_path / "source", 6)
    (tmp_path / "shards").mkdir()
    (tmp_path / "names.txt").write_text("cat\nbig dog\n")
    with tarfile.open(tmp_path / "shards" / "a.tar", "w") as tar:
        for path in sorted(source.rglob("*.png")):
            tar.add(path, path.name)
    done = run("index_shards", tmp_path / "shards", "--class_names", tmp_path / "names.txt", "--num_workers", "0")
    assert done.returncode == 0, done.stderr
    assert "6 samples in 1 shard(s)" in done.stdout
    assert open_shards(tmp_path / "shards").manifest.class_names == ("cat", "big dog")
    done = run("index_shards", tmp_path / "shards" / "a.tar", "--num_workers", "0")
    assert done.returncode == 0, done.stderr
    assert open_shards(tmp_path / "shards").manifest.class_names == ()


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("make_shards", ["--source", "nowhere", "--output", "out"], "nowhere does not exist"),
        ("make_shards", ["--source", "data", "--output", "tests"], "holds no images"),
        ("index_shards", ["docs"], "holds no *.tar files"),
        ("index_shards", ["a.tar", "--class_names", "nowhere"], "nowhere can not be read"),
    ],
)
def test_mistakes_end_in_one_line(script: str, flags: list[str], message: str) -> None:
    done = run(script, *flags)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_values_out_of_range_are_refused() -> None:
    done = run("make_shards", "--source", ".", "--output", "out", "--num_workers", "-1")
    assert done.returncode == 2
    assert "num_workers is -1; expected 0 or more" in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    source = make_images(tmp_path / "source", 2500)  # long enough to be still at work when the signal comes
    command = [
        *(sys.executable, "scripts/make_shards.py", "--source", source, "--output", tmp_path / "out"),
        *("--samples_per_shard", "1", "--num_workers", "2"),
    ]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the whole group, workers too
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.partial-*/*.tar")):
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert errors.count(b"Traceback") <= 1, "workers keep silent"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]

"""scripts/check_shards.py, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.writer import list_images, write_shards
from tests.shard_files import image_bytes, make_files, make_tar, tar_bytes

REPOSITORY = Path(__file__).parents[2]
PNG = image_bytes()


def check(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/check_shards.py", *map(str, flags)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)


def test_our_own_shards_are_sound(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [f"c{number % 2}/{number}.png" for number in range(7)])
    write_shards(list_images(source), tmp_path / "shards", samples_per_shard=3)
    done = check(tmp_path / "shards", "--decode", "1", "--num_workers", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 shard(s), ")
    assert done.stdout.endswith("7 samples, 7 images decoded: 0 fault(s), 0 warning(s)\n")
    assert "3/3" in done.stderr
    (tmp_path / "shards" / "000001.tar").unlink()
    done = check(tmp_path / "shards", "--num_workers", "0")
    assert done.returncode == 1, done.stderr
    assert "missing_shard" in done.stdout
    assert "000001.tar: No such file or directory" in done.stdout


def test_faults_of_foreign_tars_are_listed_with_examples_and_remedies(tmp_path: Path) -> None:
    sound = tar_bytes([(f"{number}.png", PNG) for number in range(10)])
    (tmp_path / "a.tar").write_bytes(sound[:5120] + b"\xff" * 512 + sound[5632:])
    make_tar(tmp_path / "b.tar", [(f"{number}.png", b"<html>") for number in range(5)] + [("d/._0.png", PNG)])
    done = check(tmp_path, "--num_workers", "0", "--examples", "2", "--json", tmp_path / "report.json")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["error", "bad_header", "1"]
    assert "a.tar: at byte 5,120, after sample '4': " in lines[1]
    assert "5 samples before it, 4 after" in lines[1]
    assert lines[2].strip().startswith("-> copy")
    assert [line.split()[:3] for line in lines if line.startswith(("error", "warning"))] == [
        ["error", "bad_header", "1"],
        ["warning", "hidden", "1"],
        ["error", "not_an_image", "5"],
    ]
    assert done.stdout.count("b.tar: ") == 3  # two examples of five, and the hidden member
    assert lines[-1].endswith("14 samples, no image decoded (--decode 1): 6 fault(s), 1 warning(s)")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["counts"] == {"bad_header": 1, "not_an_image": 5, "hidden": 1}
    assert (report["num_shards"], report["num_samples"]) == (2, 14)
    assert report["shards"]["a.tar"]["num_samples"] == 9
    assert report["rules"]["not_an_image"]["severity"] == "error"
    assert [example["key"] for example in report["rules"]["not_an_image"]["examples"]] == list("01234")


def test_warnings_alone_are_no_failure(tmp_path: Path) -> None:
    make_tar(tmp_path / "a.tar", [("0.png", PNG), ("README", b"")])
    done = check(tmp_path / "a.tar", "--num_workers", "0")
    assert done.returncode == 0, done.stderr
    assert "no_suffix" in done.stdout
    assert "0 fault(s), 1 warning(s)" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["docs"], "holds no *.tar files"),
        ([], "no shards were given"),
        (["docs", "--decode", "2"], "decode is 2.0; expected a share"),
        (["docs", "--num_workers", "-1"], "num_workers -1"),
    ],
)
def test_mistakes_of_the_command_line_have_a_status_of_their_own(flags: list[str], message: str) -> None:
    done = check(*flags)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr

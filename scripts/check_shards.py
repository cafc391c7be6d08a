"""Says what is wrong with tar shards, of any tool, with or without a manifest: every fault that a reader would trip over.

python scripts/check_shards.py shards --decode 1
"""

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from data.decode import MAX_PIXELS
from data.errors import DataError
from data.lint import LintReport, lint_tars
from data.lint_rules import RULES
from data.places import is_remote
from data.shards import MANIFEST_NAME, Manifest
from training.cli import parse_args, user_errors
from training.machine import available_cores
from training.one_process import require_one_process

EXIT_FAULTS = 1


@dataclass(frozen=True)
class CheckShardsConfig:
    """Looks through tar shards and lists what is wrong with them; changes nothing.

    Where a manifest lies beside the shards, they are held against it and against the index. Exit status 0: nothing but
    warnings; 1: faults; 2: the command line is wrong.
    """

    shards: tyro.conf.Positional[tuple[Path, ...]]
    """A folder, of which all *.tar are taken and what its manifest lists; or the tars themselves."""
    decode: float = 0.0
    """Share of the images that are decoded, evenly spread, 0..1. 0 looks at their first bytes only; 1 takes the time that one
    epoch of reading takes."""
    max_pixels: int = MAX_PIXELS
    """An image of more pixels than this is a fault, at least 1; --data.max_pixels of the training."""
    num_workers: int = available_cores()
    """Processes that read; 0 reads in the main process."""
    examples: int = 3
    """Examples that are printed of each rule, 0..20."""
    json: Path | None = None
    """File for a report that programs read: counts and up to 20 examples per rule, and the numbers of every shard."""

    def __post_init__(self) -> None:
        if not 0 <= self.decode <= 1:
            raise DataError(f"decode is {self.decode}; expected a share of the images, 0..1")
        if self.num_workers < 0 or self.max_pixels < 1 or not 0 <= self.examples <= 20:
            raise DataError(
                f"num_workers {self.num_workers}, max_pixels {self.max_pixels}, examples {self.examples}: expected at least 0, "
                "at least 1, and 0..20"
            )


def main() -> int:
    """Checks shards as the command line says; gives the exit status."""
    with user_errors():
        require_one_process("scripts/check_shards.py")
        config = parse_args(CheckShardsConfig, prog="scripts/check_shards.py")
        paths = find_shards(config.shards)
        total, shards = LintReport(), {}
        reports = lint_tars(
            paths, decode_share=config.decode, max_pixels=config.max_pixels, num_workers=config.num_workers
        )  # fmt: skip
        with tqdm(total=len(paths), desc="checking", unit="shard") as bar:
            for name, report in reports:
                total.merge(report)
                if name:
                    bar.update()
                    if config.json:
                        shards[name] = numbers(report)
        if config.json:
            write_json(config.json, total, shards)
        print("\n".join(describe(total, config)))
        return EXIT_FAULTS if total.findings.num("error") else 0


def find_shards(given: tuple[Path, ...]) -> list[Path]:
    """Returns the files that are meant by a folder, or by the paths of tars.

    Raises:
        DataError: nothing was given, a path does not exist, or a folder holds no shards.
    """
    if not given:
        raise DataError("no shards were given; expected a folder, or the paths of tar files")
    folder, *others = given
    if others or not folder.is_dir():
        for path in given:
            if not path.is_file():
                problem = "is a folder beside others" if path.is_dir() else "does not exist"
                raise DataError(f"{path} {problem}; expected one folder of tar shards, or the paths of tar files")
        return list(given)
    paths = set(folder.glob("*.tar"))
    if (folder / MANIFEST_NAME).is_file():
        with contextlib.suppress(DataError):  # `lint_tars` says what is wrong with it
            names = [shard.name for shard in Manifest.load(folder / MANIFEST_NAME).shards]
            paths |= {folder / name for name in names if not is_remote(name)}
    if not paths:
        raise DataError(f"{folder} holds no *.tar files; expected a folder of tar shards that lie here")
    return sorted(paths)


def numbers(report: LintReport) -> dict[str, Any]:
    """What a report counts."""
    return {
        "num_bytes": report.num_bytes,
        "num_samples": report.num_samples,
        "num_labelled": report.num_labelled,
        "num_decoded": report.num_decoded,
        "counts": dict(report.findings.counts),
    }


def write_json(file: Path, total: LintReport, shards: dict[str, dict[str, Any]]) -> None:
    """Writes the report that programs read."""
    rules = {
        name: {
            **RULES[name]._asdict(),
            "count": count,
            "examples": [finding._asdict() for finding in total.findings.examples[name]],
        }
        for name, count in total.findings.counts.items()
    }
    content = {"num_shards": total.num_shards, **numbers(total), "rules": rules, "shards": shards}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def describe(total: LintReport, config: CheckShardsConfig) -> list[str]:
    """Lists the rules that were broken, faults first, with examples, and last the sums."""
    lines = []
    findings = total.findings
    for name, rule in RULES.items():
        count = findings.counts[name]
        if not count:
            continue
        lines.append(f"{rule.severity:7}  {name:20} {count:9,}  {rule.meaning}")
        for finding in findings.examples[name][: config.examples]:
            where = ": ".join(part for part in (finding.shard, finding.key) if part)
            lines.append(f"{'':9}{where + ': ' if where else ''}{finding.reason}")
        if config.examples and rule.remedy:
            lines.append(f"{'':9}-> {rule.remedy}")
    if lines:
        lines.append("")
    decoded = f", {total.num_decoded:,} images decoded" if config.decode else ", no image decoded (--decode 1)"
    lines.append(
        f"{total.num_shards} shard(s), {total.num_bytes / 2**20:,.1f} MiB, {total.num_samples:,} samples{decoded}: "
        f"{findings.num('error'):,} fault(s), {findings.num('warning'):,} warning(s)"
    )
    return lines


if __name__ == "__main__":
    sys.exit(main())

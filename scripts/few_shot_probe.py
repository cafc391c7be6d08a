"""How far a frozen encoder gets with a few labelled images per class.

python scripts/few_shot_probe.py --encoders runs/cifar10 --train shards/train --test shards/test
"""

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from data.errors import DataError
from data.sources import open_dataset
from data.subsets import choose_per_class
from finetune.compare import ProbeData, ProbedEncoder, print_table, probed_encoders, write_json
from finetune.probe import FewShotResult, few_shot_accuracy
from training.cli import UserError, parse_args, user_errors
from training.one_process import require_one_process


@dataclass(frozen=True)
class FewShotConfig(ProbeData):
    """Logistic regression, and the nearest class mean, on features of a few labelled images; no other label is used.

    Which images is drawn anew for every seed; the draws of one seed are nested, so that its 5 images hold its 1.
    """

    shots: tuple[int, ...] = (1, 5, 10, 25, 100)
    """Labelled images of every class, at least 1."""
    seeds: int = 5
    """Draws of which images: the table gives mean and spread; at least 1."""
    strength: float = 100.0
    """Inverse strength of the L2 penalty (scikit-learn's C) on features of length 1 on average, above 0."""
    output: str = "few_shot_probe.json"
    """Where to write all results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shots or min(self.shots) < 1 or self.seeds < 1 or self.strength <= 0:
            raise ValueError("shots must be at least 1 and not empty, seeds at least 1, strength above 0")


def main() -> None:
    """Measures as the command line says."""
    rows, record = [], []
    with user_errors():
        require_one_process("scripts/few_shot_probe.py")
        config = parse_args(FewShotConfig, prog="scripts/few_shot_probe.py")
        draws = draw(config)  # before images are encoded for nothing
        for encoder in probed_encoders(config):
            for view in encoder.train.views:
                for shots, results in measure(encoder, view, draws, config.strength).items():
                    scores = {
                        "logistic regression": [result.logistic_regression for result in results],
                        "nearest class mean": [result.nearest_mean for result in results],
                    }
                    of = {"encoder": encoder.name, "view": view}
                    rows.append(
                        of | {"labels per class": str(shots)} | {name: mean_and_spread(each) for name, each in scores.items()}
                    )
                    record.append(of | {"shots": shots} | {name.replace(" ", "_"): each for name, each in scores.items()})
        print_table(rows)
        write_json(config.output, {"config": dataclasses.asdict(config), "results": record})


def draw(config: FewShotConfig) -> dict[int, list[Tensor]]:
    """Chooses the labelled images.

    Returns:
        Shots -> for each seed, (n,) int64 sample numbers.

    Raises:
        UserError: a class has too few images, or there is only one class.
        DataError: the data cannot be read.
    """
    train = open_dataset(config.train, labelled=True)
    if train.labels.min() == train.labels.max():
        raise UserError(f"{train.root} has one class only; expected at least two, to tell apart")
    draws = {}
    for shots in config.shots:
        try:
            chosen = [choose_per_class(train.labels, None, shots, seed) for seed in range(config.seeds)]
        except DataError as error:
            raise UserError(f"shots {shots}: {train.root}: {error}; give smaller --shots") from error
        draws[shots] = [torch.from_numpy(rows) for rows in chosen]
    return draws


def measure(
    encoder: ProbedEncoder, view: str, draws: Mapping[int, list[Tensor]], strength: float
) -> dict[int, list[FewShotResult]]:
    """Classifies the test set by each draw.

    Args:
        encoder: with features of both sets.
        view: which of the features.
        draws: shots -> for each seed, sample numbers.
        strength: of `few_shot_accuracy`.

    Returns:
        Shots -> for each seed, what the classifiers got right.
    """
    train, test = encoder.train, encoder.test
    with tqdm(total=sum(map(len, draws.values())), unit="draw", desc=f"few labels, {view}") as bar:
        found: dict[int, list[FewShotResult]] = {}
        for shots, of_seeds in draws.items():
            for rows in of_seeds:
                result = few_shot_accuracy(train.views[view][rows], train.labels[rows], test.views[view], test.labels, strength)
                found.setdefault(shots, []).append(result)
                bar.update()
    return found


def mean_and_spread(scores: list[float]) -> str:
    """Mean and standard deviation of shares, in percent."""
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return f"{statistics.mean(scores):.2%} +- {spread:.2%}"


if __name__ == "__main__":
    main()

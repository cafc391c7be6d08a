"""Nearest neighbours in the features of a frozen encoder: nothing is trained, nothing is chosen.

python scripts/knn_probe.py --encoders runs/cifar10 --train shards/train --test shards/test
"""

import dataclasses
from dataclasses import dataclass

from finetune.compare import ProbeData, print_table, probed_encoders, write_json
from training.cli import parse_args, user_errors
from training.knn import knn_accuracy
from training.one_process import require_one_process


@dataclass(frozen=True)
class KnnProbeConfig(ProbeData):
    """Classifies every test image by the training images whose features are most similar."""

    ks: tuple[int, ...] = (10, 20, 100, 200)
    """Numbers of neighbours, at least 1."""
    temperature: float = 0.07
    """Of the votes, above 0: a neighbour of cosine s counts exp(s / temperature)."""
    output: str = "knn_probe.json"
    """Where to write all results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ks or min(self.ks) < 1 or self.temperature <= 0:
            raise ValueError("ks must be at least 1 and not empty, temperature above 0")


def main() -> None:
    """Measures as the command line says."""
    rows, record = [], []
    with user_errors():
        require_one_process("scripts/knn_probe.py")
        config = parse_args(KnnProbeConfig, prog="scripts/knn_probe.py")
        for encoder in probed_encoders(config):
            for view, train in encoder.train.views.items():
                scores = knn_accuracy(
                    train, encoder.train.labels, encoder.test.views[view], encoder.test.labels, encoder.num_classes,
                    config.ks, config.temperature,
                )  # fmt: skip
                rows.append(
                    {"encoder": encoder.name, "view": view} | {f"{k}-NN": f"{score:.2%}" for k, score in scores.items()}
                )
                record.append(
                    {"encoder": encoder.name, "view": view, "accuracy": {str(k): score for k, score in scores.items()}}
                )
        print_table(rows)
        write_json(config.output, {"config": dataclasses.asdict(config), "results": record})


if __name__ == "__main__":
    main()

"""Linear classifiers on a frozen encoder: a whole grid of settings at once, chosen on held-out training samples.

python scripts/linear_probe.py --encoders runs/cifar10 --train shards/train --test shards/test
"""

import dataclasses
from dataclasses import dataclass

import torch

from finetune.compare import ProbeData, print_table, probed_encoders, write_json
from finetune.probe import accuracy, linear_probe
from training.cli import parse_args, user_errors


@dataclass(frozen=True)
class LinearProbeConfig(ProbeData):
    """Trains linear classifiers on features that are computed once, and reports their accuracy on the test set."""

    lrs: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    """Learning rates of the grid, above 0."""
    weight_decays: tuple[float, ...] = (0.0, 1e-2, 1e-1, 1.0)
    """Weight decays of the grid, at least 0."""
    num_steps: int = 1500
    """Steps of every classifier, at least 1."""
    probe_batch_size: int = 1024
    """Samples per step of the classifiers, at least 1."""
    held_out: float = 0.1
    """Share of the training samples that choose the setting, in (0, 1)."""
    seeds: int = 3
    """Repetitions with other splits and orders: the table gives mean and spread; at least 1."""
    logistic_regression: bool = False
    """Check the best view with scikit-learn's logistic regression too (slower)."""
    output: str = "linear_probe.json"
    """Where to write all results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lrs or not self.weight_decays or min(self.lrs) <= 0 or min(self.weight_decays) < 0:
            raise ValueError("lrs must be above 0 and weight_decays at least 0, and neither empty")
        if min(self.num_steps, self.probe_batch_size, self.seeds) < 1 or not 0 < self.held_out < 1:
            raise ValueError("num_steps, probe_batch_size and seeds must be at least 1, held_out in (0, 1)")


def main() -> None:
    """Measures as the command line says."""
    config = parse_args(LinearProbeConfig, prog="scripts/linear_probe.py")
    rows, record = [], []
    with user_errors():
        for encoder in probed_encoders(config):
            runs = [
                linear_probe(
                    encoder.train.views, encoder.train.labels, encoder.test.views, encoder.test.labels, encoder.num_classes,
                    config.lrs, config.weight_decays, config.num_steps, config.probe_batch_size, config.held_out, seed,
                )
                for seed in range(config.seeds)
            ]  # fmt: skip
            for view in encoder.train.views:
                of_view = [next(result for result in run if result.view == view) for run in runs]
                scores = torch.tensor([result.test_accuracy for result in of_view])
                spread = scores.std().item() if len(scores) > 1 else 0.0
                setting = of_view[0].setting
                rows.append(
                    {
                        "encoder": encoder.name,
                        "view": view,
                        "test accuracy": f"{scores.mean():.2%} +- {spread:.2%}",
                        "lr": f"{setting.lr:g}",
                        "weight decay": f"{setting.weight_decay:g}",
                    }
                )
                record.append(
                    {"encoder": encoder.name, "view": view, "test_accuracy": scores.tolist(), "setting": setting._asdict()}
                )
            if config.logistic_regression:
                view = runs[0][0].view
                score = logistic_regression_accuracy(
                    encoder.train.views[view], encoder.train.labels, encoder.test.views[view], encoder.test.labels
                )
                rows.append(
                    {
                        "encoder": encoder.name,
                        "view": f"{view} (logistic regression)",
                        "test accuracy": f"{score:.2%}",
                        "lr": "",
                        "weight decay": "",
                    }
                )
                record.append({"encoder": encoder.name, "view": view, "logistic_regression": score})
        print_table(rows)
        write_json(config.output, {"config": dataclasses.asdict(config), "results": record})


def logistic_regression_accuracy(
    train: torch.Tensor, train_labels: torch.Tensor, test: torch.Tensor, test_labels: torch.Tensor
) -> float:
    """An independent check: scikit-learn's L-BFGS on standardised features, with its default regularisation."""
    from sklearn.linear_model import LogisticRegression

    std, mean = torch.std_mean(train, dim=0)
    std = std.clamp_min(1e-6)
    model = LogisticRegression(max_iter=1000).fit(((train - mean) / std).numpy(), train_labels.numpy())
    logits = torch.from_numpy(model.predict_log_proba(((test - mean) / std).numpy()))
    return accuracy(logits, torch.searchsorted(torch.from_numpy(model.classes_), test_labels)).item()


if __name__ == "__main__":
    main()

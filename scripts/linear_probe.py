"""Linear classifiers on a frozen encoder: a grid of views and settings in one pass, chosen on held-out training samples.

python scripts/linear_probe.py --encoders runs/cifar10 --train shards/train --test shards/test
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from finetune.compare import ProbeData, ProbedEncoder, print_table, probed_encoders, write_json
from finetune.paper_probe import PaperRecipe, paper_probe
from finetune.probe import ProbeResult, ViewResult, accuracy, combine, linear_probe, probe_views
from training.cli import parse_args, user_errors
from training.machine import native_bfloat16
from training.one_process import require_one_process


@dataclass(frozen=True)
class LinearProbeConfig(ProbeData):
    """Trains linear classifiers on features that are computed once, and reports their accuracy on the test set.

    The views are the CLS token, the mean of the patch tokens, and both side by side: of each of the last blocks alone
    ("cls/12"), and of all of them side by side ("both/9-12").
    """

    last_blocks: int = 4
    """So many last blocks are tried, each alone and all side by side, at least 1; of an encoder with fewer, all of them."""
    lrs: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    """Learning rates of the grid, above 0."""
    weight_decays: tuple[float, ...] = (0.0, 1e-2, 1e-1, 1.0)
    """Weight decays of the grid, at least 0."""
    num_steps: int = 500
    """Steps of every classifier, at least 1."""
    probe_batch_size: int = 1024
    """Samples per step of the classifiers, at least 1."""
    held_out: float = 0.1
    """Share of the training samples that choose the setting, in (0, 1)."""
    seeds: int = 3
    """Repetitions with other splits and orders: the table gives mean and spread; at least 1."""
    paper_recipe: bool = False
    """Check the view that the first seed chose by the paper's probe, too: BatchNorm, LARS, 90 epochs, here without augmentation
    (with it: finetune/configs/linear_probe.yaml)."""
    paper_base_lr: float = 0.1
    """Learning rate of the paper's probe for 256 samples per step, above 0. LARS moves a weight by a share of its own size: 90
    epochs of less data than ImageNet are fewer steps, and need a larger one to arrive."""
    logistic_regression: bool = False
    """Check the view that the first seed chose with scikit-learn's logistic regression too (slower)."""
    output: str = "linear_probe.json"
    """Where to write all results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lrs or not self.weight_decays or min(self.lrs) <= 0 or min(self.weight_decays) < 0:
            raise ValueError("lrs must be above 0 and weight_decays at least 0, and neither empty")
        if self.paper_base_lr <= 0:
            raise ValueError(f"paper_base_lr must be above 0, not {self.paper_base_lr}")
        if min(self.num_steps, self.probe_batch_size, self.seeds) < 1 or not 0 < self.held_out < 1:
            raise ValueError("num_steps, probe_batch_size and seeds must be at least 1, held_out in (0, 1)")


def main() -> None:
    """Measures as the command line says."""
    rows, record = [], []
    grid_dtype = torch.bfloat16 if native_bfloat16("cpu") else torch.float32
    with user_errors():
        require_one_process("scripts/linear_probe.py")
        config = parse_args(LinearProbeConfig, prog="scripts/linear_probe.py")
        for encoder in probed_encoders(config, at_most_all=True):
            views = probe_views(encoder.train.views)
            runs = [
                linear_probe(
                    encoder.train.views, encoder.train.labels, encoder.test.views, encoder.test.labels, encoder.num_classes,
                    views, config.lrs, config.weight_decays, config.num_steps, config.probe_batch_size, config.held_out, seed,
                    grid_dtype,
                )
                for seed in range(config.seeds)
            ]  # fmt: skip
            rows.extend(table_rows(encoder.name, runs, list(views)))
            record.append({"encoder": encoder.name, "seeds": [as_json(seed, run) for seed, run in enumerate(runs)]})
            view = runs[0].chosen.view
            for name, check in CHECKS.items():
                if getattr(config, name):
                    scores = check(encoder, views[view], config)
                    shown = {"view": f"{view} ({name.replace('_', ' ')})", "test accuracy": _mean_and_spread(scores)}
                    rows.append(dict.fromkeys(rows[0], "") | {"encoder": encoder.name} | shown)
                    record[-1][name] = {"view": view, "test_accuracy": scores}
        print_table(rows)
        print(f"chosen: on {config.held_out:.0%} of the training images, then trained on all; the other rows without these")
        write_json(config.output, {"config": dataclasses.asdict(config), "results": record})


def table_rows(encoder: str, runs: list[ProbeResult], views: list[str]) -> list[dict[str, str]]:
    """The rows of one encoder: what every seed chose, then the winner of every view.

    Args:
        encoder: its name.
        runs: one result for each seed.
        views: in the order of their rows.
    """
    chosen = [run.chosen for run in runs]
    by_view = {view: [next(result for result in run.views if result.view == view) for run in runs] for view in views}
    return [
        _row(encoder, f"chosen: {_counted(result.view for result in chosen)}", chosen),
        *(_row(encoder, view, results) for view, results in by_view.items()),
    ]


def _row(encoder: str, view: str, results: list[ViewResult]) -> dict[str, str]:
    return {
        "encoder": encoder,
        "view": view,
        "test accuracy": _mean_and_spread([result.test_accuracy for result in results]),
        "held-out accuracy": _mean_and_spread([result.held_out_accuracy for result in results]),
        "lr": _counted(f"{result.setting.lr:g}" for result in results),
        "weight decay": _counted(f"{result.setting.weight_decay:g}" for result in results),
    }


def _mean_and_spread(scores: list[float]) -> str:
    spread = torch.tensor(scores).std().item() if len(scores) > 1 else 0.0
    return f"{sum(scores) / len(scores):.2%} +- {spread:.2%}"


def _counted(choices: Iterable[str]) -> str:
    """What all seeds chose, or how many chose what: "both/9-12 (2), cls/12 (1)"."""
    counts = Counter(choices).most_common()
    return counts[0][0] if len(counts) == 1 else ", ".join(f"{choice} ({count})" for choice, count in counts)


def as_json(seed: int, run: ProbeResult) -> dict[str, Any]:
    """Everything that one seed gave."""
    chosen, *views = [result._asdict() | {"setting": result.setting._asdict()} for result in (run.chosen, *run.views)]
    return {"seed": seed, "chosen": chosen, "views": views}


def paper_accuracy(encoder: ProbedEncoder, parts: tuple[str, ...], config: LinearProbeConfig) -> list[float]:
    """The paper's probe on a view, once for each seed.

    Args:
        encoder: whose features.
        parts: the features that stand side by side.
        config: learning rate; how often, with other initial weights and orders.
    """
    train, test = combine(encoder.train.views, parts), combine(encoder.test.views, parts)
    recipe = PaperRecipe(base_lr=config.paper_base_lr)
    return [
        paper_probe(train, encoder.train.labels, test, encoder.test.labels, encoder.num_classes, recipe, seed)
        for seed in range(config.seeds)
    ]


def logistic_regression_accuracy(encoder: ProbedEncoder, parts: tuple[str, ...], _config: LinearProbeConfig) -> list[float]:
    """An independent check: scikit-learn's L-BFGS on standardised features, with its default regularisation.

    Args:
        encoder: whose features.
        parts: the features that stand side by side.
    """
    from sklearn.linear_model import LogisticRegression

    train, test = combine(encoder.train.views, parts), combine(encoder.test.views, parts)
    std, mean = torch.std_mean(train, dim=0)
    std = std.clamp_min(1e-6)
    model = LogisticRegression(max_iter=1000).fit(((train - mean) / std).numpy(), encoder.train.labels.numpy())
    logits = torch.from_numpy(model.predict_log_proba(((test - mean) / std).numpy()))
    return [accuracy(logits, torch.searchsorted(torch.from_numpy(model.classes_), encoder.test.labels)).item()]


CHECKS: dict[str, Callable[[ProbedEncoder, tuple[str, ...], LinearProbeConfig], list[float]]] = {
    "paper_recipe": paper_accuracy,
    "logistic_regression": logistic_regression_accuracy,
}
"""What the grid's result is checked by: setting -> encoder, view, config -> accuracies."""


if __name__ == "__main__":
    main()

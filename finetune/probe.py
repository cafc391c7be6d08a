"""Probes of a frozen encoder's features: many linear classifiers trained at once.

Shapes: N samples, D width, C classes, S settings.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Setting(NamedTuple):
    """One linear classifier of a grid."""

    lr: float
    """Peak learning rate of AdamW."""
    weight_decay: float


@dataclass(frozen=True)
class LinearGrid:
    """S linear classifiers on the same features, trained together.

    Their weights stand side by side, (D, S * C), so that a step of all of them is one matrix product, and a grid costs little
    more than one classifier. Each column has its own learning rate and weight decay; no classifier sees another.
    """

    mean: Tensor
    """(D,), of the training features."""
    std: Tensor
    """(D,), of the training features."""
    weight: Tensor
    """(D, S, C)."""
    bias: Tensor
    """(S, C)."""

    def logits(self, features: Tensor) -> Tensor:
        """(N, D) -> (S, N, C)."""
        settings, classes = self.bias.shape
        flat = ((features - self.mean) / self.std) @ self.weight.flatten(1)  # (N, S * C)
        return (flat.view(-1, settings, classes) + self.bias).transpose(0, 1)


def fit_linear_grid(
    features: Tensor, labels: Tensor, num_classes: int, settings: list[Setting], num_steps: int, batch_size: int, seed: int
) -> LinearGrid:
    """Trains every setting of a grid on standardised features with AdamW and a cosine schedule.

    Standardising by the training set's mean and deviation is what the paper's BatchNorm without affine parameters does at test
    time (He et al. 2022, appendix A.1).

    Args:
        features: (N, D) float32.
        labels: (N,) int64 in 0 .. num_classes - 1.
        num_classes: C.
        settings: the grid, S of them.
        num_steps: steps of every classifier, at least 1.
        batch_size: samples per step.
        seed: of the order of the samples.
    """
    device, width = features.device, features.shape[1]
    std, mean = torch.std_mean(features, dim=0)
    std = std.clamp_min(1e-6)
    standard = (features - mean) / std
    lrs = torch.tensor([setting.lr for setting in settings], device=device).view(1, -1, 1)
    decays = torch.tensor([setting.weight_decay for setting in settings], device=device).view(1, -1, 1)
    # Row D is the bias: one tensor, one update.
    weight = torch.zeros(width + 1, len(settings), num_classes, device=device)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    beta1, beta2 = 0.9, 0.999
    generator = torch.Generator().manual_seed(seed)
    step = 0
    while step < num_steps:
        order = torch.randperm(len(features), generator=generator).to(device)
        for rows in order.split(batch_size)[: num_steps - step]:
            step += 1
            inputs = F.pad(standard[rows], (0, 1), value=1.0)  # (b, D + 1)
            logits = (inputs @ weight.flatten(1)).view(len(rows), len(settings), num_classes)
            # The gradient of softmax cross-entropy by hand: autograd would keep four copies of the logits.
            error = logits.softmax(dim=-1)
            error.scatter_add_(
                2, labels[rows].view(-1, 1, 1).expand(-1, len(settings), 1), error.new_full((len(rows), len(settings), 1), -1.0)
            )
            gradient = (inputs.T @ error.flatten(1)).view_as(weight) / len(rows)
            first.lerp_(gradient, 1 - beta1)
            second.lerp_(gradient.square(), 1 - beta2)
            scale = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (step - 1) / num_steps))).item()
            update = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + 1e-8)
            weight[:-1] -= scale * lrs * decays * weight[:-1]  # decoupled; the bias takes none
            weight -= scale * lrs * update
    return LinearGrid(mean, std, weight[:-1], weight[-1])


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of samples whose highest logit is the label's: (..., N, C) and (N,) -> (...)."""
    return (logits.argmax(dim=-1) == labels).float().mean(dim=-1)


class ProbeResult(NamedTuple):
    """The setting that won on the held-out part, and how it does on the test set."""

    view: str
    """Which feature: pooling and block."""
    setting: Setting
    held_out_accuracy: float
    test_accuracy: float


def split_held_out(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Splits sample numbers into a training and a held-out part, the same share of every class.

    Returns:
        Two (.,) int64 tensors of row numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    held_out = []
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero().squeeze(1)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        held_out.append(rows[: max(1, round(share * len(rows)))] if len(rows) > 1 else rows[:0])
    held = torch.cat(held_out).sort().values
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[held] = False
    return kept.nonzero().squeeze(1), held


def linear_probe(
    train: dict[str, Tensor],
    train_labels: Tensor,
    test: dict[str, Tensor],
    test_labels: Tensor,
    num_classes: int,
    lrs: tuple[float, ...],
    weight_decays: tuple[float, ...],
    num_steps: int,
    batch_size: int,
    held_out: float,
    seed: int,
) -> list[ProbeResult]:
    """Trains a grid on every view; chooses by held-out samples; trains the chosen setting on all; measures on the test set.

    Args:
        train: view -> (N, D) features.
        train_labels: (N,).
        test: view -> (M, D) features.
        test_labels: (M,).
        num_classes: C.
        lrs: learning rates of the grid.
        weight_decays: weight decays of the grid.
        num_steps: steps of every classifier.
        batch_size: samples per step.
        held_out: share of the training set that chooses, in (0, 1).
        seed: of split and order.

    Returns:
        One result for each view, best on the held-out samples first.
    """
    settings = [Setting(lr, decay) for lr, decay in itertools.product(lrs, weight_decays)]
    fit_rows, held_rows = split_held_out(train_labels, held_out, seed)
    results = []
    for view, features in train.items():
        grid = fit_linear_grid(features[fit_rows], train_labels[fit_rows], num_classes, settings, num_steps, batch_size, seed)
        held_accuracy = accuracy(grid.logits(features[held_rows]), train_labels[held_rows])  # (S,)
        best = int(held_accuracy.argmax())
        final = fit_linear_grid(features, train_labels, num_classes, [settings[best]], num_steps, batch_size, seed)
        test_accuracy = accuracy(final.logits(test[view]), test_labels)[0]
        results.append(ProbeResult(view, settings[best], held_accuracy[best].item(), test_accuracy.item()))
    return sorted(results, key=lambda result: -result.held_out_accuracy)

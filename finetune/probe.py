"""Probes of a frozen encoder's features: many linear classifiers trained at once.

Shapes: N samples, D width, C classes, S settings, b samples of a step.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from training.cli import UserError

POOLINGS = {"cls": ("cls",), "mean": ("mean",), "both": ("cls", "mean")}
"""First part of a view's name -> what stands side by side in it."""


def probe_views(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names what can be tried with some features: each block alone, and all blocks side by side.

    Args:
        names: of features, as `Features.views` has them: "cls/12", "mean/12", ...

    Returns:
        View -> the features that stand side by side in it: "both/12" -> ("cls/12", "mean/12"), "cls/11-12" -> ("cls/11",
        "cls/12"), "both/11-12" -> all four. Without CLS tokens only "mean".

    Source: dinov2/eval/linear.py, which tries the last block and the last four side by side, with and without the mean.
    """
    names = set(names)
    blocks = sorted({int(name.split("/")[1]) for name in names})
    spans = {str(block): [block] for block in blocks}
    if len(blocks) > 1:
        spans[f"{blocks[0]}-{blocks[-1]}"] = blocks
    views = {
        f"{pooling}/{span}": tuple(f"{part}/{block}" for block in of_span for part in parts)
        for span, of_span in spans.items()
        for pooling, parts in POOLINGS.items()
    }
    return {view: parts for view, parts in views.items() if names.issuperset(parts)}


def combine(features: Mapping[str, Tensor], parts: Iterable[str]) -> Tensor:
    """Puts features side by side: (N, D) each -> (N, sum of all D)."""
    return torch.cat([features[part] for part in parts], dim=1)


class Setting(NamedTuple):
    """One linear classifier of a grid."""

    lr: float
    """Peak learning rate of AdamW."""
    weight_decay: float


DECORRELATE_FROM = 10.0
"""Samples for each number of a feature from which on features are decorrelated: with fewer, the axes of least variance are
noise, and a classifier that sees them as large as the others learns it."""


@dataclass(frozen=True)
class LinearGrid:
    """S linear classifiers on the same features, trained together.

    Their weights stand side by side, (D, C * S), so that a step of all of them is one matrix product. Each column has its own
    learning rate and weight decay; no classifier sees another.
    """

    mean: Tensor
    """(D,), of the training features."""
    std: Tensor
    """(D,), of the training features."""
    weight: Tensor
    """(D, C, S)."""
    bias: Tensor
    """(C, S)."""

    def logits(self, features: Tensor) -> Tensor:
        """(N, D) -> (S, N, C)."""
        flat = ((features - self.mean) / self.std) @ self.weight.flatten(1)  # (N, C * S)
        return (flat.unflatten(1, self.bias.shape) + self.bias).permute(2, 0, 1)

    def select(self, setting: int) -> "LinearGrid":
        """The classifier of one setting alone."""
        return LinearGrid(self.mean, self.std, self.weight[:, :, [setting]], self.bias[:, [setting]])

    def accuracy(self, features: Mapping[str, Tensor], parts: Iterable[str], rows: Tensor, labels: Tensor) -> Tensor:
        """Share of some samples that each classifier gets right.

        Args:
            features: name -> (N, .).
            parts: the names that stand side by side, D wide together.
            rows: (n,) int64, which samples.
            labels: (N,).

        Returns:
            (S,).
        """
        right = torch.zeros(self.bias.shape[1], device=labels.device)
        for chunk in rows.split(4096):  # logits of all samples, classes and settings at once may not fit into memory
            inputs = torch.cat([features[part].index_select(0, chunk) for part in parts], dim=1)
            right += accuracy(self.logits(inputs), labels[chunk]) * len(chunk)
        return right / len(rows)


class _GridTraining:
    """S classifiers of one view while AdamW trains them. The last row of every tensor is the bias: one tensor, one update.

    Settings are the innermost dimension: softmax over the classes then runs over whole vectors, many times faster than over
    rows of a few classes. Everything of the weights' size is updated in place.
    """

    BETA1, BETA2, EPS = 0.9, 0.999, 1e-8

    def __init__(self, width: int, num_classes: int, settings: list[Setting], device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.shape = (num_classes, len(settings))
        self.weight = torch.zeros(width + 1, num_classes * len(settings), device=device)
        self.gradient, self.first, self.second = (torch.zeros_like(self.weight) for _ in range(3))
        self.lrs = torch.tensor([setting.lr for setting in settings], device=device).repeat(num_classes)
        decays = torch.tensor([setting.weight_decay for setting in settings], device=device).repeat(num_classes)
        self.decays = self.lrs * decays

    def step(self, inputs: Tensor, labels: Tensor, step: int, scale: float) -> None:
        """One step of every classifier.

        Args:
            inputs: (b, D), standardised, of the number type of the products.
            labels: (b,).
            step: from 1 on.
            scale: of all learning rates.
        """
        weight = self.weight.to(self.dtype)
        logits = torch.addmm(weight[-1], inputs, weight[:-1]).float().unflatten(1, self.shape)  # (b, C, S)
        # The gradient of softmax cross-entropy by hand: autograd would keep four copies of the logits.
        # Probabilities too small for normal float32 would make the products below several times slower; AdamW's epsilon hides
        # all below 1e-20.
        error = F.threshold(logits.softmax(dim=1), 1e-20, 0.0, inplace=True)
        error[torch.arange(len(labels), device=labels.device), labels] -= 1.0
        error = error.flatten(1)
        self.gradient[:-1] = torch.mm(inputs.T, error.to(self.dtype))
        torch.sum(error, 0, out=self.gradient[-1])
        self.gradient.div_(len(inputs))
        self.first.lerp_(self.gradient, 1 - self.BETA1)
        self.second.mul_(self.BETA2).addcmul_(self.gradient, self.gradient, value=1 - self.BETA2)
        denominator = torch.sqrt(self.second, out=self.gradient).div_(math.sqrt(1 - self.BETA2**step)).add_(self.EPS)
        self.weight[:-1].mul_(1 - scale * self.decays)  # decoupled; the bias takes none
        update = torch.div(self.first, denominator, out=self.gradient)
        self.weight.addcmul_(update, self.lrs, value=-scale / (1 - self.BETA1**step))


def principal_axes(
    features: Mapping[str, Tensor], moments: Mapping[str, tuple[Tensor, Tensor]], parts: tuple[str, ...], rows: Tensor
) -> Tensor:
    """The axes along which standardised features are uncorrelated, each scaled to the square root of its deviation.

    An encoder's features are strongly correlated, and AdamW, whose steps follow the axes, then needs many times more of them.
    Scaled to equal variance, the axes of least variance, mostly noise, would be learnt as fast as the others; left as they are,
    hardly at all. The classifier stays a linear one: the axes are multiplied into its weights.

    Args:
        features: name -> (N, .).
        moments: name -> mean and deviation.
        parts: the features that stand side by side, D wide together.
        rows: (n,) int64, which samples.

    Returns:
        (D, D): standardised features @ axes are uncorrelated.
    """
    correlation = torch.zeros((), dtype=torch.float64)
    for chunk in rows.split(8192):
        standard = torch.cat([(features[part][chunk] - moments[part][0]) / moments[part][1] for part in parts], dim=1)
        correlation = correlation + (standard.T @ standard).double().cpu() / len(rows)
    variances, axes = torch.linalg.eigh(correlation)
    return (axes / variances.clamp_min(1e-7 * variances.max()).sqrt().sqrt()).float().to(rows.device)


def fit_linear_grids(
    features: Mapping[str, Tensor],
    labels: Tensor,
    rows: Tensor,
    num_classes: int,
    views: Mapping[str, tuple[str, ...]],
    settings: list[Setting],
    num_steps: int,
    batch_size: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    decorrelate_from: float = DECORRELATE_FROM,
) -> dict[str, LinearGrid]:
    """Trains every setting on every view in one pass, on standardised features, with AdamW and a cosine schedule.

    Standardising by the training set's mean and deviation is what the paper's BatchNorm without affine parameters does at test
    time (He et al. 2022, appendix A.1). Samples are gathered and standardised once a step for all views, and views are put
    together from them, so that nothing of the training set's size is kept beside the features.

    Args:
        features: name -> (N, .) float32.
        labels: (N,) int64 in 0 .. num_classes - 1.
        rows: (n,) int64, which samples to train on.
        num_classes: C.
        views: what to train on: name -> the features that stand side by side in it.
        settings: the grid, S of them.
        num_steps: steps of every classifier, at least 1.
        batch_size: samples per step.
        seed: of the order of the samples.
        dtype: of the matrix products: bfloat16 is several times faster where the device has it, and good enough to choose by.
        decorrelate_from: a view is turned to its principal axes where there are at least so many samples for each number.

    Returns:
        View -> its S classifiers.
    """
    moments = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(views.values())):
        std, mean = torch.std_mean(features[name].index_select(0, rows), dim=0)
        moments[name] = mean, std.clamp_min(1e-6)
    grids = {
        view: _GridTraining(sum(features[part].shape[1] for part in parts), num_classes, settings, labels.device, dtype)
        for view, parts in views.items()
    }
    axes = {
        view: principal_axes(features, moments, parts, rows)
        for view, parts in views.items()
        if len(rows) >= decorrelate_from * sum(features[part].shape[1] for part in parts)
    }
    generator = torch.Generator().manual_seed(seed)
    step = 0
    while step < num_steps:
        order = torch.randperm(len(rows), generator=generator).to(rows.device)
        for batch in rows[order].split(batch_size)[: num_steps - step]:
            step += 1
            scale = 0.5 * (1 + math.cos(math.pi * (step - 1) / num_steps))
            standard = {
                name: features[name].index_select(0, batch).sub_(mean).div_(std) for name, (mean, std) in moments.items()
            }
            for view, grid in grids.items():
                inputs = combine(standard, views[view])
                if view in axes:  # in float32: along axes of little variance large numbers cancel
                    inputs = inputs @ axes[view]
                grid.step(inputs.to(dtype), labels[batch], step, scale)
    return {
        view: LinearGrid(
            torch.cat([moments[part][0] for part in views[view]]),
            torch.cat([moments[part][1] for part in views[view]]),
            (axes[view] @ grid.weight[:-1] if view in axes else grid.weight[:-1]).unflatten(1, grid.shape),
            grid.weight[-1].unflatten(0, grid.shape),
        )
        for view, grid in grids.items()
    }


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of samples whose highest logit is the label's: (..., N, C) and (N,) -> (...)."""
    return (logits.argmax(dim=-1) == labels).float().mean(dim=-1)


class ViewResult(NamedTuple):
    """The setting of a view that won on the held-out part, and how it does on the test set."""

    view: str
    """Which features: pooling and blocks."""
    setting: Setting
    held_out_accuracy: float
    """Of the classifier trained without the held-out part."""
    test_accuracy: float


class ProbeResult(NamedTuple):
    """What one choice on held-out samples gave."""

    chosen: ViewResult
    """The view and setting that won, trained anew on all training samples."""
    views: list[ViewResult]
    """Every view's winner, best on the held-out part first; trained without that part."""


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
    train: Mapping[str, Tensor],
    train_labels: Tensor,
    test: Mapping[str, Tensor],
    test_labels: Tensor,
    num_classes: int,
    views: Mapping[str, tuple[str, ...]],
    lrs: tuple[float, ...],
    weight_decays: tuple[float, ...],
    num_steps: int,
    batch_size: int,
    held_out: float,
    seed: int,
    grid_dtype: torch.dtype = torch.float32,
    decorrelate_from: float = DECORRELATE_FROM,
) -> ProbeResult:
    """Trains a grid on every view; chooses view and setting by held-out samples; trains only the chosen one on all samples.

    The test set chooses nothing.

    Args:
        train: name -> (N, .) features.
        train_labels: (N,).
        test: name -> (M, .) features.
        test_labels: (M,).
        num_classes: C.
        views: what to try: name -> the features that stand side by side in it, as of `probe_views`.
        lrs: learning rates of the grid.
        weight_decays: weight decays of the grid.
        num_steps: steps of every classifier.
        batch_size: samples per step.
        held_out: share of the training set that chooses, in (0, 1).
        seed: of split and order.
        grid_dtype: of the grid's matrix products; the chosen classifier is trained in float32.
        decorrelate_from: as of `fit_linear_grids`.

    Raises:
        UserError: no class has a sample to spare for the choice.
    """
    settings = [Setting(lr, decay) for lr, decay in itertools.product(lrs, weight_decays)]
    fit_rows, held_rows = split_held_out(train_labels, held_out, seed)
    if not len(held_rows):
        raise UserError("nothing can be held out to choose the setting: expected at least two training images of some class")
    all_rows, test_rows = torch.arange(len(train_labels)), torch.arange(len(test_labels))
    grids = fit_linear_grids(
        train,
        train_labels,
        fit_rows,
        num_classes,
        views,
        settings,
        num_steps,
        batch_size,
        seed,
        grid_dtype,
        decorrelate_from,
    )
    results = []
    for view, grid in grids.items():
        held_accuracy = grid.accuracy(train, views[view], held_rows, train_labels)  # (S,)
        best = int(held_accuracy.argmax())
        test_accuracy = grid.select(best).accuracy(test, views[view], test_rows, test_labels)[0]
        results.append(ViewResult(view, settings[best], held_accuracy[best].item(), test_accuracy.item()))
    results.sort(key=lambda result: -result.held_out_accuracy)
    view, setting = results[0].view, results[0].setting
    (final,) = fit_linear_grids(
        train,
        train_labels,
        all_rows,
        num_classes,
        {view: views[view]},
        [setting],
        num_steps,
        batch_size,
        seed,
        decorrelate_from=decorrelate_from,
    ).values()
    test_accuracy = final.accuracy(test, views[view], test_rows, test_labels)[0].item()
    return ProbeResult(results[0]._replace(test_accuracy=test_accuracy), results)


class FewShotResult(NamedTuple):
    """Shares of the test set that two classifiers get right, having seen the same few labelled samples."""

    logistic_regression: float
    nearest_mean: float


def few_shot_accuracy(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, strength: float = 100.0
) -> FewShotResult:
    """Classifies by a few labelled samples, which are all that the classifiers know.

    Logistic regression on standardised features that are divided by sqrt(D), so that a sample's squared length is about 1
    whatever the width; `strength` is scikit-learn's C, the same for any number of samples, so that none has to be held out to
    choose it. Of 0.1, 1, 10, 100 and 1,000 it was 100 that did best, or within about a point of it, for 1 to 100 digits per
    class and MAE encoders. The nearest class mean is taken on centred features of length 1 (Wang et al. 2019, "SimpleShot").

    Args:
        train: (N, D) float32, all labelled samples.
        train_labels: (N,), of at least two classes.
        test: (M, D).
        test_labels: (M,).
        strength: inverse strength of the L2 penalty, above 0.
    """
    from sklearn.linear_model import LogisticRegression  # slow to import

    std, mean = torch.std_mean(train, dim=0)
    scale = std.clamp_min(1e-6) * math.sqrt(train.shape[1])
    regression = LogisticRegression(C=strength, max_iter=1000).fit(((train - mean) / scale).numpy(), train_labels.numpy())
    predicted = torch.from_numpy(regression.predict(((test - mean) / scale).numpy()))

    train, test = F.normalize(train - mean, dim=1), F.normalize(test - mean, dim=1)
    classes = train_labels.unique()
    means = torch.stack([train[train_labels == label].mean(dim=0) for label in classes])  # (C, D)
    nearest = classes[torch.cdist(test, means).argmin(dim=1)]
    return FewShotResult(*((found == test_labels).float().mean().item() for found in (predicted, nearest)))

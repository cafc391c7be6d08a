"""Nearest neighbours: what features know without anything being trained on them.

Shapes: N training samples, M test samples, D width, C classes, B images at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from data.evaluation import evaluation_batches
from data.shards import ShardSet
from data.sources import open_dataset
from data.transforms import Normalization
from models.encoder import Encoder
from training.cli import UserError


def knn_accuracy(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    num_classes: int,
    ks: tuple[int, ...] = (10, 20, 100, 200),
    temperature: float = 0.07,
    chunk: int = 1024,
) -> dict[int, float]:
    """Classifies by the k most similar training samples, each voting with exp(cosine / temperature).

    Args:
        train: (N, D).
        train_labels: (N,).
        test: (M, D).
        test_labels: (M,).
        num_classes: C.
        ks: numbers of neighbours; those above N are taken as N.
        temperature: of the votes.
        chunk: test samples compared at once.

    Returns:
        k -> share of test samples classified right.

    Source: Wu et al. 2018, "Unsupervised feature learning via non-parametric instance discrimination", section 3.4; settings of
    dinov2/eval/knn.py. Features are centred on the training mean first: without it, cosines of MAE features are all near 1.
    """
    mean = train.mean(dim=0)
    train = F.normalize(train - mean, dim=1)
    test = F.normalize(test - mean, dim=1)
    right = dict.fromkeys(ks, 0)
    for rows in torch.arange(len(test), device=test.device).split(chunk):
        similarity, neighbours = (test[rows] @ train.T).topk(min(max(ks), len(train)), dim=1)  # (chunk, k)
        weights, labels = (similarity / temperature).exp(), train_labels[neighbours]
        for k in ks:
            votes = weights.new_zeros(len(rows), num_classes).scatter_add_(1, labels[:, :k], weights[:, :k])  # (chunk, C)
            right[k] += int((votes.argmax(dim=1) == test_labels[rows]).sum())
    return {k: count / len(test) for k, count in right.items()}


def check_same_classes(train: ShardSet, test: ShardSet) -> None:
    """Makes sure that label 3 of one set is label 3 of the other.

    Raises:
        UserError: the names of the classes differ, or the test set has labels that the training set has no sample of.
    """
    ours, theirs = train.manifest.class_names, test.manifest.class_names
    if ours and theirs and ours != theirs:
        differing = next(
            (number for number, names in enumerate(zip(ours, theirs, strict=False)) if names[0] != names[1]),
            min(len(ours), len(theirs)),
        )
        name = [names[differing] if differing < len(names) else "nothing" for names in (ours, theirs)]
        raise UserError(
            f"classes of {train.root} and {test.root} differ: number {differing} is {name[0]} in the first, {name[1]} in the "
            f"second ({len(ours)} and {len(theirs)} classes); write both sets of shards from the same classes"
        )
    strangers = set(test.labels.tolist()) - set(train.labels.tolist())
    if strangers:
        raise UserError(f"{test.root} has labels that {train.root} has no sample of: {sorted(strangers)[:10]}")


@dataclass(frozen=True)
class ProbeConfig:
    """Nearest neighbours during pretraining: what the encoder knows of labels that it is not trained on."""

    train: str = ""
    """Labelled images to learn from, named as for data.train (empty: no probe)."""
    test: str = ""
    """Labelled images to measure on, of the same classes."""
    every_epochs: float = 1.0
    """Passes over the training data between two measurements, above 0; the first is before the first step."""
    max_train: int = 10000
    """At most this many images to learn from, evenly spread over the data set, at least 1."""
    max_test: int = 2000
    """At most this many images to measure on, evenly spread over the data set, at least 1."""
    k: int = 20
    """Neighbours that vote, at least 1."""

    def __post_init__(self) -> None:
        if bool(self.train) != bool(self.test):
            raise ValueError("probe.train and probe.test belong together: name both, or neither")
        if not 0 < self.every_epochs < math.inf:
            raise ValueError(f"probe.every_epochs must be above 0 and finite, not {self.every_epochs}")
        if min(self.max_train, self.max_test, self.k) < 1:
            raise ValueError("probe.max_train, probe.max_test and probe.k must be at least 1")


def is_due(step: int, epochs_per_step: float, every_epochs: float) -> bool:
    """Says whether step `step` completes a period, or is 0; a period shorter than a step is one step."""

    def periods(steps: int) -> int:
        return math.floor(steps * epochs_per_step / every_epochs + 1e-9)  # 3 * 0.7 / 2.1 is less than 1 to a computer

    return periods(step) > periods(step - 1)


def evenly_spread(count: int, limit: int) -> list[int]:
    """Chooses at most `limit` of the numbers 0 .. count - 1, evenly spread and in order."""
    chosen = min(count, limit)
    return [number * count // chosen for number in range(chosen)]


class OnlineProbe:
    """Measures an encoder while it is trained, and leaves no trace in the training.

    All processes must measure at the same step: each encodes its part of the images, and gets all features.

    Args:
        config: with train and test.
        img_size: (H, W) of the encoder's input, in pixels.
        in_chans: C of the input.
        normalization: of the input.
        batch_size: B.
        num_workers: reader processes of each process.
        accelerator: of the run.

    Raises:
        UserError, DataError: the data sets cannot be opened, lack labels, or have other classes than each other.
    """

    def __init__(
        self,
        config: ProbeConfig,
        img_size: tuple[int, int],
        in_chans: int,
        normalization: Normalization,
        batch_size: int,
        num_workers: int,
        accelerator: Accelerator,
    ) -> None:
        self.config = config
        self.train, self.test = (open_dataset(source, labelled=True) for source in (config.train, config.test))
        check_same_classes(self.train, self.test)
        self.num_classes = int(self.train.labels.max()) + 1
        self.train_samples = evenly_spread(len(self.train), config.max_train)
        self.test_samples = evenly_spread(len(self.test), config.max_test)
        self._input = (img_size, in_chans, batch_size, num_workers)
        self._normalization = normalization
        self._accelerator = accelerator

    def describe(self) -> str:
        """What is measured, in one line."""
        return (
            f"{self.config.k}-NN accuracy every {self.config.every_epochs:g} epochs: {len(self.test_samples):,} images of "
            f"{self.test.root} by {len(self.train_samples):,} of {self.train.root}, {self.num_classes} classes"
        )

    def measure(self, encoder: Encoder) -> dict[str, float]:
        """Classifies by the CLS token, and by the mean of the patch tokens, both after the final norm.

        Returns:
            "knn/mean" and "knn/cls" -> share of the test samples classified right; the same on every process.

        Raises:
            DataError: an image cannot be read.
        """
        was_training = encoder.training
        encoder.eval()
        try:
            train, test = (
                self._encode(encoder, self.train, self.train_samples),
                self._encode(encoder, self.test, self.test_samples),
            )
        finally:
            encoder.train(was_training)
        labels = [
            torch.from_numpy(shards.labels[samples]).to(self._accelerator.device)
            for shards, samples in ((self.train, self.train_samples), (self.test, self.test_samples))
        ]
        return {
            f"knn/{name}": knn_accuracy(
                train[:, number], labels[0], test[:, number], labels[1], self.num_classes, (self.config.k,)
            )[self.config.k]
            for number, name in enumerate(("mean", "cls"))
        }

    def _encode(self, encoder: Encoder, shards: ShardSet, samples: Sequence[int]) -> Tensor:
        """Every process encodes its part: (N, 2, D) float32 of all, mean of the patches and CLS."""
        accelerator = self._accelerator
        parts = [torch.empty(0, 2, encoder.embed_dim, device=accelerator.device)]  # a process may have no sample
        img_size, in_chans, batch_size, num_workers = self._input
        for batch in evaluation_batches(
            shards, img_size, in_chans, batch_size, num_workers,
            accelerator.process_index, accelerator.num_processes, samples,
        ):  # fmt: skip
            with torch.no_grad(), accelerator.autocast():
                tokens = encoder.forward_features(self._normalization.apply(batch.images.to(accelerator.device)))
            tokens = tokens.float()  # (B, 1 + N, D)
            parts.append(torch.stack([tokens[:, 1:].mean(dim=1), tokens[:, 0]], dim=1))
        return gather_rows(torch.cat(parts), accelerator)


def gather_rows(part: Tensor, accelerator: Accelerator) -> Tensor:
    """Puts the rows of all processes together, those of the first process first.

    Args:
        part: (n, ...), the rows of this process; n may differ between processes.
        accelerator: of the run.

    Returns:
        (N, ...), on every process.
    """
    counts = cast(Tensor, accelerator.gather(torch.tensor([len(part)], device=part.device))).tolist()
    padded = part.new_zeros(max(counts), *part.shape[1:])  # collectives want the same shape of all
    padded[: len(part)] = part
    gathered = cast(Tensor, accelerator.gather(padded)).unflatten(0, (len(counts), -1))
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])

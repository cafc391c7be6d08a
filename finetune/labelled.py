"""Labelled data sets: which samples are learnt from, which are measured on, and what their labels mean."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.config import open_source
from data.errors import DataError
from data.shards import ShardSet
from data.subsets import choose_per_class, without
from finetune.config import LabelledDataConfig
from finetune.evaluate import EvaluationSet
from training.cli import UserError

MAX_ABSENT_FACTOR = 100
"""More numbers of classes than this for each class that occurs are no numbers of classes, but some other identifiers."""


@dataclass(frozen=True)
class LabelledData:
    """What a fine-tuning run learns from and measures on."""

    train: ShardSet
    rows: np.ndarray
    """(n,) int64: the samples of `train` that are learnt from, sorted."""
    val: ShardSet | None
    """None: nothing is measured."""
    val_rows: np.ndarray | None
    """(m,) int64: the samples of `val` that are measured on, sorted; None: all."""
    class_names: tuple[str, ...]
    """Name of class 0, 1, ...; empty where there are none."""
    num_classes: int

    def identity(self) -> dict[str, str]:
        """Tells samples apart by hashes: those that are learnt from, and those that are measured on."""
        measured = "" if self.val is None else self.val.manifest.hash
        rows = [self.rows, np.empty(0, dtype=np.int64) if self.val_rows is None else self.val_rows]
        samples, val_samples = (hashlib.sha256(part.astype(np.int64).tobytes()).hexdigest() for part in rows)
        return {"samples": samples, "measured_on": f"{measured} {val_samples}"}

    def evaluation_set(self, config: LabelledDataConfig, img_size: tuple[int, int], num_channels: int) -> EvaluationSet | None:
        """What is measured on, as inputs of a model; None where there is nothing."""
        if self.val is None:
            return None
        samples = None if self.val_rows is None else self.val_rows.tolist()
        return EvaluationSet(
            self.val, samples, img_size, num_channels, config.eval_crop_pct, config.eval_batch_size, config.num_workers,
            config.max_pixels,
        )  # fmt: skip


def open_training_data(config: LabelledDataConfig, seed: int) -> LabelledData:
    """Opens the data of a run, and chooses the samples.

    Raises:
        DataError: the data cannot be read, or a class has too few samples.
        UserError: no data is named, or the labels of the two sets do not fit each other.
    """
    if not config.train:
        raise UserError(
            "no labelled data given: --data.train takes a folder of shards, a folder of class folders, a CSV table with the "
            'columns path and label, or "digits-train"'
        )
    if config.weights:
        raise UserError("data.weights is for pretraining: fine-tuning reads every labelled image once an epoch; take it away")
    train = open_source(config.train, config, labelled=True)
    names = train.manifest.class_names
    labels = np.asarray(train.labels)
    num_classes = len(names) if names else int(labels.max()) + 1
    check_labels(train, num_classes)
    present = len(np.unique(labels))
    if present < 2:
        raise UserError(f"{config.train}: all images are of one class; a classifier needs at least two")
    if num_classes > MAX_ABSENT_FACTOR * present:
        raise UserError(
            f"{config.train}: labels reach {num_classes - 1}, but only {present} different ones occur; number the classes "
            f"0 .. {present - 1}"
        )
    rows = np.arange(len(train))
    val, val_rows = None, None
    if config.val:
        val = open_source(config.val, config, labelled=True)
        check_class_names(names, num_classes, val, str(train.root))
    elif config.held_out:
        val, val_rows = train, choose_per_class(labels, config.held_out, None, seed, leave_one=True)
        rows = without(len(train), val_rows)
    if config.fraction is not None or config.per_class is not None:
        try:
            rows = rows[choose_per_class(labels[rows], config.fraction, config.per_class, seed)]
        except DataError as error:
            raise DataError(f"{config.train}: {error}: lower --data.per_class") from error
    if not len(rows):
        raise UserError(f"{config.train}: no sample is left to learn from: lower --data.held_out, or give --data.val")
    return LabelledData(train, rows, val, val_rows, names, num_classes)


def check_channels(shards: ShardSet, num_channels: int, origin: str) -> None:
    """Makes sure that images are, or can be turned into, what a model takes: grey and colour can be turned into each other.

    Args:
        shards: the images.
        num_channels: what the model takes.
        origin: the model, for the message.

    Raises:
        UserError: they are not.
    """
    theirs = shards.manifest.num_channels
    if theirs is not None and theirs != num_channels and not {theirs, num_channels} <= {1, 3}:
        raise UserError(
            f"the images of {shards.root} have {theirs} channels, {origin} takes {num_channels}: give images, or an encoder, "
            "that fit"
        )


def check_labels(shards: ShardSet, num_classes: int) -> None:
    """Makes sure that every label is in 0 .. num_classes - 1.

    Raises:
        UserError: one is not.
    """
    labels = np.asarray(shards.labels)
    outside = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(outside):
        raise UserError(
            f"{shards.root}: {len(outside)} labels are outside 0 .. {num_classes - 1} (sample {outside[0]} has "
            f"{labels[outside[0]]}); there are {num_classes} classes: mend the labels, or write the shards with all class names"
        )


def check_class_names(names: Sequence[str], num_classes: int, shards: ShardSet, origin: str) -> None:
    """Makes sure that label 3 of a data set is label 3 of what was, or will be, trained.

    Args:
        names: of the classes 0, 1, ... that are known; empty where they have no names.
        num_classes: how many are known.
        shards: to be measured on.
        origin: where the names come from, for the message.

    Raises:
        UserError: names differ, or a label is of no known class.
    """
    theirs = shards.manifest.class_names
    if names and theirs and tuple(names) != tuple(theirs):
        missing, unknown = sorted(set(names) - set(theirs)), sorted(set(theirs) - set(names))
        if not missing and not unknown:
            first = next(number for number, pair in enumerate(zip(names, theirs, strict=True)) if pair[0] != pair[1])
            what = f"class {first} is {names[first]} in the first and {theirs[first]} in the second: the order differs"
        else:
            what = f"only the first has {_some(missing)}; only the second has {_some(unknown)}"
        raise UserError(
            f"the classes of {origin} and {shards.root} differ ({len(names)} and {len(theirs)}): {what}; write both from class "
            "folders of the same names"
        )
    check_labels(shards, num_classes)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"

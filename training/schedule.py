"""The learning rate as a pure function of how far the run has come."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.stream import num_steps_for_epochs
from training.cli import UserError

LR_BATCH_SIZE = 256
"""Images per step that `base_lr` is stated for."""


def scale_lr(base_lr: float, global_batch_size: int) -> float:
    """The peak learning rate: base_lr * global_batch_size / 256 (accumulation included).

    Source: He et al. 2022, appendix A.1; facebookresearch/mae main_pretrain.py.
    """
    return base_lr * global_batch_size / LR_BATCH_SIZE


def warmup_cosine(progress: float, warmup: float, total: float, peak_lr: float, min_lr: float) -> float:
    """Linear warm-up from exactly 0, then half a cosine from the peak down to min_lr.

    Args:
        progress: how far the run is; `warmup` and `total` are in the same unit (steps or epochs).
        warmup: length of the warm-up, less than `total`; it does not know min_lr.
        total: length of the run, warm-up included.
        peak_lr: learning rate at the end of the warm-up.
        min_lr: learning rate at the end of the run.

    Source: facebookresearch/mae util/lr_sched.py.
    """
    if progress < warmup:
        return peak_lr * progress / warmup
    cosine = math.cos(math.pi * (progress - warmup) / (total - warmup))
    return min_lr + (peak_lr - min_lr) * 0.5 * (1.0 + cosine)


DEFAULT_WARMUP = 1 / 20
"""Share of a run that is warm-up where nothing is said: the paper's 40 of 800 epochs."""


@dataclass(frozen=True)
class Horizon:
    """How long a run is, in optimizer steps."""

    num_steps: int
    warmup_steps: float
    """May be a fraction of a step: the schedule is continuous."""


def num_steps_of(settings: Mapping[str, Any], num_samples: int, global_batch_size: int) -> int:
    """Length of a run in optimizer steps.

    Args:
        settings: with "epochs" and "num_steps", see `plan_horizon`.
        num_samples: of the data set.
        global_batch_size: images of one optimizer step.
    """
    return settings["num_steps"] or num_steps_for_epochs(settings["epochs"], num_samples, global_batch_size)


def plan_horizon(
    epochs: float, num_steps: int | None, warmup_epochs: float | None, num_samples: int, global_batch_size: int
) -> Horizon:
    """Counts the steps of a run and of its warm-up.

    Args:
        epochs: length of the run in passes over the data set.
        num_steps: its length in optimizer steps, in place of epochs; None: by epochs.
        warmup_epochs: length of the warm-up; None: DEFAULT_WARMUP of the run.
        num_samples: of the data set.
        global_batch_size: images of one optimizer step.

    Raises:
        UserError: the warm-up is not shorter than the run.
    """
    num_steps = num_steps_of({"epochs": epochs, "num_steps": num_steps}, num_samples, global_batch_size)
    if warmup_epochs is None:
        return Horizon(num_steps, DEFAULT_WARMUP * num_steps)
    warmup_steps = warmup_epochs * num_samples / global_batch_size
    if warmup_steps >= num_steps:
        run_epochs = num_steps * global_batch_size / num_samples
        raise UserError(
            f"the warm-up ({warmup_epochs:g} epochs, {warmup_steps:.0f} steps) is not shorter than the run "
            f"({run_epochs:.3g} epochs, {num_steps} steps): lower --optim.warmup_epochs or train longer"
        )
    return Horizon(num_steps, warmup_steps)

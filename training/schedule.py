"""The learning rate as a pure function of how far the run has come."""

import math

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

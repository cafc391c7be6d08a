"""The paper's linear probe on features that are computed once: BatchNorm without affine parameters, LARS, warm-up, cosine.

It is what finetune/configs/linear_probe.yaml trains, where the images are not augmented. Shapes: N samples, D width, C classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from finetune.probe import accuracy
from training.optim import LARS, set_lr
from training.schedule import plan_horizon, scale_lr, warmup_cosine


@dataclass(frozen=True)
class PaperRecipe:
    """The settings of the paper's probe (He et al. 2022, appendix A.1), for a smaller batch than its 16,384."""

    epochs: float = 90
    warmup_epochs: float = 10
    base_lr: float = 0.1
    batch_size: int = 1024


def paper_probe(
    train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor, num_classes: int, recipe: PaperRecipe, seed: int
) -> float:
    """Trains the paper's probe, and gives the share of the test samples that it gets right.

    Args:
        train: (N, D) float32.
        labels: (N,) int64 in 0 .. C - 1.
        test: (M, D) float32.
        test_labels: (M,).
        num_classes: C.
        recipe: settings.
        seed: of the initial weights and the order of the samples.

    Source: facebookresearch/mae main_linprobe.py.
    """
    generator = torch.Generator().manual_seed(seed)
    norm = nn.BatchNorm1d(train.shape[1], affine=False, eps=1e-6)
    head = nn.Linear(train.shape[1], num_classes)
    nn.init.trunc_normal_(head.weight, std=0.01, generator=generator)
    nn.init.zeros_(head.bias)
    batch_size = min(recipe.batch_size, len(train))
    horizon = plan_horizon(recipe.epochs, None, recipe.warmup_epochs, len(train), batch_size)
    optimizer, peak_lr = LARS(head.parameters()), scale_lr(recipe.base_lr, batch_size)
    stream = torch.empty(0, dtype=torch.int64)
    for step in range(horizon.num_steps):
        while len(stream) < batch_size:
            stream = torch.cat([stream, torch.randperm(len(train), generator=generator)])
        rows, stream = stream[:batch_size], stream[batch_size:]
        set_lr(optimizer, warmup_cosine(step, horizon.warmup_steps, horizon.num_steps, peak_lr, 0.0))
        F.cross_entropy(head(norm(train[rows])), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    norm.eval()
    with torch.no_grad():
        return accuracy(head(norm(test)), test_labels).item()

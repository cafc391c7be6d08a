"""Nearest neighbours: what features know without anything being trained on them.

Shapes: N training samples, M test samples, D width, C classes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


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
        similarity, neighbours = (test[rows] @ train.T).topk(min(max(ks), len(train)), dim=1)
        votes = F.one_hot(train_labels[neighbours], num_classes) * (similarity / temperature).exp().unsqueeze(-1)
        for k in ks:
            right[k] += int((votes[:, :k].sum(dim=1).argmax(dim=1) == test_labels[rows]).sum())
    return {k: count / len(test) for k, count in right.items()}

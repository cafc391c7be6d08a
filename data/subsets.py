"""Which labelled samples: the same share, or the same number, of every class."""

import numpy as np

from data.errors import DataError


def choose_per_class(
    labels: np.ndarray, share: float | None, count: int | None, seed: int, leave_one: bool = False
) -> np.ndarray:
    """Chooses samples of every class at random.

    A larger share or count of the same seed holds the smaller one.

    Args:
        labels: (N,) int64, at least 0.
        share: of every class, in (0, 1], at least one sample; or None.
        count: of every class, at least 1; or None. Exactly one of the two is given.
        seed: at least 0.
        leave_one: leave at least one sample of every class: of a class of one, none is chosen.

    Returns:
        (n,) int64, sorted sample numbers.

    Raises:
        DataError: a class has fewer than `count` samples.
    """
    assert (share is None) != (count is None)
    chosen = []
    for label in np.unique(labels).tolist():
        rows = np.flatnonzero(labels == label)
        wanted = max(1, round(share * len(rows))) if share is not None else count or 0
        wanted = min(wanted, len(rows) - 1) if leave_one else wanted
        if wanted > len(rows):
            raise DataError(f"class {label} has {len(rows)} samples, {wanted} are wanted of every class")
        order = np.argsort(np.random.Philox(np.random.SeedSequence((seed, label))).random_raw(len(rows)), kind="stable")
        chosen.append(rows[order[:wanted]])
    return np.sort(np.concatenate(chosen))


def without(num_samples: int, rows: np.ndarray) -> np.ndarray:
    """The sample numbers 0 .. num_samples - 1 that are not among `rows`; sorted."""
    kept = np.ones(num_samples, dtype=bool)
    kept[rows] = False
    return np.flatnonzero(kept)

"""Which patches are hidden: pure functions of noise, and noise that is a pure function of seeds.

Shapes: B batch, N patches, K kept patches, M = N - K hidden patches.
"""

import torch
from torch import Tensor


def num_kept(num_patches: int, mask_ratio: float) -> int:
    """Counts the patches that stay visible: int(N * (1 - mask_ratio)).

    The truncation in floating point is part of the original recipe and is kept: 100 patches at ratio 0.9 give 9.

    Args:
        num_patches: N, at least 2.
        mask_ratio: share of the patches to hide, between 0 and 1, both excluded.

    Raises:
        ValueError: the ratio is out of range, or leaves no visible or no hidden patch.

    Source: facebookresearch/mae models_mae.py `random_masking`.
    """
    if not 0.0 < mask_ratio < 1.0:
        raise ValueError(f"mask_ratio must lie between 0 and 1 (both excluded), not {mask_ratio}")
    kept = int(num_patches * (1 - mask_ratio))
    if kept == 0 or kept == num_patches:
        raise ValueError(
            f"mask_ratio {mask_ratio} on {num_patches} patches leaves {kept} visible and {num_patches - kept} hidden; "
            "at least one of each is needed: change mask_ratio, img_size or patch_size"
        )
    return kept


def split_by_noise(noise: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Splits patches into visible and hidden: the smallest noise is kept.

    Args:
        noise: (B, N), any real dtype.
        kept: K.

    Returns:
        ids_keep (B, K) and ids_hidden (B, M), int64, both in ascending order of noise.
    """
    ids = torch.argsort(noise, dim=1, stable=True)  # stable: equal noise gives the same mask on every device
    return ids[:, :kept], ids[:, kept:]


def is_hidden(ids_hidden: Tensor, num_patches: int) -> Tensor:
    """Marks hidden patches: (B, M) int64 -> (B, N) bool, True = hidden."""
    marks = torch.zeros(ids_hidden.shape[0], num_patches, dtype=torch.bool, device=ids_hidden.device)
    return marks.scatter_(1, ids_hidden, True)


def _signed(unsigned: int) -> int:
    """The int64 of the same 64 bits: torch has no unsigned 64-bit arithmetic, but int64 wraps alike."""
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


_GOLDEN_RATIO = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own repeats the sign bit)."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def seeded_noise(seeds: Tensor, num_patches: int) -> Tensor:
    """Draws mask noise for every image from its own seed, on the device of the seeds.

    The noise of an image depends on its seed alone: not on the batch around it, the device, the number of processes or what
    was drawn before. So no generator state is saved, and any mask can be drawn again.

    Args:
        seeds: (B,) int64.
        num_patches: N.

    Returns:
        (B, N) float32 in [0, 1), multiples of 2^-24.

    Source: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), used as a counter-based
    generator: the N-th output of the stream that starts at the seed.
    """
    counters = torch.arange(1, num_patches + 1, device=seeds.device, dtype=torch.int64)
    bits = seeds.unsqueeze(1) + counters * _GOLDEN_RATIO  # (B, N)
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    bits = bits ^ _shift_right(bits, 31)
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24

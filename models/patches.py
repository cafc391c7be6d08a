"""Images cut into patches and put together again.

Shapes: B batch, C channels, H W pixels, N patches, P numbers per patch (patch_size^2 * C, in (p, q, C) order: pixel rows,
pixel columns, channels innermost, as in facebookresearch/mae).
"""

import torch
from torch import Tensor


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cuts images into non-overlapping patches, row by row.

    Args:
        images: (B, C, H, W), any dtype.
        patch_size: edge of a square patch in pixels; divides H and W.

    Returns:
        (B, N, P) in the dtype of `images`.

    Raises:
        ValueError: the patch size does not divide H and W.

    Source: facebookresearch/mae models_mae.py `patchify`, there for square RGB images only.
    """
    batch, channels, height, width = images.shape
    if height % patch_size or width % patch_size:
        raise ValueError(f"images of {height}x{width} px cannot be cut into patches of {patch_size} px")
    rows, columns = height // patch_size, width // patch_size
    patches = images.reshape(batch, channels, rows, patch_size, columns, patch_size)
    patches = patches.permute(0, 2, 4, 3, 5, 1)  # (B, rows, columns, p, q, C)
    return patches.reshape(batch, rows * columns, patch_size * patch_size * channels)  # (B, N, P)


def unpatchify(patches: Tensor, patch_size: int, grid_size: tuple[int, int]) -> Tensor:
    """Puts patches together again: the inverse of `patchify`.

    Args:
        patches: (B, N, P).
        patch_size: edge of a patch in pixels.
        grid_size: (rows, columns) of patches; rows * columns = N.

    Returns:
        (B, C, H, W) in the dtype of `patches`.
    """
    batch, _, numbers = patches.shape
    rows, columns = grid_size
    channels = numbers // patch_size**2
    images = patches.reshape(batch, rows, columns, patch_size, patch_size, channels)
    images = images.permute(0, 5, 1, 3, 2, 4)  # (B, C, rows, p, columns, q)
    return images.reshape(batch, channels, rows * patch_size, columns * patch_size)  # (B, C, H, W)


def take_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """Picks rows of every batch element: `rows` (B, N, X) or (1, N, X) at `ids` (B, K) -> (B, K, X)."""
    rows = rows.expand(ids.shape[0], -1, -1)
    return torch.gather(rows, 1, ids.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))

"""Position tables of a ViT.

Shapes: N patches (row-major over the grid), D width.
"""

from typing import Literal

import torch
from torch import Tensor

PositionKind = Literal["sincos_2d", "learned"]


def _sincos_1d(width: int, coordinates: Tensor) -> Tensor:
    """Sines, then cosines, of coordinates (N,) at geometric frequencies -> (N, width), float64."""
    frequencies = 10000.0 ** -(torch.arange(width // 2, dtype=torch.float64) / (width / 2))
    angles = torch.outer(coordinates, frequencies)  # (N, width / 2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def sincos_2d(embed_dim: int, grid_size: tuple[int, int], num_prefix_tokens: int = 0) -> Tensor:
    """Makes the fixed 2-D sine-cosine table.

    The first half of the width encodes a patch's COLUMN, the second half its row, each half all sines and then all cosines
    with frequencies 10000^(-i / (D/4)). Computed in float64. Rows of prefix tokens (CLS) are zero.

    Args:
        embed_dim: D, a multiple of 4.
        grid_size: (rows, columns) of patches.
        num_prefix_tokens: zero rows in front.

    Returns:
        (num_prefix_tokens + N, D), float64.

    Raises:
        ValueError: `embed_dim` is not a multiple of 4.

    Source: facebookresearch/mae util/pos_embed.py, whose names of the two axes are swapped; here any rows x columns grid.
    """
    if embed_dim % 4:
        raise ValueError(f"a 2-D sin-cos position table needs a width that is a multiple of 4, not {embed_dim}")
    rows, columns = grid_size
    row, column = torch.meshgrid(
        torch.arange(rows, dtype=torch.float64), torch.arange(columns, dtype=torch.float64), indexing="ij"
    )
    half = embed_dim // 2
    table = torch.cat([_sincos_1d(half, column.flatten()), _sincos_1d(half, row.flatten())], dim=1)  # (N, D)
    return torch.cat([table.new_zeros(num_prefix_tokens, embed_dim), table])


@torch.no_grad()
def init_position_table(table: Tensor, kind: PositionKind, grid_size: tuple[int, int], num_prefix_tokens: int) -> None:
    """Fills a position table (1, num_prefix_tokens + N, D) in place.

    "sincos_2d" writes the fixed table; "learned" draws from a truncated normal of std 0.02, as timm's ViT does.
    """
    if kind == "sincos_2d":
        table.copy_(sincos_2d(table.shape[-1], grid_size, num_prefix_tokens).unsqueeze(0))
    else:
        torch.nn.init.trunc_normal_(table, std=0.02)


def resize_position_table(
    table: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Interpolates a position table to another grid of patches: bicubic, without antialiasing; prefix rows stay.

    Args:
        table: (1, num_prefix_tokens + old rows * old columns, D).
        old_grid: (rows, columns) that it is for.
        new_grid: (rows, columns) wanted.
        num_prefix_tokens: rows in front that belong to no patch.

    Returns:
        (1, num_prefix_tokens + new rows * new columns, D); the table itself where the grids are equal.

    Source: facebookresearch/mae util/pos_embed.py `interpolate_pos_embed`; here from and to any rows x columns.
    """
    if old_grid == new_grid:
        return table
    prefix, patches = table[:, :num_prefix_tokens], table[:, num_prefix_tokens:]
    image = patches.unflatten(1, old_grid).permute(0, 3, 1, 2)  # (1, D, rows, columns)
    image = torch.nn.functional.interpolate(image.float(), size=new_grid, mode="bicubic", align_corners=False)
    return torch.cat([prefix, image.permute(0, 2, 3, 1).flatten(1, 2).to(table.dtype)], dim=1)

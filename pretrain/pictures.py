"""Pictures of what a masked autoencoder restores."""

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

from data.transforms import Normalization
from models.mae import MaskedAutoencoder

MIN_TILE_PX = 112
"""Small images are enlarged by a whole factor to about this height."""
GAP_PX = 4
HIDDEN_GREY = 128
CAPTIONS = ("input", "visible", "restored")


def visible_channels(images: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, 3, H, W): grey repeated; of more or fewer than three channels the first three, or the first."""
    channels = images.shape[1]
    return images[:, :3] if channels >= 3 else images[:, :1].expand(-1, 3, -1, -1)


@torch.no_grad()
def reconstruction_triples(model: MaskedAutoencoder, images: Tensor, noise: Tensor, normalization: Normalization) -> Tensor:
    """Shows each image, what the encoder sees of it, and what comes back with the visible patches pasted in.

    Args:
        model: in the precision of the surrounding autocast.
        images: (B, C, H, W) uint8, on the model's device.
        noise: (B, N).
        normalization: of the run.

    Returns:
        (B, 3 pictures, 3 colours, H, W) uint8 on the CPU.
    """
    restored, hidden = model.reconstruct(normalization.apply(images), noise)
    rows, columns = model.encoder.grid_size
    hidden_pixels = hidden.reshape(-1, 1, rows, columns).float()
    hidden_pixels = F.interpolate(hidden_pixels, scale_factor=float(model.encoder.patch_size)).bool()
    seen = images.masked_fill(hidden_pixels, HIDDEN_GREY)
    pictures = [images, seen, normalization.invert(restored.float())]
    return torch.stack([visible_channels(picture) for picture in pictures], dim=1).cpu()


def reconstruction_sheet(triples: Tensor, note: str) -> Image.Image:
    """Lays triples (B, 3, 3, H, W) out as a sheet of two triples a row, with captions and a note below."""
    count, parts, _, height, width = triples.shape
    factor = max(1, round(MIN_TILE_PX / height))
    tile_height, tile_width = height * factor, width * factor
    per_row = min(2, count)
    header, footer = 16, 18
    sheet_width = per_row * parts * (tile_width + GAP_PX) + (per_row - 1) * 3 * GAP_PX + GAP_PX
    rows = -(-count // per_row)
    sheet = Image.new("RGB", (sheet_width, header + rows * (tile_height + GAP_PX) + footer), "white")
    draw = ImageDraw.Draw(sheet)
    for number in range(count):
        row, column = divmod(number, per_row)
        for part in range(parts):
            left = GAP_PX + column * (parts * (tile_width + GAP_PX) + 3 * GAP_PX) + part * (tile_width + GAP_PX)
            if row == 0:
                draw.text((left + 2, 2), CAPTIONS[part], fill="black")
            pixels = np.ascontiguousarray(triples[number, part].permute(1, 2, 0).numpy())
            tile = Image.fromarray(pixels).resize((tile_width, tile_height), Image.Resampling.NEAREST)
            sheet.paste(tile, (left, header + row * (tile_height + GAP_PX)))
    draw.text((GAP_PX + 2, sheet.height - footer + 2), note, fill="black")
    return sheet


def sheet_note(model: MaskedAutoencoder, step: int) -> str:
    """The line below a sheet: step, share hidden, and what the picture owes to the input."""
    share = 1 - model.num_kept / model.encoder.num_patches
    borrowed = "; brightness and contrast of hidden patches from the input" if model.norm_pix_loss else ""
    return f"step {step}, {share:.0%} hidden{borrowed}"

"""The masked autoencoder computed as the paper describes it, with nothing saved: what the fast path is held to.

Every patch is embedded by the convolution, tokens are put back into image order, every block of the decoder computes every
token, every patch is predicted, and the loss is masked at the end. Tests compare loss and all gradients with
`MaskedAutoencoder.forward`; `benchmarks/fast_path.py` measures what the fast path saves.

Shapes as in `models/mae.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.mae import MaskedAutoencoder
from models.masking import is_hidden, split_by_noise
from models.patches import patchify, take_rows


class PlainOutput(NamedTuple):
    """What the plain pass gives."""

    loss: Tensor
    """Scalar, float32."""
    pred: Tensor
    """(B, N, P): prediction for every patch, visible ones too, in image order."""
    latent: Tensor
    """(B, 1 + K, D): CLS, then the visible tokens in the order of their noise."""
    is_hidden: Tensor
    """(B, N) bool."""


def plain_forward(model: MaskedAutoencoder, images: Tensor, noise: Tensor) -> PlainOutput:
    """Does what `model(images, noise)` does, the long way.

    Source: He et al. 2022, section 3; facebookresearch/mae models_mae.py.
    """
    encoder, decoder = model.encoder, model.decoder
    batch, num_patches = noise.shape

    tokens = encoder.patch_embed(images) + encoder.pos_embed[:, 1:]  # (B, N, D)
    ids_keep, ids_hidden = split_by_noise(noise, model.num_kept)
    cls = (encoder.cls_token + encoder.pos_embed[:, :1]).expand(batch, -1, -1)
    latent = encoder.norm(encoder.blocks(torch.cat([cls, take_rows(tokens, ids_keep)], dim=1)))  # (B, 1 + K, D)

    embedded = decoder.decoder_embed(latent)  # (B, 1 + K, E)
    mask_tokens = decoder.mask_token.expand(batch, num_patches - model.num_kept, -1)
    shuffled = torch.cat([embedded[:, 1:], mask_tokens], dim=1)  # (B, N, E)
    ids_restore = torch.argsort(torch.cat([ids_keep, ids_hidden], dim=1), dim=1)
    tokens = torch.cat([embedded[:, :1], take_rows(shuffled, ids_restore)], dim=1)  # (B, 1 + N, E), image order
    tokens = tokens + decoder.decoder_pos_embed
    for block in decoder.decoder_blocks:
        tokens = block(tokens)
    pred = decoder.decoder_pred(decoder.decoder_norm(tokens))[:, 1:]  # (B, N, P)

    target = model.make_target(patchify(images, encoder.patch_size))  # (B, N, P)
    hidden = is_hidden(ids_hidden, num_patches)
    error = (pred.float() - target).square().mean(dim=-1)  # (B, N)
    loss = (error * hidden).sum() / hidden.sum()
    return PlainOutput(loss, pred, latent, hidden)

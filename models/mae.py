"""The masked autoencoder: encode the visible patches, predict the hidden ones, compare.

Shapes: B batch, C channels, H W pixels, N patches, K kept patches, M hidden patches, D encoder width, P numbers per patch.

Source: He et al. 2022, "Masked autoencoders are scalable vision learners", section 3; facebookresearch/mae.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.decoder import Decoder
from models.encoder import Encoder, EncoderConfig, EncoderName, build_encoder, vector_parameters
from models.masking import is_hidden, num_kept, split_by_noise
from models.patches import take_rows, unpatchify

NORM_PIX_EPS = 1e-6


class DecoderPreset(NamedTuple):
    """Sizes of the decoder that goes with a named encoder."""

    decoder_embed_dim: int
    decoder_depth: int
    decoder_num_heads: int


DECODER_PRESETS: dict[EncoderName, DecoderPreset] = {
    "tiny": DecoderPreset(192, 4, 6),
    "small": DecoderPreset(256, 8, 8),
    "base": DecoderPreset(512, 8, 16),
    "large": DecoderPreset(512, 8, 16),
    "huge": DecoderPreset(512, 8, 16),
}


@dataclass(frozen=True)
class MAEConfig(EncoderConfig):
    """A masked autoencoder: the encoder's sizes, the decoder's, and the task."""

    mask_ratio: float = 0.75
    """Share of the patches that are hidden, between 0 and 1 (both excluded)."""
    norm_pix_loss: bool = True
    """Compare pixels after giving every patch mean 0 and variance 1 (better features; pictures lose absolute colour)."""
    decoder_embed_dim: int | None = None
    """Width of the decoder's tokens (None: the preset's: 192 for tiny, 256 for small, else 512)."""
    decoder_depth: int | None = None
    """Number of decoder blocks, at least 1 (None: the preset's: 4 for tiny, else 8)."""
    decoder_num_heads: int | None = None
    """Attention heads of the decoder (None: the preset's: 32 numbers per head)."""


class MAEOutput(NamedTuple):
    """What one forward pass gives."""

    loss: Tensor
    """Scalar, float32: mean squared error over all hidden patches."""
    baseline_loss: Tensor
    """Scalar, float32, no gradient: the loss of predicting, for every image, the mean of its hidden target patches."""
    pred: Tensor
    """(B, M, P): predicted target of the hidden patches, in the order of ids_hidden."""
    target: Tensor
    """(B, M, P), float32: what pred is compared with."""
    latent: Tensor
    """(B, 1 + K, D): encoder output, CLS first, in the order of ids_keep."""
    ids_keep: Tensor
    """(B, K) int64: places of the visible patches."""
    ids_hidden: Tensor
    """(B, M) int64: places of the hidden patches."""


class MaskedAutoencoder(nn.Module):
    """Encoder, decoder and loss.

    Args:
        encoder: encodes any subset of patches.
        decoder: predicts the hidden patches.
        mask_ratio: share of patches to hide.
        norm_pix_loss: normalise every target patch.

    Raises:
        ValueError: mask_ratio leaves no visible or no hidden patch.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder, mask_ratio: float = 0.75, norm_pix_loss: bool = True) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.norm_pix_loss = norm_pix_loss
        self.num_kept = num_kept(encoder.num_patches, mask_ratio)

    def forward(self, images: Tensor, noise: Tensor) -> MAEOutput:
        """Hides patches, restores them, and measures the error.

        Args:
            images: (B, C, H, W), floating point, normalised per channel.
            noise: (B, N); the K patches of smallest noise stay visible.
        """
        patches = self.encoder.patchify(images)  # (B, N, P)
        ids_keep, ids_hidden = split_by_noise(noise, self.num_kept)  # (B, K), (B, M)
        latent = self.encoder.encode_patches(take_rows(patches, ids_keep), ids_keep)  # (B, 1 + K, D)
        pred = self.decoder(latent, ids_keep, ids_hidden)  # (B, M, P)
        target = self.make_target(take_rows(patches, ids_hidden))  # (B, M, P)
        loss = (pred.float() - target).square().mean()
        baseline_loss = target.var(dim=1, correction=0).mean()
        return MAEOutput(loss, baseline_loss, pred, target, latent, ids_keep, ids_hidden)

    def make_target(self, patches: Tensor) -> Tensor:
        """Makes the regression target of patches (B, M, P), in float32.

        With norm_pix_loss each patch is normalised by its own mean and UNBIASED variance, with 1e-6 under the root, over all P
        numbers together. Source: facebookresearch/mae models_mae.py `forward_loss`.
        """
        patches = patches.float()
        if not self.norm_pix_loss:
            return patches
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        return (patches - mean) / (variance + NORM_PIX_EPS).sqrt()

    @torch.no_grad()
    def reconstruct(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Restores images: visible patches as they are, hidden patches as predicted.

        Under norm_pix_loss the prediction has no absolute brightness or contrast; mean and variance of the TRUE patch are
        put in, so that the picture can be looked at. This lends the picture knowledge that the model does not have.

        Args:
            images: (B, C, H, W), normalised.
            noise: (B, N).

        Returns:
            restored images (B, C, H, W), float32, and (B, N) bool, True where a patch was hidden.
        """
        output = self(images, noise)
        patches = self.encoder.patchify(images).float()  # (B, N, P)
        pred = output.pred.float()
        if self.norm_pix_loss:
            variance, mean = torch.var_mean(take_rows(patches, output.ids_hidden), dim=-1, keepdim=True)
            pred = pred * (variance + NORM_PIX_EPS).sqrt() + mean
        where = output.ids_hidden.unsqueeze(-1).expand_as(pred)
        restored = patches.scatter(1, where, pred)
        hidden = is_hidden(output.ids_hidden, self.encoder.num_patches)
        return unpatchify(restored, self.encoder.patch_size, self.encoder.grid_size), hidden

    def no_weight_decay(self) -> set[str]:
        """Names the parameters that take no weight decay in pretraining: vectors only.

        CLS and mask token have three dimensions and ARE decayed, as in the original.
        Source: facebookresearch/mae main_pretrain.py with timm 0.3.2 `add_weight_decay`.
        """
        return vector_parameters(self)


def build_mae(config: MAEConfig) -> MaskedAutoencoder:
    """Builds an initialised masked autoencoder; ValueError where sizes or ratio do not fit."""
    encoder = build_encoder(config)
    preset = DECODER_PRESETS[config.name]
    own = {name: getattr(config, name) for name in DecoderPreset._fields}
    sizes = preset._replace(**{name: value for name, value in own.items() if value is not None})
    decoder = Decoder(
        embed_dim=encoder.embed_dim,
        grid_size=encoder.grid_size,
        patch_numbers=encoder.patch_size**2 * encoder.in_chans,
        mlp_ratio=config.mlp_ratio,
        pos_embed=config.pos_embed,
        **sizes._asdict(),
    )
    return MaskedAutoencoder(encoder, decoder, config.mask_ratio, config.norm_pix_loss)

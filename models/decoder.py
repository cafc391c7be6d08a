"""The light decoder: from visible tokens to the pixels of the hidden patches.

Shapes: B batch, N patches, K kept patches, M hidden patches, D encoder width, E decoder width, P numbers per patch.
"""

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from models.attention import Attention
from models.encoder import init_module_weights
from models.patches import take_rows
from models.position import PositionKind, init_position_table

LAYER_NORM_EPS = 1e-6


class DecoderBlock(Block):
    """timm's pre-norm block, able to compute its last tokens only."""

    attn: Attention  # pyright: ignore[reportIncompatibleVariableOverride]

    def forward_last(self, tokens: Tensor, num_last: int) -> Tensor:
        """The last `num_last` tokens of `forward(tokens)`: (B, L, E) -> (B, num_last, E)."""
        last = tokens[:, -num_last:]
        last = last + self.attn.forward_last(self.norm1(tokens), num_last)
        return last + self.mlp(self.norm2(last))


class Decoder(nn.Module):
    """A small ViT that predicts the hidden patches from the encoder's visible tokens.

    Attention does not care about the order of tokens, so nothing is put back into image order: tokens stand as CLS, visible,
    hidden, each with its own row of the position table. The last block computes queries and MLP for the hidden tokens only,
    and only they are predicted. Loss and gradients equal the plain formulation (`models/plain.py`).

    Args:
        embed_dim: D of the encoder.
        grid_size: (rows, columns) of patches.
        patch_numbers: P.
        decoder_embed_dim: E, a multiple of decoder_num_heads.
        decoder_depth: number of blocks, at least 1.
        decoder_num_heads: attention heads.
        mlp_ratio: hidden width of an MLP over E.
        pos_embed: kind of the position table.

    Raises:
        ValueError: sizes that do not fit each other.

    Source: facebookresearch/mae models_mae.py (same parameter names).
    """

    def __init__(
        self,
        embed_dim: int,
        grid_size: tuple[int, int],
        patch_numbers: int,
        decoder_embed_dim: int = 512,
        decoder_depth: int = 8,
        decoder_num_heads: int = 16,
        mlp_ratio: float = 4.0,
        pos_embed: PositionKind = "sincos_2d",
    ) -> None:
        super().__init__()
        if min(decoder_embed_dim, decoder_depth, decoder_num_heads) < 1:
            raise ValueError(
                "decoder_embed_dim, decoder_depth and decoder_num_heads must be at least 1, "
                f"not {decoder_embed_dim}, {decoder_depth}, {decoder_num_heads}"
            )
        if decoder_embed_dim % decoder_num_heads:
            raise ValueError(
                f"decoder_embed_dim {decoder_embed_dim} is not a multiple of decoder_num_heads {decoder_num_heads}"
            )
        self.grid_size = grid_size
        self.position_kind: PositionKind = pos_embed
        self.decoder_embed = nn.Linear(embed_dim, decoder_embed_dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, decoder_embed_dim))
        self.decoder_pos_embed = nn.Parameter(
            torch.empty(1, 1 + grid_size[0] * grid_size[1], decoder_embed_dim), requires_grad=pos_embed == "learned"
        )
        self.decoder_blocks = nn.ModuleList(
            DecoderBlock(
                decoder_embed_dim,
                decoder_num_heads,
                mlp_ratio,
                qkv_bias=True,
                norm_layer=_layer_norm,  # pyright: ignore[reportArgumentType]
                attn_layer=Attention,
            )
            for _ in range(decoder_depth)
        )
        self.decoder_norm = _layer_norm(decoder_embed_dim)
        self.decoder_pred = nn.Linear(decoder_embed_dim, patch_numbers)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialises every parameter: Linear and LayerNorm as in the encoder, the mask token normal with std 0.02."""
        self.apply(init_module_weights)
        nn.init.normal_(self.mask_token, std=0.02)
        init_position_table(self.decoder_pos_embed, self.position_kind, self.grid_size, num_prefix_tokens=1)

    def forward(self, latent: Tensor, ids_keep: Tensor, ids_hidden: Tensor) -> Tensor:
        """Predicts the hidden patches.

        Args:
            latent: (B, 1 + K, D), CLS and the visible tokens at `ids_keep`.
            ids_keep: (B, K) int64.
            ids_hidden: (B, M) int64.

        Returns:
            (B, M, P) in the order of `ids_hidden`.
        """
        num_hidden = ids_hidden.shape[1]
        visible = self.decoder_embed(latent)  # (B, 1 + K, E)
        table = self.decoder_pos_embed
        cls_rows = table[:, :1].expand(len(latent), -1, -1)
        visible_rows = torch.cat([cls_rows, take_rows(table[:, 1:], ids_keep)], dim=1)  # (B, 1 + K, E)
        hidden = self.mask_token + take_rows(table[:, 1:], ids_hidden)  # (B, M, E)
        tokens = torch.cat([visible + visible_rows, hidden], dim=1)  # (B, 1 + N, E), float32 also under autocast
        for block in self.decoder_blocks[:-1]:
            tokens = block(tokens)
        last_block = self.decoder_blocks[-1]
        assert isinstance(last_block, DecoderBlock)
        hidden = last_block.forward_last(tokens, num_hidden)  # (B, M, E)
        return self.decoder_pred(self.decoder_norm(hidden))  # (B, M, P)


def _layer_norm(width: int, **factory: object) -> nn.LayerNorm:
    """LayerNorm with the eps of every norm in the original (torch's default is 1e-5)."""
    return nn.LayerNorm(width, eps=LAYER_NORM_EPS, **factory)  # pyright: ignore[reportArgumentType]

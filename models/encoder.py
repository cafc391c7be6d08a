"""The encoder: timm's VisionTransformer, able to encode any subset of patches.

Shapes: B batch, C channels, H W pixels, N patches, K kept patches, L = 1 + K tokens, D encoder width, P numbers per patch.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from models.attention import Attention
from models.patches import patchify, take_rows
from models.position import PositionKind, init_position_table

EncoderName = Literal["tiny", "small", "base", "large", "huge"]


class EncoderPreset(NamedTuple):
    """Sizes of a named encoder, and the timm model of the same sizes."""

    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int
    timm_name: str


ENCODER_PRESETS: dict[EncoderName, EncoderPreset] = {
    "tiny": EncoderPreset(16, 192, 12, 3, "vit_tiny_patch16_224"),
    "small": EncoderPreset(16, 384, 12, 6, "vit_small_patch16_224"),
    "base": EncoderPreset(16, 768, 12, 12, "vit_base_patch16_224"),
    "large": EncoderPreset(16, 1024, 24, 16, "vit_large_patch16_224"),
    "huge": EncoderPreset(14, 1280, 32, 16, "vit_huge_patch14_224"),
}


@dataclass(frozen=True)
class EncoderConfig:
    """A ViT by name, with any of its sizes changed."""

    name: EncoderName = "base"
    """Preset that gives every size not set below: tiny (192 wide x 12 blocks), small (384 x 12), base (768 x 12) and large
    (1024 x 24) with patches of 16 px, huge (1280 x 32) with patches of 14 px."""
    img_size: tuple[int, int] = (224, 224)
    """Height and width of the input in pixels; multiples of patch_size."""
    patch_size: int | None = None
    """Edge of a square patch in pixels (None: the preset's)."""
    in_chans: int = 3
    """Channels of the input: 3 colour, 1 grey, any number for .npy images."""
    embed_dim: int | None = None
    """Width D of the encoder's tokens, a multiple of num_heads (None: the preset's)."""
    depth: int | None = None
    """Number of encoder blocks, at least 1 (None: the preset's)."""
    num_heads: int | None = None
    """Attention heads of the encoder (None: the preset's)."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLPs over the token width, encoder and decoder."""
    pos_embed: PositionKind = "sincos_2d"
    """Position table of encoder and decoder: fixed 2-D sines and cosines (the paper's), or learned."""


class Encoder(VisionTransformer):
    """A ViT with CLS token, timm's parameters and no classifier head.

    `forward_features` (timm's) encodes whole images and never masks. `encode_patches` encodes a subset of the patches.

    Args:
        img_size: (H, W) in pixels.
        patch_size: edge of a patch in pixels; divides H and W.
        in_chans: C.
        embed_dim: D, a multiple of num_heads.
        depth: number of blocks.
        num_heads: attention heads.
        mlp_ratio: hidden width of an MLP over D.
        pos_embed: kind of the position table; a fixed table is a parameter without gradient.
        drop_path_rate: stochastic depth of the last block, growing linearly from 0; 0 in pretraining.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    # What timm leaves open: here it is always there.
    patch_embed: PatchEmbed  # pyright: ignore[reportIncompatibleVariableOverride]
    blocks: nn.Sequential
    cls_token: nn.Parameter
    pos_embed: nn.Parameter

    def __init__(
        self,
        img_size: tuple[int, int] = (224, 224),
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        pos_embed: PositionKind = "sincos_2d",
        drop_path_rate: float = 0.0,
    ) -> None:
        _check_sizes(img_size, patch_size, in_chans, embed_dim, depth, num_heads, mlp_ratio)
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=0,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            drop_path_rate=drop_path_rate,
            attn_layer=Attention,
            weight_init="skip",  # the position kind is not known to timm's constructor: initialised below
        )
        self.patch_size = patch_size
        self.grid_size = (img_size[0] // patch_size, img_size[1] // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.position_kind: PositionKind = pos_embed
        self.pos_embed.requires_grad_(pos_embed == "learned")
        self.init_weights()

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:  # noqa: ARG002 (timm's signature)
        """Initialises every parameter; see `init_vit`. Both arguments are timm's and not used."""
        init_vit(self, self.position_kind)

    def encode_patches(self, patches: Tensor, ids_keep: Tensor) -> Tensor:
        """Encodes the given patches only.

        Args:
            patches: (B, K, P), the patches at `ids_keep`, in the (p, q, C) order of `patchify`.
            ids_keep: (B, K) int64, where each patch stands in its image (row-major).

        Returns:
            (B, 1 + K, D) after the final norm: CLS, then the patches in the order given. Equal to `forward_features` where
            ids_keep holds all patches in order.
        """
        tokens = self.embed_patches(patches) + take_rows(self.pos_embed[:, 1:], ids_keep)  # (B, K, D)
        cls = (self.cls_token + self.pos_embed[:, :1]).expand(tokens.shape[0], -1, -1)  # (B, 1, D)
        tokens = torch.cat([cls, tokens], dim=1)  # (B, 1 + K, D), float32 also under autocast: the residual stream
        return self.norm(self.blocks(tokens))

    def embed_patches(self, patches: Tensor) -> Tensor:
        """The patch convolution as one matrix product: (B, K, P) -> (B, K, D)."""
        projection = self.patch_embed.proj
        # The patches are put into the weight's order (C, p, q), not the weight into theirs: its gradient then has the strides
        # that DistributedDataParallel expects, and the images need none.
        pixels = patches.unflatten(-1, (self.patch_size**2, self.in_chans))
        return F.linear(pixels.transpose(-1, -2).flatten(-2), projection.weight.flatten(1), projection.bias)

    def patchify(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, P); ValueError where the images are not of the encoder's size."""
        expected = (self.in_chans, self.grid_size[0] * self.patch_size, self.grid_size[1] * self.patch_size)
        if tuple(images.shape[1:]) != expected:
            raise ValueError(f"the encoder takes images of (C, H, W) = {expected}, not {tuple(images.shape[1:])}")
        return patchify(images, self.patch_size)

    def layer_ids(self) -> dict[str, int]:
        """Says which layer each parameter belongs to; see the function of the same name."""
        return layer_ids(self)

    def no_weight_decay(self) -> set[str]:
        """Names the parameters that take no weight decay in fine-tuning: vectors, the position table and the CLS token.

        Source: facebookresearch/mae util/lr_decay.py.
        """
        return vector_parameters(self) | {"pos_embed", "cls_token"}


def layer_ids(vit: VisionTransformer) -> dict[str, int]:
    """Says which layer each parameter of a ViT belongs to, for layer-wise learning rates.

    Returns:
        Parameter name -> 0 for the embeddings (tokens, position table, patch embedding, norm before the blocks), i + 1 for
        block i, depth + 1 for the final norm and everything of a head.

    Source: facebookresearch/mae util/lr_decay.py `get_layer_id_for_vit`.
    """
    embeddings = ("cls_token", "reg_token", "dist_token", "pos_embed", "patch_embed.", "norm_pre.")

    def layer_id(name: str) -> int:
        if name.startswith(embeddings):
            return 0
        if name.startswith("blocks."):
            return int(name.split(".")[1]) + 1
        return len(vit.blocks) + 1

    return {name: layer_id(name) for name, _ in vit.named_parameters()}


@torch.no_grad()
def init_vit(vit: VisionTransformer, position_kind: PositionKind) -> None:
    """Initialises every parameter of a ViT as the original does, and its position table as said.

    Linear weights Xavier-uniform with zero bias, the patch convolution Xavier-uniform on its (D, C * p * q) view with torch's
    own bias, LayerNorms 1 and 0, the CLS token and its like normal with std 0.02.

    Source: facebookresearch/mae models_mae.py `initialize_weights`.
    """
    vit.apply(init_module_weights)
    projection = vit.patch_embed.proj
    assert isinstance(projection, nn.Conv2d)
    projection.reset_parameters()
    nn.init.xavier_uniform_(projection.weight.flatten(1))  # a view: fills the weight itself
    for token in (vit.cls_token, vit.reg_token, getattr(vit, "dist_token", None)):
        if token is not None:
            nn.init.normal_(token, std=0.02)
    if vit.pos_embed is not None:
        rows, columns = vit.patch_embed.grid_size
        init_position_table(vit.pos_embed, position_kind, (rows, columns), vit.pos_embed.shape[1] - rows * columns)


def vector_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters with at most one dimension: biases and norms."""
    return {name for name, parameter in module.named_parameters() if parameter.ndim <= 1}


def count_parameters(module: nn.Module) -> int:
    """Numbers that are trained: fixed position tables and frozen parts are left out."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def init_module_weights(module: nn.Module) -> None:
    """Initialises one Linear or LayerNorm as facebookresearch/mae does; for `nn.Module.apply`."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)


def _check_sizes(
    img_size: tuple[int, int], patch_size: int, in_chans: int, embed_dim: int, depth: int, num_heads: int, mlp_ratio: float
) -> None:
    sizes = {"img_size": min(img_size), "patch_size": patch_size, "in_chans": in_chans}
    sizes |= {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if int(embed_dim * mlp_ratio) < 1:
        raise ValueError(f"mlp_ratio must be above 0, not {mlp_ratio}")
    if img_size[0] % patch_size or img_size[1] % patch_size:
        fits = [size for size in range(2, min(img_size) + 1) if img_size[0] % size == 0 and img_size[1] % size == 0]
        raise ValueError(
            f"patch_size {patch_size} does not divide img_size {img_size[0]} x {img_size[1]}; "
            f"patch sizes that do: {', '.join(map(str, fits)) or 'none'}"
        )
    if embed_dim % num_heads:
        raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")


def encoder_sizes(config: EncoderConfig) -> EncoderPreset:
    """The preset of a config with the config's own sizes put in."""
    preset = ENCODER_PRESETS[config.name]
    own = {name: getattr(config, name) for name in ("patch_size", "embed_dim", "depth", "num_heads")}
    return preset._replace(**{name: value for name, value in own.items() if value is not None})


def build_encoder(config: EncoderConfig) -> Encoder:
    """Builds an initialised encoder; ValueError where the sizes do not fit each other."""
    sizes = encoder_sizes(config)
    return Encoder(
        img_size=config.img_size,
        patch_size=sizes.patch_size,
        in_chans=config.in_chans,
        embed_dim=sizes.embed_dim,
        depth=sizes.depth,
        num_heads=sizes.num_heads,
        mlp_ratio=config.mlp_ratio,
        pos_embed=config.pos_embed,
    )

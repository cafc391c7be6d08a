"""Weights in and out: between this project's models, timm and facebookresearch/mae."""

from typing import Any

from torch import Tensor

from models.encoder import EncoderConfig, encoder_sizes
from models.mae import MaskedAutoencoder


def from_facebook_mae(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames the state dict of a facebookresearch/mae pretraining model for `MaskedAutoencoder.load_state_dict`.

    The original holds encoder and decoder side by side in one module; the names within are the same.

    Args:
        state: the original's state dict (in its released files, the entry "model").
    """

    def renamed(name: str) -> str:
        part = "decoder" if name.startswith(("decoder_", "mask_token")) else "encoder"
        return f"{part}.{name}"

    return {renamed(name): tensor for name, tensor in state.items()}


def encoder_state(model: MaskedAutoencoder) -> dict[str, Tensor]:
    """The encoder's weights, contiguous on the CPU, under timm's names: loads in `timm_model` with strict=True."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.encoder.state_dict().items()}


def timm_model(config: EncoderConfig) -> tuple[str, dict[str, Any]]:
    """Name and keyword arguments with which `timm.create_model(name, **arguments)` builds the encoder of a config."""
    sizes = encoder_sizes(config)
    arguments = {
        "img_size": list(config.img_size),
        "patch_size": sizes.patch_size,
        "in_chans": config.in_chans,
        "embed_dim": sizes.embed_dim,
        "depth": sizes.depth,
        "num_heads": sizes.num_heads,
        "mlp_ratio": config.mlp_ratio,
        "num_classes": 0,
    }
    return sizes.timm_name, arguments

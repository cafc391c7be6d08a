"""Weights in and out: between this project's models, timm, facebookresearch/mae and transformers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.data.config import resolve_model_data_config
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from models.attention import Attention
from models.encoder import ENCODER_PRESETS, EncoderConfig, encoder_sizes
from models.foreign import IMAGENET_MEAN, IMAGENET_STD, read_torch_file, read_transformers
from models.mae import MaskedAutoencoder


def from_facebook_mae(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames the state dict of a facebookresearch/mae pretraining model for `MaskedAutoencoder.load_state_dict`.

    The original holds encoder and decoder side by side in one module; the names within are the same.

    Args:
        state: the original's state dict (in its released files, the entry "model").
    """

    def renamed(name: str) -> str:
        part = "decoder" if _is_decoder(name) else "encoder"
        return f"{part}.{name}"

    return {renamed(name): tensor for name, tensor in state.items()}


def _is_decoder(name: str) -> bool:
    return name.startswith(("decoder_", "mask_token"))


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


class PretrainedEncoder(NamedTuple):
    """An encoder from anywhere, and what its input must be."""

    model: VisionTransformer
    """timm's, in eval mode, without a classifier head."""
    img_size: tuple[int, int]
    """(H, W) in pixels."""
    in_chans: int
    mean: tuple[float, ...]
    """Per channel, in units of the 0..1 range."""
    std: tuple[float, ...]
    """Per channel, in the same units."""
    timm_name: str
    """With `timm_arguments`: how to build the same architecture anew."""
    timm_arguments: dict[str, Any]
    """`timm.create_model(timm_name, **timm_arguments)` builds a model that takes the weights of `model`; JSON can hold them.
    Among them are img_size, in_chans and num_classes=0."""
    norm_eps: float | None = None
    """What the LayerNorms add to the variance, where it is not what timm gives them; for `set_norm_eps`."""


def set_norm_eps(model: nn.Module, norm_eps: float | None) -> None:
    """Sets what every LayerNorm of a model adds to the variance; None leaves it.

    timm takes it inside a function only, and `timm_arguments` hold nothing that JSON cannot.
    """
    for module in model.modules():
        if norm_eps is not None and isinstance(module, nn.LayerNorm):
            module.eps = norm_eps


def load_encoder(source: str, *, weights: bool = True) -> PretrainedEncoder:
    """Loads an encoder; every weight of it comes from the source, or the loading fails.

    Args:
        source: a run folder of this project, an exported `encoder.safetensors`, a checkpoint file (.pth) of
            facebookresearch/mae, a fine-tuned run folder or `classifier.safetensors` (its head is left out), a folder of
            transformers with a ViTMAE or ViT (config.json and weights), or the name of a timm vision transformer (whose
            weights timm downloads).
        weights: False where the architecture is all that is wanted: nothing is downloaded.

    Raises:
        ValueError: nothing like that is found, or the weights are not those of a vision transformer.
    """
    path = Path(source)
    for name in ("encoder.safetensors", "classifier.safetensors"):
        if (path / name).is_file():
            return _load_export(path / name)
    if (path / "config.json").is_file():
        return _load_transformers(path)
    if path.is_dir():
        raise ValueError(
            f"encoder {source}: the folder holds no encoder.safetensors (a run writes it at its end), and no config.json of "
            "transformers"
        )
    if path.suffix == ".safetensors" and path.is_file():
        return _load_export(path)
    if path.suffix in (".pth", ".pt") and path.is_file():
        return _load_facebook_mae(path)
    if timm.is_model(source):
        return _load_timm(source, weights)
    raise ValueError(
        f"encoder {source}: is no run folder, no encoder.safetensors, no .pth of facebookresearch/mae, no folder of "
        f"transformers, and no model of timm{_similar(source)}"
    )


def _similar(source: str) -> str:
    names = timm.list_models(f"*{Path(source).name}*")[:3] if "/" not in source else []
    return f" (timm has {', '.join(names)})" if names else ""


def read_export(path: Path, *kinds: str) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Reads a file that this project exported.

    Args:
        path: a safetensors file.
        kinds: what it may be, "encoder" or "classifier": the entry of its header that describes it.

    Returns:
        Which of the kinds it is, its description, and its weights.

    Raises:
        ValueError: it cannot be read, or is something else.
    """
    expected = " or ".join(kinds)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{expected} {path}: cannot be read, it may be cut off ({error})") from error
    kind = next((kind for kind in kinds if kind in metadata), None)
    if kind is None:
        raise ValueError(f"{expected} {path}: is a safetensors file, but no {expected} that this project exported")
    return kind, json.loads(metadata[kind]), state


def _load_export(path: Path) -> PretrainedEncoder:
    """An exported encoder, or the encoder of an exported classifier: all but its head."""
    kind, record, state = read_export(path, "encoder", "classifier")
    arguments = record["timm_arguments"]
    if kind == "classifier":
        state = {name: tensor for name, tensor in state.items() if not name.startswith(("head.", "head_dist."))}
        arguments = arguments | {"num_classes": 0}
    timm_name = record["timm_model"]
    if "dist_token" in state:  # the encoder without it is a plain one, of sizes that the arguments give
        del state["dist_token"]
        state["pos_embed"] = torch.cat([state["pos_embed"][:, :1], state["pos_embed"][:, 2:]], dim=1)
        timm_name = ENCODER_PRESETS["base"].timm_name
    mean, std = tuple(record["mean"]), tuple(record["std"])
    return _built(path, timm_name, arguments, state, mean, std, record.get("norm_eps"))


def _load_facebook_mae(path: Path) -> PretrainedEncoder:
    """Sizes are read from the shapes of the weights: the files carry no description."""
    content = read_torch_file(path)
    state = content.get("model", content)
    if not isinstance(state, dict) or "patch_embed.proj.weight" not in state or "pos_embed" not in state:
        raise ValueError(f"encoder {path}: does not hold the weights of a facebookresearch/mae model")
    state = {name: tensor for name, tensor in state.items() if not _is_decoder(name)}
    embed_dim, in_chans, patch_size, _ = state["patch_embed.proj.weight"].shape
    preset = next((preset for preset in ENCODER_PRESETS.values() if preset.embed_dim == embed_dim), None)
    if preset is None:
        raise ValueError(f"encoder {path}: has the width {embed_dim}, which none of {', '.join(ENCODER_PRESETS)} has")
    edge = round((state["pos_embed"].shape[1] - 1) ** 0.5) * patch_size
    arguments = {
        "img_size": [edge, edge],
        "patch_size": patch_size,
        "in_chans": in_chans,
        "depth": len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        "num_classes": 0,
    }
    return _built(path, preset.timm_name, arguments, state, IMAGENET_MEAN, IMAGENET_STD)


def _load_transformers(folder: Path) -> PretrainedEncoder:
    found = read_transformers(folder)
    return _built(folder, found.timm_name, found.timm_arguments, found.state, found.mean, found.std, found.norm_eps)


def _load_timm(name: str, weights: bool) -> PretrainedEncoder:
    try:
        model = timm.create_model(name, pretrained=weights, num_classes=0)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"encoder {name}: timm cannot get its weights ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(model, VisionTransformer):
        raise ValueError(f"encoder {name}: is a {type(model).__name__}, not a vision transformer")
    config = resolve_model_data_config(model)
    channels, height, width = config["input_size"]
    arguments = {"img_size": [height, width], "in_chans": channels, "num_classes": 0}
    mean, std = tuple(config["mean"]), tuple(config["std"])
    return PretrainedEncoder(model.eval(), (height, width), channels, mean, std, name, arguments)


def _built(
    path: Path,
    timm_name: str,
    timm_arguments: dict[str, Any],
    state: dict[str, Tensor],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    norm_eps: float | None = None,
) -> PretrainedEncoder:
    """Builds the architecture and fills it with weights."""
    model = timm.create_model(timm_name, **timm_arguments, attn_layer=Attention)
    assert isinstance(model, VisionTransformer)
    set_norm_eps(model, norm_eps)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ValueError(f"encoder {path}: its weights do not fit: {' '.join(str(error).split())[:400]}") from error
    height, width = timm_arguments["img_size"]
    in_chans = timm_arguments["in_chans"]
    return PretrainedEncoder(model.eval(), (height, width), in_chans, mean, std, timm_name, timm_arguments, norm_eps)

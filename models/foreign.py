"""Encoders in the layouts of other projects, translated to timm's names and arguments.

transformers: a folder with `config.json` (model_type "vit_mae" or "vit") and the weights.
"""

import json
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""What facebookresearch/mae normalises with, and with it most of the field; its files do not say so."""

TRANSFORMERS_TYPES = ("vit_mae", "vit")
TRANSFORMERS_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class ForeignEncoder(NamedTuple):
    """What `timm.create_model` and `load_state_dict` need for an encoder of another project."""

    timm_name: str
    timm_arguments: dict[str, Any]
    norm_eps: float
    """What every LayerNorm adds to the variance."""
    state: dict[str, Tensor]
    """Under timm's names."""
    mean: tuple[float, ...]
    """Per channel, in units of the 0..1 range."""
    std: tuple[float, ...]
    """Per channel, in the same units."""


def read_transformers(folder: Path) -> ForeignEncoder:
    """Reads a ViTMAE or ViT that transformers' `save_pretrained` wrote; decoder, pooler and classifier are left out.

    Args:
        folder: with config.json, and model.safetensors or pytorch_model.bin.

    Raises:
        ValueError: another kind of model, a setting that timm's vision transformer has no counterpart of, or no weights.
    """
    config = _read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in TRANSFORMERS_TYPES:
        raise ValueError(
            f"encoder {folder}: its config.json has the model_type {kind!r}; of transformers' models "
            f"{' and '.join(TRANSFORMERS_TYPES)} are read"
        )
    path = next((folder / name for name in TRANSFORMERS_WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"encoder {folder}: holds no weights, neither {' nor '.join(TRANSFORMERS_WEIGHTS)}")
    arguments, norm_eps = _transformers_arguments(folder, config)
    mean, std = _transformers_normalization(folder, arguments["in_chans"])
    state = from_transformers(_read_state(path))
    return ForeignEncoder("vit_base_patch16_224", arguments, norm_eps, state, mean, std)


_SINGLE_NAMES = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "layernorm.weight": "norm.weight",
    "layernorm.bias": "norm.bias",
}
# transformers 5 renamed the parts of a layer in memory, and still writes the older names (each pair: older, newer).
_QKV_NAMES = {"attention.attention.query": 0, "attention.attention.key": 1, "attention.attention.value": 2}
_QKV_NAMES |= {"attention.q_proj": 0, "attention.k_proj": 1, "attention.v_proj": 2}
_LAYER_NAMES = {"attention.output.dense": "attn.proj", "attention.o_proj": "attn.proj"}
_LAYER_NAMES |= {"intermediate.dense": "mlp.fc1", "mlp.fc1": "mlp.fc1", "output.dense": "mlp.fc2", "mlp.fc2": "mlp.fc2"}
_LAYER_NAMES |= {"layernorm_before": "norm1", "layernorm_after": "norm2"}
_LAYER = re.compile(r"(?:encoder\.layer|layers)\.(\d+)\.(.+)\.(weight|bias)")
_NOT_ENCODER = ("decoder.", "pooler.", "classifier.", "embeddings.mask_token")


def from_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames the state dict of transformers' ViTMAE or ViT for timm; names that it does not know stay as they are.

    Args:
        state: of a bare model, or of one with a head, where the encoder's names begin with "vit.".
    """
    if any(name.startswith("vit.") for name in state):
        state = {name.removeprefix("vit."): tensor for name, tensor in state.items() if name.startswith("vit.")}
    renamed: dict[str, Tensor] = {}
    qkv: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        if name.startswith(_NOT_ENCODER):
            continue
        layer = _LAYER.fullmatch(name)
        part = layer[2] if layer else ""
        if layer and part in _QKV_NAMES:
            qkv.setdefault(f"blocks.{layer[1]}.attn.qkv.{layer[3]}", {})[_QKV_NAMES[part]] = tensor
        elif layer and part in _LAYER_NAMES:
            renamed[f"blocks.{layer[1]}.{_LAYER_NAMES[part]}.{layer[3]}"] = tensor
        else:
            renamed[_SINGLE_NAMES.get(name, name)] = tensor
    # Where one of the three is missing nothing is put together, and the model lacks that weight when it is filled.
    return renamed | {name: torch.cat([parts[0], parts[1], parts[2]]) for name, parts in qkv.items() if len(parts) == 3}


def _transformers_arguments(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Arguments of timm.create_model, and the epsilon of the norms; the defaults are those of ViTMAEConfig."""

    def sizes(key: str, default: int) -> list[int]:
        value = config.get(key, default)
        pair = value if isinstance(value, list) else [value, value]
        if len(pair) != 2 or not all(isinstance(item, int) and item > 0 for item in pair):
            raise ValueError(f"encoder {folder}: {key} in its config.json is {value!r}, expected a number above 0, or two")
        return pair

    def size(key: str, default: int) -> int:
        first, second = sizes(key, default)
        if first != second:
            raise ValueError(f"encoder {folder}: {key} is {first} x {second}; only square ones are read")
        return first

    activation = config.get("hidden_act", "gelu")
    if activation != "gelu":
        raise ValueError(f"encoder {folder}: has the activation {activation!r}; only gelu is read")
    width, hidden, heads = size("hidden_size", 768), size("intermediate_size", 3072), size("num_attention_heads", 12)
    img_size, patch_size = sizes("image_size", 224), size("patch_size", 16)
    if width % heads:
        raise ValueError(f"encoder {folder}: hidden_size {width} is not a multiple of num_attention_heads {heads}")
    if any(edge % patch_size for edge in img_size):
        raise ValueError(f"encoder {folder}: image_size {img_size} is not a multiple of patch_size {patch_size}")
    ratio = hidden / width
    arguments = {
        "img_size": img_size,
        "patch_size": patch_size,
        "in_chans": size("num_channels", 3),
        "embed_dim": width,
        "depth": size("num_hidden_layers", 12),
        "num_heads": heads,
        # timm takes int(width * ratio), which rounding can leave one too low.
        "mlp_ratio": ratio if int(width * ratio) == hidden else (hidden + 0.5) / width,
        "qkv_bias": bool(config.get("qkv_bias", True)),
        "num_classes": 0,
    }
    return arguments, float(config.get("layer_norm_eps", 1e-12))


def _transformers_normalization(folder: Path, in_chans: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        if in_chans != len(IMAGENET_MEAN):
            raise ValueError(
                f"encoder {folder}: takes {in_chans} channels, but nothing says how they are normalised; "
                "put a preprocessor_config.json with image_mean and image_std beside it"
            )
        return IMAGENET_MEAN, IMAGENET_STD
    config = _read_json(path)
    if config.get("do_normalize") is False:
        return (0.0,) * in_chans, (1.0,) * in_chans
    mean, std = (tuple(config.get(key) or ()) for key in ("image_mean", "image_std"))
    if not len(mean) == len(std) == in_chans or min(std) <= 0:
        raise ValueError(f"encoder {folder}: image_mean and image_std of its {path.name} need {in_chans} numbers, std above 0")
    return mean, std


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"encoder {path.parent}: {path.name} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"encoder {path.parent}: {path.name} holds no JSON object")
    return content


def _read_state(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        return read_torch_file(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"encoder {path}: cannot be read, it may be cut off ({error})") from error


def read_torch_file(path: Path) -> dict[str, Any]:
    """Reads a dictionary that `torch.save` wrote; runs no code that the file may hold.

    Raises:
        ValueError: it cannot be read so, or holds something else.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"encoder {path}: cannot be read ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(content, dict):
        raise ValueError(f"encoder {path}: holds a {type(content).__name__}, not named weights")
    return content

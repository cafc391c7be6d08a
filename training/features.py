"""Features of a frozen encoder, computed once and kept on disk.

Shapes: N samples, n blocks, D encoder width.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from data.digits import cache_folder
from data.evaluation import evaluation_batches
from data.shards import ShardSet
from data.transforms import Normalization
from models.formats import PretrainedEncoder
from training.checkpoint import replacing
from training.machine import native_bfloat16


@dataclass(frozen=True)
class Features:
    """One vector per sample for each of several views of an encoder."""

    views: dict[str, Tensor]
    """Name -> (N, D) float32: "cls/12" is the CLS token after block 12, "mean/12" the mean of its patch tokens."""
    labels: Tensor
    """(N,) int64; -1 where a sample has none."""


def extract_features(
    encoder: PretrainedEncoder,
    shards: ShardSet,
    last_blocks: int,
    device: torch.device,
    batch_size: int = 256,
    num_workers: int = 2,
    cache: Path | None = None,
) -> Features:
    """Runs every image of a data set through an encoder, whole and centred, and keeps what comes out.

    Tokens of every block go through the encoder's final norm. The matrix products are bfloat16 where the device has it.

    Args:
        encoder: frozen.
        shards: the data set.
        last_blocks: how many of the last blocks to take, at least 1.
        device: where to compute.
        batch_size: images at once.
        num_workers: reader processes.
        cache: folder for results, found again by weights, data, size, normalisation and number type; None: no cache.

    Raises:
        DataError: a sample cannot be read.
    """
    path = cache / f"{_cache_key(encoder, shards, last_blocks, device)}.safetensors" if cache else None
    if path and (cached := _read(path)):
        return cached
    features = _compute(encoder, shards, last_blocks, device, batch_size, num_workers)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            save_file(features.views | {"labels": features.labels}, temporary)
    return features


def _compute(
    encoder: PretrainedEncoder, shards: ShardSet, last_blocks: int, device: torch.device, batch_size: int, num_workers: int
) -> Features:
    model = encoder.model.to(device)
    normalization = Normalization(encoder.mean, encoder.std)
    depth = len(model.blocks)
    parts: dict[str, list[Tensor]] = {}
    labels = []
    bar = tqdm(total=len(shards), unit="image", desc=f"features of {shards.root.name}")
    for batch in evaluation_batches(shards, encoder.img_size, encoder.in_chans, batch_size, num_workers):
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=native_bfloat16(device.type)):
            images = normalization.apply(batch.images.to(device))
            blocks = model.forward_intermediates(
                images, indices=last_blocks, norm=True, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
            )
        blocks = cast(list[tuple[Tensor, Tensor]], blocks)
        for offset, (patches, prefix) in enumerate(blocks):
            block = depth - last_blocks + offset + 1
            if model.has_class_token:
                parts.setdefault(f"cls/{block}", []).append(prefix[:, 0].float().cpu())
            parts.setdefault(f"mean/{block}", []).append(patches.float().mean(dim=1).cpu())
        labels.append(batch.labels)
        bar.update(len(batch.labels))
    bar.close()
    return Features({name: torch.cat(part) for name, part in parts.items()}, torch.cat(labels))


def _cache_key(encoder: PretrainedEncoder, shards: ShardSet, last_blocks: int, device: torch.device) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    # Weights do not say all: the same can be meant for another number of heads.
    architecture = [encoder.timm_name, encoder.timm_arguments, encoder.norm_eps, encoder.mean, encoder.std]
    settings = [shards.manifest.hash, architecture, last_blocks, native_bfloat16(device.type)]
    digest.update(json.dumps(settings).encode())
    return digest.hexdigest()[:32]


def _read(path: Path) -> Features | None:
    """A cached result; None where there is none, or it is torn (it is then computed anew)."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError):
        return None
    return Features({name: tensor for name, tensor in tensors.items() if name != "labels"}, tensors["labels"])


def feature_cache() -> Path:
    """Folder of cached features, in the user's cache."""
    return cache_folder() / "features"

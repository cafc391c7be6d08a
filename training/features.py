"""Features of a frozen encoder: of images in memory, and of a data set, computed once and kept on disk.

Shapes: B images, C channels, H W pixels, N samples, D encoder width, h w patches in a column and in a row of an image.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from tqdm import tqdm

from data.digits import cache_folder
from data.evaluation import evaluation_batches
from data.shards import ShardSet
from data.transforms import Normalization
from models.formats import PretrainedEncoder
from training.checkpoint import replacing
from training.machine import native_bfloat16


class EncodedImages(NamedTuple):
    """Tokens after one block and the encoder's final norm, float32 on the encoder's device."""

    cls: Tensor | None
    """(B, D); None where the encoder has no CLS token."""
    patches: Tensor
    """(B, h, w, D): [b, i, j] belongs to the patch in row i and column j of image b."""


def encode_images(
    encoder: PretrainedEncoder, images: Tensor, block: int | None = None, dtype: torch.dtype = torch.float32
) -> EncodedImages:
    """Encodes whole images; nothing is hidden or shuffled, and no gradient is kept.

    Args:
        encoder: from `load_encoder`.
        images: (B, C, H, W) uint8 of the encoder's size.
        block: after which block, 1 .. depth; None: the last.
        dtype: of the matrix products.

    Raises:
        ValueError: images of another type or size, or no such block.
    """
    expected = (encoder.in_chans, *encoder.img_size)
    if images.dtype != torch.uint8 or tuple(images.shape[1:]) != expected:
        given = f"{str(images.dtype).removeprefix('torch.')} of {tuple(images.shape)}"
        raise ValueError(f"the encoder takes uint8 images of (B, C, H, W) = (any, {str(expected)[1:-1]}), not {given}")
    model = encoder.model
    block = check_block(encoder, block)
    device = next(model.parameters()).device
    normalized = Normalization(encoder.mean, encoder.std).apply(images.to(device))
    ((prefix, patches),) = _block_tokens(model, normalized, [block], dtype)
    return EncodedImages(prefix[:, 0] if model.has_class_token else None, patches.unflatten(1, model.patch_embed.grid_size))


def check_block(encoder: PretrainedEncoder, block: int | None) -> int:
    """Number of a block of an encoder, the last one for None; ValueError where there is no such block."""
    depth = len(encoder.model.blocks)
    if block is not None and not 1 <= block <= depth:
        raise ValueError(f"block {block}: the encoder has the blocks 1 .. {depth}")
    return block or depth


def _block_tokens(
    model: VisionTransformer, images: Tensor, blocks: list[int], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Tokens after some blocks (numbered from 1) and the final norm.

    Returns:
        For each block, float32: (B, R, D) of CLS and other tokens that are no patches, and (B, h * w, D) of the patches.
    """
    device = images.device.type
    with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype != torch.float32):
        found = model.forward_intermediates(
            images, indices=[block - 1 for block in blocks], norm=True, stop_early=True, output_fmt="NLC",
            return_prefix_tokens=True, intermediates_only=True, output_dict=True,
        )  # fmt: skip
    assert isinstance(found, dict)
    patches = found["image_intermediates"]
    prefixes = found.get("image_intermediates_prefix") or [tokens[:, :0] for tokens in patches]
    return [(prefix.float(), tokens.float()) for prefix, tokens in zip(prefixes, patches, strict=True)]


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
    blocks = list(range(depth - last_blocks + 1, depth + 1))
    dtype = torch.bfloat16 if native_bfloat16(device.type) else torch.float32
    parts: dict[str, list[Tensor]] = {}
    labels = []
    bar = tqdm(total=len(shards), unit="image", desc=f"features of {shards.root.name}")
    for batch in evaluation_batches(shards, encoder.img_size, encoder.in_chans, batch_size, num_workers):
        images = normalization.apply(batch.images.to(device))
        for block, (prefix, patches) in zip(blocks, _block_tokens(model, images, blocks, dtype), strict=True):
            if model.has_class_token:
                # A copy: a view would keep the tokens of all patches, of all samples, in memory.
                parts.setdefault(f"cls/{block}", []).append(prefix[:, 0].clone().cpu())
            parts.setdefault(f"mean/{block}", []).append(patches.mean(dim=1).cpu())
        labels.append(batch.labels)
        bar.update(len(batch.labels))
    bar.close()
    return Features({name: torch.cat(part) for name, part in parts.items()}, torch.cat(labels))


def weights_hash(model: nn.Module) -> str:
    """Tells the weights of models apart: a sha256 over names and values, hexadecimal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _cache_key(encoder: PretrainedEncoder, shards: ShardSet, last_blocks: int, device: torch.device) -> str:
    # Weights do not say all: the same can be meant for another number of heads.
    architecture = [encoder.timm_name, encoder.timm_arguments, encoder.norm_eps, encoder.mean, encoder.std]
    settings = [weights_hash(encoder.model), shards.manifest.hash, architecture, last_blocks, native_bfloat16(device.type)]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]


def _read(path: Path) -> Features | None:
    """A cached result; None where there is none, or it is torn (it is then computed anew)."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError):
        return None
    labels = tensors.pop("labels")
    names = sorted(tensors, key=lambda name: (int(name.partition("/")[2]), name))  # as they were computed: block by block
    return Features({name: tensors[name] for name in names}, labels)


def feature_cache() -> Path:
    """Folder of cached features, in the user's cache."""
    return cache_folder() / "features"

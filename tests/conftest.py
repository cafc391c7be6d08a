"""What several tests use: a tiny model, and shards of small pictures."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.shards import ShardSet, open_shards
from data.writer import list_images, write_shards
from models.mae import MAEConfig, MaskedAutoencoder, build_mae

TINY = MAEConfig(
    name="tiny", img_size=(32, 32), patch_size=8, embed_dim=32, depth=2, num_heads=4,
    decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=4,
)  # fmt: skip


def png(pixels: np.ndarray) -> bytes:
    """Encodes (H, W) or (H, W, 3) uint8."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write_pictures(folder: Path, count: int, size: tuple[int, int] = (24, 20)) -> None:
    """Writes small random colour pictures in two class folders."""
    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / ("even", "odd")[number % 2] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(random.integers(0, 256, (*size, 3), dtype=np.uint8)))


@pytest.fixture
def tiny_config() -> MAEConfig:
    return TINY


@pytest.fixture
def tiny_mae(tiny_config: MAEConfig) -> MaskedAutoencoder:
    torch.manual_seed(0)
    return build_mae(tiny_config)


@pytest.fixture(scope="session")
def picture_shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """53 pictures in shards of at most 10."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder / "source", 53)
    write_shards(list_images(folder / "source"), folder / "shards", samples_per_shard=10, num_workers=0)
    return open_shards(folder / "shards")

"""What the probe scripts share: encoders side by side on one labelled data set, a table and a JSON file."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from data.sources import open_dataset
from models.formats import PretrainedEncoder, load_encoder
from models.position import sincos_2d
from training.checkpoint import replacing
from training.cli import UserError
from training.features import Features, extract_features, feature_cache
from training.knn import check_same_classes
from training.machine import best_device

RANDOM_SUFFIX = " (random weights)"


@dataclass(frozen=True)
class ProbeData:
    """Encoders to ask, labelled images to ask them with."""

    encoders: tuple[str, ...]
    """What to measure, one row of the table each: run folders, encoder.safetensors files, .pth files of facebookresearch/mae,
    names of timm vision transformers."""
    train: str
    """Labelled images to learn from: a folder of shards, a folder of class folders, a CSV table with the columns path and label
    (the last two are packed into shards on first use), or "digits", "digits-train", "digits-test"."""
    test: str
    """Labelled images to measure on, of the same classes, named in the same ways."""
    random_baseline: bool = False
    """Measure each encoder with random weights too: what the architecture gives without any training."""
    last_blocks: int = 1
    """Features of this many last blocks are tried, at least 1."""
    batch_size: int = 256
    """Images encoded at once, at least 1."""
    num_workers: int = 2
    """Reader processes; 0 reads in this one."""
    cache: bool = True
    """Keep features on disk and use them again."""
    seed: int = 0
    """Seed of the random baseline, at least 0."""

    def __post_init__(self) -> None:
        if not self.encoders:
            raise ValueError("encoders: name at least one")
        if min(self.last_blocks, self.batch_size) < 1 or min(self.num_workers, self.seed) < 0:
            raise ValueError("last_blocks and batch_size must be at least 1, num_workers and seed at least 0")


@dataclass(frozen=True)
class ProbedEncoder:
    """One encoder's features of the training and the test set, on the device where probes are trained."""

    name: str
    train: Features
    test: Features
    num_classes: int


def probed_encoders(config: ProbeData, *, at_most_all: bool = False) -> Iterator[ProbedEncoder]:
    """Encodes both data sets with one encoder after the other.

    Args:
        config: what to encode.
        at_most_all: take all blocks of an encoder that has fewer than `last_blocks`, rather than refuse it.

    Raises:
        UserError: an encoder cannot be loaded, or the labels of the two sets do not fit each other.
        DataError: the data cannot be read.
    """
    train, test = (open_dataset(source, labelled=True) for source in (config.train, config.test))
    check_same_classes(train, test)
    num_classes = int(max(train.labels.max(), test.labels.max())) + 1
    device = best_device()
    for source in config.encoders:
        try:
            encoder = load_encoder(source)
        except ValueError as error:
            raise UserError(str(error)) from error
        depth = len(encoder.model.blocks)
        if config.last_blocks > depth and not at_most_all:
            raise UserError(f"last_blocks {config.last_blocks}: {source} has only {depth} blocks")
        variants = [(source, encoder)]
        if config.random_baseline:
            variants.append((source + RANDOM_SUFFIX, with_random_weights(encoder, config.seed)))
        for name, variant in variants:
            features = [
                extract_features(
                    variant, shards, min(config.last_blocks, depth), device, config.batch_size, config.num_workers,
                    feature_cache() if config.cache else None,
                )
                for shards in (train, test)
            ]  # fmt: skip
            yield ProbedEncoder(name, features[0], features[1], num_classes)


def with_random_weights(encoder: PretrainedEncoder, seed: int) -> PretrainedEncoder:
    """The same architecture, initialised anew as timm does; only a fixed sin-cos table, which was never trained, is kept."""
    model = copy.deepcopy(encoder.model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.init_weights()
    table = encoder.model.pos_embed
    if isinstance(table, nn.Parameter) and isinstance(model.pos_embed, nn.Parameter) and _is_sincos(encoder.model, table):
        with torch.no_grad():
            model.pos_embed.copy_(table)
    return encoder._replace(model=model)


def _is_sincos(model: VisionTransformer, table: Tensor) -> bool:
    """Says whether a position table is the fixed one: files of weights do not say what was trained."""
    if table.shape[-1] % 4:
        return False
    rows, columns = model.patch_embed.grid_size
    fixed = sincos_2d(table.shape[-1], (rows, columns), table.shape[1] - rows * columns).float()
    return torch.allclose(table[0].cpu(), fixed, atol=1e-5)


def write_json(path: str, record: dict[str, Any]) -> None:
    """Writes a result file, whole or not at all."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def print_table(rows: list[dict[str, str]]) -> None:
    """Prints rows of the same keys as aligned columns."""
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    for row in [{key: key for key in rows[0]}, *rows]:
        print("  ".join(f"{text:<{widths[key]}}" for key, text in row.items()).rstrip())

"""Writes the features of a frozen encoder for every image of a data set: CLS tokens, maps of patch tokens, or both.

python scripts/extract_features.py --encoder runs/photos --data shards/photos --output features/photos
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from data.sources import open_dataset
from models.formats import load_encoder
from training.cli import UserError, parse_args, user_errors
from training.feature_files import INDEX_NAME, FeatureFilesConfig, write_features
from training.machine import best_device
from training.one_process import require_one_process


@dataclass(frozen=True, kw_only=True)
class ExtractConfig(FeatureFilesConfig):
    """Encodes whole images, resized and cropped at the centre, and writes their tokens to a new folder."""

    encoder: str
    """A run folder, an encoder.safetensors, a .pth of facebookresearch/mae, a folder of transformers with a ViTMAE or ViT, or
    the name of a timm vision transformer."""
    data: str
    """A folder of shards, a folder of images, a CSV table of images, or "digits"; labels go along where there are some."""
    output: Path
    """New or empty folder; complete or absent, whatever happens on the way."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the accelerator where there is one, else the CPU."""


def main() -> None:
    """Extracts as the command line says."""
    with user_errors():
        require_one_process("scripts/extract_features.py")
        config = parse_args(ExtractConfig, prog="scripts/extract_features.py")
        shards = open_dataset(config.data)
        try:
            encoder = load_encoder(config.encoder)
        except ValueError as error:
            raise UserError(str(error)) from error
        device = torch.device("cpu") if config.device == "cpu" else best_device()
        print(summarize(config.output, write_features(encoder, shards, config.output, config, device)))


def summarize(output: Path, index: dict[str, Any]) -> str:
    """Says what was written, and how it is read."""
    shapes = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in index["tokens"].items())
    first = output / index["files"][0]["name"]
    how = {
        "safetensors": f'safetensors.torch.load_file("{first}")',
        "npz": f'numpy.load("{first}")',
        "shards": f'webdataset.WebDataset("{first}", shardshuffle=False).decode()',
    }
    return (
        f"{output}: {index['num_samples']:,} samples in {len(index['files'])} file(s), after block {index['block']} of "
        f"{index['depth']}, {index['dtype']}: {shapes}\n"
        f"described in {output / INDEX_NAME}; read with {how[index['layout']]}"
    )


if __name__ == "__main__":
    main()

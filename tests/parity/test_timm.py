"""The encoder is timm's: same parameters, same features, and it loads there."""

import dataclasses
import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

from data.transforms import Normalization
from models.formats import encoder_state, timm_model
from models.mae import MAEConfig, build_mae
from pretrain.report import export_encoder

VARIANTS = [
    {},
    {"img_size": (32, 64), "in_chans": 1},
    {"in_chans": 5, "pos_embed": "learned", "patch_size": 4},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_exported_encoder_loads_in_timm_and_gives_the_same_features(
    tiny_config: MAEConfig, tmp_path: Path, changes: dict[str, object]
) -> None:
    config = dataclasses.replace(tiny_config, **changes)  # pyright: ignore[reportArgumentType]
    model = build_mae(config).eval()
    export_encoder(tmp_path, model, config, Normalization((0.5,) * config.in_chans, (0.25,) * config.in_chans))

    record = json.loads((tmp_path / "encoder.json").read_text())
    theirs = timm.create_model(record["timm_model"], **record["timm_arguments"])
    assert isinstance(theirs, VisionTransformer)
    theirs.load_state_dict(load_file(tmp_path / "encoder.safetensors"), strict=True)
    theirs.eval()
    images = torch.randn(2, config.in_chans, *config.img_size)
    with torch.no_grad():
        torch.testing.assert_close(theirs.forward_features(images), model.encoder.forward_features(images), atol=1e-5, rtol=0)


def test_timm_reads_the_file_by_itself(tiny_config: MAEConfig, tmp_path: Path) -> None:
    """The command that a run prints at its end: weights by `checkpoint_path`."""
    model = build_mae(tiny_config).eval()
    export_encoder(tmp_path, model, tiny_config, Normalization((0.5,) * 3, (0.25,) * 3))
    name, arguments = timm_model(tiny_config)
    theirs = timm.create_model(name, **arguments, checkpoint_path=str(tmp_path / "encoder.safetensors"))
    for key, tensor in encoder_state(model).items():
        assert torch.equal(theirs.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", ["tiny", "small", "base", "large", "huge"])
def test_presets_have_timms_sizes(name: str) -> None:
    config = MAEConfig(name=name)  # pyright: ignore[reportArgumentType]
    with torch.device("meta"):
        ours = build_mae(config).encoder
        timm_name, arguments = timm_model(config)
        sizes = {"embed_dim", "depth", "num_heads", "patch_size"}
        theirs = timm.create_model(timm_name, num_classes=0)
        by_arguments = timm.create_model(timm_name, **arguments)
    shapes = {key: tensor.shape for key, tensor in ours.state_dict().items()}
    assert shapes == {key: tensor.shape for key, tensor in theirs.state_dict().items()}
    assert shapes == {key: tensor.shape for key, tensor in by_arguments.state_dict().items()}
    assert sizes <= arguments.keys()

"""Encoders in the layout of transformers, against transformers itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.foreign import IMAGENET_MEAN, IMAGENET_STD
from models.formats import PretrainedEncoder, load_encoder
from tests.unit.test_formats import assert_can_be_built_anew

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 56, "intermediate_size": 61, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": [16, 64],
    "patch_size": 8, "layer_norm_eps": 1e-2,
}  # fmt: skip
"""Odd on purpose: to a computer 56 * (61 / 56) is less than 61, and such an epsilon shows in every feature. The patches are as
many as a square has: transformers builds no other decoder."""
DECODER = {
    "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 8,
}  # fmt: skip


def random_model(name: str, **changes: Any) -> Any:
    """A model of transformers that hides nothing, with numbers in every weight: norms and biases too."""
    settings = SIZES | changes
    if name.startswith("ViTMAE"):
        config = transformers.ViTMAEConfig(**settings, **DECODER, mask_ratio=0.0)
    else:
        config = transformers.ViTConfig(**settings)
    model = getattr(transformers, name)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def hidden_state(model: Any, images: Tensor) -> Tensor:
    """What transformers' encoder gives: (B, 1 + N, D) after the final norm, patches in image order."""
    bare = getattr(model, "vit", model)
    with torch.no_grad():
        if "ViTMAE" not in type(bare).__name__:
            return bare(images).last_hidden_state
        num_patches = bare.embeddings.patch_embeddings.num_patches
        return bare(images, noise=torch.arange(float(num_patches)).expand(len(images), -1)).last_hidden_state


def save_newer_names(model: Any, folder: Path) -> None:
    """The names that transformers 5 uses in memory, as some of its versions write them."""
    model.config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")


def save_pickled(model: Any, folder: Path) -> None:
    """pytorch_model.bin, as all older models of the hub have it."""
    model.save_pretrained(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("save", [lambda model, folder: model.save_pretrained(folder), save_newer_names, save_pickled])
@pytest.mark.parametrize("name", ["ViTMAEForPreTraining", "ViTMAEModel", "ViTModel", "ViTForImageClassification"])
def test_features_are_those_of_transformers(name: str, save: Callable[[Any, Path], None], tmp_path: Path) -> None:
    model = random_model(name)
    save(model, tmp_path)
    encoder = load_encoder(str(tmp_path))
    assert (encoder.img_size, encoder.in_chans, encoder.mean, encoder.std) == ((16, 64), 3, IMAGENET_MEAN, IMAGENET_STD)
    images = torch.randn(3, 3, 16, 64)
    with torch.no_grad():
        features = encoder.model.forward_features(images)
    torch.testing.assert_close(features, hidden_state(model, images), atol=1e-5, rtol=1e-5)
    assert_can_be_built_anew(encoder)


def test_test_itself_knows_both_layouts(tmp_path: Path) -> None:
    """save_pretrained of the installed version writes the older names; should it change, the test above must be told."""
    model = random_model("ViTMAEModel")
    model.save_pretrained(tmp_path)
    assert "encoder.layer.0.attention.attention.query.weight" in load_file(tmp_path / "model.safetensors")
    assert "layers.0.attention.q_proj.weight" in model.state_dict()


def test_settings_of_the_config_are_honoured(tmp_path: Path) -> None:
    """Square size, no biases of queries, keys and values, one channel normalised as the preprocessor says."""
    model = random_model("ViTMAEModel", qkv_bias=False, image_size=24, num_channels=1, layer_norm_eps=1e-12)
    model.save_pretrained(tmp_path)
    processor = tmp_path / "preprocessor_config.json"
    processor.write_text(json.dumps({"do_normalize": True, "image_mean": [0.3], "image_std": [0.4]}))
    encoder = load_encoder(str(tmp_path))
    assert (encoder.img_size, encoder.in_chans, encoder.mean, encoder.std) == ((24, 24), 1, (0.3,), (0.4,))
    assert encoder.norm_eps == 1e-12
    images = torch.randn(2, 1, 24, 24)
    with torch.no_grad():
        features = encoder.model.forward_features(images)
    torch.testing.assert_close(features, hidden_state(model, images), atol=1e-5, rtol=1e-5)
    processor.write_text(json.dumps({"do_normalize": False, "image_mean": [0.3], "image_std": [0.4]}))
    encoder = load_encoder(str(tmp_path))
    assert (encoder.mean, encoder.std) == ((0.0,), (1.0,))


def test_defaults_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config.json need not say what has its default; no weights of that size are made."""
    built: list[dict[str, Any]] = []

    def note(_path: Path, _name: str, arguments: dict[str, Any], *rest: Any) -> PretrainedEncoder:
        built.append(arguments | {"norm_eps": rest[-1]})
        raise ValueError("seen")

    monkeypatch.setattr("models.formats._built", note)
    (tmp_path / "config.json").write_text('{"model_type": "vit_mae"}')
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="seen"):
        load_encoder(str(tmp_path))
    defaults = transformers.ViTMAEConfig()
    assert built == [
        {
            "img_size": [defaults.image_size] * 2, "patch_size": defaults.patch_size, "in_chans": defaults.num_channels,
            "embed_dim": defaults.hidden_size, "depth": defaults.num_hidden_layers, "num_heads": defaults.num_attention_heads,
            "mlp_ratio": defaults.intermediate_size / defaults.hidden_size, "qkv_bias": defaults.qkv_bias, "num_classes": 0,
            "norm_eps": defaults.layer_norm_eps,
        }
    ]  # fmt: skip


LAYER = "encoder.layer.1.attention.attention.key.weight"


@pytest.mark.parametrize(
    "missing", [LAYER, "embeddings.cls_token", "layernorm.bias", "encoder.layer.0.intermediate.dense.bias"]
)
def test_every_weight_comes_from_the_file(missing: str, tmp_path: Path) -> None:
    random_model("ViTMAEModel").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state[missing]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="its weights do not fit") as caught:
        load_encoder(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_weights_that_the_config_does_not_speak_of_are_refused(tmp_path: Path) -> None:
    random_model("ViTMAEModel").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"do not fit.*blocks.1"):
        load_encoder(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert'; of transformers' models vit_mae and vit are read"),
        ({"model_type": None}, "model_type None"),
        ({"patch_size": [8, 4]}, "patch_size is 8 x 4; only square"),
        ({"image_size": 20}, r"image_size \[20, 20\] is not a multiple of patch_size 8"),
        ({"image_size": "large"}, "image_size in its config.json is 'large', expected a number"),
        ({"num_attention_heads": 3}, "hidden_size 56 is not a multiple of num_attention_heads 3"),
        ({"hidden_act": "relu"}, "activation 'relu'; only gelu"),
        ({"num_channels": 4}, "takes 4 channels, but nothing says how they are normalised"),
    ],
)
def test_other_models_are_refused_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    random_model("ViTMAEModel").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message) as caught:
        load_encoder(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", None, "holds no weights, neither model.safetensors nor pytorch_model.bin"),
        ("model.safetensors", b"cut", "cannot be read, it may be cut off"),
        ("config.json", b"{", "config.json cannot be read as JSON"),
        ("config.json", b"[]", "config.json holds no JSON object"),
        ("preprocessor_config.json", b'{"image_mean": [0.5], "image_std": [0.5]}', "need 3 numbers"),
        ("preprocessor_config.json", b'{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0, 0.5]}', "std above 0"),
    ],
)
def test_broken_folders_are_refused_in_one_line(file: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    random_model("ViTMAEModel").save_pretrained(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_encoder(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_weights_that_would_run_code_are_not_unpickled(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("harm",))

    random_model("ViTMAEModel").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"layernorm.bias": Harm()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin"):
        load_encoder(str(tmp_path))

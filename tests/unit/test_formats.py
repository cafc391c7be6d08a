import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer

from data.transforms import Normalization
from models.formats import PretrainedEncoder, load_encoder, set_norm_eps
from models.mae import MAEConfig, MaskedAutoencoder, build_mae
from pretrain.report import export_encoder


@pytest.fixture
def exported(tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder, tmp_path: Path) -> Path:
    export_encoder(tmp_path, tiny_mae, tiny_config, Normalization((0.4, 0.5, 0.6), (0.1, 0.2, 0.3)))
    return tmp_path


def assert_can_be_built_anew(encoder: PretrainedEncoder) -> None:
    """The name and arguments that travel with an encoder, through JSON too, build a model that takes its weights."""
    arguments = json.loads(json.dumps(encoder.timm_arguments))
    assert (tuple(arguments["img_size"]), arguments["in_chans"], arguments["num_classes"]) == (
        encoder.img_size,
        encoder.in_chans,
        0,
    )
    again = timm.create_model(encoder.timm_name, **arguments).eval()
    assert isinstance(again, VisionTransformer)
    set_norm_eps(again, encoder.norm_eps)
    again.load_state_dict(encoder.model.state_dict(), strict=True)
    images = torch.randn(2, encoder.in_chans, *encoder.img_size)
    with torch.no_grad():
        torch.testing.assert_close(again.forward_features(images), encoder.model.forward_features(images))


def test_run_folder_and_exported_file_give_the_encoder_and_its_input(exported: Path, tiny_mae: MaskedAutoencoder) -> None:
    images = torch.randn(2, 3, 32, 32)
    for source in (exported, exported / "encoder.safetensors"):
        encoder = load_encoder(str(source))
        assert (encoder.img_size, encoder.in_chans) == ((32, 32), 3)
        assert (encoder.mean, encoder.std) == ((0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
        assert not encoder.model.training
        assert_can_be_built_anew(encoder)
        with torch.no_grad():
            features = encoder.model.forward_features(images)
            torch.testing.assert_close(features, tiny_mae.encoder.forward_features(images))


def test_facebook_mae_files_load_by_the_shapes_of_their_weights(tmp_path: Path) -> None:
    config = MAEConfig(name="tiny", img_size=(32, 32), patch_size=8, depth=2, decoder_depth=1)
    model = build_mae(config)
    state = {name.split(".", 1)[1]: tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": state}, tmp_path / "mae.pth")
    encoder = load_encoder(str(tmp_path / "mae.pth"))
    assert_can_be_built_anew(encoder)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder.model.forward_features(images), model.encoder.forward_features(images))


def test_encoders_of_timm_say_how_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretrained flag is taken out: tests download nothing."""
    create = timm.create_model
    monkeypatch.setattr("models.formats.timm.create_model", lambda name, **arguments: create(name, num_classes=0))
    encoder = load_encoder("vit_tiny_patch16_384")
    monkeypatch.undo()
    assert (encoder.timm_name, encoder.img_size, encoder.in_chans) == ("vit_tiny_patch16_384", (384, 384), 3)
    assert_can_be_built_anew(encoder)


def test_an_encoder_is_never_partly_random(exported: Path) -> None:
    path = exported / "encoder.safetensors"
    state = load_file(path)
    del state["blocks.1.mlp.fc1.weight"]
    record = json.loads((exported / "encoder.json").read_text())
    save_file(state, path, metadata={"encoder": json.dumps(record)})
    with pytest.raises(ValueError, match=r"do not fit.*blocks.1.mlp.fc1.weight"):
        load_encoder(str(exported))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.safetensors", b"", "cannot be read"),
        ("x.pth", None, "does not hold the weights"),
        ("x.pth", b"", "cannot be read"),
        ("missing", None, "is no run folder"),
    ],
)
def test_what_is_no_encoder_is_refused_by_name(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    elif name.endswith(".pth"):
        torch.save({"model": {"fc.weight": torch.zeros(2, 2)}}, path)
    with pytest.raises(ValueError, match=message) as caught:
        load_encoder(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [[1, 2], {"model": torch.zeros(2)}])
def test_torch_files_without_named_weights_are_refused(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"list.pth: (holds a list|does not hold the weights)"):
        load_encoder(str(tmp_path / "list.pth"))


def test_files_that_would_run_code_are_not_unpickled(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("harm",))

    torch.save({"model": Harm()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil.pth"):
        load_encoder(str(tmp_path / "evil.pth"))


def test_folder_without_encoder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no encoder.safetensors"):
        load_encoder(str(tmp_path))

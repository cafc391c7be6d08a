import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.transforms import Normalization
from models.formats import load_encoder
from models.mae import MAEConfig, MaskedAutoencoder, build_mae
from pretrain.report import export_encoder


@pytest.fixture
def exported(tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder, tmp_path: Path) -> Path:
    export_encoder(tmp_path, tiny_mae, tiny_config, Normalization((0.4, 0.5, 0.6), (0.1, 0.2, 0.3)))
    return tmp_path


def test_run_folder_and_exported_file_give_the_encoder_and_its_input(exported: Path, tiny_mae: MaskedAutoencoder) -> None:
    images = torch.randn(2, 3, 32, 32)
    for source in (exported, exported / "encoder.safetensors"):
        encoder = load_encoder(str(source))
        assert (encoder.img_size, encoder.in_chans) == ((32, 32), 3)
        assert (encoder.mean, encoder.std) == ((0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
        assert not encoder.model.training
        with torch.no_grad():
            features = encoder.model.forward_features(images)
            torch.testing.assert_close(features, tiny_mae.encoder.forward_features(images))


def test_facebook_mae_files_load_by_the_shapes_of_their_weights(tmp_path: Path) -> None:
    config = MAEConfig(name="tiny", img_size=(32, 32), patch_size=8, depth=2, decoder_depth=1)
    model = build_mae(config)
    state = {name.split(".", 1)[1]: tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": state}, tmp_path / "mae.pth")
    encoder = load_encoder(str(tmp_path / "mae.pth"))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(encoder.model.forward_features(images), model.encoder.forward_features(images))


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

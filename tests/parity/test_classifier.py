"""Heads, layer-wise learning rates, LARS and the interpolated position table equal the original implementation's numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from models.attention import Attention
from models.formats import PretrainedEncoder
from models.heads import Classifier, ClassifierConfig, Pooling, build_classifier
from models.position import resize_position_table
from training.optim import LARS, layer_groups, set_lr

GOLDEN_FOLDER = Path(__file__).parent / "golden"
NUM_CLASSES = 5


def read(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN_FOLDER / name) as file:
        return {key: file[key] for key in file.files}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return read("classifier_lars_interp.npz")


@pytest.fixture(scope="module")
def encoder() -> PretrainedEncoder:
    """The encoder whose weights the golden classifier is built on."""
    arguments = {
        "img_size": [32, 32], "patch_size": 8, "in_chans": 3, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 0,
    }  # fmt: skip
    model = timm.create_model("vit_base_patch16_224", **arguments, attn_layer=Attention)
    assert isinstance(model, VisionTransformer)
    prefix = "weights/"
    weights = {
        k.removeprefix(prefix): torch.tensor(v) for k, v in read("mae_forward_backward.npz").items() if k.startswith(prefix)
    }
    model.load_state_dict({k: v for k, v in weights.items() if not k.startswith(("decoder_", "mask_token"))}, strict=True)
    return PretrainedEncoder(model.eval(), (32, 32), 3, (0.5,) * 3, (0.5,) * 3, "vit_base_patch16_224", arguments)


def golden_classifier(encoder: PretrainedEncoder, golden: dict[str, np.ndarray], pooling: Pooling, name: str) -> Classifier:
    classifier = build_classifier(encoder, ClassifierConfig(pooling=pooling, drop_path_rate=0.0), NUM_CLASSES).eval()
    head, fc_norm = classifier.vit.head, classifier.vit.fc_norm
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.copy_(torch.tensor(golden[f"{name}/head_weight"]))
        head.bias.copy_(torch.tensor(golden[f"{name}/head_bias"]))
        if isinstance(fc_norm, nn.LayerNorm):
            fc_norm.weight.copy_(torch.tensor(golden[f"{name}/fc_norm_weight"]))
            fc_norm.bias.copy_(torch.tensor(golden[f"{name}/fc_norm_bias"]))
    return classifier


@pytest.mark.parametrize(("pooling", "name"), [("cls", "cls"), ("mean", "gap")])
def test_features_and_logits(encoder: PretrainedEncoder, golden: dict[str, np.ndarray], pooling: Pooling, name: str) -> None:
    classifier = golden_classifier(encoder, golden, pooling, name)
    images = torch.tensor(read("mae_forward_backward.npz")["images"])
    with torch.no_grad():
        features = classifier.vit.forward_head(classifier.vit.forward_features(images), pre_logits=True)
        logits = classifier(images)
    np.testing.assert_allclose(features.numpy(), golden[f"{name}/features"], atol=1e-5)
    np.testing.assert_allclose(logits.numpy(), golden[f"{name}/logits"], atol=1e-5)


def test_interpolated_position_table(golden: dict[str, np.ndarray]) -> None:
    resized = resize_position_table(torch.tensor(golden["interp/in_4x4"]), (4, 4), (7, 7), 1)
    np.testing.assert_allclose(resized.numpy(), golden["interp/out_7x7"], atol=1e-6)


def test_layer_decay_groups(encoder: PretrainedEncoder) -> None:
    classifier = build_classifier(encoder, ClassifierConfig(), NUM_CLASSES)
    names = {parameter: name.removeprefix("vit.") for name, parameter in classifier.named_parameters()}
    ours = {
        names[parameter]: (group["lr_scale"], group["weight_decay"])
        for group in layer_groups(classifier, 0.05, 0.65)
        for parameter in group["params"]
    }
    expected = {
        name: (pytest.approx(group["lr_scale"], rel=1e-12), group["weight_decay"])
        for group in json.loads((GOLDEN_FOLDER / "layer_decay_groups.json").read_text())
        for name in group["names"]
    }
    assert ours == expected


def test_lars_steps(golden: dict[str, np.ndarray]) -> None:
    weight, bias = (nn.Parameter(torch.tensor(golden[f"lars/{name}0"])) for name in "wb")
    optimizer = LARS([weight, bias], weight_decay=0.01)

    def gradient(name: str, step: int) -> Tensor:
        return torch.tensor(golden[f"lars/grads_{name}"][step])

    for step, lr in enumerate(golden["lars/lrs"].tolist()):
        weight.grad, bias.grad = gradient("w", step), gradient("b", step)
        set_lr(optimizer, lr)
        optimizer.step()
        np.testing.assert_allclose(weight.detach().numpy(), golden["lars/w_after"][step], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(bias.detach().numpy(), golden["lars/b_after"][step], rtol=1e-6, atol=1e-7)

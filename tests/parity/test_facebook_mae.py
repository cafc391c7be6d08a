"""Every number of the original implementation that this project promises to reproduce."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.formats import from_facebook_mae
from models.mae import MAEConfig, MaskedAutoencoder, build_mae
from models.masking import is_hidden, num_kept, split_by_noise
from models.patches import patchify, take_rows, unpatchify
from models.plain import plain_forward
from models.position import sincos_2d
from training.schedule import warmup_cosine

GOLDEN_FOLDER = Path(__file__).parent / "golden"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN_FOLDER / "mae_forward_backward.npz") as file:
        return {name: file[name] for name in file.files}


def section(golden: dict[str, np.ndarray], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): torch.tensor(array) for name, array in golden.items() if name.startswith(prefix)}


def golden_model(golden: dict[str, np.ndarray], config: MAEConfig, norm_pix_loss: bool) -> MaskedAutoencoder:
    model = build_mae(dataclasses.replace(config, norm_pix_loss=norm_pix_loss))
    model.load_state_dict(from_facebook_mae(section(golden, "weights/")), strict=True)
    return model


@pytest.mark.parametrize("loss_kind", ["plain", "norm_pix"])
def test_loss_latent_prediction_and_every_gradient(
    golden: dict[str, np.ndarray], tiny_config: MAEConfig, loss_kind: str
) -> None:
    model = golden_model(golden, tiny_config, norm_pix_loss=loss_kind == "norm_pix")
    output = model(torch.tensor(golden["images"]), torch.tensor(golden["noise"]))
    output.loss.backward()

    assert output.loss.item() == pytest.approx(float(golden[f"{loss_kind}/loss"]), abs=TOLERANCE)
    np.testing.assert_allclose(output.latent.detach().numpy(), golden["latent"], atol=TOLERANCE)
    hidden_pred = take_rows(torch.tensor(golden["pred"]), output.ids_hidden)
    torch.testing.assert_close(output.pred, hidden_pred, atol=TOLERANCE, rtol=0)

    expected = from_facebook_mae(section(golden, f"{loss_kind}/grad/"))
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(trained[name], gradient, atol=TOLERANCE, rtol=0, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize("loss_kind", ["plain", "norm_pix"])
def test_plain_formulation(golden: dict[str, np.ndarray], tiny_config: MAEConfig, loss_kind: str) -> None:
    model = golden_model(golden, tiny_config, norm_pix_loss=loss_kind == "norm_pix")
    output = plain_forward(model, torch.tensor(golden["images"]), torch.tensor(golden["noise"]))
    assert output.loss.item() == pytest.approx(float(golden[f"{loss_kind}/loss"]), abs=TOLERANCE)
    np.testing.assert_allclose(output.pred.detach().numpy(), golden["pred"], atol=TOLERANCE)


def test_patchify_and_mask(golden: dict[str, np.ndarray]) -> None:
    images = torch.tensor(golden["images"])
    patches = patchify(images, 8)
    np.testing.assert_array_equal(patches.numpy(), golden["patchify"])
    torch.testing.assert_close(unpatchify(patches, 8, (4, 4)), images, atol=0, rtol=0)
    ids_keep, ids_hidden = split_by_noise(torch.tensor(golden["noise"]), kept=4)
    np.testing.assert_array_equal(is_hidden(ids_hidden, 16).numpy(), golden["mask"].astype(bool))
    ids_restore = torch.argsort(torch.cat([ids_keep, ids_hidden], dim=1), dim=1)
    np.testing.assert_array_equal(ids_restore.numpy(), golden["ids_restore"])


def test_kept_counts(golden: dict[str, np.ndarray]) -> None:
    for ratio, num_patches, kept in golden["len_keep/ratio_L_keep"]:
        assert num_kept(int(num_patches), float(ratio)) == int(kept), (ratio, num_patches)


def test_sincos_table(golden: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(sincos_2d(32, (4, 4), 1).numpy(), golden["sincos/32_4x4_cls"], atol=1e-12)
    large = sincos_2d(768, (14, 14), 1).numpy()[[0, 1, 2, 15, 196]]
    np.testing.assert_allclose(large, golden["sincos/768_14x14_cls_rows_0_1_2_15_196"], atol=1e-12)


def test_schedule() -> None:
    record = json.loads((GOLDEN_FOLDER / "lr_schedule.json").read_text())
    for epoch, lr in record["epoch_lr"]:
        ours = warmup_cosine(epoch, record["warmup_epochs"], record["epochs"], record["lr"], record["min_lr"])
        assert ours == pytest.approx(lr, rel=1e-12, abs=1e-15), epoch


def test_layer_ids_and_weight_decay(tiny_config: MAEConfig) -> None:
    """The encoder's own statements give the original's fine-tuning groups (its head excepted: it has none yet)."""
    encoder = build_mae(tiny_config).encoder
    groups = json.loads((GOLDEN_FOLDER / "layer_decay_groups.json").read_text())
    expected = {name: group for group in groups for name in group["names"] if not name.startswith("head.")}
    ids, exempt, depth = encoder.layer_ids(), encoder.no_weight_decay(), len(encoder.blocks)
    assert ids.keys() == expected.keys()
    for name, group in expected.items():
        assert 0.65 ** (depth + 1 - ids[name]) == pytest.approx(group["lr_scale"]), name
        assert (0.0 if name in exempt else 0.05) == group["weight_decay"], name

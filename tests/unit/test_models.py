import dataclasses

import pytest
import timm.layers.attention
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models.attention import Attention, attend, choose_attention, prefers_plain_attention
from models.decoder import DecoderBlock
from models.encoder import Encoder
from models.mae import MAEConfig, MaskedAutoencoder, build_mae
from models.masking import seeded_noise
from models.patches import patchify, unpatchify
from models.plain import plain_forward
from models.position import sincos_2d

SHAPES = [
    {},
    {"norm_pix_loss": False},
    {"img_size": (32, 64), "in_chans": 1, "mask_ratio": 0.5},
    {"in_chans": 5, "pos_embed": "learned", "decoder_depth": 1},
]


def inputs(config: MAEConfig, model: MaskedAutoencoder, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, config.in_chans, *config.img_size), torch.rand(batch, model.encoder.num_patches)


@pytest.mark.parametrize("changes", SHAPES)
def test_fast_path_equals_plain_path_in_loss_and_every_gradient(tiny_config: MAEConfig, changes: dict) -> None:
    config = dataclasses.replace(tiny_config, **changes)
    model = build_mae(config)
    images, noise = inputs(config, model)
    fast = model(images, noise)
    fast.loss.backward()
    fast_gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    plain = plain_forward(model, images, noise)
    plain.loss.backward()

    torch.testing.assert_close(fast.loss, plain.loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(fast.latent, plain.latent, atol=1e-5, rtol=0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            torch.testing.assert_close(fast_gradients[name], parameter.grad, atol=1e-6, rtol=0, msg=name)
        else:
            assert fast_gradients[name] is None, name


def test_bfloat16_fast_path_stays_near_float32(tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder) -> None:
    images, noise = inputs(tiny_config, tiny_mae)
    exact = tiny_mae(images, noise)
    with torch.autocast("cpu", torch.bfloat16):
        rough = tiny_mae(images, noise)
    assert rough.pred.dtype == torch.bfloat16  # the matrix products are 16-bit
    assert rough.latent.dtype == rough.loss.dtype == torch.float32  # the residual stream and the loss are not
    torch.testing.assert_close(rough.loss, exact.loss, atol=0.02, rtol=0)


def test_loss_ignores_predictions_of_visible_patches(tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder) -> None:
    """In the plain formulation, where they exist: their gradient is exactly zero."""
    images, noise = inputs(tiny_config, tiny_mae)
    seen = {}
    tiny_mae.decoder.decoder_pred.register_forward_hook(lambda _m, _i, out: seen.update(pred=out) or out.retain_grad())
    output = plain_forward(tiny_mae, images, noise)
    output.loss.backward()
    gradient = seen["pred"].grad[:, 1:]
    assert torch.equal(gradient.abs().sum(-1) == 0, ~output.is_hidden)


def test_target_uses_the_unbiased_variance(tiny_mae: MaskedAutoencoder) -> None:
    patches = torch.randn(2, 3, 192)
    target = tiny_mae.make_target(patches)
    expected = (patches - patches.mean(-1, keepdim=True)) / (patches.std(-1, correction=1, keepdim=True) ** 2 + 1e-6).sqrt()
    torch.testing.assert_close(target, expected)
    assert not torch.allclose(target.std(-1, correction=0), torch.ones(2, 3), atol=1e-3)


def test_baseline_loss_is_the_loss_of_predicting_the_mean_hidden_patch(
    tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder
) -> None:
    images, noise = inputs(tiny_config, tiny_mae)
    output = tiny_mae(images, noise)
    guess = output.target.mean(dim=1, keepdim=True)
    torch.testing.assert_close(output.baseline_loss, (output.target - guess).square().mean())


def test_forward_features_never_masks_and_agrees_with_encoding_all_patches(
    tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder
) -> None:
    images, _ = inputs(tiny_config, tiny_mae)
    encoder = tiny_mae.encoder.train()
    features = encoder.forward_features(images)
    assert features.shape == (3, 1 + 16, 32)
    assert torch.equal(features, encoder.forward_features(images))
    everything = torch.arange(16).expand(3, -1)
    torch.testing.assert_close(encoder.encode_patches(encoder.patchify(images), everything), features)


def test_reconstruct_keeps_visible_patches_and_replaces_hidden_ones(
    tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder
) -> None:
    images, noise = inputs(tiny_config, tiny_mae)
    restored, hidden = tiny_mae.reconstruct(images, noise)
    before, after = patchify(images, 8), patchify(restored, 8)
    assert torch.equal(before[~hidden], after[~hidden])
    assert (before[hidden] != after[hidden]).any(dim=-1).all()
    # norm_pix_loss: the true mean and spread of a patch are put into the picture.
    pred = tiny_mae(images, noise).pred
    scaled = (pred.std() * before[hidden].std()).item()
    assert after[hidden].std().item() == pytest.approx(scaled, rel=0.5)


def test_every_parameter_is_initialised(tiny_config: MAEConfig) -> None:
    """Build without memory, fill with NaN, initialise: what is left out shows."""
    with torch.device("meta"):
        model = build_mae(tiny_config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    model.encoder.init_weights()
    model.decoder.init_weights()
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), name


def test_initialisation_follows_the_original(tiny_config: MAEConfig) -> None:
    torch.manual_seed(0)
    model = build_mae(dataclasses.replace(tiny_config, embed_dim=256, num_heads=4))
    encoder = model.encoder
    assert torch.equal(encoder.pos_embed[0], sincos_2d(256, (4, 4), 1).float())
    assert not encoder.pos_embed.requires_grad
    assert not model.decoder.decoder_pos_embed.requires_grad
    assert encoder.cls_token.std().item() == pytest.approx(0.02, rel=0.2)
    parameters = dict(encoder.named_parameters())
    for weight in (parameters["patch_embed.proj.weight"].flatten(1), parameters["blocks.0.mlp.fc1.weight"]):
        bound = (6 / sum(weight.shape)) ** 0.5
        assert weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-6
        if isinstance(module, nn.Linear):
            assert module.bias.abs().max() == 0


def test_only_vectors_escape_weight_decay_in_pretraining(tiny_mae: MaskedAutoencoder) -> None:
    exempt = tiny_mae.no_weight_decay()
    for name, parameter in tiny_mae.named_parameters():
        assert (name in exempt) == (parameter.ndim == 1), name
    assert not {"encoder.cls_token", "decoder.mask_token"} & exempt


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 7}, "patch sizes that do: 2, 4, 8, 16, 32"),
        ({"embed_dim": 30}, "not a multiple of num_heads 4"),
        ({"embed_dim": 36, "num_heads": 6, "depth": 0}, "depth must be at least 1"),
        ({"mask_ratio": 1.2}, "between 0 and 1"),
        ({"decoder_embed_dim": 18}, "decoder_num_heads"),
        ({"embed_dim": 34, "num_heads": 2}, "multiple of 4"),
        ({"in_chans": 0}, "in_chans must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiny_config: MAEConfig, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_mae(dataclasses.replace(tiny_config, **changes))


def test_images_of_another_size_are_refused(tiny_mae: MaskedAutoencoder) -> None:
    with pytest.raises(ValueError, match=r"\(3, 32, 32\), not \(3, 32, 40\)"):
        tiny_mae(torch.zeros(1, 3, 32, 40), torch.rand(1, 16))


def test_patchify_keeps_rows_columns_and_channels_in_place() -> None:
    images = torch.arange(2 * 5 * 4 * 6).view(2, 5, 4, 6)
    patches = patchify(images, 2)
    assert patches.shape == (2, 6, 20)
    # Patch 4 is row 1, column 1; its first numbers are the five channels of its top left pixel.
    assert torch.equal(patches[1, 4, :5], images[1, :, 2, 2])
    assert torch.equal(unpatchify(patches, 2, (2, 3)), images)
    with pytest.raises(ValueError, match="4x6 px"):
        patchify(images, 4)


def test_position_table_of_a_wide_grid_has_columns_first() -> None:
    table = sincos_2d(8, (2, 3))
    assert table.shape == (6, 8)
    same_column, same_row = (table[1], table[4]), (table[3], table[5])
    assert torch.equal(same_column[0][:4], same_column[1][:4])
    assert not torch.equal(same_column[0][4:], same_column[1][4:])
    assert torch.equal(same_row[0][4:], same_row[1][4:])


def test_attention_for_the_last_tokens_equals_the_end_of_full_attention() -> None:
    torch.manual_seed(0)
    block = DecoderBlock(32, 4, qkv_bias=True, attn_layer=Attention)
    tokens = torch.randn(2, 11, 32)
    torch.testing.assert_close(block.forward_last(tokens, 5), block(tokens)[:, -5:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_attention_kernels_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(2, 3, length, 16, dtype=dtype, requires_grad=True) for length in (7, 9, 9))
    results = []
    for plain in (True, False):
        monkeypatch.setattr("models.attention.prefers_plain_attention", lambda *_, choice=plain: choice)
        out = attend(queries, keys, values)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [queries, keys, values])])
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def test_attention_kernel_is_chosen_by_device_dtype_and_length() -> None:
    assert prefers_plain_attention("cpu", torch.bfloat16, 65)
    assert not prefers_plain_attention("cpu", torch.float32, 65)
    assert not prefers_plain_attention("cpu", torch.bfloat16, 4096)
    assert not prefers_plain_attention("cuda", torch.bfloat16, 65)


def test_masks_of_an_image_do_not_depend_on_its_batch(tiny_config: MAEConfig, tiny_mae: MaskedAutoencoder) -> None:
    images, _ = inputs(tiny_config, tiny_mae, batch=4)
    seeds = torch.tensor([11, 12, 13, 14])
    whole = tiny_mae(images, seeded_noise(seeds, 16))
    part = tiny_mae(images[2:], seeded_noise(seeds[2:], 16))
    assert torch.equal(whole.ids_keep[2:], part.ids_keep)
    torch.testing.assert_close(whole.pred[2:], part.pred, atol=1e-6, rtol=0)


def test_stochastic_depth_is_accepted_for_fine_tuning() -> None:
    encoder = Encoder(img_size=(16, 16), patch_size=8, embed_dim=16, depth=2, num_heads=2, drop_path_rate=0.5)
    images = torch.randn(8, 3, 16, 16)
    assert not torch.equal(encoder.train().forward_features(images), encoder.forward_features(images))
    assert torch.equal(encoder.eval().forward_features(images), encoder.forward_features(images))


def fused_in_blocks(vit: VisionTransformer) -> list[bool]:
    return [module.fused_attn for module in vit.modules() if isinstance(module, timm.layers.attention.Attention)]


def test_a_timm_vit_attends_by_the_faster_way_and_to_the_same_result() -> None:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5).eval()
    images = torch.randn(2, 3, 32, 32)
    choose_attention(vit, "cpu", torch.float32)
    assert fused_in_blocks(vit) == [True, True]
    fused = vit(images)
    choose_attention(vit, "cpu", torch.bfloat16)
    assert fused_in_blocks(vit) == [False, False]
    torch.testing.assert_close(vit(images), fused, atol=1e-5, rtol=1e-5)
    choose_attention(vit, "cuda", torch.bfloat16)
    assert fused_in_blocks(vit) == [True, True]

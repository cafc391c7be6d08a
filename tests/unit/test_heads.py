"""Heads on encoders: what is trained, what is exported, what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.deit import VisionTransformerDistilled
from torch import nn

from data.transforms import Normalization
from models.formats import PretrainedEncoder, load_encoder
from models.heads import ClassifierConfig, Pooling, build_classifier, classifier_arguments, export_state, load_classifier
from models.mae import MAEConfig, build_mae
from models.position import sincos_2d
from pretrain.report import export_encoder

NUM_CLASSES = 7


@pytest.fixture
def encoder(tiny_config: MAEConfig, tmp_path: Path) -> PretrainedEncoder:
    torch.manual_seed(1)
    folder = tmp_path / "run"
    folder.mkdir()
    export_encoder(folder, build_mae(tiny_config), tiny_config, Normalization((0.5,) * 3, (0.25,) * 3))
    return load_encoder(str(folder))


def images(count: int = 6, size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(2))


CONFIGS = {
    "cls": ClassifierConfig(head_init_std=0.5),
    "mean": ClassifierConfig(pooling="mean", head_init_std=0.5),
    "attentive": ClassifierConfig(pooling="attentive", head_init_std=0.5),
    "batchnorm": ClassifierConfig(batchnorm=True, frozen=True, head_init_std=0.5),
    "size": ClassifierConfig(img_size=(48, 24), head_init_std=0.5),
}


@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_exported_classifier_is_one_of_timms_and_gives_the_same_logits(
    encoder: PretrainedEncoder, name: str, distilled: bool
) -> None:
    config = CONFIGS[name]
    if distilled and name in ("mean", "attentive", "batchnorm"):
        with pytest.raises(ValueError, match=r"distillation needs model\.pooling cls"):
            build_classifier(encoder, config, NUM_CLASSES, distilled=True)
        return
    classifier = build_classifier(encoder, config, NUM_CLASSES, distilled)
    inputs = images(size=config.img_size or (32, 32))
    if isinstance(classifier.vit.fc_norm, nn.BatchNorm1d):
        classifier.train()
        classifier(inputs * 2 + 1)  # statistics of its own
        assert classifier.vit.fc_norm.running_mean is not None
        assert classifier.vit.fc_norm.running_mean.abs().max() > 0.01
    classifier.eval()
    timm_name, arguments = classifier_arguments(encoder, config, NUM_CLASSES, distilled)
    twin = timm.create_model(timm_name, **json.loads(json.dumps(arguments))).eval()
    twin.load_state_dict(export_state(classifier), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(twin(inputs), classifier(inputs), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean", "attentive"])
def test_a_frozen_encoder_learns_nothing_and_stays_in_evaluation_mode(encoder: PretrainedEncoder, pooling: Pooling) -> None:
    config = ClassifierConfig(pooling=pooling, frozen=True, drop_path_rate=0.9, head_init_std=0.1)
    classifier = build_classifier(encoder, config, NUM_CLASSES).train()
    trained = {name for name, parameter in classifier.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(name.startswith(("vit.head.", "vit.fc_norm.", "vit.attn_pool.")) for name in trained)
    assert classifier.vit.head.training
    assert not any(block.training for block in classifier.vit.blocks)
    logits = classifier(images())
    assert torch.equal(logits, classifier(images()))  # no drop path
    logits.sum().backward()
    with_gradient = {name for name, parameter in classifier.named_parameters() if parameter.grad is not None}
    assert with_gradient == trained


def test_fine_tuning_trains_everything_and_the_position_table_if_wanted(encoder: PretrainedEncoder) -> None:
    classifier = build_classifier(encoder, ClassifierConfig(), NUM_CLASSES)
    assert all(parameter.requires_grad for parameter in classifier.parameters())
    fixed = build_classifier(encoder, ClassifierConfig(train_pos_embed=False), NUM_CLASSES)
    assert [name for name, parameter in fixed.named_parameters() if not parameter.requires_grad] == ["vit.pos_embed"]


def test_drop_path_grows_with_depth(encoder: PretrainedEncoder) -> None:
    blocks = build_classifier(encoder, ClassifierConfig(drop_path_rate=0.4), NUM_CLASSES).vit.blocks
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks]
    assert rates == pytest.approx([0.0, 0.4])


def test_every_weight_comes_from_the_encoder(encoder: PretrainedEncoder) -> None:
    classifier = build_classifier(encoder, ClassifierConfig(), NUM_CLASSES)
    theirs = encoder.model.state_dict()
    for name, tensor in classifier.vit.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(tensor, theirs[name]), name
    assert isinstance(classifier.vit.head, nn.Linear)
    assert classifier.vit.head.weight.std() < 1e-4
    assert not classifier.vit.head.bias.any()


def test_from_scratch_takes_the_architecture_alone(encoder: PretrainedEncoder) -> None:
    classifier = build_classifier(encoder, ClassifierConfig(patch_size=4), NUM_CLASSES, from_scratch=True)
    assert classifier.vit.patch_embed.grid_size == (8, 8)
    assert classifier.vit.pos_embed is not None
    torch.testing.assert_close(classifier.vit.pos_embed[0].detach(), sincos_2d(32, (8, 8), 1).float())
    theirs, ours = encoder.model.state_dict(), classifier.vit.state_dict()
    assert not torch.equal(ours["blocks.0.attn.qkv.weight"], theirs["blocks.0.attn.qkv.weight"])


def test_a_distilled_classifier_has_a_second_token(encoder: PretrainedEncoder) -> None:
    classifier = build_classifier(encoder, ClassifierConfig(head_init_std=0.5), NUM_CLASSES, distilled=True)
    assert isinstance(classifier.vit, VisionTransformerDistilled)
    assert classifier.vit.pos_embed.shape == (1, 2 + 16, 32)
    first, second = classifier.train()(images())
    assert first.shape == second.shape == (6, NUM_CLASSES)
    assert not torch.equal(first, second)
    assert classifier.eval()(images()).shape == (6, NUM_CLASSES)
    assert "vit.dist_token" in classifier.no_weight_decay()
    assert classifier.layer_ids()["vit.dist_token"] == 0
    assert classifier.layer_ids()["vit.head_dist.weight"] == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ClassifierConfig(patch_size=4), "only from scratch"),
        (ClassifierConfig(img_size=(36, 32)), r"36 x 32 is not a multiple of the encoder's patches of 8 px"),
        (ClassifierConfig(pooling="mean", batchnorm=True), "mean pooling has a norm of its own"),
    ],
)
def test_settings_that_do_not_fit_are_refused(encoder: PretrainedEncoder, config: ClassifierConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_classifier(encoder, config, NUM_CLASSES)


def test_an_encoder_without_the_needed_weights_is_refused(encoder: PretrainedEncoder) -> None:
    def create(**changes: Any) -> Any:
        return timm.create_model(encoder.timm_name, **(encoder.timm_arguments | changes))

    pooled = create(global_pool="avg")  # no norm after the last block
    with pytest.raises(ValueError, match=r"set model\.pooling mean"):
        build_classifier(encoder._replace(model=pooled), ClassifierConfig(), NUM_CLASSES)
    assert build_classifier(encoder._replace(model=pooled), ClassifierConfig(pooling="mean"), NUM_CLASSES)
    shallow = create(depth=1)
    with pytest.raises(ValueError, match=r"lacks blocks\.1\.norm1\.weight"):
        build_classifier(encoder._replace(model=shallow), ClassifierConfig(), NUM_CLASSES)
    parallel = timm.create_model("vit_base_patch16_xp_224", img_size=32, depth=1)
    with pytest.raises(ValueError, match="choose a plain ViT"):
        build_classifier(encoder._replace(model=cast(Any, parallel)), ClassifierConfig(), NUM_CLASSES)
    tokenless = create(class_token=False, global_pool="avg")
    with pytest.raises(ValueError, match="no CLS token"):
        build_classifier(encoder._replace(model=tokenless), ClassifierConfig(), NUM_CLASSES)
    with pytest.raises(ValueError, match="at least 2 classes, not 1"):
        build_classifier(encoder, ClassifierConfig(), 1)


def test_files_of_classifiers(encoder: PretrainedEncoder, tmp_path: Path) -> None:
    config = ClassifierConfig(head_init_std=0.5)
    classifier = build_classifier(encoder, config, 2).eval()
    name, arguments = classifier_arguments(encoder, config, 2, distilled=False)
    record = {
        "timm_model": name, "timm_arguments": arguments, "mean": [0.5] * 3, "std": [0.25] * 3, "norm_eps": None,
        "eval_crop_pct": 0.9, "class_names": ["cat", "dog"],
    }  # fmt: skip
    state = export_state(classifier)
    path = tmp_path / "classifier.safetensors"
    save_file(state, path, metadata={"classifier": json.dumps(record)})
    loaded = load_classifier(str(tmp_path))
    assert (loaded.class_names, loaded.eval_crop_pct, loaded.img_size, loaded.in_chans) == (("cat", "dog"), 0.9, (32, 32), 3)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images()), classifier(images()))
        headless = load_encoder(str(path))  # a fine-tuned encoder is an encoder
        torch.testing.assert_close(headless.model.forward_features(images()), classifier.vit.forward_features(images()))
    save_file(
        {**state, "head.weight": state["head.weight"][:1].contiguous()}, path, metadata={"classifier": json.dumps(record)}
    )
    with pytest.raises(ValueError, match=r"its weights do not fit.*head\.weight"):
        load_classifier(str(tmp_path))
    save_file(state, path)
    with pytest.raises(ValueError, match="no classifier that this project exported"):
        load_classifier(str(path))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="may be cut off"):
        load_classifier(str(path))
    with pytest.raises(ValueError, match="a fine-tuning run writes it"):
        load_classifier(str(tmp_path / "nowhere"))


def test_norm_epsilon_of_other_projects_is_kept(encoder: PretrainedEncoder) -> None:
    classifier = build_classifier(encoder._replace(norm_eps=1e-3), ClassifierConfig(pooling="mean"), NUM_CLASSES)
    assert {module.eps for module in classifier.modules() if isinstance(module, nn.LayerNorm)} == {1e-3}


def test_config_ranges() -> None:
    for wrong in ({"drop_path_rate": 1.0}, {"head_init_std": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dataclasses.replace(ClassifierConfig(), **wrong)

"""Classifiers: a pretrained encoder with a softmax head, as timm's own ViT classifiers.

Whatever the head, the whole is one of timm's models under timm's names: an exported classifier loads in `timm.create_model`.

Shapes: B batch, C channels, H W pixels, D encoder width, N patches.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import timm
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from models.attention import Attention
from models.encoder import init_vit, layer_ids, vector_parameters
from models.formats import PretrainedEncoder, read_export, set_norm_eps
from models.position import resize_position_table

Pooling = Literal["cls", "mean", "attentive"]
TIMM_POOLING: dict[Pooling, str] = {"cls": "token", "mean": "avg", "attentive": "map"}
DISTILLED_TIMM_NAME = "deit_base_distilled_patch16_224"
"""The timm model with a distillation token; its sizes are given as arguments."""

CLASSIFIER_NAME = "classifier.safetensors"

_NEW_IN_HEAD = ("head.", "head_dist.", "fc_norm.", "attn_pool.", "dist_token")
"""What a classifier may hold beyond its encoder."""
_LEFT_BEHIND = ("head.", "fc_norm.", "norm.", "attn_pool.")
"""What of an encoder a classifier may have no use for: mean pooling has a norm of its own after the mean."""


@dataclass(frozen=True)
class ClassifierConfig:
    """The head on the encoder, and what of the encoder is trained."""

    pooling: Pooling = "cls"
    """What the softmax head reads. cls: the CLS token after the final norm; mean: the mean of the patch tokens, with a norm of
    its own in place of the final norm; attentive: what an attention layer with one learned query gathers from all tokens."""
    img_size: tuple[int, int] | None = None
    """Height and width of the input in pixels (None: the encoder's). The position table is interpolated to another size."""
    patch_size: int | None = None
    """Edge of a patch in pixels; only from scratch (None: the encoder's)."""
    drop_path_rate: float = 0.1
    """Stochastic depth of the last block, growing linearly from 0, in [0, 1)."""
    train_pos_embed: bool = True
    """Train the position table, as the original does in fine-tuning."""
    frozen: bool = False
    """Train the head alone: a probe. The encoder is in evaluation mode."""
    batchnorm: bool = False
    """Standardise the pooled feature by a BatchNorm without affine parameters, as the paper's linear probe does."""
    head_init_std: float = 2e-5
    """Standard deviation of the head's initial weights (the original: 2e-5 fine-tuning, 0.01 linear probe)."""
    grad_checkpointing: bool = False
    """Compute the blocks' activations anew in the backward pass: less memory, about a third more time."""

    def __post_init__(self) -> None:
        if not 0 <= self.drop_path_rate < 1:
            raise ValueError(f"model.drop_path_rate must lie in [0, 1), not {self.drop_path_rate}")
        if self.head_init_std < 0:
            raise ValueError(f"model.head_init_std must be at least 0, not {self.head_init_std}")


class TrainedClassifier(NamedTuple):
    """A classifier from a file, and what its input and its answers mean."""

    model: VisionTransformer
    """timm's, in eval mode."""
    img_size: tuple[int, int]
    """(H, W) in pixels."""
    in_chans: int
    mean: tuple[float, ...]
    """Per channel, in units of the 0..1 range."""
    std: tuple[float, ...]
    """Per channel, in the same units."""
    class_names: tuple[str, ...]
    """Name of class 0, 1, ...; empty where the training data had none."""
    eval_crop_pct: float
    """Share of the resized image that the model looks at, in (0, 1]."""


class Classifier(nn.Module):
    """A timm ViT with a head, and what training must know of its parameters.

    Args:
        vit: with a classifier head.
        frozen: train the head alone.
    """

    def __init__(self, vit: VisionTransformer, frozen: bool = False) -> None:
        super().__init__()
        self.vit = vit
        self.frozen = frozen
        if frozen:
            head = {name for name, _ in vit.named_parameters() if name.startswith(_NEW_IN_HEAD)}
            for name, parameter in vit.named_parameters():
                parameter.requires_grad_(name in head)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """(B, C, H, W) normalised -> logits (B, classes); a distilled model in training gives those of both its tokens."""
        if not self.frozen:
            return self.vit(images)
        with torch.no_grad():
            tokens = self.vit.forward_features(images)
        return self.vit.forward_head(tokens)

    def train(self, mode: bool = True) -> "Classifier":
        """Sets the mode of what is trained; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.frozen:
            self.vit.eval()
            for part in (self.vit.fc_norm, self.vit.attn_pool, self.vit.head_drop, self.vit.head):
                if part is not None:
                    part.train(mode)
        return self

    @property
    def is_distilled(self) -> bool:
        """Whether the model has a distillation token."""
        return isinstance(self.vit, VisionTransformerDistilled)

    def layer_ids(self) -> dict[str, int]:
        """Says which layer each parameter belongs to, for layer-wise learning rates; see `models.encoder.layer_ids`."""
        return {f"vit.{name}": layer for name, layer in layer_ids(self.vit).items()}

    def no_weight_decay(self) -> set[str]:
        """Names the parameters that take none: vectors, position table, CLS, register and distillation tokens.

        Source: facebookresearch/mae util/lr_decay.py.
        """
        tokens = {"pos_embed", "cls_token", "reg_token", "dist_token"}
        return {f"vit.{name}" for name, _ in self.vit.named_parameters() if name in tokens} | vector_parameters(self)


def classifier_arguments(
    encoder: PretrainedEncoder, config: ClassifierConfig, num_classes: int, distilled: bool
) -> tuple[str, dict[str, Any]]:
    """Name and keyword arguments with which `timm.create_model` builds the exported classifier.

    Raises:
        ValueError: settings that do not fit each other or the encoder.
    """
    arguments = dict(encoder.timm_arguments)
    arguments |= {"num_classes": num_classes, "global_pool": TIMM_POOLING[config.pooling]}
    if config.img_size is not None:
        arguments["img_size"] = list(config.img_size)
    if config.patch_size is not None:
        arguments["patch_size"] = config.patch_size
    if not distilled:
        return encoder.timm_name, arguments
    if config.pooling != "cls" or config.frozen or config.batchnorm:
        raise ValueError("distillation needs model.pooling cls, and neither model.frozen nor model.batchnorm")
    vit = encoder.model
    mlp_ratio = vit.blocks[0].mlp.fc1.out_features / vit.embed_dim  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]
    sizes = {
        "patch_size": arguments.get("patch_size", vit.patch_embed.patch_size[0]),
        "embed_dim": vit.embed_dim,
        "depth": len(vit.blocks),
        "num_heads": vit.blocks[0].attn.num_heads,  # pyright: ignore[reportAttributeAccessIssue]
        "mlp_ratio": mlp_ratio,
    }
    return DISTILLED_TIMM_NAME, arguments | sizes


def build_classifier(
    encoder: PretrainedEncoder, config: ClassifierConfig, num_classes: int, distilled: bool = False, from_scratch: bool = False
) -> Classifier:
    """Puts a head on an encoder; every weight of the encoder that the classifier uses is there, or the building fails.

    Args:
        encoder: pretrained; of it only the architecture is used when training starts from scratch.
        config: of the head.
        num_classes: at least 2.
        distilled: add a distillation token with a head of its own (DeiT).
        from_scratch: initialise every weight anew, as the start of pretraining does, with a trainable position table.

    Raises:
        ValueError: settings that do not fit each other or the encoder.
    """
    if num_classes < 2:
        raise ValueError(f"a classifier needs at least 2 classes, not {num_classes}")
    if config.patch_size is not None and not from_scratch:
        raise ValueError(
            f"model.patch_size {config.patch_size}: only from scratch, the encoder's weights are for its own patches"
        )
    if not hasattr(encoder.model.blocks[0], "attn") or isinstance(encoder.model, VisionTransformerDistilled):
        kind = type(encoder.model).__name__
        raise ValueError(
            f"the encoder {encoder.timm_name} ({kind}) has parallel blocks or a distillation token: choose a plain ViT"
        )
    name, arguments = classifier_arguments(encoder, config, num_classes, distilled)
    _check_size(encoder, arguments)
    if config.pooling == "cls" and not encoder.model.has_class_token:
        raise ValueError("the encoder has no CLS token: set model.pooling mean or attentive")
    vit = timm.create_model(
        name, **arguments, drop_path_rate=config.drop_path_rate, attn_layer=type(encoder.model.blocks[0].attn)
    )
    assert isinstance(vit, VisionTransformer)
    set_norm_eps(vit, encoder.norm_eps)
    if from_scratch:
        init_vit(vit, "sincos_2d" if vit.embed_dim % 4 == 0 else "learned")
    else:
        _take_weights(vit, encoder.model)
    for head in [vit.head, *([vit.head_dist] if isinstance(vit, VisionTransformerDistilled) else [])]:
        assert isinstance(head, nn.Linear)
        nn.init.trunc_normal_(head.weight, std=config.head_init_std)
        nn.init.zeros_(head.bias)
    if isinstance(vit, VisionTransformerDistilled):
        vit.set_distilled_training(True)
    if config.batchnorm:
        if config.pooling == "mean":
            raise ValueError("model.batchnorm goes with model.pooling cls or attentive: mean pooling has a norm of its own")
        vit.fc_norm = nn.BatchNorm1d(vit.embed_dim, affine=False, eps=1e-6)
    if vit.pos_embed is not None:
        vit.pos_embed.requires_grad_(config.train_pos_embed)
    vit.set_grad_checkpointing(config.grad_checkpointing)
    return Classifier(vit, config.frozen)


def export_state(classifier: Classifier) -> dict[str, Tensor]:
    """The weights under timm's names, contiguous on the CPU.

    A BatchNorm before the head is folded into it, so that the exported model is one of timm's.
    """
    vit = classifier.vit
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in vit.state_dict().items()}
    if isinstance(vit.fc_norm, nn.BatchNorm1d):
        statistics = {name: state.pop(f"fc_norm.{name}") for name in ("running_mean", "running_var", "num_batches_tracked")}
        scale = (statistics["running_var"] + vit.fc_norm.eps).rsqrt()  # (D,)
        weight = state["head.weight"] * scale
        state["head.bias"] = state["head.bias"] - weight @ statistics["running_mean"]
        state["head.weight"] = weight.contiguous()
    return state


def load_classifier(source: str) -> TrainedClassifier:
    """Loads what a fine-tuning run exported; every weight of it comes from the file.

    Args:
        source: a fine-tuned run folder, or a classifier.safetensors.

    Raises:
        ValueError: there is no such file, or its weights do not fit its description.
    """
    path = Path(source)
    path = path / CLASSIFIER_NAME if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"classifier {source}: there is no {path.name if path.name else source}; a fine-tuning run writes it")
    _, record, state = read_export(path, "classifier")
    model = timm.create_model(record["timm_model"], **record["timm_arguments"], attn_layer=Attention)
    set_norm_eps(model, record.get("norm_eps"))
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ValueError(f"classifier {path}: its weights do not fit: {' '.join(str(error).split())[:400]}") from error
    assert isinstance(model, VisionTransformer)
    height, width = record["timm_arguments"]["img_size"]
    return TrainedClassifier(
        model.eval(), (height, width), record["timm_arguments"]["in_chans"], tuple(record["mean"]), tuple(record["std"]),
        tuple(record["class_names"]), record["eval_crop_pct"],
    )  # fmt: skip


def _check_size(encoder: PretrainedEncoder, arguments: dict[str, Any]) -> None:
    height, width = arguments["img_size"]
    patch = arguments.get("patch_size", encoder.model.patch_embed.patch_size[0])
    if height % patch or width % patch:
        raise ValueError(f"model.img_size {height} x {width} is not a multiple of the encoder's patches of {patch} px")


@torch.no_grad()
def _take_weights(vit: VisionTransformer, source: VisionTransformer) -> None:
    state = dict(source.state_dict())
    if "pos_embed" in state:
        state["pos_embed"] = _fitted_table(vit, source, state["pos_embed"])
    outcome = vit.load_state_dict(state, strict=False)
    missing = [name for name in outcome.missing_keys if not name.startswith(_NEW_IN_HEAD)]
    unexpected = [name for name in outcome.unexpected_keys if not name.startswith(_LEFT_BEHIND)]
    if any(name.startswith("norm.") for name in missing):
        raise ValueError(
            "the encoder has no norm after its last block (it was trained with mean pooling): set model.pooling mean"
        )
    if missing or unexpected:
        lacking = f"lacks {', '.join(missing[:5])}" if missing else f"has no use for {', '.join(unexpected[:5])}"
        raise ValueError(f"the encoder's weights do not fit the classifier, which {lacking}")


def _fitted_table(vit: VisionTransformer, source: VisionTransformer, table: Tensor) -> Tensor:
    """The source's position table for the classifier's grid, with a row for the distillation token where there is one."""
    old_grid, new_grid = source.patch_embed.grid_size, vit.patch_embed.grid_size
    num_prefix = table.shape[1] - old_grid[0] * old_grid[1]
    table = resize_position_table(table, old_grid, new_grid, num_prefix)
    if isinstance(vit, VisionTransformerDistilled) and num_prefix:
        table = torch.cat([table[:, :1], table], dim=1)  # it starts where the CLS token stands
    return table

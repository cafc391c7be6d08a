"""Learning from a teacher by a distillation token.

Shapes: B batch, C channels, H W pixels.
"""

import pickle
from collections.abc import Sequence
from typing import NamedTuple

import timm
import torch
from safetensors import SafetensorError
from timm.data.config import resolve_model_data_config
from torch import Tensor, nn
from torch.nn import functional as F

from data.transforms import Normalization
from finetune.config import DistillConfig
from models.heads import load_classifier
from training.cli import UserError


class Teacher(NamedTuple):
    """A frozen classifier, and what its input must be."""

    model: nn.Module
    img_size: tuple[int, int]
    """(H, W) in pixels."""
    normalization: Normalization

    @torch.no_grad()
    def logits(self, images: Tensor, normalization: Normalization) -> Tensor:
        """Asks the teacher about the student's very images, mixed and erased as they are.

        Args:
            images: (B, C, H, W), normalised for the student.
            normalization: the student's.
        """
        if self.normalization != normalization:
            images = normalization.to(self.normalization, images)
        if tuple(images.shape[-2:]) != self.img_size:
            images = F.interpolate(images, size=self.img_size, mode="bicubic", antialias=True)
        return self.model(images)


def load_teacher(config: DistillConfig, class_names: Sequence[str], num_classes: int, num_channels: int) -> Teacher:
    """Loads the teacher that a config names.

    Raises:
        UserError: nothing like that is found, or it tells other classes apart or takes other images.
    """
    name = config.teacher
    if timm.is_model(name):
        teacher = _timm_teacher(name, config.teacher_weights, num_classes)
    else:
        try:
            ours = load_classifier(name)
        except ValueError as error:
            raise UserError(f"distill.teacher: {error}, and timm has no model of this name") from error
        teacher = Teacher(ours.model, ours.img_size, Normalization(ours.mean, ours.std))
        if class_names and ours.class_names and tuple(class_names) != ours.class_names:
            raise UserError(f"distill.teacher {name}: has the classes {_some(ours.class_names)}, the data {_some(class_names)}")
        if ours.model.num_classes != num_classes:
            raise UserError(f"distill.teacher {name}: tells {ours.model.num_classes} classes apart, the data has {num_classes}")
    if len(teacher.normalization.mean) != num_channels:
        raise UserError(
            f"distill.teacher {name}: takes images of {len(teacher.normalization.mean)} channels, the encoder {num_channels}"
        )
    teacher.model.requires_grad_(False).eval()
    return teacher


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _timm_teacher(name: str, weights: str, num_classes: int) -> Teacher:
    try:
        if weights:
            model = timm.create_model(name, num_classes=num_classes, checkpoint_path=weights)
        else:
            model = timm.create_model(name, pretrained=True)
    except (RuntimeError, OSError, KeyError, SafetensorError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"distill.teacher {name}: its weights cannot be had or do not fit ({reason})") from error
    if model.num_classes != num_classes:
        raise UserError(
            f"distill.teacher {name}: tells {model.num_classes} classes apart, the data has {num_classes}; fine-tune it first, "
            "and give its weights with --distill.teacher_weights"
        )
    config = resolve_model_data_config(model)
    _, height, width = config["input_size"]
    return Teacher(model, (height, width), Normalization(tuple(config["mean"]), tuple(config["std"])))


def distillation_loss(student: Tensor, teacher: Tensor, config: DistillConfig) -> Tensor:
    """The teacher's loss on the distillation token's logits.

    Args:
        student: (B, classes), of the distillation token.
        teacher: (B, classes).
        config: hard: cross-entropy with the teacher's answer; soft: Kullback-Leibler divergence of the softened probabilities,
            times the temperature squared, the mean over the batch.

    Source: Touvron et al. 2021, "Training data-efficient image transformers & distillation through attention", section 4
    (equations 2 and 3). facebookresearch/deit divides the soft loss by the number of classes too; the equation does not.
    """
    if config.kind == "hard":
        return F.cross_entropy(student, teacher.argmax(dim=1))
    temperature = config.temperature
    return (
        F.kl_div(
            F.log_softmax(student / temperature, dim=1),
            F.log_softmax(teacher / temperature, dim=1),
            reduction="batchmean",
            log_target=True,
        )
        * temperature**2
    )

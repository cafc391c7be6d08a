"""The configuration of a fine-tuning run."""

import math
from dataclasses import dataclass, field
from typing import Literal

from data.config import DataConfig
from models.heads import ClassifierConfig
from training.batches import check_global_batch
from training.optim import OptimConfig
from training.run import RunConfig

MAY_CHANGE_ON_RESUME = (
    "resume",
    "output_dir",
    "encoder",  # the folder may have moved: the weights come from the checkpoint
    "distill.teacher",  # as the encoder's
    "run.device",
    "run.compile",
    "run.cpu_threads",
    "run.log_every_steps",
    "run.picture_every_steps",
    "run.save_every_steps",
    "run.save_every_minutes",
    "run.timeout_minutes",
    "run.keep_checkpoints",
    "run.milestone_every_epochs",
    "data.train",  # the folders may have moved: that they hold the same data is checked by the manifests' hashes
    "data.val",
    "data.num_workers",
    "data.prefetch_batches",
    "data.cache_dir",
    "data.cache_gib",
    "data.read_timeout_s",
    "data.allow_pipe",
    "data.max_bad_share",
    "data.eval_batch_size",
    "global_batch_size",  # must stay the same, and is checked
)
"""Settings that may differ when a run is continued: none changes what is learnt."""

CHANGES_THE_RUN = ("optim.base_lr", "optim.clip_grad_norm", "run.dtype", "epochs", "num_steps")
"""Settings that may be changed too, to save a run that has become unstable or to train longer; it then says so."""


@dataclass(frozen=True)
class LabelledDataConfig(DataConfig):
    """Where the labelled images come from and how they are read."""

    train: str = ""
    """Labelled images to learn from: a folder of shards, a folder of class folders, a CSV table with the columns path and
    label, or "digits-train"."""
    val: str = ""
    """Labelled images to measure on, in the same forms (empty: `held_out` of the training images)."""
    held_out: float = 0.1
    """Share of every class of the training images that is kept for measuring where `val` is empty, in [0, 1); 0: none is, and
    nothing is measured."""
    fraction: float | None = None
    """Learn from this share of every class only, in (0, 1]."""
    per_class: int | None = None
    """Learn from this many images of every class only, at least 1."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area of the random crop, as a share of the image's area: 0 < smallest <= largest <= 1."""
    eval_crop_pct: float = 1.0
    """For measuring, an image is resized so that this share of it is cut out at the centre, in (0, 1]. The original takes 0.875
    up to 224 px and 1 above."""
    eval_batch_size: int = 256
    """Images that one process measures at once, at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.held_out < 1:
            raise ValueError(f"data.held_out must lie in [0, 1), not {self.held_out}")
        if self.fraction is not None and self.per_class is not None:
            raise ValueError("data.fraction and data.per_class: give one of the two")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"data.fraction must lie in (0, 1], not {self.fraction}")
        if self.per_class is not None and self.per_class < 1:
            raise ValueError(f"data.per_class must be at least 1, not {self.per_class}")
        if not 0 < self.eval_crop_pct <= 1:
            raise ValueError(f"data.eval_crop_pct must lie in (0, 1], not {self.eval_crop_pct}")
        if self.eval_batch_size < 1:
            raise ValueError(f"data.eval_batch_size must be at least 1, not {self.eval_batch_size}")


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to images and labels beyond crop and flip. The defaults are the original's for fine-tuning."""

    rand_augment: str = "rand-m9-mstd0.5-inc1"
    """timm's description of RandAugment (empty: none); for 1 or 3 channels."""
    erase_probability: float = 0.25
    """Chance that a random rectangle of an image is filled with noise, in [0, 1]."""
    mixup: float = 0.8
    """Alpha of mixup, at least 0 (0: none)."""
    cutmix: float = 1.0
    """Alpha of cutmix, at least 0 (0: none). Where both are on, each batch gets one of them, half and half."""
    mix_probability: float = 1.0
    """Chance that a batch is mixed at all, in [0, 1]."""
    label_smoothing: float = 0.1
    """Share of each label that is spread over all classes, in [0, 1)."""

    def __post_init__(self) -> None:
        for name in ("erase_probability", "mix_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"augment.{name} must lie in [0, 1], not {getattr(self, name)}")
        if min(self.mixup, self.cutmix) < 0:
            raise ValueError(f"augment.mixup and augment.cutmix must be at least 0, not {self.mixup}, {self.cutmix}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"augment.label_smoothing must lie in [0, 1), not {self.label_smoothing}")

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with each other."""
        return max(self.mixup, self.cutmix) > 0 and self.mix_probability > 0


@dataclass(frozen=True)
class DistillConfig:
    """Learning from a teacher by a distillation token (DeiT)."""

    teacher: str = ""
    """A fine-tuned run folder or its classifier.safetensors, or the name of any timm model with as many classes (empty:
    none)."""
    teacher_weights: str = ""
    """File of weights for a timm model (empty: timm downloads its own)."""
    kind: Literal["hard", "soft"] = "hard"
    """hard: the teacher's answer is a label; soft: its probabilities are the target."""
    alpha: float = 0.5
    """Weight of the teacher's loss, in [0, 1]; the labels' has the rest. DeiT: 0.5 for hard, 0.1 for soft."""
    temperature: float = 3.0
    """Divides the logits of both before they are compared, above 0; for soft."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"distill.alpha must lie in [0, 1], not {self.alpha}")
        if self.temperature <= 0:
            raise ValueError(f"distill.temperature must be above 0, not {self.temperature}")


@dataclass(frozen=True)
class FinetuneOptimConfig(OptimConfig):
    """The optimizer of fine-tuning and its schedule."""

    name: Literal["adamw", "lars"] = "adamw"
    """adamw for fine-tuning; lars for the paper's linear probe (its momentum is beta1)."""
    base_lr: float = 5e-4
    """Learning rate for 256 images per step, above 0; the peak is base_lr * global batch size / 256."""
    min_lr: float = 1e-6
    """Learning rate at the end of the cosine, at least 0."""
    beta2: float = 0.999
    """AdamW: decay of the mean of squared gradients, in [0, 1)."""
    layer_decay: float = 0.65
    """Each layer's learning rate over that of the layer above, in (0, 1]; 1: all learn alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"optim.layer_decay must lie in (0, 1], not {self.layer_decay}")


@dataclass(frozen=True)
class FinetuneConfig:
    """Fine-tunes a pretrained encoder on labels, trains a probe on the frozen encoder, or measures what was trained before.

    finetune/configs holds the published recipes.
    """

    encoder: str = ""
    """What to start from: a pretraining run folder, an encoder.safetensors, a .pth of facebookresearch/mae, a folder of
    transformers, or the name of a timm vision transformer. With eval_only: a fine-tuned run folder, or a
    classifier.safetensors."""
    from_scratch: bool = False
    """Use the encoder's architecture only, with random weights and one learning rate for all layers (optim.layer_decay counts
    as 1): what pretraining must beat."""
    output_dir: str = ""
    """Run folder: config, logs, checkpoints, classifier, tables, pictures; never reused for another config (empty:
    runs/finetune; with eval_only the folder "evaluation/<name of data.val>" beside the classifier)."""
    resume: Literal["never", "auto"] = "never"
    """auto: continue what output_dir holds, at the step of its newest valid checkpoint; start anew where it holds nothing."""
    eval_only: bool = False
    """Train nothing: measure a fine-tuned classifier on data.val."""
    epochs: float = 100.0
    """Length of the run in passes over the training images, above 0."""
    num_steps: int | None = None
    """Length of the run in optimizer steps, in place of epochs, at least 1."""
    global_batch_size: int | None = None
    """Images of one optimizer step over all processes, at least 1; then their number changes neither schedule nor images. A
    process takes at most data.batch_size_per_process images at once, and optim.accum_steps is worked out. None:
    batch_size_per_process x processes x accum_steps."""
    eval_every_epochs: float = 1.0
    """Passes over the training images between two measurements, above 0; there is one at the end in any case."""
    ema_decay: float | None = None
    """Keep a moving average of the weights, and measure and export that: share kept at each step, in (0, 1) (None: no average).
    At step t at most t / (10 + t) is kept, so that the start is forgotten."""
    model: ClassifierConfig = field(default_factory=ClassifierConfig)
    """The head, and what of the encoder is trained."""
    data: LabelledDataConfig = field(default_factory=LabelledDataConfig)
    """The labelled images."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Augmentation beyond crop and flip."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """Learning from a teacher."""
    optim: FinetuneOptimConfig = field(default_factory=FinetuneOptimConfig)
    """The optimizer."""
    run: RunConfig = field(default_factory=RunConfig)
    """How the run is carried out."""

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be above 0 and finite, not {self.epochs}")
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, not {self.num_steps}")
        check_global_batch(self.global_batch_size, self.optim.accum_steps)
        if not 0 < self.eval_every_epochs < math.inf:
            raise ValueError(f"eval_every_epochs must be above 0 and finite, not {self.eval_every_epochs}")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must lie in (0, 1), not {self.ema_decay}")
        if self.augment.mixes and self.data.batch_size_per_process % 2:
            raise ValueError(
                f"mixup and cutmix mix pairs of images: data.batch_size_per_process must be even, not "
                f"{self.data.batch_size_per_process} (or set --augment.mixup 0 --augment.cutmix 0)"
            )
        if self.model.frozen and self.from_scratch:
            raise ValueError("model.frozen and from_scratch: a frozen encoder of random weights learns nothing; drop one")

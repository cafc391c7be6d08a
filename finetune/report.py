"""What a fine-tuning run says of itself, and what it leaves behind."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torchvision.utils import make_grid

from data.config import describe_reading
from data.stream import BatchPlan
from finetune.config import FinetuneConfig
from finetune.evaluate import EvaluationSet, Scores, describe_scores, write_scores
from finetune.labelled import LabelledData
from models.encoder import count_parameters
from models.formats import PretrainedEncoder
from models.heads import CLASSIFIER_NAME, Classifier, classifier_arguments, export_state
from training.checkpoint import replacing
from training.cli import UserError
from training.parallel import Distributed
from training.schedule import Horizon, scale_lr

BEST_NAME = f"best_{CLASSIFIER_NAME}"
NUM_SHOWN_INPUTS = 16


def describe_run(
    config: FinetuneConfig,
    data: LabelledData,
    validation: EvaluationSet | None,
    distributed: Distributed[Classifier],
    encoder: PretrainedEncoder,
    horizon: Horizon,
    plan: BatchPlan,
    device: torch.device,
    dtype: str,
) -> str:
    """Answers what a person asks before a long run, one line a question."""
    classifier, optim = distributed.model, config.optim
    vit = classifier.vit
    height, width = vit.patch_embed.img_size
    peak_lr = scale_lr(optim.base_lr, plan.global_batch_size)
    origin = "random weights, architecture of " if config.from_scratch else ""
    what = "the head alone" if classifier.frozen else "all"
    epochs = horizon.num_steps * plan.global_batch_size / len(data.rows)
    lines = {
        "data": f"{data.train.root}: {len(data.rows):,} of {len(data.train):,} images, {data.num_classes} classes",
        "reading": describe_reading(data.train, config.data, plan.world_size),
        "measure": "nothing" if validation is None else f"{validation.shards.root}: {len(validation):,} images",
        "input": f"{encoder.in_chans} x {height} x {width} px, patches of {vit.patch_embed.patch_size[0]} px",
        "encoder": f"{origin}{config.encoder}: {vit.embed_dim} wide x {len(vit.blocks)} blocks",
        "trained": f"{what}, {count_parameters(classifier) / 1e6:.2f} M parameters; head on {config.model.pooling}"
        + (f", distilled from {config.distill.teacher} ({config.distill.kind})" if classifier.is_distilled else ""),
        "batch": f"{plan.global_batch_size:,} = {plan.batch_size_per_process} per process x {plan.world_size} "
        f"process{'es' if plan.world_size > 1 else ''} x {plan.accum_steps} accumulated",
        "lr": f"{optim.name}, base {optim.base_lr:g} per 256 images, peak {peak_lr:.3g}, layer decay {optim.layer_decay:g}",
        "steps": f"{horizon.num_steps:,} ({epochs:.4g} epochs), warm-up {horizon.warmup_steps:,.0f}",
        "device": f"{device.type}, {dtype}{', compiled' if config.run.compile else ''}{distributed.describe()}",
        "output": config.output_dir,
    }
    return "\n".join(f"{name:>8}  {text}" for name, text in lines.items())


def input_sheet(images: Tensor) -> Image.Image:
    """The first images of a batch (B, C, H, W) uint8 side by side, as the model sees them: cropped, mixed, erased."""
    images = images[:NUM_SHOWN_INPUTS].cpu()
    images = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    factor = max(1, round(112 / images.shape[-2]))
    grid = make_grid(images.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3), nrow=8, pad_value=255)
    return Image.fromarray(grid.permute(1, 2, 0).contiguous().numpy())


def export_classifier(
    folder: Path,
    classifier: Classifier,
    encoder: PretrainedEncoder,
    config: FinetuneConfig,
    class_names: Sequence[str],
    step: int,
    scores: Scores | None,
    best: bool,
) -> None:
    """Writes a classifier for `timm.create_model`, with all that is needed to use it in the header.

    Args:
        folder: of the run.
        classifier: to be exported.
        encoder: what it was built on.
        config: of the run.
        class_names: of class 0, 1, ...
        step: optimizer steps done.
        scores: of this step, where it was measured.
        best: write the best of the run, not its end.

    Raises:
        UserError: the file cannot be written.
    """
    name, arguments = classifier_arguments(encoder, config.model, classifier.vit.num_classes, classifier.is_distilled)
    own = bool(config.data.mean)
    record: dict[str, Any] = {
        "timm_model": name,
        "timm_arguments": arguments,
        "mean": list(config.data.mean if own else encoder.mean),
        "std": list(config.data.std if own else encoder.std),
        "norm_eps": encoder.norm_eps,
        "eval_crop_pct": config.data.eval_crop_pct,
        "class_names": list(class_names),
        "step": step,
        "top1": None if scores is None else scores.top1,
    }
    path = folder / (BEST_NAME if best else CLASSIFIER_NAME)
    try:
        with replacing(path) as temporary:
            save_file(export_state(classifier), temporary, metadata={"classifier": json.dumps(record)})
        with replacing(path.with_suffix(".json")) as temporary:
            temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the classifier {path}: {error}; the checkpoints are intact") from error


def best_top1(folder: Path) -> float:
    """The best top-1 that the run folder holds a classifier of; -1 where it holds none that can be read."""
    try:
        with safe_open(folder / BEST_NAME, framework="pt") as file:
            return json.loads((file.metadata() or {})["classifier"])["top1"]
    except (OSError, SafetensorError, KeyError):
        return -1.0


def finish_report(
    folder: Path,
    config: FinetuneConfig,
    validation: EvaluationSet | None,
    class_names: Sequence[str],
    scores: Scores | None,
) -> str:
    """Writes the tables of the end of a run, and says what a person can type next."""
    lines = []
    if scores is not None and validation is not None:
        about: dict[str, object] = {"classifier": str(folder / CLASSIFIER_NAME), "data": str(validation.shards.root)}
        write_scores(folder, scores, class_names, about)
        lines += [describe_scores(scores, class_names)]
        if config.data.val:
            lines += [
                f"best of the run: top-1 {best_top1(folder):.2%} ({folder / BEST_NAME}); chosen on the images it is measured "
                "on, so it flatters: report the end"
            ]
        lines += [
            f"look at what it confuses:     {folder / 'confusion.png'}",
            f"see the curves and inputs:    tensorboard --logdir {folder}",
        ]
    val = config.data.val or "LABELLED_IMAGES"
    lines += [
        f"measure it on other images:   accelerate launch finetune/main.py --eval_only --encoder {folder} --data.val {val}",
        "use the classifier in Python:",
        "  import json, pathlib, timm, torch",
        f'  how = json.loads(pathlib.Path("{folder / "classifier.json"}").read_text())',
        f'  model = timm.create_model(how["timm_model"], checkpoint_path="{folder / CLASSIFIER_NAME}",',
        '                            **how["timm_arguments"])',
        '  mean, std = (torch.tensor(how[name]).view(-1, 1, 1) for name in ("mean", "std"))',
        "  probabilities = model.eval()((images - mean) / std).softmax(dim=1)  # images (B, C, H, W) in 0..1",
    ]
    return "\n".join(lines)

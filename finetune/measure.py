"""Measuring a fine-tuned classifier again, on any labelled images."""

import dataclasses
from pathlib import Path

from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from data.config import open_source
from data.shards import ShardSet
from data.transforms import Normalization
from finetune.config import FinetuneConfig
from finetune.evaluate import EvaluationSet, describe_scores, evaluate, write_scores
from finetune.labelled import check_channels, check_class_names
from models.heads import CLASSIFIER_NAME, TrainedClassifier, load_classifier
from training.cli import UserError
from training.features import weights_hash
from training.launch import facts_of_launch, require_agreement
from training.resume import compute_dtype
from training.run import build_accelerator


def measure_only(config: FinetuneConfig) -> None:
    """Measures the classifier that `config.encoder` names on `config.data.val`, and writes the tables and the picture.

    The size of the input, its normalisation and the crop are those the classifier was trained with. Several processes share
    the images; the first one writes.

    Raises:
        UserError: there is no such classifier, its classes are not those of the data, or the processes do not agree on what is
            measured.
        DataError: the data cannot be read.
    """
    source = Path(config.encoder)
    if not config.encoder or not config.data.val:
        raise UserError(
            "eval_only measures a fine-tuned classifier on labelled images: give --encoder RUN_FOLDER and --data.val IMAGES"
        )
    beside = (source if source.is_dir() else source.parent) / "evaluation" / Path(config.data.val).stem
    folder = Path(config.output_dir) if config.output_dir else beside
    accelerator = build_accelerator(config.run, folder)
    require_agreement(accelerator, facts_of_launch(config))  # before any other thing that they do together
    if (folder / "config.yaml").exists():
        raise UserError(
            f"output_dir {folder} holds a training run, whose own tables would be lost: choose another --output_dir"
        )
    try:
        trained = load_classifier(config.encoder)
    except ValueError as error:
        raise UserError(str(error)) from error
    shards = open_source(config.data.val, config.data, labelled=True)
    check_channels(shards, trained.in_chans, f"the classifier {config.encoder}")
    check_class_names(trained.class_names, trained.model.num_classes, shards, config.encoder)
    require_agreement(accelerator, _facts(trained, shards, accelerator))
    data = EvaluationSet(
        shards, None, trained.img_size, trained.in_chans, trained.eval_crop_pct, config.data.eval_batch_size,
        config.data.num_workers, config.data.max_pixels,
    )  # fmt: skip
    model: nn.Module = trained.model.to(accelerator.device)
    normalization = Normalization(trained.mean, trained.std)
    scores = evaluate(model, data, normalization, trained.model.num_classes, accelerator)
    if accelerator.is_main_process:
        write_scores(folder, scores, trained.class_names, _about(config, trained, source))
        tqdm.write(f"{describe_scores(scores, trained.class_names)}\nlook at what it confuses: {folder / 'confusion.png'}")
    accelerator.end_training()


def _facts(trained: TrainedClassifier, shards: ShardSet, accelerator: Accelerator) -> dict[str, object]:
    """What all processes must share before they measure, each its part of the images."""
    return {
        "classifier (hash of its weights)": weights_hash(trained.model),
        "data (hash of the manifest)": shards.manifest.hash,
        "dtype": compute_dtype(accelerator),
    }


def _about(config: FinetuneConfig, trained: TrainedClassifier, source: Path) -> dict[str, object]:
    """What was measured on what."""
    settings = dataclasses.asdict(config.data)
    return {
        "classifier": str(source / CLASSIFIER_NAME if source.is_dir() else source),
        "data": settings["val"],
        "img_size": list(trained.img_size),
        "eval_crop_pct": trained.eval_crop_pct,
    }

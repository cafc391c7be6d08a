"""How good a classifier is: every sample counted exactly once, over any number of processes.

Shapes: B batch, C classes.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from data.decode import MAX_PIXELS
from data.evaluation import evaluation_batches
from data.shards import ShardSet
from data.transforms import Normalization
from training.checkpoint import replacing
from training.cli import UserError

MAX_PICTURE_CLASSES = 40
"""A confusion matrix of more classes is drawn without names."""
MATRIX_PX = 640
"""About the edge of the drawn confusion matrix; of more classes than this, several share a pixel."""


@dataclass(frozen=True)
class EvaluationSet:
    """Labelled samples to measure on, and how an image of them becomes an input."""

    shards: ShardSet
    samples: Sequence[int] | None
    """Which of them; None: all."""
    img_size: tuple[int, int]
    """(H, W) in pixels."""
    num_channels: int
    crop_pct: float
    """Share of the resized image that is looked at, in (0, 1]."""
    batch_size: int
    """Images that one process measures at once."""
    num_workers: int
    max_pixels: int = MAX_PIXELS
    """An image of more counts as unreadable."""

    def __len__(self) -> int:
        return len(self.shards) if self.samples is None else len(self.samples)


@dataclass(frozen=True)
class Scores:
    """What was counted."""

    confusion: np.ndarray
    """(C, C) int64: [label, answer] -> samples."""
    num_top5: int
    """Samples whose label is among the five highest logits (all of them where there are at most five classes)."""
    loss: float
    """Mean cross-entropy, without label smoothing."""

    @property
    def num_samples(self) -> int:
        """Samples measured."""
        return int(self.confusion.sum())

    @property
    def top1(self) -> float:
        """Share of samples whose highest logit is the label's."""
        return float(np.trace(self.confusion)) / self.num_samples

    @property
    def top5(self) -> float:
        """Share of samples whose label is among the five highest logits."""
        return self.num_top5 / self.num_samples

    @property
    def per_class(self) -> np.ndarray:
        """(C,) share of each class's samples that were recognised; NaN for a class without samples."""
        counts = self.confusion.sum(axis=1)
        return np.divide(np.diag(self.confusion), counts, out=np.full(len(counts), np.nan), where=counts > 0)


@torch.no_grad()
def evaluate(
    model: nn.Module, data: EvaluationSet, normalization: Normalization, num_classes: int, accelerator: Accelerator
) -> Scores:
    """Measures a classifier; all processes take part, and all get the same scores.

    Batches are the same whatever the number of processes, so that rounding cannot tip an answer from one to another. The
    model's mode is put back as it was.

    Args:
        model: (B, channels, H, W) normalised -> logits (B, C), or logits of several heads to be averaged.
        data: labelled samples, labels in 0 .. C - 1.
        normalization: of the model's input.
        num_classes: C.
        accelerator: of the run.

    Raises:
        DataError: a sample cannot be read.
    """
    device = accelerator.device
    confusion = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=device)
    top5 = torch.zeros((), dtype=torch.int64, device=device)
    loss = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    was_training = model.training
    model.eval()
    bar = tqdm(total=len(data), unit="image", desc="measuring", leave=False, disable=not accelerator.is_main_process)
    for batch in evaluation_batches(
        data.shards, data.img_size, data.num_channels, data.batch_size, data.num_workers,
        accelerator.process_index, accelerator.num_processes, data.samples, data.crop_pct, data.max_pixels,
    ):  # fmt: skip
        with accelerator.autocast():
            logits = model(normalization.apply(batch.images.to(device)))
        logits, labels = logits.float(), batch.labels.to(device)
        loss += F.cross_entropy(logits, labels, reduction="sum")
        confusion.index_add_(0, labels * num_classes + logits.argmax(dim=1), torch.ones_like(labels))
        top5 += (logits.topk(min(5, num_classes), dim=1).indices == labels.unsqueeze(1)).sum()
        bar.update(len(labels) * accelerator.num_processes)
    bar.close()
    model.train(was_training)
    confusion, top5, loss = (_summed(accelerator, tensor) for tensor in (confusion, top5, loss))
    counts = confusion.view(num_classes, num_classes).cpu().numpy()
    return Scores(counts, int(top5.item()), float(loss.item()) / max(1, int(counts.sum())))


def _summed(accelerator: Accelerator, tensor: Tensor) -> Tensor:
    summed = accelerator.reduce(tensor, "sum")
    assert isinstance(summed, Tensor)
    return summed


def class_labels(class_names: Sequence[str], num_classes: int) -> list[str]:
    """Names of all classes; numbers where there are no names."""
    return list(class_names) if class_names else [str(number) for number in range(num_classes)]


def write_scores(folder: Path, scores: Scores, class_names: Sequence[str], about: dict[str, object]) -> None:
    """Writes evaluation.json, per_class.csv, confusion.csv and confusion.png into a folder, made if absent.

    Args:
        folder: where to.
        scores: what was counted.
        class_names: of class 0, 1, ...; empty where there are none.
        about: what was measured on what, for evaluation.json.

    Raises:
        UserError: a file cannot be written.
    """
    names = class_labels(class_names, len(scores.confusion))
    counts = scores.confusion.sum(axis=1)
    summary = {"num_samples": scores.num_samples, "top1": scores.top1, "top5": scores.top5, "loss": scores.loss}
    rows = [[name, count, right] for name, count, right in zip(names, counts.tolist(), scores.per_class.tolist(), strict=True)]
    writers: dict[str, Callable[[Path], object]] = {
        "evaluation.json": lambda path: path.write_text(json.dumps(about | summary, indent=2) + "\n", encoding="utf-8"),
        "per_class.csv": lambda path: _write_csv(path, ["class", "samples", "accuracy"], rows),
        "confusion.csv": lambda path: _write_csv(
            path, ["label \\ answer", *names], [[n, *r] for n, r in zip(names, scores.confusion.tolist(), strict=True)]
        ),
        "confusion.png": lambda path: draw_confusion(scores, class_names).save(path, format="PNG"),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            with replacing(folder / name) as temporary:
                write(temporary)
    except OSError as error:
        raise UserError(f"cannot write the scores to {folder}: {error.strerror}") from error


def _write_csv(path: Path, header: list[str], rows: list[list[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def draw_confusion(scores: Scores, class_names: Sequence[str]) -> Image.Image:
    """Draws the confusion matrix: a row for each label, a column for each answer, darker for a larger share of the row.

    Up to MAX_PICTURE_CLASSES classes have their names, and each cell its share in percent.
    """
    confusion = scores.confusion
    num_classes = len(confusion)
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    cell = MATRIX_PX // num_classes
    has_text = num_classes <= MAX_PICTURE_CLASSES
    names = class_labels(class_names, num_classes)
    margin = 12 + (min(160, max(round(7 * len(name)) for name in names)) if has_text else 0)
    edge = min(cell * num_classes, MATRIX_PX)
    picture = Image.new("RGB", (margin + edge + 12, 40 + edge + margin), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((8, 6), f"{scores.num_samples} samples, top-1 {scores.top1:.2%}: rows are labels, columns answers", fill="black")
    # White over blue to dark: the diagonal of a good classifier is dark, a confusion stands out from white.
    colours = np.stack([255 - 225 * shares, 255 - 175 * shares, 255 - 95 * shares], axis=-1).astype(np.uint8)
    matrix = Image.fromarray(colours).resize((edge, edge), Image.Resampling.NEAREST if cell else Image.Resampling.BOX)
    picture.paste(matrix, (margin, 40))
    draw.rectangle([margin - 1, 39, margin + edge, 40 + edge], outline="grey")
    if has_text:
        for row, name in enumerate(names):
            middle = 40 + row * cell + cell // 2
            draw.text((margin - 6, middle), name[:22], fill="black", anchor="rm")
            label = Image.new("RGB", (margin, 14), "white")
            ImageDraw.Draw(label).text((margin - 2, 7), name[:22], fill="black", anchor="rm")
            picture.paste(label.rotate(90, expand=True), (margin + row * cell + cell // 2 - 7, 44 + edge))
            for column in range(num_classes if cell >= 28 else 0):
                share = shares[row, column]
                if share >= 0.005:
                    shade = "white" if share > 0.5 else "black"
                    at = (margin + column * cell + cell // 2, middle)
                    draw.text(at, f"{share:.0%}"[:-1], fill=shade, anchor="mm")
    return picture


def describe_scores(scores: Scores, class_names: Sequence[str]) -> str:
    """A few lines for a person: the totals, and the classes that are recognised worst."""
    lines = [
        f"{scores.num_samples} samples: top-1 {scores.top1:.2%}, top-5 {scores.top5:.2%}, loss {scores.loss:.4f}",
    ]
    names = class_labels(class_names, len(scores.confusion))
    present = [number for number in np.argsort(scores.per_class, kind="stable").tolist() if scores.confusion[number].sum()]
    worst = ", ".join(f"{names[number]} {scores.per_class[number]:.1%}" for number in present[:5])
    lines.append(f"worst classes: {worst}")
    return "\n".join(lines)

"""Continuing a run where its newest valid checkpoint stands."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from tqdm import tqdm

from data.crops import crop_backend
from data.stream import ORDER_VERSION
from training.checkpoint import Checkpoint, newest_checkpoint, restore
from training.cli import UserError, flat_config


def compute_dtype(accelerator: Accelerator) -> str:
    """Type of the matrix products of a run."""
    return "bfloat16" if accelerator.mixed_precision == "bf16" else "float32"


def identity(config: Any, manifest_hash: str, global_batch_size: int, accelerator: Accelerator) -> dict[str, Any]:
    """What a checkpoint records of its run: the config, and what a config does not say.

    Args:
        config: of the run, a dataclass.
        manifest_hash: identifies the training data.
        global_batch_size: images of one optimizer step.
        accelerator: of the run.
    """
    return flat_config(config) | {
        "manifest_hash": manifest_hash,
        "global_batch_size": global_batch_size,
        "order_version": ORDER_VERSION,
        "dtype": compute_dtype(accelerator),
        "jpeg_backend": crop_backend(),
    }


def _find(folder: Path, accelerator: Accelerator) -> Checkpoint | None:
    """Finds the newest valid checkpoint, the same on all processes, and sets damaged ones after it aside.

    Raises:
        UserError: no checkpoint is valid, or the newest cannot be judged; or the processes see different folders.
    """
    checkpoint, complaints = newest_checkpoint(folder)
    # This also waits until all have looked, before the first process renames anything.
    steps = gather_object([None if checkpoint is None else checkpoint.step])
    if len(set(steps)) > 1:
        raise UserError(
            f"{folder}: the processes find checkpoints of different steps there ({', '.join(map(str, steps))}): put "
            "--output_dir on a disk that all machines share"
        )
    for path, complaint in complaints.items():
        if accelerator.is_main_process:
            path.rename(path.with_suffix(".damaged"))
            tqdm.write(f"warning: {complaint}; set aside as {path.stem}.damaged, an earlier checkpoint is used")
    return checkpoint


def _require_same_run(checkpoint: Checkpoint, now: dict[str, Any], must_agree: Mapping[str, str]) -> None:
    """Makes sure that a checkpoint is of the data, order and global batch of a run, and of what else must agree.

    Raises:
        UserError: it is not.
    """
    was = checkpoint.config
    if was["manifest_hash"] != now["manifest_hash"]:
        raise UserError(
            f"{checkpoint.path}: was trained on other data ({was['data.train']}) than {now['data.train']} holds now; "
            "continue on the same shards, or start a new run with another --output_dir"
        )
    if was.get("order_version", 1) != now["order_version"]:
        raise UserError(
            f"{checkpoint.path}: was trained by a version of this program that reads the samples in another order "
            f"({was.get('order_version', 1)}, now {now['order_version']}); continue it with that version, or start a new run "
            "with another --output_dir"
        )
    if was["global_batch_size"] != now["global_batch_size"]:
        raise UserError(
            f"{checkpoint.path}: was trained with a global batch of {was['global_batch_size']}, now it would be "
            f"{now['global_batch_size']}: give --global_batch_size {was['global_batch_size']}, or change "
            "--data.batch_size_per_process or --optim.accum_steps so that their product with the processes stays the same"
        )
    for key, meaning in must_agree.items():
        if was.get(key) != now[key]:
            raise UserError(
                f"{checkpoint.path}: {meaning}; continue it as it was, or start a new run with another --output_dir"
            )


def resume(
    folder: Path,
    now: dict[str, Any],
    num_steps_of: Callable[[Mapping[str, Any]], int],
    changes_the_run: Sequence[str],
    must_agree: Mapping[str, str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
) -> Checkpoint | None:
    """Restores the newest valid checkpoint of a run; damaged ones after it are set aside under another name.

    Args:
        folder: of the checkpoints.
        now: identity of the run as it is started now.
        num_steps_of: tells where a run ends, by "epochs" and "num_steps" of its identity.
        changes_the_run: settings that may differ, with a warning.
        must_agree: further entries of the identity that may not differ -> what it means where they do.
        model: without any wrapper.
        optimizer: over the model's parameters.
        accelerator: of the run.

    Returns:
        The checkpoint, already restored; None where there is none.

    Raises:
        UserError: no checkpoint is valid, or the newest is of a newer format; it is of another model; the data, the global
            batch size, or what must agree, is another than in the checkpoint; the run was to be longer; or the processes see
            different folders.
    """
    checkpoint = _find(folder, accelerator)
    if checkpoint is None:
        if accelerator.is_main_process and (folder.parent / "metrics.jsonl").exists():
            tqdm.write(f"warning: {folder.parent} holds a run, but no checkpoint of it: it starts anew, and so do its logs")
        return None
    was = checkpoint.config
    changed = [
        f"{key} {was.get(key)} -> {now[key]}" for key in (*changes_the_run, "dtype", "jpeg_backend") if was.get(key) != now[key]
    ]
    if changed and accelerator.is_main_process:
        tqdm.write(f"warning: the run goes on, but not as an uninterrupted one would: {', '.join(changed)}")
    _require_same_run(checkpoint, now, must_agree)
    as_it_was = f"--config {folder.parent / 'config.yaml'} --resume auto"
    end_then, num_steps = num_steps_of(was), num_steps_of(now)
    if num_steps < end_then:
        raise UserError(
            f"{checkpoint.path}: is of a run of {end_then} steps, which cannot be cut to {num_steps}: give more --epochs or "
            f"--num_steps, or continue it as it was ({as_it_was})"
        )
    if num_steps > end_then and accelerator.is_main_process:
        tqdm.write(f"warning: the run is {num_steps} steps now, not {end_then}; where that is not meant: {as_it_was}")
    if not checkpoint.is_sound and accelerator.is_main_process:
        tqdm.write(
            f"warning: {checkpoint.path} was saved while the run was sick; to go on from an earlier one, rename it to *.suspect"
        )
    if checkpoint.step == num_steps and accelerator.is_main_process:
        tqdm.write(f"the run was at its end, after step {num_steps}: to train on, give more --epochs or --num_steps")
    restore(checkpoint, model, optimizer)
    return checkpoint

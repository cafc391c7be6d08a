"""The fine-tuning loop."""

import contextlib
import dataclasses
import functools
import json
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from tqdm import tqdm

from data.loader import Batch, BatchLoader
from data.stream import BatchPlan, SubsetOrder, mix64
from data.transforms import Normalization
from finetune.augment import Mixing, RandAugment
from finetune.config import CHANGES_THE_RUN, MAY_CHANGE_ON_RESUME, FinetuneConfig
from finetune.distill import Teacher, distillation_loss, load_teacher
from finetune.evaluate import EvaluationSet, Scores, draw_confusion, evaluate
from finetune.labelled import LabelledData, check_channels, open_training_data
from finetune.report import best_top1, describe_run, export_classifier, finish_report, input_sheet
from models.attention import choose_attention
from models.formats import PretrainedEncoder, load_encoder
from models.heads import Classifier, build_classifier
from training.batches import plan_batches
from training.cli import UserError
from training.faults import FaultLog
from training.features import weights_hash
from training.health import Health
from training.history import note_start
from training.launch import contact, facts_of_launch, facts_of_start, require_agreement
from training.log import RunLog
from training.meters import Meters, WaitClock
from training.optim import LARS, build_adamw, layer_groups, set_lr
from training.parallel import Distributed, sharding_asked
from training.resume import compute_dtype, identity, resume
from training.run import StopRequest, build_accelerator, check_run_folder, lock_for_run
from training.saving import Saver
from training.schedule import Horizon, num_steps_of, plan_horizon, scale_lr, warmup_cosine
from training.watch import StallWatch

EMA_PREFIX = "ema/"

MUST_AGREE = {
    "samples": "it learnt from other images of the same data (--data.val, held_out, fraction and per_class choose them)",
    "measured_on": "it was measured on other images than --data.val names now",
    "encoder_input": "it was built on another encoder than --encoder names now: of other sizes, or for another normalisation",
    "teacher": "it learnt from another teacher than --distill.teacher names now",
}
"""Entries of a run's identity that a resumed run shares, and what it means where it does not."""


@dataclass
class Finetuning:
    """Everything a run needs, put together and checked before the first step."""

    config: FinetuneConfig
    folder: Path
    accelerator: Accelerator
    encoder: PretrainedEncoder
    """What the classifier was built on."""
    data: LabelledData
    validation: EvaluationSet | None
    normalization: Normalization
    img_size: tuple[int, int]
    """(H, W) in pixels."""
    classifier: Classifier
    """The bare model: checkpoints, and where it is not sharded, measuring and export."""
    distributed: Distributed[Classifier]
    """The model as all processes train it."""
    ema: ModelEmaV3 | None
    teacher: Teacher | None
    plan: BatchPlan
    horizon: Horizon
    start_step: int
    resumed_from: Path | None
    """The checkpoint of the start step."""
    identity: dict[str, Any]
    """What a checkpoint records of the run."""
    lock: AbstractContextManager[object]
    """Keeps the run folder to this run until it is left."""
    saver: Saver
    """Writes the checkpoints."""
    health: Health = field(init=False)
    """Skips steps that are not sound, and ends a run that does not recover."""

    def __post_init__(self) -> None:
        mixing = Mixing(self.config.augment, self.num_classes, self.accelerator.device)
        self.health = Health(
            self.accelerator, self.folder, self.distributed, self.start_step, self.data.train,
            lambda step: build_loader(self, step, step + 1), self.saver.set_suspects_aside,
            lambda model, *at: compute_loss(self, model, mixing, *at)[0],
        )  # fmt: skip

    @property
    def num_classes(self) -> int:
        """Classes that the head tells apart."""
        return self.data.num_classes

    def measured(self) -> Classifier:
        """The model that is measured and exported: the moving average where there is one; all processes must ask for it."""
        averaged = None if self.ema is None else cast(Classifier, self.ema.module)
        return self.distributed.whole_model(averaged)


def set_up(config: FinetuneConfig) -> Finetuning:
    """Puts a run together; nothing is written before everything is checked.

    Raises:
        UserError, DataError: settings, encoder, data or run folder do not fit.
    """
    config = dataclasses.replace(config, output_dir=config.output_dir or "runs/finetune")
    folder = Path(config.output_dir)
    check_run_folder(folder, config, config.resume, (*MAY_CHANGE_ON_RESUME, *CHANGES_THE_RUN))
    if not config.encoder:
        raise UserError(
            "no encoder given: --encoder takes a pretraining run folder, or another of the forms in --help; for a model "
            "without pretraining add --from_scratch True"
        )
    accelerator = build_accelerator(config.run, folder)
    require_agreement(accelerator, facts_of_launch(config))  # before any other thing that they do together
    data = open_training_data(config.data, config.run.seed)
    classifier, encoder = build_model(config, data.num_classes)
    for shards in (data.train, data.val):
        if shards is not None:
            check_channels(shards, encoder.in_chans, f"the encoder {config.encoder}")
    normalization = choose_normalization(config, encoder)
    img_size = config.model.img_size or encoder.img_size
    validation = data.evaluation_set(config.data, img_size, encoder.in_chans)
    teacher = (
        load_teacher(config.distill, data.class_names, data.num_classes, encoder.in_chans) if config.distill.teacher else None
    )
    if config.augment.rand_augment:  # its mistakes belong here, not into a reader process
        RandAugment(config.augment.rand_augment, img_size, normalization.mean)

    plan = plan_batches(
        config.global_batch_size, config.data, config.optim.accum_steps, accelerator.num_processes, accelerator.process_index,
        in_pairs=config.augment.mixes,
    )  # fmt: skip
    horizon = plan_horizon(config.epochs, config.num_steps, config.optim.warmup_epochs, len(data.rows), plan.global_batch_size)
    classifier.to(accelerator.device)
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    choose_attention(classifier.vit, accelerator.device.type, dtype)
    if teacher is not None:
        teacher.model.to(accelerator.device)
    ema = build_average(classifier, config.ema_decay)
    optimizer = build_optimizer(classifier, config)
    start_step, resumed_from = 0, None
    now = identity(config, data.train.manifest.hash, plan.global_batch_size, accelerator) | data.identity()
    now |= {"encoder_input": json.dumps(encoder[1:]), "teacher": "" if teacher is None else weights_hash(teacher.model)}
    length_of_run = functools.partial(num_steps_of, num_samples=len(data.rows), global_batch_size=plan.global_batch_size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_for_run(folder, accelerator))  # before checkpoints are read: damaged ones are set aside
        if config.resume == "auto":
            checkpoint = resume(
                folder / "checkpoints", now, length_of_run, CHANGES_THE_RUN, MUST_AGREE, classifier, optimizer, accelerator
            )
            if checkpoint is not None:
                start_step, resumed_from = checkpoint.step, checkpoint.path
                if ema is not None:
                    ema.module.load_state_dict(checkpoint.part(EMA_PREFIX), strict=True)
        lock = stack.pop_all()
    # Every process has read the folder before the first one writes to it.
    require_agreement(accelerator, facts_of_start(now, horizon.num_steps, start_step))
    if config.run.compile:
        classifier.compile()  # in place: parameter names stay as they are
    distributed = Distributed(classifier, optimizer, accelerator, sharding_asked(os.environ))
    if ema is not None:
        distributed.shard_alike(ema.module)
    if accelerator.is_main_process:
        note_start(folder, config, start_step, accelerator.num_processes)
    saver = Saver(config.run, folder / "checkpoints", plan.global_batch_size / len(data.rows), accelerator)
    return Finetuning(
        config, folder, accelerator, encoder, data, validation, normalization, img_size, classifier, distributed,
        ema, teacher, plan, horizon, start_step, resumed_from, now, lock, saver,
    )  # fmt: skip


def build_model(config: FinetuneConfig, num_classes: int) -> tuple[Classifier, PretrainedEncoder]:
    """Loads the encoder and puts the head on it.

    Raises:
        UserError: the encoder cannot be loaded, or the settings do not fit it.
    """
    try:
        encoder = load_encoder(config.encoder, weights=not config.from_scratch)
        distilled = bool(config.distill.teacher)
        return build_classifier(encoder, config.model, num_classes, distilled, config.from_scratch), encoder
    except ValueError as error:
        raise UserError(str(error)) from error


def choose_normalization(config: FinetuneConfig, encoder: PretrainedEncoder) -> Normalization:
    """The encoder's own mean and std, as it was pretrained with; or the user's.

    Raises:
        UserError: only one of the two is given, or a length is not the encoder's number of channels.
    """
    mean, std = config.data.mean, config.data.std
    if not mean and not std:
        return Normalization(encoder.mean, encoder.std)
    if len(mean) != encoder.in_chans or len(std) != encoder.in_chans or min(std) <= 0:
        raise UserError(
            f"data.mean and data.std need {encoder.in_chans} numbers each (one per channel, std above 0); given: mean "
            f"{list(mean)}, std {list(std)}"
        )
    return Normalization(mean, std)


def build_average(classifier: Classifier, decay: float | None) -> ModelEmaV3 | None:
    """The moving average of the weights: at step t at most t / (10 + t) is kept, so that it is one of what there is so far."""
    if decay is None:
        return None
    return ModelEmaV3(classifier, decay=decay, use_warmup=True, warmup_gamma=10, warmup_power=1.0)


def build_optimizer(classifier: Classifier, config: FinetuneConfig) -> torch.optim.Optimizer:
    """AdamW or LARS with layer-wise learning rates, which are set at every step."""
    layer_decay = 1.0 if config.from_scratch else config.optim.layer_decay  # random layers have nothing to keep
    groups = layer_groups(classifier, config.optim.weight_decay, layer_decay)
    if config.optim.name == "lars":
        return LARS(groups, momentum=config.optim.beta1)
    return build_adamw(groups, config.optim)


def seed_micro_step(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seeds every generator that erasing, mixing and drop path draw from: a resumed run draws what it would have drawn."""
    position = np.array([(step << 20) + (micro_step << 10) + rank], dtype=np.uint64)
    value = int(mix64(mix64(np.array([seed], dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)) ^ position)[0] >> np.uint64(1))
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 (timm's Mixup knows no other generator)
    torch.manual_seed(value)


def train(run: Finetuning) -> int:
    """Trains to the end, or until a signal.

    Returns:
        The exit status: 0, or 128 + the number of the signal that ended the run.

    Raises:
        UserError: a checkpoint cannot be written.
        DataError: the data cannot be read.
        SystemExit: what all processes end of together: see `Health`, `FaultLog`, `Saver`, `contact`.
    """
    config, accelerator, horizon = run.config, run.accelerator, run.horizon
    if accelerator.is_main_process:
        tqdm.write(describe_run(run.config, run.data, run.validation, run.distributed, run.encoder, horizon, run.plan,
                                accelerator.device, compute_dtype(accelerator)))  # fmt: skip
        if run.resumed_from:
            tqdm.write(f"  resume  {run.resumed_from}")
    loader = build_loader(run, run.start_step, horizon.num_steps)
    clock, meters = WaitClock(), Meters()
    mixing = Mixing(config.augment, run.num_classes, accelerator.device)
    peak_lr = scale_lr(config.optim.base_lr, run.plan.global_batch_size)
    eval_every = max(1, round(config.eval_every_epochs * len(run.data.rows) / run.plan.global_batch_size))
    log = RunLog(
        accelerator, run.folder, run.start_step, horizon.num_steps, run.plan.global_batch_size, clock,
        FaultLog(accelerator, run.folder, run.start_step, run.plan, config.data.max_bad_share),
    )  # fmt: skip
    step, stopped, scores = run.start_step, False, None
    run.classifier.train()
    with (
        StopRequest(config.run.timeout) as stop,
        log,
        run.saver,
        contextlib.closing(StallWatch().watch(clock.watch(iter(loader)))) as batches,
        contact(run.folder, config.run.timeout_minutes),
    ):
        run.health.count_on(log.resumed)
        while step < horizon.num_steps and not stopped:
            lr = warmup_cosine(step, horizon.warmup_steps, horizon.num_steps, peak_lr, config.optim.min_lr)
            set_lr(run.distributed.optimizer, lr)
            pictures = config.run.picture_every_steps
            shown = train_step(run, step, batches, mixing, meters, log.faults)
            if accelerator.is_main_process and (step == 0 or (pictures and (step + 1) % pictures == 0)):
                log.add_picture("input", input_sheet(run.normalization.invert(shown)), step + 1)
            step += 1
            run.health.check(step)

            stopped, by_clock, has_failed = stop.agreed(*run.saver.notes())
            is_last = step == horizon.num_steps
            measures = run.validation is not None and (is_last or (step % eval_every == 0 and not stopped))
            # Saved before it is measured: an image that cannot be read costs no training.
            saves = run.saver.is_due(step, by_clock, has_failed) or stopped or is_last or measures
            if saves or step % config.run.log_every_steps == 0:
                write_log(run, log, step, lr, meters)
            if saves:
                save(run, step)
            if measures:
                with log.paused():
                    scores = measure(run, log, step)
    if step == horizon.num_steps:
        finish(run, scores)
        return 0
    if accelerator.is_main_process:
        tqdm.write(f"stopped after step {step}; the same command with --resume auto goes on from there")
    return stop.exit_status or 1


def build_loader(run: Finetuning, start_step: int, stop_step: int) -> BatchLoader:
    """This process's batches of some steps."""
    config, augment = run.config, run.config.augment.rand_augment
    order = SubsetOrder(
        run.data.rows, run.data.train.first_sample, config.run.seed, config.data.shuffle_window, config.data.lanes
    )
    return BatchLoader(
        run.data.train, config.data, run.plan, order, run.img_size, run.encoder.in_chans, start_step,
        stop_step, pin_memory=run.accelerator.device.type == "cuda",
        augment=RandAugment(augment, run.img_size, run.normalization.mean) if augment else None,
    )  # fmt: skip


def train_step(
    run: Finetuning, step: int, batches: Iterator[Batch], mixing: Mixing, meters: Meters, faults: FaultLog
) -> Tensor:
    """Does one optimizer step: accumulated micro-batches, then the update.

    Returns:
        (B, C, H, W) normalised: the last micro-batch as the model saw it.
    """
    accum_steps = run.plan.accum_steps
    images = torch.empty(0)
    for micro_step in range(accum_steps):
        batch = next(batches)
        faults.extend(batch.faults)
        is_last = micro_step == accum_steps - 1
        # Gradients travel between processes once per step, with the last micro-batch.
        with contextlib.nullcontext() if is_last else run.distributed.without_sync():
            loss, images = compute_loss(run, run.distributed.wrapped, mixing, batch, step, micro_step)
            run.health.backward(loss, accum_steps, batch)
    run.health.update(run.distributed.clip_gradients(run.config.optim.clip_grad_norm), meters)
    if run.ema is not None:
        run.ema.update(run.classifier, step=step)
    return images


def compute_loss(
    run: Finetuning, model: nn.Module, mixing: Mixing, batch: Batch, step: int, micro_step: int
) -> tuple[Tensor, Tensor]:
    """The labels' loss on the head, and the teacher's on the distillation token where there is one.

    Returns:
        The loss; and (B, C, H, W) normalised, the images as the model (with or without its wrapper) saw them.
    """
    seed_micro_step(run.config.run.seed, step, micro_step, run.accelerator.process_index)
    images = run.normalization.apply(batch.images.to(run.accelerator.device, non_blocking=True))
    labels = batch.labels.to(run.accelerator.device, non_blocking=True)
    images, targets = mixing(images, labels)
    outputs = model(images)
    if run.teacher is None:
        return mixing.loss(outputs.float(), targets), images
    logits, distilled = outputs
    with run.accelerator.autocast():
        answers = run.teacher.logits(images, run.normalization)
    config = run.config.distill
    of_teacher = distillation_loss(distilled.float(), answers.float(), config)
    return (1 - config.alpha) * mixing.loss(logits.float(), targets) + config.alpha * of_teacher, images


def write_log(run: Finetuning, log: RunLog, step: int, lr: float, meters: Meters) -> None:
    """Writes the entry of a log interval.

    Raises:
        SystemExit: too many samples are unreadable; a checkpoint is saved.
    """
    means = run.health.take(meters)
    values = means | {"lr": lr, "epoch": step * run.plan.global_batch_size / len(run.data.rows)}
    headline = f"loss {means['loss']:.4f}" if means else "all steps skipped"
    log.write(step, values | run.health.entries(step, means.get("loss")), headline)
    if log.faults.too_many:
        save(run, step)
        log.end_run()


def share_buffers(model: nn.Module) -> None:
    """Gives every process the first one's buffers: a BatchNorm's statistics differ after the last step."""
    for buffer in model.buffers():
        buffer.copy_(cast(Tensor, broadcast(buffer)))


def measure(run: Finetuning, log: RunLog, step: int) -> Scores:
    """Measures on the validation images, logs, and exports the classifier where it is the best so far."""
    assert run.validation is not None
    model = run.measured()
    share_buffers(model)
    scores = evaluate(model, run.validation, run.normalization, run.num_classes, run.accelerator)
    values = {"val/top1": scores.top1, "val/top5": scores.top5, "val/loss": scores.loss}
    log.write_measured(step, values, f"top-1 {scores.top1:.2%}, top-5 {scores.top5:.2%}, loss {scores.loss:.4f}")
    if run.accelerator.is_main_process:
        log.add_picture("confusion", draw_confusion(scores, run.data.class_names), step)
        if scores.top1 > best_top1(run.folder):
            export_classifier(run.folder, model, run.encoder, run.config, run.data.class_names, step, scores, best=True)
    return scores


def save(run: Finetuning, step: int) -> None:
    """Saves a checkpoint; ends all processes where the weights are not worth one."""
    is_sound = run.health.require_sound_weights(step)
    extra = {} if run.ema is None else {EMA_PREFIX + name: tensor for name, tensor in run.ema.module.state_dict().items()}
    run.saver.save(step, run.identity, run.classifier, run.distributed.optimizer, extra, is_sound)


def finish(run: Finetuning, scores: Scores | None) -> None:
    """Leaves the classifier and its tables, and says what to type next.

    Args:
        run: at its end.
        scores: measured at the last step; None where a finished run was resumed, or nothing can be measured.
    """
    model = run.measured()
    share_buffers(model)
    if scores is None and run.validation is not None:
        scores = evaluate(model, run.validation, run.normalization, run.num_classes, run.accelerator)
    if run.accelerator.is_main_process:
        step = run.horizon.num_steps
        export_classifier(run.folder, model, run.encoder, run.config, run.data.class_names, step, scores, best=False)
        tqdm.write(finish_report(run.folder, run.config, run.validation, run.data.class_names, scores))

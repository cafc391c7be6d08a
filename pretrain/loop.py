"""The pretraining loop."""

import contextlib
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from data.config import DataConfig, build_order, choose_normalization, open_source
from data.loader import Batch, BatchLoader, preview_images
from data.shards import ShardSet
from data.stream import BatchPlan, Order
from data.transforms import Normalization
from models.mae import MAEOutput, MaskedAutoencoder, build_mae
from models.masking import seeded_noise
from pretrain.config import CHANGES_THE_RUN, MAY_CHANGE_ON_RESUME, PretrainConfig
from pretrain.pictures import reconstruction_sheet, reconstruction_triples, sheet_note
from pretrain.report import describe_run, export_encoder, next_commands
from training.batches import plan_batches
from training.checkpoint import replacing
from training.cli import UserError
from training.faults import FaultLog
from training.health import Health
from training.history import note_start
from training.knn import OnlineProbe, is_due
from training.launch import contact, facts_of_launch, facts_of_start, require_agreement
from training.log import RunLog
from training.meters import Meters, WaitClock
from training.optim import build_adamw, parameter_groups, set_lr
from training.parallel import Distributed, sharding_asked
from training.resume import compute_dtype, identity, resume
from training.run import StopRequest, build_accelerator, check_run_folder, lock_for_run
from training.saving import Saver
from training.schedule import Horizon, num_steps_of, plan_horizon, scale_lr, warmup_cosine
from training.watch import StallWatch

NUM_PREVIEW_IMAGES = 8


@dataclass
class Pretraining:
    """Everything a run needs, put together and checked before the first step."""

    config: PretrainConfig
    folder: Path
    accelerator: Accelerator
    shards: ShardSet
    normalization: Normalization
    model: MaskedAutoencoder
    """The bare model: checkpoints, and where it is not sharded, export and pictures."""
    distributed: Distributed[MaskedAutoencoder]
    """The model as all processes train it."""
    order: Order
    plan: BatchPlan
    horizon: Horizon
    start_step: int
    resumed_from: Path | None
    """The checkpoint of the start step."""
    preview: Tensor
    """(b, C, H, W) uint8 on the device: what pictures are made of."""
    probe: OnlineProbe | None
    """Measures the encoder now and then."""
    lock: AbstractContextManager[object]
    """Keeps the run folder to this run until it is left."""
    saver: Saver
    """Writes the checkpoints."""
    health: Health = field(init=False)
    """Skips steps that are not sound, and ends a run that does not recover."""

    def __post_init__(self) -> None:
        self.health = Health(
            self.accelerator, self.folder, self.distributed, self.start_step, self.shards,
            lambda step: build_loader(self, step, step + 1), self.saver.set_suspects_aside,
            lambda model, batch, *_: compute_output(self, model, batch).loss,
        )  # fmt: skip

    @property
    def wrapped(self) -> nn.Module:
        """The model as accelerate distributes it: training steps."""
        return self.distributed.wrapped


def set_up(config: PretrainConfig) -> Pretraining:
    """Puts a run together; nothing is written before everything is checked.

    Raises:
        UserError, DataError: settings, data or run folder do not fit.
    """
    folder = Path(config.output_dir)
    check_run_folder(folder, config, config.resume, (*MAY_CHANGE_ON_RESUME, *CHANGES_THE_RUN))
    accelerator = build_accelerator(config.run, folder)
    require_agreement(accelerator, facts_of_launch(config))  # before any other thing that they do together
    try:
        model = build_mae(config.model)
    except ValueError as error:
        raise UserError(f"model: {error}") from error

    shards = open_training_shards(config.data)
    order = build_order(shards, config.data, config.run.seed)
    normalization = choose_normalization(config.data, shards, config.model.in_chans)
    plan = plan_batches(
        config.global_batch_size, config.data, config.optim.accum_steps, accelerator.num_processes, accelerator.process_index,
    )  # fmt: skip
    horizon = plan_horizon(config.epochs, config.num_steps, config.optim.warmup_epochs, len(shards), plan.global_batch_size)
    preview = preview_images(shards, config.model.img_size, config.model.in_chans, NUM_PREVIEW_IMAGES, config.data.max_pixels)
    probe = None
    if config.probe.train:
        probe = OnlineProbe(
            config.probe, config.model.img_size, config.model.in_chans, normalization,
            config.data.batch_size_per_process, config.data.num_workers, accelerator,
        )  # fmt: skip

    model.to(accelerator.device)
    optimizer = build_adamw(parameter_groups(model, config.optim.weight_decay), config.optim)
    start_step, resumed_from = 0, None
    now = identity(config, shards.manifest.hash, plan.global_batch_size, accelerator)
    length_of_run = functools.partial(num_steps_of, num_samples=len(shards), global_batch_size=plan.global_batch_size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_for_run(folder, accelerator))  # before checkpoints are read: damaged ones are set aside
        if config.resume == "auto":
            checkpoint = resume(folder / "checkpoints", now, length_of_run, CHANGES_THE_RUN, {}, model, optimizer, accelerator)
            if checkpoint is not None:
                start_step, resumed_from = checkpoint.step, checkpoint.path
        lock = stack.pop_all()
    # Every process has read the folder before the first one writes to it.
    require_agreement(accelerator, facts_of_start(now, horizon.num_steps, start_step))
    if config.run.compile:
        model.compile()  # in place: parameter names stay as they are
    distributed = Distributed(model, optimizer, accelerator, sharding_asked(os.environ))
    if accelerator.is_main_process:
        note_start(folder, config, start_step, accelerator.num_processes)
    saver = Saver(config.run, folder / "checkpoints", plan.global_batch_size / len(shards), accelerator)
    return Pretraining(
        config, folder, accelerator, shards, normalization, model, distributed, order, plan, horizon,
        start_step, resumed_from, preview.to(accelerator.device), probe, lock, saver,
    )  # fmt: skip


def open_training_shards(config: DataConfig) -> ShardSet:
    """Opens the data set that `data.train` names."""
    if not config.train:
        raise UserError('no data given: --data.train FOLDER (of images or of shards), a CSV table of images, or "digits"')
    return open_source(config.train, config)


def build_loader(run: Pretraining, start_step: int, stop_step: int) -> BatchLoader:
    """This process's batches of some steps."""
    config = run.config
    return BatchLoader(
        run.shards, config.data, run.plan, run.order, config.model.img_size, config.model.in_chans, start_step, stop_step,
        pin_memory=run.accelerator.device.type == "cuda",
    )  # fmt: skip


def train(run: Pretraining) -> int:
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
        tqdm.write(
            describe_run(
                config, run.shards, run.distributed, horizon, run.plan, accelerator.device, compute_dtype(accelerator),
            )
        )  # fmt: skip
        if run.probe:
            tqdm.write(f"   probe  {run.probe.describe()}")
        if run.resumed_from:
            tqdm.write(f"  resume  {run.resumed_from}")
    loader = build_loader(run, run.start_step, horizon.num_steps)
    peak_lr = scale_lr(config.optim.base_lr, run.plan.global_batch_size)
    clock, meters = WaitClock(), Meters()
    log = RunLog(
        accelerator, run.folder, run.start_step, horizon.num_steps, run.plan.global_batch_size, clock,
        FaultLog(accelerator, run.folder, run.start_step, run.plan, config.data.max_bad_share),
    )  # fmt: skip
    step, stopped = run.start_step, False
    with (
        StopRequest(config.run.timeout) as stop,
        log,
        run.saver,
        contextlib.closing(StallWatch().watch(clock.watch(iter(loader)))) as batches,
        contact(run.folder, config.run.timeout_minutes),
    ):
        run.health.count_on(log.resumed)
        if step == 0:
            measure(run, log, step)
        while step < horizon.num_steps and not stopped:
            lr = warmup_cosine(step, horizon.warmup_steps, horizon.num_steps, peak_lr, config.optim.min_lr)
            set_lr(run.distributed.optimizer, lr)
            train_step(run, batches, meters, log.faults)
            step += 1
            run.health.check(step)

            stopped, by_clock, has_failed = stop.agreed(*run.saver.notes())
            saves = run.saver.is_due(step, by_clock, has_failed) or stopped or step == horizon.num_steps
            if saves or step % config.run.log_every_steps == 0:
                write_log(run, log, step, lr, meters)
            if saves:
                save(run, step)
            # Saved before anything is shown or measured: an image that cannot be read costs no training.
            pictures = config.run.picture_every_steps
            is_due = step == horizon.num_steps or (pictures and step % pictures == 0)
            if is_due:
                show_restored(run, log, step)
            if not stopped:  # whoever stops a run may not wait long for it to save
                measure(run, log, step)
    if step == horizon.num_steps:
        finish(run)
        return 0
    if accelerator.is_main_process:
        tqdm.write(f"stopped after step {step}; the same command with --resume auto goes on from there")
    return stop.exit_status or 1


def write_log(run: Pretraining, log: RunLog, step: int, lr: float, meters: Meters) -> None:
    """Writes the entry of a log interval.

    Raises:
        SystemExit: too many samples are unreadable; a checkpoint is saved.
    """
    means = run.health.take(meters)
    values = {"lr": lr, "epoch": step * run.plan.global_batch_size / len(run.shards)}
    headline = "all steps skipped"
    if means:
        loss, baseline = means["loss"], means["baseline_loss"]
        explained = 1.0 - loss / baseline if baseline > 0 else 0.0
        values |= {"loss": loss, "explained": explained, "grad_norm": means["grad_norm"]}
        headline = f"loss {loss:.4f}, explained {explained:.1%}"
    log.write(step, values | run.health.entries(step, means.get("loss")), headline)
    if log.faults.too_many:
        save(run, step)
        log.end_run()


def train_step(run: Pretraining, batches: Iterator[Batch], meters: Meters, faults: FaultLog) -> None:
    """Does one optimizer step: accumulated micro-batches, then the update."""
    accum_steps = run.plan.accum_steps
    for micro_step in range(accum_steps):
        batch = next(batches)
        faults.extend(batch.faults)
        is_last = micro_step == accum_steps - 1
        # Gradients travel between processes once per step, with the last micro-batch.
        with contextlib.nullcontext() if is_last else run.distributed.without_sync():
            output = compute_output(run, run.wrapped, batch)
            run.health.backward(output.loss, accum_steps, batch, baseline_loss=output.baseline_loss)
    run.health.update(run.distributed.clip_gradients(run.config.optim.clip_grad_norm), meters)


def compute_output(run: Pretraining, model: nn.Module, batch: Batch) -> MAEOutput:
    """Runs the model, with or without its wrapper, on a micro-batch."""
    images = batch.images.to(run.accelerator.device, non_blocking=True)
    seeds = batch.seeds.to(run.accelerator.device, non_blocking=True)
    noise = seeded_noise(seeds, run.model.encoder.num_patches)
    return model(run.normalization.apply(images), noise)


def measure(run: Pretraining, log: RunLog, step: int) -> None:
    """Measures the encoder where a period is complete, and at the end of the run.

    Raises:
        DataError: an image of the probe cannot be read.
    """
    epochs_per_step = run.plan.global_batch_size / len(run.shards)
    due = step == run.horizon.num_steps or is_due(step, epochs_per_step, run.config.probe.every_epochs)
    if run.probe is None or not due:
        return
    with log.paused():
        values = run.probe.measure(run.distributed.whole_model().encoder)
    shares = f"{values['knn/mean']:.1%} by the mean of the patches, {values['knn/cls']:.1%} by CLS"
    log.write_measured(step, values, f"{run.config.probe.k}-NN accuracy {shares}")


def show_restored(run: Pretraining, log: RunLog, step: int) -> None:
    """Puts the preview images, restored, into TensorBoard; all processes must call it."""
    model = run.distributed.whole_model()
    if run.accelerator.is_main_process:
        log.add_picture("reconstruction", preview_sheet(run, model, step), step)


def preview_sheet(run: Pretraining, model: MaskedAutoencoder, step: int) -> Image.Image:
    """Shows the preview images restored, always under the same masks, so that the pictures of a run can be compared."""
    seeds = torch.arange(len(run.preview), device=run.preview.device)
    noise = seeded_noise(seeds, model.encoder.num_patches)
    with run.accelerator.autocast():
        triples = reconstruction_triples(model, run.preview, noise, run.normalization)
    return reconstruction_sheet(triples, sheet_note(model, step))


def save(run: Pretraining, step: int) -> None:
    """Saves a checkpoint; ends all processes where the weights are not worth one."""
    is_sound = run.health.require_sound_weights(step)
    record = identity(run.config, run.shards.manifest.hash, run.plan.global_batch_size, run.accelerator)
    run.saver.save(step, record, run.model, run.distributed.optimizer, is_sound=is_sound)


def finish(run: Pretraining) -> None:
    """Leaves the encoder and the picture, and says what to type next; all processes must call it."""
    model = run.distributed.whole_model()
    if not run.accelerator.is_main_process:
        return
    export_encoder(run.folder, model, run.config.model, run.normalization)
    with replacing(run.folder / "reconstruction.png") as temporary:
        preview_sheet(run, model, run.horizon.num_steps).save(temporary, format="PNG")
    tqdm.write(next_commands(run.folder, run.config.data.train))

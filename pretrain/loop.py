"""The pretraining loop."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from data.digits import digits_shards
from data.loader import Batch, BatchLoader, choose_normalization, preview_images
from data.shards import ShardSet, open_shards
from data.stream import BatchPlan, SampleOrder
from data.transforms import Normalization
from models.mae import MaskedAutoencoder, build_mae
from models.masking import seeded_noise
from pretrain.config import MAY_CHANGE_ON_RESUME, Horizon, PretrainConfig, plan_horizon
from pretrain.pictures import reconstruction_sheet, reconstruction_triples, sheet_note
from pretrain.report import describe_run, export_encoder, next_commands
from training.checkpoint import checkpoint_path, newest_checkpoint, replacing, restore, save_checkpoint
from training.cli import UserError, flat_config
from training.machine import memory_mib
from training.meters import Meters, WaitClock
from training.optim import build_adamw, set_lr
from training.run import MetricsFile, StopRequest, build_accelerator, check_run_folder, save_config
from training.schedule import scale_lr, warmup_cosine

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
    """The bare model: checkpoints, export and pictures."""
    wrapped: nn.Module
    """The model as accelerate distributes it: training steps."""
    optimizer: torch.optim.Optimizer
    plan: BatchPlan
    horizon: Horizon
    start_step: int
    preview: Tensor
    """(b, C, H, W) uint8 on the device: what pictures are made of."""


def set_up(config: PretrainConfig) -> Pretraining:
    """Puts a run together; nothing is written before everything is checked.

    Raises:
        UserError, DataError: settings, data or run folder do not fit.
    """
    folder = Path(config.output_dir)
    check_run_folder(folder, config, config.resume, MAY_CHANGE_ON_RESUME)
    accelerator = build_accelerator(config.run, folder)
    try:
        model = build_mae(config.model)
    except ValueError as error:
        raise UserError(f"model: {error}") from error

    shards = open_training_shards(config.data.train)
    normalization = choose_normalization(config.data, shards, config.model.in_chans)
    plan = BatchPlan(
        config.data.batch_size_per_process,
        config.optim.accum_steps,
        accelerator.num_processes,
        accelerator.process_index,
    )
    horizon = plan_horizon(config, len(shards), plan.global_batch_size)
    preview = preview_images(shards, config.model.img_size, config.model.in_chans, NUM_PREVIEW_IMAGES, config.data.max_pixels)

    model.to(accelerator.device)
    optimizer = build_adamw(model, config.optim)
    start_step = 0
    if config.resume == "auto":
        start_step = resume(folder / "checkpoints", identity(config, shards, plan), model, optimizer)
    if config.run.compile:
        model.compile()  # in place: parameter names stay as they are
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    accelerator.wait_for_everyone()  # every process has checked the folder before the first one writes to it
    if accelerator.is_main_process and start_step == 0:
        save_config(folder, config)
    return Pretraining(
        config, folder, accelerator, shards, normalization, model, wrapped, cast(torch.optim.Optimizer, optimizer),
        plan, horizon, start_step, preview.to(accelerator.device),
    )  # fmt: skip


def open_training_shards(train: str) -> ShardSet:
    """Opens the data set that `data.train` names."""
    if not train:
        raise UserError('no data given: --data.train FOLDER (or "digits"); make a folder with scripts/make_shards.py')
    return open_shards(digits_shards() if train == "digits" else train)


def identity(config: PretrainConfig, shards: ShardSet, plan: BatchPlan) -> dict[str, object]:
    """What a checkpoint records of its run: the config, and what must agree for the run to be continued."""
    return flat_config(config) | {"manifest_hash": shards.manifest.hash, "global_batch_size": plan.global_batch_size}


def resume(folder: Path, now: dict[str, object], model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restores the newest valid checkpoint of a run.

    Returns:
        The number of steps done; 0 where there is no checkpoint.

    Raises:
        UserError: the data or the global batch size is another than in the checkpoint.
    """
    checkpoint, complaints = newest_checkpoint(folder)
    for complaint in complaints:
        tqdm.write(f"warning: {complaint}; an earlier checkpoint is used")
    if checkpoint is None:
        return 0
    was = checkpoint.config
    if was["manifest_hash"] != now["manifest_hash"]:
        raise UserError(
            f"{checkpoint.path}: was trained on other data ({was['data.train']}) than {now['data.train']} holds now; "
            "continue on the same shards, or start a new run with another --output_dir"
        )
    if was["global_batch_size"] != now["global_batch_size"]:
        raise UserError(
            f"{checkpoint.path}: was trained with a global batch of {was['global_batch_size']}, now it would be "
            f"{now['global_batch_size']}: change --data.batch_size_per_process or --optim.accum_steps so that "
            "batch_size_per_process x processes x accum_steps stays the same"
        )
    restore(checkpoint, model, optimizer)
    return checkpoint.step


def train(run: Pretraining) -> int:
    """Trains to the end, or until a signal.

    Returns:
        The exit status: 0, or 128 + the number of the signal that ended the run.

    Raises:
        UserError: the loss is not finite, or a checkpoint cannot be written.
        DataError: the data cannot be read.
    """
    config, accelerator, horizon = run.config, run.accelerator, run.horizon
    if accelerator.is_main_process:
        describe = describe_run(
            config, run.shards, run.model, horizon, run.plan.global_batch_size, accelerator.num_processes,
            accelerator.device, "bfloat16" if accelerator.mixed_precision == "bf16" else "float32",
        )  # fmt: skip
        tqdm.write(describe)
        if run.start_step:
            tqdm.write(f"  resume  {checkpoint_path(run.folder / 'checkpoints', run.start_step)}")
    order = SampleOrder(run.shards.first_sample, config.run.seed, config.data.shuffle_window)
    loader = BatchLoader(
        run.shards, config.data, run.plan, order, config.model.img_size, config.model.in_chans,
        run.start_step, horizon.num_steps, pin_memory=accelerator.device.type == "cuda",
    )  # fmt: skip
    peak_lr = scale_lr(config.optim.base_lr, run.plan.global_batch_size)
    clock, meters = WaitClock(), Meters()
    batches = clock.watch(iter(loader))
    log = RunLog(run, clock)
    step = run.start_step
    with StopRequest() as stop, log:
        for step in range(run.start_step + 1, horizon.num_steps + 1):
            lr = warmup_cosine(step - 1, horizon.warmup_steps, horizon.num_steps, peak_lr, config.optim.min_lr)
            set_lr(run.optimizer, lr)
            train_step(run, batches, meters, log.faults)

            is_last = step == horizon.num_steps
            if step % config.run.log_every_steps == 0 or is_last:
                # Processes may notice a signal at different steps: they agree where they meet anyway.
                meters.update(stop=torch.tensor(float(stop.signal is not None), device=accelerator.device))
                means = meters.take(lambda tensor: cast(Tensor, accelerator.reduce(tensor, "mean")))
                stop_agreed = means.pop("stop") > 0
                log.write(step, lr, means)
            else:
                stop_agreed = accelerator.num_processes == 1 and stop.signal is not None
            pictures = config.run.picture_every_steps
            if pictures and step % pictures == 0 and not is_last:
                log.picture(step)
            if step % config.run.save_every_steps == 0 or stop_agreed or is_last:
                save(run, step)
            if stop_agreed and not is_last:
                break
    if step == horizon.num_steps:
        finish(run)
        return 0
    if accelerator.is_main_process:
        tqdm.write(f"stopped after step {step}; the same command with --resume auto goes on from there")
    return stop.exit_status or 1


def train_step(run: Pretraining, batches: Iterator[Batch], meters: Meters, faults: list[str]) -> None:
    """Does one optimizer step: accumulated micro-batches, then the update."""
    accelerator, accum_steps = run.accelerator, run.config.optim.accum_steps
    for micro_step in range(accum_steps):
        batch = next(batches)
        faults.extend(batch.faults)
        is_last = micro_step == accum_steps - 1
        # Gradients travel between processes once per step, with the last micro-batch.
        with contextlib.nullcontext() if is_last else accelerator.no_sync(run.wrapped):
            images = batch.images.to(accelerator.device, non_blocking=True)
            seeds = batch.seeds.to(accelerator.device, non_blocking=True)
            noise = seeded_noise(seeds, run.model.encoder.num_patches)
            output = run.wrapped(run.normalization.apply(images), noise)
            accelerator.backward(output.loss / accum_steps)
        meters.update(loss=output.loss, baseline_loss=output.baseline_loss)
    limit = run.config.optim.clip_grad_norm
    norm = accelerator.clip_grad_norm_(run.model.parameters(), float("inf") if limit is None else limit)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    meters.update(grad_norm=cast(Tensor, norm))


class RunLog:
    """Progress bar, TensorBoard, metrics.jsonl and pictures of a run; on all but the first process it does nothing.

    Args:
        run: the run.
        clock: measures the waiting for data.
    """

    def __init__(self, run: Pretraining, clock: WaitClock) -> None:
        self.run = run
        self.clock = clock
        self.faults: list[str] = []
        """Unreadable samples of this process since the last entry."""
        self.num_faults = 0
        self._last_step = run.start_step
        self._last_time = time.perf_counter()

    def __enter__(self) -> "RunLog":
        run = self.run
        run.accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": run.start_step + 1}})
        if run.accelerator.is_main_process:
            self.metrics = MetricsFile(run.folder / "metrics.jsonl", run.start_step)
        self.bar = tqdm(
            total=run.horizon.num_steps, initial=run.start_step, unit="step", dynamic_ncols=True,
            disable=not run.accelerator.is_main_process,
        )  # fmt: skip
        self._last_time = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.run.accelerator.is_main_process:
            self.metrics.close()
        self.run.accelerator.end_training()

    def write(self, step: int, lr: float, means: dict[str, float]) -> None:
        """Writes one entry.

        Raises:
            UserError: the loss or the gradient is not finite.
        """
        run, now = self.run, time.perf_counter()
        elapsed_s = now - self._last_time
        images = (step - self._last_step) * run.plan.global_batch_size
        values = {
            "loss": means["loss"],
            "explained": 1.0 - means["loss"] / means["baseline_loss"] if means["baseline_loss"] > 0 else 0.0,
            "lr": lr,
            "grad_norm": means["grad_norm"],
            "images_per_s": images / elapsed_s,
            "data_wait": self.clock.waited_s / elapsed_s,
            "memory_mib": memory_mib(run.accelerator.device),
            "epoch": step * run.plan.global_batch_size / len(run.shards),
        }
        self._report_faults()
        if run.accelerator.is_main_process:
            self.metrics.write({"step": step, **values})
            self.bar.update(step - self._last_step)
            self.bar.set_postfix_str(
                f"loss {values['loss']:.4f}, explained {values['explained']:.1%}, "
                f"{values['images_per_s']:.0f} images/s, data wait {values['data_wait']:.0%}"
            )
        run.accelerator.log(values, step=step)
        if not torch.isfinite(torch.tensor([means["loss"], means["grad_norm"]])).all():
            raise UserError(
                f"loss {means['loss']} and gradient norm {means['grad_norm']} between steps {self._last_step + 1} and {step}: "
                "not finite. Continue from the last checkpoint with a lower --optim.base_lr, --optim.clip_grad_norm 1 or "
                "--run.dtype float32"
            )
        self._last_step, self._last_time, self.clock.waited_s = step, time.perf_counter(), 0.0

    def _report_faults(self) -> None:
        if not self.faults:
            return
        self.num_faults += len(self.faults)
        tqdm.write(
            f"warning: {len(self.faults)} unreadable samples replaced by their neighbours ({self.num_faults} so far on process "
            f"{self.run.accelerator.process_index}); the first: {self.faults[0]}"
        )
        self.faults.clear()

    def picture(self, step: int) -> None:
        """Shows in TensorBoard how the preview images are restored."""
        if self.run.accelerator.is_main_process:
            writer = cast(SummaryWriter, self.run.accelerator.get_tracker("tensorboard", unwrap=True))
            # One picture an image: input, visible and restored side by side.
            wide = torch.cat(preview_triples(self.run).unbind(1), dim=-1)  # (b, 3, H, 3 * W)
            writer.add_images("reconstruction", wide, global_step=step)


def preview_triples(run: Pretraining) -> Tensor:
    """The preview images as triples, always under the same masks, so that pictures of one run can be compared."""
    seeds = torch.arange(len(run.preview), device=run.preview.device)
    noise = seeded_noise(seeds, run.model.encoder.num_patches)
    with run.accelerator.autocast():
        return reconstruction_triples(run.model, run.preview, noise, run.normalization)


def save(run: Pretraining, step: int) -> None:
    """Writes a checkpoint on the first process."""
    if run.accelerator.is_main_process:
        config = identity(run.config, run.shards, run.plan)
        save_checkpoint(run.folder / "checkpoints", step, config, run.model, run.optimizer, run.config.run.keep_checkpoints)


def finish(run: Pretraining) -> None:
    """Leaves the encoder and the picture, and says what to type next."""
    if not run.accelerator.is_main_process:
        return
    export_encoder(run.folder, run.model, run.config.model, run.normalization)
    sheet = reconstruction_sheet(preview_triples(run), sheet_note(run.model, run.horizon.num_steps))
    with replacing(run.folder / "reconstruction.png") as temporary:
        sheet.save(temporary, format="PNG")
    tqdm.write(next_commands(run.folder, run.config.model))

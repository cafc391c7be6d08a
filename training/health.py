"""Steps that must not count, and runs that must not go on."""

import functools
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm import tqdm

from data.errors import DataError
from data.loader import Batch
from data.reader import ShardReader
from data.shards import ShardSet
from training.checkpoint import SetAside, replacing
from training.cli import EXIT_USER_ERROR, UserError, user_errors
from training.diagnosis import first_not_finite
from training.launch import here
from training.meters import Meters
from training.parallel import Distributed, own_part
from training.watch import SpikeWatch

MAX_SKIPPED_IN_A_ROW = 10
"""So many skipped steps in a row end a run."""
MAX_SKIPPED_SHARE = 0.1
"""Of the steps before a checkpoint; above it the checkpoint is not trusted."""

_APPLIED = "applied"
_JUMPED_FROM = "loss_jumped_from"


class Health:
    """Decides step by step whether the optimizer's update is made, and ends a run that does not recover.

    A step is skipped where the loss of any process, or the norm of the gradient, is not finite; a norm whose square overflows
    counts as infinite, for the optimizer squares it. A skipped step leaves weights, moments and running statistics as they
    were. It counts as a step of the schedule, and its samples as read.

    All processes decide alike without asking each other. A loss that is not finite is made to give a gradient that is not:
    adding up the gradients brings that to every process, and all compute the norm from the same sums. On a GPU the host does
    not learn of it: the decision is a number on the device, which the fused AdamW reads there, as it does for
    `torch.amp.GradScaler`. Only LARS, which has no such entrance, makes the host wait. The host looks once a log interval, at
    each checkpoint, and every MAX_SKIPPED_IN_A_ROW steps; on the CPU at every step. So a run ends after exactly that many
    skipped steps in a row on the CPU, and after at most twice as many on a GPU.

    Before a checkpoint is saved, the new weights must be finite, and must give a finite loss on images which the old ones
    gave one for: one forward pass of a micro-batch. That does not make them good ones: a checkpoint is a suspect where the last
    step was skipped, where more than one, and more than MAX_SKIPPED_SHARE, of the steps before it were (since the last
    checkpoint, but of at least MAX_SKIPPED_IN_A_ROW steps), or while the loss has not come back from a jump (`SpikeWatch`).
    When the run ends, suspects are set aside, and it is continued from the newest checkpoint that is none.

    Args:
        accelerator: of the run.
        folder: of the run.
        distributed: the model and its optimizer.
        start_step: optimizer steps done before.
        shards: what is trained on.
        batches_of: reads this process's micro-batches of a step again; steps count from 0.
        set_suspects_aside: of the run's `Saver`.
        loss_of: computes the loss of a model without any wrapper on a micro-batch, by its step and number therein.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        distributed: Distributed[Any],
        start_step: int,
        shards: ShardSet,
        batches_of: Callable[[int], Iterable[Batch]],
        set_suspects_aside: Callable[[], SetAside],
        loss_of: Callable[[nn.Module, Batch, int, int], Tensor],
    ) -> None:
        self.accelerator = accelerator
        self.folder = folder
        self.distributed = distributed
        self.model: nn.Module = distributed.model
        self.optimizer = optimizer = distributed.optimizer
        self.shards = shards
        self.batches_of = batches_of
        self.set_suspects_aside = set_suspects_aside
        self.loss_of = loss_of
        self.in_a_row = 0
        """Skipped steps since the last one that counted; as the host last saw it, the same on all processes."""
        self.skipped = 0
        """Skipped steps of the run; on processes other than the first, since it was started."""
        bare = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        self._fused = bare if isinstance(bare, torch.optim.AdamW) and bare.defaults["fused"] else None
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        self._statistics = [(buffer, buffer.clone()) for module in norms for buffer in module.buffers(recurse=False)]
        self._counts = torch.zeros(2, dtype=torch.int64, device=accelerator.device)  # in a row, in all
        self._sums: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._batch: Batch | None = None
        self._sound_batch: Batch | None = None
        self._start_step = start_step
        self._saves: deque[tuple[int, int]] = deque([(start_step, 0)])
        """Steps of the last checkpoints, and steps skipped until then."""
        self._warn_at = 1
        self._spikes = SpikeWatch()
        self._tells_jump = False

    def backward(self, loss: Tensor, accum_steps: int, batch: Batch, **others: Tensor) -> None:
        """Computes the gradients of a micro-batch.

        Args:
            loss: of the micro-batch, a scalar.
            accum_steps: micro-batches of a step.
            batch: what the loss is of.
            others: further scalars to be averaged.
        """
        one_or_nan = torch.where(loss.detach().isfinite(), 1.0, math.nan)
        self.accelerator.backward(loss * one_or_nan / accum_steps)
        for name, value in {"loss": loss, **others}.items():
            share = value.detach().float() / accum_steps
            self._sums[name] = self._sums[name] + share if name in self._sums else share
        self._batch = batch

    def update(self, norm: Tensor, meters: Meters) -> None:
        """Updates the weights where the step is sound, and empties the gradients.

        Args:
            norm: of the gradient, before it was clipped; the same on all processes.
            meters: get the averages of the step.
        """
        is_sound = (norm * norm).isfinite()
        if self._fused is not None:
            self._fused.found_inf = 1.0 - is_sound.float()  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.step()
        elif bool(is_sound):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, kept in self._statistics:
            buffer.copy_(torch.where(is_sound, buffer, kept))
            kept.copy_(buffer)
        in_a_row, total = self._counts
        self._counts = torch.stack([torch.where(is_sound, 0, in_a_row + 1), total + ~is_sound])
        self._last = {"grad_norm": norm, **self._sums}
        meters.update(**{name: torch.where(is_sound, value, 0.0) for name, value in self._last.items()}, **{_APPLIED: is_sound})
        self._sums = {}

    def take(self, meters: Meters) -> dict[str, float]:
        """Gives the means of a log interval over the steps that counted and over all processes; empty where none did."""
        means = meters.take(lambda tensor: cast(Tensor, self.accelerator.reduce(tensor, "mean")))
        applied = means.pop(_APPLIED)
        return {name: value / applied for name, value in means.items()} if applied > 0 else {}

    def count_on(self, last: Mapping[str, Any]) -> None:
        """Goes on counting where the interrupted run stood at the start step; on the first process, which tells and saves.

        Args:
            last: the newest values of metrics.jsonl.
        """
        self._counts[1] = self.skipped = int(last.get("skipped_steps", 0))
        self._saves = deque([(self._start_step, self.skipped)])
        self._spikes.jumped_from = float(last.get(_JUMPED_FROM, 0.0)) or None
        self._tells_jump = self._spikes.jumped_from is not None
        self._warn_at = self.skipped + 1

    def entries(self, step: int, loss: float | None) -> dict[str, float]:
        """What a log entry says of the health of a run; warns of a loss that jumps.

        Args:
            step: optimizer steps done.
            loss: mean of the log interval; None where no step counted.
        """
        self._look(step)
        ratio, warning = self._spikes.add(loss) if loss is not None else (None, None)
        if warning and self.accelerator.is_main_process:
            tqdm.write(f"warning: step {step}: {warning}")
        entries = {"skipped_steps": float(self.skipped)} | ({} if ratio is None else {"loss_over_median": ratio})
        if self._tells_jump or self._spikes.jumped_from is not None:  # 0, once, where the loss has come back
            entries[_JUMPED_FROM] = self._spikes.jumped_from or 0.0
        self._tells_jump = self._spikes.jumped_from is not None
        return entries

    def check(self, step: int) -> None:
        """Ends a run that does not recover; all processes must call it after each step.

        Args:
            step: optimizer steps done.

        Raises:
            SystemExit: MAX_SKIPPED_IN_A_ROW steps in a row were skipped; the first process has said what is known of it.
        """
        if self.accelerator.device.type == "cpu" or step % MAX_SKIPPED_IN_A_ROW == 0:
            self._look(step)
        if self.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            self._end_run(step, f"the last {self.in_a_row} steps were skipped: loss or gradient norm is not finite")

    def require_sound_weights(self, step: int) -> bool:
        """Makes sure that the weights are worth a checkpoint; all processes must call it at the same step.

        Args:
            step: optimizer steps done.

        Returns:
            Whether the run is sound; else the checkpoint is a suspect. Right on the first process, which saves: the others do
            not know what was before a resumption.

        Raises:
            SystemExit: they are not, and no later ones will be; the first process has said what is known of it.
        """
        self._look(step)
        is_sound = torch.tensor(False)
        if self._sound_batch is not None:
            tensors = [own_part(tensor) for tensor in self.model.state_dict().values() if tensor.is_floating_point()]
            with torch.no_grad():
                loss = self._compute_loss(self.model, self._sound_batch, step, 0)
            is_sound = torch.stack([loss.isfinite(), *(tensor.isfinite().all() for tensor in tensors)]).all()
            for buffer, kept in self._statistics:  # the forward pass has moved them
                buffer.copy_(kept)
        sick = (~is_sound).to(self.accelerator.device, torch.float32)
        if float(cast(Tensor, self.accelerator.reduce(sick, "sum"))) > 0:
            what = "the new weights give no finite loss"
            if self._sound_batch is None:
                what = f"no step since step {self._start_step} has given a finite loss"
            self._end_run(step, what)
        while len(self._saves) > 1 and self._saves[1][0] <= step - MAX_SKIPPED_IN_A_ROW:
            self._saves.popleft()
        since, skipped_before = self._saves[0]
        self._saves.append((step, self.skipped))
        is_rare = self.skipped - skipped_before <= max(1.0, MAX_SKIPPED_SHARE * (step - since))
        return is_rare and self.in_a_row == 0 and self._spikes.jumped_from is None

    def _look(self, step: int) -> None:
        """Lets the host see the counts."""
        before, (self.in_a_row, self.skipped) = self.skipped, self._counts.tolist()
        if self.in_a_row == 0:
            self._sound_batch = self._batch
        if self.skipped > before and self.skipped >= self._warn_at and self.accelerator.is_main_process:
            self._warn_at = 2 * self.skipped  # a line each time that they have doubled
            tqdm.write(
                f"warning: step {step}: {self.skipped} step(s) of this run were skipped so far, because the loss or the norm "
                f"of the gradient is not finite; {MAX_SKIPPED_IN_A_ROW} in a row end it"
            )

    def _end_run(self, step: int, what: str) -> None:
        """Ends all processes together, after the first has told what is known; nothing is left to do but this.

        Raises:
            SystemExit: with the exit status of a user's mistake.
        """
        values = {name: value.item() for name, value in self._last.items()}
        model = self.distributed.whole_model()  # each process may come to another end with it
        everyone = gather_object([(here(), values, *self._examine(model, step - 1))])
        try:
            if self.accelerator.is_main_process:
                with tqdm.external_write_mode(file=sys.stderr), user_errors():
                    raise UserError(self._diagnosis(step, what, everyone))
        finally:
            # Launchers kill all others when one process ends: it must not be one before the message is out.
            self.accelerator.wait_for_everyone()
        raise SystemExit(EXIT_USER_ERROR)

    def _diagnosis(self, step: int, what: str, everyone: list[tuple[str, dict[str, float], str, list[dict[str, Any]]]]) -> str:
        """One line for the user; writes the list of samples."""
        found = [entry for entry in everyone if entry[2]] or everyone
        process, values, finding, _ = found[0]
        listed = self._list_samples(step, {process: samples for process, _, _, samples in found})
        numbers = f"loss {values.get('loss', math.nan):.4g}, gradient norm {values.get('grad_norm', math.nan):.4g}"
        finding = finding or "the step's images, computed once more, give nothing that is not finite"
        remedies = "a lower --optim.base_lr or --optim.clip_grad_norm 1"
        if self.accelerator.mixed_precision != "no":
            remedies = "a lower --optim.base_lr, --optim.clip_grad_norm 1, or --run.dtype float32"
        return (
            f"step {step}: {what} ({numbers} on {process}); {finding}. The samples of the step {listed}. Nothing of it was "
            f"saved; {self._way_out()} with --resume auto and {remedies}"
        )

    def _list_samples(self, step: int, samples: dict[str, list[dict[str, Any]]]) -> str:
        """Writes the samples of a step into a file; says where they are."""
        path = self.folder / f"sick_step_{step:08d}.json"
        try:
            with replacing(path) as temporary:
                temporary.write_text(json.dumps({"step": step, "samples": samples}, indent=1), encoding="utf-8")
        except OSError as error:  # a full disk must not hide what else is known
            return f"could not be listed in {path} ({error.strerror})"
        return f"are listed in {path}"

    def _way_out(self) -> str:
        """Sees to it that the run can be continued from a good checkpoint; says from which."""
        aside = self.set_suspects_aside()
        told = f"{aside.num_renamed} checkpoint(s) of the sick run are set aside as *.suspect; " if aside.num_renamed else ""
        if aside.left:
            told += f"{', '.join(map(str, aside.left))} could not be: delete what is left of these; "
        return told + (
            "no good checkpoint is there: start again" if aside.sound is None else f"{aside.sound.name} is good: go on from it"
        )

    def _examine(self, model: nn.Module, step: int) -> tuple[str, list[dict[str, Any]]]:
        """Computes a step once more on this process.

        Returns:
            What is not finite first, "" for nothing; and the samples of the micro-batch where that is, else of the last one.
        """
        finding, samples = "", list[dict[str, Any]]()
        try:
            for micro_step, batch in enumerate(self.batches_of(step)):
                samples = self._name(batch)
                finding = first_not_finite(model, functools.partial(self._compute_loss, model, batch, step, micro_step))
                if finding:
                    break
        except (
            DataError,
            RuntimeError,
        ) as error:  # out of memory, say: the end is told even without its cause
            finding = f"the step could not be computed once more ({' '.join(str(error).split())[:200]})"
        return finding, samples

    def _compute_loss(self, model: nn.Module, batch: Batch, step: int, micro_step: int) -> Tensor:
        with self.accelerator.autocast():  # which a copy of a sharded model does not bring along
            return self.loss_of(model, batch, step, micro_step)

    def _name(self, batch: Batch) -> list[dict[str, Any]]:
        with ShardReader(self.shards) as reader:
            samples = [reader.read(index) for index in dict.fromkeys(batch.indices.tolist())]
        return [{"sample": sample.index, "shard": sample.shard, "key": sample.key} for sample in samples]

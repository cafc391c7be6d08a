"""Steps that must not count, runs that must not go on, losses that jump, and readers that have fallen silent."""

import contextlib
import functools
import json
import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

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
from training.checkpoint import replacing
from training.cli import EXIT_USER_ERROR, UserError, user_errors
from training.launch import here
from training.meters import Meters
from training.parallel import Distributed, own_part

Item = TypeVar("Item")

MAX_SKIPPED_IN_A_ROW = 10
"""So many skipped steps in a row end a run."""
STALL_S = 120.0
"""So long a process waits for a batch before it says so."""

SPIKE_WINDOW = 32
"""So many log intervals a new one is compared with."""
SPIKE_MIN = 8
"""So many there must be before."""
SPIKE_RATIO = 1.5
SPIKE_DEVIATIONS = 6.0
"""A spike is above the median by this factor, and by so many deviations: small losses scatter more."""

_APPLIED = "applied"


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
    gave one for: one forward pass of a micro-batch.

    Args:
        accelerator: of the run.
        folder: of the run.
        distributed: the model and its optimizer.
        start_step: optimizer steps done before.
        shards: what is trained on.
        batches_of: reads this process's micro-batches of a step again; steps count from 0.
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
        loss_of: Callable[[nn.Module, Batch, int, int], Tensor],
    ) -> None:
        self.accelerator = accelerator
        self.folder = folder
        self.distributed = distributed
        self.model: nn.Module = distributed.model
        self.optimizer = optimizer = distributed.optimizer
        self.shards = shards
        self.batches_of = batches_of
        self.loss_of = loss_of
        self.in_a_row = 0
        """Skipped steps since the last one that counted; as the host last saw it, the same on all processes."""
        self.skipped = 0
        """Skipped steps of the run, the same."""
        bare = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        self._fused = bare if isinstance(bare, torch.optim.AdamW) and bare.defaults["fused"] else None
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        self._statistics = [(buffer, buffer.clone()) for module in norms for buffer in module.buffers(recurse=False)]
        self._counts = torch.zeros(2, dtype=torch.int64, device=accelerator.device)  # in a row, in all
        self._sums: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._batch: Batch | None = None
        self._sound_batch: Batch | None = None
        self._sound_step = start_step
        self._warn_at = 1
        self._spikes = SpikeWatch()

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
        """Goes on counting where the interrupted run stood at the start step; on the first process.

        Args:
            last: the newest values of metrics.jsonl.
        """
        self._counts[1] = self.skipped = int(last.get("skipped_steps", 0))
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
        return {"skipped_steps": float(self.skipped)} | ({} if ratio is None else {"loss_over_median": ratio})

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

    def require_sound_weights(self, step: int) -> None:
        """Makes sure that the weights are worth a checkpoint; all processes must call it at the same step.

        Args:
            step: optimizer steps done.

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
            what = "no step has given a finite loss yet" if self._sound_batch is None else "the new weights give no finite loss"
            self._end_run(step, f"{what}, and are not worth a checkpoint")
        self._sound_step = step

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
        path = self.folder / f"sick_step_{step:08d}.json"
        samples = {process: listed for process, _, _, listed in found}
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"step": step, "samples": samples}, indent=1), encoding="utf-8")
        numbers = f"loss {values.get('loss', math.nan):.4g}, gradient norm {values.get('grad_norm', math.nan):.4g}"
        finding = finding or "the step's images, computed once more, give nothing that is not finite"
        good = (
            f"the checkpoint of step {self._sound_step} is untouched: go on from it"
            if self._sound_step
            else "there is no checkpoint yet: start again"
        )
        return (
            f"step {step}: {what} ({numbers} on {process}); {finding}. The samples of the step are listed in {path}. Nothing "
            f"of it was saved; {good} with --resume auto and a lower --optim.base_lr, --optim.clip_grad_norm 1, or --run.dtype "
            "float32"
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


def first_not_finite(model: nn.Module, compute: Callable[[], Tensor]) -> str:
    """Computes a loss and its gradients, watching every module.

    The model is not changed, but for statistics that it updates itself, and its gradients are empty afterwards.

    Args:
        model: what `compute` calls.
        compute: gives the loss, a scalar.

    Returns:
        What was not finite first: a weight, the input or output of a module, the loss, or a gradient; "" for nothing.
    """
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return f"the weight {name} is not finite"
    found: list[str] = []

    def look(tensor: Tensor, what: str) -> None:
        if not found and tensor.is_floating_point() and not tensor.detach().isfinite().all():
            found.append(f"{what} is the first to be not finite")

    def hook_of(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            called = f"{name or 'the model'} ({type(module).__name__})"
            for tensor in tensors_in(inputs):
                look(tensor, f"the input of {called}")
            for tensor in tensors_in(output):
                look(tensor, f"the output of {called}")
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: look(gradient, f"the gradient that reaches the output of {called}"))

        return hook

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(hook_of(name)).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code calls no hooks
        loss = compute()
        look(loss, "the loss")
        if not found and loss.requires_grad:
            loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            look(parameter.grad, f"the gradient of the weight {name}")
            parameter.grad = None
    return found[0] if found else ""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


class SpikeWatch:
    """Compares the loss of each log interval with the median of those before it.

    A spike is a loss above SPIKE_RATIO times the median and SPIKE_DEVIATIONS robust deviations above it (1.48 times the median
    distance from the median, which is the standard deviation of a normal distribution). It is told when it begins, the 1st, the
    2nd, the 4th, 8th, ... time. A loss that stays high is the new median before long. A resumed run begins with an empty
    window.
    """

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._inside = False
        self._count = 0

    def add(self, loss: float) -> "Spike":
        """Takes the loss of the next log interval."""
        ratio = warning = None
        if len(self._window) >= SPIKE_MIN:
            median = statistics.median(self._window)
            deviation = 1.48 * statistics.median(abs(value - median) for value in self._window)
            ratio = loss / median if median > 0 else 1.0
            is_spike = ratio > SPIKE_RATIO and loss > median + SPIKE_DEVIATIONS * deviation
            if is_spike and not self._inside:
                self._count += 1
                if self._count & (self._count - 1) == 0:
                    warning = (
                        f"the loss jumped to {loss:.4g}, {ratio:.2g} times the median of the last {len(self._window)} entries "
                        f"({median:.4g}); jump no. {self._count}. Where it does not come back: --resume auto from before it, "
                        "with a lower --optim.base_lr or --optim.clip_grad_norm 1"
                    )
            self._inside = is_spike
        self._window.append(loss)
        return Spike(ratio, warning)


class Spike(NamedTuple):
    """What a loss is to those before it."""

    over_median: float | None
    """Loss over median; None while there are too few before it."""
    warning: str | None
    """A line for the user; None where there is nothing to tell."""


class StallWatch:
    """Says so while this process waits long for its next batch; it never ends the run.

    A thread looks now and then, and tells on stderr after `limit_s`, then each time that the waiting has doubled, and once more
    when the batch has come. The other processes wait in the meantime for this one, and end after `run.timeout_minutes`.

    Args:
        limit_s: None: STALL_S.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = STALL_S if limit_s is None else limit_s
        self._since: float | None = None
        self._tell_at = self.limit_s
        self._ended = threading.Event()

    def watch(self, items: Generator[Item, None, None]) -> Generator[Item, None, None]:
        """Passes items on, watching how long each takes to come; closed, it closes their source."""
        thread = threading.Thread(target=self._look, name="stalls", daemon=True)
        thread.start()
        try:
            with contextlib.closing(items):
                while True:
                    self._tell_at, self._since = self.limit_s, time.monotonic()
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                    waited_s, self._since = time.monotonic() - self._since, None
                    if self._tell_at > self.limit_s:
                        self._tell(f"the batch came after {waited_s:.0f} s")
                    yield item
        finally:
            self._ended.set()
            thread.join()

    def _look(self) -> None:
        while not self._ended.wait(self.limit_s / 8):
            since = self._since
            waited_s = 0.0 if since is None else time.monotonic() - since
            if waited_s >= self._tell_at:
                self._tell_at *= 2
                self._tell(
                    f"no batch of images for {waited_s:.0f} s: the readers wait for the storage, or hang; the run goes on when "
                    "one comes"
                )

    @staticmethod
    def _tell(message: str) -> None:
        tqdm.write(f"warning ({here()}): {message}", file=sys.stderr)

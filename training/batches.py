"""How a global batch is cut into micro-batches for the processes at hand."""

import math

from data.config import DataConfig
from data.stream import BatchPlan
from training.cli import UserError


def plan_batches(
    global_batch_size: int | None,
    data: DataConfig,
    accum_steps: int,
    num_processes: int,
    process_index: int,
    in_pairs: bool = False,
) -> BatchPlan:
    """Plans the micro-batches of a step.

    With a global batch there are as few of them as data.batch_size_per_process allows, all of one size.

    Args:
        global_batch_size: images of one optimizer step over all processes; None: batch_size_per_process x processes x
            accum_steps.
        data: with the most images that a process takes at once, and the views of each.
        accum_steps: micro-batches of a step; counts where global_batch_size is None.
        num_processes: of the run, at least 1.
        process_index: number of this process.
        in_pairs: a micro-batch has an even number of images: pairs of them are mixed.

    Raises:
        UserError: the global batch cannot be shared evenly.
    """
    limit, views = data.batch_size_per_process, data.views_per_image
    if global_batch_size is None:
        return BatchPlan(limit, accum_steps, num_processes, process_index, views)
    unit = math.lcm(views, 2 if in_pairs else 1)
    share, rest = divmod(global_batch_size, num_processes * unit)
    if rest:
        below, above = (count * num_processes * unit for count in (share, share + 1))
        reason = f", each taking all {views} views of an image" if views > 1 else ""
        reason += ", each mixing pairs of images" if in_pairs else ""
        raise UserError(
            f"global_batch_size {global_batch_size} cannot be shared evenly by {num_processes} processes{reason}: start a "
            f"number of processes that divides it, or give {f'{below} or ' if below else ''}{above}"
        )
    units = limit // unit  # at once; the configs see to it that nothing is left over
    accum_steps = next(count for count in range(-(-share // units), share + 1) if share % count == 0)
    return BatchPlan(share // accum_steps * unit, accum_steps, num_processes, process_index, views)


def check_global_batch(global_batch_size: int | None, accum_steps: int) -> None:
    """ValueError where the global batch is no size, or contradicts a number of micro-batches."""
    if global_batch_size is not None and global_batch_size < 1:
        raise ValueError(f"global_batch_size must be at least 1, not {global_batch_size}")
    if global_batch_size is not None and accum_steps != 1:
        raise ValueError("global_batch_size determines optim.accum_steps: give one of the two")

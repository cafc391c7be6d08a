"""How the processes of a run share a model: each holds the whole (DDP), or each holds a part (FSDP2).

The launcher decides: `accelerate launch --use_fsdp --fsdp_version 2`, or ACCELERATE_USE_FSDP=true in the environment.
accelerate itself does not look at that on CPUs, so torch's `fully_shard` is called here, in one way for all devices. Data,
seeds, losses, gradients, and checkpoints are those of DDP.

Sharded tensors are DTensors. What is done with them in a whole - a checkpoint, a picture, a measurement - is gathered first, by
all processes together.
"""

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from training.cli import UserError

Model = TypeVar("Model", bound=nn.Module)

_BLOCK_LISTS = ("blocks", "decoder_blocks")
"""Modules of these names hold the blocks of a model: each is gathered by itself, when it computes."""
_FURTHER_FORWARDS = ("forward_last",)
"""Methods besides `forward` by which a block is made to compute."""


@dataclass(frozen=True)
class Sharding:
    """How a model is shared out in parts."""

    reshard_after_forward: bool = True
    """Give up the gathered weights of a block after its forward pass, and gather them again for its backward pass: less memory,
    half as much traffic again."""


def sharding_asked(environment: Mapping[str, str]) -> Sharding | None:
    """What the launcher asks for: None for whole models.

    Args:
        environment: variables of this process, as `accelerate launch` sets them.

    Raises:
        UserError: it asks for FSDP1, or to keep parameters in the host's memory.
    """
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    if environment.get("FSDP_VERSION", "2") != "2":
        raise UserError(
            "the launcher asks for the first version of FSDP (FSDP_VERSION=1), this program shards by the second alone: launch "
            "it with --use_fsdp --fsdp_version 2"
        )
    if environment.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise UserError(
            "the launcher asks to keep sharded parameters in the host's memory (FSDP_OFFLOAD_PARAMS), which this program does "
            "not do: launch it with --fsdp_offload_params false"
        )
    return Sharding(environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false")


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor, which all processes must do together; any other one is given back as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a sharded tensor, which may be empty; any other one is given back as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Distributed(Generic[Model]):
    """A model that is trained by all processes of a run, and its optimizer.

    Args:
        model: on the accelerator's device, the same on every process; where it is sharded, its parameters are replaced.
        optimizer: over its parameters, perhaps with state; where the model is sharded, so is the state.
        accelerator: of the run.
        sharding: None for whole models; of a single process they always are.
    """

    def __init__(
        self, model: Model, optimizer: torch.optim.Optimizer, accelerator: Accelerator, sharding: Sharding | None = None
    ) -> None:
        self.model = model
        """Without any wrapper. Sharded, it computes only when all processes do."""
        self._accelerator = accelerator
        self._skeleton: Model | None = None
        self._mesh: DeviceMesh | None = None
        self._sharding = sharding or Sharding()
        if sharding is None or accelerator.num_processes == 1:
            self.wrapped, prepared = accelerator.prepare(model, optimizer)
        else:
            self._skeleton = without_weights(model)
            # "For evaluation" accelerate puts its autocast around the forward pass, and no DDP.
            self.wrapped = accelerator.prepare_model(model, evaluation_mode=True)
            self._mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
            shard(model, optimizer, self._mesh, sharding)
            prepared = accelerator.prepare_optimizer(optimizer)
        self.optimizer = cast(torch.optim.Optimizer, prepared)

    @property
    def is_sharded(self) -> bool:
        """Says whether each process holds only a part."""
        return self._skeleton is not None

    def describe(self) -> str:
        """What a run says of it: "" where every process holds the whole model."""
        return f", each process holds 1/{self._accelerator.num_processes} of the model (FSDP2)" if self.is_sharded else ""

    @contextlib.contextmanager
    def without_sync(self) -> Iterator[None]:
        """Within it gradients are added up on each process alone; they travel with the first backward pass after it."""
        if isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                self.wrapped.set_requires_gradient_sync(True)
        else:
            with self._accelerator.no_sync(self.wrapped):
                yield

    def clip_gradients(self, limit: float | None) -> Tensor:
        """Scales all gradients down to a norm.

        Args:
            limit: the largest norm, above 0; None: they are left alone.

        Returns:
            The norm before, a scalar, the same on all processes.
        """
        norm = self._accelerator.clip_grad_norm_(self.model.parameters(), float("inf") if limit is None else limit)
        return whole(cast(Tensor, norm))

    def shard_alike(self, twin: Model) -> None:
        """Shards a model of the same architecture (an average of the weights) as this one is, in place, if it is."""
        if self._mesh is not None:
            shard(twin, None, self._mesh, self._sharding)

    def whole_model(self, twin: Model | None = None) -> Model:
        """The model with all its weights, to be used by each process on its own; all must call it.

        Args:
            twin: which to take in its place, sharded alike.

        Returns:
            The model itself where it is not sharded; else a copy without autocast, which knows nothing of later steps.
        """
        model = self.model if twin is None else twin
        return model if self._skeleton is None else with_weights(self._skeleton, model)


def without_weights(model: Model) -> Model:
    """Copies a model, but for the numbers in its parameters: they are on the meta device and take no memory."""
    shapes = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, shapes)


def with_weights(skeleton: Model, model: nn.Module) -> Model:
    """Gathers the weights of a sharded model into a copy of its skeleton; all processes must call it.

    Args:
        skeleton: of the model, see `without_weights`; it is left as it is.
        model: sharded.
    """
    filled = copy.deepcopy(skeleton)
    state = {
        name: whole(tensor) if isinstance(tensor, DTensor) else tensor.clone() for name, tensor in model.state_dict().items()
    }
    filled.load_state_dict(state, strict=True, assign=True)
    return cast(Model, filled.train(model.training))


def shard(model: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: DeviceMesh, sharding: Sharding) -> None:
    """Leaves each process its part of every parameter and of its optimizer's state, in place.

    Nothing travels: every process cuts its part out of its own copy.

    Args:
        model: the same on every process.
        optimizer: over its parameters; None: there is none.
        mesh: the processes.
        sharding: how.
    """
    # Of what a step computes only the loss is used, and nothing is changed in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    lists = [module for name, module in model.named_modules() if name.rpartition(".")[2] in _BLOCK_LISTS]
    for block in (block for blocks in lists for block in blocks.children()):
        fully_shard(block, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward)
        for method in _FURTHER_FORWARDS:
            if hasattr(block, method):
                register_fsdp_forward_method(block, method)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)  # the backward pass begins with these right away
    if optimizer is None:
        return
    parts = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parts[names[parameter]] for parameter in group["params"]]
    for parameter in list(optimizer.state):
        part = parts[names[parameter]]
        assert isinstance(part, DTensor)
        optimizer.state[part] = {
            entry: distribute_tensor(value, part.device_mesh, part.placements, src_data_rank=None)
            if isinstance(value, Tensor) and value.shape == part.shape
            else value
            for entry, value in optimizer.state.pop(parameter).items()
        }

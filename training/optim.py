"""Parameter groups and optimizers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedule, and how a step is put together."""

    base_lr: float = 1.5e-4
    """Learning rate for 256 images per step, above 0; the peak is base_lr * global batch size / 256."""
    min_lr: float = 0.0
    """Learning rate at the end of the cosine, at least 0."""
    warmup_epochs: float | None = None
    """Length of the linear warm-up from 0, in epochs, at least 0; shorter than the run (None: a twentieth of the run, which is
    the paper's 40 of 800 epochs)."""
    weight_decay: float = 0.05
    """AdamW's weight decay, at least 0; biases and norms take none."""
    beta1: float = 0.9
    """AdamW: decay of the mean of gradients, in [0, 1)."""
    beta2: float = 0.95
    """AdamW: decay of the mean of squared gradients, in [0, 1)."""
    accum_steps: int = 1
    """Micro-batches added up for one optimizer step, at least 1."""
    clip_grad_norm: float | None = None
    """Largest norm of the gradient, above 0 (None: no clipping, as in the original)."""

    def __post_init__(self) -> None:
        if not 0 < self.base_lr < math.inf:
            raise ValueError(f"optim.base_lr must be above 0 and finite, not {self.base_lr}")
        if min(self.min_lr, self.warmup_epochs or 0.0, self.weight_decay) < 0:
            raise ValueError("optim.min_lr, optim.warmup_epochs and optim.weight_decay must be at least 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"optim.beta1 and optim.beta2 must lie in [0, 1), not {self.beta1}, {self.beta2}")
        if self.accum_steps < 1:
            raise ValueError(f"optim.accum_steps must be at least 1, not {self.accum_steps}")
        if self.clip_grad_norm is not None and self.clip_grad_norm <= 0:
            raise ValueError(f"optim.clip_grad_norm must be above 0 or None, not {self.clip_grad_norm}")


class StatesItsParameters(Protocol):
    """A model that says what training must know of its parameters."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """As torch's modules."""
        ...

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that take no weight decay."""
        ...


class StatesItsLayers(StatesItsParameters, Protocol):
    """A model that says which layer each parameter belongs to, too."""

    def layer_ids(self) -> dict[str, int]:
        """Parameter name -> layer, 0 for the embeddings, the highest for the head."""
        ...


def parameter_groups(model: StatesItsParameters, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the trainable parameters into those with and those without weight decay, as the model states."""
    exempt = model.no_weight_decay()
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in trainable if name in exempt], "weight_decay": 0.0},
        {"params": [parameter for name, parameter in trainable if name not in exempt], "weight_decay": weight_decay},
    ]


def layer_groups(model: StatesItsLayers, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
    """Splits the trainable parameters by layer and weight decay, and gives each group the scale of its learning rate.

    Args:
        model: states layers and exemptions.
        weight_decay: of the parameters that take any.
        layer_decay: ratio of the learning rates of neighbouring layers, in (0, 1]; the head's is the schedule's own.

    Returns:
        Groups with "params", "weight_decay" and "lr_scale" = layer_decay ** (highest layer - layer), which `set_lr` applies.

    Source: facebookresearch/mae util/lr_decay.py `param_groups_lrd`.
    """
    ids, exempt = model.layer_ids(), model.no_weight_decay()
    highest = max(ids.values())
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = (ids[name], name in exempt)
        if kind not in groups:
            scale = layer_decay ** (highest - ids[name])
            groups[kind] = {"params": [], "weight_decay": 0.0 if name in exempt else weight_decay, "lr_scale": scale}
        groups[kind]["params"].append(parameter)
    return list(groups.values())


def build_adamw(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.AdamW:
    """Builds AdamW over parameter groups; its learning rate is set at every step.

    The fused kernel does the same arithmetic in one pass over memory; on 2 CPU cores it takes a quarter of the time.
    """
    return torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), fused=True)


class LARS(torch.optim.Optimizer):
    """Momentum SGD with a learning rate per matrix, from the ratio of its norm to its gradient's.

    Vectors and scalars (biases, norms) take neither the ratio nor weight decay. The learning rate multiplies the momentum
    buffer, it is not inside it.

    Args:
        groups: parameters or parameter groups.
        lr: learning rate, at least 0.
        weight_decay: added to the gradient of matrices, times the weight.
        momentum: in [0, 1).
        trust_coefficient: of the ratio.

    Source: You et al. 2017, "Large batch training of convolutional networks"; facebookresearch/mae util/lars.py.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        lr: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "trust_coefficient": trust_coefficient}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        """Does one step; takes no closure."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = parameter.grad
                if parameter.ndim > 1:
                    update = update.add(parameter, alpha=group["weight_decay"])
                    weight_norm, update_norm = parameter.norm(), update.norm()
                    ratio = group["trust_coefficient"] * weight_norm / update_norm
                    update = update * torch.where((weight_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].mul_(group["momentum"]).add_(update)
                parameter.sub_(state["momentum"], alpha=group["lr"])


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every parameter group, times the group's own `lr_scale` where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)

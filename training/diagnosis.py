"""Where in a model the first number that is not finite comes up."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


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

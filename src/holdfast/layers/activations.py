"""Activations by name, so that configurations can hold them; any callable on tensors works too."""

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from holdfast.suggest import unknown

Activation = Callable[[Tensor], Tensor]


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu_squared,
    "tanh": F.tanh,
    "sigmoid": F.sigmoid,
}


def resolve(activation: str | Activation) -> tuple[str | None, Activation]:
    """The name, if it has one, and the function."""
    if callable(activation):
        return None, activation
    if activation not in ACTIVATIONS:
        raise ValueError(unknown("activation", activation, ACTIVATIONS))
    return activation, ACTIVATIONS[activation]

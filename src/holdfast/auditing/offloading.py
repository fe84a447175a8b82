"""Models larger than memory, which accelerate holds on a disk and fetches layer by layer."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def resident(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the `with`, the weights of these modules stay in memory; afterwards they are where they were.

    Routers are small, and an audit looks at their weights, rounds them and asks them again between forwards.
    """
    with ExitStack() as stack:
        for module in modules:
            for part in module.modules():
                hook = getattr(part, "_hf_hook", None)
                if getattr(hook, "offload", False):
                    _fetch(part, hook)
                    stack.callback(_drop, part, hook)
        yield


def _fetch(module: nn.Module, hook: Any) -> None:
    hook.pre_forward(module)
    hook.offload = False  # so that a forward neither fetches them again nor drops them


def _drop(module: nn.Module, hook: Any) -> None:
    hook.offload = True
    hook.post_forward(module, None)


def device_of(model: Any) -> torch.device:
    """Where inputs go: a model whose weights are on a disk says `meta`, and its hook knows better."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    return torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")

"""Weights that accelerate offloads to memory or disk and loads for the forward of the module that owns them."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate keeps weights of this module, or of one inside it, elsewhere until its forward runs."""
    return any("_hf_hook" in part.__dict__ and _is_away(part) for part in module.modules())


@contextlib.contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Inside the `with`, the module's weights are on their device, for one who reads them outside of its forward.

    What is read inside stays valid afterwards; the module itself releases it.
    """
    hooked: list[Any] = [part for part in module.modules() if "_hf_hook" in part.__dict__ and _is_away(part)]
    for part in hooked:
        part._hf_hook.pre_forward(part)
    try:
        yield
    finally:
        for part in hooked:
            part._hf_hook.post_forward(part, None)


def _is_away(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))

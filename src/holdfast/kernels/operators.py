"""Operators for the hot path: opaque to `torch.compile`, and cheap to call.

`torch.library.custom_op` with `register_autograd` costs about 75 microseconds of Python for a forward and a backward, nearly
what a router's kernels take. An operator without autograd, inside a `torch.autograd.Function`, costs a third of that.
"""

from collections.abc import Callable
from typing import Any

import torch

EVERYWHERE = "CompositeExplicitAutograd"

_LIBRARY = torch.library.Library("holdfast", "FRAGMENT")


def operator(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], *, devices: str = "CUDA"
) -> Callable[..., Any]:
    """An operator of this signature on some devices; `fake` makes outputs of the right shape for the compiler.

    Autograd does not see through it: call it under `torch.autograd.Function`, or on tensors that need no gradient.
    """
    _LIBRARY.define(schema)
    name = schema.split("(")[0]
    _LIBRARY.impl(name, implementation, devices)
    torch.library.register_fake(f"holdfast::{name}", fake, lib=_LIBRARY)
    packet = getattr(torch.ops.holdfast, name)
    overload: Callable[..., Any] = packet.default
    return overload

"""Running means whose first batch sets them: a formula, and on a GPU one kernel instead of a dozen small ones."""

import torch
from torch import Tensor

from holdfast.kernels.triton_support import has_kernels, on_device_of


def running_mean(state: Tensor, seen: Tensor, batch: Tensor, counts: Tensor, memory: float) -> tuple[Tensor, Tensor]:
    """The state (n,) after a batch that `counts`, and whether one was ever seen; both bool, on the device."""
    running = torch.where(seen, memory * state + (1 - memory) * batch, batch)
    return running.where(counts, state), seen | counts


def absorb_mean(
    state: Tensor, seen: Tensor, staged: Tensor, tokens: Tensor, due: Tensor, *, memory: float, is_sum: bool
) -> bool:
    """Where it is `due`, let a batch of so many `tokens` into `state` and `seen`, in place. False: there is no kernel here.

    `staged` is a sum over the tokens, or, unless `is_sum`, a value that is not seen as long as it is 0.
    """
    if torch.compiler.is_compiling() or not has_kernels(state):  # a compiler makes one kernel of the formula by itself
        return False
    from holdfast.kernels import running_kernels

    with on_device_of(state):
        running_kernels.absorb(state, seen, staged, tokens, due, memory, is_sum)
    return True

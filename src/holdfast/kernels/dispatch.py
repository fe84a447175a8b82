"""Slots sorted by expert: where the row of each slot is, so that each expert's rows lie side by side.

T tokens, K slots a token, E experts; R rows, one a slot. An index of E is a slot that is not used.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.operators import operator
from holdfast.kernels.triton_support import has_kernels, on_device_of

MOST_EXPERTS = 512  # beyond it, a program's counts are no longer small


class Dispatch(NamedTuple):
    """Where each slot's row is. Unused slots come last, belong to nobody and are never read."""

    order: Tensor  # (R,) the slot of each row, counted through all of them; undefined from `used` on
    slots: Tensor  # (T,K) the row of each slot; `used` or more for an unused one
    offsets: Tensor  # (E,) int32, where each expert's rows end

    @property
    def used(self) -> Tensor:
        return self.offsets[-1]


def dispatch(chosen: Tensor, experts: int) -> Dispatch:
    """Sort the slots of `chosen (T,K)` by expert, stably, so that the order within an expert is the tokens' own."""
    if has_kernels(chosen) and experts <= MOST_EXPERTS and 0 < chosen.numel() < 2**31:
        return Dispatch(*_dispatch(chosen.contiguous(), experts))
    tokens, slots_per_token = chosen.shape
    keys = chosen.reshape(-1)
    if experts < torch.iinfo(torch.int16).max:
        keys = keys.to(torch.int16)
    by_expert, order = torch.sort(keys, stable=True)
    boundaries = torch.arange(experts, device=chosen.device, dtype=by_expert.dtype)
    offsets = torch.searchsorted(by_expert, boundaries, right=True).to(torch.int32)
    positions = torch.arange(order.shape[0], device=chosen.device)
    slots = torch.empty_like(order).scatter_(0, order, positions).view(tokens, slots_per_token)
    if chosen.device.type == "cpu" and not torch.compiler.is_compiling():
        order = order[: int(offsets[-1])]  # reading a size is free on a CPU, a stall on a GPU, a graph break in a trace
    return Dispatch(order, slots, offsets)


def _dispatch_on_gpu(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    from holdfast.kernels import dispatch_kernels

    with on_device_of(chosen):
        return dispatch_kernels.dispatch(chosen, experts)


_dispatch = operator(
    "dispatch(Tensor chosen, int experts) -> (Tensor, Tensor, Tensor)",
    _dispatch_on_gpu,
    lambda chosen, experts: (
        chosen.new_empty(chosen.numel(), dtype=torch.int64),
        chosen.new_empty(chosen.shape, dtype=torch.int64),
        chosen.new_empty(experts, dtype=torch.int32),
    ),
)

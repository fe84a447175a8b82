"""State that learns without gradients, under one rule.

A forward uses the state as it was before its batch. What the batch teaches is only staged, and committed once: at the start
of the next training forward, on `eval()`, or when the state is saved. So training is as causal as evaluation, activation
checkpointing recomputes the same routes, nothing is counted twice, and evaluation changes nothing.

One thing it does not do: when a layer runs forward twice before the first backward, the second forward commits what the
first staged, and a recomputation of the first then sees newer state. Do not checkpoint a stateful router that is used so.
"""

from collections.abc import Callable, Mapping
from typing import Self

import torch
import torch.distributed
from torch import Tensor

from holdfast.kernels.backward import first_forward, recomputing
from holdfast.kernels.launching import on_side_stream
from holdfast.routing.parts import Part


class StatefulPart(Part):
    """A part with state under the rule (abstract). State and staged statistics are buffers: saved, moved, kept float32."""

    pending: Tensor  # 0 or 1
    learning = True  # False: nothing is staged or committed and no loss made, even in training

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pending", flag())
        self.register_state_dict_pre_hook(_commit_before_saving)

    def absorb(self) -> Mapping[str, Tensor]:
        """Return the state's new values, by buffer name, from the state and the staged statistics.

        A part overrides this or `absorb_where`.
        """
        raise NotImplementedError(f"{type(self).__name__} has state, but neither `absorb` nor `absorb_where`.")

    def register_statistics(self, **statistics: Tensor) -> None:
        """Declare what will be staged, with values of the right shape."""
        for name, value in statistics.items():
            self.register_buffer(f"staged_{name}", value)

    @torch.no_grad()
    def begin_training_forward(self) -> None:
        """Commit what the last batch staged, unless this forward is a recomputation."""
        if not self.learning:
            return
        if torch.compiler.is_compiling():  # then the question is asked when it runs, by an operator
            self._commit(is_set(self.pending) & first_forward(self.pending))
        elif not recomputing():
            self._commit(is_set(self.pending))

    @torch.no_grad()
    def learn(self, statistics: Callable[[], Mapping[str, Tensor]]) -> None:
        """Stage what the batch teaches. No route depends on it: on a GPU it is computed beside the rest of the forward."""
        if self.learning and (torch.compiler.is_compiling() or not recomputing()):
            on_side_stream(self.pending, lambda: self.stage(**statistics()))

    @torch.no_grad()
    def stage(self, **statistics: Tensor) -> None:
        """Keep what the batch taught until the next commit; the same on every rank (see `sum_over_ranks`)."""
        if not torch.compiler.is_compiling():
            if not recomputing():
                for name, value in statistics.items():
                    self.get_buffer(f"staged_{name}").copy_(value)
                self.pending.fill_(1)
            return
        first = first_forward(self.pending)
        for name, value in statistics.items():
            staged = self.get_buffer(f"staged_{name}")
            staged.copy_(torch.where(first, value.to(staged.dtype), staged))
        self.pending.copy_(is_set(self.pending) | first)

    @torch.no_grad()
    def commit(self) -> None:
        """Let the staged statistics into the state, once."""
        self._commit(is_set(self.pending))

    def _commit(self, due: Tensor) -> None:
        self.absorb_where(due)
        self.pending.copy_(is_set(self.pending) ^ due)  # only what is pending is ever due

    def absorb_where(self, due: Tensor) -> None:
        """Replace the state by its new values, in place, if `due`, a bool on the device."""
        for name, value in self.absorb().items():
            state = self.get_buffer(name)
            # Not where(..., out=state): under torch.compile a backward that makes it again then reads the new state.
            state.copy_(torch.where(due, value, state))

    def train(self, mode: bool = True) -> Self:
        if not mode:
            self.commit()
        return super().train(mode)


def flag() -> Tensor:
    """Return a flag that is not set, for a buffer. No bool: others do arithmetic with whatever is in a state dict."""
    return torch.zeros((), dtype=torch.uint8)


def is_set(buffer: Tensor) -> Tensor:
    """Return a flag as a bool on its device; in eager execution it shares the buffer's memory, for kernels that write it."""
    # Inductor of torch 2.11 does not lower such a view, and fuses a comparison with what reads it.
    return buffer != 0 if torch.compiler.is_compiling() else buffer.view(torch.bool)


def _commit_before_saving(part: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    assert isinstance(part, StatefulPart)
    part.commit()


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of every rank's `value`; just `value` where there is one process.

    Taken when staging, not when committing: all ranks run the same forwards, while saving may happen on one of them only. In
    training only: evaluation may run on one rank, or more often on one than on another.
    """
    if several_ranks():
        value = value.clone()
        torch.distributed.all_reduce(value)
    return value


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of every rank's `value`; just `value` where there is one process. In training only, as the sum."""
    return sum_over_ranks(value) / torch.distributed.get_world_size() if several_ranks() else value


def several_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

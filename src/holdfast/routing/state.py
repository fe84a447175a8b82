"""State that parts update without gradients, under one rule.

A forward uses the state from before its batch. The statistics of the batch are staged, and committed to the state once: at
the start of the next training forward, on `eval()`, or when the state is saved. So training is as causal as evaluation,
activation checkpointing recomputes the same routing, no batch is counted twice, and evaluation does not change state.

One part reads its own batch in training, and only if the batch overflows: see `holdfast.routing.smoothing`.

Limit: if a layer runs forward twice before the first backward, the second forward commits the statistics of the first, and a
recomputation of the first then reads newer state. Do not use activation checkpointing for a stateful router in this case.
"""

from collections.abc import Callable, Mapping
from typing import Self

import torch
import torch.distributed
from torch import Tensor

from holdfast.kernels.operators import is_first_forward, on_side_stream
from holdfast.kernels.torch_internals import is_recomputing
from holdfast.routing.parts import Part


class StatefulPart(Part):
    """A part with state (abstract). State and staged statistics are float32 buffers that are saved with the model."""

    pending: Tensor  # 1 if statistics are staged and not yet committed, else 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pending", flag())
        self.register_state_dict_pre_hook(_commit_before_saving)

    def new_state(self) -> Mapping[str, Tensor]:
        """Return the new values of the state, by buffer name, from the state and the staged statistics.

        A part overrides this method or `update_state_where`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has state, but overrides neither `new_state` nor `update_state_where`."
        )

    def register_statistics(self, **statistics: Tensor) -> None:
        """Register a buffer `staged_<name>` for each statistic; the values give the shapes."""
        for name, value in statistics.items():
            self.register_buffer(f"staged_{name}", value)

    @torch.no_grad()
    def begin_training_forward(self) -> None:
        """Commit the statistics of the previous batch, unless this forward is a recomputation."""
        if not self.learning:
            return
        if torch.compiler.is_compiling():  # an operator then tests at run time whether this is a recomputation
            self._commit(is_set(self.pending) & is_first_forward(self.pending))
        elif not is_recomputing():
            self._commit(is_set(self.pending))

    @torch.no_grad()
    def stage_in_background(self, statistics: Callable[[], Mapping[str, Tensor]]) -> None:
        """Compute the statistics of a batch and stage them; on a GPU this runs in parallel to the rest of the forward."""
        if self.learning and (torch.compiler.is_compiling() or not is_recomputing()):
            on_side_stream(self.pending, lambda: self.stage_statistics(**statistics()))

    @torch.no_grad()
    def stage_statistics(self, **statistics: Tensor) -> None:
        """Keep the statistics of a batch until the next commit. They must be equal on all ranks (see `sum_over_ranks`)."""
        if not torch.compiler.is_compiling():
            if not is_recomputing():
                for name, value in statistics.items():
                    self.get_buffer(f"staged_{name}").copy_(value)
                self.pending.fill_(1)
            return
        first = is_first_forward(self.pending)
        for name, value in statistics.items():
            staged = self.get_buffer(f"staged_{name}")
            staged.copy_(torch.where(first, value.to(staged.dtype), staged))
        self.pending.copy_(is_set(self.pending) | first)

    @torch.no_grad()
    def commit(self) -> None:
        """Update the state from the staged statistics, if there are any."""
        self._commit(is_set(self.pending))

    def _commit(self, due: Tensor) -> None:
        self.update_state_where(due)
        self.pending.copy_(is_set(self.pending) ^ due)  # `due` is set only if `pending` is

    def update_state_where(self, due: Tensor) -> None:
        """Replace the state by its new values in place, if `due`, a bool tensor on the device, is True."""
        for name, value in self.new_state().items():
            state = self.get_buffer(name)
            # Not where(..., out=state): a compiled backward that computes it again would read the new state.
            state.copy_(torch.where(due, value, state))

    def train(self, mode: bool = True) -> Self:
        if not mode:
            self.commit()
        return super().train(mode)


def flag() -> Tensor:
    """Return a flag with value 0, for a buffer. It is not a bool: other libraries do arithmetic on all of a state dict."""
    return torch.zeros((), dtype=torch.uint8)


def is_set(buffer: Tensor) -> Tensor:
    """Return a flag as a bool tensor. In eager execution it shares memory with the buffer, for kernels that write to it."""
    # Inductor of torch 2.11 cannot lower such a view, and fuses a comparison with the operation that reads it.
    return buffer != 0 if torch.compiler.is_compiling() else buffer.view(torch.bool)


def _commit_before_saving(part: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    assert isinstance(part, StatefulPart)
    part.commit()


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of `value` over all ranks; with one process, `value`.

    Call it when staging, not when committing: all ranks run the same forwards, but one rank alone may save. Call it only in
    training: ranks may run different numbers of evaluation forwards.
    """
    if several_ranks():
        value = value.clone()
        torch.distributed.all_reduce(value)
    return value


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of `value` over all ranks; with one process, `value`. Call it only in training."""
    return sum_over_ranks(value) / torch.distributed.get_world_size() if several_ranks() else value


def gather_over_ranks(rows: Tensor) -> tuple[Tensor, slice]:
    """Return the `rows (n, ...)` of all ranks, in the order of ranks, and which of them are this rank's.

    Ranks may have different numbers of rows, so the host waits for the device, to read these numbers. Call it only in
    training.
    """
    if not several_ranks():
        return rows, slice(0, len(rows))
    ranks = torch.distributed.get_world_size()
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(ranks)]
    torch.distributed.all_gather(counts, count)
    lengths = [int(each) for each in torch.cat(counts).tolist()]
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    torch.distributed.all_gather(gathered, padded)
    start = sum(lengths[: torch.distributed.get_rank()])
    found = torch.cat([each[:length] for each, length in zip(gathered, lengths, strict=True)])
    return found, slice(start, start + len(rows))


def several_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()

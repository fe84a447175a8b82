"""Stop a training run at the first NaN or infinity, by name, without making the GPU wait.

On a CPU the error comes at once. On a GPU the check of a layer writes the layer's name to a record in the host's memory,
unless an earlier layer did, and the host reads that record at the next check. There is one record for each GPU. A kernel
does all the work of a check, so a CUDA graph that is replayed checks as well. After a replay, and before the step of an
optimizer whose model is compiled with CUDA graphs, the host reads the record (`require_finite_so_far`).
"""

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.operators import HAS_TRITON, on_gpu, operator

NAME_BYTES = 128
_check = on_gpu(__name__, "check")


def encode_name(name: str) -> Tensor:
    """Return a name as a tensor of fixed size. A string would make `torch.compile` compile every layer anew."""
    raw = name.encode()[-NAME_BYTES:]
    return torch.tensor(list(raw.ljust(NAME_BYTES, b"\0")), dtype=torch.uint8)


def decode_name(encoded: Tensor) -> str:
    """Return the name that `encode_name` was given."""
    return bytes(encoded.tolist()).rstrip(b"\0").decode(errors="replace")


class _Record:
    """The first layer of a GPU whose scores were not finite, in the host's memory: its name, and whether there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = torch.zeros(NAME_BYTES, dtype=torch.uint8, pin_memory=True)
        self.found = torch.zeros((), dtype=torch.int32, pin_memory=True)
        self._value = ctypes.c_int32.from_address(self.found.data_ptr())  # read at every check: faster than a tensor

    @property
    def is_set(self) -> bool:
        return self._value.value != 0

    def clear(self) -> None:
        self._value.value = 0


_records: dict[torch.device, _Record] = {}


def require_finite_so_far() -> None:
    """Raise ValueError, with the layer's name, if a GPU has found router scores that are NaN or infinite; do not wait.

    It reports what the GPU has computed so far. Call it after each replay of a CUDA graph that you have captured yourself.
    """
    for record in _records.values():
        if record.is_set:
            raise _first_found(record)


def _first_found(record: _Record) -> ValueError:
    """Return the error of a record, and clear all records: what later layers find has the same cause."""
    for each in _records.values():
        torch.cuda.synchronize(each.device)  # the name is complete, and no kernel of this step writes a record later
        each.clear()
    return _report(record.name, None)


def _report(layer: Tensor, tokens: Tensor | None) -> ValueError:
    if tokens is None:
        cause = "in a step before this one (a GPU reports late): look at its input and at the router's weights."
    elif not tokens.isfinite().all():
        bad = int((~tokens.isfinite()).flatten(1).any(1).sum()) if tokens.dim() > 1 else 1
        cause = f"because {bad} of {tokens.shape[0]} tokens that reach it already are: look at the layers before it."
    else:
        cause = "although its tokens are finite: its own weights or what it reads from attention are not, or they overflow."
    return ValueError(
        f"{decode_name(layer)}: router scores are NaN or infinite {cause} (check_finite=False lets them through.)"
    )


def _check_on_gpu(scores: Tensor, layer: Tensor, real: Tensor | None) -> None:
    """Launch a check of `scores (n,E)`, rows of real tokens only; raise the error of an earlier check if there is one."""
    if scores.device not in _records:
        _records[scores.device] = _Record(scores.device)
    record = _records[scores.device]
    if torch.cuda.is_current_stream_capturing():
        _read_before_optimizer_steps()
    elif record.is_set:
        raise _first_found(record)
    if scores.numel() == 0:
        return
    layer = layer if layer.device == scores.device else layer.to(scores.device)
    if HAS_TRITON:
        _check(scores.contiguous(), real, layer, record.name, record.found)
    else:
        _check_without_triton(scores, layer, real, record)


def _check_without_triton(scores: Tensor, layer: Tensor, real: Tensor | None, record: _Record) -> None:
    """Copy the record to the GPU, complete it there and copy it back: nothing waits."""
    checked = scores if real is None else scores.where(real.reshape(-1, 1), 0.0)
    found = record.found.to(scores.device, non_blocking=True)
    name = record.name.to(scores.device, non_blocking=True)
    is_first = ~checked.isfinite().all() & (found == 0)
    record.name.copy_(torch.where(is_first, layer, name), non_blocking=True)
    record.found.copy_(torch.where(is_first, 1, found), non_blocking=True)


@functools.cache
def _read_before_optimizer_steps() -> None:
    """Read the records before each step of any optimizer: in a replayed graph no layer does it."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def read(*_: Any) -> None:
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            require_finite_so_far()

    register_optimizer_step_pre_hook(read)


def _require_finite_anywhere(scores: Tensor, tokens: Tensor, layer: Tensor, real: Tensor | None) -> Tensor:
    """Check the scores; return a 0, because a compiler drops an operator whose result is not used."""
    if scores.is_cuda:
        _check_on_gpu(scores, layer, real)
        return scores.new_zeros(())
    if scores.numel() > 0:
        checked = scores if real is None else scores.where(real.reshape(-1, 1), 0.0)
        largest = torch.linalg.vector_norm(checked, ord=math.inf)  # one kernel, and NaN or infinite if one score is
        if not largest.isfinite():
            raise _report(layer, tokens)
    return scores.new_zeros(())


_require_finite = operator(
    "require_finite(Tensor scores, Tensor tokens, Tensor layer, Tensor? real) -> Tensor",
    _require_finite_anywhere,
    lambda scores, *_: scores.new_empty(()),
)


def require_finite(scores: Tensor, tokens: Tensor, layer: Tensor, real: Tensor | None) -> Tensor:
    """Return `scores (B,N,E)`; raise a `ValueError` that names the layer if a real token's scores are NaN or infinite.

    On a CPU the error comes at once, on a GPU at one of the next checks. `layer` is a name from `encode_name`; `real (B,N)`
    is True where a token is real.
    """
    checked = scores.detach().flatten(0, -2)
    if torch.compiler.is_compiling():
        zero: Tensor = _require_finite(checked, tokens.detach().flatten(0, -2), layer, real)
        return scores + zero
    if checked.is_cuda:
        _check_on_gpu(checked, layer, real)
    else:
        _require_finite_anywhere(checked, tokens.detach().flatten(0, -2), layer, real)
    return scores

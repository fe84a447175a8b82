"""Stop a training run at the first NaN or infinity, by name, without making the GPU wait."""

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels.operators import EVERYWHERE, operator
from holdfast.kernels.triton_support import HAS_TRITON, on_device_of

NAME_BYTES = 128


@dataclass
class _Check:
    """One that a GPU may not have come to yet. It holds the host's memory that a kernel will write to, until it has."""

    arrived: torch.cuda.Event
    found: Tensor
    layer: Tensor
    silent: bool = False  # it follows from one that was reported


_in_flight: deque[_Check] = deque()


def encode_name(name: str) -> Tensor:
    """A name as a tensor of fixed size. A string would make `torch.compile` compile every layer anew for its name."""
    raw = name.encode()[-NAME_BYTES:]
    return torch.tensor(list(raw.ljust(NAME_BYTES, b"\0")), dtype=torch.uint8)


def decode_name(encoded: Tensor) -> str:
    return bytes(encoded.tolist()).rstrip(b"\0").decode(errors="replace")


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


def _drain() -> None:
    while _in_flight and _in_flight[0].arrived.query():
        check = _in_flight.popleft()
        if check.found and not check.silent:
            for later in _in_flight:
                later.silent = True
            raise _report(check.layer, None)


def _require_finite_anywhere(scores: Tensor, tokens: Tensor, layer: Tensor, traced: bool) -> Tensor:
    """Where `traced`, returns a 0: a compiler drops what has no result."""
    if scores.numel() == 0:
        return scores.new_zeros(())
    if scores.is_cuda:
        with on_device_of(scores):
            return _look_later(scores.contiguous(), layer, traced)
    largest = torch.linalg.vector_norm(scores, ord=math.inf)  # one kernel, and NaN or infinite if one score is
    if not largest.isfinite():
        raise _report(layer, tokens)
    return scores.new_zeros(()) if traced else scores.new_empty(())


def _look_later(scores: Tensor, layer: Tensor, traced: bool) -> Tensor:
    """Have the host told of what is not finite, at some time, by the current device, which is that of the scores."""
    if torch.cuda.is_current_stream_capturing():
        return scores.new_zeros(()) if traced else scores.new_empty(())
    _drain()
    found = torch.zeros((), dtype=torch.int32, pin_memory=True)
    if HAS_TRITON:
        from holdfast.kernels import finite_kernels

        zero = finite_kernels.look(scores, found)
    else:
        found.copy_(~scores.isfinite().all(), non_blocking=True)
        zero = scores.new_zeros(())
    arrived = torch.cuda.Event()
    arrived.record()
    _in_flight.append(_Check(arrived, found, layer))
    return zero


_require_finite = operator(
    "require_finite(Tensor scores, Tensor tokens, Tensor layer, bool traced) -> Tensor",
    _require_finite_anywhere,
    lambda scores, *_: scores.new_empty(()),
    devices=EVERYWHERE,
)


def require_finite(scores: Tensor, tokens: Tensor, layer: Tensor, real: Tensor | None) -> Tensor:
    """`scores (B,N,E)` unchanged; a `ValueError` that names the layer if those of a real token are NaN or infinite.

    On a CPU at once, on a GPU at one of the next checks. `layer` is what `encode_name` makes of a name.
    """
    checked = scores.detach() if real is None else scores.detach().where(real.unsqueeze(-1), 0.0)
    traced = torch.compiler.is_compiling()
    zero: Tensor = _require_finite(checked, tokens.detach().flatten(0, -2), layer, traced)
    # A compiler would drop a check whose result nobody reads; otherwise a launch is saved.
    return scores + zero if traced else scores

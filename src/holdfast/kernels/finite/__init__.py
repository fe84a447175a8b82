"""Stop a training run at the first NaN or infinity, by name, without making the GPU wait."""

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels.launching import EVERYWHERE, HAS_TRITON, on_device_of, operator

NAME_BYTES = 128


@dataclass
class _Check:
    """A check that a GPU may not have run yet. It keeps the host memory alive that the kernel will write to."""

    arrived: torch.cuda.Event
    found: Tensor
    layer: Tensor
    silent: bool = False  # an earlier layer was reported already, and caused this one


_in_flight: deque[_Check] = deque()


def encode_name(name: str) -> Tensor:
    """Return a name as a tensor of fixed size. A string would make `torch.compile` compile every layer anew."""
    raw = name.encode()[-NAME_BYTES:]
    return torch.tensor(list(raw.ljust(NAME_BYTES, b"\0")), dtype=torch.uint8)


def decode_name(encoded: Tensor) -> str:
    """Return the name that `encode_name` was given."""
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


def _report_finished_checks() -> None:
    """Raise for the first finished check that found a NaN or infinity; later ones follow from it and stay silent."""
    while _in_flight and _in_flight[0].arrived.query():
        check = _in_flight.popleft()
        if check.found and not check.silent:
            for later in _in_flight:
                later.silent = True
            raise _report(check.layer, None)


def _require_finite_anywhere(scores: Tensor, tokens: Tensor, layer: Tensor, traced: bool) -> Tensor:
    """Check the scores; return a 0 if `traced`, because a compiler drops an operator whose result is not used."""
    if scores.numel() == 0:
        return scores.new_zeros(())
    if scores.is_cuda:
        with on_device_of(scores):
            return _check_later(scores.contiguous(), layer, traced)
    largest = torch.linalg.vector_norm(scores, ord=math.inf)  # one kernel, and NaN or infinite if one score is
    if not largest.isfinite():
        raise _report(layer, tokens)
    return scores.new_zeros(()) if traced else scores.new_empty(())


def _check_later(scores: Tensor, layer: Tensor, traced: bool) -> Tensor:
    """Launch a check on the current device, the device of the scores; a later call reads what it found."""
    if torch.cuda.is_current_stream_capturing():
        return scores.new_zeros(()) if traced else scores.new_empty(())
    _report_finished_checks()
    found = torch.zeros((), dtype=torch.int32, pin_memory=True)
    if HAS_TRITON:
        from holdfast.kernels.finite import triton

        zero = triton.check(scores, found)
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
    """Return `scores (B,N,E)`; raise a `ValueError` that names the layer if a real token's scores are NaN or infinite.

    On a CPU the error comes at once, on a GPU at one of the next checks. `layer` is a name from `encode_name`.
    """
    checked = scores.detach() if real is None else scores.detach().where(real.unsqueeze(-1), 0.0)
    traced = torch.compiler.is_compiling()
    zero: Tensor = _require_finite(checked, tokens.detach().flatten(0, -2), layer, traced)
    # A compiler would drop a check whose result is not used. In eager mode not adding the 0 saves a launch.
    return scores + zero if traced else scores

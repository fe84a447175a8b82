"""Stop a training run at the first NaN or infinity, by name, without making the GPU wait."""

from collections import deque

import torch
from torch import Tensor

_in_flight: deque[tuple[torch.cuda.Event, Tensor, Tensor]] = deque()
NAME_BYTES = 128


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
        cause = "although its tokens are finite: the router's own weights are not, or they overflow."
    return ValueError(
        f"{decode_name(layer)}: router scores are NaN or infinite {cause} (check_finite=False lets them through.)"
    )


def _drain() -> None:
    while _in_flight and _in_flight[0][0].query():
        _, finite, layer = _in_flight.popleft()
        if not finite:
            _in_flight.clear()
            raise _report(layer, None)


@torch.library.custom_op("holdfast::require_finite", mutates_args=())
def _require_finite(scores: Tensor, tokens: Tensor, layer: Tensor) -> Tensor:
    zero = scores.new_zeros(())
    finite = scores.isfinite().all()
    if not scores.is_cuda:
        if not finite:
            raise _report(layer, tokens)
        return zero
    if not torch.cuda.is_current_stream_capturing():
        _drain()
        on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
        on_host.copy_(finite, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        _in_flight.append((arrived, on_host, layer))
    return zero


@_require_finite.register_fake
def _(scores: Tensor, tokens: Tensor, layer: Tensor) -> Tensor:
    return scores.new_empty(())


def require_finite(scores: Tensor, tokens: Tensor, layer: Tensor, real: Tensor | None) -> Tensor:
    """`scores (B,N,E)` unchanged; a `ValueError` that names the layer if those of a real token are NaN or infinite.

    On a CPU at once, on a GPU at one of the next checks. `layer` is what `encode_name` makes of a name.
    """
    checked = scores.detach() if real is None else scores.detach().where(real.unsqueeze(-1), 0.0)
    # The zero that comes back is added, or a compiler would drop a check whose result nobody reads.
    zero: Tensor = _require_finite(checked, tokens.detach().flatten(0, -2), layer)
    return scores + zero

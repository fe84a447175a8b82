"""Count the matrix products that really run: torch's counter, which is told what the operators of this library do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from holdfast.kernels import fp32_linear, grouped, token_mixing  # noqa: F401  (they define the operators)

Shape = torch.Size


def _matmul(left: Shape, right: Shape, **_: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _scaled(tokens: Shape, mixture: Shape, scales: Shape, weight: Shape, **_: Any) -> int:
    return 2 * prod(mixture) * scales[1] + 2 * prod(tokens) * weight[0]


def _scaled_backward(grad: Shape, tokens: Shape, mixture: Shape, scales: Shape, weight: Shape, **_: Any) -> int:
    return 2 * prod(mixture) * scales[1] + 4 * prod(tokens) * weight[0]


def _mix(query: Shape, key: Shape, value: Shape, second: Shape | None, *_: Any, **__: Any) -> int:
    return 2 * prod(query[:2]) * key[1] * (query[2] + _width(second) + value[2])


def _mix_backward(
    grad: Shape, out: Shape, total: Shape, query: Shape, key: Shape, value: Shape, second: Shape | None, *_: Any, **__: Any
) -> int:
    return 2 * prod(query[:2]) * key[1] * (3 * (query[2] + _width(second)) + 2 * value[2])


def _width(second: Shape | None) -> int:
    return 0 if second is None else second[2]


def _entropy(query: Shape, key: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(query) * key[2]


def _gather(tokens: Shape, weight: Shape, index: Shape, *_: Any, **__: Any) -> int:
    return 2 * index[0] * weight[1] * weight[2]


def _gather_backward(grad: Shape, tokens: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 4 * grad[0] * weight[1] * weight[2]


def _combine(hidden: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * hidden[0] * weight[1] * weight[2]


def _combine_backward(grad: Shape, hidden: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 4 * hidden[0] * weight[1] * weight[2]


def _ours() -> dict[Any, Callable[..., int]]:
    ops = torch.ops.holdfast
    return {
        ops.matmul_float32: _matmul,
        ops.scaled_matmul_float32: _scaled,
        ops.scaled_matmul_float32_backward: _scaled_backward,
        ops.softmax_mix: _mix,
        ops.softmax_mix_backward: _mix_backward,
        ops.attention_entropy: _entropy,
        ops.gather_mm: _gather,
        ops.gather_mm_backward: _gather_backward,
        ops.mm_combine: _combine,
        ops.mm_combine_backward: _combine_backward,
    }


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count the FLOPs of the matrix products inside the `with`, those of this library's operators too."""
    with FlopCounterMode(display=False, custom_mapping=_ours()) as counter:
        yield counter

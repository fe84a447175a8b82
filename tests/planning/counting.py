"""Count the FLOPs of real models."""

from collections.abc import Callable
from typing import Any

from holdfast.planning.model_shape import counting


def products(work: Callable[[], Any]) -> int:
    """Return the FLOPs of the matrix products of `work`, without those of rotary positions, which no plan counts."""
    with counting() as counter:
        work()
    counts = counter.get_flop_counts()
    rotary = sum(sum(ops.values()) for name, ops in counts.items() if name.endswith("rotary_emb"))
    return int(counter.get_total_flops() - rotary)

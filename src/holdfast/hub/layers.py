"""Which layers of a model to change."""

from collections.abc import Sequence
from typing import Any

from holdfast.suggest import unknown

Layers = str | Sequence[int]


def choose(layers: Layers, count: int) -> list[int]:
    """Indices among `count` layers: "all", "alternate" (every second, GLaM), "last:n" (V-MoE), or indices themselves."""
    if count == 0:
        raise ValueError("this model has no layer to change.")
    if not isinstance(layers, str):
        return _checked_indices(layers, count)
    if layers == "all":
        return list(range(count))
    if layers == "alternate":
        return list(range(1, count, 2)) or [0]
    kind, _, number = layers.partition(":")
    if kind != "last":
        raise ValueError(
            f"{unknown('choice of layers', layers, ('all', 'alternate', 'last:2'))[:-1]}, or a list of indices."
        )
    if not number.isdigit() or not 1 <= int(number) <= count:
        raise ValueError(f"layers is {layers!r}; the model has {count}, so it must be last:1 to last:{count}.")
    return list(range(count - int(number), count))


def _checked_indices(layers: Sequence[int], count: int) -> list[int]:
    for layer in layers:
        if not isinstance(layer, int) or not -count <= layer < count:
            raise ValueError(f"there is no layer {layer!r}: the model has {count}, counted from 0.")
    chosen = sorted({layer % count for layer in layers})
    if not chosen:
        raise ValueError("layers is empty; name at least one.")
    return chosen


def require_unwrapped(model: Any) -> None:
    """Changes belong to the model: put on a wrapper (PEFT's), they would come off with it."""
    if hasattr(model, "get_base_model"):
        raise ValueError(
            f"this {type(model).__name__} wraps the model; change the one inside, model.get_base_model(), or change it "
            "before wrapping."
        )

"""What was changed in a model, layer by layer, as plain data: what a saved folder's config says and loading repeats."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from holdfast.losses import Losses
from holdfast.routing.rules import Rule, Softmax
from holdfast.version import VERSION

FORMAT = 2  # in format 1, layers are named as in the saved class; since, as in its base model
READABLE = (1, FORMAT)
NATIVE = "native"  # the family's own rule


@dataclass(frozen=True)
class LayerSpec:
    """One MoE layer: its router and, where a dense layer was replaced, its experts."""

    router: str
    k: int
    options: Mapping[str, Any] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    pretrained: bool = True  # the router entered a model that works
    experts: int | None = None  # of a layer that was dense
    hidden: int | None = None
    weights: str | None = None  # of such a layer: "softmax" or "switch" as of TopK; None is what the router's name says

    def __post_init__(self) -> None:
        try:
            plain = json.loads(json.dumps(dict(self.options), allow_nan=False))
        except (TypeError, ValueError) as problem:
            raise ValueError(
                f"the options of router {self.router!r} must be plain values, to be saved: {problem}."
            ) from None
        object.__setattr__(self, "options", plain)

    def loss_terms(self) -> Losses | None:
        return Losses(**self.losses) if self.losses else None

    def rule(self) -> Rule | None:
        """The convention of a layer that was dense: its experts expect it whatever router comes."""
        return None if self.weights is None else Softmax(renormalise=self.weights == "softmax")


def coefficients(losses: Losses | None) -> dict[str, float]:
    """Of each loss, zeros too: said outright, they mean that a model's own balance loss is not wanted."""
    if losses is not None and not isinstance(losses, Losses):
        raise ValueError(f"losses is a {type(losses).__name__}; give a holdfast.Losses, which can be saved with the model.")
    return {} if losses is None else asdict(losses)


def describe(model_type: str, specs: Mapping[str, LayerSpec]) -> dict[str, Any]:
    """As it is written to config.json under "holdfast"; `names_in_base` then makes its names fit every head."""
    layers = {name: asdict(spec) for name, spec in specs.items()}
    return {"format": FORMAT, "version": VERSION, "model_type": model_type, "layers": layers}


def names_in_base(model: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under names of layers relative to the base model, so that a model with another head finds them."""
    prefix = _prefix(model)
    return {name.removeprefix(prefix): value for name, value in named.items()}


def names_in_model(model: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under names of layers in `model`, which may be the base model or hold it."""
    prefix = _prefix(model)
    inside = prefix if prefix and hasattr(model, prefix.removesuffix(".")) else ""
    return {f"{inside}{name.removeprefix(prefix)}": value for name, value in named.items()}


def _prefix(model: Any) -> str:
    """What names of the base model's parts start with in a model that has a head."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name else ""


def read(description: Any) -> dict[str, LayerSpec]:
    """The specs of a description, checked: it may come from anywhere."""
    if not isinstance(description, dict) or not isinstance(description.get("layers"), dict):
        raise ValueError('its config has no "holdfast" section that names layers.')
    if description.get("format") not in READABLE:
        reads = " and ".join(map(str, READABLE))
        raise ValueError(f"it is written in format {description.get('format')!r}; this Holdfast ({VERSION}) reads {reads}.")
    return {name: _read_layer(name, values) for name, values in description["layers"].items()}


def _read_layer(name: str, values: Any) -> LayerSpec:
    known = {entry.name for entry in fields(LayerSpec)}
    if not isinstance(values, dict) or set(values) != known:
        raise ValueError(f"layer {name!r} should say {', '.join(sorted(known))}.")
    kinds = {"router": str, "k": int, "options": dict, "losses": dict, "pretrained": bool}
    for entry, kind in kinds.items():
        if type(values[entry]) is not kind:  # True is an int
            raise ValueError(f"layer {name!r}: {entry} is {values[entry]!r}; expected {kind.__name__}.")
    for entry in ("experts", "hidden"):
        if values[entry] is not None and (not isinstance(values[entry], int) or values[entry] < 1):
            raise ValueError(f"layer {name!r}: {entry} is {values[entry]!r}, not a positive number.")
    if values["weights"] not in (None, "softmax", "switch"):
        raise ValueError(f"layer {name!r}: weights is {values['weights']!r}, not softmax or switch.")
    for term, weight in values["losses"].items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if term not in {entry.name for entry in fields(Losses)} or not number or not 0 <= weight < math.inf:
            raise ValueError(f"layer {name!r}: there is no loss {term!r} of weight {weight!r}.")
    return LayerSpec(**values)

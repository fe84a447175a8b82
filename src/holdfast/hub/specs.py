"""What was changed in each MoE layer, as plain data, and the routers that are built from it.

LayerSpec   what was changed in one layer: written to config.json, and applied again when loading
LayerInfo   the sizes of a layer that a router is built for; `build_routers` makes routers from specs
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

import torch

from holdfast.checked import Limits, from_mapping
from holdfast.layers.losses import Losses
from holdfast.routing import Router
from holdfast.routing.presets import NATIVE as NATIVE
from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import HostModel
from holdfast.routing.rules import Rule, Softmax
from holdfast.version import VERSION

FORMAT = 2
Positive = Annotated[int, Limits(1, math.inf, "a positive number")]
NOT_A_ROUTER = (
    "SoftMoE and SMEAR are layers of their own, and reroute changes the routers of MoE layers only; make such layers from a "
    "dense model with holdfast.sparsify."
)


@dataclass(frozen=True)
class LayerSpec:
    """The router of one MoE layer and, if the layer was dense, its experts."""

    router: str
    k: int
    options: dict[str, Any] = field(default_factory=dict)
    losses: Losses | None = None  # zeros, too, disable the model's own balance loss
    pretrained: bool = True  # the router was put into a trained model
    # Of a layer that was dense:
    experts: Positive | None = None
    hidden: Positive | None = None
    weights: Literal["softmax", "switch"] | None = None  # as in TopK; None: the default of the router's name
    shared: Annotated[int, Limits(1, 1024, "a number from 1 to 1024")] | None = None  # each as wide as an expert

    def __post_init__(self) -> None:
        if self.losses is not None and not isinstance(self.losses, Losses):
            kind = type(self.losses).__name__
            raise ValueError(f"losses is a {kind}; give a holdfast.Losses, which can be saved with the model.")
        if self.losses is not None and self.losses.margin and self.router == NATIVE:
            raise ValueError("margin needs a router of Holdfast: reroute the model with 'smoe' instead of 'native'.")
        try:
            plain = json.loads(json.dumps(self.options, allow_nan=False))
        except (TypeError, ValueError) as problem:
            raise ValueError(f"the options of router {self.router!r} must be plain values: {problem}.") from None
        object.__setattr__(self, "options", plain)

    def rule(self) -> Rule | None:
        """Return the rule that a router must keep in a layer that was dense; None for any other layer."""
        return None if self.weights is None else Softmax(renormalise=self.weights == "softmax")


def describe(model: Any, specs: Mapping[str, LayerSpec]) -> dict[str, Any]:
    """Return the entry "holdfast" of config.json.

    Names of layers are relative to the base model, so that a model with another head finds them.
    """
    layers = {name.removeprefix(_prefix(model)): asdict(spec) for name, spec in specs.items()}
    return {"format": FORMAT, "version": VERSION, "model_type": model.config.model_type, "layers": layers}


def names_in_model(model: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values with the layer names of `model`, which is the base model or contains it."""
    prefix = _prefix(model)
    inside = prefix if prefix and hasattr(model, prefix.removesuffix(".")) else ""
    return {f"{inside}{name.removeprefix(prefix)}": value for name, value in named.items()}


def _prefix(model: Any) -> str:
    """Return what the names of the base model's modules start with in a model that has a head."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name else ""


def read_specs(description: Any) -> dict[str, LayerSpec]:
    """Return the specs of the entry "holdfast" of a config.json. It is untrusted: raise ValueError if a value is wrong."""
    if not isinstance(description, dict) or not isinstance(description.get("layers"), dict):
        raise ValueError('its config has no "holdfast" section that names layers.')
    if (written := description.get("format")) != FORMAT:
        raise ValueError(f"it is written in format {written!r}; this Holdfast ({VERSION}) reads {FORMAT}.")
    return {name: from_mapping(LayerSpec, values, f"layer {name!r}") for name, values in description["layers"].items()}


@dataclass(frozen=True)
class LayerInfo:
    """The sizes of an MoE layer and its place in the model, for which a router is built."""

    name: str
    dim: int
    experts: int
    heads: int | None  # None: attention within windows, or no attention
    depth: int = 0  # index among the MoE layers of its stack
    before: "LayerInfo | None" = None  # the previous MoE layer of its stack
    recurrent: bool = False  # a layer of a hybrid model without attention
    vocabulary: int | None = None  # number of token ids; None: the model, or this tower of it, reads none
    uncaptured: bool = False  # the family's attention cannot be captured
    packed: bool = False  # all images of a batch are one row of tokens
    connector: bool = False  # between a vision tower and a language model, where there is no attention

    @property
    def place(self) -> int:
        """The number of this layer, from 1, among those whose previous MoE layer has the same width; 0 if its has not."""
        return 0 if self.before is None or self.before.dim != self.dim else self._clusterable

    @property
    def _clusterable(self) -> int:
        """The number of layers up to this one whose previous MoE layer has the same width."""
        return 0 if self.before is None else self.before._clusterable + (self.before.dim == self.dim)


def linked_in_order(infos: Sequence[LayerInfo]) -> list[LayerInfo]:
    """Return the layers with `depth` and `before` set. A model may have several stacks of layers (two towers)."""
    linked: list[LayerInfo] = []
    for info in infos:
        last = linked[-1] if linked and _stack(linked[-1].name) == _stack(info.name) else None
        linked.append(info if last is None else replace(info, depth=last.depth + 1, before=last))
    return linked


def _stack(name: str) -> str:
    """Return the part of a layer's name before its number: the stack of layers that it belongs to."""
    steps = name.split(".")
    number = next((index for index, step in enumerate(steps) if step.isdigit()), len(steps))
    return ".".join(steps[:number])


def build_routers(
    infos: Sequence[LayerInfo], specs: Mapping[str, LayerSpec], hosts: Mapping[str, HostModel]
) -> dict[str, Router | None]:
    """Return a router for each layer that `specs` names; None means the family's own rule. The model is not changed."""
    attending = [index for index, info in enumerate(infos) if not info.recurrent]
    wanted = [info for info in infos if info.name in specs]
    return {info.name: _build_router(info, specs[info.name], hosts[info.name], attending) for info in wanted}


def _build_router(info: LayerInfo, spec: LayerSpec, host: HostModel, attending: Sequence[int]) -> Router | None:
    """Return the router of one layer. `attending`: the indices of the layers that have attention."""
    if spec.router == NATIVE:
        if spec.options:
            raise ValueError(f"the native router takes no options (given: {', '.join(spec.options)}).")
        return None
    from_layer: dict[str, Any] = {"depth": info.depth, "place": info.place, "heads": info.heads or 1}
    from_layer["clusters"] = info.before.experts if info.before else None
    if info.vocabulary is not None:
        from_layer["vocabulary"] = info.vocabulary
        given = spec.options.get("vocabulary", info.vocabulary)
        if isinstance(given, int) and given < info.vocabulary:
            raise ValueError(f"{info.name}: vocabulary is {given}, but there are {info.vocabulary} token ids; leave it out.")
    elif reads(spec.router, "token_ids"):
        raise ValueError(
            f"{info.name}: router {spec.router!r} chooses experts by token id, and this part of the model reads none; "
            "choose a router that reads the tokens themselves."
        )
    try:
        with default_float32():
            sizes: dict[str, Any] = {"dim": info.dim, "experts": info.experts, "k": spec.k, "losses": spec.losses}
            host = replace(host, pretrained=spec.pretrained, options=from_layer)
            router = REGISTRY.build(spec.router, **sizes, layer=info.name, host=host, **spec.options)
    except (TypeError, OverflowError) as problem:  # options from a folder may have any type and size
        given = ", ".join(f"{name}={value!r}" for name, value in spec.options.items())
        raise ValueError(f"{info.name}: router {spec.router!r} does not take these options ({given}): {problem}.") from None
    if router.select.layer_kind != "moe" and spec.experts is None:
        raise ValueError(f"{info.name}: {NOT_A_ROUTER}")
    if info.uncaptured and router.traits.sequence_aware:
        raise ValueError(
            f"{info.name}: router {spec.router!r} reads other tokens, and this model's attention cannot be captured (it is "
            "not one of transformers' attention functions, or it adds a bias of its own); use a router of single tokens."
        )
    if info.packed and router.traits.sequence_aware:
        raise ValueError(
            f"{info.name}: router {spec.router!r} reads other tokens, and here the patches of all images are one row of "
            "tokens, in which it cannot separate the images; use a router of single tokens in this part."
        )
    if info.connector and "attention.projection" in router.reads:
        raise ValueError(
            f"{info.name}: router {spec.router!r} reads attention, and a connector has none; use 'similarity' or a router "
            "of single tokens in this part."
        )
    if info.recurrent and router.traits.sequence_aware:
        raise ValueError(
            f"{info.name}: router {spec.router!r} reads other tokens, and this layer has no attention and no KV cache to "
            f"read them from; use it only in layers that have (layers={attending})."
        )
    if info.heads is None and not info.recurrent and "attention.projection" in router.reads:
        raise ValueError(
            f"{info.name}: this model attends within windows, so router {spec.router!r} has no attention over the whole "
            "sequence to read; use 'similarity'."
        )
    if "previous" in router.reads and info.before is not None and info.before.dim != info.dim:
        raise ValueError(
            f"{info.name}: the previous MoE layer has width {info.before.dim}, this one {info.dim}; router "
            f"{spec.router!r} reads the previous layer and needs equal widths: choose layers of one width."
        )
    return router


@contextlib.contextmanager
def default_float32() -> Iterator[None]:
    """Inside the `with`, build in float32: router state is float32 whatever the dtype of the model."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def reads(router: str, field: str) -> bool:
    """Return whether a part of the router `router` reads this field of its context."""
    return router != NATIVE and any(field in part.reads for part in REGISTRY.part_classes(router))

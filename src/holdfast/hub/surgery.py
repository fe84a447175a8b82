"""Putting routers and experts into a model, from specs: the one way, for a model at hand and for one that is being loaded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from holdfast.hub.families import DenseFamily, MoEFamily, dense_family, layers_of
from holdfast.hub.gates import install
from holdfast.hub.scores import GateScore
from holdfast.hub.sites import Site, sites
from holdfast.hub.sparse import SparseLayer
from holdfast.hub.specs import LayerSpec
from holdfast.hub.wiring import build_router, wire
from holdfast.moe import Experts
from holdfast.moe.activations import ACTIVATIONS, Activation
from holdfast.routing import Clustered, LinearScore, Router
from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import Host
from holdfast.routing.rules import Softmax

SAME_ACTIVATION = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}  # under transformers' names


def repeat(model: nn.Module, specs: Mapping[str, LayerSpec]) -> None:
    """Change a fresh model as `specs` say. Its weights are still to come."""
    dense = {name: spec for name, spec in specs.items() if spec.experts is not None}
    if dense:
        family = dense_family(model)
        layers = {f"{name}.{family.place}".lstrip("."): layer for name, layer in layers_of(family, model)}
        for depth, (name, spec) in enumerate(dense.items()):
            if name not in layers:
                raise ValueError(f"its config names a layer {name!r} that the model does not have.")
            place_sparse(family, layers[name], name, spec, depth)
    found = sites(model)
    unknown_names = specs.keys() - {site.name for site in found}
    if unknown_names:
        raise ValueError(f"its config names a layer {sorted(unknown_names)[0]!r} that the model does not have.")
    if not dense:
        for site, router in build_all(found, specs).items():
            place_router(site_by_name(found, site), specs[site], router)
    wire(model, found, specs)


def site_by_name(found: list[Site], name: str) -> Site:
    return next(site for site in found if site.name == name)


def build_all(found: list[Site], specs: Mapping[str, LayerSpec]) -> dict[str, Router | None]:
    """A router for each layer that `specs` names, all or none: nothing is changed before every one could be built."""
    built = {}
    for depth, site in enumerate(found):
        if site.name in specs:
            before = found[depth - 1] if depth else None
            built[site.name] = build_router(site, specs[site.name], host_of(site), depth, before)
    return built


def host_of(site: Site) -> Host:
    """What the layer as it is brings along: its scores, and its rule for weights."""
    if site.family is not None:
        family, gate = site.family, site.gate
        score = GateScore(gate, weight=family.weight, bias=family.bias)
        scale = 1.0 if family.scale is None else float(getattr(gate, family.scale))
        return Host(True, score, family.rule(gate), scale)
    router = site.router
    assert router is not None
    own = router.score.base if isinstance(router.score, Clustered) else router.score
    rule = getattr(router.select, "rule", None) or Softmax(renormalise=True)
    return Host(True, own if isinstance(own, LinearScore) else None, rule, router.scale)


def place_router(site: Site, spec: LayerSpec, router: Router | None) -> None:
    """Put a router where the layer has one; None is the family's own rule."""
    if isinstance(site.block, SparseLayer):
        assert router is not None
        if site.block.__dict__["former"] is None:
            site.block.__dict__["former"] = site.block.router
        site.block.router = router.to(**_like(site.block.experts.down_proj)).train(site.block.training)
        return
    family, gate = site.family, site.gate
    assert family is not None
    weight = gate.get_parameter(family.weight)
    if router is not None:
        router = router.to(**_like(weight, gate)).train(gate.training)
        _require_unused_sentinel_support(site, router)
    install(gate, router, family.rule(gate), spec.loss_terms() if router is None else None, family.usual_order)
    # A score of another kind leaves the checkpoint's unused, and parameters without a gradient stop DDP.
    used = router is None or any(isinstance(module, GateScore) for module in router.modules())
    if used != weight.requires_grad and not (used and not hasattr(gate, "was_trained")):
        _set_trained(gate, used)


def _set_trained(gate: Any, used: bool) -> None:
    if used:
        del gate.was_trained
    else:
        gate.was_trained = True
    for parameter in gate.parameters(recurse=False):
        parameter.requires_grad_(used)


def _require_unused_sentinel_support(site: Site, router: Router) -> None:
    experts = site.experts
    if router.select.ragged and not all(hasattr(experts, name) for name in ("has_gate", "has_bias", "is_transposed", "config")):
        raise ValueError(
            f"{site.name}: {type(experts).__name__} of this transformers version cannot run a router that uses a different number "
            "of experts for each token; update transformers, or choose a router with a fixed k."
        )


def place_sparse(family: DenseFamily, layer: nn.Module, name: str, spec: LayerSpec, depth: int) -> SparseLayer:
    """Replace a layer's feed-forward network by experts, with weights of their own still."""
    assert spec.experts is not None
    down, config = layer.get_submodule(family.down), layer.get_submodule(family.attention).config
    dim, inner = _shape(down)
    experts = Experts(
        dim,
        spec.hidden or inner,
        spec.experts,
        activation=activation_of(config, family),
        gated=family.gated,
        bias=getattr(down, "bias", None) is not None,
        **_like(down.weight),
    )
    brought: dict[str, Any] = {"depth": depth}
    if not family.windowed:
        brought["heads"] = int(config.num_attention_heads)
    rule = Softmax(renormalise=True) if spec.pretrained else None
    host = Host(spec.pretrained, rule=rule, options=brought)
    router = REGISTRY.build(
        spec.router, dim=dim, experts=spec.experts, k=spec.k, losses=spec.loss_terms(), layer=name, host=host, **spec.options
    )
    dropout = None if family.dropout is None else layer.get_submodule(family.dropout)
    sparse = SparseLayer(router.to(**_like(down.weight)), experts, dropout).train(layer.training)
    layer.set_submodule(family.place, sparse)
    for path in family.bypassed:
        layer.set_submodule(path, nn.Identity())
    return sparse


def activation_of(config: Any, family: DenseFamily) -> str | Activation:
    """The config's activation, under our name where we have a fused one."""
    from transformers.activations import ACT2FN

    name = getattr(config, family.activation)
    name = SAME_ACTIVATION.get(name, name)
    function: Activation = name if name in ACTIVATIONS else ACT2FN[name]
    return function


def _shape(linear: nn.Module) -> tuple[int, int]:
    """(out, in) of a linear map; GPT-2's keep their weights transposed."""
    from transformers.pytorch_utils import Conv1D

    out, inner = linear.weight.shape
    return (inner, out) if isinstance(linear, Conv1D) else (out, inner)


def _like(weight: torch.Tensor, module: nn.Module | None = None) -> dict[str, Any]:
    """Device and dtype of a weight; of one that accelerate keeps elsewhere, the device it is computed on."""
    device = weight.device
    if device.type == "meta" and module is not None and hasattr(module, "_hf_hook"):
        device = torch.device(getattr(module._hf_hook, "execution_device", None) or "cpu")
    return {"device": device, "dtype": weight.dtype} if weight.is_floating_point() else {"device": device}

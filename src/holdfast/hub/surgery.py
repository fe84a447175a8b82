"""Putting routers and experts into a model, from specs: the same way for a model at hand and for one being loaded."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from holdfast.hub.backends import is_known, is_replaced
from holdfast.hub.building import Place, build_routers, in_order
from holdfast.hub.families import DenseFamily, dense_family, layers_of
from holdfast.hub.gates import ReroutedGate, install
from holdfast.hub.scores import GateScore
from holdfast.hub.sites import Site, places, sites
from holdfast.hub.sparse import SparseLayer
from holdfast.hub.specs import LayerSpec
from holdfast.layers import Experts, name_layers
from holdfast.layers.activations import ACTIVATIONS, Activation
from holdfast.routing import Router
from holdfast.routing.registry import Host

Module = TypeVar("Module", bound=nn.Module)
SAME_ACTIVATION = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}  # under transformers' names


def repeat(model: nn.Module, specs: Mapping[str, LayerSpec]) -> list[Site]:
    """Change a fresh model as `specs` say and return its MoE layers. Its weights are still to come."""
    if any(spec.experts is not None for spec in specs.values()):
        family = dense_family(model)
        layers = {f"{name}.{family.place}".lstrip("."): layer for name, layer in layers_of(family, model)}
        _require_known(specs, layers)
        make_sparse(family, {name: layers[name] for name in specs}, specs)
        found = sites(model)
    else:
        found = sites(model)
        _require_known(specs, {site.name: site for site in found})
        reroute_sites(found, specs)
    return found


def _require_known(specs: Mapping[str, LayerSpec], layers: Mapping[str, Any]) -> None:
    for name in specs:
        if name not in layers:
            raise ValueError(f"its config names a layer {name!r} that the model does not have.")


def reroute_sites(found: list[Site], specs: Mapping[str, LayerSpec]) -> None:
    """Give each layer that `specs` names the router it says, or change nothing."""
    hosts = {site.name: host_of(site, specs[site.name]) for site in found if site.name in specs}
    built = build_routers(places(found), specs, hosts)
    for site in found:
        if site.name in built:
            require_runnable(site, built[site.name])
    for site in found:
        if site.name in built:
            _place_router(site, specs[site.name], hosts[site.name], built[site.name])


def host_of(site: Site, spec: LayerSpec) -> Host:
    """What the layer as it is brings along: its scores, and its rule for weights."""
    if site.family is not None:
        family, gate = site.family, site.gate
        score = GateScore(gate, weight=family.weight, bias=family.bias)
        scale = 1.0 if family.scale is None else float(getattr(gate, family.scale))
        return Host(True, score, family.rule(gate), scale)
    router = site.router
    assert router is not None
    return Host(True, router.score.host, spec.rule())


def _place_router(site: Site, spec: LayerSpec, host: Host, router: Router | None) -> None:
    """Put a router where the layer has one; None is the family's own rule."""
    if isinstance(site.block, SparseLayer):
        assert router is not None
        router = router.to(**_like(site.block.experts.down_proj, site.block.experts)).train(site.block.training)
        site.block.router = _marked(router)
        return
    family, gate = site.family, site.gate
    assert family is not None
    weight = gate.get_parameter(family.weight)
    if router is not None:
        router = _marked(router.to(**_like(weight, gate)).train(gate.training))
    install(gate, router, family.rule(gate), spec.loss_terms() if router is None else None, family.usual_order)
    # A score of another kind leaves the checkpoint's unused, and parameters without a gradient stop DDP.
    used = router is None or router.score.host is host.score
    if used == hasattr(gate, "was_trained"):
        set_trained(gate, used)


def _marked(module: Module) -> Module:
    """`module`, marked as transformers marks what it need not initialise any more, unless its values are still to come."""
    if not any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        for part in module.modules():
            part._is_hf_initialized = part._is_started = True  # type: ignore[assignment]
    return module


@torch.no_grad()
def initialise(model: nn.Module, specs: Mapping[str, LayerSpec]) -> None:
    """Give routers and experts of ours that were made on `meta` the values they start with.

    Tensors that a checkpoint has filled, which transformers has marked, keep theirs.
    """
    found = sites(model)
    for site in found:
        if site.family is None and not hasattr(site.experts, "_is_started"):
            _start_experts(site.experts, float(getattr(site.config, "initializer_range", None) or 0.02))
        if site.router is not None and not hasattr(site.router, "_is_started"):
            spec = specs[site.name]
            host = Host(rule=spec.rule()) if site.family is None else host_of(site, spec)
            with torch.device("cpu"):
                fresh = build_routers(places(found), {site.name: spec}, {site.name: host})[site.name]
            assert fresh is not None
            _start_router(site.router, fresh)
    name_layers(model)


def _start_experts(experts: Any, std: float) -> None:
    from transformers import initialization

    for name, parameter in experts.named_parameters(recurse=False):
        initialization.zeros_(parameter) if name.endswith("_bias") else initialization.normal_(parameter, std=std)
    experts._is_started = True


def _start_router(router: Any, fresh: Router) -> None:
    from transformers import initialization

    values = dict(chain(fresh.named_parameters(), fresh.named_buffers()))
    for name, tensor in chain(router.named_parameters(), router.named_buffers()):
        initialization.copy_(tensor, values[name])
    router._is_started = True


def set_trained(gate: Any, trained: bool) -> None:
    """Let the gate's own weights learn, or not while they are unused."""
    if not trained:
        gate.was_trained = [name for name, parameter in gate.named_parameters(recurse=False) if parameter.requires_grad]
    for name in gate.was_trained:
        gate.get_parameter(name).requires_grad_(trained)
    if trained:
        del gate.was_trained


def require_runnable(site: Site, router: Router | None) -> None:
    """Refuse what would fail in the middle of a forward, or be passed by in silence."""
    if router is None or site.family is None:
        return
    if not isinstance(site.gate, ReroutedGate) and is_replaced(site.gate):
        raise ValueError(
            f"{site.name}: another library has replaced the gate's forward, so a router in it would not be asked; "
            "change the model before it is distributed."
        )
    if not router.select.ragged:
        return
    if is_replaced(site.experts):
        raise ValueError(
            f"{site.name}: transformers has spread these experts over processes (distributed_config), and its dispatch "
            "cannot leave a slot unused; choose a router with a fixed k, or spread them with holdfast.shard_experts."
        )
    if not is_known(site.experts):
        raise ValueError(
            f"{site.name}: {type(site.experts).__name__} of this transformers cannot run a router that uses a different "
            "number of experts for each token; update transformers, or choose a router with a fixed k."
        )


def make_sparse(
    family: DenseFamily, layers: Mapping[str, nn.Module], specs: Mapping[str, LayerSpec]
) -> dict[str, SparseLayer]:
    """Replace the feed-forward networks of `layers`, by the name of their place, with experts of weights yet to be set."""
    where = []
    for name, layer in layers.items():
        config: Any = layer.get_submodule(family.attention).config
        dim, _ = _shape(layer.get_submodule(family.down))
        heads = None if family.windowed else int(config.num_attention_heads)
        where.append(Place(name, dim, specs[name].experts or 0, heads))
    hosts = {name: Host(rule=specs[name].rule()) for name in layers}
    routers = build_routers(in_order(where), specs, hosts)
    experts = {name: _experts(family, layer, specs[name]) for name, layer in layers.items()}
    made = {}
    for name, layer in layers.items():
        router = routers[name]
        if router is None:
            raise ValueError("a dense model has no native router; name one of holdfast.list_routers().")
        made[name] = _place_sparse(family, layer, router, experts[name])
    return made


def _experts(family: DenseFamily, layer: nn.Module, spec: LayerSpec) -> Experts:
    down: Any = layer.get_submodule(family.down)
    dim, inner = _shape(down)
    return Experts(
        dim,
        spec.hidden or inner,
        spec.experts or 0,
        activation=activation_of(layer.get_submodule(family.attention).config, family),
        gated=family.gated,
        bias=getattr(down, "bias", None) is not None,
        **_like(down.weight),
    )


def _place_sparse(family: DenseFamily, layer: nn.Module, router: Router, experts: Experts) -> SparseLayer:
    dropout = None if family.dropout is None else layer.get_submodule(family.dropout)
    sparse = SparseLayer(router.to(**_like(experts.down_proj)), experts, dropout).train(layer.training)
    _marked(sparse)
    layer.set_submodule(family.place, sparse)
    for path in family.bypassed:
        layer.set_submodule(path, nn.Identity())
    return sparse


def activation_of(config: Any, family: DenseFamily) -> str | Activation:
    """The config's activation, under our name where we have a fused one."""
    from transformers.activations import ACT2FN

    name = getattr(config, family.activation)
    name = SAME_ACTIVATION.get(name, name)
    known: str | Activation = name if name in ACTIVATIONS else ACT2FN[name]
    return known


def _shape(linear: Any) -> tuple[int, int]:
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

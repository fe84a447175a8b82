"""Putting routers and experts into a model, from specs: the same way for a model at hand and for one being loaded.

A changed model's connections: each MoE layer's surroundings, the ledger of losses, the specs.
"""

import warnings
from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from holdfast.hub.context import LOOKS_AHEAD, Surroundings
from holdfast.hub.families import DenseFamily, dense_family, layers_of, record
from holdfast.hub.layers import NATIVE, LayerSpec, Place, Site, build_routers, in_order, places, sites
from holdfast.hub.losses import Ledger, text_config
from holdfast.hub.replacements import GateScore, ReroutedGate, SparseLayer, install, is_known, is_replaced, runs_ours
from holdfast.layers import Experts, name_layers
from holdfast.layers.experts import ACTIVATIONS, Activation
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


CHANGED_IN_MEMORY = " (changed in memory by Holdfast: save the model and load that folder, or pass the model itself)"
ENTRIES = ("output_router_logits", "router_aux_loss_coef", "num_experts", "num_experts_per_tok")  # of a config


class CountedGate:
    """Count a layer that keeps the family's router, unchanged, in the balance loss that a trainer asks for.

    The family's own loss is over all layers. Where routers of ours replace some, ours is over all of them too.
    """

    def __init__(self, site: Site, ledger: Ledger) -> None:
        assert site.family is not None
        self.rule, self.k = site.family.rule(site.gate), int(site.gate.top_k)
        self.ledger, self.around = ledger, Surroundings(None, site.neighbours, ledger, None, self.k)
        self.handle = site.gate.register_forward_hook(self)

    def __call__(self, gate: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        context = self.around.context(self.around.tokens(inputs[0]))
        if self.ledger.asked:
            self.ledger.collect(record(output, self.rule), output[1], None, context.token_mask, self.k)

    def remove(self) -> None:
        self.handle.remove()
        self.around.remove()


class Wiring:
    """What holds the changes of a model together; one a model, replaced as a whole by the next change."""

    def __init__(self, model: nn.Module, found: list[Site], specs: Mapping[str, LayerSpec]) -> None:
        routers = [site.router for site in found if site.name in specs and site.router is not None]
        has_losses = any(spec.losses for spec in specs.values())
        on_request = not has_losses and any(spec.router != NATIVE for spec in specs.values())
        self.specs = dict(specs)
        self.ledger = Ledger(
            model,
            routers,
            own_coefficient=float(model.__dict__.get("_own_balance", 0.0)),
            unit=float(getattr(text_config(model), "router_aux_loss_coef", 1.0)) or 1.0,
            on_request=on_request,
            lists_logits=found[0].family is None,
        )
        by_name: dict[str, Surroundings] = {}
        for site, place in zip(found, places(found), strict=True):
            if site.name in specs:
                before = by_name.get(place.before.name) if place.before else None
                around = by_name[site.name] = Surroundings(
                    site.router, site.neighbours, self.ledger, before, specs[site.name].k
                )
                holder = site.block if site.family is None else site.gate
                holder.surroundings = around
        self.surroundings = list(by_name.values())
        kept = [site for site in found if site.name not in specs] if on_request else []
        self.counted = [CountedGate(site, self.ledger) for site in kept if site.family is not None]

    @property
    def looks_ahead(self) -> bool:
        """Does a router in a causal model let a route depend on later tokens?"""
        return any(around.looks_ahead for around in self.surroundings)

    def remove(self) -> None:
        self.ledger.remove()
        for around in self.surroundings:
            around.remove()
        for gate in self.counted:
            gate.remove()


def wiring(model: nn.Module) -> Wiring | None:
    found = model.__dict__.get("_holdfast")
    return found if isinstance(found, Wiring) else None


def specs_of(model: nn.Module) -> dict[str, LayerSpec]:
    current = wiring(model)
    return {} if current is None else dict(current.specs)


def own_balance(model: Any) -> float:
    """Return the coefficient of the balance loss that the model itself adds in training, also while ours replaces it."""
    coefficient = model.__dict__.get("_own_balance", getattr(model, "router_aux_loss_coef", 0.0))
    return float(coefficient) if getattr(model.config, "output_router_logits", False) else 0.0


def _replace_own_balance(model: Any, specs: Mapping[str, LayerSpec]) -> None:
    """Switch the family's balance loss off where a router of ours selects, or brings losses; else switch it on again.

    The family computes it from a top-k of the logits, whatever was selected.
    """
    if any(spec.losses or spec.router != NATIVE for spec in specs.values()):
        if hasattr(model, "router_aux_loss_coef"):  # added in any forward that is asked for router logits
            model.__dict__.setdefault("_own_balance", model.router_aux_loss_coef)
            model.router_aux_loss_coef = 0.0
    elif "_own_balance" in model.__dict__:
        model.router_aux_loss_coef = model.__dict__.pop("_own_balance")


def _describe_experts(config: Any, specs: Mapping[str, LayerSpec]) -> None:
    """Give the config the entries by which trainers recognise an MoE and weight its `aux_loss`, where it lacks them."""
    before = config.__dict__.pop("_holdfast_entries", ())
    for name in ENTRIES:
        if isinstance(before, list | tuple) and name in before and hasattr(config, name):
            delattr(config, name)
    if not specs:
        return
    first = next(iter(specs.values()))
    entries: dict[str, Any] = {"output_router_logits": False, "num_experts_per_tok": first.k}
    if first.experts is not None:
        entries["num_experts"] = first.experts
    # 0 means that a trainer does not ask for the loss.
    entries["router_aux_loss_coef"] = 1.0 if any(spec.losses for spec in specs.values()) else 0.0
    added = [name for name in entries if not hasattr(config, name)]
    for name in added:
        setattr(config, name, entries[name])
    config.__dict__["_holdfast_entries"] = added


def original_name(name: str) -> str:
    """Return the folder or hub id that a model came from, as it was before the model was changed in memory."""
    return name.partition(CHANGED_IN_MEMORY)[0]


def mark_changed(model: Any, changed: bool = True) -> None:
    """Keep others from loading the model as it was before under the name that it came from.

    TRL makes DPO's reference model from `config._name_or_path`, and PEFT notes `name_or_path` as an adapter's base:
    both would silently be the model with its old routers.
    """
    changed = changed or "_opened_changed" in model.__dict__  # the folder holds other routers than the model's own
    for owner, name in ((model.config, "_name_or_path"), (model, "name_or_path")):
        given = getattr(owner, name, None)
        known = original_name(given) if isinstance(given, str) else ""
        if known:
            setattr(owner, name, known + CHANGED_IN_MEMORY if changed else known)


def connect(model: nn.Module, found: list[Site], specs: Mapping[str, LayerSpec]) -> None:
    """Connect the layers that `specs` names, and nothing else, in place of earlier connections."""
    current = wiring(model)
    if current is not None:
        current.remove()
    _replace_own_balance(model, specs)
    _describe_experts(text_config(model), specs)
    for site in found:
        if site.family is not None and hasattr(site.experts, "config"):
            runs_ours(site.experts, ragged=site.router is not None and site.router.select.ragged)
    if not specs:
        model.__dict__.pop("_holdfast", None)
        return
    wired = model.__dict__["_holdfast"] = Wiring(model, found, specs)
    if wired.looks_ahead:
        warnings.warn(
            f"{LOOKS_AHEAD}: its perplexity compares with no causal model's, and it cannot generate.", stacklevel=3
        )

"""Install routers, experts and hooks in a model, as specs say: the same way for a model in memory and one being loaded.

    install_specs            change the layers of a fresh model: `make_sparse` for a dense model, `reroute_layers` for an MoE
    initialise               give values to routers and experts that were built on `meta`
    install_hooks            put one `ModelHooks` on the model, in the place of an earlier one

`ModelHooks` is everything of Holdfast that runs around the layers: a `ContextCapture` for each MoE layer and one
`LossCollector`. Every change of a model replaces it as a whole.
"""

import warnings
from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from holdfast.hub.context import NOT_CAUSAL, ContextCapture
from holdfast.hub.families import (
    DenseLayer,
    device_and_dtype,
    initial_std,
    new_experts,
    routing_from_gate,
    text_config,
)
from holdfast.hub.forwards import ForwardHooks, LossCollector, is_called_alone
from holdfast.hub.layers import MoELayerRef, dense_layers, layer_info, layer_infos, moe_layers, require_modalities
from holdfast.hub.replacements import (
    GateScore,
    ReroutedGate,
    SparseLayer,
    has_foreign_forward,
    has_known_layout,
    install_gate,
    needs_holdfast_experts,
    use_holdfast_experts,
)
from holdfast.hub.specs import NATIVE, LayerSpec, build_routers, linked_in_order
from holdfast.layers import name_layers
from holdfast.layers.expert_losses import of_experts
from holdfast.layers.losses import Losses
from holdfast.layers.moe import LAYERS, not_causal
from holdfast.layers.upcycling import new_shared
from holdfast.routing import Router, join_routers
from holdfast.routing.registry import HostModel

Module = TypeVar("Module", bound=nn.Module)
MODIFIED_IN_MEMORY = " (changed in memory by Holdfast: save the model and load that folder, or pass the model itself)"
MOE_ENTRIES = ("output_router_logits", "router_aux_loss_coef", "num_experts", "num_experts_per_tok")  # of a config


def install_specs(model: nn.Module, specs: Mapping[str, LayerSpec]) -> list[MoELayerRef]:
    """Change the layers of a fresh model as `specs` say and return its MoE layers. Weights are loaded afterwards."""
    for router in {spec.router for spec in specs.values()}:
        require_modalities(model, router)
    is_dense = any(spec.experts is not None for spec in specs.values())
    layers: dict[str, Any] = dense_layers(model) if is_dense else {layer.name: layer for layer in moe_layers(model)}
    for name in specs:
        if name not in layers:
            raise ValueError(f"its config names a layer {name!r} that the model does not have.")
    if is_dense:
        make_sparse({name: layer for name, layer in layers.items() if name in specs}, specs)  # in the order of the model
        return moe_layers(model)
    reroute_layers(list(layers.values()), specs)
    return list(layers.values())


def reroute_layers(found: list[MoELayerRef], specs: Mapping[str, LayerSpec]) -> None:
    """Give each layer that `specs` names its router. An error is raised before the first layer is changed."""
    changed = [moe_layer for moe_layer in found if moe_layer.name in specs]
    hosts = {moe_layer.name: host_of(moe_layer, specs[moe_layer.name]) for moe_layer in changed}
    built = build_routers(layer_infos(found), specs, hosts)
    for moe_layer in changed:
        require_runnable(moe_layer, built[moe_layer.name])
    for moe_layer in changed:
        router, family = built[moe_layer.name], moe_layer.family
        if isinstance(moe_layer.block, SparseLayer):
            assert router is not None
            experts = moe_layer.block.experts
            router = router.to(**device_and_dtype(experts.down_proj, experts)).train(moe_layer.block.training)
            moe_layer.block.router = _mark_initialised(router)
            continue
        assert family is not None
        gate = moe_layer.gate
        if router is not None:  # None means the family's own rule
            placed = device_and_dtype(gate.get_parameter(family.weight), gate)
            router = _mark_initialised(router.to(**placed).train(gate.training))
        losses = specs[moe_layer.name].losses if router is None else None
        install_gate(gate, router, losses, family, moe_layer.block)
        # A router with a score of its own leaves the gate's weights unused, and parameters without a gradient stop DDP.
        is_used = router is None or router.score.declares.reusable_score is hosts[moe_layer.name].score
        if is_used == hasattr(gate, "was_trained"):
            set_gate_trainable(gate, is_used)


def host_of(moe_layer: MoELayerRef, spec: LayerSpec) -> HostModel:
    """Return what a new router takes over from the layer: its scores, its rule for weights and their scale."""
    if moe_layer.family is not None:
        family, block = moe_layer.family, moe_layer.block
        score = GateScore(moe_layer.gate, weight=family.weight, bias=family.bias)
        return HostModel(True, score, family.rule_of(block), family.scale_of(block))
    router = moe_layer.router
    assert router is not None
    return HostModel(True, router.score.declares.reusable_score, spec.rule())


def require_runnable(moe_layer: MoELayerRef, router: Router | None) -> None:
    """Raise ValueError if the router would fail during a forward, or never run."""
    if router is None or moe_layer.family is None:
        return
    if not isinstance(moe_layer.gate, ReroutedGate) and has_foreign_forward(moe_layer.gate):
        raise ValueError(
            f"{moe_layer.name}: another library has replaced the gate's forward, so a router inside it would never run; "
            "change the model before it is distributed."
        )
    if not needs_holdfast_experts(router):
        return
    if has_foreign_forward(moe_layer.experts):
        raise ValueError(
            f"{moe_layer.name}: transformers has sharded these experts over ranks (distributed_config), and its dispatch "
            "supports neither unused slots nor gradient_scaling; choose a router with a fixed k and without it, or shard "
            "them with holdfast.shard_experts."
        )
    if not has_known_layout(moe_layer.experts):
        raise ValueError(
            f"{moe_layer.name}: {type(moe_layer.experts).__name__} of this transformers cannot run a router that uses a "
            "different number of experts for each token, or that has gradient_scaling; update transformers, or choose a "
            "router with a fixed k and without it."
        )


def set_gate_trainable(gate: Any, trainable: bool) -> None:
    """Freeze a gate's own weights while they are unused, or make those trainable again that were."""
    if not trainable:
        own = (pair for pair in gate.named_parameters() if not pair[0].startswith("holdfast."))  # the router is inside
        gate.was_trained = [name for name, parameter in own if parameter.requires_grad]
    for name in gate.was_trained:
        gate.get_parameter(name).requires_grad_(trainable)
    if trainable:
        del gate.was_trained


def make_sparse(layers: Mapping[str, DenseLayer], specs: Mapping[str, LayerSpec]) -> dict[str, SparseLayer]:
    """Replace the feed-forward networks of `layers` by experts, whose weights the caller sets; keys are module names."""
    sizes = {name: (dense.dim, specs[name].experts or 0) for name, dense in layers.items()}
    infos = [
        layer_info(name, sizes[name], dense.config, dense.family, of_images=dense.of_images)
        for name, dense in layers.items()
    ]
    hosts = {name: HostModel(rule=specs[name].rule()) for name in layers}
    routers = build_routers(linked_in_order(infos), specs, hosts)
    for name, dense in layers.items():
        router = routers[name]
        if router is None:
            raise ValueError("a dense model has no native router; name one of holdfast.list_routers().")
        if router.select.declares.refuses_causal and dense.family.is_causal(dense.attention):
            raise ValueError(f"{name}: {not_causal(LAYERS[router.select.layer_kind].__name__)}")
    experts = {name: new_experts(dense, specs[name].experts or 0, specs[name].hidden) for name, dense in layers.items()}
    made = {}
    for name, dense in layers.items():
        router, family, layer, count = routers[name], dense.family, dense.layer, specs[name].shared
        assert router is not None
        shared = new_shared(experts[name], count) if count else None
        dropout = None if family.dropout is None else layer.get_submodule(family.dropout)
        router = router.to(**device_and_dtype(experts[name].down_proj))
        sparse = SparseLayer(router, experts[name], dropout, shared).train(layer.training)
        made[name] = _mark_initialised(sparse)
        layer.set_submodule(family.place, sparse)
        for path in family.bypassed:
            layer.set_submodule(path, nn.Identity())
    return made


def _mark_initialised(module: Module) -> Module:
    """Mark `module` as initialised, so that transformers does not do it again; not if it is on `meta` without values."""
    if not any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers())):
        for part in module.modules():
            part._is_hf_initialized = part._is_started = True  # type: ignore[assignment]
    return module


@torch.no_grad()
def initialise(model: nn.Module, specs: Mapping[str, LayerSpec]) -> None:
    """Give routers and experts that were built on `meta` their initial values.

    Tensors that were loaded from a checkpoint keep their values: transformers has marked those.
    """
    from transformers import initialization

    found = moe_layers(model)
    for moe_layer in found:
        experts, router = moe_layer.experts, cast(Any, moe_layer.router)
        if moe_layer.family is None and not hasattr(experts, "_is_started"):
            std = initial_std(moe_layer.config)
            for name, parameter in experts.named_parameters(recurse=False):
                initialization.zeros_(parameter) if name.endswith("_bias") else initialization.normal_(parameter, std=std)
            experts._is_started = True
        if router is not None and not hasattr(router, "_is_started"):
            name, spec = moe_layer.name, specs[moe_layer.name]
            host = HostModel(rule=spec.rule()) if moe_layer.family is None else host_of(moe_layer, spec)
            with torch.device("cpu"):
                fresh = build_routers(layer_infos(found), {name: spec}, {name: host})[name]
            assert fresh is not None
            values = dict(chain(fresh.named_parameters(), fresh.named_buffers()))
            for name, tensor in chain(router.named_parameters(), router.named_buffers()):
                initialization.copy_(tensor, values[name])
            router._is_started = True
    name_layers(model)


class ModelHooks:
    """The hooks of a changed model: a `ContextCapture` for each layer of `specs`, and the `LossCollector`."""

    def __init__(self, model: nn.Module, found: list[MoELayerRef], specs: Mapping[str, LayerSpec]) -> None:
        routers = [layer.router for layer in found if layer.name in specs and layer.router is not None]
        join_routers(routers)
        self.specs = dict(specs)
        self.collector = LossCollector(model, specs, adds_logits=found[0].family is None)
        balance_on_request = self.collector.balance_on_request
        # Routes are recorded for the tokens of `input_ids`, so layers of images do not replay.
        can_replay = [layer.name for layer in found if layer.name in specs and not layer.of_images]
        self.forwards = ForwardHooks(model, routers, self.collector, len(can_replay))
        self.expert_losses: list[NativeExpertLosses] = []
        by_name: dict[str, ContextCapture] = {}
        for layer, info in zip(found, layer_infos(found), strict=True):
            if layer.name in specs:
                previous = by_name.get(info.before.name) if info.before else None
                spec = specs[layer.name]
                idle = layer.router is None and not spec.losses and not balance_on_request
                number = 0 if layer.of_images else can_replay.index(layer.name)
                capture = ContextCapture(layer.router, layer.layer_modules, self.forwards, previous, spec.k, number, idle)
                by_name[layer.name] = capture
                holder = layer.block if layer.family is None else layer.gate
                holder.context_capture = capture
                if layer.family is not None and spec.losses is not None and spec.losses.reads_experts:
                    self.expert_losses.append(NativeExpertLosses(layer, capture, self.forwards, spec.losses))
                if layer.family is not None and layer.router is not None and hasattr(layer.experts, "config"):
                    layer.experts.context_capture = capture  # `_holdfast_experts` reads how many rows it has to allocate
        self.captures = list(by_name.values())
        # Whether a router in a causal model lets a token's routing depend on later tokens.
        self.breaks_causality = any(capture.breaks_causality for capture in self.captures)
        for capture in [each for each in self.captures if each.breaks_causality_in_training][:1]:
            capture.warns_in_training = True
        unchanged = [layer for layer in found if layer.name not in specs] if balance_on_request else []
        self.native_gates = [NativeGateBalance(layer, self.forwards) for layer in unchanged if layer.family is not None]

    @property
    def sees_later_tokens(self) -> bool:
        """Whether, in evaluation, a token's routing depends on later tokens in a layer whose attention is causal."""
        return any(
            capture.layer_modules.causal and capture.router is not None and not capture.router.traits.causal
            for capture in self.captures
        )

    def remove(self) -> None:
        """Remove all hooks from the model."""
        self.forwards.remove()
        for capture in self.captures:
            capture.remove()
        for gate in self.native_gates:
            gate.remove()
        for hook in self.expert_losses:
            hook.remove()


class NativeExpertLosses:
    """A hook that adds the losses of the outputs of a family's experts, where they run.

    Not at the gate: in some families its tokens are not those of the experts.
    """

    def __init__(self, moe_layer: MoELayerRef, capture: ContextCapture, forwards: ForwardHooks, losses: Losses) -> None:
        self.moe_layer, self.capture, self.forwards, self.losses = moe_layer, capture, forwards, losses
        self.count = moe_layer.size[1]
        self.handle = moe_layer.experts.register_forward_pre_hook(self)

    def __call__(self, experts: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        forward = self.forwards.forward
        if not (self.capture.is_training and forward.learning):
            return None
        (tokens, chosen, weights), layer = inputs, self.moe_layer
        teacher = getattr(layer.block, "teacher", None)
        # `forward`, not a call: a call would run this hook again.
        slots = chosen, weights, self.capture.token_mask
        factors, self.capture.gradient_factors = self.capture.gradient_factors, None  # of the layer's own outputs only
        try:
            terms = of_experts(self.losses, experts.forward, self.count, tokens, *slots, teacher, layer.name)
        finally:
            self.capture.gradient_factors = factors
        total = torch.stack(list(terms.values())).sum()
        return tokens, chosen, self.forwards.collector.attach(terms, total, weights, forward)

    def remove(self) -> None:
        self.handle.remove()


class NativeGateBalance:
    """A hook that includes a layer with the family's own, unchanged gate in the balance loss that a trainer requests.

    The family's balance loss is over all layers. If routers of ours replace some of them, ours is over all layers too.
    """

    def __init__(self, moe_layer: MoELayerRef, forwards: ForwardHooks) -> None:
        assert moe_layer.family is not None
        self.rule, self.k = moe_layer.family.rule_of(moe_layer.block), int(moe_layer.gate.top_k)
        self.forwards = forwards
        self.context_capture = ContextCapture(None, moe_layer.layer_modules, forwards, None, self.k, forwards.layers)
        self.handle = moe_layer.gate.register_forward_hook(self)

    def __call__(self, gate: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if is_called_alone(gate):
            return
        _, context = self.context_capture.prepare(inputs[0], None)
        forward = self.forwards.forward
        if forward.wants_router_logits:
            routing = routing_from_gate(output, self.rule)
            self.forwards.collector.collect(routing, output[1], None, context.token_mask, self.k, forward)

    def remove(self) -> None:
        self.handle.remove()
        self.context_capture.remove()


def hooks_of(model: nn.Module) -> ModelHooks | None:
    """Return the hooks of a changed model; None for any other."""
    found = model.__dict__.get("_holdfast")
    return found if isinstance(found, ModelHooks) else None


def specs_of(model: nn.Module) -> dict[str, LayerSpec]:
    """Return the specs of the layers that were changed, by name."""
    hooks = hooks_of(model)
    return {} if hooks is None else dict(hooks.specs)


def install_hooks(model: Any, found: list[MoELayerRef], specs: Mapping[str, LayerSpec]) -> None:
    """Put hooks on the layers that `specs` names, in the place of all earlier hooks."""
    current = hooks_of(model)
    if current is not None:
        current.remove()
    # The family computes its balance loss from the top-k of the logits, whatever experts were selected. So it is off where a
    # router of ours selects or has losses.
    if any(spec.losses or spec.router != NATIVE for spec in specs.values()):
        if hasattr(model, "router_aux_loss_coef"):  # used in any forward for which router logits are requested
            model.__dict__.setdefault("_native_balance", model.router_aux_loss_coef)
            model.router_aux_loss_coef = 0.0
    elif "_native_balance" in model.__dict__:
        model.router_aux_loss_coef = model.__dict__.pop("_native_balance")
    _add_moe_entries(text_config(model), specs)
    for moe_layer in found:
        if moe_layer.family is not None and hasattr(moe_layer.experts, "config"):
            use_holdfast_experts(moe_layer.experts, moe_layer.router)
            moe_layer.experts.__dict__.pop("context_capture", None)
    if not specs:
        model.__dict__.pop("_holdfast", None)
        return
    hooks = model.__dict__["_holdfast"] = ModelHooks(model, found, specs)
    if hooks.breaks_causality:
        warnings.warn(
            f"{NOT_CAUSAL}: its perplexity cannot be compared with that of a causal model, and it cannot generate.",
            stacklevel=3,
        )


def native_balance(model: Any) -> float:
    """Return the coefficient of the balance loss that the model adds in training, also while ours replaces it."""
    coefficient = model.__dict__.get("_native_balance", getattr(model, "router_aux_loss_coef", 0.0))
    return float(coefficient) if getattr(model.config, "output_router_logits", False) else 0.0


def _add_moe_entries(config: Any, specs: Mapping[str, LayerSpec]) -> None:
    """Give the config the entries by which trainers recognise an MoE and weight its `aux_loss`, where it lacks them."""
    added_before = config.__dict__.pop("_holdfast_entries", ())
    for name in MOE_ENTRIES:
        if isinstance(added_before, list | tuple) and name in added_before and hasattr(config, name):
            delattr(config, name)
    if not specs:
        return
    first = next(iter(specs.values()))
    entries: dict[str, Any] = {"output_router_logits": False, "num_experts_per_tok": first.k}
    if first.experts is not None:
        entries["num_experts"] = first.experts
    # 0 means that a trainer does not request the loss.
    entries["router_aux_loss_coef"] = 1.0 if any(spec.losses for spec in specs.values()) else 0.0
    added = [name for name in entries if not hasattr(config, name)]
    for name in added:
        setattr(config, name, entries[name])
    config.__dict__["_holdfast_entries"] = added


def mark_modified(model: Any, modified: bool = True) -> None:
    """Mark the name that a changed model came from, so that other libraries do not load the unchanged model by it.

    TRL makes DPO's reference model from `config._name_or_path`, and PEFT writes `name_or_path` as an adapter's base: both
    would silently be the model with its old routers.
    """
    modified = modified or "_opened_modified" in model.__dict__  # the folder has other routers than the family's
    for owner, name in ((model.config, "_name_or_path"), (model, "name_or_path")):
        given = getattr(owner, name, None)
        original = given.partition(MODIFIED_IN_MEMORY)[0] if isinstance(given, str) else ""
        if original:
            setattr(owner, name, original + MODIFIED_IN_MEMORY if modified else original)

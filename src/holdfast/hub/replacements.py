"""The modules that a router runs in: a family's gate with a router inside, and the layer that replaces a dense network.

What happens to the tokens of an MoE layer in a changed model, step by step:

    attention     If the router reads attention, `_attention_with_capture` calls the model's own attention function and
                  hands its queries, keys, values and mask to the layer's `ContextCapture` (context.py).
    gate          `ReroutedGate.forward` gets the router's `Context` from the `ContextCapture`, calls the router, passes the
                  routing to `record_routing` (which attaches the router's losses, forwards.py), and returns logits, weights
                  and expert indices in the order of the family.
    experts       The family's own experts function runs the selected experts. `_holdfast_experts` runs them instead if slots
                  can be unused or experts are sharded over ranks.

In a model that `sparsify` made, a `SparseLayer` with a Holdfast router and Holdfast's `Experts` is in the place of a
feed-forward network.

In transformers, attention and experts modules look up their function by a name in their config (`_attn_implementation`,
`_experts_implementation`). To make a module use Holdfast's function, we give it a `ConfigView`, in which only that name
differs. The model's own config is not changed.

`as_linear` reads the weights of a layer with its adapters, for the attention router.
"""

import sys
import types
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast.hub.adapters import active_module, with_mixin, without_mixin
from holdfast.hub.families import MoEFamily, routing_from_gate
from holdfast.hub.forwards import PerThread, is_called_alone
from holdfast.kernels.grouped import Dispatch
from holdfast.kernels.quantised import FLOATS, as_float, is_quantised
from holdfast.layers import Experts
from holdfast.layers.expert_losses import Teacher
from holdfast.layers.experts import UNKNOWN_FORMAT, Network, activate_used_rows, gradient_factors, run_experts
from holdfast.layers.moe import run_layer, with_expert_losses
from holdfast.routing import Router, Routing
from holdfast.routing.declarations import Order, Values
from holdfast.routing.parts import LinearScore, ScoreDeclarations
from holdfast.routing.records import Context, Projection
from holdfast.routing.replaying import checked_slots
from holdfast.routing.router_checks import require_usable
from holdfast.routing.rules import Rule, Scores, Selection
from holdfast.routing.scores import weights_loaded

NAME = "holdfast"  # the name of Holdfast's functions in transformers' tables of attention and experts functions
ATTENTION, EXPERTS = "_attn_implementation", "_experts_implementation"  # config entries that choose such a function
UNREADABLE_GATE = "a router cannot compute scores from them; exclude gates from quantisation"
USE_SIMILARITY = "use 'similarity', which reads no weights"


class Capture(Protocol):
    """What a gate and a layer ask of what is captured around them (`ContextCapture`, context.py)."""

    def keeps_native_gate(self) -> bool: ...

    @property
    def learning(self) -> bool: ...

    gradient_factors: Tensor | None

    def needs_native_routing(self) -> bool: ...

    def prepare(self, hidden: Tensor, router: Router | None) -> tuple[Tensor, Context]: ...

    def record_routing(
        self, tokens: Tensor, routing: Routing, context: Context, losses: Any, weights: Tensor | None = None
    ) -> Tensor: ...


class ReroutedGate:
    """Mixin for the class of a family's gate: the gate's forward calls a router.

    The gate remains the same object, with its weights under their names, and an instance of its class, so that transformers
    still records its logits. With `holdfast = None` the family's own gate selects the experts, and its routing is recorded.
    """

    holdfast: Router | None
    context_capture: Capture  # set by `ModelHooks`
    rule: Rule
    losses: Any
    training: bool
    usual_order: bool  # returns (logits, weights, indices); otherwise the reverse
    native_scale: float  # what the family's own gate multiplies its weights by
    disabled: Tensor | None = None  # (E,) bool, the experts that the family's own gate does without (`holdfast.disable`)

    def forward(self, hidden_states: Tensor, *extra: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        """`extra` and `named` are for the family's own gate, such as a bias that its block has; the rule reads it there."""
        capture, router = self.context_capture, self.holdfast
        if router is None and (is_called_alone(self) or capture.keeps_native_gate()):
            return self._native_output(Context(), hidden_states, *extra, **named)
        tokens, context = capture.prepare(hidden_states, router)
        if router is None:
            output = self._native_output(context, hidden_states, *extra, **named)
            return self._record_native_routing(tokens, context, output)
        routing = router(tokens, context)
        weights, experts = capture.record_routing(tokens, routing, context, router.losses), routing.experts
        if router.gradient_scaling is not None:
            capture.gradient_factors = gradient_factors(router, routing, context.token_mask)
        if context.token_mask is not None and router.select.ragged:
            # For such routers `_holdfast_experts` runs, which accepts unused slots; some functions of transformers do not.
            usable = context.usable_rows(tokens)
            assert usable is not None
            experts = experts.where(usable.view(-1, 1), routing.gates.shape[-1])
            weights = weights.where(usable.view(-1, 1), 0.0)
        return (routing.logits, weights, experts) if self.usual_order else (experts, weights, routing.logits)

    def _native_output(self, context: Context, *given: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        output: tuple[Tensor, Tensor, Tensor] = super().forward(*given, **named)  # type: ignore[misc]
        if self.disabled is None:
            return output
        require_usable("a native gate", self.training, context)
        return without_experts(output, self.rule, self.native_scale, self.disabled)

    def _record_native_routing(
        self, tokens: Tensor, context: Context, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Record the routing of the family's own gate, if it is needed, and attach this layer's losses to its weights.

        With recorded routes, replace its experts by them, weighted by the family's rule. A token whose recorded set is its
        live set keeps what it has.
        """
        capture = self.context_capture
        has_losses = self.training and self.losses is not None and capture.learning
        if not has_losses and not capture.needs_native_routing():
            return output
        routing = routing_from_gate(output, self.rule)
        logits, weights, experts = output if output[0].is_floating_point() else output[::-1]
        if context.replayed is not None:
            live, k = routing, routing.experts.shape[-1]
            shape, count = torch.Size((1, len(live.gates))), live.gates.shape[-1]
            slots = checked_slots(context.replayed.to(live.gates.device), shape, count, k, "a native gate").squeeze(0)
            slots = slots.where((slots >= 0).all(-1, keepdim=True), live.experts)
            scores, selection = Scores.from_routing(live, informed=False), Selection.from_routing(live, self.native_scale)
            held = self.rule.held_weights(slots.unsqueeze(0), scores, selection).squeeze(0)
            routing = replace(live, experts=slots, weights=held)
            is_live = (routing.chosen == live.chosen).all(-1).view(*weights.shape[:-1], 1)
            weights = weights.where(is_live, routing.weights.view(weights.shape).to(weights.dtype))
            experts = experts.where(is_live, routing.experts.view(experts.shape).to(experts.dtype))
        if has_losses:
            routing = replace(routing, losses=self.losses(routing, context.token_mask))
        weights = capture.record_routing(tokens, routing, context, self.losses, weights)
        return (logits, weights, experts) if output[0].is_floating_point() else (experts, weights, logits)


def without_experts(
    output: tuple[Tensor, Tensor, Tensor], rule: Rule, scale: float, lost: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of a family's gate as if the gates of experts that are `lost (E,)` were 0 before its selection.

    The family's rule selects again. A token for which that changes nothing keeps its weights to the bit.
    """
    live = routing_from_gate(output, rule)
    logits, weights, experts = output if output[0].is_floating_point() else output[::-1]
    scores, k = Scores.from_routing(live, informed=False), experts.shape[-1]
    best, weighed = rule.best(scores.without(lost.to(live.gates.device), rule.gate), k)
    before = rule.best(scores, k)
    same = ((best == before[0]) & (weighed == before[1])).all(-1).view(*weights.shape[:-1], 1)
    weights = weights.where(same, (weighed * scale).view(weights.shape).to(weights.dtype))
    experts = experts.where(same, best.view(experts.shape).to(experts.dtype))
    return (logits, weights, experts) if output[0].is_floating_point() else (experts, weights, logits)


def install_gate(gate: Any, router: Router | None, losses: Any, family: MoEFamily, block: nn.Module) -> None:
    """Put a router into a family's gate; with `router=None` the gate still selects the experts by itself."""
    if not isinstance(gate, ReroutedGate):
        _set_class(gate, with_mixin(type(gate), ReroutedGate))
    gate.holdfast, gate.losses, gate.usual_order = router, losses, family.usual_order
    gate.rule, gate.native_scale = family.rule_of(block), family.scale_of(block)


def uninstall_gate(gate: nn.Module) -> None:
    """Give a gate its own class back and remove everything that `install_gate` put on it."""
    if isinstance(gate, ReroutedGate):
        _set_class(gate, without_mixin(type(gate)))
        for name in ("holdfast", "rule", "losses", "context_capture", "usual_order", "native_scale"):
            if hasattr(gate, name):
                delattr(gate, name)


def _set_class(gate: nn.Module, kind: type) -> None:
    gate.__class__ = kind
    if "_old_forward" in gate.__dict__:  # accelerate's hook replaces `forward` on the object and calls this one
        gate._old_forward = types.MethodType(kind.forward, gate)  # type: ignore[attr-defined, assignment]


def gate_weight(gate: Any, path: str) -> Tensor:
    """Return the weight or bias at `path` in a gate as numbers. Raise ValueError if they cannot be read."""
    owner, _, name = path.rpartition(".")
    module = gate.get_submodule(owner) if owner else gate
    weight = module._parameters.get(name)
    if type(weight) is nn.Parameter and weight.dtype in FLOATS and not hasattr(type(module), f"q{name}"):
        return weight  # the usual case, in every forward; a class of quanto has a `qweight`
    if hasattr(module, "base_layer"):
        raise ValueError(f"PEFT has put an adapter on {owner} of a gate, which a router cannot read; leave gates out of it.")
    # `get_parameter` would fail while a PEFT adapter adds to the weight: then the weight is not a parameter.
    return as_float(module, name, UNREADABLE_GATE)


class GateScore(LinearScore):
    """logits = x W^T (+ b), where W and b are the weights of a family's gate.

    They are looked up at every use, not copied: training updates the gate's own weights, `restore` has nothing to put back,
    and offloading may replace the tensors between forwards.
    """

    def __init__(self, gate: nn.Module, *, weight: str = "weight", bias: str | None = None) -> None:
        super().__init__()
        # Not registered as a submodule: the gate contains the router, so the router cannot contain the gate.
        self.__dict__["gate"] = gate
        self.weight_name, self.bias_name = weight, bias
        self.experts, self.dim = self.matrix.shape

    @property
    def matrix(self) -> Tensor:
        return gate_weight(self.__dict__["gate"], self.weight_name)

    @property
    def bias(self) -> Tensor | None:
        return None if self.bias_name is None else gate_weight(self.__dict__["gate"], self.bias_name).float()

    def finish(self, projected: Tensor) -> Tensor:
        bias = self.bias
        return projected if bias is None else projected + bias

    @property
    def declares(self) -> ScoreDeclarations:
        return replace(super().declares, order=lambda tokens, context: Order(self.matrix, self.bias, values=Values()))


class SparseLayer(nn.Module):
    """A router, experts and perhaps a shared expert in the place of a dense feed-forward network: `(B,N,d)` to `(B,N,out)`.

    The router's selector declares how experts run: as in `holdfast.MoE`, `holdfast.SoftMoE` or `holdfast.SMEAR`.
    """

    context_capture: Capture  # set by `ModelHooks`

    def __init__(
        self, router: Router, experts: Experts, dropout: nn.Module | None = None, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.router, self.experts, self.dropout, self.shared = router, experts, dropout, shared
        self.teacher: Teacher | None = None  # of the loss distillation (`set_teacher`)
        # The router that `reroute` replaced, with its spec, for `restore`. It must not be a submodule.
        self.__dict__["former"] = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        capture, called, shape = self.context_capture, self.router, hidden_states.shape
        router = called if isinstance(called, Router) else active_module(called)
        hidden_states, context = capture.prepare(hidden_states, router)
        routing, tokens = called(hidden_states, context), context.zero_unusable(hidden_states)
        routing = with_expert_losses(routing, router, self.experts, tokens, context.token_mask, self.teacher)
        weights = capture.record_routing(hidden_states, routing, context, router.losses)
        out = run_layer(router, self.experts, self.shared, tokens, routing, weights, context)
        out = out if len(shape) == 3 else out.reshape(*shape[:-1], out.shape[-1])
        return out if self.dropout is None else self.dropout(out)


class ConfigView:
    """A view of a config in which one entry has the value "holdfast"; all else is read from and written to the config."""

    def __init__(self, config: Any, attribute: str) -> None:
        # `runs_native.current`: whether this thread runs the native function, which reads its own name from the config.
        self.__setstate__({"config": config, "attribute": attribute, "runs_native": PerThread(bool)})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Here, too, because a pickle may be loaded by a process that has changed no model.
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(NAME, _attention_with_capture)
        ALL_EXPERTS_FUNCTIONS.register(NAME, _holdfast_experts)
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` reads these before `config` is set
            raise AttributeError(name)
        view = self.__dict__
        return NAME if name == view["attribute"] and not view["runs_native"].current else getattr(view["config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["config"], name, value)


def override_config(module: Any, attribute: str) -> None:
    """Make `module` use Holdfast's function: give it a view of its config in which `attribute` is "holdfast"."""
    if not isinstance(module.config, ConfigView):
        module.config = ConfigView(module.config, attribute)


def restore_config(module: Any) -> None:
    """Give `module` its own config back."""
    if isinstance(module.config, ConfigView):
        module.config = module.config.__dict__["config"]


def _attention_with_capture(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> Any:
    """Run the model's own attention function and pass its arguments to the MoE layer's `ContextCapture`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    view = module.config.__dict__
    eager = sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
    native = ALL_ATTENTION_FUNCTIONS.get_interface(getattr(view["config"], ATTENTION), eager)
    view["runs_native"].current = True
    try:
        result = native(module, query, key, value, attention_mask, **options)
    finally:
        view["runs_native"].current = False
    module.context_capture.capture_attention(query, key, value, attention_mask, options)
    return result


def needs_holdfast_experts(router: Router | None) -> bool:
    """Whether a family's experts must run `_holdfast_experts`: slots can be unused, or gradients of experts are scaled."""
    return router is not None and (router.select.ragged or router.gradient_scaling is not None)


def use_holdfast_experts(experts: Any, router: Router | None = None) -> None:
    """Make a family's experts run `_holdfast_experts` if the router needs it or experts are sharded, else their own."""
    needs_holdfast = needs_holdfast_experts(router) or getattr(experts, "shards", None) is not None
    override_config(experts, EXPERTS) if needs_holdfast else restore_config(experts)


def has_known_layout(experts: Any) -> bool:
    """Whether `_holdfast_experts` can run these experts."""
    return all(hasattr(experts, name) for name in ("has_gate", "has_bias", "is_transposed", "config"))


def has_foreign_forward(module: Any) -> bool:
    """Whether another library has set a `forward` on this object, so that the `forward` of its class does not run.

    Transformers does this to distribute experts (`distributed_config`). The `forward` that accelerate's hooks set does not
    count: it calls the forward of the class, and is supported.
    """
    return "forward" in vars(module) and "_old_forward" not in vars(module)


def _holdfast_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run a family's experts if slots can be unused, or if experts are sharded over ranks.

    Some of transformers' own functions do not accept the index of an unused slot.
    """
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = (as_float(module, name, UNKNOWN_FORMAT) for name in (up_name, "down_proj"))
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    up_bias, down_bias = (getattr(module, f"{up_name}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    activation = module._apply_gate if module.has_gate else module.act_fn

    def activate(hidden: Tensor, plan: Dispatch) -> Tensor:
        return activate_used_rows(hidden, plan, activation)

    network = Network(up, down, up_bias, down_bias, activate, "silu" if _is_swiglu(module) else None)
    most_rows = factors = None
    if hasattr(module, "context_capture"):
        most_rows, factors = module.context_capture.most_rows(top_k_index.shape[0]), module.context_capture.gradient_factors
    shards = getattr(module, "shards", None)
    return run_experts(hidden_states, top_k_index, top_k_weights, network, shards, most_rows, factors)


def _is_swiglu(module: Any) -> bool:
    """Whether the activation is exactly silu(gate) * up, for which there is a fused kernel."""
    from transformers.activations import SiLUActivation

    return bool(module.has_gate) and has_default_gate(module) and type(module.act_fn) is SiLUActivation


def has_default_gate(module: Any) -> bool:
    """Whether gated experts compute act_fn(gate) * up, and not a function of their family's."""
    # `override_config` has imported it. Old versions of torch.compile cannot trace an import of it here.
    moe = sys.modules["transformers.integrations.moe"]
    default = getattr(moe, "_default_apply_gate", None)  # families with another activation replace this method
    return default is not None and getattr(type(module), "_apply_gate", None) is default


def as_linear(module: Any) -> nn.Linear | Projection:
    """Return the output projection of an attention as weight and bias of a linear map, in the layout of `nn.Linear`.

    The weight is the one that the layer's forward uses: loaded through accelerate's hooks if it is offloaded, dequantised if
    it is quantised, and with the active LoRA or DoRA adapters of PEFT. Raise ValueError if it cannot be read.
    """
    if type(module) is nn.Linear and not (module.weight.is_meta or is_quantised(module.weight)):
        return module
    from transformers.pytorch_utils import Conv1D

    with weights_loaded(module):
        base: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        weight = as_float(base, "weight", f"the attention router cannot read them; {USE_SIMILARITY}")
        if weight.is_meta:
            raise ValueError(f"the output projection, which the attention router reads, is not in memory; {USE_SIMILARITY}.")
        weight = weight.t() if isinstance(base, Conv1D) else weight  # GPT-2's layers store it as (in, out)
        if base is module:
            return Projection(weight, base.bias)
        return _with_adapters(module, weight, base.bias)


def _with_adapters(module: Any, weight: Tensor, bias: Tensor | None) -> Projection:
    """Return the base layer's `weight (d,in)` and bias with the active adapters applied."""
    if module.disable_adapters or module.merged:
        return Projection(weight, bias)
    if not hasattr(module, "lora_A"):
        packages = type(module).__module__.split(".")  # PEFT has a package in `peft.tuners` for each of its methods
        is_peft = packages[:2] == ["peft", "tuners"] and len(packages) > 2
        raise _unreadable_adapter(packages[2] if is_peft else type(module).__name__)
    adapted = weight
    for name in module.active_adapters:
        if name in module.lora_A:
            adapted = adapted + _adapter_delta(module, name, weight)
            added = getattr(module.lora_B[name], "bias", None)  # LoraConfig(lora_bias=True)
            if added is not None:
                added = added * module.scaling[name]
                bias = added if bias is None else bias + added
    return Projection(adapted, bias)


def _adapter_delta(module: Any, name: str, weight: Tensor) -> Tensor:
    """Return what one adapter adds to `weight (d,in)`.

    LoRA adds its delta D. DoRA (section 4.3 of its paper) replaces W by m (W + D) / |W + D|, where |.| is the length of each
    row and m a learned length per row; no gradient flows through |W + D|.
    """
    delta: Tensor = module.get_delta_weight(name)
    if getattr(module, "fan_in_fan_out", False):
        delta = delta.t()
    variant = getattr(module, "lora_variant", {}).get(name)
    if variant is None:
        return delta
    if type(variant).__name__ != "DoraLinearVariant":
        raise _unreadable_adapter(type(variant).__name__.removesuffix("LinearVariant"))
    length = torch.linalg.vector_norm(weight + delta, dim=1).detach()
    factor = (module.lora_magnitude_vector[name].weight / length).unsqueeze(1)
    return (factor - 1) * weight + factor * delta


def _unreadable_adapter(kind: str) -> ValueError:
    return ValueError(
        f"the attention router cannot read an adapter of kind {kind} on the output projection; merge it (merge_adapter), "
        f"leave that layer out of target_modules, or {USE_SIMILARITY}."
    )

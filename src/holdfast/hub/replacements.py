"""The modules that a router runs in: a family's gate with a router inside, and the layer that replaces a dense network.

What happens to the tokens of an MoE layer in a changed model, step by step:

    attention     If the router reads attention, `_attention_with_capture` calls the model's own attention function and
                  hands its queries, keys, values and mask to the layer's `ContextCapture` (context.py).
    gate          `ReroutedGate.forward` gets the router's `Context` from the `ContextCapture`, calls the router, passes the
                  routing to `record_routing` (which attaches the router's losses, losses.py), and returns logits, weights
                  and expert indices in the order of the family.
    experts       The family's own experts function runs the selected experts. `_holdfast_experts` runs them instead if slots
                  can be unused or experts are sharded over ranks.

In a model that `sparsify` made, a `SparseLayer` with a Holdfast router and Holdfast's `Experts` is in the place of a
feed-forward network.

In transformers, attention and experts modules look up their function by a name in their config (`_attn_implementation`,
`_experts_implementation`). To make a module use Holdfast's function, we give it a `ConfigView`, in which only that name
differs. The model's own config is not changed.
"""

import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.hub.adapters import active_module, with_mixin, without_mixin
from holdfast.hub.families import moe_family, routing_from_gate
from holdfast.kernels.backward import is_recomputing
from holdfast.kernels.quantised import as_float
from holdfast.layers import LAYERS, Experts
from holdfast.layers.experts import UNKNOWN_FORMAT, activate_used_rows, run_experts
from holdfast.routing import Router, Routing
from holdfast.routing.declarations import Order, Values
from holdfast.routing.parts import LinearScore
from holdfast.routing.records import Context
from holdfast.routing.replaying import checked_slots
from holdfast.routing.rules import Rule, Scores, Selection

NAME = "holdfast"  # the name of Holdfast's functions in transformers' tables of attention and experts functions
ATTENTION, EXPERTS = "_attn_implementation", "_experts_implementation"  # config entries that choose such a function
ROUTED_EXPERTS = "routed_experts"  # the argument of a model with recorded routes, named as in vLLM and SGLang
UNREADABLE_GATE = "a router cannot compute scores from them; exclude gates from quantisation"


class PerThread(threading.local):
    """Attributes with separate values in every thread. A copy, and an object loaded from a pickle, has initial values."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class ReroutedGate:
    """Mixin for the class of a family's gate: the gate's forward calls a router.

    The gate remains the same object, with its weights under their names, and an instance of its class, so that transformers
    still records its logits. With `holdfast = None` the family's own gate selects the experts, and its routing is recorded.
    """

    holdfast: Router | None
    context_capture: Any  # a `ContextCapture`, set by `ModelHooks`
    rule: Rule
    losses: Any
    training: bool
    usual_order: bool  # returns (logits, weights, indices); otherwise the reverse
    native_scale: float  # what the family's own gate multiplies its weights by, set by `RouteReplay`

    def forward(self, hidden_states: Tensor, *extra: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
        """`extra` and `named` are for the family's own gate, such as a bias that its block has; the rule reads it there."""
        capture = self.context_capture
        if self.holdfast is None and capture.is_idle and not capture.needs_record:
            return super().forward(hidden_states, *extra, **named)  # type: ignore[misc, no-any-return]
        tokens = capture.as_sequences(hidden_states)
        context = capture.build_context(tokens)
        if self.holdfast is None:
            output: tuple[Tensor, Tensor, Tensor] = super().forward(hidden_states, *extra, **named)  # type: ignore[misc]
            return self._record_native_routing(tokens, context, output)
        return self._route_with_holdfast(self.holdfast, tokens, context)

    def _route_with_holdfast(self, router: Router, tokens: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return the router's routing in the form that the family's gate returns."""
        self.context_capture.attach_router(router)
        routing = router(tokens, context)
        weights = self.context_capture.record_routing(tokens, routing, context, router.losses)
        experts = routing.experts
        usable = context.usable_rows(tokens)
        if usable is not None and router.select.ragged:
            # For such routers `_holdfast_experts` runs, which accepts unused slots; some functions of transformers do not.
            experts = experts.where(usable.view(-1, 1), routing.gates.shape[-1])
            weights = weights.where(usable.view(-1, 1), 0.0)
        output = (routing.logits, weights, experts)
        return output if self.usual_order else output[::-1]

    def _record_native_routing(
        self, tokens: Tensor, context: Context, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Record the routing of the family's own gate, if it is needed, and attach this layer's losses to its weights.

        With recorded routes, replace its experts by them. A token whose recorded set is its live set keeps what it has.
        """
        capture = self.context_capture
        has_losses = self.training and self.losses is not None and capture.collector.learning_enabled
        wants_logits = capture.collector.wants_router_logits
        if not (capture.is_read_by_next or has_losses or wants_logits or capture.needs_record):
            return output
        routing = routing_from_gate(output, self.rule)
        logits, weights, experts = output if output[0].is_floating_point() else output[::-1]
        if context.replayed is not None:
            routing, is_live = self._replay(routing, context.replayed, weights.shape[:-1])
            weights = weights.where(is_live, routing.weights.view(weights.shape).to(weights.dtype))
            experts = experts.where(is_live, routing.experts.view(experts.shape).to(experts.dtype))
        if has_losses:
            routing = replace(routing, losses=self.losses(routing, context.token_mask))
        weights = capture.record_routing(tokens, routing, context, self.losses, weights)
        return (logits, weights, experts) if output[0].is_floating_point() else (experts, weights, logits)

    def _replay(self, live: Routing, replayed: Tensor, tokens: torch.Size) -> tuple[Routing, Tensor]:
        """Return the routing with the recorded experts, weighted by the family's rule, and (*tokens,1): tokens to keep."""
        shape, (experts, k) = torch.Size((1, len(live.gates))), (live.gates.shape[-1], live.experts.shape[-1])
        slots = checked_slots(replayed.to(live.gates.device), shape, experts, k, "a native gate").squeeze(0)
        slots = slots.where((slots >= 0).all(-1, keepdim=True), live.experts)
        scores, selection = Scores.from_routing(live, informed=False), Selection.from_routing(live, self.native_scale)
        weights = self.rule.held_weights(slots.unsqueeze(0), scores, selection).squeeze(0)
        changed = replace(live, experts=slots, weights=weights)
        return changed, (changed.chosen == live.chosen).all(-1).view(*tokens, 1)


def install_gate(gate: nn.Module, router: Router | None, rule: Rule, losses: Any, usual_order: bool) -> None:
    """Put a router into a family's gate; with `router=None` the gate still selects the experts by itself."""
    if not isinstance(gate, ReroutedGate):
        _set_class(gate, with_mixin(type(gate), ReroutedGate))
    gate.holdfast, gate.rule, gate.losses, gate.usual_order = router, rule, losses, usual_order  # type: ignore[assignment]


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
    module = gate.get_submodule(owner)
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
        return projected if self.bias is None else projected + self.bias

    def order(self, tokens: Tensor, context: Context) -> Order:
        return Order(self.matrix, self.bias)

    def values(self, tokens: Tensor, context: Context) -> Values:
        return Values()


class SparseLayer(nn.Module):
    """A router, experts and perhaps a shared expert in the place of a dense feed-forward network: `(B,N,d)` to `(B,N,d)`.

    The router's selector declares how experts run: as in `holdfast.MoE`, `holdfast.SoftMoE` or `holdfast.SMEAR`.
    """

    context_capture: Any  # a `ContextCapture`, set by `ModelHooks`

    def __init__(
        self, router: Router, experts: Experts, dropout: nn.Module | None = None, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.router, self.experts, self.dropout, self.shared = router, experts, dropout, shared
        # The router that `reroute` replaced, with its spec, for `restore`. It must not be a submodule.
        self.__dict__["former"] = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        capture = self.context_capture
        router = active_module(self.router)
        capture.attach_router(router)
        shape = hidden_states.shape
        hidden_states = hidden_states if hidden_states.dim() == 3 else capture.as_sequences(hidden_states)
        context = capture.build_context(hidden_states)
        routing = self.router(hidden_states, context)
        weights = capture.record_routing(hidden_states, routing, context, router.losses)
        tokens = context.zero_unusable(hidden_states)
        most_rows = None if context.replayed is not None else router.select.most_rows(routing.experts.shape[0])
        run = LAYERS[router.select.layer_kind].run
        out = run(self.experts, tokens, routing, weights, context.token_mask, most_rows)
        out = out if self.shared is None else out + self.shared(tokens)
        out = out if len(shape) == 3 else out.reshape(shape)
        return out if self.dropout is None else self.dropout(out)


class _ReplayedForward:
    def __init__(self) -> None:
        self.routes: Tensor | None = None  # (B,N,L,K), the recorded routes
        self.in_model = self.in_base = False  # which forwards run: the model's, its base's by itself


class _ReplayedForwards(PerThread):
    def __init__(self) -> None:
        self.current = _ReplayedForward()  # a compiler does not see changes of this thread's own attributes


class RouteReplay:
    """Hooks around a model's forward that take `routed_experts`, the recorded routes (B,N,L,K), off its arguments.

    A recomputation by activation checkpointing reads those of the last forward that may have a backward.
    """

    def __init__(self, model: Any) -> None:
        self._forwards = _ReplayedForwards()
        self._latest: Tensor | None = None
        self._next: list[Any] | None = None  # the routes that `once` got, until a forward takes them
        self._captures = 0  # how many layers asked for their place
        layers: list[Any] = [module for module in model.modules() if isinstance(module, ReroutedGate | SparseLayer)]
        gates = [layer for layer in layers if isinstance(layer, ReroutedGate)]
        self.layers, scale = len(layers), moe_family(model).scale if gates else None
        for gate in gates:
            gate.native_scale = 1.0 if scale is None else float(getattr(gate, scale))
        base, own = getattr(model, "base_model", model), {"with_kwargs": True, "prepend": True}
        self._handles = [model.register_forward_pre_hook(self._begin_forward, **own)]
        self._handles.append(model.register_forward_hook(self._end_forward, always_call=True))
        if base is not model:  # it may be called directly, or by the model
            self._handles.append(base.register_forward_pre_hook(self._begin_base, **own))
            self._handles.append(base.register_forward_hook(self._end_base, always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def next_layer(self) -> int:
        """Return the place in recorded routes of the next layer: captures are made in the order of the layers."""
        self._captures += 1
        return self._captures - 1

    @contextmanager
    def once(self, routes: Any) -> Iterator[None]:
        """Inside the `with`, one forward gets these routes, and a second one raises ValueError."""
        self._next = [routes]
        try:
            yield
        finally:
            self._next = None

    @property
    def _current(self) -> _ReplayedForward:
        return self._forwards.current

    @property
    def routes(self) -> Tensor | None:
        """The routes (B,N,L,K) of the current forward, or of the one that a backward recomputes; None if all is live."""
        if self._current.in_model or self._current.in_base:
            return self._current.routes
        return self._latest if torch.compiler.is_compiling() or is_recomputing() else None

    def _begin_forward(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self._current.in_model = True
        return self._take_routes(model, inputs, options)

    def _begin_base(self, base: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._current.in_model:
            return None
        self._current.in_base = True
        return self._take_routes(base, inputs, options)

    def _take_routes(self, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given, options = options.get(ROUTED_EXPERTS), {name: options[name] for name in options if name != ROUTED_EXPERTS}
        if self._next is not None:
            if given is not None or not self._next:
                raise ValueError(f"holdfast.replay gives routes to one forward; to this one, pass {ROUTED_EXPERTS}= alone.")
            given = self._next.pop()
        self._current.routes = None if given is None else self._checked(model, given)
        return inputs, options

    def _checked(self, model: nn.Module, given: Any) -> Tensor:
        """Return what the caller gave as a tensor (B,N,L,K). Raise ValueError if it is none, or has other layers."""
        if hasattr(given, "require_model"):  # a `Routes`, which knows what model it is of
            given.require_model(model)
            given = given.experts
        if not isinstance(given, Tensor) or given.dim() != 4:
            found = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"{ROUTED_EXPERTS} is {found}; expected a tensor (B, N, L, K) or a holdfast.Routes.")
        if given.shape[2] != self.layers:
            raise ValueError(
                f"{ROUTED_EXPERTS} has {given.shape[2]} layers, but {self.layers} of this model can replay; layers that "
                'were not rerouted can after holdfast.reroute(model, "native"), which changes no number.'
            )
        return given

    def _end_forward(self, model: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        # A forward in training without gradients may run between another one and its backward; so may one that has raised.
        if not model.training:
            self._latest = None
        elif outputs is not None and torch.is_grad_enabled():
            self._latest = self._current.routes
        self._current.in_model, self._current.routes = False, None

    def _end_base(self, base: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        if self._current.in_base:
            self._current.in_base = False
            self._end_forward(base, inputs, outputs)


class _ThreadOverride(PerThread):
    """Whether this thread sees Holdfast's implementation name."""

    is_active = True


class ConfigView:
    """A view of a config in which one entry has the value "holdfast"; all else is read from and written to the config."""

    def __init__(self, config: Any, attribute: str) -> None:
        self.__dict__.update(config=config, attribute=attribute, override=_ThreadOverride())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` reads these before `config` is set
            raise AttributeError(name)
        view = self.__dict__
        return NAME if name == view["attribute"] and view["override"].is_active else getattr(view["config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["config"], name, value)

    @contextmanager
    def unmodified(self) -> Iterator[Any]:
        """Inside the `with`, return the config's own value for the entry: native functions read their name from it."""
        override = self.__dict__["override"]
        override.is_active = False
        try:
            yield self.__dict__["config"]
        finally:
            override.is_active = True


def override_config(module: Any, attribute: str) -> None:
    """Make `module` use Holdfast's function: give it a view of its config in which `attribute` is "holdfast"."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention_with_capture)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _holdfast_experts)
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

    with module.config.unmodified() as config:
        eager = sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
        native = ALL_ATTENTION_FUNCTIONS.get_interface(getattr(config, ATTENTION), eager)
        result = native(module, query, key, value, attention_mask, **options)
    module.context_capture.capture_attention(query, key, value, attention_mask, options)
    return result


def use_holdfast_experts(experts: Any, ragged: bool) -> None:
    """Make a family's experts run `_holdfast_experts` if slots can be unused or experts are sharded, else their own."""
    needs_holdfast = ragged or getattr(experts, "shards", None) is not None
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
    activation = module._apply_gate if module.has_gate else module.act_fn
    return run_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        up,
        down,
        getattr(module, f"{up_name}_bias") if module.has_bias else None,
        module.down_proj_bias if module.has_bias else None,
        activate=lambda hidden, plan: activate_used_rows(hidden, plan, activation),
        glu="silu" if _is_swiglu(module) else None,
        shards=getattr(module, "shards", None),
        most_rows=module.context_capture.most_rows(top_k_index.shape[0]) if hasattr(module, "context_capture") else None,
    )


def _is_swiglu(module: Any) -> bool:
    """Whether the activation is exactly silu(gate) * up, for which there is a fused kernel."""
    from transformers.activations import SiLUActivation

    # `override_config` has imported it. Old versions of torch.compile cannot trace an import of it here.
    moe = sys.modules["transformers.integrations.moe"]
    default = getattr(moe, "_default_apply_gate", None)  # families with another activation replace this method
    return (
        bool(module.has_gate)
        and default is not None
        and getattr(type(module), "_apply_gate", None) is default
        and type(module.act_fn) is SiLUActivation
    )

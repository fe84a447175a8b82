"""What a forward under way notes down, for each thread its own: a model may serve several at once.

Our functions in transformers' own tables of attention and experts functions, and how single modules are pointed at them.

A module finds its function by a name in its config. A module of ours gets a view of the config in which that one name is
different: the model's config stays as it is, with its masks, its file and what the user sets in it later.

A family's gate with a router of ours inside.

The gate stays the object it was, with its weights under their names, and an instance of its class, so that transformers
still records its logits; only its class is now a subclass whose forward asks the router.

Scores that are a checkpoint's own: read from the family's gate, which keeps its weights and their names.

The layer that takes a feed-forward network's place.

The output projection of an attention, in the shape of an `nn.Linear`, whatever module it is.

The weight is that of the layer's forward: read through accelerate's hooks where it is offloaded, dequantised where it is
quantised, and with the adapters that are in force.
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

from holdfast.hub.adapters import running, with_mixin, without_mixin
from holdfast.hub.families import record
from holdfast.kernels.quantised import as_float, is_quantised
from holdfast.layers import Experts
from holdfast.layers.experts import UNKNOWN_FORMAT, activate_used, run_experts
from holdfast.routing import Router
from holdfast.routing.declarations import Order, Values
from holdfast.routing.parts import LinearScore, Rule
from holdfast.routing.records import Context, Projection
from holdfast.routing.scores import loaded


class PerThread(threading.local):
    """Attributes that every thread has its own values of, from those of the class on. Copies and pickles start anew."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


NAME = "holdfast"
ATTENTION, EXPERTS = "_attn_implementation", "_experts_implementation"


class _Answer(PerThread):
    """Whether a view gives our name."""

    is_ours = True


class ConfigView:
    """A config in which one name is different."""

    def __init__(self, config: Any, attribute: str) -> None:
        self.__dict__.update(config=config, attribute=attribute, answer=_Answer())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying asks for these before there is a config
            raise AttributeError(name)
        own = self.__dict__
        return NAME if name == own["attribute"] and own["answer"].is_ours else getattr(own["config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["config"], name, value)

    @contextmanager
    def as_it_is(self) -> Iterator[Any]:
        """Inside the `with`, the config without the difference: a native function looks up its own name there."""
        answer = self.__dict__["answer"]
        answer.is_ours = False
        try:
            yield self.__dict__["config"]
        finally:
            answer.is_ours = True


def point(module: Any, attribute: str) -> None:
    """Make `module` find our function under `attribute` of its config."""
    _register()
    if not isinstance(module.config, ConfigView):
        module.config = ConfigView(module.config, attribute)


def runs_ours(experts: Any, ragged: bool) -> None:
    """Make a family's experts run our function, or its own: ours where slots stay unused or other processes have experts."""
    ours = ragged or getattr(experts, "owners", None) is not None
    point(experts, EXPERTS) if ours else unpoint(experts)


def is_known(experts: Any) -> bool:
    """Are these experts of the kind that our function runs?"""
    return all(hasattr(experts, name) for name in ("has_gate", "has_bias", "is_transposed", "config"))


def is_replaced(module: Any) -> bool:
    """Has another library put a forward of its own on this module, where a class or a config cannot reach it?

    As transformers does to spread experts (`distributed_config`). Accelerate's hooks are known and worked with.
    """
    return "forward" in vars(module) and "_old_forward" not in vars(module)


def unpoint(module: Any) -> None:
    if isinstance(module.config, ConfigView):
        module.config = module.config.__dict__["config"]


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _overheard_attention)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def _overheard_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    """The model's own attention function; the MoE layer behind it hears what went in."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with module.config.as_it_is() as config:
        eager = sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
        native = ALL_ATTENTION_FUNCTIONS.get_interface(getattr(config, ATTENTION), eager)
        result = native(module, query, key, value, attention_mask, **options)
    module.listener.hear(query, key, value, attention_mask, options)
    return result


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A family's experts for routers that leave slots unused, which not all of transformers' functions survive, and for
    experts that are spread over processes."""
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
        activate=lambda hidden, plan: activate_used(hidden, plan, activation),
        glu="silu" if _is_swiglu(module) else None,
        owners=getattr(module, "owners", None),
    )


def _is_swiglu(module: Any) -> bool:
    """silu(gate) * up and nothing else: then our kernels know it."""
    from transformers.activations import SiLUActivation

    moe = sys.modules["transformers.integrations.moe"]  # `_register` has seen to it; older compilers trace no lazy import
    usual = getattr(moe, "_default_apply_gate", None)  # families with a gate of their own have their own function there
    return (
        bool(module.has_gate)
        and usual is not None
        and getattr(type(module), "_apply_gate", None) is usual
        and type(module.act_fn) is SiLUActivation
    )


class ReroutedGate:
    """Mixed into the class of a family's gate. Without a router it is the family's own rule, observed."""

    holdfast: Router | None
    surroundings: Any  # set by `wire`
    rule: Rule
    losses: Any
    training: bool
    usual_order: bool  # (logits, weights, indices)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        surroundings = self.surroundings
        tokens = surroundings.tokens(hidden_states)
        context = surroundings.context(tokens)
        if self.holdfast is None:
            output: tuple[Tensor, Tensor, Tensor] = super().forward(hidden_states)  # type: ignore[misc]
            has_losses = self.training and self.losses is not None and surroundings.ledger.learning
            if surroundings.is_read or has_losses or surroundings.ledger.asked:
                routing = record(output, self.rule)
                if has_losses:
                    routing = replace(routing, losses=self.losses(routing, context.token_mask))
                weights = surroundings.leave(tokens, routing, context, self.losses, output[1])
                output = (output[0], weights, output[2])
            return output
        surroundings.follow(self.holdfast)
        routing = self.holdfast(tokens, context)
        weights = surroundings.leave(tokens, routing, context, self.holdfast.losses)
        experts = routing.experts
        usable = context.usable(tokens)
        if usable is not None and self.holdfast.select.ragged:
            # Then our function runs the experts, and takes the sentinel; not all of transformers' own do.
            experts = experts.where(usable.view(-1, 1), routing.gates.shape[-1])
            weights = weights.where(usable.view(-1, 1), 0.0)
        output = (routing.logits, weights, experts)
        return output if self.usual_order else output[::-1]


def install(gate: nn.Module, router: Router | None, rule: Rule, losses: Any, usual_order: bool) -> None:
    """Put a router into a family's gate; None is the family's own rule."""
    if not isinstance(gate, ReroutedGate):
        _become(gate, with_mixin(type(gate), ReroutedGate))
    gate.holdfast, gate.rule, gate.losses, gate.usual_order = router, rule, losses, usual_order  # type: ignore[assignment]


def uninstall(gate: nn.Module) -> None:
    """The gate as it was."""
    if isinstance(gate, ReroutedGate):
        _become(gate, without_mixin(type(gate)))
        for name in ("holdfast", "rule", "losses", "surroundings", "usual_order"):
            if hasattr(gate, name):
                delattr(gate, name)


def _become(gate: nn.Module, kind: type) -> None:
    gate.__class__ = kind
    if "_old_forward" in gate.__dict__:  # accelerate has put a function of its own before the class's: it calls this one
        gate._old_forward = types.MethodType(kind.forward, gate)  # type: ignore[attr-defined, assignment]


UNREADABLE_GATE = "a router cannot score by them; leave gates out when quantising"


class GateScore(LinearScore):
    """logits = x W^T (+ b), with W and b those of a gate.

    Looked up when used, not copied: training updates the gate's own weights, `restore` has nothing to put back, and
    offloading may replace the tensors between forwards.
    """

    def __init__(self, gate: nn.Module, *, weight: str = "weight", bias: str | None = None) -> None:
        super().__init__()
        # Past nn.Module's bookkeeping: the gate holds the router, so it cannot be a part of it too.
        self.__dict__["gate"] = gate
        self.weight_name, self.bias_name = weight, bias
        self.experts, self.dim = self.matrix.shape

    @property
    def matrix(self) -> Tensor:
        # Not `get_parameter`: while an adapter (PEFT's) adds to it, it is none.
        return as_float(self.__dict__["gate"], self.weight_name, UNREADABLE_GATE)

    @property
    def bias(self) -> Tensor | None:
        return None if self.bias_name is None else getattr(self.__dict__["gate"], self.bias_name).float()

    def finish(self, projected: Tensor) -> Tensor:
        return projected if self.bias is None else projected + self.bias

    def order(self, tokens: Tensor, context: Context) -> Order:
        return Order(self.matrix, self.bias)

    def values(self, tokens: Tensor, context: Context) -> Values:
        return Values()


class SparseLayer(nn.Module):
    """Experts and a router where a model had one feed-forward network: `(B,N,d)` to `(B,N,d)`."""

    surroundings: Any  # set by `wire`

    def __init__(self, router: Router, experts: Experts, dropout: nn.Module | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.dropout = router, experts, dropout
        # What `reroute` took out, the router and its spec, for `restore`: not a part of the model any more.
        self.__dict__["former"] = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        surroundings = self.surroundings
        router = running(self.router)
        surroundings.follow(router)
        context = surroundings.context(hidden_states)
        routing = self.router(hidden_states, context)
        weights = surroundings.leave(hidden_states, routing, context, router.losses)
        flat = context.clean(hidden_states).reshape(-1, hidden_states.shape[-1])
        out = self.experts(flat, routing.experts, weights).view(hidden_states.shape)
        return out if self.dropout is None else self.dropout(out)


INSTEAD = "use 'similarity', which reads no weights"


def as_linear(module: Any) -> nn.Linear | Projection:
    """Return the projection as weight and bias of a linear map; raise where its kind is not known.

    GPT-2's keep their weights transposed. PEFT's LoRA and DoRA change the weight of the layer that they wrap.
    """
    if type(module) is nn.Linear and not (module.weight.is_meta or is_quantised(module.weight)):
        return module
    with loaded(module):
        base: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        weight = as_float(base, "weight", f"the attention router cannot read them; {INSTEAD}")
        if weight.is_meta:
            raise ValueError(
                f"the output projection's weights, which the attention router reads, are not in memory; {INSTEAD}."
            )

        weight = weight.t() if _is_transposed(base) else weight
        if base is module:
            return Projection(weight, base.bias)
        return _with_adapters(module, weight, base.bias)


def _is_transposed(base: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(base, Conv1D)


def _with_adapters(module: Any, weight: Tensor, bias: Tensor | None) -> Projection:
    """Return what the adapters in force make of the base layer's `weight (d,in)` and bias."""
    if module.disable_adapters or module.merged:
        return Projection(weight, bias)
    if not hasattr(module, "lora_A"):
        raise _unreadable(_kind(module))
    changed = weight
    for name in module.active_adapters:
        if name in module.lora_A:
            changed = changed + _change(module, name, weight)
            added = getattr(module.lora_B[name], "bias", None)  # LoraConfig(lora_bias=True)
            if added is not None:
                added = added * module.scaling[name]
                bias = added if bias is None else bias + added
    return Projection(changed, bias)


def _change(module: Any, name: str, weight: Tensor) -> Tensor:
    """Return what one adapter adds to `weight (d,in)`."""
    delta: Tensor = module.get_delta_weight(name)
    if getattr(module, "fan_in_fan_out", False):
        delta = delta.t()
    variant = getattr(module, "lora_variant", {}).get(name)
    if variant is None:
        return delta
    if type(variant).__name__ != "DoraLinearVariant":
        raise _unreadable(type(variant).__name__.removesuffix("LinearVariant"))
    # DoRA learns the length of each row; no gradient flows through the length that it had (section 4.3 of the paper).
    length = torch.linalg.vector_norm(weight + delta, dim=1).detach()
    factor = (module.lora_magnitude_vector[name].weight / length).unsqueeze(1)
    return (factor - 1) * weight + factor * delta


def _kind(module: Any) -> str:
    """Return the name of the method: PEFT keeps a package for each."""
    steps = type(module).__module__.split(".")
    return steps[2] if steps[:2] == ["peft", "tuners"] and len(steps) > 2 else type(module).__name__


def _unreadable(kind: str) -> ValueError:
    return ValueError(
        f"the attention router cannot read an adapter of kind {kind} on the output projection; merge it (merge_adapter), "
        f"leave that layer out of target_modules, or {INSTEAD}."
    )

"""Our functions in transformers' own tables of attention and experts functions, and how single modules are pointed at them.

A module finds its function by a name in its config. A module of ours gets a view of the config in which that one name is
different: the model's config stays as it is, with its masks, its file and what the user sets in it later.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from holdfast.hub.per_thread import PerThread
from holdfast.kernels.quantised import as_float
from holdfast.layers.experts import UNKNOWN_FORMAT, activate_used, run_experts

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

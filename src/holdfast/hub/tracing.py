"""Record what every router of a model does, without changing the model.

Hooks of our own, because many families record no router logits at all, and the others only the logits.


What every router of a model was asked: its tokens and the context they came in, so that it can be asked again.

What a model must be before it is tried: finite, with a row for every token and a place for every position.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from holdfast.errors import unknown
from holdfast.hub.context import token_mask_of
from holdfast.hub.families import detached, record
from holdfast.hub.layers import is_moe, sites
from holdfast.kernels.backward import recomputing
from holdfast.routing import Context, Router, Routing
from holdfast.routing.parts import Rule

Each = Callable[[int, Routing, Tensor | None], None]  # (layer, routing, padding)


@final
class Step:
    """The `Routing` of each MoE layer in one forward: `step[i]`, T = B x N tokens, one sequence after the other."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.shape: tuple[int, int] | None = None  # (B,N); None where the model's input does not tell
        self._padding: Tensor | None = None
        self._padding_known = False
        self._routings: dict[int, Routing] = {}

    @property
    def token_mask(self) -> Tensor | None:
        """(B,N) bool, True where the token is real; None if all are."""
        if not self._padding_known:
            raise ValueError(
                "padding is unknown, because the model's forward was called in a way that passes hooks by; call model(...) "
                "rather than model.forward(...)."
            )
        return self._padding

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, layer: int) -> Routing:
        place = range(len(self))[layer]
        if place not in self._routings:
            raise ValueError(f"layer {layer} has recorded nothing: run the model inside the trace, without `each`.")
        return self._routings[place]

    def __iter__(self) -> Iterator[Routing]:
        return (self[layer] for layer in range(len(self)))


class Routes:
    """The `Routing` of each MoE layer in the last forward: `routes[i]`, of the layer `routes.names[i]`.

    `routes.steps` holds a `Step` for each forward that was kept, in their order; the last one is what `routes` itself shows.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.steps: list[Step] = []

    @property
    def token_mask(self) -> Tensor | None:
        """(B,N) bool of the last forward, True where the token is real; None if all are."""
        return self.steps[-1].token_mask if self.steps else None

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, layer: int) -> Routing:
        return (self.steps[-1] if self.steps else Step(self.names))[layer]

    def __iter__(self) -> Iterator[Routing]:
        return (self[layer] for layer in range(len(self)))


@contextmanager
def trace(model: nn.Module, *, keep: Literal["last", "all"] = "last", each: Each | None = None) -> Iterator[Routes]:
    """Inside the `with`, every forward of `model` records each MoE layer's `Routing`, detached, padding known.

    keep    "last" keeps the last forward only. "all" keeps every forward in `routes.steps`: of `generate()`, the prompt (or
            each chunk of it) and then every token, so that the steps joined along N are the routes of the whole sequence
            (the rows of a beam search change places between steps; `beam_indices` of its output says how). A token takes
            2 E + 2 K numbers a layer, on the model's device, as long as `routes` lives
    each    `each(layer, routing, padding)` is called instead of keeping anything: memory is then bounded by one layer

    Works for every family of `holdfast.hub.families` and for models with Holdfast routers. What activation checkpointing
    computes again in the backward is not recorded again.
    """
    if keep not in ("last", "all"):
        raise ValueError(unknown("keep", keep, ("last", "all")))
    if each is not None and keep == "all":
        raise ValueError('keep="all" and each=... exclude each other: `each` is for keeping nothing.')
    routers = watched(model)
    recorder = _Recorder([name for name, _, _ in routers], keep == "all", each)
    base = getattr(model, "base_model", None)  # called by itself, or by the model around it
    handles = []
    for called in [model, base] if isinstance(base, nn.Module) and base is not model else [model]:
        handles.append(called.register_forward_pre_hook(recorder.begin, with_kwargs=True))
        handles.append(called.register_forward_hook(recorder.end, always_call=True))
    for layer, (_, module, rule) in enumerate(routers):
        handles.append(module.register_forward_hook(partial(recorder.record, rule, layer)))
    try:
        yield recorder.routes
    finally:
        for handle in handles:
            handle.remove()


def has_routers(model: nn.Module) -> bool:
    """Is there anything to trace?"""
    return is_moe(model) or any(isinstance(module, Router) for module in model.modules())


def watched(model: nn.Module) -> list[tuple[str, nn.Module, Rule | None]]:
    """Name, module and rule of what routes in each MoE layer: a Router of ours, or a family's gate with its rule."""
    found: list[tuple[str, nn.Module, Rule | None]] = []
    if not is_moe(model):
        found.extend((name, module, None) for name, module in model.named_modules() if isinstance(module, Router))
    for site in [] if found else sites(model):
        if site.family is None:
            found.append((f"{site.name}.router", site.block.get_submodule("router"), None))
        elif site.router is not None:
            found.append((f"{site.name}.{site.family.gate}", site.router, None))
        else:
            found.append((f"{site.name}.{site.family.gate}", site.gate, site.family.rule(site.gate)))
    return found


class _Recorder:
    """The hooks of a trace."""

    def __init__(self, names: Sequence[str], all_steps: bool, each: Each | None) -> None:
        self.routes, self._all_steps, self._each = Routes(names), all_steps, each
        self._running: nn.Module | None = None  # the model whose forward is under way
        self._recorded: set[int] = set()  # layers, in the last step

    def begin(self, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Start a step with what the model is given, unless a model around it has started one."""
        if self._running is not None:
            return
        self._running = model
        step = self._next_step()
        tokens = options.get("input_ids")
        tokens = options.get("inputs_embeds") if tokens is None else tokens
        tokens = arguments[0] if tokens is None and arguments else tokens
        mask = options.get("attention_mask")
        mask = arguments[1] if mask is None and len(arguments) > 1 else mask
        if isinstance(tokens, Tensor) and tokens.dim() >= 2:
            step.shape = (tokens.shape[0], tokens.shape[1])
            step._padding = token_mask_of(mask, *step.shape, _tokens_before(options))
        step._padding_known = True

    def end(self, model: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Note that the model's forward is over."""
        if self._running is model:
            self._running = None

    def record(self, rule: Rule | None, layer: int, gate: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what a router did, or hand it on."""
        if recomputing():
            return
        steps = self.routes.steps
        if self._running is None and (not steps or steps[-1]._padding_known or layer in self._recorded):
            self._next_step()  # of a forward whose start no hook saw
        self._recorded.add(layer)
        step = steps[-1]
        with torch.no_grad():  # or checkpointing would find tensors of the forward missing when it computes them again
            routing = detached(output if rule is None else record(output, rule))
        if self._each is None:
            step._routings[layer] = routing
        else:
            self._each(layer, routing, step.token_mask)

    def _next_step(self) -> Step:
        if not self._all_steps:
            self.routes.steps.clear()
        step = Step(self.routes.names)
        self.routes.steps.append(step)
        self._recorded = set()
        return step


def _tokens_before(options: dict[str, Any]) -> int | None:
    """How many tokens a KV cache holds before a forward; None where nothing says."""
    positions, past = options.get("cache_position"), options.get("past_key_values")
    if isinstance(positions, Tensor):
        return int(positions[0])
    return None if past is None else int(past.get_seq_length())


@final
@dataclass(frozen=True)
class Call:
    """One layer's router in the last forward. A family's own gate is a callable from tokens to a `Routing`."""

    name: str
    route: Router | Callable[[Tensor], Routing]
    tokens: Tensor  # detached, as the router got them: (B,N,d), or (T,d) for a family's own gate
    context: Context | None


@contextmanager
def calls(model: nn.Module) -> Iterator[list[Call]]:
    """Inside the `with`, the list holds the calls of the last forward, a call for each MoE layer in the model's order."""
    heard: list[Call] = []
    handles = []
    for layer, (name, module, rule) in enumerate(watched(model)):
        listen = partial(_hear, heard, layer, name, rule)
        handles.append(module.register_forward_pre_hook(listen, with_kwargs=True))
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _hear(
    heard: list[Call],
    layer: int,
    name: str,
    rule: Rule | None,
    module: nn.Module,
    given: tuple[Any, ...],
    named: dict[str, Any],
) -> None:
    del heard[layer:]  # of an earlier forward
    tokens = given[0].detach()
    if isinstance(module, Router):
        context = given[1] if len(given) > 1 else named.get("context")
        heard.append(Call(name, module, tokens, context))
    else:
        assert rule is not None
        heard.append(Call(name, partial(_ask, module, rule), tokens, None))


def _ask(gate: nn.Module, rule: Rule, tokens: Tensor) -> Routing:
    return record(gate(tokens), rule)


CHECKED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def require_finite(model: Any) -> None:
    """Of the weights that are in memory; those on a disk cannot be looked at."""
    for name, weight in model.state_dict().items():
        here = weight.to_local() if hasattr(weight, "to_local") else weight  # of one that is spread, this process's part
        if here.dtype in CHECKED and not here.is_meta and not _is_finite(here):
            raise ValueError(f"{name}: its weights hold NaN or infinity; the checkpoint is broken.")


def _is_finite(weight: Tensor) -> bool:
    # A sum takes no memory, and is not finite where any weight is not. Finite ones may overflow: then each is looked at.
    return bool(weight.sum(dtype=torch.float32).isfinite()) or bool(weight.isfinite().all())


def require_known(model: Any, ids: Tensor) -> None:
    """Of each token: an embedding says nothing of use about one that it has no row for."""
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if known is not None and ids.numel() and (largest := int(ids.max())) >= known:
        raise ValueError(f"there is a token {largest}, but this model has {known}: the tokeniser is not this model's.")


def require_room(model: Any, length: int) -> None:
    """For sequences of that length."""
    longest = longest_sequence(model)
    if longest is not None and length > longest:
        raise ValueError(f"length is {length}, but the model's positions end at {longest} (max_position_embeddings).")


def longest_sequence(model: Any) -> int | None:
    """Where its config says so; some say -1 for no end."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(longest) if longest and longest > 0 else None

"""Observe the routers of a model without changing it, and check a model and its inputs before a measurement.

trace                   record the `Routing` of every MoE layer. It uses its own hooks, because many families record no
                        router logits, and the others nothing but logits
router_calls            record the inputs of every router, tokens and context, so that it can be called again with others
live_routings           record routings that gradients can be taken of
own_hooks               hooks for a while, which run only for the thread or asyncio task that added them
require_finite, require_known_tokens, require_positions
                        raise ValueError for weights that are not finite, unknown token ids, too long sequences
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from holdfast.errors import require_known
from holdfast.hub.context import token_mask_of
from holdfast.hub.families import routing_from_gate
from holdfast.hub.forwards import SECOND_VIEW, as_token_ids, entered, entered_keys, require_no_copies
from holdfast.hub.layers import is_moe, moe_layers
from holdfast.kernels.quantised import FLOATS
from holdfast.kernels.torch_internals import is_recomputing
from holdfast.routing import Context, Router, Routing
from holdfast.routing.rules import Rule

NO_HOOKS = "the call did not run the model's hooks; call model(...) instead of model.forward(...)"
AT_ONCE = (
    "two threads run the model at once inside one holdfast.trace or holdfast.record, which cannot tell their routes apart: "
    "open one in each thread."
)
Each = Callable[[int, Routing, Tensor | None], None]  # (layer, routing, padding)


@final
class Step:
    """The `Routing` of each MoE layer in one forward: `step[i]`, T = B x N tokens in the order of the sequences.

    In a vision-language model the tokens of a tower or a connector are parts of images: T is their number there, and
    `shape`, `token_ids` and `token_mask` are those of the text.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.shape: tuple[int, int] | None = None  # (B,N); None if the model's input does not show it
        self.token_ids: Tensor | None = None  # (B,N); None if the model's input is something else
        self.before: int | None = None  # how many tokens a KV cache had; None if it is not known
        self._padding: Tensor | None = None
        self._unknown_because: str | None = NO_HOOKS  # why padding is not known; None if it is
        self._routings: dict[int, Routing] = {}

    @property
    def token_mask(self) -> Tensor | None:
        """(B,N) bool, True where the token is real; None if all are."""
        if self._unknown_because is not None:
            raise ValueError(f"padding is unknown because {self._unknown_because}.")
        return self._padding

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, layer: int) -> Routing:
        place = range(len(self))[layer]
        if place not in self._routings:
            raise ValueError(f"layer {layer} is not recorded: run it inside the trace, in the same thread, without `each`.")
        return self._routings[place]

    def __iter__(self) -> Iterator[Routing]:
        return (self[layer] for layer in range(len(self)))


class Trace:
    """The `Routing` of each MoE layer in the last forward: `routes[i]`, of the layer `routes.names[i]`.

    `routes.steps` has a `Step` for each forward that was kept, in order; `routes` itself shows the last one.
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
def trace(model: nn.Module, *, keep: Literal["last", "all"] = "last", each: Each | None = None) -> Iterator[Trace]:
    """Inside the `with`, record the detached `Routing` of each MoE layer in every forward of `model`, and its padding.

    keep    "last" keeps the last forward only. "all" keeps every forward in `routes.steps`: of `generate()`, the prompt (or
            each chunk of it) and then every token, so that the steps joined along N are the routing of the whole sequence
            (a beam search reorders rows between steps; `beam_indices` of its output has the order). A token takes
            2 E + 2 K numbers per layer, on the model's device, as long as `routes` exists
    each    `each(layer, routing, token_mask)` is called and nothing is kept: memory is then bounded by one layer. The
            mask is None for a layer whose tokens are parts of images

    Only forwards of the thread, or asyncio task, that entered the `with` are recorded. A thread that is started inside it
    records nothing, unless it runs in a copy of the context, as in `asyncio.to_thread(model, ids)` and
    `Thread(target=contextvars.copy_context().run, args=(model, ids))`.

    This works for every family of `holdfast.hub.families` and for models with Holdfast routers. A recomputation by
    activation checkpointing is not recorded. What `torch.compile` has compiled runs uncompiled inside the `with`.
    """
    require_known("keep", keep, ("last", "all"))
    if each is not None and keep == "all":
        raise ValueError('keep="all" and each=... exclude each other: with `each`, nothing is kept.')
    require_no_copies(model)
    routers = routing_modules(model)
    recorder = _Recorder([name for name, _, _ in routers], layers_of_images(model), keep == "all", each)
    base = getattr(model, "base_model", None)  # may be called directly, or by the model
    with own_hooks() as hooks:
        for called in [model, base] if isinstance(base, nn.Module) and base is not model else [model]:
            hooks.before(called, recorder.begin)
            hooks.after(called, recorder.end, always_call=True)
        for layer, (_, module, rule) in enumerate(routers):
            hooks.after(module, partial(recorder.record, rule, layer))
        yield recorder.routes


@final
class OwnHooks:
    """Forward hooks that do nothing in other threads and asyncio tasks (see `own_hooks`)."""

    def __init__(self) -> None:
        self.key = object()
        self.handles: list[Any] = []

    def before(self, module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Call `hook(module, arguments, options)` before each forward of `module`."""
        self.handles.append(module.register_forward_pre_hook(partial(self._run, hook), with_kwargs=True))

    def after(self, module: nn.Module, hook: Callable[..., Any], *, always_call: bool = False) -> None:
        """Call `hook(module, arguments, output)` after each forward of `module`; with `always_call` if it raised, too."""
        self.handles.append(module.register_forward_hook(partial(self._run, hook), always_call=always_call))

    def _run(self, hook: Callable[..., Any], module: nn.Module, *given: Any) -> Any:
        require_no_copies(module)
        # While this thread adds or removes a hook, torch may call it in another thread without the options in `given`.
        keys = entered_keys()
        return hook(module, *given) if self.key in keys and SECOND_VIEW not in keys else None


@contextmanager
def own_hooks() -> Iterator[OwnHooks]:
    """Inside the `with`, run the hooks that are added, in this thread or asyncio task only, and nothing compiled."""
    hooks = OwnHooks()
    with without_compilation(), entered(hooks.key):
        try:
            yield hooks
        finally:
            for handle in hooks.handles:
                handle.remove()


class _Uncompiled:
    """How many `without_compilation` there are at this time; torch has one stance for all threads."""

    lock = threading.Lock()
    users = 0
    stance: Any = None


@contextmanager
def without_compilation() -> Iterator[None]:
    """Inside the `with`, everything that `torch.compile` has compiled runs uncompiled, in all threads.

    A forward that was compiled earlier would not run hooks of inner modules that are added later, and one that is compiled
    with them would still run them after they are removed: the compiler does not check whether hooks have changed.
    """
    with _Uncompiled.lock:
        if _Uncompiled.users == 0:
            _Uncompiled.stance = torch.compiler.set_stance("force_eager")
        _Uncompiled.users += 1
    try:
        yield
    finally:
        with _Uncompiled.lock:
            _Uncompiled.users -= 1
            if _Uncompiled.users == 0:
                _Uncompiled.stance.__exit__(None, None, None)


def has_routers(model: nn.Module) -> bool:
    """Whether the model has routers that can be traced."""
    return is_moe(model) or any(isinstance(module, Router) for module in model.modules())


def routing_modules(model: nn.Module) -> list[tuple[str, nn.Module, Rule | None]]:
    """Return name, module and rule of what routes in each MoE layer: a `Router`, or a family's gate with its rule."""
    found: list[tuple[str, nn.Module, Rule | None]] = []
    if not is_moe(model):
        found.extend((name, module, None) for name, module in model.named_modules() if isinstance(module, Router))
    for moe_layer in [] if found else moe_layers(model):
        if moe_layer.family is None:
            found.append((f"{moe_layer.name}.router", moe_layer.block.get_submodule("router"), None))
        elif moe_layer.router is not None:
            found.append((f"{moe_layer.name}.{moe_layer.family.gate}", moe_layer.router, None))
        else:
            rule = moe_layer.family.rule_of(moe_layer.block)
            found.append((f"{moe_layer.name}.{moe_layer.family.gate}", moe_layer.gate, rule))
    return found


def layers_of_images(model: nn.Module) -> set[int]:
    """Return the indices of the MoE layers whose tokens are parts of images."""
    return {index for index, layer in enumerate(moe_layers(model) if is_moe(model) else []) if layer.of_images}


class _Recorder:
    """The hooks of a trace."""

    def __init__(self, names: Sequence[str], of_images: set[int], all_steps: bool, each: Each | None) -> None:
        self.routes, self._all_steps, self._each = Trace(names), all_steps, each
        self._of_images = of_images
        self._running: tuple[nn.Module, int] | None = None  # the model whose forward runs, and the thread
        self._is_free = threading.Lock()  # held while a forward runs
        self._recorded: set[int] = set()  # layers, in the last step

    def begin(self, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Start a step with the model's inputs, unless a model around it has started one."""
        if self._runs_here():
            return
        if not self._is_free.acquire(blocking=False):
            raise ValueError(AT_ONCE)
        self._running = model, threading.get_ident()
        # `generate` encodes images before the first forward: what towers recorded then belongs to this step.
        has_images = bool(options.get("mm_encoder_outputs")) and self._recorded and self._recorded <= self._of_images
        step = self.routes.steps[-1] if has_images else self._next_step()
        given = options.get("input_ids"), options.get("inputs_embeds"), *arguments[:1]
        tokens = next((each for each in given if each is not None), None)
        mask = options.get("attention_mask", arguments[1] if len(arguments) > 1 else None)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            step._unknown_because = "the encoder and the decoder of this model have different tokens"
            return
        if tokens is None and isinstance(mask, Tensor):
            step._unknown_because = "the mask is not of tokens but of what the model makes tokens from"
            return
        if isinstance(tokens, Tensor) and tokens.dim() >= 2:
            step.shape = (tokens.shape[0], tokens.shape[1])
            step.token_ids, step.before = as_token_ids(tokens), tokens_before(options)
            step._padding = token_mask_of(mask, *step.shape, step.before)
        step._unknown_because = None

    def end(self, model: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Note that the model's forward is over."""
        if self._running == (model, threading.get_ident()):
            self._running = None
            self._is_free.release()

    def record(self, rule: Rule | None, layer: int, gate: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep a router's routing, or pass it to `each`."""
        if is_recomputing():
            return
        steps = self.routes.steps
        if not self._runs_here() and (not steps or steps[-1]._unknown_because is None or layer in self._recorded):
            self._next_step()  # a forward that did not run the model's hooks
        self._recorded.add(layer)
        step = steps[-1]
        with torch.no_grad():  # checkpointing requires that a recomputation saves the same tensors as the forward
            routing = output if rule is None else routing_from_gate(output, rule)
            routing = routing.map_tokens(Tensor.detach)  # without its autograd graph and its losses
        if self._each is None:
            step._routings[layer] = routing
        else:
            self._each(layer, routing, None if layer in self._of_images else step.token_mask)

    def _runs_here(self) -> bool:
        """Whether the model's forward runs. Raise ValueError if it does in another thread, with a copy of the context."""
        running = self._running
        if running is not None and running[1] != threading.get_ident():
            raise ValueError(AT_ONCE)
        return running is not None

    def _next_step(self) -> Step:
        if not self._all_steps:
            self.routes.steps.clear()
        step = Step(self.routes.names)
        self.routes.steps.append(step)
        self._recorded = set()
        return step


def tokens_before(options: dict[str, Any]) -> int | None:
    """Return how many tokens a KV cache has before a forward; None if it is not known."""
    positions, past = options.get("cache_position"), options.get("past_key_values")
    if isinstance(positions, Tensor):
        return int(positions[0])
    return None if past is None else int(past.get_seq_length())


@final
@dataclass(frozen=True)
class RouterCall:
    """The call of one layer's router in the last forward. A family's own gate is a callable from tokens to a `Routing`."""

    name: str
    route: Router | Callable[[Tensor], Routing]
    tokens: Tensor  # detached, as the router got them: (B,N,d), or (T,d) for a family's own gate
    context: Context | None


@contextmanager
def router_calls(model: nn.Module) -> Iterator[list[RouterCall]]:
    """Inside the `with`, the list has the router calls of the last forward: one per MoE layer, in the model's order."""
    captured: list[RouterCall] = []

    def capture(layer: int, name: str, rule: Rule | None, module: nn.Module, given: Any, named: dict[str, Any]) -> None:
        del captured[layer:]  # those of an earlier forward
        route: Router | Callable[[Tensor], Routing]

        def call_gate(tokens: Tensor) -> Routing:
            """Call a family's own gate with other tokens, and otherwise as in the recorded call."""
            assert rule is not None
            with entered(module):
                return routing_from_gate(module(tokens, *given[1:], **named), rule)

        if isinstance(module, Router):
            route, context = module, given[1] if len(given) > 1 else named.get("context")
        else:
            route, context = call_gate, None
        captured.append(RouterCall(name, route, given[0].detach(), context))

    with own_hooks() as hooks:
        for layer, (name, module, rule) in enumerate(routing_modules(model)):
            hooks.before(module, partial(capture, layer, name, rule))
        yield captured


@contextmanager
def live_routings(model: nn.Module) -> Iterator[list[Routing]]:
    """Inside the `with`, the list has the routings of the last forward with their autograd graphs, in the model's order."""
    captured: list[Routing] = []

    def capture(layer: int, rule: Rule | None, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        del captured[layer:]  # those of an earlier forward
        captured.append(output if rule is None else routing_from_gate(output, rule))

    with own_hooks() as hooks:
        for layer, (_, module, rule) in enumerate(routing_modules(model)):
            hooks.after(module, partial(capture, layer, rule))
        yield captured


@torch.no_grad()
def require_finite(model: Any) -> None:
    """Raise ValueError if a weight in memory is NaN or infinite. Weights on a disk are not checked."""
    for name, weight in model.state_dict().items():
        local = weight.to_local() if hasattr(weight, "to_local") else weight  # this rank's part of a sharded weight
        if local.dtype not in FLOATS or local.is_meta:
            continue
        # A sum needs no memory and is not finite if a weight is not. A sum of finite weights may overflow: then check each.
        if not (bool(local.sum(dtype=torch.float32).isfinite()) or bool(local.isfinite().all())):
            raise ValueError(f"{name}: its weights contain NaN or infinity; the checkpoint is broken.")


def require_known_tokens(model: Any, ids: Tensor) -> None:
    """Raise ValueError if the model's embedding has no row for a token id: its own error would not say so."""
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if known is not None and ids.numel() and (largest := int(ids.max())) >= known:
        raise ValueError(f"there is a token id {largest}, but this model has {known} tokens: use the model's tokeniser.")
    if known is not None and ids.numel() and (least := int(ids.min())) < 0:
        raise ValueError(f"there is a token id {least}; token ids are 0 or more, those of padding too.")


def require_positions(model: Any, length: int, hint: str = "") -> None:
    """Raise ValueError, which ends with the hint, if sequences of this length have more positions than the model."""
    longest = longest_sequence(model)
    if longest is not None and length > longest:
        raise ValueError(f"length is {length}, but the model's positions end at {longest} (max_position_embeddings){hint}.")


def longest_sequence(model: Any) -> int | None:
    """Return the number of positions in the model's config; None if there is none, or -1 for no limit."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(longest) if longest and longest > 0 else None

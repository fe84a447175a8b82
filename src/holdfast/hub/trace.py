"""Record what every router of a model does, without changing the model.

Hooks of our own, because many families record no router logits at all, and the others only the logits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from holdfast.hub.families import detached, record
from holdfast.hub.padding import token_mask_of
from holdfast.hub.sites import is_moe, sites
from holdfast.kernels.backward import recomputing
from holdfast.routing import Router, Routing
from holdfast.routing.parts import Rule
from holdfast.suggest import unknown

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

"""What every router of a model was asked: its tokens and the context they came in, so that it can be asked again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from holdfast.hub.families import record
from holdfast.hub.trace import watched
from holdfast.routing import Context, Router, Routing
from holdfast.routing.parts import Rule


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

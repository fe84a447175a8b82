"""The attacks of `holdfast attack` on routers, by layer and budget: flips, a chosen expert, loads, one perturbation for all.

They perturb the inputs of one router, or the embeddings of the tokens: then the whole model runs, and what a layer routes
depends on all layers before it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor

from holdfast.attacks import attack_load, attack_routes
from holdfast.attacks.flags import Flag, flags_of_layers
from holdfast.attacks.inputs import ascending
from holdfast.attacks.route_search import Route
from holdfast.attacks.routes import AttackedRoutes
from holdfast.hub import router_calls
from holdfast.hub.tracing import layers_of_images, live_routings, own_hooks, routing_modules
from holdfast.routing import Context, Router, Routing
from holdfast.train.task import AttackTable, Inputs, Task, forward, without_attack_warnings

On = Literal["inputs", "embeddings"]  # what is perturbed: the inputs of a router, the embeddings of tokens
RESTARTS = 6  # of the search for one perturbation: the number of flips has many local maxima


@final
@dataclass(frozen=True)
class LayerAttack:
    """What an attack on the tokens of a layer says, in the columns of its table."""

    title: str
    columns: Sequence[str]  # after the layer, its tokens and the budget; the first is the curve of a page
    run: Callable[..., tuple[list[Any], dict[str, Any], Any]]  # the values of these columns, the summary, and what was found


def _strongest(found: AttackedRoutes, smaller: AttackedRoutes | None) -> AttackedRoutes:
    """Return what was found within a budget or a smaller one, whose perturbations are within this one too."""
    if smaller is None:
        return found
    kept = smaller if smaller.rate > found.rate else found
    nearest = found.distances.minimum(smaller.distances)
    return replace(kept, distances=nearest, budget=found.budget, budgets=found.budgets, flags=found.flags)


def _flips(route: Router | Route, tokens: Tensor, smaller: Any, **how: Any) -> tuple[list[Any], dict[str, Any], Any]:
    found = _strongest(attack_routes(route, tokens, **how), smaller)
    summary = found.summary()
    return [summary["rate"], summary["smallest"] or "", summary["median"] or ""], summary, found


def _universal(route: Router | Route, tokens: Tensor, smaller: Any, **how: Any) -> tuple[list[Any], dict[str, Any], Any]:
    found = attack_routes(route, tokens, universal=True, restarts=RESTARTS, rounds=0, bisections=0, **how)
    found = _strongest(found, smaller)
    summary = found.summary()
    return [summary["rate"], summary["realised"]], summary, found


def _expert(
    route: Router | Route, tokens: Tensor, smaller: Any, *, expert: int, **how: Any
) -> tuple[list[Any], dict[str, Any], Any]:
    clean = attack_routes(route, tokens, experts=expert, **{**how, "budget": 0.0, "steps": 1}, rounds=0, restarts=0, tries=0)
    found = _strongest(attack_routes(route, tokens, experts=expert, **how), smaller)
    summary = found.summary()
    return [summary["rate"], clean.rate, expert, summary["median"] or ""], {**summary, "clean_rate": clean.rate}, found


def _load(
    objective: str, route: Router | Route, tokens: Tensor, smaller: Any, **how: Any
) -> tuple[list[Any], dict[str, Any], Any]:
    found = attack_load(route, tokens, objective=objective, **how)
    if smaller is not None:  # its perturbations are within this budget too
        kept = smaller if smaller.value > found.value else found
        targeted = [max(pair) for pair in zip(found.targeted, smaller.targeted, strict=True)]
        found = replace(kept, targeted=targeted, budget=found.budget, flags=found.flags)
    values = [found.value, found.clean_value, found.expert, found.dropped, found.clean_dropped]
    return values, found.summary(), found


LIMITS = "dropped by a limit of capacity", "dropped without the attack"
ROUTE_ATTACKS = {
    "routes": LayerAttack("Routes", ["share that flips", "smallest perturbation that flips", "median of those"], _flips),
    "universal-routes": LayerAttack("One perturbation for all tokens", ["share that flips", "its length"], _universal),
    "expert": LayerAttack(
        "Towards one expert",
        ["share that asks for it", "without the attack", "expert", "median perturbation that gets there"],
        _expert,
    ),
    "overload": LayerAttack(
        "Overload of one expert",
        ["share that asks for it", "highest share without the attack", "expert", *LIMITS],
        partial(_load, "overload"),
    ),
    "imbalance": LayerAttack(
        "Uneven loads",
        ["squared variation of the loads", "without the attack", "expert with the highest load", *LIMITS],
        partial(_load, "imbalance"),
    ),
}


def attack_routers(
    model: Any,
    task: Task,
    kind: str = "routes",
    *,
    budget: float | Sequence[float],
    steps: int,
    tokens: int,
    seed: int,
    on: On = "inputs",
    **options: Any,
) -> AttackTable:
    """Attack the router of each layer that can change, for the first probe sequences with about `tokens` tokens in all.

    kind        a name of `ROUTE_ATTACKS`
    budget      one, or several: a multiple of the length of each perturbed vector, in l2
    on          perturb the inputs of each router, or the embeddings, with which the whole model runs
    options     `expert`, of the attack towards an expert
    """
    if tokens < 1:
        raise ValueError(f"examples is {tokens}; attack at least 1 token.")
    budgets = ascending(list(budget) if isinstance(budget, Sequence) else [budget])
    attack = ROUTE_ATTACKS[kind]
    probe = task.probe()
    length = next(iter(probe.values())).shape[1] if "input_ids" in probe else 1
    few = {name: tensor[: max(1, tokens // length)] for name, tensor in probe.items()}
    with torch.no_grad(), live_routings(model) as routings:
        forward(model, few)
        modules = [module for _, module, _ in routing_modules(model)]
        attacked = [_can_change(kind, *layer) for layer in zip(modules, routings, strict=True)]
        if not any(attacked):
            raise ValueError(
                f"every token of this model runs all experts of its layers: the attack {kind} can change nothing."
            )
    calls = _input_calls if on == "inputs" else _embedding_calls
    rows, summaries, flags = [], [], list[tuple[int, Flag]]()
    curves: dict[str, dict[str, list[float]]] = {}
    with without_attack_warnings(), calls(model, few) as layers:
        for layer, (name, route, given, how) in enumerate(layers):
            if not attacked[layer]:
                continue
            found = None  # within the smaller budgets
            for one in budgets:
                values, summary, found = attack.run(
                    route, given, found, budget=one, relative=True, steps=steps, seed=seed, **how, **options
                )
                rows.append([layer, summary["tokens"], one, *values])
                summaries.append({"layer": name, **summary})
                flags += [(layer, flag) for flag in found.flags]
                curve = curves.setdefault(f"layer {layer}", {"budgets": [], "figure": []})
                curve["budgets"].append(one)
                curve["figure"].append(values[0])
    what = "router inputs" if on == "inputs" else "embeddings"
    size = "" if len(budgets) > 1 else f" by up to {budgets[0]:.3g} of their length"
    return {
        "title": f"{attack.title}: {what} perturbed{size} (l2)",
        "caption": f"A budget is a share of the length of each of these {what}. Columns with perturbations have lengths. "
        "All numbers are what a search found, within this budget or a smaller one: the worst case may be worse."
        + ("" if all(attacked) else " Layers whose tokens run all experts are left out."),
        "columns": ["layer", "tokens", "budget", *attack.columns],
        "rows": rows,
        "flags": flags_of_layers(flags),
        "summary": {"attack": kind, "perturbed": what, "layers": summaries},
        "lines": {"x": "budget, as a share of each length", "y": attack.columns[0], "curves": curves},
    }


def _can_change(kind: str, module: torch.nn.Module, routing: Routing) -> bool:
    """Return whether the attack can change what tokens ask for; if that is every expert, some routers may ask for fewer."""
    if not routing.used.all() or routing.experts.shape != routing.gates.shape:
        return True
    return kind in ("routes", "universal-routes") and isinstance(module, Router) and module.select.ragged


Layers = list[tuple[str, Router | Route, Tensor, dict[str, Any]]]  # name, route, tokens and further options of each layer


@contextmanager
def _input_calls(model: Any, inputs: Inputs) -> Iterator[Layers]:
    """Yield each layer's router, with its inputs in a clean forward."""
    with torch.no_grad(), router_calls(model) as captured:
        forward(model, inputs)
    layers: Layers = []
    of_images = layers_of_images(model)  # their tokens are no tokens of texts, and none is padding
    for number, call in enumerate(captured):
        how: dict[str, Any] = {"context": call.context if isinstance(call.context, Context) else None}
        mask = _padding(inputs)
        if mask is not None and number not in of_images:
            how["token_mask"] = mask.view(call.tokens.shape[:-1]).to(call.tokens.device)
        layers.append((call.name, call.route, call.tokens.float(), how))
    yield layers


@contextmanager
def _embedding_calls(model: Any, inputs: Inputs) -> Iterator[Layers]:
    """Yield for each layer the function from embeddings to its routing, with the embeddings of these inputs."""
    if "input_ids" not in inputs:
        raise ValueError("this model's inputs are images, which have no embeddings of tokens: perturb router inputs.")
    if layers_of_images(model):
        raise ValueError(
            "a layer routes parts of images, which do not depend on the embeddings of tokens: perturb router inputs."
        )
    table, given = model.get_input_embeddings(), list[Tensor]()
    embeddings = table(inputs["input_ids"].to(model.device)).detach()
    mask = _padding(inputs)
    how = {} if mask is None else {"token_mask": mask.to(embeddings.device)}

    def route(layer: int, tokens: Tensor) -> Routing:
        given[:] = [Rounded.apply(tokens, embeddings)]
        forward(model, inputs)
        return routings[layer]

    with own_hooks() as hooks, live_routings(model) as routings:
        hooks.after(table, lambda *_: given[0])
        names = [name for name, _, _ in routing_modules(model)]
        yield [(name, partial(route, layer), embeddings.float(), how) for layer, name in enumerate(names)]


class Rounded(torch.autograd.Function):
    """Round tokens to the dtype of the clean ones, never farther from them than they were: a budget holds in bf16 too."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, clean: Tensor) -> Tensor:
        rounded = tokens.to(clean.dtype)
        too_far = (rounded.float() - clean.float()).abs() > (tokens - clean.float()).abs()
        return torch.where(too_far, torch.nextafter(rounded, clean), rounded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.float(), None


def _padding(inputs: Inputs) -> Tensor | None:
    """Return (B,N) bool, True where a token is real; None if all are."""
    mask = inputs.get("attention_mask")
    return None if mask is None or bool(mask.all()) else mask.bool()

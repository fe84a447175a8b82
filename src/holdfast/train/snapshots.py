"""Snapshots of the routing on a few fixed examples, at the same training steps for every router (`training.snapshots`).

A snapshot has, for each layer, the selected sets, the expert graph and the routing metrics of these examples, and on request
the gradient interference of experts. It is measured in forwards of its own, in evaluation mode: the training step, whether
captured or compiled, does not change.

Each snapshot is a file, so that an interrupted run resumes with the snapshots it has. `evolution` joins them to curves over
training, with the share of tokens that flip between two snapshots; `consistency` measures how many keep their experts under
noise. `shown_routes` has the routes of a few test examples for the Explorer of a page: clean, under noise, and attacked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import ne
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from holdfast.certificates import certify
from holdfast.hub import RouterCall, router_calls, trace
from holdfast.hub.install import specs_of
from holdfast.hub.layers import moe_layers
from holdfast.hub.tracing import own_hooks
from holdfast.metrics import Blocks, Boundary, RoutingReport, boundary_of, gradient_interference, graph_sparsity
from holdfast.metrics.token_routes import LayerRoutes, RouteChanges, Routes, layer_routes
from holdfast.routing import Router, Routing
from holdfast.stored import without_nan
from holdfast.train.run_folder import read_with_checksum, write_with_checksum
from holdfast.train.step import loss_of
from holdfast.train.task import Inputs, evaluating, forward

NOISE = 0.05  # relative to the length of each embedding
NOISE_ABOUT = f"noise of {NOISE:.0%} of each embedding's length"


@torch.no_grad()
def take_snapshot(
    model: Any, probe: Inputs, k: int | Sequence[int], step: int, folder: Path, batch: Inputs | None = None
) -> None:
    """Write the k first experts of every token, the expert graph and the metrics of every layer; k may differ by layer.

    batch   training examples with labels, on which the gradient interference is measured; None: it is not
    """
    layers = []
    routings = routings_of(model, probe)
    found = zip(routings.cores(k), routings.token_mask, routings.metrics, strict=True)
    learned = [module.snapshot() for module in model.modules() if isinstance(module, Router)]
    cosines = None if batch is None else interference(model, batch)
    for layer, (kept, token_mask, metrics) in enumerate(found):
        masks = kept[token_mask] if token_mask is not None else kept
        own = learned[layer] if layer < len(learned) else {}
        counts = torch.tensor(metrics.pop("co_selection")["counts"], dtype=torch.float64)
        graph = own["graph"].cpu() if "graph" in own else counts / counts.sum(1, keepdim=True).clamp_min(1)
        metrics["sparsity"] = graph_sparsity(graph)
        metrics["width"] = float(own["width"]) if "width" in own else None
        metrics["interference"] = None if cosines is None else cosines[layer]
        rounded = [[round(value, 3) for value in row] for row in graph.tolist()]
        layers.append({"sets": [sorted(row) for row in masks.tolist()], "graph": rounded, "metrics": metrics})
    write_with_checksum(_file(folder, step), without_nan({"step": step, "layers": layers}))


@torch.enable_grad()
def interference(model: Any, batch: Inputs) -> list[float | None]:
    """Return the gradient interference of the experts of every layer, for the loss of the batch in evaluation mode.

    No gradient is stored, no random number is drawn, and routers learn nothing.
    """
    parameters: list[list[Tensor]] = []
    for layer in moe_layers(model):
        _, experts = layer.size
        own = [one for one in layer.experts.parameters() if one.requires_grad and one.shape[:1] == (experts,)]
        parameters.append(own)
    wanted = [parameter for own in parameters for parameter in own]
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    with evaluating(model, routing=False):
        gradients = iter(torch.autograd.grad(loss_of(model, inputs, None), wanted, materialize_grads=True) if wanted else ())
    return [gradient_interference([next(gradients) for _ in own]) for own in parameters]


def damaged_snapshot(folder: Path, steps: list[int]) -> str | None:
    """Return what is wrong with the first snapshot of these steps that cannot be read; None if all can."""
    for step in steps:
        try:
            read_with_checksum(_file(folder, step))
        except (OSError, ValueError):
            return f"cannot be used: the snapshot {_file(folder, step)} is missing or damaged"
    return None


def _file(folder: Path, step: int) -> Path:
    return folder / f"{step:08d}.json"


def evolution(folder: Path, steps: list[int], names: list[str], *, learned: bool) -> dict[str, Any]:
    """Return how sets change between snapshots (Mutual-Inform, Figure 2) and how graphs grow (Symphony, Figure 4).

    `states` are the metrics of every snapshot (Discontinuities in SMoE, Figures 4, 6 and 7).
    """
    taken = [read_with_checksum(_file(folder, step)) for step in steps]
    layers = []
    for layer, name in enumerate(names):
        sets, graphs, states = (
            [snapshot["layers"][layer][key] for snapshot in taken] for key in ("sets", "graph", "metrics")
        )
        flips = [sum(map(ne, *pair)) / len(pair[0]) for pair in pairwise(sets)]
        layers.append({"layer": layer, "name": name, "fluctuation": flips, "graphs": graphs, "states": states})
    return {"steps": steps, "graph": "learned" if learned else "co-selection", "layers": layers}


@torch.no_grad()
def consistency(model: Any, probe: Inputs, k: int | Sequence[int]) -> dict[str, Any]:
    """Return the share of tokens that keep their k experts under a little noise on the embeddings, for every layer.

    "figure" is the mean over tokens and layers, and "per_example" has the counts of each example, for intervals.
    """
    before = routings_of(model, probe)
    with own_hooks() as hooks:
        hooks.after(model.get_input_embeddings(), add_noise)
        after = routings_of(model, probe)
    shares, examples = [], len(next(iter(probe.values())))
    kept, tokens = torch.zeros(examples), torch.zeros(examples)  # of all layers, by example
    for old, new, token_mask in zip(before.cores(k), after.cores(k), before.token_mask, strict=True):
        same = (old.sort(1).values == new.sort(1).values).all(1)
        counted = torch.ones_like(same) if token_mask is None else token_mask
        shares.append(float(same[counted].double().mean()))
        kept += (same & counted).view(examples, -1).sum(1)
        tokens += counted.view(examples, -1).sum(1)
    found = Blocks(kept.double().numpy(), tokens.double().numpy(), perplexity=False)
    return {"what": NOISE_ABOUT, "layers": shares, "figure": found.mean, "per_example": found.stored()}


@final
@dataclass(frozen=True)
class ProbeRoutings:
    """The routing of every layer on the probe, on the CPU, and its metrics (`RoutingReport`)."""

    names: list[str]
    layers: list[Routing]
    token_mask: list[Tensor | None]
    metrics: list[dict[str, Any]]

    def cores(self, k: int | Sequence[int]) -> list[Tensor]:
        """Return (T,k) for every layer: the k experts with the largest weights, the sentinel E in unused slots.

        Experts that `smooth` adds below them enter and leave with weight 0, so they do not count as a flip. `k` is one
        number for all layers, or one for each.
        """
        ks = [k] * len(self.layers) if isinstance(k, int) else k
        return [routing.experts[:, :count] for routing, count in zip(self.layers, ks, strict=True)]


def routings_of(model: Any, probe: Inputs) -> ProbeRoutings:
    """Run the model on the probe in evaluation mode and return its routing; the model keeps its mode."""
    layers, masks = list[Routing](), list[Tensor | None]()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    report = RoutingReport(boundaries={layer: boundary_of(router) for layer, router in enumerate(routers)})

    def each(layer: int, routing: Routing, token_mask: Tensor | None) -> None:
        report.each(layer, routing, token_mask)
        layers.append(routing.map_tokens(Tensor.cpu))
        masks.append(None if token_mask is None else token_mask.flatten().cpu())

    with evaluating(model, routing=False), trace(model, each=each) as routes:
        forward(model, probe)
    return ProbeRoutings(routes.names, layers, masks, report.result()["layers"])


def experts_per_token(model: Any) -> list[int]:
    """Return the k of every MoE layer of a changed model."""
    return [spec.k for spec in specs_of(model).values()]


def learns_a_graph(model: Any) -> bool:
    """Return whether a router of the model stores an expert graph."""
    return any("graph" in module.snapshot() for module in model.modules() if isinstance(module, Router))


def add_noise(module: Any, inputs: Any, output: Any) -> Any:
    """Return the output of the embeddings with noise, as a forward hook; it is the same in every forward."""
    rows = output[0] if isinstance(output, tuple) else output  # Swin returns its embeddings with their size
    source = torch.Generator().manual_seed(0)
    noise = torch.randn(rows.shape, generator=source).to(rows)
    noisy = rows + noise * (NOISE * rows.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
    return (noisy, *output[1:]) if isinstance(output, tuple) else noisy


@final
@dataclass(frozen=True)
class RecordedRoutes:
    """One forward: the routing and the call of every layer's router, and the model's logits."""

    routings: list[Routing]
    calls: list[RouterCall]
    logits: Tensor


@final
@dataclass(frozen=True)
class Changed:
    """Inputs that an attack has changed, and the rows of the tokens that it leaves alone: before, after.

    Without `rows`, every token is in its place, as when a picture changes.
    """

    about: str
    inputs: Inputs
    rows: tuple[Tensor, Tensor] | None = None


@torch.no_grad()
def record_routes(model: Any, inputs: Inputs, *, noise: bool = False) -> RecordedRoutes:
    """Run a model in evaluation mode; with noise on its embeddings, as `consistency` measures it."""
    with own_hooks() as hooks, router_calls(model) as calls, trace(model) as routes:
        if noise:
            hooks.after(model.get_input_embeddings(), add_noise)
        logits = forward(model, inputs).logits
        return RecordedRoutes(list(routes), list(calls), logits)


def shown_routes(
    model: Any,
    inputs: Inputs,
    recorded: RecordedRoutes,
    rows: Sequence[Tensor],
    changed: Mapping[str, Changed] | None = None,
) -> Routes:
    """Return the routes of the `rows` of each layer, and what noise and `changed` inputs change in them."""
    layers = [_layer(call, routing, own) for call, routing, own in zip(recorded.calls, recorded.routings, rows, strict=True)]
    noisy = record_routes(model, inputs, noise=True)
    every = [(torch.arange(len(routing.experts)),) * 2 for routing in recorded.routings]
    perturbed = {"noise": _changes(recorded, noisy, rows, every).result(NOISE_ABOUT)}
    for name, one in (changed or {}).items():
        after = record_routes(model, one.inputs)
        same = every if one.rows is None else [one.rows] * len(rows)
        perturbed[name] = _changes(recorded, after, rows, same).result(one.about)
    return Routes(layers, perturbed)


def _layer(call: RouterCall, routing: Routing, rows: Tensor) -> LayerRoutes:
    if not isinstance(call.route, Router):
        return layer_routes(routing, rows, Boundary(), None)
    try:
        radii = certify(call.route, call.tokens, call.context).relative
    except ValueError:  # no certificate is known for this router
        radii = None
    return layer_routes(routing, rows, boundary_of(call.route), call.route.select.declares.core, radii)


def _changes(
    before: RecordedRoutes, after: RecordedRoutes, rows: Sequence[Tensor], same: Sequence[tuple[Tensor, Tensor]]
) -> RouteChanges:
    found = RouteChanges(rows)
    for layer, (old, new) in enumerate(zip(before.routings, after.routings, strict=True)):
        found.add(layer, old, new, same[layer])
    return found

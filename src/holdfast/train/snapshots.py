"""Snapshots: the selected sets and the expert graphs on a few fixed examples, at the same training steps for every router.

Each snapshot is a file, so that an interrupted run resumes with the snapshots it has. From them, `evolution` computes how
many tokens flip between two snapshots; `consistency` measures how many keep their experts under noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from holdfast.hub import trace
from holdfast.hub.install import specs_of
from holdfast.hub.tracing import own_hooks
from holdfast.metrics import CoSelection
from holdfast.routing import Router, Routing
from holdfast.train.run_folder import read_with_checksum, write_with_checksum
from holdfast.train.task import Inputs, forward

COUNT = 5  # snapshots per run
NOISE = 0.05  # relative to the length of each embedding


def snapshot_steps(steps: int) -> list[int]:
    """Return the steps after which snapshots are taken: evenly spaced, with the last step."""
    return sorted({max(1, round(steps * part / COUNT)) for part in range(1, COUNT + 1)})


@torch.no_grad()
def take_snapshot(model: Any, probe: Inputs, k: int | Sequence[int], step: int, folder: Path) -> None:
    """Write the k first experts of every token and the graph of the experts, in every layer; k may differ by layer."""
    layers = []
    routings = routings_of(model, probe)
    for kept, token_mask, graph in zip(routings.cores(k), routings.token_mask, _graphs(model, routings), strict=True):
        masks = kept[token_mask] if token_mask is not None else kept
        rounded = [[round(value, 3) for value in row] for row in graph.tolist()]
        layers.append({"sets": [sorted(row) for row in masks.tolist()], "graph": rounded})
    write_with_checksum(_file(folder, step), {"step": step, "layers": layers})


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
    """Return how sets change between snapshots (Mutual-Inform, Figure 2) and how graphs grow (Symphony, Figure 4)."""
    taken = [read_with_checksum(_file(folder, step)) for step in steps]
    layers = []
    for layer, name in enumerate(names):
        sets = [snapshot["layers"][layer]["sets"] for snapshot in taken]
        layers.append(
            {
                "layer": layer,
                "name": name,
                "fluctuation": [
                    sum(old != new for old, new in zip(before, after, strict=True)) / len(before)
                    for before, after in pairwise(sets)
                ],
                "graphs": [snapshot["layers"][layer]["graph"] for snapshot in taken],
            }
        )
    return {"steps": steps, "graph": "learned" if learned else "co-selection", "layers": layers}


@torch.no_grad()
def consistency(model: Any, probe: Inputs, k: int | Sequence[int]) -> dict[str, Any]:
    """Return the share of tokens that keep their k experts under a little noise on the embeddings, for every layer."""
    before = routings_of(model, probe)
    with own_hooks() as hooks:
        hooks.after(model.get_input_embeddings(), _add_noise)
        after = routings_of(model, probe)
    shares = []
    for old, new, token_mask in zip(before.cores(k), after.cores(k), before.token_mask, strict=True):
        same = (old.sort(1).values == new.sort(1).values).all(1)
        shares.append(float((same if token_mask is None else same[token_mask]).double().mean()))
    return {"what": f"noise of {NOISE:.0%} of each embedding's length", "layers": shares}


@final
@dataclass(frozen=True)
class ProbeRoutings:
    """The routing of every layer on the probe, on the CPU."""

    names: list[str]
    layers: list[Routing] = field(default_factory=list)
    token_mask: list[Tensor | None] = field(default_factory=list)

    def cores(self, k: int | Sequence[int]) -> list[Tensor]:
        """Return (T,k) for every layer: the k experts with the largest weights, the sentinel E in unused slots.

        Experts that `smooth` adds below them enter and leave with weight 0, so they do not count as a flip. `k` is one
        number for all layers, or one for each.
        """
        ks = [k] * len(self.layers) if isinstance(k, int) else k
        return [routing.experts[:, :count] for routing, count in zip(self.layers, ks, strict=True)]


def routings_of(model: Any, probe: Inputs) -> ProbeRoutings:
    """Run the model on the probe in evaluation mode and return its routing; the model keeps its mode."""
    found, was_training = ProbeRoutings([]), model.training

    def each(layer: int, routing: Routing, token_mask: Tensor | None) -> None:
        found.layers.append(routing.map_tokens(Tensor.cpu))
        found.token_mask.append(None if token_mask is None else token_mask.flatten().cpu())

    model.eval()
    with trace(model, each=each) as routes:
        forward(model, probe)
    model.train(was_training)
    found.names.extend(routes.names)
    return found


def experts_per_token(model: Any) -> list[int]:
    """Return the k of every MoE layer of a changed model."""
    return [spec.k for spec in specs_of(model).values()]


def learns_a_graph(model: Any) -> bool:
    """Return whether a router of the model stores an expert graph."""
    return any("graph" in module.snapshot() for module in model.modules() if isinstance(module, Router))


def _graphs(model: Any, routings: ProbeRoutings) -> Iterator[Tensor]:
    """Yield the expert graph of each layer: the learned one, or the co-selection counts with rows that sum to 1."""
    learned = [module.snapshot().get("graph") for module in model.modules() if isinstance(module, Router)]
    for layer, (routing, token_mask) in enumerate(zip(routings.layers, routings.token_mask, strict=True)):
        graph = learned[layer] if layer < len(learned) else None
        if graph is None:
            counts = CoSelection()
            counts.update(routing, token_mask)
            found = torch.tensor(counts.result().counts, dtype=torch.float64)
            graph = found / found.sum(1, keepdim=True).clamp_min(1)
        yield graph.cpu()


def _add_noise(module: Any, inputs: Any, output: Any) -> Any:
    rows = output[0] if isinstance(output, tuple) else output  # Swin returns its embeddings with their size
    source = torch.Generator().manual_seed(0)
    noise = torch.randn(rows.shape, generator=source).to(rows)
    noisy = rows + noise * (NOISE * rows.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
    return (noisy, *output[1:]) if isinstance(output, tuple) else noisy

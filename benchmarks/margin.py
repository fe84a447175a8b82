"""What margin training costs and gains: certified share of tokens against perplexity, over the strength of the loss.

    PYTHONPATH=src python benchmarks/margin.py --out results/margin

It trains the demo's model (`holdfast compare`) with `smoe`, three seeds, without the loss and with it. The radius is the one
that 20% of the validation tokens reach without it, over all layers and seeds. Finished cells are not trained again. OUT gets
margin.json; docs/pictures/margin_training.json keeps it, from which `make figures` draws the curve.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import holdfast
from holdfast.progress import quiet
from holdfast.train import Comparison, load_recipe, parse_routers
from holdfast.train.text_task import TextTask
from holdfast.version import versions

# Of the margin and of the balance loss: routing that collapses to a few experts is certified too, and worth nothing.
STRENGTHS = ("0.003,0.01", "0.01,0.01", "0.03,0.01", "0.1,0.01", "0,0.1", "0.01,0.1", "0.03,0.1", "0.1,0.1")
REACHED = 0.2  # share of tokens that are certified for the radius without the loss
TOKENS = 8192  # of the validation text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--router", default="smoe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--strengths", nargs="*", default=STRENGTHS, help="margin,balance")
    options = parser.parse_args()
    quiet()
    plain = cells(options, "plain", {})
    relative = torch.cat([seed.radii for seed in plain]).flatten()
    radius = float(relative.sort(descending=True).values[round(REACHED * len(relative))])
    rows: list[dict[str, Any]] = [{"margin": 0.0, "balance": 0.01, **row(radius, plain, plain)}]
    for pair in options.strengths:
        margin, balance = (float(part) for part in pair.split(","))
        changes = {"losses.margin": margin, "losses.balance": balance, "losses.radius": radius}
        rows.append({"margin": margin, "balance": balance, **row(radius, cells(options, pair, changes), plain)})
        record = {"router": options.router, "radius": radius, "rows": rows, "versions": versions()}
        (options.out / "margin.json").write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


class Trained(NamedTuple):
    """A trained model."""

    perplexity: float  # of the test text
    used: float  # experts in effect: exp of the entropy of the loads on the test text, mean over layers
    radii: Tensor  # (layers, tokens): relative radii of validation tokens


def cells(options: argparse.Namespace, name: str, changes: dict[str, Any]) -> list[Trained]:
    """Train every seed with these changes of the recipe, unless that is done, and certify its validation tokens."""
    comparison = Comparison(
        load_recipe("tiny", {"training.steps": options.steps, **changes}),
        parse_routers(options.router),
        options.seeds,
        options.out / name,
    )
    results = comparison.run()
    task = comparison.task
    assert isinstance(task, TextTask)
    texts, found = [document.text for document in task.corpus.documents("valid")], []
    for cell, result in zip(comparison.cells, results, strict=True):
        model = holdfast.load(comparison.folder / "cells" / cell.folder / "model")
        layers = holdfast.certify(model, texts, tokenizer=task.audit_tokenizer, length=64, tokens=TOKENS).layers
        certified = [layer.certificates.relative for layer in layers if layer.certificates is not None]
        loads = torch.tensor([layer["load"]["percent"] for layer in result["clean"]["routing"]["layers"]])
        used = torch.special.entr(loads / loads.sum(1, keepdim=True)).sum(1).exp().mean()
        found.append(Trained(result["clean"]["figure"], float(used), torch.stack(certified)))
    return found


def row(radius: float, found: list[Trained], plain: list[Trained]) -> dict[str, list[float]]:
    """Return for each seed the certified share, the experts in effect, the perplexity, and its ratio to `plain`."""
    return {
        "share": [float((seed.radii >= radius).double().mean()) for seed in found],
        "used": [seed.used for seed in found],
        "perplexity": [seed.perplexity for seed in found],
        "ratio": [seed.perplexity / before.perplexity for seed, before in zip(found, plain, strict=True)],
    }


if __name__ == "__main__":
    main()

"""Train a recipe's model dense and with a router, on the same batches, and compare them by seed; for labelled texts.

    PYTHONPATH=src python benchmarks/dense.py banking77 --data DATA --out results/banking77 \
        --set model.checkpoint=MINILM training.precision=bf16

The sparse cells are those of `holdfast compare`: finished ones are not trained again.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml

from holdfast.metrics.paired import paired
from holdfast.progress import quiet
from holdfast.train import Comparison, Task, load_recipe, parse_routers
from holdfast.train.label_task import LabelTask
from holdfast.train.training import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder with banking77/, sst/ and glue/")
    parser.add_argument("--router", default="smoe")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], help="key=value, changes of the recipe")
    given = parser.parse_args()
    quiet()
    changes = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in given.set)}
    routers = parse_routers(given.router)
    if len(routers) != 1:
        parser.error("give one router; the dense model is compared with one at a time.")
    comparison = Comparison(load_recipe(given.recipe, changes), routers, given.seeds, given.out, data=given.data)
    task = comparison.task
    if not isinstance(task, LabelTask):
        parser.error(f"the recipe {given.recipe} is not for labelled texts.")
    sparse = sorted(comparison.run(), key=lambda result: result["seed"])
    dense = [trained_dense(task, seed, given.out / "dense") for seed in range(given.seeds)]
    for one, other in zip(sparse, dense, strict=True):
        assert all(one[key] == other[key] for key in ("first_batch", "last_batch")), "the batches differ"
    metric = task.metric
    kinds = {
        "clean": lambda result: result["clean"][metric],
        "words": lambda result: result["attacked"][metric],
        "changed by words": lambda result: result["attacked"]["predictions_changed"],
        "typos": lambda result: result["trials"]["typos"][metric],
    }
    for name, value in kinds.items():
        pairs = [(100 * value(one), 100 * value(other)) for one, other in zip(sparse, dense, strict=True)]
        figures = {
            given.router: interval([one for one, _ in pairs]),
            "dense": interval([other for _, other in pairs]),
            "difference": interval([one - other for one, other in pairs]),
        }
        print(json.dumps({"metric": metric, "of": name, **figures}))


def trained_dense(task: Task, seed: int, folder: Path) -> dict[str, Any]:
    """Return the scores of the dense model; its weights, those of the head too, start as in the sparse model."""
    own = task.for_seed(seed)
    torch.manual_seed(seed)
    model = own.initial_model()
    with patch("holdfast.train.recipe.TrainingPart.snapshot_steps", lambda *_: []):  # a dense model has no routing
        train(model, own, folder / f"seed{seed}", seed=seed, k=[])
    shutil.rmtree(folder / f"seed{seed}", ignore_errors=True)
    examples = own.examples(seed)
    return {"first_batch": examples.hash(0), "last_batch": examples.hash(own.steps - 1), **own.score(model)}


def interval(values: list[float]) -> dict[str, float | None]:
    """Return the mean with its 95% interval, Student's t over seeds; one value has no interval."""
    found = asdict(paired([0.0] * len(values), values))
    return {key: found[key] for key in ("mean", "low", "high")}


if __name__ == "__main__":
    main()

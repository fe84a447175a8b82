"""What the experiment of a paper needs: GPU hours, counted by `holdfast.plan`."""

from __future__ import annotations

import warnings
from typing import Any

from holdfast.planning.planning import Workload, plan
from holdfast.train.papers import Preset
from holdfast.train.recipe import Recipe, load_recipe

RATE = 8e13  # FLOPs a second: an H200 that trained six models of 32 million parameters on enwik8 at a time had this rate
IMAGENET = 1_281_167  # training images


def gpu_hours(preset: Preset) -> float | None:
    """Return about how many hours all routers and seeds of a preset train on one GPU; None if this cannot be counted.

    Every router is counted as the plain one, and the GPU as one that computes with `RATE`.
    """
    assert preset.recipe is not None
    recipe = load_recipe(preset.recipe, preset.set)
    flops = training_flops(recipe)
    return None if flops is None else flops * len(preset.routers) * preset.seeds / RATE / 3600


def training_flops(recipe: Recipe) -> float | None:
    """Return the FLOPs of one training; None for checkpoints, data of unknown size, and models that `plan` does not know."""
    model, sparse, training, data = recipe.model, recipe.sparse, recipe.training, recipe.data
    if model.family is None:
        return None
    sizes: dict[str, Any] = dict(model.config)
    if recipe.task == "text":
        sizes["vocab_size"] = 256 if data.tokens == "bytes" else data.vocabulary or 50_000
        sequence: int | None = data.length
    else:
        sequence = None
        if data.size is not None:
            sizes["image_size"] = data.size
    examples = IMAGENET if data.source.startswith("imagenet") else None
    if training.steps is None and examples is None:
        return None
    steps = training.step_count(examples or 0)
    try:
        with warnings.catch_warnings(action="ignore"):
            planned = plan(
                model.family,
                ["smoe"],
                experts=sparse.experts,
                k=sparse.k,
                layers=sparse.layers,
                hidden=sparse.hidden,
                sizes=sizes,
                workload=Workload(sequence=sequence),
            )
    except ValueError:
        return None
    tokens = steps * training.batch * training.accumulate * planned.sequence
    return planned.columns[0].training.total * tokens

"""Build every router of a run before the first one is trained, so that a mistake in the last one costs seconds.

The models are built on the `meta` device: with all sizes and without values, by the functions that build the real ones.
Nothing is written. No forward is run, because neither transformers' attention masks nor autocast work without values; what a
forward would refuse because the task cannot supply it is found from what routers declare that they read.
"""

import warnings
from collections.abc import Sequence

import torch

from holdfast.hub.layers import moe_layers
from holdfast.layers.losses import Losses
from holdfast.planning.meta_model import Change, Choice, sparsify_on_meta
from holdfast.routing import Router
from holdfast.train.recipe import RouterChoice
from holdfast.train.task import Task

# Fields of a `Context` that not every task supplies, the model's input that they are made from, and what they are.
INPUTS_OF_FIELDS = {
    "token_ids": ("input_ids", "token ids"),
    "modality": ("modality", "the modality of each token"),
}


def preflight(task: Task, choices: Sequence[RouterChoice]) -> None:
    """Build the task's model with each router on `meta`; raise ValueError for the first router that cannot be used."""
    sparse = task.recipe.sparse
    change = Change(
        sparse.experts,
        sparse.k,
        sparse.layers,
        sparse.hidden,
        copied=sparse.init == "copy",
        losses=Losses(balance=sparse.balance),
        shared=sparse.shared,
    )
    for choice in choices:
        with torch.device("meta"):
            model = task.dense()  # an error here is one of the recipe, not of a router
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the real model will warn
                sparsify_on_meta(model, Choice(choice.name, choice.router, choice.options, choice.k), change)
            for moe_layer in moe_layers(model):
                _require_readable(moe_layer.router, task)
        except ValueError as problem:
            raise ValueError(f"router {choice.name!r} cannot be trained with this recipe: {problem}") from problem


def _require_readable(router: Router | None, task: Task) -> None:
    """Raise ValueError if the router reads something that the inputs of this task do not have."""
    for field, (name, words) in INPUTS_OF_FIELDS.items():
        if router is not None and field in router.reads and name not in task.probe():
            raise ValueError(f"it reads {words}, which the inputs of this task do not have.")

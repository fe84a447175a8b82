"""Build every router of a run before the first one is trained, so that a mistake in the last one costs seconds.

The models are built on the `meta` device: with all sizes and without values, by the functions that build the real ones.
Nothing is written. No forward is run, because neither transformers' attention masks nor autocast work without values; what a
forward would refuse because the task cannot supply it is found from what routers declare that they read.
"""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.hub.layers import layer_infos, moe_layers
from holdfast.routing import Router
from holdfast.train.put_router import put_router
from holdfast.train.recipe import RouterChoice
from holdfast.train.task import Task

logger = logging.getLogger("holdfast")

# Fields of a `Context` that not every task supplies, the model's input that they are made from, and what they are.
INPUTS_OF_FIELDS = {
    "token_ids": ("input_ids", "token ids"),
    "modality": ("modality", "the modality of each token"),
}


def preflight(task: Task, choices: Sequence[RouterChoice], *, report_size: bool = True) -> None:
    """Build the task's model with each router on `meta`; raise ValueError for the first router that cannot be used.

    report_size     log what decides how long a step takes
    """
    for number, choice in enumerate(choices):
        with torch.device("meta"):
            model = task.initial_model()  # an error here is one of the recipe, not of a router
        if number == 0 and report_size:
            _report_size(task, model)
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the real model will warn
                put_router(model, task.recipe, choice)
            for moe_layer in moe_layers(model):
                _require_readable(moe_layer.router, task)
        except ValueError as problem:
            raise ValueError(f"router {choice.name!r} cannot be trained with this recipe: {problem}") from problem


def _report_size(task: Task, model: Any) -> None:
    """Log what decides how long a step takes, and a warning if it could be made shorter."""
    line, warning = task.size_line(model), task.size_warning(model)
    if line is not None:
        logger.info("%s.", line)
    if warning is not None:
        logger.warning("%s", warning)


def expert_count(task: Task) -> int:
    """Return the number of experts of a layer; the smallest if the recipe's checkpoint has layers that differ."""
    if task.recipe.sparse.experts is not None:
        return task.recipe.sparse.experts
    with torch.device("meta"):
        return min(info.experts for info in layer_infos(moe_layers(task.initial_model())))


def _require_readable(router: Router | None, task: Task) -> None:
    """Raise ValueError if the router reads something that the inputs of this task do not have."""
    for field, (name, words) in INPUTS_OF_FIELDS.items():
        if router is not None and field in router.reads and name not in task.probe():
            raise ValueError(f"it reads {words}, which the inputs of this task do not have.")

"""Build every router of a run before the first one is trained, so that a mistake in the last one costs seconds.

The models are built on the `meta` device: with all sizes and without values, by the functions that build the real ones.
Nothing is written. No forward is run, because neither transformers' attention masks nor autocast work without values; what a
forward would refuse because the task cannot supply it is found from what routers declare that they read.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from holdfast.hub.layers import layer_infos, moe_layers
from holdfast.model_size import in_gib, memory_for_training
from holdfast.planning.planning import CONFIG_ERRORS
from holdfast.routing import Router
from holdfast.train.put_router import put_router
from holdfast.train.recipe import RouterChoice
from holdfast.train.start import wrong_entries
from holdfast.train.task import Task, forward
from holdfast.train.trainer_loop import processes

logger = logging.getLogger("holdfast")

BYTES_PER_PARAMETER = 16  # a weight, its gradient and two moments in float32

# Fields of a `Context` that not every task supplies, the model's input that they are made from, and what they are.
INPUTS_OF_FIELDS = {
    "token_ids": ("input_ids", "token ids"),
    "modality": ("modality", "the modality of each token"),
}


def preflight(task: Task, choices: Sequence[RouterChoice], *, report_size: bool = True) -> None:
    """Build the task's model with each router on `meta`; raise ValueError for the first router that cannot be used.

    report_size     log what decides how long a step takes
    """
    built = []
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
        built.append(model)
    for model in built:
        _require_memory(task, model)


def _report_size(task: Task, model: Any) -> None:
    """Log what decides how long a step takes, and a warning if it could be made shorter."""
    line, warning = task.size_line(model), task.size_warning(model)
    if line is not None:
        logger.info("%s.", line)
    if warning is not None:
        logger.warning("%s", warning)


def _require_memory(task: Task, model: Any) -> None:
    """Raise ValueError if training needs more memory than there is, even if only the following is counted.

    For each parameter its weight, gradient and two moments of AdamW; for each example of a micro-batch its inputs and, of
    texts, the embeddings and the logits. Several ranks may share the parameters and do share the examples.
    """
    training, probe = task.recipe.training, task.probe()
    example = sum(tensor[0].numel() * tensor.element_size() for tensor in probe.values())
    if "input_ids" in probe:
        head = model.get_output_embeddings()
        width = model.get_input_embeddings().weight.shape[1] + (0 if head is None else head.weight.shape[0])
        example += probe["input_ids"].shape[1] * width * (2 if training.precision == "bf16" else 4)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    needed = (BYTES_PER_PARAMETER * parameters + training.batch * example) // processes()
    memory = memory_for_training()
    if memory is None or needed <= memory:
        return
    model_part, sparse = task.recipe.model, task.recipe.sparse
    sizes = {f"model.config.{name}": value for name, value in model_part.config.items() if type(value) is int}
    sizes |= {f"sparse.{name}": getattr(sparse, name) or 0 for name in ("experts", "hidden", "shared")}
    sizes |= {"training.batch": training.batch, "data.length": task.recipe.data.length}
    largest = max(sizes, key=lambda name: sizes[name])
    raise ValueError(
        f"{parameters:,} parameters and batches of {training.batch:,} need at least {in_gib(needed)} of memory, and there "
        f"are {in_gib(memory)}; make the model or training.batch smaller (the largest size is {largest}={sizes[largest]:,})."
    )


def explain_failed_forward(task: Task, problem: Exception) -> None:
    """Raise ValueError if a training failed because of the entries of `model.config`.

    They are the cause if the model, without routers, fails on one example too: sizes of a config may contradict each other
    without an error until the first forward.
    """
    config = task.recipe.model.config
    inputs = {name: tensor[:1] for name, tensor in task.probe().items()}

    def run(changed: Mapping[str, Any]) -> None:
        part = replace(task.recipe.model, config=dict(changed))
        forward(task.with_recipe(replace(task.recipe, model=part)).initial_model().train(), inputs)

    try:
        run(config)
    except (*CONFIG_ERRORS, ValueError):
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise ValueError(f"{wrong_entries(config, run)}: the model cannot run ({reason}).") from problem


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

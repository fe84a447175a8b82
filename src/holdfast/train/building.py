"""Build the model of a recipe with a router; and build all of a run before the first is trained.

put_router    `sparsify` a dense model, `reroute` one that has experts
build_model   a fresh model with a router; weights that two routers share start bit-identical
preflight     build every router of a run on the `meta` device, with all sizes and without values, by the functions that
              build the real ones, so that a mistake in the last router costs seconds. Nothing is written. No forward is
              run, because neither transformers' attention masks nor autocast work without values; what a forward would
              refuse because the task cannot supply it is found from what routers declare that they read
"""

import hashlib
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from holdfast.certificates.margins import require_trainable
from holdfast.hub import reroute, sparsify
from holdfast.hub.convert import choose_in_parts, choose_layers, routers_in_parts, set_losses
from holdfast.hub.families import DENSE_FAMILIES, VISION_LANGUAGE_FAMILIES
from holdfast.hub.install import specs_of
from holdfast.hub.layers import (
    feed_forward_layers,
    find_submodule,
    is_moe,
    layer_infos,
    mixer_of,
    moe_family,
    moe_layers,
)
from holdfast.hub.parts import vision_language_family
from holdfast.hub.replacements import SparseLayer
from holdfast.hub.second_view import require_no_noise, require_views_differ
from holdfast.hub.specs import LayerSpec
from holdfast.layers.losses import Losses
from holdfast.model_size import in_gib, memory_for_training
from holdfast.planning.planning import CONFIG_ERRORS
from holdfast.routing import Router
from holdfast.routing.presets import resolve_layers, shared_k
from holdfast.train.certified_predictions import require_certifiable
from holdfast.train.recipe import Recipe, RouterChoice, SparsePart
from holdfast.train.robust_step import require_one_sequence
from holdfast.train.start import wrong_entries
from holdfast.train.task import Task, forward
from holdfast.train.trainer_loop import processes


def with_training(task: Task, choice: RouterChoice) -> Task:
    """Return the task with the recipe that this router is trained with."""
    return task.with_recipe(choice.recipe(task.recipe))


def put_router(model: Any, recipe: Recipe, choice: RouterChoice) -> bool:
    """Give the model the router, in place; return whether the model was dense and has new experts now."""
    sparse, losses = recipe.sparse, Losses(**asdict(recipe.losses))
    k = shared_k(choice.router, sparse.k) if choice.k is None else choice.k
    was_dense = not is_moe(model)
    if was_dense:
        if sparse.experts is None:
            raise ValueError(f"{recipe.model.checkpoint} is a dense model: set sparse.experts to the number of experts.")
        sizes: dict[str, Any] = {name: getattr(sparse, name) for name in ("experts", "hidden", "shared", "layers", "parts")}
        how: dict[str, Any] = {"init": initial_experts(recipe), "losses": losses, "router_options": choice.options}
        sparsify(model, k=k, router=choice.router, **sizes, **how)
    else:
        _require_no_contradiction(sparse, model, recipe.model.checkpoint)
        if _has_router(model, choice, k):
            set_losses(model, losses)
        else:
            reroute(model, choice.router, k=k, losses=losses, **choice.options)
    # Refuse now what the first training step would refuse.
    if losses.distillation and any(getattr(layer.block, "teacher", None) is None for layer in moe_layers(model)):
        raise ValueError(
            "losses.distillation compares experts with the dense network that they are copies of, and this recipe has none: "
            "start from a dense checkpoint with sparse.init=copy, or set losses.distillation to 0."
        )
    if losses.consistency:
        require_views_differ(model, losses.word_noise)
    return was_dense


def initial_experts(recipe: Recipe) -> str:
    """Return how experts start, "copy" or "random": by default those of a checkpoint are copies of its dense networks."""
    return recipe.sparse.init or ("copy" if recipe.model.checkpoint is not None else "random")


def _has_router(model: Any, choice: RouterChoice, k: int | None) -> bool:
    """Return whether every MoE layer has this router already, with these options: then it keeps its state."""
    specs, found = specs_of(model), moe_layers(model)
    wanted = routers_in_parts(resolve_layers(choice.router, dict(choice.options), k=k), found)
    for layer, one in zip(found, wanted, strict=True):
        spec = specs.get(layer.name)
        if spec is None or one is None:
            return False
        other = LayerSpec(one.router, spec.k if one.k is None else one.k, one.options)
        if (spec.router, spec.k, spec.options) != (other.router, other.k, other.options):
            return False
    return True


def _require_no_contradiction(sparse: SparsePart, model: Any, checkpoint: str | None) -> None:
    """Raise ValueError if the section `sparse` describes other experts than the model has."""
    found, specs = moe_layers(model), specs_of(model)
    own: dict[str, set[Any]] = {
        "experts": {info.experts for info in layer_infos(found)},
        "hidden": {layer.experts.down_proj.shape[-1] for layer in found if hasattr(layer.experts, "down_proj")},
        "shared": {spec.shared for spec in specs.values()},
    }
    for name, values in own.items():
        given = getattr(sparse, name)
        if given is not None and values != {given}:
            has = " and ".join(sorted(map(str, values))) or "its own"
            raise ValueError(f"sparse.{name} is {given}, and {checkpoint} has {has} already; {_leave_out(name)}.")
    parts = sorted({str(layer.part) for layer in found})
    if sparse.parts is not None and sorted(set(sparse.parts)) != parts:
        raise ValueError(f"sparse.parts is {sparse.parts}, and {checkpoint} has experts in {parts}; {_leave_out('parts')}.")
    if sparse.init is not None:
        raise ValueError(f"sparse.init is for dense models, and {checkpoint} has experts; {_leave_out('init')}.")
    if sparse.layers != "all" and _chosen(sparse, model) != [layer.name for layer in found]:
        raise ValueError(
            f"sparse.layers is {sparse.layers}, and {checkpoint} has experts in other layers; {_leave_out('layers', 'all')}."
        )


def _leave_out(name: str, value: str = "null") -> str:
    return f"leave it out (--set sparse.{name}={value})"


def _chosen(sparse: SparsePart, model: Any) -> list[str]:
    """Return the names of the layers that `sparse.layers` chooses among all transformer layers of the parts with experts."""
    if model.config.model_type in (*DENSE_FAMILIES, *VISION_LANGUAGE_FAMILIES):
        parts = {layer.part for layer in moe_layers(model)}
        found = [layer for layer in feed_forward_layers(model).values() if layer.part in parts]
        return [layer.name for layer in choose_in_parts(sparse.layers, found)]
    family, names = moe_family(model), list[str]()
    for name, module in model.named_modules():
        if mixer_of(family, module) is not None and find_submodule(module, family.block) is not None:
            names.append(f"{name}.{family.block}")
    return [names[index] for index in choose_layers(sparse.layers, len(names))]


def build_model(task: Task, name: str, options: Mapping[str, Any], *, seed: int, k: int | None = None) -> Any:
    """Return the recipe's model with a router. Weights that two routers have in common start bit-identical."""
    torch.manual_seed(seed)
    model = task.initial_model()
    was_dense = put_router(model, task.recipe, RouterChoice(name, name, options, k))
    # Routers that ask for it (`hash[balanced=true]`) read how often each token id occurs in the training data.
    routers = [module for module in model.modules() if isinstance(module, Router)]
    counted = [router for router in routers if any(part.declares.wants_token_counts for part in router.parts)]
    if counted and (counts := task.token_counts()) is not None:
        for router in counted:
            router.use_token_counts(counts)
    if was_dense:
        std = float(getattr(model.config, "initializer_range", 0.02))
        _draw_shared_weights(model, seed, std, experts=initial_experts(task.recipe) == "random")
    return model


@torch.no_grad()
def _draw_shared_weights(model: nn.Module, seed: int, std: float, *, experts: bool) -> None:
    """Draw scores, and `experts` too, each from the seed and its own name, whatever else the router draws."""
    in_routers, in_layers = (
        {id(parameter) for module in model.modules() if isinstance(module, kind) for parameter in module.parameters()}
        for kind in (Router, SparseLayer)
    )
    for name, parameter in model.named_parameters():
        common_name = name.replace(".score.base.", ".score.")  # AC wraps the score it clusters
        digest = hashlib.sha256(f"{seed} {common_name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
        is_expert = id(parameter) in in_layers and (".experts." in name or ".shared." in name)
        if experts and is_expert and not name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        elif id(parameter) in in_routers and common_name.endswith("router.score.weight"):
            bound = 1 / math.sqrt(parameter.shape[1])
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)


logger = logging.getLogger("holdfast")

BYTES_PER_PARAMETER = 16  # a weight, its gradient and two moments in float32

# Fields of a `Context` that not every task supplies, the model's input that they are made from, and what they are.
INPUTS_OF_FIELDS = {"token_ids": ("input_ids", "token ids"), "modality": ("modality", "the modality of each token")}


def preflight(task: Task, choices: Sequence[RouterChoice], *, report_size: bool = True) -> None:
    """Build the task's model with each router on `meta`; raise ValueError for the first router that cannot be used.

    report_size     log what decides how long a step takes
    """
    built = []
    for number, choice in enumerate(choices):
        with torch.device("meta"):
            model = task.initial_model()  # an error here is one of the recipe, not of a router
        if number == 0 and report_size:
            if (line := task.size_line(model)) is not None:
                logger.info("%s.", line)
            if (warning := task.size_warning(model)) is not None:
                logger.warning("%s", warning)
        try:
            recipe = choice.recipe(task.recipe)
            with torch.device("meta"), warnings.catch_warnings(action="ignore"):  # the real model will warn
                put_router(model, recipe, choice)
            require_one_sequence(model, recipe.robust)
            require_certifiable(model, task, choice.name)
            if recipe.losses.consistency or recipe.robust.compares_gates:
                require_no_noise(model)
            for router in filter(None, (layer.router for layer in moe_layers(model))):
                for field, (name, words) in INPUTS_OF_FIELDS.items():
                    knows_modality = field == "modality" and vision_language_family(model) is not None
                    if field in router.reads and name not in task.probe() and not knows_modality:
                        raise ValueError(f"it reads {words}, which the inputs of this task do not have.")
                if recipe.losses.margin:
                    require_trainable(router)
        except ValueError as problem:
            raise ValueError(f"router {choice.name!r} cannot be trained with this recipe: {problem}") from problem
        built.append(model)
    for model in built:
        _require_memory(task, model)


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

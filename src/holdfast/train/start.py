"""The model that a run starts from: the same weights for every router, wherever shapes agree."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from holdfast.hub import sparsify
from holdfast.losses import Losses
from holdfast.routing import Router
from holdfast.train.task import Task


def start(task: Task, router: str, options: Mapping[str, Any], *, seed: int, k: int | None = None) -> Any:
    """A fresh model with a router. What two routers have in common starts equal, to the bit."""
    import transformers

    recipe = task.recipe
    if recipe.model.family not in transformers.CONFIG_MAPPING:
        raise ValueError(f"transformers knows no model family {recipe.model.family!r}.")
    torch.manual_seed(seed)
    model = task.dense()
    sparse = recipe.sparse
    sparsify(
        model,
        experts=sparse.experts,
        k=sparse.k if k is None else k,
        hidden=sparse.hidden,
        layers=sparse.layers,
        init=sparse.init,
        router=router,
        losses=Losses(balance=sparse.balance),
        router_options=options,
    )
    if sparse.init == "random":
        _start_equal(model, seed, float(getattr(model.config, "initializer_range", 0.02)))
    return model


@torch.no_grad()
def _start_equal(model: nn.Module, seed: int, spread: float) -> None:
    """Draw experts and scores anew, each from its own name and the seed: what else a router draws cannot shift them."""
    in_routers = {
        id(parameter) for module in model.modules() if isinstance(module, Router) for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        plain = name.replace(".score.base.", ".score.")  # AC wraps the score it clusters
        generator = torch.Generator().manual_seed(_number(plain, seed))
        if ".experts." in name and not name.endswith("_bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
        elif id(parameter) in in_routers and plain.endswith("router.score.weight"):
            bound = 1 / math.sqrt(parameter.shape[1])
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)


def _number(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "big")

"""The model under audit: its MoE layers, what routes in each, and how a forward of it is made."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.auditing.offloading import device_of
from holdfast.certificates import Gate
from holdfast.hub.sites import Site, sites
from holdfast.hub.trace import watched
from holdfast.hub.usable import require_known
from holdfast.metrics import Boundary, boundary_of, levels_of
from holdfast.routing import Router


@final
class Audited:
    """A Hugging Face model with MoE layers. A `ValueError` says why where it is none."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.sites: list[Site] = sites(model)
        self.routes: list[nn.Module] = [module for _, module, _ in watched(model)]
        self.names: list[str] = [name for name, _, _ in watched(model)]
        self._takes = inspect.signature(model.forward).parameters
        self._cached = "use_cache" in self._takes or hasattr(model.config, "use_cache")

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def predicts_next(self) -> bool:
        """Is it a causal language model?"""
        name = type(self.model).__name__
        return "CausalLM" in name or "LMHead" in name

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in self._takes

    @property
    def pad(self) -> int:
        return int(getattr(self.model.config, "pad_token_id", None) or 0)

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        """On the model's device and, for pixels, in its dtype; nothing is cached."""
        if "input_ids" in inputs:
            require_known(self.model, inputs["input_ids"])
        moved = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        moved = {name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor for name, tensor in moved.items()}
        options = {"use_cache": False} if self._cached and "input_ids" in inputs else {}
        return self.model(**moved, **options)

    def core(self, layer: int) -> int | None:
        """Return how many of the best experts are compared as a token's set; None is all that it uses."""
        router = self.sites[layer].router
        return None if router is None else router.select.core

    def boundaries(self) -> dict[int, Boundary]:
        found = {}
        for layer, site in enumerate(self.sites):
            if site.router is not None:
                found[layer] = boundary_of(site.router)
            elif site.family is not None:
                found[layer] = Boundary(levels=levels_of(site.family.rule(site.gate)))
        return found

    def certified(self, layer: int) -> Router | Gate:
        """What a certificate is about: our router, or the plain weights and the rule of a family's gate."""
        site = self.sites[layer]
        if site.router is not None:
            return site.router
        assert site.family is not None
        gate, family = site.gate, site.family
        bias = None if family.bias is None else getattr(gate, family.bias)
        return Gate(getattr(gate, family.weight), int(gate.top_k), bias=bias, rule=family.rule(gate))

    def scorers(self) -> list[nn.Module]:
        """The modules that hold the routers' weights."""
        return [self.routes[layer] if site.family is None else site.gate for layer, site in enumerate(self.sites)]

    def describe(self, name: str | None) -> dict[str, Any]:
        config = self.model.config
        return {
            "name": name or getattr(config, "_name_or_path", None) or type(self.model).__name__,
            "type": config.model_type,
            "class": type(self.model).__name__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "layers": self.names,
            "experts": [site.size[1] for site in self.sites],
            "routers": ["native" if site.router is None else _parts(site.router) for site in self.sites],
        }


def _parts(router: Router) -> str:
    return " ".join(type(part).__name__ for part in router.parts)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation and without gradients; every module is left in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def weights_as(modules: list[nn.Module], dtype: torch.dtype, *, only_rounded: bool = False) -> Iterator[None]:
    """Inside the `with`, floating-point weights are in `dtype`, or rounded to it and back; then bit for bit as they were."""
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    kept = [(parameter, parameter.data) for parameter in parameters.values() if parameter.is_floating_point()]
    try:
        for parameter, data in kept:
            rounded = data.to(dtype)
            parameter.data = rounded.to(data.dtype) if only_rounded else rounded
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data

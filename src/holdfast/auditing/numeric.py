"""Perturbations of numbers: the same forward again, noise at the routers, shorter numbers, other kernels."""

from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from holdfast.attacks.seeds import mixed
from holdfast.auditing.comparing import Tally
from holdfast.auditing.observing import Observation, observe
from holdfast.auditing.perturbation import Perturbation
from holdfast.auditing.rounding import DTYPES, rounded
from holdfast.auditing.samples import Sample
from holdfast.auditing.subject import Audited, weights_as


@final
class Again(Perturbation):
    """The same forward twice: a model in evaluation must say the same."""

    name, about = "none", "the same forward a second time"
    harmless: ClassVar[bool] = True

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        into.compare(clean, observe(audited, sample))


@final
class Noise(Perturbation):
    """Every router's input plus Gaussian noise of a share of its length: x + level |x| e / sqrt(d), e standard normal."""

    def __init__(self, level: float, seed: int) -> None:
        self.level, self.seed = level, seed
        self.name, self.about = f"noise.{level:g}", f"router inputs with noise of {level:g} of their length"

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        into.compare(clean, observe(audited, sample, moved=partial(self._moved, sample.number)))

    def _moved(self, batch: int, layer: int, tokens: Tensor) -> Tensor:
        # Drawn on the CPU: the same on every device, and the same for every router that is put into the model.
        source = torch.Generator().manual_seed(mixed(self.seed, "noise", self.level, batch, layer))
        noise = torch.randn(tokens.shape, generator=source).to(tokens.device)
        size = tokens.float().norm(dim=-1, keepdim=True) * self.level / tokens.shape[-1] ** 0.5
        return (tokens.float() + size * noise).to(tokens.dtype)


@final
class RoutingDtype(Perturbation):
    """Router inputs and weights rounded to a shorter dtype, everything else as it was."""

    def __init__(self, dtype: str) -> None:
        self.dtype = DTYPES[dtype]
        self.name, self.about = f"routing.{dtype}", f"router inputs and weights rounded to {dtype}"

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        with weights_as(audited.scorers(), self.dtype, only_rounded=True):
            into.compare(clean, observe(audited, sample, moved=lambda layer, tokens: rounded(tokens, self.dtype)))


@final
class ModelDtype(Perturbation):
    """The whole model in another dtype: bfloat16, or float32 where it is short already."""

    def __init__(self, audited: Audited) -> None:
        self.dtype = torch.bfloat16 if audited.dtype == torch.float32 else torch.float32
        short = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        self.name, self.about = f"model.{short}", f"the whole model in {short}"

    def unavailable(self, audited: Audited, sample: Sample) -> str | None:
        if any(parameter.is_meta for parameter in audited.model.parameters()):
            return "some weights are on disk; they cannot be held in another dtype meanwhile."
        return None

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        with weights_as([audited.model], self.dtype):
            into.compare(clean, observe(audited, sample))


@final
class Backend(Perturbation):
    """The experts computed by another of transformers' functions: eager against grouped_mm."""

    def __init__(self, audited: Audited) -> None:
        self.current = getattr(audited.model.config, "_experts_implementation", None)
        self.other = "grouped_mm" if self.current == "eager" else "eager"
        self.name, self.about = "backend", f"experts by {self.other} instead of {self.current}"

    def unavailable(self, audited: Audited, sample: Sample) -> str | None:
        if any(site.family is None for site in audited.sites):
            return "its experts are Holdfast's own, which have one implementation for each device."
        if not hasattr(audited.model, "set_experts_implementation") or self.current is None:
            return "this transformers has one implementation of its experts."
        if any(site.router is not None and site.router.select.ragged for site in audited.sites):
            return "its routers leave slots unused, which only Holdfast's own experts function takes."
        return None

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        audited.model.set_experts_implementation(self.other)
        try:
            into.compare(clean, observe(audited, sample))
        finally:
            audited.model.set_experts_implementation(self.current)

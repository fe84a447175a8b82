"""What every perturbation has: a name, a line about it, a reason where it cannot be run, and how it is run.

Perturbations of numbers: the same forward again, noise at the routers, shorter numbers, other kernels.

Perturbations of a token's company: the sequences it shares a batch with, and padding. None of it is about the token.

Perturbations of texts: words swapped or misspelt. What is compared are the tokens that were left alone.

The perturbation that looks for the worst: each router's inputs moved, within a budget, so that tokens change experts.
"""

import warnings
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor

from holdfast.attacks import AttackedText, AttackWarning, attack_routes, misspell, swap_words, words_in
from holdfast.attacks.threat import mixed
from holdfast.auditing.differences import Rows, Tally
from holdfast.auditing.layer_certificates import DTYPES, ask, in_its_dtype, rounded
from holdfast.auditing.observation import Observation, observe
from holdfast.auditing.subject import Audited, Reader, Sample, weights_as
from holdfast.data import Vocabulary
from holdfast.metrics.tasks import IGNORED
from holdfast.routing import Router


class Perturbation(ABC):
    """Compares a perturbed forward with the clean one on the same tokens (abstract)."""

    name: str  # in the report
    about: str
    harmless: ClassVar[bool] = False  # it asks for the same numbers: any change at all is a fault

    def unavailable(self, audited: Audited, sample: Sample) -> str | None:
        """Why it cannot be run on this model and these inputs; None where it can."""
        return None

    @abstractmethod
    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        """One batch. Whatever it changes in the model is back as it was when it returns or raises."""


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


PADDED = 5  # tokens of padding: not a multiple of anything that kernels like


@final
class Alone(Perturbation):
    """Each sequence by itself, without padding, against the batch it was in."""

    name, about = "batch.alone", "each sequence alone against the whole batch"
    harmless: ClassVar[bool] = True

    def unavailable(self, audited: Audited, sample: Sample) -> str | None:
        mask = clean_mask(sample)
        if sample.size == 1 and (mask is None or bool(mask.all())):
            return "every batch is one sequence without padding, which is alone already."
        return None

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        mask = clean_mask(sample)
        for sequence in range(sample.size):
            real = None if mask is None else mask[sequence].bool().nonzero().flatten()
            if real is not None and not len(real):
                continue
            seen = observe(audited, _one(sample, sequence, real))
            rows = [self._rows(clean, layer, sequence, real) for layer in range(len(clean.layers))]
            if clean.predictions is None or clean.predictions.per_token:
                into.compare(clean, seen, rows)
                continue
            for layer, pair in enumerate(rows):
                into.compare_layer(layer, clean, seen, pair)
            into.compare_pictures(clean, seen, (torch.tensor([sequence]), torch.tensor([0])))

    def _rows(self, clean: Observation, layer: int, sequence: int, real: Tensor | None) -> Rows:
        length = len(clean.layers[layer].tokens) // clean.sequences  # windowed models have other lengths further up
        device = clean.layers[layer].tokens.device
        places = torch.arange(length, device=device) if real is None else real.to(device)
        return sequence * length + places, torch.arange(len(places), device=device)


@final
class Padded(Perturbation):
    """The same batch with more padding, before or after."""

    harmless: ClassVar[bool] = True

    def __init__(self, side: Literal["left", "right"]) -> None:
        self.side = side
        self.name, self.about = f"batch.{side}", f"{PADDED} more tokens of padding on the {side}"

    def unavailable(self, audited: Audited, sample: Sample) -> str | None:
        if sample.ids is None:
            return "pictures have no padding."
        if sample.inputs.keys() - {"input_ids", "attention_mask", "token_type_ids"}:
            return "its inputs hold more than tokens and their mask, which cannot be padded here."
        if not audited.takes_positions and self.side == "left":
            return "its forward takes no position_ids, so that padding on the left would move every token."
        return None

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        assert sample.ids is not None
        length = sample.ids.shape[1]
        mask = torch.ones_like(sample.ids) if clean_mask(sample) is None else sample.inputs["attention_mask"]
        inputs = {name: self._pad(tensor, 0) for name, tensor in sample.inputs.items()}
        inputs |= {"input_ids": self._pad(sample.ids, audited.pad), "attention_mask": self._pad(mask, 0)}
        if audited.takes_positions:
            inputs["position_ids"] = (inputs["attention_mask"].long().cumsum(1) - 1).clamp_min(0)
        labels = None if sample.labels is None else self._pad(sample.labels, IGNORED)
        seen = observe(audited, replace(sample, inputs=inputs, labels=labels))
        first = clean.real(0)
        shift = PADDED if self.side == "left" else 0
        there = first // length * (length + PADDED) + first % length + shift
        into.compare(clean, seen, [(first, there)] * len(clean.layers))

    def _pad(self, tensor: Tensor, value: int) -> Tensor:
        more = tensor.new_full((tensor.shape[0], PADDED), value)
        return torch.cat([more, tensor] if self.side == "left" else [tensor, more], dim=1)


def clean_mask(sample: Sample) -> Tensor | None:
    mask = sample.inputs.get("attention_mask")
    return mask if mask is not None and mask.dim() == 2 else None


def _one(sample: Sample, sequence: int, real: Tensor | None) -> Sample:
    def cut(name: str, tensor: Tensor) -> Tensor:
        row = tensor[sequence : sequence + 1]
        return row if real is None or tensor.dim() != 2 or tensor.shape[1] <= int(real.max()) else row[:, real]

    inputs = {name: cut(name, tensor) for name, tensor in sample.inputs.items()}
    return replace(sample, inputs=inputs, labels=None if sample.labels is None else cut("labels", sample.labels))


@final
class Words(Perturbation):
    """Some words of each text replaced. A token is compared where its characters, and it, are the same in both texts."""

    def __init__(self, name: str, reader: Reader | None, rate: float, seed: int, length: int) -> None:
        self.name, self.reader, self.rate, self.seed, self.length = name, reader, rate, seed, length
        how = "swapped for other words of the texts" if name == "words" else "misspelt"
        self.about = f"{rate:.0%} of the words {how}; of the tokens left alone"

    def unavailable(self, audited: Audited, sample: Sample) -> str | None:
        if sample.texts is None or self.reader is None:
            return "there are no texts, only inputs."
        if sample.spans is None:
            return "the tokenizer is slow and does not say where its tokens are in a text."
        return None

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        assert sample.texts is not None and sample.spans is not None and self.reader is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttackWarning)
            attacked = self._attacked(sample)
        if attacked is None or not attacked.changed:
            return
        changed = self.reader.batch(sample.number, attacked.texts, self.length)
        first, second = aligned(sample, changed, attacked)
        device = clean.layers[0].tokens.device
        rows: Rows = (first.to(device), second.to(device))
        into.compare(clean, observe(audited, changed), [rows] * len(clean.layers))
        into.details.append({"words": sum(attacked.words), "changed": attacked.changed, "checksum": attacked.checksum})

    def _attacked(self, sample: Sample) -> AttackedText | None:
        assert sample.texts is not None and self.reader is not None
        if self.name == "typos":
            return misspell(sample.texts, rate=self.rate, seed=self.seed)
        # Words that the model knows: an unknown one is easy to predict, and would not show what a swap costs.
        words = [word for word in words_in(sample.texts) if self.reader.knows(word)]
        if len({word.lower() for word in words}) < 2:
            return None
        pieces = sample.spans if isinstance(self.reader.tokenizer, Vocabulary) else None
        return swap_words(sample.texts, rate=self.rate, seed=self.seed, words=words, pieces=pieces)


def aligned(before: Sample, after: Sample, attacked: AttackedText) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the two batches that hold the same untouched token at the same place of the text."""
    assert before.ids is not None and after.ids is not None and before.spans is not None and after.spans is not None
    first, second = [], []
    for document, (old, new) in enumerate(zip(before.spans, after.spans, strict=True)):
        real, there = (np.flatnonzero(spans[:, 0] < spans[:, 1]) for spans in (old, new))
        shared = attacked.shared(document, old[real], new[there])
        places = torch.from_numpy(real[shared[0]]), torch.from_numpy(there[shared[1]])
        same = before.ids[document, places[0]] == after.ids[document, places[1]]
        first.append(document * before.ids.shape[1] + places[0][same])
        second.append(document * after.ids.shape[1] + places[1][same])
    return torch.cat(first), torch.cat(second)


STEPS = 5


@final
class Attack(Perturbation):
    """PGD on a few sequences of the first batch, layer by layer: the router's input moves, what its experts get does not.

    Each layer is attacked by itself in the clean forward. Predictions are those of a forward in which all layers' router
    inputs are moved as these attacks found.
    """

    def __init__(self, budget: float, tokens: int, seed: int) -> None:
        self.budget, self.tokens, self.seed = budget, tokens, seed
        self.name = "attack"
        self.about = f"router inputs of about {tokens} tokens moved by up to {budget:g} of their length, at worst"

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        if sample.number:
            return
        few = self._few(sample, clean)
        seen = observe(audited, few)
        moves = []
        for layer, record in enumerate(seen.layers):
            moved, summary = self._moved(seen, layer)
            moves.append(moved - seen.calls[layer].tokens)
            routing = ask(seen.calls[layer], moved)
            tokens = record.tokens
            experts, weights = routing.experts.to(tokens.device), routing.weights.to(tokens.device, record.weights)
            routed = audited.sites[layer].experts(tokens, experts, weights)
            after = replace(record, routing=routing, routed=routed, output=record.output + (routed - record.routed))
            there = replace(seen, layers=[*seen.layers[:layer], after, *seen.layers[layer + 1 :]])
            into.compare_layer(layer, seen, there, (seen.real(layer), seen.real(layer)))
            into.details.append({"layer": layer, **summary})
        into.compare_predictions(seen, observe(audited, few, moved=lambda layer, tokens: tokens + moves[layer]))

    def _few(self, sample: Sample, clean: Observation) -> Sample:
        """Whole sequences, the first of them, since tokens may inform each other."""
        length = len(clean.layers[0].tokens) // clean.sequences
        count = max(1, self.tokens // length)
        inputs = {name: tensor[:count] for name, tensor in sample.inputs.items()}
        return replace(sample, inputs=inputs, labels=None if sample.labels is None else sample.labels[:count])

    def _moved(self, seen: Observation, layer: int) -> tuple[Tensor, dict[str, Any]]:
        call, tokens = seen.calls[layer], seen.calls[layer].tokens
        real = torch.zeros(tokens.shape[:-1].numel(), dtype=torch.bool, device=tokens.device)
        real[seen.real(layer)] = True
        route: Any = call.route
        options: dict[str, Any] = {"context": call.context}
        if not isinstance(route, Router):  # a family's gate: looks at one token at a time, in its own dtype
            route, options = partial(in_its_dtype, call.route, tokens.dtype), {"joint": False}
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore", AttackWarning)
            found = attack_routes(
                route,
                tokens.float(),
                budget=self.budget,
                relative=True,
                token_mask=real.view(tokens.shape[:-1]),
                steps=STEPS,
                rounds=0,
                bisections=4,
                seed=self.seed,
                **options,
            )
        kept = ("rate", "tokens", "smallest", "median", "budget", "norm", "relative", "joint", "steps", "seed", "flags")
        summary = found.summary()
        return found.inputs.to(tokens.dtype), {name: summary[name] for name in kept}

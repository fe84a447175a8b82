"""The perturbations of an audit. Each runs a perturbed forward and compares it with the clean forward of the same tokens.

What each perturbs:

    Repeat                        nothing: the same forward again
    Noise                         Gaussian noise on the inputs of routers
    RoutingDtype, ModelDtype      routers, or the whole model, in another dtype
    Backend                       experts computed by another kernel
    SingleSequence, ExtraPadding  the other sequences and the padding of the batch
    WordChanges                   words swapped, misspelt or attacked by a plugin; only untouched tokens are compared
    LostExpert                    the most used expert of each layer, whose gate is 0 before selection
    Attack                        the inputs of routers perturbed within a budget, so that as many tokens as possible flip
"""

import warnings
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor

from holdfast.attacks import AttackedText, AttackWarning, attack_routes, attack_texts, find_attack, words_in
from holdfast.attacks.threat import derived_seed
from holdfast.auditing.forwards import ForwardComparison, Observation, Rows, observe
from holdfast.auditing.layer_certificates import call_in_dtype, rounded, route_again
from holdfast.auditing.model_and_data import AuditBatch, AuditedModel, TextEncoder, labelled_batch, weights_in_dtype
from holdfast.auditing.reports import DTYPES
from holdfast.data import Vocabulary
from holdfast.data.labelled_texts import with_texts
from holdfast.hub import disable
from holdfast.hub.disabling import routed_layers
from holdfast.hub.replacements import needs_holdfast_experts
from holdfast.metrics.tasks import IGNORED
from holdfast.routing import Router

PADDED = 5  # tokens of extra padding per sequence; not a multiple of a kernel's block size
QUICK = {"steps": 5, "rounds": 0, "bisections": 4}  # of the attack


class Perturbation(ABC):
    """One way to perturb a model or its inputs (abstract)."""

    name: str  # in the report
    about: str  # one line for the report
    harmless: ClassVar[bool] = False  # True: results should not change, so any flip is a defect of the model

    def unavailable(self, audited: AuditedModel, batch: AuditBatch) -> str | None:
        """Return why this perturbation cannot be run on this model and these inputs; None if it can."""
        return None

    @abstractmethod
    def run(self, audited: AuditedModel, batch: AuditBatch, clean: Observation, comparison: ForwardComparison) -> None:
        """Perturb one batch and add the changes to `comparison`. The model is restored afterwards, also after an error."""


@final
class Repeat(Perturbation):
    """Run the same forward twice: a model in evaluation mode must give the same result."""

    name, about = "none", "the same forward a second time"
    harmless: ClassVar[bool] = True

    def run(self, audited: AuditedModel, batch: AuditBatch, clean: Observation, comparison: ForwardComparison) -> None:
        comparison.compare(clean, observe(audited, batch))


@final
class Noise(Perturbation):
    """Add Gaussian noise to every router's input: x + level |x| e / sqrt(d), e standard normal."""

    def __init__(self, level: float, seed: int) -> None:
        self.level, self.seed = level, seed
        self.name, self.about = f"noise.{level:g}", f"router inputs with noise of {level:g} of their length"

    def run(self, audited: AuditedModel, batch: AuditBatch, clean: Observation, comparison: ForwardComparison) -> None:
        comparison.compare(clean, observe(audited, batch, perturb_input=partial(self._perturbed_input, batch.number)))

    def _perturbed_input(self, batch: int, layer: int, tokens: Tensor) -> Tensor:
        # Drawn on the CPU with a fixed seed: the noise of a layer is the same on every device and with every router.
        source = torch.Generator().manual_seed(derived_seed(self.seed, "noise", self.level, batch, layer))
        noise = torch.randn(tokens.shape, generator=source).to(tokens.device)
        size = tokens.float().norm(dim=-1, keepdim=True) * self.level / tokens.shape[-1] ** 0.5
        return (tokens.float() + size * noise).to(tokens.dtype)


@final
class RoutingDtype(Perturbation):
    """Round only router inputs and router weights to a dtype with fewer bits."""

    def __init__(self, dtype: str) -> None:
        self.dtype = DTYPES[dtype]
        self.name, self.about = f"routing.{dtype}", f"router inputs and weights rounded to {dtype}"

    def run(self, audited: AuditedModel, batch: AuditBatch, clean: Observation, comparison: ForwardComparison) -> None:
        with weights_in_dtype(audited.scorers(), self.dtype, only_rounded=True):
            perturbed = observe(audited, batch, perturb_input=lambda layer, tokens: rounded(tokens, self.dtype))
            comparison.compare(clean, perturbed)


@final
class ModelDtype(Perturbation):
    """Run the whole model in another dtype: bfloat16, or float32 if the model is not in float32."""

    def __init__(self, audited: AuditedModel) -> None:
        self.dtype = torch.bfloat16 if audited.model.dtype == torch.float32 else torch.float32
        short = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        self.name, self.about = f"model.{short}", f"the whole model in {short}"

    def unavailable(self, audited: AuditedModel, batch: AuditBatch) -> str | None:
        is_offloaded = any(parameter.is_meta for parameter in audited.model.parameters())
        return "some weights are offloaded to disk, so the model cannot be run in another dtype." if is_offloaded else None

    def run(self, audited: AuditedModel, batch: AuditBatch, clean: Observation, comparison: ForwardComparison) -> None:
        with weights_in_dtype([audited.model], self.dtype), warnings.catch_warnings():
            # Twenty lines of C++, on CPUs without bfloat16: PyTorch then computes it in another way.
            warnings.filterwarnings("ignore", "mkldnn_matmul failed")
            comparison.compare(clean, observe(audited, batch))


@final
class Backend(Perturbation):
    """Run the experts with another implementation of transformers: grouped_mm if it is eager now, otherwise eager."""

    def __init__(self, audited: AuditedModel) -> None:
        self.current = getattr(audited.model.config, "_experts_implementation", None)
        self.other = "grouped_mm" if self.current == "eager" else "eager"
        self.name, self.about = "backend", f"experts by {self.other} instead of {self.current}"

    def unavailable(self, audited: AuditedModel, batch: AuditBatch) -> str | None:
        if any(site.family is None for site in audited.moe_layers):
            return "the model's experts are Holdfast's own, which have one implementation per device."
        if not hasattr(audited.model, "set_experts_implementation") or self.current is None:
            return "this version of transformers has only one implementation of its experts."
        if any(needs_holdfast_experts(site.router) for site in audited.moe_layers):
            return "its routers leave slots unused or scale gradients, which only Holdfast's own experts function supports."
        return None

    def run(self, audited: AuditedModel, batch: AuditBatch, clean: Observation, comparison: ForwardComparison) -> None:
        audited.model.set_experts_implementation(self.other)
        try:
            comparison.compare(clean, observe(audited, batch))
        finally:
            audited.model.set_experts_implementation(self.current)


@final
class SingleSequence(Perturbation):
    """Run each sequence alone and without padding."""

    name, about = "batch.alone", "each sequence alone against the whole batch"
    harmless: ClassVar[bool] = True

    def unavailable(self, audited: AuditedModel, batch: AuditBatch) -> str | None:
        if any(tensor.shape[:1] != (batch.size,) for tensor in batch.inputs.values()):
            return "an input does not have one row for each sequence (as packed images), so no sequence can be taken out."
        is_alone = batch.size == 1 and (batch.token_mask is None or bool(batch.token_mask.all()))
        return "every batch is already one sequence without padding." if is_alone else None

    def run(self, audited: AuditedModel, batch: AuditBatch, clean: Observation, comparison: ForwardComparison) -> None:
        mask = batch.token_mask
        for sequence in range(batch.size):
            real = None if mask is None else mask[sequence].bool().nonzero().flatten()
            if real is not None and not len(real):
                continue
            observed = observe(audited, batch.sequences(slice(sequence, sequence + 1), real))
            rows: list[Rows] = []
            for record in clean.layers:
                length = len(record.tokens) // clean.sequences  # Swin has shorter sequences in later layers
                positions = (torch.arange(length) if real is None else real).to(record.tokens.device)
                rows.append((sequence * length + positions, torch.arange(len(positions), device=positions.device)))
            comparison.compare(clean, observed, rows, examples=(torch.tensor([sequence]), torch.tensor([0])))


@final
class ExtraPadding(Perturbation):
    """Run the same batch with more padding on one side."""

    harmless: ClassVar[bool] = True

    def __init__(self, side: Literal["left", "right"]) -> None:
        self.side = side
        self.name, self.about = f"batch.{side}", f"{PADDED} more tokens of padding on the {side}"

    def unavailable(self, audited: AuditedModel, batch: AuditBatch) -> str | None:
        if batch.ids is None:
            return "images have no padding."
        if batch.inputs.keys() - {"input_ids", "attention_mask", "token_type_ids"}:
            return "the inputs contain more than tokens and their mask, and an audit cannot pad the others."
        if not audited.takes_positions and self.side == "left":
            return "the model's forward takes no position_ids, so padding on the left would change every token's position."
        if audited.pools_first_token and self.side == "left":
            return "the model classifies a text by its first token, which would be padding."
        return None

    def run(self, audited: AuditedModel, batch: AuditBatch, clean: Observation, comparison: ForwardComparison) -> None:
        assert batch.ids is not None
        length = batch.ids.shape[1]
        mask = torch.ones_like(batch.ids) if batch.token_mask is None else batch.token_mask
        inputs = {name: self._pad(tensor, 0) for name, tensor in batch.inputs.items()}
        inputs |= {"input_ids": self._pad(batch.ids, audited.pad), "attention_mask": self._pad(mask, 0)}
        if audited.takes_positions:
            inputs["position_ids"] = (inputs["attention_mask"].long().cumsum(1) - 1).clamp_min(0)
        labels = batch.labels
        if labels is not None and labels.dim() == 2:  # a class for each sequence needs no padding
            labels = self._pad(labels, IGNORED)
        observed = observe(audited, replace(batch, inputs=inputs, labels=labels))
        before = clean.real(0)
        shift = PADDED if self.side == "left" else 0
        after = before // length * (length + PADDED) + before % length + shift
        comparison.compare(clean, observed, [(before, after)] * len(clean.layers))

    def _pad(self, tensor: Tensor, value: int) -> Tensor:
        more = tensor.new_full((tensor.shape[0], PADDED), value)
        return torch.cat([more, tensor] if self.side == "left" else [tensor, more], dim=1)


@final
class WordChanges(Perturbation):
    """Swap or misspell some words of each text; compare the tokens that have the same characters and id in both texts."""

    def __init__(self, name: str, encoder: TextEncoder | None, rate: float, seed: int, length: int) -> None:
        self.name, self.encoder, self.rate, self.seed, self.length = name, encoder, rate, seed, length
        how = {"words": "words swapped for other words of the texts"}.get(name) or find_attack(name, "text").about
        self.about = f"{rate:.0%} of the words: {how} (untouched tokens only)"

    def unavailable(self, audited: AuditedModel, batch: AuditBatch) -> str | None:
        if batch.texts is None or self.encoder is None:
            return "the data are batches of inputs, not texts."
        if batch.spans is None:
            return "a slow tokenizer does not give the positions of its tokens in a text; use a fast one."
        return None

    def run(self, audited: AuditedModel, batch: AuditBatch, clean: Observation, comparison: ForwardComparison) -> None:
        assert batch.texts is not None and batch.spans is not None and self.encoder is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttackWarning)
            attacked = self._attacked(batch)
        if attacked is None or not attacked.changed:
            return
        if batch.examples is None:
            changed = self.encoder.batch(batch.number, attacked.texts, self.length)
        else:
            examples = with_texts(batch.examples, attacked.texts)
            changed = labelled_batch(self.encoder, batch.number, examples, self.length, classes=audited.classes)
        device = clean.layers[0].tokens.device
        first, second = (rows.to(device) for rows in aligned_rows(batch, changed, attacked))
        comparison.compare(clean, observe(audited, changed), [(first, second)] * len(clean.layers))
        comparison.details.append({"words": sum(attacked.words), "changed": attacked.changed, "checksum": attacked.checksum})

    def _attacked(self, batch: AuditBatch) -> AttackedText | None:
        assert batch.texts is not None and self.encoder is not None
        # Swap in only words that the tokenizer knows: the unknown token is easy to predict and would hide the cost.
        words = [word for word in words_in(batch.texts) if self.encoder.knows(word)]
        if self.name == "words" and len({word.lower() for word in words}) < 2:
            return None
        pieces = batch.spans if isinstance(self.encoder.tokenizer, Vocabulary) else None
        attack = find_attack(self.name, "text")
        return attack_texts(attack, batch.texts, rate=self.rate, seed=self.seed, words=words, pieces=pieces)


def aligned_rows(before: AuditBatch, after: AuditBatch, attacked: AttackedText) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row indices, in each of the two batches, of the untouched tokens that both texts share."""
    assert before.ids is not None and after.ids is not None and before.spans is not None and after.spans is not None
    first, second = [], []
    for document, (row, old, new) in enumerate(zip(before.rows_of_texts, before.spans, after.spans, strict=True)):
        old_real, new_real = (np.flatnonzero(spans[:, 0] < spans[:, 1]) for spans in (old, new))
        shared = attacked.common_tokens(document, old[old_real], new[new_real])
        places = torch.from_numpy(old_real[shared[0]]), torch.from_numpy(new_real[shared[1]])
        same = before.ids[row, places[0]] == after.ids[row, places[1]]
        first.append(row * before.ids.shape[1] + places[0][same])
        second.append(row * after.ids.shape[1] + places[1][same])
    return torch.cat(first), torch.cat(second)


@final
class LostExpert(Perturbation):
    """Evaluate without the expert of each layer that most tokens of the first batch use; the next best take its tokens."""

    name, about = "lost-expert", "the most used expert of each layer is lost, and the next best take its tokens"

    def __init__(self) -> None:
        self.lost: dict[int, int] = {}  # expert by layer

    def unavailable(self, audited: AuditedModel, batch: AuditBatch) -> str | None:
        return next((reason for layer in routed_layers(audited.model) if (reason := layer.refusal()) is not None), None)

    def run(self, audited: AuditedModel, batch: AuditBatch, clean: Observation, comparison: ForwardComparison) -> None:
        if not self.lost:
            for layer, record in enumerate(clean.layers):
                used = record.routing.chosen[clean.real(layer)].double().mean(0)
                self.lost[layer] = int(used.argmax())
                comparison.details.append({"layer": layer, "expert": self.lost[layer], "share": float(used.max())})
        with disable(audited.model, self.lost):
            comparison.compare(clean, observe(audited, batch))


@final
class Attack(Perturbation):
    """Attack the router inputs of a few sequences of the first batch by PGD, layer by layer; the experts' inputs are clean.

    Each layer is attacked separately, with the router inputs of the clean forward. Predictions are compared with those of a
    forward in which all layers have the perturbations that these attacks found.
    """

    def __init__(self, budget: float, tokens: int, seed: int) -> None:
        self.budget, self.tokens, self.seed = budget, tokens, seed
        self.name = "attack"
        self.about = f"router inputs of about {tokens} tokens attacked by up to {budget:g} of their length"

    def run(self, audited: AuditedModel, batch: AuditBatch, clean: Observation, comparison: ForwardComparison) -> None:
        if batch.number:
            return
        # Whole sequences, with about `tokens` tokens: informers mix the gates of a whole sequence.
        count = max(1, self.tokens * clean.sequences // len(clean.layers[0].tokens))
        attacked_batch = batch.sequences(slice(count))
        observed = observe(audited, attacked_batch)
        perturbations = []
        for layer, record in enumerate(observed.layers):
            attacked, summary = self._attack(observed, layer)
            perturbations.append(attacked - observed.router_calls[layer].tokens)
            routing = route_again(observed.router_calls[layer], attacked)
            tokens = record.tokens
            experts, weights = routing.experts.to(tokens.device), routing.weights.to(tokens.device, record.weights)
            routed = audited.moe_layers[layer].experts(tokens, experts, weights)
            after = replace(record, routing=routing, routed=routed, output=record.output + (routed - record.routed))
            perturbed = replace(observed, layers=[*observed.layers[:layer], after, *observed.layers[layer + 1 :]])
            comparison.compare_layer(layer, observed, perturbed, (observed.real(layer), observed.real(layer)))
            comparison.details.append({"layer": layer, **summary})
        all_perturbed = observe(audited, attacked_batch, perturb_input=lambda layer, tokens: tokens + perturbations[layer])
        comparison.compare_predictions(observed, all_perturbed, (observed.real(0), observed.real(0)))

    def _attack(self, observed: Observation, layer: int) -> tuple[Tensor, dict[str, Any]]:
        """Return the attacked inputs of one router, and a summary of the attack."""
        call, tokens = observed.router_calls[layer], observed.router_calls[layer].tokens
        real = torch.zeros(tokens.shape[:-1].numel(), dtype=torch.bool, device=tokens.device)
        real[observed.real(layer)] = True
        route: Any = call.route
        options: dict[str, Any] = {"context": call.context}
        if not isinstance(route, Router):  # a native gate routes each token separately, in the dtype of the tokens
            route, options = partial(call_in_dtype, call.route, tokens.dtype), {"joint": False}
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore", AttackWarning)
            options |= {"token_mask": real.view(tokens.shape[:-1]), "seed": self.seed, **QUICK}
            found = attack_routes(route, tokens.float(), budget=self.budget, relative=True, **options)
        reported = ("rate", "tokens", "smallest", "median", "budget", "norm", "relative", "joint", "steps", "seed", "flags")
        summary = found.summary()
        return found.inputs.to(tokens.dtype), {name: summary[name] for name in reported}

"""The perturbation that looks for the worst: each router's inputs moved, within a budget, so that tokens change experts."""

import warnings
from dataclasses import replace
from typing import final

import torch

from holdfast.attacks import AttackWarning, attack_routes
from holdfast.audit.comparing import Tally
from holdfast.audit.observing import Observation
from holdfast.audit.perturbation import Perturbation
from holdfast.audit.rounding import ask
from holdfast.audit.samples import Sample
from holdfast.audit.subject import Audited
from holdfast.routing import Router

STEPS = 5


@final
class Attack(Perturbation):
    """PGD on a few sequences of the first batch, layer by layer: the router's input moves, what its experts get does not.

    Each layer is attacked by itself in the clean forward, so there is no prediction to compare.
    """

    def __init__(self, budget: float, tokens: int, seed: int) -> None:
        self.budget, self.tokens, self.seed = budget, tokens, seed
        self.name = "attack"
        self.about = f"router inputs of about {tokens} tokens moved by up to {budget:g} of their length, at worst"

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        if sample.number:
            return
        for layer, record in enumerate(clean.layers):
            moved, summary = self._moved(clean, layer)
            routing = ask(clean.calls[layer], moved)
            site, tokens = audited.sites[layer], record.tokens
            experts, weights = routing.experts.to(tokens.device), routing.weights.to(tokens.device, record.weights)
            routed = site.experts(tokens, experts, weights)
            after = replace(record, routing=routing, routed=routed, output=record.output + (routed - record.routed))
            there = replace(clean, layers=[*clean.layers[:layer], after, *clean.layers[layer + 1 :]])
            rows = clean.real(layer)
            rows = rows[rows < self._attacked(clean, layer)]
            into.compare_layer(layer, clean, there, (rows, rows))
            into.details.append({"layer": layer, **summary})

    def _attacked(self, clean: Observation, layer: int) -> int:
        """How many rows: whole sequences, the first of them, since tokens may inform each other."""
        length = len(clean.layers[layer].tokens) // clean.sequences
        return length * min(clean.sequences, max(1, self.tokens // length))

    def _moved(self, clean: Observation, layer: int) -> tuple[torch.Tensor, dict[str, object]]:
        call, tokens = clean.calls[layer], clean.calls[layer].tokens
        flat = tokens.reshape(-1, tokens.shape[-1])
        count = self._attacked(clean, layer)
        budgets = self.budget * flat.double().norm(dim=-1)
        real = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
        real[clean.real(layer)] = True
        budgets = budgets.where(real & (torch.arange(len(flat), device=flat.device) < count), 0.0)
        lead = tokens.shape[:-1]
        options = {"context": call.context} if isinstance(call.route, Router) else {"joint": False}
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore", AttackWarning)
            found = attack_routes(
                call.route,
                tokens.float(),
                budget=budgets.view(lead).float().double(),
                padding=(budgets > 0).view(lead),
                steps=STEPS,
                rounds=0,
                bisections=4,
                seed=self.seed,
                **options,  # type: ignore[arg-type]
            )
        summary = found.summary()
        kept = {name: summary[name] for name in ("rate", "tokens", "smallest", "median", "flags")}
        return found.inputs.to(tokens.dtype), {**kept, "budget": self.budget, "norm": "l2", "relative": True}

"""The perturbation that looks for the worst: each router's inputs moved, within a budget, so that tokens change experts."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from holdfast.attacks import AttackWarning, attack_routes
from holdfast.auditing.comparing import Tally
from holdfast.auditing.observing import Observation, observe
from holdfast.auditing.perturbation import Perturbation
from holdfast.auditing.rounding import ask, in_its_dtype
from holdfast.auditing.samples import Sample
from holdfast.auditing.subject import Audited
from holdfast.routing import Router

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

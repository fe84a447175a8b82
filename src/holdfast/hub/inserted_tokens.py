"""`InsertedTokens`: sequences with a few tokens inserted into them, and the experts of the tokens that follow.

S sequences of L tokens, n inserted tokens, C sequences of inserted tokens that are tried, A allowed tokens, E experts
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from holdfast.hub.families import routing_from_gate
from holdfast.hub.tracing import own_hooks, routing_modules, trace
from holdfast.routing import Router, Routing
from holdfast.routing.rules import Rule

SEQUENCES_PER_BATCH = 64
TINY = torch.finfo(torch.float32).tiny


class Shares(NamedTuple):
    """Of one layer (C,S,E): for each tried sequence, means over the counted tokens of each text."""

    chosen: Tensor  # the share of them that select the expert
    gates: Tensor  # the gate of the expert


@final
class InsertedTokens:
    """Texts as `ids` and `mask` (S,L), padded on the right, with tokens inserted before position `place`.

    Counted are the real tokens from that position on, whose experts the inserted tokens may change.

    forward     runs the model with its inputs
    """

    def __init__(
        self, model: Any, forward: Callable[[dict[str, Tensor]], Any], ids: Tensor, mask: Tensor, place: int
    ) -> None:
        self.model, self.forward = model, forward
        self.ids, self.mask, self.place = ids, mask.long(), place
        self.counted = mask.bool()[:, place:]
        routers = [module for _, module, _ in routing_modules(model) if isinstance(module, Router)]
        # A router that reads the whole batch must not see other candidates.
        self.together = all(router.traits.batch_invariant for router in routers)

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs with each of `tokens` (C,n) in each text: C S rows."""
        count, texts = len(tokens), len(self.ids)
        inserted = tokens.to(self.ids.device).repeat_interleave(texts, 0)
        ids, mask = self.ids.repeat(count, 1), self.mask.repeat(count, 1)
        return {
            "input_ids": torch.cat([ids[:, : self.place], inserted, ids[:, self.place :]], 1),
            "attention_mask": torch.cat([mask[:, : self.place], torch.ones_like(inserted), mask[:, self.place :]], 1),
        }

    @torch.no_grad()
    def shares(self, tokens: Tensor) -> list[Shares]:
        """Return the `Shares` of each layer for `tokens` (C,n); n may be 0."""
        size = max(1, SEQUENCES_PER_BATCH // len(self.ids)) if self.together else 1
        parts = [self._shares(some) for some in tokens.split(size)]
        return [Shares(*map(torch.cat, zip(*layers, strict=True))) for layers in zip(*parts, strict=True)]

    def _shares(self, tokens: Tensor) -> list[Shares]:
        found: dict[int, Shares] = {}

        def add(layer: int, routing: Routing, token_mask: Tensor | None) -> None:
            found[layer] = Shares(
                *(self._mean(each, len(tokens)).cpu() for each in (routing.chosen.double(), routing.gates))
            )

        with trace(self.model, each=add):
            self.forward(self.inputs(tokens))
        return [found[layer] for layer in range(len(found))]

    def _mean(self, rows: Tensor, count: int) -> Tensor:
        """Return (C,S,E): the means of `rows` (C S (L + n), E) over the counted tokens of each text."""
        texts, following = self.counted.shape
        of_tokens = rows.view(count, texts, -1, rows.shape[-1])[:, :, -following:]
        counted = self.counted.to(rows.device).unsqueeze(-1)
        return (of_tokens * counted).sum(2) / counted.sum(1).clamp_min(1)

    def slopes(self, tokens: Tensor, layer: int, expert: int, allowed: Tensor) -> Tensor:
        """Return (n,A): the gradient of an expert's mean log gate with respect to one-hot inserted tokens, at `tokens` (n,).

        That of a one-hot token is the product of its embedding and the gradient at the output of the embedding.
        """
        embedding, (_, module, rule) = self.model.get_input_embeddings(), routing_modules(self.model)[layer]
        seen: dict[str, Any] = {}

        def embed(module: nn.Module, given: Any, output: Tensor) -> Tensor:
            seen["embedded"] = output.detach().requires_grad_()
            return seen["embedded"]  # type: ignore[no-any-return]

        def route(rule: Rule | None, module: nn.Module, given: Any, output: Any) -> None:
            seen["routing"] = output if rule is None else routing_from_gate(output, rule)

        with torch.enable_grad(), own_hooks() as hooks:
            hooks.after(embedding, embed)
            hooks.after(module, partial(route, rule))
            self.forward(self.inputs(tokens.unsqueeze(0)))
            value = self._mean(seen["routing"].gates[:, expert, None].clamp_min(TINY).log(), 1).mean()
            slope = _gradient(value, seen["embedded"])[:, self.place : self.place + len(tokens)].sum(0)
        with torch.no_grad():
            table = embedding(allowed.to(slope.device))
        return (slope.float() @ table.float().T).cpu()


def _gradient(value: Tensor, inputs: Tensor) -> Tensor:
    """Return the gradient; 0 if the value does not depend on the inputs, as the routes of a hash router."""
    if not value.requires_grad:
        return torch.zeros_like(inputs)
    (slope,) = torch.autograd.grad(value, inputs, allow_unused=True)
    return torch.zeros_like(inputs) if slope is None else slope

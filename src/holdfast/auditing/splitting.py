"""A layer's change of output, split into what flips cause and the rest.

x, r the tokens and routing of the first forward, x', r' of the second, y(x, r) the layer's output. Let r* send each token to
the experts of r, weighted as the scores behind r' weight them. Then, as vectors and exactly,

    y(x', r') - y(x, r)  =  [y(x', r') - y(x', r*)]  +  [y(x', r*) - y(x, r)]
    total                =  flip                     +  rest

A token whose set stays has r* = r' and no flip part. Where experts fade in and out (smooth top-k, ReLU), one that has left
has faded to nothing, and r* are the weights of r' that are left, rescaled to their sum where the layer renormalises: so the
flip part of a continuous router goes to 0 with the perturbation, and that of top-k does not.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.auditing.observing import LayerRecord
from holdfast.hub.sites import Site
from holdfast.routing import ReLU, Routing, Scores, TopK, TopP
from holdfast.routing.parts import shares
from holdfast.routing.rules import Rule


@final
@dataclass(frozen=True)
class OutputChange:
    """(T,d) float64 each: total = flip + rest."""

    before: Tensor
    total: Tensor
    flip: Tensor
    rest: Tensor


def rows_of(routing: Routing, rows: Tensor) -> Routing:
    """The routing of some tokens."""
    rows = rows.to(routing.experts.device)
    return Routing(routing.logits[rows], routing.gates[rows], routing.experts[rows], routing.weights[rows])


def split(site: Site, before: LayerRecord, after: LayerRecord, rows: tuple[Tensor, Tensor]) -> OutputChange:
    """Of the tokens in `rows` of the first forward and of the second. Runs experts for the tokens that flipped only."""
    first, second = rows_of(before.routing, rows[0]), rows_of(after.routing, rows[1])
    output = before.output[rows[0]].double()
    total = after.output[rows[1]].double() - output
    flip = torch.zeros_like(total)
    flipped = (first.chosen != second.chosen.to(first.chosen.device)).any(-1).nonzero().flatten()
    if len(flipped):
        kept, there = rows_of(first, flipped), rows_of(second, flipped)
        weights = kept_weights(site, kept.experts, there)
        tokens, routed = after.tokens[rows[1]][flipped], after.routed[rows[1]][flipped]
        stayed = site.experts(tokens, kept.experts.to(tokens.device), weights.to(tokens.device, after.weights))
        flip[flipped] = routed.double() - stayed.double()
    return OutputChange(output, total, flip, total - flip)


def kept_weights(site: Site, experts: Tensor, after: Routing) -> Tensor:
    """(T,K): the weights of r*, of `experts (T,K)` of the first routing under the scores of the second."""
    count = after.gates.shape[-1]
    experts = experts.to(after.gates.device)
    in_use = experts < count
    slots = experts.where(in_use, 0)
    router = site.router
    if router is None:
        assert site.family is not None
        gate, family = site.gate, site.family
        scale = 1.0 if family.scale is None else float(getattr(gate, family.scale))
        return scale * _weighed(family.rule(gate), after, slots, in_use, informed=False)
    if isinstance(router.select, TopK):
        informed = any(not informer.inert for informer in router.informers)
        return router.scale * _weighed(router.select.rule, after, slots, in_use, informed=informed)
    if isinstance(router.select, TopP):
        return router.scale * shares(after.gates.gather(1, slots).where(in_use, 0.0))
    left = after.dense_weights.gather(1, slots).where(in_use, 0.0)
    if isinstance(router.select, ReLU) or not getattr(getattr(router.select, "rule", None), "renormalise", True):
        return left
    whole = after.weights.sum(-1, keepdim=True)
    # All of them gone: the experts they were, evenly. Nothing says how a faded expert would be weighted.
    return whole * shares(left).where(left.sum(-1, keepdim=True) > 0, shares(in_use.to(left.dtype)))


def _weighed(rule: Rule, after: Routing, slots: Tensor, in_use: Tensor, *, informed: bool) -> Tensor:
    logits, gates = after.logits.unsqueeze(0), after.gates.unsqueeze(0)
    scores = Scores.from_gates(gates, logits) if informed else Scores(logits, gates, informed=False, raw=logits)
    slots, in_use = slots.unsqueeze(0), in_use.unsqueeze(0)
    # Rules take slots ranked: Phi-MoE's weight of an expert depends on which went before.
    ranks = rule.ranks(scores).gather(-1, slots).where(in_use, -torch.inf)
    order = ranks.argsort(dim=-1, descending=True, stable=True)
    weights = rule.weigh(scores, slots.gather(-1, order), in_use.gather(-1, order), None, slots.shape[-1])
    return torch.zeros_like(weights).scatter(-1, order, weights).squeeze(0)

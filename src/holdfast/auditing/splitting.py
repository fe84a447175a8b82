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
from holdfast.routing import Routing, Scores, Selection


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
    experts = experts.to(after.gates.device)
    if site.router is not None:
        return site.router.held_weights(experts, after)
    assert site.family is not None
    scale = 1.0 if site.family.scale is None else float(getattr(site.gate, site.family.scale))
    live = Selection.recorded(after, scale)
    rule, scores = site.family.rule(site.gate), Scores.recorded(after, informed=False)
    return rule.held_weights(experts.unsqueeze(0), scores, live).squeeze(0)

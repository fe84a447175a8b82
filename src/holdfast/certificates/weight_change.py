"""How much the weights of a layer's experts can change, and which experts can be in use, if a token moves by up to r.

Everything follows from how far the difference of two keys can move, |d(l_f - l_e)| <= F_fe. Keys l are logits, or logarithms
of informed gates. For linear logits F_fe = r |w_f - w_e|; for cosines it is that of the points on the sphere; after an
expert graph it is r D for every pair, D the largest |w_e - w_f|, because a mean of exponentials moves no faster than its
terms.

**Where experts can be in use.** S are the k best experts at x, c the k-th key. Everywhere in the ball, k keys are at least
the least key of S, and if k - 1 experts are left out, one of the others is at least the k-th. So the gap c - l_e of an
expert stays between

    low_e  = min over f in S of (l_f - l_e - F_fe)
    high_e = max over f not in S of (l_f - l_e + F_fe)      at least 0 for e in S; else also over f = the k-th

and R is S and {e : low_e < eps} (plain top-k, eps = 0: low_e <= 0). Within the certified radius of the routing S stays: for
plain top-k R = S.

**How far the weights move**, TV = 1/2 sum |g'_e - g_e|, is at most the smallest of

    tanh(F / 4)                     if R = S: a softmax over S. F is the largest F_fe in R
    F (1/4 + n (1 + s) / k)         n = |R| - k, s the steepest slope of the strip's factor, in logits
    sum of max(0, g_e - lower_e)    and the same with max(0, upper_e - g_e)
    1

The second is the length of the path of g: the k best move like a softmax, at most F / 4, and each of the n others adds at
most (1 + s) F / k, the speed of its amount over the sum of the amounts, which is at least k exp(c). The third bounds every
share alone: lower_e = p_e / (p_e + sum over f in R of q_f exp(l_f - l_e + F_fe)), where p and q are the smallest and the
largest factor of the strip for gaps between low and high (top-k: 1 or 0, and only the k - 1 largest terms of the sum). It
needs no slope, and is the smaller one where a strip is steep.

If gates are not divided by their sum over the experts in use, a function that is 0 has the rest of the weight. Then F is
the largest of all experts, shares are those of a softmax over all experts, and the second bound does not apply. Gates after
an expert graph A may sum to more than 1. They are divided by the largest column sum of A (`mass`), and the bound is
multiplied by it. Divided, they are a mixture of a softmax, which moves no farther than the softmax, and each stays between
g_e exp(-F) and g_e exp(F).

If gates are sigmoids or ReLUs and are not divided by anything (`alone`), every gate moves by itself: it stays between the
gates of l_e - r |w_e| and l_e + r |w_e|, times 0 and 1 where an expert may leave or enter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from holdfast.certificates.router_conditions import CertifiedRouter
from holdfast.routing.bounds import ABOVE
from holdfast.routing.declarations import NoCertificate, Shares, best
from holdfast.routing.parts import TINY

ROUNDED = 1e-12  # of the largest key: rounding errors of differences of keys in float64
GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "relu": torch.relu}  # that can be `alone`
LARGEST_POWER = 700.0  # exp of more may be infinite in float64


@final
@dataclass(frozen=True)
class WeightChange:
    """Weights of some tokens, and how far they move (see the docstring of this file).

    described   the router at these tokens
    distance    (T,): up to which perturbation each token keeps its set, or its hard core; in real numbers
    chosen      (T,E) bool: the sets at the tokens, without experts in strips
    """

    described: CertifiedRouter
    shares: Shares
    distance: Tensor
    chosen: Tensor

    @property
    def gate(self) -> str:
        """The name of the function from logits to amounts."""
        return (self.shares.gate or self.described.gate).name

    @property
    def of_all(self) -> bool:
        """Whether the weights of the experts in use may sum to less than 1."""
        return self.shares.divided_by != "set"

    @cached_property
    def mass(self) -> float:
        """Return what the weights of the layer are, divided by `weights`: an upper bound of their sum."""
        graph = self.described.graph
        return float(graph.sum(0).max()) if self.shares.divided_by == "nothing" and graph is not None else 1.0

    @cached_property
    def keys(self) -> Tensor:
        """Return l (T,E) in float64."""
        values, gate, graph = self.described.scoring.values, self.gate, self.described.graph
        if gate == "softmax" and graph is not None:
            return (values.logits.softmax(-1) @ graph.t()).clamp_min(TINY).log()
        return torch.nn.functional.logsigmoid(values.logits) if gate == "sigmoid" and not self.alone else values.logits

    @property
    def alone(self) -> bool:
        """Whether every weight moves by itself: weights are gates, and gates are not a softmax."""
        return self.shares.divided_by == "nothing" and self.gate != "softmax"

    @cached_property
    def _spans(self) -> Tensor:
        """Return (T,E,E) or (1,E,E): F for a move by 1 of the points of the logits."""
        values, experts = self.described.scoring.values, self.keys.shape[1]
        if self.gate == "sigmoid" and not self.alone:  # log(sigmoid) has slopes between 0 and 1
            spans = values.slopes.unsqueeze(2) + values.slopes.unsqueeze(1)
        elif self.described.graph is not None:
            spans = values.diameters.view(-1, 1, 1).expand(-1, experts, experts)
        else:
            return values.expert_spans()
        return spans * (1 - torch.eye(experts, dtype=spans.dtype, device=spans.device))

    @cached_property
    def weights(self) -> Tensor:
        """Return g (T,E), as declared."""
        if self.shares.equal:
            return self.chosen / self.chosen.sum(1, keepdim=True).clamp_min(1).double()
        factors = self.chosen.double()
        if self.shares.width > 0:
            last = self.keys.where(self.chosen, torch.inf).amin(1, keepdim=True)
            factors = factors.maximum(self.shares.factor(last - self.keys))
        if self.alone:
            return GATES[self.gate](self.keys) * factors
        if self._is_mixture:
            return self.keys.exp() * factors / self.mass
        amounts = (self.keys - self.keys.amax(1, keepdim=True)).exp()
        return amounts * factors / (amounts if self.of_all else amounts * factors).sum(1, keepdim=True)

    @property
    def _is_mixture(self) -> bool:
        return self.shares.divided_by == "nothing" and self.described.graph is not None

    def within(self, radius: Tensor) -> tuple[Tensor, Tensor]:
        """Return R (T,E) bool and TV (T,) for perturbations of up to `radius (T,)`."""
        kept = radius < self.distance
        everywhere = self.chosen | ~kept.unsqueeze(1)
        if self.shares.equal:
            return everywhere, (~kept).double()
        far = self._farthest(radius, self._spans)
        if self.shares.best is None:
            change = torch.tanh(self._largest(far, everywhere) / 4)
            return everywhere, (change * ABOVE).where(kept, 1.0)
        return self._of_best(far, kept)

    def each(self, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return R (T,E) bool, how far each weight moves (T,E), and its largest value (T,E), if weights are `alone`."""
        kept, gate = radius < self.distance, GATES[self.gate]
        most = (self.chosen | ~kept.unsqueeze(1)).double()
        least = (self.chosen & kept.unsqueeze(1)).double()
        if self.shares.best is not None:
            _, _, least, most = self._factors(self._farthest(radius, self._spans), kept)
        far = self._farthest(radius, self.described.scoring.values.slopes.unsqueeze(1)).squeeze(1)
        lower, upper = gate(self.keys - far) * least, gate(self.keys + far) * most
        return upper > 0, (upper - self.weights).maximum(self.weights - lower) * ABOVE, upper * ABOVE

    def _farthest(self, radius: Tensor, speeds: Tensor) -> Tensor:
        """Return how far something with these `speeds (T,n,n)` can move, rounded up."""
        scoring = self.described.scoring
        far = scoring.point_distance(radius * scoring.point_speed).view(-1, 1, 1) * speeds * ABOVE
        return far + ROUNDED * (1 + self.keys.abs().amax(1)).view(-1, 1, 1)

    def _of_best(self, far: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        shares, k = self.shares, self.shares.best
        assert k is not None
        ahead, reach, least, most = self._factors(far, kept)
        box = self._by_share(ahead, far, least, most)
        extra = reach.sum(1) - k
        largest = self._largest(far, reach)
        steady = torch.tanh(largest / 4)
        way = torch.full_like(steady, torch.inf) if self.of_all else largest * (0.25 + extra * (1 + shares.slope) / k)
        change = torch.where(extra == 0, steady, way.nan_to_num(nan=torch.inf)).minimum(box)
        return reach, (change * ABOVE).clamp_max(1)

    def _factors(self, far: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return l_f - l_e (T,f,e), R (T,E), and the smallest and the largest factor (T,E) of each expert."""
        shares, core = self.shares, self.chosen
        ahead = self.keys.unsqueeze(2) - self.keys.unsqueeze(1)  # (T,f,e): l_f - l_e
        last = best(-self.keys.where(core, torch.inf), 1)
        low = (ahead - far).where(core.unsqueeze(2), torch.inf).amin(1)
        reaching = (low < shares.width) if shares.width > 0 else (low <= 0) & ~kept.unsqueeze(1)
        reach = core | reaching
        may_lead = ~core.unsqueeze(2) | (last.unsqueeze(2) & ~core.unsqueeze(1))
        high = (ahead + far).where(may_lead, -torch.inf).amax(1)
        sure = core & (kept.unsqueeze(1) | (high < 0))
        most = shares.factor(low).where(reach, 0.0).where(~core, 1.0)
        least = (shares.factor(high.clamp_min(0)) if shares.width > 0 else torch.zeros_like(high)).where(~sure, 1.0)
        return ahead, reach, least, most

    def _by_share(self, ahead: Tensor, far: Tensor, least: Tensor, most: Tensor) -> Tensor:
        """Return the bound (T,) that bounds every share by itself; `least` and `most` (T,E) are the factors p and q."""
        self_pair = torch.eye(ahead.shape[1], dtype=torch.bool, device=ahead.device)
        above = (ahead + far).clamp_max(LARGEST_POWER).exp().masked_fill(self_pair, 0.0)
        below = (ahead - far).clamp_max(LARGEST_POWER).exp().masked_fill(self_pair, 0.0)
        if self._is_mixture:
            gates, farthest = self.keys.exp() / self.mass, far.amax(1)
            lower, upper = least * gates * (-farthest).exp(), most * gates * farthest.clamp_max(LARGEST_POWER).exp()
        elif self.of_all:
            lower, upper = least / (1 + above.sum(1)), most / (1 + below.sum(1))
        else:
            above, below = above * most.unsqueeze(2), below * least.unsqueeze(2)
            if self.shares.width == 0:
                assert self.shares.best is not None
                above = above.topk(self.shares.best - 1, dim=1).values
            lower, upper = least / (least + above.sum(1)), most / (most + below.sum(1))
        falls = (self.weights - lower.nan_to_num(nan=0.0)).clamp_min(0).sum(1)
        rises = (upper.nan_to_num(nan=0.0) - self.weights).clamp_min(0).sum(1)
        return falls.maximum(rises) if self.of_all else falls.minimum(rises)

    def _largest(self, far: Tensor, reach: Tensor) -> Tensor:
        """Return the largest F (T,) of two experts in R, or of any two if shares are those of all experts."""
        if self.of_all:
            return far.flatten(1).amax(1)
        return (far * (reach.unsqueeze(2) & reach.unsqueeze(1))).flatten(1).amax(1)


def declared_shares(described: CertifiedRouter) -> Shares:
    """Return how a router declares its weights; raise NoCertificate, with the reason, if the output has no known bound."""
    shares = None if described.shares is None else described.shares()
    unknown = f"no bound of the output is known for {described.declared_by}"
    if shares is None:
        raise NoCertificate(f"{unknown}: it does not declare how weights follow from scores")
    if described.mixing is not None:
        raise NoCertificate(f"{unknown}: tokens of a sequence share their gates")
    if shares.equal:
        return shares
    gate, graph = (shares.gate or described.gate).name, described.graph
    if graph is not None and not graph.any():
        raise NoCertificate(f"{unknown}: all entries of its expert graph are 0, and so are all gates")
    divided = shares.divided_by != "nothing"
    if gate != "softmax" and graph is not None:
        raise NoCertificate(f"{unknown}: an informer changes its gates, which are not a softmax")
    if gate not in ("softmax", *GATES) or (divided and (gate == "relu" or (gate == "sigmoid" and shares.best is not None))):
        raise NoCertificate(f"{unknown}: no bound is known for weights from its gates, {gate!r}")
    if gate != "softmax" and described.scoring.shifted:
        raise NoCertificate(f"{unknown}: the score declares only differences of logits")
    return shares

"""The stage cluster (ACMoE): features in which the cluster of a token has a small spread count more.

c       the cluster of a token: its expert with the largest weight in the previous MoE layer
h       the router inputs of that layer
s_cq    the spread of feature q of h within cluster c;  m_c = 1 / max(s_c, a tenth of its mean), scaled to mean 1
logits = (x * m_c) W^T, and no gradient flows through m

**Which layers are clustered.** A layer can be if there is a previous MoE layer of the same width. The first layer, and those
after a change of width (Swin's stages), use the base score. `skip` counts as tables 10 and 12 of the paper do: "Full" is
`skip=0`; "Skip 1" is `skip=1`, where the first layer that could be clustered is not (layers 3, 4, 5, 6 of Switch's 6).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from holdfast.errors import require_known
from holdfast.kernels import clusters
from holdfast.kernels.clusters import naive
from holdfast.kernels.operators import on_side_stream, wait_for_side_stream
from holdfast.kernels.select import top
from holdfast.routing.declarations import FLOAT, Cost, LayerSizes, Order, Scales
from holdfast.routing.parts import LinearScore, ScalableScore, Score, ScoreDeclarations, Traits, normalise
from holdfast.routing.records import Context, Previous
from holdfast.routing.scores import is_offloaded, weights_loaded
from holdfast.routing.state import StatefulPart, several_ranks, sum_over_ranks

MEMORY = 0.9  # of the running mean of the spreads
FEWEST_TOKENS = 8  # a cluster with fewer tokens in a batch keeps its spreads
RANDOM_STD = 0.5  # of random features
SMALLEST_SPREAD = 0.1  # relative to the mean spread of the cluster


class Clustered(Score, StatefulPart):
    """A linear score on features that are scaled by the spreads of the token's cluster (definitions 1 and 2).

    base        the linear score
    spread      "mad", the mean absolute deviation from the mean of the cluster, "variance", or "iqr", the interquartile
                range: the difference of the ceil(n/4)-th largest and smallest value of a cluster's n tokens. It is exact
                over all ranks, which sum 2 C d counts in each of 32 rounds; the other spreads sum C d numbers twice
    scales      "inverse": m as above. "exact": the optimal weights of theorem 1, lambda / (s + alpha), with lambda the mean
                of s and alpha such that the mean is 1; they differ less between features, and need no floor
    features    "spreads", or "random", the ablation of appendix C.5.3: m_c is drawn from a normal distribution with mean 1
                and standard deviation 0.5, negative values are 0. It is drawn once, when the router is built, and saved;
                nothing is learned from batches, and a pretrained model does not keep its outputs
    mix         average m over the `mix` best previous experts of a token, weighted by their gates (appendix C.6); None is 1,
                and for the slots of SoftMoE 8 (appendix C.7), or all clusters if there are fewer
    stats       "running": spreads are an exponential mean (0.9) over training batches. "batch", as in the paper: spreads
                of the current batch; then other sequences and later tokens change the routing, and one token has no spread
    skip        how many of the layers that could be clustered use the base score instead, from the first. So do tokens
                without a previous expert, and all tokens if the context has no previous layer
    place       the number of this layer among those that could be clustered, from 1; 0: it cannot be. None: not known, and
                `skip` has no effect
    clusters    the number of experts of the previous layer, if it differs from this layer's
    """

    reads: tuple[str, ...] = ("previous",)
    spreads: Tensor
    random_scales: Tensor

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        base: ScalableScore,
        spread: Literal["mad", "variance", "iqr"] = "mad",
        scales: Literal["inverse", "exact"] = "inverse",
        features: Literal["spreads", "random"] = "spreads",
        mix: int | None = None,
        stats: Literal["running", "batch"] = "running",
        skip: int = 0,
        place: int | None = None,
        clusters: int | None = None,
    ) -> None:
        super().__init__()
        clusters = experts if clusters is None else clusters
        require_known("spread", spread, ("mad", "variance", "iqr"))
        require_known("kind of scales", scales, ("inverse", "exact"))
        require_known("kind of features", features, ("spreads", "random"))
        require_known("kind of statistics", stats, ("running", "batch"))
        given = {"spread": spread != "mad", "scales": scales != "inverse", "stats": stats != "running"}
        if features == "random" and any(given.values()):
            names = ", ".join(name for name, is_given in given.items() if is_given)
            raise ValueError(f"features='random' uses no spreads, so {names} would have no effect; remove one of the two.")
        if not isinstance(base, ScalableScore):
            raise ValueError(f"clustering needs a score that subclasses LinearScore; {type(base).__name__} does not.")
        mix = min(base.mixed_clusters, clusters) if mix is None else mix
        if not 1 <= mix <= clusters:
            raise ValueError(f"mix is {mix}; it must be between 1 and the number of clusters, {clusters}.")
        for name, number in (("skip", skip), ("place", place)):
            if number is not None and number < 0:
                raise ValueError(f"{name} is {number}; a number of layers must not be negative.")
        self.dim, self.experts, self.base, self.slots = dim, experts, base, base.slots
        self.spread, self.mix, self.stats, self.clusters = spread, mix, stats, clusters
        self.scales, self.is_random = scales, features == "random"
        self.is_skipped = place is not None and place <= skip
        if self.is_skipped:
            self.reads = ()
        independent = stats == "running" or self.is_skipped
        self.traits = Traits(causal=independent, batch_invariant=independent, cacheable=independent) & base.traits
        if self.is_random:
            drawn = 1 + RANDOM_STD * torch.randn(clusters, dim, dtype=torch.float32)
            self.register_buffer("random_scales", drawn.clamp_min(0))
        else:
            self.register_buffer("spreads", torch.ones(clusters, dim))
            self.register_statistics(deviations=torch.zeros(clusters, dim), counts=torch.zeros(clusters))

    @property
    def wrapped(self) -> tuple[ScalableScore, ...]:
        return (self.base,)

    @property
    def declares(self) -> ScoreDeclarations:
        base = self.base.declares
        return ScoreDeclarations(
            cost=self._cost,
            snapshot=lambda: {} if self.is_random else {"spreads": self.spreads},
            order=None if base.order is None else self._order,
            reusable_score=base.reusable_score,
        )

    def _cost(self, sizes: LayerSizes) -> Cost:
        if self.is_skipped or self.is_random:
            return Cost("clusters", kept=0 if self.is_skipped else FLOAT * self.clusters)
        sums = 64 if self.spread == "iqr" else 2  # two in each round of the bisection that finds quartiles
        summed = FLOAT * (self.clusters + sums * self.clusters * sizes.dim)
        again = summed if self.stats == "batch" else 0
        return Cost("clusters", kept=FLOAT * self.clusters, summed=summed, summed_again=again)

    def begin_training_forward(self) -> None:
        if not self.is_random:
            on_side_stream(self.spreads, super().begin_training_forward)

    def update_state_where(self, due: Tensor) -> None:
        if self.is_random:
            return
        batch = self.get_buffer("staged_deviations"), self.get_buffer("staged_counts")
        clusters.update_spreads(self.spreads, *batch, due, memory=MEMORY, fewest=FEWEST_TOKENS)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        if context.previous is None or self.is_skipped:
            logits: Tensor = self.base(tokens, context)
            return logits
        # The forward of `base`, which would load its weights, does not run.
        with weights_loaded(self.base) if is_offloaded(self.base) else nullcontext():
            if self.mix == 1 and isinstance(self.base, LinearScore):
                real = context.checked_mask(tokens)
                return self.base.finish(self._grouped(tokens, self.base.matrix, context.previous, real))
            features = self.features(tokens, context)
            assert features is not None
            return self.base.on_scaled(tokens, *features)

    def _grouped(self, tokens: Tensor, matrix: Tensor, previous: Previous, real: Tensor | None) -> Tensor:
        """Return (x * m_c) matrix^T for tokens that have one cluster each (mix = 1); equal to the scales of `features`.

        On a GPU the scales are computed in parallel to the grouping of tokens by cluster.
        """
        self._check(previous)
        rows = tokens.reshape(-1, self.dim)
        real = None if real is None else real.flatten().contiguous()
        scales = None
        if self.stats == "running" and self.scales == "inverse" and not self.is_random:
            scales = on_side_stream(self.spreads, lambda: clusters.feature_scales(self.spreads, SMALLEST_SPREAD))
        first = previous.routing.experts[:, 0]
        groups = clusters.group(first, real, self.clusters, tokens=tokens, weight=matrix)
        spreads = None if self.is_random else self._spreads(lambda: self._deviations(previous, groups, real))
        if scales is None and spreads is not None and self.scales == "inverse":
            scales = clusters.feature_scales(spreads, SMALLEST_SPREAD)
        elif scales is None:
            scales = clusters.padded_scales(self._feature_scales(spreads), groups)
        projected = clusters.clustered_linear(rows, matrix, groups, scales)
        return projected.view(*tokens.shape[:-1], matrix.shape[0])

    def features(self, tokens: Tensor, context: Context, *, stage: bool = True) -> tuple[Tensor, Tensor] | None:
        """Return mixture (T,C) and scales (C,d): the features of each token are multiplied by their product.

        A token whose row in the mixture is 0 is unchanged; None means that all tokens are. In training this stages the
        spreads of the batch, unless `stage=False`.
        """
        previous = context.previous
        if previous is None or self.is_skipped:
            return None
        self._check(previous)
        members = naive.members(previous.routing.experts[:, 0], self.clusters)
        real = context.checked_mask(tokens)
        real = None if real is None else real.flatten()
        spreads = None if self.is_random else self._spreads(lambda: self._deviations(previous, members, real), stage)
        return self._mixture(previous, members, context), self._feature_scales(spreads)

    def _feature_scales(self, spreads: Tensor | None) -> Tensor:
        """Return m (C,d) for `spreads (C,d)`; None means random features."""
        if spreads is None:
            return self.random_scales
        return naive.optimal_scales(spreads) if self.scales == "exact" else feature_scales(spreads)

    def _order(self, tokens: Tensor, context: Context) -> Order | None:
        """Return the order of the base on scaled features: a perturbation of a token does not change its cluster."""
        assert self.base.declares.order is not None
        order, features = self.base.declares.order(tokens, context), self.features(tokens, context, stage=False)
        return order if order is None or features is None else replace(order, scales=Scales(*features))

    def _deviations(self, previous: Previous, groups: clusters.Groups, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sums of |h - mean| or its square over the real tokens of each cluster on all ranks, and the counts.

        For "iqr" it is the range times the count, so that the quotient of the two is the spread for all of them.
        """
        inputs, squared = previous.tokens.detach().reshape(-1, self.dim), self.spread == "variance"
        if self.spread == "iqr":
            first = previous.routing.experts[:, 0]
            ranges, counts = naive.quartile_ranges(inputs, real, first, self.clusters, self._over_ranks())
            return ranges * counts.unsqueeze(1), counts
        return clusters.deviations(inputs, real, groups, squared=squared, over_ranks=self._over_ranks())

    def _over_ranks(self) -> Callable[[Tensor], Tensor] | None:
        """Return the sum over ranks in training; None in evaluation, where ranks may run different numbers of forwards."""
        return sum_over_ranks if self.training and several_ranks() else None

    def _spreads(self, of_batch: Callable[[], tuple[Tensor, Tensor]], stage: bool = True) -> Tensor:
        """Return the spreads for this forward; in training, stage the batch's sums of deviations and counts."""
        wait_for_side_stream(self.spreads)
        if self.stats == "batch":
            deviations, counts = of_batch()
            return (deviations / counts.clamp_min(1).unsqueeze(1)).where(counts.unsqueeze(1) > 0, 1.0)
        if self.training and stage:
            self.stage_in_background(lambda: dict(zip(("deviations", "counts"), of_batch(), strict=True)))
        return self.spreads

    def _check(self, previous: Previous) -> None:
        width, experts = previous.tokens.shape[-1], previous.routing.gates.shape[-1]
        if width != self.dim:
            raise ValueError(f"the previous MoE layer has width {width} and this layer {self.dim}; `ac` needs equal widths.")
        if experts != self.clusters:
            raise ValueError(f"the previous MoE layer has {experts} experts; set clusters={experts} (now {self.clusters}).")

    def _mixture(self, previous: Previous, members: Tensor, context: Context) -> Tensor:
        """Return (T,C): the weight of the scales of each cluster for a token; all 0 if its features are unchanged."""
        if self.mix == 1:
            return members
        gates = previous.routing.gates.detach()
        if context.token_mask is not None:
            gates = context.zero_unusable(gates.view(*context.token_mask.shape, -1)).flatten(0, 1)
        best = top(gates, self.mix)
        weights = torch.zeros_like(gates).scatter(1, best, gates.gather(1, best))
        return normalise(weights) * members.sum(1, keepdim=True)


def feature_scales(spreads: Tensor) -> Tensor:
    """Return m (C,d): the inverse spreads of each cluster, limited to a tenth of their mean, scaled to mean 1."""
    return naive.feature_scales(spreads, SMALLEST_SPREAD)

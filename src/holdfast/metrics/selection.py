"""Routing metrics of one layer: which experts are selected, how often, together with which others, and with what weight.

Of one run:

CoSelection         which experts are selected together, and how well that connects them
GateEntropy         how undecided a router is
LayerInstability    whether tokens that share an expert in one layer still share one in the next
ExpertLoad          how evenly tokens are distributed over experts
ExpertsPerToken     how many experts a token uses
WeightSums          what the gate weights of a token sum to
DroppedExperts      how many experts tokens lose to a limit

Of two runs over the same tokens, two checkpoints, or clean and perturbed inputs:

RoutingChanges      how many tokens change their selected set or their first expert, and how much weights change
PredictionStability how many predictions stay the same
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.metrics.accumulator import Accumulator, only_real, real_rows
from holdfast.routing import Routing
from holdfast.routing.parts import normalise


@dataclass(frozen=True)
class CoSelectionGraph:
    counts: list[list[int]]  # E x E: tokens that selected both; on the diagonal, tokens that selected the expert
    spectral_gap: float  # 0: experts form groups that no token connects; 1: no structure


class CoSelection(Accumulator[CoSelectionGraph]):
    """C = Z^T Z with Z (T,E) the 0/1 matrix of the selected sets (Symphony, Algorithm 1), and the spectral gap 1 - lambda_2.

    lambda_2 is the second largest eigenvalue of the row-normalised counts D^-1 C, Symphony's graph, over the experts that
    were selected at all. It is similar to D^-1/2 C D^-1/2, so its eigenvalues are real, and lie in [0, 1] because C is a
    product Z^T Z: lambda_2 is the rho of Symphony's Proposition 1. With one expert per token the gap is 0.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        chosen = only_real(routing, token_mask).chosen.double()
        self._add(counts=chosen.t() @ chosen, tokens=chosen.shape[0])

    def result(self) -> CoSelectionGraph:
        self._per("tokens")
        counts = self._sums["counts"]
        return CoSelectionGraph([[int(count) for count in row] for row in counts.tolist()], spectral_gap(counts))


def spectral_gap(counts: Tensor) -> float:
    """Return 1 - lambda_2 of D^-1 C for symmetric `counts (E,E)`, rows of dead experts 0; 1 if fewer than two are used."""
    used = counts.diagonal() > 0
    counts = counts[used][:, used].double()
    if len(counts) < 2:
        return 1.0
    scale = counts.sum(1).rsqrt()
    second = float(torch.linalg.eigvalsh(scale.unsqueeze(1) * counts * scale)[-2])
    return min(1.0, max(0.0, 1 - second))


class GateEntropy(Accumulator[float]):
    """mean_t -sum_e g_te log g_te in nats, from 0 to log E, g the gates that selection read over their sum.

    High entropy makes routing fluctuate (Mutual-Inform, section 3.3). A token whose gates are all 0 has entropy 0.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        gates = normalise(only_real(routing, token_mask).gates.double())
        self._add(entropy=torch.special.entr(gates).sum(), tokens=gates.shape[0])

    def result(self) -> float:
        return self._mean("entropy")


class LayerInstability(Accumulator[float]):
    """mean_ij |Same_l[i,j] - Same_(l-1)[i,j]|, Same_l[i,j] = 1 if tokens i, j have the same first expert (ACMoE C.9).

    From the joint counts N_ab of the tokens with first expert a in layer l-1 and b in layer l, never T x T:
    (sum_a N_a.^2 + sum_b N_.b^2 - 2 sum_ab N_ab^2) / T^2. All tokens added form one set of pairs, also across batches.
    Tokens that took no expert are alike: they form a group of their own.
    """

    def update(self, previous: Routing, routing: Routing, token_mask: Tensor | None = None) -> None:
        """Add the routings of the same tokens in layer l-1 and in layer l."""
        if previous.experts.shape[0] != routing.experts.shape[0]:
            raise ValueError(
                f"{previous.experts.shape[0]} tokens in one layer and {routing.experts.shape[0]} in the next; "
                "instability needs the same tokens in both."
            )
        before, now = (
            real_rows(record.experts[:, 0], token_mask).to(routing.experts.device) for record in (previous, routing)
        )
        groups = [record.gates.shape[-1] + 1 for record in (previous, routing)]  # the last group: tokens without an expert
        joint = torch.bincount(before * groups[1] + now, minlength=groups[0] * groups[1])
        self._add(joint=joint.view(groups), tokens=now.shape[0])

    def result(self) -> float:
        tokens = self._per("tokens")
        joint = self._sums["joint"]
        pairs = joint.sum(1).square().sum() + joint.sum(0).square().sum() - 2 * joint.square().sum()
        return float(pairs) / tokens**2


@dataclass(frozen=True)
class Load:
    percent: list[float]  # of tokens that selected each expert; the sum is 100 times the experts per token
    std: float  # standard deviation of the percentages (ACMoE Table 6), 0 if even
    cv: float  # load unevenness, std / mean (survey 5.2); does not depend on the number of experts per token
    dead: list[int]  # experts that no token selected


class ExpertLoad(Accumulator[Load]):
    """The percentage of tokens that select each expert, its standard deviation, the load unevenness (CV), and dead experts.

    Both use the population's standard deviation, since all experts are counted. If no expert is selected, the CV is 0.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        chosen = only_real(routing, token_mask).chosen
        self._add(counts=chosen.sum(0), tokens=chosen.shape[0])

    def result(self) -> Load:
        tokens = self._per("tokens")
        percent = 100 * self._sums["counts"] / tokens
        std, mean = float(percent.std(correction=0)), float(percent.mean())
        dead = (percent == 0).nonzero().flatten().tolist()
        return Load(percent.tolist(), std, std / mean if mean > 0 else 0.0, dead)


@dataclass(frozen=True)
class ExpertCount:
    mean: float
    histogram: list[int]  # number of tokens with 0, 1, ..., E experts


class ExpertsPerToken(Accumulator[ExpertCount]):
    """mean_t |S_t|, which decides the cost of a token: k for top-k, more for smooth top-k, any number for top-p and ReLU.

    In SoftMoE and SMEAR layers every token uses every expert, and the mean is that of the rows that experts compute.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        real = only_real(routing, token_mask)
        chosen = real.chosen
        used = chosen.sum(1)
        cost = used if real.rows is None else real.rows.double()
        self._add(tokens=chosen.shape[0], used=cost.sum(), histogram=torch.bincount(used, minlength=chosen.shape[1] + 1))

    def result(self) -> ExpertCount:
        return ExpertCount(self._mean("used"), [int(count) for count in self._sums["histogram"].tolist()])


@dataclass(frozen=True)
class WeightSum:
    mean: float
    std: float


class WeightSums(Accumulator[WeightSum]):
    """Mean and standard deviation over tokens of sum_e w_te: 1 and 0 where weights are renormalised.

    A mean that drifts shows that a router scales its layer's output up or down.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        sums = only_real(routing, token_mask).weights.double().sum(-1)
        # Centred at 1, the usual sum, so that the variance is not a difference of large numbers.
        self._add(tokens=sums.shape[0], excess=(sums - 1).sum(), squares=(sums - 1).square().sum())

    def result(self) -> WeightSum:
        excess = self._mean("excess")
        return WeightSum(1 + excess, max(0.0, self._mean("squares") - excess**2) ** 0.5)


@dataclass(frozen=True)
class Dropped:
    share: float  # of the experts that tokens asked for
    tokens: float  # share of the tokens that are left without any expert


class DroppedExperts(Accumulator[Dropped]):
    """The share of the experts that tokens lose because experts are limited, and of the tokens that are left with none.

    Routings without a limit are not counted.
    """

    def update(self, routing: Routing, token_mask: Tensor | None = None) -> None:
        if routing.dropped is None:
            return
        routing = only_real(routing, token_mask)
        assert routing.dropped is not None
        used, dropped = routing.used.sum(), routing.dropped.sum()
        self._add(tokens=len(routing.experts), asked=used + dropped, dropped=dropped, empty=(~routing.used.any(-1)).sum())

    def result(self) -> Dropped:
        empty = self._mean("empty")
        asked = float(self._sums["asked"])
        return Dropped(float(self._sums["dropped"]) / asked if asked else 0.0, empty)


@dataclass(frozen=True)
class Changes:
    fluctuation: float  # share of tokens that flip (Mutual-Inform, Figure 2: between checkpoints)
    consistency: float  # share of tokens that keep their selected set (survey 5.2: under a perturbation)
    first_flips: float  # share of tokens whose expert with the largest weight changes
    weight_change: float  # mean over tokens of sum_e |w_te - w'_te|, w = 0 for experts that are not selected


class RoutingChanges(Accumulator[Changes]):
    """Shares of tokens whose selected set or first expert differs between two routings, and the L1 distance of weights.

    The two may have different numbers of slots. With `k`, only the k experts with the largest weights are compared: smooth
    top-k adds and drops experts at weight 0, which is no flip, so its own k makes it comparable to top-k.
    """

    def __init__(self, k: int | None = None) -> None:
        super().__init__()
        if k is not None and k < 1:
            raise ValueError(f"k is {k}; it must be at least 1, or None for whole sets.")
        self.k = k

    @property
    def settings(self) -> tuple[object, ...]:
        return (self.k,)

    def update(self, before: Routing, after: Routing, token_mask: Tensor | None = None) -> None:
        if before.gates.shape != after.gates.shape:
            raise ValueError(
                "the two routings have {} tokens x {} experts and {} x {}; ".format(*before.gates.shape, *after.gates.shape)
                + "expected the same tokens, in layers with the same number of experts."
            )
        before, after = only_real(before, token_mask), only_real(after, token_mask, before.experts.device)
        changed = set_changes(before, after, self.k)
        weights = (before.dense_weights.double() - after.dense_weights.double()).abs()
        self._add(
            tokens=changed.shape[0],
            changed=changed.sum(),
            flipped=(before.experts[:, 0] != after.experts[:, 0]).sum(),
            weights=weights.sum(),
        )

    def result(self) -> Changes:
        changed = self._mean("changed")
        return Changes(changed, 1 - changed, self._mean("flipped"), self._mean("weights"))


def set_changes(before: Routing, after: Routing, k: int | None = None) -> Tensor:
    """Return (T,) bool: which tokens flip; with `k`, compare the k experts with the largest weights."""
    return (before.sets_of_slots(k) != after.sets_of_slots(k)).any(-1)


class PredictionStability(Accumulator[float]):
    """The share of predictions that a perturbation does not change, 1 - mean [y(x) != y(x + delta)] (survey 5.2)."""

    def update(self, before: Tensor, after: Tensor, token_mask: Tensor | None = None) -> None:
        """Add predicted classes or tokens of the same shape (...), for example `logits.argmax(-1)`."""
        if before.shape != after.shape:
            raise ValueError(f"predictions have shapes {tuple(before.shape)} and {tuple(after.shape)}; they must be equal.")
        same = real_rows((before == after.to(before.device)).reshape(-1), token_mask)
        self._add(same=same.sum(), predictions=same.numel())

    def result(self) -> float:
        return self._mean("same", "predictions")

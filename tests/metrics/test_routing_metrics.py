"""Each routing metric against loops over tokens, T x T matrices and hand-made cases."""

import math
import statistics
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from metrics.routings import random_routing, sets, updated
from torch import Tensor
from wording import assert_refused

from holdfast.metrics import (
    CoSelection,
    DroppedExperts,
    ExpertLoad,
    ExpertsPerToken,
    GateEntropy,
    LayerInstability,
    PredictionStability,
    RoutingChanges,
    WeightSums,
    set_changes,
)
from holdfast.routing import Routing

RAGGED = [False, True]


def naive_entropy(gates: list[float]) -> float:
    total = sum(gates)
    return -sum(g / total * math.log(g / total) for g in gates if g > 0) if total > 0 else 0.0


def first_only(experts: list[int], count: int) -> Routing:
    """Tokens with one slot each; `count` is the sentinel."""
    gates = torch.full((len(experts), count), 1 / count)
    return Routing(gates.log(), gates, torch.tensor(experts).view(-1, 1), torch.ones(len(experts), 1))


def test_entropy_is_that_of_the_gates_over_their_sum() -> None:
    routing = random_routing()
    gates = routing.gates * torch.linspace(0.1, 3, 63).unsqueeze(1)
    gates[5:9, 2:] = 0
    gates[11] = 0  # a silent token
    metric = updated(GateEntropy(), Routing(routing.logits, gates, routing.experts, routing.weights))
    assert metric.result() == pytest.approx(statistics.fmean(map(naive_entropy, gates.double().tolist())))


@pytest.mark.parametrize("ragged", RAGGED)
def test_load_is_the_percentage_of_tokens_that_chose_each_expert(ragged: bool) -> None:
    routing = random_routing(ragged=ragged)
    percent = [100 * sum(e in chosen for chosen in sets(routing)) / 63 for e in range(7)]
    metric = updated(ExpertLoad(), routing)
    load = metric.result()
    assert load.percent == pytest.approx(percent)
    assert load.std == pytest.approx(statistics.pstdev(percent))
    assert load.cv == pytest.approx(statistics.pstdev(percent) / statistics.fmean(percent))
    assert load.dead == []


def test_experts_that_nobody_chose_are_dead_and_a_silent_layer_has_only_such() -> None:
    metric, silent = ExpertLoad(), ExpertLoad()
    metric.update(first_only([0, 0, 3, 5], 5))  # 5 is nobody
    assert metric.result().dead == [1, 2, 4]
    assert metric.result().percent == [50, 0, 0, 25, 0]
    silent.update(first_only([5, 5], 5))
    assert silent.result().dead == [0, 1, 2, 3, 4] and silent.result().cv == 0


def naive_instability(before: list[int], after: list[int]) -> float:
    """mean |Same_l - Same_(l-1)| with the T x T matrices of the paper."""

    def same(first: list[int]) -> Tensor:
        return torch.tensor([[float(a == b) for b in first] for a in first])

    return float((same(after) - same(before)).abs().mean())


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=40), st.integers(0, 40))
def test_instability_from_joint_counts_equals_the_matrices(tokens: list[tuple[int, int]], cut: int) -> None:
    """In two parts: pairs of tokens from different batches count too. 4 and 3 are nobody, of 4 and of 3 experts."""
    before, after = [a for a, _ in tokens], [b for _, b in tokens]
    metric = LayerInstability()
    for part in (slice(0, cut), slice(cut, None)):
        if before[part]:
            metric.update(first_only(before[part], 4), first_only(after[part], 3))
    assert metric.result() == pytest.approx(naive_instability(before, after), abs=1e-6)


def test_instability_reads_the_first_expert_of_each_layer() -> None:
    one, other = random_routing(seed=1), random_routing(seed=2, experts=5, slots=2)
    metric = updated(LayerInstability(), one, other)
    expected = naive_instability(one.experts[:, 0].tolist(), other.experts[:, 0].tolist())
    assert metric.result() == pytest.approx(expected, abs=1e-6)
    assert_refused(r"\b63 tokens.*\b62\b", metric.update, one, random_routing(62))


@pytest.mark.parametrize("ragged", RAGGED)
def test_co_selection_counts_pairs_chosen_together(ragged: bool) -> None:
    routing = random_routing(ragged=ragged)
    counts = [[sum({a, b} <= chosen for chosen in sets(routing)) for b in range(7)] for a in range(7)]
    metric = updated(CoSelection(), routing)
    graph = metric.result()
    assert graph.counts == counts
    walk = torch.tensor(counts, dtype=torch.float64)
    eigenvalues = torch.linalg.eigvals(walk / walk.sum(1, keepdim=True)).real.sort(descending=True).values
    assert graph.spectral_gap == pytest.approx(1 - float(eigenvalues[1]), abs=1e-9)


def pairs(*chosen: tuple[int, int], experts: int) -> Routing:
    gates = torch.full((len(chosen), experts), 1 / experts)
    return Routing(gates.log(), gates, torch.tensor(chosen), torch.full((len(chosen), 2), 0.5))


def test_the_spectral_gap_is_0_for_groups_that_never_meet_and_blind_to_dead_experts() -> None:
    apart, together, alone = CoSelection(), CoSelection(), CoSelection()
    apart.update(pairs((0, 1), (2, 3), (1, 0), experts=6))
    together.update(pairs((0, 1), (0, 1), experts=6))
    alone.update(first_only([2, 2], 4))
    assert apart.result().spectral_gap == pytest.approx(0, abs=1e-9)
    assert together.result().spectral_gap == pytest.approx(1)
    assert alone.result().spectral_gap == 1


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=30))
def test_the_spectral_gap_lies_between_0_and_1(chosen: list[list[int]]) -> None:
    experts = torch.tensor([row + [6] * (4 - len(row)) for row in chosen])
    gates = torch.full((len(chosen), 6), 1 / 6)
    metric = updated(CoSelection(), Routing(gates, gates, experts, (experts < 6).float()))
    assert 0 <= metric.result().spectral_gap <= 1


@pytest.mark.parametrize("ragged", RAGGED)
def test_experts_per_token_and_weight_sums_are_means_over_tokens(ragged: bool) -> None:
    routing = random_routing(ragged=ragged)
    used = [len(chosen) for chosen in sets(routing)]
    sums = [sum(row) for row in routing.weights.double().tolist()]
    count, weights = ExpertsPerToken(), WeightSums()
    count.update(routing)
    weights.update(routing)
    assert count.result().mean == pytest.approx(statistics.fmean(used))
    assert count.result().histogram == [used.count(n) for n in range(8)]
    assert weights.result().mean == pytest.approx(statistics.fmean(sums))
    assert weights.result().std == pytest.approx(statistics.pstdev(sums))


def heaviest(routing: Routing, k: int | None) -> list[set[int]]:
    return sets(Routing(routing.logits, routing.gates, routing.experts[:, :k], routing.weights[:, :k]))


@pytest.mark.parametrize("k", [None, 1, 2])
def test_changes_are_counted_token_by_token_whatever_the_number_of_slots(k: int | None) -> None:
    one, other = random_routing(seed=3, slots=2), random_routing(seed=4, slots=5, ragged=True)
    other.experts[:20], other.weights[:20] = 7, 0
    other.experts[:20, :2], other.weights[:20, :2] = one.experts[:20].flip(1), one.weights[:20].flip(1)  # same set
    changed = [a != b for a, b in zip(heaviest(one, k), heaviest(other, k), strict=True)]
    distances = []
    for a, b in zip(dense(one), dense(other), strict=True):
        distances.append(sum(abs(a.get(e, 0) - b.get(e, 0)) for e in range(7)))
    metric = updated(RoutingChanges(k), one, other)
    result = metric.result()
    assert sum(changed) > 0
    assert result.fluctuation == pytest.approx(sum(changed) / 63)
    assert result.consistency == pytest.approx(1 - sum(changed) / 63)
    flips = [a != b for a, b in zip(one.experts[:, 0].tolist(), other.experts[:, 0].tolist(), strict=True)]
    assert result.first_flips == pytest.approx(sum(flips) / 63)
    assert result.weight_change == pytest.approx(statistics.fmean(distances))
    assert set_changes(one, other, k).tolist() == changed


def dense(routing: Routing) -> list[dict[int, float]]:
    rows = zip(routing.experts.tolist(), routing.weights.double().tolist(), strict=True)
    return [dict(zip(experts, weights, strict=True)) for experts, weights in rows]


def test_changes_between_different_tokens_or_layers_are_refused() -> None:
    assert_refused(r"\b63 .*\b62 ", RoutingChanges().update, random_routing(63), random_routing(62))
    assert_refused("experts", RoutingChanges().update, random_routing(experts=7), random_routing(experts=8))
    assert_refused(r"\bk\b.* 0", RoutingChanges, 0)


def test_stability_is_the_share_of_predictions_that_survive() -> None:
    metric = updated(PredictionStability(), torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [0, 4]]))
    assert metric.result() == 0.75
    assert_refused("equal", metric.update, torch.tensor([1]), torch.tensor([1, 2]))


def test_dropped_experts_are_shares_of_what_tokens_asked_for() -> None:
    routing = random_routing(ragged=True)
    metric = updated(DroppedExperts(), routing)
    assert metric.tokens == 0, "a routing without a limit is not counted"
    dropped = torch.arange(63) % 3
    limited = replace(routing, dropped=dropped)
    real = torch.arange(63) % 5 != 0
    metric.update(limited, real)
    used = [int(count) for count in routing.used.sum(1)[real]]
    lost = [int(count) for count in dropped[real]]
    found = metric.result()
    assert found.share == pytest.approx(sum(lost) / (sum(used) + sum(lost)))
    assert found.tokens == pytest.approx(used.count(0) / len(used))

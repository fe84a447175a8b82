"""Near-tie mass: against a loop over tokens, and in the levels in which each kind of router compares."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from metrics.routings import random_routing, updated
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.metrics import Boundary, NearTies, boundary_of, levels_of
from holdfast.routing import ExpertGraph, Router, Routing, Scores, TopK
from holdfast.routing.declarations import SIGMOID
from holdfast.routing.rules import Rule, Softmax

WIDTHS = (0.05, 0.5, 2.0)


def naive(levels: list[list[float]], counts: list[int], width: float) -> tuple[float, float]:
    """The share of tokens with a near-tie, and experts in the strip per token."""
    near, experts = 0, 0
    for row, k in zip(levels, counts, strict=True):
        ranked = sorted(row, reverse=True)
        if 0 < k < len(row):
            near += ranked[k - 1] - ranked[k] < width
            experts += sum(ranked[k - 1] - level < width for level in ranked[k:])
    return near / len(levels), experts / len(levels)


def check(metric: NearTies, levels: Tensor, counts: list[int]) -> None:
    for strip in metric.result().strips:
        expected = naive(levels.double().tolist(), counts, strip.width)
        assert (strip.share, strip.experts) == pytest.approx(expected)
    assert any(0 < strip.share < 1 for strip in metric.result().strips)


@pytest.mark.parametrize("ragged", [False, True])
def test_near_ties_equal_a_loop_over_tokens(ragged: bool) -> None:
    """Each token at its own number of experts, where they differ."""
    routing = random_routing(ragged=ragged)
    metric = updated(NearTies(WIDTHS), routing)
    check(metric, routing.logits, routing.used.sum(-1).tolist())
    assert metric.result().explained == 1


@given(rows=st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=1, max_size=10), k=st.integers(1, 4))
def test_exact_ties_are_near_and_a_gap_of_just_the_width_is_not(rows: list[list[int]], k: int) -> None:
    logits = torch.tensor(rows).float()
    order = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    metric = updated(NearTies((1.0,)), Routing(logits, logits.softmax(-1), order, torch.ones_like(order).float()))
    expected = naive([list(map(float, row)) for row in rows], [k] * len(rows), 1.0)
    strip = metric.result().strips[0]
    assert (strip.share, strip.experts) == pytest.approx(expected)


def test_smooth_top_k_has_the_near_ties_of_its_core_not_of_its_strip() -> None:
    torch.manual_seed(0)
    smooth = holdfast.create_router("smooth", dim=16, experts=8, k=2, eps=0.3).eval()
    routing = smooth(torch.randn(200, 16))
    assert routing.used.sum(-1).max() > 2
    metric = updated(NearTies((0.05, 0.3), boundary_of(smooth)), routing)
    check(metric, routing.logits, [2] * 200)
    extra = float(routing.used.sum(-1).double().mean()) - 2
    assert metric.result().strips[1].experts == pytest.approx(extra)


def informed_router() -> Router:
    torch.manual_seed(0)
    router = holdfast.create_router("symphony", dim=16, experts=8, k=2)
    (graph,) = router.informers
    assert isinstance(graph, ExpertGraph)
    graph.graph.copy_(torch.rand(8, 8).softmax(-1))
    return router.eval()


@pytest.mark.parametrize("known", [False, True], ids=["from the record", "from the router"])
def test_after_an_informer_experts_are_compared_in_log_gates(known: bool) -> None:
    router = informed_router()
    routing = router(torch.randn(200, 16))
    metric = updated(NearTies(WIDTHS, boundary_of(router) if known else None), routing)
    check(metric, routing.gates.log(), [2] * 200)
    assert metric.result().explained == 1
    wrong = updated(NearTies(WIDTHS, Boundary(levels=lambda record: record.logits)), routing)
    assert wrong.result().explained < 0.9  # and the metric says that logits do not explain these choices


@pytest.mark.parametrize("name", ["smoe", "xmoe", "top-p", "remoe"])
def test_without_an_informer_experts_are_compared_in_logits_also_where_gates_underflow(name: str) -> None:
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=16, experts=8).eval()
    tokens = torch.randn(200, 16)
    routing = router(tokens if name == "xmoe" else tokens * 40)
    for boundary in (None, boundary_of(router)):
        metric = updated(NearTies(WIDTHS, boundary), routing)
        check(metric, routing.logits, routing.used.sum(-1).tolist())


def test_one_token_at_a_time_finds_the_same_levels_as_all_at_once() -> None:
    routing = informed_router()(torch.randn(50, 16))
    whole, steps = NearTies(WIDTHS), NearTies(WIDTHS)
    whole.update(routing)
    for t in range(50):
        row = slice(t, t + 1)
        steps.update(Routing(routing.logits[row], routing.gates[row], routing.experts[row], routing.weights[row]))
    assert steps.result() == whole.result()


class Biased(Rule):
    """Ranks by sigmoid plus a bias, as DeepSeek does."""

    gate = SIGMOID
    bias = torch.linspace(-0.4, 0.4, 8)

    def ranks(self, scores: Scores) -> Tensor:
        return scores.gates + self.bias

    def levels(self, scores: Scores) -> Tensor:
        return self.ranks(scores)

    def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
        return scores.gates.gather(-1, experts)


def test_a_rule_with_levels_of_its_own_is_asked_for_them_and_missed_where_it_is_not_known() -> None:
    torch.manual_seed(0)
    router = Router(holdfast.routing.Linear(16, 8), TopK(8, 2, rule=Biased())).eval()
    routing = router(torch.randn(200, 16))
    known, by_rule, unknown = (
        NearTies((0.01, 0.1), boundary) for boundary in (boundary_of(router), Boundary(levels=levels_of(Biased())), None)
    )
    for metric in (known, by_rule, unknown):
        metric.update(routing)
    check(known, routing.gates + Biased.bias, [2] * 200)
    assert by_rule.result() == known.result()
    assert known.result().explained == 1 > unknown.result().explained


def test_a_layer_that_uses_no_expert_or_all_of_them_is_far_from_any_tie() -> None:
    silent, full = random_routing(slots=2), random_routing(slots=7)
    silent.experts[:], silent.weights[:] = 7, 0
    for routing in (silent, full):
        metric = updated(NearTies((100.0,)), routing)
        strip = metric.result().strips[0]
        assert (strip.share, strip.experts) == (0, 0)


def test_impossible_settings_are_one_clear_sentence() -> None:
    assert_refused("positive", NearTies, (0.1, 0.0))
    assert_refused(r"\bk\b.* 0", NearTies, boundary=Boundary(k=0))
    assert (
        boundary_of(holdfast.routing.create_router("top-p", dim=4, experts=3)) == Boundary()
    )  # in training, it declares no core
    assert levels_of(Softmax(renormalise=True))(random_routing()).shape == (63, 7)

"""Bounds for expert graphs and thresholds on gates: against loops, the two Lipschitz bounds, and a search in the plane."""

import math

import pytest
import torch
from certificates.certified_routers import build, generator, linear_score
from certificates.naive import symphony_radii
from certificates.probing import sets_of, share_of_search
from torch import Tensor

from holdfast.certificates import NORMS, Norm, certify
from holdfast.routing import Context, ExpertGraph, Linear, Router, TopK, TopP, create_router

SYMPHONIES = ["symphony row", "symphony conditional", "symphony sinkhorn", "symphony sparse", "symphony+ac", "xmoe+symphony"]


def with_graph(graph: Tensor, weight: Tensor, k: int = 1) -> Router:
    experts, dim = weight.shape
    informer = ExpertGraph(experts, k)
    informer.graph.copy_(graph)
    return Router(linear_score(weight), TopK(dim, experts, k), [informer]).eval()


def graph_of(made: Router) -> Tensor:
    informer = made.informers[0]
    assert isinstance(informer, ExpertGraph)
    return informer.expert_graph().double()


@pytest.mark.parametrize("name", ["symphony row", "symphony conditional", "symphony sinkhorn", "symphony sparse"])
def test_both_lipschitz_bounds_equal_the_naive_ones(name: str) -> None:
    made, tokens, context = build(name, length=7)
    assert isinstance(made.score, Linear)
    found = certify(made, tokens, context)
    pairwise, proposition = symphony_radii(graph_of(made), made.score.weight.detach().double(), tokens.flatten(0, 1), 2)
    for bound, expected in (("pairwise", pairwise), ("proposition 1", proposition)):
        torch.testing.assert_close(
            found.bounds[bound].flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-12
        )


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", SYMPHONIES)
def test_the_odds_bound_is_the_best_of_three(name: str, norm: Norm) -> None:
    made, tokens, context = build(name)
    found = certify(made, tokens, context, norm=norm)
    assert (found.bounds["proposition 1"] <= found.bounds["pairwise"] * (1 + 1e-9)).all()
    assert (found.bounds["pairwise"] <= found.distance * (1 + 1e-6)).all()
    assert (found.distance > 2 * found.bounds["pairwise"]).float().mean() > 0.9
    assert (found.radius <= found.distance).all() and (found.radius > 0.97 * found.distance).float().mean() > 0.9


@pytest.mark.parametrize("norm", NORMS)
def test_the_identity_graph_is_the_plain_router(norm: Norm) -> None:
    weight, tokens = torch.randn(9, 5, generator=generator(0)), torch.randn(40, 5, generator=generator(1))
    informed = with_graph(torch.eye(9), weight, k=3)
    plain = Router(informed.score, select=TopK(5, 9, 3)).eval()
    one, other = (certify(made, tokens, norm=norm) for made in (informed, plain))
    torch.testing.assert_close(one.distance, other.distance, rtol=1e-5, atol=1e-9)
    assert torch.equal(one.pair, other.pair) and one.kind == "lower bound"


def test_two_experts_with_a_graph_by_hand() -> None:
    """g_1 > g_2 with rows (0.8, 0.2) and (0.4, 0.6) is 0.4 exp(l_1) > 0.4 exp(l_2): the plane l_1 = l_2, as without it."""
    graph, weight = torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    found = certify(with_graph(graph, weight), torch.tensor([[2.0, 1.0]]))
    assert found.distance.item() == pytest.approx(2 / 5, rel=1e-6)
    shifted = torch.tensor([[0.8, 0.2], [0.4, 1.0]])  # 0.4 exp(l_1) > 0.8 exp(l_2): the plane is log 2 nearer
    found = certify(with_graph(shifted, weight), torch.tensor([[2.0, 1.0]]))
    assert found.distance.item() == pytest.approx((2 - math.log(2)) / 5, rel=1e-6)
    gates = torch.tensor([6.0, 4.0], dtype=torch.float64).softmax(0)
    assert found.margin.item() == pytest.approx(float(0.4 * gates[0] - 0.8 * gates[1]), rel=1e-6)


def test_a_zero_graph_and_a_dominated_expert_have_infinite_radii() -> None:
    weight, tokens = torch.randn(3, 4, generator=generator(0)), torch.randn(6, 4, generator=generator(1))
    assert certify(with_graph(torch.zeros(3, 3), weight), tokens).distance.isinf().all()
    dominated = torch.tensor([[0.5, 0.5, 0.5], [0.1, 0.2, 0.3], [0.0, 0.1, 0.2]])
    found = certify(with_graph(dominated, weight), tokens)
    assert found.distance.isinf().all() and (found.relative > 5).all()  # as far as float32 gates do not underflow


def test_gates_that_underflow_have_radius_zero() -> None:
    """Logits 300, 60 and 50 under the identity: in float32 the second and third gate are 0, and the index decides."""
    weight = torch.tensor([[0.5], [0.6], [3.0]])
    made = with_graph(torch.eye(3), weight, k=2)
    found = certify(made, torch.tensor([[100.0]]))
    assert found.radius.item() == 0 and found.distance.item() == pytest.approx(100.0)
    assert made(torch.tensor([[100.0]])).chosen.tolist() == [[True, False, True]]  # not 0.6


@pytest.mark.parametrize("times", [1.0, 30.0, 1000.0])
def test_logits_of_any_size_give_finite_and_ordered_bounds(times: float) -> None:
    made, tokens, context = build("symphony row")
    found = certify(made, times * tokens, context)
    assert found.radius.isfinite().all() and (found.radius <= found.distance).all()
    assert (found.radius >= 0).all() and (found.bounds["pairwise"] <= found.distance * (1 + 1e-6)).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["symphony row", "xmoe+symphony", "top-p", "top-p alone", "symphony+top-p", "xmoe+top-p"])
def test_the_bound_is_close_to_what_a_search_of_the_plane_finds(name: str, norm: Norm) -> None:
    """In two dimensions every point can be tried: sound, and not far below the true distance."""
    made, tokens, context = build(name, dim=2, batch=1, length=12)
    found = certify(made, tokens, context, norm=norm)
    # Cosines are bounded by how far z can be turned, in its worst direction; the plane has only one.
    assert share_of_search(sets_of(made), tokens[0], found) > (0.3 if "xmoe" in name else 0.8)


def test_a_threshold_on_two_gates_by_hand() -> None:
    """Gates (s, 1 - s) with s the sigmoid of l_1 - l_2, above 0.1: the second expert leaves where l_1 - l_2 = log 9."""
    made = Router(linear_score([[1.0], [0.0]]), select=TopP(2, p=0.1)).eval()
    found = certify(made, torch.tensor([[1.0], [3.0], [-5.0]]))
    assert found.distance.tolist() == pytest.approx([math.log(9) - 1, 3 - math.log(9), 5 - math.log(9)], rel=1e-6)
    assert found.pair.tolist() == [[1, 2], [2, 1], [2, 0]]


def test_an_expert_that_is_alone_below_the_threshold_stays_while_it_is_the_best() -> None:
    made = Router(linear_score([[1.0], [0.0], [-1.0], [-2.0]]), select=TopP(4, p=0.9)).eval()
    found = certify(made, torch.tensor([[0.5]]))
    assert found.distance.item() == pytest.approx(0.5, rel=1e-6) and found.pair.tolist() == [[0, 1]]


def test_a_learned_threshold_is_used() -> None:
    torch.manual_seed(0)
    made = create_router("top-p", dim=6, experts=5, p=0.1, learned=True).eval()
    assert isinstance(made.select, TopP) and made.select.learned_p is not None
    tokens, before = torch.randn(20, 6), made.select.learned_p.item()
    first = certify(made, tokens, Context())
    with torch.no_grad():
        made.select.learned_p.fill_(before + 1)
    assert not torch.allclose(first.distance, certify(made, tokens).distance)

"""Selectors: what each chooses, with which weights, and how they move during training."""

import pytest
import torch
from torch import Tensor
from wording import assert_refused

from holdfast import Context, Experts, MoE, create_router
from holdfast.routing import ReLU, Router, Routing, Scores, TopK, TopP


def route(select: TopK | TopP | ReLU, logits: Tensor) -> Routing:
    """Scores that are the tokens themselves."""
    chosen = select(Scores(logits, select.gate(logits), informed=False), torch.zeros(*logits.shape[:2], 4), Context())
    return Routing(logits[0], chosen.gates[0], chosen.experts[0], chosen.weights[0], chosen.losses)


def test_experts_are_told_apart_where_their_gates_underflow_to_zero() -> None:
    """exp(-140) is 0 in float32: reading gates would tie experts 1 and 2 and choose the wrong one."""
    routing = route(TopK(3, 2), torch.tensor([[[200.0, 50.0, 60.0]]]))
    assert routing.gates[0, 1] == routing.gates[0, 2] == 0
    assert routing.experts.tolist() == [[0, 2]]


@pytest.mark.parametrize("weights", ["softmax", "switch"])
def test_gates_that_are_all_zero_give_zero_weights_and_no_nan(weights: str) -> None:
    select = TopK(3, 2, weights=weights)  # type: ignore[arg-type]
    gates = torch.zeros(1, 1, 3, requires_grad=True)
    chosen = select(Scores.from_gates(gates), torch.zeros(1, 1, 4), Context())
    assert chosen.weights.tolist() == [[[0.0, 0.0]]]
    chosen.weights.sum().backward()
    assert gates.grad is not None and gates.grad.isfinite().all()


def test_k_grows_with_progress_and_survives_saving() -> None:
    built, tokens = create_router("smoe-dropout", dim=8, experts=6, k=2), torch.randn(1, 5, 8)
    seen = []
    for fraction in (0.0, 0.25, 0.5, 1.0):
        built.progress(fraction)
        routing = built(tokens)
        seen.append(int(routing.used.sum(-1).unique()))
        torch.testing.assert_close(routing.weights.sum(-1), torch.ones(5))
    assert seen == [2, 3, 4, 6]
    built.progress(0.5)
    other = create_router("smoe-dropout", dim=8, experts=6, k=2)
    other.load_state_dict(built.state_dict())
    assert int(other(tokens).used.sum(-1).unique()) == 4


def test_top_p_takes_every_expert_above_p_and_always_one() -> None:
    logits = torch.tensor([[[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01]]]).log()
    routing = route(TopP(4, p=0.1), logits)
    assert routing.experts.tolist() == [[0, 1, 2, 4], [0, 4, 4, 4]]
    torch.testing.assert_close(routing.weights[0], torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95)
    assert route(TopP(4, p=0.99), logits).used.sum(-1).tolist() == [1, 1]


def test_a_learned_p_starts_where_told_and_learns() -> None:
    select = TopP(4, p=0.1, learned=True)
    torch.testing.assert_close(select.threshold(), torch.tensor([0.1]))
    logits = torch.tensor([[[0.5, 0.3, 0.11, 0.09]]]).log()
    routing = route(select, logits)
    assert routing.used.sum() == 3
    routing.weights[0, 0].backward()
    assert select.learned_p is not None and select.learned_p.grad is not None
    assert select.learned_p.grad != 0


@pytest.mark.slow
def test_the_l1_coefficient_steers_the_number_of_experts_to_k() -> None:
    """In a layer that learns a small regression, from about half of the experts active."""
    layer = MoE(create_router("remoe", dim=16, experts=16, k=2, l1=1e-4), Experts(16, 16, 16))
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    tokens = torch.randn(4, 64, 16) + 0.5
    target, active = torch.tanh(tokens @ torch.randn(16, 16)), []
    for _ in range(400):
        out, routing = layer(tokens)
        optimizer.zero_grad()
        ((out - target).square().mean() + routing.loss).backward()
        optimizer.step()
        active.append(float(routing.used.sum(-1).float().mean()))
    assert active[0] > 6
    assert abs(sum(active[-50:]) / 50 - 2) < 0.5


@pytest.mark.parametrize("count", [1.0, 3.0])
def test_the_l1_coefficient_moves_by_its_rate_once_a_batch(count: float) -> None:
    select = ReLU(4, 2, l1=0.5, l1_rate=1.2)
    logits = torch.full((1, 3, 4), -1.0)
    logits[..., : int(count)] = 1.0
    before = route(select, logits).losses["l1"]
    torch.testing.assert_close(before, torch.tensor(0.5 * count))
    torch.testing.assert_close(select.l1, torch.tensor(0.5))  # staged, not committed
    select.eval()
    torch.testing.assert_close(select.l1, torch.tensor(0.5 * 1.2 if count > 2 else 0.5 / 1.2))
    select.train().eval()
    torch.testing.assert_close(select.l1, torch.tensor(0.5 * 1.2 if count > 2 else 0.5 / 1.2))


def test_a_router_needs_a_selector_and_at_most_one_informer_on_each_side() -> None:
    import toy_parts

    from holdfast.routing import Linear

    assert_refused("expected a Selector", Router, Linear(4, 3), toy_parts.FixedGraph(3))
    with pytest.raises(ValueError, match="2 informers on the expert side"):
        Router(Linear(4, 3), TopK(3, 1), (toy_parts.FixedGraph(3), toy_parts.FixedGraph(3)))

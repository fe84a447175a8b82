"""Sparsemax: the projection onto the simplex, its Jacobian, and the selector that it makes."""

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import holdfast
from holdfast.certificates import NoCertificate, certify
from holdfast.routing import Scores
from holdfast.routing.selection import TopK
from holdfast.routing.thresholds import SparsemaxRule, sparsemax


def quadratic_programme(logits: Tensor) -> Tensor:
    """argmin |p - z|^2 over the simplex, by a solver that does not know the formula."""
    z = logits.double().numpy()
    found = minimize(
        lambda p: ((p - z) ** 2).sum(),
        [1 / len(z)] * len(z),
        jac=lambda p: 2 * (p - z),
        bounds=[(0, None)] * len(z),
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1, "jac": lambda p: [1.0] * len(z)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return torch.from_numpy(found.x)


@pytest.mark.parametrize("experts", [1, 2, 7, 32])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_sparsemax_equals_its_quadratic_programme(experts: int, scale: float) -> None:
    torch.manual_seed(experts)
    for logits in scale * torch.randn(10, experts):
        torch.testing.assert_close(sparsemax(logits).double(), quadratic_programme(logits), atol=1e-5, rtol=0)


def test_gradients_equal_differences() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sparsemax, logits)


@pytest.mark.parametrize("shift", [0.0, 1e4, -3e37])
def test_gates_do_not_depend_on_a_common_shift(shift: float) -> None:
    logits = torch.tensor([[0.0, 0.25, -0.5, 0.25, -4.0]])
    if abs(shift) > 1e5:
        logits = torch.zeros(1, 5)
    torch.testing.assert_close(sparsemax(logits + shift), sparsemax(logits), atol=1e-3, rtol=0)
    assert sparsemax(logits + shift).sum() == pytest.approx(1)


def test_equal_logits_share_and_one_expert_gets_all() -> None:
    assert torch.equal(sparsemax(torch.full((3, 4), 7.5)), torch.full((3, 4), 0.25))
    assert torch.equal(sparsemax(torch.randn(3, 1)), torch.ones(3, 1))
    assert torch.equal(sparsemax(torch.tensor([0.0, 1.0])), torch.tensor([0.0, 1.0]))  # a lead of 1 takes all
    assert torch.equal(sparsemax(torch.tensor([1e30, -1e30, 0.0])), torch.tensor([1.0, 0.0, 0.0]))


def test_equal_logits_at_the_edge_of_the_support_are_all_in_or_all_out() -> None:
    for low in (-0.49, -0.5, -0.51):
        gates = sparsemax(torch.tensor([0.0, low, low]))
        assert gates[1] == gates[2]
    tokens = torch.ones(1, 1, 4)
    router = holdfast.create_router("sparsemax", dim=4, experts=3)
    torch.nn.init.zeros_(router.score.get_parameter("weight"))
    assert router(tokens).experts.tolist() == [[0, 1, 2]]


def test_after_an_informer_it_projects_safe_logarithms_and_no_gate_of_0_is_selected() -> None:
    select = holdfast.create_router("sparsemax", dim=4, experts=4).select
    gates = torch.tensor([[[0.5, 0.25, 0.0, 0.25], [0.0, 0.0, 0.0, 0.0]]])
    chosen = select(Scores.from_gates(gates), torch.zeros(1, 2, 4), holdfast.Context())
    expected = sparsemax(gates[0, 0].clamp_min(torch.finfo(torch.float32).tiny).log())
    assert chosen.experts.tolist() == [[[0, 1, 3, 4], [4, 4, 4, 4]]]
    torch.testing.assert_close(chosen.weights[0, 0, :3], expected[[0, 1, 3]])
    assert (chosen.weights[0, 1] == 0).all()


def test_the_rule_makes_a_top_k_of_sparsemax_gates() -> None:
    logits = torch.randn(1, 11, 6)
    scores = Scores(logits, sparsemax(logits), informed=False, raw=logits)
    chosen = TopK(6, 3, rule=SparsemaxRule())(scores, torch.zeros(1, 11, 4), holdfast.Context())
    best = sparsemax(logits).topk(3).values
    torch.testing.assert_close(chosen.weights, best / best.sum(-1, keepdim=True))


@pytest.mark.parametrize("name", ["sparsemax", "symphony+sparsemax"])
def test_a_certificate_is_refused_with_the_reason(name: str) -> None:
    router = holdfast.create_router(name, dim=8, experts=4).eval()
    with pytest.raises(NoCertificate, match="its threshold is the sum of the selected logits minus 1"):
        certify(router, torch.randn(1, 5, 8))

"""Sparse transport against linear and quadratic programmes, and `symphony+sinkhorn` in the order of its paper."""

import itertools
import math

import numpy as np
import pytest
import torch
from balanced_references import potentials, sparse_row, sparse_transport
from scipy.optimize import linprog, minimize
from torch import Tensor

from holdfast import Context, create_router
from holdfast.kernels.select import top_reference as top
from holdfast.routing.balanced import Sinkhorn
from holdfast.routing.expert_graph import ExpertGraph
from holdfast.routing.transport import sparse_potentials, sparse_rows

GAMMA = 0.7


def scores(tokens: int, experts: int, seed: int) -> Tensor:
    drawn = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)).double()
    return drawn + torch.linspace(0, 2, experts)


def smallest_semi_dual(rows: Tensor, sparsity: int, gamma: float = GAMMA) -> tuple[float, float]:
    """Return D(v) after many steps, term by term, and the violation of the column sums."""
    real = torch.ones(1, len(rows), dtype=torch.bool)
    v, count, violation = sparse_potentials(rows.unsqueeze(0), real, sparsity, gamma, iterations=1000)
    assert int(count) == len(rows)
    total = -len(rows) / rows.shape[1] * float(v.sum())
    for row in rows + v:
        x = sparse_row(row, sparsity, gamma)
        total += float(row @ x - gamma / 2 * x @ x)
    return total, float(violation)


def marginals(tokens: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix and the right side of: rows sum to 1, columns to T / E."""
    rows, columns = np.kron(np.eye(tokens), np.ones(experts)), np.kron(np.ones(tokens), np.eye(experts))
    return np.vstack([rows, columns]), np.array([1.0] * tokens + [tokens / experts] * experts)


def quadratic_programme(rows: Tensor, support: np.ndarray, gamma: float = GAMMA) -> float:
    """Return the largest <s, X> - gamma/2 |X|^2 with the marginals and zeros outside of the support; -inf: there is no X."""
    matrix, right = marginals(*rows.shape)
    allowed = matrix[:, support]
    start = linprog(np.zeros(allowed.shape[1]), A_eq=allowed, b_eq=right, bounds=(0, 1))
    if not start.success:
        return -math.inf
    s = rows.numpy().ravel()[support]
    found = minimize(
        lambda x: -(s @ x - gamma / 2 * x @ x),
        start.x,
        jac=lambda x: gamma * x - s,
        bounds=[(0, 1)] * len(s),
        constraints={"type": "eq", "fun": lambda x: allowed[:-1] @ x - right[:-1], "jac": lambda x: allowed[:-1]},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    return float(-found.fun)


@pytest.mark.parametrize(("tokens", "experts"), [(12, 4), (7, 3)])
def test_with_one_expert_it_is_the_linear_programme(tokens: int, experts: int) -> None:
    rows = scores(tokens, experts, seed=1)
    matrix, right = marginals(tokens, experts)
    best = -linprog(-rows.numpy().ravel(), A_eq=matrix, b_eq=right, bounds=(0, 1)).fun
    value, _ = smallest_semi_dual(rows, 1)
    assert value == pytest.approx(best - GAMMA * tokens / 2, abs=1e-4)


@pytest.mark.parametrize(("tokens", "experts"), [(8, 3), (6, 4)])
def test_with_all_experts_it_is_the_quadratic_programme(tokens: int, experts: int) -> None:
    rows = scores(tokens, experts, seed=2)
    value, violation = smallest_semi_dual(rows, experts)
    assert value == pytest.approx(quadratic_programme(rows, np.ones(rows.numel(), dtype=bool)), abs=1e-4)
    assert violation < 1e-3


@pytest.mark.parametrize(("gamma", "has_gap"), [(GAMMA, False), (3.0, True)])
def test_otherwise_the_semi_dual_is_at_least_the_best_support(gamma: float, has_gap: bool) -> None:
    """A duality gap may remain; the columns then miss T / E by the violation that is printed."""
    rows, pairs = scores(4, 3, seed=3), [np.arange(3) != left_out for left_out in range(3)]
    supports = (np.concatenate(each) for each in itertools.product(pairs, repeat=4))
    best = max(quadratic_programme(rows, support, gamma) for support in supports)
    value, violation = smallest_semi_dual(rows, 2, gamma)
    print(f"semi-dual {value:.4f}, best support {best:.4f}, violation of the columns {violation:.3f}")
    assert value >= best - 1e-6
    assert value <= quadratic_programme(rows, np.ones(12, dtype=bool), gamma) + 1e-4  # which has no limit
    assert (violation > 0.05) == (value - best > 0.01) == has_gap


@pytest.mark.parametrize(("sparsity", "experts"), [(1, 5), (2, 7), (5, 5)])
def test_potentials_and_rows_are_those_of_the_naive_loops(sparsity: int, experts: int) -> None:
    logits = scores(24, experts, seed=6).float().requires_grad_()
    real = torch.rand(24, generator=torch.Generator().manual_seed(7)) < 0.8
    found, _, _ = sparse_potentials(logits.unsqueeze(0), real.unsqueeze(0), sparsity, GAMMA)
    expected = sparse_transport(logits, real.tolist(), sparsity, GAMMA)
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=0)
    tilt = torch.randn(24, experts, generator=torch.Generator().manual_seed(8))
    ours, naive = sparse_rows(logits + found, sparsity, GAMMA), [sparse_row(row, sparsity, GAMMA) for row in logits + found]
    torch.testing.assert_close(ours, torch.stack(naive).float())
    gradients = [torch.autograd.grad((rows * tilt).sum(), logits)[0] for rows in (ours, torch.stack(naive))]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("sparsity", [2, 4])
def test_a_batch_of_tokens_is_balanced_and_the_violation_recorded(sparsity: int) -> None:
    router = create_router(f"sinkhorn[sparsity={sparsity}]", dim=12, experts=8, k=4)
    tokens = torch.randn(2, 400, 12) + torch.randn(12)
    routing = router(tokens)
    columns = routing.gates.detach().sum(0) * 8 / 800
    violation = float(router.snapshot()["violation"])
    assert float((columns - 1).abs().max()) == pytest.approx(violation, abs=2e-3)
    assert violation < 0.05 < float((router.eval()(tokens).gates.sum(0) * 8 / 800 - 1).abs().max())
    assert int(routing.used.sum(-1).max()) <= sparsity
    torch.testing.assert_close(routing.dense_weights, routing.gates)


@pytest.mark.parametrize("options", ["", "[sparsity=2]", "[bias=running]"], ids=str)
def test_symphony_mixes_the_balanced_gate_and_counts_its_pairs(options: str) -> None:
    """000: the base gate is that of optimal transport, g = gamma A^T, and pairs are those of the k largest of gamma."""
    router = create_router(f"symphony[init=kaiming,beta=0]+sinkhorn{options}", dim=12, experts=6, k=2)
    graph, select = router.inform[0], router.select
    assert isinstance(graph, ExpertGraph) and isinstance(select, Sinkhorn)
    before, tokens = graph.graph.clone(), torch.randn(2, 40, 12) + torch.randn(12)
    routing = router(tokens)
    logits, real = routing.logits.detach(), [True] * 80
    v = sparse_transport(logits, real, 2, 1.0) if select.sparsity else potentials(logits, real)
    gates, together = [], torch.zeros(6, 6)
    for row in logits.double() + v:
        gamma = sparse_row(row, 2, 1.0) if select.sparsity else torch.softmax(row, -1)
        gates.append([sum(float(before[i, j] * gamma[j]) for j in range(6)) for i in range(6)])
        for i, j in itertools.product(top(row.float(), 2).tolist(), repeat=2):
            together[i, j] += 1
    torch.testing.assert_close(routing.gates, torch.tensor(gates), atol=2e-5, rtol=1e-4)
    assert torch.equal(routing.experts, top(routing.gates, 2))
    torch.testing.assert_close(routing.weights, routing.gates.gather(1, routing.experts))
    router.eval()
    torch.testing.assert_close(graph.graph, together / together.sum(1, keepdim=True))
    expected = select.gate(logits + (select.running if select.has_bias else 0)) @ graph.graph.t()
    torch.testing.assert_close(router(tokens, Context()).gates, expected)

"""Symphony's graph: algorithm 1 by hand, its options, its identities."""

from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import Context
from holdfast.routing import ExpertGraph


def learn(graph: ExpertGraph, batches: list[Tensor], token_mask: Tensor | None = None) -> Tensor:
    """The graph after training forwards on these raw logits (B,N,E)."""
    graph.train()
    for logits in batches:
        graph.begin_training_forward()
        graph(logits.softmax(-1), logits, logits, Context(token_mask=token_mask))
    graph.eval()
    return graph.graph


def algorithm_1(
    start: Tensor, batches: list[Tensor], k: int, beta: float, normalize: str, real: Tensor, decay: bool
) -> Tensor:
    """Counting pairs one token at a time."""
    graph, experts = start.double(), start.shape[0]
    for logits in batches:
        together = torch.zeros(experts, experts).double()
        for token, is_real in zip(logits.flatten(0, 1), real.flatten(), strict=True):
            chosen = token.topk(k).indices.tolist() if is_real else []
            for i in chosen:
                for j in chosen:
                    together[i, j] += 1
        updated = graph.clone()
        for i in range(experts):
            for j in range(experts):
                count = together[i].sum() if normalize == "row" else together[j, j]
                used = together[i, i] > 0 if normalize == "row" else together[j, j] > 0
                if used or decay:
                    updated[i, j] = beta * graph[i, j] + (1 - beta) * (together[i, j] / count if used else 0)
        graph = updated
    return graph


@pytest.mark.parametrize("decay", [True, False], ids=["decaying", "keeping"])
@pytest.mark.parametrize("normalize", ["row", "conditional"])
@pytest.mark.parametrize("init", ["zero", "identity", "uniform", "kaiming", "xavier"])
def test_the_graph_follows_algorithm_1(init: str, normalize: str, decay: bool) -> None:
    graph = ExpertGraph(6, 2, beta=0.8, init=init, normalize=normalize, decay_unused=decay)  # type: ignore[arg-type]
    start = graph.graph.clone()
    batches = [torch.randn(2, 5, 6) for _ in range(4)]
    for logits in batches:
        logits[..., 4] = -10  # no token selects expert 4
    real = torch.ones(2, 5, dtype=torch.bool)
    real[1, 3:] = False
    learned = learn(graph, batches, real)
    torch.testing.assert_close(learned, algorithm_1(start, batches, 2, 0.8, normalize, real, decay).float())
    assert (learned >= 0).all()
    assert decay or torch.equal(
        learned[4] if normalize == "row" else learned[:, 4], start[4] if normalize == "row" else start[:, 4]
    )


def test_a_sinkhorn_graph_is_symmetric_and_doubly_stochastic_from_the_start() -> None:
    graph = ExpertGraph(8, 2, normalize="sinkhorn")
    assert torch.equal(graph.graph, torch.eye(8))
    for _ in range(5):
        logits = torch.randn(2, 40, 8)
        logits[..., 5] = -10
        learned = learn(graph, [logits])
        torch.testing.assert_close(learned, learned.t())
        torch.testing.assert_close(learned.sum(0), torch.ones(8), atol=1e-5, rtol=0)
        torch.testing.assert_close(learned[5], torch.eye(8)[5])
    # Proposition 1: a perturbation of p, which sums to 0, does not grow.
    assert torch.linalg.matrix_norm(graph.graph - graph.graph.mean(1, keepdim=True), ord=2) < 1 + 1e-5


def test_a_threshold_makes_the_graph_sparse() -> None:
    graph = ExpertGraph(3, 1, threshold=0.05)
    graph.graph.copy_(torch.tensor([[0.9, 0.04, 0.06], [0.0, 1.0, 0.0], [0.02, 0.05, 0.93]]))
    assert graph.expert_graph().count_nonzero() == 5
    gates = torch.tensor([[[0.2, 0.3, 0.5]]])
    torch.testing.assert_close(graph.eval()(gates, gates, gates, Context())[0, 0, 0], torch.tensor(0.2 * 0.9 + 0.5 * 0.06))


def test_with_k_1_and_identity_init_symphony_is_the_plain_router() -> None:
    plain = holdfast.create_router("smoe", dim=16, experts=6, k=1, weights="switch")
    symphony = holdfast.create_router("symphony", dim=16, experts=6, k=1, init="identity")
    symphony.score.load_state_dict(plain.score.state_dict())
    for _ in range(5):
        tokens = torch.randn(3, 20, 16)
        expected, got = plain(tokens), symphony(tokens)
        assert torch.equal(got.experts, expected.experts)
        torch.testing.assert_close(got.weights, expected.weights)
    torch.testing.assert_close(symphony.eval().informers[0].get_buffer("graph"), torch.eye(6))


def test_a_zero_graph_gives_zero_weights_for_one_batch_and_no_nan() -> None:
    layer = holdfast.MoE(holdfast.create_router("symphony", dim=16, experts=6), holdfast.Experts(16, 8, 6))
    layer.router.losses = holdfast.Losses(balance=1.0, importance=1.0, load=1.0, z=1.0, entropy=1.0)
    tokens = torch.randn(2, 9, 16, requires_grad=True)
    out, routing = layer(tokens)
    assert torch.equal(out, torch.zeros_like(out))
    (out.sum() + routing.loss).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    assert layer(tokens)[0].abs().sum() > 0


@pytest.mark.parametrize("noise", [{"noise": "gaussian", "noise_std": 0.0}, {"noise": "gumbel"}])
def test_noise_keeps_the_sum_of_the_gates_also_of_a_zero_graph(noise: dict[str, Any]) -> None:
    router, tokens = holdfast.create_router("symphony", dim=16, experts=6, **noise), torch.randn(2, 40, 16)
    assert torch.equal(router(tokens).weights, torch.zeros(80, 2))
    for _ in range(3):
        router(tokens)
    quiet = holdfast.create_router("symphony", dim=16, experts=6)
    quiet.load_state_dict(router.state_dict())
    got, expected = router(tokens), quiet(tokens)
    torch.testing.assert_close(got.gates.sum(-1), expected.gates.sum(-1))
    if noise["noise"] == "gaussian":  # of standard deviation 0
        torch.testing.assert_close(got.weights, expected.weights)


def test_weights_are_raw_gates_alone_and_renormalised_beside_a_token_informer() -> None:
    assert holdfast.create_router("symphony", dim=8, experts=4).select.weights == "switch"
    for name in ("symphony+similarity", "similarity+symphony"):
        assert holdfast.create_router(name, dim=8, experts=4).select.weights == "softmax"
    assert holdfast.create_router("symphony", dim=8, experts=4, weights="softmax").select.weights == "softmax"

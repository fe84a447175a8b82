"""The auction: balanced exactly, and within its precision of the best assignment."""

import itertools
import math

import pytest
import torch
from balanced_references import best_assignment
from torch import Tensor

from holdfast.routing import transport
from holdfast.routing.transport import STEPS, assign_balanced, auction, steps


def check_balanced(chosen: Tensor, k: int) -> None:
    tokens, experts = chosen.shape
    assert bool((chosen.sum(1) == k).all())
    assert int(chosen.sum(0).max()) <= math.ceil(tokens * k / experts)


def lost(scores: Tensor, k: int) -> float:
    """Return how much smaller the sum of the auction is than the largest one, over the range of the scores and T k + E."""
    chosen = auction(scores, k)
    check_balanced(chosen, k)
    spread = float(scores.max() - scores.min()) or 1.0
    found, best = (float(scores.double()[x].sum()) for x in (chosen, best_assignment(scores, k)))
    return (best - found) / ((scores.shape[0] * k + scores.shape[1]) * spread)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_eight_tokens_get_the_best_of_all_balanced_assignments(seed: int, k: int) -> None:
    scores = torch.randint(0, 50, (8, 4), generator=torch.Generator().manual_seed(seed)).float()
    chosen = auction(scores, k)
    check_balanced(chosen, k)
    # Scores are whole numbers, so a sum within less than 1 of the largest is the largest.
    assert (8 * k + 4) * STEPS[-1] * 50 < 1
    assert float(scores[chosen].sum()) == largest_sum(scores.tolist(), k)


def largest_sum(scores: list[list[float]], k: int) -> float:
    """Try every assignment, token by token; keep the best sum for each vector of loads."""
    places = math.ceil(len(scores) * k / len(scores[0]))
    best = {(0,) * len(scores[0]): 0.0}
    for row in scores:
        extended: dict[tuple[int, ...], float] = {}
        for loads, total in best.items():
            for chosen in itertools.combinations(range(len(row)), k):
                now = tuple(load + (expert in chosen) for expert, load in enumerate(loads))
                if max(now) <= places:
                    extended[now] = max(extended.get(now, -math.inf), total + sum(row[expert] for expert in chosen))
        best = extended
    return max(best.values())


@pytest.mark.parametrize("kind", ["normal", "skewed", "rounded"])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(63, 7, 1), (63, 7, 2), (256, 8, 1), (130, 16, 3), (3, 7, 2), (9, 4, 3)]
)
def test_the_sum_is_within_the_precision_of_the_best(tokens: int, experts: int, k: int, kind: str) -> None:
    scores = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    if kind == "skewed":
        scores = 0.3 * scores + torch.linspace(3, 0, experts)
    scores = scores.round() if kind == "rounded" else scores
    assert -1e-6 <= lost(scores, k) <= steps(len(scores))[-1]


@pytest.mark.parametrize("k", [1, 2])
def test_it_ends_whatever_the_scores(k: int) -> None:
    tied = torch.zeros(50, 6)
    wanted = tied.clone()
    wanted[:, :2] = 1.0  # all tokens want the same two experts
    odd = torch.randn(50, 6)
    odd[3], odd[4, 1], odd[5, 2], odd[6, 0] = torch.nan, torch.inf, -torch.inf, 1e38
    for scores in (tied, wanted, odd, 1e-30 * torch.randn(50, 6), 1e4 + torch.randn(50, 6)):
        check_balanced(auction(scores, k), k)


def test_all_experts_are_taken_if_a_token_takes_them_all() -> None:
    assert auction(torch.randn(5, 3), 3).all()


def test_groups_of_a_large_batch_are_balanced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MOST_TOKENS", 40)
    for tokens, experts, k in ((163, 7, 2), (90, 16, 1), (41, 5, 3)):
        scores = torch.randn(tokens, experts) + torch.linspace(2, 0, experts)
        chosen = auction(scores, k)
        check_balanced(chosen, k)
        greedy = torch.zeros_like(chosen).scatter(1, scores.topk(k).indices, True)
        assert scores[chosen].sum() > 0.7 * scores[greedy].sum()
        assert torch.equal(chosen, auction(scores, k)), "the permutation must be the same in a recomputation"


def test_padding_takes_no_place() -> None:
    scores, real = torch.randn(40, 5), torch.rand(40) < 0.7
    assigned = assign_balanced(scores, real, 2)
    alone = assign_balanced(scores[real], torch.ones(int(real.sum()), dtype=torch.bool), 2)
    assert torch.equal(assigned[real], alone)
    assert bool((assigned[~real] == 0).all())

"""Randomised smoothing: the bound against exact probabilities, the vote as a router, and what noise depends on."""

import math
from typing import Any

import pytest
import torch
from certificates.certified_routers import build, generator, linear_score
from torch import Tensor

from holdfast.attacks import attack_routes
from holdfast.certificates import MajorityVote, Smoothing, certify, certify_vote
from holdfast.certificates.voting import majority, pack_sets, unpack_sets
from holdfast.routing import Router, Routing, TopK, create_router


def two_experts() -> Router:
    """The set is {0} where the first feature is positive."""
    return Router(linear_score([[1.0, 0.0], [-1.0, 0.0]]), select=TopK(2, 1)).eval()


def test_the_certified_radius_covers_at_the_stated_confidence() -> None:
    """On a plane the chance of the set is Phi(x / sigma), and the vote's exact radius is the distance |x| itself."""
    tokens = torch.linspace(0.05, 1.5, 400).unsqueeze(1) * torch.tensor([1.0, 0.0])
    smoothing = Smoothing(sigma=0.7, samples=300, selection=20, alpha=0.1)
    found = certify_vote(MajorityVote(two_experts(), smoothing), tokens)
    too_large = (found.radius > tokens[:, 0].double()).float().mean().item()
    assert too_large <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / 400)
    assert too_large > 0.02  # and it is not so timid that it never is
    assert found.kind == "probabilistic" and found.confidence == pytest.approx(0.9)
    clear = tokens[:, 0] > 0.5
    assert (found.radius[clear] > 0).all() and (found.radius / tokens[:, 0]).median() > 0.7


def test_the_bound_is_that_of_clopper_and_pearson() -> None:
    """All of 100 samples agree: p = alpha^(1/100)."""
    smoothing = Smoothing(sigma=0.5, samples=100, selection=10, alpha=0.01)
    found = certify_vote(MajorityVote(two_experts(), smoothing), torch.tensor([[50.0, 0.0]]))
    lowest = 0.01 ** (1 / 100)
    assert found.radius.item() == pytest.approx(0.5 * torch.special.ndtri(torch.tensor(lowest).double()).item(), rel=1e-6)
    assert found.margin.item() == pytest.approx(2 * lowest - 1, rel=1e-6) and found.pair.tolist() == [[0, 1]]


def test_a_vote_without_a_clear_majority_has_radius_zero() -> None:
    found = certify_vote(MajorityVote(two_experts(), Smoothing(sigma=1.0, samples=50)), torch.tensor([[0.001, 0.0]]))
    assert found.radius.item() == 0 and found.margin.item() < 0


def test_a_token_s_result_depends_on_seed_and_index_only() -> None:
    made, tokens, _ = build("symphony row")
    rows = tokens.flatten(0, 1)
    settings: dict[str, Any] = {"sigma": 0.3, "samples": 40, "selection": 20}
    whole = certify_vote(MajorityVote(made, Smoothing(**settings)), rows)
    part = certify_vote(MajorityVote(made, Smoothing(**settings, first=10)), rows[10:20])
    assert torch.equal(whole.radius[10:20], part.radius) and torch.equal(whole.pair[10:20], part.pair)
    again = certify_vote(MajorityVote(made, Smoothing(**settings)), rows)
    other = certify_vote(MajorityVote(made, Smoothing(**settings, seed=1)), rows)
    assert torch.equal(again.radius, whole.radius) and not torch.equal(other.radius, whole.radius)
    votes = [MajorityVote(made, Smoothing(**settings, first=first))(rows[first:20]) for first in (0, 10)]  # type: ignore[arg-type]
    assert torch.equal(votes[0].chosen[10:], votes[1].chosen)
    shaped = certify_vote(MajorityVote(made, Smoothing(**settings)), tokens)
    assert torch.equal(shaped.radius.flatten(), whole.radius)


def test_selection_and_estimation_use_different_noise() -> None:
    tokens = torch.zeros(5, 2)
    seen: list[Tensor] = []

    def route(rows: Tensor) -> Routing:
        seen.append(rows)
        return two_experts()(rows)

    certify_vote(MajorityVote(route, Smoothing(sigma=1.0, samples=20, selection=20)), tokens)
    assert len(seen) == 40 and len({row.sum().item() for row in seen}) == 40
    noise = torch.stack(seen)
    assert noise.std().item() == pytest.approx(1.0, abs=0.1)
    assert (torch.corrcoef(noise.flatten(1).t()) - torch.eye(10)).abs().max() < 0.6


@pytest.mark.slow
def test_the_vote_is_a_router_that_attacks_can_be_run_against() -> None:
    """No set that is clear at the attacked token changes inside its radius; far outside, the attack succeeds."""
    made, tokens, _ = build("top-p", batch=1, length=6)
    smoothing = Smoothing(sigma=0.5, samples=80, selection=20, alpha=0.01)
    vote = MajorityVote(made, smoothing)
    found = certify(vote, tokens)
    assert (found.radius > 0).any()
    once = dict.fromkeys(("restarts", "candidates", "pairs", "tries"), 1)
    options: dict[str, Any] = {"joint": False, "steps": 2, "rounds": 0, "bisections": 0, "check": False, **once}
    inside = attack_routes(vote, tokens, budget=found.radius, **options)
    clear = certify(vote, inside.inputs).radius > 0
    assert not (inside.flipped & clear).any()
    outside = attack_routes(vote, tokens, budget=6.0, **options)
    assert outside.rate > 0.5


def test_the_vote_of_a_smooth_gate_is_the_set_of_most_samples() -> None:
    made, tokens, _ = build("linear", batch=1)
    vote = MajorityVote(made, Smoothing(sigma=0.2, samples=64))
    routing = vote(tokens)
    sets = torch.stack([draw.chosen for draw in vote.draws(tokens, 64)])
    for token in range(16):
        names = [tuple(row.nonzero().flatten().tolist()) for row in sets[:, token]]
        best = max(names.count(name) for name in names)
        assert names.count(tuple(routing.chosen[token].nonzero().flatten().tolist())) == best
    torch.testing.assert_close(routing.gates, torch.stack([draw.gates for draw in vote.draws(tokens, 64)]).mean(0))
    assert (routing.weights.diff(dim=-1) <= 0).all()
    leaf = tokens.clone().requires_grad_()
    vote(leaf).gates[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0


def test_the_linf_radius_is_the_l2_radius_over_the_root_of_the_features() -> None:
    smoothing = Smoothing(sigma=0.5, samples=40, selection=10)
    made, tokens, _ = build("linear", batch=2)
    for router_, wide in ((made, 12), (build("similarity", batch=2)[0], 12 * 16)):
        vote = MajorityVote(router_, smoothing)
        l2, linf = certify(vote, tokens), certify(vote, tokens, norm="linf")
        torch.testing.assert_close(linf.radius, l2.radius / math.sqrt(wide))
    free = MajorityVote(lambda rows: made(rows), smoothing)
    assert free.coordinates(tokens) == 12 * 16 and free.coordinates(tokens[0]) == 12
    assert MajorityVote(lambda rows: made(rows), smoothing, joint=False).coordinates(tokens) == 12


def test_sets_of_many_experts_are_packed_and_counted() -> None:
    sets = torch.rand(50, 150, generator=generator(0)) < 0.3
    assert torch.equal(unpack_sets(pack_sets(sets), 150), sets)
    votes = torch.stack([pack_sets(sets)] * 3 + [pack_sets(~sets)] * 2)[torch.tensor([3, 0, 4, 1, 2])]
    assert torch.equal(unpack_sets(majority(votes), 150), sets)
    tie = torch.tensor([[[5]], [[3]], [[3]], [[5]], [[4]]])
    assert majority(tie).tolist() == [[3]]  # the first in order


def test_empty_sets_vote_too() -> None:
    made = create_router("remoe", dim=4, experts=3, k=1).eval()
    with torch.no_grad():
        made.score.weight.copy_(torch.eye(3, 4))  # type: ignore[union-attr, operator]
    found = certify(MajorityVote(made, Smoothing(sigma=0.1, samples=50)), -torch.ones(2, 4))
    assert (found.radius > 0).all() and (found.pair[:, 0] == 3).all()
    assert not MajorityVote(made, Smoothing(sigma=0.1, samples=20))(-torch.ones(2, 4)).used.any()

"""Attacks towards experts, on their load, and with one perturbation for all, against dense searches of a small ball."""

import json
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from wording import assert_refused

from holdfast.attacks import OBJECTIVES, AttackWarning, attack_load, attack_routes
from holdfast.certificates import certify
from holdfast.routing import Router, create_router

DIM, EXPERTS, BUDGET = 3, 4, 0.4


def build(name: str, k: int, tokens: int, seed: int = 0, dim: int = DIM) -> tuple[Router, Tensor]:
    """A router in evaluation mode that has seen a batch, and tokens (1,tokens,dim)."""
    torch.manual_seed(seed)
    made = create_router(name, dim=dim, experts=EXPERTS, k=k)
    made.train()(torch.randn(4, 16, dim))
    return made.eval(), torch.randn(1, tokens, dim)


def ball(points: int, radius: float = BUDGET) -> Tensor:
    """Points of a ball of three dimensions, half of them on its surface."""
    source = torch.Generator().manual_seed(1)
    way = torch.nn.functional.normalize(torch.randn(points, DIM, generator=source), dim=1)
    length = torch.rand(points, 1, generator=source) ** (1 / DIM)
    length[: points // 2] = 0.9999
    return radius * length * way


def sets_in_reach(made: Router, tokens: Tensor) -> Tensor:
    """(T,N,E) bool: what each token asks for at each point of its ball."""
    return torch.stack([made((token + ball(20_000)).unsqueeze(0)).requested_sets for token in tokens[0]])


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", ["smoe", "xmoe", "symphony", "capacity"])
def test_every_expert_in_reach_of_a_token_is_reached(name: str, k: int) -> None:
    made, tokens = build(name, k, tokens=30)
    in_reach = sets_in_reach(made, tokens).any(1)
    for expert in range(EXPERTS):
        result = attack_routes(made, tokens, budget=BUDGET, experts=expert, steps=20, rounds=0, bisections=0)
        assert not (in_reach[:, expert] & ~result.flipped[0]).any()
        assert torch.equal(result.flipped[0], made(result.inputs).requested_sets[:, expert])
        assert ((result.inputs.double() - tokens.double()).norm(dim=-1) <= BUDGET).all()


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_load_is_the_worst_of_all_mixtures_of_sets_in_reach(objective: str, k: int) -> None:
    for name in ("smoe", "symphony"):
        made, tokens = build(name, k, tokens=6)
        each = [sets.unique(dim=0).float().unbind(0) for sets in sets_in_reach(made, tokens)]
        value = OBJECTIVES[objective].value
        worst = max(float(value(torch.stack(mixture).mean(0))) for mixture in product(*each))
        result = attack_load(made, tokens, objective=objective, budget=BUDGET, steps=20)
        assert result.value == pytest.approx(worst, rel=1e-5) and result.value > result.clean_value
        assert ((result.inputs.double() - tokens.double()).norm(dim=-1) <= BUDGET).all()
        asked = made(result.inputs).requested_sets.float().mean(0)
        torch.testing.assert_close(torch.tensor(result.load), asked)


@pytest.mark.parametrize("name", ["smoe", "symphony", "smooth"])
def test_one_perturbation_flips_as_many_tokens_as_a_dense_search(name: str) -> None:
    found, best = 0, 0
    for seed in range(3):
        made, tokens = build(name, 1 + seed % 2, tokens=40, seed=seed)
        how: dict[str, Any] = {"steps": 20, "restarts": 6, "rounds": 0, "bisections": 0}
        result = attack_routes(made, tokens, budget=BUDGET, universal=True, **how)
        deltas = result.inputs[0].double() - tokens[0].double()
        assert (deltas - deltas[0]).abs().max() < 1e-5 and (deltas.norm(dim=-1) <= BUDGET).all()
        clean = made(tokens).chosen
        found += int(result.flipped.sum())
        best += max(int((made(tokens + point).chosen != clean).any(-1).sum()) for point in ball(3000))
    assert found >= 0.98 * best


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smoe", "symphony"])
def test_no_attack_changes_a_set_inside_a_certificate(name: str) -> None:
    """10,000 tokens, each with its own radius as budget."""
    made, tokens = build(name, 2, tokens=10_000, dim=16)
    found = certify(made, tokens)
    budget = torch.as_tensor(found.radius).double().clamp_min(0)
    assert (budget > 0).double().mean() > 0.9
    clean = made(tokens).chosen
    how: dict[str, Any] = {"steps": 4, "pairs": 1, "restarts": 0, "tries": 1}
    for expert in range(EXPERTS):
        result = attack_routes(made, tokens, budget=budget, experts=expert, rounds=0, bisections=0, **how)
        assert torch.equal(made(result.inputs).chosen, clean) and torch.equal(result.flipped[0], clean[:, expert])
    for objective in OBJECTIVES:
        load = attack_load(made, tokens, objective=objective, budget=budget, **how)
        assert load.load == load.clean_load and torch.equal(made(load.inputs).chosen, clean)
    outside = attack_routes(made, tokens, budget=4 * budget + 1e-6, rounds=0, bisections=0, **how)
    assert outside.rate > 0.9  # so that these attacks would have found something


def test_a_limit_of_capacity_does_not_hide_what_tokens_ask_for() -> None:
    made, tokens = build("capacity", 2, tokens=40)
    result = attack_load(made, tokens, budget=1.0)
    routing = made(result.inputs)
    got = routing.chosen[:, result.expert].float().mean()
    assert result.load[result.expert] > 1.3 * float(got) and result.dropped > result.clean_dropped
    assert result.dropped == pytest.approx(float(routing.dropped.sum() / routing.requested_sets.sum()))
    free = attack_load(build("smoe", 2, tokens=40)[0], tokens, budget=1.0)
    assert free.dropped == 0


@pytest.mark.slow
def test_sets_of_varying_sizes_are_attacked_and_the_flag_says_what_is_not_searched() -> None:
    """Some token here asks for every expert, and others can still be pushed."""
    made, tokens = build("remoe", 2, tokens=40, seed=1)
    assert 1 < made(tokens).chosen.sum(1).max() == EXPERTS
    found = attack_load(made, tokens, budget=1.0)
    assert found.value > found.clean_value
    with pytest.warns(AttackWarning, match="lower bound"):
        uneven = attack_load(made, tokens, budget=1.0, objective="imbalance")
    assert uneven.value >= uneven.clean_value


def test_padding_has_no_load_and_is_not_moved() -> None:
    made, tokens = build("smoe", 1, tokens=12)
    mask = torch.arange(12).unsqueeze(0) < 8
    result = attack_load(made, tokens, budget=BUDGET, token_mask=mask)
    alone = attack_load(made, tokens[:, :8], budget=BUDGET)
    assert result.load == alone.load and result.tokens == 8
    assert torch.equal(result.inputs[:, 8:], tokens[:, 8:])


def test_the_same_seed_gives_the_same_attack_and_a_summary_is_json() -> None:
    made, tokens = build("symphony", 2, tokens=12)
    for objective in OBJECTIVES:
        first, second = (attack_load(made, tokens, objective=objective, budget=BUDGET, seed=3) for _ in range(2))
        assert torch.equal(first.inputs, second.inputs)
        assert json.loads(json.dumps(first.summary()))["attack"] == objective


def test_an_attack_that_still_finds_much_in_its_last_steps_is_flagged() -> None:
    """The key is an angle: its slope turns on the way, so that one step does not reach the boundary."""

    def turning(x: Tensor) -> Tensor:
        angle = torch.atan2(x[..., 1], x[..., 0])
        return torch.stack([0 * angle, angle - 2.6], -1)

    tokens = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.9, -0.1], [1.1, 0.0]])
    how: dict[str, Any] = {
        "budget": 1.2,
        "k": 1,
        "joint": False,
        "restarts": 0,
        "rounds": 0,
        "bisections": 0,
        "tries": 0,
        "pairs": 1,
    }
    with pytest.warns(AttackWarning, match="more steps help: 3 of 3"):
        attack_routes(turning, tokens, experts=1, steps=8, **how)
    assert attack_routes(turning, tokens, experts=1, steps=20, **how).flags == ()


def test_random_routing_is_flagged() -> None:
    made, tokens = build("smoe", 1, tokens=8)
    torch.manual_seed(0)
    noisy = lambda x: made.score(x, None) + 0.1 * torch.randn(*x.shape[:-1], EXPERTS)  # noqa: E731
    with pytest.warns(AttackWarning, match="randomised"):
        result = attack_load(noisy, tokens, budget=BUDGET, k=1, tries=0)
    assert "randomised forward" in {flag.kind for flag in result.flags}


def test_misleading_gradients_are_flagged() -> None:
    made, tokens = build("smoe", 1, tokens=40)
    with pytest.warns(AttackWarning, match="black box"):
        result = attack_routes(
            lambda x: made(2 * x.detach() - x), tokens, budget=1.0, experts=0, restarts=0, rounds=0, tries=20
        )
    assert "black box beats white box" in {flag.kind for flag in result.flags}


def test_wrong_experts_and_objectives_are_refused() -> None:
    made, tokens = build("smoe", 2, tokens=4)
    assert_refused("0 to 3", attack_routes, made, tokens, budget=1.0, experts=4)
    assert_refused("each once", attack_routes, made, tokens, budget=1.0, experts=[1, 1])
    assert_refused("at most 2 experts", attack_routes, made, tokens, budget=1.0, experts=[0, 1, 2])
    assert_refused("imbalance", attack_load, made, tokens, budget=1.0, objective="imbalances")
    assert_refused("2 layers", attack_load, lambda x: [made(x), made(x)], tokens, budget=1.0)
    assert_refused("every expert", attack_load, build("smoe", 4, tokens=4)[0], tokens, budget=1.0)

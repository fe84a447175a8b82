"""The routing attack against exact certificates, and on routers that have none."""

import json
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from wording import assert_refused

from holdfast.attacks import AttackedRoutes, AttackWarning, attack_routes
from holdfast.attacks.route_search import RouteProbe
from holdfast.certificates import certify
from holdfast.routing import Context, Linear, Router, Routing, create_router
from holdfast.routing.bounds import NORMS, Norm

DIM, EXPERTS = 16, 6
NAMES = ["smoe", "xmoe", "symphony", "top-p", "remoe", "smooth", "similarity", "xmoe+symphony+similarity"]
FAST: dict[str, Any] = {"steps": 6, "rounds": 0, "bisections": 8, "pairs": 3, "tries": 1}


def build(name: str, k: int = 2, seed: int = 0, experts: int = EXPERTS) -> tuple[Router, Tensor]:
    """A router in evaluation mode that has seen a batch, and tokens (2,9,DIM)."""
    torch.manual_seed(seed)
    made = create_router(name, dim=DIM, experts=experts, k=k)
    made.train()(torch.randn(4, 16, DIM))
    return made.eval(), torch.randn(2, 9, DIM)


def certificate(made: Router, tokens: Tensor, norm: Norm) -> Tensor:
    """(B,N): the exact distance of each token to its nearest plane, which tests of certificates compare with loops."""
    return certify(made, tokens, norm=norm, arithmetic=None).distance


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["smoe", "xmoe"])
@pytest.mark.parametrize("k", [1, 3])
def test_no_set_flips_inside_an_exact_certificate_and_every_one_just_outside(name: str, k: int, norm: Norm) -> None:
    made, tokens = build(name, k)
    radius = certificate(made, tokens, norm)
    assert (radius > 1e-4).all()
    inside = attack_routes(made, tokens, budget=0.999 * radius, norm=norm, rounds=0, bisections=4)
    assert inside.rate == 0 and inside.distances.isinf().all()
    outside = attack_routes(made, tokens, budget=1.001 * radius, norm=norm, rounds=0, bisections=4)
    assert outside.rate == 1 and (outside.distances >= 0.999 * radius).all()


@settings(max_examples=8)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 3), norm=st.sampled_from(NORMS), times=st.floats(0.1, 10))
def test_flips_are_those_beyond_the_certificate_whatever_the_router(seed: int, k: int, norm: Norm, times: float) -> None:
    made, tokens = build("smoe", k, seed)
    radius = certificate(made, tokens, norm)
    budget = float(times * radius.median())
    result = attack_routes(made, tokens, budget=budget, norm=norm, **FAST)
    assert not result.flipped[radius > 1.0001 * budget].any()
    assert result.flipped[radius < 0.999 * budget].all()


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_the_smallest_flip_found_is_the_exact_radius(norm: Norm) -> None:
    """From a budget many times as large, by bisection along the way to the nearest plane."""
    for name, slack in (("smoe", 1.01), ("xmoe", 1.1)):  # cosines are not linear, only their switching planes are flat
        made, tokens = build(name)
        radius = certificate(made, tokens, norm)
        result = attack_routes(made, tokens, budget=float(2 * radius.max()), norm=norm, rounds=2, restarts=0)
        assert (result.distances >= radius * (1 - 1e-4)).all()
        assert (result.distances <= radius * slack).all()


@pytest.mark.parametrize("norm", NORMS)
def test_the_nearest_plane_is_known_before_the_first_step(norm: Norm) -> None:
    """One pair, one step: the smallest margin is not the nearest plane, nor is the l2 one the nearest for l_inf."""
    made, tokens = build("smoe", k=4, experts=16)
    radius = certificate(made, tokens, norm)
    result = attack_routes(made, tokens, budget=1.001 * radius, norm=norm, steps=1, pairs=1, restarts=0, rounds=0, tries=0)
    assert result.rate == 1


@pytest.mark.parametrize(
    ("name", "by_logits"), [("smoe", True), ("xmoe", True), ("remoe", True), ("symphony", False), ("top-p", False)]
)
def test_margins_are_read_where_selection_reads_them(name: str, by_logits: bool) -> None:
    """Logits where gates only follow them; gates after an informer, or where a threshold on them decides."""
    made, tokens = build(name)
    assert RouteProbe(made, tokens, None).by_logits == [by_logits]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", NAMES)
def test_every_router_is_flipped_within_the_ball_more_often_at_a_larger_budget(name: str, norm: Norm) -> None:
    made, tokens = build(name)
    results = [attack_routes(made, tokens, budget=budget, norm=norm, relative=True, **FAST) for budget in (0.0, 0.03, 0.6)]
    rates = [result.rate for result in results]
    assert rates[0] == 0 and torch.equal(results[0].inputs, tokens)
    assert rates[0] < rates[1] < rates[2] and rates[2] > 0.9
    for result in results:
        moves = result.inputs.double() - tokens.double()
        lengths = moves.norm(dim=-1) if norm == "l2" else moves.abs().amax(-1)
        own = tokens.double().norm(dim=-1) if norm == "l2" else tokens.double().abs().amax(-1)
        assert result.budget is not None and (lengths <= result.budget * own).all()
        assert torch.equal(result.flipped.flatten(), (made(result.inputs).chosen != made(tokens).chosen).any(-1))
        assert result.flags == ()


def test_the_attack_beats_noise_of_the_same_length() -> None:
    for name in ("smoe", "symphony", "smooth", "similarity"):
        made, tokens = build(name)
        clean = made(tokens).chosen
        noise = torch.nn.functional.normalize(torch.randn(20, *tokens.shape), dim=-1) * 0.4
        random = max(float((made(tokens + move).chosen != clean).any(-1).float().mean()) for move in noise)
        assert attack_routes(made, tokens, budget=0.4, **FAST).rate > random + 0.1


@pytest.mark.slow
def test_the_flipped_distance_is_reached_by_no_smaller_budget_of_the_same_attack() -> None:
    """Distances and budgets are the same thing: a token flips at a budget if its distance is within it."""
    made, tokens = build("symphony")
    result = attack_routes(made, tokens, budget=3.0, rounds=2)
    assert result.distances.isfinite().all()
    again = attack_routes(made, tokens, budget=1.01 * result.distances, rounds=0)
    assert again.rate > 0.9
    assert attack_routes(made, tokens, budget=0.7 * result.distances, rounds=0).rate < 0.1


@pytest.mark.parametrize("name", ["smoe", "similarity"])
def test_padding_is_neither_moved_nor_counted_nor_looked_at(name: str) -> None:
    made, tokens = build(name)
    token_mask = torch.ones(2, 9, dtype=torch.bool)
    token_mask[1, 4:] = False
    other = tokens.clone()
    other[~token_mask] = 50.0
    results = [
        attack_routes(made, x, budget=0.3, context=Context(causal=True, token_mask=token_mask), **FAST)
        for x in (tokens, other)
    ]
    for result, clean in zip(results, (tokens, other), strict=True):
        assert torch.equal(result.inputs[~token_mask], clean[~token_mask])
        assert not result.flipped[~token_mask].any() and result.distances[~token_mask].isinf().all()
        assert (result.budgets[~token_mask] == 0).all() and int(result.real.sum()) == 13
        assert result.rate == float(result.flipped.sum() / 13)
    assert torch.equal(results[0].flipped, results[1].flipped) and results[0].rate > 0
    torch.testing.assert_close(results[0].inputs[token_mask], results[1].inputs[token_mask], rtol=0, atol=1e-5)


def test_tokens_of_a_sequence_move_together_where_one_may_flip_another() -> None:
    made, tokens = build("similarity")
    result = attack_routes(made, tokens, budget=0.3, **FAST)
    assert result.joint and not attack_routes(build("smoe")[0], tokens, budget=0.3, **FAST).joint
    # Each sequence is a case of its own.
    fixed = FAST | {"tries": 0, "restarts": 0}
    alone = attack_routes(made, tokens[:1], budget=0.3, **fixed)
    both = attack_routes(made, tokens, budget=0.3, **fixed)
    assert torch.equal(alone.flipped[0], both.flipped[0])
    # A distance is the largest move in the sequence: a joint move of that length flips the token.
    assert (result.distances[result.flipped] <= 0.3).all()


def scores_of(made: Router) -> "torch.nn.Module":
    class Scores(torch.nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            assert isinstance(made.score, Linear)
            return tokens @ made.score.weight.t()

    return Scores().eval()


def test_a_callable_that_gives_scores_needs_k_and_is_attacked_alike() -> None:
    made, tokens = build("smoe", k=3)
    radius = certificate(made, tokens, "l2")
    assert_refused(r"\bk\b", attack_routes, scores_of(made), tokens, budget=0.1)
    result = attack_routes(scores_of(made), tokens, budget=1.001 * radius, k=3, joint=False, **FAST)
    assert (
        result.rate == 1
        and attack_routes(scores_of(made), tokens, budget=0.999 * radius, k=3, joint=False, **FAST).rate == 0
    )


def test_a_model_of_several_layers_is_attacked_through_its_embeddings() -> None:
    first, tokens = build("smoe", seed=1)
    second, _ = build("symphony", seed=2)
    mix = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(0)) / DIM**0.5

    def model(embeddings: Tensor) -> list[Routing]:
        return [first(embeddings), second(torch.tanh(embeddings @ mix))]

    results = [attack_routes(model, tokens, budget=budget, **FAST) for budget in (0.05, 0.5)]
    for result in results:
        assert result.joint and result.flipped_by_layer.shape == (2, 2, 9)
        assert torch.equal(result.flipped, result.flipped_by_layer.any(0))
        for layer, (now, was) in enumerate(zip(model(result.inputs), model(tokens), strict=True)):
            assert torch.equal(result.flipped_by_layer[layer].flatten(), (now.chosen != was.chosen).any(-1))
    assert all(low < high for low, high in zip(results[0].rates, results[1].rates, strict=True)) and results[1].rate > 0.9


def test_the_core_of_a_smooth_router_is_what_its_certificate_is_about() -> None:
    made, tokens = build("smooth")
    assert bool((made(tokens).used.sum(-1) > 2).any())
    plain = create_router("smoe", dim=DIM, experts=EXPERTS, k=2).eval()
    plain.score.load_state_dict(made.score.state_dict())
    radius = certificate(plain, tokens, "l2")
    assert attack_routes(made, tokens, budget=0.999 * radius, k=2, **FAST).rate == 0
    assert attack_routes(made, tokens, budget=1.001 * radius, k=2, **FAST).rate == 1
    assert attack_routes(made, tokens, budget=0.999 * radius, **FAST).rate > 0.3  # its whole set changes earlier


def test_a_route_without_a_graph_is_flagged_and_noise_beats_it() -> None:
    made, tokens = build("smoe")
    with pytest.warns(AttackWarning) as caught:
        result = attack_routes(lambda x: made(x.detach()), tokens, budget=1.5, restarts=0, **FAST)
    assert [flag.kind for flag in result.flags] == ["zero gradients", "black box beats white box"]
    assert len(caught) == 2 and result.rate > 0.2


def test_a_router_in_training_mode_and_a_noisy_one_are_flagged() -> None:
    torch.manual_seed(0)
    made, tokens = create_router("smoe", dim=DIM, experts=EXPERTS, noise="gumbel").train(), torch.randn(2, 9, DIM)
    with pytest.warns(AttackWarning):
        flags = attack_routes(made, tokens, budget=0.1, **FAST).flags
    assert {"train mode", "randomised forward"} <= {flag.kind for flag in flags}

    def noisy(x: Tensor) -> Tensor:
        return x @ torch.eye(DIM)[:, :EXPERTS] + torch.randn(2, 9, EXPERTS)

    with pytest.warns(AttackWarning, match="randomised forward"):
        attack_routes(noisy, tokens, budget=0.1, k=2, **FAST)


def test_a_router_with_all_its_experts_in_use_cannot_be_flipped() -> None:
    made, tokens = build("smoe", k=EXPERTS)
    result = attack_routes(made, tokens, budget=1.0, **FAST)
    assert result.rate == 0 and result.flags == ()


def test_seeds_repeat_and_the_router_is_left_as_it_was() -> None:
    made, tokens = build("smooth")
    before = {name: value.clone() for name, value in made.state_dict().items()}
    results: list[AttackedRoutes] = [attack_routes(made, tokens, budget=0.2, seed=7, **FAST) for _ in range(2)]
    assert torch.equal(results[0].inputs, results[1].inputs) and torch.equal(results[0].distances, results[1].distances)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert all(parameter.grad is None for parameter in made.parameters()) and not tokens.requires_grad


def test_rows_of_tokens_and_bfloat16_are_fine() -> None:
    made, tokens = build("smoe")
    rows = tokens.flatten(0, 1)
    assert attack_routes(made, rows, budget=2.0, **FAST).flipped.shape == (18,)
    result = attack_routes(made, rows.bfloat16(), budget=0.5, **FAST)
    assert result.inputs.dtype == torch.bfloat16 and result.rate > 0 and result.realised <= 0.5


def test_a_summary_holds_the_threat_model_and_is_json() -> None:
    made, tokens = build("smoe")
    summary = json.loads(json.dumps(attack_routes(made, tokens, budget=0.2, norm="linf", seed=3, **FAST).summary()))
    assert summary["budget"] == 0.2 and summary["norm"] == "linf" and summary["seed"] == 3 and summary["tokens"] == 18
    assert 0 < summary["smallest"] <= summary["median"] <= 0.2
    nothing = json.loads(json.dumps(attack_routes(made, tokens, budget=0.0, **FAST).summary()))
    assert nothing["smallest"] is None and nothing["rate"] == 0


def test_wrong_arguments_are_named() -> None:
    made, tokens = build("smoe")
    with pytest.raises(TypeError, match="budget"):
        attack_routes(made, tokens)  # type: ignore[call-arg]
    assert_refused(r"budget.* None", attack_routes, made, tokens, budget=None)
    assert_refused(r"\(2, 9\)", attack_routes, made, tokens, budget=torch.ones(2))
    assert_refused(r"context.*Router", attack_routes, scores_of(made), tokens, budget=0.1, k=2, context=Context())
    assert_refused(r"torch\.int64", attack_routes, made, tokens, budget=0.1, token_mask=torch.ones(2, 9, dtype=torch.int64))
    assert_refused(r"\bk\b.*\b5\b.*\b2 experts", attack_routes, made, tokens, budget=0.1, k=5)
    assert_refused("finite", attack_routes, made, tokens.long(), budget=0.1)

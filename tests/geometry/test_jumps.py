"""The output along the normal through the nearest tie: top-k jumps, smooth does not; slopes of the gates themselves."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.geometry import (
    affine_order,
    along_normals,
    gate_slopes,
    nearest_boundaries,
    smooth_weights,
    softmax_weights,
    top_k_weights,
)
from holdfast.routing import Router
from holdfast.routing.thresholds import sparsemax


def two_layers(name: str = "smoe") -> tuple[holdfast.MoE, holdfast.MoE, Tensor]:
    """Return an MoE layer with the router `name`, the same layer with a smooth one, and tokens."""
    torch.manual_seed(0)
    experts = holdfast.Experts(12, 16, 6)
    hard = holdfast.create_router(name, dim=12, experts=6, k=2).eval()
    soft = holdfast.create_router(f"{name}+smooth", dim=12, experts=6, k=2, eps=0.5).eval()
    soft.score.load_state_dict(hard.score.state_dict())
    return holdfast.MoE(hard, experts).eval(), holdfast.MoE(soft, experts).eval(), torch.randn(20, 12)


def router_of(layer: holdfast.MoE) -> Router:
    assert isinstance(layer.router, Router)
    return layer.router


def test_top_k_jumps_at_the_nearest_tie_and_smooth_does_not() -> None:
    hard, soft, tokens = two_layers()
    order, k = affine_order(router_of(hard), tokens)
    layers = {"top-k": lambda x: hard(x.unsqueeze(0))[0].squeeze(0), "smooth": lambda x: soft(x.unsqueeze(0))[0].squeeze(0)}
    found = along_normals(layers, order, tokens, k, reach=0.2, points=101)
    assert found.outputs["top-k"].shape == (20, 101, 12)
    sharp, smooth = found.jumps["top-k"], found.jumps["smooth"]
    # The difference of both sides stays for top-k and falls with the step for smooth.
    ratio = smooth.differences[-1] / smooth.differences[-3]
    assert (sharp.limit > 1e-3).all() and (ratio < 0.2).all()
    torch.testing.assert_close(sharp.differences[-1], sharp.limit, rtol=0.05, atol=1e-4)
    # On the sampled line the jump is between the points on both sides of the tie.
    largest = found.outputs["top-k"].double().diff(dim=1).norm(dim=2)
    middle = largest[:, 50]
    assert (middle >= 0.5 * sharp.limit).all()


@pytest.mark.parametrize("name", ["smoe", "xmoe"])
def test_the_router_flips_at_the_nearest_boundary(name: str) -> None:
    hard, _, tokens = two_layers(name)
    router = router_of(hard)
    order, k = affine_order(router, tokens)
    found = nearest_boundaries(order, tokens, k)
    before, after = (router((found.points + side * 1e-3 * found.normals).float()).chosen for side in (-1, 1))
    assert torch.equal(before, router(tokens).chosen)
    change = before.long() - after.long()
    assert torch.equal(change.argmax(1), found.leaving) and torch.equal(change.argmin(1), found.entering)
    assert (change.abs().sum(1) == 2).all()


def test_tokens_without_a_tie_are_refused_and_those_on_a_boundary_have_a_normal() -> None:
    hard, _, tokens = two_layers()
    order, _ = affine_order(router_of(hard), tokens)
    assert_refused("a token can flip only", nearest_boundaries, order, tokens, 6)
    once = nearest_boundaries(order, tokens.double(), 2)
    again = nearest_boundaries(order, once.points, 2)
    torch.testing.assert_close(once.points, again.points)
    torch.testing.assert_close((once.normals * again.normals).sum(1).abs(), torch.ones(20, dtype=torch.float64))
    assert_refused("reach is 0", along_normals, {}, order, tokens, 2, reach=0.0)


@pytest.fixture(scope="module")
def logits() -> Tensor:
    return 2 * torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_slope_of_softmax_is_the_norm_of_its_jacobian(logits: Tensor) -> None:
    found = gate_slopes(softmax_weights, logits, 2)
    p = logits.softmax(-1)
    exact = torch.linalg.matrix_norm(torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1), ord=2)
    torch.testing.assert_close(found.at_token, exact, rtol=1e-5, atol=1e-7)
    assert (found.at_token <= 0.5 + 1e-6).all() and (found.jump == 0).all() and (found.largest <= 0.5 + 1e-6).all()


def test_the_slope_of_sparsemax_is_0_or_1(logits: Tensor) -> None:
    found = gate_slopes(sparsemax, logits, 2)
    several = (sparsemax(logits) > 0).sum(1) > 1
    torch.testing.assert_close(found.at_token, several.double(), rtol=1e-5, atol=1e-5)
    assert (found.jump == 0).all()


def test_top_k_is_infinitely_steep_at_a_tie_and_its_jump_is_known(logits: Tensor) -> None:
    found = gate_slopes(lambda x: top_k_weights(x, 2), logits, 2)
    assert found.largest.isinf().all() and (found.at_token <= 0.5 + 1e-6).all()
    ordered = logits.sort(dim=1, descending=True).values
    tie = (ordered[:, 1] + ordered[:, 2]) / 2
    weight = 1 / (1 + (ordered[:, 0] - tie).exp())  # of the second expert, at the tie
    torch.testing.assert_close(found.jump, math.sqrt(2) * weight, rtol=1e-4, atol=1e-6)
    at_tie = logits.scatter(1, logits.argsort(dim=1, descending=True)[:, 1:3], tie.unsqueeze(1).expand(-1, 2))
    assert gate_slopes(lambda x: top_k_weights(x, 2), at_tie, 2).at_token.isinf().all()


def test_smooth_is_finitely_steep_and_steeper_in_a_narrower_strip(logits: Tensor) -> None:
    steep = []
    for eps in (0.5, 0.05):
        found = gate_slopes(partial(smooth_weights, k=2, eps=eps), logits, 2, reach=2 * eps)
        assert found.largest.isfinite().all() and (found.jump == 0).all()
        steep.append(found.largest)
    assert (steep[1] > 3 * steep[0]).double().mean() > 0.9


def test_the_weights_of_the_gates_are_those_of_the_routers(logits: Tensor) -> None:
    for name, gate in (("smoe", lambda x: top_k_weights(x, 2)), ("smooth", lambda x: smooth_weights(x, 2, 0.5))):
        options = {"eps": 0.5} if name == "smooth" else {}
        router = holdfast.create_router(name, dim=6, experts=6, k=2, **options).eval()
        with torch.no_grad():
            router.score.get_parameter("weight").copy_(torch.eye(6))
            weights = router(logits.float()).dense_weights
        torch.testing.assert_close(weights.double(), gate(logits.float().double()), rtol=1e-4, atol=1e-5)

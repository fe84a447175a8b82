"""Scores: their formulas where the conformance suite's references do not look."""

import pytest
import torch

from holdfast import Context, create_router
from holdfast.certificates import certify
from holdfast.routing import Cosine, Frozen, Linear, TwoLayer
from holdfast.routing.declarations import NoCertificate


@pytest.mark.parametrize(("experts", "width"), [(4, 8), (16, 8), (64, 32)])
def test_the_cosine_space_has_half_as_many_dimensions_as_experts_but_at_least_8(experts: int, width: int) -> None:
    assert Cosine(32, experts).projection.shape == (width, 32)


def test_frozen_scores_have_nothing_to_train_and_are_saved() -> None:
    score = Frozen(16, 8)
    assert not list(score.parameters())
    assert list(score.state_dict()) == ["weight"]


def test_a_bias_of_frozen_scores_is_random_and_not_trained_and_certificates_know_it() -> None:
    router = create_router("random[bias=true]", dim=16, experts=8, k=2).eval()
    tokens, score = torch.randn(1, 200, 16), router.score
    assert isinstance(score, Frozen) and score.bias is not None and score.bias.abs().min() > 0
    assert not list(router.parameters()) and set(score.state_dict()) == {"weight", "bias"}
    torch.testing.assert_close(score(tokens, Context()), tokens @ score.weight.T + score.bias)
    radii = certify(router, tokens).radius
    direction = torch.randn_like(tokens)
    moved = tokens + 0.99 * radii.view(1, -1, 1) * direction / direction.norm(dim=-1, keepdim=True)
    assert torch.equal(router(moved).chosen, router(tokens).chosen)


def test_scores_of_a_network_start_as_large_as_linear_ones_and_have_no_certificate() -> None:
    tokens = torch.randn(4, 1000, 64)
    sizes = [float(score(tokens, Context()).detach().std()) for score in (Linear(64, 32), TwoLayer(64, 32))]
    assert sizes == pytest.approx([3**-0.5, 3**-0.5], rel=0.1)
    router = create_router("mlp[hidden=24]", dim=64, experts=8).eval()
    assert isinstance(router.score, TwoLayer) and router.score.hidden.shape == (24, 64)
    with pytest.raises(NoCertificate, match="no certificate is known for TwoLayer: it declares no order"):
        certify(router, tokens[:1, :5])
    assert TwoLayer(16, 8).weight.shape == (8, 32)


def test_a_zero_token_gets_equal_finite_scores() -> None:
    for score in (Linear(16, 8), Frozen(16, 8), Cosine(16, 8), TwoLayer(16, 8)):
        assert torch.equal(score(torch.zeros(1, 1, 16), Context()), torch.zeros(1, 1, 8))

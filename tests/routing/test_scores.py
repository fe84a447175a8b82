"""Scores: their formulas where the conformance suite's references do not look."""

import pytest
import torch

from holdfast import Context
from holdfast.routing import Cosine, Frozen, Linear


def test_cosine_scores_ignore_the_length_of_a_token() -> None:
    score, tokens = Cosine(16, 8), torch.randn(1, 5, 16)
    torch.testing.assert_close(score(tokens, Context()), score(7 * tokens, Context()))
    assert score(tokens, Context()).abs().max() <= 1 / 0.07 + 1e-4


@pytest.mark.parametrize(("experts", "width"), [(4, 8), (16, 8), (64, 32)])
def test_the_cosine_space_has_half_as_many_dimensions_as_experts_but_at_least_8(experts: int, width: int) -> None:
    assert Cosine(32, experts).projection.shape == (width, 32)


def test_frozen_scores_have_nothing_to_train_and_are_saved() -> None:
    score = Frozen(16, 8)
    assert not list(score.parameters())
    assert list(score.state_dict()) == ["weight"]


def test_a_zero_token_gets_equal_finite_scores() -> None:
    for score in (Linear(16, 8), Frozen(16, 8), Cosine(16, 8)):
        assert torch.equal(score(torch.zeros(1, 1, 16), Context()), torch.zeros(1, 1, 8))

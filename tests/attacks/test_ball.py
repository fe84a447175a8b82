"""Perturbations stay in the ball: exactly, in every dtype, whatever is projected."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from holdfast.attacks.threat import Bounds, direction, project
from holdfast.routing.bounds import NORMS, Norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def exact_distance(moved: torch.Tensor, centre: torch.Tensor, norm: Norm) -> float:
    gaps = [a - b for a, b in zip(moved.double().tolist(), centre.double().tolist(), strict=True)]
    return max(map(abs, gaps)) if norm == "linf" else math.sqrt(math.fsum(gap * gap for gap in gaps))


@given(
    centre=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    moves=st.lists(st.floats(-3, 3) | st.sampled_from([math.inf, -math.inf, math.nan]), min_size=12, max_size=12),
    radius=st.floats(0, 2) | st.floats(0, 1e-6),
    norm=st.sampled_from(NORMS),
    dtype=st.sampled_from(DTYPES),
    bounds=st.sampled_from([None, (0.0, 1.0)]),
)
def test_a_projection_is_within_the_ball_and_the_bounds(
    centre: list[float], moves: list[float], radius: float, norm: Norm, dtype: torch.dtype, bounds: Bounds
) -> None:
    at = torch.tensor([centre], dtype=dtype)
    far = at + torch.tensor([moves[: len(centre)]], dtype=dtype)
    moved = project(far, at, torch.tensor([radius], dtype=torch.float64), norm, bounds)
    assert moved.dtype == dtype and moved.isfinite().all()
    assert exact_distance(moved[0], at[0], norm) <= radius * (1 + 1e-15)  # the slack is that of this sum
    if bounds is not None:
        assert (moved >= 0).all() and (moved <= 1).all()


@given(values=st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=9), norm=st.sampled_from(NORMS))
def test_a_radius_of_zero_gives_the_centre_bit_for_bit(values: list[float], norm: Norm) -> None:
    centre = torch.tensor([values])
    assert torch.equal(project(centre + 1, centre, torch.zeros(1).double(), norm), centre)


@pytest.mark.parametrize("norm", NORMS)
def test_what_is_inside_is_left_alone_and_what_is_outside_comes_to_the_border(norm: Norm) -> None:
    torch.manual_seed(0)
    centre = torch.randn(2, 3, 5)
    way = direction(torch.randn(2, 3, 5), norm)
    radius = torch.tensor([0.25, 0.5], dtype=torch.float64)
    inside, outside = centre + 0.2 * way, centre + 3 * way
    assert torch.equal(project(inside, centre, radius, norm), inside)
    border = project(outside, centre, radius, norm)
    torch.testing.assert_close(border, centre + radius.float().view(2, 1, 1) * way, rtol=0, atol=5e-6)


def test_a_direction_has_length_one_however_small_the_gradient() -> None:
    gradient = torch.tensor([[3e-30, 4e-30], [0.0, 0.0], [float("nan"), 1.0]])
    torch.testing.assert_close(direction(gradient, "l2"), torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, 1.0]]))
    assert direction(gradient, "linf").tolist() == [[1, 1], [0, 0], [0, 1]]

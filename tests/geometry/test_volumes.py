"""Shares of a ball near flats: against Monte Carlo, against the law of large balls, and in thousands of dimensions."""

import math
from functools import cache

import pytest
import torch
from tiers import quick_or_slow
from torch import Tensor
from wording import assert_refused

from holdfast.geometry import (
    ball_radius,
    extra_experts_law,
    nearest_ties,
    slice_densities,
    slice_density_bounds,
    thickening_share,
)
from holdfast.geometry.volumes import log_ball, log_law, log_share_spread, log_share_within
from holdfast.routing.declarations import Order

SAMPLES = 10**6
RADIUS = 2.0


@cache
def points_of_ball(dim: int, samples: int = SAMPLES, seed: int = 0) -> Tensor:
    """Return uniform points of the ball."""
    source = torch.Generator().manual_seed(100 * seed + dim)
    drawn = torch.randn(samples, dim, generator=source, dtype=torch.float64)
    lengths = torch.rand(samples, 1, generator=source, dtype=torch.float64) ** (1 / dim)
    return RADIUS * lengths * drawn / drawn.norm(dim=1, keepdim=True)


def require_share(inside: Tensor, log_share: float) -> None:
    """Require the share of `inside`, a mean of as many samples, within three standard errors and 2% if it is not rare."""
    measured, expected = float(inside.double().mean()), math.exp(log_share)
    error = math.sqrt(expected * (1 - expected) / len(inside))
    assert abs(measured - expected) <= 3 * error, f"{measured} and {expected}, {(measured - expected) / error:.2f} errors"
    assert expected < 0.02 or abs(measured / expected - 1) <= 0.02


@pytest.mark.parametrize("dim", quick_or_slow([3, 4, 5, 6, 7, 8], quick=[4]))
def test_euclidean_shares_equal_monte_carlo(dim: int) -> None:
    points = points_of_ball(dim)
    for m in (1, 2, 3):
        for delta, eps in ((0.0, 0.5), (0.4, 0.7), (1.0, 0.5), (0.7, 0.7), (1.8, 0.6)):
            across = points[:, :m].clone()
            across[:, 0] -= delta
            share = log_share_within(m, dim, torch.tensor([delta]), eps, RADIUS)
            require_share(across.norm(dim=1) <= eps, float(share))


@pytest.mark.parametrize("dim", quick_or_slow([3, 4, 5, 6, 7, 8], quick=[4]))
def test_logit_shares_equal_monte_carlo(dim: int) -> None:
    points, source = points_of_ball(dim), torch.Generator().manual_seed(dim)
    for m in (1, 2, 3):
        if m == dim:  # then the density has a step at the edge of the ball
            continue
        weight = torch.linalg.qr(torch.randn(dim, m + 1, generator=source, dtype=torch.float64))[0].t()
        weight = weight * torch.linspace(1, 2, m + 1, dtype=torch.float64).unsqueeze(1)
        bias = 0.2 * torch.randn(m + 1, generator=source, dtype=torch.float64)
        keys = points @ weight.t() + bias
        rows, offsets = weight[1:] - weight[:1], bias[1:] - bias[:1]
        share = log_share_spread(m, dim, (rows @ rows.t()).unsqueeze(0), offsets.unsqueeze(0), torch.tensor([0.6]), RADIUS)
        require_share(keys.amax(1) - keys.amin(1) <= 0.6, float(share))


def errors_of_the_law(exact: list[Tensor], law: list[Tensor]) -> None:
    """Require that the law at R = 10, 100 and 1000 is too large, and that its error falls as 1 / R^2."""
    errors = [float((one - other).exp() - 1) for one, other in zip(exact, law, strict=True)]
    assert all(error < 0 for error in errors)  # a flat away from the centre has less of the ball
    assert abs(errors[0]) < 0.2 and abs(errors[2]) < 2e-5
    assert errors[1] / errors[2] == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_the_law_is_reached_as_the_ball_grows(m: int) -> None:
    radii = (10.0, 100.0, 1000.0)
    exact = [log_share_within(m, 8, torch.tensor([1.0]), 0.5, radius) for radius in radii]
    errors_of_the_law(exact, [log_law(m, 8, torch.tensor(0.5), radius) for radius in radii])


@pytest.mark.parametrize("m", [1, 2, 3])
def test_the_law_of_logits_is_reached_as_the_ball_grows(m: int) -> None:
    radii, rows = (10.0, 100.0, 1000.0), torch.eye(m, dtype=torch.float64).unsqueeze(0) * 1.5
    offsets = torch.full((1, m), 0.5, dtype=torch.float64)
    log_det = torch.linalg.slogdet(rows).logabsdet
    exact = [log_share_spread(m, 8, rows, offsets, torch.tensor([0.5]), radius) for radius in radii]
    errors_of_the_law(exact, [log_law(m, 8, torch.tensor(0.5), radius, log_det) for radius in radii])


def test_thousands_of_dimensions_do_not_overflow() -> None:
    dim, radius = 4096, 64.0
    for m in (1, 2, 3, 5, 8):
        found = log_share_within(m, dim, torch.tensor([0.0, 1.0, 2.0, 30.0, 60.0]), 0.1, radius)
        assert found.isfinite().all() and (found.diff() < 0).all()
        assert float(found[0]) == pytest.approx(float(log_law(m, dim, torch.tensor(0.1), radius)), abs=0.02)
        # A component of a point of this ball is nearly a standard Gaussian: the share falls as exp(-delta^2 / 2).
        assert float(found[1] - found[0]) == pytest.approx(-0.5, abs=0.01)
        assert float(found[2] - found[0]) == pytest.approx(-2.0, abs=0.01)
    assert math.isfinite(log_ball(100_000))
    unit, nothing = torch.eye(3, dtype=torch.float64).unsqueeze(0), torch.zeros(1, 3, dtype=torch.float64)
    spread = log_share_spread(3, dim, unit, nothing, torch.tensor([0.1]), radius)
    assert float(spread) == pytest.approx(float(log_law(3, dim, torch.tensor(0.1), radius, torch.zeros(1))), abs=0.02)


def test_at_the_radius_of_a_models_tokens_the_law_is_wrong_and_the_integral_right() -> None:
    """At R = sqrt(d) the law is too large by exp(delta^2 / 2): its factors are 0.61 and 0.14 for delta = 1 and 2."""
    dim = 1024
    for delta, factor in ((1.0, 0.61), (2.0, 0.14)):
        exact = log_share_within(1, dim, torch.tensor([delta]), 0.05, math.sqrt(dim))
        assert float((exact - log_law(1, dim, torch.tensor(0.05), math.sqrt(dim))).exp()) == pytest.approx(factor, abs=0.01)


@pytest.mark.slow
def test_a_flat_of_five_experts_and_more_needs_the_incomplete_beta_function() -> None:
    dim, eps = 8, 0.9
    points = points_of_ball(dim)
    for m in (4, 5, 8):
        across = points[:, :m].clone()
        across[:, 0] -= 0.5
        require_share(across.norm(dim=1) <= eps, float(log_share_within(m, dim, torch.tensor([0.5]), eps, RADIUS)))


@pytest.mark.slow
@pytest.mark.parametrize("bias", [0.0, 0.3])
def test_shares_of_a_whole_router_equal_the_distances_of_uniform_points(bias: float) -> None:
    """Sums over all flats, with slice densities, against the nearest ties of 200,000 points, for narrow neighbourhoods."""
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 6, generator=source, dtype=torch.float64)
    order = Order(weight, bias * torch.randn(6, generator=source, dtype=torch.float64))
    points, eps = points_of_ball(6, 200_000), torch.tensor([0.01, 0.03])
    found = thickening_share(order, points[:10], 2, eps, orders=(1, 2), radius=RADIUS, draws=4000)
    measured = nearest_ties(order, points, 2, (1, 2)).share_within(eps)
    error = (measured * (1 - measured) / len(points)).sqrt()
    close = 0.06 if bias == 0 else 0.15  # two neighbourhoods overlap; with a bias, slices near the centre differ
    assert ((measured - found.exact).abs() <= close * found.exact + 3 * error).all()
    assert (measured <= found.bound + 3 * error).all()
    assert (found.exact <= found.bound).all()


@pytest.mark.slow
def test_extra_experts_of_smooth_follow_their_law() -> None:
    source = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 6, generator=source, dtype=torch.float64)
    keys = (points_of_ball(6) @ weight.t()).sort(dim=1, descending=True).values
    for m, eps, close in ((1, 0.02, 0.03), (2, 0.06, 0.06)):
        measured = float((keys[:, 1] - keys[:, 1 + m] < eps).double().mean())
        law = float(extra_experts_law(weight, 2, torch.tensor([eps]), RADIUS, m=m, draws=20_000))
        assert law == pytest.approx(measured, rel=close)


def test_slice_densities_of_exchangeable_experts_are_known() -> None:
    """With orthogonal weights, the number of the E - m - 1 others above a tie has a known law when m + 1 = E - 1."""
    found = slice_densities(torch.eye(3, 5), 1, 1, draws=5000)
    # One other expert: it is above the tie or below it, with probability 1/2 each; k = 1 needs it below.
    assert ((found.density - 0.5).abs() < 0.03).all() and found.members.shape == (3, 2)
    assert (found.high - found.low < 0.03).all()
    total = slice_densities(torch.eye(4, 6), 2, 3, draws=100)
    assert (total.density == 1).all()  # all experts tie: always at the threshold
    half = slice_densities(torch.eye(4, 6), 2, 2, draws=5000)
    assert (half.density == 1).all()  # one other expert: 0 or 1 above are both in [k - m, k - 1] = [0, 1]
    smooth = slice_densities(torch.eye(4, 6), 2, 2, draws=5000, smooth=True)
    assert ((smooth.density - 0.5).abs() < 0.03).all()
    rough = [slice_densities(torch.eye(3, 5), 1, 1, draws=200, seed=seed) for seed in range(40)]
    covered = torch.stack([(one.low <= 0.5) & (one.high >= 0.5) for one in rough]).double().mean()
    assert 0.9 < covered < 1  # of 120 intervals of 95%


@pytest.mark.parametrize("m", [1, 2, 3])
def test_slice_densities_are_between_the_papers_bounds(m: int) -> None:
    weight = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = slice_densities(weight, 2, m, draws=4000)
    for members, low, high in zip(found.members.tolist(), found.low.tolist(), found.high.tolist(), strict=True):
        least, most = slice_density_bounds(weight, 2, members)
        assert 0 < least <= high and low <= most <= 1


def test_one_slice_of_orthogonal_weights_has_a_known_bound() -> None:
    """One other expert: the slice is a half, and the cap about its middle is that half."""
    least, most = slice_density_bounds(torch.eye(3, 5), 1, [0, 1])
    assert least == pytest.approx(0.5) and most == 0.5
    assert slice_density_bounds(torch.eye(3, 5), 1, [0, 1, 2]) == (1.0, 1.0)


def test_ratios_of_orders_fall_with_eps_over_the_radius() -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = thickening_share(Order(weight), torch.randn(5, 16), 2, [0.1, 0.2], radius=50.0, draws=32)
    torch.testing.assert_close(found.ratio(2, 1)[1] / found.ratio(2, 1)[0], torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(found.ratio(3, 1)[1] / found.ratio(3, 1)[0], torch.tensor(4.0, dtype=torch.float64))
    wider = thickening_share(Order(weight), torch.randn(5, 16), 2, [0.1], radius=500.0, draws=32)
    torch.testing.assert_close(found.ratio(2, 1)[:1] / wider.ratio(2, 1), torch.tensor([10.0], dtype=torch.float64))


def test_sampled_sets_estimate_the_sum_over_all() -> None:
    weight = torch.randn(12, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    arguments = {"eps": [0.05], "orders": (2,), "radius": 10.0, "draws": 500}
    whole = thickening_share(Order(weight), torch.zeros(1, 24), 3, **arguments)  # type: ignore[arg-type]
    part = thickening_share(Order(weight), torch.zeros(1, 24), 3, most_sets=100, **arguments)  # type: ignore[arg-type]
    assert part.sampled == (True,) and whole.sampled == (False,)
    assert abs(float(part.exact / whole.exact) - 1) <= 2 * float(part.error)


def test_both_forms_agree_on_one_pair_of_experts_of_unit_difference() -> None:
    weight = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    euclidean, logit = (
        thickening_share(Order(weight), torch.zeros(1, 4), 1, [0.1], orders=(1,), radius=3.0, form=form)  # type: ignore[arg-type]
        for form in ("euclidean", "logit")
    )
    torch.testing.assert_close(euclidean.exact, logit.exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(euclidean.law, logit.law)


@pytest.mark.parametrize("form", ["euclidean", "logit"])
def test_experts_with_equal_weights_add_no_volume(form: str) -> None:
    """Two experts with the same weights tie everywhere or nowhere: a tie of three is one of two, on the same flat."""
    weight = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]], dtype=torch.float64)
    found = thickening_share(Order(weight), torch.zeros(1, 3), 1, [0.1], orders=(1, 2), radius=2.0, form=form)  # type: ignore[arg-type]
    assert found.exact[0, 0] > 0 and found.exact[0, 1] == 0


def test_no_tie_means_no_volume() -> None:
    found = thickening_share(Order(torch.eye(3)), torch.ones(2, 3), 3, [0.1])
    assert (found.exact == 0).all() and (found.law == 0).all() and (found.bound == 0).all()


def test_the_default_ball_has_the_mean_square_of_the_tokens() -> None:
    points = points_of_ball(5, 200_000)
    assert ball_radius(points) == pytest.approx(RADIUS, rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"eps": [0.0]}, "eps is"), ({"radius": -1.0}, "the radius -1"), ({"form": "logits"}, "did you mean 'logit'")],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"eps": [0.1], "radius": 1.0} | change
    assert_refused(message, thickening_share, Order(torch.eye(4)), torch.ones(2, 4), 2, **arguments)

"""Occupation times: in the Monte Carlo interval for isotropic noise, below the bound for any other."""

import math
from itertools import combinations

import pytest
import torch
from tiers import quick_or_slow
from torch import Tensor
from wording import assert_refused

from holdfast.geometry import occupation_bound, occupation_time, occupation_times
from holdfast.geometry.walks import probability_within
from holdfast.routing.declarations import Order

STARTS = [(1.0, 0.3, 2.0, 1.0), (0.2, 0.5, 1.0, 1.0), (0.5, 0.5, 4.0, 0.7), (2.0, 0.4, 1.0, 1.5), (0.0, 0.5, 3.0, 1.0)]


def times_near(matrix: Tensor, delta: float, eps: float, time: float, samples: int = 200_000) -> tuple[float, float]:
    """Return the mean time within eps of 0 of a walk with dV = `matrix (m,m)` dB from distance delta, and its error."""
    source = torch.Generator().manual_seed(0)
    instants = time * torch.rand(samples, 1, generator=source, dtype=torch.float64)
    places = instants.sqrt() * torch.randn(samples, len(matrix), generator=source, dtype=torch.float64) @ matrix.t()
    places[:, 0] += delta
    share = float((places.norm(dim=1) <= eps).double().mean())
    return time * share, time * math.sqrt(max(share * (1 - share), 1 / samples) / samples)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize(("delta", "eps", "time", "sigma"), STARTS)
def test_isotropic_times_are_in_the_monte_carlo_interval_and_below_the_bound(
    m: int, delta: float, eps: float, time: float, sigma: float
) -> None:
    measured, error = times_near(sigma * torch.eye(m, dtype=torch.float64), delta, eps, time)
    found = float(occupation_time(m, torch.tensor([delta]), eps, time, sigma))
    assert abs(measured - found) <= 3 * error
    log_det, largest = torch.tensor([2 * m * math.log(sigma)]), torch.tensor([sigma**2])
    assert found <= float(occupation_bound(m, torch.tensor([delta]), eps, time, log_det, largest)) + 1e-9


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_times_under_any_noise_are_below_the_bound(m: int) -> None:
    source = torch.Generator().manual_seed(m)
    useful = 0
    for delta, eps, time in ((1.0, 0.2, 1.0), (0.5, 0.1, 2.0), (2.0, 0.3, 1.0), (0.1, 0.2, 1.0)):
        matrix = torch.randn(m, m, generator=source, dtype=torch.float64) + torch.eye(m, dtype=torch.float64)
        gamma = matrix @ matrix.t()
        values = torch.linalg.eigvalsh(gamma)
        bound = float(occupation_bound(m, torch.tensor([delta]), eps, time, values.log().sum().view(1), values[-1:]))
        measured, error = times_near(matrix, delta, eps, time)
        assert measured <= bound + 3 * error
        useful += bound < time
    assert useful >= 2  # a bound of the whole time says nothing


@pytest.mark.parametrize("m", [1, 2, 3])
def test_the_closed_form_of_the_bound_is_its_integral(m: int) -> None:
    delta, eps, time = torch.tensor([1.0], dtype=torch.float64), 0.2, 1.5
    instants = torch.linspace(1e-6, time, 200_001, dtype=torch.float64)
    ball = math.pi ** (m / 2) / math.gamma(m / 2 + 1)
    density = ball * eps**m * (2 * math.pi * instants) ** (-m / 2) * torch.exp(-(0.8**2) / (2 * instants))
    integral = float(torch.trapezoid(density, instants))
    assert float(occupation_bound(m, delta, eps, time)) == pytest.approx(integral, rel=1e-4)


def test_probabilities_are_those_of_a_noncentral_chi_square() -> None:
    ncx2 = pytest.importorskip("scipy.stats").ncx2
    for m in (1, 2, 3, 5, 8):
        for delta, eps, deviation in ((0.5, 0.3, 0.7), (1.0, 1.0, 0.01), (0.2, 1.0, 0.05), (3.0, 1.0, 0.5)):
            place = torch.tensor(delta, dtype=torch.float64), eps, torch.tensor(deviation, dtype=torch.float64)
            expected = ncx2.cdf((eps / deviation) ** 2, m, (delta / deviation) ** 2)
            assert float(probability_within(m, *place)) == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", quick_or_slow(["isotropic", "diagonal"], quick=["isotropic"]))
def test_times_of_a_router_are_the_sum_over_its_flats(kind: str) -> None:
    """A plain simulation of tokens: the time within eps of each flat, summed over all sets of m + 1 experts."""
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 7, generator=source, dtype=torch.float64)
    token = torch.randn(1, 7, generator=source, dtype=torch.float64)
    noise: float | Tensor = 0.8 if kind == "isotropic" else torch.linspace(0.3, 1.5, 7, dtype=torch.float64)
    eps, time, samples = 0.3, 1.0, 100_000
    instants = time * torch.rand(samples, 1, generator=source, dtype=torch.float64)
    points = token + noise * instants.sqrt() * torch.randn(samples, 7, generator=source, dtype=torch.float64)
    for m in (1, 2):
        near = torch.zeros(samples, dtype=torch.float64)
        for members in combinations(range(5), m + 1):
            rows = weight[list(members[1:])] - weight[members[0]]
            near += is_near(points, rows, eps)
        error = float(near.std()) / math.sqrt(samples)
        found = occupation_times(Order(weight), token, 2, m, eps, time, noise=noise)
        assert found.exact == (kind == "isotropic") and not found.sampled
        if found.exact:
            assert abs(float(near.mean()) - float(found.share)) <= 3 * error
            bound = occupation_times(Order(weight), token, 2, m, eps, time, noise=noise, bound=True)
            assert float(found.times) <= float(bound.times)
        else:
            assert float(near.mean()) <= float(found.share) + 3 * error


def is_near(points: Tensor, rows: Tensor, eps: float) -> Tensor:
    """Return (T,): 1 where a point is within eps of the flat rows x = 0."""
    across = points @ torch.linalg.pinv(rows) @ rows
    return (across.norm(dim=1) <= eps).double()


def test_a_token_that_does_not_move_is_near_a_flat_always_or_never() -> None:
    assert occupation_time(2, torch.tensor([0.1, 0.5]), 0.3, 2.0, sigma=0.0).tolist() == [2.0, 0.0]
    slow = occupation_time(2, torch.tensor([0.1, 0.5]), 0.3, 2.0, sigma=1e-6)
    torch.testing.assert_close(slow, torch.tensor([2.0, 0.0], dtype=torch.float64))


def test_wrong_arguments_are_refused() -> None:
    for eps, time in ((0.0, 1.0), (1.0, -1.0)):
        assert_refused("expected positive numbers", occupation_time, 1, torch.zeros(1), eps, time)
        assert_refused("expected positive numbers", occupation_bound, 1, torch.zeros(1), eps, time)


def test_experts_with_equal_weights_are_left_out() -> None:
    weight = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]], dtype=torch.float64)
    for noise in (1.0, torch.ones(3)):
        found = occupation_times(Order(weight), torch.ones(2, 3), 1, 1, 0.1, 1.0, noise=noise)
        assert found.times.isfinite().all() and (found.times > 0).all()
        none = occupation_times(Order(weight), torch.ones(2, 3), 1, 2, 0.1, 1.0, noise=noise)
        assert (none.times == 0).all()

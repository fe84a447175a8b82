"""Random walks: simulated exits are inside both bounds, all of order 1, and agree with a plain simulation of tokens."""

import math

import pytest
import torch
from tiers import quick_or_slow
from torch import Tensor
from wording import assert_refused

from holdfast.geometry import hitting_bounds, nearest_ties, simulate_walks
from holdfast.geometry.walks import order_of
from holdfast.routing.declarations import Order, Scales

LEVELS = [0.2, 0.4, 0.7, 1.0, 3.0]


def a_router(experts: int = 8, width: int = 12, bias: float = 0.3) -> tuple[Order, Tensor]:
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(experts, width, generator=source, dtype=torch.float64)
    offsets = bias * torch.randn(experts, generator=source, dtype=torch.float64)
    return Order(weight, offsets), torch.randn(6, width, generator=source, dtype=torch.float64)


def require_inside(share: Tensor, lower: Tensor, upper: Tensor, walks: int) -> None:
    """Require shares of walks between the bounds, up to four standard errors at each bound."""
    for bound, side in ((lower, 1), (upper, -1)):
        error = 4 * (bound * (1 - bound) / walks).sqrt() + 1e-9
        assert (side * (share - bound) >= -error).all(), f"{share} beside {bound}"


@pytest.mark.parametrize("sigma", quick_or_slow(LEVELS, quick=[0.4]))
def test_10000_walks_are_inside_both_bounds_and_exit_at_order_1(sigma: float) -> None:
    order, tokens = a_router()
    times = torch.tensor([0.05, 0.3, 1.0, 4.0, 20.0], dtype=torch.float64)
    bounds = hitting_bounds(order, tokens[:1], 2, times, noise=sigma)
    assert (bounds.lower <= bounds.upper).all() and (bounds.upper <= bounds.coarse).all()
    walks = simulate_walks(order, tokens[:1], 2, float(times[-1]), noise=sigma, walks=10_000, seed=1)
    require_inside(walks.share_before(times), bounds.lower, bounds.upper, 10_000)
    exits = walks.times.isfinite()
    assert torch.equal(exits, walks.orders > 0) and (walks.orders[exits] == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("speed", [0.0, 1.0])
def test_the_simulation_agrees_with_tokens_that_take_small_steps(speed: float) -> None:
    """Two step sizes, extrapolated: a walk that is seen at steps only misses exits as the root of their length."""
    order, tokens = a_router()
    horizon = (1 if speed else 2) * float(hitting_bounds(order, tokens[:1], 2, [1.0]).nearest) ** 2
    drift = speed * torch.linspace(-1, 1, 12).double()
    shares = [plain_share(order, tokens[0], horizon, steps, drift) for steps in (64, 256)]
    found, without = (
        float(
            simulate_walks(order, tokens[:1], 2, horizon, drift=way, walks=8000, seed=3).share_before(
                torch.tensor([horizon])
            )
        )
        for way in (drift, None)
    )
    assert found == pytest.approx(2 * shares[1] - shares[0], abs=0.04)
    assert found > shares[1] > shares[0]
    assert (abs(found - without) > 0.05) == bool(speed)


def plain_share(order: Order, token: Tensor, horizon: float, steps: int, drift: Tensor, walks: int = 8000) -> float:
    source = torch.Generator().manual_seed(steps)
    assert order.bias is not None
    chosen = torch.zeros(len(order.matrix), dtype=torch.bool)
    chosen[(order.matrix @ token + order.bias).topk(2).indices] = True
    points, inside = token.repeat(walks, 1), torch.ones(walks, dtype=torch.bool)
    for _ in range(steps):
        points += horizon / steps * drift
        points += math.sqrt(horizon / steps) * torch.randn(points.shape, generator=source, dtype=torch.float64)
        keys = points @ order.matrix.t() + order.bias
        inside &= keys[:, chosen].amin(1) > keys[:, ~chosen].amax(1)
    return 1 - float(inside.double().mean())


@pytest.mark.parametrize("kind", ["diagonal", "matrix"])
def test_noise_with_a_direction_is_noise_on_other_tokens(kind: str) -> None:
    """dX = D dB is a plain walk of y = D^-1 x, whose router has the weights W D."""
    order, tokens = a_router()
    source = torch.Generator().manual_seed(5)
    matrix = torch.diag(torch.rand(12, generator=source, dtype=torch.float64) + 0.2)
    if kind == "matrix":
        matrix = matrix + 0.1 * torch.randn(12, 12, generator=source, dtype=torch.float64)
    noise = matrix.diagonal() if kind == "diagonal" else matrix
    found = hitting_bounds(order, tokens, 2, [0.5, 2.0], noise=noise)
    moved = tokens @ torch.linalg.inv(matrix).t()
    plain = hitting_bounds(Order(order.matrix @ matrix, order.bias), moved, 2, [0.5, 2.0])
    torch.testing.assert_close(found.lower, plain.lower)
    torch.testing.assert_close(found.upper, plain.upper)
    walks = simulate_walks(order, tokens, 2, 2.0, noise=noise, walks=500, seed=6)
    require_inside(walks.share_before(found.times), found.lower, found.upper, 500)


def test_h_without_noise_is_the_distance_to_order_1() -> None:
    order, tokens = a_router()
    bounds = hitting_bounds(order, tokens, 2, [1.0])
    torch.testing.assert_close(bounds.nearest, nearest_ties(order, tokens, 2, (1,)).distances[:, 0])


def test_a_walk_that_stays_in_its_cell_has_no_exit() -> None:
    order, tokens = a_router()
    walks = simulate_walks(order, tokens, 2, 1e-6, walks=50)
    assert walks.times.isinf().all() and not walks.orders.any()
    everything = simulate_walks(order, tokens, 8, 1.0, walks=5)
    assert everything.times.isinf().all()


def test_the_same_seed_gives_the_same_walks() -> None:
    order, tokens = a_router()
    one, same, other = (simulate_walks(order, tokens, 2, 1.0, walks=20, seed=seed).times for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_the_order_of_an_exit_counts_experts_not_pairs() -> None:
    met = torch.zeros(3, 2, 3, dtype=torch.bool)
    met[0, 0, 1] = True
    met[1, 0, :2] = True
    met[2] = True
    assert order_of(met).tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"times": [0.0]}, "times are"), ({"noise": torch.ones(5)}, "expected finite numbers"), ({"k": 9}, "k is 9")],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    order, tokens = a_router()
    given: dict[str, object] = {"k": 2, "times": [1.0]} | arguments
    assert_refused(message, hitting_bounds, order, tokens, **given)
    assert_refused("positive time", simulate_walks, order, tokens, 2, -1.0)
    assert_refused("walks is 0", simulate_walks, order, tokens, 2, 1.0, walks=0)


def first_passage(h: float, c: float, root: float) -> float:
    direct, reflected = (math.erfc((h / root + side * c * root) / math.sqrt(2)) / 2 for side in (-1, 1))
    return direct + math.exp(2 * c * h) * reflected


@pytest.mark.parametrize("speed", [-0.8, 0.0, 0.9, 40.0])
def test_the_law_of_two_experts_with_drift_is_the_first_passage_of_a_brownian_motion(speed: float) -> None:
    """One pair: both bounds are Phi((c t - h) / sqrt t) + exp(2 c h) Phi(-(c t + h) / sqrt t), and the walks agree."""
    order = Order(torch.tensor([[1.0, 0.5], [-0.3, 0.2]], dtype=torch.float64), torch.tensor([0.1, 0.3]).double())
    token = torch.tensor([[1.0, 0.4]], dtype=torch.float64)
    across = order.matrix[1] - order.matrix[0]
    drift = speed * across / across.norm() + 3.0 * torch.stack([across[1], -across[0]])  # along the plane: no effect
    times = torch.tensor([0.02, 0.5, 1.0, 4.0], dtype=torch.float64)
    bounds = hitting_bounds(order, token, 1, times, noise=0.7, drift=drift)
    h, c = float(bounds.nearest), speed / 0.7
    expected = [first_passage(h, c, math.sqrt(time)) for time in times.tolist()]
    assert bounds.lower[0].tolist() == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(bounds.upper, bounds.lower)
    walks = simulate_walks(order, token, 1, 4.0, noise=0.7, drift=drift, walks=10_000, seed=4)
    require_inside(walks.share_before(times), bounds.lower, bounds.upper, 10_000)


@pytest.mark.parametrize("speed", quick_or_slow([-2.0, 0.5, 3.0, 30.0], quick=[0.5, 30.0]))
def test_walks_with_drift_are_inside_both_bounds(speed: float) -> None:
    """Every token drifts along the difference of its first and its last expert, with noise that has a direction."""
    order, tokens = a_router()
    source = torch.Generator().manual_seed(5)
    noise = torch.diag(torch.rand(12, generator=source, dtype=torch.float64) + 0.2)
    noise += 0.1 * torch.randn(12, 12, generator=source, dtype=torch.float64)
    assert order.bias is not None
    ranked = (tokens @ order.matrix.t() + order.bias).argsort(dim=1, descending=True)
    across = order.matrix[ranked[:, 3]] - order.matrix[ranked[:, 0]]
    drift = speed * across / across.norm(dim=1, keepdim=True)
    times = torch.tensor([0.02, 0.1, 0.5, 2.0], dtype=torch.float64)
    bounds = hitting_bounds(order, tokens, 2, times, noise=noise, drift=drift)
    plain = hitting_bounds(order, tokens, 2, times, noise=noise)
    assert (bounds.lower <= bounds.upper).all() and (bounds.upper <= bounds.coarse).all()
    assert torch.equal(bounds.nearest, plain.nearest) and not torch.allclose(bounds.lower, plain.lower)
    walks = simulate_walks(order, tokens, 2, 2.0, noise=noise, drift=drift, walks=2000, seed=6)
    require_inside(walks.share_before(times), bounds.lower, bounds.upper, 2000)
    assert (walks.orders[walks.times.isfinite()] == 1).all()


def test_with_drift_the_lower_bound_is_the_most_probable_pair_not_the_nearest() -> None:
    """Of three experts, the nearest tie is moved away from, and the other one is approached."""
    order = Order(torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64))
    token = torch.tensor([[0.2, 0.6]], dtype=torch.float64)  # expert 1 ties at the distance 0.2, expert 2 at 0.6
    drift = torch.tensor([3.0, -0.8])
    one, other = (hitting_bounds(Order(order.matrix[[0, each]]), token, 1, [0.5], drift=drift) for each in (1, 2))
    both = hitting_bounds(order, token, 1, [0.5], drift=drift)
    assert float(one.lower) < float(other.lower) == float(both.lower)
    assert float(both.upper) == float(one.lower + other.lower) < 1
    assert float(both.nearest) == pytest.approx(0.2)


def test_tokens_of_several_clusters_and_blocks_walk_with_their_own_weights() -> None:
    order, tokens = a_router()
    factors = torch.stack([torch.ones(12), torch.linspace(0.1, 2, 12)]).double()
    index, drift = torch.tensor([0, 1, 0, 1, 1, 0]), torch.linspace(-2, 2, 12).double()
    scaled = Order(order.matrix, order.bias, scales=Scales(torch.nn.functional.one_hot(index, 2).double(), factors))
    blocks = Order(torch.cat([order.matrix, order.matrix * factors[1]], 1), order.bias, block=index)
    alone = hitting_bounds(Order(order.matrix * factors[1], order.bias), tokens[index == 1], 2, [0.2], drift=drift)
    for several in (scaled, blocks):
        bounds = hitting_bounds(several, tokens, 2, [0.2], drift=drift)
        torch.testing.assert_close(bounds.lower[index == 1], alone.lower)
        torch.testing.assert_close(bounds.upper[index == 1], alone.upper)
    walks = simulate_walks(scaled, tokens, 2, 0.2, drift=drift, walks=1000, seed=7)
    require_inside(walks.share_before(bounds.times), bounds.lower, bounds.upper, 1000)


def test_a_drift_that_does_not_fit_is_one_clear_sentence() -> None:
    order, tokens = a_router()
    assert_refused(r"the drift has shape \(3,\)", hitting_bounds, order, tokens, 2, [1.0], drift=torch.ones(3))
    assert_refused("give a D that is invertible", simulate_walks, order, tokens, 2, 1.0, noise=0.0, drift=torch.ones(12))

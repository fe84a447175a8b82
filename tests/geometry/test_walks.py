"""Random walks: simulated exits are inside both bounds, all of order 1, and agree with a plain simulation of tokens."""

import math

import pytest
import torch
from tiers import quick_or_slow
from torch import Tensor

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


def test_the_noise_levels_reach_from_few_exits_to_many() -> None:
    """So that the test of the bounds is one of tails and of the middle."""
    order, tokens = a_router()
    lower = [float(hitting_bounds(order, tokens[:1], 2, [20.0], noise=sigma).lower) for sigma in LEVELS]
    assert lower[0] < 0.2 and lower[-1] > 0.8


def test_before_a_step_is_refined_some_exits_look_like_higher_orders() -> None:
    order, tokens = a_router()
    walks = simulate_walks(order, tokens, 2, 5.0, walks=300, seed=2)
    assert (walks.orders[walks.times.isfinite()] == 1).all()


@pytest.mark.slow
def test_the_simulation_agrees_with_tokens_that_take_small_steps() -> None:
    """Two step sizes, extrapolated: a walk that is seen at steps only misses exits as the root of their length."""
    order, tokens = a_router()
    bounds = hitting_bounds(order, tokens[:1], 2, [1.0])
    horizon = 2 * float(bounds.nearest) ** 2
    shares = [plain_share(order, tokens[0], horizon, steps) for steps in (64, 256)]
    expected = 2 * shares[1] - shares[0]
    found = float(simulate_walks(order, tokens[:1], 2, horizon, walks=8000, seed=3).share_before(torch.tensor([horizon])))
    assert found == pytest.approx(expected, abs=0.04)
    assert found > shares[1] > shares[0]


def plain_share(order: Order, token: Tensor, horizon: float, steps: int, walks: int = 8000) -> float:
    source = torch.Generator().manual_seed(steps)
    assert order.bias is not None
    chosen = torch.zeros(len(order.matrix), dtype=torch.bool)
    chosen[(order.matrix @ token + order.bias).topk(2).indices] = True
    points, inside = token.repeat(walks, 1), torch.ones(walks, dtype=torch.bool)
    for _ in range(steps):
        points += math.sqrt(horizon / steps) * torch.randn(points.shape, generator=source, dtype=torch.float64)
        keys = points @ order.matrix.t() + order.bias
        inside &= keys[:, chosen].amin(1) > keys[:, ~chosen].amax(1)
    return 1 - float(inside.double().mean())


@pytest.mark.slow
def test_the_law_of_two_experts_is_the_reflection_principle() -> None:
    """One pair: both bounds are equal, and the simulation has no bias beyond them."""
    order = Order(torch.tensor([[1.0, 0.5], [-0.3, 0.2]], dtype=torch.float64))
    token = torch.tensor([[1.0, 0.4]], dtype=torch.float64)
    times = torch.tensor([0.1, 0.5, 1.0, 4.0], dtype=torch.float64)
    bounds = hitting_bounds(order, token, 1, times)
    torch.testing.assert_close(bounds.lower, bounds.upper)
    walks = simulate_walks(order, token, 1, 4.0, walks=100_000, seed=4)
    require_inside(walks.share_before(times), bounds.lower, bounds.upper, 100_000)


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


def test_tokens_of_several_clusters_walk_with_their_own_weights() -> None:
    order, tokens = a_router()
    factors = torch.stack([torch.ones(12), torch.linspace(0.1, 2, 12)]).double()
    index = torch.tensor([0, 1, 0, 1, 1, 0])
    scaled = Order(order.matrix, order.bias, scales=Scales(torch.nn.functional.one_hot(index, 2).double(), factors))
    bounds = hitting_bounds(scaled, tokens, 2, [0.2, 1.0])
    walks = simulate_walks(scaled, tokens, 2, 1.0, walks=1000, seed=7)
    require_inside(walks.share_before(bounds.times), bounds.lower, bounds.upper, 1000)
    alone = hitting_bounds(Order(order.matrix * factors[1], order.bias), tokens[index == 1], 2, [0.2, 1.0])
    torch.testing.assert_close(bounds.lower[index == 1], alone.lower)


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
    with pytest.raises(ValueError, match=message):
        hitting_bounds(order, tokens, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive time"):
        simulate_walks(order, tokens, 2, -1.0)
    with pytest.raises(ValueError, match="walks is 0"):
        simulate_walks(order, tokens, 2, 1.0, walks=0)

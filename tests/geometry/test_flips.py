"""The nearest boundary against a loop over pairs; at it top-k jumps and smooth top-k does not."""

import pytest
import torch
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Experts, MoE
from holdfast.geometry import FlipPoints, Jumps, affine_order, jumps, nearest_boundaries
from holdfast.routing.declarations import Order

DIM, EXPERTS = 16, 8


def build(name: str, k: int = 2, bias: bool = False, **options: float) -> MoE:
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=DIM, experts=EXPERTS, k=k, bias=bias, **options)
    if bias:
        router.get_parameter("score.bias").data.normal_()
    return MoE(router, Experts(DIM, 32, EXPERTS)).eval()


def tokens(count: int = 40) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(1))


def measure(moe: MoE, x: Tensor) -> tuple[FlipPoints, Jumps]:
    """Return where the tokens flip, and the jumps of the layer there."""
    assert isinstance(moe.router, holdfast.Router)
    order, k = affine_order(moe.router, x)
    switch = nearest_boundaries(order, x, k)
    return switch, jumps(lambda at: moe(at)[0], switch)


@pytest.mark.parametrize("k", [1, 3])
def test_the_nearest_plane_is_that_of_the_closest_pair(k: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(EXPERTS, DIM).double(), torch.randn(EXPERTS).double(), tokens().double()
    switch = nearest_boundaries(Order(weight, bias), x, k)
    for t, token in enumerate(x):
        logits = [float(token @ w + b) for w, b in zip(weight, bias, strict=True)]
        chosen = sorted(range(EXPERTS), key=lambda e: -logits[e])[:k]
        distance, i, j = min(
            ((logits[i] - logits[j]) / float((weight[i] - weight[j]).norm()), i, j)
            for i in chosen
            for j in set(range(EXPERTS)) - set(chosen)
        )
        assert (int(switch.leaving[t]), int(switch.entering[t])) == (i, j)
        assert float(switch.distances[t]) == pytest.approx(distance)
        assert float((switch.points[t] - token).norm()) == pytest.approx(distance)
        assert float(switch.points[t] @ (weight[i] - weight[j]) + bias[i] - bias[j]) == pytest.approx(0, abs=1e-9)
    torch.testing.assert_close(switch.normals.norm(dim=-1), torch.ones(len(x)).double())


@pytest.mark.parametrize("bias", [False, True])
def test_the_set_changes_at_the_point_and_not_before(bias: bool) -> None:
    moe = build("smoe", bias=bias)
    x = tokens()
    switch, _ = measure(moe, x)

    def sets(share: float) -> Tensor:
        at = x.double() + share * switch.distances.unsqueeze(1) * switch.normals
        return moe.router(at.float()).chosen

    assert torch.equal(sets(0.999), sets(0))
    assert (sets(1.001) != sets(0)).any(-1).all()


def test_top_k_jumps_by_the_difference_of_the_two_experts() -> None:
    """At the tie both experts have the same weight, and only they are exchanged."""
    moe = build("smoe")
    x = tokens()
    switch, found = measure(moe, x)
    at = switch.points.float()
    weights = moe.router(at).weights[:, 1:]
    ones = torch.ones(len(x), 1)
    leaving, entering = (moe.experts(at, e.view(-1, 1), ones) for e in (switch.leaving, switch.entering))
    others = moe.router(at).experts[:, 0]
    tied_first = (others == switch.leaving) | (others == switch.entering)
    assert not tied_first.all()
    expected = (weights * (entering - leaving)).norm(dim=-1)[~tied_first]
    torch.testing.assert_close(found.limit[~tied_first].float(), expected, rtol=1e-2, atol=1e-5)
    assert (found.limit > 1e-3).all()


def test_smooth_top_k_does_not_jump_where_top_k_does() -> None:
    hard, smooth = build("smoe"), build("smooth", eps=0.2)
    smooth.load_state_dict(hard.state_dict(), strict=False)
    x = tokens()
    jumping, measured = measure(hard, x)[1].limit, measure(smooth, x)[1]
    continuous, differences = measured.limit, measured.differences
    assert (continuous < 0.01 * jumping).all()  # an expert at the edge of the strip, where weights are steep, is the worst
    assert continuous.median() < 1e-5 * jumping.median()
    assert (differences[2] < 0.2 * differences[1]).all()


def test_a_linear_map_has_no_jump_and_one_that_jumps_has_its_height() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(EXPERTS, DIM), tokens()
    switch = nearest_boundaries(Order(weight), x, 1)
    smooth = jumps(lambda at: 3 * at, switch)
    torch.testing.assert_close(smooth.limit, torch.zeros(40).double(), atol=1e-5, rtol=0)
    step = jumps(lambda at: at + 5.0 * (at @ weight.t()).argmax(-1, keepdim=True), switch)
    torch.testing.assert_close(
        step.limit, 5 * DIM**0.5 * (switch.leaving - switch.entering).abs().double(), rtol=1e-4, atol=1e-4
    )


def test_what_has_no_boundary_and_steps_without_a_limit_are_one_clear_sentence() -> None:
    x, order = tokens(5), Order(torch.randn(EXPERTS, DIM))
    assert_refused(r"k.*8.*8", nearest_boundaries, order, x, 8)
    assert_refused("equal", nearest_boundaries, Order(torch.ones(4, DIM)), x, 2)
    assert_refused("positive", jumps, lambda at: at, nearest_boundaries(order, x, 2), steps=(1e-3, 1e-2))

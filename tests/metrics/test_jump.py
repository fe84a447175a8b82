"""The jump at the nearest switching plane: geometry against a loop over pairs, top-k jumps, smooth top-k does not."""

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import Experts, MoE, Routing
from holdfast.metrics import jump, jumps, nearest_flip

DIM, EXPERTS = 16, 8


def build(name: str, k: int = 2, bias: bool = False, **options: float) -> MoE:
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=DIM, experts=EXPERTS, k=k, bias=bias, **options)
    if bias:
        router.get_parameter("score.bias").data.normal_()
    return MoE(router, Experts(DIM, 32, EXPERTS)).eval()


def tokens(count: int = 40) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(1))


def measure(moe: MoE, x: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
    """The limit of the jump, and the differences on the way to it."""
    _, found = jump(moe.router, lambda at: moe(at)[0], x, k=k)
    return found.limit, found.differences


@pytest.mark.parametrize("k", [1, 3])
def test_the_nearest_plane_is_that_of_the_closest_pair(k: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(EXPERTS, DIM).double(), torch.randn(EXPERTS).double(), tokens().double()
    switch = nearest_flip(x, weight, k, bias)
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
    switch, _ = jump(moe.router, lambda at: moe(at)[0], x)

    def sets(share: float) -> Tensor:
        at = x.double() + share * switch.distances.unsqueeze(1) * switch.normals
        return moe.router(at.float()).chosen

    assert torch.equal(sets(0.999), sets(0))
    assert (sets(1.001) != sets(0)).any(-1).all()


def test_top_k_jumps_by_the_difference_of_the_two_experts() -> None:
    """At the tie both experts have the same weight, and only they are exchanged."""
    moe = build("smoe")
    x = tokens()
    switch, found = jump(moe.router, lambda at: moe(at)[0], x)
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


def test_top_1_with_renormalised_weights_jumps_from_one_expert_to_the_other() -> None:
    moe = build("smoe", k=1)
    switch, found = jump(moe.router, lambda at: moe(at)[0], tokens())
    at, ones = switch.points.float(), torch.ones(40, 1)
    leaving, entering = (moe.experts(at, e.view(-1, 1), ones) for e in (switch.leaving, switch.entering))
    torch.testing.assert_close(found.limit.float(), (entering - leaving).norm(dim=-1), rtol=1e-2, atol=1e-5)


def test_smooth_top_k_does_not_jump_where_top_k_does() -> None:
    hard, smooth = build("smoe"), build("smooth", eps=0.2)
    smooth.load_state_dict(hard.state_dict(), strict=False)
    x = tokens()
    jumping, _ = measure(hard, x)
    continuous, differences = measure(smooth, x, k=2)
    assert (continuous < 0.01 * jumping).all()  # an expert at the edge of the strip, where weights are steep, is the worst
    assert continuous.median() < 1e-5 * jumping.median()
    assert (differences[2] < 0.2 * differences[1]).all()


def test_the_difference_of_top_k_does_not_go_away_with_the_step() -> None:
    _, differences = measure(build("smoe"), tokens())
    torch.testing.assert_close(differences[2], differences[1], rtol=0.1, atol=0)


def test_a_linear_map_has_no_jump_and_one_that_jumps_has_its_height() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(EXPERTS, DIM), tokens()
    switch = nearest_flip(x, weight, 1)
    smooth = jumps(lambda at: 3 * at, switch)
    torch.testing.assert_close(smooth.limit, torch.zeros(40).double(), atol=1e-5, rtol=0)
    step = jumps(lambda at: at + 5.0 * (at @ weight.t()).argmax(-1, keepdim=True), switch)
    torch.testing.assert_close(
        step.limit, 5 * DIM**0.5 * (switch.leaving - switch.entering).abs().double(), rtol=1e-4, atol=1e-4
    )


def test_what_has_no_switching_plane_is_one_clear_sentence() -> None:
    x = tokens(5)
    smoe, cosine, smooth = build("smoe"), build("smoe"), build("smooth", eps=0.5)
    cosine.router.score = holdfast.routing.Cosine(DIM, EXPERTS)
    with pytest.raises(ValueError, match="linear"):
        measure(cosine, x)
    with pytest.raises(ValueError, match="k="):
        measure(smooth, x)
    with pytest.raises(ValueError, match=r"k.*8.*8"):
        measure(build("smoe", k=8), x)
    with pytest.raises(ValueError, match=r"\(T, d\)"):
        measure(smoe, x.unsqueeze(0))
    with pytest.raises(ValueError, match="positive"):
        jump(smoe.router, lambda at: at, x, steps=(1e-3, 1e-2))
    with pytest.raises(ValueError, match="equal"):
        nearest_flip(x, torch.ones(4, DIM), 2)

    def reordered(at: Tensor) -> Routing:
        routing = smoe.router(at)
        return Routing(routing.logits, routing.gates, routing.logits.argsort(-1)[:, -2:], routing.weights)

    def perverse(at: Tensor) -> Routing:
        routing = smoe.router(at)
        return Routing(routing.logits, routing.gates, routing.logits.argsort(-1)[:, :2], routing.weights)

    jump(reordered, lambda at: at, x)  # in another order, the same sets
    with pytest.raises(ValueError, match=r"\b2 largest"):
        jump(perverse, lambda at: at, x)

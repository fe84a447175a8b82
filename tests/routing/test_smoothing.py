"""Smooth top-k: its formula, its continuity, and both ways to set the strip's width."""

import pytest
import torch
from tiers import quick_or_slow
from torch import Tensor

import holdfast
from holdfast import Context, Experts, MoE
from holdfast.kernels.select import Powers, strip_fade
from holdfast.routing import Scores, SmoothTopK


def train(router: holdfast.Router, batches: int, tokens: int = 256) -> list[float]:
    """Experts a token in each batch, on fresh random tokens."""
    active = []
    for _ in range(batches):
        routing = router(torch.randn(2, tokens // 2, router.dim))
        active.append(float(routing.used.sum(-1).float().mean()))
    return active


@pytest.mark.parametrize(("a", "b"), [(1, 50), (2.5, 7), (0.5, 3), (3, 1)])
def test_s_is_what_the_paper_says_with_any_exponents(a: float, b: float) -> None:
    u, eps = torch.linspace(-0.205, 1.195, 141, dtype=torch.float64), 0.3
    fade, in_strip = strip_fade(((1 - u) * eps).float(), torch.tensor(eps), Powers(a, b))
    assert torch.equal(in_strip, u > 0)
    inside = u[in_strip].clamp_max(1)  # beyond the strip S stays 0
    expected = (inside**a / (inside**a + (1 - inside) ** b)).log()
    torch.testing.assert_close(fade[in_strip].double(), expected, atol=1e-5, rtol=1e-4)


def test_the_exponents_of_a_strip_change_weights_and_not_experts() -> None:
    usual, other = (
        holdfast.create_router("smooth", dim=16, experts=8, eps=0.5, a=a, b=b).eval() for a, b in ((1.0, 50.0), (2.0, 5.0))
    )
    other.score.load_state_dict(usual.score.state_dict())
    tokens = torch.randn(2, 50, 16)
    first, second = usual(tokens), other(tokens)
    assert torch.equal(first.chosen, second.chosen)
    assert (first.dense_weights - second.dense_weights).abs().max() > 1e-3


@pytest.mark.parametrize(("options", "start"), [({}, -9.0), ({"eta": -2.0}, -2.0), ({"eta": 0.5, "eps": 0.3}, 0.5)])
def test_eta_starts_where_told(options: dict[str, float], start: float) -> None:
    select = SmoothTopK(8, 2, control="loss", **options)  # type: ignore[arg-type]
    assert select.eta is not None and float(select.eta) == start
    torch.testing.assert_close(select.eps(), torch.nn.functional.softplus(torch.tensor(start)))


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_an_eps_of_0_is_top_k_and_a_small_one_nearly(eps: float) -> None:
    plain, smooth = (
        holdfast.create_router("smoe", dim=16, experts=8),
        holdfast.create_router("smooth", dim=16, experts=8, eps=eps),
    )
    smooth.score.load_state_dict(plain.score.state_dict())
    tokens = torch.randn(2, 500, 16)
    expected, got = plain.eval()(tokens), smooth.eval()(tokens)
    assert torch.equal(got.chosen, expected.chosen)
    torch.testing.assert_close(got.dense_weights, expected.dense_weights)


def jumps(layer: MoE, tokens: Tensor, k: int) -> Tensor:
    """|y(+t) - y(-t)| for each token, t = 1e-6 to both sides of its nearest switching plane, in float64."""
    score = layer.router.score
    assert isinstance(score, DoubleLinear)
    weight = score.weight.double()
    logits = tokens.double() @ weight.t()
    order = logits.argsort(-1, descending=True)
    last, next_best = order[:, k - 1], order[:, k]
    normal = weight[last] - weight[next_best]
    margin = logits.gather(1, last[:, None]) - logits.gather(1, next_best[:, None])
    on_plane = tokens.double() - margin * normal / normal.square().sum(1, keepdim=True)
    # Order 1: only these two experts tie there, and they are the k-th and the next.
    there = on_plane @ weight.t()
    ranked = there.sort(-1, descending=True).values
    gaps = ranked[:, :-1] - ranked[:, 1:]
    simple = (gaps[:, k - 1] < 1e-9) & (gaps[:, k] > 1e-3) & (gaps[:, k - 2] > 1e-3)
    step = 1e-6 * normal / normal.norm(dim=1, keepdim=True)
    sides = [layer((on_plane + sign * step)[simple].unsqueeze(0))[0][0] for sign in (1, -1)]
    return (sides[0] - sides[1]).norm(dim=1)


class DoubleLinear(holdfast.routing.Linear):
    """Linear scores in float64: a step of 1e-6 is not lost in the rounding of float32."""

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return tokens.double() @ self.weight.double().t()


@pytest.mark.parametrize(("a", "b"), [(1.0, 50.0), (1.5, 4.0), (3.0, 1.0)])
def test_smooth_is_continuous_and_plain_top_k_is_not(a: float, b: float) -> None:
    """Over 1,000 crossings of order 1, at the eps that a budget of 0.5 gives, whatever the exponents."""
    dim, experts, k = 32, 16, 2
    smooth = holdfast.create_router("smooth", dim=dim, experts=experts, k=k, a=a, b=b)
    train(smooth, 5, 4096)
    smooth.eval()
    assert 0.005 < float(smooth.select.eps()) < 1  # type: ignore[operator]
    score = DoubleLinear(dim, experts)
    score.load_state_dict(smooth.score.state_dict())
    body = Experts(dim, 32, experts, dtype=torch.float64)
    plain = MoE(holdfast.Router(score, holdfast.routing.TopK(experts, k)), body).eval()
    repaired = MoE(holdfast.Router(score, smooth.select), body).eval()
    tokens = torch.randn(3000, dim)
    with torch.no_grad():
        broken, held = jumps(plain, tokens, k)[:1000], jumps(repaired, tokens, k)[:1000]
    assert len(broken) == len(held) == 1000
    assert broken.median() > 1e-2
    assert broken.min() > 0
    assert (held / broken).median() < 1e-3
    assert (held / broken).max() < 1e-2


def capped(most: int, eps: float, experts: int = 16, k: int = 2) -> tuple[holdfast.Router, holdfast.Router]:
    """A router whose tokens may use `most` experts, and the same without that."""
    torch.manual_seed(0)
    free = holdfast.create_router("smooth", dim=32, experts=experts, k=k, eps=eps).eval()
    bound = holdfast.create_router("smooth", dim=32, experts=experts, k=k, eps=eps, most=most).eval()
    bound.score.load_state_dict(free.score.state_dict())
    return bound, free


def test_no_token_uses_more_than_the_most_and_others_are_as_without_it() -> None:
    bound, free = capped(4, 0.3)
    tokens = torch.randn(1, 2000, 32)
    got, expected = bound(tokens), free(tokens)
    assert got.experts.shape == got.weights.shape == (2000, 4)
    few = expected.used.sum(-1) <= 4
    assert 0.2 < few.float().mean() < 0.8 and (got.used.sum(-1) <= 4).all()
    assert torch.equal(got.experts[few], expected.experts[few, :4])
    torch.testing.assert_close(got.weights[few], expected.weights[few, :4], atol=1e-6, rtol=1e-4)
    assert (got.weights[~few] - expected.weights[~few, :4]).abs().amax() > 1e-3


def test_the_strip_of_a_token_with_too_many_ends_at_the_next_so_nothing_jumps() -> None:
    """Along a line on which the 4th and the 5th change places, with both in the strip."""
    bound, _ = capped(4, 3.0)
    score = DoubleLinear(32, 16)
    score.load_state_dict(bound.score.state_dict())
    layer = MoE(holdfast.Router(score, bound.select), Experts(32, 32, 16, dtype=torch.float64)).eval()
    weight = score.weight.detach().double()
    tokens = torch.randn(500, 32).double()
    order = (tokens @ weight.t()).argsort(-1, descending=True)
    normal = weight[order[:, 3]] - weight[order[:, 4]]
    on_plane = tokens - (tokens * normal).sum(1, keepdim=True) * normal / normal.square().sum(1, keepdim=True)
    step = 1e-6 * normal / normal.norm(dim=1, keepdim=True)
    with torch.no_grad():
        (one, first), (other, second) = (layer((on_plane + sign * step).unsqueeze(0)) for sign in (1, -1))
    switched = first.logits.argsort(-1, descending=True)[:, 3] != second.logits.argsort(-1, descending=True)[:, 3]
    assert switched.sum() > 100
    assert (one - other)[0, switched].norm(dim=1).max() < 1e-3 * one.norm(dim=-1).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "budget"),
    quick_or_slow(
        [("smooth", 0.5), ("smooth", 1.0), ("xmoe+smooth", 0.5), ("symphony+smooth", 0.5), ("similarity+smooth", 0.5)],
        [("smooth", 0.5)],
    ),
)
def test_the_quantile_control_holds_the_budget(name: str, budget: float) -> None:
    """Within 0.05 of k + budget after 200 steps in which the router itself learns."""
    layer = MoE(holdfast.create_router(name, dim=16, experts=8, budget=budget), Experts(16, 16, 8))
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    active, matrix = [], torch.randn(16, 16)
    for _ in range(230):
        tokens = torch.randn(8, 64, 16)
        out, routing = layer(tokens, Context(causal=True))
        optimizer.zero_grad()
        ((out - torch.tanh(tokens @ matrix)).square().mean() + routing.loss).backward()
        optimizer.step()
        active.append(float(routing.used.sum(-1).float().mean()))
    assert abs(sum(active[200:]) / 30 - (2 + budget)) < 0.05


def test_the_first_batch_sets_the_width_to_its_quantile() -> None:
    select = SmoothTopK(8, 2, budget=0.5)
    logits = torch.randn(2, 50, 8)
    real = torch.ones(2, 50, dtype=torch.bool)
    real[1, 40:] = False
    select.begin_training_forward()
    select(Scores(logits, logits.softmax(-1), False), torch.zeros(2, 50, 4), Context(token_mask=real))
    select.eval()
    ranked = logits[real].sort(-1, descending=True).values
    gaps = (ranked[:, 1:2] - ranked[:, 2:]).flatten().sort().values
    torch.testing.assert_close(select.width, (gaps[44] + gaps[45]) / 2)  # m = 45 of 90 tokens
    chosen = select(Scores(logits, logits.softmax(-1), False), torch.zeros(2, 50, 4), Context())
    assert (chosen.experts < 8)[real].sum() == 2 * 90 + 45


def test_the_first_batch_with_a_gap_sets_the_width_after_a_zero_graph() -> None:
    """At step 0 of symphony all gates are 0 and all experts tie: that is no gap to remember."""
    router, tokens = holdfast.create_router("symphony+smooth", dim=16, experts=8), torch.randn(4, 128, 16)
    widths = []
    for _ in range(4):
        router(tokens)
        widths.append(float(router.select.width))  # type: ignore[arg-type]
    assert widths[:2] == [0.0, 0.0]
    assert 0 < 0.9 * widths[2] < widths[3] < 1.1 * widths[2]  # set at once, not crept up to


@pytest.mark.parametrize(("budget", "expected"), [(0.0, 2.0), (6.0, 8.0), (99.0, 8.0)])
def test_budgets_of_nothing_and_of_everything(budget: float, expected: float) -> None:
    router = holdfast.create_router("smooth", dim=16, experts=8, budget=budget)
    assert sum(train(router, 30)[10:]) / 20 == pytest.approx(expected, abs=0.02)
    everyone = holdfast.create_router("smooth", dim=16, experts=8, k=8)
    assert train(everyone, 3)[-1] == 8


def test_the_boundary_loss_steers_eps_towards_the_budget() -> None:
    for start, target in ((2.0, "down"), (1e-3, "up")):
        router = holdfast.create_router("smooth", dim=16, experts=8, control="loss", eps=start)
        before = float(router.select.eps().detach())  # type: ignore[operator]
        optimizer = torch.optim.Adam(router.parameters(), lr=0.05)
        for _ in range(20):
            optimizer.zero_grad()
            router(torch.randn(2, 128, 16)).losses["boundary"].backward()
            optimizer.step()
        after = float(router.select.eps().detach())  # type: ignore[operator]
        assert after < before if target == "down" else after > before


def test_annealing_ends_in_hard_top_k() -> None:
    router = holdfast.create_router("smooth", dim=16, experts=8, anneal=True)
    seen = {}
    for fraction in (0.0, 0.5, 0.625, 0.75, 1.0):
        router.progress(fraction)
        seen[fraction] = float(router.select.budget_now)  # type: ignore[arg-type]
    assert seen == {0.0: 0.5, 0.5: 0.5, 0.625: 0.25, 0.75: 0.0, 1.0: 0.0}
    router.progress(0.0)
    assert sum(train(router, 20)[5:]) / 15 == pytest.approx(2.5, abs=0.1)
    assert (router.eval()(torch.randn(2, 64, 16)).used.sum(-1) == 2).all()
    router.train().progress(0.8)
    assert set(train(router, 3)) == {2.0}


def test_hard_inference_is_hard_only_in_evaluation() -> None:
    router = holdfast.create_router("smooth", dim=16, experts=8, inference="hard", eps=0.5)
    tokens = torch.randn(2, 64, 16)
    assert router(tokens).used.sum() > 2 * 128
    assert router.eval()(tokens).used.sum() == 2 * 128

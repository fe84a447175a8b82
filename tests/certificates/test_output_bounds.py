"""The output of a layer never changes by more than its bound, nor does any part of the bound fail: M of every network, the
change of weights, and the experts that can be in use. Each is compared with a naive loop and with a search."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from certificates.certified_routers import build, generator, linear_score
from torch import Tensor, nn

import holdfast
from holdfast.attacks import attack_outputs
from holdfast.certificates import Gate, LayerParts, Networks, NoCertificate, OutputCertificate, certify_output
from holdfast.kernels.select import Powers
from holdfast.layers.experts import ACTIVATIONS, SLOPES, slope_of
from holdfast.layers.moe import FeedForward, network_of
from holdfast.routing import Context, ReLU, Router, Routing, SmoothTopK, TopK
from holdfast.routing.rules import Softmax
from holdfast.routing.smoothing import steepest, strip_factor

RADII = (0.01, 0.1, 1.0)


def networks(name: str, gated: bool, seed: int = 0, experts: int = 3) -> holdfast.Experts:
    torch.manual_seed(seed)
    made = holdfast.Experts(7, 5, experts, activation=name, gated=gated, bias=True)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made.requires_grad_(False)


def naive_move(made: holdfast.Experts, expert: int, x: Tensor, r: float) -> float:
    """Return M, hidden unit by hidden unit."""
    slope, down = SLOPES[str(made.activation_name)], made.down_proj[expert].double()
    of_down = float(torch.linalg.svdvals(down)[0])
    if not made.gated:
        return of_down * slope * float(torch.linalg.svdvals(made.get_parameter("up_proj")[expert].double())[0]) * r
    weights = dict(made.named_parameters())
    up, bias = weights["gate_up_proj"][expert].double(), weights["gate_up_proj_bias"][expert].double()
    v, all_a, all_b = [], [], []
    for q in range(made.hidden):
        g, u = up[q], up[made.hidden + q]
        a = float(made.activation(g @ x + bias[q]))
        b = float(u @ x + bias[made.hidden + q])
        of_g, of_u = float(g.norm()), float(u.norm())
        v.append(slope * r * of_g * (abs(b) + r * of_u) + abs(a) * r * of_u)
        all_a.append(abs(a))
        all_b.append(abs(b) + r * max(float(row.norm()) for row in up[made.hidden :]))
    of_gate, of_up = (float(torch.linalg.svdvals(part)[0]) for part in up.chunk(2))
    together = slope * r * of_gate * max(all_b) + max(all_a) * r * of_up
    return of_down * min(math.sqrt(sum(one**2 for one in v)), together)


def farthest(function: Callable[[Tensor], Tensor], x: Tensor, r: float, tries: int = 64, steps: int = 20) -> float:
    """Return the largest |f(x') - f(x)| that random directions and gradient steps find in the ball around `x (d,)`."""
    before, rows = function(x.unsqueeze(0)), torch.randn(tries, len(x), generator=generator(1), dtype=x.dtype)
    moved = x + r * rows / rows.norm(dim=1, keepdim=True)
    largest = 0.0
    for _ in range(steps):
        moved = moved.detach().requires_grad_()
        change = (function(moved) - before).square().sum(1)
        largest = max(largest, float(change.detach().max()) ** 0.5)
        step = moved.detach() - x + r * nn.functional.normalize(torch.autograd.grad(change.sum(), moved)[0], dim=1)
        moved = x + step * (r / step.norm(dim=1, keepdim=True)).clamp_max(1)
    return largest


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("name", SLOPES)
def test_no_network_moves_farther_than_its_bound(name: str, gated: bool) -> None:
    made = networks(name, gated)
    tokens = torch.randn(4, 7, generator=generator(3)).double()
    at, double = made.networks().at(tokens), made.double()
    for r in RADII:
        found = at.move(torch.full((4,), r, dtype=torch.float64))
        for token, x in enumerate(tokens):
            for expert in range(3):

                def run(rows: Tensor, expert: int = expert) -> Tensor:
                    return double(rows, torch.full((len(rows), 1), expert), torch.ones(len(rows), 1))

                torch.testing.assert_close(at.outputs[token, expert], run(x.unsqueeze(0))[0])
                assert float(found[token, expert]) == pytest.approx(naive_move(double, expert, x, r), rel=1e-6)
                assert farthest(run, x, r, tries=16, steps=8) <= float(found[token, expert])


def test_the_bound_of_a_linear_network_is_reached() -> None:
    """With ReLU and all units active f = W2 W1 x + b: the largest change is |W2 W1| r, and M if singular vectors agree."""
    down, up = torch.randn(6, 1, generator=generator(0)), torch.randn(1, 4, generator=generator(1))
    made = Networks(up[None], down[None], torch.relu, 1.0, gated=False, up_bias=torch.full((1, 1), 100.0))
    x, r = torch.zeros(1, 4, dtype=torch.float64), 0.5
    step = r * up.double() / up.double().norm()
    before, after = made.at(x).outputs, made.at(x + step).outputs
    bound = made.at(x).move(torch.tensor([r], dtype=torch.float64))
    assert float((after - before).norm() / bound) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("name", SLOPES)
def test_the_bound_is_reached_to_first_order_where_the_activation_is_steepest(name: str, gated: bool) -> None:
    points = torch.linspace(-6, 6, 600_001, dtype=torch.float64, requires_grad=True)
    slopes = torch.autograd.grad(ACTIVATIONS[name](points).sum(), points)[0]
    assert float(slopes.abs().max()) <= SLOPES[name] <= float(slopes.abs().max()) * 1.0001
    up = torch.tensor([[1.0, 0.0]]).double()
    bias = points.detach()[slopes.argmax()].view(1, 1)
    sign = float(ACTIVATIONS[name](bias).sign()) or 1.0
    if gated:  # both factors grow along the same feature
        up, bias = torch.cat([up, sign * up]), torch.cat([bias, torch.full((1, 1), 0.7, dtype=torch.float64)], dim=1)
    made = Networks(up[None], torch.ones(1, 3, 1).double(), ACTIVATIONS[name], SLOPES[name], gated, bias)
    x, r = torch.zeros(1, 2, dtype=torch.float64), 1e-4
    steps = torch.tensor([[r, 0.0], [-r, 0.0]]).double()
    change = (made.at(steps).outputs - made.at(x).outputs).norm(dim=-1).max()
    assert 0.999 < float(change / made.at(x).move(torch.tensor([r]).double())) <= 1


def test_a_network_behind_a_sigmoid_gate_moves_no_farther_than_its_bound() -> None:
    torch.manual_seed(0)
    dense, weight = FeedForward(7, 5).double(), torch.randn(7).double()
    made = network_of(dense.requires_grad_(False), weight)
    for x in torch.randn(4, 7, generator=generator(2)).double():
        for r in RADII:
            bound = float(made.at(x.unsqueeze(0)).move(torch.tensor([r]).double()))
            largest = farthest(lambda rows: torch.sigmoid(rows @ weight).unsqueeze(1) * dense(rows), x, r)
            assert 0.02 * bound < largest <= bound


def test_activations_without_a_known_slope_are_refused() -> None:
    for activation in (ACTIVATIONS["relu2"], lambda hidden: hidden, nn.GELU(), nn.Softplus()):
        with pytest.raises(NoCertificate, match="no steepest slope is known"):
            slope_of(activation)
    assert slope_of(nn.SiLU()) == SLOPES["silu"]


def test_the_slope_of_the_strip_is_bounded_from_above_and_tightly() -> None:
    for powers in (Powers(), Powers(1, 1), Powers(2, 10), Powers(3, 3), Powers(1, 500)):
        factors = strip_factor(torch.linspace(-0.5, 1.5, 2_000_001, dtype=torch.float64), 1.0, powers)
        measured = float(factors.diff().abs().max()) * 1e6
        assert measured * (1 - 1e-6) <= steepest(powers) <= measured * 1.006
    assert steepest(Powers()) == pytest.approx(17.76, abs=0.01)
    assert math.isinf(steepest(Powers(0.5, 50))) and math.isinf(steepest(Powers(1, 0.9)))


def without_experts(router: Router) -> LayerParts:
    """Return parts whose experts are 0, for what certificates say about weights."""
    none = torch.zeros(router.experts, 1, router.dim)
    return LayerParts(router, Networks(none, none.mT, torch.relu, 1.0, gated=False))


def naive_reach(weight: Tensor, x: Tensor, k: int, r: float, width: float) -> list[bool]:
    logits = [float(row @ x) for row in weight]
    best = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:k]
    return [
        e in best or min(logits[f] - logits[e] - r * float((weight[f] - weight[e]).norm()) for f in best) < (width or 1e-300)
        for e in range(len(logits))
    ]


def test_the_experts_that_can_be_in_use_are_those_of_the_naive_formula() -> None:
    for select, width in ((TopK(9, 3), 0.0), (SmoothTopK(9, 3, eps=0.25), 0.25)):
        weight = torch.randn(9, 6, generator=generator(0))
        router = Router(linear_score(weight), select).eval()
        tokens = torch.randn(40, 6, generator=generator(1))
        found = certify_output(without_experts(router), tokens, RADII)
        for place, r in enumerate(RADII):
            for token, x in enumerate(tokens.double()):
                assert found.reach[token, place].tolist() == naive_reach(weight.double(), x, 3, r, width)


def naive_change(weight: Tensor, x: Tensor, k: int, r: float, width: float) -> float:
    """Return T of a router whose weights are shares of the set, expert by expert."""
    logits, experts = [float(row @ x) for row in weight], range(len(weight))
    best = sorted(experts, key=lambda e: (-logits[e], e))[:k]
    last, reach = best[-1], [e for e in experts if naive_reach(weight, x, k, r, width)[e]]
    far = [[r * float((weight[f] - weight[e]).norm()) for e in experts] for f in experts]

    def factor(gap: float) -> float:
        return float(strip_factor(torch.tensor(gap).double(), width)) if width else float(gap <= 0)

    amounts = [math.exp(logits[e]) * (1.0 if e in best else factor(logits[last] - logits[e])) for e in experts]
    shares = [amount / sum(amounts) for amount in amounts]
    low = [min(logits[f] - logits[e] - far[f][e] for f in best) for e in experts]
    rivals = [[f for f in experts if f not in best or (f == last and e not in best)] for e in experts]
    high = [max((logits[f] - logits[e] + far[f][e] for f in rivals[e]), default=-9.0) for e in experts]
    p = [1.0 if e in best and high[e] < 0 else factor(max(high[e], 0)) if width else 0.0 for e in experts]
    q = [1.0 if e in best else factor(low[e]) if e in reach else 0.0 for e in experts]
    falls = rises = 0.0
    for e in experts:
        above = sorted((q[f] * math.exp(logits[f] - logits[e] + far[f][e]) for f in experts if f != e), reverse=True)
        below = sum(p[f] * math.exp(logits[f] - logits[e] - far[f][e]) for f in experts if f != e)
        lower = p[e] / (p[e] + sum(above if width else above[: k - 1])) if p[e] else 0.0
        upper = q[e] / (q[e] + below) if q[e] else 0.0
        falls, rises = falls + max(0.0, shares[e] - lower), rises + max(0.0, upper - shares[e])
    largest = max(far[f][e] for e in reach for f in reach)
    if len(reach) == k:
        return min(1.0, falls, rises, math.tanh(largest / 4))
    path = largest * (0.25 + (len(reach) - k) * (1 + steepest(Powers()) / width) / k) if width else 1.0
    return min(1.0, falls, rises, path)


@pytest.mark.parametrize("width", [0.0, 0.25])
def test_the_bound_of_the_change_of_weights_is_that_of_the_naive_formula(width: float) -> None:
    weight = torch.randn(7, 6, generator=generator(0))
    router = Router(linear_score(weight), SmoothTopK(7, 3, eps=width) if width else TopK(7, 3)).eval()
    tokens, radii = torch.randn(30, 6, generator=generator(1)), (0.0003, 0.003, 0.03, 0.1, 0.3)
    found = certify_output(without_experts(router), tokens, radii)
    expected = [[naive_change(weight.double(), x, 3, r, width) for r in radii] for x in tokens.double()]
    torch.testing.assert_close(found.change, torch.tensor(expected).double(), rtol=1e-5, atol=1e-9)
    assert 0.01 < found.change.median() < 0.95


SUBJECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "top-k": ("smoe", {}),
    "raw gates": ("switch", {}),
    "cosines": ("xmoe", {}),
    "strip": ("smooth", {"eps": 0.3}),
    "steep strip": ("smooth", {"eps": 0.3, "a": 0.5, "b": 0.7}),
    "graph": ("symphony", {}),
    "graph and strip": ("symphony+smooth", {}),
    "threshold": ("top-p", {"p": 0.1}),
    "ReLU": ("remoe", {}),
    "groups": ("grouped", {}),
    "sigmoids": ("base", {}),
}


def router_of(name: str, seed: int = 0) -> Router:
    kind, options = SUBJECTS[name]
    torch.manual_seed(seed)
    made = holdfast.create_router(kind, dim=10, experts=6, k=2, **options)
    if "graph" in name:
        for _ in range(4):
            made.train()(torch.randn(8, 16, 10))
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("name", SUBJECTS)
def test_weights_move_no_farther_than_their_bound_and_stay_among_the_expected_experts(name: str) -> None:
    router, tokens = router_of(name), torch.randn(64, 10, generator=generator(4))
    found = certify_output(without_experts(router), tokens, RADII)
    before = router(tokens).dense_weights
    for place, r in enumerate(RADII):

        def search(step: Tensor, r: float = r, place: int = place) -> Tensor:
            moved = tokens + 0.9999 * r * nn.functional.normalize(step, dim=1)
            routing = router(moved)
            change = (routing.dense_weights - before).abs().sum(1) / 2
            assert (change <= found.change[:, place] + 1e-5).all()
            assert not (routing.chosen & ~found.reach[:, place]).any()
            return change

        for seed in range(20):
            search(torch.randn(tokens.shape, generator=generator(seed)))
        for up in range(6):  # towards one expert and away from another
            for down in range(6):
                leaf = tokens.clone().requires_grad_()
                gates = router(leaf).gates.clamp_min(1e-30).log()
                if up != down:
                    search(torch.autograd.grad((gates[:, up] - gates[:, down]).sum(), leaf)[0])


def test_the_change_of_a_softmax_over_two_experts_is_reached() -> None:
    """tanh(r D / 4) is exact where the two experts swap their weights."""
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, -9.0]])
    router = Router(linear_score(weight), TopK(3, 2)).eval()
    token = torch.tensor([[-0.25, 2.0]])
    found = certify_output(without_experts(router), token, [0.5])
    moved = router(token + torch.tensor([[0.5, 0.0]])).dense_weights
    change = float((moved - router(token).dense_weights).abs().sum().detach() / 2)
    assert found.reach.tolist() == [[[True, True, False]]]
    assert change == pytest.approx(math.tanh(0.25), abs=1e-6) and float(found.change) == pytest.approx(change, rel=1e-6)


def test_the_change_of_weights_in_a_strip_is_within_a_small_factor_of_the_bound() -> None:
    """One expert is in the strip below another, where its factor is steepest."""
    weight, width = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), 0.5
    router = Router(linear_score(weight), SmoothTopK(2, 1, eps=width)).eval()
    gaps = torch.linspace(0, width, 5001)
    factors = strip_factor(gaps.double(), width)
    gap = float(gaps[1:][factors.diff().argmin()])
    token = torch.tensor([[gap / 2, 0.0]])
    found = certify_output(without_experts(router), token, [1e-4])
    before = router(token).dense_weights
    moved = [float((router(token + step).dense_weights - before).abs().sum() / 2) for step in (1e-4 * weight[:, None])]
    assert 0.1 < max(moved) / float(found.change) <= 1


def test_within_the_radius_of_the_routing_only_its_experts_are_in_use_and_beyond_it_all_of_a_weight_can_move() -> None:
    weight = torch.eye(3)
    router = Router(linear_score(weight), TopK(3, 1)).eval()
    token = torch.tensor([[1.0, 0.0, -1.0]])
    plane = 1 / math.sqrt(2)
    found = certify_output(without_experts(router), token, [0.999 * plane, 1.001 * plane])
    assert found.reach[0].tolist() == [[True, False, False], [True, True, False]]
    assert float(found.change[0, 0]) < 1e-9 and float(found.change[0, 1]) == 1


def layer_of(router: Router, shared: nn.Module | None = None, **options: Any) -> holdfast.MoE:
    torch.manual_seed(1)
    made = holdfast.MoE(router, holdfast.Experts(router.dim, 12, router.experts, **options), shared)
    return made.eval().requires_grad_(False)


def runner(layer: holdfast.MoE, context: Context | None = None) -> Callable[[Tensor], tuple[Tensor, Routing]]:
    def run(rows: Tensor) -> tuple[Tensor, Routing]:
        output, routing = layer(rows.unsqueeze(0), context)
        return output.squeeze(0), routing

    return run


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_attack_changes_an_output_by_more_than_its_bound(name: str) -> None:
    layer, tokens = layer_of(router_of(name), FeedForward(10, 8)), torch.randn(48, 10, generator=generator(6))
    layer.router.scale = 1.5
    found = certify_output(layer, tokens, RADII)
    torch.testing.assert_close(found.lengths, layer(tokens.unsqueeze(0))[0][0].norm(dim=1).double(), rtol=1e-4, atol=1e-5)
    for place in range(len(RADII)):
        attack = attack_outputs(runner(layer), tokens, budget=found.radii[:, place], steps=8, starts=2, planes=3)
        assert (attack.change <= found.bound[:, place] * 1.0001 + 1e-5).all()
        assert float((attack.change / found.bound[:, place]).median()) > 0.02


def test_the_bound_is_that_of_the_naive_formula_for_plain_top_k() -> None:
    layer, token = layer_of(router_of("top-k")), torch.randn(1, 10, generator=generator(8))
    found, r = certify_output(layer, token, [0.05]), 0.05
    routing, at = layer.router(token.unsqueeze(0)), layer.experts.networks().at(token)
    reach = [e for e in range(6) if found.reach[0, 0, e]]
    apart = max(float((at.outputs[0, e] - at.outputs[0, f]).norm()) for e in reach for f in reach)
    moves = [float(at.move(torch.tensor([r]).double())[0, e]) for e in reach]
    share = float(found.change)
    mean = sum(float(routing.dense_weights[0, e]) * float(at.move(torch.tensor([r]).double())[0, e]) for e in reach)
    expected = share * apart + min(max(moves), mean + share * (max(moves) - min(moves)))
    assert float(found.bound) == pytest.approx(expected, rel=1e-6)


def test_one_strip_rule_of_a_model_whose_gates_are_not_renormalised_is_bounded_too() -> None:
    torch.manual_seed(0)
    score = linear_score(torch.randn(6, 10, generator=generator(1)))
    layer = layer_of(Router(score, SmoothTopK(6, 2, eps=0.4, rule=Softmax(renormalise=False))).eval())
    tokens = torch.randn(48, 10, generator=generator(6))
    found = certify_output(layer, tokens, RADII)
    for place in range(len(RADII)):
        attack = attack_outputs(runner(layer), tokens, budget=found.radii[:, place], steps=8, starts=2, planes=3)
        assert (attack.change <= found.bound[:, place] * 1.0001 + 1e-5).all()


def test_the_effective_weights_of_ac_count_and_padding_is_left_out() -> None:
    router, tokens, context = build("ac mixed", batch=2, length=12)
    layer = layer_of(router)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 7:] = False
    context = Context(previous=context.previous, token_mask=mask)
    found = certify_output(layer, tokens, [0.01, 0.2], context, relative=True)
    assert found.bound.shape == (2, 12, 2) and found.summary()["tokens"] == 19
    moved = tokens + 0.2 * 0.999 * tokens.norm(dim=-1, keepdim=True) * nn.functional.normalize(
        torch.randn(tokens.shape, generator=generator(5)), dim=-1
    )
    change = (layer(moved, context)[0] - layer(tokens, context)[0]).norm(dim=-1)
    assert (change <= found.bound[..., 1])[mask].all()


def test_a_native_gate_with_its_rule_has_the_bound_of_the_same_router() -> None:
    router, tokens = router_of("top-k"), torch.randn(20, 10, generator=generator(3))
    experts = layer_of(router).experts.networks()
    weight = next(router.score.parameters())
    mine = certify_output(LayerParts(router, experts), tokens, RADII)
    theirs = certify_output(LayerParts(Gate(weight, 2, rule=Softmax(renormalise=True)), experts), tokens, RADII)
    torch.testing.assert_close(mine.bound, theirs.bound)
    with pytest.raises(NoCertificate, match="does not declare how weights follow"):
        certify_output(LayerParts(Gate(weight, 2), experts), tokens, RADII)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "shared gates": ("similarity", {}, "tokens of a sequence share their gates"),
    "most": ("smooth", {"most": 3, "eps": 0.3}, "the width of a strip depends on the next expert"),
    "no order": ("mlp", {}, "declares no order"),
    "informed ReLU": ("symphony+remoe", {}, "an informer changes its gates"),
    "capacity": ("capacity", {}, "no certificate is known|does not declare how weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_router_without_a_known_bound_is_refused_in_one_sentence(name: str) -> None:
    kind, options, reason = REFUSED[name]
    router = holdfast.create_router(kind, dim=10, experts=6, k=2, **options)
    if "symphony" in kind:
        router.train()(torch.randn(2, 8, 10))
    with pytest.raises(NoCertificate, match=reason):
        certify_output(layer_of(router.eval()), torch.randn(1, 8, 10), [0.1])


def test_experts_and_shared_experts_without_a_known_bound_are_refused() -> None:
    router, tokens = router_of("top-k"), torch.randn(2, 10)
    with pytest.raises(NoCertificate, match="activation, relu2"):
        certify_output(layer_of(router, activation="relu2"), tokens, [0.1])
    with pytest.raises(NoCertificate, match="a shared expert that is a LayerNorm"):
        certify_output(layer_of(router, nn.LayerNorm(10)), tokens, [0.1])
    own: Any = layer_of(router)
    own.experts = nn.Identity()
    with pytest.raises(NoCertificate, match="experts that are a Identity"):
        certify_output(own, tokens, [0.1])
    with pytest.raises(ValueError, match="expected at least one finite number"):
        certify_output(layer_of(router), tokens, [-0.1])
    with pytest.raises(ValueError, match="training mode"):
        certify_output(layer_of(router).train(), tokens, [0.1])
    router.eval()


def test_wrong_declarations_are_an_error_and_no_certificate() -> None:
    class Sharper(TopK):
        """Weights that are not those of the declared rule."""

        def forward(self, *given: Any) -> Any:
            selection = super().forward(*given)
            squared = selection.weights.square()
            return selection._replace(weights=squared / squared.sum(-1, keepdim=True))

    router = Router(linear_score(torch.randn(6, 10, generator=generator(2))), Sharper(6, 2)).eval()
    with pytest.raises(ValueError, match="other weights than the router's parts declare"):
        certify_output(layer_of(router), torch.randn(8, 10), [0.1])


def test_weights_in_bfloat16_are_read_exactly_and_no_tokens_give_an_empty_certificate() -> None:
    layer = layer_of(router_of("top-k"))
    layer.experts.bfloat16()
    tokens = torch.randn(5, 10, generator=generator(0))
    rounded = certify_output(layer, tokens, [0.1])
    layer.experts.float()
    torch.testing.assert_close(certify_output(layer, tokens, [0.1]).bound, rounded.bound)
    empty = certify_output(layer, tokens[:0], [0.1])
    assert empty.bound.shape == (0, 1) and empty.share(1.0) == [0.0]


def test_an_output_of_length_0_has_a_summary() -> None:
    """With ReLU gates a token may have no expert: its output is 0, and its relative change 0 or infinite."""
    router = Router(linear_score(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), ReLU(2, 1)).eval()
    found = certify_output(layer_of(router), torch.tensor([[-1.0, -1.0]]), [0.1, 2.0])
    first, second = (row["relative_change"] for row in summary_rows(found))
    assert float(found.lengths) == 0 and first == 0 and second is None
    assert found.share(0.5) == [1.0, 0.0]


def summary_rows(found: OutputCertificate) -> Any:
    return found.summary()["radii"]


def test_shares_count_tokens_whose_output_changes_by_at_most_that_part_of_its_length() -> None:
    found = certify_output(layer_of(router_of("top-k")), torch.randn(30, 10, generator=generator(1)), [0.01, 0.1])
    ratio = found.bound / found.lengths.unsqueeze(1)
    expected = [sum(float(ratio[t, place]) <= 0.2 for t in range(30)) / 30 for place in range(2)]
    assert found.share(0.2) == pytest.approx(expected)
    assert [row["radius"] for row in summary_rows(found)] == [0.01, 0.1]


@pytest.mark.parametrize("name", ["remoe", "smoe", "smooth"])
def test_rounding_of_huge_logits_is_not_taken_for_a_wrong_declaration(name: str) -> None:
    """float32 holds a logit of 10,000 with an error of 0.001, and weights follow it."""
    router = holdfast.create_router(name, dim=64, experts=6, k=2).eval()
    assert isinstance(router.score, nn.Module)
    with torch.no_grad():
        weight = router.score.get_parameter("weight").normal_(std=0.05, generator=generator(0))
        weight[1] = weight[0] + 1e-3 * weight[2]
        weight[:, 0] = torch.tensor([1.02, 1.02, 1, 1, 1, 1])
    tokens = torch.randn(200, 64, generator=generator(1))
    tokens[:, 0] *= 10_000
    declared = tokens.double() @ weight.double().t()
    assert (declared - router.score(tokens.unsqueeze(0), Context())[0]).abs().max() > 1e-3
    found = certify_output(without_experts(router), tokens, [0.01])
    assert found.change.isfinite().all()


@pytest.mark.parametrize("weights", ["softmax", "switch"])
def test_an_expert_graph_of_zeros_is_refused(weights: str) -> None:
    """All gates and weights are 0 then, as in a new `symphony`, and there are no logarithms of gates."""
    router = holdfast.create_router("symphony", dim=8, experts=4, k=2, weights=weights).eval()
    with pytest.raises(NoCertificate, match="all entries of its expert graph are 0"):
        certify_output(without_experts(router), torch.randn(1, 5, 8, generator=generator(0)), [0.1])


class Hundredfold(FeedForward):
    """A shared expert with the submodules of another one, that computes something else."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 100 * super().forward(tokens)


class HundredfoldExperts(holdfast.Experts):
    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return 100 * super().forward(*arguments, **options)


@pytest.mark.parametrize("which", ["experts", "shared", "hook"])
def test_a_layer_that_computes_something_else_than_its_parts_is_refused(which: str) -> None:
    torch.manual_seed(0)
    router = holdfast.create_router("smoe", dim=8, experts=4, k=2)
    experts = HundredfoldExperts(8, 8, 4) if which == "experts" else holdfast.Experts(8, 8, 4)
    shared = Hundredfold(8, 8) if which == "shared" else FeedForward(8, 8)
    layer, tokens = holdfast.MoE(router, experts, shared).eval(), torch.randn(9, 8)
    if which == "hook":
        layer.shared.register_forward_hook(lambda module, given, output: 100 * output)  # type: ignore[union-attr]
    with pytest.raises(NoCertificate, match="its output is not that of its router, its experts and a shared expert"):
        certify_output(layer, tokens, [0.1])


def test_a_negative_scale_of_weights_has_the_bound_of_a_positive_one() -> None:
    torch.manual_seed(0)
    layer = holdfast.MoE(holdfast.create_router("smoe", dim=8, experts=4, k=2), holdfast.Experts(8, 8, 4))
    found = []
    for scale in (2.0, -2.0):
        layer.eval().router.scale = scale
        tokens = torch.randn(5, 8, generator=generator(0))
        found.append(certify_output(layer, tokens, [0.1]).bound)
    assert torch.equal(*found) and (found[0] > 0).all()

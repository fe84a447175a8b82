"""User-defined parts: declared ones are certified and survive attacks; undeclared ones are refused by name."""

from dataclasses import replace

import pytest
import torch
from certificates.certified_routers import generator, linear_score
from certificates.probing import directions, probe, sets_of
from certificates.rounding import rounding_errors
from outside_score import Distance
from torch import Tensor

from holdfast.attacks import attack_routes
from holdfast.certificates import NORMS, NoCertificate, Norm, certify
from holdfast.kernels.select import top
from holdfast.routing import (
    Context,
    Informer,
    InformerDeclarations,
    Linear,
    LinearScore,
    Router,
    ScoreDeclarations,
    Scores,
    Selection,
    Selector,
    SelectorDeclarations,
    TopK,
    TopP,
)
from holdfast.routing.declarations import (
    RELU,
    SIGMOID,
    SOFTMAX,
    Conditions,
    GateFunction,
    Order,
    keep_above,
    keep_best,
)
from holdfast.routing.expert_graph import ExpertGraph
from holdfast.routing.rules import Rule

DIM, EXPERTS = 6, 5


def by_distance(kind: type[Distance] = Distance) -> Distance:
    """Return the score of the contributing page: differences of its logits are affine in x, a logit is not."""
    torch.manual_seed(3)
    return kind(DIM, EXPERTS, width=1.0)


class Prototype(LinearScore):
    """logit_e = c_e.x + b_e, by a product and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.experts = DIM, EXPERTS
        self.register_buffer("centres", torch.randn(EXPERTS, DIM, generator=generator(4)))

    @property
    def matrix(self) -> Tensor:
        return self.get_buffer("centres")

    def finish(self, projected: Tensor) -> Tensor:
        return projected + torch.arange(EXPERTS)


class DeclaredPrototype(Prototype):
    @property
    def declares(self) -> ScoreDeclarations:
        return ScoreDeclarations(order=lambda tokens, context: Order(self.matrix, bias=torch.arange(EXPERTS)))


class WithinReach(Selector):
    """Every expert whose logit is above 0.3; no conditions are declared."""

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        experts = top(scores.logits, EXPERTS)
        in_use = scores.logits.gather(-1, experts) > 0.3
        weights = in_use.float() / in_use.sum(-1, keepdim=True).clamp_min(1)
        return Selection(experts.where(in_use, EXPERTS), weights, scores.gates)

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        in_use = experts < EXPERTS
        return live.weights_if_same_set(experts, in_use.float() / in_use.sum(-1, keepdim=True).clamp_min(1))


class DeclaredWithinReach(WithinReach):
    @property
    def declares(self) -> SelectorDeclarations:
        return SelectorDeclarations(conditions=lambda scores: keep_above(scores.logits, 0.3, "logits"))


class Reverse(Informer):
    """Gates in reverse order, a graph that is not declared."""

    side = "expert"

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        return gates.flip(-1)


class DeclaredReverse(Reverse):
    @property
    def declares(self) -> InformerDeclarations:
        return InformerDeclarations(graph=lambda: torch.eye(EXPERTS).flip(0))


class Against(Reverse):
    @property
    def declares(self) -> InformerDeclarations:
        return InformerDeclarations(graph=lambda: -torch.eye(EXPERTS))


class Blur(Informer):
    """Every token gets the mean of its sequence; no mixing is declared."""

    side = "token"

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        return gates.mean(1, keepdim=True).expand_as(gates)


def tokens_of(count: int = 40) -> Tensor:
    return 2 * torch.randn(count, DIM, generator=generator(0))


def survives(router: Router, tokens: Tensor, norm: Norm) -> float:
    """Return the share of tokens with a radius, after random perturbations and an attack found no flip inside it."""
    found = certify(router, tokens, norm=norm)
    tried, flipped = probe(sets_of(router), tokens, found.radius, norm, directions(tokens, norm, 32))
    assert tried > 500 and flipped == 0
    some = found.radius > 0
    budget = found.radius.where(found.radius < torch.inf, 1.0)
    assert attack_routes(router, tokens[some], budget=budget[some], norm=norm).rate == 0
    return float(some.float().mean())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("select", [TopK(EXPERTS, 2), TopP(EXPERTS, p=0.2)], ids=["top-k", "top-p"])
def test_a_declared_score_is_certified_and_the_radius_survives_attack(select: Selector, norm: Norm) -> None:
    made = Router(by_distance(), select=select).eval()
    assert survives(made, tokens_of(), norm) > 0.95


def test_the_radius_of_a_declared_score_is_the_distance_to_the_nearest_plane() -> None:
    made, tokens = Router(by_distance(), select=TopK(EXPERTS, 1)).eval(), tokens_of()
    centres = made.score.get_parameter("centres").detach().double()
    found = certify(made, tokens)
    assert found.kind == "exact"
    for x, distance in zip(tokens.double(), found.distance.tolist(), strict=True):
        near = (x - centres).square().sum(1)
        best = int(near.argmin())
        others = [j for j in range(EXPERTS) if j != best]
        planes = [float((near[j] - near[best]) / (2 * (centres[j] - centres[best]).norm())) for j in others]
        assert distance == pytest.approx(min(planes), rel=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_a_declared_selector_is_certified_and_the_radius_survives_attack(norm: Norm) -> None:
    made = Router(Linear(DIM, EXPERTS), select=DeclaredWithinReach()).eval()
    assert survives(made, tokens_of(), norm) > 0.95


def test_a_declared_expert_graph_is_certified_and_the_radius_survives_attack() -> None:
    made = Router(Linear(DIM, EXPERTS), TopK(EXPERTS, 2), [DeclaredReverse()]).eval()
    assert survives(made, tokens_of(), "l2") > 0.95
    plain = Router(made.score, select=TopK(EXPERTS, 2)).eval()  # the same experts under other numbers
    expected = certify(plain, tokens_of()).distance
    torch.testing.assert_close(certify(made, tokens_of()).distance, expected, rtol=1e-5, atol=1e-9)


def test_declared_rounding_outside_of_the_product_is_subtracted() -> None:
    made, tokens = Router(by_distance(), select=TopK(EXPERTS, 2)).eval(), tokens_of()
    found = certify(made, tokens)

    class Careless(Distance):
        def order(self, tokens: Tensor, context: Context) -> Order:
            return replace(super().order(tokens, context), rounding=None)

    careless = Router(by_distance(Careless), select=made.select).eval()
    other = certify(careless, tokens)
    assert torch.equal(found.distance, other.distance) and (found.radius < other.radius).all()
    errors = (rounding_errors(each, tokens, torch.float32) for each in (made, careless))
    assert torch.gt(*errors).all()


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (Router(Prototype(), select=TopK(EXPERTS, 2)), "Prototype: it declares no order"),
        (Router(DeclaredPrototype(), select=TopP(EXPERTS)), "DeclaredPrototype: it declares no values"),
        (Router(Linear(DIM, EXPERTS), select=WithinReach()), "WithinReach: it declares no conditions"),
        (Router(Linear(DIM, EXPERTS), TopK(EXPERTS, 2), [Reverse()]), "Reverse: it declares no graph"),
        (Router(Linear(DIM, EXPERTS), TopK(EXPERTS, 2), [Against()]), "Against: .* negative entries"),
        (Router(Linear(DIM, EXPERTS), TopK(EXPERTS, 2), [Blur()]), "Blur: it declares no mixing"),
        (Router(by_distance(), select=DeclaredWithinReach()), "Distance.*DeclaredWithinReach reads the logits themselves"),
    ],
    ids=["score", "values", "selector", "expert side", "negative graph", "token side", "shifted logits"],
)
def test_what_is_not_declared_is_refused_by_name(router: Router, message: str) -> None:
    with pytest.raises(NoCertificate, match=message):
        certify(router.eval(), tokens_of().unsqueeze(0))


def test_an_order_alone_is_enough_for_the_best_logits() -> None:
    own = DeclaredPrototype()
    known = linear_score(own.matrix, torch.arange(float(EXPERTS)))
    first, second = (certify(Router(score, select=TopK(EXPERTS, 2)).eval(), tokens_of()) for score in (known, own))
    assert torch.equal(first.radius, second.radius)


@pytest.mark.parametrize("gate", [SOFTMAX, SIGMOID, RELU, GateFunction("square", torch.square)], ids=lambda gate: gate.name)
def test_only_declared_gate_functions_are_certified(gate: GateFunction) -> None:
    """The name decides: a softmax under another name is not certified."""

    class Best(Rule):
        def conditions(self, scores: Scores, k: int) -> Conditions:
            return keep_best(scores.key, k, scores.compares)

        def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
            return scores.gates.gather(-1, experts)

    def build(gate: GateFunction) -> Router:
        rule = Best()
        rule.gate = gate
        graph = ExpertGraph(EXPERTS, 2, init="identity")
        return Router(Linear(DIM, EXPERTS), TopK(EXPERTS, 2, rule=rule), [graph]).eval()

    made = build(gate)
    if gate.name in ("softmax", "sigmoid"):
        assert survives(made, tokens_of(), "l2") > 0.9
    else:
        with pytest.raises(NoCertificate, match=r"TopK under the rule Best"):
            certify(made, tokens_of())
    with pytest.raises(NoCertificate, match="'mine'"):
        certify(build(replace(gate, name="mine")), tokens_of())

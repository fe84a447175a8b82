"""Sigmoid gates with a correction bias and groups of experts, as DeepSeek-V3 and GLM-4 have them."""

import math
from itertools import product

import pytest
import torch
from certificates.certified_routers import generator, grouped_sigmoid, sigmoid_gate
from certificates.probing import directions, native, probe, share_of_search
from torch import Tensor

from holdfast.certificates import NORMS, Gate, NoCertificate, Norm, certify
from holdfast.routing import Router, Routing, Scores
from holdfast.routing.declarations import SIGMOID, best_groups, group_conditions
from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import HostModel
from holdfast.routing.rules import Rule


def with_bias(gate: Gate, bias: list[float]) -> Gate:
    assert gate.rule is not None
    owner = gate.rule.owner  # type: ignore[attr-defined]
    owner.e_score_correction_bias.copy_(torch.tensor(bias))
    return gate


def test_two_experts_on_a_line_by_hand() -> None:
    """s(x) + 0.1 against s(0) + 0.3: the first loses where s(x) = 0.7, at x = log(7/3)."""
    gate = with_bias(Gate(torch.tensor([[1.0], [0.0]]), 1, rule=grouped_sigmoid(2, 1, 1)), [0.1, 0.3])
    for x in (0.9, 1.5, 3.0):
        found = certify(gate, torch.tensor([[x]]))
        exact = x - math.log(7 / 3)
        # On a line the worst of the logits is the truth.
        assert found.distance.item() == pytest.approx(exact, rel=1e-5) and found.kind == "lower bound"
        assert found.margin.item() == pytest.approx(1 / (1 + math.exp(-x)) - 0.7, rel=1e-4)
        assert found.pair.tolist() == [[0, 1]]


def test_a_bias_that_no_sigmoid_can_overcome_is_certified_everywhere() -> None:
    gate = with_bias(Gate(torch.tensor([[1.0], [-1.0]]), 1, rule=grouped_sigmoid(2, 1, 1)), [1.5, 0.0])
    assert certify(gate, torch.tensor([[0.3]])).distance.isinf().all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("groups", [1, 4])
def test_the_bound_is_close_to_what_a_search_of_the_plane_finds(groups: int, norm: Norm) -> None:
    gate = sigmoid_gate(experts=8, k=2, groups=groups, kept=max(1, groups // 2), dim=2)
    tokens = 2 * torch.randn(16, 2, generator=generator(4))
    found = certify(gate, tokens, norm=norm)
    assert share_of_search(native(gate), tokens, found) > 0.7


def test_without_bias_and_groups_the_planes_are_those_of_the_logits() -> None:
    gate, tokens = sigmoid_gate(spread=0.0), torch.randn(50, 12, generator=generator(1))
    found, plain = certify(gate, tokens), certify(Gate(gate.weight, gate.k), tokens)
    assert found.kind == "exact" and torch.equal(found.distance, plain.distance)
    assert (found.radius < found.distance).all() and (found.radius > 0.99 * plain.radius).float().mean() > 0.9


def test_sigmoids_that_round_to_one_have_radius_zero() -> None:
    """Logits 30 and 20 are far apart, their float32 sigmoids are both 1."""
    weight = torch.tensor([[20.0], [30.0]])
    found = certify(Gate(weight, 1, rule=grouped_sigmoid(2, 1, 1, spread=0.0)), torch.tensor([[1.0], [0.1]]))
    assert found.radius[0] == 0 and found.radius[1] > 0


def test_the_conditions_of_groups_are_those_of_every_two_groups() -> None:
    """Kept group 0 with chosen experts, kept group 1 without; against groups 2 and 3 of three experts each."""
    keys = torch.tensor([[9.0, 8.0, 1.0, 5.0, 4.0, 0.0, 2.0, 1.0, 3.0, 0.5, 2.5, 0.1]])
    kept = best_groups(keys, 4, 2)
    assert kept.tolist() == [[True, True, False, False]]
    chosen = torch.zeros_like(keys, dtype=torch.bool)
    chosen[0, :2] = True
    pairs = group_conditions(keys, kept, chosen)
    assert pairs.way is not None
    found = {
        (tuple(sorted(ahead)), tuple(sorted(behind)), way)
        for ahead, behind, way in zip(pairs.ahead[0].tolist(), pairs.behind[0].tolist(), pairs.way[0].tolist(), strict=True)
    }
    teams = {2: [(6, 7), (6, 8), (7, 8)], 3: [(9, 10), (9, 11), (10, 11)]}
    expected = {((0, 1), team, 0) for group in (2, 3) for team in teams[group]}
    expected |= {((3, 4), team, 2 * group + 1) for group in (2, 3) for team in teams[group]}
    expected |= {((i, 12), (j, 12), 2 * (j // 3) + 2) for i, j in product((0, 1), range(6, 12))}
    assert found == expected and pairs.valid.all()


def test_a_rule_without_conditions_is_refused() -> None:
    class Odd(Rule):
        gate = SIGMOID

        def ranks(self, scores: Scores) -> Tensor:
            return scores.gates.square()

        def weigh(self, scores: Scores, experts: Tensor, in_use: Tensor, fade: Tensor | None, k: int) -> Tensor:
            return scores.gates.gather(-1, experts)

    tokens = torch.randn(3, 4)
    with pytest.raises(NoCertificate, match=r"Odd.*conditions"):
        certify(Gate(torch.randn(5, 4), 2, rule=Odd()), tokens)
    lying = grouped_sigmoid(5, 1, 1)
    lying.ranks = lambda scores: scores.gates * 2  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="other experts than the router's parts declare"):
        certify(Gate(torch.randn(5, 4), 2, rule=lying), torch.randn(50, 4))
    with pytest.raises(NoCertificate, match=r"BestGates.*3 experts"):
        certify(Gate(torch.randn(6, 4), 3, rule=grouped_sigmoid(6, 3, 1)), tokens)


def rerouted(name: str, rule: Rule, experts: int, k: int) -> Router:
    """A router with a family's rule, as `reroute` makes it."""
    torch.manual_seed(0)
    made = REGISTRY.build(name, dim=12, experts=experts, k=k, host=HostModel(rule=rule)).train()
    for _ in range(5):
        made(2 * torch.randn(4, 16, 12))
    return made.eval()


@pytest.mark.parametrize("name", ["smoe", "symphony", "xmoe", "smooth"])
def test_routers_under_the_rule_of_a_family_are_certified(name: str) -> None:
    made, tokens = rerouted(name, grouped_sigmoid(16, 4, 2), 16, 4), 2 * torch.randn(64, 12, generator=generator(2))

    def core(routing: Routing) -> Tensor:
        logits, gates = routing.logits.unsqueeze(0), routing.gates.unsqueeze(0)
        informed = bool(made.informers)
        scores = Scores.from_gates(gates, logits) if informed else Scores(logits, gates, informed=False, raw=logits)
        ranks = made.select.ranks(scores)[0]
        return torch.zeros_like(routing.chosen).scatter(1, ranks.topk(4, dim=1).indices, True)

    for norm in NORMS:
        found = certify(made, tokens, norm=norm)
        assert (found.radius > 0).float().mean() > 0.95
        _, changed = probe(lambda rows: core(made(rows)), tokens, found.radius, norm, directions(tokens, norm, 40))
        assert changed == 0

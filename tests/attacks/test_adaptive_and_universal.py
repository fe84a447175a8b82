"""The adaptive attack and the universal perturbation on inputs, against PGD and against dense searches."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wording import assert_refused

from holdfast.attacks import AttackWarning, adaptive, attack_curve, attack_pixels, find_attack, pgd, universal
from holdfast.routing import Router, Routing, create_router


class Mixture(nn.Module):
    """A classifier whose experts disagree: each is another linear map of the input."""

    def __init__(self, dim: int = 3, experts: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router: Router = create_router("smoe", dim=dim, experts=experts, k=1)
        self.heads = nn.Parameter(torch.randn(experts, dim, 3))
        self.eval()

    def routed(self, inputs: Tensor) -> tuple[Tensor, Sequence[Routing]]:
        routing = self.router(inputs.unsqueeze(1))
        return torch.einsum("bd,edc,be->bc", inputs, self.heads, routing.chosen.float()), [routing]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.routed(inputs)[0]


def ball(points: int, radius: float) -> Tensor:
    return radius * (2 * torch.rand(points, 3, generator=torch.Generator().manual_seed(1)) - 1)


HOW: dict[str, Any] = {"bounds": None, "budget": 0.3, "steps": 12}


def test_the_adaptive_attack_finds_wrong_answers_behind_another_expert() -> None:
    """The loss alone gives no gradient through the choice of an expert."""
    model = Mixture(seed=1)
    inputs = torch.randn(200, 3, generator=torch.Generator().manual_seed(2))
    labels = model(inputs).argmax(-1)
    in_reach = torch.stack([model(inputs + point).argmax(-1) != labels for point in ball(4000, 0.3)]).any(0)
    joint = adaptive(model, inputs, labels, restarts=4, **HOW)
    alone = pgd(model, inputs, labels, restarts=8, **HOW)  # as many runs
    assert (joint.distances <= 0.3 * (1 + 1e-6)).all() and joint.options["flipped"] != 0
    assert torch.equal(joint.success, model(joint.inputs).argmax(-1) != labels)
    assert int(joint.success.sum()) > int(alone.success.sum())
    assert int((joint.success & in_reach).sum()) >= 0.95 * int(in_reach.sum())


def test_one_perturbation_of_inputs_has_as_many_wrong_answers_as_a_dense_search() -> None:
    model = Mixture(seed=1)
    inputs = torch.randn(120, 3, generator=torch.Generator().manual_seed(3))
    labels = model(inputs).argmax(-1)
    best = max(int((model(inputs + point).argmax(-1) != labels).sum()) for point in ball(3000, 0.3))
    found = universal(model, inputs, labels, restarts=6, **HOW)
    assert int(found.success.sum()) >= 0.95 * best
    moved = (found.inputs - inputs)[found.success]
    assert (moved - moved[0]).abs().max() < 1e-6 and (found.distances <= 0.3 * (1 + 1e-6)).all()
    parts = universal(model, inputs, labels, restarts=6, batch=50, **HOW)
    assert abs(int(parts.success.sum()) - int(found.success.sum())) <= 3  # sums in another order, of smoothed counts


@pytest.mark.parametrize("name", ["adaptive", "universal"])
def test_both_are_attacks_by_name_within_their_budget(name: str) -> None:
    model = Mixture()
    pixels = torch.rand(16, 3, generator=torch.Generator().manual_seed(4))
    labels = model(pixels).argmax(-1)
    first, second = (attack_pixels(find_attack(name), model, pixels, labels, budget=0.1, steps=4, seed=1) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs) and first.realised <= 0.1 * (1 + 1e-6)
    assert float(first.inputs.min()) >= 0 and float(first.inputs.max()) <= 1
    nothing = attack_pixels(find_attack(name), model, pixels, labels, budget=0.0, steps=4, seed=1)
    assert torch.equal(nothing.inputs, pixels)


def test_random_routing_and_misleading_gradients_are_flagged() -> None:
    class Noisy(Mixture):
        def routed(self, inputs: Tensor) -> tuple[Tensor, Sequence[Routing]]:
            return super().routed(inputs + 0.1 * torch.randn_like(inputs))

    class Reversed(Mixture):
        def routed(self, inputs: Tensor) -> tuple[Tensor, Sequence[Routing]]:
            return super().routed(2 * inputs.detach() - inputs)

    inputs = torch.randn(100, 3, generator=torch.Generator().manual_seed(5))
    labels = Mixture()(inputs).argmax(-1)
    with pytest.warns(AttackWarning, match="randomised"):
        flags = adaptive(Noisy(), inputs, labels, **HOW).flags
    assert "randomised forward" in {flag.kind for flag in flags}
    for attack in (adaptive, universal):
        with pytest.warns(AttackWarning, match="black box"):
            attack(Reversed(), inputs, labels, **{**HOW, "tries": 40})


def test_a_model_without_routes_is_refused() -> None:
    model = nn.Linear(3, 3).eval()
    assert_refused("routed", adaptive, model, torch.rand(2, 3), torch.zeros(2).long(), budget=0.1)


def test_a_curve_of_one_perturbation_has_one_perturbation_at_each_budget() -> None:
    """20 inputs are wrong when the difference of their numbers rises by 0.019, 80 when it falls by 0.029: never both."""
    inputs = torch.full((100, 1), 0.5)
    limits = torch.tensor([[0.519]] * 20 + [[0.471]] * 80)
    inputs = torch.cat([inputs, limits], dim=1)

    def model(given: Tensor) -> Tensor:
        rises = given[:, 1] > 0.5
        margin = torch.where(rises, given[:, 1] - given[:, 0], given[:, 0] - given[:, 1])
        return torch.stack([margin, torch.zeros_like(margin)], dim=1)

    labels = torch.zeros(100, dtype=torch.int64)

    def attack(budget: float) -> Any:
        return universal(model, inputs, labels, budget=budget, steps=10, restarts=8, check=False)

    points, alone = attack_curve(attack, [0.01, 0.015]), attack(0.015)
    for point in points:
        assert len((point.inputs - inputs)[point.success].round(decimals=5).unique(dim=0)) == 1
    assert int(points[1].success.sum()) == max(int(alone.success.sum()), int(points[0].success.sum())) < 100


def test_successes_late_in_any_run_are_flagged() -> None:
    class Far(nn.Module):
        router: Router = create_router("smoe", dim=64, experts=2, k=1).eval()

        def routed(self, given: Tensor) -> tuple[Tensor, Sequence[Routing]]:
            total = (given - 0.5).mean(1)
            return torch.stack([total, -total], dim=1), [self.router(given.unsqueeze(1))]

        def forward(self, given: Tensor) -> Tensor:
            return self.routed(given)[0]

    inputs, labels = torch.full((200, 64), 0.5095), torch.zeros(200, dtype=torch.int64)
    how: dict[str, Any] = {"budget": 0.01, "step": 0.0022, "strength": 0.0, "tries": 0}
    assert not bool(adaptive(Far().eval(), inputs, labels, steps=6, check=False, **how).success.any())
    with pytest.warns(AttackWarning, match="more steps help"):
        late = adaptive(Far().eval(), inputs, labels, steps=8, **how)
    assert bool(late.success.all())

"""The error against the budget: no smaller attack is forgotten, and top-5 errors equal a recount."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wording import assert_refused

from holdfast.attacks import AttackedInputs, Threat, attack_curve, fgsm, pgd, spsa, worst_of
from holdfast.attacks.inputs import ranks_of
from holdfast.metrics.tasks import in_top_k

Digits = tuple[nn.Module, Tensor, Tensor]
BUDGETS = (0.0, 0.05, 0.1, 0.2, 0.4)


def weakening(budget: float, model: nn.Module, images: Tensor, labels: Tensor) -> AttackedInputs:
    """An attack that is strong at small budgets and does nothing at large ones."""
    return pgd(model, images, labels, budget=budget if budget <= 0.1 else 0.0, steps=4, top=5)


@pytest.mark.parametrize(("attack", "options"), [(fgsm, {}), (pgd, {"steps": 4}), (spsa, {"steps": 4, "samples": 8})])
def test_errors_never_fall_with_the_budget_and_start_at_the_clean_error(
    attack: Callable[..., AttackedInputs], options: dict[str, Any], digits: Digits
) -> None:
    model, images, labels = digits[0], digits[1][:60], digits[2][:60]
    points = attack_curve(
        lambda budget: attack(model, images, labels, budget=budget, top=5, **options), [0.2, 0.0, 0.4, 0.05, 0.1, 0.1]
    )
    assert [point.budget for point in points] == list(BUDGETS)
    clean = model(images)
    assert torch.equal(points[0].success, ~in_top_k(clean, labels))
    assert torch.equal(points[0].beyond(5), ~in_top_k(clean, labels, 5))  # type: ignore[arg-type]
    for smaller, larger in itertools.pairwise(points):
        for top in (1, 5):
            before, after = smaller.beyond(top), larger.beyond(top)
            assert before is not None and after is not None and not (before & ~after).any()
        assert larger.realised <= larger.budget
        assert torch.equal(larger.success, model(larger.inputs).argmax(-1) != labels)
    assert points[-1].accuracy < points[0].accuracy


def test_what_a_smaller_budget_found_counts_at_larger_ones(digits: Digits) -> None:
    model, images, labels = digits[0], digits[1][:60], digits[2][:60]
    alone = [weakening(budget, model, images, labels) for budget in BUDGETS]
    curve = attack_curve(lambda budget: weakening(budget, model, images, labels), BUDGETS)
    assert alone[-1].accuracy > alone[2].accuracy  # this attack alone is not monotone
    assert [point.accuracy for point in curve] == [min(one.accuracy for one in alone[: n + 1]) for n in range(len(alone))]
    last = curve[-1]
    assert torch.equal(last.success, model(last.inputs).argmax(-1) != labels)
    assert torch.equal(last.distances, (last.inputs.double() - images.double()).abs().flatten(1).amax(1))
    assert last.realised <= 0.1


def test_the_top_5_error_counts_inputs_that_any_step_tried(digits: Digits) -> None:
    model, images, labels = digits[0], digits[1][:40], digits[2][:40]
    tried: list[Tensor] = []

    def noting(inputs: Tensor) -> Tensor:
        logits: Tensor = model(inputs)
        tried.append(logits.detach())
        return logits

    result = pgd(noting, images, labels, budget=0.4, steps=6, top=5, check=False)
    outside = torch.stack([~in_top_k(logits, labels, 5) for logits in tried]).any(0)
    found = result.beyond(5)
    assert found is not None and torch.equal(found, outside) and 0 < int(found.sum()) < len(labels)
    stopped = pgd(model, images, labels, budget=0.4, steps=6, check=False)
    assert torch.equal(stopped.success, result.success)  # attacking on for the top 5 changes no top-1 error
    assert result.options["top"] == 5 and "top" not in stopped.options


def test_an_attack_for_the_top_5_does_not_stop_at_the_first_wrong_class(digits: Digits) -> None:
    model, images, labels = digits[0], digits[1][:40], digits[2][:40]
    both: list[tuple[Callable[..., AttackedInputs], dict[str, Any]]] = [(pgd, {}), (spsa, {"samples": 8})]
    for attack, options in both:
        one, five = (attack(model, images, labels, budget=0.6, top=top, steps=12, **options).ranks for top in (1, 5))
        assert one is not None and five is not None and int((five >= 5).sum()) > int((one >= 5).sum())


def test_ranks_agree_with_top_k_also_for_ties_and_nan() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0], [0.0, 2.0, 1.0], [float("nan"), 2.0, 1.0], [3.0, float("nan"), 1.0]])
    for label in range(3):
        labels = torch.full((4,), label)
        for top in (1, 2, 3):
            assert torch.equal(ranks_of(logits, labels) < top, in_top_k(logits, labels, top))


def test_with_few_classes_the_attack_stops_as_for_the_top_1() -> None:
    calls = 0

    def model(inputs: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.stack((inputs.sum(1), -inputs.sum(1)), 1)

    wrong = torch.ones(3, dtype=torch.long)  # the model says 0
    pgd(model, torch.full((3, 2), 0.5), wrong, budget=0.1, steps=50, top=5, check=False)
    assert calls < 5


def test_the_worst_of_attacks_has_the_worst_rank(digits: Digits) -> None:
    model, images, labels = digits
    first, second = (attack(model, images[:40], labels[:40], budget=0.3, top=5) for attack in (fgsm, pgd))
    worst = worst_of(first, second)
    assert first.ranks is not None and second.ranks is not None and worst.ranks is not None
    assert torch.equal(worst.ranks, torch.maximum(first.ranks, second.ranks))


def test_mistakes_are_named(digits: Digits) -> None:
    model, images, labels = digits
    assert_refused("no budgets", attack_curve, lambda budget: fgsm(model, images, labels, budget=budget), [])
    assert_refused("budget is -1", attack_curve, lambda budget: fgsm(model, images, labels, budget=budget), [0.1, -1])
    with pytest.raises(ValueError, match="same inputs"):
        attack_curve(
            lambda budget: fgsm(model, images[: int(10 * budget)], labels[: int(10 * budget)], budget=budget), [1, 2]
        )
    assert_refused("top is 0", Threat, 0.1, top=0)

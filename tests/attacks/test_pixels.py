"""FGSM, PGD and SPSA on a small network that reads digits."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wording import assert_refused

from holdfast.attacks import PAPER_BUDGET, AttackedInputs, fgsm, pgd, spsa, worst_of
from holdfast.attacks.pixels import random_signs
from holdfast.routing.bounds import NORMS, Norm

Digits = tuple[nn.Module, Tensor, Tensor]
ATTACKS: list[Callable[..., AttackedInputs]] = [fgsm, pgd, spsa]
BUDGETS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
FEW: dict[str, Any] = {"steps": 4, "samples": 8}


def options(attack: Callable[..., AttackedInputs]) -> dict[str, Any]:
    return FEW if attack is spsa else {}


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(-1) == labels).double().mean())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacked_images_stay_in_the_ball_and_are_images(
    attack: Callable[..., AttackedInputs], norm: Norm, digits: Digits
) -> None:
    model, images, labels = digits[0], digits[1][:40], digits[2][:40]
    for budget in (1e-4, PAPER_BUDGET, 0.3):
        result = attack(model, images, labels, budget=budget, norm=norm, **options(attack))
        moves = (result.inputs.double() - images.double()).flatten(1)
        lengths = moves.abs().amax(1) if norm == "linf" else moves.norm(dim=1)
        assert (lengths <= budget).all()
        assert torch.equal(lengths, result.distances) and result.realised == float(lengths.max())
        assert (result.inputs >= 0).all() and (result.inputs <= 1).all()
        assert result.realised > 0.9 * budget  # and they use what they may


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_accuracy_falls_with_the_budget_to_zero_and_pgd_is_at_least_as_strong_as_fgsm(norm: Norm, digits: Digits) -> None:
    model, images, labels = digits
    scale = 1 if norm == "linf" else 5
    one = [fgsm(model, images, labels, budget=scale * budget, norm=norm).accuracy for budget in BUDGETS]
    many = [pgd(model, images, labels, budget=scale * budget, norm=norm).accuracy for budget in BUDGETS]
    assert one[0] == many[0] == accuracy(model, images, labels) > 0.85
    assert all(strong <= weak for strong, weak in zip(many, one, strict=True))
    assert many[3] < one[3]  # and really stronger where there is something to gain
    assert many == sorted(many, reverse=True) and many[3] < many[0] - 0.1
    assert many[-1] <= 0.01


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_budget_of_zero_returns_the_images_bit_for_bit(attack: Callable[..., AttackedInputs], digits: Digits) -> None:
    model, images, labels = digits
    result = attack(model, images[:20], labels[:20], budget=0.0, **options(attack))
    assert torch.equal(result.inputs, images[:20]) and result.rate == 0 and result.accuracy == result.clean_accuracy


def test_success_is_what_the_model_says_of_the_returned_images(digits: Digits) -> None:
    model, images, labels = digits
    for result in (fgsm(model, images, labels, budget=0.1), pgd(model, images, labels, budget=0.1, norm="l2")):
        assert torch.equal(result.success, model(result.inputs).argmax(-1) != labels)
        assert result.accuracy == accuracy(model, result.inputs, labels) < result.clean_accuracy
        assert (result.success | ~result.already_wrong).all()  # an attacker may do nothing


def test_the_batch_size_changes_nothing(digits: Digits) -> None:
    """Up to the rounding of the model itself; random starts and probes are each example's own."""
    model, images, labels = digits[0], digits[1][:24], digits[2][:24]
    for attack in (pgd, spsa):
        whole = attack(model, images, labels, budget=0.1, seed=3, **options(attack))
        parts = attack(model, images, labels, budget=0.1, seed=3, batch=7, **options(attack))
        assert torch.equal(whole.success, parts.success)
        assert float((whole.inputs - parts.inputs).abs().mean()) < 1e-3


def test_seeds_repeat_and_differ_and_restarts_only_help(digits: Digits) -> None:
    model, images, labels = digits
    first = pgd(model, images, labels, budget=0.1, seed=1, steps=3)
    assert torch.equal(first.inputs, pgd(model, images, labels, budget=0.1, seed=1, steps=3).inputs)
    assert not torch.equal(first.inputs, pgd(model, images, labels, budget=0.1, seed=2, steps=3).inputs)
    more = pgd(model, images, labels, budget=0.1, seed=1, steps=3, restarts=4)
    assert (more.success | ~first.success).all() and more.success.sum() > first.success.sum()


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    images, labels = torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    before = images.clone()
    with torch.no_grad():
        pgd(model, images, labels, budget=0.1)
    assert torch.equal(images, before) and not images.requires_grad
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_on_a_linear_model_fgsm_is_the_best_there_is() -> None:
    """The margin falls by exactly budget |w_y - w_c|_1, or budget |w_y - w_c|_2 for l2."""
    torch.manual_seed(0)
    weight = torch.randn(2, 30)
    points = torch.randn(50, 30)
    labels = (points @ weight.t()).argmax(-1)
    gap = (points @ (weight[0] - weight[1])).abs()
    for norm, dual in (("linf", 1), ("l2", 2)):
        radius = gap / (weight[0] - weight[1]).norm(p=dual)
        for budget in (0.02, 0.1, 0.4):
            result = fgsm(lambda x: x @ weight.t(), points, labels, budget=budget, norm=norm, bounds=None)  # type: ignore[arg-type]
            assert torch.equal(result.success, radius < budget)


def test_embeddings_are_attacked_without_bounds() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 4)).eval()
    embeddings, labels = 3 * torch.randn(10, 6, 4), torch.zeros(10, dtype=torch.int32)
    assert_refused("bounds=None", pgd, model, embeddings, labels, budget=0.1)
    result = pgd(model, embeddings, labels, budget=0.5, norm="l2", bounds=None)
    assert result.realised == pytest.approx(0.5) and result.bounds is None


@pytest.mark.filterwarnings("ignore::holdfast.attacks.AttackWarning")
def test_spsa_works_where_there_are_no_gradients(digits: Digits) -> None:
    model, images, labels = digits[0], digits[1][:24], digits[2][:24]

    def hidden(inputs: Tensor) -> Tensor:
        return model(inputs.detach())

    blind = pgd(hidden, images, labels, budget=0.2, random_start=False)
    black = spsa(hidden, images, labels, budget=0.2, steps=8, samples=24)
    assert blind.accuracy == blind.clean_accuracy > 0.8
    assert black.accuracy < 0.4 and black.black_box


def test_the_worst_of_several_attacks_counts_each_example_once(digits: Digits) -> None:
    model, images, labels = digits
    one, many = fgsm(model, images, labels, budget=0.1), pgd(model, images, labels, budget=0.1)
    worst = worst_of(one, many)
    assert torch.equal(worst.success, one.success | many.success)
    assert torch.equal(worst.success, model(worst.inputs).argmax(-1) != labels)
    assert worst.realised <= 0.1 and worst.flags == ()
    assert_refused("threat models", worst_of, one, pgd(model, images, labels, budget=0.2))


def test_a_summary_holds_the_threat_model_and_is_json(digits: Digits) -> None:
    model, images, labels = digits
    result = worst_of(*(attack(model, images[:9], labels[:9], budget=0.1, **options(attack)) for attack in ATTACKS))
    summary = json.loads(json.dumps(result.summary()))
    assert summary["budget"] == 0.1 and summary["norm"] == "linf" and summary["seed"] == 0
    assert summary["options"]["SPSA"]["options"]["queries"] == 4 * 17 + 1


@pytest.mark.parametrize("budget", [None, -0.1, float("nan"), float("inf"), "1/255"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_budget_that_says_nothing_is_an_error(attack: Callable[..., AttackedInputs], budget: Any) -> None:
    inputs, labels = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    assert_refused("budget", attack, nn.Identity(), inputs, labels, budget=budget)
    with pytest.raises(TypeError, match="budget"):
        attack(nn.Identity(), inputs, labels)


def test_wrong_arguments_are_named() -> None:
    model, images, labels = nn.Flatten().eval(), torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 2])
    assert_refused("'linf'", pgd, model, images, labels, budget=0.1, norm="inf")
    assert_refused("3 inputs", pgd, model, images, labels[:2], budget=0.1)
    assert_refused(r"torch\.uint8.*floating", pgd, model, (images * 255).byte(), labels, budget=0.1)
    assert_refused(r"steps.* 0", pgd, model, images, labels, budget=0.1, steps=0)
    assert_refused("logits", pgd, lambda x: x.sum(), images, labels, budget=0.1)


def test_no_inputs_are_no_trouble() -> None:
    result = pgd(nn.Flatten().eval(), torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.int64), budget=0.1)
    assert result.inputs.shape == (0, 1, 2, 2) and result.realised == 0


@pytest.mark.parametrize("shape", [(8, 3, 5, 5), (3,), (2, 4)], ids=str)
def test_random_signs_are_the_bits_of_each_generator(shape: tuple[int, ...]) -> None:
    """The signs of an example depend only on its own generator, however many others are drawn with it."""
    count = math.prod(shape)
    found = random_signs(
        shape, [torch.Generator().manual_seed(seed) for seed in (4, 5)], torch.zeros(1, dtype=torch.float64)
    )
    assert found.shape == (2, *shape) and found.dtype == torch.float64
    for row, seed in enumerate((4, 5)):
        octets = torch.randint(256, (-(-count // 8),), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        signs = [1.0 if octets[place // 8] & (1 << place % 8) else -1.0 for place in range(count)]
        assert found[row].flatten().tolist() == signs
    both = random_signs((40_000,), [torch.Generator().manual_seed(0)], torch.zeros(1))
    assert set(both.unique().tolist()) == {-1.0, 1.0} and abs(float(both.mean())) < 0.02

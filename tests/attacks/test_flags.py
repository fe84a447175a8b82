"""The flags that say when not to trust an attack: each fires on the fault it is for, and on nothing else."""

import warnings
from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.attacks import AttackWarning, check_model, pgd, spsa, worst_of
from holdfast.attacks.flags import Model

Digits = tuple[nn.Module, Tensor, Tensor]


def rounded(model: Model) -> Model:
    """Inputs in 8 steps: a defence that shatters gradients."""
    return lambda inputs: model((inputs * 8).round() / 8)


def misleading(model: Model) -> Model:
    """The right scores with the gradient of their opposite."""
    return lambda inputs: 2 * model(inputs).detach() - model(inputs)


def partly_training(model: nn.Module) -> Model:
    whole = nn.Sequential(model, nn.Dropout(0.0)).eval()
    whole[1].train()
    return whole


FAULTS: dict[str, tuple[Callable[[nn.Module], Model], set[str]]] = {
    "none": (lambda model: model, set()),
    "dropout in evaluation": (
        lambda model: lambda inputs: model(F.dropout(inputs, 0.2, training=True)),
        {"randomised forward"},
    ),
    "rounded inputs": (rounded, {"zero gradients"}),
    "no graph": (lambda model: lambda inputs: model(inputs.detach()), {"zero gradients"}),
    "so sure that cross-entropy is flat": (lambda model: lambda inputs: model(inputs) * 1e4, {"zero gradients"}),
    "a part in training mode": (partly_training, {"train mode"}),
    "probabilities": (lambda model: nn.Sequential(model, nn.Softmax(-1)).eval(), {"probabilities"}),
    "not finite": (lambda model: lambda inputs: model(inputs) / (inputs.sum() * 0), {"not finite"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_its_flag_and_no_other(fault: str, digits: Digits) -> None:
    wrap, expected = FAULTS[fault]
    model, images, labels = digits
    assert {flag.kind for flag in check_model(wrap(model), images, labels)} == expected


def test_a_sound_model_is_attacked_without_a_warning(digits: Digits) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttackWarning)
        assert pgd(*digits, budget=0.05).flags == ()


def test_a_black_box_that_beats_gradients_is_flagged(digits: Digits) -> None:
    model, images, labels = digits
    white = pgd(misleading(model), images[:24], labels[:24], budget=0.15)
    black = spsa(misleading(model), images[:24], labels[:24], budget=0.15, steps=8, samples=24)
    assert white.flags == ()  # one look at the model does not show it
    with pytest.warns(AttackWarning, match="SPSA"):
        together = worst_of(white, black)
    assert [flag.kind for flag in together.flags] == ["black box beats white box"]
    assert together.accuracy < white.accuracy


def test_the_flags_of_an_attack_are_warned_of_and_recorded(digits: Digits) -> None:
    _, images, labels = digits
    with pytest.warns(AttackWarning, match="zero gradients"):
        result = pgd(rounded(digits[0]), images, labels, budget=0.01)
    assert [flag.kind for flag in result.flags] == ["zero gradients"]
    assert result.summary()["flags"] == [{"kind": "zero gradients", "detail": result.flags[0].detail}]
    assert pgd(rounded(digits[0]), images, labels, budget=0.01, check=False).flags == ()

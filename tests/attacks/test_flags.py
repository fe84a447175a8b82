"""The flags that say when not to trust an attack: each fires on the fault it is for, and on nothing else."""

import warnings

import pytest
from torch import Tensor, nn

from holdfast.attacks import AttackWarning, check_model, pgd, spsa, worst_of

Digits = tuple[nn.Module, Tensor, Tensor]


def kinds(model: nn.Module, digits: Digits) -> set[str]:
    _, images, labels = digits
    return {flag.kind for flag in check_model(model, images, labels)}


class Rounded(nn.Module):
    """Inputs in 8 steps: a defence that shatters gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model((inputs * 8).round() / 8)


class Dropping(nn.Module):
    """Dropout that is not switched off by `eval`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(nn.functional.dropout(inputs, 0.2, training=True))


class Misleading(nn.Module):
    """The right scores with the gradient of their opposite."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs)
        return 2 * logits.detach() - logits


def test_a_sound_model_has_no_flags(digits: Digits) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttackWarning)
        assert kinds(digits[0], digits) == set()
        assert pgd(*digits, budget=0.05).flags == ()


def test_dropout_in_evaluation_is_a_randomised_forward(digits: Digits) -> None:
    assert kinds(Dropping(digits[0]).eval(), digits) == {"randomised forward"}


def test_rounded_inputs_have_zero_gradients(digits: Digits) -> None:
    assert kinds(Rounded(digits[0]).eval(), digits) == {"zero gradients"}


def test_a_forward_without_a_graph_has_zero_gradients(digits: Digits) -> None:
    model, images, labels = digits
    flags = check_model(lambda inputs: model(inputs.detach()), images, labels)
    assert [flag.kind for flag in flags] == ["zero gradients"]


def test_a_model_so_sure_that_cross_entropy_is_flat_has_zero_gradients(digits: Digits) -> None:
    model, images, labels = digits
    flags = check_model(lambda inputs: model(inputs) * 1e4, images, labels)
    assert [flag.kind for flag in flags] == ["zero gradients"]


def test_a_model_in_training_mode_is_flagged_and_so_is_one_with_a_part_in_it(digits: Digits) -> None:
    wrapped = Rounded(nn.Sequential(digits[0], nn.Dropout(0.0))).eval()
    wrapped.model[1].train()  # type: ignore[index, union-attr]
    assert "train mode" in kinds(wrapped, digits)


def test_probabilities_instead_of_logits_are_flagged(digits: Digits) -> None:
    assert "probabilities" in kinds(nn.Sequential(digits[0], nn.Softmax(-1)).eval(), digits)


def test_logits_that_are_not_finite_are_flagged(digits: Digits) -> None:
    model, images, labels = digits
    flags = check_model(lambda inputs: model(inputs) / (inputs.sum() * 0), images, labels)
    assert "not finite" in {flag.kind for flag in flags}


def test_a_black_box_that_beats_gradients_is_flagged(digits: Digits) -> None:
    model, images, labels = digits
    misleading = Misleading(model).eval()
    white = pgd(misleading, images[:24], labels[:24], budget=0.15)
    black = spsa(misleading, images[:24], labels[:24], budget=0.15, steps=8, samples=24)
    assert white.flags == ()  # one look at the model does not show it
    with pytest.warns(AttackWarning, match="SPSA"):
        together = worst_of(white, black)
    assert [flag.kind for flag in together.flags] == ["black box beats white box"]
    assert together.accuracy < white.accuracy


def test_the_flags_of_an_attack_are_warned_of_and_recorded(digits: Digits) -> None:
    _, images, labels = digits
    with pytest.warns(AttackWarning, match="zero gradients"):
        result = pgd(Rounded(digits[0]).eval(), images, labels, budget=0.01)
    assert [flag.kind for flag in result.flags] == ["zero gradients"]
    assert result.summary()["flags"] == [{"kind": "zero gradients", "detail": result.flags[0].detail}]
    assert pgd(Rounded(digits[0]).eval(), images, labels, budget=0.01, check=False).flags == ()

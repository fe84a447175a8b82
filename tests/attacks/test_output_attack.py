"""The attack on outputs stays within its budget, finds the largest change of a linear layer, and jumps across planes."""

import pytest
import torch
from torch import Tensor

from holdfast.attacks import attack_outputs
from holdfast.routing import Routing


def linear_layer(matrix: Tensor) -> object:
    def run(rows: Tensor) -> tuple[Tensor, Routing]:
        logits = rows[:, :2]
        experts = logits.argmax(1, keepdim=True)
        return rows @ matrix.t(), Routing(logits, logits.softmax(-1), experts, torch.ones_like(experts, dtype=torch.float32))

    return run


def jump(rows: Tensor) -> tuple[Tensor, Routing]:
    """Return 10 where the first feature is larger than the second, and else 0: gradients show nothing."""
    logits = rows[:, :2]
    experts = logits.argmax(1, keepdim=True)
    output = 10 * (experts == 0).float() + 0 * rows[:, :1]
    return output, Routing(logits, logits.softmax(-1), experts, torch.ones_like(output))


def test_the_largest_change_of_a_linear_layer_is_found() -> None:
    torch.manual_seed(0)
    matrix, tokens = torch.randn(5, 4), torch.randn(6, 4)
    found = attack_outputs(linear_layer(matrix), tokens, budget=0.3, steps=40)  # type: ignore[arg-type]
    exact = 0.3 * float(torch.linalg.svdvals(matrix)[0])
    assert found.change.min() > 0.99 * exact and found.change.max() <= exact * (1 + 1e-5)
    assert ((found.inputs - tokens).double().norm(dim=1) <= 0.3).all()


def test_an_attack_from_beyond_the_plane_finds_a_jump_that_gradients_do_not_show() -> None:
    tokens = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    budget = torch.tensor([0.72, 0.70])  # the plane is at 1/sqrt(2)
    found = attack_outputs(jump, tokens, budget=budget, starts=0)
    assert found.change.tolist() == [10.0, 0.0]
    assert attack_outputs(jump, tokens, budget=budget, starts=0, planes=0).change.tolist() == [0.0, 0.0]


def test_wrong_budgets_and_tokens_are_refused() -> None:
    tokens = torch.randn(3, 4)
    for budget in (-1.0, torch.ones(2)):
        with pytest.raises(ValueError, match="budget"):
            attack_outputs(jump, tokens, budget=budget)
    with pytest.raises(ValueError, match="expected finite rows"):
        attack_outputs(jump, tokens.unsqueeze(0), budget=0.1)

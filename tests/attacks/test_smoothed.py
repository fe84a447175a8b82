"""The attack on a smoothed classifier: it reaches a boundary that can be computed, and stays within its ball."""

import pytest
import torch
from torch import Tensor

from holdfast.attacks import attack_smoothed
from holdfast.attacks.threat import distances
from holdfast.certificates import Smoothing, certify_predictions
from holdfast.certificates.voting import count_classes

WAY = torch.tensor([0.6, 0.8])


def plane(inputs: Tensor) -> Tensor:
    """Class 1 on one side of a plane through 0; the distance to it is `inputs @ WAY`."""
    return torch.stack([-(inputs @ WAY), inputs @ WAY], dim=1)


def test_inside_the_certified_radius_the_vote_stays_and_beyond_the_exact_distance_it_changes() -> None:
    inputs = torch.tensor([[0.6, 0.8], [1.2, 1.6], [-0.6, -0.8], [-0.3, -0.4]])
    found = certify_predictions(plane, inputs, Smoothing(0.5, samples=4000))
    exact = (inputs @ WAY).abs()
    for share, stays in ((1.0, True), (1.2, False)):
        radius = found.radius if stays else share * exact.double()
        attacked = attack_smoothed(plane, inputs, found.classes, radius=radius, sigma=0.5, steps=10)
        assert (distances(attacked, inputs, "l2") <= radius).all()
        assert (distances(attacked, inputs, "l2") >= 0.99 * radius).all()  # it uses all of the ball
        for number, (one, chosen) in enumerate(zip(attacked, found.classes.tolist(), strict=True)):
            votes = count_classes(plane, one, 0.5, 4000, 0, "attacked", number)
            assert (int(votes.argmax()) == chosen) == stays


def test_an_attack_depends_on_the_seed_and_the_number_of_the_input_only() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).eval()
    inputs, radius = torch.randn(3, 5), torch.full((3,), 0.5)
    classes = model(inputs).argmax(1)
    whole = attack_smoothed(model, inputs, classes, radius=radius, sigma=0.3, steps=4, draws=8)
    part = attack_smoothed(model, inputs[2:], classes[2:], radius=radius[2:], sigma=0.3, steps=4, draws=8, first=2, batch=3)
    other = attack_smoothed(model, inputs, classes, radius=radius, sigma=0.3, steps=4, draws=8, seed=1)
    torch.testing.assert_close(whole[2:], part)
    assert not torch.allclose(whole, other)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_radius_of_zero_leaves_the_input_as_it_is() -> None:
    inputs = torch.randn(2, 2)
    attacked = attack_smoothed(plane, inputs, torch.tensor([0, 1]), radius=torch.zeros(2), sigma=0.5, steps=2)
    assert torch.equal(attacked, inputs)


def test_wrong_options_are_refused() -> None:
    inputs, classes, radius = torch.randn(1, 2), torch.tensor([0]), torch.ones(1)
    with pytest.raises(ValueError, match="steps"):
        attack_smoothed(plane, inputs, classes, radius=radius, sigma=0.5, steps=0)
    with pytest.raises(ValueError, match="draws"):
        attack_smoothed(plane, inputs, classes, radius=radius, sigma=0.5, draws=0)

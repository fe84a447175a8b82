"""mCE against the definition, error by error."""

import pytest
import torch
from torch import Tensor

from holdfast.metrics import ALEXNET_ERRORS, MeanCorruptionError


def images(right: int, wrong: int) -> tuple[Tensor, Tensor]:
    """Logits over two classes and targets, so many of them right."""
    targets = torch.tensor([0] * right + [1] * wrong)
    return torch.tensor([[1.0, 0.0]]).expand(right + wrong, 2), targets


def test_mce_is_the_mean_over_corruptions_of_errors_relative_to_the_baseline() -> None:
    """Errors of a severity count alike, however many images it has."""
    metric = MeanCorruptionError({"fog": 40.0, "snow": 80.0}, severities=(1, 3))
    for corruption, severity, right, wrong in (("fog", 1, 3, 1), ("fog", 3, 1, 1), ("snow", 1, 5, 0), ("snow", 3, 20, 80)):
        metric.update(corruption, severity, *images(right, wrong))
    fog, snow = (25 + 50) / 2, (0 + 80) / 2
    assert metric.errors() == pytest.approx({"fog": fog, "snow": snow})
    assert metric.result() == pytest.approx(100 * (fog / 40 + snow / 80) / 2)


def test_a_model_as_good_as_the_baseline_has_an_mce_of_100() -> None:
    first = MeanCorruptionError({"fog": 100.0, "snow": 100.0}, severities=[2])
    first.update("fog", 2, *images(3, 4))
    first.update("snow", 2, *images(6, 1))
    again = MeanCorruptionError(first.errors(), severities=[2]).merge(MeanCorruptionError(first.errors(), severities=[2]))
    again.update("fog", 2, *images(3, 4))
    again.update("snow", 2, *images(6, 1))
    assert again.result() == pytest.approx(100)


def test_alexnet_has_an_mce_of_100_and_all_fifteen_corruptions() -> None:
    assert len(ALEXNET_ERRORS) == 15
    assert sum(ALEXNET_ERRORS.values()) / 15 == pytest.approx(78.9, abs=0.1)  # the mean that the paper prints
    metric = MeanCorruptionError(ALEXNET_ERRORS)
    for corruption, error in ALEXNET_ERRORS.items():
        for severity in range(1, 6):
            metric.update(corruption, severity, *images(round(1000 - 10 * error), round(10 * error)))
    assert metric.result() == pytest.approx(100)


def test_a_part_of_the_corruptions_has_no_mce() -> None:
    metric = MeanCorruptionError({"fog": 40.0, "snow": 80.0}, severities=(1, 2))
    metric.update("fog", 1, *images(1, 1))
    with pytest.raises(ValueError, match=r"fog 2, snow 1, snow 2.*3 of 4"):
        metric.result()


def test_unknown_corruptions_severities_and_baselines_are_one_clear_sentence() -> None:
    metric = MeanCorruptionError(ALEXNET_ERRORS)
    with pytest.raises(ValueError, match=r"'gausian_noise'.*'gaussian_noise'"):
        metric.update("gausian_noise", 1, *images(1, 1))
    with pytest.raises(ValueError, match=r"severity.* 6"):
        metric.update("fog", 6, *images(1, 1))
    with pytest.raises(ValueError, match=r"fog.*0"):
        MeanCorruptionError({"fog": 0.0})
    with pytest.raises(ValueError, match="corruption"):
        MeanCorruptionError({})

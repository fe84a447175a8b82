"""Certified predictions: the radius against a direct implementation of the paper, and against exact distances."""

import math

import pytest
import torch
from scipy.stats import beta, binom, norm
from torch import Tensor, nn

from holdfast.certificates import Smoothing, certify_predictions
from holdfast.certificates.voting import certified_radius, count_classes, generator_of, lowest_chance


class Rings(nn.Module):
    """Three classes by the distance from the origin, so that no boundary is a plane."""

    def forward(self, inputs: Tensor) -> Tensor:
        lengths = inputs.flatten(1).norm(dim=1, keepdim=True)
        return -(lengths - torch.tensor([0.0, 1.5, 3.0], device=inputs.device)).abs()


def line(inputs: Tensor) -> Tensor:
    """Class 1 where the first number is positive: the distance to the boundary is that number."""
    return torch.stack([-inputs[:, 0], inputs[:, 0]], dim=1)


def certify_of_the_paper(classify: nn.Module, one: Tensor, smoothing: Smoothing, number: int) -> tuple[int, float]:
    """CERTIFY of Cohen et al. 2019, one draw after the other, with the same noise; radius 0 stands for ABSTAIN."""

    def sample_under_noise(count: int, purpose: str) -> list[int]:
        counts = [0, 0, 0]
        source = generator_of(smoothing.seed, purpose, number, 0, device=one.device)
        noise = torch.randn(count, *one.shape, generator=source, device=one.device)
        for draw in noise:
            counts[int(classify((one + smoothing.sigma * draw).unsqueeze(0)).argmax())] += 1
        return counts

    selected = sample_under_noise(smoothing.selection, "selection")
    top = selected.index(max(selected))
    hits = sample_under_noise(smoothing.samples, "samples")[top]
    lower = 0.0 if hits == 0 else float(beta.ppf(smoothing.alpha, hits, smoothing.samples - hits + 1))
    return top, smoothing.sigma * float(norm.ppf(lower)) if lower > 0.5 else 0.0


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]
)
def test_certificates_are_those_of_a_direct_implementation_of_the_paper(device: str) -> None:
    inputs = 1.2 * torch.randn(12, 2, 3).to(device)
    smoothing = Smoothing(0.4, samples=200, selection=30, alpha=0.01, seed=3, first=5)
    found = certify_predictions(Rings().eval(), inputs, smoothing, batch=64)
    expected = [certify_of_the_paper(Rings(), one, smoothing, 5 + at) for at, one in enumerate(inputs)]
    assert found.classes.tolist() == [top for top, _ in expected]
    assert found.radius.tolist() == pytest.approx([radius for _, radius in expected], rel=1e-6)
    assert 0 < found.abstained.sum() < len(inputs) and len(set(found.classes.tolist())) > 1


def test_certified_accuracy_counts_right_classes_with_a_larger_radius() -> None:
    inputs = torch.tensor([[5.0], [0.5], [-0.5], [0.001]])
    found = certify_predictions(line, inputs, Smoothing(0.5, samples=500))
    labels = torch.tensor([1, 1, 1, 1])
    assert found.abstained.tolist() == [False, False, False, True]
    assert found.accuracy(labels) == 0.5 and found.accuracy(labels, 0.6) == 0.25 and found.accuracy(labels, 9.0) == 0
    assert found.hits[0] == 500 and found.smoothing.sigma == 0.5


def test_a_result_depends_on_the_seed_and_the_number_of_the_input_only() -> None:
    inputs, how = torch.randn(6, 5), {"samples": 100, "selection": 20}
    whole = certify_predictions(Rings().eval(), inputs, Smoothing(0.5, **how))  # type: ignore[arg-type]
    part = certify_predictions(Rings().eval(), inputs[4:], Smoothing(0.5, **how, first=4), batch=7)  # type: ignore[arg-type]
    other = certify_predictions(Rings().eval(), inputs, Smoothing(0.5, **how, seed=1))  # type: ignore[arg-type]
    assert torch.equal(whole.hits[4:], part.hits) and not torch.equal(whole.hits, other.hits)


def test_the_noise_is_not_clipped_and_has_the_stated_deviation() -> None:
    seen: list[Tensor] = []

    def watch(inputs: Tensor) -> Tensor:
        seen.append(inputs)
        return line(inputs)

    count_classes(watch, torch.full((4,), 0.9), 0.5, 2000, "noise")
    noise = torch.cat(seen) - 0.9
    assert noise.std().item() == pytest.approx(0.5, rel=0.03) and abs(noise.mean().item()) < 0.02 and noise.max() > 1


def test_a_copy_with_a_logit_that_is_no_number_is_no_hit() -> None:
    def half(inputs: Tensor) -> Tensor:
        return torch.where(inputs > 0, torch.tensor([[0.0, 1.0]]), torch.nan)

    found = certify_predictions(half, torch.zeros(1, 1), Smoothing(1.0, samples=400))
    assert found.abstained.all() and 150 < found.hits.item() < 250 and found.classes.item() == 1


def test_wrong_inputs_are_refused() -> None:
    smoothing = Smoothing(0.5, samples=10)
    with pytest.raises(ValueError, match="training mode"):
        certify_predictions(Rings(), torch.randn(1, 2), smoothing)
    with pytest.raises(ValueError, match="finite"):
        certify_predictions(line, torch.tensor([[torch.nan]]), smoothing)
    with pytest.raises(ValueError, match="shape"):
        certify_predictions(lambda inputs: inputs[:, 0], torch.randn(1, 2), smoothing)


@pytest.mark.slow
@pytest.mark.parametrize("distance", [0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
def test_radii_of_a_linear_classifier_are_nearly_exact_and_rarely_too_large(distance: float) -> None:
    """The chance of the class is Phi(distance / sigma), so that the radius of the vote is the distance itself."""
    sigma, samples, alpha = 0.7, 10**6, 0.001
    exact, ceiling = distance * sigma, sigma * norm.ppf(alpha ** (1 / samples))
    inputs = torch.full((100, 1), exact)
    drawn = certify_predictions(line, inputs, Smoothing(sigma, samples=samples, alpha=alpha), batch=samples)
    # Many more certificates: the count of each is binomial.
    hits = torch.from_numpy(binom(samples, norm.cdf(distance)).rvs(100_000, random_state=round(10 * distance)))
    many = certified_radius(lowest_chance(hits, samples, alpha), sigma)
    for radius in (drawn.radius, many):
        assert radius.min() >= 0.98 * exact and radius.max() <= ceiling
        too_large = int((radius > exact).sum())
        assert too_large <= binom.ppf(0.999, len(radius), alpha)
    assert int((many > exact).sum()) > 0.5 * alpha * len(many)  # the bound is not looser than it says


def test_no_radius_is_above_that_of_a_unanimous_vote() -> None:
    smoothing = Smoothing(0.3, samples=100, alpha=0.01)
    found = certify_predictions(line, torch.tensor([[50.0]]), smoothing)
    assert found.hits.item() == 100
    highest = 0.3 * float(norm.ppf(0.01 ** (1 / 100)))
    assert found.radius.item() <= highest and math.isclose(found.radius.item(), highest, rel_tol=1e-6)

"""Noise before selection: in training only, with every selector, the same in a recomputation."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from certificates.rounding import rounding_errors
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Context, create_router
from holdfast.certificates import certify
from holdfast.geometry.flats import affine_keys, affine_order
from holdfast.routing import (
    GaussianNoise,
    GumbelNoise,
    Linear,
    Noise,
    Router,
    Score,
    Scores,
    Selection,
    Selector,
    SelectorDeclarations,
    TopK,
    UniformNoise,
)
from holdfast.routing.noise import create_noise
from holdfast.routing.presets import REGISTRY

SELECTORS = ("smoe", "switch", "top-p", "remoe", "smooth", "smoe-dropout", "symphony+smooth", "similarity+remoe", "ac+top-p")
KINDS: dict[str, dict[str, Any]] = {
    "gaussian": {"noise": "gaussian", "noise_std": 0.5},
    "learned gaussian": {"noise": "gaussian"},
    "uniform": {"noise": "uniform", "noise_std": 0.5},
    "learned uniform": {"noise": "uniform"},
    "gumbel": {"noise": "gumbel", "noise_temperature": 0.7},
}


class Given(Score):
    """Scores that are the same for each token."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.dim, self.experts, self.logits = 4, len(logits), logits

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return self.logits.expand(*tokens.shape[:2], -1)


def gates(logits: Tensor, k: int = 1, tokens: int = 20000, **options: Any) -> holdfast.Routing:
    """The routing of many tokens with the same logits, in training."""
    torch.manual_seed(0)
    noise = create_noise(4, len(logits), **options)
    return Router(Given(logits), TopK(len(logits), k), noise=noise)(torch.zeros(1, tokens, 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SELECTORS)
def test_every_router_takes_noise_in_training_only(name: str, kind: str) -> None:
    built, tokens = create_router(name, dim=8, experts=16, **KINDS[kind]), torch.randn(1, 200, 8)
    for informer in built.informers:  # a graph of zeros has gates of 0, with or without noise
        if hasattr(informer, "graph"):
            informer.get_buffer("graph").copy_(torch.eye(16))
    first, second = built(tokens), built(tokens)
    assert not torch.equal(first.gates, second.gates)
    torch.testing.assert_close(first.logits, second.logits)
    built.eval()
    assert torch.equal(built(tokens).gates, built(tokens).gates)
    plain = create_router(name, dim=8, experts=16)
    plain.load_state_dict({key: value for key, value in built.state_dict().items() if "noise" not in key})
    assert torch.equal(built(tokens).gates, plain.eval()(tokens).gates) == (kind != "gumbel")  # which has a temperature


def with_temperature(name: str, temperature: float) -> tuple[Router, Router]:
    """Return a router with a Gumbel temperature, and one without whose linear score is divided by it; in evaluation."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dim": 8, "experts": 6, "k": 2}
    hot = create_router(name, noise="gumbel", noise_temperature=temperature, **options).eval()
    plain = create_router(name, **options).eval()
    plain.load_state_dict(hot.state_dict())
    with torch.no_grad():
        plain.score.get_parameter("weight").div_(temperature)
    return hot, plain


@pytest.mark.parametrize("temperature", [0.5, 4.0])
@pytest.mark.parametrize(
    "name", ["smoe", "switch", "top-p", "remoe", "symphony[init=kaiming]", "similarity", "smooth[eps=0.5]", "grouped"]
)
def test_a_gumbel_temperature_divides_the_logits_in_evaluation(name: str, temperature: float) -> None:
    """Routing, held weights, certificates and keys are those of a score that is divided, to the bit: by a power of 2."""
    hot, plain = with_temperature(name, temperature)
    tokens = torch.randn(3, 17, 8)
    found, expected = hot(tokens), plain(tokens)
    for field in ("logits", "gates", "experts", "weights"):
        assert torch.equal(getattr(found, field), getattr(expected, field)), field
    moved = expected.experts.flip(0)
    assert torch.equal(hot.held_weights(moved, found), plain.held_weights(moved, expected))
    replayed = [router(tokens, Context(replayed=moved.view(3, 17, -1))).weights for router in (hot, plain)]
    assert torch.equal(*replayed)
    ours, theirs = (certify(router, tokens, arithmetic=None) for router in (hot, plain))
    torch.testing.assert_close(ours.distance, theirs.distance)
    rounded = certify(hot, tokens).radius
    assert bool((rounded <= ours.radius).all()) and bool((rounded[ours.radius > 0.01] > 0).all())
    errors = [rounding_errors(router, tokens, torch.bfloat16) for router in (hot, plain)]
    assert bool((errors[0] >= errors[1]).all()) and bool((errors[0] <= 1.001 * errors[1]).all())
    if name.startswith(("smoe", "smooth")):
        order, k = affine_order(hot, tokens)
        assert k == 2
        torch.testing.assert_close(affine_keys(order, tokens).logits.float(), found.logits)


def test_a_temperature_changes_weights_and_no_certified_set_of_top_k() -> None:
    tokens, plain = torch.randn(2, 9, 8), create_router("smoe", dim=8, experts=6).eval()
    hot = create_router("smoe", dim=8, experts=6, noise="gumbel", noise_temperature=3.0).eval()
    hot.load_state_dict(plain.state_dict())
    cold, warm = plain(tokens), hot(tokens)
    assert torch.equal(cold.experts, warm.experts)
    expected = torch.stack([row[chosen] for row, chosen in zip(cold.logits / 3, cold.experts, strict=True)]).softmax(-1)
    torch.testing.assert_close(warm.weights, expected)
    radii = [certify(router, tokens, arithmetic=None).radius for router in (plain, hot)]
    torch.testing.assert_close(*radii)


def test_gumbel_noise_samples_from_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    share = gates(logits, noise="gumbel").chosen.float().mean(0)
    torch.testing.assert_close(share, logits.softmax(-1), atol=0.015, rtol=0)


@pytest.mark.parametrize(("options", "std"), [({"noise_std": 0.3}, 0.3), ({}, 0.6931)])
@pytest.mark.parametrize("noise", ["gaussian", "uniform"])
def test_noise_has_the_standard_deviation_asked_for_or_starts_at_log_2(
    noise: str, options: dict[str, Any], std: float
) -> None:
    """With W_noise = 0 the standard deviation is softplus(0) = log 2 (Shazeer et al. 2017)."""
    found = gates(torch.zeros(2), noise=noise, **options).gates.detach()
    difference = (found[:, 0] / found[:, 1]).log()
    torch.testing.assert_close(float(difference.std()), std * 2**0.5, atol=0.02, rtol=0)


def test_uniform_noise_is_bounded_and_flat() -> None:
    drawn = UniformNoise(4, 2, std=0.5)(torch.zeros(1, 20000, 2), torch.zeros(1, 20000, 4))
    assert 0.86 < float(drawn.abs().max()) <= 0.5 * 3**0.5
    shares = torch.histc(drawn, bins=4) / drawn.numel()
    torch.testing.assert_close(shares, torch.full((4,), 0.25), atol=0.01, rtol=0)


@pytest.mark.parametrize("noise", ["gaussian", "uniform"])
def test_learned_noise_learns(noise: str) -> None:
    built = create_router("top-p", dim=8, experts=6, noise=noise)
    built(torch.randn(2, 9, 8)).weights.square().sum().backward()
    assert built.select.noise is not None
    assert float(built.select.noise.weight.grad.abs().sum()) > 0  # type: ignore[union-attr, operator]


def test_an_expert_graph_counts_selections_without_noise() -> None:
    noisy = create_router("symphony+smooth", dim=8, experts=6, noise="gaussian", noise_std=5.0)
    plain = create_router("symphony+smooth", dim=8, experts=6)
    plain.score.load_state_dict(noisy.score.state_dict())
    tokens = torch.randn(2, 30, 8)
    graphs = []
    for built in (noisy, plain):
        built(tokens)
        graphs.append(built.eval().snapshot()["graph"])
    assert torch.equal(*graphs)


def test_a_gate_of_zero_gets_no_expert_from_noise_in_relu_routing() -> None:
    built = create_router("symphony+remoe", dim=8, experts=6, init="identity", noise="gumbel")
    routing = built(torch.randn(2, 30, 8))
    assert torch.equal(routing.chosen, routing.logits > 0)


def test_the_bracket_grammar_takes_noise_for_every_name() -> None:
    built = create_router("symphony+top-p[noise=uniform, noise_std=0.2]", dim=8, experts=4)
    assert isinstance(built.select.noise, UniformNoise) and built.select.noise.std == 0.2
    assert_refused("the option noise_std is 'x'", create_router, "top-p[noise=gaussian, noise_std=x]", dim=8, experts=4)


class FirstExpert(TopK):
    """A selector that reads no scores."""

    @property
    def declares(self) -> SelectorDeclarations:
        return replace(super().declares, takes_noise=False)

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        raise NotImplementedError


def test_a_selector_that_reads_no_scores_refuses_noise() -> None:
    with pytest.raises(ValueError, match=r"FirstExpert does not select by scores.*remove the noise"):
        Router(Linear(8, 4), FirstExpert(4, 2), noise=GaussianNoise(8, 4))
    noisy = Router(Linear(8, 4), TopK(4, 2), noise=GumbelNoise())
    assert_refused("noise once", Router, Linear(8, 4), noisy.select, noise=GaussianNoise(8, 4))


class Limited(Selector):
    """A capacity limit that never applies: it passes everything on to the selector inside."""

    def __init__(self, *, base: Selector) -> None:
        super().__init__()
        self.base = base

    def held_weights(self, experts: Tensor, scores: Scores, live: Selection) -> Tensor:
        return self.base.held_weights(experts, scores, live)

    def forward(self, scores: Scores, tokens: Tensor, context: Context) -> Selection:
        selection: Selection = self.base(scores, tokens, context)
        return selection


@pytest.mark.parametrize("inside", ["smoe", "top-p"])
def test_noise_is_drawn_once_with_a_capacity_limit(inside: str) -> None:
    holdfast.register("limited", stage="capacity", about="a test", paper="none")(Limited)
    try:
        torch.manual_seed(0)
        limited = create_router(f"{inside}+limited[noise=gaussian, noise_std=0.5]", dim=8, experts=6)
        plain = create_router(f"{inside}[noise=gaussian, noise_std=0.5]", dim=8, experts=6)
    finally:
        REGISTRY.remove("limited")
    plain.score.load_state_dict(limited.score.state_dict())
    assert isinstance(limited.select, Limited) and limited.select.noise is not None and limited.select.base.noise is None
    tokens, gates = torch.randn(2, 9, 8), []
    for built in (limited, plain):
        torch.manual_seed(1)
        gates.append(built(tokens).gates)
    assert torch.equal(*gates)


def test_noise_is_a_part_with_its_own_cost() -> None:
    learned = create_router("top-p", dim=8, experts=4, noise="gaussian")
    assert sum(isinstance(part, Noise) for part in learned.parts) == 1
    assert sum(isinstance(part, Noise) for part in create_router("top-p", dim=8, experts=4).parts) == 0

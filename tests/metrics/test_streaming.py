"""What holds for every streaming metric: parts equal the whole, padding is not there, merging, asking for nothing."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from metrics.routings import leaves, padded, random_routing, rows
from torch import Tensor
from wording import assert_refused

from holdfast import metrics
from holdfast.routing import Routing

Update = Callable[[Any, "Data", Tensor | None], object]
TOKENS = 63


def moved(routing: Routing, device: str) -> Routing:
    return routing.map_tokens(lambda rows: rows.to(device))


class Data:
    """Something for each metric: two routings of the same tokens, logits over classes, targets, likelihoods."""

    def __init__(self, one: Routing, other: Routing, classes: Tensor, targets: Tensor) -> None:
        self.one, self.other, self.classes, self.targets = one, other, classes, targets

    def part(self, which: slice) -> "Data":
        return Data(rows(self.one, which), rows(self.other, which), self.classes[which], self.targets[which])

    def to(self, device: str) -> "Data":
        return Data(moved(self.one, device), moved(self.other, device), self.classes.to(device), self.targets.to(device))

    def padded(self) -> tuple["Data", Tensor]:
        one, real = padded(self.one)
        other, _ = padded(self.other)
        classes = torch.full((real.numel(), self.classes.shape[1]), torch.nan)
        targets = torch.full((real.numel(),), -100)
        classes[real.flatten()], targets[real.flatten()] = self.classes, self.targets
        return Data(one, other, classes, targets), real


def whole() -> Data:
    generator = torch.Generator().manual_seed(5)
    one = random_routing(TOKENS, ragged=True)
    other = random_routing(TOKENS, slots=5, seed=1, ragged=True)
    logits, targets = torch.randn(TOKENS, 11, generator=generator), torch.randint(0, 11, (TOKENS,), generator=generator)
    return Data(one, other, logits, targets)


def _is_image(routing: Routing) -> Tensor:
    """Some tokens of each part, by a rule that padding does not change."""
    return (routing.experts == 0).any(1)


CASES: dict[str, tuple[Callable[[], Any], Update]] = {
    "Perplexity": (
        metrics.Perplexity,
        lambda m, d, p: m.update(metrics.token_nll(d.classes, d.targets), p),
    ),
    "AnomalyPrecision": (metrics.AnomalyPrecision, lambda m, d, p: m.update(d.classes, d.targets > 6, p)),
    "GateEntropy": (metrics.GateEntropy, lambda m, d, p: m.update(d.one, p)),
    "ExpertLoad": (metrics.ExpertLoad, lambda m, d, p: m.update(d.one, p)),
    "ModalityUse": (metrics.ModalityUse, lambda m, d, p: m.update(d.one, _is_image(d.one), p)),
    "LayerInstability": (metrics.LayerInstability, lambda m, d, p: m.update(d.one, d.other, p)),
    "CoSelection": (metrics.CoSelection, lambda m, d, p: m.update(d.one, p)),
    "NearTies": (lambda: metrics.NearTies((0.1, 0.5)), lambda m, d, p: m.update(d.one, p)),
    "ExpertsPerToken": (metrics.ExpertsPerToken, lambda m, d, p: m.update(d.one, p)),
    "WeightSums": (metrics.WeightSums, lambda m, d, p: m.update(d.one, p)),
    "RoutingChanges": (metrics.RoutingChanges, lambda m, d, p: m.update(d.one, d.other, p)),
    "RoutingChanges of 2": (lambda: metrics.RoutingChanges(2), lambda m, d, p: m.update(d.one, d.other, p)),
    "PredictionStability": (
        metrics.PredictionStability,
        lambda m, d, p: m.update(d.classes.argmax(-1), d.targets, p),
    ),
    "RoutingReport": (metrics.RoutingReport, lambda m, d, p: (m.each(0, d.one, p), m.each(1, d.other, p))),
}


def measured(name: str, *parts: tuple[Data, Tensor | None]) -> Any:
    build, update = CASES[name]
    metric = build()
    for data, token_mask in parts:
        update(metric, data, token_mask)
    return metric


def assert_same(one: Any, other: Any, rel: float = 1e-9) -> None:
    got, expected = leaves(one.result()), leaves(other.result())
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        assert (a is None and b is None) or a == pytest.approx(b, rel=rel, abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_parts_one_after_another_equal_all_at_once(name: str) -> None:
    data = whole()
    parts = [(data.part(which), None) for which in (slice(0, 5), slice(5, 40), slice(40, 40), slice(40, TOKENS))]
    assert_same(measured(name, *parts), measured(name, (data, None)))


@pytest.mark.parametrize("name", CASES)
def test_padding_is_as_if_the_tokens_were_not_there(name: str) -> None:
    """Also where padding is NaN, routed elsewhere or has the target -100."""
    data = whole()
    assert_same(measured(name, data.padded()), measured(name, (data, None)))


@pytest.mark.parametrize("name", CASES)
def test_merged_parts_equal_one_run(name: str) -> None:
    """Parts of a run, or ranks: they travel pickled. The part that is taken in stays as it was."""
    data = whole()
    first, second = (measured(name, (data.part(which), None)) for which in (slice(0, 30), slice(30, TOKENS)))
    untouched = leaves(second.result())
    merged = CASES[name][0]().merge(second).merge(pickle.loads(pickle.dumps(first)))
    assert_same(merged, measured(name, (data, None)))
    CASES[name][1](merged, data, None)
    assert leaves(second.result()) == untouched


@pytest.mark.parametrize("name", CASES)
def test_asking_for_a_result_of_nothing_is_one_clear_sentence(name: str) -> None:
    data, real = whole().padded()
    for metric in (CASES[name][0](), measured(name, (data, torch.zeros_like(real)))):
        assert_refused(r"has (no|0)\b|nothing", metric.result)


@pytest.mark.parametrize("name", CASES)
def test_an_attention_mask_of_0_and_1_is_refused_as_padding(name: str) -> None:
    data, real = whole().padded()
    assert_refused(r"torch\.int64.*126", measured, name, (data, real.long()))
    assert_refused("bool", measured, name, (data, real[:, :-1]))


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_gradients_being_recorded(name: str) -> None:
    data = whole()
    learned = whole()
    learned.classes.requires_grad_()
    for routing in (learned.one, learned.other):
        for field in (routing.logits, routing.gates, routing.weights):
            field.requires_grad_()
    assert_same(measured(name, (learned, None)), measured(name, (data, None)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_the_results_of_a_cpu_wherever_the_padding_is(name: str) -> None:
    data, real = whole().padded()
    rel = 1e-6  # float32 rounds differently there
    for token_mask in (real, real.cuda()):
        assert_same(measured(name, (data.to("cuda"), token_mask)), measured(name, (data, real)), rel)
    apart = Data(moved(data.one, "cuda"), data.other, data.classes.cuda(), data.targets.cuda())  # layers on two devices
    assert_same(measured(name, (apart, real)), measured(name, (data, real)), rel)
    together = measured(name, (data.to("cuda"), real.cuda())).merge(measured(name, (data, real)))
    # Of one token's two scores, equal on one device, either may come first where they were rounded on two.
    near = 1e-2 if name == "AnomalyPrecision" else rel
    assert_same(together, measured(name, (data, real), (data, real)), near)


def test_metrics_of_different_kinds_or_settings_do_not_merge() -> None:
    assert_refused(r"Perplexity.*GateEntropy", metrics.GateEntropy().merge, metrics.Perplexity())
    assert_refused("settings", metrics.NearTies((0.1,)).merge, metrics.NearTies((0.2,)))


def test_layers_with_different_numbers_of_experts_do_not_mix_and_nothing_is_half_added() -> None:
    load = metrics.ExpertLoad()
    load.update(random_routing(experts=7))
    before = load.result()
    assert_refused(r"\(7,\).*\(8,\)", load.update, random_routing(experts=8))
    assert load.result() == before and load.tokens == 63


def test_sums_are_float64() -> None:
    """Ten million and one small number: float32 would lose it."""
    metric = metrics.Perplexity()
    metric.update(torch.full((1,), 2.0**24))
    for _ in range(8):
        metric.update(torch.ones(1))
    metric.update(torch.tensor([-(2.0**24)]))
    assert metric.result() == pytest.approx(torch.tensor(0.8).exp().item(), rel=1e-6)

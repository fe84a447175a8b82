"""The reports: each metric of each layer, through `holdfast.trace`, as data that JSON can hold."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from metrics.routings import random_routing, rows
from torch import Tensor, nn

import holdfast
from holdfast import Experts, MoE, metrics
from holdfast.routing import Routing


class Stack(nn.Module):
    """MoE layers one after the other, with a router of each name."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            MoE(holdfast.create_router(name, dim=16, experts=6, k=2), Experts(16, 16, 6)) for name in names
        )

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            tokens = tokens + layer(tokens)[0]
        return tokens


def test_a_traced_model_is_reported_layer_by_layer() -> None:
    model = Stack("smoe", "xmoe", "smooth").eval()
    batches = [torch.randn(2, 9, 16), torch.randn(3, 5, 16)]
    report = metrics.RoutingReport(["a", "b", "c"])
    records: list[list[Routing]] = []
    for batch in batches:
        with holdfast.trace(model, each=report.each):
            model(batch)
        with holdfast.trace(model) as routes:
            model(batch)
        records.append(list(routes))
    result = report.result()
    assert result["overall"]["layers"] == 3
    for place, layer in enumerate(result["layers"]):
        assert (layer["layer"], layer["name"], layer["tokens"], layer["experts"]) == (place, "abc"[place], 33, 6)
        alone: dict[str, Any] = {
            "entropy": metrics.GateEntropy(),
            "load": metrics.ExpertLoad(),
            "experts_per_token": metrics.ExpertsPerToken(),
            "weight_sum": metrics.WeightSums(),
            "near_ties": metrics.NearTies(),
            "co_selection": metrics.CoSelection(),
        }
        instability = metrics.LayerInstability()
        for batch_records in records:
            for metric in alone.values():
                metric.update(batch_records[place])
            if place:
                instability.update(batch_records[place - 1], batch_records[place])
        for name, metric in alone.items():
            expected = metric.result()
            assert layer[name] == (expected if isinstance(expected, float) else asdict(expected))
        assert layer["instability"] == (instability.result() if place else None)


def collected(*layers: Routing, token_mask: Tensor | None = None, **options: Any) -> metrics.RoutingReport:
    report = metrics.RoutingReport(**options)
    for layer, routing in enumerate(layers):
        report.each(layer, routing, token_mask)
    return report


def numbers(key: Callable[[dict[str, Any]], float | None], result: dict[str, Any]) -> list[float]:
    found = [key(layer) for layer in result["layers"]]
    return [value for value in found if value is not None]


KEYS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "entropy": lambda layer: layer["entropy"],
    "load std": lambda layer: layer["load"]["std"],
    "load cv": lambda layer: layer["load"]["cv"],
    "experts": lambda layer: layer["experts_per_token"]["mean"],
    "weights": lambda layer: layer["weight_sum"]["mean"],
    "near ties": lambda layer: layer["near_ties"]["strips"][2]["share"],
    "in the strip": lambda layer: layer["near_ties"]["strips"][2]["experts"],
    "explained": lambda layer: layer["near_ties"]["explained"],
    "instability": lambda layer: layer["instability"],
    "spectral gap": lambda layer: layer["co_selection"]["spectral_gap"],
}


@pytest.mark.parametrize("name", KEYS)
def test_overall_is_the_mean_over_layers(name: str) -> None:
    result = collected(random_routing(seed=1), random_routing(seed=2, slots=2), random_routing(seed=3, ragged=True)).result()
    values = numbers(KEYS[name], result)
    assert len(values) == (2 if name == "instability" else 3)
    assert KEYS[name](result["overall"]) == pytest.approx(sum(values) / len(values))


def test_dead_experts_are_counted_over_layers() -> None:
    dead = random_routing(experts=7, slots=2)
    dead.experts[dead.experts == 3] = 7
    result = collected(dead, random_routing(), dead).result()
    assert [layer["load"]["dead"] for layer in result["layers"]] == [[3], [], [3]]
    assert result["overall"]["load"]["dead"] == 2


def test_a_report_is_json_also_of_a_broken_layer() -> None:
    broken = random_routing()
    broken.gates[3] = math.nan
    result = collected(broken, random_routing(ragged=True)).result()
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["layers"][0]["entropy"] is None and result["overall"]["entropy"] is None
    assert result["layers"][1]["entropy"] > 0


def test_entropy_is_compared_with_a_baseline_layer_by_layer() -> None:
    one, other = random_routing(seed=1), random_routing(seed=2)
    sharp = replace(other, gates=(4 * other.logits).softmax(-1))
    result = collected(one, sharp).result(collected(one, other))
    assert result["layers"][0]["entropy_ratio"] == 1
    assert result["layers"][1]["entropy_ratio"] < 0.8
    assert result["overall"]["entropy_ratio"] == pytest.approx((1 + result["layers"][1]["entropy_ratio"]) / 2)
    with pytest.raises(ValueError, match="layer 1"):
        collected(one, other).result(collected(one))
    certain = replace(one, gates=nn.functional.one_hot(one.experts[:, 0], 7).float())
    assert collected(one).result(collected(certain))["layers"][0]["entropy_ratio"] is None


def test_layers_that_do_not_see_the_same_tokens_have_no_instability() -> None:
    few = rows(random_routing(seed=3), slice(0, 30))
    result = collected(random_routing(seed=1), few, random_routing(30, seed=2)).result()
    assert [layer["instability"] is None for layer in result["layers"]] == [True, True, False]
    report = metrics.RoutingReport()
    report.each(0, random_routing(), None)
    report.each(1, random_routing(), torch.arange(63) % 2 == 0)
    report.each(3, random_routing(), None)
    assert [layer["instability"] for layer in report.result()["layers"]] == [None, None, None]


def test_the_last_layer_of_a_forward_and_the_first_of_the_next_are_no_neighbours() -> None:
    one, other = random_routing(seed=1), random_routing(seed=2)
    report = metrics.RoutingReport()
    for _ in range(2):
        report.each(0, one, None)
        report.each(1, other, None)
    expected = metrics.LayerInstability()
    expected.update(one, other)
    expected.update(one, other)
    assert [layer["instability"] for layer in report.result()["layers"]] == [None, expected.result()]


def test_boundaries_and_widths_reach_the_layers_and_graphs_can_be_left_out() -> None:
    routing = random_routing(slots=3)
    result = collected(routing, routing, widths=(0.7,), boundaries={1: metrics.Boundary(k=1)}).result(graphs=False)
    one = metrics.NearTies((0.7,), metrics.Boundary(k=1))
    one.update(routing)
    assert result["layers"][1]["near_ties"] == asdict(one.result()) != result["layers"][0]["near_ties"]
    assert all(set(layer["co_selection"]) == {"spectral_gap"} for layer in result["layers"])


def test_changes_between_two_traced_runs_are_reported_layer_by_layer() -> None:
    model = Stack("smoe", "smooth").eval()
    report = metrics.ChangeReport(["a", "b"], k=2)
    expected = [metrics.RoutingChanges(2), metrics.RoutingChanges(2)]
    for _ in range(3):
        clean = torch.randn(2, 20, 16)
        noisy = clean + 0.2 * torch.randn(2, 20, 16)
        with holdfast.trace(model, each=report.before):
            model(clean)
        with holdfast.trace(model, each=report.after):
            model(noisy)
        with holdfast.trace(model) as before:
            model(clean)
        records = list(before)
        with holdfast.trace(model) as after:
            model(noisy)
        for layer in range(2):
            expected[layer].update(records[layer], after[layer])
    result = report.result()
    for place, layer in enumerate(result["layers"]):
        changes = asdict(expected[place].result())
        assert layer == {"layer": place, "name": "ab"[place], "tokens": 120, **changes}
        assert 0 < layer["fluctuation"] < 1
    for name in ("fluctuation", "consistency", "first_flips", "weight_change"):
        assert result["overall"][name] == pytest.approx(sum(layer[name] for layer in result["layers"]) / 2)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_the_same_run_twice_changes_nothing() -> None:
    model = Stack("smoe", "symphony").eval()
    report = metrics.ChangeReport()
    batches = [torch.randn(2, 8, 16) for _ in range(3)]
    for each in (report.before, report.after):  # one whole run after the other
        with holdfast.trace(model, each=each):
            for batch in batches:
                model(batch)
    assert report.result()["overall"] == {
        "layers": 2,
        "fluctuation": 0,
        "consistency": 1,
        "first_flips": 0,
        "weight_change": 0,
    }


def test_runs_that_do_not_match_are_one_clear_sentence() -> None:
    report, routing, real = metrics.ChangeReport(), random_routing(), torch.ones(63, dtype=torch.bool)
    with pytest.raises(ValueError, match="layer 2"):
        report.after(2, routing, None)
    report.before(0, routing, real)
    with pytest.raises(ValueError, match=r"layer 0.*padding"):
        report.after(0, routing, torch.arange(63) > 3)
    report.before(1, routing, None)
    with pytest.raises(ValueError, match="layer 1"):
        report.result()

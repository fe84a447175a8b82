"""The reports: each metric of each layer, through `holdfast.trace`, as data that JSON can hold."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from metrics.routings import random_routing, rows, updated
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


def collected(*layers: Routing, **options: Any) -> metrics.RoutingReport:
    report = metrics.RoutingReport(**options)
    for layer, routing in enumerate(layers):
        report.each(layer, routing, None)
    return report


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
    values = [value for layer in result["layers"] if (value := KEYS[name](layer)) is not None]
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
    expected = updated(metrics.LayerInstability(), one, other)
    expected.update(one, other)
    assert [layer["instability"] for layer in report.result()["layers"]] == [None, expected.result()]


def test_boundaries_reach_the_layers() -> None:
    routing = random_routing(slots=3)
    result = collected(routing, routing, boundaries={1: metrics.Boundary(k=1)}).result()
    one = updated(metrics.NearTies(boundary=metrics.Boundary(k=1)), routing)
    assert result["layers"][1]["near_ties"] == asdict(one.result()) != result["layers"][0]["near_ties"]

"""`measure_geometry`: its numbers against direct calls, what it refuses, and that it leaves the model alone."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from auditing.audited_models import batches, hooks, sparse, state, texts, tokenizer
from tiny import tiny
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.auditing import GeometryReport
from holdfast.auditing.forwards import observe
from holdfast.auditing.geometry_run import WIDTHS, what_if_routers
from holdfast.auditing.layer_geometry import LayerTokens, nearest_jumps, nearest_two, slice_around, slice_through
from holdfast.auditing.model_and_data import AuditedModel, audit_batches, evaluation_mode
from holdfast.geometry import (
    NoGeometry,
    affine_order,
    co_selection_widths,
    jumps,
    mixed_entropies,
    nearest_boundaries,
    nearest_ties,
    similarity_weights,
)
from holdfast.routing.declarations import Order

QUICK: dict[str, Any] = {"walking": 16, "walks": 2, "pictures": 1}


def observed(model: Any, layer: int = 0) -> LayerTokens:
    audited = AuditedModel(model)
    with evaluation_mode(model):
        batch = next(audit_batches(batches(), audited, None, batch=1, length=2, tokens=None))
        return LayerTokens.of(audited, layer, observe(audited, batch), batch)


def make(name: str) -> Any:
    return sparse(name) if name in ("smoe", "xmoe", "ac", "smooth") else tiny(name)


@pytest.fixture(scope="module")
def report() -> Any:
    return holdfast.measure_geometry(sparse(), list(batches()), name="a sparse llama", **QUICK)


@pytest.mark.slow
def test_shares_near_ties_are_those_of_direct_calls(report: Any) -> None:
    """The tokens of the two batches, from a trace of the model itself; 3 of 51 rows have 6 tokens of padding."""
    model, found = sparse(), []
    with torch.no_grad(), holdfast.hub.router_calls(model) as calls:
        for batch in batches():
            model(**batch)
            rows = calls[1].tokens.reshape(-1, calls[1].tokens.shape[-1])[batch["attention_mask"].bool().flatten()]
            found.append(rows)
    tokens = torch.cat(found)
    router = model.model.layers[1].mlp.router
    ties = nearest_ties(Order(router.score.weight), tokens, 2)
    relative = ties.distances / tokens.double().norm(dim=-1, keepdim=True)
    ties_of_report = report.layers[1].ties
    assert report.layers[1].tokens == len(tokens) == 90 and ties_of_report.exact
    for place, order in enumerate(ties_of_report.orders):
        wanted = [float((relative[:, place] <= width).double().mean()) for width in WIDTHS]
        assert order.shares == pytest.approx(wanted) and 0 < sum(wanted) < len(wanted)
        assert order.median == pytest.approx(float(relative[:, place].median()))


@pytest.mark.slow
def test_jumps_are_those_of_the_metric_and_smooth_has_none(report: Any) -> None:
    layer = observed(sparse(), 0)
    router, site = layer.call.route, layer.site
    assert isinstance(router, holdfast.Router)

    def whole(points: Tensor) -> Tensor:
        routing = router(points)
        return site.experts(points, routing.experts, routing.weights)  # type: ignore[no-any-return]

    order, k = affine_order(router, layer.tokens)
    wanted = jumps(whole, nearest_boundaries(order, layer.tokens, k))
    found = nearest_jumps(layer, layer.flips())
    torch.testing.assert_close(found.limit, wanted.limit, rtol=1e-3, atol=1e-5)
    for measured in report.layers:
        own, other = measured.jumps.routers
        assert own.mean > 0.01 and other.mean < 0.02 * own.mean
        assert measured.jumps.largest[0].size == own.largest
    assert report.what_if is not None and report.what_if.jump.after < 0.02 * report.what_if.jump.before


def test_walks_stay_inside_their_bounds(report: Any) -> None:
    for layer in report.layers:
        found = layer.hitting
        assert found.tokens == 16 and found.walks == 32 and found.exits_of_order_1 == 1
        slack = 3 * 0.5 / math.sqrt(found.tokens)
        for low, share, high in zip(found.lower, found.simulated, found.upper, strict=True):
            assert low <= high and low - slack <= share <= high + slack
        assert found.simulated[0] < found.simulated[-1]


def test_a_walk_with_drift_and_hardly_any_noise_meets_the_nearest_boundary_on_time() -> None:
    """With a drift of once the norm in one unit of time, a walk meets it at the relative distance of its token."""
    settings = {**QUICK, "noise": 1e-6, "drift": 1.0, "walks": 1, "walking": 512, "pictures": 0, "what_if": None}
    found: Any = holdfast.measure_geometry(sparse(), list(batches(1)), **settings)
    for layer in found.layers:
        within = dict(zip(layer.ties.widths, layer.ties.orders[0].shares, strict=True))
        for values in (layer.hitting.simulated, layer.hitting.lower, layer.hitting.upper):
            at = dict(zip(layer.hitting.times, values, strict=True))
            shared = sorted(within.keys() & at.keys())
            assert len(shared) == 9 and [at[time] for time in shared] == pytest.approx([within[time] for time in shared])
        assert layer.hitting.tokens == layer.tokens


@pytest.mark.parametrize("name", ["smoe", "xmoe", "ac", "mixtral", "gpt_oss", "granitemoe"])
def test_points_at_the_tokens_are_routed_and_run_as_in_the_model(name: str) -> None:
    layer = observed(make(name), 1)
    every = torch.arange(len(layer.tokens))
    with torch.no_grad():
        routing = layer.route(layer.tokens, every)
        output = layer.run(layer.tokens, every)
    best = layer.keys.logits.argsort(dim=1, descending=True, stable=True)[:, : layer.k].sort(1).values
    assert torch.equal(routing.experts[:, : layer.k].sort(1).values, best)
    torch.testing.assert_close(output, layer.output.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["smoe", "xmoe", "ac", "smooth", "mixtral"])
def test_every_grid_point_of_a_slice_is_routed_as_drawn(name: str) -> None:
    """Only points as close to a tie as float32 rounding may differ."""
    layer = observed(make(name), 1)
    best = layer.keys.logits.argsort(dim=1, descending=True, stable=True)[:, : layer.k].sort(1).values.tolist()
    others = [place for place, each in enumerate(best) if each != best[0]]
    with torch.no_grad():
        for found in (slice_around(layer, 0), slice_through(layer, (0, others[0], others[1]))):
            count = len(found.cells) ** 2
            assert found.disagree <= 1e-3 * count and len(found.sets) >= 2 and found.lines
            assert (found.extra[0] is None) == (name != "smooth")
    if name != "ac":  # a slice has the keys of its first token's cluster
        width = len(found.cells)
        for mark, token in zip(found.tokens, (0, others[0], others[1]), strict=True):
            column, row = (
                int((getattr(mark, axis) - low) / (high - low) * width)
                for axis, low, high in zip("xy", found.low, found.high, strict=True)
            )
            assert found.sets[found.cells[row][column]] == best[token]


def test_the_first_boundary_is_the_nearest_one() -> None:
    layer = observed(sparse())
    flips = layer.flips()
    for token in range(5):
        one, two = nearest_two(layer, token)
        torch.testing.assert_close(one, flips.points[token])
        near, far = (float((point - layer.tokens[token]).norm()) for point in (one, two))
        assert near == pytest.approx(float(flips.distances[token])) and near <= far


def test_the_output_jumps_on_the_normal_with_top_k_and_not_with_smooth(report: Any) -> None:
    normal = report.layers[0].pictures.normal
    own, other = ([abs(two - one) for one, two in pairwise(curve)] for curve in normal.change)
    middle = len(own) // 2
    assert own.index(max(own)) == middle and max(own) > 10 * sorted(own)[-2] and max(other) < max(own)
    assert normal.largest[0][-1] > 0.5 * normal.largest[0][0]  # steps become smaller, differences do not
    assert normal.largest[1][-1] < 0.5 * normal.largest[0][-1]
    assert report.layers[1].pictures is None  # one layer was asked for


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    model = sparse().train()
    before, count = state(model), hooks(model)
    holdfast.measure_geometry(model, list(batches(1)), **QUICK)
    assert model.training and hooks(model) == count
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())


def test_a_router_of_the_what_if_still_works_when_the_model_is_restored() -> None:
    for model in (sparse(), tiny("mixtral")):
        audited = AuditedModel(model)
        tokens = torch.randn(1, 40, audited.moe_layers[0].size[0])
        (router, *_) = what_if_routers(audited, "smooth")
        assert router is not None
        holdfast.reroute(model, "smooth").eval()
        with torch.no_grad():
            wanted, found = AuditedModel(model).moe_layers[0].router(tokens), router(tokens)  # type: ignore[misc]
        assert torch.equal(wanted.experts, found.experts) and torch.equal(wanted.weights, found.weights)
        holdfast.restore(model)


@pytest.mark.slow
def test_layers_without_affine_keys_are_refused_by_layer_and_others_shown() -> None:
    model = sparse("symphony@0|smoe")
    torch.manual_seed(0)
    model.model.layers[0].mlp.router.inform[0].get_buffer("graph").copy_(torch.rand(8, 8))
    report: Any = holdfast.measure_geometry(model, list(batches(1)), what_if=None, **QUICK)
    (first,), (second, *_) = report.refused, report.layers
    assert first.layer == 0 and "gates" in first.reason
    assert second.layer == 1 and second.ties.orders[0].median > 0
    assert report.what_if is None and len(second.jumps.routers) == 1
    with pytest.raises(NoGeometry):
        observed(sparse("remoe"))


@pytest.mark.slow
def test_texts_have_their_words_at_the_largest_jumps() -> None:
    report: Any = holdfast.measure_geometry(tiny("mixtral"), texts(), tokenizer=tokenizer(), length=16, batch=3, **QUICK)
    for layer in report.layers:
        for entry in layer.jumps.largest:
            words = [word for word in (entry.before, entry.text, entry.after) if word]
            assert entry.text and " ".join(words) == entry.context
    marks = report.layers[0].pictures.slices[0].tokens
    assert all(mark.text for mark in marks)


@pytest.mark.slow
def test_two_reports_differ_only_in_their_seconds(report: Any, tmp_path: Path) -> None:
    again = holdfast.measure_geometry(sparse(), iter(list(batches())), name="a sparse llama", **QUICK)
    one, two = (json.loads(each.to_json()) for each in (report, again))
    del one["seconds"], two["seconds"]
    assert one == two
    assert report.versions and report.data.checksum and report.settings.seed == 0
    loaded = GeometryReport.load(report.save(tmp_path / "geometry.json"))
    assert loaded.to_json() == report.to_json()
    other: Any = holdfast.measure_geometry(sparse(), list(batches()), **QUICK, seed=1)
    assert other.layers[0].hitting.simulated != report.layers[0].hitting.simulated


@pytest.mark.slow
def test_an_interrupted_report_has_the_finished_batches() -> None:
    def stop(done: int, what: str) -> None:
        if done > 0:
            raise KeyboardInterrupt

    report: Any = holdfast.measure_geometry(sparse(), list(batches(3)), progress=stop, **QUICK)
    assert report.status == "interrupted" and report.data.batches == 1
    assert report.layers[0].tokens == report.layers[1].tokens == 45
    assert report.what_if is not None and report.what_if.cost["loss"].after is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"nois": 0.1}, "'noise'"),
        ({"noise": 0}, "noise is 0"),
        ({"noise": 2.0}, "noise is 2.0"),
        ({"drift": -0.1}, "drift is -0.1"),
        ({"walks": 0}, "walks is 0"),
        ({"pictures": -1}, "pictures is -1"),
        ({"what_if": "smoth"}, "smooth"),
        ({"what_if": "similarity"}, "one token at a time"),
        ({"what_if": "hash"}, "one token at a time"),
    ],
)
def test_a_mistake_is_found_before_the_first_forward(given: dict[str, Any], says: str) -> None:
    model = sparse()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    assert_refused(says, holdfast.measure_geometry, model, list(batches(1)), **given)


@pytest.mark.slow
@pytest.mark.parametrize(("zeros", "says"), [("mlp.gate.weight", "equal weights"), ("embed_tokens", "are 0")])
def test_weights_of_zero_are_refused_with_the_name_of_the_layer(zeros: str, says: str) -> None:
    model = tiny("mixtral")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if zeros in name:
                weight.zero_()
    assert_refused(f"^model.layers.0.mlp.gate: .*{says}", holdfast.measure_geometry, model, list(batches(1)), **QUICK)


@pytest.mark.slow
def test_a_rerouted_model_is_refused_with_a_what_if_and_measured_without() -> None:
    model = holdfast.reroute(tiny("mixtral"), "smooth")
    assert_refused("already rerouted", holdfast.measure_geometry, model, list(batches(1)), **QUICK)
    report: Any = holdfast.measure_geometry(model, list(batches(1)), what_if=None, **QUICK)
    assert report.layers[0].jumps.routers[0].mean < 0.01
    assert report.layers[0].pictures.slices[0].extra[0] is not None


def test_an_audit_has_the_shares_of_some_tokens_and_one_slice() -> None:
    """The first batch has 45 real tokens, fewer than an audit takes at most."""
    model = sparse("symphony@2|smoe")
    torch.manual_seed(0)
    model.model.layers[2].mlp.router.inform[0].get_buffer("graph").copy_(torch.rand(8, 8))
    report: Any = holdfast.audit(model, list(batches()), perturb=["none"])
    found = [layer.boundaries for layer in report.layers]
    for place in (0, 1):
        layer = observed(model, place)
        (_, order), *_ = layer.keys.orders()
        relative = nearest_ties(order, layer.tokens, 2, (1, 2)).distances / layer.lengths.unsqueeze(1)
        for number, near in enumerate(found[place].orders):
            wanted = [float((relative[:, number] <= width).double().mean()) for width in found[place].widths]
            assert near.shares == pytest.approx(wanted) and found[place].tokens == 45
    assert "gates" in found[2].skipped
    assert [each.slice is not None for each in found].count(True) == 1
    worst = max((0, 1), key=lambda place: found[place].orders[0].shares[2])
    assert found[worst].slice.lines


def test_statements_of_the_papers_are_those_of_direct_calls(report: Any) -> None:
    layer, found = observed(sparse(), 0), report.layers[0].theory
    assert set(found.skipped) == {"clusters"} and "previous" in found.skipped["clusters"]
    gates = torch.softmax(layer.keys.logits[:17], dim=-1)  # the first sequence has 17 tokens and no padding
    wanted = mixed_entropies(gates, similarity_weights(layer.tokens[:17]))
    assert found.entropy.informed == pytest.approx(float(wanted.informed.mean()))
    assert found.entropy.informed <= found.entropy.bound
    slopes = found.slopes
    assert slopes.softmax.largest <= 0.5 and slopes.top_k.largest is None and slopes.smooth.jump == 0
    assert slopes.top_k.jump > 0 and slopes.smooth.largest > 0.5
    widths = co_selection_widths(layer.route(layer.tokens, torch.arange(45)).chosen)
    assert found.co_selection.half_width == pytest.approx(float(widths.half_widths[widths.counts > 0].median()))
    for moved, bound in zip(found.co_selection.joint, found.co_selection.joint_bound, strict=True):
        assert 0 <= moved <= bound <= 1
    assert 0 < found.co_selection.regularity < 0.5
    assert len(found.tsne.experts) == 45
    assert report.layers[1].theory is None  # only layers with pictures have it

"""The unperturbed model: certificates, rounding, tokens at risk, and routing metrics."""

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from auditing.audited_models import batches, sparse, texts, tokenizer
from tiny import tiny
from tiny_dense import inputs as dense_inputs
from tiny_dense import tiny_dense

import holdfast
from holdfast.auditing import audit, what_if
from holdfast.auditing.baseline import RadiusHistogram, count_groups
from holdfast.metrics import RoutingReport


def test_no_decided_token_flips_and_a_share_of_the_undecided_does() -> None:
    source = torch.Generator().manual_seed(2)
    many = [{"input_ids": torch.randint(3, 64, (12, 60), generator=source)}]
    flips = []
    for model_type in ("mixtral", "deepseek_v3", "gpt_oss"):
        found: Any = audit(tiny(model_type), many, perturb=["none"])
        for layer in found.layers:
            for dtype in ("bf16", "fp16"):
                assert layer.undecided[dtype].decided_that_flip == 0
            assert layer.undecided["fp16"].share < layer.undecided["bf16"].share < 0.2
            flips.append(layer.undecided["bf16"].of_undecided_flip)
    assert 0.02 < sum(flips) / len(flips) < 1


@pytest.mark.parametrize("router", ["smooth", "symphony", "smoe"])
def test_no_decided_token_flips_with_holdfast_routers(router: str) -> None:
    found: Any = audit(holdfast.reroute(tiny("olmoe"), router), batches(8), perturb=["none"])
    assert all(layer.undecided["bf16"].decided_that_flip == 0 for layer in found.layers)
    assert found.overall.undecided["bf16"] > 0


def test_the_layers_contain_the_routing_report() -> None:
    model = tiny("olmoe")
    report = RoutingReport()
    with torch.no_grad(), holdfast.trace(model, each=report.each):
        for batch in batches():
            model(**batch)
    known, found = report.result(), audit(model, batches(), perturb=["none"])
    for mine, theirs in zip(found.layers, known["layers"], strict=True):
        for name in ("tokens", "entropy", "load", "experts_per_token", "near_ties", "instability"):
            assert asdict(mine)[name] == theirs[name], name
        assert mine.co_selection.counts == theirs["co_selection"]["counts"]
        assert mine.entropy_share == pytest.approx(theirs["entropy"] / math.log(8))


def test_the_loss_equals_that_of_the_model() -> None:
    model, (batch,) = tiny("mixtral"), list(batches(1))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        expected = float(model(**batch, labels=labels).loss)
    for given in (batch, {**batch, "labels": labels}):
        found: Any = audit(model, [given], perturb=["none"])
        assert found.overall.loss == pytest.approx(expected, rel=1e-5)
        assert found.overall.perplexity == pytest.approx(math.exp(expected), rel=1e-4)


def test_the_histogram_of_radii_has_their_counts_median_and_low_share() -> None:
    radii = 10 ** (torch.randn(4000, generator=torch.Generator().manual_seed(0)).double() - 2)
    radii[:3], radii[3:5] = 0.0, torch.inf
    whole, parts = RadiusHistogram(), RadiusHistogram()
    whole.update(radii)
    for part in radii.split(700):
        other = RadiusHistogram()
        other.update(part)
        parts.merge(other)
    found = whole.result()
    assert found == parts.result()
    edges = [0.0, *found.edges, math.inf]
    for low, high, count in zip(edges, edges[1:], found.counts, strict=False):
        inside = (radii >= low) & (radii < high) if high < math.inf else radii >= low
        assert abs(int(inside.sum()) - count) <= 1  # an edge is a power that rounds
    assert found.median == pytest.approx(float(radii.median()), rel=0.04)
    assert found.low == float((radii < 1e-3).double().mean()) and found.none == 3 / 4000


def test_the_tokens_at_risk_are_those_with_the_smallest_radii_decoded_in_context() -> None:
    found: Any = audit(tiny("mixtral"), texts(12), tokenizer=tokenizer(), perturb=["none"], at_risk=7, batch=5)
    risk = [entry.relative for entry in found.at_risk]
    assert len(risk) == 7 and risk == sorted(risk) and risk[0] > 0
    everything: Any = audit(tiny("mixtral"), texts(12), tokenizer=tokenizer(), perturb=["none"], at_risk=10_000, batch=12)
    assert len(everything.at_risk) == 12 * 14 * 3
    assert [entry.relative for entry in everything.at_risk[:7]] == pytest.approx(risk, rel=1e-3)
    for entry in found.at_risk:
        text = texts(12)[entry.batch * 5 + entry.sequence].split()
        assert text[entry.position] == entry.text and entry.text in entry.context.split()
        assert " ".join(text[max(0, entry.position - 4) : entry.position + 5]) == entry.context
        around = [word for word in (entry.before, entry.text, entry.after) if word]
        assert " ".join(around) == entry.context and entry.leaves != entry.enters


def test_the_view_has_the_routes_of_a_direct_forward() -> None:
    given: Any = {"tokenizer": tokenizer(), "at_risk": 10_000, "batch": 3, "noise": [0.05]}
    model, read = tiny("mixtral"), texts(5, words=9)
    found: Any = audit(model, read, **given)
    assert ["".join(example.pieces) for example in found.view.examples] == read[:3]
    inputs = tokenizer()(read[:3], return_tensors="pt", padding=True)
    with torch.no_grad(), holdfast.trace(model.eval()) as traced:
        model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    for shown, routing in zip(found.view.routes.layers, traced, strict=True):
        assert shown.experts == routing.experts.tolist() and shown.core is None
        assert torch.tensor(shown.weights) / 1000 == pytest.approx(routing.weights, abs=6e-4)
        best = routing.logits.sort(descending=True).values
        assert shown.margins == pytest.approx((best[:, 1] - best[:, 2]).tolist(), rel=6e-3)
    for entry in found.at_risk:
        if entry.batch == 0:
            radii = found.view.routes.layers[entry.layer].radii
            assert radii[9 * entry.sequence + entry.position] == pytest.approx(entry.relative, rel=6e-3)
    assert audit(tiny("mixtral"), batches(1), perturb=["none"]).view is None  # ids, and no tokenizer to read them


def test_the_view_has_as_many_flips_as_the_audit_counts() -> None:
    found: Any = audit(tiny("mixtral"), texts(4, words=9), tokenizer=tokenizer(), batch=4, noise=[0.05], rate=0.3)
    assert set(found.view.routes.perturbed) == set(found.perturbations) >= {"noise.0.05", "words", "batch.alone", "attack"}
    total = 0
    for name, one in found.view.routes.perturbed.items():
        compared = sum(end - start for start, end in one.compared)
        for layer, changed in enumerate(one.layers):
            before = found.view.routes.layers[layer].experts
            flips = sum(
                set(before[token]) != set(after) for token, after in zip(changed.tokens, changed.experts, strict=True)
            )
            (counted,) = [entry for entry in found.perturbations[name].layers if entry.layer == layer]
            assert (compared, flips) == (counted.tokens, round(counted.flips * counted.tokens)), name
            total += flips
    assert total > 20
    assert sum(end - start for start, end in found.view.routes.perturbed["words"].compared) < 36


@pytest.mark.parametrize("router", ["smooth", "remoe"])
def test_a_what_if_has_the_routes_of_the_same_tokens(router: str) -> None:
    model, given = tiny("mixtral"), {"tokenizer": tokenizer(), "perturb": ["noise"], "noise": [0.05]}
    found: Any = what_if(model, texts(3), router, **given)
    routers = [module for module in holdfast.reroute(model, router).modules() if isinstance(module, holdfast.Router)]
    with torch.no_grad(), holdfast.trace(model.eval()) as traced:
        model(
            **{name: found for name, found in tokenizer()(texts(3), return_tensors="pt").items() if name != "token_type_ids"}
        )
    for shown, routing, own in zip(found.routes.layers, traced, routers, strict=True):
        used = routing.used.sum(-1).tolist()
        assert shown.experts == [row[:count] for row, count in zip(routing.experts.tolist(), used, strict=True)]
        assert shown.core == own.select.declares.core


@pytest.mark.parametrize(("model_type", "lengths", "finest"), [("vit", [17, 17, 17], 4), ("swin", [64, 64, 16, 16], 8)])
def test_the_view_of_pictures_has_a_route_for_each_patch(model_type: str, lengths: list[int], finest: int) -> None:
    model, given = holdfast.sparsify(tiny_dense(model_type), experts=4, router="smoe"), dense_inputs(model_type)
    found: Any = audit(model, [given], perturb=["noise"], noise=[0.05])
    with torch.no_grad(), holdfast.trace(model.eval()) as traced:
        said = model(pixel_values=given["pixel_values"]).logits.argmax(-1).tolist()
    assert [len(routing.experts) for routing in traced] == [2 * length for length in lengths]
    names, pictures = model.config.id2label, [example.picture for example in found.view.examples]
    assert [one.label for one in pictures] == [names[1], names[3]] and [one.said for one in pictures] == [
        names[n] for n in said
    ]
    assert [one.grid for one in pictures] == [[finest, finest]] * 2
    for shown, routing, length in zip(found.view.routes.layers, traced, lengths, strict=True):
        side, patches = math.isqrt(length), finest * finest
        for number in range(2 * patches):
            picture, row, column = number // patches, number % patches // finest, number % finest
            token = (picture + 1) * length - side * side + row * side // finest * side + column * side // finest
            assert shown.experts[number] == routing.experts[token].tolist()
    assert found.view.routes.perturbed["noise.0.05"].compared == [[0, 2 * finest * finest]]


def test_groups_of_experts_that_no_token_connects_are_counted() -> None:
    assert count_groups([[4, 4, 0, 0], [4, 4, 0, 0], [0, 0, 2, 2], [0, 0, 2, 2]]) == 2
    assert count_groups([[4, 2, 0], [2, 3, 1], [0, 1, 1]]) == 1
    assert count_groups([[4, 0], [0, 0]]) == 1  # a dead expert is no group


def test_an_audit_continues_if_a_router_has_no_certificate() -> None:
    found: Any = audit(sparse("xmoe+similarity"), batches(vocabulary=96), perturb=["noise"])
    skipped = [layer.no_certificate for layer in found.layers]
    assert all(reason and "no certificate is known" in reason for reason in skipped) or not any(skipped)
    assert found.perturbations["noise.0.05"].overall.flips > 0

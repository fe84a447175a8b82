"""Findings name the faulty layer; those with consequences come first, and the worst of these."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from auditing.audited_models import batches, constant
from report.audited import perturbed, report_of, stored_audit
from tiers import quick_or_slow
from tiny import tiny
from wording import mentions

from holdfast.auditing import AuditReport, Finding, audit, diagnose
from holdfast.auditing.findings import CONSEQUENCES, most_severe

WITHOUT_ATTACK = ("none", "noise", "routing", "model", "batch", "backend")


def gate(model: Any, layer: int) -> Any:
    return model.model.layers[layer].mlp.gate


@pytest.mark.parametrize("layer", quick_or_slow([0, 1, 2], [1]))
@pytest.mark.parametrize("model_type", quick_or_slow(["mixtral", "olmoe"], ["mixtral"]))
def test_a_router_whose_rows_are_nearly_equal_is_the_first_finding_about_experts(model_type: str, layer: int) -> None:
    model = tiny(model_type)
    with torch.no_grad():
        weight = gate(model, layer).weight
        weight.copy_(weight.mean(0) + 1e-3 * (weight - weight.mean(0)))
    found = diagnose(audit(model, batches(6), perturb=WITHOUT_ATTACK))
    assert found[0].consequence == "predictions" and found[0].severity != "minor"  # that is what it does
    first, *others = [finding for finding in found if finding.consequence == "experts"]
    assert first.layer == layer and first.kind == "undecided" and first.severity != "minor"
    assert first.number > 0.8 and f"layer {layer}" in first.text and "undecided in bf16" in first.text
    assert {"near-ties", "uniform"} <= {finding.kind for finding in others if finding.layer == layer}


def test_a_dead_expert_and_the_uneven_load_are_found() -> None:
    model = tiny("gpt_oss")
    with torch.no_grad():
        model.model.layers[1].mlp.router.bias[3] = -1e3
    found = kinds(audit(model, batches(6), perturb=["none"]))
    assert found["dead experts", 1].number == 1 and ("dead experts", 0) not in found
    assert ("dead experts", 1) not in kinds(audit(model, batches(1), perturb=["none"]))  # too few tokens


def test_a_collapsed_router_and_uneven_load_are_found() -> None:
    model = constant()
    with torch.no_grad():
        model.model.layers[2].mlp.router.bias.mul_(100)
    found = kinds(audit(model, batches(6), perturb=["none"]))
    assert found["collapsed", 2].number < 0.02 and ("collapsed", 0) not in found
    assert found["uneven load", 0].number > 1


def test_groups_that_no_token_connects_are_found() -> None:
    model = tiny("gpt_oss")
    with torch.no_grad():  # pairs of equal rows: whoever takes one takes the other
        router = model.model.layers[0].mlp.router
        router.weight.copy_(router.weight[::2].repeat_interleave(2, 0) * 3)
        router.bias.copy_(torch.tensor([0.0, 0.001]).repeat(4))
    found = kinds(audit(model, batches(6), perturb=["none"]))
    assert found["disconnected", 0].number == 4


@pytest.mark.slow
def test_any_change_of_a_repeated_forward_comes_before_all_else() -> None:
    model = tiny("mixtral")
    gate(model, 2).register_forward_pre_hook(lambda module, given: (given[0] + 1e-3 * torch.randn_like(given[0]),))
    with torch.no_grad():
        weight = gate(model, 0).weight
        weight.copy_(weight.mean(0) + 1e-3 * (weight - weight.mean(0)))
    first = diagnose(audit(model, batches(6), perturb=WITHOUT_ATTACK))[0]
    assert first.kind == "evaluation" and first.layer == 2


@pytest.mark.slow
def test_every_finding_is_beyond_its_threshold_and_harmless_ones_are_not_made_up() -> None:
    report = audit(tiny("mixtral"), batches(4))
    for finding in diagnose(report):
        assert finding.number > finding.threshold or finding.kind == "collapsed"
        assert finding.text and finding.why and not finding.text.endswith(".")
    unperturbed = replace(report, perturbations={})
    assert {finding.consequence for finding in diagnose(unperturbed)} <= {"experts"}


def stored(name: str, predictions: float | None, loss: float | None, *, flips: float = 0.4, **about: Any) -> AuditReport:
    """Return an audit with one perturbation, whose consequences are given."""
    content = stored_audit()
    one = perturbed("a change", flips, flips / 2, **about)
    change = None if loss is None else {"before": 2.0, "after": 2.0 + loss, "change": loss, "size": abs(loss)}
    one["overall"] |= {"prediction_flips": predictions, "loss": change}
    content["perturbations"] = {name: one}
    return report_of(content)


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("name", "predictions", "loss", "kind", "severity"),
    [
        ("routing.bf16", 0.002, 0.0003, "flips: routing.bf16", "minor"),  # many flips, and nothing happens
        ("routing.bf16", 0.002, -0.0003, "flips: routing.bf16", "minor"),
        ("routing.bf16", 0.011, 0.0003, "predictions: routing.bf16", "serious"),
        ("routing.bf16", 0.101, 0.0003, "predictions: routing.bf16", "severe"),
        ("routing.bf16", 0.002, 0.011, "loss: routing.bf16", "serious"),
        ("routing.bf16", 0.002, -0.2, "loss: routing.bf16", "severe"),
        ("routing.bf16", 0.02, 0.2, "predictions: routing.bf16", "severe"),  # predictions come first; the loss is worse
        ("routing.bf16", None, 0.0003, "flips: routing.bf16", "minor"),
        ("routing.bf16", None, None, "flips: routing.bf16", "serious"),  # the consequence is not known
        ("words", 0.15, 0.15, "flips: words", "minor"),  # other words may change what is predicted
        ("words", 0.25, 0.15, "predictions: words", "serious"),
    ],
)
def test_consequences_decide_what_a_finding_is_about_and_how_severe_it_is(
    name: str, predictions: float | None, loss: float | None, kind: str, severity: str
) -> None:
    (found,) = [one for one in diagnose(stored(name, predictions, loss)) if name in one.kind]
    assert (found.kind, found.severity, found.layer) == (kind, severity, 0)
    assert found.consequence == {"flips": "experts"}.get(kind.partition(":")[0], kind.partition(":")[0])


@pytest.mark.parametrize(("share", "severity"), [(0.0025, "minor"), (0.3, "severe")])
def test_a_harmless_perturbation_that_changes_a_prediction_is_a_finding(share: float, severity: str) -> None:
    first = diagnose(stored("batch.left", share, 1e-9, harmless=True))[0]
    assert (first.kind, first.severity, first.threshold) == ("predictions: batch.left", severity, 0)


def test_undecided_tokens_are_as_severe_as_what_rounding_does_if_that_was_measured() -> None:
    def undecided(report: AuditReport) -> Finding:
        return next(one for one in diagnose(report) if one.kind == "undecided")

    assert undecided(stored("words", 0.0, 0.0)).severity == "severe"  # 30% of the tokens; rounding was not tried
    harmless = undecided(stored("routing.bf16", 0.0021, -0.0003))
    assert harmless.severity == "minor" and mentions(harmless.why, "routing.bf16", "0.21%", "-0.0003")


def test_predictions_come_before_the_loss_and_the_loss_before_experts() -> None:
    content = stored_audit()
    for name, predictions, loss in (("model.bf16", 0.0, 0.5), ("routing.bf16", 0.011, 0.0), ("backend", 0.3, 0.0)):
        content["perturbations"][name] = perturbed("a change", 0.4, 0.4)
        changed = {"before": 2.0, "after": 2.0 + loss, "change": loss, "size": loss}
        content["perturbations"][name]["overall"] |= {"prediction_flips": predictions, "loss": changed}
    content["perturbations"]["none"] = perturbed("again", 0.1, 0.1, harmless=True)
    found = diagnose(report_of(content))
    kinds = [one.kind for one in found if one.consequence != "experts"]
    assert kinds == ["evaluation", "predictions: backend", "predictions: noise.0.01", "predictions: routing.bf16",
                     "loss: model.bf16"]  # fmt: skip
    assert [one.consequence for one in found] == sorted((one.consequence for one in found), key=[*CONSEQUENCES].index)
    assert most_severe(found) is found[0]


def kinds(report: AuditReport) -> dict[tuple[str, int | None], Finding]:
    return {(finding.kind, finding.layer): finding for finding in diagnose(report)}

"""Findings name the faulty layer, and the worst comes first."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from auditing.audited_models import batches, constant
from tiers import quick_or_slow
from tiny import tiny

from holdfast.auditing import AuditReport, Finding, audit, diagnose

WITHOUT_ATTACK = ("none", "noise", "routing", "model", "batch", "backend")


def gate(model: Any, layer: int) -> Any:
    return model.model.layers[layer].mlp.gate


@pytest.mark.parametrize("layer", quick_or_slow([0, 1, 2], [1]))
@pytest.mark.parametrize("model_type", quick_or_slow(["mixtral", "olmoe"], ["mixtral"]))
def test_a_router_whose_rows_are_nearly_equal_is_the_first_finding(model_type: str, layer: int) -> None:
    model = tiny(model_type)
    with torch.no_grad():
        weight = gate(model, layer).weight
        weight.copy_(weight.mean(0) + 1e-3 * (weight - weight.mean(0)))
    first, *others = diagnose(audit(model, batches(6), perturb=WITHOUT_ATTACK))
    assert first.layer == layer and first.kind == "undecided" and first.severity == "severe"
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


def test_a_change_by_other_sequences_is_severe() -> None:
    from auditing.test_perturbations import Nosy

    model = tiny("mixtral")
    model.model.layers[0].mlp.experts = Nosy(model.model.layers[0].mlp.experts)
    found = diagnose(audit(model, batches(), perturb=["batch", "none"]))
    severe = {finding.kind for finding in found if finding.severity == "severe"}
    assert severe == {"flips: batch.alone", "flips: batch.left", "flips: batch.right"}
    assert found[0].severity == "severe" and found[0].threshold == 0


@pytest.mark.slow
def test_every_finding_is_beyond_its_threshold_and_harmless_ones_are_not_made_up() -> None:
    report = audit(tiny("mixtral"), batches(4))
    for finding in diagnose(report):
        assert finding.number > finding.threshold or finding.kind == "collapsed"
        assert finding.text and finding.why and not finding.text.endswith(".")
    unperturbed = replace(report, perturbations={})
    assert not any(finding.kind.startswith("flips") for finding in diagnose(unperturbed))


def kinds(report: AuditReport) -> dict[tuple[str, int | None], Finding]:
    return {(finding.kind, finding.layer): finding for finding in diagnose(report)}

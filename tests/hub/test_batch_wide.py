"""Routers that look at the whole batch, in models: warnings, generation, padding, saving, plans, audits and pages."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny
from tiny_dense import inputs, outputs, tiny_dense

import holdfast
from holdfast.auditing import audit
from holdfast.certificates import NoCertificate, certify
from holdfast.hub.layers import moe_layers
from holdfast.hub.tracing import router_calls
from holdfast.planning import Workload, plan
from holdfast.report import render
from holdfast.routing import Context, Router

IN_TRAINING = ["expert-choice", "sinkhorn", "sinkhorn[bias=running]", "symphony+sinkhorn", "base"]  # only there
ALWAYS = ["capacity[policy=next]", "smoe+capacity[factor=0.7]", "remoe+capacity", "expert-choice[evaluate=same]"]


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (3, 17), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def changed(router: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return holdfast.reroute(tiny("olmoe"), router)


@pytest.mark.parametrize("router", IN_TRAINING)
def test_a_router_that_looks_ahead_only_in_training_warns_once_there_and_generates(router: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = holdfast.reroute(tiny("olmoe"), router)
        model(**batch())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model.train()(**batch(), labels=batch()["input_ids"]).loss.backward()
    assert len([each for each in found if "later tokens in training" in str(each.message)]) == 1
    prompt = batch()["input_ids"][:, :5]
    model.eval()
    cached, whole = (
        model.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=use, eos_token_id=None) for use in (True, False)
    )
    assert torch.equal(cached, whole)
    assert torch.equal(model.train().generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None), whole)


@pytest.mark.parametrize("router", ALWAYS)
def test_padding_takes_no_place_in_evaluation(router: str) -> None:
    model, given = changed(router), batch()
    with torch.no_grad():
        first = model(**given).logits
        other = torch.where(given["attention_mask"].bool(), given["input_ids"], 7)
        second = model(input_ids=other, attention_mask=given["attention_mask"]).logits
    real = given["attention_mask"].bool()
    torch.testing.assert_close(first[real], second[real])


@pytest.mark.parametrize("router", [*IN_TRAINING, *ALWAYS])
def test_a_saved_model_routes_alike_after_loading(router: str, tmp_path: Path) -> None:
    model = changed(router)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(3):
            model.train()(**batch(seed))
        model.eval()
        loaded = holdfast.load(holdfast.save(model, tmp_path / "saved")).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch()).logits, model(**batch()).logits, atol=0, rtol=0)


def test_a_trace_keeps_what_was_requested_and_dropped() -> None:
    model = changed("smoe+capacity[factor=0.6]")
    with holdfast.trace(model) as routes, torch.no_grad():
        model(**batch())
    for routing in routes:
        assert routing.requested is not None and routing.dropped is not None
        assert routing.requested.shape == routing.experts.shape
        assert torch.equal(routing.dropped, routing.requested_sets.sum(1) - routing.used.sum(1))
    assert any(bool(routing.dropped.any()) for routing in routes if routing.dropped is not None)


@pytest.mark.parametrize("router", ["expert-choice", "symphony+sinkhorn", "base", "smoe+capacity[factor=1.5]"])
@pytest.mark.parametrize("family", ["bert", "vit"])
def test_a_dense_model_becomes_sparse_and_learns(family: str, router: str) -> None:
    model = holdfast.sparsify(tiny_dense(family), experts=4, router=router, noise=0.5).train()
    outputs(model, inputs(family)).square().mean().backward()
    routers = [layer.router for layer in moe_layers(model) if layer.router is not None]
    for router_of_layer in routers:
        weight = router_of_layer.score.get_parameter("weight")
        assert weight.grad is not None and bool(weight.grad.any())
    assert routers


def first_call(router: str) -> tuple[Router, torch.Tensor, Context]:
    """Return the first router of a model, and its tokens and context in a forward."""
    model = changed(router)
    with router_calls(model) as calls, torch.no_grad():
        model(**batch())
    assert isinstance(calls[0].route, Router) and calls[0].context is not None
    return calls[0].route, calls[0].tokens, calls[0].context


@pytest.mark.parametrize("router", ["capacity", "expert-choice[evaluate=same]"])
def test_a_certificate_is_refused_with_the_reason(router: str) -> None:
    call = first_call(router)
    with pytest.raises(NoCertificate, match="other tokens"):
        certify(*call)


@pytest.mark.parametrize("router", IN_TRAINING)
def test_evaluation_has_the_certificates_of_top_k(router: str) -> None:
    call = first_call(router)
    if "running" in router:
        with pytest.raises(NoCertificate, match="bias"):
            certify(*call)
    else:
        assert bool((certify(*call).radius > 0).any())


def test_an_audit_and_its_page_show_what_is_dropped() -> None:
    found = audit(changed("smoe+capacity[factor=0.6]"), [batch()], perturb=["none", "noise"])
    shares = [found.overall.dropped["share"], *(layer.dropped and layer.dropped["share"] for layer in found.layers)]
    assert all(share and share > 0.1 for share in shares)
    page = render(found)
    assert ">dropped<" in page
    plain = audit(tiny("olmoe"), [batch()], perturb=["none"])
    assert plain.overall.dropped == {}


def test_a_plan_counts_what_ranks_exchange_to_select() -> None:
    workload = Workload(sequence=64, gpus=2)
    columns = plan("mixtral", ["smoe", "base", "capacity", "sinkhorn"], workload=workload).columns
    sent = {column.router: column.layouts[0].summed for column in columns}
    assert sent["smoe"] == 0 < sent["sinkhorn"] < sent["base"] < sent["capacity"]


def test_phimoe_with_a_capacity_has_finite_gradients() -> None:
    """A dropped slot is read as expert 0, beside which no expert may be near."""
    model = holdfast.reroute(tiny("phimoe"), "capacity[factor=0.5]").train()
    ids = torch.randint(3, 64, (2, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in model.parameters())

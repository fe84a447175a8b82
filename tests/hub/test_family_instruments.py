"""Instruments on every MoE family that routers can be put into: audits, certificates and replay read its own gate."""

from typing import Any

import pytest
import torch
from families_page import listed
from family_models import is_installed, tiny_moe
from tiers import quick_or_slow

import holdfast

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
OTHER_GATES = ("hunyuan_v1_moe", "hy_v3")  # the weight is in a module of the gate; the block passes a bias to the gate


def built(family: str) -> Any:
    if not is_installed(family):
        pytest.skip("this transformers does not have it")
    torch.manual_seed(0)
    return tiny_moe(family).eval()


@pytest.mark.parametrize("family", quick_or_slow(listed("MoE")[0], OTHER_GATES))
def test_an_audit_reads_the_gate_of_the_family(family: str) -> None:
    inputs = [{"input_ids": IDS}]
    report = holdfast.audit(built(family), inputs, perturb=["none", "noise", "routing", "attack"], noise=(0.5,))
    same, other = report.perturbations["none"].layers, report.perturbations["noise.0.5"].layers
    assert all(layer.flips == 0 for layer in same)
    assert any(layer.flips > 0 for layer in other)


@pytest.mark.parametrize("family", quick_or_slow(listed("MoE")[0], [*OTHER_GATES, "mixtral", "gpt_oss", "qwen3_5_moe"]))
def test_a_native_model_replays_its_own_routes_to_the_bit_and_others_change_it(family: str) -> None:
    model = holdfast.reroute(built(family), "native")
    with torch.no_grad(), holdfast.trace(model) as found:
        live = model(input_ids=IDS, use_cache=False)[0]
    routes = holdfast.Routes.from_trace(found, model)
    experts = {routing.gates.shape[-1] for routing in found}
    assert len(experts) == 1
    others = (routes.experts.long() + 1) % experts.pop()
    with torch.no_grad():
        with holdfast.replay(model, routes):
            again = model(input_ids=IDS, use_cache=False)[0]
        foreign = model(input_ids=IDS, use_cache=False, routed_experts=others)[0]
    assert torch.equal(again, live)
    assert not torch.allclose(foreign, live)

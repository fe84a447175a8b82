"""Native gates of Hugging Face families are certified from weights and rule; a rerouted gate is certified as a Router."""

from typing import Any

import pytest
import torch
from certificates.certified_routers import generator
from certificates.probing import directions, probe
from tiny import EXTRA, tiny
from torch import Tensor

from holdfast.certificates import NORMS, Gate, certify, undecided
from holdfast.hub.families import routing_from_gate
from holdfast.hub.layers import MoELayerRef, moe_layers


def plain(site: MoELayerRef) -> Gate:
    """Return the `Gate` that an audit makes: weights, bias, rule, k."""
    assert site.family is not None
    gate, family = site.gate, site.family
    bias = None if family.bias is None else getattr(gate, family.bias)
    return Gate(getattr(gate, family.weight), int(getattr(gate, "top_k", 2)), bias=bias, rule=family.rule(gate))


def native_sets(site: MoELayerRef, tokens: Tensor) -> Tensor:
    assert site.family is not None
    shaped = tokens.unsqueeze(0) if site.family.model_type in ("deepseek_v3", "glm4_moe") else tokens
    return routing_from_gate(site.gate(shaped), site.family.rule(site.gate)).chosen


@pytest.mark.parametrize("model_type", sorted(EXTRA))
def test_no_perturbation_inside_the_radius_flips_a_native_gate(model_type: str) -> None:
    site = moe_layers(tiny(model_type))[-1]
    with torch.no_grad():
        for name, buffer in site.gate.named_buffers():
            if "bias" in name:
                buffer.normal_(std=0.1)
        tokens = torch.randn(64, 32, generator=generator(1))
        for norm in NORMS:
            found = certify(plain(site), tokens, norm=norm)
            assert found.kind == ("lower bound" if model_type in ("deepseek_v3", "glm4_moe") else "exact")
            assert (found.radius > 0).float().mean() > 0.9
            tries = directions(tokens, norm, 24)
            assert probe(lambda rows: native_sets(site, rows), tokens, found.radius, norm, tries)[1] == 0


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "granitemoe"])
def test_no_decided_token_flips_in_a_model_that_runs_in_bfloat16(model_type: str) -> None:
    """These families score in the model's dtype."""
    model: Any = tiny(model_type)
    tokens = torch.randn(3000, 32, generator=generator(2)).bfloat16()
    site = moe_layers(model.bfloat16())[0]
    gate = plain(site)
    with torch.no_grad():
        short = native_sets(site, tokens)
        alarm = undecided(gate, tokens, torch.bfloat16)
        long = native_sets(moe_layers(model.float())[0], tokens.float())
    flips = (short != long).any(1)
    assert flips.any() and not (flips & ~alarm).any() and alarm.float().mean() < 0.2

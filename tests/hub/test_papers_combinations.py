"""The combinations of the papers' tables, by name: each is built into a real tiny model, trained, saved and loaded.

000 is SymphonySMoE, 001 Mutual-Inform SMoE, 002 ACMoE, 003 the paper of smooth.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_dense import inputs, outputs, tiny_dense

import holdfast
from holdfast.hub.layers import moe_layers
from holdfast.routing import Router

SWITCH, GLAM, VIT = ("gpt2", "all"), ("gpt2", "alternate"), ("vit", "all")
COMBINATIONS = {
    "000 Table 1, Symphony over SMoE": ("symphony", *SWITCH),
    "000 Table 1, Symphony over GLaM": ("symphony", *GLAM),
    "000 Table 1, Symphony over XMoE": ("xmoe+symphony", *SWITCH),
    "000 Table 9, Symphony over SoftMoE": ("softmoe+symphony", *VIT),
    "000 Table 16, Symphony over similarity": ("symphony+similarity", *SWITCH),
    "000, Symphony over Sinkhorn": ("symphony+sinkhorn", *SWITCH),
    "001 Table 1, similarity over GLaM": ("similarity", *GLAM),
    "001 Table 1, attention over GLaM": ("attention", *GLAM),
    "001 Table 3, similarity over XMoE": ("xmoe+similarity", *SWITCH),
    "001 Table 3, attention over XMoE": ("xmoe+attention", *SWITCH),
    "001 Table 3, similarity over SMoE-dropout": ("smoe-dropout+similarity", *SWITCH),
    "001 Table 3, attention over SMoE-dropout": ("smoe-dropout+attention", *SWITCH),
    "001 Table 2, both in one V-MoE": ("similarity@even|attention@odd", *VIT),
    "002 Table 3, AC over XMoE": ("xmoe+ac", *SWITCH),
    "002 Table 17, AC over SoftMoE": ("softmoe+ac[mix=8]", *VIT),
    "002 Table 20, AC over top-p": ("ac+top-p", *SWITCH),
    "002 Table 20, AC over learned top-p": ("ac+top-p[learned=true]", *SWITCH),
    "003, smooth over XMoE": ("xmoe+smooth", *SWITCH),
}
EXPERTS = 8


def routers_of(model: Any) -> list[Router]:
    return [layer.router for layer in moe_layers(model) if layer.router is not None]


def state_of(model: Any) -> list[torch.Tensor]:
    """Return what the routers have learned without gradients."""
    return [value.clone() for router in routers_of(model) for _, value in sorted(router.snapshot().items())]


@pytest.mark.slow
@pytest.mark.parametrize(("router", "family", "layers"), COMBINATIONS.values(), ids=COMBINATIONS)
def test_a_combination_of_the_papers_trains_and_is_saved(router: str, family: str, layers: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    depth = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    model = tiny_dense(family, **depth)
    holdfast.sparsify(
        model, experts=EXPERTS, router=router, layers=layers, init="random", losses=holdfast.Losses(balance=0.01)
    )
    assert len(routers_of(model)) == (2 if layers == "alternate" else 4)
    before = state_of(model)
    model.train()
    for seed in (1, 2):  # a batch's statistics are committed at the start of the next training forward
        model.zero_grad()
        loss = model(**inputs(family, seed)).loss
        assert loss.isfinite()
        loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(grad is None or grad.isfinite().all() for grad in grads.values())
    experts = [grad for name, grad in grads.items() if ".experts." in name]
    assert experts and all(grad is not None and grad.count_nonzero() for grad in experts)
    model.eval()
    after = state_of(model)
    learns = any(name in router for name in ("symphony", "attention", "ac", "smooth"))
    assert learns == any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    with torch.no_grad():
        expected = outputs(model, inputs(family))
    holdfast.save(model, tmp_path / "saved")
    loaded = holdfast.load(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(outputs(loaded, inputs(family)), expected)
    assert all(torch.equal(old, new) for old, new in zip(after, state_of(loaded), strict=True))

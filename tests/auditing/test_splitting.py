"""The change of a layer's output is the flip part plus the rest, as vectors, for every family and router."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from auditing.audited_models import batches, sparse
from tiny import EXTRA, tiny
from torch import Tensor

import holdfast
from holdfast.auditing.forwards import Observation, held_weights, observe, split_change
from holdfast.auditing.model_and_data import AuditBatch, AuditedModel, from_batches
from holdfast.auditing.perturbations import Noise
from holdfast.routing import Scores, Selection

REROUTED = ["smoe", "symphony", "smooth", "top-p", "remoe", "similarity", "xmoe+symphony", "ac"]


def pair(model: Any, level: float = 0.2, inputs: Any = None) -> tuple[AuditedModel, Observation, Observation, AuditBatch]:
    audited = AuditedModel(model)
    sample = next(from_batches(inputs or batches(1), audited))
    noise = Noise(level, seed=0)
    with torch.no_grad():
        return (
            audited,
            observe(audited, sample),
            observe(audited, sample, perturb_input=lambda *it: noise._perturbed_input(0, *it)),
            sample,
        )


def forced(audited: AuditedModel, layer: int, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the layer's output for `tokens (B,N,d)` when its router is forced to `experts` and `weights`."""
    site = audited.moe_layers[layer]
    if site.family is None:
        router = audited.routes[layer]
        handle = router.register_forward_hook(lambda module, given, out: replace(out, experts=experts, weights=weights))
    else:
        order = site.family.usual_order
        said = (weights, experts)
        handle = site.gate.register_forward_hook(
            lambda module, given, out: (out[0], *said) if order else (*said[::-1], out[2])
        )
    try:
        out = site.block(tokens)
    finally:
        handle.remove()
    out = out[0] if isinstance(out, tuple) else out
    return out.reshape(-1, out.shape[-1]).double()


def check(model: Any) -> int:
    audited, before, after, sample = pair(model)
    flipped = 0
    for layer, site in enumerate(audited.moe_layers):
        one, two = before.layers[layer], after.layers[layer]
        rows = before.real(layer)
        with torch.no_grad():
            change = split_change(site, one, two, (rows, rows))
            flips = (one.routing.chosen != two.routing.chosen).any(1)
            weights = held_weights(site, one.routing.experts, two.routing)
            shape = (sample.size, -1, two.tokens.shape[-1])
            there = forced(audited, layer, two.tokens.view(shape), two.routing.experts, two.routing.weights.to(two.weights))
            stayed = forced(audited, layer, two.tokens.view(shape), one.routing.experts, weights.to(two.weights))
        stayed = torch.where(flips.unsqueeze(1), stayed, there)[rows]
        assert torch.equal(change.total, two.output[rows].double() - one.output[rows].double())
        assert torch.allclose(
            change.flip + change.rest, change.total, rtol=0, atol=1e-15 * float(two.output.abs().max()) * 8
        )
        scale = float(two.output.abs().max())
        assert torch.allclose(change.rest, stayed - one.output[rows].double(), rtol=0, atol=2e-6 * scale)
        assert torch.allclose(change.flip, two.output[rows].double() - stayed, rtol=0, atol=2e-6 * scale)
        assert not change.flip[~flips[rows]].any()
        flipped += int((change.flip.norm(dim=1) > 1e-3 * scale).sum())
    return flipped


KINDS = [("native", family) for family in sorted(EXTRA)]
KINDS += [("rerouted", router) for router in REROUTED] + [("sparsified", "smoe"), ("sparsified", "smooth")]


def built(kind: str, name: str) -> Any:
    """Return a family, a family with another router, or a dense model with experts."""
    if kind == "rerouted":
        return holdfast.reroute(tiny("olmoe" if name == "top-p" else "deepseek_v3"), name)
    return tiny(name) if kind == "native" else sparse(name)


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_flips_and_the_rest_add_up_to_the_change_of_the_layer(kind: str, name: str) -> None:
    assert check(built(kind, name)) > (5 if kind == "native" else 0)


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_the_weights_of_an_unchanged_set_are_the_routers_own(kind: str, name: str) -> None:
    audited, before, _, _ = pair(built(kind, name))
    for site, layer in zip(audited.moe_layers, before.layers, strict=True):
        assert torch.equal(held_weights(site, layer.routing.experts, layer.routing), layer.routing.weights)


@pytest.mark.parametrize("model_type", sorted(EXTRA))
def test_the_rule_of_every_family_gives_the_weights_of_its_gate(model_type: str) -> None:
    """Computed from the scores alone: the selection passed to it is empty."""
    audited, before, _, _ = pair(tiny(model_type))
    for site, layer in zip(audited.moe_layers, before.layers, strict=True):
        assert site.family is not None
        scale = 1.0 if site.family.scale is None else float(getattr(site.gate, site.family.scale))
        live, scores = Selection.from_routing(layer.routing, scale), Scores.from_routing(layer.routing, informed=False)
        empty = live._replace(experts=torch.full_like(live.experts, scores.gates.shape[-1]))
        held = site.family.rule(site.gate).held_weights(live.experts, scores, empty)
        assert torch.allclose(held, live.weights, atol=1e-6)


def test_the_held_weights_of_mixtral_are_a_softmax_over_the_held_set() -> None:
    audited, before, after, _ = pair(tiny("mixtral"))
    for site, one, two in zip(audited.moe_layers, before.layers, after.layers, strict=True):
        expected = two.routing.logits.gather(1, one.routing.experts).softmax(-1)
        assert torch.allclose(held_weights(site, one.routing.experts, two.routing), expected, atol=1e-6)


def test_the_flip_part_of_a_smooth_router_vanishes_with_the_noise_and_that_of_top_k_does_not() -> None:
    """Per token that flips: a jump does not shrink, a fade does."""

    def size(router: str, level: float) -> float:
        options: dict[str, Any] = {"eps": 1.0} if router == "smooth" else {}
        model = holdfast.reroute(tiny("mixtral"), router, **options)
        many = torch.randint(3, 64, (32, 40), generator=torch.Generator().manual_seed(5))
        audited, before, after, _ = pair(model, level, [{"input_ids": many}])
        found = []
        for layer, site in enumerate(audited.moe_layers):
            one, two = before.layers[layer], after.layers[layer]
            with torch.no_grad():
                flip = split_change(site, one, two, (before.real(layer),) * 2).flip.norm(dim=1)
            found += [value / float(one.output.norm(dim=1).mean()) for value in flip.tolist() if value > 0]
        return max(found)

    assert size("smoe", 0.0003) > 0.3 and size("smoe", 0.01) > 0.3
    assert size("smooth", 0.0003) < 0.1 * size("smooth", 0.01) and size("smooth", 0.01) < 0.2

"""What computes the output of an MoE layer of a Hugging Face model, as `holdfast.certificates.certify_output` reads it."""

from typing import Any

from torch import nn

from holdfast.certificates import Gate, LayerParts, Networks, NoCertificate
from holdfast.hub.families.dense import without_dropout
from holdfast.hub.layers import MoELayerRef
from holdfast.hub.replacements import SparseLayer, has_default_gate, has_foreign_forward, has_known_layout
from holdfast.kernels.quantised import as_float
from holdfast.layers.experts import UNKNOWN_FORMAT, slope_of
from holdfast.layers.moe import network_of
from holdfast.routing import Router

SHARED, SHARED_GATE = ("shared_expert", "shared_experts"), "shared_expert_gate"


def output_parts(site: MoELayerRef, router: Router | Gate) -> LayerParts:
    """Return the parts of a layer with this router; raise NoCertificate, with the reason, if a part has no known bound."""
    block: Any = site.block
    if isinstance(block, SparseLayer):
        experts = block.experts.networks(without_dropout(block.experts.activation))
        shared = None if block.shared is None else network_of(block.shared)
    else:
        experts, shared = family_networks(site.experts), _shared_network(site)
    if any(weight.is_meta for weight in (experts.up, experts.down)):
        raise NoCertificate(f"no bound of the output is known for {site.name}: the weights of its experts are not in memory")
    if isinstance(router, Router):
        scale = router.scale
    else:
        assert site.family is not None
        scale = site.family.scale_of(block)
    return LayerParts(router, experts, shared, scale)


def family_networks(module: Any) -> Networks:
    """Return a family's experts with fused weights; raise NoCertificate if they compute something else."""
    plain = has_known_layout(module) and not has_foreign_forward(module) and getattr(module, "shards", None) is None
    if plain and module.has_gate:
        plain = has_default_gate(module) and getattr(module, "is_concatenated", True)
    if not plain or getattr(module, "has_post_expert_norm", False):
        raise NoCertificate(f"no bound of the output is known for the experts of a {type(module).__name__}")
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = (as_float(module, each, UNKNOWN_FORMAT) for each in (name, "down_proj"))
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    biases = (getattr(module, f"{name}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    return Networks(up, down, module.act_fn, slope_of(module.act_fn), bool(module.has_gate), *biases)


def _shared_network(site: MoELayerRef) -> Networks | None:
    """Return the shared expert of a family's block, the only module that may be beside its gate and its experts."""
    assert site.family is not None
    known = {site.family.gate.split(".")[0], site.family.experts.split(".")[0]}
    others = {name: module for name, module in site.block.named_children() if name not in known}
    shared = [others.pop(name) for name in SHARED if name in others]
    gate: Any = others.pop(SHARED_GATE, None)
    if others or len(shared) > 1 or (gate is not None and (type(gate) is not nn.Linear or gate.bias is not None)):
        names = ", ".join(others) or SHARED_GATE
        raise NoCertificate(f"no bound of the output is known for a {type(site.block).__name__} with {names}")
    return None if not shared else network_of(shared[0], None if gate is None else gate.weight[0])

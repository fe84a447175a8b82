"""Recognise an MoE family by its modules, so that a family that follows the common contract of transformers needs no row.

The contract: a block has experts with fused weights `gate_up_proj` or `up_proj`, and `down_proj`, each (E,.,.), and one
gate with a weight (E,d) that returns logits, weights (T,k) and expert indices (T,k). The layer around the block has one
attention, or one recurrent module in its place. The gate's rule is found among the declared rules (`GateRule`) and checked
on the gate alone (gate_check.py). What differs from this is refused with the reason.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.hub.adapters import active_module, original_class
from holdfast.hub.families.gate_check import (
    OURS,
    GateDiffers,
    GateForm,
    check_form,
    check_rule,
    copy_with_random_weights,
    plain_float32,
)
from holdfast.hub.families.rows import MoEFamily
from holdfast.hub.families.rules import GROUPS, GateRule
from holdfast.layers import Experts

UP, DOWN = ("gate_up_proj", "up_proj"), "down_proj"  # of fused experts
CORRECTIONS = ("e_score_correction_bias", "expert_bias")  # names of a bias that ranks experts and does not weight them
SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")  # names of what weights are multiplied by
RENORMALISES = "norm_topk_prob"  # the attribute of gates that says whether weights are divided by their sum
PROJECTIONS = ("o_proj", "out_proj", "dense", "wo", "c_proj")  # names of an attention's output projection


def _declared_rules(gate: Any, bias: str | None) -> Iterator[GateRule]:
    """Yield the rules that a gate with these attributes may have; the check decides."""
    configured = getattr(gate, RENORMALISES, None)
    groups = getattr(gate, GROUPS, None)
    grouped = isinstance(groups, int) and groups > 1
    kinds: tuple[Literal["softmax", "sigmoid"], ...] = ("softmax", "sigmoid")
    for gates in kinds:
        for renormalise in (True, False) if configured is None else (bool(configured), not configured):
            yield GateRule(gates, renormalise, bias)
            if grouped:
                yield GateRule(gates, renormalise, bias, True)
                yield GateRule(gates, renormalise, bias, True, counted=1)


# What was found for a gate of a class with the same settings: a rule with the gate's form, or the reason of a refusal.
_known_gates: dict[Any, tuple[GateRule, GateForm, str | None] | str] = {}
_checked_rows: dict[Any, str | None] = {}  # how a gate of a class with the same settings differs from a declared row


def recognise_gate(gate: nn.Module, experts: int, extra: str | None) -> tuple[GateRule, GateForm, str | None]:
    """Return the rule of a gate, its form and the name of its scale. Raise GateDiffers with the reason if there is none.

    experts     how many experts the block has
    extra       the name of the bias that the block passes as a second argument
    """
    key = (*_settings(gate), experts, extra)
    if key not in _known_gates:
        try:
            with plain_float32():
                _known_gates[key] = _find_rule(gate, experts, extra)
        except GateDiffers as reason:
            _known_gates[key] = str(reason)
    found = _known_gates[key]
    if isinstance(found, str):
        raise GateDiffers(found)
    return found


def check_declared(family: MoEFamily, name: str, block: nn.Module) -> None:
    """Raise ValueError if the gate of a block does not route as the family's row says. The rule is measured, as always."""
    gate = family.gate_of(block)
    key = (*_settings(gate), family)
    if key not in _checked_rows:
        with plain_float32():
            _checked_rows[key] = _difference(family, gate)
    if _checked_rows[key] is not None:
        raise ValueError(f"{name}.{family.gate}: the row of {family.model_type} is wrong: {_checked_rows[key]}.")


def _difference(family: MoEFamily, gate: nn.Module) -> str | None:
    scale = 1.0 if family.scale is None else float(getattr(gate, family.scale))
    form = GateForm(family.weight, family.bias, scale, None, family.usual_order)
    generator = torch.Generator("cpu").manual_seed(0)
    try:
        made = copy_with_random_weights(gate, generator)
        arguments: tuple[Any, ...] = (made,)
        if family.block_bias is not None:
            count = made.get_parameter(family.weight).shape[0]
            form = replace(form, extra=0.3 * torch.randn(count, generator=generator))
            arguments = (made, SimpleNamespace(**{family.block_bias: form.extra}))
        check_form(made, form, sampled_in_training=family.samples_in_training)
        check_rule(made, family.rule(*arguments), form, sampled_in_training=family.samples_in_training)
    except GateDiffers as reason:
        return str(reason)
    return None


def _settings(gate: nn.Module) -> tuple[Any, ...]:
    """Return what the result of a check depends on: the class, plain attributes, shapes of weights."""
    plain = {name: value for name, value in vars(gate).items() if isinstance(value, str | int | float | None)}
    shapes = [(name, tuple(tensor.shape)) for name, tensor in _tensors(gate).items()]
    kept = [(name, value) for name, value in plain.items() if name not in OURS and name != "training"]
    return original_class(type(gate)), tuple(sorted(kept, key=str)), tuple(sorted(shapes))


def _tensors(gate: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return the parameters and buffers of a gate by name, without those of a router that Holdfast put into it."""
    found = {f"{prefix}{name}": tensor for name, tensor in (*gate._parameters.items(), *gate._buffers.items())}
    for name, child in gate._modules.items():
        if child is not None and name not in OURS:
            found |= _tensors(child, f"{prefix}{name}.")
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _find_rule(gate: nn.Module, experts: int, extra: str | None) -> tuple[GateRule, GateForm, str | None]:
    form, bias = _form_of(gate, experts)
    if extra is not None and bias is not None:
        raise GateDiffers(f"its gate has a bias {bias} and gets another one, {extra}")
    generator = torch.Generator("cpu").manual_seed(0)
    made, block = copy_with_random_weights(gate, generator), None
    if extra is not None:
        form = replace(form, extra=0.3 * torch.randn(experts, generator=generator))
        block = SimpleNamespace(**{extra: form.extra})
    check_form(made, form)
    scales = [name for name in SCALES if isinstance(getattr(gate, name, None), int | float)]
    for rule in _declared_rules(gate, bias or extra):
        for scale in (*scales, None):
            scaled = form if scale is None else replace(form, scale=float(getattr(gate, scale)))
            try:
                check_rule(made, rule(made, block), scaled)
                if rule.renormalise and made.top_k == 1 < experts:  # its one weight is always 1: two weights show more
                    made_two = copy.copy(made)
                    made_two.top_k = 2
                    check_rule(made_two, rule(made, block), scaled)
            except GateDiffers:
                continue
            return rule, replace(scaled, extra=None), scale
    raise GateDiffers("its gate ranks or weights experts by a rule that Holdfast does not know")


def _form_of(gate: nn.Module, experts: int) -> tuple[GateForm, str | None]:
    """Return where the gate's weights are, and the name of its correction bias. Raise GateDiffers for other tensors."""
    tensors = _tensors(gate)
    weight = _weight_of(tensors)
    if weight is None:
        matrices = [name for name, tensor in tensors.items() if tensor.dim() > 1]
        raise GateDiffers(f"its gate has other weights than one (experts, width): {', '.join(matrices)}")
    if tensors[weight].shape[0] != experts:
        raise GateDiffers(f"its gate has {tensors[weight].shape[0]} outputs, and there are {experts} experts")
    bias = f"{weight.removesuffix('weight')}bias"
    correction = next((name for name in CORRECTIONS if name in tensors), None)
    unknown = [name for name in tensors if name not in (weight, bias, correction)]
    if unknown:
        raise GateDiffers(f"its gate has {unknown[0]}, which no declared rule uses")
    return GateForm(weight, bias if bias in tensors else None), correction


def _weight_of(tensors: Mapping[str, Tensor]) -> str | None:
    matrices = [name for name, tensor in tensors.items() if tensor.dim() == 2]
    return matrices[0] if len(matrices) == 1 and matrices[0].rpartition(".")[2] == "weight" else None


@dataclass(frozen=True)
class Site:
    """An MoE layer that follows the contract: the paths that a row has."""

    block: str
    gate: str
    experts: str
    block_bias: str | None
    attention: str | None
    recurrent: str | None


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of a family's experts with fused weights; a module with several names is yielded for each."""
    for name, module in model.named_modules(remove_duplicate=False):
        own = module._parameters
        down = own.get(DOWN)
        if isinstance(module, Experts):  # in a layer of Holdfast
            continue
        if down is not None and down.dim() == 3 and any(own.get(up) is not None for up in UP):
            yield name, module


def recognise(model: nn.Module) -> MoEFamily | None:
    """Return a row for a model whose MoE layers follow the contract; None for a model without fused experts.

    Raise ValueError with the name of the first layer that differs, and how.
    """
    model_type = str(getattr(getattr(model, "config", None), "model_type", None))
    found: dict[Any, str] = {}
    for name, experts in fused_experts(model):
        try:
            site, block = _site(model, name, experts)
            gate = active_module(block.get_submodule(site.gate))
            parts = recognise_gate(gate, int(experts.get_parameter(DOWN).shape[0]), site.block_bias)
        except GateDiffers as reason:
            raise ValueError(
                f"{name.rpartition('.')[0]}: this {model_type} model does not follow the contract of MoE layers that "
                f"Holdfast recognises: {reason}. Declare the family with holdfast.register_family."
            ) from None
        found.setdefault((site, parts), name)
    return _as_row(model_type, found) if found else None


def _as_row(model_type: str, found: Mapping[Any, str]) -> MoEFamily:
    """Return the row of all layers. They may differ only in whether they have attention or a recurrent module."""
    sites = [site for site, _ in found]
    common = {(replace(site, attention=None, recurrent=None), parts) for site, parts in found}
    attentions = {site.attention for site in sites} - {None}
    recurrents = {site.recurrent for site in sites} - {None}
    if len(common) > 1 or len(attentions) > 1 or len(recurrents) > 1:
        names = list(found.values())
        raise ValueError(
            f"the MoE layers {names[0]} and {names[1]} of this {model_type} model are of different kinds, and Holdfast "
            "recognises models with one kind."
        )
    (site, (rule, form, scale)) = next(iter(common))
    attention = next(iter(attentions), "self_attn.o_proj")
    recurrent = next(iter(recurrents), None)
    return MoEFamily(
        model_type,
        gate=site.gate,
        rule=rule,
        block=site.block,
        experts=site.experts,
        weight=form.weight,
        bias=form.bias,
        scale=scale,
        block_bias=site.block_bias,
        attention=str(attention).rpartition(".")[0],
        projection=str(attention),
        recurrent=recurrent,
    )


def _site(model: nn.Module, experts_name: str, experts: nn.Module) -> tuple[Site, nn.Module]:
    """Return the paths around experts, and the block. Raise GateDiffers if something differs from the contract."""
    block_name, _, experts_path = experts_name.rpartition(".")
    layer_name, _, block_path = block_name.rpartition(".")
    block, layer = model.get_submodule(block_name), model.get_submodule(layer_name)
    count = experts.get_parameter(DOWN).shape[0]
    gates = [name for name, child in block.named_children() if child is not experts and _may_be_gate(child, count)]
    if len(gates) != 1:
        raise GateDiffers(f"{len(gates) or 'no'} modules beside the experts have top_k and a weight for each expert")
    gate = active_module(block.get_submodule(gates[0]))
    extra = _second_argument(gate, block, count)
    attention, recurrent = _mixer(layer, block)
    return Site(block_path, gates[0], experts_path, extra, attention, recurrent), block


def _may_be_gate(module: nn.Module, count: int) -> bool:
    """Whether a module is not a plain linear map, and has a weight with a row for each expert."""
    module = active_module(module)
    if original_class(type(module)) in (nn.Linear, nn.Embedding):
        return False
    return any(tensor.dim() == 2 and tensor.shape[0] >= count for tensor in _tensors(module).values()) and hasattr(
        module, "top_k"
    )


def _second_argument(gate: nn.Module, block: nn.Module, count: int) -> str | None:
    """Return the name of the gate's second argument, if it is a bias that the block has under this name."""
    _, _, *others = inspect.signature(original_class(type(gate)).forward).parameters.values()
    for parameter in others:
        given = getattr(block, parameter.name, None)
        if len(others) > 1 or not isinstance(given, Tensor) or given.shape != (count,):
            raise GateDiffers(f"its gate also takes {parameter.name!r}")
    return others[0].name if others else None


def _mixer(layer: nn.Module, block: nn.Module) -> tuple[str | None, str | None]:
    """Return the path of the output projection of a layer's attention, or that of the recurrent module in its place."""
    children = [(name, child) for name, child in layer.named_children() if child is not block]
    attentions = [(name, child) for name, child in children if hasattr(child, "is_causal") and hasattr(child, "config")]
    if len(attentions) == 1:
        name, attention = attentions[0]
        projection = next((path for path in PROJECTIONS if path in attention._modules), None)
        if projection is None:
            raise GateDiffers(f"{name} has no output projection under a known name")
        return f"{name}.{projection}", None
    recurrent = [name for name, child in children if hasattr(child, "layer_idx")]
    if attentions or len(recurrent) > 1:
        raise GateDiffers(f"the layer around it has {len(attentions) or len(recurrent)} attention or recurrent modules")
    if not recurrent:
        raise GateDiffers("the layer around it has no attention or recurrent module, which would tell padding from tokens")
    return None, recurrent[0]

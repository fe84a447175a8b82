"""Recognise an MoE family by its modules, so that a family that follows the common contract of transformers needs no row.

The contract: a block has experts with fused weights `gate_up_proj` or `up_proj`, and `down_proj`, each (E,.,.), and one
gate with a weight (E,d) that returns logits, weights (T,k) and expert indices (T,k). The layer around the block has one
attention, or one recurrent module in its place. The gate's rule is found among the declared rules (`GateRule`) and checked
on the gate alone. What differs from this is refused with the reason.

**The check is a measurement** (`check_form`, `check_rule`). "The native router gives the same outputs" shows only that the
old gate is called. Whether a router that replaces it may keep its rule for weights is shown here: a copy of the gate with
random weights gets 64 random tokens, one token, equal logits and bfloat16, in training and in evaluation, and its logits,
experts, weights and gradients must be those of the rule. The copy is on the CPU, so a gate on `meta` is checked too.
"""

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.hub.adapters import active_module, original_class
from holdfast.hub.families.moe import GROUPS, RENORMALISES, GateRule, MoEFamily
from holdfast.hub.specs import default_float32
from holdfast.kernels.select import top
from holdfast.layers import Experts
from holdfast.routing.rules import Scores

UP, DOWN = ("gate_up_proj", "up_proj"), "down_proj"  # of fused experts
CORRECTIONS = ("e_score_correction_bias", "expert_bias")  # names of a bias that ranks experts and does not weight them
SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")  # names of what weights are multiplied by
PROJECTIONS = ("o_proj", "out_proj", "dense", "wo", "c_proj")  # names of an attention's output projection
TOKENS = 64  # with which a gate is checked
MOST_WEIGHTS = 2**26  # eight times those of a gate for 1024 experts of width 8192
CLEAR = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # a gap between experts that rounding cannot close
# The largest error in units of the dtype's rounding, relative to the largest value: a sum of d products is rounded often.
ROUNDINGS = 64
LEAST = 1e-3  # errors of smaller values are relative to this one
OURS = ("holdfast", "rule", "losses", "context_capture", "usual_order", "was_trained")  # put on a gate by Holdfast
FOREIGN = ("forward", "_old_forward", "_hf_hook")  # put on a module by accelerate and others
HOOKS = ("_hooks", "_pre_hooks")  # how the names of a module's tables of hooks end


class GateDiffers(ValueError):
    """A gate is not what its declaration says."""


class RandomBlock(nn.Module):
    """A random copy of a gate, and of the bias that the gate gets from its block, in the place of the block.

    Raise GateDiffers if the gate does not have the form that its row says.
    """

    gate: Any

    def __init__(self, row: MoEFamily, gate: nn.Module) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(0)
        self.gate = copy_with_random_weights(gate, generator)
        if row.block_bias is not None:
            count = self.gate.get_parameter(row.weight).shape[0]
            setattr(self, row.block_bias, 0.3 * torch.randn(count, generator=generator))
        check_form(row, self)

    def get_submodule(self, target: str) -> Any:
        """Return the gate, for `MoEFamily.gate_of`."""
        return self.gate

    def given(self, row: MoEFamily) -> tuple[Tensor, ...]:
        """Return what the gate gets beside tokens."""
        return () if row.block_bias is None else (getattr(self, row.block_bias),)


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


# What was measured for a gate of a class with the same settings; or how it differs.
_measured: dict[Any, Any] = {}


def _measure_once(key: Any, measure: Callable[[], Any]) -> Any:
    """Return the result of `measure`, called once for each key. Raise GateDiffers if it has raised that."""
    if key not in _measured:
        with plain_float32():
            try:
                _measured[key] = measure()
            except GateDiffers as reason:
                _measured[key] = GateDiffers(str(reason))  # a new one: `reason` keeps the gate alive by its traceback
    if isinstance(_measured[key], GateDiffers):
        raise GateDiffers(str(_measured[key]))
    return _measured[key]


def check_declared(family: MoEFamily, name: str, block: nn.Module) -> None:
    """Raise ValueError if the gate of a block does not route as the family's row says. The rule is measured, as always."""
    gate = family.gate_of(block)

    try:
        _measure_once((*_settings(gate), family), lambda: check_rule(family, RandomBlock(family, gate)))
    except GateDiffers as reason:
        raise ValueError(f"{name}.{family.gate}: the row of {family.model_type} is wrong: {reason}.") from None


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


def _find_rule(gate: nn.Module, experts: int, extra: str | None) -> dict[str, Any]:
    """Return the fields of a row for a gate whose second argument is `extra`: its weights, rule and scale."""
    weight, bias, correction = _weights_of(gate, experts)
    if extra is not None and correction is not None:
        raise GateDiffers(f"its gate has a bias {correction} and gets another one, {extra}")
    scales = [name for name in SCALES if isinstance(getattr(gate, name, None), int | float)]
    rules = list(_declared_rules(gate, correction or extra))
    fields: dict[str, Any] = {"weight": weight, "bias": bias, "block_bias": extra}
    block = RandomBlock(MoEFamily("", "gate", rules[0], **fields), gate)
    for rule, scale in product(rules, (*scales, None)):
        row = MoEFamily("", "gate", rule, scale=scale, **fields)
        try:
            check_rule(row, block)
            if rule.renormalise and block.gate.top_k == 1 < experts:  # its one weight is always 1: two weights show more
                with_two = copy.deepcopy(block)
                with_two.gate.top_k = 2
                check_rule(row, with_two)
        except GateDiffers:
            continue
        return {"rule": rule, "scale": scale, **fields}
    raise GateDiffers("its gate ranks or weights experts by a rule that Holdfast does not know")


def _weights_of(gate: nn.Module, experts: int) -> tuple[str, str | None, str | None]:
    """Return the names of the gate's weight, bias and correction bias. Raise GateDiffers for other tensors."""
    tensors = _tensors(gate)
    weight, *more = [name for name, tensor in tensors.items() if tensor.dim() > 1] or [""]
    if more or weight.rpartition(".")[2] != "weight" or tensors[weight].dim() != 2:
        raise GateDiffers(f"its gate has other weights than one (experts, width): {', '.join([weight, *more])}")
    if tensors[weight].shape[0] != experts:
        raise GateDiffers(f"its gate has {tensors[weight].shape[0]} outputs, and there are {experts} experts")
    bias = f"{weight.removesuffix('weight')}bias"
    correction = next((name for name in CORRECTIONS if name in tensors), None)
    unknown = [name for name in tensors if name not in (weight, bias, correction)]
    if unknown:
        raise GateDiffers(f"its gate has {unknown[0]}, which no declared rule uses")
    return weight, bias if bias in tensors else None, correction


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
    rows: dict[MoEFamily, str] = {}  # the row of each layer, with the name of its experts
    for name, experts in fused_experts(model):
        try:
            rows.setdefault(_row_of_layer(model_type, model, name, experts), name)
        except GateDiffers as reason:
            raise ValueError(
                f"{name.rpartition('.')[0]}: this {model_type} model does not follow the contract of MoE layers that "
                f"Holdfast recognises: {reason}. Declare the family with holdfast.register_family."
            ) from None
    if not rows:
        return None
    # Layers may differ only in whether they have attention or a recurrent module.
    alike = {replace(row, attention="", projection="", recurrent=None) for row in rows}
    projections = {row.projection for row in rows if row.recurrent is None}
    recurrent = {row.recurrent for row in rows} - {None}
    if max(len(alike), len(projections), len(recurrent)) > 1:
        names = list(rows.values())
        raise ValueError(f"{names[0]} and {names[1]} are MoE layers of different kinds; Holdfast recognises one kind.")
    projection = next(iter(projections), MoEFamily.projection)
    attention = projection.rpartition(".")[0]
    return replace(alike.pop(), attention=attention, projection=projection, recurrent=next(iter(recurrent), None))


def _row_of_layer(model_type: str, model: nn.Module, experts_name: str, experts: nn.Module) -> MoEFamily:
    """Return the row of the layer around `experts`. Raise GateDiffers if something differs from the contract."""
    block_name, _, experts_path = experts_name.rpartition(".")
    layer_name, _, block_path = block_name.rpartition(".")
    block, layer = model.get_submodule(block_name), model.get_submodule(layer_name)
    count = int(experts.get_parameter(DOWN).shape[0])
    gates = [name for name, child in block.named_children() if child is not experts and _may_be_gate(child, count)]
    if len(gates) != 1:
        raise GateDiffers(f"{len(gates) or 'no'} modules beside the experts have top_k and a weight for each expert")
    gate = active_module(block.get_submodule(gates[0]))
    extra = _second_argument(gate, block, count)
    mixer = _mixer(layer, block)
    measured = _measure_once((*_settings(gate), count, extra), lambda: _find_rule(gate, count, extra))
    return MoEFamily(model_type, gates[0], block=block_path, experts=experts_path, attention="", **measured, **mixer)


def _may_be_gate(module: nn.Module, count: int) -> bool:
    """Whether a module is not a plain linear map, and has a weight with a row for each expert."""
    module = active_module(module)
    is_plain = original_class(type(module)) in (nn.Linear, nn.Embedding)
    has_rows = any(tensor.dim() == 2 and tensor.shape[0] >= count for tensor in _tensors(module).values())
    return has_rows and not is_plain and hasattr(module, "top_k")


def _second_argument(gate: nn.Module, block: nn.Module, count: int) -> str | None:
    """Return the name of the gate's second argument, if it is a bias that the block has under this name."""
    _, _, *others = inspect.signature(original_class(type(gate)).forward).parameters.values()
    for parameter in others:
        given = getattr(block, parameter.name, None)
        if len(others) > 1 or not isinstance(given, Tensor) or given.shape != (count,):
            raise GateDiffers(f"its gate also takes {parameter.name!r}")
    return others[0].name if others else None


def _mixer(layer: nn.Module, block: nn.Module) -> dict[str, Any]:
    """Return the fields of a row for the output projection of a layer's attention, or the recurrent module in its place."""
    children = [(name, child) for name, child in layer.named_children() if child is not block]
    attentions = [(name, child) for name, child in children if hasattr(child, "is_causal") and hasattr(child, "config")]
    if len(attentions) == 1:
        name, attention = attentions[0]
        projection = next((path for path in PROJECTIONS if path in attention._modules), None)
        if projection is None:
            raise GateDiffers(f"{name} has no output projection under a known name")
        return {"projection": f"{name}.{projection}"}
    recurrent = [name for name, child in children if hasattr(child, "layer_idx")]
    if attentions or len(recurrent) > 1:
        raise GateDiffers(f"the layer around it has {len(attentions) or len(recurrent)} attention or recurrent modules")
    if not recurrent:
        raise GateDiffers("the layer around it has no attention or recurrent module, which would tell padding from tokens")
    return {"projection": "", "recurrent": recurrent[0]}


def copy_with_random_weights(module: nn.Module, generator: torch.Generator) -> Any:
    """Return a copy of a module on the CPU, without hooks, in float32, whose parameters and buffers are random numbers.

    Raise GateDiffers for a module of a size that no gate has: the sizes may come from an untrusted config.
    """
    size = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    if size > MOST_WEIGHTS:
        raise GateDiffers(f"its gate has {size:,} weights, more than a gate that can be checked ({MOST_WEIGHTS:,})")
    kind = original_class(type(module))
    copied = kind.__new__(kind)
    nn.Module.__init__(copied)
    left_out = (*OURS, *FOREIGN, "_parameters", "_buffers", "_modules")
    kept = {name: value for name, value in vars(module).items() if name not in left_out and not name.endswith(HOOKS)}
    copied.__dict__.update(kept)
    for name, child in module._modules.items():
        if name not in OURS:
            copied._modules[name] = None if child is None else copy_with_random_weights(child, generator)
    for name, parameter in module._parameters.items():
        copied._parameters[name] = None if parameter is None else nn.Parameter(_random(parameter, generator))
    for name, buffer in module._buffers.items():
        copied._buffers[name] = None if buffer is None else _random(buffer, generator)
    return copied


def _random(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers that give logits of about 2 and biases of about 0.3."""
    scale = 2 / math.sqrt(tensor.shape[-1]) if tensor.dim() > 1 else 0.3
    return scale * torch.randn(tensor.shape, generator=generator, device="cpu", dtype=torch.float32)


@contextlib.contextmanager
def plain_float32() -> Iterator[None]:
    """Inside the `with`, compute on the CPU, with gradients and without autocast, and leave random numbers as they were."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        default_float32(),
    ):
        yield


def check_form(row: MoEFamily, block: RandomBlock) -> None:
    """Raise GateDiffers if the random copy is random, or its logits are not a linear map of the token."""
    tokens = _tokens(row, block)
    for training in _modes(row):
        block.gate.train(training)
        torch.manual_seed(1)
        first = call_gate(row, block, tokens)
        torch.manual_seed(2)
        second = call_gate(row, block, tokens)
        if not all(torch.equal(one, other) for one, other in zip(first, second, strict=True)):
            raise GateDiffers(f"its gate returns random results in {'training' if training else 'evaluation'}")
        _require_close(first[0], _linear(row, block, tokens), "the logits of its gate are not a linear map of the token")


def check_rule(row: MoEFamily, block: RandomBlock) -> None:
    """Raise GateDiffers if the random copy does not route as the row says. Call it inside `plain_float32`."""
    tokens = _tokens(row, block)
    generator = torch.Generator("cpu").manual_seed(2)
    for training in _modes(row):
        block.gate.train(training)
        for batch in (tokens, tokens[:1]):
            _compare(row, block, call_gate(row, block, batch))
            _check_gradients(row, block, batch, generator)
    block.gate.eval()
    rounded, tokens_16 = copy.deepcopy(block), tokens.to(torch.bfloat16)
    rounded.gate.to(torch.bfloat16)
    if row.block_bias is not None:
        setattr(rounded, row.block_bias, rounded.given(row)[0].to(torch.bfloat16))
    output = call_gate(row, rounded, tokens_16)
    linear, what = _linear(row, rounded, tokens_16.float()), "the logits of its gate in bfloat16"
    _require_close(output[0], linear, f"{what} are not a linear map of the token", torch.bfloat16)
    _compare(row, block, output, torch.bfloat16)
    _check_equal_logits(row, block, tokens)


def _modes(row: MoEFamily) -> tuple[bool, ...]:
    """Return the values of `training` with which a gate is checked."""
    return (False,) if row.samples_in_training else (False, True)


def _tokens(row: MoEFamily, block: RandomBlock) -> Tensor:
    dim = block.gate.get_parameter(row.weight).shape[1]
    return torch.randn(TOKENS, dim, generator=torch.Generator("cpu").manual_seed(1))


def call_gate(row: MoEFamily, block: RandomBlock, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (T,E), weights (T,k) and experts (T,k) of a gate. Raise GateDiffers if it returns anything else."""
    tokens = tokens.clone()  # some gates change it
    try:
        output = block.gate(tokens, *block.given(row))
    except Exception:  # some gates take (B,N,d) only
        try:
            output = block.gate(tokens.unsqueeze(0), *block.given(row))
        except Exception as problem:
            reason = " ".join(str(problem).split())[:120] or type(problem).__name__
            raise GateDiffers(f"its gate fails when it is called alone ({reason})") from None
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(one, Tensor) for one in output):
        count = len(output) if isinstance(output, tuple) else 1
        raise GateDiffers(f"its gate returns {count} values, not logits, weights and indices")
    logits, weights, experts = (one.flatten(0, -2) for one in (output if row.usual_order else output[::-1]))
    if experts.is_floating_point() or not logits.is_floating_point() or weights.shape != experts.shape:
        raise GateDiffers("its gate does not return logits, weights and indices, in this order")
    return logits, weights, experts.long()


def _declared(row: MoEFamily, block: RandomBlock, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ranks (T,E), the experts (T,k) and the weights (T,k) of the row's rule for `logits (T,E)`."""
    rule, rows = row.rule_of(block), logits.unsqueeze(0)
    scores = Scores(rows, rule.gate(rows), informed=False, raw=rows)
    ranks = rule.ranks(scores)
    experts = top(ranks, k)
    weights = rule.weigh(scores, experts, torch.ones_like(experts, dtype=torch.bool), None, k)
    return ranks[0], experts[0], row.scale_of(block) * weights[0]


def _compare(
    row: MoEFamily, block: RandomBlock, output: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Compare experts and weights with those that the rule gives for the gate's own logits."""
    logits, weights, experts = output
    count, k = logits.shape[-1], experts.shape[-1]
    ranks, chosen, declared = _declared(row, block, logits.detach().float(), k)
    best = ranks.sort(-1, descending=True).values
    is_clear = torch.ones(len(best), dtype=torch.bool) if k == count else best[:, k - 1] - best[:, k] > CLEAR[dtype]
    same = (experts.sort(-1).values == chosen.sort(-1).values).all(-1)
    if not bool(same[is_clear].all()):
        raise GateDiffers("its gate selects other experts than the rule")
    found, expected = _dense(weights.detach().float(), experts, count), _dense(declared, chosen, count)
    _require_close(found[same], expected[same], "the weights of its gate follow another rule", dtype)


def _check_gradients(row: MoEFamily, block: RandomBlock, tokens: Tensor, generator: torch.Generator) -> None:
    """Compare the gradients of a random sum of weights, with respect to the tokens and the gate's weight."""
    weight = block.gate.get_parameter(row.weight)
    count = weight.shape[0]
    factors = torch.randn(len(tokens), count, generator=generator)

    def gradients(of_rule: bool) -> tuple[Tensor, ...]:
        given = tokens.clone().requires_grad_()
        if of_rule:
            _, chosen, weights = _declared(row, block, _linear(row, block, given), k)
        else:
            _, weights, chosen = call_gate(row, block, given)
        total = (_dense(weights.float(), chosen, count) * factors).sum()
        if not total.requires_grad:
            return torch.zeros_like(given), torch.zeros_like(weight)
        return torch.autograd.grad(total, (given, weight), allow_unused=True, materialize_grads=True)

    k = call_gate(row, block, tokens)[2].shape[-1]
    # A single weight that is divided by itself is 1, and its gradient 0 but for rounding.
    least = 1.0 if k == 1 else LEAST
    for name, one, other in zip(("tokens", "weight"), gradients(False), gradients(True), strict=True):
        _require_close(one, other, f"the gradient of the {name} in its gate is not that of the rule", least=least)


@torch.no_grad()
def _check_equal_logits(row: MoEFamily, block: RandomBlock, tokens: Tensor) -> None:
    """Compare the weights where all logits are 0. Which of several equal experts is selected is open, its weight is not."""
    zeroed = copy.deepcopy(block)
    for tensor in (*zeroed.gate.parameters(), *zeroed.gate.buffers(), *zeroed.given(row)):
        tensor.zero_()
    logits, weights, experts = call_gate(row, zeroed, tokens)
    _, _, declared = _declared(row, zeroed, logits.float(), experts.shape[-1])
    what = "the weights that its gate gives equal logits follow another rule"
    _require_close(weights.sort(-1).values, declared.sort(-1).values, what)


def _linear(row: MoEFamily, block: RandomBlock, tokens: Tensor) -> Tensor:
    logits = tokens @ block.gate.get_parameter(row.weight).float().t()
    return logits if row.bias is None else logits + block.gate.get_parameter(row.bias).float()


def _dense(weights: Tensor, experts: Tensor, count: int) -> Tensor:
    return weights.new_zeros(len(weights), count).scatter(-1, experts, weights)


def _require_close(
    found: Tensor, expected: Tensor, what: str, dtype: torch.dtype = torch.float32, *, least: float = LEAST
) -> None:
    if found.shape != expected.shape:
        raise GateDiffers(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    allowed = ROUNDINGS * torch.finfo(torch.float32).eps if dtype != torch.bfloat16 else 4 * torch.finfo(dtype).eps
    error = (found.detach().float() - expected.detach().float()).abs().max() if found.numel() else torch.zeros(())
    largest = expected.detach().float().abs().max().clamp_min(least) if found.numel() else torch.ones(())
    if not bool(error <= allowed * largest):
        raise GateDiffers(f"{what} (they differ by {float(error):.1g})")

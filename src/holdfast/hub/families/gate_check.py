"""Check a gate's declared rule by measurement, on the gate alone.

"The native router gives the same outputs" shows only that the old gate is called. Whether a router that replaces it may keep
its rule for weights is shown here: a copy of the gate with random weights gets 64 random tokens, one token, equal logits
and bfloat16, in training and in evaluation, and its logits, experts, weights and gradients must be those of the rule. The
copy is on the CPU, so a gate on `meta` is checked too.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.hub.adapters import original_class
from holdfast.kernels.select import top
from holdfast.routing.rules import Rule, Scores

TOKENS = 64
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


@dataclass(frozen=True)
class GateForm:
    """Where a gate's weights are and what it is called with."""

    weight: str
    bias: str | None = None
    scale: float = 1.0
    extra: Tensor | None = None  # its second argument
    usual_order: bool = True


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
    kept = {name: value for name, value in vars(module).items() if name not in (*OURS, *FOREIGN) and not _is_table(name)}
    copied.__dict__.update(kept)
    for name, child in module._modules.items():
        if name not in OURS:
            copied._modules[name] = None if child is None else copy_with_random_weights(child, generator)
    for name, parameter in module._parameters.items():
        copied._parameters[name] = None if parameter is None else nn.Parameter(_random(parameter, generator))
    for name, buffer in module._buffers.items():
        copied._buffers[name] = None if buffer is None else _random(buffer, generator)
    return copied


def _is_table(name: str) -> bool:
    return name in ("_parameters", "_buffers", "_modules") or name.endswith(HOOKS)


def _random(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers that give logits of about 2 and biases of about 0.3."""
    scale = 2 / math.sqrt(tensor.shape[-1]) if tensor.dim() > 1 else 0.3
    return scale * torch.randn(tensor.shape, generator=generator, device="cpu", dtype=torch.float32)


@contextlib.contextmanager
def plain_float32() -> Iterator[None]:
    """Inside the `with`, compute on the CPU, with gradients and without autocast, and leave random numbers as they were."""
    usual = torch.get_default_dtype()
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(usual)


def check_form(gate: Any, form: GateForm, *, sampled_in_training: bool = False) -> None:
    """Raise GateDiffers if the random copy `gate` is random, or its logits are not a linear map of the token."""
    tokens = _tokens(gate, form)
    for training in (False,) if sampled_in_training else (False, True):
        gate.train(training)
        torch.manual_seed(1)
        first = call_gate(gate, tokens.clone(), form)
        torch.manual_seed(2)
        second = call_gate(gate, tokens.clone(), form)
        if not all(torch.equal(one, other) for one, other in zip(first, second, strict=True)):
            raise GateDiffers(f"its gate returns random results in {'training' if training else 'evaluation'}")
        _require_close(first[0], _linear(gate, form, tokens), "the logits of its gate are not a linear map of the token")


def check_rule(gate: Any, rule: Rule, form: GateForm, *, sampled_in_training: bool = False) -> None:
    """Raise GateDiffers if the random copy `gate` does not route as `rule` says. Call it inside `plain_float32`.

    sampled_in_training     the family samples experts in training, so only evaluation is compared
    """
    tokens = _tokens(gate, form)
    generator = torch.Generator("cpu").manual_seed(2)
    for training in (False,) if sampled_in_training else (False, True):
        gate.train(training)
        for batch in (tokens, tokens[:1]):
            _compare(rule, form, *call_gate(gate, batch.clone(), form))
            _check_gradients(gate, rule, form, batch, generator)
    gate.eval()
    _check_in_bfloat16(gate, rule, form, tokens)
    _check_equal_logits(gate, rule, form, tokens)


def _tokens(gate: Any, form: GateForm) -> Tensor:
    dim = gate.get_parameter(form.weight).shape[1]
    return torch.randn(TOKENS, dim, generator=torch.Generator("cpu").manual_seed(1))


def call_gate(gate: Any, tokens: Tensor, form: GateForm) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (T,E), weights (T,k) and experts (T,k) of a gate. Raise GateDiffers if it returns anything else."""
    extra = () if form.extra is None else (form.extra,)
    try:
        output = gate(tokens, *extra)
    except Exception:  # some gates take (B,N,d) only
        try:
            output = gate(tokens.unsqueeze(0), *extra)
        except Exception as problem:
            raise GateDiffers(f"its gate fails when it is called alone ({_one_line(problem)})") from None
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(one, Tensor) for one in output):
        count = len(output) if isinstance(output, tuple) else 1
        raise GateDiffers(f"its gate returns {count} values, not logits, weights and indices")
    logits, weights, experts = (one.flatten(0, -2) for one in (output if form.usual_order else output[::-1]))
    if experts.is_floating_point() or not logits.is_floating_point() or weights.shape != experts.shape:
        raise GateDiffers("its gate does not return logits, weights and indices, in this order")
    return logits, weights, experts.long()


def _compare(
    rule: Rule,
    form: GateForm,
    logits: Tensor,
    weights: Tensor,
    experts: Tensor,
    *,
    ties: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare experts and weights with those that the rule gives for the gate's own `logits`."""
    k = experts.shape[-1]
    scores = _scores(rule, logits.detach().float())
    dense = _dense(weights.detach().float(), experts, logits.shape[-1])
    chosen, declared = _declared(rule, form, scores, k)
    if ties:  # which of several equal experts is selected is open, its weight is not
        _require_close(
            weights.sort(-1).values,
            declared.sort(-1).values,
            "the weights that its gate gives equal logits follow another rule",
        )
        return
    ranks = rule.ranks(scores)[0]
    best = ranks.sort(-1, descending=True).values
    is_clear = (
        (best[:, k - 1] - best[:, k]) > CLEAR[dtype] if k < ranks.shape[-1] else torch.ones(len(best), dtype=torch.bool)
    )
    same = (_members(experts, ranks) == _members(chosen, ranks)).all(-1)
    if not bool(same[is_clear].all()):
        raise GateDiffers("its gate selects other experts than the rule")
    expected = _dense(declared, chosen, ranks.shape[-1])
    _require_close(dense[same], expected[same], "the weights of its gate follow another rule", dtype)


def _check_gradients(gate: Any, rule: Rule, form: GateForm, tokens: Tensor, generator: torch.Generator) -> None:
    """Compare the gradients of a random sum of weights, with respect to the tokens and the gate's weight."""
    weight = gate.get_parameter(form.weight)
    count = weight.shape[0]
    factors = torch.randn(len(tokens), count, generator=generator)

    def gradients(of_rule: bool) -> tuple[Tensor, ...]:
        given = tokens.clone().requires_grad_()
        if of_rule:
            scores = _scores(rule, _linear(gate, form, given))
            chosen, weights = _declared(rule, form, scores, k)
        else:
            _, weights, chosen = call_gate(gate, given.clone(), form)
        total = (_dense(weights.float(), chosen, count) * factors).sum()
        if not total.requires_grad:
            return torch.zeros_like(given), torch.zeros_like(weight)
        return torch.autograd.grad(total, (given, weight), allow_unused=True, materialize_grads=True)

    k = call_gate(gate, tokens.clone(), form)[2].shape[-1]
    # A single weight that is divided by itself is 1, and its gradient 0 but for rounding.
    least = 1.0 if k == 1 else LEAST
    for name, one, other in zip(("tokens", "weight"), gradients(False), gradients(True), strict=True):
        _require_close(one, other, f"the gradient of the {name} in its gate is not that of the rule", least=least)


def _check_in_bfloat16(gate: Any, rule: Rule, form: GateForm, tokens: Tensor) -> None:
    rounded = copy.deepcopy(gate).to(torch.bfloat16)
    extra = None if form.extra is None else form.extra.to(torch.bfloat16)
    logits, weights, experts = call_gate(rounded, tokens.to(torch.bfloat16), replace(form, extra=extra))
    linear = _linear(rounded.float(), form, tokens.to(torch.bfloat16).float())
    _require_close(logits, linear, "the logits of its gate in bfloat16 are not a linear map of the token", torch.bfloat16)
    _compare(rule, form, logits, weights, experts, dtype=torch.bfloat16)


def _check_equal_logits(gate: Any, rule: Rule, form: GateForm, tokens: Tensor) -> None:
    """Compare the weights where all logits are 0. The gate's tensors get their values back: the rule may read them."""
    tensors = [*gate.parameters(), *gate.buffers(), *([] if form.extra is None else [form.extra])]
    with torch.no_grad():
        values = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        try:
            _compare(rule, form, *call_gate(gate, tokens, form), ties=True)
        finally:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)


def _linear(gate: Any, form: GateForm, tokens: Tensor) -> Tensor:
    logits = tokens @ gate.get_parameter(form.weight).float().t()
    return logits if form.bias is None else logits + gate.get_parameter(form.bias).float()


def _scores(rule: Rule, logits: Tensor) -> Scores:
    rows = logits.unsqueeze(0)
    return Scores(rows, rule.gate(rows), informed=False, raw=rows)


def _declared(rule: Rule, form: GateForm, scores: Scores, k: int) -> tuple[Tensor, Tensor]:
    """Return the experts (T,k) and weights (T,k) of the rule."""
    experts = top(rule.ranks(scores), k)
    weights = rule.weigh(scores, experts, torch.ones_like(experts, dtype=torch.bool), None, k)
    return experts[0], form.scale * weights[0]


def _dense(weights: Tensor, experts: Tensor, count: int) -> Tensor:
    return weights.new_zeros(len(weights), count).scatter(-1, experts, weights)


def _members(experts: Tensor, ranks: Tensor) -> Tensor:
    return torch.zeros_like(ranks, dtype=torch.bool).scatter(-1, experts, True)


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


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:120] or type(problem).__name__

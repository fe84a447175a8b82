"""Count the matrix products that really run: torch's counter, which is told what the operators of this library do.

The checks that what a router's parts declare is what can be measured. One function each, as in `checks`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from holdfast.certificates import NoBound, certify
from holdfast.kernels import fp32_linear, grouped, token_mixing  # noqa: F401  (they define the operators)
from holdfast.routing import Context, Part, Router, RouterCache, Routing
from holdfast.routing.declarations import Cost, Place
from holdfast.testing.subject import HEADS, STEEP, WIDTH, LeftOut, Subject, objective

Shape = torch.Size


def _matmul(left: Shape, right: Shape, **_: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


def _scaled(tokens: Shape, mixture: Shape, scales: Shape, weight: Shape, **_: Any) -> int:
    return 2 * prod(mixture) * scales[1] + 2 * prod(tokens) * weight[0]


def _scaled_backward(grad: Shape, tokens: Shape, mixture: Shape, scales: Shape, weight: Shape, **_: Any) -> int:
    return 2 * prod(mixture) * scales[1] + 4 * prod(tokens) * weight[0]


def _mix(query: Shape, key: Shape, value: Shape, second: Shape | None, *_: Any, **__: Any) -> int:
    return 2 * prod(query[:2]) * key[1] * (query[2] + _width(second) + value[2])


def _mix_backward(
    grad: Shape, out: Shape, total: Shape, query: Shape, key: Shape, value: Shape, second: Shape | None, *_: Any, **__: Any
) -> int:
    return 2 * prod(query[:2]) * key[1] * (3 * (query[2] + _width(second)) + 2 * value[2])


def _width(second: Shape | None) -> int:
    return 0 if second is None else second[2]


def _entropy(query: Shape, key: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(query) * key[2]


def _gather(tokens: Shape, weight: Shape, index: Shape, *_: Any, **__: Any) -> int:
    return 2 * index[0] * weight[1] * weight[2]


def _gather_backward(grad: Shape, tokens: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 4 * grad[0] * weight[1] * weight[2]


def _combine(hidden: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * hidden[0] * weight[1] * weight[2]


def _combine_backward(grad: Shape, hidden: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 4 * hidden[0] * weight[1] * weight[2]


def _ours() -> dict[Any, Callable[..., int]]:
    ops = torch.ops.holdfast
    return {
        ops.matmul_float32: _matmul,
        ops.scaled_matmul_float32: _scaled,
        ops.scaled_matmul_float32_backward: _scaled_backward,
        ops.softmax_mix: _mix,
        ops.softmax_mix_backward: _mix_backward,
        ops.attention_entropy: _entropy,
        ops.gather_mm: _gather,
        ops.gather_mm_backward: _gather_backward,
        ops.mm_combine: _combine,
        ops.mm_combine_backward: _combine_backward,
    }


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count the FLOPs of the matrix products inside the `with`, those of this library's operators too."""
    with FlopCounterMode(display=False, custom_mapping=_ours()) as counter:
        yield counter


LENGTH = 17
NUMBER = 4  # bytes: tokens here are float32
WITHIN = 0.999  # of a certified radius: what a float32 sum of token and perturbation may add
ATTACK_STEPS = 12
DIRECTIONS = 24
BISECTIONS = 22  # until two inputs are one rounding apart


def cost(subject: Subject) -> None:
    """The declared FLOPs and cached bytes of a token, and the bytes summed over ranks, equal what is counted."""
    parts = [inner for part in subject.prototype.parts for inner in (*part.wrapped, part)]
    place = _place(subject.prototype)
    undeclared = [type(part).__name__ for part in parts if part.cost(place) is None]
    if undeclared:
        raise LeftOut(f"cost not declared: {', '.join(undeclared)}")
    declared = [_declared_cost(part, place) for part in parts]
    forward = sum(part.forward for part in declared)
    learned = forward + sum(part.disturbing + part.learning for part in declared)
    _require_equal("forward", forward, _counted(subject, training=False)[0])
    in_training, backward = _counted(subject, training=True)
    _require_equal("forward in training", learned, in_training)
    _require_equal("backward", sum(part.backward for part in declared), backward)
    if subject.prototype.traits.cacheable:
        _require_equal("cached bytes", sum(part.cached for part in declared), _cached_bytes(subject))
    _require_equal("bytes summed over ranks in a forward", sum(part.summed for part in declared), _summed_bytes(subject))


def _declared_cost(part: Part, place: Place) -> Cost:
    declared = part.cost(place)
    assert declared is not None
    return declared


def _place(router: Router) -> Place:
    """The layer that `Subject.context` describes, not causal: every token is mixed with all tokens of its sequence."""
    return Place(router.dim, router.experts, LENGTH, float(LENGTH), HEADS, WIDTH, WIDTH, NUMBER)


def _require_equal(what: str, declared: float, counted: float) -> None:
    assert abs(declared - counted) <= 1e-9 * max(declared, counted), (
        f"the declared cost ({what}) is {declared:g}, and {counted:g} is counted"
    )


def _counted(subject: Subject, *, training: bool) -> tuple[float, float]:
    """FLOPs a token of a forward and of its backward. What a forward does once for all tokens is taken off."""
    few, many = (_flops(subject, sequences, training) for sequences in (2, 4))
    forward, backward = ((more - less) / (2 * LENGTH) for less, more in zip(few, many, strict=True))
    return forward, backward


def _flops(subject: Subject, sequences: int, training: bool) -> tuple[int, int]:
    router = subject.build().train(training)
    tokens = subject.tokens(sequences, LENGTH)
    context = _trained_context(subject.context(tokens))
    tokens.requires_grad_()
    with counting() as counter:
        routing = router(tokens, context)
    if not training:
        return counter.get_total_flops(), 0
    with counting() as backward:
        objective(routing).backward()
    return counter.get_total_flops(), backward.get_total_flops()


def _trained_context(context: Context) -> Context:
    """The context with an attention whose tensors ask for gradients, as in a model that trains."""
    attention = context.attention
    assert attention is not None and attention.projection is not None
    names = ("query", "key", "value", "output")
    leaves: dict[str, Any] = {name: getattr(attention, name).detach().requires_grad_() for name in names}
    attention.projection.weight.requires_grad_()
    return replace(context, attention=replace(attention, **leaves))


def _cached_bytes(subject: Subject) -> float:
    """Bytes a token that a forward leaves in the cache."""
    tokens, cache = subject.tokens(2, LENGTH), RouterCache()
    subject.build().eval()(tokens, replace(subject.context(tokens, causal=True), cache=cache))
    return cache.bytes / (2 * LENGTH)


def _summed_bytes(subject: Subject) -> int:
    """Bytes that a rank sends in a training forward, as if there were two."""
    router, tokens, sent = subject.build(), subject.tokens(2, LENGTH), list[int]()
    with (
        patch.object(torch.distributed, "is_initialized", lambda: True),
        patch.object(torch.distributed, "get_world_size", lambda: 2),
        patch.object(torch.distributed, "all_reduce", lambda value: sent.append(value.nbytes)),
    ):
        router(tokens, subject.context(tokens))
    return sum(sent)


def active_experts(subject: Subject) -> None:
    """No token uses more experts than there are declared slots; a number declared as certain is that of every token."""
    router, tokens = subject.build().eval(), subject.tokens()
    declared = router.select.active_experts(_place(router))
    if declared is None:
        raise LeftOut("it declares no number of active experts")
    used = router(tokens, subject.context(tokens)).used.sum(-1)
    most = int(used.max())
    assert most <= declared.slots, f"it declares {declared.slots} slots, and a token uses {most} experts"
    if not declared.about:
        assert bool((used == declared.inference).all()), f"{declared.inference:g} experts a token are declared, {most} used"


def held_weights(subject: Subject) -> None:
    """Held weights are the live ones, bit for bit, where the held set is the live set; they have gradients in the scores.

    With the set of a first input held, the change to a second is what flips cause plus the rest, and tokens that keep their
    set have no flip part.
    """
    router = subject.build().eval()
    router.scale = 2.5  # as of some pretrained models: held weights are to have it too
    before = subject.tokens()
    after = (before + 0.3 * subject.tokens(seed=1)).requires_grad_()
    first, second = (router(tokens, subject.context(tokens)) for tokens in (before, after))
    live = router.held_weights(second.experts, second)
    assert torch.equal(live, second.weights), "the weights of the live set, held, are not the live weights bit for bit"
    reordered = second.experts.flip(-1)
    assert torch.equal(router.held_weights(reordered, second), second.weights.flip(-1)), "held weights depend on the order"
    held = router.held_weights(first.experts, second)
    assert held.shape == first.experts.shape and held.isfinite().all(), "held weights must be finite, one for each slot"
    assert bool((held[~first.used] == 0).all()), "an unused slot has a held weight"
    _require_additive(first, second, held)
    _require_continuous(router, before, after.detach(), subject.context(before))
    plain = Routing(second.logits, second.gates, second.experts, second.weights / 2.5)
    router.scale = 1.0
    torch.testing.assert_close(2.5 * router.held_weights(first.experts, plain), held, msg="held weights miss the scale")
    wanted = [after, *(parameter for parameter in router.parameters() if parameter.requires_grad)]
    expected = _gradients(second.weights, wanted)
    for mine, theirs in zip(_gradients(live, wanted), expected, strict=True):
        assert torch.equal(mine, theirs), "gradients through held weights of the live set are not those of the live weights"
    moved = (first.chosen != second.chosen).any(-1) & (second.chosen & first.chosen).any(-1)
    if bool(moved.any()) and any(bool(grad.any()) for grad in expected):
        grads = _gradients(held[moved], wanted)
        assert any(bool(grad.any()) for grad in grads), "held weights have no gradient in the scores"


@torch.no_grad()
def _require_continuous(router: Router, before: Tensor, after: Tensor, context: Context) -> None:
    """Held weights have no jump where a set changes: just after, those of the old set are the weights just before."""
    start = router(before, context)
    low, high = start, router(after, context)
    if bool((low.chosen == high.chosen).all()):
        return
    near, far = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (near + far) / 2
        routing = router(before + middle * (after - before), context)
        if bool((routing.chosen == start.chosen).all()):
            near, low = middle, routing
        else:
            far, high = middle, routing
    changed = (low.chosen != high.chosen).any(-1)
    jump = (router.held_weights(low.experts, high) - low.weights).abs()[changed].amax() / router.scale
    assert jump <= STEEP, f"the weights of a held set jump by {jump:.2g} where the live set changes"


def _gradients(weights: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum of the weights, each counted differently: the plain sum may be the same whatever the scores are."""
    tilt = torch.linspace(0.5, 2.0, weights.numel()).view(weights.shape)
    if not weights.requires_grad:
        return tuple(torch.zeros_like(tensor) for tensor in wanted)
    return torch.autograd.grad((weights * tilt).sum(), wanted, retain_graph=True, allow_unused=True, materialize_grads=True)


def _require_additive(first: Routing, second: Routing, held: Tensor) -> None:
    """With experts that return unit vectors, a layer's output is its dense weights: total = flip + rest."""
    stayed = Routing(second.logits, second.gates, first.experts, held).dense_weights
    total = second.dense_weights - first.dense_weights
    flip, rest = second.dense_weights - stayed, stayed - first.dense_weights
    kept = (first.chosen == second.chosen).all(-1)
    assert bool((flip[kept] == 0).all()), "tokens that keep their set have a flip part"
    torch.testing.assert_close(flip + rest, total, msg="flips and the rest do not add up to the whole change")


def certificate(subject: Subject) -> str:
    """No token that moves by less than its certified radius changes its set, neither at random nor along gradients."""
    router, tokens = subject.build().eval(), subject.tokens()
    context = subject.context(tokens)
    try:
        found = certify(router, tokens, context)
    except NoBound as reason:
        raise LeftOut(str(reason)) from None
    radius = WITHIN * found.radius.float().clamp_max(1e3 * (1 + tokens.norm(dim=-1).max()))
    for reach, certified in _reaches(router, radius):
        attack = _Attack(router, tokens, context, reach, certified)
        for seed in range(DIRECTIONS):
            attack.move(torch.randn(tokens.shape, generator=torch.Generator().manual_seed(seed)), "at random")
        for other in range(router.experts):
            moved = tokens
            for _ in range(ATTACK_STEPS):
                ahead = reach.unsqueeze(-1) / 4 * _unit(_towards(router, moved, context, other))
                moved = attack.move(moved - tokens + ahead, f"towards expert {other}")
    sure = float((radius > 0).float().mean())
    return f"{found.kind}; {sure:.0%} of the tokens have a radius"


def _reaches(router: Router, radius: Tensor) -> list[tuple[Tensor, Tensor]]:
    """How far to move each token (B,N), and for which tokens (B,N) that is within the certificate.

    Where tokens inform each other, a radius holds with all tokens of the sequence moved that far: try some tokens' radii.
    """
    if not router.traits.sequence_aware:
        return [(radius, torch.ones_like(radius, dtype=torch.bool))]
    ordered = radius.sort(dim=1).values
    chosen = (ordered[:, place : place + 1].expand_as(radius) for place in (0, LENGTH // 2, LENGTH - 1))
    return [(reach, radius >= reach) for reach in chosen]


@final
class _Attack:
    """Tokens, how far each may be moved, and which of them must keep their experts."""

    def __init__(self, router: Router, tokens: Tensor, context: Context, reach: Tensor, certified: Tensor) -> None:
        self.router, self.tokens, self.context = router, tokens, context
        self.reach, self.certified, self.wanted = reach, certified.flatten(), _core(router, tokens, context)

    @torch.no_grad()
    def move(self, step: Tensor, how: str) -> Tensor:
        """Return the tokens moved by their whole reach in the direction of `step`; raise where a certificate breaks."""
        moved = self.tokens + _unit(step) * self.reach.unsqueeze(-1)
        lost = (_core(self.router, moved, self.context) != self.wanted).any(-1) & self.certified
        assert not lost.any(), f"{int(lost.sum())} tokens change experts within their certified radius, moved {how}"
        return moved


def _core(router: Router, tokens: Tensor, context: Context) -> Tensor:
    """(T,E) bool: the set that a certificate is about."""
    routing = router(tokens, context)
    core = router.select.core
    if core is None:
        return routing.chosen
    best = routing.experts[:, :core]
    return Routing(routing.logits, routing.gates, best, routing.weights[:, :core]).chosen


def _towards(router: Router, tokens: Tensor, context: Context, other: int) -> Tensor:
    """The gradient of the gap between one expert's gate and that of the worst expert in use."""
    leaf = tokens.detach().requires_grad_()
    routing = router(leaf, context)
    least = routing.gates.masked_fill(~routing.chosen, torch.inf).amin(-1)
    gap = (routing.gates[:, other] - least.where(least.isfinite(), 0.0)).clamp_min(-1e6)
    return torch.autograd.grad(gap.sum(), leaf)[0] if gap.requires_grad else torch.zeros_like(leaf)


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-30)

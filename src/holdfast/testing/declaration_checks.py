"""The checks of declarations: that declared costs, held weights and certificates agree with measurement.

Each check is one function, as in `checks`.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from holdfast.certificates import LayerParts, Networks, NoCertificate, certify, certify_output
from holdfast.kernels import fp32_linear, grouped, token_mixing  # noqa: F401  (they define the operators)
from holdfast.routing import Context, Router, RouterCache, Routing
from holdfast.routing.declarations import FLOAT, LayerSizes
from holdfast.testing.router_under_test import (
    HEADS,
    STEEP,
    WIDTH,
    NotApplicable,
    RouterUnderTest,
    gradients,
)

LENGTH = 17
NUMBER = 4  # bytes: tokens here are float32
KEPT_WITHIN = 4  # the factor by which declared bytes for the backward may differ from saved ones
WITHIN = 0.999  # of a certified radius: the float32 sum of token and perturbation is rounded
ATTACK_STEPS = 12
DIRECTIONS = 24
WEIGHT_RADII = (0.003, 0.03, 0.3)  # as shares of a token's length
GAPS = 3000  # at which the factor of a strip is measured
BISECTIONS = 22  # then two inputs differ by about one rounding


def check_declared_cost(subject: RouterUnderTest) -> None:
    """Check that declared cached bytes and bytes that ranks exchange equal the counted ones.

    Check that those kept for the backward are about as many as autograd saves; devices and kernels save different tensors.
    """
    sizes = _layer_sizes(subject.prototype)
    undeclared = [type(part).__name__ for part in subject.prototype.all_parts if part.declares.cost is None]
    if undeclared:
        raise NotApplicable(f"cost not declared: {', '.join(undeclared)}")
    costs = [part.declares.cost(sizes) for part in subject.prototype.all_parts if part.declares.cost is not None]
    counted = dict(zip(("summed", "gathered"), _exchanged_bytes(subject), strict=True))
    if subject.prototype.traits.cacheable:
        tokens, cache = subject.tokens(2, LENGTH), RouterCache()
        subject.build().eval()(tokens, replace(subject.context(tokens, causal=True), cache=cache))
        counted["cached"] = cache.bytes / (2 * LENGTH)  # for a token
    for name, count in counted.items():
        total = sum(getattr(cost, name) for cost in costs)
        differs = f"the declared cost ({name}) is {total:g} bytes, but the counted cost is {count:g}"
        assert abs(total - count) <= 1e-9 * max(total, count), differs
    kept, saved, few = sum(cost.kept for cost in costs), _saved_bytes(subject), 4 * FLOAT * sizes.experts
    is_about = saved <= KEPT_WITHIN * kept + few and kept <= KEPT_WITHIN * saved + few
    assert is_about, f"the declared cost (kept) is {kept:g} bytes for a token, but autograd saves {saved:g}"


def _layer_sizes(router: Router) -> LayerSizes:
    """Return the sizes of the layer of `RouterUnderTest.context`."""
    return LayerSizes(router.dim, router.experts, LENGTH, HEADS, WIDTH, WIDTH, NUMBER)


def _saved_bytes(subject: RouterUnderTest) -> float:
    """Return the bytes that autograd saves for one more token in a training forward, besides the inputs of the router."""

    def total(sequences: int) -> int:
        router, tokens = subject.build(), subject.tokens(sequences, LENGTH).requires_grad_()
        context = subject.context(tokens.detach())
        given = {tensor.untyped_storage().data_ptr() for value in (router, tokens, context) for tensor in _tensors(value)}
        saved: dict[int, Tensor] = {}  # they are kept here, so that no address is used twice

        def pack(tensor: Tensor) -> Tensor:
            return saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            router(tokens, context)
        return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in given)

    return (total(4) - total(2)) / (2 * LENGTH)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module or a record."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif is_dataclass(value):
        for entry in fields(value):
            yield from _tensors(getattr(value, entry.name))


def _exchanged_bytes(subject: RouterUnderTest) -> tuple[int, float]:
    """Return the bytes that a rank sums over ranks in a training forward, and those per token that it sends to all others.

    There are two ranks with the same tokens. The message with the number of tokens is not counted.
    """
    router, tokens, sent, gathered = subject.build(), subject.tokens(2, LENGTH), list[int](), list[int]()

    def gather(rows: list[Tensor], own: Tensor) -> None:
        gathered.append(own.nbytes if own.dim() > 1 else 0)
        for each in rows:
            each.copy_(own)

    with (
        patch.object(torch.distributed, "is_initialized", lambda: True),
        patch.object(torch.distributed, "get_world_size", lambda: 2),
        patch.object(torch.distributed, "get_rank", lambda: 0),
        patch.object(torch.distributed, "all_reduce", lambda value: sent.append(value.nbytes)),
        patch.object(torch.distributed, "all_gather", gather),
    ):
        router(tokens, subject.context(tokens))
    return sum(sent), sum(gathered) / (2 * LENGTH)


def check_declared_fixed_sets(subject: RouterUnderTest) -> None:
    """Check that other tokens in the same context change sets, and logits, if and only if the router does not declare it."""
    router, tokens = subject.build().eval(), subject.tokens()
    context = subject.context(tokens)
    before, after = router(tokens, context), router(subject.tokens(seed=1), context)
    can_change = not bool(before.chosen.all())
    moved = bool((before.chosen != after.chosen).any())
    assert not (router.fixed_sets and moved), "it declares fixed sets, but other tokens change them"
    assert router.fixed_sets or moved or not can_change, "it does not declare fixed sets, but other tokens change no set"
    differs = not torch.equal(before.logits, after.logits)
    assert router.score.declares.reads_tokens == differs, "`reads_tokens` of the score is not what other tokens show"


def check_declared_number_of_experts(subject: RouterUnderTest) -> None:
    """Check that no token uses more experts than declared; without a remark, every token uses the declared number.

    Check that a training batch uses no more rows than the selector declares.
    """
    router, tokens = subject.build(), subject.tokens()
    most = router.select.most_rows(tokens.shape[0] * tokens.shape[1])
    if most is not None:
        in_use = int(router(tokens, subject.context(tokens)).used.sum())
        assert in_use <= most, f"it declares {most} rows in training, but a batch uses {in_use}"
    router.eval()
    if router.select.declares.active is None:
        raise NotApplicable("it declares no number of active experts")
    declared = router.select.declares.active(_layer_sizes(router))
    routing = router(tokens, subject.context(tokens))
    if routing.rows is not None:
        rows = float(routing.rows.mean())
        differs = f"it declares {declared.inference:g} rows for a token, but its routing has {rows:g}"
        assert abs(declared.inference - rows) <= 1e-6 * rows, differs
        return
    used = routing.used.sum(-1)
    most = int(used.max())
    assert most <= declared.slots, f"it declares {declared.slots} slots, but a token uses {most} experts"
    if not declared.about:
        differs = f"it declares {declared.inference:g} experts per token, but a token uses {most}"
        assert bool((used == declared.inference).all()), differs


def check_replay(subject: RouterUnderTest) -> None:
    """Check that a router that replays its own routes returns what it returned, and that foreign sets are used as recorded.

    Tokens without a record are live. Gradients are finite, and state is what it would be without a record.
    """
    tokens = subject.tokens()
    context = subject.context(tokens)
    for training in (True, False):
        live = subject.route(tokens, context, training)
        own = replace(context, replayed=live.experts.view(*tokens.shape[:2], -1).to(torch.int16))
        if subject.prototype.select.layer_kind != "moe":
            try:
                subject.route(tokens, own, training)
            except ValueError:
                continue
            raise AssertionError("a layer in which every token uses all experts replays routes")
        again = subject.route(tokens, own, training)
        for name in ("experts", "weights", "gates"):
            assert torch.equal(getattr(again, name), getattr(live, name)), f"replay of its own routes changes its {name}"
        moved = (tokens + 0.5 * subject.tokens(seed=3)).requires_grad_()
        foreign = live.experts.view(*tokens.shape[:2], -1).clone()
        foreign[0] = -1
        alone = subject.outcome((moved, subject.context(moved)), training=training)
        replayed = subject.outcome((moved, replace(subject.context(moved), replayed=foreign)), training=training)
        count, unrecorded = tokens.shape[1], alone.routing.weights
        assert torch.equal(replayed.routing.chosen[count:], live.chosen[count:]), "the recorded sets are not used"
        is_live = torch.equal(replayed.routing.weights[:count, : unrecorded.shape[1]], unrecorded[:count])
        assert is_live, "a token without a record is not routed live"
        is_finite = bool(replayed.gradients["tokens"].isfinite().all())
        assert is_finite, "replay gives a gradient that is not finite"
        for name, state in alone.state.items():
            assert torch.equal(state, replayed.state[name]), f"replay changes what the router learns ({name})"


def check_held_weights(subject: RouterUnderTest) -> None:
    """Check that held weights of the live set are exactly the live weights, and that they have gradients.

    If the set of a first input is held, the part of the change to a second input that flips cause is 0 for tokens that keep
    their set.
    """
    router = subject.build().eval()
    router.scale = 2.5  # some pretrained models have a scale; held weights must include it
    before = subject.tokens()
    after = (before + 0.3 * subject.tokens(seed=1)).requires_grad_()
    first, second = (router(tokens, subject.context(tokens)) for tokens in (before, after))
    live = router.held_weights(second.experts, second)
    assert torch.equal(live, second.weights), "the held weights of the live set are not exactly the live weights"
    reordered = second.experts.flip(-1)
    assert torch.equal(router.held_weights(reordered, second), second.weights.flip(-1)), "held weights depend on the order"
    held = router.held_weights(first.experts, second)
    assert held.shape == first.experts.shape and held.isfinite().all(), "held weights must be finite, one for each slot"
    assert bool((held[~first.used] == 0).all()), "an unused slot has a held weight"
    stayed = Routing(second.logits, second.gates, first.experts, held).dense_weights
    kept = (first.chosen == second.chosen).all(-1)
    assert bool((second.dense_weights == stayed)[kept].all()), "tokens that keep their set have a flip part"
    if router.select.gate.continuous or not router.informed:  # held weights after an informer are gates
        _require_continuous(router, before, after.detach(), subject.context(before))
    plain = Routing(second.logits, second.gates, second.experts, second.weights / 2.5)
    router.scale = 1.0
    scaled = 2.5 * router.held_weights(first.experts, plain)
    torch.testing.assert_close(scaled, held, msg="held weights do not include the scale")
    found, expected = (
        gradients(_tilted_sum(weights), after, router, retain_graph=True) for weights in (live, second.weights)
    )
    for name, gradient in found.items():
        is_equal = torch.equal(gradient, expected[name])
        assert is_equal, "gradients through held weights of the live set are not those of the live weights"
    moved = (first.chosen != second.chosen).any(-1) & (second.chosen & first.chosen).any(-1)
    if bool(moved.any()) and any(bool(gradient.any()) for gradient in expected.values()):
        found = gradients(_tilted_sum(held[moved]), after, router)
        assert any(bool(gradient.any()) for gradient in found.values()), "held weights have no gradient in the scores"


@torch.no_grad()
def _require_continuous(router: Router, before: Tensor, after: Tensor, context: Context) -> None:
    """Check that held weights are continuous where a set changes: just after it, they are the weights just before it."""
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
    assert jump <= STEEP, f"held weights change by {jump:.2g} at the point where the live set changes"


def _tilted_sum(weights: Tensor) -> Tensor:
    """Return a weighted sum of the weights: their plain sum may not depend on the scores."""
    return (weights * torch.linspace(0.5, 2.0, weights.numel()).view(weights.shape)).sum()


def check_declared_certificate(subject: RouterUnderTest) -> str:
    """Check that no perturbation within the certified radius, random or along gradients, changes the set of a token."""
    router, tokens = subject.build().eval(), subject.tokens()
    context = subject.context(tokens)
    try:
        found = certify(router, tokens, context)
    except NoCertificate as reason:
        raise NotApplicable(str(reason)) from None
    radius = WITHIN * found.radius.float().clamp_max(1e3 * (1 + tokens.norm(dim=-1).max()))
    reaches = [radius]
    if router.traits.sequence_aware:  # a radius is valid if all tokens of a sequence are perturbed: try those of some tokens
        ordered = radius.sort(dim=1).values
        reaches = [ordered[:, rank : rank + 1].expand_as(radius) for rank in (0, LENGTH // 2, LENGTH - 1)]
    core = router.select.declares.core  # a whole set is certified where it is None

    @torch.no_grad()
    def certified_sets(rows: Tensor) -> Tensor:
        routing = router(rows, context)
        return Routing(routing.logits, routing.gates, routing.experts[:, :core], routing.weights[:, :core]).chosen

    before = certified_sets(tokens)

    def move(step: Tensor, reach: Tensor, how: str) -> Tensor:
        """Return the tokens, perturbed by `reach` in the direction of `step`; fail if a certified set changes."""
        moved = tokens + _unit(step) * reach.unsqueeze(-1)
        lost = (certified_sets(moved) != before).any(-1) & (radius >= reach).flatten()
        assert not lost.any(), f"{int(lost.sum())} tokens change experts within their certified radius, perturbed {how}"
        return moved

    for reach in reaches:
        for seed in range(DIRECTIONS):
            move(torch.randn(tokens.shape, generator=torch.Generator().manual_seed(seed)), reach, "at random")
        for other in range(router.experts):
            moved = tokens
            for _ in range(ATTACK_STEPS):
                leaf = moved.detach().requires_grad_()
                routing = router(leaf, context)
                least = routing.gates.masked_fill(~routing.chosen, torch.inf).amin(-1)  # of the selected experts
                gap = (routing.gates[:, other] - least.where(least.isfinite(), 0.0)).clamp_min(-1e6)
                slope = torch.autograd.grad(gap.sum(), leaf)[0] if gap.requires_grad else torch.zeros_like(leaf)
                ahead = reach.unsqueeze(-1) / 4 * _unit(slope)
                moved = move(moved - tokens + ahead, reach, f"towards expert {other}")
    sure = float((radius > 0).float().mean())
    return f"{found.kind}; {sure:.0%} of the tokens have a radius"


def check_declared_weights(subject: RouterUnderTest) -> str:
    """Check that declared weights are those of the router, and move no farther than the bound that follows from them.

    Check that experts in use are among those that the bound expects, and that the factor of a strip is what is declared.
    """
    router, tokens = subject.build().eval(), subject.tokens()
    context, lengths = subject.context(tokens), tokens.norm(dim=-1, keepdim=True)
    none = torch.zeros(router.experts, 1, router.dim)
    networks = Networks(none, none.mT, torch.relu, 1.0, gated=False)
    try:
        found = certify_output(LayerParts(router, networks), tokens, WEIGHT_RADII, context, relative=True)
    except NoCertificate as reason:
        raise NotApplicable(str(reason)) from None
    except ValueError as wrong:
        raise AssertionError(str(wrong)) from None
    declared = router.select.declares.shares
    shares = None if declared is None else declared()
    assert shares is not None
    if shares.width > 0:
        factors = shares.factor(torch.linspace(-1, 2, GAPS + 1, dtype=torch.float64) * shares.width)
        steepest = float(factors.diff().abs().max()) * GAPS / (3 * shares.width)
        assert float(factors[0]) == 1 and float(factors[-1]) == 0, "the factor is not 1 above a strip, or not 0 below it"
        assert bool((factors.diff() <= 0).all()), "the factor of a strip increases with the gap"
        assert steepest <= shares.slope * (1 + 1e-9), f"the factor has a slope of {steepest:.3g}, above the declared one"
    before = router(tokens, context).dense_weights
    steps = [subject.tokens(seed=1000 + seed) for seed in range(DIRECTIONS)]
    leaf = tokens.detach().requires_grad_()
    gates = router(leaf, context).gates
    if gates.requires_grad:
        steps += [torch.autograd.grad(gates[:, one].sum(), leaf, retain_graph=True)[0] for one in range(router.experts)]
    for place, radius in enumerate(WEIGHT_RADII):
        for step in steps:
            with torch.no_grad():
                moved = router(tokens + WITHIN * radius * lengths * _unit(step), context)
            change = (moved.dense_weights - before).abs().sum(1) / 2
            most = found.change[..., place].flatten()
            assert bool((change <= 1.001 * most + 1e-4).all()), f"weights move by more than the bound, at radius {radius}"
            outside = moved.chosen & ~found.reach[..., place, :].flatten(0, -2)
            assert not outside.any(), f"an expert is in use that the bound does not expect, at radius {radius}"
    return f"median bound of the change of weights {float(found.change[..., 0].median()):.2g} at radius {WEIGHT_RADII[0]}"


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-30)

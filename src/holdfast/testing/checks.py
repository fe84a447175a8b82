"""The checks of what a router returns: shapes, ties, traits, padding, decoding and float32 arithmetic.

Each check is one function. It takes a `RouterUnderTest` and raises AssertionError, with a sentence, if the router fails.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from holdfast.kernels.select import top_reference
from holdfast.layers.losses import TERMS, Losses
from holdfast.routing import Context, Router, RouterCache, Routing, Score, Scores, Selector, Traits
from holdfast.testing.router_under_test import (
    GRADIENT_TOLERANCE,
    STEEP,
    NotApplicable,
    RouterUnderTest,
    differing,
    fill_padding,
    objective,
    state_of,
    steps,
    with_padding,
)

DECODING_STEPS = 64


def contract(subject: RouterUnderTest) -> None:
    """Check shapes, dtypes, the order of slots, unused slots, and that evaluation returns no losses."""
    tokens = subject.tokens()
    for training in (True, False):
        router = subject.build().train(training)
        routing = router(tokens, subject.context(tokens))
        count, experts = tokens.shape[0] * tokens.shape[1], router.experts
        for name, value in (("logits", routing.logits), ("gates", routing.gates), ("weights", routing.weights)):
            assert value.dtype == torch.float32, f"{name} are {value.dtype}, not float32"
            assert value.isfinite().all(), f"{name} are not all finite"
        assert routing.logits.shape == routing.gates.shape == (count, experts), "logits and gates must be (T,E)"
        assert routing.experts.dtype == torch.int64, f"experts are {routing.experts.dtype}, not int64"
        assert routing.experts.shape == routing.weights.shape, "experts and weights differ in shape"
        assert (routing.gates >= 0).all(), "a gate is negative"
        assert ((routing.experts >= 0) & (routing.experts <= experts)).all(), "an expert index is out of range"
        assert (routing.weights[~routing.used] == 0).all(), "an unused slot has a weight"
        assert (routing.weights.diff(dim=-1) <= 0).all(), "slots are not sorted by weight, descending"
        assert (routing.used.long().diff(dim=-1) <= 0).all(), "an unused slot comes before a used one"
        assert (routing.chosen.sum(-1) == routing.used.sum(-1)).all(), "a token has the same expert twice"
        assert training or not routing.losses, f"losses in evaluation: {list(routing.losses)}"


def empty_batch(subject: RouterUnderTest) -> None:
    """Check that an empty batch gives an empty routing with finite losses."""
    for shape in ((0, 5), (3, 0)):
        tokens = subject.tokens()[:0, :5] if shape[0] == 0 else subject.tokens()[:, :0]
        for training in (True, False):
            router = subject.build().train(training)
            router.losses = Losses(**dict.fromkeys(TERMS, 1.0))
            routing = router(tokens, subject.context(tokens, causal=True))
            assert routing.experts.shape[0] == 0 and routing.gates.shape == (0, router.experts), f"shape {shape} fails"
            assert routing.loss.isfinite(), "the loss of an empty batch is not finite"
            if routing.loss.requires_grad:
                routing.loss.backward()


def bad_input(subject: RouterUnderTest) -> None:
    """Check that wrong shapes, wrong masks, NaN and a progress above 1 raise ValueError."""
    router, tokens = subject.build(), subject.tokens()
    router.layer = "model.layers.3.mlp"
    with _raises_value_error("a wrong width"):
        router(tokens[..., :-1])
    with _raises_value_error("tokens of four dimensions"):
        router(tokens.unsqueeze(0))
    with _raises_value_error("progress beyond 1"):
        router.progress(1.5)
    with _raises_value_error("a padding mask of another shape"):
        router(tokens, Context(token_mask=torch.ones(tokens.shape[0], tokens.shape[1] + 1, dtype=torch.bool)))
    with _raises_value_error("a padding mask without a real token"):
        router(tokens, subject.context(tokens, torch.zeros(tokens.shape[:2], dtype=torch.bool)))
    if router.traits.sequence_aware:
        with _raises_value_error("2-D tokens, being sequence-aware"):
            router(tokens[0])
    else:
        context = subject.context(tokens)
        whole = Context(token_ids=context.token_ids, modality=context.modality)
        assert whole.token_ids is not None and whole.modality is not None
        row = Context(token_ids=whole.token_ids.view(1, -1), modality=whole.modality.view(1, -1))
        flat = subject.build().eval()(tokens.flatten(0, 1), row)
        assert not differing(flat, subject.build().eval()(tokens, whole)).any(), "2-D tokens are routed differently"
    for value in (torch.nan, torch.inf):
        broken = tokens.clone()
        broken[1, 2, 3] = value
        if router.score.declares.reads_tokens:
            with _raises_value_error(f"a token that is {value}, in training", naming="model.layers.3.mlp"):
                subject_router = subject.build()
                subject_router.layer = "model.layers.3.mlp"
                subject_router(broken, subject.context(tokens))
        through = subject.build()
        through.check_finite = False
        for routing in (through(broken, subject.context(tokens)), through.eval()(broken, subject.context(tokens))):
            assert routing.experts.min() >= 0 and routing.experts.max() <= router.experts, (
                "NaN gives an expert index out of range"
            )


def naive_reference(subject: RouterUnderTest) -> None:
    """Check that gates, weights, losses and gradients equal those of the naive reference."""
    if subject.reference is None:
        raise NotApplicable("no naive reference was given")
    for length, pad, causal, training in [
        (17, 0, False, True),
        (17, 5, True, True),
        (13, 5, False, False),
        (1, 0, True, False),
    ]:
        tokens = subject.tokens(3, length).requires_grad_()
        token_mask = _right_padding(3, length, pad) if pad else None
        fast, slow = subject.build().train(training), subject.build().train(training)
        results = []
        for router, compute in ((fast, fast), (slow, lambda x, c, r=slow: subject.reference(r, x, c))):  # type: ignore[misc]
            torch.manual_seed(1)
            routing = compute(tokens, subject.context(tokens, token_mask, causal=causal))
            wanted = [tokens, *(p for p in router.parameters() if p.requires_grad)]
            grads = torch.autograd.grad(objective(routing), wanted, allow_unused=True, materialize_grads=True)
            results.append((routing, grads))
        (got, got_grads), (expected, expected_grads) = results
        what = f"with {length} tokens, {pad} of them padding, causal={causal}, training={training}"
        assert not differing(got, expected).any(), f"the routing differs from the naive reference {what}"
        assert got.losses.keys() == expected.losses.keys(), f"losses {list(got.losses)}, expected {list(expected.losses)}"
        for name, value in got.losses.items():
            torch.testing.assert_close(value, expected.losses[name], msg=f"loss {name} differs {what}")
        largest = max(float(grad.norm()) for grad in expected_grads)
        for mine, theirs in zip(got_grads, expected_grads, strict=True):
            # A gradient much smaller than the others (of a temperature, say) is the difference of large terms.
            error = (mine - theirs).norm() / theirs.norm().clamp_min(max(0.1 * largest, 1e-6))
            assert error <= GRADIENT_TOLERANCE, f"gradients differ from the naive reference by {error:.1e} {what}"


def determinism(subject: RouterUnderTest) -> None:
    """Check that the same seed gives exactly the same routing, losses and gradients."""
    tokens = subject.tokens()
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        router, x = subject.build(), tokens.clone().requires_grad_()
        router.losses = Losses(balance=0.1, z=0.1)
        routing = router(x, subject.context(x))
        objective(routing).backward()
        again = router.eval()(tokens, subject.context(tokens))
        grads = [value.grad for value in (x, *router.parameters()) if value.grad is not None]
        runs.append([routing.gates, routing.experts, routing.weights, routing.loss, again.experts, again.weights, *grads])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second), "two runs with one seed differ"


def ties(subject: RouterUnderTest) -> None:
    """Check that of experts with equal levels the one with the lower index is selected first."""
    router, tokens = subject.build().eval(), subject.tokens(4, 33)
    if router.select.declares.fixed_sets:
        raise NotApplicable("it does not select by gates")
    router.score = _Rounded(router.score)
    routing = router(tokens, subject.context(tokens))
    _require_lower_index(router.select, router.scores_from(routing), routing.experts.unsqueeze(0), "a tie")
    if router.informers:  # informed gates do not tie: round them, too
        gates = (routing.gates.unflatten(0, tokens.shape[:2]) * 16).round() / 16
        scores = Scores.from_gates(gates)
        selected = router.select(scores, tokens, subject.context(tokens))
        _require_lower_index(router.select, scores, selected.experts, "a tie of informed gates")


def _require_lower_index(select: Selector, scores: Scores, experts: Tensor, tie: str) -> None:
    """Check that ties in the ranks decide for lower indices, and that slots with equal gates are sorted by index."""
    broken = f"{tie} was not broken towards the lower index"
    used, slots = experts < scores.gates.shape[-1], experts.shape[-1]
    chosen = torch.zeros(*experts.shape[:-1], scores.gates.shape[-1] + 1, dtype=torch.bool).scatter(-1, experts, True)
    chosen = chosen[..., :-1]
    if select.traits.batch_invariant:  # otherwise another token may have taken a place at the better expert
        best = top_reference(select.ranks(scores), slots)
        expected = torch.zeros_like(chosen).scatter(-1, best, used)
        assert torch.equal(chosen, expected), broken
    order = top_reference(scores.gates.where(chosen, -1.0), slots)
    assert torch.equal(experts[used], order[used]), broken


class _Rounded(Score):
    """Another score, rounded to multiples of 1/2, so that experts tie."""

    def __init__(self, score: Score) -> None:
        super().__init__()
        self.score, self.dim, self.experts, self.traits = score, score.dim, score.experts, score.traits
        self.slots = score.slots

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return (self.score(tokens, context) * 2).round() / 2


def causality(subject: RouterUnderTest) -> None:
    """Check that later tokens change the routing of earlier ones, in a causal context, only if causality is not declared.

    Training traits are tested with batches that do not overflow (`SelectorDeclarations.overflow`).
    """
    for training in (False, True):
        moved = any(
            _later_tokens_matter(subject, tokens, other, training)
            for tokens, other in (
                (subject.tokens(), subject.tokens(seed=1)),
                (subject.crowded_tokens(), subject.tokens(seed=1)),
            )
        )
        declared, trait = _traits(subject, training).causal, "causal in training" if training else "causal"
        _declared(declared, not moved, trait, "a later token changes the routing of earlier tokens")


def _later_tokens_matter(subject: RouterUnderTest, tokens: Tensor, other: Tensor, training: bool) -> bool:
    """Return whether the routing of the first tokens changes if those after them are replaced by `other` tokens."""
    cut = 9
    changed = torch.cat([tokens[:, :cut], other[:, cut:]], dim=1)
    if training and any(subject.overflows(x, subject.context(x, causal=True)) for x in (tokens, changed)):
        return False
    before, after = (
        _part(subject.route(x, subject.context(x, causal=True), training), x.shape[:2], slice(None), slice(0, cut))
        for x in (tokens, changed)
    )
    return bool(differing(before, after, weights_within=STEEP).any())


def _traits(subject: RouterUnderTest, training: bool) -> Traits:
    return subject.prototype.training_traits if training else subject.prototype.traits


def sequence_awareness(subject: RouterUnderTest) -> None:
    """Check that earlier tokens change the routing of the last one only if sequence awareness is declared."""
    router, tokens = subject.build().eval(), subject.tokens()
    if not router.traits.batch_invariant:
        raise NotApplicable("it depends on the whole batch, and so on all tokens")
    changed = subject.tokens(seed=1)
    changed[:, -1] = tokens[:, -1]
    before, after = (
        _part(router(x, subject.context(x, causal=True)), x.shape[:2], slice(None), slice(-1, None))
        for x in (tokens, changed)
    )
    moved = bool(differing(before, after, weights_within=STEEP).any())
    _declared(router.traits.sequence_aware, moved, "sequence_aware", "other tokens of the sequence change nothing")


def padding(subject: RouterUnderTest) -> None:
    """Check that padding, whatever its values, does not change the routing, losses, state or gradients of real tokens."""
    tokens, real = subject.tokens(), _right_padding(3, 17, 5)
    other = tokens.where(real.unsqueeze(-1), 100 * subject.tokens(seed=1))
    longer = torch.cat([tokens, subject.tokens(3, 6, seed=2)], dim=1)
    first = torch.arange(longer.shape[1]) < tokens.shape[1]
    for training in (True, False):
        _same_real_tokens(subject, (tokens, real), (other, real), training)
        if not (training and _draws(subject)):  # more tokens draw other random numbers
            _same_real_tokens(subject, (tokens, None), (longer, first.expand(longer.shape[:2])), training)
    _nan_in_padding(subject, tokens, real)


def _draws(subject: RouterUnderTest) -> bool:
    """Return whether the router draws random numbers in training."""
    router, tokens = subject.build(), subject.tokens()
    context = subject.context(tokens)
    before = torch.random.get_rng_state()
    router(tokens, context)
    return not torch.equal(before, torch.random.get_rng_state())


def _same_real_tokens(
    subject: RouterUnderTest, one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None], training: bool
) -> None:
    """Check that two batches with the same real tokens and different padding give the same results."""
    outcomes = []
    length = min(one[0].shape[1], other[0].shape[1])
    for x, real in (one, other):
        torch.manual_seed(5)
        router = subject.build().train(training)
        router.losses = Losses(**dict.fromkeys(TERMS, 1.0))
        routing = router(x, subject.context(x, real))
        kept = _part(routing, x.shape[:2], slice(None), slice(0, length))
        outcomes.append((kept, routing.losses, state_of(router.eval())))
    (first, losses, state), (second, other_losses, other_state) = outcomes
    moved = differing(first, second, weights_within=STEEP)
    if one[1] is not None:
        moved = moved & one[1].flatten()
    assert not moved.any(), f"{int(moved.sum())} real tokens change with the padding (training={training})"
    for name in losses:
        torch.testing.assert_close(losses[name], other_losses[name], msg=f"padding changes the loss {name}")
    for name, value in state.items():
        torch.testing.assert_close(value, other_state[name], msg=f"padding changes the state {name}")


def _nan_in_padding(subject: RouterUnderTest, tokens: Tensor, real: Tensor) -> None:
    """Check that NaN in padding, of tokens and of the whole context, changes no loss, state or gradient."""
    outcomes = []
    for value in (0.0, torch.nan):
        torch.manual_seed(5)
        router, x = subject.build(), fill_padding(tokens, real, value).requires_grad_()
        router.losses = Losses(**dict.fromkeys(TERMS, 1.0))
        context = with_padding(subject.context(tokens, real), real, value)
        routing = router(x, context)
        own = routing.dense_weights.where(real.view(-1, 1), 0.0)
        total = (own * torch.linspace(-1, 1, own.shape[1])).sum() + routing.loss
        wanted = {"tokens": x, **{name: p for name, p in router.named_parameters() if p.requires_grad}}
        if total.requires_grad:
            grads = torch.autograd.grad(total, list(wanted.values()), allow_unused=True, materialize_grads=True)
            found = {f"the gradient of {name}": grad for name, grad in zip(wanted, grads, strict=True)}
        else:
            found = {}
        found |= {
            "the loss": routing.loss,
            **{f"the state {name}": state for name, state in state_of(router.eval()).items()},
        }
        outcomes.append(found)
    for name, expected in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][name], expected, msg=f"NaN in padding changes {name}")


def batch_invariance(subject: RouterUnderTest) -> None:
    """Check that other sequences and padding change the routing of a token only if invariance is not declared.

    Training traits are tested with batches that do not overflow (`SelectorDeclarations.overflow`).
    """
    for training in (False, True):
        if not (training and _draws(subject)):  # more tokens draw other random numbers
            moved = any(_others_matter(subject, tokens, training) for tokens in (subject.tokens(), subject.crowded_tokens()))
            declared = _traits(subject, training).batch_invariant
            trait = "batch_invariant in training" if training else "batch_invariant"
            _declared(declared, not moved, trait, "other sequences or padding change the routing of a token")


def _others_matter(subject: RouterUnderTest, tokens: Tensor, training: bool) -> bool:
    """Return whether the routing of the first sequence depends on the others, or on padding beside it."""
    if training and any(subject.overflows(x, subject.context(x)) for x in (tokens[:1], tokens)):
        return False
    alone = subject.route(tokens[:1], subject.context(tokens[:1]), training)
    together = subject.route(tokens, subject.context(tokens), training)
    together = _part(together, tokens.shape[:2], slice(0, 1), slice(None))
    moved = differing(alone, together, weights_within=STEEP).any()
    for side in ("right", "left"):
        filler = subject.tokens(1, 6, seed=2)
        pieces = (tokens[:1], filler) if side == "right" else (filler, tokens[:1])
        padded = torch.cat(pieces, dim=1)
        real = torch.zeros(1, padded.shape[1], dtype=torch.bool)
        own = slice(0, tokens.shape[1]) if side == "right" else slice(6, None)
        real[:, own] = True
        routing = subject.route(padded, subject.context(padded, real), training)
        moved = moved | differing(alone, _part(routing, real.shape, slice(None), own), weights_within=STEEP).any()
    return bool(moved)


def cached_decoding(subject: RouterUnderTest) -> str:
    """Check that a prompt and then one token at a time, with a cache, gives the routing of one forward, if declared."""
    router, tokens = subject.build().eval(), subject.tokens(2, DECODING_STEPS)
    context = subject.context(tokens, causal=True)
    full = router(tokens, context)
    cache, pieces, prompt = RouterCache(), [], 5
    bounds = [(0, prompt), *((t, t + 1) for t in range(prompt, DECODING_STEPS))]
    with patch.object(Router, "_refuse_cache"):  # a router that denies the trait may have it
        for start, end in bounds:
            pieces.append(router(tokens[:, start:end], steps(context, start, end, cache)))
    stepwise = _join(pieces, sequences=2)
    moved = int(differing(full, stepwise, weights_within=STEEP).sum())
    _declared(
        router.traits.cacheable, moved == 0, "cacheable", f"{moved} tokens have another routing when decoded step by step"
    )
    undecided = int((full.chosen != stepwise.chosen).any(-1).sum()) - moved
    return f"{undecided} of {full.chosen.shape[0]} tokens were numerically undecided"


def float32_routing(subject: RouterUnderTest) -> None:
    """Check that routing is float32 under autocast, in a bfloat16 model and with a lower matmul precision."""
    tokens = subject.tokens()
    expected = subject.build().eval()(tokens, subject.context(tokens))
    context = subject.context(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = subject.build().eval()(tokens, context)
    _same_bits(routing, expected, "under autocast")
    with _matmul_precision("medium"):
        routing = subject.build().eval()(tokens, context)
    _same_bits(routing, expected, "under set_float32_matmul_precision('medium')")
    rounded = subject.build().eval()
    state = state_of(rounded)
    rounded = rounded.to(torch.bfloat16)
    for name, value in rounded.named_buffers():
        assert torch.equal(value, state[name]), f".to(torch.bfloat16) rounds the state {name}"
    back = copy.deepcopy(rounded).float()
    low = tokens.to(torch.bfloat16)
    first, second = rounded(low, subject.context(low.float())), back(low.float(), subject.context(low.float()))
    _same_bits(first, second, "in a bfloat16 model")


def _same_bits(got: Routing, expected: Routing, where: str) -> None:
    slots = [name for name in ("dispatch", "shares") if getattr(expected, name) is not None]
    for name in ("logits", "gates", "weights", *slots):
        assert getattr(got, name).dtype == torch.float32, f"{name} are {getattr(got, name).dtype} {where}"
        assert torch.equal(getattr(got, name), getattr(expected, name)), f"{name} are not those of float32 {where}"


@contextmanager
def _raises_value_error(what: str, naming: str | None = None) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        assert naming is None or naming in str(error), f"{what} raises ValueError, but without naming {naming}: {error}"
    else:
        raise AssertionError(f"{what} does not raise ValueError")


@contextmanager
def _matmul_precision(setting: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _declared(declared: bool, observed: bool, trait: str, otherwise: str) -> None:
    if declared:
        assert observed, f"it declares the trait {trait}, but {otherwise}"
    else:
        assert not observed, f"it does not declare the trait {trait}, but has it here: declare it"


def _right_padding(sequences: int, length: int, padded: int) -> Tensor:
    """Return a mask (B,N) in which all sequences but the first end in padding."""
    real = torch.ones(sequences, length, dtype=torch.bool)
    real[1:, length - padded :] = False
    return real


def _part(routing: Routing, shape: torch.Size, sequences: slice, positions: slice) -> Routing:
    """Return some sequences and positions of the routing of tokens of `shape` (B,N)."""
    return routing.map_tokens(lambda rows: rows.unflatten(0, shape)[sequences, positions].flatten(0, 1))


def _join(pieces: list[Routing], sequences: int) -> Routing:
    """Return the routings of consecutive pieces of the sequences as one."""

    def join(name: str) -> Tensor:
        parts = [getattr(piece, name).unflatten(0, (sequences, -1)) for piece in pieces]
        return torch.cat(parts, dim=1).flatten(0, 1)

    has_slots = pieces[0].dispatch is not None
    dispatch, shares = (join(name) if has_slots else None for name in ("dispatch", "shares"))
    return Routing(join("logits"), join("gates"), join("experts"), join("weights"), dispatch=dispatch, shares=shares)

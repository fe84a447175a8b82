"""The checks of what a router returns (shapes, ties, traits, padding, decoding, float32 arithmetic) and of its training
(gradients, state, saving, recomputation, compilation, second derivatives).

Each check is one function. It takes a `RouterUnderTest` and raises AssertionError, with a sentence, if the router fails.
"""

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holdfast.kernels.select import top_reference
from holdfast.layers.losses import TERMS, Losses
from holdfast.routing import Context, Router, RouterCache, Routing, Score, Scores, Selector
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
NO_DERIVATIVE = ".*autograd kernel was not registered.*"  # torch's warning when such an operator is differentiated
REFERENCE_TOLERANCE, DIFFERENCE_TOLERANCE = 1e-3, 0.05
STEPS = (2e-3, 5e-4)
COUNTING = ("balance", "load")  # losses of how many tokens an expert has
ROUNDING = 1e-6
ATTEMPTS = 5


def contract(subject: RouterUnderTest) -> None:
    """Check shapes, dtypes, the order of slots, unused slots, and that evaluation returns no losses.

    Check that weights are finite if all gates are 0: an informer may return such gates.
    """
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
    if router.select.declares.takes_informers:
        logits = routing.logits.unflatten(0, tokens.shape[:2])
        scores = Scores.from_gates(torch.zeros_like(logits), logits)
        weights = router.select(scores, tokens, subject.context(tokens)).weights
        assert weights.isfinite().all(), "weights are not finite if an informer makes all gates 0"


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
        batches = subject.tokens(), subject.crowded_tokens()
        moved = any(_later_tokens_matter(subject, tokens, training) for tokens in batches)
        _declared(subject, "causal", not moved, "a later token changes the routing of earlier tokens", training)


def _later_tokens_matter(subject: RouterUnderTest, tokens: Tensor, training: bool) -> bool:
    """Return whether the routing of the first tokens changes if those after them are replaced by others."""
    cut = 9
    changed = torch.cat([tokens[:, :cut], subject.tokens(seed=1)[:, cut:]], dim=1)
    if training and any(subject.overflows(x, subject.context(x, causal=True)) for x in (tokens, changed)):
        return False
    before, after = (
        _part(subject.route(x, subject.context(x, causal=True), training), x.shape[:2], slice(None), slice(0, cut))
        for x in (tokens, changed)
    )
    return bool(differing(before, after, weights_within=STEEP).any())


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
    _declared(subject, "sequence_aware", moved, "other tokens of the sequence change nothing")


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
        total = total if total.requires_grad else total.requires_grad_()  # the routing of `hash` has no gradient
        wanted = {"tokens": x, **{name: p for name, p in router.named_parameters() if p.requires_grad}}
        grads = torch.autograd.grad(total, list(wanted.values()), allow_unused=True, materialize_grads=True)
        results = {f"the gradient of {name}": grad for name, grad in zip(wanted, grads, strict=True)}
        results |= {f"the state {name}": state for name, state in state_of(router.eval()).items()}
        outcomes.append({"the loss": routing.loss, **results})
    for name, expected in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][name], expected, msg=f"NaN in padding changes {name}")


def batch_invariance(subject: RouterUnderTest) -> None:
    """Check that other sequences and padding change the routing of a token only if invariance is not declared.

    Training traits are tested with batches that do not overflow (`SelectorDeclarations.overflow`).
    """
    for training in (False, True):
        if not (training and _draws(subject)):  # more tokens draw other random numbers
            moved = any(_others_matter(subject, tokens, training) for tokens in (subject.tokens(), subject.crowded_tokens()))
            otherwise = "other sequences or padding change the routing of a token"
            _declared(subject, "batch_invariant", not moved, otherwise, training)


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
    cache, moved, undecided, prompt = RouterCache(), 0, 0, 5
    for start, end in [(0, prompt), *((t, t + 1) for t in range(prompt, DECODING_STEPS))]:
        with patch.object(Router, "_refuse_cache"):  # a router that denies the trait may have it
            decoded = router(tokens[:, start:end], steps(context, start, end, cache))
        expected = _part(full, tokens.shape[:2], slice(None), slice(start, end))
        differs = differing(expected, decoded, weights_within=STEEP)
        moved += int(differs.sum())
        undecided += int(((expected.chosen != decoded.chosen).any(-1) & ~differs).sum())
    _declared(subject, "cacheable", moved == 0, f"{moved} tokens have another routing when decoded step by step")
    return f"{undecided} of {full.chosen.shape[0]} tokens were numerically undecided"


def float32_routing(subject: RouterUnderTest) -> None:
    """Check that routing is float32 under autocast, in a bfloat16 model and with a lower matmul precision."""
    tokens = subject.tokens()
    expected = subject.build().eval()(tokens, subject.context(tokens))
    context = subject.context(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = subject.build().eval()(tokens, context)
    _same_bits(routing, expected, "under autocast")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        routing = subject.build().eval()(tokens, context)
    finally:
        torch.set_float32_matmul_precision(precision)
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


def _declared(subject: RouterUnderTest, trait: str, observed: bool, otherwise: str, training: bool = False) -> None:
    """Check that a trait is declared if and only if it is `observed`; `otherwise` says what was seen if it is not."""
    router = subject.prototype
    name = f"{trait} in training" if training else trait
    if getattr(router.training_traits if training else router.traits, trait):
        assert observed, f"it declares the trait {name}, but {otherwise}"
    else:
        assert not observed, f"it does not declare the trait {name}, but has it here: declare it"


def _right_padding(sequences: int, length: int, padded: int) -> Tensor:
    """Return a mask (B,N) in which all sequences but the first end in padding."""
    real = torch.ones(sequences, length, dtype=torch.bool)
    real[1:, length - padded :] = False
    return real


def _part(routing: Routing, shape: torch.Size, sequences: slice, positions: slice) -> Routing:
    """Return some sequences and positions of the routing of tokens of `shape` (B,N)."""
    return routing.map_tokens(lambda rows: rows.unflatten(0, shape)[sequences, positions].flatten(0, 1))


def save_and_load(subject: RouterUnderTest) -> None:
    """Check that a router loaded from saved state returns exactly the routing of the saved one, and has the same state."""
    trained, tokens = subject.build(), subject.tokens()
    for seed in range(3):
        trained(subject.tokens(seed=seed), subject.context(subject.tokens(seed=seed)))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    loaded = subject.build()
    loaded.load_state_dict(state)
    expected = trained.eval()(tokens, subject.context(tokens))
    got = loaded.eval()(tokens, subject.context(tokens))
    assert torch.equal(got.experts, expected.experts), "the experts differ after loading"
    assert torch.equal(got.weights, expected.weights), "the weights differ after loading"
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), f"{name} differs after saving and loading"


def evaluation_keeps_state(subject: RouterUnderTest) -> None:
    """Check that forwards in evaluation change no buffer."""
    router, tokens = subject.build(), subject.tokens()
    router(tokens, subject.context(tokens))
    router.eval()
    before = state_of(router)
    for seed in (1, 2):
        router(subject.tokens(seed=seed), subject.context(subject.tokens(seed=seed)))
    for name, value in state_of(router).items():
        assert torch.equal(value, before[name]), f"evaluation changed {name}"


def no_inert_coefficient(subject: RouterUnderTest) -> None:
    """Check that every loss coefficient, of the router and of its parts, changes a gradient when it is not 0.

    If a selector declares equal loads, the losses that count tokens must not change one.
    """
    tokens = subject.tokens()
    if not subject.build()(tokens.clone().requires_grad_(), subject.context(tokens)).gates.requires_grad:
        raise NotApplicable("its routing has no gradient")

    def gradients(change: str | None) -> list[Tensor]:
        torch.manual_seed(9)
        router, x = subject.build(), tokens.clone().requires_grad_()
        router.losses = Losses(**{change: 1.0}) if change in TERMS else None
        for part in router.all_parts:
            for name in part.coefficients:
                held, value = getattr(part, name), float(name == change)
                setattr(part, name, held.fill_(value) if isinstance(held, Tensor) else value)
        wanted = [x, *(p for p in router.parameters() if p.requires_grad)]
        total = objective(router(x, subject.context(tokens)))
        return list(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))

    without = gradients(None)
    # In a layer that runs every expert for every sequence, the loads are equal whatever the router does.
    select = subject.prototype.select
    inert = COUNTING if select.declares.equal_loads or select.layer_kind != "moe" else ()
    for change in [*TERMS, *(name for part in subject.prototype.all_parts for name in part.coefficients)]:
        moved = max(float((a - b).abs().max()) for a, b in zip(gradients(change), without, strict=True))
        if change in inert:
            assert moved < ROUNDING, f"it declares equal loads, but the coefficient of {change!r} changes a gradient"
        else:
            assert moved, f"the coefficient of {change!r} changes no gradient"


def no_inert_parameter(subject: RouterUnderTest) -> None:
    """Check that every trainable parameter gets a gradient that is not zero."""
    router, tokens = subject.build(), subject.tokens()
    if not any(parameter.requires_grad for parameter in router.parameters()):
        raise NotApplicable("it has no parameters")
    objective(router(tokens, subject.context(tokens))).backward()
    for name, parameter in router.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, f"{name} gets no gradient"


def activation_checkpointing(subject: RouterUnderTest) -> None:
    """Check that activation checkpointing gives the same gradients and the same state."""
    outcomes = []
    for recompute in (False, True):
        router = subject.build()
        router.losses = Losses(balance=0.1)
        grads = []
        for seed in range(3):
            torch.manual_seed(seed)
            x = subject.tokens(seed=seed).requires_grad_()
            context = subject.context(x.detach())
            forward = lambda y, r=router, c=context: objective(r(y, c))  # noqa: E731
            total = checkpoint(forward, x, use_reentrant=False) if recompute else forward(x)
            total.backward()
            grads.append(x.grad)
        grads += [p.grad for p in router.parameters() if p.grad is not None]
        outcomes.append((grads, state_of(router.eval())))
    (plain, plain_state), (again, again_state) = outcomes
    for first, second in zip(plain, again, strict=True):
        torch.testing.assert_close(first, second, msg="recomputation changes a gradient")
    for name, value in plain_state.items():
        assert torch.equal(value, again_state[name]), f"recomputation counted twice in {name}"


def compile_whole(subject: RouterUnderTest) -> None:
    """Check that `torch.compile` makes one graph, with the routing, losses, gradients and state of eager mode."""
    for training in (True, False):
        outcomes = []
        for compiled in (False, True):
            torch.compiler.reset()
            router = subject.build().train(training)
            forward = torch.compile(router, fullgraph=True, backend="aot_eager") if compiled else router
            for seed in range(2):
                torch.manual_seed(seed)
                tokens = subject.tokens(seed=seed).requires_grad_()
                routing = forward(tokens, subject.context(tokens.detach()))
                grads = torch.autograd.grad(objective(routing), tokens, allow_unused=True, materialize_grads=True)
            outcomes.append((routing, grads[0], state_of(router.eval())))
        (eager, eager_grad, eager_state), (graph, graph_grad, graph_state) = outcomes
        assert not differing(graph, eager, weights_within=STEEP).any(), (
            f"the compiled routing differs from the eager one (training={training})"
        )
        torch.testing.assert_close(graph.loss, eager.loss, msg="the compiled loss differs")
        torch.testing.assert_close(graph_grad, eager_grad, msg="compiled gradients differ")
        for name, value in eager_state.items():
            torch.testing.assert_close(graph_state[name], value, msg=f"compiled state {name} differs")


def second_derivatives(subject: RouterUnderTest) -> str | None:
    """Check that second derivatives are right, or raise an error that says so. Gradient penalties need them.

    The derivative of the gradient along a direction is compared with that of the naive reference; without a reference, with
    differences of gradients. Then gradients must be the derivatives of the output, which is not so if a part holds something
    constant on purpose.
    """
    router = subject.build().eval()
    tokens = subject.tokens(2, 9)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=NO_DERIVATIVE)
            got = _derivative(router, router, tokens, subject.context(tokens), _directions(router, tokens))
    except (RuntimeError, ValueError, NotImplementedError) as refusal:
        assert "second derivative" in str(refusal), f"second derivatives raise an error that does not name them: {refusal}"
        return f"refused: {refusal}"
    if subject.reference is None:
        _compare_with_differences(subject)
        return None
    reference, slow = subject.reference, subject.build().eval()
    naive = lambda x, context: reference(slow, x, context)  # noqa: E731
    expected = _derivative(slow, naive, tokens, subject.context(tokens), _directions(slow, tokens))
    error = _largest_error(got, expected)
    assert error <= REFERENCE_TOLERANCE, f"second derivatives differ from the naive reference by {error:.1%}"
    return None


def _compare_with_differences(subject: RouterUnderTest) -> None:
    for attempt in range(ATTEMPTS):
        router, tokens = subject.build().eval(), subject.tokens(1, 5, seed=attempt)
        context, along = subject.context(tokens), _directions(router, tokens)
        if not _has_true_gradient(router, tokens, context, along):
            continue
        differences = []
        for step in STEPS:
            above, below = (_after_step(router, tokens, context, along, by)[1] for by in (step, -step))
            differences.append([(high - low) / (2 * step) for high, low in zip(above, below, strict=True)])
        coarse, fine = differences
        if _largest_error(coarse, fine) > DIFFERENCE_TOLERANCE / 2:
            continue  # a token flips, or a gate becomes 0, within a step
        error = _largest_error(_derivative(router, router, tokens, context, along), fine)
        assert error <= DIFFERENCE_TOLERANCE, f"second derivatives differ from differences of gradients by {error:.1%}"
        return
    raise NotApplicable(
        "its gradient is not continuous, or not the derivative of its output; pass a naive reference to compare with"
    )


def _trainable(router: Router) -> list[Tensor]:
    return [parameter for parameter in router.parameters() if parameter.requires_grad]


def _directions(router: Router, tokens: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(value.shape, generator=generator) for value in (tokens, *_trainable(router))]


def _derivative(
    router: Router, compute: Callable[..., Routing], tokens: Tensor, context: Context, along: Sequence[Tensor]
) -> list[Tensor]:
    """Return the derivative, along a direction, of the gradients of tokens and parameters."""
    inputs = [tokens.clone().requires_grad_(), *_trainable(router)]
    total = objective(compute(inputs[0], context))
    grads = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True, materialize_grads=True)
    slope = torch.stack([(grad * way).sum() for grad, way in zip(grads, along, strict=True)]).sum()
    if not slope.requires_grad:
        return [torch.zeros_like(value) for value in inputs]
    return list(torch.autograd.grad(slope, inputs, allow_unused=True, materialize_grads=True))


def _after_step(
    router: Router, tokens: Tensor, context: Context, along: Sequence[Tensor], step: float
) -> tuple[float, list[Tensor]]:
    """Return the objective and its gradients after a step in a direction."""
    moved, x = copy.deepcopy(router), (tokens + step * along[0]).requires_grad_()
    wanted = _trainable(moved)
    with torch.no_grad():
        for parameter, way in zip(wanted, along[1:], strict=True):
            parameter.add_(way, alpha=step)
    total = objective(moved(x, context))
    grads = torch.autograd.grad(total, [x, *wanted], allow_unused=True, materialize_grads=True)
    return float(total.detach()), list(grads)


def _has_true_gradient(router: Router, tokens: Tensor, context: Context, along: Sequence[Tensor]) -> bool:
    """Return whether the gradient of each tensor is the derivative of the output along its own direction."""
    _, grads = _after_step(router, tokens, context, along, 0.0)
    for index, (grad, way) in enumerate(zip(grads, along, strict=True)):
        alone = [way if index == other else torch.zeros_like(each) for other, each in enumerate(along)]
        above, below = (_after_step(router, tokens, context, alone, by)[0] for by in (STEPS[0], -STEPS[0]))
        difference, slope = (above - below) / (2 * STEPS[0]), float((grad * way).sum())
        if abs(difference - slope) > 0.02 * float(grad.norm()) + 1e-3:
            return False
    return True


def _largest_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest error of a tensor, relative to its norm or, if that is small, to a tenth of the largest norm."""
    largest = max(float(value.norm()) for value in expected)
    sizes = [max(float(value.norm()), 0.1 * largest, 1e-2) for value in expected]
    return max(float((mine - theirs).norm()) / size for mine, theirs, size in zip(got, expected, sizes, strict=True))

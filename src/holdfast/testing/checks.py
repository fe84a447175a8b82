"""The checks of what a router returns (shapes, ties, traits, padding, decoding, float32 arithmetic) and of its training
(gradients, state, saving, recomputation, compilation, second derivatives).

Each check is one function. It takes a `RouterUnderTest` and raises AssertionError, with a sentence, if the router fails.
"""

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holdfast.kernels.select import top_reference
from holdfast.layers.losses import TERMS, Losses
from holdfast.routing import Context, Router, RouterCache, Routing, Scores, Selector
from holdfast.testing.router_under_test import (
    GRADIENT_TOLERANCE,
    STEEP,
    NotApplicable,
    RouterUnderTest,
    differing,
    fill_padding,
    gradients,
    objective,
    state_of,
    steps,
    with_padding,
)

DECODING_STEPS = 64
NO_DERIVATIVE = ".*autograd kernel was not registered.*"  # torch's warning when such an operator is differentiated
REFERENCE_TOLERANCE, DIFFERENCE_TOLERANCE = 1e-3, 0.05
STEPS = (2e-3, 5e-4)
# The length of a sequence, how much of it is padding, whether the context is causal, and whether the router trains.
REFERENCE_CASES = (17, 0, False, True), (17, 5, True, True), (13, 5, False, False), (1, 0, True, False)
COUNTING = ("balance", "load")  # losses of how many tokens an expert has
ROUNDING = 1e-6
ATTEMPTS = 5
# Return whether a batch shows that a trait is absent; the last argument: in training.
Matters = Callable[[RouterUnderTest, Tensor, bool], bool]
ALL_LOSSES = Losses(**dict.fromkeys(TERMS, 1.0))


def check_contract(subject: RouterUnderTest) -> None:
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
    if router.select.declares.refuses_informers is None:
        logits = routing.logits.unflatten(0, tokens.shape[:2])
        scores = Scores.from_gates(torch.zeros_like(logits), logits)
        weights = router.select(scores, tokens, subject.context(tokens)).weights
        assert weights.isfinite().all(), "weights are not finite if an informer makes all gates 0"


def check_empty_batch(subject: RouterUnderTest) -> None:
    """Check that an empty batch gives an empty routing with finite losses."""
    for shape in ((0, 5), (3, 0)):
        tokens = subject.tokens()[:0, :5] if shape[0] == 0 else subject.tokens()[:, :0]
        for training in (True, False):
            router = subject.build().train(training)
            router.losses = ALL_LOSSES
            routing = router(tokens, subject.context(tokens, causal=True))
            assert routing.experts.shape[0] == 0 and routing.gates.shape == (0, router.experts), f"shape {shape} fails"
            assert routing.loss.isfinite(), "the loss of an empty batch is not finite"
            if routing.loss.requires_grad:
                routing.loss.backward()


def check_bad_input(subject: RouterUnderTest) -> None:
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
            in_range = routing.experts.min() >= 0 and routing.experts.max() <= router.experts
            assert in_range, "NaN gives an expert index out of range"


def check_naive_reference(subject: RouterUnderTest) -> None:
    """Check that gates, weights, losses and gradients equal those of the naive reference."""
    reference = subject.reference
    if reference is None:
        raise NotApplicable("no naive reference was given")
    for length, pad, causal, training in REFERENCE_CASES:
        token_mask = _right_padding(3, length, pad) if pad else None
        outcomes = []
        for run in (lambda router: router, lambda router: partial(reference, router)):
            tokens = subject.tokens(3, length).requires_grad_()
            batch = tokens, subject.context(tokens, token_mask, causal=causal)
            outcomes.append(subject.outcome(batch, training=training, run=run))
        got, expected = outcomes
        what = f"with {length} tokens, {pad} of them padding, causal={causal}, training={training}"
        assert not differing(got.routing, expected.routing).any(), f"the routing differs from the naive reference {what}"
        mine, theirs = got.routing.losses, expected.routing.losses
        assert mine.keys() == theirs.keys(), f"losses {list(mine)}, expected {list(theirs)}"
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], msg=f"loss {name} differs {what}")
        largest = max(float(gradient.norm()) for gradient in expected.gradients.values())
        for name, gradient in expected.gradients.items():
            # A gradient much smaller than the others (of a temperature, say) is the difference of large terms.
            error = (got.gradients[name] - gradient).norm() / gradient.norm().clamp_min(max(0.1 * largest, 1e-6))
            assert error <= GRADIENT_TOLERANCE, f"gradients differ from the naive reference by {error:.1e} {what}"


def check_determinism(subject: RouterUnderTest) -> None:
    """Check that the same seed gives exactly the same routing, losses and gradients."""
    for training in (True, False):
        outcomes = []
        for _ in range(2):
            tokens = subject.tokens().requires_grad_()
            batch = tokens, subject.context(tokens)
            outcomes.append(subject.outcome(batch, training=training, losses=Losses(balance=0.1, z=0.1)))
        first, second = outcomes
        for name in ("gates", "experts", "weights"):
            is_equal = torch.equal(getattr(first.routing, name), getattr(second.routing, name))
            assert is_equal, f"a second run with the same seed changes the {name}"
        second.require_equal(first, "a second run with the same seed", exactly=True)


def check_ties(subject: RouterUnderTest) -> None:
    """Check that of experts with equal levels the one with the lower index is selected first."""
    router, tokens = subject.build().eval(), subject.tokens(4, 33)
    if router.select.declares.fixed_sets:
        raise NotApplicable("it does not select by gates")
    router.score.register_forward_hook(lambda score, given, logits: (logits * 2).round() / 2)  # so that experts tie
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


def check_causality(subject: RouterUnderTest) -> None:
    """Check that later tokens change the routing of earlier ones, in a causal context, only if causality is not declared.

    Training traits are tested with batches that do not overflow (`SelectorDeclarations.overflow`).
    """
    otherwise = "a later token changes the routing of earlier tokens"
    _check_trait(subject, "causal", _later_tokens_matter, otherwise, (False, True))


def _check_trait(subject: RouterUnderTest, trait: str, matters: Matters, otherwise: str, modes: Sequence[bool]) -> None:
    """Check a trait in evaluation and in training, where `modes` has these.

    There are more batches if it is not declared: what is one choice for a whole batch, such as a head, differs for some.
    """
    for training in modes:
        more = 0 if _declares(subject, trait, training) else 16
        batches = [subject.tokens(), subject.crowded_tokens(), *(subject.uneven_tokens(seed) for seed in range(more))]
        moved = any(matters(subject, tokens, training) for tokens in batches)
        _declared(subject, trait, not moved, otherwise, training)


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


def check_sequence_awareness(subject: RouterUnderTest) -> None:
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


def check_padding(subject: RouterUnderTest) -> None:
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
    outcomes, kept, length = [], [], min(one[0].shape[1], other[0].shape[1])
    for tokens, real in (one, other):
        found = subject.outcome((tokens, subject.context(tokens, real)), training=training, losses=ALL_LOSSES)
        outcomes.append(replace(found, gradients={}))
        kept.append(_part(found.routing, tokens.shape[:2], slice(None), slice(0, length)))
    moved = differing(*kept, weights_within=STEEP)
    if one[1] is not None:
        moved = moved & one[1].flatten()
    assert not moved.any(), f"{int(moved.sum())} real tokens change with the padding (training={training})"
    outcomes[1].require_equal(outcomes[0], "padding")


def _nan_in_padding(subject: RouterUnderTest, tokens: Tensor, real: Tensor) -> None:
    """Check that NaN in padding, of tokens and of the whole context, changes no loss, state or gradient."""
    outcomes = []
    for value in (0.0, torch.nan):
        batch = fill_padding(tokens, real, value), with_padding(subject.context(tokens, real), real, value)
        outcomes.append(subject.outcome(batch, losses=ALL_LOSSES, real=real))
    zeros, with_nan = outcomes
    with_nan.require_equal(zeros, "NaN in padding")


def check_batch_invariance(subject: RouterUnderTest) -> None:
    """Check that other sequences and padding change the routing of a token only if invariance is not declared.

    Training traits are tested with batches that do not overflow (`SelectorDeclarations.overflow`).
    """
    otherwise = "other sequences or padding change the routing of a token"
    modes = (False,) if _draws(subject) else (False, True)  # more tokens draw other random numbers
    _check_trait(subject, "batch_invariant", _others_matter, otherwise, modes)


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


def check_cached_decoding(subject: RouterUnderTest) -> str:
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


def check_float32_routing(subject: RouterUnderTest) -> None:
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
    name = f"{trait} in training" if training else trait
    if _declares(subject, trait, training):
        assert observed, f"it declares the trait {name}, but {otherwise}"
    else:
        assert not observed, f"it does not declare the trait {name}, but has it here: declare it"


def _declares(subject: RouterUnderTest, trait: str, training: bool) -> bool:
    router = subject.prototype
    return bool(getattr(router.training_traits if training else router.traits, trait))


def _right_padding(sequences: int, length: int, padded: int) -> Tensor:
    """Return a mask (B,N) in which all sequences but the first end in padding."""
    real = torch.ones(sequences, length, dtype=torch.bool)
    real[1:, length - padded :] = False
    return real


def _part(routing: Routing, shape: torch.Size, sequences: slice, positions: slice) -> Routing:
    """Return some sequences and positions of the routing of tokens of `shape` (B,N)."""
    return routing.map_tokens(lambda rows: rows.unflatten(0, shape)[sequences, positions].flatten(0, 1))


def check_save_and_load(subject: RouterUnderTest) -> None:
    """Check that a router loaded from saved state returns exactly the routing of the saved one, and has the same state."""
    trained, tokens = subject.build(), subject.tokens()
    for batch in subject.batches(3):
        trained(*batch)
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


def check_evaluation_keeps_state(subject: RouterUnderTest) -> None:
    """Check that forwards in evaluation change no buffer."""
    router, (first, *others) = subject.build(), subject.batches(3)
    router(*first)
    router.eval()
    before = state_of(router)
    for batch in others:
        router(*batch)
    for name, value in state_of(router).items():
        assert torch.equal(value, before[name]), f"evaluation changed {name}"


def check_no_inert_coefficient(subject: RouterUnderTest) -> None:
    """Check that every loss coefficient, of the router and of its parts, changes a gradient when it is not 0.

    If a selector declares equal loads, the losses that count tokens must not change one.
    """
    tokens = subject.tokens()
    if not subject.build()(tokens.clone().requires_grad_(), subject.context(tokens)).gates.requires_grad:
        raise NotApplicable("its routing has no gradient")

    def gradients_with(change: str | None) -> dict[str, Tensor]:
        def with_coefficients(router: Router) -> Router:
            router.losses = Losses(**{change: 1.0}) if change in TERMS else None
            for part in router.all_parts:
                for name in part.coefficients:
                    held, value = getattr(part, name), float(name == change)
                    setattr(part, name, held.fill_(value) if isinstance(held, Tensor) else value)
            return router

        return subject.outcome((tokens, subject.context(tokens)), run=with_coefficients).gradients

    without = gradients_with(None)
    # In a layer that runs every expert for every sequence, the loads are equal whatever the router does.
    select = subject.prototype.select
    inert = COUNTING if select.declares.equal_loads or select.layer_kind != "moe" else ()
    for change in [*TERMS, *(name for part in subject.prototype.all_parts for name in part.coefficients)]:
        moved = max(float((value - without[name]).abs().max()) for name, value in gradients_with(change).items())
        if change in inert:
            assert moved < ROUNDING, f"it declares equal loads, but the coefficient of {change!r} changes a gradient"
        else:
            assert moved, f"the coefficient of {change!r} changes no gradient"


def check_no_inert_parameter(subject: RouterUnderTest) -> None:
    """Check that every trainable parameter gets a gradient that is not zero."""
    found = subject.outcome(*subject.batches(1)).gradients
    del found["tokens"]
    if not found:
        raise NotApplicable("it has no parameters")
    for name, gradient in found.items():
        assert gradient.abs().sum() > 0, f"{name} gets no gradient"


def check_activation_checkpointing(subject: RouterUnderTest) -> None:
    """Check that activation checkpointing gives the same gradients and the same state."""
    how: dict[str, Any] = {"losses": Losses(balance=0.1)}
    plain = subject.outcome(*subject.batches(3), **how)
    again = subject.outcome(*subject.batches(3), **how, run=lambda router: partial(checkpoint, router, use_reentrant=False))
    again.require_equal(plain, "recomputation", exactly=True)


def check_compile(subject: RouterUnderTest) -> None:
    """Check that `torch.compile` makes one graph, with the routing, losses, gradients and state of eager mode."""
    compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")
    for training in (True, False):
        torch.compiler.reset()
        eager = subject.outcome(*subject.batches(2), training=training)
        graph = subject.outcome(*subject.batches(2), training=training, run=compiled)
        moved = differing(graph.routing, eager.routing, weights_within=STEEP).any()
        assert not moved, f"the compiled routing differs from the eager one (training={training})"
        graph.require_equal(eager, "compilation")


def check_second_derivatives(subject: RouterUnderTest) -> str | None:
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
    slow = subject.build().eval()
    naive = partial(subject.reference, slow)
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
            differences.append({name: (above[name] - below[name]) / (2 * step) for name in along})
        coarse, fine = differences
        if _largest_error(coarse, fine) > DIFFERENCE_TOLERANCE / 2:
            continue  # a token flips, or a gate becomes 0, within a step
        error = _largest_error(_derivative(router, router, tokens, context, along), fine)
        assert error <= DIFFERENCE_TOLERANCE, f"second derivatives differ from differences of gradients by {error:.1%}"
        return
    raise NotApplicable("its gradient is not continuous, or not the derivative of its output; pass a naive reference")


def _directions(router: Router, tokens: Tensor) -> dict[str, Tensor]:
    """Return random directions in which tokens and trainable parameters are moved, by name."""
    generator = torch.Generator().manual_seed(11)
    moved = {"tokens": tokens, **{name: each for name, each in router.named_parameters() if each.requires_grad}}
    return {name: torch.randn(value.shape, generator=generator) for name, value in moved.items()}


def _derivative(
    router: Router, compute: Callable[..., Routing], tokens: Tensor, context: Context, along: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the derivative, along a direction, of the gradients of tokens and parameters."""
    leaf = tokens.clone().requires_grad_()
    found = gradients(objective(compute(leaf, context)), leaf, router, create_graph=True)
    slope = torch.stack([(found[name] * way).sum() for name, way in along.items()]).sum()
    return gradients(slope, leaf, router)


def _after_step(
    router: Router, tokens: Tensor, context: Context, along: Mapping[str, Tensor], step: float
) -> tuple[float, dict[str, Tensor]]:
    """Return the objective and its gradients after a step in a direction; what has none stays."""
    moved, leaf = copy.deepcopy(router), tokens.clone()
    with torch.no_grad():
        for name, value in [("tokens", leaf), *moved.named_parameters()]:
            if name in along:
                value.add_(along[name], alpha=step)
    total = objective(moved(leaf.requires_grad_(), context))
    return float(total.detach()), gradients(total, leaf, moved)


def _has_true_gradient(router: Router, tokens: Tensor, context: Context, along: Mapping[str, Tensor]) -> bool:
    """Return whether the gradient of each tensor is the derivative of the output along its own direction."""
    _, found = _after_step(router, tokens, context, along, 0.0)
    for name, way in along.items():
        above, below = (_after_step(router, tokens, context, {name: way}, by)[0] for by in (STEPS[0], -STEPS[0]))
        difference, slope = (above - below) / (2 * STEPS[0]), float((found[name] * way).sum())
        if abs(difference - slope) > 0.02 * float(found[name].norm()) + 1e-3:
            return False
    return True


def _largest_error(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest error of a tensor, relative to its norm or, if that is small, to a tenth of the largest norm."""
    norms = {name: float(value.norm()) for name, value in expected.items()}
    least = max(0.1 * max(norms.values()), 1e-2)
    return max(float((got[name] - value).norm()) / max(norms[name], least) for name, value in expected.items())

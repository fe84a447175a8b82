"""Similarity and attention posterior: identities, the head that is chosen, grouped keys, packed documents."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from references import posterior, similar
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Context
from holdfast.kernels.token_mixing import blocks
from holdfast.routing import Attention, AttentionPosterior, Similarity, TokenGraph, VisibleTokens
from holdfast.routing import token_graph as token_graph_module


def attention(
    length: int = 11, heads: int = 4, key_heads: int = 4, bias: bool = True, mask: Tensor | None = None
) -> Attention:
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, h, length, 3) for h in (heads, key_heads, key_heads))
    return Attention(query, key, value, torch.nn.Linear(heads * 3, 12, bias=bias), torch.randn(2, length, 12), mask)


PADDED = torch.tensor([[False] * 3 + [True] * 8, [True] * 8 + [False] * 3])


def padded_to(length: int) -> Tensor:
    """A mask whose second sequence has this many tokens before its padding."""
    return torch.arange(11) < torch.tensor([[11], [length]])


def test_a_small_tau_is_the_plain_router_when_tokens_have_one_length() -> None:
    """A token is then most similar to itself."""
    tokens = torch.nn.functional.normalize(torch.randn(2, 30, 16), dim=-1)
    plain, similar = (
        holdfast.create_router("smoe", dim=16, experts=6),
        holdfast.create_router("similarity", dim=16, experts=6, tau=1e-4),
    )
    similar.score.load_state_dict(plain.score.state_dict())
    expected, got = plain.eval()(tokens), similar.eval()(tokens, Context(causal=True))
    assert torch.equal(got.experts, expected.experts)
    torch.testing.assert_close(got.weights, expected.weights)


def test_without_attention_the_routers_own_input_is_compared() -> None:
    gates, tokens = torch.rand(1, 5, 4), torch.randn(1, 5, 8)
    expected = torch.softmax(tokens @ tokens.transpose(1, 2) / 8**0.5, -1) @ gates
    for of in ("tokens", "attention"):
        torch.testing.assert_close(Similarity(8, of=of)(gates, gates, tokens, Context()), expected)  # type: ignore[arg-type]


def test_packed_documents_do_not_see_each_other() -> None:
    """The model's own mask decides what may be compared: changing the first document leaves the second alone."""
    document = torch.tensor([0] * 4 + [1] * 7)
    mask = (document.unsqueeze(0) == document.unsqueeze(1)) & torch.ones(11, 11).tril().bool()
    first = attention(mask=mask.view(1, 1, 11, 11))
    torch.manual_seed(5)
    in_first = document.view(-1, 1) == 0

    def change(x: Tensor) -> Tensor:
        return torch.where(in_first, torch.randn_like(x), x)

    changed = replace(
        first, query=change(first.query), key=change(first.key), value=change(first.value), output=change(first.output)
    )
    gates, tokens = torch.rand(2, 11, 4), torch.randn(2, 11, 12)
    for make in INFORMERS.values():
        informer = make()
        one, two = (
            informer(g, g, x, Context(causal=True, attention=a))
            for g, x, a in ((gates, tokens, first), (change(gates), change(tokens), changed))
        )
        assert torch.equal(one[:, 4:], two[:, 4:])
        assert (one[:, :4] != two[:, :4]).any()


def test_packed_documents_are_separated_without_captured_attention() -> None:
    """`visible` is all that similarity of tokens reads: it gives what the whole record of the attention gives."""
    document = torch.tensor([0] * 4 + [1] * 7)
    mask = ((document.unsqueeze(0) == document.unsqueeze(1)) & torch.ones(11, 11).tril().bool()).view(1, 1, 11, 11)
    gates, tokens = torch.rand(2, 11, 4), torch.randn(2, 11, 12)
    informer = Similarity(12)
    assert informer.reads == ("attention.mask",)
    expected = informer(gates, gates, tokens, Context(causal=True, attention=attention(mask=mask)))
    got = informer(gates, gates, tokens, Context(causal=True, visible=VisibleTokens(11, mask)))
    assert torch.equal(got, expected)
    alone = informer(gates[:, 4:], gates[:, 4:], tokens[:, 4:], Context(causal=True))
    torch.testing.assert_close(got[:, 4:], alone)


def test_an_additive_mask_means_what_a_bool_mask_means() -> None:
    allowed = torch.ones(11, 11).tril().bool()
    added = torch.zeros(1, 1, 11, 11).masked_fill(~allowed, torch.finfo(torch.float32).min)
    gates, tokens = torch.rand(2, 11, 5), torch.randn(2, 11, 12)
    for make in INFORMERS.values():
        informer = make()
        one, two = (informer(gates, gates, tokens, Context(attention=attention(mask=m))) for m in (allowed, added))
        torch.testing.assert_close(one, two)


INFORMERS: dict[str, Any] = {
    "similarity": lambda: Similarity(12).eval(),
    "similarity of attention": lambda: Similarity(12, of="attention").eval(),
    "similarity, bilinear, confident": lambda: Similarity(12, rank=4, form="bilinear", from_="confident").eval(),
    "attention": lambda: AttentionPosterior(12, heads=4).eval(),
    "attention, all heads": lambda: AttentionPosterior(12, heads="all").eval(),
    "attention, all heads, confident": lambda: AttentionPosterior(12, heads="all", from_="confident").eval(),
}


def later_tokens_matter(informer: TokenGraph, mask: Tensor) -> bool:
    """Whether changing tokens from the eighth on changes what the first seven get, in a causal context."""
    first = attention(mask=mask)

    def change(x: Tensor) -> Tensor:
        return torch.where((torch.arange(11) >= 7).view(-1, 1), torch.randn_like(x), x)

    second = replace(first, key=change(first.key), value=change(first.value), output=change(first.output))
    gates, tokens = torch.rand(2, 11, 5), torch.randn(2, 11, 12)
    one, two = (
        informer(g, g, x, Context(causal=True, attention=a))
        for g, x, a in ((gates, tokens, first), (change(gates), change(tokens), second))
    )
    return not torch.equal(one[:, :7], two[:, :7])


@pytest.mark.parametrize("name", INFORMERS)
@pytest.mark.parametrize("least", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_no_additive_mask_lets_the_future_in(name: str, least: float) -> None:
    mask = torch.zeros(1, 1, 11, 11).masked_fill(~torch.ones(11, 11).tril().bool(), least)
    assert not later_tokens_matter(INFORMERS[name](), mask)


@pytest.mark.parametrize("name", INFORMERS)
def test_a_mask_that_only_broadcasts_lets_no_future_in_and_survives_blocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Key padding as (B,1,1,M), in a causal context, more queries than fit into one block."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", {"cpu": 1})
    monkeypatch.setattr(blocks, "FEWEST_ROWS", 4)
    mask = torch.ones(2, 1, 1, 11, dtype=torch.bool)
    mask[1, ..., 3] = False
    assert not later_tokens_matter(INFORMERS[name](), mask)


@pytest.mark.parametrize("name", INFORMERS)
def test_a_mask_of_integers_is_one_clear_sentence(name: str) -> None:
    assert_refused(r"torch\.int64.*bool", later_tokens_matter, INFORMERS[name](), torch.ones(11, 11).tril().long())


@pytest.mark.parametrize("name", INFORMERS)
def test_nan_in_padding_reaches_no_real_token(name: str) -> None:
    real = padded_to(8)
    given, gates = attention(), torch.rand(2, 11, 5)

    def poison(x: Tensor) -> Tensor:
        return x.masked_fill(~(real.unsqueeze(-1) if x.dim() == 3 else real[:, None, :, None]), torch.nan)

    broken = replace(
        given, query=poison(given.query), key=poison(given.key), value=poison(given.value), output=poison(given.output)
    )
    informer, tokens = INFORMERS[name](), torch.randn(2, 11, 12)
    expected = informer(gates, gates, tokens, Context(causal=True, token_mask=real, attention=given))
    got = informer(poison(gates), poison(gates), tokens, Context(causal=True, token_mask=real, attention=broken))
    torch.testing.assert_close(got[real], expected[real])


@pytest.mark.parametrize("name", INFORMERS)
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padding_keeps_its_own_gates_and_gradients_stay_finite(name: str, left: bool) -> None:
    """Left padding in a causal model sees no token at all."""
    real = torch.ones(2, 11, dtype=torch.bool)
    real[1, : 4 if left else None] = not left
    real[1, 7:] = left
    given, gates = attention(), torch.rand(2, 11, 5, requires_grad=True)
    for rows in (given.query, given.key, given.value, given.output):
        rows.requires_grad_()
    tokens = torch.randn(2, 11, 12, requires_grad=True)
    got = INFORMERS[name]()(gates, gates, tokens, Context(causal=True, token_mask=real, attention=given))
    assert torch.equal(got[~real], gates[~real]) and (got[real] != gates[real]).any()
    wanted = [gates, tokens, given.query, given.key, given.value, given.output]
    grads = torch.autograd.grad(got.square().sum(), wanted, allow_unused=True, materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_running_entropy_is_that_of_the_attention_and_the_lowest_head_is_taken(causal: bool, padded: bool) -> None:
    informer = AttentionPosterior(12, heads=4)
    given = attention()
    real = padded_to(8 if padded else 11)
    context = Context(causal=causal, token_mask=real if padded else None, attention=given)
    means = []
    for factor in (1.0, 3.0):
        scaled = Attention(factor * given.query, given.key, given.value, given.projection, given.output)
        informer.begin_training_forward()
        informer(
            torch.rand(2, 11, 5), torch.rand(2, 11, 5), torch.zeros(2, 11, 12), Context(causal, context.token_mask, scaled)
        )
        scores = scaled.query @ scaled.key.transpose(2, 3) / 3**0.5
        allowed = torch.ones(11, 11).tril().bool() if causal else torch.ones(11, 11).bool()
        weights = scores.masked_fill(~(allowed & real[:, None, None, :]), -torch.inf).softmax(-1)
        means.append(torch.special.entr(weights).sum(-1).transpose(1, 2)[real].mean(0))
    informer.eval()
    torch.testing.assert_close(informer.entropy, 0.9 * means[0] + 0.1 * means[1])


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
def test_batch_statistics_take_the_head_with_the_lowest_entropy_of_these_tokens(padded: bool, training: bool) -> None:
    given, gates, tokens = attention(), torch.rand(2, 11, 5), torch.zeros(2, 11, 12)
    real = padded_to(3 if padded else 11)
    taken = set()
    for sharpened in range(4):  # a head with larger queries attends to fewer tokens
        factors = torch.ones(4, 1, 1).index_fill(0, torch.tensor([sharpened]), 8.0)
        sharp = replace(given, query=given.query * factors)
        scores = sharp.query @ sharp.key.transpose(2, 3) / 3**0.5
        allowed = torch.ones(11, 11).tril().bool() & real[:, None, None, :]
        entropies = torch.special.entr(scores.masked_fill(~allowed, -torch.inf).softmax(-1)).sum(-1).transpose(1, 2)
        running = AttentionPosterior(12, heads=4).eval()
        running.entropy.copy_(entropies[real].mean(0))
        context = Context(causal=True, token_mask=real if padded else None, attention=sharp)
        batch = AttentionPosterior(12, heads=4, stats="batch").train(training)
        assert torch.equal(batch(gates, gates, tokens, context), running(gates, gates, tokens, context))
        assert not any("entrop" in name for name, _ in batch.named_buffers())
        taken.add(int(running.entropy.argmin()))
    assert taken == {0, 1, 2, 3}


def test_entropies_of_long_sequences_use_some_blocks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(2, 2, 300, 4), torch.randn(2, 2, 300, 4)
    given = Attention(query, key, key, torch.nn.Linear(8, 12), torch.randn(2, 300, 12))
    real = torch.rand(2, 300) < 0.7
    monkeypatch.setattr(token_graph_module, "SAMPLE", 150)  # then every second block: tokens 64 to 127 and 192 to 255
    informer = AttentionPosterior(12, heads=2)
    informer(torch.rand(2, 300, 5), torch.rand(2, 300, 5), torch.zeros(2, 300, 12), Context(True, real, given))
    allowed = torch.ones(300, 300).tril().bool() & real[:, None, None, :]
    weights = (query @ key.transpose(2, 3) / 2).masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num()
    seen = real & (torch.arange(300) // 64 % 2 == 1)
    informer.eval()
    torch.testing.assert_close(informer.entropy, torch.special.entr(weights).sum(-1).transpose(1, 2)[seen].mean(0))


def test_an_attention_that_is_missing_or_does_not_fit_is_one_clear_sentence() -> None:
    router = holdfast.create_router("attention", dim=12, experts=4, heads=3)
    assert_refused("attention", router, torch.randn(2, 11, 12))
    assert_refused(r"4 heads.* 3", router, torch.randn(2, 11, 12), Context(attention=attention()))


@pytest.mark.parametrize("name", ["similarity", "attention"])
def test_strength_zero_is_the_plain_router_to_the_last_bit(name: str) -> None:
    options: dict[str, Any] = {"heads": 4} if name == "attention" else {}
    informed = holdfast.create_router(name, dim=16, experts=6, k=2, strength=0.0, **options)
    plain = holdfast.create_router("smoe", dim=16, experts=6, k=2)
    plain.load_state_dict(informed.state_dict(), strict=False)
    tokens = torch.randn(2, 9, 16)
    ours, theirs = informed(tokens, Context(causal=True)), plain(tokens)
    assert torch.equal(ours.experts, theirs.experts) and torch.equal(ours.weights, theirs.weights)


def test_the_option_from_has_one_value_however_it_is_written() -> None:
    """`from` is a Python keyword, so that the constructor's parameter is `from_`."""
    written = (
        holdfast.create_router("similarity[from=confident]", dim=8, experts=4),
        holdfast.create_router("similarity", dim=8, experts=4, from_="confident"),
        holdfast.create_router("similarity", dim=8, experts=4, **{"from": "confident"}),  # type: ignore[arg-type]
    )
    for router in written:
        informer = router.informers[0]
        assert isinstance(informer, Similarity) and informer.from_ == "confident"


def test_the_defaults_compare_tokens_at_the_root_of_their_width() -> None:
    for options, tau in (({}, 12**0.5), ({"rank": 4}, 2.0), ({"tau": 1.0}, 1.0)):
        informer = holdfast.create_router("similarity", dim=12, experts=4, **options).informers[0]  # type: ignore[arg-type]
        assert isinstance(informer, Similarity) and informer.of == "tokens" and informer.tau == pytest.approx(tau)
    bracketed = holdfast.create_router("similarity[tau=sqrt,rank=9]", dim=12, experts=4).informers[0]
    assert isinstance(bracketed, Similarity) and bracketed.tau == 3.0


def test_rows_of_the_matrices_have_the_variance_of_the_specification() -> None:
    informer = Similarity(400, rank=100, form="bilinear")
    for matrix in (informer.reduce, informer.reduce_keys):
        assert matrix is not None and float(matrix.detach().std()) == pytest.approx(400**-0.5, rel=0.02)


def informed(informer: TokenGraph, gates: Tensor, logits: Tensor, tokens: Tensor, *leaves: Tensor) -> list[Tensor]:
    """What the informer returns in a causal, padded context, and the gradients of the leaves."""
    got = informer(gates, logits, tokens, Context(causal=True, token_mask=padded_to(9), attention=attention()))
    return [got, *torch.autograd.grad(got.sin().sum(), leaves)]


def test_bilinear_with_equal_matrices_is_symmetric() -> None:
    symmetric, bilinear = Similarity(12, rank=4), Similarity(12, rank=4, form="bilinear")
    assert symmetric.reduce is not None and bilinear.reduce is not None and bilinear.reduce_keys is not None
    with torch.no_grad():
        bilinear.reduce.copy_(symmetric.reduce)
        bilinear.reduce_keys.copy_(symmetric.reduce)
    gates, tokens = torch.rand(2, 11, 5), torch.randn(2, 11, 12, requires_grad=True)
    one, of_tokens, of_both = informed(symmetric, gates, gates, tokens, tokens, symmetric.reduce)
    two, of_same, of_query, of_key = informed(bilinear, gates, gates, tokens, tokens, bilinear.reduce, bilinear.reduce_keys)
    torch.testing.assert_close(two, one)
    torch.testing.assert_close(of_same, of_tokens)
    torch.testing.assert_close(of_query + of_key, of_both)


@pytest.mark.parametrize("name", ["similarity", "attention"])
def test_tokens_of_equal_entropy_are_all_informed_by_all(name: str) -> None:
    """Logits that are permutations of each other have equal entropies, which rounding must not tell apart."""
    logits = torch.randn(5)
    rows = torch.stack([logits[torch.randperm(5)] for _ in range(22)]).view(2, 11, 5)
    gates, tokens = rows.softmax(-1), torch.randn(2, 11, 12)
    make: Any = Similarity if name == "similarity" else AttentionPosterior
    options: dict[str, Any] = {} if name == "similarity" else {"heads": 4}
    everyone, confident = (make(12, **options, from_=value).eval() for value in ("all", "confident"))
    context = Context(attention=attention())
    torch.testing.assert_close(confident(gates, rows, tokens, context), everyone(gates, rows, tokens, context))
    uneven = rows * torch.linspace(0.1, 3.0, 11).view(1, 11, 1)
    assert not torch.allclose(confident(gates, uneven, tokens, context), everyone(gates, uneven, tokens, context))


def test_the_most_confident_token_of_all_is_informed_by_itself_only() -> None:
    logits = torch.randn(1, 6, 4)
    logits[0, 2] = torch.tensor([50.0, 0.0, 0.0, 0.0])
    gates = logits.softmax(-1)
    got = Similarity(8, from_="confident")(gates, logits, torch.randn(1, 6, 8), Context())
    torch.testing.assert_close(got[0, 2], gates[0, 2])


def assert_same(one: Tensor, other: Tensor, leaves: list[Tensor]) -> None:
    """Check that two results, and their gradients to all leaves, are equal up to rounding."""
    gradients = [torch.autograd.grad(found.sin().sum(), leaves) for found in (one, other)]
    torch.testing.assert_close((one, *gradients[0]), (other, *gradients[1]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("from_", ["all", "confident"])
def test_all_heads_of_an_attention_with_one_head_are_that_head(from_: Any) -> None:
    given = attention(heads=1, key_heads=1)
    wanted = [given.query, given.key, given.value, given.output]
    for rows in wanted:
        rows.requires_grad_()
    assert given.projection is not None
    logits, gates = torch.randn(2, 11, 5), torch.rand(2, 11, 5, requires_grad=True)
    one, every = (
        AttentionPosterior(12, heads=heads, from_=from_).eval()(  # type: ignore[arg-type]
            gates, logits, torch.zeros(2, 11, 12), Context(causal=True, attention=given)
        )
        for heads in (1, "all")
    )
    assert_same(every, one, [gates, *wanted, given.projection.weight])


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("from_", ["all", "confident"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("head", ["all", 0, 3])
def test_the_posterior_equals_the_reference_with_all_gradients(key_heads: int, from_: Any, bias: bool, head: Any) -> None:
    heads: Any = "all" if head == "all" else 4
    informer = AttentionPosterior(12, heads=heads, sigma=1.5, from_=from_, strength="learned").eval()
    if head != "all":
        informer.entropy.fill_(1.0)[head] = 0.5
    given = attention(key_heads=key_heads, bias=bias)
    logits, gates = torch.randn(2, 11, 5), torch.rand(2, 11, 5, requires_grad=True)
    assert given.projection is not None and informer.strength_logit is not None
    wanted = [gates, given.query, given.key, given.value, given.output, given.projection.weight, informer.strength_logit]
    wanted += [given.projection.bias] if given.projection.bias is not None else []
    for rows in wanted:
        rows.requires_grad_()
    context = Context(causal=True, token_mask=PADDED, attention=given)
    assert_same(informer(gates, logits, gates, context), posterior(informer, gates, logits, gates, context), wanted)


@pytest.mark.parametrize(
    "options", [{"rank": 5, "form": "bilinear"}, {"rank": 5}, {"of": "attention", "tau": 0.7}, {}], ids=str
)
@pytest.mark.parametrize("from_", ["all", "confident"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_similarity_equals_the_reference_with_all_gradients(options: dict[str, Any], from_: Any, causal: bool) -> None:
    informer = Similarity(12, **options, from_=from_, strength="learned")
    given, logits = attention(), torch.randn(2, 11, 5)
    gates, tokens = torch.rand(2, 11, 5, requires_grad=True), torch.randn(2, 11, 12, requires_grad=True)
    wanted = [gates, *informer.parameters(), given.output.requires_grad_() if informer.of == "attention" else tokens]
    context = Context(causal=causal, token_mask=PADDED, attention=given)
    assert_same(informer(gates, logits, tokens, context), similar(informer, gates, logits, tokens, context), wanted)


def test_a_learned_strength_starts_at_a_tenth_and_is_shown_in_the_snapshot() -> None:
    router = holdfast.create_router("similarity[strength=learned]", dim=8, experts=4)
    informer = router.informers[0]
    assert isinstance(informer, TokenGraph) and informer.strength == pytest.approx(0.1) and not informer.inert
    assert float(router.snapshot()["strength"]) == pytest.approx(0.1)
    gates, tokens = torch.rand(1, 5, 4), torch.randn(1, 5, 8)
    fixed = Similarity(8, strength=0.1)(gates, gates, tokens, Context())
    torch.testing.assert_close(informer(gates, gates, tokens, Context()), fixed)


def test_all_heads_have_no_state() -> None:
    router = holdfast.create_router("attention[heads=all]", dim=12, experts=5)
    before = {name: value.clone() for name, value in router.state_dict().items()}
    for _ in range(2):
        router(torch.randn(2, 11, 12), Context(causal=True, attention=attention()))
    assert all(torch.equal(value, before[name]) for name, value in router.state_dict().items())
    assert not any("entrop" in name for name in before)

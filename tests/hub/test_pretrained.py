"""Upcycling real pretrained models changes nothing at step 0. benchmarks/upcycling.py has the figures for the whole text."""

import pretrained
import pytest
import torch
from torch import Tensor
from upcycling import (
    BATCH,
    TEXT,
    embeddings,
    encode,
    experts_per_token,
    perplexity,
    read_text,
    sentences,
    sparse,
    token_losses,
    windows,
)

EXPERTS = {"smoe": (2.0, 2.0), "smooth": (2.1, 3.9)}  # a token, at least and at most; the strip is open from the start
TOKENS = 513  # from the beginning of the text; all but the first are predicted


@pytest.fixture(scope="module")
def text() -> str:
    if not TEXT.exists():
        pytest.skip("WikiText-2 is not in ../shared/data")
    return read_text()


@pytest.fixture(scope="module")
def tokens(text: str) -> Tensor:
    return torch.tensor(pretrained.smollm2_tokenizer()(text[: 8 * TOKENS]).input_ids[:TOKENS])


@pytest.fixture(scope="module")
def dense_losses(tokens: Tensor) -> Tensor:
    return token_losses(pretrained.smollm2(), tokens)


@pytest.fixture(scope="module")
def encoder(text: str) -> tuple[list[str], Tensor]:
    """Some sentences, and their embeddings by the dense encoder."""
    some = sentences(text, 64)
    return some, embeddings(*pretrained.minilm(), some)


def test_every_token_but_the_first_is_predicted_once_and_from_its_own_window_only() -> None:
    pairs = list(windows(torch.arange(11), 4))
    assert [read.tolist() for read, _ in pairs] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9]]]
    assert torch.equal(torch.cat([expected[0] for _, expected in pairs]), torch.arange(1, 11))


def test_the_dequantised_language_model_knows_english(dense_losses: Tensor) -> None:
    """Query and key rows left in the order of the GGUF file make this 301; a rotary base of 10,000 adds a tenth."""
    assert perplexity(dense_losses) == pytest.approx(16.926, rel=1e-3)


def test_the_language_models_tokens_spell_the_text(text: str) -> None:
    tokenizer = pretrained.smollm2_tokenizer()
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("4 ½").input_ids) == ["4", "Ġ", "Â½"]  # digits are split off first


@pytest.mark.parametrize("router", EXPERTS)
def test_an_upcycled_language_model_keeps_its_perplexity(router: str, tokens: Tensor, dense_losses: Tensor) -> None:
    batch = {"input_ids": tokens[None]}
    model = sparse(pretrained.smollm2(), router, batch)
    losses = token_losses(model, tokens)
    assert perplexity(losses) == pytest.approx(perplexity(dense_losses), rel=1e-3)
    # Copies differ by rounding alone, which an average should not hide.
    torch.testing.assert_close(losses, dense_losses, rtol=0, atol=1e-3)
    least, most = EXPERTS[router]
    assert least <= experts_per_token(model, batch) <= most


@pytest.mark.parametrize("router", EXPERTS)
def test_an_upcycled_encoder_keeps_its_embeddings(router: str, encoder: tuple[list[str], Tensor]) -> None:
    some, dense = encoder
    model, tokenizer = pretrained.minilm()
    batch = encode(tokenizer, some[:BATCH])
    model = sparse(model, router, batch)
    assert (embeddings(model, tokenizer, some) - dense).norm(dim=-1).max() < 1e-5
    least, most = EXPERTS[router]
    assert least <= experts_per_token(model, batch) <= most

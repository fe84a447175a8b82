"""Perplexity and bits, against loops over tokens."""

import math

import pytest
import torch

from holdfast.metrics import BitsPerByte, Perplexity, WordPerplexity, token_nll


def naive_nll(logits: list[float], target: int) -> float:
    return -math.log(math.exp(logits[target]) / sum(math.exp(value) for value in logits))


def test_token_nll_is_minus_the_log_of_the_softmax() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 9, 13), torch.randint(0, 13, (2, 9))
    got = token_nll(logits, targets)
    assert got.shape == targets.shape
    for row, target, value in zip(
        logits.view(18, 13).tolist(), targets.flatten().tolist(), got.flatten().tolist(), strict=True
    ):
        assert value == pytest.approx(naive_nll(row, target), rel=1e-5)


def test_token_nll_of_half_precision_logits_is_float32_and_ignored_targets_cost_nothing() -> None:
    nll = token_nll(torch.randn(3, 5).bfloat16(), torch.tensor([1, -100, 2]))
    assert nll.dtype == torch.float32 and nll[1] == 0 and nll[0] > 0


def test_perplexity_of_a_uniform_model_is_the_size_of_its_vocabulary() -> None:
    metric = Perplexity()
    metric.update(token_nll(torch.zeros(2, 7, 50), torch.randint(0, 50, (2, 7))))
    assert metric.result() == pytest.approx(50)


def test_perplexity_per_token_per_word_and_bits_per_byte_differ_in_their_unit_only() -> None:
    nll = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))
    total = sum(value for row in nll.tolist() for value in row)
    tokens, words, bits = Perplexity(), WordPerplexity(), BitsPerByte()
    tokens.update(nll)
    words.update(nll, 20)
    bits.update(nll, 100)
    assert tokens.result() == pytest.approx(math.exp(total / 32))
    assert words.result() == pytest.approx(math.exp(total / 20))
    assert bits.result() == pytest.approx(total / math.log(2) / 100)


def test_a_hopeless_perplexity_is_infinite_not_an_error() -> None:
    metric = Perplexity()
    metric.update(torch.tensor([1e4]))
    assert metric.result() == math.inf


def test_text_without_words_has_no_perplexity_per_word() -> None:
    metric = WordPerplexity()
    metric.update(torch.ones(3), 0)
    with pytest.raises(ValueError, match=r"WordPerplexity.*words"):
        metric.result()

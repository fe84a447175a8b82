"""How well a language model predicts: perplexity per token, perplexity per word, bits per byte.

All three are one sum of negative log-likelihoods, in nats, over different units. The sum never depends on the tokeniser's
units, so figures per word or per byte can be compared between tokenisers, figures per token cannot.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.rows import kept

IGNORED = -100  # transformers' label for a target that is not scored


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target] in float32: `logits (...,V)`, `targets (...)` to (...); 0 where a target is -100.

    Nothing is shifted: logits at a place must predict the target at that place. Pass `targets != -100` on as padding.
    """
    flat = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), reduction="none", ignore_index=IGNORED
    )
    return flat.view(targets.shape)


class Perplexity(Accumulator[float]):
    """exp(total nll / number of tokens)."""

    def update(self, nll: Tensor, token_mask: Tensor | None = None) -> None:
        """`nll`, one number of nats for each token, for example from `token_nll`."""
        nll = kept(nll.detach().reshape(-1), token_mask)
        self._add(nll=nll.sum(dtype=torch.float64), tokens=nll.numel())

    def result(self) -> float:
        return _exp(self._mean("nll"))


class WordPerplexity(Accumulator[float]):
    """exp(total nll / number of words), the word-level figure where a tokeniser splits words."""

    def update(self, nll: Tensor, words: int, token_mask: Tensor | None = None) -> None:
        """`words`: how many words the text behind these tokens has."""
        nll = kept(nll.detach().reshape(-1), token_mask)
        self._add(nll=nll.sum(dtype=torch.float64), tokens=nll.numel(), words=words)

    def result(self) -> float:
        return _exp(self._mean("nll", "words"))


class BitsPerByte(Accumulator[float]):
    """total nll / (ln 2 * number of bytes): what enwik8's "bits per character" is."""

    def update(self, nll: Tensor, byte_count: int, token_mask: Tensor | None = None) -> None:
        """`byte_count`: how many UTF-8 bytes the text behind these tokens has."""
        nll = kept(nll.detach().reshape(-1), token_mask)
        self._add(nll=nll.sum(dtype=torch.float64), tokens=nll.numel(), bytes=byte_count)

    def result(self) -> float:
        return self._mean("nll", "bytes") / math.log(2)


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf

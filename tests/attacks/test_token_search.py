"""The search for tokens against all sequences, within its length and the allowed tokens."""

import itertools

import pytest
import torch
from torch import Tensor

from holdfast.attacks import random_tokens, search_tokens

VOCABULARY = 7


class Toy:
    """A value of sequences: a quadratic function of one-hot tokens, with its exact slopes."""

    def __init__(self, tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.linear = torch.randn(tokens, VOCABULARY, generator=generator).double()
        pairs = torch.randn(tokens, VOCABULARY, tokens, VOCABULARY, generator=generator).double()
        self.pairs = 0.3 * (pairs + pairs.permute(2, 3, 0, 1))

    def __call__(self, tokens: Tensor) -> Tensor:
        hot = torch.nn.functional.one_hot(tokens, VOCABULARY).double()
        return (hot * self.linear).sum((1, 2)) + torch.einsum("cia,iajb,cjb->c", hot, self.pairs, hot)

    def slopes(self, tokens: Tensor) -> Tensor:
        hot = torch.nn.functional.one_hot(tokens, VOCABULARY).double()
        return self.linear + 2 * torch.einsum("iajb,jb->ia", self.pairs, hot)

    def best(self, allowed: list[int]) -> float:
        return float(self(torch.tensor(list(itertools.product(allowed, repeat=len(self.linear))))).max())


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_best_of_all_sequences(tokens: int, seed: int) -> None:
    toy, allowed = Toy(tokens, seed), torch.tensor([0, 2, 3, 5, 6])
    starts = random_tokens(allowed, 4, tokens, seed)
    found = search_tokens(
        toy, lambda one: toy.slopes(one)[:, allowed], allowed, starts, steps=30, tries=8, width=4, seed=seed
    )
    assert found.value == pytest.approx(toy.best(allowed.tolist()))
    assert float(toy(torch.tensor([found.tokens]))) == found.value
    assert len(found.tokens) == tokens and set(found.tokens) <= set(allowed.tolist())  # the budget
    again = search_tokens(
        toy, lambda one: toy.slopes(one)[:, allowed], allowed, starts, steps=30, tries=8, width=4, seed=seed
    )
    assert again == found and found.summary()["tokens"] == list(found.tokens)


def test_a_search_that_still_improves_or_has_no_slopes_says_so() -> None:
    toy, allowed = Toy(3, 0), torch.arange(VOCABULARY)
    start = torch.tensor([[int(n) for n in row.argmin(-1)] for row in [toy.linear]])
    short = search_tokens(toy, toy.slopes, allowed, start, steps=1)
    long = search_tokens(toy, toy.slopes, allowed, start, steps=30)
    assert [flag.kind for flag in short.flags] == ["still improving"] and long.flags == () and long.value > short.value
    blind = search_tokens(toy, lambda one: torch.zeros(3, VOCABULARY), allowed, start, steps=3)
    assert "zero gradients" in [flag.kind for flag in blind.flags]


def test_a_search_ends_at_the_highest_possible_value() -> None:
    toy, allowed = Toy(2, 1), torch.arange(VOCABULARY)
    best = toy.best(allowed.tolist())
    start = random_tokens(allowed, 1, 2, 0)
    found = search_tokens(toy, toy.slopes, allowed, start, most=best - 1e-9, steps=1000, tries=64)
    assert found.value == pytest.approx(best) and found.tried < 1000 and found.flags == ()


def test_random_sequences_are_of_allowed_tokens_and_of_the_seed() -> None:
    allowed = torch.tensor([3, 9])
    drawn = random_tokens(allowed, 50, 4, seed=1)
    assert drawn.shape == (50, 4) and set(drawn.flatten().tolist()) == {3, 9}
    assert drawn.equal(random_tokens(allowed, 50, 4, seed=1)) and not drawn.equal(random_tokens(allowed, 50, 4, seed=2))

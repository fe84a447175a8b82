"""A text to learn and to be tried on: its blocks for training and testing, clean and attacked."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from holdfast.attacks import AttackedText, swap_words
from holdfast.data import Blocks, Document, Tokenizer, TrainingBatches, corpus, tokenizer
from holdfast.data.cuts import CUTS
from holdfast.train.recipe import Recipe

ATTACK_SEED = 0  # one attacked set for all: it is the routers that are compared


@dataclass(frozen=True)
class Trial:
    """A text that a trained model is scored on; `touched` marks targets that the attack put there."""

    name: str
    blocks: Blocks
    touched: Tensor | None = None  # (T,) bool, of each token


class TextTask:
    """The text of a recipe, cut as the recipe says. `folder` is where named sources are looked for."""

    def __init__(self, recipe: Recipe, folder: Path | None = None) -> None:
        self.recipe = recipe
        self.corpus = corpus(recipe.data.source, folder=folder)
        size = recipe.data.vocabulary if recipe.data.tokens in CUTS else None
        self.tokenizer: Tokenizer = tokenizer(self.corpus, recipe.data.tokens, size=size)

    @cached_property
    def training(self) -> Blocks:
        return self._blocks(self.corpus.documents("train"))

    def batches(self, seed: int) -> TrainingBatches:
        """The training batches of a seed, the same for every router."""
        return TrainingBatches(self.training, self.recipe.training.batch * self.recipe.training.accumulate, seed)

    @cached_property
    def clean(self) -> Trial:
        return Trial("clean", self._blocks(self.corpus.documents("test")))

    @cached_property
    def attack(self) -> AttackedText:
        documents = list(self.corpus.documents("test"))
        return swap_words(
            [document.text for document in documents],
            rate=self.recipe.attack.rate,
            token=self.recipe.attack.token,
            seed=ATTACK_SEED,
            keys=[document.title for document in documents],
        )

    @cached_property
    def attacked(self) -> Trial:
        titles = [document.title for document in self.corpus.documents("test")]
        documents = [Document(title, text.encode()) for title, text in zip(titles, self.attack.texts, strict=True)]
        touched = torch.cat(list(self._touched(documents))) if self.tokenizer.name in CUTS else None
        return Trial("attacked", self._blocks(documents), touched)

    @property
    def attacked_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.attack.texts)

    def _blocks(self, documents: object) -> Blocks:
        return Blocks(self.tokenizer.stream(documents), self.recipe.data.length)  # type: ignore[arg-type]

    def _touched(self, documents: list[Document]) -> Iterator[Tensor]:
        """For each token of the attacked documents, whether it is the attack's."""
        cut = CUTS[self.tokenizer.name]
        token = next(iter(cut.pieces([self.recipe.attack.token])))
        for document in documents:
            pieces = [*cut.pieces(document.lines()), *cut.ends()]
            yield torch.tensor([piece == token for piece in pieces], dtype=torch.bool)

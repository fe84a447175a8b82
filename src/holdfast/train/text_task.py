"""A text to learn and to be tried on: its blocks for training and testing, clean and attacked."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from holdfast.attacks import AttackedText, misspell, swap_words
from holdfast.data import Blocks, Corpus, Document, Order, Tokenizer, corpus, tokenizer
from holdfast.data.cuts import CUTS
from holdfast.hub import trace
from holdfast.train.evaluation import score_text
from holdfast.train.recipe import Recipe
from holdfast.train.task import Examples, Inputs, Measure, Task, first_experts, forward

ATTACK_SEED = 0
WATCHED = 2048  # tokens of the probe, about
SHOWN = 160  # tokens of the view
CHOSEN_BY = 65_536  # tokens of the validation text at most


@final
@dataclass(frozen=True)
class Trial:
    """A text that a trained model is scored on. `kept` marks the tokens that the attack leaves, or will leave, alone."""

    blocks: Blocks
    bytes: int
    kept: Tensor  # (T,) bool, of each token


@final
class TextTask(Task):
    """The text of a recipe. `folder` is where named sources are looked for; `known` a tokeniser that is there already."""

    def __init__(self, recipe: Recipe, folder: Path | None = None, *, known: Tokenizer | None = None) -> None:
        self.recipe = recipe
        self.corpus: Corpus = corpus(recipe.data.source, folder=folder)
        size = recipe.data.vocabulary if recipe.data.tokens in CUTS else None
        self.tokenizer: Tokenizer = known or tokenizer(self.corpus, recipe.data.tokens, size=size)

    @property
    def measure(self) -> Measure:
        attack = f"a swap of {self.attack.realised:.1%} of its words"
        return Measure("perplexity", "perplexity a token on the test text", attack)

    def describe(self) -> dict[str, Any]:
        return {"data": self.corpus.describe(), "attack": self.attack.summary()}

    def state(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.describe()}

    def dense(self) -> Any:
        import transformers

        part = self.recipe.model
        config = transformers.AutoConfig.for_model(part.family, vocab_size=len(self.tokenizer), **part.config)
        return transformers.AutoModelForCausalLM.from_config(config)

    def examples(self, seed: int) -> Examples:
        blocks, training = _filled(self.training), self.recipe.training
        order = Order(blocks.whole, training.batch * training.accumulate, seed)  # without the padded block at the end
        return Examples(order, partial(_inputs, blocks), training.steps)

    def validation(self) -> Dataset[Inputs]:
        return _Blocks(_filled(self._blocks(self.corpus.documents("valid"), CHOSEN_BY), "held-out text"))

    @cached_property
    def training(self) -> Blocks:
        return self._blocks(self.corpus.documents("train"))

    @cached_property
    def attack(self) -> AttackedText:
        """Words swapped, as the recipe says: one attacked text for all, it is the routers that are compared."""
        return self.attacked_with(swap_words, token=self.recipe.attack.token)

    @cached_property
    def clean(self) -> Trial:
        return self.trials(self.attack)[0]

    @cached_property
    def attacked(self) -> Trial:
        return self.trials(self.attack)[1]

    @cached_property
    def misspelt(self) -> Trial:
        return self.trials(self.attacked_with(misspell))[1]

    def attacked_with(
        self, attack: Callable[..., AttackedText], *, rate: float | None = None, seed: int = ATTACK_SEED, **options: Any
    ) -> AttackedText:
        """The test text under an attack, by default at the recipe's rate."""
        keys, texts = [document.title for document in self._test], [document.text for document in self._test]
        return attack(texts, rate=self.recipe.attack.rate if rate is None else rate, seed=seed, keys=keys, **options)

    def trials(self, attack: AttackedText) -> tuple[Trial, Trial]:
        """The clean text and the attacked one; in both, what the attack leaves alone is known."""
        changed = [Document(old.title, new.encode()) for old, new in zip(self._test, attack.texts, strict=True)]
        return self._trial(self._test, partial(attack.touched, clean=True)), self._trial(changed, attack.touched)

    def score(self, model: Any) -> dict[str, Any]:
        found = {"clean": score_text(model, self.clean), "attacked": score_text(model, self.attacked)}
        if self.recipe.attack.rate:
            found["trials"] = {"typos": score_text(model, self.misspelt, routing=False)}
        return found

    def inputs_to_score(self) -> int:
        trials = [self.clean, self.attacked, *([self.misspelt] if self.recipe.attack.rate else [])]
        return sum(len(trial.blocks) for trial in trials)

    def probe(self) -> Inputs:
        blocks = self.clean.blocks
        batch = blocks.batch(range(min(len(blocks), -(-WATCHED // blocks.length))))
        return {"input_ids": batch.inputs, "attention_mask": batch.mask.long()}

    def view(self, model: Any) -> Mapping[str, Any]:
        inputs = {name: tensor[:1, :SHOWN] for name, tensor in self.probe().items()}
        with torch.no_grad(), trace(model) as routes:
            forward(model, inputs)
        count = int(inputs["attention_mask"].sum())
        pieces = [self.tokenizer.decode([token]) for token in inputs["input_ids"][0, :count].tolist()]
        return {"kind": "text", "pieces": pieces, "experts": [layer[:count].tolist() for layer in first_experts(routes)]}

    @cached_property
    def _test(self) -> list[Document]:
        limit = self.recipe.data.test_bytes
        if not (found := list(_beginning(self.corpus.documents("test"), limit))):
            raise ValueError(f"data.test_bytes is {limit}, which is less than the first line of the test text.")
        return found

    def _trial(self, documents: list[Document], touched: Callable[..., Any]) -> Trial:
        masks = [
            touched(place, self.tokenizer.spans(document, first=place == 0)) for place, document in enumerate(documents)
        ]
        kept = ~torch.cat([torch.from_numpy(mask) for mask in masks])
        blocks = self._blocks(documents)
        assert len(kept) == len(blocks.tokens), "every token has a place in the text"
        return Trial(blocks, sum(len(document.data) for document in documents), kept)

    def _blocks(self, documents: Iterable[Document], limit: int | None = None) -> Blocks:
        return Blocks(self.tokenizer.stream(documents, limit), self.recipe.data.length)


class _Blocks(Dataset[Inputs]):
    """Every block but a padded one at the end."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return self.blocks.whole

    def __getitems__(self, places: list[int]) -> Inputs:
        return _inputs(self.blocks, torch.tensor(places))


def _filled(blocks: Blocks, what: str = "text") -> Blocks:
    if not blocks.whole:
        raise ValueError(f"a {what} of {len(blocks.tokens)} tokens does not fill one block of {blocks.length}.")
    return blocks


def _inputs(blocks: Blocks, numbers: Tensor) -> Inputs:
    batch = blocks.batch(numbers)
    return {"input_ids": batch.inputs, "labels": batch.labels, "shift_labels": batch.labels}


def _beginning(documents: Iterable[Document], limit: int | None) -> Iterable[Document]:
    """So many bytes of the documents, the last cut after a line."""
    left = limit
    for document in documents:
        if left is None or len(document.data) <= left:
            yield document
        elif cut := document.data.rfind(b"\n", 0, left) + 1:
            yield Document(document.title, document.data[:cut])
        left = None if left is None else left - len(document.data)
        if left is not None and left <= 0:
            return

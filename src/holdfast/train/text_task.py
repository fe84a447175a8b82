"""Texts to learn and to be evaluated on: blocks for training, validation and testing, clean and attacked.

A text attack changes some words. Its cost is measured on the untouched words, because they are the same targets in the clean
text and in the attacked one; `TextTask.scored_texts` finds the tokens that both texts share.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from holdfast.attacks import AttackedText, Scored, Version, attack_texts, find_attack, swap_words, swappable, words_in
from holdfast.attacks.text import Span, Spans
from holdfast.data import Blocks, Corpus, Document, Tokenizer, corpus, tokenizer
from holdfast.data.encoded_texts import EncodedTexts
from holdfast.data.tokenizers import Vocabulary, token_texts
from holdfast.hub.tracing import require_known_tokens, require_positions
from holdfast.metrics import ChosenMetrics, block_losses, cost_of_attack, token_nll
from holdfast.metrics.token_routes import MOST_TOKENS, Example, View, tokens_to_show
from holdfast.train.recipe import TEXT_METHODS, Recipe
from holdfast.train.snapshots import Changed, record_routes, shown_routes
from holdfast.train.start import start_model, start_tokenizer
from holdfast.train.task import (
    AttackTable,
    Examples,
    HeldOut,
    Inputs,
    Measure,
    Task,
    evaluating,
    without_attack_warnings,
)
from holdfast.train.text_guides import embedding_neighbours, language_score, read_synonyms, sentence_similarity

ATTACK_SEED, TRAINING_ATTACK_SEED = 0, 1  # of the test texts, and of the training texts for robust training
WORD_SWAP = "words"  # the attack of a recipe that names none
PROBE_TOKENS = 2048  # rounded up to whole blocks
LETTERS_PER_TOKEN = 64  # more than a token has: limits how much of a long document is read
VALIDATION_TOKENS = 65_536  # at most
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 32768}  # when scoring; at least one block
LOGITS_PER_BATCH = 2**28  # at most: 1 GiB of float32


class TextsTask(Task):
    """What tasks on texts share: a tokeniser, and attacks on the words of the test texts (abstract)."""

    tokenizer: Tokenizer
    swapped: ClassVar[tuple[str, str]]  # in the description of an attack: whose words are swapped, and what for by default

    @abstractmethod
    def test_texts(self) -> tuple[list[str], list[str] | None]:
        """Return the test texts, and names for them if they have some, which decide what an attack draws for each."""

    @property
    @abstractmethod
    def training(self) -> Blocks | EncodedTexts:
        """The tokens of the training texts."""

    def pieces(self) -> list[Spans] | None:
        """Return the spans of tokens that an attack may change as a whole only; None: it may change every letter."""
        return None

    def token_counts(self) -> Tensor:
        return torch.bincount(self.training.tokens.long(), minlength=len(self.tokenizer))

    @cached_property
    def attack(self) -> AttackedText:
        """The test texts, attacked as the recipe says: the same attacked texts for every router."""
        part = self.recipe.attack
        if part.token is None:
            return self.attacked_with(part.name or WORD_SWAP)
        texts, keys = self.test_texts()
        with without_attack_warnings():
            return swap_words(texts, rate=part.rate, seed=ATTACK_SEED, keys=keys, token=part.token)

    def attacked_with(
        self, name: str, *, rate: float | None = None, seed: int = ATTACK_SEED, guides: Mapping[str, Any] | None = None
    ) -> AttackedText:
        """Return the test texts under the attack of this name, by default at the recipe's rate; `guides` read the model."""
        texts, keys = self.test_texts()
        rate = self.recipe.attack.rate if rate is None else rate
        return self._attack(name, texts, keys=keys, pieces=self.pieces, rate=rate, seed=seed, **(guides or {}))

    def _attack(self, name: str, texts: list[str], **how: Any) -> AttackedText:
        """Return texts under the attack of this name; `how` are options of `attack_texts`."""

        def known_words() -> list[str]:
            # Tokenisers without a vocabulary of words can encode every word.
            known = self.tokenizer.words if isinstance(self.tokenizer, Vocabulary) else None
            return swappable(known) if known else words_in(texts)

        with without_attack_warnings():
            return attack_texts(find_attack(name, "text"), texts, words=known_words, **how)

    def _attacked_training_texts(
        self, texts: list[str], keys: list[str] | None = None, pieces: list[Spans] | None = None
    ) -> list[str] | None:
        """Return the training texts as robust training attacks them; None if it attacks no words."""
        part = self.recipe.robust
        if part.method not in TEXT_METHODS or part.budget is None:
            return None
        how: dict[str, Any] = {"keys": keys, "pieces": lambda: pieces, "rate": part.budget, "seed": TRAINING_ATTACK_SEED}
        return list(self._attack(part.method, texts, **how).texts)

    def described_attack(self) -> str:
        """Return the attack of the recipe in a sentence."""
        whose, others = self.swapped
        share = f"{self.attack.realised:.1%} of {whose} words"
        if self.recipe.attack.name not in (None, WORD_SWAP):
            return f"{self.attack.attack}: {share}"
        return f"a swap of {share} for {self.attack.options.get('token', others)}"

    @abstractmethod
    def _score(self, model: Any) -> Callable[[int, Sequence[Version]], Scored]:
        """Return the function that scores versions of a test text, for attacks that the model guides."""

    def passages(self) -> list[list[Span]] | None:
        """Return the parts of each test text that such attacks change on their own; None: each text is one."""
        return None

    @abstractmethod
    def _attack_table(self, model: Any, kind: str, attack: AttackedText) -> AttackTable:
        """Return the caption, columns, rows and summary of the table of an attack."""

    def _view(self, model: Any, inputs: Inputs, changed: Mapping[str, Changed] | None = None) -> View:
        """Return the texts of these inputs with the routes of their tokens, and what `changed` inputs change in them."""
        recorded = record_routes(model, inputs)
        rows = inputs["attention_mask"].flatten().nonzero().flatten()[: tokens_to_show(len(recorded.routings))]
        ids, length = inputs["input_ids"].flatten()[rows], inputs["input_ids"].shape[1]
        texts = [ids[rows // length == text].tolist() for text in (rows // length).unique().tolist()]
        examples = [Example(token_texts(self.tokenizer.decode, text)) for text in texts]
        return View(examples, shown_routes(model, inputs, recorded, [rows] * len(recorded.routings), changed or {}))


def attack_words(
    model: Any,
    task: Task,
    kind: str,
    rates: Sequence[float],
    *,
    seed: int,
    synonyms: Path | None = None,
    encoder: Path | None = None,
) -> AttackTable:
    """Attack the words of the test texts with a registered attack, at one rate or several; the rates are ascending.

    Return one table, with the curve of its first figure. Raise ValueError if the task has no texts.

    synonyms    a file with synonyms of words, for attacks that take neighbours of words
    encoder     a folder with a sentence encoder, for attacks that take the similarity of texts
    """
    if not isinstance(task, TextsTask):
        raise ValueError(f"{kind} attacks texts, but {task.not_texts}.")
    for keyword, given in (("neighbours", synonyms), ("similarity", encoder)):
        if given is not None and keyword not in find_attack(kind, "text").keywords:
            raise ValueError(f"{kind} does not read {given}: it takes no {keyword}.")
    guides: dict[str, Any] = {
        "score": lambda: task._score(model),
        "neighbours": lambda: read_synonyms(synonyms) if synonyms else embedding_neighbours(model, task.tokenizer),
        "similarity": (lambda: sentence_similarity(encoder, model.device)) if encoder else None,
        "passages": task.passages,
    }
    tables = []
    for rate in rates:
        with evaluating(model, routing=False):
            attack = task.attacked_with(kind, rate=rate, seed=seed, guides=guides)
        title = f"{attack.attack}: {attack.changed} of {sum(attack.words)} words, {attack.realised:.2%}"
        flags = [flag.summary() for flag in attack.flags]
        tables.append({"title": title, "flags": flags, **task._attack_table(model, kind, attack)})
    first = tables[0]
    line = {"budgets": [0.0, *rates], "figure": [first["rows"][0][1], *(table["rows"][1][1] for table in tables)]}
    found = {**first, "lines": {"x": "rate", "y": first["columns"][1], "curves": {kind: line}}}
    if len(tables) == 1:
        return found
    # Which words are untouched depends on the rate, so each rate has a clean row of its own.
    return found | {
        "title": "; ".join(table["title"] for table in tables),
        "caption": None,
        "columns": ["", "rate", *first["columns"][1:]],
        "rows": [[row[0], rate, *row[1:]] for rate, table in zip(rates, tables, strict=True) for row in table["rows"]],
        "flags": [flag for table in tables for flag in table["flags"]],
        "summary": {"attacks": [table["summary"] for table in tables]},
    }


def tokens_per_batch(model: Any) -> int:
    """Return the number of tokens of a forward when a model is scored."""
    return TOKENS_PER_BATCH.get(model.device.type, TOKENS_PER_BATCH["cpu"])


def scored_tokens(model: Any) -> int:
    """Return the same number where the logits of all tokens are kept, which may take more memory than the model."""
    return min(tokens_per_batch(model), LOGITS_PER_BATCH // model.config.vocab_size)


@final
@dataclass(frozen=True)
class ScoredText:
    """A text that a trained model is scored on, clean or attacked, and which of its tokens both texts share."""

    blocks: Blocks
    bytes: int
    place: Tensor  # (T,) int64: the same token's place in the clean text, -1 if the attack changes the token

    @property
    def block(self) -> Tensor:
        """(T,) int64: the block of the clean text that predicts this token, -1 if the attack changes the token."""
        return torch.where(self.place < 0, -1, (self.place - 1).clamp_min(0) // self.blocks.length)

    @property
    def untouched(self) -> Tensor:
        """Return (T,) bool: the tokens that the attack does not change."""
        return self.place >= 0


@final
class TextTask(TextsTask):
    """The text of a recipe.

    folder   where named sources are searched for
    known    an existing tokeniser to use instead of making one
    """

    swapped = ("its", "others of the vocabulary")
    split = "test"  # whose text is scored

    def __init__(self, recipe: Recipe, folder: Path | None = None, *, known: Tokenizer | None = None) -> None:
        self.recipe = recipe
        self.source = self.corpus = corpus(recipe.data.source, folder=folder, column=recipe.data.text)
        self.tokenizer = self.audit_tokenizer = known or recipe_tokenizer(recipe, lambda: self.corpus)
        self._attacked_tokens: dict[tuple[str, float | None], Tensor] = {}  # of training texts, by robust method and budget

    def audit_inputs(self, tokens: int) -> Iterator[str]:
        left = LETTERS_PER_TOKEN * tokens
        for document in self.corpus.documents("test"):
            text = document.text[:left]
            left -= len(text)
            yield text
            if left <= 0:
                return

    @property
    def measure(self) -> Measure:
        return Measure("perplexity", "perplexity per token on the test text", self.described_attack())

    def describe(self) -> dict[str, Any]:
        return {"data": self.corpus.describe(), "attack": self.attack.summary()}

    def state(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.describe()}

    def initial_model(self) -> Any:
        model = start_model(self.recipe.model, "text", vocab_size=len(self.tokenizer))
        require_positions(model, self.recipe.data.length)
        return model

    def examples(self, seed: int) -> Examples:
        blocks, attacked = _require_full_block(self.training), self._attacked_training
        view = None if attacked is None else lambda numbers: {"input_ids": attacked.batch(numbers).inputs}
        return self._examples(blocks.whole, seed, partial(_inputs, blocks), view)  # without the padded block at the end

    @property
    def _attacked_training(self) -> Blocks | None:
        """The training text as robust training attacks it, token by token; None if it attacks no words.

        Raise ValueError if an attacked word is not exactly one token: then the blocks would not be those of the clean text.
        """
        part = self.recipe.robust
        if part.method not in TEXT_METHODS:
            return None
        key = part.method, part.budget
        if key not in self._attacked_tokens:
            documents = list(self.corpus.documents("train"))
            _, spans = self.tokenizer.stream_with_spans(documents)
            texts = [document.text for document in documents], [document.title for document in documents]
            is_words = isinstance(self.tokenizer, Vocabulary) and self.tokenizer.words
            attacked = self._attacked_training_texts(*texts, spans if is_words else None)
            assert attacked is not None
            changed = [Document(old.title, new.encode()) for old, new in zip(documents, attacked, strict=True)]
            tokens, after = self.tokenizer.stream_with_spans(changed)
            if any(len(one) != len(other) for one, other in zip(spans, after, strict=True)):
                raise ValueError(
                    f"robust.method {part.method} changes the number of tokens of this text: a language model needs a "
                    "vocabulary of whole words for it (data.tokens=words); pgd, fast, free and noise read any tokens."
                )
            self._attacked_tokens[key] = tokens
        return Blocks(self._attacked_tokens[key][: len(self.training.tokens)], self.recipe.data.length)

    def validation(self) -> Dataset[Inputs]:
        blocks = _require_full_block(self._blocks(self.corpus.documents("valid"), VALIDATION_TOKENS), "held-out text")
        return HeldOut(range(blocks.whole), partial(_inputs, blocks))  # without the padded block at the end

    @cached_property
    def training(self) -> Blocks:
        return self._blocks(self.corpus.documents("train"), self.recipe.data.train_tokens)

    def test_texts(self) -> tuple[list[str], list[str]]:
        return [document.text for document in self._test], [document.title for document in self._test]

    def pieces(self) -> list[Spans] | None:
        """Return the spans of tokens, for a vocabulary of words: a change inside a token would make that token unknown."""
        has_words = isinstance(self.tokenizer, Vocabulary) and self.tokenizer.words
        return self._clean[1] if has_words else None

    def passages(self) -> list[list[Span]]:
        """Return the parts of about the length of a block, cut between tokens: the context of a word when it is scored."""
        found = []
        for document, spans in zip(self._test, self._clean[1], strict=True):
            places = spans[spans[:, 0] < spans[:, 1], 0][:: self.recipe.data.length]  # without the ends of lines and texts
            cuts = [0, *places[1:].tolist(), len(document.text)]
            found.append(list(pairwise(cuts)))
        return found

    def _score(self, model: Any) -> Callable[[int, Sequence[Version]], Scored]:
        return language_score(model, self.tokenizer, scored_tokens(model))

    @cached_property
    def _clean(self) -> tuple[Tensor, list[Spans]]:
        """The tokens of the test text, and their places in its documents."""
        return self.tokenizer.stream_with_spans(self._test)

    @cached_property
    def swaps(self) -> tuple[ScoredText, ScoredText]:
        """The clean text and the one with words swapped."""
        return self.scored_texts(self.attack)

    @property
    def clean(self) -> ScoredText:
        return self.swaps[0]

    @property
    def attacked(self) -> ScoredText:
        return self.swaps[1]

    @cached_property
    def typos(self) -> tuple[ScoredText, ScoredText]:
        """The clean text and the misspelt one."""
        return self.scored_texts(self.attacked_with("typos"))

    def scored_texts(self, attack: AttackedText) -> tuple[ScoredText, ScoredText]:
        """Return the clean text and the attacked one, each with the tokens that the attack does not change."""
        changed = [Document(old.title, new.encode()) for old, new in zip(self._test, attack.texts, strict=True)]
        (clean, clean_spans), (attacked, attacked_spans) = self._clean, self.tokenizer.stream_with_spans(changed)
        before, after = (Blocks(tokens, self.recipe.data.length) for tokens in (clean, attacked))
        places: list[tuple[Tensor, Tensor]] = []  # of common tokens, in both token sequences
        starts = [0, 0]
        for number, spans in enumerate(zip(clean_spans, attacked_spans, strict=True)):
            common = attack.common_tokens(number, *spans)
            places.append(tuple(torch.from_numpy(own) + start for own, start in zip(common, starts, strict=True)))  # type: ignore[arg-type]
            starts = [start + len(own) for start, own in zip(starts, spans, strict=True)]
        assert starts == [len(before.tokens), len(after.tokens)], "every token has a place in the text"
        old, new = (torch.cat(own) for own in zip(*places, strict=True))
        # The same characters may be another token next to a changed word. The first token of a text is not predicted, so a
        # token counts only if it is the first of both texts or of neither.
        same = (before.tokens[old] == after.tokens[new]) & ((old == 0) == (new == 0))
        return _scored_text(before, self._test, old, old, same), _scored_text(after, changed, new, old, same)

    def score(self, model: Any) -> dict[str, Any]:
        metrics = self.recipe.metrics
        (clean, before), (attacked, after) = (score_text(model, text, metrics=metrics) for text in self.swaps)
        found = {"clean": clean, "attacked": attacked}
        if self.recipe.attack.rate:
            typos, misspelt = score_text(model, self.typos[1], routing=False)
            attacked["cost"] = cost_between((self.clean, before), (self.attacked, after))
            typos["cost"] = cost_between((self.typos[0], before), (self.typos[1], misspelt))
            found["trials"] = {"typos": typos}
        if self.recipe.data.score_validation:
            texts = self._validation_texts.items()
            found["validation"] = {name: score_text(model, text, routing=False)[0]["figure"] for name, text in texts}
        return found

    def inputs_to_score(self) -> int:
        texts = [self.clean, self.attacked, *([self.typos[1]] if self.recipe.attack.rate else [])]
        if self.recipe.data.score_validation:
            texts += self._validation_texts.values()
        return sum(len(text.blocks) for text in texts)

    @cached_property
    def _validation_texts(self) -> dict[str, ScoredText]:
        """The validation text, clean and attacked as the test text is."""
        other = TextTask.__new__(TextTask)
        other.recipe, other.corpus, other.tokenizer, other.split = self.recipe, self.corpus, self.tokenizer, "valid"
        return {"clean": other.clean, "attacked": other.attacked}

    def probe(self) -> Inputs:
        return first_blocks(self.clean.blocks, PROBE_TOKENS)

    def view(self, model: Any) -> View:
        inputs = first_blocks(self.clean.blocks, MOST_TOKENS)
        # A row of the first blocks is a place in the text.
        untouched = self.attacked.untouched & (self.attacked.place < inputs["input_ids"].numel())
        after = untouched.nonzero().flatten()
        if not self.recipe.attack.rate or not len(after):
            return self._view(model, inputs)
        attacked = first_blocks(self.attacked.blocks, int(after.max()) + 1)
        changed = Changed(self.described_attack(), attacked, (self.attacked.place[after], after))
        return self._view(model, inputs, {self.attack.attack: changed})

    def _attack_table(self, model: Any, kind: str, attack: AttackedText) -> AttackTable:
        texts = self.scored_texts(attack)
        (clean, before), (attacked, after) = (score_text(model, text, routing=False) for text in texts)
        cost, scores = cost_between((texts[0], before), (texts[1], after)), {"clean": clean, kind: attacked}
        return {
            "caption": cost and f"On untouched words, the attack changes the perplexity by {cost['words']}.",
            "columns": ["", "perplexity", "of untouched words", "bits per byte"],
            "rows": [
                [name, score["figure"], score["figure_of_kept"], score["bits_per_byte"]] for name, score in scores.items()
            ],
            "summary": {"attack": attack.summary(), **scores, "cost": cost},
        }

    @cached_property
    def _test(self) -> list[Document]:
        limit, found = self.recipe.data.test_bytes, list[Document]()
        left = math.inf if limit is None else limit
        for document in self.corpus.documents(self.split):
            if len(document.data) <= left:
                found.append(document)
            elif end := document.data.rfind(b"\n", 0, int(left)) + 1:  # the last document is cut after a line
                found.append(Document(document.title, document.data[:end]))
            left -= len(document.data)
            if left <= 0:
                break
        if not found:
            raise ValueError(
                f"data.test_bytes is {limit}, which is less than the first line of the {self.split} text; use more."
            )
        return found

    def _blocks(self, documents: Iterable[Document], limit: int | None = None) -> Blocks:
        return Blocks(self.tokenizer.stream(documents, limit), self.recipe.data.length)


def first_blocks(blocks: Blocks, tokens: int) -> Inputs:
    """Return the blocks that contain the first tokens of a text."""
    batch = blocks.batch(range(min(len(blocks), -(-tokens // blocks.length))))
    return {"input_ids": batch.inputs, "attention_mask": batch.mask.long()}


def _inputs(blocks: Blocks, numbers: Tensor) -> Inputs:
    batch = blocks.batch(numbers)
    return {"input_ids": batch.inputs, "labels": batch.labels, "shift_labels": batch.labels}


def _require_full_block(blocks: Blocks, what: str = "text") -> Blocks:
    if not blocks.whole:
        raise ValueError(f"a {what} of {len(blocks.tokens)} tokens does not fill one block of {blocks.length}.")
    return blocks


def _scored_text(blocks: Blocks, documents: list[Document], places: Tensor, clean: Tensor, same: Tensor) -> ScoredText:
    """Return a text from the `places` of its common tokens, their places in the clean text, and which are the same token."""
    place = torch.full((len(blocks.tokens),), -1, dtype=torch.int64)
    place[places[same]] = clean[same]
    return ScoredText(blocks, sum(len(document.data) for document in documents), place)


@torch.no_grad()
def score_text(
    model: Any, text: ScoredText, *, routing: bool = True, metrics: Sequence[str] = ()
) -> tuple[dict[str, Any], Tensor]:
    """Score every token but the first once, in blocks of the training length; return the score and the losses, in nats.

    "figure" is the perplexity over all targets, "figure_of_kept" the one over the untouched targets: the same words in the
    clean text and in the attacked one. Of `metrics`, the names of further metrics, the results are under "metrics".
    """
    chosen = ChosenMetrics(metrics)
    require_known_tokens(model, text.blocks.tokens)
    nlls = list[Tensor]()
    batch_size = max(1, scored_tokens(model) // text.blocks.length)
    with evaluating(model, routing=routing) as measured:
        for batch in text.blocks.batches(batch_size):
            device = model.device
            out = model(input_ids=batch.inputs.to(device), attention_mask=batch.mask.long().to(device), use_cache=False)
            nlls.append(token_nll(out.logits, batch.labels.to(device)).cpu()[batch.mask].double())
            if chosen:
                mask = batch.mask.to(device)
                chosen.update(out.logits[mask], batch.labels.to(device)[mask])
    found = torch.cat(nlls)
    untouched, places = found[text.untouched[1:]], torch.arange(len(found)) // text.blocks.length  # of predicted tokens
    total = float(found.sum())
    score = {
        "figure": perplexity(total, len(found)),
        "figure_of_kept": perplexity(float(untouched.sum()), len(untouched)) if len(untouched) else None,
        "nll": total,
        "tokens": len(found),
        "kept_tokens": len(untouched),
        "bits_per_byte": total / math.log(2) / text.bytes,
        "per_example": block_losses(found, places, len(text.blocks)).stored(),
        **chosen.result(),
        **measured,
    }
    return score, found


def perplexity(nll: float, tokens: int) -> float:
    """Return exp(nll / tokens), or infinity if that is too large for a float."""
    try:
        return math.exp(nll / tokens)
    except OverflowError:
        return math.inf


def cost_between(clean: tuple[ScoredText, Tensor], attacked: tuple[ScoredText, Tensor]) -> dict[str, Any] | None:
    """Return the cost of an attack on the untouched words, from the losses of both texts."""
    count = len(clean[0].blocks)
    before, after = (block_losses(losses, text.block[1:], count) for text, losses in (clean, attacked))
    cost = cost_of_attack(before, after)
    return None if cost is None else cost.summary()


def recipe_tokenizer(recipe: Recipe, training: Callable[[], Corpus]) -> Tokenizer:
    """Return the tokeniser of the recipe's checkpoint, or a new one from the `training` texts."""
    part = recipe.data
    if recipe.model.checkpoint is not None:
        return start_tokenizer(recipe.model.checkpoint, part.tokens)
    return tokenizer(training(), part.tokens or "words", size=part.vocabulary)

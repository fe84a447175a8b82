"""A model scored on a text: how well it predicts, and what its routers did meanwhile.

A text to learn and to be tried on: its blocks for training and testing, clean and attacked.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from holdfast.attacks import GENERIC, AttackedText, misspell, swap_words, swappable, words_in
from holdfast.data import Blocks, Corpus, Document, Order, Tokenizer, corpus, tokenizer
from holdfast.data.documents import CUTS
from holdfast.data.tokenizers import Vocabulary
from holdfast.hub import has_routers, trace
from holdfast.hub.tracing import require_known
from holdfast.metrics import BlockLosses, RoutingReport, boundary_of, cost_of_attack, token_nll
from holdfast.routing import Router
from holdfast.train.recipe import Recipe
from holdfast.train.task import Examples, Inputs, Measure, Task, first_experts, forward

TOKENS = {"cpu": 2048, "cuda": 32768}  # in a batch, about; more only where one block has more
LOGITS = 2**28  # numbers in a batch's logits, at most: 1 GiB


def routing_report(model: Any) -> RoutingReport:
    """For `trace(model, each=...)`, knowing the borders of the model's own routers."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return RoutingReport(boundaries={layer: boundary_of(router) for layer, router in enumerate(routers)})


@torch.no_grad()
def score_text(model: Any, trial: "Trial", *, routing: bool = True, losses: list[Tensor] | None = None) -> dict[str, Any]:
    """Every token but the first is scored once, in blocks of the training length.

    "figure" is the perplexity over all targets, "figure_of_kept" over those that the attack leaves alone: the same words in
    the clean text and in the attacked one. The losses of all tokens, in nats, are appended to `losses`.
    """
    require_known(model, trial.blocks.tokens)
    was_training = model.training
    model.eval()
    total = of_kept = 0.0
    tokens = kept_tokens = 0
    place, all_kept = 1, trial.kept  # the first token is not predicted
    tokens_at_once = min(TOKENS.get(model.device.type, TOKENS["cpu"]), LOGITS // model.config.vocab_size)
    batch_size = max(1, tokens_at_once // trial.blocks.length)
    with ExitStack() as stack:
        report = routing_report(model) if routing and has_routers(model) else None
        routes = stack.enter_context(trace(model, each=report.each)) if report is not None else None
        for batch in trial.blocks.batches(batch_size):
            device = model.device
            out = model(input_ids=batch.inputs.to(device), attention_mask=batch.mask.long().to(device), use_cache=False)
            nll = token_nll(out.logits, batch.labels.to(device)).cpu()[batch.mask].double()
            kept = all_kept[place : place + nll.numel()]
            total, tokens = total + float(nll.sum()), tokens + nll.numel()
            of_kept, kept_tokens = of_kept + float(nll[kept].sum()), kept_tokens + int(kept.sum())
            if losses is not None:
                losses.append(nll)
            place += nll.numel()
    model.train(was_training)
    found: dict[str, Any] = {
        "figure": perplexity(total, tokens),
        "figure_of_kept": perplexity(of_kept, kept_tokens) if kept_tokens else None,
        "nll": total,
        "tokens": tokens,
        "kept_tokens": kept_tokens,
        "bits_per_byte": total / math.log(2) / trial.bytes,
    }
    if report is not None and routes is not None:
        report.names = routes.names
        found["routing"] = report.result()
    return found


def perplexity(nll: float, tokens: int) -> float:
    """Infinite where a model is so bad that no float holds it."""
    try:
        return math.exp(nll / tokens)
    except OverflowError:
        return math.inf


ATTACK_SEED = 0
WATCHED = 2048  # tokens of the probe, about
SHOWN = 160  # tokens of the view
CHOSEN_BY = 65_536  # tokens of the validation text at most


@final
@dataclass(frozen=True)
class Trial:
    """A text that a trained model is scored on, clean or attacked, and which of its tokens both texts have."""

    blocks: Blocks
    bytes: int
    block: Tensor  # (T,) int64, of each token: the block of the clean text that predicts it, -1 if the attack changes it

    @property
    def kept(self) -> Tensor:
        """(T,) bool: the tokens that the attack leaves, or will leave, alone."""
        return self.block >= 0


def cost_between(clean: tuple[Trial, list[Tensor]], attacked: tuple[Trial, list[Tensor]]) -> dict[str, Any] | None:
    """The cost of an attack on the words that it left alone, from the losses that `score_text` appended."""
    count = len(clean[0].blocks)
    before, after = (BlockLosses.of(torch.cat(losses), trial.block[1:], count) for trial, losses in (clean, attacked))
    cost = cost_of_attack(before, after)
    return None if cost is None else cost.summary()


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
        token = self.attack.options.get("token", "others of the vocabulary")
        attack = f"a swap of {self.attack.realised:.1%} of its words for {token}"
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
        return self.swapped(self.recipe.attack.token)

    def swapped(self, token: str | None = None, **options: Any) -> AttackedText:
        """The test text with words swapped for `token`, or by default for words that the model knows."""
        known = self.tokenizer.words if isinstance(self.tokenizer, Vocabulary) else None  # others can write every word
        words = swappable(known) if known else words_in(document.text for document in self._test)
        if token is not None or len({word.lower() for word in words}) < 2:  # there is nothing else to swap in
            return self.attacked_with(swap_words, token=token or GENERIC, **options)
        # Only words that are one token: one that is part of a token would make an unknown token of it.
        pieces = [self.tokenizer.spans(document, first=False) for document in self._test] if known else None
        return self.attacked_with(swap_words, words=words, pieces=pieces, **options)

    @cached_property
    def swaps(self) -> tuple[Trial, Trial]:
        """The clean text and the one with words swapped."""
        return self.trials(self.attack)

    @property
    def clean(self) -> Trial:
        return self.swaps[0]

    @property
    def attacked(self) -> Trial:
        return self.swaps[1]

    @cached_property
    def typos(self) -> tuple[Trial, Trial]:
        """The clean text and the misspelt one."""
        return self.trials(self.attacked_with(misspell))

    @property
    def misspelt(self) -> Trial:
        return self.typos[1]

    def attacked_with(
        self, attack: Callable[..., AttackedText], *, rate: float | None = None, seed: int = ATTACK_SEED, **options: Any
    ) -> AttackedText:
        """The test text under an attack, by default at the recipe's rate."""
        keys, texts = [document.title for document in self._test], [document.text for document in self._test]
        return attack(texts, rate=self.recipe.attack.rate if rate is None else rate, seed=seed, keys=keys, **options)

    def trials(self, attack: AttackedText) -> tuple[Trial, Trial]:
        """The clean text and the attacked one; in both, the tokens that the attack leaves alone are known."""
        changed = [Document(old.title, new.encode()) for old, new in zip(self._test, attack.texts, strict=True)]
        before, after = self._blocks(self._test), self._blocks(changed)
        places: list[tuple[Tensor, Tensor]] = []
        starts = [0, 0]
        for number, documents in enumerate(zip(self._test, changed, strict=True)):
            spans = [self.tokenizer.spans(document, first=number == 0) for document in documents]
            shared = attack.shared(number, *spans)
            places.append(tuple(torch.from_numpy(own) + start for own, start in zip(shared, starts, strict=True)))  # type: ignore[arg-type]
            starts = [start + len(own) for start, own in zip(starts, spans, strict=True)]
        assert starts == [len(before.tokens), len(after.tokens)], "every token has a place in the text"
        old, new = (torch.cat(own) for own in zip(*places, strict=True))
        # The same characters may be another token beside a changed word; and what is predicted in one must be in both.
        same = (before.tokens[old] == after.tokens[new]) & ((old == 0) == (new == 0))
        return _trial(before, self._test, old, old, same), _trial(after, changed, new, old, same)

    def score(self, model: Any) -> dict[str, Any]:
        clean, attacked, misspelt = (list[Tensor]() for _ in range(3))
        found = {
            "clean": score_text(model, self.clean, losses=clean),
            "attacked": score_text(model, self.attacked, losses=attacked),
        }
        if self.recipe.attack.rate:
            typos = score_text(model, self.misspelt, routing=False, losses=misspelt)
            found["attacked"]["cost"] = cost_between((self.clean, clean), (self.attacked, attacked))
            typos["cost"] = cost_between((self.typos[0], clean), (self.typos[1], misspelt))
            found["trials"] = {"typos": typos}
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


def _trial(blocks: Blocks, documents: list[Document], places: Tensor, clean: Tensor, same: Tensor) -> Trial:
    """`places` of shared tokens, their places in the clean text, and which of them are the same."""
    block = torch.full((len(blocks.tokens),), -1, dtype=torch.int64)
    block[places[same]] = (clean[same] - 1).clamp_min(0) // blocks.length
    return Trial(blocks, sum(len(document.data) for document in documents), block)


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

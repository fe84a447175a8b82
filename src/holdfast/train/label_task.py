"""Texts and pairs of texts to classify or to score: examples for training, validation and testing, clean and attacked.

The metric is a metric of labels (`metrics.tasks`), by default the one that the data are usually scored by. Routers are
compared by it, higher is better; for accuracy by the share of wrong classes in percent, lower is better. A metric that is
not defined, as a correlation with constant predictions, gives NaN and a reason.

An attack changes words of the test texts; the labels stay. Besides the metric it has the share of predictions that change,
and the difference to the clean texts with a 95% interval over examples, paired by example.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.attacks import AttackedText, Scored, Version
from holdfast.data import Corpus, Document, LabelledText, Tokenizer, text_set
from holdfast.data.documents import WORD_SPLITTERS
from holdfast.data.encoded_texts import EncodedTexts, PairEncoder
from holdfast.data.labelled_texts import flat_texts
from holdfast.data.tokenizers import HubTokenizer
from holdfast.errors import unknown_name
from holdfast.hub.tracing import own_hooks, require_positions
from holdfast.metrics import ChosenMetrics, Predictions, Shares, difference_of, level_of
from holdfast.metrics.tasks import IGNORED, LABEL_METRICS, label_metric, label_metrics
from holdfast.metrics.token_routes import MOST_TOKENS, View
from holdfast.stored import without_nan
from holdfast.train.recipe import Recipe
from holdfast.train.start import padding_token, start_model
from holdfast.train.task import (
    AttackTable,
    Examples,
    HeldOut,
    Inputs,
    Measure,
    NoisyExample,
    evaluating,
    evenly_spaced,
    forward,
)
from holdfast.train.text_guides import label_score
from holdfast.train.text_task import TextsTask, recipe_tokenizer, tokens_per_batch

PROBE_TOKENS = 2048  # with padding, rounded up to whole texts
VALIDATION_TEXTS = 4096  # at most
MOST_CUT = 0.5  # share of training texts that fill the length; above it there is a warning
ROWS = 4096  # of an embedding table in memory at a time
ROUNDED_TO = 8  # tokens: the width of training batches is a multiple of this

Values = npt.NDArray[Any]


@final
class LabelTask(TextsTask):
    """The labelled texts of a recipe.

    folder      where named sources are searched for
    known       an existing tokeniser to use instead of making one
    classes     of a trained model, in the order of its outputs; () if it predicts a number
    test_only   all rows of a single file are the test split: the model is not trained
    """

    swapped = ("the", "other words")
    noise_unit = "the embeddings of all tokens of a text together, as a multiple of the root mean square of their entries"

    def __init__(
        self,
        recipe: Recipe,
        folder: Path | None = None,
        *,
        known: Tokenizer | None = None,
        classes: Sequence[str] | None = None,
        test_only: bool = False,
    ) -> None:
        self.recipe = recipe
        part = recipe.data
        if part.metric is not None and part.metric not in LABEL_METRICS:
            raise ValueError(f"data.metric: {unknown_name('metric of labels', part.metric, LABEL_METRICS)}")
        wanted = None if part.metric is None else LABEL_METRICS[part.metric].numbers or None
        how: dict[str, Any] = {**part.columns(), "regression": wanted, "classes": classes, "test_only": test_only}
        self.source = self.text_set = text_set(part.source, folder=folder, **how)
        self.metric: str = part.metric or self.text_set.metric
        metric, classes, name = LABEL_METRICS[self.metric], self.text_set.classes, self.text_set.name
        if metric.numbers != self.text_set.is_regression:
            kind = "numbers to predict" if self.text_set.is_regression else "classes"
            raise ValueError(f"data.metric is {self.metric}, and the labels of {name} are {kind}; choose another metric.")
        if metric.two_classes and len(classes) != 2:
            raise ValueError(f"data.metric is {self.metric}, which is for two classes, and {name} has {len(classes)}.")
        self._require_metrics_of_labels()

        def training_texts() -> Corpus:
            counts_words = (part.tokens or "words") in WORD_SPLITTERS
            texts = flat_texts(self.text_set.texts("train")) if counts_words else []
            documents = [Document("text", text.encode("utf-8", "replace")) for text in texts]
            return Corpus(self.text_set.name, self.text_set.about, {"train": documents})

        self.tokenizer: Tokenizer = known or recipe_tokenizer(recipe, training_texts)
        pad = padding_token(self.tokenizer)
        self.encoder = PairEncoder(self.tokenizer, part.length, pad=pad, types=self._reads_token_types())
        self._attacked_texts: dict[tuple[str, float | None], EncodedTexts | None] = {}  # by robust method and budget
        of_transformers = self.preprocessor()
        # Both add the special tokens that a classifier reads.
        self.audit_tokenizer = self.encoder if of_transformers is None else of_transformers

    def _require_metrics_of_labels(self) -> None:
        """Raise ValueError if the recipe names further metrics, which are of classes, and the labels are numbers."""
        if self.recipe.metrics and self.text_set.is_regression:
            named = ", ".join(self.recipe.metrics)
            raise ValueError(f"metrics: {named} is of classes, and the labels of {self.text_set.name} are numbers.")

    def _reads_token_types(self) -> bool:
        """Return whether pairs are marked by token types: their tokeniser makes them, and the model has weights for them."""
        if not isinstance(self.tokenizer, HubTokenizer) or not self.text_set.has_pairs:
            return False
        if "token_type_ids" not in self.tokenizer.tokenizer.model_input_names:
            return False
        if self.recipe.model.family is None:
            return True  # a checkpoint has its own tokeniser
        import transformers

        config = transformers.AutoConfig.for_model(self.recipe.model.family, **self.recipe.model.config)
        return int(getattr(config, "type_vocab_size", 0) or 0) > 1

    def audit_inputs(self, tokens: int) -> Iterator[LabelledText]:
        return iter(self.text_set.texts("test"))

    @property
    def measure(self) -> Measure:
        metric, attack = LABEL_METRICS[self.metric], self.described_attack()
        if self.metric == "accuracy":
            return Measure("error, %", "share of test texts that are classified wrongly, in percent", attack)
        return Measure(metric.name, f"{metric.about}, on the test texts", attack, better="higher")

    @property
    def other_metrics(self) -> list[dict[str, str]]:
        """The recipe's further metrics; if the labels are numbers, the other correlation."""
        if not self.text_set.is_regression:
            return super().other_metrics
        others = [metric for name, metric in LABEL_METRICS.items() if metric.numbers and name != self.metric]
        return [{"name": metric.name, "about": metric.about, "better": "higher"} for metric in others]

    def describe(self) -> dict[str, Any]:
        return {"data": self.text_set.describe(), "attack": self.attack.summary()}

    def state(self) -> dict[str, Any]:
        own = {"classes": list(self.text_set.classes), "checksum": self.text_set.checksum}
        return {"tokenizer": self.tokenizer.describe(), **own}

    def initial_model(self) -> Any:
        classes = self.text_set.classes
        names = dict(enumerate(classes)) if classes else {0: "LABEL_0"}
        kind = "single_label_classification" if classes else "regression"
        given = {"vocab_size": len(self.tokenizer), "pad_token_id": self.encoder.pad}
        model = start_model(self.recipe.model, "labels", id2label=names, problem_type=kind, **given)
        require_positions(model, self.width)
        # Heads of most families compute a mean over the texts of a micro-batch, whatever number of labels they are told.
        model.accepts_loss_kwargs = False
        return model

    def encoded(self, rows: Sequence[LabelledText], texts: Sequence[str] | None = None) -> EncodedTexts:
        """Return the tokens of some examples, or of attacked versions of their `texts` (`flat_texts`)."""
        flat = flat_texts(rows) if texts is None else list(texts)
        return self.encoder.encode(flat[: len(rows)], flat[len(rows) :] or None)

    @cached_property
    def training(self) -> EncodedTexts:
        return self.encoded(self.text_set.texts("train"))

    @property
    def width(self) -> int:
        """The number of tokens that training texts are padded to: one for all batches, so that a step can be captured."""
        return self._width(self.training, self._attacked_training)

    def _width(self, *texts: EncodedTexts | None) -> int:
        longest = max(int(one.lengths.max()) for one in texts if one is not None)
        return min(self.recipe.data.length, -(-longest // ROUNDED_TO) * ROUNDED_TO)

    def size_warning(self, model: Any) -> str | None:
        share = float((self.training.lengths >= self.recipe.data.length).double().mean())
        if share <= MOST_CUT:
            return None
        return (
            f"{share:.0%} of the training texts have {self.recipe.data.length} tokens, the most that data.length allows: "
            "texts that are longer lose their end. A larger data.length reads more of them."
        )

    def examples(self, seed: int) -> Examples:
        labels, attacked, width = self.labels("train"), self._attacked_training, self.width
        view = None if attacked is None else partial(attacked.batch, width=width)
        return self._examples(len(labels), seed, partial(_inputs, self.training, labels, width), view)

    @property
    def _attacked_training(self) -> EncodedTexts | None:
        """The training texts as robust training attacks them; None if it attacks no words."""
        part, rows = self.recipe.robust, self.text_set.texts("train")
        key = part.method, part.budget
        if key not in self._attacked_texts:
            texts = self._attacked_training_texts(flat_texts(rows))
            self._attacked_texts[key] = None if texts is None else self.encoded(rows, texts)
        return self._attacked_texts[key]

    def validation(self) -> HeldOut:
        rows = self.text_set.texts("valid")[:VALIDATION_TEXTS]
        encoded, labels = self.encoded(rows), self.labels("valid")[:VALIDATION_TEXTS]
        return HeldOut(range(len(rows)), partial(_inputs, encoded, labels, self._width(encoded)))

    def held_out_figure(self, model: Any) -> float:
        rows = self.text_set.texts("valid")[:VALIDATION_TEXTS]
        predicted, labels = predict(model, self.encoded(rows))[0], self.labels("valid")[: len(rows)].numpy()
        return 100 * (1 - label_metric(self.metric, predicted, labels))

    def labels(self, split: str) -> Tensor:
        """Return (n,): the classes of a split, int64, or the numbers to predict, float32."""
        values = [row.label for row in self.text_set.texts(split)]
        return torch.tensor(values, dtype=torch.float32 if self.text_set.is_regression else torch.int64)

    def test_texts(self) -> tuple[list[str], None]:
        return flat_texts(self.text_set.texts("test")), None

    def score(self, model: Any) -> dict[str, Any]:
        clean, predicted = self._scored(model, self.encoded(self.text_set.texts("test")), "test", routing=True)
        others = self.text_set.other_tests
        further = {split: self._scored(model, self.encoded(self.text_set.texts(split)), split)[0] for split in others}
        found: dict[str, Any] = {"clean": {**clean, **self._against_majority(clean)}}
        found["clean"] |= {"other_tests": further} if further else {}
        found["attacked"] = self._attacked(model, self.attack.texts, clean, predicted, routing=True)
        if self.recipe.attack.rate:
            found["trials"] = {"typos": self._attacked(model, self.attacked_with("typos").texts, clean, predicted)}
        return found

    def require_classifier(self, model: Any) -> None:
        if self.text_set.is_regression:
            raise ValueError(f"the labels of {self.text_set.name} are numbers; predictions are certified for classes.")
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError("predictions are certified for one sequence of tokens, not for an encoder and a decoder.")

    def noisy_examples(self, model: Any, count: int) -> tuple[list[int], Callable[[int], NoisyExample]]:
        self.require_classifier(model)
        texts, labels, scale = self.text_set.texts("test"), self.labels("test"), embedding_size(model)

        @torch.no_grad()
        def example(number: int) -> NoisyExample:
            text = self.encoded(texts[number : number + 1]).batch([0])
            (embedded,) = model.get_input_embeddings()(text["input_ids"].to(model.device))
            classify = partial(logits_of_embeddings, model, text, scale, embedded.dtype)
            batch = max(1, tokens_per_batch(model) // len(embedded))
            return NoisyExample(number, int(labels[number]), embedded.float() / scale, classify, batch)

        known: list[int] = (labels != IGNORED).nonzero().flatten().tolist()
        return [known[place] for place in evenly_spaced(len(known), count)], example

    def inputs_to_score(self) -> int:
        others = sum(len(self.text_set.texts(split)) for split in self.text_set.other_tests)
        return others + len(self.text_set.texts("test")) * (3 if self.recipe.attack.rate else 2)

    def _scored(
        self, model: Any, encoded: EncodedTexts, split: str, *, routing: bool = False
    ) -> tuple[dict[str, Any], Values]:
        """Return the score of a model on some texts, and its predictions."""
        self._require_metrics_of_labels()
        chosen = ChosenMetrics(self.recipe.metrics)
        predicted, logits, measured = predict(model, encoded, routing=routing)
        if chosen:
            chosen.update(logits, self.labels(split))
        labels = self.labels(split).numpy()
        metrics = label_metrics(predicted, labels, classes=len(self.text_set.classes))
        found: dict[str, Any] = {**self._score_of(predicted, labels), **metrics, "examples": len(labels)}
        if self.text_set.is_regression:
            found["metrics"] = {LABEL_METRICS[name].name: value for name, value in metrics.items() if name != self.metric}
        if math.isnan(found["figure"]):
            found["undefined"] = (
                f"{LABEL_METRICS[self.metric].name} is not defined: all predictions or all labels are equal."
            )
        return {**found, **chosen.result(), **measured}, predicted

    def _score_of(self, predicted: Values, labels: Values) -> dict[str, Any]:
        """Return the figure of predictions, which may be NaN, and what `difference_of` compares by example."""
        metric = label_metric(self.metric, predicted, labels)
        if self.metric != "accuracy":
            return {"figure": metric, "per_example": Predictions(self.metric, predicted, labels).stored()}
        wrong = (predicted != labels)[labels != IGNORED].astype(np.float64)
        return {"figure": 100 * (1 - metric), "per_example": Shares(wrong).stored()}

    def _against_majority(self, clean: Mapping[str, Any]) -> dict[str, Any]:
        """Return the interval of the figure, and of its difference to always predicting the most frequent class of train."""
        found: dict[str, Any] = {}
        level = level_of([without_nan(clean)])
        if level is not None and level.low is not None:
            found["interval"] = {"low": level.low, "high": level.high}
        if not self.text_set.is_regression:
            usual = Counter(row.label for row in self.text_set.splits.get("train", self.text_set.texts("test")))
            labels = self.labels("test").numpy()
            constant = self._score_of(np.full_like(labels, int(usual.most_common(1)[0][0])), labels)
            found["majority"] = {"figure": without_nan(constant["figure"]), "difference": self._difference(constant, clean)}
        return found

    def _attacked(
        self, model: Any, texts: Sequence[str], clean: Mapping[str, Any], before: Values, *, routing: bool = False
    ) -> dict[str, Any]:
        """Return the score on attacked test texts, how predictions change, and the difference of the figure."""
        rows = self.text_set.texts("test")
        attacked, after = self._scored(model, self.encoded(rows, texts), "test", routing=routing)
        name, change = "predictions_changed", after != before
        if self.text_set.is_regression:
            name, change = "mean_change", np.abs(after - before)
        return {**attacked, name: float(change.mean()), "paired": self._difference(clean, attacked)}

    def _difference(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any] | None:
        found = difference_of([without_nan(before)], [without_nan(after)])
        return None if found is None else {**found.summary(), "examples": len(self.text_set.texts("test"))}

    def _score(self, model: Any) -> Callable[[int, Sequence[Version]], Scored]:
        rows = self.text_set.texts("test")

        def encode(number: int, versions: Sequence[str]) -> EncodedTexts:
            row = rows[number % len(rows)]
            if row.pair is None:
                return self.encoder.encode(versions)
            same = [row.pair if number < len(rows) else row.text] * len(versions)
            return self.encoder.encode(*((versions, same) if number < len(rows) else (same, versions)))

        return label_score(model, encode, self.labels("test"), tokens_per_batch(model))

    def _attack_table(self, model: Any, kind: str, attack: AttackedText) -> AttackTable:
        clean, before = self._scored(model, self.encoded(self.text_set.texts("test")), "test")
        attacked = self._attacked(model, attack.texts, clean, before)
        names = [name for name in LABEL_METRICS if name in clean]
        changed = attacked.get("predictions_changed", attacked.get("mean_change"))
        what = "mean change of a prediction" if self.text_set.is_regression else "share of predictions that change"
        paired = attacked["paired"]
        return {
            "caption": paired and f"The attack changes the {self.measure.noun} by {paired['words']}.",
            "columns": ["", self.measure.name, *(LABEL_METRICS[name].name for name in names), what],
            "rows": [
                ["clean", clean["figure"], *(clean[name] for name in names), ""],
                [kind, attacked["figure"], *(attacked[name] for name in names), changed],
            ],
            "summary": {"attack": attack.summary(), "clean": clean, kind: attacked},
        }

    def probe(self) -> Inputs:
        encoded = self.encoded(self.text_set.texts("test")[:PROBE_TOKENS])
        width = int(encoded.lengths.max())
        return encoded.batch(range(min(len(encoded), -(-PROBE_TOKENS // width))))

    def view(self, model: Any) -> View:
        encoded = self.encoded(self.text_set.texts("test")[:MOST_TOKENS])
        return self._view(model, encoded.batch(range(max(1, int((encoded.ends <= MOST_TOKENS).sum())))))


def _inputs(encoded: EncodedTexts, labels: Tensor, width: int, numbers: Tensor) -> Inputs:
    return {**encoded.batch(numbers, width), "labels": labels[numbers]}


@torch.no_grad()
def embedding_size(model: Any) -> float:
    """Return the root mean square of the entries of the embeddings of all tokens that a model knows."""
    table = model.get_input_embeddings()
    parts = torch.arange(table.weight.shape[0], device=model.device).split(ROWS)
    squares = [table(part).double().square().mean(1) for part in parts]
    return float(torch.cat(squares).mean().sqrt())


def logits_of_embeddings(model: Any, text: Inputs, scale: float, dtype: torch.dtype, copies: Tensor) -> Tensor:
    """Return the logits (n, classes) of copies (n,N,d) of the embeddings of one text (1,N), in units of `scale`.

    A hook puts them in the place of the output of the embeddings, so that the model still has its token ids.
    """
    given = {name: tensor.expand(len(copies), -1) for name, tensor in text.items()}
    with own_hooks() as hooks:
        hooks.after(model.get_input_embeddings(), lambda *_: (scale * copies).to(dtype))
        logits: Tensor = forward(model, given).logits
    return logits


@torch.no_grad()
def predict(model: Any, encoded: EncodedTexts, *, routing: bool = False) -> tuple[Values, Tensor, dict[str, Any]]:
    """Return the predicted class or number of each text, the logits, and with `routing` the metrics of the routers.

    Texts of similar length are in one batch, so that there is little padding, which the metrics of routers leave out. A text
    with NaN logits counts as a class that no text has.
    """
    order = encoded.lengths.argsort(descending=True, stable=True)
    budget = tokens_per_batch(model)
    found, start = list[Tensor](), 0
    with evaluating(model, routing=routing) as measured:
        while start < len(encoded):
            count = max(1, budget // int(encoded.lengths[order[start]]))
            numbers = order[start : start + count]
            found.append(forward(model, encoded.batch(numbers)).logits.float().cpu())
            start += count
    logits = torch.cat(found)[order.argsort()]
    best = torch.where(logits.isnan().any(1), logits.shape[1], logits.argmax(1))
    return (logits[:, 0] if logits.shape[1] == 1 else best).numpy(), logits, measured

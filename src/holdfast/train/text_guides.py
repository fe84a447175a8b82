"""What guides attacks on words: the losses of a model, neighbours of words, and the similarity of sentences.

The neighbours of a word are near it in the model's own input embeddings, or they are in a table that the user gives. Only
words that are one token of the model's tokeniser have an embedding of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from holdfast.attacks import Scored, Version, listed_words, nearest_words, swappable
from holdfast.data import Document, Tokenizer
from holdfast.data.encoded_texts import EncodedTexts
from holdfast.data.tokenizers import HubTokenizer, Vocabulary, failures
from holdfast.files import LARGE, read_json, read_text
from holdfast.hub import load
from holdfast.hub.tracing import longest_sequence
from holdfast.metrics import token_nll
from holdfast.metrics.tasks import IGNORED
from holdfast.train.task import forward

SENTENCES_PER_BATCH = 32
POOLING = Path("1_Pooling", "config.json")  # of a folder of sentence-transformers


def language_score(model: Any, tokenizer: Tokenizer, tokens: int) -> Callable[[int, Sequence[Version]], Scored]:
    """Return the score of versions of a text for a language model: the sum of the losses of the words that are the same.

    tokens      most tokens of a batch
    """
    longest = longest_sequence(model)

    def losses(text: str) -> tuple[Tensor, Any]:
        ids, (spans,) = tokenizer.stream_with_spans([Document("text", text.encode("utf-8", "replace"))])
        return ids.long()[:longest], spans[:longest]

    @torch.no_grad()
    def score(document: int, versions: Sequence[Version]) -> Scored:
        found: dict[str, tuple[Tensor, Any]] = {version.text: losses(version.text) for version in versions}
        texts, nlls = list(found), list[Tensor]()
        size = max(1, tokens // max(1, max(len(ids) for ids, _ in found.values())))
        for start in range(0, len(texts), size):
            rows = [found[text][0] for text in texts[start : start + size]]
            ids = pad_sequence(rows, batch_first=True)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED)
            if not labels.numel():  # texts of one token have nothing to predict
                nlls += [torch.zeros(0)] * len(rows)
                continue
            logits = forward(model, {"input_ids": ids, "attention_mask": mask}).logits[:, :-1]
            nll = token_nll(logits, labels.to(logits.device)).double().cpu()
            nlls += [own[: len(row) - 1] for own, row in zip(nll, rows, strict=True)]
        of_text = dict(zip(texts, nlls, strict=True))
        sums = [float(of_text[one.text][~_touched(found[one.text][1], one.changed)[1:]].sum()) for one in versions]
        return Scored(torch.tensor(sums, dtype=torch.float64), torch.zeros(len(sums), dtype=torch.bool))

    return score


def _touched(spans: Any, changed: Sequence[tuple[int, int]]) -> Tensor:
    """Return (T,) bool: the tokens that overlap a changed span, or that are no characters of the text."""
    found = spans[:, 0] >= spans[:, 1]
    for start, end in changed:
        found = found | ((spans[:, 0] < end) & (spans[:, 1] > start))
    return torch.from_numpy(np.asarray(found, dtype=bool))


def label_score(
    model: Any, encode: Callable[[int, Sequence[str]], EncodedTexts], labels: Tensor, tokens: int
) -> Callable[[int, Sequence[Version]], Scored]:
    """Return the score of versions of a text for a model of labels: cross entropy, or the squared error of a number.

    An attack succeeds if the predicted class is wrong. A text without a label (-100) is not attacked.

    encode      from the number of a text and versions of it to the model's inputs
    labels      (n,): of each text, or of each pair: the second text of a pair has the number of the pair plus n
    tokens      most tokens of a batch
    """

    @torch.no_grad()
    def score(document: int, versions: Sequence[Version]) -> Scored:
        label = labels[document % len(labels)]
        texts = list(dict.fromkeys(version.text for version in versions))
        if labels.dtype == torch.int64 and label == IGNORED:
            return Scored(torch.zeros(len(versions)), torch.ones(len(versions), dtype=torch.bool))
        encoded = encode(document, texts)
        parts = torch.arange(len(texts)).split(max(1, tokens // int(encoded.lengths.max())))
        logits = torch.cat([forward(model, encoded.batch(part)).logits.double().cpu() for part in parts])
        if labels.dtype == torch.int64:
            loss = F.cross_entropy(logits, label.expand(len(texts)), reduction="none")
            succeeded = logits.argmax(-1) != label
        else:
            loss = (logits[:, 0] - label).square()
            succeeded = torch.zeros(len(texts), dtype=torch.bool)
        rows = {text: row for row, text in enumerate(texts)}
        order = torch.tensor([rows[version.text] for version in versions])
        return Scored(loss[order], succeeded[order])

    return score


def embedding_neighbours(model: Any, tokenizer: Tokenizer) -> Callable[[str], Sequence[str]]:
    """Return a function from a word to the words that are nearest in the input embeddings of the model."""
    words = _known_words(tokenizer)
    # A word is read after a space, which many tokenisers join to it, or alone if these are fewer tokens.
    found = {word: min((tokenizer.ids(f" {word}"), tokenizer.ids(word)), key=len) for word in words}
    numbers = {word: ids[0] for word, ids in found.items() if len(ids) == 1}
    if len(numbers) < 2:
        raise ValueError(
            f"the tokeniser {tokenizer.name} has no words as tokens, so the model has no embeddings of words; name a table "
            "of synonyms."
        )
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        vectors = embedding(torch.tensor(list(numbers.values()), device=model.device))
    return nearest_words(list(numbers), vectors)


def _known_words(tokenizer: Tokenizer) -> list[str]:
    """Return the words in the vocabulary of a tokeniser."""
    if isinstance(tokenizer, Vocabulary):
        return swappable(tokenizer.words)
    if isinstance(tokenizer, HubTokenizer):
        return swappable(tokenizer.decode([number]).strip() for number in range(len(tokenizer)))
    return []


def read_synonyms(path: Path) -> Callable[[str], Sequence[str]]:
    """Return the function from a word to its synonyms that a file has.

    A JSON file is an object from words to lists of words. In any other file, a line has a word and its synonyms, separated
    by tabs. The order decides which synonym is tried first.
    """
    table: dict[str, list[str]] = {}
    if path.suffix == ".json":
        found = read_json(path, limit=LARGE)
        if not isinstance(found, Mapping) or not all(isinstance(words, list) for words in found.values()):
            raise ValueError(f'{path}: a table of synonyms is an object from words to lists of words: {{"big": ["large"]}}.')
        table = dict(found)
    else:
        for line in read_text(path, limit=LARGE).splitlines():
            word, *words = line.split("\t")
            if words:
                table[word] = words
    for word, words in table.items():
        for new in words:
            if not isinstance(new, str) or not new or any(character.isspace() for character in new):
                raise ValueError(f"{path}: {new!r}, a synonym of {word!r}, is not one word.")
    if not any(table.values()):
        raise ValueError(f"{path} has no synonyms; write a word and its synonyms in each line, separated by tabs.")
    return listed_words(table)


def sentence_similarity(folder: Path, device: Any) -> Callable[[str, Sequence[str]], Tensor]:
    """Return a function from a text and versions of it to the cosines of their embeddings by the encoder in a folder.

    An embedding is the mean of the last hidden states of a text's tokens, or that of its first token if the folder is one of
    sentence-transformers and its pooling says so.
    """
    encoder = load(folder).to(device).eval()
    tokenizer = HubTokenizer(str(folder)).tokenizer
    longest = longest_sequence(encoder)
    of_first = bool((folder / POOLING).exists() and read_json(folder / POOLING).get("pooling_mode_cls_token"))

    @torch.no_grad()
    def embedded(texts: Sequence[str]) -> Tensor:
        with failures(f"the tokeniser of {folder} failed on a text"):
            how: dict[str, Any] = {"truncation": longest is not None, "max_length": longest, "padding": True}
            batch = tokenizer(list(texts), return_tensors="pt", **how).to(device)
        hidden, mask = encoder(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
        return F.normalize((hidden[:, 0] if of_first else (hidden * mask).sum(1) / mask.sum(1)).double(), dim=-1)

    def similarity(text: str, versions: Sequence[str]) -> Tensor:
        parts = [
            embedded(versions[start : start + SENTENCES_PER_BATCH]) for start in range(0, len(versions), SENTENCES_PER_BATCH)
        ]
        return (torch.cat(parts) @ embedded([text])[0]).cpu()

    return similarity

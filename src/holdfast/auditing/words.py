"""Perturbations of texts: words swapped or misspelt. What is compared are the tokens that were left alone."""

import warnings
from typing import final

import numpy as np
import torch

from holdfast.attacks import AttackedText, AttackWarning, misspell, swap_words, words_in
from holdfast.auditing.comparing import Rows, Tally
from holdfast.auditing.observing import Observation, observe
from holdfast.auditing.perturbation import Perturbation
from holdfast.auditing.samples import Reader, Sample
from holdfast.auditing.subject import Audited
from holdfast.data import Vocabulary


@final
class Words(Perturbation):
    """Some words of each text replaced. A token is compared where its characters, and it, are the same in both texts."""

    def __init__(self, name: str, reader: Reader | None, rate: float, seed: int, length: int) -> None:
        self.name, self.reader, self.rate, self.seed, self.length = name, reader, rate, seed, length
        how = "swapped for other words of the texts" if name == "words" else "misspelt"
        self.about = f"{rate:.0%} of the words {how}; of the tokens left alone"

    def unavailable(self, audited: Audited, sample: Sample) -> str | None:
        if sample.texts is None or self.reader is None:
            return "there are no texts, only inputs."
        if sample.spans is None:
            return "the tokenizer is slow and does not say where its tokens are in a text."
        return None

    def run(self, audited: Audited, sample: Sample, clean: Observation, into: Tally) -> None:
        assert sample.texts is not None and sample.spans is not None and self.reader is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttackWarning)
            attacked = self._attacked(sample)
        if attacked is None or not attacked.changed:
            return
        changed = self.reader.batch(sample.number, attacked.texts, self.length)
        first, second = aligned(sample, changed, attacked)
        device = clean.layers[0].tokens.device
        rows: Rows = (first.to(device), second.to(device))
        into.compare(clean, observe(audited, changed), [rows] * len(clean.layers))
        into.details.append({"words": sum(attacked.words), "changed": attacked.changed, "checksum": attacked.checksum})

    def _attacked(self, sample: Sample) -> AttackedText | None:
        assert sample.texts is not None and self.reader is not None
        if self.name == "typos":
            return misspell(sample.texts, rate=self.rate, seed=self.seed)
        # Words that the model knows: an unknown one is easy to predict, and would not show what a swap costs.
        words = [word for word in words_in(sample.texts) if self.reader.knows(word)]
        if len({word.lower() for word in words}) < 2:
            return None
        pieces = sample.spans if isinstance(self.reader.tokenizer, Vocabulary) else None
        return swap_words(sample.texts, rate=self.rate, seed=self.seed, words=words, pieces=pieces)


def aligned(before: Sample, after: Sample, attacked: AttackedText) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the two batches that hold the same untouched token at the same place of the text."""
    assert before.ids is not None and after.ids is not None and before.spans is not None and after.spans is not None
    first, second = [], []
    for document, (old, new) in enumerate(zip(before.spans, after.spans, strict=True)):
        real, there = (np.flatnonzero(spans[:, 0] < spans[:, 1]) for spans in (old, new))
        shared = attacked.shared(document, old[real], new[there])
        places = torch.from_numpy(real[shared[0]]), torch.from_numpy(there[shared[1]])
        same = before.ids[document, places[0]] == after.ids[document, places[1]]
        first.append(document * before.ids.shape[1] + places[0][same])
        second.append(document * after.ids.shape[1] + places[1][same])
    return torch.cat(first), torch.cat(second)

"""Spans: the place of each token in its document, and which tokens an attack changed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.hub_tokenizers import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from wording import assert_refused

from holdfast.attacks import AttackedText, swap_words
from holdfast.data import Bytes, Document, HubTokenizer, Tokenizer, Vocabulary
from holdfast.data.documents import WORD_SPLITTERS

TEXTS = [  # the lower case of a dotted capital I is longer than the letter
    "The quick, brown fox isn't lazy.\n\nIt pays 3.14 in x_y\r\n",
    "\u0130STANBUL and \u0130zmir: na\u00efve caf\u00e9, \u65e5\u672c \U0001f642!\n\u1e9e end",
    "",
    "\n \nalone",
]
DOCUMENTS = [Document(f"d{place}", text.encode()) for place, text in enumerate(TEXTS)]
LETTERS = "aBz\u0130\u00e9\u0301\u1e9e\u65e5\U0001f6423._'-, \t\r\n\x0b\x85\u2028"


def whole(cut: str, *texts: str) -> Vocabulary:
    """Return a vocabulary with every word of the texts."""
    return Vocabulary(texts, splitter=cut)


def stream(tokenizer: Tokenizer, documents: list[Document]) -> list[int]:
    numbers: list[int] = tokenizer.stream(documents).tolist()
    return numbers


def placed(tokenizer: Tokenizer, documents: list[Document]) -> list[tuple[str, int, int]]:
    """Return the document and the span of every token, in the order of the stream."""
    return [
        (document.text, int(start), int(end))
        for document, own in zip(documents, tokenizer.spans(documents), strict=True)
        for start, end in own
    ]


def hub(folder: Path, kind: str) -> HubTokenizer:
    return HubTokenizer(str(write_tokenizer(folder, kind, TEXTS)))


@pytest.mark.parametrize("cut", WORD_SPLITTERS)
def test_the_span_of_a_word_is_its_place_in_the_text(cut: str) -> None:
    vocabulary = whole(cut, *TEXTS)
    tokens, spans = stream(vocabulary, DOCUMENTS), placed(vocabulary, DOCUMENTS)
    assert len(tokens) == len(spans) and len({text for text, _, _ in spans}) == (4 if cut == "words" else 3)
    for number, (text, start, end) in zip(tokens, spans, strict=True):
        word, there = vocabulary.words[number], text[start:end]
        if number == vocabulary.end:
            assert start == end
        elif cut == "lines" or "\u0130" not in there:
            assert word == (there.lower() if cut == "words" else there)
        else:  # the dotted I becomes two letters, and the dot a piece of its own
            assert word in there.lower()
    istanbul = [text[start:end] for text, start, end in spans if text == TEXTS[1]][:4]
    assert istanbul == (
        ["\u0130", "\u0130", "STANBUL", "and"] if cut == "words" else ["\u0130STANBUL", "and", "\u0130zmir:", "na\u00efve"]
    )


@given(st.lists(st.text(LETTERS, max_size=20), min_size=1, max_size=3))
def test_words_and_spans_are_one_to_one_in_every_text(texts: list[str]) -> None:
    documents = [Document(str(place), text.encode()) for place, text in enumerate(texts)]
    for cut in WORD_SPLITTERS:
        vocabulary = whole(cut, *texts)
        tokens, spans = stream(vocabulary, documents), placed(vocabulary, documents)
        assert len(tokens) == len(spans)
        assert all(
            vocabulary.words[number] in (text[start:end].lower() if cut == "words" else text[start:end])
            for number, (text, start, end) in zip(tokens, spans, strict=True)
            if number != vocabulary.end
        )
        for document, found in zip(documents, vocabulary.spans(documents), strict=True):
            own = found.tolist()  # in order, inside the text, and nothing but spaces between them
            assert own == sorted(own) and all(0 <= start <= end <= len(document.text) for start, end in own)
            covered = {place for start, end in own for place in range(start, end)}
            assert all(letter.isspace() for place, letter in enumerate(document.text) if place not in covered)


@given(st.lists(st.text(LETTERS, max_size=20), min_size=1, max_size=3))
def test_the_span_of_a_byte_is_its_character(texts: list[str]) -> None:
    documents = [Document(str(place), text.encode()) for place, text in enumerate(texts)]
    naive: list[tuple[str, int, int, int]] = []
    for place, text in enumerate(texts):
        naive += [(text, 0, 0, ord("\n"))] if place else []
        naive += [(text, number, number + 1, byte) for number, letter in enumerate(text) for byte in letter.encode()]
    assert placed(Bytes(), documents) == [(text, start, end) for text, start, end, _ in naive]
    assert stream(Bytes(), documents) == [byte for _, _, _, byte in naive]


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_the_spans_of_a_hub_tokeniser_are_the_places_of_its_tokens(kind: str, tmp_path: Path) -> None:
    tokenizer = hub(tmp_path, kind)
    tokens, spans = stream(tokenizer, DOCUMENTS), placed(tokenizer, DOCUMENTS)
    assert len(tokens) == len(spans) > 25
    assert sum(number == tokenizer.end for number in tokens) == (len(DOCUMENTS) if kind == "bytes" else 0)
    for number, (text, start, end) in zip(tokens, spans, strict=True):
        there = text[start:end]
        if number == tokenizer.end:
            assert start == end == len(text)
        elif kind == "words":
            assert tokenizer.tokenizer.convert_ids_to_tokens(number) == there.lower()
        elif there.isascii():
            assert tokenizer.decode([number]) == there
        else:  # some of the bytes of a character
            assert tokenizer.decode([number]).replace("\N{REPLACEMENT CHARACTER}", "") in there
    for document, own in zip(DOCUMENTS, tokenizer.spans(DOCUMENTS), strict=True):  # every character is in some token
        covered = {place for start, end in own.tolist() for place in range(start, end)}
        assert all(letter.isspace() for place, letter in enumerate(document.text) if place not in covered)


def test_tokens_and_their_places_come_from_one_encoding_of_each_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = hub(tmp_path, "bytes")
    expected = tokenizer.stream(DOCUMENTS), list(tokenizer.spans(DOCUMENTS))
    encode, encoded = tokenizer._encode, list[str]()

    def counted(texts: list[str], **options: Any) -> Any:
        encoded.extend(texts)
        return encode(texts, **options)

    monkeypatch.setattr(tokenizer, "_encode", counted)
    tokens, spans = tokenizer.stream_with_spans(DOCUMENTS)
    assert torch.equal(tokens, expected[0]) and tokens.dtype == expected[0].dtype
    assert all(np.array_equal(one, other) for one, other in zip(spans, expected[1], strict=True))
    assert encoded == [document.text for document in DOCUMENTS]


def test_a_slow_tokeniser_has_no_spans_and_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = hub(tmp_path, "words")
    monkeypatch.setattr(type(tokenizer.tokenizer), "is_fast", False)
    assert_refused("slow tokeniser", lambda: next(tokenizer.spans(DOCUMENTS)))


def attacked(*texts: str, rate: float = 0.5) -> AttackedText:
    return swap_words(list(texts), rate=rate, seed=0, keys=[str(place) for place in range(len(texts))])


@given(
    st.text("ab cd,-", max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12),
    st.booleans(),
)
@pytest.mark.filterwarnings("ignore::holdfast.attacks.AttackWarning")
def test_changed_tokens_are_those_that_overlap_a_changed_word(text: str, spans: list[tuple[int, int]], clean: bool) -> None:
    found = attacked(text)
    changed = [change.before if clean else change.after for change in found.changes[0]]
    naive = [any(start < end and start < right and left < end for left, right in changed) for start, end in spans]
    assert found.is_changed(0, spans, clean=clean).tolist() == naive
    assert found.is_changed(0, np.array(spans, dtype=np.int64).reshape(-1, 2), clean=clean).tolist() == naive


def kept(tokenizer: Tokenizer, attack: AttackedText, texts: list[str], *, clean: bool) -> list[int]:
    documents = [Document(str(place), text.encode()) for place, text in enumerate(texts)]
    touched = [
        bool(touched)
        for place, spans in enumerate(tokenizer.spans(documents))
        for touched in attack.is_changed(place, spans, clean=clean)
    ]
    return [token for token, lost in zip(stream(tokenizer, documents), touched, strict=True) if not lost]


# Without an underscore: behind a combining mark it belongs to the swapped word, but stands alone in the clean text.
PIECES = ["a", "Bz", "\u0130", "\u00e9", "e\u0301", "\u65e5", "\U0001f642", *"3.'-,/ \n"]


@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=40).map("".join), min_size=1, max_size=2))
@pytest.mark.filterwarnings("ignore::holdfast.attacks.AttackWarning")
def test_untouched_tokens_are_the_same_in_both_texts(texts: list[str]) -> None:
    """Word for word and byte for byte, so that perplexities over them can be compared."""
    attack = attacked(*texts)
    for tokenizer in (whole("words", *texts, "AAA"), whole("lines", *texts, *attack.texts), Bytes()):
        before, after = (kept(tokenizer, attack, list(each), clean=each is texts) for each in (texts, attack.texts))
        assert before == after
        if not attack.changed:
            assert len(before) == len(stream(tokenizer, [Document(str(n), t.encode()) for n, t in enumerate(texts)]))

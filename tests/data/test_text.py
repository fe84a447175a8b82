"""The embedded text and word-level tokens."""

import pytest

from holdfast.data import Vocabulary, python_docs, words


def test_the_embedded_text_is_english_and_in_a_fixed_order() -> None:
    documents = python_docs()
    assert list(documents) == sorted(documents)
    text = " ".join(documents.values())
    assert len(text.split()) > 50_000
    assert text.count(" the ") > 1000


def test_words_are_lower_case_with_punctuation_apart() -> None:
    assert words("It's a Test, isn't_it?") == ["it", "'", "s", "a", "test", ",", "isn", "'", "t_it", "?"]


def test_a_vocabulary_keeps_the_most_frequent_words_and_breaks_ties_by_alphabet() -> None:
    vocabulary = Vocabulary(["b b c a", "b a d"], 4)
    assert vocabulary.words == ["<unk>", "b", "a", "c"]
    assert vocabulary.encode("a B d c").tolist() == [2, 1, 0, 3]
    assert len(vocabulary) == 4


def test_a_vocabulary_without_room_is_one_clear_sentence() -> None:
    with pytest.raises(ValueError, match="holds no words"):
        Vocabulary(["a"], 1)

"""The texts of single tokens: joined they are the decoded text."""

import pytest

from holdfast.data.tokenizers import Bytes, token_texts


def pieces(vocabulary: list[str]) -> list[str]:
    """Decode as tokenizers of words in pieces do: a token decoded alone loses the space before it."""
    return token_texts(lambda ids: "".join(vocabulary[number] for number in ids).strip(" "), range(len(vocabulary)))


def test_a_token_keeps_the_space_before_it() -> None:
    vocabulary = ["Hold", "fast", " in", " the", " ", "night", "\n", "x"]
    found = pieces(vocabulary)
    assert "".join(found) == "".join(vocabulary) and found[:4] == ["Hold", "fast", " in", " the"]


@pytest.mark.parametrize("text", ["plain text", "café €5 🙂 end"])
def test_bytes_inside_a_character_are_shown_alone(text: str) -> None:
    own = Bytes()
    found = token_texts(own.decode, own.encode(text).tolist())
    assert len(found) == len(text.encode())
    assert [piece for piece in found if piece and piece.isascii()] == [letter for letter in text if letter.isascii()]

"""Tokenisers: words, bytes, and Hugging Face's; encoded and decoded, recorded and rebuilt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from data.hub_tokenizers import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from wording import assert_refused

from holdfast.data import (
    Bytes,
    Corpus,
    Document,
    HubTokenizer,
    Tokenizer,
    Vocabulary,
    tokenizer,
    tokenizer_from,
    tokenizers,
    words,
)

TEXT = "The quick brown fox jumps over the lazy dog.\nIt isn't <unk>, is it?\n"


def source(**texts: str) -> Corpus:
    splits = {
        split: (Document(f"{split}/0", text.encode()), Document(f"{split}/1", b"Another one."))
        for split, text in texts.items()
    }
    return Corpus("toy", "a toy", splits)


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("models") / "tiny", "bytes", [TEXT])


def every(hub_folder: Path) -> list[Tokenizer]:
    toy = source(train=TEXT)
    return [tokenizer(toy, "words"), tokenizer(toy, "lines"), tokenizer(toy, "bytes"), tokenizer(toy, str(hub_folder))]


def test_words_are_lower_case_and_punctuation_marks_are_words() -> None:
    assert words("It's a Test, isn't_it?") == ["it", "'", "s", "a", "test", ",", "isn", "'", "t_it", "?"]


def test_a_vocabulary_keeps_the_most_frequent_words_and_breaks_ties_by_alphabet() -> None:
    vocabulary = Vocabulary(["b b c a", "b a d"], 5)
    assert vocabulary.words == ["<unk>", "<eos>", "b", "a", "c"]
    assert vocabulary.encode("a B d c").tolist() == [3, 2, 0, 4]
    assert len(vocabulary) == 5
    assert len(Vocabulary(["b b c a", "b a d"])) == 6


def test_wikitexts_convention_is_spaces_and_an_end_for_every_line() -> None:
    vocabulary = Vocabulary([" \n = A B = \n a <unk> . \n"], splitter="lines")
    assert vocabulary.decode(range(2, len(vocabulary))) == "= . A B a"
    assert vocabulary.encode(" \n a <unk> = \nnew").tolist() == [1, 6, 0, 2, 1, 0, 1]
    assert vocabulary.encode("a").tolist() == vocabulary.encode("a\n").tolist() == [6, 1]
    assert vocabulary.encode("").tolist() == []


def test_lines_end_at_newlines_only() -> None:
    """WikiText contains separators that `str.splitlines` would treat as ends of lines."""
    text = "a\x0bb\x85c\u2028d\re"
    assert Vocabulary([text], splitter="lines").encode(f"{text}\n").tolist() == [*range(2, 7), 1]


@given(st.lists(st.sampled_from(["a", "bb", ",", "é", ".", "12", "x_y", "\n"])))
def test_a_vocabulary_encodes_what_it_decodes(pieces: list[str]) -> None:
    for cut in ("words", "lines"):
        vocabulary = Vocabulary(["a bb , é . 12 x_y"], splitter=cut)
        ids = vocabulary.encode(" ".join(pieces))
        assert torch.equal(vocabulary.encode(vocabulary.decode(ids)), ids)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_encode_every_text(text: str) -> None:
    ids = Bytes().encode(text)
    assert Bytes().decode(ids) == text
    assert len(ids) == len(text.encode())


def test_half_a_character_can_be_decoded() -> None:
    assert Bytes().decode(Bytes().encode("aé")[:2]) == "a\N{REPLACEMENT CHARACTER}"


def test_every_tokeniser_gives_int64_below_its_length_and_has_a_name(hub_folder: Path) -> None:
    for each in every(hub_folder):
        ids = each.encode(TEXT)
        assert ids.dtype == torch.int64 and ids.dim() == 1
        assert int(ids.min()) >= 0 and int(ids.max()) < len(each)
        assert each.name
        assert each.encode("").tolist() == []


def test_a_recorded_tokeniser_is_rebuilt_from_json(hub_folder: Path) -> None:
    for each in every(hub_folder):
        again = tokenizer_from(json.loads(json.dumps(each.describe())))
        assert type(again) is type(each) and again.name == each.name and len(again) == len(each) and again.end == each.end
        assert torch.equal(again.encode(TEXT + "new words"), each.encode(TEXT + "new words"))


def test_documents_are_one_sequence_with_ends_as_each_tokeniser_has_them(hub_folder: Path) -> None:
    documents = [Document("a", b"One two\nthree"), Document("b", b"two\n")]
    in_words, in_lines, in_bytes, of_hub = every(hub_folder)
    in_words, in_lines = (Vocabulary(["one two three One"], splitter=cut) for cut in ("words", "lines"))
    assert in_words.decode(in_words.stream(documents)) == "one two three\ntwo\n"
    assert in_lines.decode(in_lines.stream(documents)) == "One two\nthree\ntwo\n"
    assert in_bytes.decode(in_bytes.stream(documents)) == "One two\nthree\ntwo\n"
    assert of_hub.decode(of_hub.stream(documents)) == "One two\nthree<|end|>two\n<|end|>"


def test_a_stream_stops_reading_at_its_limit(hub_folder: Path) -> None:
    def documents() -> Any:
        yield Document("a", TEXT.encode())
        raise AssertionError("read on")

    for each in every(hub_folder):
        assert torch.equal(each.stream(documents(), limit=5).long(), each.stream([Document("a", TEXT.encode())])[:5].long())
        assert len(each.stream([])) == 0


def test_words_are_those_of_training() -> None:
    toy = source(train="a b", test="c d")
    assert tokenizer(toy, "words").encode("a d").tolist()[1] == 0
    assert len(tokenizer(toy, "words", size=4)) == 4


def test_a_hub_tokeniser_adds_nothing_and_is_not_cut_at_the_models_length(hub_folder: Path) -> None:
    ids = HubTokenizer(str(hub_folder)).encode(TEXT * 3)
    assert HubTokenizer(str(hub_folder)).decode(ids) == TEXT * 3
    assert len(ids) > 8


def test_a_hub_tokeniser_that_changed_is_not_taken_for_the_one_recorded(hub_folder: Path, tmp_path: Path) -> None:
    record = HubTokenizer(str(hub_folder)).describe()
    for file in hub_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert tokenizer_from({**record, "place": str(tmp_path)}).name == str(tmp_path)
    changed = (tmp_path / "tokenizer.json").read_text().replace('"<|end|>"', '"<|fin|>"')
    (tmp_path / "tokenizer.json").write_text(changed)
    assert_refused("checksum", tokenizer_from, {**record, "place": str(tmp_path)})


def test_a_tokeniser_with_its_own_code_is_refused_and_not_executed(hub_folder: Path, tmp_path: Path) -> None:
    for file in hub_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    assert_refused(r"tokeniser.*transformers", HubTokenizer, str(tmp_path))
    assert not ran.exists()


def test_every_tokeniser_is_listed() -> None:
    assert list(tokenizers()) == ["words", "lines", "bytes"]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"name": "word"}, "'word'.*'words'"),
    "no folder": ({"name": "./missing"}, "folder"),
    "no room": ({"name": "words", "size": 2}, "vocabulary.*2.*3"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_raises_a_clear_error(mistake: str) -> None:
    options, says = MISTAKES[mistake]
    assert_refused(says, lambda: tokenizer(source(train="a b"), **options))


def test_a_folder_without_a_tokeniser_says_so(tmp_path: Path) -> None:
    assert_refused(r"tokeniser.*transformers", lambda: tokenizer(source(train="a b"), str(tmp_path)))


def test_a_damaged_record_is_refused() -> None:
    assert_refused(r"'byts'.*'bytes'", tokenizer_from, {"kind": "byts"})
    assert_refused("damaged", tokenizer_from, {"kind": "words", "words": ["<unk>", "<eos>", "a", "a"]})
    assert_refused("damaged", tokenizer_from, {"kind": "words", "words": ["a"]})


def test_a_document_that_is_not_text_is_named() -> None:
    with pytest.raises(ValueError, match=r"odd.*UTF-8"):
        _ = Document("odd", b"\xff").text

"""Labelled texts: Banking77's CSV, GLUE's TSV, and errors in others."""

from pathlib import Path

import pytest
from wording import assert_refused

from holdfast.data import TextSet, text_set, text_sets


def sizes(texts: TextSet) -> list[int]:
    return [len(texts.texts(split)) for split in ("train", "valid", "test")]


def test_banking77_has_its_published_queries_and_intents(shared: Path) -> None:
    bank = text_set("banking77", folder=shared)
    assert sizes(bank) == [9_003, 1_000, 3_080]
    assert len(bank.classes) == 77 and bank.classes[0] == "Refund_not_showing_up"
    first = bank.texts("test")[0]
    assert (first.text, bank.classes[int(first.label)]) == ("How do I locate my card?", "card_arrival")
    assert {text.label for text in bank.texts("test")} == set(range(77))
    assert not {text.text for text in bank.texts("valid")} & {text.text for text in bank.texts("train")}
    assert bank.checksum == text_set(shared / "banking77").checksum


def glue(folder: Path, *, test: str | None = "index\tsentence\n0\tunlabelled\n") -> None:
    folder.mkdir(parents=True)
    rows = "".join(f'" odd film , number {number} \t{number % 2}\n' for number in range(20))
    (folder / "train.tsv").write_text(f"sentence\tlabel\n{rows}")
    (folder / "dev.tsv").write_text("sentence\tlabel\nfine\t1\ndull\t0\n")
    if test is not None:
        (folder / "test.tsv").write_text(test)


def test_a_labelled_test_is_the_test(tmp_path: Path) -> None:
    glue(tmp_path / "mine", test="label\tsentence\n1\tgood\n")
    reviews = text_set(tmp_path / "mine")
    assert sizes(reviews) == [20, 2, 1] and reviews.texts("test")[0].text == "good"
    assert reviews.name == "mine"


def test_labels_that_are_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    rows = "".join(f"text {number},{number % 11}\n" for number in range(40))
    (tmp_path / "train.csv").write_text(f"text,label\n{rows}")
    (tmp_path / "test.csv").write_text('text,label\n"two\nlines, one field",10\n')
    numbers = text_set(tmp_path)
    assert numbers.classes == tuple(map(str, range(11)))
    assert (numbers.texts("test")[0].text, numbers.texts("test")[0].label) == ("two\nlines, one field", 10)


WRONG = {
    "columns": ("test.csv", "first,second,label\na,b,0\n", r"test\.csv.*first, second, label.*data\.text"),
    "fields": ("test.csv", "text,label\na,0\nb\n", r"test\.csv, line 3: 1 fields.* 2"),
    "quote": ("test.csv", 'text,label\n"a,0\n', r"test\.csv, line 2: unexpected end of data"),
    "header only": ("test.csv", "text,label\n", r"test\.csv.*rows"),
    "empty": ("test.csv", "", r"test\.csv.*no text"),
    "stranger": ("test.csv", "text,label\na,9\n", r"test.*'9'.*train"),
    "unlabelled train": ("train.csv", "text\na\nb\n", r"train\.csv.*label, .*category.*data\.label"),
    "a row without a label": ("test.csv", "text,label\na,0\nb,\n", r"row 3 of test has no label"),
    "a row without a text": ("test.csv", "text,label\n,0\n", r"test\.csv, line 2: text is empty"),
    "a list as label": (
        "train.jsonl",
        '{"text": "a", "label": [0]}\n' * 5,
        r"train\.jsonl, line 1: the label is \[0\], a list",
    ),
    "a dictionary": ("train.jsonl", '{"text": "a", "label": {"a": 0}}\n', r"train\.jsonl, line 1: the label is .*, a dict"),
    "a label of 5,000 digits": (
        "train.csv",
        f"text,label\na,{'9' * 5000}\nb,1\n",
        r"row 2 of train .* 5,000 letters, .*label.$",
    ),
    "one class": ("train.csv", "text,label\n" + "a,0\n" * 5, r"only one class, '0'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_table_raises_an_error_that_names_it(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + "a,0\nb,1\n" * 5)
    (tmp_path / "test.csv").write_text("text,label\na,0\n")
    name, content, says = WRONG[wrong]
    (tmp_path / name).with_suffix(".csv").unlink()
    (tmp_path / name).write_text(content)
    assert_refused(says, text_set, tmp_path)


def test_a_missing_source_says_how_to_get_it(tmp_path: Path) -> None:
    assert_refused(r"banking77.*train\.csv.*test\.csv", text_set, "banking77", folder=tmp_path)
    assert_refused(r"sst2.*train\.tsv", text_set, "sst2")
    assert_refused(r"train\.csv.*train\.tsv", text_set, tmp_path)
    assert_refused("does not exist", text_set, tmp_path / "missing")
    assert_refused("'banking77'", text_set, "banking")
    assert {"python-topics", "banking77", "sst2", "sst5", "stsb"} <= text_sets().keys()

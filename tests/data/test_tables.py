"""Texts in tables: only the column of texts is read."""

import csv
import gzip
import json
from pathlib import Path

import pytest
from wording import assert_refused

from holdfast.data import Corpus, corpus

ROWS = [(f'The "film" no. {number}, in short, was\nfine; \u00e9t\u00e9', f"label{number % 2}") for number in range(30)]


def texts(source: Corpus) -> list[str]:
    return sorted(document.text for split in source.splits for document in source.documents(split))


def separated(sign: str, header: tuple[str, str] = ("kind", "Text")) -> str:
    def quoted(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    return "\r\n".join([sign.join(header), *(sign.join((label, quoted(text))) for text, label in ROWS)]) + "\r\n"


def json_lines(field: str = "text") -> str:
    return "\n".join(json.dumps({"kind": label, field: text}) for text, label in ROWS) + "\n\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", separated(",")),
        ("a.CSV", separated(";")),
        ("bom.csv", "\ufeff" + separated(",", ("text", "text2")).replace("label0,", "x,").replace("label1,", "x,")),
        ("a.jsonl", json_lines()),
        ("a.ndjson", json_lines("content")),
    ],
)
def test_the_column_of_texts_is_read_and_nothing_else(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode())
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
    expected = ["x"] * len(ROWS) if name == "bom.csv" else sorted(text for text, _ in ROWS)
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        found = corpus(path)
        assert texts(found) == expected
        assert all(len(list(found.documents(split))) > 0 for split in ("train", "valid", "test"))
        assert found.checksum is not None and found.name == path.name


def test_a_tsv_has_no_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("sentence\tkind\n" + "".join(f'"{n} so-called\t1\n' for n in range(9)))
    assert texts(corpus(tmp_path / "a.tsv")) == [f'"{n} so-called' for n in range(9)]


def test_a_text_may_be_longer_than_the_limit_of_python(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text("text,kind\n" + f"{'word ' * 40_000},1\n" * 3)
    assert {len(text) for text in texts(corpus(tmp_path / "a.csv"))} == {200_000} and csv.field_size_limit() == before


def test_a_column_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(separated(",", ("text", "review")))
    (tmp_path / "a.jsonl").write_text(json_lines("review"))
    for name in ("a.csv", "a.jsonl"):
        assert texts(corpus(f"{tmp_path / name}:review")) == sorted(text for text, _ in ROWS)
    assert texts(corpus(f"{tmp_path / 'a.csv'}:text")) == sorted(label for _, label in ROWS)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", separated(",", ("kind", "review")), r"kind, review.*a\.csv:kind"),
        ("a.csv:reviw", separated(",", ("kind", "review")), r"kind, review.*reviw"),
        ("a.jsonl", json_lines("review"), r"kind, review.*a\.jsonl:kind"),
        ("a.jsonl", json_lines() + "{}", "line 32: .*text"),
        ("a.jsonl", json_lines() + '{"text": 3}', "line 32: .*text"),
        ("a.jsonl", "prose\n", "line 1: .*JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: .*JSON"),
        ("a.jsonl", json_lines() + r'{"text": "\ud83d"}', "a.jsonl, line 32: .*surrogate"),
        ("a.json", json.dumps([{"text": "x"}] * 9), "JSON"),
        ("a.csv", "text,kind\na,b\nc\n", "line 3: 1 fields.* 2"),
        ("a.csv", 'text,kind\n"a,b\n', "a.csv, line"),
        ("a.csv", "text,kind\na,b\n,b\nc,d\n", "2 rows"),
        ("a.csv", separated(",", ("text", "text")), "2 columns.*text"),
        ("a.csv", " \n", "no text"),
        ("missing.csv", "", "missing.csv"),
    ],
)
def test_a_wrong_table_raises_a_one_line_error(name: str, content: str, says: str, tmp_path: Path) -> None:
    if content:
        (tmp_path / name.partition(":")[0]).write_text(content)
    assert_refused(says, corpus, str(tmp_path / name))


@pytest.mark.parametrize("label", ["label", "Category", "sentiment"])
def test_a_table_with_labels_is_refused_unless_its_texts_are_named(tmp_path: Path, label: str) -> None:
    (tmp_path / "a.csv").write_text(separated(",", (label, "text")))
    (tmp_path / "a.jsonl").write_text(json_lines().replace('"kind"', f'"{label}"'))
    for name in ("a.csv", "a.jsonl"):
        assert_refused(rf"labels, {label},.*`task: labels`.*data\.text=text, or .*{name}:text", corpus, tmp_path / name)
        expected = sorted(text for text, _ in ROWS)
        assert texts(corpus(f"{tmp_path / name}:text")) == texts(corpus(tmp_path / name, column="text")) == expected


def test_a_column_of_something_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree\n")
    for source in (tmp_path / "a.txt", "python-docs"):
        assert_refused(r"column words.*not a table", corpus, source, column="words")

"""Texts of the user: files and folders, and errors in them."""

import gzip
import lzma
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wording import assert_refused

from holdfast.data import Corpus, Document, corpus
from holdfast.data.documents import hold_out, split_by_position, split_by_title


def texts(source: Corpus) -> dict[str, str]:
    return {split: "".join(document.text for document in source.documents(split)) for split in source.splits}


def test_a_text_is_split_by_position_after_paragraphs(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {number}\nhas two lines.\n\n" for number in range(50)]
    (tmp_path / "book.txt").write_text("".join(paragraphs))
    parts = texts(corpus(tmp_path / "book.txt"))
    assert "".join(parts.values()) == "".join(paragraphs)
    assert all(part.endswith("\n\n") and part.startswith("Paragraph") for part in parts.values())
    assert [round(len(part) / len("".join(paragraphs)), 1) for part in parts.values()] == [0.8, 0.1, 0.1]


def test_a_text_without_paragraphs_is_split_after_lines(tmp_path: Path) -> None:
    lines = [f"line {number}\r\n" for number in range(40)]
    (tmp_path / "list.txt").write_bytes("".join(lines).encode())
    parts = texts(corpus(str(tmp_path / "list.txt")))
    assert "".join(parts.values()) == "".join(lines)
    assert all(part.endswith("\r\n") for part in parts.values())


@given(st.lists(st.sampled_from([b"word ", b"\n", b"\n\n", b" \n", b"\r\n", "é".encode()])))
def test_a_split_text_is_never_cut_inside_a_line_and_loses_nothing(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    parts = split_by_position(data)
    if parts is not None:
        assert b"".join(parts) == data
        assert all(part.strip() for part in parts)
        assert all(part.endswith(b"\n") for part in parts[:2])


@pytest.mark.parametrize("content", [b"one line", b"two\nlines", b"x\n" + b"a very long line " * 99])
def test_a_text_too_short_to_split_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "short.txt").write_bytes(content)
    assert_refused(r"short\.txt.*lines", corpus, tmp_path / "short.txt")


def folder(place: Path, count: int) -> dict[str, str]:
    files = {f"part{number % 3}/chapter{number}.txt": f"Chapter {number}.\n" for number in range(count)}
    for name, text in files.items():
        (place / name).parent.mkdir(exist_ok=True, parents=True)
        (place / name).write_text(text)
    return files


@pytest.mark.parametrize("count", [3, 4, 30])
def test_a_folder_is_split_by_file_and_no_split_is_empty(tmp_path: Path, count: int) -> None:
    files = folder(tmp_path, count)
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    source = corpus(tmp_path)
    found = {split: [document.title for document in source.documents(split)] for split in source.splits}
    assert sorted(title for titles in found.values() for title in titles) == sorted(files)
    assert all(titles == sorted(titles) and titles for titles in found.values())
    assert len(found["test"]) == len(found["valid"]) == max(1, count // 10)


def test_packing_a_file_changes_neither_the_splits_nor_the_checksum(tmp_path: Path) -> None:
    files = folder(tmp_path, 12)
    checksum = corpus(tmp_path).checksum
    first, second = list(files)[:2]
    (tmp_path / f"{first}.xz").write_bytes(lzma.compress(files[first].encode()))
    (tmp_path / f"{second}.gz").write_bytes(gzip.compress(files[second].encode()))
    for name in (first, second):
        (tmp_path / name).unlink()
    assert corpus(tmp_path).checksum == checksum


def test_a_file_that_exists_twice_is_an_error(tmp_path: Path) -> None:
    files = folder(tmp_path, 3)
    name = next(iter(files))
    with gzip.open(tmp_path / f"{name}.gz", "wb") as file:
        file.write(b"other")
    assert_refused(r"part0/chapter0\.txt", corpus, tmp_path)


def test_a_disk_in_place_of_a_folder_of_texts_is_not_searched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for number in range(1000):
            yield f"{folder}/{number}", [], ["file"] * 110
        raise AssertionError("all of the disk was searched")

    monkeypatch.setattr(os, "walk", walk)
    assert_refused(r"has over 100,000 files that are not texts \(\.txt\); name a folder", corpus, tmp_path)


def test_files_named_after_the_splits_are_the_splits(tmp_path: Path) -> None:
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} text")
    assert texts(corpus(tmp_path)) == {"train": "the train text", "valid": "the dev text", "test": "the test text"}


def test_a_folder_with_too_few_texts_says_so(tmp_path: Path) -> None:
    folder(tmp_path, 2)
    assert_refused("2 text files", corpus, tmp_path)


def test_any_change_of_a_text_its_title_or_its_split_changes_the_checksum() -> None:
    def checksum(**splits: list[tuple[str, bytes]]) -> str | None:
        documents = {split: [Document(*document) for document in found] for split, found in splits.items()}
        return Corpus("toy", "a toy", documents).checksum

    one = checksum(train=[("a", b"bc")], test=[("d", b"e")])
    others = [
        checksum(train=[("a", b"bC")], test=[("d", b"e")]),
        checksum(train=[("A", b"bc")], test=[("d", b"e")]),
        checksum(train=[("ab", b"c")], test=[("d", b"e")]),
        checksum(train=[("a", b"bc"), ("d", b"e")], test=[]),
        checksum(train=[("a", b"bc")], valid=[("d", b"e")]),
    ]
    assert len({one, *others}) == 6
    assert one == checksum(train=[("a", b"bc")], test=[("d", b"e")])


WRONG = {
    "empty": ("a.txt", b"", r"a\.txt .*no text"),
    "blank": ("a.txt", b" \n\n ", r"a\.txt .*no text"),
    "Latin-1": ("a.txt", "caf\xe9\n".encode("latin-1") * 20, r"a\.txt .*UTF-8.*0xe9"),
    "UTF-16": ("a.txt", "text\n".encode("utf-16") * 20, r"a\.txt .*UTF-8"),
    "not gzip": ("a.txt.gz", b"plain text", r"a\.txt\.gz is damaged"),
    "half a gzip": ("a.txt.gz", gzip.compress(b"text\n" * 999)[:-20], r"a\.txt\.gz is damaged"),
    "half an xz": ("a.txt.xz", lzma.compress(b"text\n" * 999)[:-20], r"a\.txt\.xz is damaged"),
    "not xz": ("a.txt.xz", b"plain text", r"a\.txt\.xz is damaged"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_raises_an_error_that_names_it(tmp_path: Path, wrong: str) -> None:
    name, content, says = WRONG[wrong]
    (tmp_path / name).write_bytes(content)
    assert_refused(says, corpus, tmp_path / name)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word\n" * 50, encoding="utf-8-sig")
    assert texts(corpus(tmp_path / "a.txt"))["train"].startswith("word\n")


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 1000), min_size=3, max_size=12))
def test_titles_fill_three_splits_whatever_their_sizes(sizes: dict[str, int]) -> None:
    splits = split_by_title(sizes)
    assert set(splits) == set(sizes)
    assert set(splits.values()) == {"train", "valid", "test"}
    assert splits == split_by_title(dict(reversed(sizes.items())))


@given(st.lists(st.text(max_size=3), min_size=2))
def test_holding_out_keeps_every_example_once(keys: list[str]) -> None:
    kept, held = hold_out(keys)
    assert sorted(kept + held) == list(range(len(keys)))
    assert kept and held and kept == sorted(kept) and held == sorted(held)


def test_too_few_examples_to_split_raise_an_error() -> None:
    assert_refused("2 documents", split_by_title, {"a": 1, "b": 1})
    assert_refused("held out", hold_out, ["a"])

"""Text sources by name: the real ones if they are available, else small copies of their layout; no network."""

import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wording import assert_refused

from holdfast.data import Bytes, Vocabulary, corpora, corpus, text_sources, tokenizer
from holdfast.errors import MissingExtra

LINES = {
    "train": " \n = Title = \n \n The quick <unk> fox . \n",
    "valid": " \n The fox . \n",
    "test": " \n A quick fox . \n \n",
}
WRITERS: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with WRITERS[path.suffix if path.suffix in WRITERS else ""](path, "wb") as file:
        file.write(text.encode())


def test_every_source_is_listed_with_a_line_of_its_own() -> None:
    assert list(corpora()) == ["python-docs", "wikitext-2", "wikitext-103", "enwik8", "c4"]
    assert all(about and "\n" not in about for about in corpora().values())


@pytest.mark.slow
def test_wikitext_2_has_exactly_the_published_tokens(shared: Path) -> None:
    """Its published vocabulary of 33,278 words covers all of them: unknown words are written as <unk> in the text."""
    source = corpus("wikitext-2", folder=shared)
    words = tokenizer(source, "lines")
    assert [len(words.stream(source.documents(split))) for split in source.splits] == [2_088_628, 217_646, 245_569]
    assert len(words) == 33_278 and words.end is not None
    test = words.stream(source.documents("test"))
    text = next(iter(source.documents("test"))).text
    assert int((test == 0).sum()) == text.split().count("<unk>")
    assert int((test == words.end).sum()) == text.count("\n")


@pytest.mark.slow
def test_enwik8_is_cut_at_its_usual_places(shared: Path) -> None:
    source = corpus("enwik8", folder=shared)
    tokens = {split: Bytes().stream(source.documents(split)) for split in source.splits}
    assert [len(tokens[split]) for split in ("train", "valid", "test")] == [90_000_000, 5_000_000, 5_000_000]
    assert all(part.element_size() == 1 for part in tokens.values())  # 90 million int64 would take 720 MB
    assert Bytes().decode(tokens["train"][:10]) == "<mediawiki"
    assert Bytes().decode(tokens["train"][-4:]) + Bytes().decode(tokens["valid"][:3]) == "orthern"


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("layout", ["wikitext2/{}.txt", "wikitext-2/wiki.{}.tokens"])
def test_wikitext_is_found_in_either_layout_packed_or_not(tmp_path: Path, layout: str, ending: str) -> None:
    for split, text in LINES.items():
        write(tmp_path / f"{layout.format(split)}{ending}", text)
    source = corpus("wikitext-2", folder=tmp_path)
    assert {split: "".join(d.text for d in source.documents(split)) for split in source.splits} == LINES
    folder = (tmp_path / layout).parent
    assert corpus("wikitext-2", folder=folder).checksum == source.checksum


def test_a_folder_of_another_text_is_not_taken_for_wikitext(tmp_path: Path) -> None:
    for split, text in LINES.items():
        write(tmp_path / "wikitext103" / f"{split}.txt", text)
    assert_refused("wikitext-2", corpus, "wikitext-2", folder=tmp_path / "wikitext103")
    assert corpus("wikitext-103", folder=tmp_path / "wikitext103").name == "wikitext-103"


def test_through_the_datasets_package_wikitext_is_the_same_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package reads a local copy of the hub's layout, whose empty rows have no newline."""
    pytest.importorskip("datasets")
    folder = tmp_path / "Salesforce" / "wikitext"
    names = {"train": "train", "valid": "validation", "test": "test"}
    for split, text in LINES.items():
        rows = [{"text": line if line.strip() else ""} for line in text.splitlines(keepends=True)]
        write(folder / f"{names[split]}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in names.values())
    write(folder / "README.md", f"---\nconfigs:\n- config_name: wikitext-2-v1\n  data_files:\n{files}---\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source = corpus("wikitext-2")
    for split, text in LINES.items():
        words = Vocabulary([LINES["train"]], splitter="lines")
        assert words.stream(source.documents(split)).tolist() == words.encode(text).tolist()


def c4(folder: Path, train: int = 5, valid: int = 4) -> None:
    for split, count in (("train", train), ("validation", valid)):
        rows = [
            json.dumps({"text": f"{split} page {number}\nends", "url": "u", "timestamp": "t"}) for number in range(count)
        ]
        half = count // 2
        for shard, part in enumerate((rows[:half], rows[half:])):
            write(folder / f"c4-{split}.0000{shard}-of-00002.json.gz", "".join(f"{row}\n" for row in part))


def test_c4_is_streamed_and_its_validation_pages_alternate(tmp_path: Path) -> None:
    c4(tmp_path / "c4")
    source = corpus("c4", folder=tmp_path)
    titles = {split: [document.title for document in source.documents(split)] for split in source.splits}
    assert titles["train"] == [f"c4/train/{number}" for number in range(5)]
    assert titles["valid"] == ["c4/validation/0", "c4/validation/2"]
    assert titles["test"] == ["c4/validation/1", "c4/validation/3"]
    assert source.streamed and source.checksum is None


def test_no_more_of_a_stream_is_read_than_needed(tmp_path: Path) -> None:
    """The second shard is damaged, which is an error only when it is read."""
    c4(tmp_path)
    (tmp_path / "c4-train.00001-of-00002.json.gz").write_bytes(b"not gzip")
    source = corpus("c4", folder=tmp_path)
    assert Bytes().decode(Bytes().stream(source.documents("train"), limit=20)) == "train page 0\nends\ntr"
    assert_refused(r"c4-train\.00001-of-00002\.json\.gz is damaged", lambda: list(source.documents("train")))


def test_the_words_of_a_stream_are_not_counted(tmp_path: Path) -> None:
    c4(tmp_path)
    assert_refused("count words", lambda: tokenizer(corpus("c4", folder=tmp_path), "words"))


def test_through_the_datasets_package_c4_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "allenai" / "c4"
    c4(folder / "en")
    files = "".join(f"  - split: {name}\n    path: en/c4-{name}.*.json.gz\n" for name in ("train", "validation"))
    write(folder / "README.md", f"---\nconfigs:\n- config_name: en\n  data_files:\n{files}---\n")
    monkeypatch.chdir(tmp_path)
    source, local = corpus("c4"), corpus("c4", folder=folder / "en")
    assert source.streamed
    for split in source.splits:
        assert list(source.documents(split)) == list(local.documents(split))


def test_a_wrong_line_of_c4_is_named(tmp_path: Path) -> None:
    c4(tmp_path)
    write(tmp_path / "c4-train.00000-of-00002.json.gz", '{"text": "fine"}\n{"url": "no text"}\n')
    assert_refused(
        r"00000-of-00002\.json\.gz, line 2: .*JSON", lambda: list(corpus("c4", folder=tmp_path).documents("train"))
    )


def test_an_enwik8_of_another_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "enwik8", "too short")
    assert_refused(r"\b9 bytes.*enwik8.*100,000,000", lambda: list(corpus("enwik8", folder=tmp_path).documents("test")))
    monkeypatch.setattr(text_sources, "ENWIK8", {"train": 4, "valid": 3, "test": 2})
    source = corpus("enwik8", folder=tmp_path)
    assert [d.data for split in source.splits for d in source.documents(split)] == [b"too ", b"sho", b"rt"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wikitext-2", r"wikitext-2.*train\.txt.*wikitext2"),
        ("wikitext-103", r"train\.txt.*wikitext103"),
        ("enwik8", r"enwik8.*enwik8\.zip.*enwik8"),
        ("c4", r"c4 .*c4-train\.\*\.json\.gz"),
    ],
)
def test_a_missing_source_says_how_to_get_it(tmp_path: Path, name: str, says: str) -> None:
    assert_refused(says, corpus, name, folder=tmp_path)


def test_half_a_source_says_which_half_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "wikitext2" / "train.txt", LINES["train"])
    assert_refused(r"wikitext-2.*valid\.txt", corpus, "wikitext-2", folder=tmp_path)


@pytest.mark.parametrize("name", ["wikitext-2", "c4"])
def test_without_a_network_a_source_says_what_to_do_instead(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert_refused(r"\(.+\).*network", corpus, name)


def test_without_the_datasets_package_a_source_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"needs datasets.*'\.\[lab\]'.*[^.]; or put train"):
        corpus("wikitext-2")


def test_enwik8_without_a_folder_says_where_to_get_it() -> None:
    assert_refused("enwik8", corpus, "enwik8")


@pytest.mark.parametrize("name", ["wikitext2", "pyton-docs", ""])
def test_an_unknown_name_raises_and_suggests_the_closest(name: str) -> None:
    nearest = {
        "wikitext2": "did you mean 'wikitext-2'",
        "pyton-docs": "did you mean 'python-docs'",
        "": "expected one of c4",
    }
    assert_refused(nearest[name], corpus, name)


@pytest.mark.parametrize("path", ["missing.txt", "missing.txt.xz", f"no{os.sep}where", Path("missing")])
def test_a_path_that_does_not_exist_is_not_taken_for_a_name(path: str | Path) -> None:
    assert_refused("does not exist", corpus, path)


def test_an_unknown_split_raises_and_suggests_the_closest() -> None:
    assert_refused(r"'vald'.*'valid'", lambda: corpus("python-docs").documents("vald"))

"""Named sets of labelled texts in their own layouts, folders of `datasets`, and columns that the user names."""

import json
import lzma
from collections.abc import Sequence
from pathlib import Path

import pytest
from wording import assert_refused

from holdfast.data import TextSet, text_set
from holdfast.data.labelled_texts import GLUE, class_numbers

LABELS = {
    "stsb": ["0.0", "2.5", "5.0"],
    "mnli": ["contradiction", "entailment", "neutral"],
    "qnli": ["entailment", "not_entailment"],
    "rte": ["entailment", "not_entailment"],
}


def row(task: str, number: int, header: Sequence[str]) -> str:
    labels = LABELS.get(task, ["0", "1"])
    columns = GLUE[task].columns
    cells = {columns.text: f'the "first {number}', columns.pair: f"second' {number}"}
    cells[columns.label] = labels[number % len(labels)]
    return "\t".join(cells.get(name, f"{name} {number}") for name in header) + "\n"


def write_task(folder: Path, task: str) -> None:
    place, columns = folder / GLUE[task].folder, GLUE[task].columns
    place.mkdir(parents=True)
    files = {"train.tsv": 20, **{file: 3 + place for place, (_, file) in enumerate(GLUE[task].tests)}}
    for name, count in files.items():
        names = [one for one in (columns.label, columns.pair, columns.text) if one is not None]
        others = ["index"] if name == "train.tsv" else ["index", "label1", "label2"]  # MNLI's dev files have more columns
        header = GLUE[task].header or [*others, *names]
        rows = "".join(row(task, number, header) for number in range(count))
        mark = "\ufeff" if task == "mrpc" else ""  # as in GLUE's own file
        first = "" if GLUE[task].header else "\t".join(header) + "\n"  # CoLA's files have no header
        (place / name).write_text(mark + first + rows)
    (place / "test.tsv").write_text("index\tsentence\n0\tno label\n")


@pytest.mark.parametrize("task", GLUE)
@pytest.mark.parametrize("around", ["", "glue"])
def test_the_files_of_every_glue_task_are_read(task: str, around: str, tmp_path: Path) -> None:
    write_task(tmp_path / around, task)
    found = text_set(task, folder=tmp_path)
    assert [len(found.texts(split)) for split in ("train", "valid", "test")] == [18, 2, 3]
    first = found.texts("test")[1]
    assert first.text == 'the "first 1'  # a lone quote is part of the text
    assert first.pair == (None if task in ("cola", "sst2") else "second' 1")
    assert found.metric == {"cola": "matthews", "mrpc": "f1", "qqp": "f1", "stsb": "pearson"}.get(task, "accuracy")
    if task == "stsb":
        assert found.is_regression and [text.label for text in found.texts("test")] == [0, 2.5, 5]
    else:
        assert found.classes == tuple(LABELS.get(task, ["0", "1"])) and first.label == 1
    assert found.other_tests == (["mismatched"] if task == "mnli" else [])
    if task == "mnli":
        assert len(found.texts("mismatched")) == 4


def test_broken_rows_of_qqp_are_skipped_and_those_of_others_refused(tmp_path: Path) -> None:
    for task in ("qqp", "rte"):
        write_task(tmp_path, task)
        with (tmp_path / GLUE[task].folder / "train.tsv").open("a") as file:
            file.write("99\tonly two\n")
    assert len(text_set("qqp", folder=tmp_path).texts("train")) == 18
    assert_refused(r"train\.tsv, line 22: 2 fields", text_set, "rte", folder=tmp_path)


def test_a_missing_file_of_a_glue_task_is_named(tmp_path: Path) -> None:
    write_task(tmp_path, "mnli")
    (tmp_path / "MNLI" / "dev_mismatched.tsv").unlink()
    assert_refused(r"no dev_mismatched\.tsv", text_set, "mnli", folder=tmp_path)


def test_the_treebank_is_read_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "sst").mkdir()
    for kind, labels in (("binary", 2), ("fine", 5)):
        for split, count in (("train", 15), ("dev", 5), ("test", 10)):
            lines = "".join(f"{number % labels} film \u2028 {number} .\n" for number in range(count))
            (tmp_path / "sst" / f"stsa.{kind}.{split}.xz").write_bytes(lzma.compress(lines.encode()))
    for name, labels in (("sst2", 2), ("sst5", 5)):
        found = text_set(name, folder=tmp_path)
        assert {split: len(rows) for split, rows in found.splits.items()} == {"train": 15, "valid": 5, "test": 10}
        assert found.classes == tuple(map(str, range(labels))) and found.texts("test")[3].text == "film \u2028 3 ."
    (tmp_path / "sst" / "stsa.fine.dev.xz").write_bytes(lzma.compress(b"good film\n"))
    assert_refused("line 1: this is not a number", text_set, "sst5", folder=tmp_path)


def test_the_shared_sets_have_their_published_sizes(shared: Path) -> None:
    sizes = {
        "sst2": (6920, 872, 1821),
        "sst5": (8544, 1101, 2210),
        "cola": (7696, 855, 1043),
        "mrpc": (3300, 367, 408),
        "rte": (2241, 249, 277),
    }
    for name, expected in sizes.items():
        found = text_set(name, folder=shared)
        assert tuple(len(found.texts(split)) for split in ("train", "valid", "test")) == expected


def write_csv(path: Path, rows: int = 30) -> Path:
    path.write_text("id,body,other,stars\n" + "".join(f"{n},text {n},pair {n},{n % 3}\n" for n in range(rows)))
    return path


def test_columns_are_named_by_options_or_in_the_source(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv")
    for found in (
        text_set(path, text="body", pair="other", label="stars"),
        text_set(f"{path}:body,other,stars"),
    ):
        row = found.texts("test")[0]
        assert row.text.startswith("text ") and row.pair == row.text.replace("text", "pair")
        assert found.classes == ("0", "1", "2") and found.has_pairs
        assert {split: len(rows) for split, rows in found.splits.items()} == {"train": 24, "valid": 3, "test": 3}
    assert not text_set(f"{path}:body,stars").has_pairs


def test_the_splits_of_one_file_have_no_row_twice(tmp_path: Path) -> None:
    found = text_set(write_csv(tmp_path / "a.csv", 200), text="body", label="stars")
    texts = [row.text for split in found.splits.values() for row in split]
    assert sorted(texts) == sorted(f"text {number}" for number in range(200))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"text": "bdy"}, r"id, body, other, stars, and none is called bdy, as data\.text says"),
        ({"text": "body", "pair": "p"}, r"none is called p, as data\.pair says"),
        ({"text": "body", "label": "l"}, r"none is called l, as data\.label says"),
        ({"pair": "other"}, r"name the first in data\.text"),
        ({"text": "body"}, r"name the column of labels in data\.label"),
        ({}, r"name the column of texts in data\.text"),
    ],
)
def test_a_missing_column_is_one_sentence(given: dict[str, str], says: str, tmp_path: Path) -> None:
    assert_refused(says, lambda: text_set(write_csv(tmp_path / "a.csv"), **given))  # type: ignore[arg-type]


def test_unequal_pairs_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"premise": "a", "hypothesis": "b", "label": 0}\n{"premise": "a", "label": 1}\n')
    assert_refused(r"a\.jsonl, line 2: hypothesis is missing", text_set, tmp_path / "a.jsonl")
    (tmp_path / "a.csv").write_text("sentence1,sentence2,label\na,b,0\nc,,1\n")
    assert_refused(r"a\.csv, line 3: sentence2 is empty", text_set, tmp_path / "a.csv")


def test_json_labels_may_be_numbers_booleans_or_fractions(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"t {n}", "label": n % 2 == 0}) + "\n" for n in range(9)))
    assert text_set(path).classes == ("0", "1")
    path.write_text("".join(json.dumps({"text": f"t {n}", "label": n / 2}) + "\n" for n in range(9)))
    assert text_set(path).is_regression and text_set(path).metric == "pearson"
    path.write_text("".join(json.dumps({"text": f"t {n}", "label": n % 3}) + "\n" for n in range(9)))
    assert not text_set(path).is_regression and text_set(path, regression=True).is_regression


def test_labels_are_matched_to_the_classes_of_a_model() -> None:
    assert class_numbers(["NEGATIVE", "POSITIVE"], ["positive", "negative"])["positive"] == 1
    assert class_numbers(["LABEL_0", "LABEL_1"], ["1", "0"]) == {"0": 0, "1": 1}
    assert class_numbers(["b", "a"], ["a"])["a"] == 1
    assert class_numbers(["1", "2"], ["0", "1"]) == {"1": 0, "2": 1}  # numbers that are names stay names
    assert class_numbers(["a", "A"], ["A"]) == {"a": 0, "A": 1}


def test_a_label_that_a_model_does_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,good\nb,odd\n")
    assert_refused(r"label 'odd'.*\(bad, good\)", text_set, tmp_path / "a.csv", classes=("bad", "good"), test_only=True)
    (tmp_path / "a.csv").write_text("text,label\na,good\nb,Bad\n")
    found = text_set(tmp_path / "a.csv", classes=("bad", "good"), test_only=True)
    assert [row.label for row in found.texts("test")] == [1, 0]


def test_a_model_that_predicts_numbers_refuses_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,good\nb,bad\n")
    assert_refused(r"'good', which is not a number", text_set, tmp_path / "a.csv", classes=(), test_only=True)


def check_reviews(found: TextSet) -> None:
    assert found.classes == ("bad", "good") and len(found.texts("test")) == 4
    assert {row.label for row in found.texts("test")} == {0, 1}


def test_folders_that_datasets_wrote_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})

    def split(count: int) -> object:
        rows = {"text": [f"review {number}" for number in range(count)], "label": [number % 2 for number in range(count)]}
        return datasets.Dataset.from_dict(rows, features=features)

    splits = {"train": split(20), "validation": split(6), "test": split(4)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "dict")
    check_reviews(text_set(tmp_path / "dict"))
    assert len(text_set(tmp_path / "dict").texts("valid")) == 6
    splits["train"].save_to_disk(tmp_path / "one")  # type: ignore[attr-defined]
    sizes = {name: len(rows) for name, rows in text_set(tmp_path / "one").splits.items()}
    assert sizes == {"train": 16, "valid": 2, "test": 2}
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    for name, one in splits.items():
        one.to_parquet(str(tmp_path / "parquet" / "data" / f"{name}-00000-of-00001.parquet"))  # type: ignore[attr-defined]
    check_reviews(text_set(tmp_path / "parquet"))

    table = pytest.importorskip("pyarrow")
    for name, texts in (("not UTF-8", b"\xff"), ("cut", b"a")):
        rows = table.table({"text": table.array([texts] * 9, table.binary()).view(table.string()), "label": [0, 1, 2] * 3})
        path = tmp_path / name / "train.parquet"
        path.parent.mkdir()
        table.parquet.write_table(rows, path)
        path.write_bytes(path.read_bytes()[: -9 if name == "cut" else None])
        assert_refused(r"train\.parquet is damaged", text_set, path.parent)
    state = tmp_path / "one" / "state.json"
    stored = json.loads(state.read_text())
    for outside in ("../dict/train/data-00000-of-00001.arrow", "/etc/passwd", 3):
        state.write_text(json.dumps({**stored, "_data_files": [{"filename": outside}]}))
        assert_refused("not inside", text_set, tmp_path / "one")
    state.write_text(json.dumps(stored))
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"nothing")
    assert_refused("damaged", text_set, tmp_path / "one")


def test_the_embedded_set_needs_no_file() -> None:
    found = text_set("python-topics")
    assert len(found.classes) == 6 and len(found.texts("train")) > 300
    texts = [row.text for split in found.splits.values() for row in split]
    assert len(set(texts)) == len(texts)
    assert_refused("columns of its own", text_set, "python-topics", text="a")

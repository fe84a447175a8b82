"""Pictures with questions in files: LLaVA's dialogues, and the layouts of ScienceQA, MMBench, POPE and MME."""

import base64
import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from wording import assert_refused

from holdfast.data import question_set
from holdfast.data.question_files import read_tests
from holdfast.data.questions import put

SIZE = 8
GREY = {"a.png": 40, "b.png": 90, "c.png": 200}


def picture(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((10, 12, 3), value, dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def entry(name: str | None = "a.png", *turns: str) -> dict[str, Any]:
    said = turns or ("<image>\nWhat is it?", "A cat.")
    found: dict[str, Any] = {"id": "1"} if name is None else {"id": "1", "image": f"pictures/{name}"}
    return found | {"conversations": [{"from": ("human", "gpt")[n % 2], "value": one} for n, one in enumerate(said)]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    (place / "pictures").mkdir(parents=True)
    for name, value in GREY.items():
        (place / "pictures" / name).write_bytes(picture(value))
    write(place, [entry(name, "<image>\nWhat is it?", "A cat.", "And now?", "Still.") for name in GREY])
    return place


def write(folder: Path, entries: Any) -> None:
    (folder / "dialogues.json").write_text(json.dumps(entries))


def test_dialogues_are_read_with_their_pictures_and_turns(folder: Path) -> None:
    write(folder, [*(entry(name, "Look. <image>", name, "And?", "So.") for name in GREY), entry(None, "Who?", "Me.")])
    found = question_set(folder, size=SIZE)
    assert not found.tests and found.checksum == question_set(folder / "dialogues.json", size=SIZE).checksum
    every = [(split, one) for split in ("train", "valid") for one in found.dialogues(split).dialogues]
    assert len(every) == 4 and len([one for split, one in every if split == "valid"]) == 1
    for split, one in every:
        if one.picture is None:
            assert one.turns == (("Who?", "Me."),)
            continue
        pixels = found.dialogues(split).pictures.pixels([one.picture])
        assert pixels.shape == (1, 3, SIZE, SIZE)
        assert torch.equal(pixels, torch.full_like(pixels, GREY[one.turns[0][1]] / 255))
        assert one.turns == (("Look. <image>", one.turns[0][1]), ("And?", "So."))


BROKEN = {
    "missing picture": ([entry("d.png"), entry()], "there is no .*d.png"),
    "question without an answer": ([entry("a.png", "<image> What?"), entry()], "entry 0 has a question without an answer"),
    "empty answer": ([entry("a.png", "<image> What?", " "), entry()], "entry 0: turn 1 has no text"),
    "path that leaves the folder": ([entry("../../x.png"), entry()], "not a path inside"),
    "absolute path": ([entry() | {"image": "/etc/passwd"}, entry()], "not a path inside"),
    "picture without its place": ([entry("a.png", "What?", "It."), entry()], "has a picture and 0 times <image>"),
    "place without a picture": ([entry(None, "<image> What?", "It."), entry()], "has no picture and 1 times <image>"),
    "two places": ([entry("a.png", "<image> <image>?", "It."), entry()], "2 times <image>"),
    "name that is no text": ([entry("\ud800.png"), entry()], "not Unicode text"),
    "two pictures": ([entry() | {"image": ["a", "b"]}, entry()], "the path of one picture is expected"),
    "wrong order": ([{"conversations": [{"from": "gpt", "value": "It."}]}, entry()], "turn 0 is from 'gpt'"),
    "no list": ({"a": 1}, "is not a list of dialogues"),
    "no conversations": ([{"image": "pictures/a.png"}], "has no conversations"),
    "one dialogue": ([entry()], "two are needed"),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_broken_folder_is_refused_with_one_sentence(folder: Path, problem: str) -> None:
    entries, sentence = BROKEN[problem]
    write(folder, entries)
    assert_refused(sentence, question_set, folder, size=SIZE)


def test_a_broken_picture_is_refused_before_anything_is_trained(folder: Path) -> None:
    whole = picture(7)
    for content in (b"no picture", whole[: len(whole) // 2]):
        (folder / "pictures" / "b.png").write_bytes(content)
        assert_refused("b.png is not an image that can be read", question_set, folder, size=SIZE)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs links and pipes")
def test_links_out_of_the_folder_and_pipes_are_not_followed(folder: Path, tmp_path: Path) -> None:
    place = folder / "pictures" / "b.png"
    (tmp_path / "secret.png").write_bytes(picture(1))
    place.unlink()
    place.symlink_to(tmp_path / "secret.png")
    assert_refused("link to a file outside of its folder", question_set, folder, size=SIZE)
    place.unlink()
    os.mkfifo(place)
    assert_refused("named pipe", question_set, folder, size=SIZE)


def test_a_folder_without_its_json_or_with_two_is_refused(folder: Path) -> None:
    (folder / "more.json").write_text("[]")
    assert_refused("has 2 .json files", question_set, folder, size=SIZE)
    for file in folder.glob("*.json"):
        file.unlink()
    assert_refused("has no .json file", question_set, folder, size=SIZE)


# Tests


def scienceqa(folder: Path, changes: dict[str, Any] | None = None) -> str:
    problem = {"question": "Which?", "choices": ["x", "y", "z"], "answer": 2, "hint": "Look.", "image": "image.png"}
    problem |= {"split": "test", "subject": "natural science"} | (changes or {})
    text = {**problem, "image": None, "answer": 0, "hint": ""}
    (folder / "problems.json").write_text(json.dumps({"7": problem, "8": text, "9": problem}))
    (folder / "pid_splits.json").write_text(json.dumps({"train": ["9"], "test": ["7", "8"]}))
    (folder / "images" / "test" / "7").mkdir(parents=True, exist_ok=True)
    (folder / "images" / "test" / "7" / "image.png").write_bytes(picture(60))
    return f"scienceqa={folder}"


def mmbench(folder: Path, changes: dict[str, Any] | None = None) -> str:
    row = {
        "index": "1",
        "question": "Which\nof these?",
        "hint": "nan",
        "A": "x",
        "B": "y",
        "C": "nan",
        "D": "",
        "answer": "B",
    }
    row |= {"category": "colour", "image": base64.b64encode(picture(60)).decode()} | (changes or {})
    with (folder / "mmbench.tsv").open("w", newline="") as file:
        lines = csv.DictWriter(file, row, delimiter="\t")
        lines.writeheader()
        lines.writerow(row)
        lines.writerow(row | {"index": "2", "hint": "See.", "image": "1", "C": 'a "third"'})  # the picture of row 1
    return f"mmbench={folder / 'mmbench.tsv'}"


def pope(folder: Path, changes: dict[str, Any] | None = None) -> str:
    row = {"question_id": 1, "image": "a.png", "text": "Is there a dog in the image?", "label": "no"} | (changes or {})
    (folder / "a.png").write_bytes(picture(60))
    (folder / "pope.json").write_text(json.dumps(row) + "\n" + json.dumps({**row, "label": "Yes"}) + "\n")
    return f"pope={folder / 'pope.json'}"


def mme(folder: Path, changes: dict[str, Any] | None = None) -> str:
    (folder / "count").mkdir(exist_ok=True)
    (folder / "ocr" / "images").mkdir(parents=True, exist_ok=True)
    (folder / "ocr" / "questions_answers_YN").mkdir(exist_ok=True)
    lines = (changes or {}).get("lines", "Is it one?\tYes\nIs it two?\tNo\n")
    (folder / "count" / "1.txt").write_text(lines)
    (folder / "count" / "1.png").write_bytes(picture(60))
    (folder / "ocr" / "questions_answers_YN" / "2.txt").write_text("Is it an A?\tNo\n")
    (folder / "ocr" / "images" / "2.jpg").write_bytes(picture(90))
    return f"mme={folder}"


def test_the_layouts_are_read_with_their_pictures_options_and_kinds(tmp_path: Path) -> None:
    for make in (scienceqa, mmbench, pope, mme):
        (tmp_path / make.__name__).mkdir()
    found = read_tests([make(tmp_path / make.__name__) for make in (scienceqa, mmbench, pope, mme)], SIZE)
    asked = {name.split()[0]: test for name, (test, _) in found.items()}
    assert [name.split()[0] for name in found] == ["scienceqa", "mmbench", "pope", "mme"]
    first, second = asked["scienceqa"].questions
    assert (first.text, first.options, first.answer, first.picture) == ("Look.\nWhich?", ("x", "y", "z"), "z", 0)
    assert (second.picture, second.answer, second.kind, second.lettered) == (None, "x", "natural science", True)
    first, second = asked["mmbench"].questions
    assert (first.text, first.options, first.answer) == ("Which\nof these?", ("x", "y"), "y")
    assert (second.text, second.options, second.picture) == ("See.\nWhich\nof these?", ("x", "y", 'a "third"'), 0)
    assert [one.answer for one in asked["pope"].questions] == ["no", "yes"]
    kinds = [(one.text, one.answer, one.kind, one.picture) for one in asked["mme"].questions]
    assert kinds == [
        ("Is it one?", "yes", "count", 0),
        ("Is it two?", "no", "count", 0),
        ("Is it an A?", "no", "ocr", 1),
    ]
    for test in asked.values():
        assert test.pictures.pixels([0]).mean() == pytest.approx(60 / 255)
        assert all(put(one, 0).answer in put(one, 0).options for one in test.questions)


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "scienceqa without an answer": (scienceqa, {"answer": None}, "problem 7 has a question without an answer"),
    "scienceqa with an answer beyond": (scienceqa, {"answer": 3}, "problem 7 has a question without an answer"),
    "scienceqa that leaves its folder": (scienceqa, {"image": "../../../x.png"}, "not a path inside"),
    "scienceqa without a picture": (scienceqa, {"image": "other.png"}, "there is no .*other.png"),
    "scienceqa with equal options": (scienceqa, {"choices": ["x", "x", "z"]}, "different ones"),
    "mmbench without an answer": (mmbench, {"answer": "nan"}, "line 3 has a question without an answer"),
    "mmbench with an answer beyond": (mmbench, {"answer": "C"}, "has a question without an answer"),
    "mmbench with a broken picture": (mmbench, {"image": base64.b64encode(b"no picture" * 9).decode()}, "is not an image"),
    "mmbench without base64": (mmbench, {"image": "?" * 100}, "its picture is not base64"),
    "pope without an answer": (pope, {"label": "maybe"}, "line 1 has a question without an answer"),
    "pope without a picture": (pope, {"image": "b.png"}, "there is no .*b.png"),
    "pope that leaves its folder": (pope, {"image": "/a.png"}, "not a path inside"),
    "mme without an answer": (mme, {"lines": "Is it one?\n"}, "line 1 has a question without an answer"),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_broken_layout_is_refused_with_one_sentence(tmp_path: Path, problem: str) -> None:
    make, changes, sentence = WRONG[problem]
    assert_refused(sentence, read_tests, [make(tmp_path, changes)], SIZE)


def test_a_layout_that_is_not_known_or_not_there_is_refused(tmp_path: Path) -> None:
    assert_refused("did you mean 'pope'", read_tests, ["pop=x.json"], SIZE)
    assert_refused("write LAYOUT=PATH", read_tests, ["pope"], SIZE)
    for layout in ("scienceqa", "mmbench", "pope", "mme"):
        assert_refused("does not exist|is not a folder", read_tests, [f"{layout}={tmp_path / 'nothing'}"], SIZE)
    written = pope(tmp_path)
    assert_refused("two sets called", read_tests, [written, written], SIZE)

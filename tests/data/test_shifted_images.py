"""Layouts of shifted test sets, and which outputs of a model their classes are."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from PIL import Image
from wording import assert_refused

from holdfast.data import shifted_images
from holdfast.data.shifted_images import ClassIndex, outputs_of, read_class_index, recognise, unsplit_images

IDS = [f"n{20_000_000 + number:08}" for number in range(1000)]


def write(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)


def test_layouts_are_recognised(tmp_path: Path) -> None:
    for name in ("imagenet-a", "imagenet_r", "imagenet-o", "photos"):
        write(tmp_path / name / IDS[0] / "1.jpg", tmp_path / name / IDS[1] / "2.jpg")
    write(tmp_path / "c" / "fog" / "3" / "cat" / "1.png", tmp_path / "g" / "weather" / "fog" / "3" / "cat" / "1.png")
    for split in ("train", "val", "test"):
        write(*(tmp_path / "stars" / split / str(stars) / f"{split}.png" for stars in (1, 2, 3, 4, 5)))
    found = {path.name: recognise(str(path)) for path in tmp_path.iterdir()}
    assert {name: (one.kind, one.layout) for name, one in found.items()} == {
        "imagenet-a": ("classes", "ImageNet-A"),
        "imagenet_r": ("classes", "ImageNet-R"),
        "imagenet-o": ("outliers", "ImageNet-O"),
        "photos": ("classes", "class folders"),
        "c": ("corrupted", "corruption folders"),
        "g": ("corrupted", "corruption folders"),
        "stars": ("classes", "test split"),
    }
    assert len(found["stars"]) == 5 and [part.severity for part in found["g"].parts] == [3]
    for name in ("photos", "imagenet-o"):
        declared = recognise(f"outliers={tmp_path / name}")
        assert (declared.kind, declared.layout) == ("outliers", "outliers")


def test_a_folder_of_one_class_is_described_in_the_singular(tmp_path: Path) -> None:
    write(tmp_path / "one" / "cat" / "1.png", tmp_path / "c" / "fog" / "3" / "cat" / "1.png")
    write(*(tmp_path / "two" / name / f"{number}.png" for name in ("cat", "dog") for number in (1, 2)))
    says = {name: recognise(str(tmp_path / name)).about.split(": ", 1)[1] for name in ("one", "c", "two")}
    assert says == {
        "one": "class folders, 1 image of 1 class",
        "c": "corruption folders, 1 image of 1 class, 1 corruption",
        "two": "class folders, 4 images of 2 classes",
    }
    about = {name: unsplit_images(tmp_path / name, ["cat", "dog"], size=4).about for name in ("one", "two")}
    assert about["one"] == "1 test image of 1 class in one, 4 pixels per side"
    assert about["two"] == "4 test images of 2 classes in two, 4 pixels per side"


def test_a_published_list_of_classes_is_recognised_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "odd" / IDS[0] / "1.jpg", tmp_path / "odd" / IDS[1] / "2.jpg")
    monkeypatch.setitem(shifted_images.PUBLISHED, hashlib.sha256(" ".join(IDS[:2]).encode()).hexdigest(), "ImageNet-O")
    assert recognise(str(tmp_path / "odd")).kind == "outliers"


def test_hidden_files_pipes_and_other_files_are_no_images(tmp_path: Path) -> None:
    write(tmp_path / "set" / "cat" / "1.jpg", tmp_path / "set" / "dog" / "1.jpg")
    (tmp_path / "set" / "cat" / "._1.jpg").write_bytes(b"")
    (tmp_path / "set" / "cat" / "list.txt").write_text("no image")
    os.mkfifo(tmp_path / "set" / "cat" / "pipe.jpg")
    assert len(recognise(str(tmp_path / "set"))) == 2


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a" / "cat" / "1.jpg")
    (tmp_path / "a" / "dog").mkdir()
    assert_refused("dog has no images", recognise, str(tmp_path / "a"))
    write(tmp_path / "c" / "fog" / "1" / "cat" / "1.png", tmp_path / "c" / "fog" / "2" / "dog" / "1.png")
    assert_refused("has no class", recognise, str(tmp_path / "c"))
    write(tmp_path / "d" / "x" / "fog" / "1" / "cat" / "1.png", tmp_path / "d" / "y" / "fog" / "1" / "cat" / "1.png")
    assert_refused("fog twice", recognise, str(tmp_path / "d"))


@pytest.mark.parametrize("written", ["", " ", "classes="])
def test_an_empty_name_is_not_the_current_folder(written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused("is not a folder", recognise, written)


def test_class_indexes_are_read_from_folders_and_files(tmp_path: Path) -> None:
    for name in reversed(IDS[:3]):
        (tmp_path / "imagenet" / "train" / name).mkdir(parents=True)
    assert read_class_index(tmp_path / "imagenet").ids == tuple(IDS[:3])
    (tmp_path / "a.json").write_text(json.dumps({str(n): [IDS[n], f"a_{n}"] for n in range(3)}))
    found = read_class_index(tmp_path / "a.json")
    assert (found.ids, found.names) == (tuple(IDS[:3]), ("a_0", "a_1", "a_2"))
    (tmp_path / "a.txt").write_text(f"{IDS[0]} a, b\n{IDS[1]} c\n")
    assert read_class_index(tmp_path / "a.txt").names == ("a, b", "c")
    for name, text in {"b.txt": "cat\n", "c.txt": f"{IDS[0]}\n{IDS[0]}\n", "d.json": '{"1": 2}', "e.txt": ""}.items():
        (tmp_path / name).write_text(text)
        assert_refused("class index", read_class_index, tmp_path / name)


def test_ids_without_names_need_the_usual_thousand_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [f"thing {number}" for number in range(1000)]
    for number, name in shifted_images.LANDMARKS.items():
        usual[number] = f"{name.title()}, other word"
    index = ClassIndex("folder", tuple(IDS))
    with pytest.raises(ValueError, match="not the usual"):  # the list is not ImageNet's
        outputs_of(Path("a"), IDS[5:7], usual, index)
    monkeypatch.setitem(shifted_images.PUBLISHED, hashlib.sha256(" ".join(IDS).encode()).hexdigest(), "ImageNet")
    assert outputs_of(Path("a"), IDS[5:7], usual, index) == [5, 6]
    assert outputs_of(Path("a"), IDS[5:7], ["background", *usual], index) == [6, 7]
    with pytest.raises(ValueError, match="not the usual"):  # the model's classes are in another order
        outputs_of(Path("a"), IDS[5:7], [*usual[1:], usual[0]], index)
    assert outputs_of(Path("a"), IDS[5:7], [f"LABEL_{n}" for n in range(1000)], index) == [5, 6]

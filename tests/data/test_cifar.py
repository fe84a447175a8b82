"""CIFAR-10 from folders, archives and the authors' binary files, which all give the same images."""

import io
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from wording import assert_refused

from holdfast.data import ImageSet, image_set
from holdfast.data.labelled_images import BINARY, CLASSES

EACH = {"train": 4, "test": 2}  # images of a class


def image(split: str, label: int, number: int) -> np.ndarray:  # type: ignore[type-arg]
    """Return (32,32,3): the class is in the red channel, the number in the green one, and the corner is blue."""
    pixels = np.zeros((32, 32, 3), dtype=np.uint8)
    pixels[..., 0], pixels[..., 1] = 20 * label, 10 * number + 100 * (split == "test")
    pixels[0, 1, 2] = 255
    return pixels


def encoded(pixels: np.ndarray) -> bytes:  # type: ignore[type-arg]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def files() -> dict[str, bytes]:
    return {
        f"{split}/{name}/{number:04}.png": encoded(image(split, label, number))
        for split, count in EACH.items()
        for label, name in enumerate(CLASSES)
        for number in range(count)
    }


def write_folder(folder: Path, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        path = folder / "cifar10" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def archive(content: dict[str, bytes], prefix: str = "") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as written:
        for name, data in content.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(data)
            written.addfile(info, io.BytesIO(data))
    return file.getvalue()


def records(split: str) -> bytes:
    images = [(label, image(split, label, number)) for label in range(10) for number in range(EACH[split])]
    return b"".join(bytes((label,)) + pixels.transpose(2, 0, 1).tobytes() for label, pixels in images)


def check(found: ImageSet) -> None:
    assert found.classes == CLASSES and [len(found.images(split)) for split in ("train", "valid", "test")] == [36, 4, 20]
    for split in found.splits:
        images = found.images(split)
        pixels = images.pixels(range(len(images)))
        assert pixels.shape[1:] == images.shape == (3, 32, 32)
        assert torch.equal((255 * pixels[:, 0, 5, 5] / 20).round().long(), images.labels)
        assert (pixels[:, 2, 0, 1] == 1).all() and (pixels[:, 2, 1, 0] == 0).all()  # not transposed
        assert bool(((255 * pixels[:, 1, 0, 0]).round() >= 100).all()) == (split == "test")
    numbers = {split: found.images(split).pixels(range(len(found.images(split)))).numpy() for split in ("train", "valid")}
    assert not {row.tobytes() for row in numbers["train"]} & {row.tobytes() for row in numbers["valid"]}


def test_folders_and_archives_give_the_same_images(tmp_path: Path) -> None:
    write_folder(tmp_path / "plain", files())
    for ending, packed in (("", archive(files())), (".xz", lzma.compress(archive(files(), "./cifar/")))):
        path = tmp_path / f"packed{ending}" / "cifar10" / f"cifar10-jpg.tar{ending}"
        path.parent.mkdir(parents=True)
        path.write_bytes(packed)
    plain = image_set("cifar10", folder=tmp_path / "plain")
    check(plain)
    for name in ("packed", "packed.xz"):
        assert image_set("cifar10", folder=tmp_path / name).checksum == plain.checksum
    assert image_set("cifar10", folder=tmp_path / "plain" / "cifar10").checksum == plain.checksum  # the folder itself


def test_the_authors_binary_files_are_read(tmp_path: Path) -> None:
    content = {f"{BINARY}/data_batch_1.bin": records("train"), f"{BINARY}/test_batch.bin": records("test")}
    write_folder(tmp_path, content)
    found = image_set("cifar10", folder=tmp_path)
    check(found)
    packed = tmp_path / "packed" / "cifar-10" / "cifar-10-binary.tar"
    packed.parent.mkdir(parents=True)
    packed.write_bytes(archive(content))
    assert image_set("cifar10", folder=tmp_path / "packed").checksum == found.checksum


def test_wrong_data_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(r"cifar-10-binary\.tar\.gz", image_set, "cifar10", folder=tmp_path)
    assert_refused("--data", image_set, "cifar10")
    whole = files()
    wrong = {
        "other class": ({**whole, "train/cow/0000.png": encoded(image("train", 0, 0))}, "'cow'"),
        "other size": ({**whole, "train/cat/9.png": encoded(np.zeros((32, 31, 3), np.uint8))}, "31 x 32 pixels"),
        "no ships": (
            {name: data for name, data in whole.items() if "test/ship" not in name},
            "0 images of ship in test.*some are missing",
        ),
        "no image": ({**whole, "train/cat/9.png": b"no image"}, "train/cat/9.png"),
        "no record": ({f"{BINARY}/test_batch.bin": b"123"}, "3 bytes"),
        "no class": ({f"{BINARY}/test_batch.bin": b"\xff" * 3073}, "class that CIFAR-10 does not have"),
    }
    for name, (content, says) in wrong.items():
        write_folder(tmp_path / name, content)
        assert_refused(says, image_set, "cifar10", folder=tmp_path / name)
    packed = tmp_path / "cifar10" / "cifar10.tar.xz"
    packed.parent.mkdir()
    packed.write_bytes(lzma.compress(archive(whole)[:30_000]))
    assert_refused("some are missing", image_set, "cifar10", folder=tmp_path)
    packed.write_bytes(lzma.compress(b"no archive"))
    assert_refused("complete tar archive", image_set, "cifar10", folder=tmp_path)
    packed.write_bytes(lzma.compress(archive(whole))[:-100])
    assert_refused("damaged", image_set, "cifar10", folder=tmp_path)
    packed.write_bytes(lzma.compress(archive(whole)))
    monkeypatch.setattr("holdfast.data.labelled_images.MOST_UNPACKED", 2**15)
    assert_refused("unpacks to more", image_set, "cifar10", folder=tmp_path)


def test_links_and_devices_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(encoded(image("train", 3, 9)))
    file = io.BytesIO(archive(files()))
    with tarfile.open(fileobj=file, mode="a") as written:
        link = tarfile.TarInfo("train/cat/7777.png")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.png")
        written.addfile(link)
    path = tmp_path / "cifar10" / "cifar10.tar"
    path.parent.mkdir()
    path.write_bytes(file.getvalue())
    check(image_set("cifar10", folder=tmp_path))  # not one image more


@pytest.mark.slow
def test_the_shared_images_are_read(shared: Path) -> None:
    if not (shared / "cifar10").is_dir():
        pytest.skip("there is no cifar10 in ../shared/data")
    found = image_set("cifar10", folder=shared)
    assert [len(found.images(split)) for split in ("train", "valid", "test")] == [45_000, 5_000, 10_000]
    test = found.images("test")
    assert test.labels.bincount().tolist() == [1000] * 10
    means = test.pixels(range(10_000)).mean((0, 2, 3)).tolist()
    assert means == pytest.approx([0.494, 0.485, 0.451], abs=0.005)  # as published for CIFAR-10's test set

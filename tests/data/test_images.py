"""Images: the embedded digits, IDX files, folders."""

import gzip
import lzma
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from wording import assert_refused

from holdfast.data import ImageSet, image_set, image_sets
from holdfast.data.images import FileImages, read_image
from holdfast.data.shifted_images import unsplit_images

DEBIAN = Path("/usr/share/datasets")


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)


def sizes(found: ImageSet) -> list[int]:
    return [len(found.images(split)) for split in ("train", "valid", "test")]


def test_the_digits_have_their_labels() -> None:
    """The nearest mean of a class is right for nine in ten: pixels and labels belong together in every split."""
    digits = image_set("digits")
    assert sizes(digits) == [1437, 180, 180] and len(digits.classes) == 10
    train = digits.images("train")
    pixels = train.pixels(range(len(train)))
    assert pixels.shape == (1437, 1, 8, 8) and train.shape == (1, 8, 8) and pixels.dtype == torch.float32
    assert float(pixels.min()) == 0 and float(pixels.max()) == 1
    means = torch.stack([pixels[train.labels == label].mean(0) for label in range(10)]).flatten(1)
    for split in ("valid", "test"):
        others = digits.images(split)
        nearest = torch.cdist(others.pixels(range(len(others))).flatten(1), means).argmin(1)
        assert float((nearest == others.labels).float().mean()) > 0.85
    assert digits.checksum == image_set("digits").checksum


def test_no_digit_is_in_two_splits() -> None:
    digits = image_set("digits")
    images = [p.numpy().tobytes() for split in digits.splits for p in digits.images(split).pixels(range(180))]
    assert len(set(images)) == len(images)


def write_idx(path: Path, values: np.ndarray[Any, Any], ending: str) -> None:
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    opener: Any = {"": open, ".gz": gzip.open, ".xz": lzma.open}[ending]
    path.parent.mkdir(exist_ok=True, parents=True)
    with opener(f"{path}{ending}", "wb") as file:
        file.write(header + values.astype(np.uint8).tobytes())


def write_fashion(folder: Path, ending: str = "", joint: str = "-") -> np.ndarray[Any, Any]:
    """Write 20 and 6 images whose first pixel is their number and whose label is the number's last digit."""
    for part, count in (("train", 20), ("t10k", 6)):
        images = np.zeros((count, 28, 28), dtype=np.uint8)
        images[:, 0, 0] = np.arange(count)
        write_idx(folder / f"{part}-images{joint}idx3-ubyte", images, ending)
        write_idx(folder / f"{part}-labels{joint}idx1-ubyte", np.arange(count) % 10, ending)
    return images


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
@pytest.mark.parametrize("joint", ["-", "."])
def test_idx_files_are_read_packed_or_not(tmp_path: Path, ending: str, joint: str) -> None:
    write_fashion(tmp_path / "fashion-mnist", ending, joint)
    clothes = image_set("fashion-mnist", folder=tmp_path)
    assert sizes(clothes) == [18, 2, 6] and clothes.classes[9] == "Ankle boot"
    numbers = []
    for split in clothes.splits:
        images = clothes.images(split)
        found = (images.pixels(range(len(images)))[:, 0, 0, 0] * 255).round().long()
        assert torch.equal(found % 10, images.labels)
        numbers += found.tolist() if split != "test" else []
    assert sorted(numbers) == list(range(20))


def test_fashion_mnist_is_what_zalando_published() -> None:
    if not (DEBIAN / "fashion-mnist").is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    clothes = image_set("fashion-mnist")
    assert sizes(clothes) == [54_000, 6_000, 10_000]
    counts = sum(clothes.images(split).labels.bincount() for split in ("train", "valid"))
    assert isinstance(counts, torch.Tensor) and counts.tolist() == [6_000] * 10
    assert clothes.images("test").labels.bincount().tolist() == [1_000] * 10
    pixels = clothes.images("test").pixels(range(100))
    assert pixels.shape == (100, 1, 28, 28) and 0.2 < float(pixels.mean()) < 0.4


def test_wrong_idx_files_raise_an_error_that_names_them(tmp_path: Path) -> None:
    write_fashion(tmp_path / "fashion-mnist")
    images = tmp_path / "fashion-mnist" / "train-images-idx3-ubyte"
    right = images.read_bytes()
    for content, says in (
        (right[:-1], r"idx3-ubyte.*15,680 bytes.*15,679"),
        (right + b"x", r"15,680 bytes.*more"),
        (right[:7], r"IDX.*3 dimensions"),
        (b"\x00\x00\x0d\x03" + right[4:], r"IDX"),
        (right[:4] + b"\xff" * 12, r"IDX"),
    ):
        images.write_bytes(content)
        assert_refused(says, image_set, "fashion-mnist", folder=tmp_path)
    images.write_bytes(right)
    write_idx(tmp_path / "fashion-mnist" / "train-labels-idx1-ubyte", np.arange(20), "")
    assert_refused(r"labels.*train.*20 images", image_set, "fashion-mnist", folder=tmp_path)
    (tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte").unlink()
    write_fashion(tmp_path / "fashion-mnist")
    (tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte").unlink()
    assert_refused("t10k-labels-idx1-ubyte", image_set, "fashion-mnist", folder=tmp_path)


def write_images(folder: Path, classes: str, count: int) -> None:
    """Write images of 40x20, red on the left and blue on the right, with the number of their class as green."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            pixels = np.zeros((20, 40, 3), dtype=np.uint8)
            pixels[:, :20, 0], pixels[:, 20:, 2], pixels[:, :, 1] = 255, 255, number * 10
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


def test_an_image_folder_is_split_by_file(tmp_path: Path) -> None:
    write_images(tmp_path, "abc", 10)
    (tmp_path / "a" / "notes.md").write_text("not an image")
    found = image_set(tmp_path, size=10)
    assert found.classes == ("a", "b", "c") and sizes(found) == [24, 3, 3]
    for split in found.splits:
        images = found.images(split)
        pixels = images.pixels(range(len(images)))
        assert pixels.shape == (len(images), 3, 10, 10) and images.shape == (3, 10, 10)
        assert torch.equal((pixels[:, 1].mean((1, 2)) * 25.5).round().long(), images.labels)
        assert torch.equal(pixels[:, 0, :, 0], torch.ones_like(pixels[:, 0, :, 0]))  # the middle has both halves
        assert torch.equal(pixels[:, 2, :, 9], torch.ones_like(pixels[:, 2, :, 9]))
    assert images.pixels([]).shape == (0, 3, 10, 10)


def test_imagenets_layout_is_tested_on_val(tmp_path: Path) -> None:
    write_images(tmp_path / "train", "ab", 10)
    write_images(tmp_path / "val", "ab", 3)
    found = image_set(str(tmp_path), size=8)
    assert sizes(found) == [18, 2, 6]
    write_images(tmp_path / "test", "b", 4)
    with_test = image_set(tmp_path, size=8)
    assert sizes(with_test) == [20, 6, 4] and with_test.images("test").labels.tolist() == [1] * 4
    assert with_test.checksum != found.checksum


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("content", [b"no image", POSTSCRIPT], ids=["damaged", "PostScript"])
def test_images_are_decoded_when_they_are_read(tmp_path: Path, content: bytes) -> None:
    """Pillow would start Ghostscript on PostScript, whatever the file is called."""
    write_images(tmp_path, "ab", 5)
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(content)
    images = image_set(tmp_path, size=8).images("train")
    assert_refused(r"\.png is not .*: cannot identify", images.pixels, [0])


def test_a_class_that_is_not_in_training_is_named(tmp_path: Path) -> None:
    write_images(tmp_path / "train", "ab", 4)
    write_images(tmp_path / "val", "abz", 2)
    assert_refused(r"val.z.*class", image_set, tmp_path)


def test_folders_without_images_raise_an_error_that_says_what_is_expected(tmp_path: Path) -> None:
    assert_refused("folder", image_set, tmp_path)
    (tmp_path / "a").mkdir()
    assert_refused("class", image_set, tmp_path)
    write_images(tmp_path, "a", 2)
    assert_refused("2 images", image_set, tmp_path)
    write_images(tmp_path, "a", 6)
    assert_refused("one class only, a;", image_set, tmp_path)
    write_images(tmp_path / "train", "ab", 4)
    assert_refused(r"val.*test", image_set, tmp_path)
    assert_refused("folder", image_set, tmp_path / "missing")


def test_missing_packages_and_files_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused("dataset-fashion-mnist", image_set, "fashion-mnist", folder=tmp_path)
    (tmp_path / "a").mkdir()
    with monkeypatch.context() as patch:
        without(patch, "PIL")
        assert_refused(r"needs PIL.*pip install '\.\[lab\]'", image_set, tmp_path)
    with monkeypatch.context() as patch:
        without(patch, "sklearn")
        assert_refused(r"needs sklearn.*pip install '\.\[lab\]'", image_set, "digits")


def test_unknown_names_and_inert_options_are_refused() -> None:
    assert list(image_sets()) == ["digits", "fashion-mnist", "cifar10"]
    assert_refused(r"'digit'.*'digits'", image_set, "digit")
    assert_refused("size", image_set, "digits", size=16)


def test_a_file_is_decoded_once_if_all_images_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.data import images as module

    write_images(tmp_path, "ab", 10)
    decoded, decode = list[Path](), module.decode

    def noting(path: Path, *given: Any) -> Any:
        decoded.append(path)
        return decode(path, *given)

    monkeypatch.setattr(module, "decode", noting)
    images = image_set(tmp_path, size=8).images("train")
    first = images.pixels([3, 1, 3])
    assert torch.equal(images.pixels([1, 3])[[1, 0, 1]], first) and len(decoded) == 2
    monkeypatch.setattr(module, "LARGEST_IN_MEMORY", 0)
    large = image_set(tmp_path, size=8).images("train")
    assert torch.equal(large.pixels([3, 1, 3]), first) and len(decoded) == 5


def test_images_on_a_device_are_the_same_images(tmp_path: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "meta")  # meta: shapes and devices only
    write_images(tmp_path, "ab", 10)
    for images in (image_set(tmp_path, size=8).images("train"), image_set("digits").images("train")):
        there, numbers = images.on(device), torch.tensor([5, 2, 2])
        pixels, labels = there.pixels(numbers), there.labels_of(numbers)
        assert pixels.device.type == labels.device.type == device.type and pixels.shape == (3, *images.shape)
        if device.type == "cuda":
            torch.testing.assert_close(pixels.cpu(), images.pixels(numbers))
            assert torch.equal(labels.cpu(), images.labels[numbers])


RAMP = np.linspace(0, 1, 64).reshape(8, 8)  # from black to white


@pytest.mark.parametrize(
    ("ending", "values"),
    [
        ("png", (65535 * RAMP).astype(np.uint16)),
        ("tif", (65535 * RAMP).astype(np.uint16)),
        ("tif", (65535 * RAMP).astype(">u2")),
        ("pgm", (65535 * RAMP).astype(np.uint16)),
        ("tif", RAMP.astype(np.float32)),
        ("png", (255 * RAMP).astype(np.uint8)),
    ],
    ids=["16-bit PNG", "16-bit TIFF", "big-endian TIFF", "16-bit PGM", "float TIFF", "bytes"],
)
def test_pixels_of_more_than_8_bits_are_scaled_by_their_range(
    tmp_path: Path, ending: str, values: np.ndarray[Any, Any]
) -> None:
    path = tmp_path / f"image.{ending}"
    Image.fromarray(values).save(path)
    found = FileImages([path], [0], 8).pixels([0])[0]
    assert np.abs(found.numpy() - RAMP).max() < 1.01 / 255


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((1000 * RAMP).astype(np.int32), "image.tif .* integers of unknown range"),
        ((255 * RAMP).astype(np.float32), "image.tif .* real numbers from 0 to 255, not from 0 to 1"),
        (np.full((8, 8), np.nan, np.float32), "image.tif .* real numbers from nan"),
    ],
)
def test_pixels_of_unknown_range_are_refused(tmp_path: Path, values: np.ndarray[Any, Any], says: str) -> None:
    Image.fromarray(values).save(tmp_path / "image.tif")
    assert_refused(says, lambda: FileImages([tmp_path / "image.tif"], [0], 8).pixels([0]))


@pytest.mark.parametrize("ending", ["png", "jpg", "tif", "webp"])
def test_images_are_turned_upright_as_their_exif_data_say(tmp_path: Path, ending: str) -> None:
    stored = Image.fromarray(np.repeat((255 * RAMP).astype(np.uint8)[:4, :, None], 3, axis=2))
    for orientation in range(1, 10):  # 9 does not exist
        path, exif = tmp_path / f"{orientation}.{ending}", Image.Exif()
        exif[0x0112] = orientation
        stored.save(path, exif=exif, **({"lossless": True} if ending == "webp" else {}))
        with Image.open(path) as opened:
            expected = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
        found = read_image(path, str(path))
        assert np.array_equal(np.asarray(found), expected), orientation
        whole = FileImages([path], [0], 8).crops([0], lambda _, width, height: (0, 0, width, height))
        assert torch.equal(whole[0].permute(1, 2, 0), torch.from_numpy(np.array(found.resize((8, 8), 2))))
    damaged = tmp_path / f"damaged.{ending}"
    if ending != "tif":  # whose image is described by the same tags
        stored.save(damaged, exif=b"Exif\0\0no tags")
        assert np.asarray(read_image(damaged, "damaged")).shape == (4, 8, 3)


def test_file_names_may_be_any_bytes_and_class_names_must_be_utf8(tmp_path: Path) -> None:
    write_images(tmp_path, "ab", 5)
    plain = image_set(tmp_path, size=8)
    try:
        (tmp_path / "a" / "0.png").rename(tmp_path / "a" / "\udcff.png")
    except OSError:
        pytest.skip("this file system has only UTF-8 names")
    assert image_set(tmp_path, size=8).checksum != plain.checksum
    (tmp_path / "a").rename(tmp_path / "\udcffa")
    for read in (image_set, partial(unsplit_images, classes=["a", "b"])):
        assert_refused(r"the name of the folder .*a is not UTF-8", read, tmp_path, size=8)

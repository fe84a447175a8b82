"""Images of several domains: how they are read, split and ordered, and which folders are refused."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from wording import assert_refused

from holdfast.data import domain_set
from holdfast.data.draws import DomainOrder
from holdfast.data.images import FileImages, decode

DOMAINS = {"art": 15, "cartoon": 10, "photo": 12, "sketch": 21}
CLASSES = ("cat", "dog", "elk")


def write_domains(folder: Path, domains: dict[str, int], classes: tuple[str, ...] = CLASSES) -> Path:
    """Write noise of 9 x 7 pixels as DOMAIN/CLASS/number.png; the images of a domain are spread over the classes."""
    from PIL import Image

    source = np.random.default_rng(0)
    for domain, count in domains.items():
        for number in range(count):
            place = folder / domain / classes[number % len(classes)]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(source.integers(0, 256, (7, 9, 3), dtype=np.uint8)).save(place / f"{number:03}.png")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_domains(tmp_path / "pacs", DOMAINS)


def test_the_splits_are_those_of_training_domain_validation(folder: Path) -> None:
    found = domain_set(folder, size=4)
    assert found.classes == CLASSES and {name: len(images) for name, images in found.domains.items()} == DOMAINS
    for held_out in DOMAINS:
        splits = found.leave_out(held_out, seed=3).splits
        others = [name for name in DOMAINS if name != held_out]
        assert len(splits["valid"]) == sum(DOMAINS[name] // 5 for name in others)
        assert len(splits["train"]) == sum(DOMAINS[name] - DOMAINS[name] // 5 for name in others)
        paths = found.domains[held_out].paths
        assert splits["test"] is found.domains[held_out]
        assert paths == [path for name in CLASSES for path in sorted((folder / held_out / name).iterdir())]
        # Pixels are noise, so an image is known by them: every image of a training domain is in one of the two splits.
        used = torch.cat([splits[split].pixels(range(len(splits[split]))) for split in ("train", "valid")])
        expected = [
            torch.from_numpy(decode(path, 4)).permute(2, 0, 1).float() / 255
            for name in others
            for path in found.domains[name].paths
        ]
        as_bytes = Counter(one.numpy().tobytes() for one in used)
        assert as_bytes == Counter(one.numpy().tobytes() for one in expected) and set(as_bytes.values()) == {1}


def test_the_split_of_a_domain_depends_on_the_seed_only(folder: Path) -> None:
    one, other = domain_set(folder, size=4), domain_set(folder, size=8)
    for name in DOMAINS:
        torch.testing.assert_close(one.split(name, 5), other.split(name, 5), rtol=0, atol=0)
        train, valid = one.split(name, 5)
        assert sorted([*train.tolist(), *valid.tolist()]) == list(range(DOMAINS[name]))
    assert any(not torch.equal(one.split(name, 0)[1], one.split(name, 1)[1]) for name in DOMAINS)
    equal = DomainOrder({"a": 40, "b": 40}, 2, seed=0)
    assert not torch.equal(equal.orders[0].at(range(40)), equal.orders[1].at(range(40)))


def test_labels_and_pixels_of_joined_domains_stay_together(folder: Path) -> None:
    train = domain_set(folder, size=4).leave_out("photo", seed=0).images("train")
    assert isinstance(train, FileImages)
    assert [CLASSES[label] for label in train.labels.tolist()] == [path.parent.name for path in train.paths]
    wanted = torch.tensor([30, 0, 13, 0])
    expected = [torch.from_numpy(decode(train.paths[number], 4)).permute(2, 0, 1) for number in wanted.tolist()]
    assert torch.equal(train.pixels(wanted), torch.stack(expected).float() / 255)
    assert train.pixels([]).shape == (0, 3, 4, 4)


def test_a_batch_has_as_many_images_of_each_domain(folder: Path) -> None:
    """Also each micro-batch; and an epoch of a domain has each of its images once."""
    found = domain_set(folder, size=4)
    order = found.order("photo", 12, 7, split_seed=7)
    counts = [len(found.split(name, 7)[0]) for name in ("art", "cartoon", "sketch")]
    assert (order.count, order.size, counts) == (sum(counts), 12, [12, 8, 17])
    starts = np.cumsum([0, *counts])
    seen = []
    for step in range(30):
        numbers = order.at(range(12 * step, 12 * step + 12))
        domains = np.searchsorted(starts, numbers.numpy(), side="right") - 1
        for micro in (domains[:6], domains[6:]):
            assert Counter(micro.tolist()) == {0: 2, 1: 2, 2: 2}
        seen += numbers.tolist()
    for start, count in zip(starts, counts, strict=False):
        own = [number - start for number in seen if start <= number < start + count]
        for epoch in range(len(own) // count):
            assert sorted(own[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert not torch.equal(order.at(range(12)), found.order("photo", 12, 8, split_seed=7).at(range(12)))


def test_images_in_memory_are_those_of_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = domain_set(folder, size=5)
    kept.read()
    monkeypatch.setattr("holdfast.data.images.LARGEST_IN_MEMORY", 10)
    files = domain_set(folder, size=5)
    files.read()
    for name in DOMAINS:
        assert len(kept.domains[name].decoded or ()) == sum(DOMAINS.values()) and files.domains[name].decoded is None
        assert torch.equal(files.domains[name].pixels([3, 1]), kept.domains[name].pixels(torch.tensor([3, 1])))
    train = kept.leave_out("photo", seed=0).images("train")
    assert isinstance(train, FileImages) and train.decoded is kept.domains["photo"].decoded  # not decoded again


def test_crops_and_sides_are_those_of_the_files_on_disk_in_the_order_of_the_batch(folder: Path) -> None:
    found = domain_set(folder, size=4)
    found.read()  # images in memory are smaller than those on disk, and are not what is cropped
    train = found.leave_out("photo", seed=0).images("train")
    paths = [
        found.domains[name].paths[number]
        for name in DOMAINS
        if name != "photo"
        for number in found.split(name, 0)[0].tolist()
    ]
    assert len(paths) == len(train)
    wanted = [30, 0, 13, 31, 1]  # of several domains, mixed
    seen = []

    def choose(place: int, width: int, height: int) -> tuple[int, int, int, int]:
        seen.append((place, width, height))
        return place, 1, 3, 4

    def choose_at(place: int, _: int, width: int, height: int) -> tuple[int, int, int, int]:
        return choose(place, width, height)

    crops = train.crops(wanted, choose)
    assert sorted(seen) == [(place, 9, 7) for place in range(5)]
    for place, number in enumerate(wanted):
        alone = FileImages([paths[number]], [0], 4).crops([0], partial(choose_at, place))
        assert torch.equal(crops[place], alone[0])
    assert train.sides(wanted) == [7] * 5 == found.domains["photo"].sides(range(5))


def test_the_checksum_and_the_description_name_every_file_and_domain(folder: Path) -> None:
    before = domain_set(folder, size=4)
    described = before.describe()
    assert described["domains"] == DOMAINS and described["name"] == "pacs"
    assert described["about"] == "58 images of 3 classes in 4 domains of pacs, 4 pixels per side"
    assert domain_set(folder, size=4).checksum == before.checksum
    (folder / "art" / "cat" / "000.png").rename(folder / "art" / "cat" / "other.png")
    assert domain_set(folder, size=4).checksum != before.checksum


def move_out(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).rename(folder.parent / name.replace("/", "-"))


def classes_without_domains(folder: Path) -> None:
    for name in CLASSES:
        (folder / "art" / name).rename(folder / name)
    (folder / "art").rmdir()


def delete(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


OTHERS = [f"{domain}/{name}" for domain in DOMAINS for name in ("dog", "elk")]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda folder: move_out(folder, "art", "cartoon", "photo"),
            r"one domain only, sketch; to leave one domain out, put the images into folders DOMAIN/CLASS",
        ),
        (lambda folder: move_out(folder, *DOMAINS), r"pacs has no folders; to leave one domain out"),
        (
            lambda folder: (folder / "sketch" / "dog").rename(folder / "sketch" / "horse"),
            r"the domain sketch has no class dog, which art has; every domain needs the same classes",
        ),
        (
            lambda folder: copytree(folder / "sketch" / "cat", folder / "sketch" / "horse"),
            r"the domain art has no class horse, which sketch has",
        ),
        (
            lambda folder: delete((folder / "photo" / "dog").iterdir()),
            r"photo/dog has no images \(.*\.png.*\); add some, or remove the folder",
        ),
        (classes_without_domains, r"the domain .*/cat has no folders of classes; put the images into folders DOMAIN/CLASS"),
        (lambda folder: move_out(folder, *OTHERS), r"one class only, cat; classification needs two"),
        (
            lambda folder: delete(path for name in CLASSES for path in sorted((folder / "art" / name).iterdir())[1:]),
            r"pacs/art has 3 images; splitting a domain needs at least 5",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_sentence(damage: Callable[[Path], None], sentence: str, folder: Path) -> None:
    damage(folder)
    assert_refused(sentence, domain_set, folder, size=4)


def test_hidden_folders_and_loose_files_are_not_domains_or_classes(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / "art" / ".cache").mkdir()
    (folder / "readme.txt").write_text("about")
    (folder / "art" / "cat" / "list.txt").write_text("names")
    assert {name: len(images) for name, images in domain_set(folder).domains.items()} == DOMAINS


@pytest.mark.parametrize("length", [0, 60])
def test_a_damaged_image_is_found_before_training(folder: Path, length: int) -> None:
    path = folder / "sketch" / "elk" / "002.png"
    path.write_bytes(path.read_bytes()[:length] or b"not an image")
    assert_refused(r"sketch/elk/002.png is not an image that can be read", lambda: domain_set(folder, size=4).read())


def test_an_unknown_held_out_domain_suggests_the_closest(folder: Path) -> None:
    found = domain_set(folder, size=4)
    assert_refused(r"data.held_out: unknown domain 'skecth': did you mean 'sketch'", found.leave_out, "skecth", 0)


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    assert_refused("is not a folder of domains; put the images into folders DOMAIN/CLASS", domain_set, tmp_path / "none")

"""The image processor of a checkpoint: pixels and scaling together equal what transformers computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from train.conftest import MakeRecipe
from wording import assert_refused

from holdfast.data.images import FileImages
from holdfast.hub.folder_files import PROCESSOR
from holdfast.train import build_model, make_task, save_trained
from holdfast.train.image_reading import ImageReading, image_reading
from holdfast.train.image_task import ImageTask
from holdfast.train.task import evenly_spaced

SCALED: dict[str, Any] = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViTImageProcessor": {"size": {"height": 8, "width": 8}},
    "ViTFeatureExtractor": {"size": 8},
    "ConvNextImageProcessor": {"size": {"shortest_edge": 8}, "crop_pct": 0.875},
    "DeiTImageProcessor": {"size": {"height": 10, "width": 10}, "crop_size": {"height": 8, "width": 8}},
    "BitImageProcessor": {"size": {"shortest_edge": 10}, "crop_size": 8, "do_center_crop": True, "resample": 3},
}


def checkpoint(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    (folder / PROCESSOR).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("kind", PROCESSORS)
def test_images_are_read_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    entry = "feature_extractor_type" if kind.endswith("Extractor") else "image_processor_type"
    reading = image_reading(checkpoint(tmp_path, {entry: kind, **PROCESSORS[kind], **SCALED}), "vit", 8)
    values = np.random.default_rng(1).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "image.png")
    found = reading.scaling(FileImages([tmp_path / "image.png"], [0], 8, reading.prepare).pixels([0]))
    wanted = AutoImageProcessor.from_pretrained(tmp_path)(Image.fromarray(values), return_tensors="pt")["pixel_values"]
    assert found.shape == (1, 3, 8, 8) and torch.allclose(found, wanted.float(), atol=1e-5)
    plain = FileImages([tmp_path / "image.png"], [0], 8).pixels([0])
    assert kind not in ("ViTImageProcessor", "DeiTImageProcessor") or not torch.allclose(reading.scaling(plain), found)


@pytest.mark.parametrize("colour", [True, False])
def test_plain_images_through_the_saved_processor_give_the_models_own_logits(
    colour: bool, digits: MakeRecipe, tmp_path: Path
) -> None:
    """As `holdfast train` saves a model: of image files of any size with a pipeline, of grey images with the processor."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

    generator, source = np.random.default_rng(2), tmp_path / "images"
    for number in range(24 if colour else 0):
        place = source / f"class {number % 2}" / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (16, 24, 3), dtype=np.uint8)).save(place)
    task = make_task(digits({"data.source": str(source), "data.size": 8} if colour else {}))
    assert isinstance(task, ImageTask)
    model = build_model(task, "symphony", {}, seed=0).eval()
    model.classifier.weight.data *= 20
    save_trained(model, task, tmp_path / "trained")
    folder = tmp_path / "trained" / "model"
    pixels = task.test_images(4, torch.device("cpu"))[0]
    with torch.no_grad():
        expected = model(pixel_values=task.scaling(pixels)).logits
    images: Any = task.image_set.images("test")
    if colour:
        run: Any = pipeline("image-classification", str(folder), function_to_apply="none")
        said = run([str(images.paths[number]) for number in evenly_spaced(len(images), 4)])
        scores = [{entry["label"]: entry["score"] for entry in one} for one in said]
        logits = torch.tensor([[one[name] for name in task.image_set.classes] for one in scores])
    else:
        grey = [Image.fromarray((255 * each[0]).round().byte().numpy()) for each in pixels]
        processor = AutoImageProcessor.from_pretrained(folder)
        with torch.no_grad():
            opened = AutoModelForImageClassification.from_pretrained(folder)
            logits = opened(**processor(grey, return_tensors="pt")).logits
    assert torch.allclose(logits, expected, atol=0.01) and float(expected.std(0).mean()) > 0.1
    reading = image_reading(folder, "vit", 8)  # as for a folder without its task
    assert torch.allclose(reading.scaling(pixels), task.scaling(pixels))


def test_without_a_processor_pixels_are_scaled_to_1_and_minus_1(tmp_path: Path) -> None:
    assert image_reading(tmp_path, "vit", 8) == ImageReading()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"image_processor_type": "EfficientNetImageProcessor", "size": 8, "include_top": True}, "does more than"),
        ({"image_processor_type": "ViTImageProcessor", "size": 9}, "makes images of 9 x 9 x 3"),
        ({"image_processor_type": "ViTImageProcessor", "size": 10**9}, "pixels per side"),
        ({"image_processor_type": "AutoModel", "size": 8}, "does not name an image processor"),
        ({"image_processor_type": "NoSuchImageProcessor", "size": 8}, "has no image processor"),
    ],
)
def test_other_processors_are_refused(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert_refused(words, lambda: image_reading(checkpoint(tmp_path, {**values, **SCALED}), "vit", 8))

"""The vision recipes with their own lists of sparse layers, on small images in narrow models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.comparing import ROUTERS
from holdfast.hub import trace
from holdfast.train import Comparison, Recipe, build_model, load_recipe, make_task, parse_routers
from holdfast.train.building import put_router
from holdfast.train.image_task import ImageTask
from holdfast.train.start import start_model
from holdfast.train.training import train

SWIN = {
    "model.config.embed_dim": 8,
    "model.config.num_heads": [1, 2, 2, 4],
    "model.config.window_size": 2,
    "model.config.patch_size": 2,
}
VIT = {
    "model.config.hidden_size": 16,
    "model.config.intermediate_size": 16,
    "model.config.num_attention_heads": 2,
    "model.config.patch_size": 16,
    "sparse.hidden": 16,
}
SMALL: dict[str, dict[str, Any]] = {"swin-moe": SWIN, "swin-base": SWIN, "vmoe": VIT, "softmoe": VIT}
OF_SWIN = [f"swin.encoder.layers.2.blocks.{block}" for block in range(1, 18, 2)] + ["swin.encoder.layers.3.blocks.1"]
SPARSE = {
    "swin-moe": OF_SWIN,
    "swin-base": OF_SWIN,
    "vmoe": ["vit.layers.6", "vit.layers.7"],
    "softmoe": [f"vit.layers.{block}" for block in range(6, 12)],
}
SIDES = {"swin-moe": [4, 2], "swin-base": [4, 2], "vmoe": [2], "softmoe": [2]}  # patches a side at the sparse layers
# Millions of parameters with 1,000 classes, as the papers give them; SoftMoE's are not given.
PARAMETERS = {"swin-moe": (275, 285), "swin-base": (450, 550), "vmoe": (55, 65)}
TINY: dict[str, tuple[str, dict[str, Any]]] = {  # routers of a comparison, and what makes it short
    "vmoe-tiny": (ROUTERS, {}),
    "swin-moe-tiny": (ROUTERS, {"training.steps": 60, "training.warmup": 10}),
    "swin-base-tiny": ("smoe,ac", {"training.steps": 60, "training.warmup": 10}),
    "softmoe-tiny": ("softmoe[slots=4],softmoe[slots=4]+symphony,softmoe[slots=4]+ac", {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write noise of three colours into train/CLASS and val/CLASS, the layout of ImageNet."""
    from PIL import Image

    folder, source = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for channel, name in enumerate(("blue", "green", "red")):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = source.integers(0, 80, (40, 48, 3), dtype=np.uint8)
                pixels[:, :, 2 - channel] += 120
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


def small(name: str, folder: Path, **changes: Any) -> Recipe:
    step = {"training.steps": 1, "training.batch": 6, "training.warmup": 0, "training.precision": "float32"}
    step["training.accumulate"] = 1
    return load_recipe(
        name, {**step, "sparse.experts": 4, "data.size": 32, **SMALL[name], "data.source": f"{folder}/", **changes}
    )


@pytest.mark.parametrize("name", SMALL)
def test_the_papers_layers_are_sparse_and_a_step_of_training_works(name: str, folder: Path, tmp_path: Path) -> None:
    task = make_task(small(name, folder))
    assert isinstance(task, ImageTask) and task.image_set.classes == ("blue", "green", "red")
    model = build_model(task, "softmoe" if name == "softmoe" else "smoe", {}, seed=0)
    probe = task.probe()
    assert probe["pixel_values"].shape == (12, 3, 32, 32)
    with torch.no_grad(), trace(model.eval()) as routes:
        model(**probe)
    assert [place.rpartition(".mlp")[0] for place in routes.names] == SPARSE[name]
    before = {key: value.clone() for key, value in model.named_parameters()}
    (line,) = train(model, task, tmp_path / "run", seed=0, k=2)
    assert line["step"] == 1 and 0.5 < line["loss"] < 2.5
    assert "second_labels" in task.examples(0).__getitems__(range(6))  # the recipe augments its images
    moved = {key for key, value in model.named_parameters() if not torch.equal(value, before[key])}
    assert any(".experts." in key for key in moved) and any("router.score" in key for key in moved)
    view = task.view(model.eval())
    pictures = [example.picture for example in view.examples if example.picture is not None]
    assert len(pictures) > 2 and {shown.label for shown in pictures} <= {"blue", "green", "red"}
    side = max(SIDES[name])
    assert all(shown.grid == [side, side] and shown.width == 32 for shown in pictures)
    assert [len(layer.experts) for layer in view.routes.layers] == [len(pictures) * side * side] * len(SPARSE[name])
    assert list(view.routes.perturbed) == ["noise"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_recipe_has_the_parameters_that_its_paper_gives(name: str) -> None:
    recipe = load_recipe(name)
    (choice,) = parse_routers("smoe")
    with torch.device("meta"):
        model = start_model(recipe.model, "images", image_size=224, id2label={number: str(number) for number in range(1000)})
        put_router(model, recipe, choice)
    low, high = PARAMETERS[name]
    assert low < sum(parameter.numel() for parameter in model.parameters()) / 1e6 < high


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_the_tiny_form_of_a_recipe_trains_every_router_and_learns(name: str, tmp_path: Path) -> None:
    """The shipped recipe as it is, but for fewer attacked images; a guess is wrong in 90% of the cases."""
    routers, changes = TINY[name]
    recipe = load_recipe(name, {"attack.examples": 8, "attack.steps": 2, **changes})
    results = Comparison(recipe, parse_routers(routers), 1, tmp_path / "run").run()
    assert [result["router"] for result in results] == [choice.name for choice in parse_routers(routers)]
    assert len({result["last_batch"] for result in results}) == 1
    for result in results:
        assert result["clean"]["figure"] < 70, result["router"]


def test_a_patch_of_a_later_stage_covers_the_smaller_patches_below_it(folder: Path) -> None:
    task = make_task(small("swin-moe", folder))
    model = build_model(task, "smoe", {}, seed=0).eval()
    shown = [[experts[0] for experts in layer.experts[:16]] for layer in task.view(model).routes.layers]
    with torch.no_grad(), trace(model) as routes:
        model(pixel_values=task.probe()["pixel_values"][:1])
    early, late = routes[0].experts[:, 0].tolist(), routes[9].experts[:, 0].tolist()
    assert (len(early), len(late)) == (16, 4)
    assert shown[0] == early
    assert shown[9] == [late[2 * (row // 2) + column // 2] for row in range(4) for column in range(4)]


def test_attacked_and_probed_images_are_of_every_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.train.image_task.PROBE_IMAGES", 6)
    task = make_task(small("vmoe", folder, **{"attack.examples": 3}))
    assert isinstance(task, ImageTask)
    labels = task.image_set.images("test").labels
    assert labels.tolist() == sorted(labels.tolist())
    assert set(task.test_images(task.recipe.attack.examples, torch.device("cpu"))[1].tolist()) == {0, 1, 2}
    watched = task.probe()["pixel_values"].mean((2, 3)).argmax(1)
    assert set(watched.tolist()) == {0, 1, 2}
    assert task.describe()["attack"]["examples"] == 3

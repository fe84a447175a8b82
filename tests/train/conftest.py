"""Fixtures: runs so small that a cell takes a second."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.train import Recipe, load_recipe

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything

MakeRecipe = Callable[..., Recipe]  # from changes of a recipe by their path

TEXT = {
    "training.steps": 12,
    "training.batch": 4,
    "training.save_every": 4,
    "data.length": 16,
    "data.vocabulary": 200,
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 32,
    "sparse.hidden": 16,
    "attack.rate": 0.2,
}
IMAGES = {
    "training.steps": 40,
    "training.batch": 32,
    "training.save_every": 16,
    "training.learning_rate": 0.005,
    "training.warmup": 5,
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 16,
    "model.config.num_hidden_layers": 2,
    "sparse.hidden": 16,
    "sparse.experts": 4,
    "attack.steps": 2,
    "attack.examples": 24,
}
AUGMENT = {"crop": 0.3, "flip": True, "randaugment": 9, "erase": 0.5, "mixup": 0.8, "cutmix": 1.0}  # all that is not `pad`


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine several threads wait for each other, and small products are not faster with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from holdfast.data import python_topics

    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("\n\n".join(list(python_topics().values())[:12])[:60_000])
    return path


@pytest.fixture(scope="session")
def tiny(text: Path) -> MakeRecipe:
    """Return a text recipe, with changes by their path."""

    def recipe(changes: dict[str, Any] | None = None) -> Recipe:
        return load_recipe("tiny", {**TEXT, "data.source": str(text), **(changes or {})})

    return recipe


@pytest.fixture(scope="session")
def digits() -> MakeRecipe:
    """Return an image recipe, with changes by their path."""

    def recipe(changes: dict[str, Any] | None = None) -> Recipe:
        return load_recipe("vmoe-tiny", {**IMAGES, **(changes or {})})

    return recipe

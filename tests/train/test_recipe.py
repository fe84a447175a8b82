"""Recipes: shipped recipes are valid, changes are checked, and mistakes raise a one-line error."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from wording import assert_refused

from holdfast.hub.families import DENSE_FAMILIES, VISION_LANGUAGE_FAMILIES
from holdfast.train import Recipe, load_recipe, recipes
from holdfast.train.recipe import value_at


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_shipped_recipe_is_valid_and_says_what_it_is(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.about == recipes()[name]
    assert recipe.model.family in (*DENSE_FAMILIES, *VISION_LANGUAGE_FAMILIES) or recipe.model.checkpoint is not None
    assert recipe.sparse.k is not None and recipe.sparse.experts is not None
    assert recipe.sparse.k <= recipe.sparse.experts


NUMBERS: dict[str, dict[str, Any]] = {  # of the papers, by recipe: sections with their values
    "switch-small": {"model.config": {"n_layer": 3, "n_embd": 128, "n_head": 8, "resid_pdrop": 0.7}},
    "switch-medium": {"model.config": {"n_layer": 6, "n_embd": 352, "n_head": 8, "resid_pdrop": 0.1}},
    "glam-small": {
        "model.config": {"n_layer": 6, "n_embd": 144},
        "sparse": {"layers": "alternate"},
        "data": {"length": 2048},
    },
    "glam-medium": {"model.config": {"n_layer": 12, "n_embd": 352}, "data": {"length": 2048}},
    "enwik8": {"model.config": {"n_layer": 8, "n_embd": 352}, "sparse": {"layers": "all"}, "data": {"length": 2048}},
    "glue-bert": {"sparse": {"experts": 16, "k": 2, "layers": "last:1"}, "losses": {"balance": 0.01}},
    "glue-phi3": {"sparse": {"experts": 4, "k": 2, "layers": "alternate"}},
    "vmoe": {"model.config": {"num_hidden_layers": 8, "hidden_size": 512}, "sparse": {"layers": "last:2"}},
    "swin-moe": {"model.config": {"depths": [2, 2, 18, 2], "embed_dim": 96}, "sparse": {"layers": [*range(5, 22, 2), 23]}},
    "swin-base": {"sparse": {"experts": 16, "k": 2}, "losses": {"balance": 0.1}},
    "gmoe": {"sparse": {"experts": 6, "k": 2, "layers": [8, 10]}, "training": {"batch": 3 * 32, "steps": 5000}},
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.every_combination
def test_the_numbers_of_a_paper_are_in_its_recipe(name: str) -> None:
    for section, values in NUMBERS[name].items():
        assert values.items() <= value_at(load_recipe(name).describe(), section).items()


def test_the_recipes_of_large_language_models_agree() -> None:
    large = [load_recipe(name) for name in recipes() if "tiny" not in name]
    for own in (recipe for recipe in large if recipe.task == "text"):
        assert (own.losses.balance, own.sparse.experts, own.sparse.k, own.training.learning_rate) == (0.01, 16, 2, 7e-4)
        assert (own.model.config["activation_function"], own.model.config["tie_word_embeddings"]) == ("relu", False)
        assert own.data.tokens != "lines" or own.data.vocabulary == 267_735


def test_values_are_changed_by_their_path() -> None:
    recipe = load_recipe("tiny", {"training.steps": 7, "model.config.num_hidden_layers": 1, "data.source": "x.txt"})
    assert load_recipe("tiny", {"training.learning_rate": "1e-3"}).training.learning_rate == 0.001
    assert (recipe.training.steps, recipe.model.config["num_hidden_layers"], recipe.data.source) == (7, 1, "x.txt")
    assert load_recipe("tiny", {"training.epochs": 3}).training.steps is None  # a recipe has one of the two
    assert recipe.about.endswith(", changed by model.config.num_hidden_layers=1")  # "2 layers" is not true of it
    assert load_recipe("tiny", {"model.checkpoint": "runs/first"}).about == "models from runs/first"
    assert load_recipe("tiny", {"model.config.num_hidden_layers": 2}).about == load_recipe("tiny").about
    with pytest.raises(FrozenInstanceError):
        recipe.about = "changed in place"  # type: ignore[misc]


MISTAKES: dict[str, list[tuple[dict[str, object], str]]] = {  # by recipe: changes, and what the error says
    "tinny": [({}, "tiny")],
    "none.yaml": [({}, "none.yaml")],
    "broken.yaml": [({}, "YAML")],
    "empty.yaml": [({}, "empty.yaml")],
    "binary.yaml": [({}, "binary.yaml")],
    "tiny": [
        ({"training.stpes": 3}, "steps"),
        ({"traning.steps": 3}, "training"),
        ({"training.steps": 0}, "training.steps is 0"),
        ({"training.steps": True}, "training.steps"),
        ({"training.clip": float("inf")}, "training.clip"),
        ({"attack.rate": 2}, "between 0 and 1"),
        ({"data.source": " "}, "data.source has an empty name"),
        ({"sparse": 3}, "sparse"),
        ({"training.precision": "fp8"}, "precision"),
        ({"task": "pictures"}, "task is .pictures., not .text. or .labels. or .images. or .domains."),
        ({"about.x": 1}, "about"),
        ({"losses.zeta": 1}, "losses.zeta: unknown key 'zeta': expected one of balance"),
        ({"losses.z": -1}, "losses.z is -1, not a number of at least 0"),
        ({"training.epochs": 2, "training.steps": 5}, "give one of training.steps and training.epochs; .* both"),
        ({"training.steps": None}, "give one of .* neither"),
        ({"training.epochs": 0}, "training.epochs is 0, not a number above 0"),
        ({"training.floor": 0.1}, "training.floor is for the schedules"),
        ({"training.schedule": "cosin"}, "training.schedule"),
        ({"training.label_smoothing": 1}, "training.label_smoothing is 1, not a number of at least 0 and below 1"),
        ({"training.validate_every": 0}, "training.validate_every is 0"),
        ({"data.train_tokens": 0}, "data.train_tokens is 0"),
        ({"attack.budgets": [0.1]}, "attack.budgets is for images"),
        ({"data.metric": "a"}, "data.metric is for labelled texts"),
    ],
    "labels-tiny": [({f"data.{key}": 5}, f"data.{key} is for language models") for key in ("train_tokens", "test_bytes")],
    "vmoe-tiny": [
        ({"attack.budgets": [2]}, "attack.budgets.*a number between 0 and 1"),
        ({"attack.severities": [6]}, "attack.severities.*from 1 to 5"),
        ({"attack.severities": []}, "attack.severities"),
        ({"attack.severities": [5, 5]}, "only once"),
        ({"attack.restarts": 0}, "attack.restarts"),
    ],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_a_one_line_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.yaml").write_text("about: [")
    Path("empty.yaml").write_text("")
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    for changes, sentence in MISTAKES[name]:
        assert_refused(sentence, load_recipe, name, changes)


def test_a_recipe_can_be_a_file_of_the_user(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(load_recipe("tiny").describe()))
    assert load_recipe(str(path)) == load_recipe("tiny")
    assert isinstance(load_recipe(str(path)), Recipe)

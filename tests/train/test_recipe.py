"""Recipes: shipped recipes are valid, changes are checked, and mistakes raise a one-line error."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from holdfast.hub import DENSE_FAMILIES
from holdfast.train import Recipe, load_recipe, recipes


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_shipped_recipe_is_valid_and_says_what_it_is(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.about == recipes()[name]
    assert recipe.model.family in DENSE_FAMILIES or recipe.model.checkpoint is not None
    assert recipe.sparse.k is not None and recipe.sparse.experts is not None
    assert recipe.sparse.k <= recipe.sparse.experts


def test_the_numbers_of_the_papers_are_in_their_recipes() -> None:
    small, medium = load_recipe("switch-small"), load_recipe("switch-medium")
    assert [small.model.config[key] for key in ("n_layer", "n_embd", "n_head", "resid_pdrop")] == [3, 128, 8, 0.7]
    assert [medium.model.config[key] for key in ("n_layer", "n_embd", "n_head", "resid_pdrop")] == [6, 352, 8, 0.1]
    assert (small.training.steps, small.training.batch, small.training.warmup) == (60_000, 96, 3000)
    assert (medium.training.steps, medium.training.batch, medium.training.warmup) == (80_000, 48, 4000)
    large = [load_recipe(name) for name in recipes() if "tiny" not in name]
    texts = [own for own in large if own.task == "text"]
    assert all((own.losses.balance, own.sparse.experts, own.sparse.k) == (0.01, 16, 2) for own in texts)
    for name in ("swin-moe", "swin-base"):
        own = load_recipe(name)
        assert (own.losses.balance, own.sparse.experts, own.sparse.k) == (0.1, 16, 2)
    assert all(own.training.learning_rate == 7e-4 and own.model.config["activation_function"] == "relu" for own in texts)
    assert all(own.model.config["tie_word_embeddings"] is False for own in texts)
    assert all(own.data.vocabulary == 267_735 for own in texts if own.data.tokens == "lines")
    for recipe, (layers, width) in {"glam-small": (6, 144), "glam-medium": (12, 352), "enwik8": (8, 352)}.items():
        own = load_recipe(recipe)
        assert (own.model.config["n_layer"], own.model.config["n_embd"], own.data.length) == (layers, width, 2048)
        assert own.sparse.layers == ("all" if recipe == "enwik8" else "alternate")
    bert, phi3 = load_recipe("glue-bert"), load_recipe("glue-phi3")
    assert (bert.sparse.experts, bert.sparse.k, bert.sparse.layers, bert.losses.balance) == (16, 2, "last:1", 0.01)
    assert (phi3.sparse.experts, phi3.sparse.k, phi3.sparse.layers) == (4, 2, "alternate")
    vmoe, swin = load_recipe("vmoe"), load_recipe("swin-moe")
    assert [vmoe.model.config[key] for key in ("num_hidden_layers", "hidden_size")] == [8, 512]
    assert vmoe.sparse.layers == "last:2"
    assert (swin.model.config["depths"], swin.model.config["embed_dim"]) == ([2, 2, 18, 2], 96)
    assert swin.sparse.layers == [*range(5, 22, 2), 23]  # 4 layers before stage 3, 22 before stage 4
    gmoe = load_recipe("gmoe")
    assert (gmoe.sparse.experts, gmoe.sparse.k, gmoe.sparse.layers) == (6, 2, [8, 10])  # the last two even ones of 12
    assert (gmoe.training.batch, gmoe.training.learning_rate, gmoe.training.steps) == (3 * 32, 3e-5, 5000)
    for own in (vmoe, swin):
        assert (own.attack.budget, own.attack.steps) == (1 / 255, 20)


def test_values_are_changed_by_their_path() -> None:
    recipe = load_recipe("tiny", {"training.steps": 7, "model.config.num_hidden_layers": 1, "data.source": "x.txt"})
    assert load_recipe("tiny", {"training.learning_rate": "1e-3"}).training.learning_rate == 0.001
    assert (recipe.training.steps, recipe.model.config["num_hidden_layers"], recipe.data.source) == (7, 1, "x.txt")
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
        ({"data.pair": "a"}, "data.pair is for labelled texts"),
        ({"data.label": "a"}, "data.label is for labelled texts"),
        ({"data.metric": "a"}, "data.metric is for labelled texts"),
    ],
    "labels-tiny": [({f"data.{key}": 5}, f"data.{key} is for language models") for key in ("train_tokens", "test_bytes")],
    "vmoe-tiny": [
        ({"attack.budgets": [2]}, "attack.budgets.*a number between 0 and 1"),
        ({"attack.budgets": ["one"]}, "attack.budgets"),
        ({"attack.budgets": 0.1}, "attack.budgets"),
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
        with pytest.raises(ValueError, match=sentence) as caught:
            load_recipe(name, changes)
        assert "\n" not in str(caught.value)


def test_a_recipe_can_be_a_file_of_the_user(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(load_recipe("tiny").describe()))
    assert load_recipe(str(path)) == load_recipe("tiny")
    assert isinstance(load_recipe(str(path)), Recipe)

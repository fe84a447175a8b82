"""docs/papers.md: every command of the page parses, and every router, recipe and option that it names exists."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tiers import quick_or_slow

from holdfast.planning.meta_model import Change, Choice, sparsify_on_meta
from holdfast.routing.grammar import split_routers
from holdfast.routing.layer_names import resolve_layers, routers_by_layer
from holdfast.train import Recipe, RouterChoice, load_recipe, parse_routers
from holdfast.train.recipe import parse_pairs
from holdfast.train.start import HEADS

PAGE = (Path(__file__).parent.parent / "docs" / "papers.md").read_text(encoding="utf-8")
CODE = [code.replace("\\|", "|") for code in re.findall(r"`([^`\n]+)`", PAGE)]
COMMANDS = sorted({code for code in CODE if code.startswith("holdfast ") and "--" in code})
COMPARISONS = [command for command in COMMANDS if command.startswith("holdfast compare")]
CHECKPOINTS = {
    "google-bert/bert-large-uncased": ("bert", 24),
    "microsoft/Phi-3-mini-4k-instruct": ("phi3", 32),
    "comparison/cells/smoe-seed0": ("gpt2", 8),  # a cell of the recipe enwik8
}
EXPERTS = {"comparison/cells/smoe-seed0": load_recipe("enwik8").sparse.experts}  # of checkpoints that have experts
OTHERS = ("report.html", "log.jsonl", "holdfast.metrics.jump", "pgd", "spsa", "@")


def options(command: str) -> dict[str, list[str]]:
    """Return the values of each --option of a command; those without a name are under ""."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for word in shlex.split(command):
        if word.startswith("--"):
            name = word
            found[name] = []
        else:
            found[name].append(word)
    return found


def recipe_of(given: dict[str, list[str]]) -> Recipe:
    (name,) = given["--recipe"]
    return load_recipe(name, parse_pairs(given.get("--set", ()), "training.steps=50"))


def build_on_meta(recipe: Recipe, choice: RouterChoice) -> None:
    """Build the recipe's model with the router as the preflight of a comparison does, but without its data."""
    family, entries = recipe.model.family, recipe.model.config
    if recipe.model.checkpoint is not None:  # of its family, with its number of layers
        family, layers = CHECKPOINTS[recipe.model.checkpoint]
        entries = {"num_hidden_layers": layers, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **entries)
    head = "images" if recipe.task == "domains" else recipe.task
    kind = getattr(transformers, HEADS[head])
    sparse = recipe.sparse
    if (own := EXPERTS.get(recipe.model.checkpoint or "")) is not None:
        assert sparse.experts in (None, own), "a number that contradicts the checkpoint is refused"
        sparse = replace(sparse, experts=own)
    change = Change(sparse.experts, sparse.k, sparse.layers, sparse.hidden, copied=sparse.init == "copy")
    with torch.device("meta"):
        sparsify_on_meta(kind.from_config(config), Choice(choice.name, choice.router, choice.options, choice.k), change)


def test_the_page_covers_the_five_papers() -> None:
    sections = re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    assert len(sections) == 5
    assert len(COMMANDS) > 35
    assert "issue" not in PAGE


@pytest.mark.parametrize("command", quick_or_slow(COMPARISONS, COMPARISONS[::6]))
def test_every_router_of_a_comparison_of_the_page_can_be_built_with_its_recipe(command: str) -> None:
    given = options(command)
    assert set(given) <= {"", "--recipe", "--routers", "--set", "--no-match-compute"}
    recipe = recipe_of(given)
    (routers,) = given["--routers"]
    choices = parse_routers(routers)
    assert len(choices) > 1 and len({choice.name for choice in choices}) == len(choices)
    for choice in choices:
        build_on_meta(recipe, choice)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("holdfast plan")])
def test_a_plan_of_the_page_names_routers_that_exist(command: str) -> None:
    given = options(command)
    assert set(given) == {"", "--experts", "--routers"} and given[""][:2] == ["holdfast", "plan"]
    (routers,) = given["--routers"]
    for router in split_routers(routers):
        resolve_layers(router)


def test_everything_else_in_code_is_a_file_a_recipe_or_a_router() -> None:
    for code in CODE:
        if code.startswith(("holdfast ", "--recipe ", "--data ")) or code in OTHERS:
            continue
        if code.startswith("python "):
            assert (Path(__file__).parent.parent / code.split()[1]).is_file()
            continue
        try:
            load_recipe(code)
        except ValueError:
            resolve_layers(code)


@pytest.mark.parametrize(
    ("routers", "recipe"),
    [
        ("smoe,ac@last:3,ac@1,3,5,ac@last:4,ac@all", "switch-medium"),
        ("smoe,ac@4,5,6,7,8,ac@3,4,5,6,7,8,ac@2,3,4,5,6,7,8,ac@1,2,3,4,5,6,7,8", "swin-moe"),
    ],
)
def test_the_placements_of_ac_are_those_of_the_recipes(routers: str, recipe: str) -> None:
    """The layers exist, and they are in the rows of the page."""
    count = {"switch-medium": 6, "swin-moe": 10}[recipe]
    sparse = load_recipe(recipe).sparse
    assert sparse.layers == "all" or len(sparse.layers) == count
    assert f'--recipe {recipe} --routers "{routers}"' in PAGE
    placed = [
        [index for index, one in enumerate(routers_by_layer(resolve_layers(choice.name), count)) if one is not None]
        for choice in parse_routers(routers)[1:]
    ]
    if recipe == "switch-medium":  # 002 C.5.2, whose layers are counted from 1
        assert placed == [[3, 4, 5], [1, 3, 5], [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    else:  # MoE layer i of the stage of depth 18 is its block 2 (i + 1)
        blocks = [[2 * (index + 1) for index in one] for one in placed]
        assert blocks == [[10, 12, 14, 16, 18], list(range(8, 19, 2)), list(range(6, 19, 2)), list(range(4, 19, 2))]

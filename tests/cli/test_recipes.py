"""`holdfast recipes`."""

import yaml
from commands import Command

from holdfast.train import load_recipe, recipes


def test_every_recipe_is_listed_with_its_line(command: Command) -> None:
    rows = {line.split()[0]: line for line in command.printed("recipes").splitlines() if line.strip()}
    assert all(about in rows[name] for name, about in recipes().items())
    assert rows["tiny"].split()[-2:] == ["150", "steps"] and rows["vmoe"].split()[-2:] == ["300", "epochs"]


def test_one_recipe_is_printed_with_all_keys(command: Command) -> None:
    assert yaml.safe_load(command.printed("recipes", "tiny")) == load_recipe("tiny").describe()

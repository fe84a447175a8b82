"""The cells of a comparison: their settings, names and folders, and the results of all finished cells of a folder.

A sweep has values of a recipe's keys as a further axis of a comparison, every combination with every router and seed.

    --sweep sparse.k=1,2,4 training.learning_rate=1e-3,1e-4

A setting is one combination. Routers are compared with the baseline of the same setting. All settings are scored on the same
test data under the same attack, so keys that would change these cannot be swept.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from holdfast.errors import unknown_name
from holdfast.files import LARGEST, read_json
from holdfast.routing.grammar import written_pairs, written_value
from holdfast.train.recipe import Recipe, RouterChoice, change_recipe, parse_pairs, value_at
from holdfast.train.run_folder import read_with_checksum

UNSAFE = re.compile(r"[^\w+.,=\[\] -]")  # in the names of cells' folders
LONGEST_FILE_NAME = 120  # characters of a router name and its setting in the name of a folder

Result = dict[str, Any]
MOST_CELLS = 1000  # of one comparison with a sweep
# Keys that change what is measured; of the data, only how much is trained on, and the domain that is held out, may differ.
NOT_SWEPT = ("about", "task", "data", "attack", "metrics")
SWEPT_ANYWAY = ("data.train_tokens", "data.held_out")
Values = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One router with one seed, in one setting of a sweep."""

    choice: RouterChoice
    seed: int
    settings: tuple[tuple[str, Any], ...] = ()  # keys of the recipe and their values; empty without a sweep

    @property
    def label(self) -> str:
        """The router and its setting: `smoe-sparse.k=1`."""
        return cell_label(self.choice.name, dict(self.settings))

    @property
    def name(self) -> str:
        return f"{self.label}-seed{self.seed}"

    @property
    def folder(self) -> str:
        return f"{safe_file_name(self.label)}-seed{self.seed}"

    def describe(self) -> dict[str, Any]:
        """Return what two results of the same cell must share, apart from the seed."""
        return {**self.choice.describe(), **({"settings": dict(self.settings)} if self.settings else {})}


def cell_label(router: str, settings: Mapping[str, Any]) -> str:
    return "-".join([router, *(f"{key}={written_value(value)}" for key, value in settings.items())])


def result_folder(result: Result) -> str:
    """Return the name of the folder of a result's cell."""
    return f"{safe_file_name(cell_label(result['router'], result.get('settings', {})))}-seed{result['seed']}"


def safe_file_name(name: str) -> str:
    """Return a file name for a router name: `ac@even|smooth@odd` becomes `ac_even_smooth_odd-<checksum>`.

    A name that is a safe file name already is not changed.
    """
    safe = UNSAFE.sub("_", name)[:LONGEST_FILE_NAME]
    return name if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def merge_results(folder: Path, results: Sequence[Result]) -> list[Result]:
    """Return `results` and those of the other finished cells of the folder, sorted by setting, router and seed.

    Routers and settings keep the order of the existing results.json, so that the first router, the baseline, stays the same.
    """
    found = {_key(result): result for result in results}
    for path in sorted((folder / "cells").glob("*/result.json")):
        try:
            result = read_with_checksum(path)
            found.setdefault(_key(result), result)
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is damaged; remove {path.parent} to train its cell again.") from None
    try:
        stored = [_key({**row, "seed": 0})[:2] for row in read_json(folder / "results.json", limit=LARGEST)["rows"]]
    except (OSError, ValueError, KeyError, TypeError):  # it is missing or damaged, and will be replaced
        stored = []
    routers = list(dict.fromkeys([*(router for _, router in stored), *(router for _, router, _ in found)]))
    settings = list(dict.fromkeys([*(setting for setting, _ in stored), *(setting for setting, _, _ in found)]))
    return [found[key] for key in sorted(found, key=lambda key: (settings.index(key[0]), routers.index(key[1]), key[2]))]


def _key(result: Result) -> tuple[str, str, int]:
    """Return the setting, the router and the seed of a result."""
    return json.dumps(result.get("settings", {}), sort_keys=True), str(result["router"]), int(result["seed"])


@final
@dataclass(frozen=True)
class Setting:
    """One combination of values, and the recipe with them."""

    recipe: Recipe
    values: Values = field(default_factory=dict)  # by key, such as "sparse.k"; empty without a sweep

    @property
    def label(self) -> str:
        return written_pairs(self.values)


def parse_sweep(pairs: Sequence[str]) -> dict[str, list[Any]]:
    """Return `sparse.k=1,2` and the like as keys and lists of values, which are read as YAML."""
    keys = [pair.partition("=")[0] for pair in pairs]
    if twice := next((key for place, key in enumerate(keys) if key in keys[:place]), None):
        raise ValueError(f"{twice} is swept twice; write all its values after one {twice}=.")
    return parse_pairs(pairs, "sparse.k=1,2,4", "[{}]")


def settings_of(recipe: Recipe, sweep: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Return every combination of the values, the last key varying fastest; without a sweep, the recipe as it is.

    Raise ValueError if a key is unknown or cannot be swept, if a value is wrong, or if two settings are the same.
    """
    for key, values in sweep.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"the sweep of {key} has the values {values!r}; give a list with at least one.")
    if (count := math.prod(map(len, sweep.values()))) > MOST_CELLS:
        raise ValueError(f"the sweep has {count:,} settings; at most {MOST_CELLS:,} cells are trained: sweep fewer values.")
    _require_sweepable(recipe, list(sweep))
    settings: list[Setting] = []
    for combination in itertools.product(*sweep.values()):
        given = dict(zip(sweep, combination, strict=True))
        try:
            changed = change_recipe(recipe, given)
        except ValueError as mistake:
            raise ValueError(f"the sweep cannot have {written_pairs(given)}: {mistake}") from None
        described = changed.describe()
        # As the recipe has them, so that 1e-3 and 0.001 are the same setting.
        setting = Setting(changed, {key: value_at(described, key) for key in given})
        if any(setting.values == other.values for other in settings):
            raise ValueError(f"the sweep has {setting.label} twice; write each value once.")
        settings.append(setting)
    return settings


def _require_sweepable(recipe: Recipe, keys: Sequence[str]) -> None:
    from transformers import CONFIG_MAPPING

    described = recipe.describe()
    for key in keys:
        section = key.split(".")[0]
        if section not in described:
            raise ValueError(f"{key} cannot be swept: {unknown_name('section', section, described)}")
        if section in NOT_SWEPT and key not in SWEPT_ANYWAY:
            raise ValueError(
                f"{key} cannot be swept: all settings are scored on the same test data under the same attack; run a "
                "comparison for each value in a folder of its own."
            )
        if key == "model.checkpoint":
            raise ValueError(f"{key} cannot be swept; run a comparison for each checkpoint in a folder of its own.")
        if isinstance(value_at(described, key), dict):
            raise ValueError(f"{key} cannot be swept: it is a section; name one of its keys.")
        name, family = key.removeprefix("model.config."), recipe.model.family
        if name != key and family in CONFIG_MAPPING and name not in recipe.model.config:
            known = set(CONFIG_MAPPING[family]().to_dict())
            if name not in known:  # transformers would accept and ignore it
                raise ValueError(f"{key} cannot be swept: {unknown_name('entry', name, known)}")
    for one, other in itertools.permutations(keys, 2):
        if other.startswith(f"{one}."):
            raise ValueError(f"{one} and {other} cannot be swept together: one contains the other.")


def with_choices(settings: Sequence[Setting], choices: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Return every setting with every choice that the recipe leaves open (`Task.open_choices`).

    A setting that has a value for a key of `choices` keeps it.
    """
    found = []
    for setting in settings:
        open_keys = {key: values for key, values in choices.items() if key not in setting.values}
        for combination in itertools.product(*open_keys.values()):
            given = dict(zip(open_keys, combination, strict=True))
            found.append(Setting(change_recipe(setting.recipe, given), {**setting.values, **given}))
    return found


def require_few_cells(settings: int, routers: int, seeds: int) -> None:
    """Raise ValueError if a sweep has more than `MOST_CELLS` cells."""
    if settings > 1 and (count := settings * routers * seeds) > MOST_CELLS:
        raise ValueError(
            f"the sweep has {count:,} cells ({settings} settings x {routers} routers x {seeds} seeds); at most "
            f"{MOST_CELLS:,} are trained in one comparison: sweep fewer values, or use fewer routers or seeds."
        )


def shares_data(recipe: Recipe, other: Recipe) -> bool:
    """Return whether the tasks of two recipes have the same data and inputs, so that these are read only once."""
    model = replace(recipe.model, config=other.model.config)
    data = replace(recipe.data, held_out=other.data.held_out)  # the domains are read once, whichever is held out
    return (data, recipe.attack, recipe.metrics, model) == (other.data, other.attack, other.metrics, other.model)

"""The cells of a comparison: their names and folders, and the results of all finished cells of a folder."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.files import LARGEST, read_json
from holdfast.routing.grammar import written_value
from holdfast.train.recipe import RouterChoice
from holdfast.train.run_folder import read_with_checksum

UNSAFE = re.compile(r"[^\w+.,=\[\] -]")  # in the names of cells' folders
LONGEST_FILE_NAME = 120  # characters of a router name and its setting in the name of a folder

Result = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One router with one seed, in one setting of a sweep."""

    choice: RouterChoice
    seed: int
    settings: tuple[tuple[str, Any], ...] = ()  # keys of the recipe and their values; empty without a sweep

    @property
    def label(self) -> str:
        """The router and its setting: `smoe-sparse.k=1`."""
        return "-".join([self.choice.name, *(f"{key}={written_value(value)}" for key, value in self.settings)])

    @property
    def name(self) -> str:
        return f"{self.label}-seed{self.seed}"

    @property
    def folder(self) -> str:
        return f"{safe_file_name(self.label)}-seed{self.seed}"

    def describe(self) -> dict[str, Any]:
        """Return what two results of the same cell must share, apart from the seed."""
        return {**self.choice.describe(), **({"settings": dict(self.settings)} if self.settings else {})}


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
        rows = read_json(folder / "results.json", limit=LARGEST)["rows"]
        stored = [_key({**row, "seed": 0})[:2] for row in rows]
    except (OSError, ValueError, KeyError, TypeError):  # it is missing or damaged, and will be replaced
        stored = []
    routers = list(dict.fromkeys([*(router for _, router in stored), *(router for _, router, _ in found)]))
    settings = list(dict.fromkeys([*(setting for setting, _ in stored), *(setting for setting, _, _ in found)]))
    return [found[key] for key in sorted(found, key=lambda key: (settings.index(key[0]), routers.index(key[1]), key[2]))]


def _key(result: Result) -> tuple[str, str, int]:
    """Return the setting, the router and the seed of a result."""
    return json.dumps(result.get("settings", {}), sort_keys=True), str(result["router"]), int(result["seed"])

"""`holdfast recipes`: list the shipped recipes, or print one with all its keys."""

from __future__ import annotations

from dataclasses import dataclass

from tyro.conf import Positional

from holdfast.cli.common import show


@dataclass(frozen=True)
class Recipes:
    """List the recipes of `holdfast compare` and `holdfast train`, or print one with all keys that --set can change.

    Examples: `holdfast recipes`, `holdfast recipes tiny`, `holdfast recipes my.yaml`
    """

    name: Positional[str | None] = None
    """A recipe, or the path of a .yaml file; by default all recipes are listed."""

    def run(self) -> None:
        from holdfast.report.tables import Table
        from holdfast.train import load_recipe, recipes

        if self.name is not None:
            import yaml

            print(yaml.safe_dump(load_recipe(self.name).describe(), sort_keys=False, default_flow_style=None, width=120))
            return
        rows = []
        for name, about in recipes().items():
            recipe = load_recipe(name)
            steps, epochs = recipe.training.steps, recipe.training.epochs
            length = f"{epochs:g} epochs" if steps is None else f"{steps:,} steps"
            row = {"name": name, "what it is": about, "task": recipe.task, "data": recipe.data.source}
            rows.append({**row, "training": length})
        show(Table.of("Recipes", rows, "Keys of a recipe: holdfast recipes NAME. Change them with --set KEY=VALUE."))

"""`holdfast papers`: list the papers' experiments, and print one of them with its published figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tyro.conf import Positional

from holdfast.cli.common import show

if TYPE_CHECKING:
    from holdfast.train.papers import Preset


@dataclass(frozen=True)
class Papers:
    """List the experiments of the papers, with what each needs, or print one: its recipe, the published figures and what a
    run here does otherwise. `holdfast compare --paper NAME` runs it.

    Examples: `holdfast papers`, `holdfast papers acmoe`, `holdfast papers acmoe:table1-switch`
    """

    name: Positional[str | None] = None
    """A paper, or a paper and one of its tables; by default all are listed."""

    def run(self) -> None:
        from holdfast.train.papers import find_presets, load_papers

        names = load_papers() if self.name is None else [self.name]
        chosen = {key: preset for name in names for key, preset in find_presets(name).items()}
        if len(chosen) > 1:
            self._print_list(chosen)
        else:
            self._print_one(*chosen.popitem())

    def _print_list(self, chosen: dict[str, Preset]) -> None:
        from holdfast.report.tables import Table
        from holdfast.train.papers import RATE
        from holdfast.train.recipe import load_recipe

        rows = []
        for name, preset in chosen.items():
            row = {"name": name, "tables": ", ".join(preset.covers), "what it compares": preset.title}
            if preset.recipe is not None:
                row["data"] = load_recipe(preset.recipe, preset.set).data.source
                row["cells"], hours = str(preset.cells), preset.hours
                row["GPU hours"] = "" if hours is None else f"{hours:.2g}" if hours < 100 else f"{hours:,.0f}"
            rows.append(row)
        note = (
            f"A cell is a trained model. GPU hours: the FLOPs of `holdfast plan` for all cells, at {RATE / 1e12:.0f} "
            "TFLOP/s; empty where nothing is trained. `holdfast papers NAME` prints one: its recipe, published figures and "
            "deviations."
        )
        show(Table.of("Experiments of the papers", rows, note))

    def _print_one(self, name: str, preset: Preset) -> None:
        import yaml

        from holdfast.report.comparison_tables import published_table
        from holdfast.train.recipe import load_recipe

        print(f"{name}: {preset.title} ({', '.join(preset.covers)})\n")
        if preset.recipe is None:
            print(f"Run: {preset.command}\n" if preset.command else "It cannot be run here.\n")
        else:
            option = "" if preset.start is None else f" --from FOLDER-OF-{name.partition(':')[0]}:{preset.start}"
            print(f"Run: holdfast compare --paper {name}{option} --out FOLDER; a rehearsal of minutes: add --rehearse\n")
            seeds = f"{preset.seeds} seed{'s' if preset.seeds > 1 else ''}"
            swept = "".join(f", {key} {', '.join(map(str, values))}" for key, values in preset.sweep.items())
            print(f"Routers, {seeds}{swept}: " + ",".join(preset.routers) + "\n")
            start = {} if preset.start is None else {"model.checkpoint": f"each router's cell of {preset.start}"}
            recipe = load_recipe(preset.recipe, {**preset.set, **start}).describe()
            del recipe["about"]  # of the recipe without the changes
            print(f"Recipe: {preset.recipe}, changed by {preset.set}" if preset.set else f"Recipe: {preset.recipe}")
            print(yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None, width=120))
        if preset.published.rows:
            show(published_table(preset.published))
        for title, sentences in (("Deviations", preset.deviations), ("Not built here", preset.needs)):
            if sentences:
                print(f"\n{title}:\n" + "\n".join(f"- {sentence}" for sentence in sentences))

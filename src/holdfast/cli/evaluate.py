"""`holdfast evaluate`: how well a saved model does, and what its routers do meanwhile."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from holdfast.cli.common import Loading, PluginFiles, forwards, require_free, show, write_out


@dataclass(frozen=True)
class Evaluate:
    """Score a saved model on its test data, clean and attacked, and show what each router does.

    Examples: `holdfast evaluate comparison/cells/smoe-seed0`, `holdfast evaluate runs/smooth --out smooth.json`,
    `holdfast evaluate path/to/olmoe --source wikitext-2 --data ~/data --length 1024`
    """

    model: Positional[str]
    """What `holdfast train` or `compare` left, or any Hugging Face folder or name."""
    source: str | None = None
    """Another text or set of pictures than the model was trained on: a name or a path."""
    data: Path | None = None
    """Where named sources lie, if they are not to be fetched."""
    length: int | None = None
    """Tokens of a block of text."""
    out: Path | None = None
    """A JSON file for all figures."""
    force: bool = False
    """Overwrite that file if it is there."""
    loading: Annotated[Loading, arg(name="")] = field(default_factory=Loading)
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.metrics.report import plain
        from holdfast.train.saved_model import subject
        from holdfast.train.training import quiet
        from holdfast.version import versions

        self.plugins.load()
        require_free(self.out, self.force)
        quiet()
        model, task = subject(
            self.model, source=self.source, data=self.data, length=self.length, loading=self.loading.options()
        )
        with forwards(model, f"scoring {self.model}", task.inputs_to_score()):
            found = plain(task.score(model))
        print_scores(self.model, {key: found[key] for key in ("clean", "attacked")} | found.get("trials", {}), task)
        print_routing(found["clean"].get("routing"))
        stored = {"model": self.model, **task.describe(), "measure": asdict(task.measure), "versions": versions(), **found}
        write_out(self.out, stored)


def print_scores(title: str, scores: dict[str, dict[str, Any]], task: Any) -> None:
    from rich.table import Table

    measure = task.measure
    table = Table(title=title, caption=f"{measure.long}; attacked: under {measure.attack}. Lower is better.")
    columns = {
        "": None,
        measure.name: "figure",
        "of what the attack left alone": "figure_of_kept",
        "bits a byte": "bits_per_byte",
    }
    shown = {name: key for name, key in columns.items() if key is None or any(key in score for score in scores.values())}
    for name in shown:
        table.add_column(name)
    for name, score in scores.items():
        figures = (score.get(key) for key in shown.values() if key is not None)
        table.add_row(name, *("" if figure is None else f"{figure:.4f}" for figure in figures))
    show(table)


def print_routing(routing: dict[str, Any] | None) -> None:
    from rich.table import Table

    if routing is None:
        print("The model is dense: it has no routers to look at.")
        return
    table = Table(title="What its routers do, on the clean data")
    for column in ("layer", "experts a token", "entropy", "CV of load", "dead experts", "within 0.01 of a tie"):
        table.add_column(column)
    for layer in routing["layers"]:
        close = next((strip["share"] for strip in layer["near_ties"]["strips"] if strip["width"] == 0.01), None)
        table.add_row(
            str(layer["layer"]),
            f"{layer['experts_per_token']['mean']:.2f}",
            _number(layer["entropy"]),
            _number(layer["load"]["cv"]),
            str(len(layer["load"]["dead"])),
            "" if close is None else f"{close:.2%}",
        )
    show(table)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"

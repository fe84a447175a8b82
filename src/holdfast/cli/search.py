"""`holdfast search`: find the routers and settings that are best for their FLOPs."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from holdfast.cli.common import PluginFiles, require_folder, require_place, show, show_messages
from holdfast.locking import take_over
from holdfast.progress import quiet

if TYPE_CHECKING:
    from holdfast.report.tables import Table
    from holdfast.train.search import Search as Found


@dataclass(frozen=True)
class Search:
    """Search the routers, numbers of experts and other settings with the lowest loss for their FLOPs.

    Candidates are all routers in all settings of the sweep. They are trained in rungs (successive halving): all of them for
    a few steps, one in three for three times as many, until the last are trained for all steps of the recipe. Loss on
    validation data and counted FLOPs decide together; the front is printed: the candidates that no other beats in both. Run
    the same command again to resume an interrupted search.

    Examples: `holdfast search --flops 1.1x --routers smoe,symphony,smooth --sweep sparse.k=1,2 sparse.experts=4,8`,
    `holdfast search --routers smoe,capacity --sweep sparse.k=1,2,4 --rungs 2 --seeds 3 --out runs/search`
    """

    recipe: str = "tiny"
    """The name of a shipped recipe, or the path of a .yaml file."""
    routers: str = "smoe,symphony,similarity,ac,smooth"
    """Router names, joined by commas, as for `holdfast compare`. The first one, in the recipe as it is, is the baseline of
    --flops."""
    flops: str | None = None
    """The most FLOPs of a forward: 1.1x for 1.1 times those of the baseline, or a number, per token or per image."""
    sweep: tuple[str, ...] = ()
    """Values of keys of the recipe, for example sparse.k=1,2,4 sparse.experts=8,16; every combination is a setting."""
    rungs: int = 3
    """How many rungs there are."""
    keep: int = 3
    """With 3, one in three candidates goes on to the next rung, and is trained for three times as many steps."""
    seeds: int = 1
    """How many times each candidate is trained in each rung."""
    steps: int | None = None
    """The steps of the last rung, instead of as many as the recipe says."""
    out: Path = Path("search")
    """The folder for all results."""
    data: Path | None = None
    """The folder with named sources; without it they are downloaded."""
    set: tuple[str, ...] = ()
    """Changes to the recipe, for example training.batch=8."""
    jobs: int = 1
    """How many models to train at the same time; several use one GPU better."""
    take_over: bool = False
    """Write into the folder although a process of another host has left its note there; make sure that it has ended."""
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.train.cells import parse_sweep
        from holdfast.train.recipe import parse_pairs
        from holdfast.train.search import Search as Found
        from holdfast.train.search import search

        changes = parse_pairs(self.set, "training.batch=8")
        changes |= {} if self.steps is None else {"training.steps": self.steps}
        sweep = parse_sweep(self.sweep)
        require_folder(self.out)
        require_place(self.out / Found.file_name)
        if self.take_over:
            take_over(self.out)
        quiet()
        show_messages()
        names = ("recipe", "flops", "rungs", "keep", "seeds", "out", "data", "jobs")
        how: dict[str, Any] = {name: getattr(self, name) for name in names}
        found = search(self.routers, sweep=sweep, changes=changes, command=shlex.join(["holdfast", *sys.argv[1:]]), **how)
        show(candidates_table(found))
        times = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
        print(
            f"\nThe front: {'; '.join(one.label for one in found.front)}.\nIt is selected on validation data, with {times}: "
            f"confirm a difference with `holdfast compare` and more seeds.\nAll numbers: {self.out / Found.file_name}"
        )


def candidates_table(found: Found) -> Table:
    """Return the table of all candidates, the front first."""
    from holdfast.report.page_shell import flops_text
    from holdfast.report.tables import Table
    from holdfast.routing.grammar import written_value

    rows = [
        {
            "router": one.router,
            **{key.removeprefix("sparse."): written_value(value) for key, value in one.settings.items()},
            "FLOPs": flops_text(one.flops),
            "times": f"{one.flops / found.baseline_flops:.3f}",
            "rung": one.rung or "",
            "loss": "" if one.loss is None else f"{one.loss:.4f}",
            found.measure.name: "" if one.figure is None else f"{one.figure:.{found.measure.digits}f}",
            "": "front" if one.on_front else "limit" if found.is_over(one) else "",
        }
        for one in found.candidates
    ]
    note = (
        f"FLOPs of a forward, and times those of {found.baseline}; the last rung that trained it, and its loss on "
        f"validation data there; {found.measure.name} on test data; limit: it needs too many FLOPs"
    )
    return Table.of(f"{len(rows)} candidates", rows, note)

"""`holdfast compare`: train and attack several routers under equal conditions."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from holdfast.cli.common import PluginFiles, require_folder, require_place, show, show_messages
from holdfast.comparing import PAGE, RECIPE, ROUTERS, choose, run_comparison
from holdfast.locking import take_over
from holdfast.progress import quiet

if TYPE_CHECKING:
    from holdfast.train.results import Results


@dataclass(frozen=True)
class Compare:
    """Train several routers under equal conditions, attack each trained model, and print a comparison.

    Every router gets the same batches in the same order and starts from the same weights wherever shapes agree. Run the
    same command again to resume an interrupted comparison; finished cells are not run again. Routers that you name later
    are added to those in the folder. A router that cannot be built is reported before any training.

    Examples: `holdfast compare`, `holdfast compare --routers smoe,smooth --seeds 5 --out runs/smooth`,
    `holdfast compare --routers smoe,smooth --sweep sparse.k=1,2,4 training.learning_rate=1e-3,1e-4 --out runs/k`,
    `holdfast compare --recipe switch-small --data ~/data --set data.source=wikitext-2 training.steps=5000`,
    `holdfast compare --paper acmoe:table1-switch --steps 3000 --seeds 2 --data ~/data --out runs/acmoe`,
    `holdfast compare --recipe vmoe --set data.source=imagenet/ "data.shifts=[imagenet-a, imagenet-c, corruptions]"`
    """

    recipe: str = RECIPE
    """The name of a shipped recipe, or the path of a .yaml file."""
    routers: str = ROUTERS
    """Router names, joined by commas; the first is the baseline, unless the folder already has one. A plus sign joins
    names, brackets contain options, layers follow @: smoe,symphony+smooth,similarity[causal=false],ac@1,3. Braces contain
    training settings of one router: "smoe,smoe{method=pgd,budget=0.01}"."""
    paper: str | None = None
    """The experiment of a paper, as `holdfast papers` lists them: acmoe:table1-switch. It has its own recipe and routers;
    table and page show its published figures beside ours."""
    rehearse: bool = False
    """With --paper: train its routers with a small recipe and one seed, in minutes."""
    start: Annotated[Path | None, arg(name="from")] = None
    """The folder of a comparison: each router and seed starts from its trained cell of the same router and seed."""
    steps: int | None = None
    """How many steps to train, instead of as many as the recipe says."""
    seeds: int | None = None
    """How many times to train each router, each time with other initial weights and another order of the data; by default 3
    times, or as often as the paper does."""
    out: Path = Path("comparison")
    """The folder for all results."""
    data: Path | None = None
    """The folder with named sources; without it they are downloaded."""
    set: tuple[str, ...] = ()
    """Changes to the recipe, for example training.steps=50."""
    sweep: tuple[str, ...] = ()
    """Values of keys of the recipe, for example sparse.k=1,2,4 training.learning_rate=1e-3,1e-4: every combination is
    trained with every router and seed, and compared with the baseline of the same setting."""
    match_compute: bool = True
    """If a router uses more experts per token than the baseline, add the baseline with that number, rounded up; never with
    --paper or --from."""
    jobs: int = 1
    """How many models to train at the same time; several use one GPU better."""
    ledger: Path | None = None
    """A folder that gets a small file with the result of each cell, to be kept and merged with those of other machines."""
    take_over: bool = False
    """Write into the folder although a process of another host has left its note there; make sure that it has ended."""
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.report.comparison_page import verdict
        from holdfast.train.cells import parse_sweep
        from holdfast.train.recipe import parse_pairs, parse_routers

        changes = parse_pairs(self.set, "training.steps=50")
        changes |= {} if self.steps is None else {"training.steps": self.steps}
        how: dict[str, Any] = {"paper": self.paper, "rehearse": self.rehearse, "start": self.start}
        how["sweep"] = parse_sweep(self.sweep)
        chosen = choose(self.recipe, parse_routers(self.routers), self.seeds, changes, **how)
        for folder in filter(None, (self.out, self.ledger)):
            require_folder(folder)
        for name in ("results.json", PAGE):
            require_place(self.out / name)
        if self.take_over:
            take_over(self.out)
        quiet()
        show_messages()

        how = {"data": self.data, "match_compute": self.match_compute, "ledger": self.ledger}
        how["command"] = shlex.join(["holdfast", *sys.argv[1:]])
        results = run_comparison(chosen, self.out, jobs=self.jobs, **how)
        print_tables(results)
        print("\n" + "\n".join(verdict(results)))
        print(f"\nAll numbers: {self.out / 'results.json'}\nReport: {self.out / PAGE}")


def print_tables(results: Results) -> None:
    """Print the tables of a comparison."""
    from holdfast.report.comparison_tables import (
        accuracy_table,
        domain_table,
        main_table,
        metrics_table,
        modalities_table,
        shifts_table,
    )

    if results.paper is not None:
        from holdfast.report.comparison_tables import published_table

        show(published_table(results.paper.published, results))
    counts = sorted({len(row.seeds) for row in results.rows})  # routers that were added later may have fewer
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' if counts[0] > 1 else ''}"
    show(replace(main_table(results, brief=True), title=f"{results.title}; {seeds}"))
    # Turned: they have a few columns for each attack, metric, test set or domain.
    for make in (accuracy_table, metrics_table, shifts_table, modalities_table, domain_table):
        if (table := make(results, brief=True)).rows:
            show(table.turned())

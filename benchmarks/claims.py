"""Check the papers' claims with `holdfast.train.Comparison` on one GPU: enwik8 bytes and WikiText-2 words, three seeds.

    PYTHONPATH=src python benchmarks/claims.py enwik8 --data DATA --out results/enwik8 --steps 3000 --ledger results/ledger

Finished cells are not run again, so a list of routers can be run in parts. Interrupted by Ctrl-C, it enters the cells that
are finished. `make results` writes docs/results.md from the cells in results/ledger.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.progress import quiet
from holdfast.train import Cell, Comparison, load_recipe, parse_routers
from holdfast.train.ledger import enter_cells
from holdfast.train.recipe import RouterChoice

# The slow ones first, so that no slow one runs alone at the end.
# similarity[tau=1] is the paper's router; without an option, tau is the root of the width.
ROUTERS = (
    "smoe,attention,similarity[tau=1],similarity[tau=1,causal=false],similarity,symphony+smooth,smooth,ac,symphony,xmoe"
)
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    # 6 layers, d 384, 64 x 512 bytes per step, a million bytes to test; the cells of docs/results.md have 3,000 steps
    "enwik8": (
        "enwik8",
        {
            "model.config.n_layer": 6,
            "model.config.n_embd": 384,
            "model.config.n_inner": 384,
            "sparse.hidden": 384,
            "model.config.n_positions": 512,
            "data.length": 512,
            "data.test_bytes": 1_000_000,
            "training.batch": 64,
            "training.warmup": 100,
        },
    ),
    # switch-small's shape on WikiText-2, whose vocabulary is taken whole
    "wikitext-2": ("switch-small", {"data.source": "wikitext-2", "data.vocabulary": None, "training.warmup": 100}),
}


class LaterSeeds(Comparison):
    """A comparison without its first seeds, which are in the ledger already, or finished so far."""

    first_seed = 0
    only_finished = False

    @property
    def cells(self) -> list[Cell]:
        cells = [cell for cell in super().cells if cell.seed >= self.first_seed]
        return [cell for cell in cells if self.stored(cell) is not None] if self.only_finished else cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--data", type=Path, required=True, help="folder with enwik8/ and wikitext2/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--routers", default=ROUTERS)
    parser.add_argument("--top-3", action="store_true", help="add the baseline with three experts per token")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="leave out the seeds before it")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--ledger", type=Path, help="a folder that gets a small file with the result of each cell")
    parser.add_argument("--set", nargs="*", default=[], help="key=value, further changes of the recipe")
    given = parser.parse_args()
    quiet()
    name, changes = SETTINGS[given.setting]
    more = dict(pair.split("=", 1) for pair in given.set)
    numbers = {key: json.loads(value) for key, value in more.items()}
    recipe = load_recipe(
        name, {**changes, "training.steps": given.steps, "training.save_every": max(1, given.steps // 4), **numbers}
    )
    routers = parse_routers(given.routers)
    if given.top_3:
        routers.append(RouterChoice("smoe, top 3", "smoe", k=3))
    comparison = LaterSeeds(recipe, routers, given.seeds, given.out, data=given.data)
    comparison.first_seed = given.first_seed
    begun = time.monotonic()
    last: dict[str, int] = {}
    ticks: list[float] = []

    def tell(cell: Cell, steps: int) -> None:
        last[cell.name] = steps
        ticks.append(time.monotonic() - begun)
        if steps in (1, recipe.training.steps):
            print(f"{ticks[-1]:.0f} s, {cell.name}: step {steps}", flush=True)

    try:
        cells = comparison.run(tell, jobs=given.jobs)
    except KeyboardInterrupt:
        comparison.only_finished = True
        cells = comparison.run()
    if given.ledger is not None:
        enter_cells(given.ledger, comparison, cells)
    results = comparison.finish(cells)
    print(f"rate {sum(last.values()) / (ticks[-len(last) - 1] - ticks[0]):.2f} steps per second with {given.jobs} jobs")
    print(f"all {time.monotonic() - begun:.0f} s")
    for row in results.rows:
        print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()

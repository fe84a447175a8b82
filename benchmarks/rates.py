"""Measure how many steps a second `holdfast compare` trains, one cell at a time.

    PYTHONPATH=src python benchmarks/rates.py                                # on a CPU: the recipe tiny
    PYTHONPATH=src python benchmarks/rates.py --device cuda --data DATA      # on a GPU: enwik8, 6 layers, d 352 and d 384

    whole      steps a second from the end of the first step to the end of the last, with snapshots and checkpoints
    steady     the median over windows of 25 steps: most of them contain neither
    compiled   the same with `training.compile`, which is used if the compiled step has the gradients of an uncompiled one

The host may be some steps ahead of the GPU, so a window of 25 steps is exact to a few percent, and the median to less.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from command import check, command, write
from versions import versions

from holdfast.progress import quiet
from holdfast.train import Comparison, load_recipe, parse_routers

WINDOW = 25


def enwik8(dim: int) -> dict[str, Any]:
    """Return the changes of the recipe `enwik8` to 6 layers of width `dim`, with 64 sequences of 512 tokens in a batch."""
    return {
        "model.config.n_layer": 6,
        "model.config.n_embd": dim,
        "model.config.n_inner": dim,
        "model.config.n_positions": 512,
        "sparse.hidden": dim,
        "data.length": 512,
        "training.batch": 64,
        "training.warmup": 50,
    }


SETTINGS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "cpu": {"tiny": ("tiny", {})},
    "cuda": {"d 352": ("enwik8", enwik8(352)), "d 384": ("enwik8", enwik8(384))},
}


def rates(times: list[float]) -> dict[str, float]:
    """Return the rates of steps that ended at these `times`, in seconds."""
    windows = [later - earlier for earlier, later in zip(times, times[WINDOW:], strict=False)][::WINDOW]
    return {"whole": (len(times) - 1) / (times[-1] - times[0]), "steady": WINDOW / statistics.median(windows)}


def trained(recipe: str, changes: dict[str, Any], router: str, data: Path | None) -> dict[str, float]:
    """Train one cell in a folder that is deleted afterwards, and return its rates."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(
            load_recipe(recipe, changes), parse_routers(router), 1, Path(folder) / "comparison", data=data
        )
        comparison.run(progress=lambda cell, steps: times.append(time.perf_counter()) if steps else None)
    return rates(times)


def main() -> None:
    parser = command(__doc__, rounds=1)
    parser.add_argument("--data", type=Path, help="folder with enwik8/")
    parser.add_argument("--routers", default="smoe")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--compile", action="store_true", help="measure compiled steps, too")
    given = parser.parse_args()
    check(given)
    if given.steps < 2 * WINDOW:
        parser.error(f"--steps must be at least {2 * WINDOW}, two windows.")
    quiet()
    results: dict[str, Any] = {"versions": versions(), "steps": given.steps}
    for name, (recipe, changes) in SETTINGS[given.device].items():
        for router in given.routers.split(","):
            for compiled in (False, True) if given.compile else (False,):
                own = {**changes, "training.steps": given.steps, "training.save_every": 125, "training.compile": compiled}
                found = [trained(recipe, own, router, given.data) for _ in range(given.rounds)]
                row = {key: statistics.median(one[key] for one in found) for key in found[0]}
                label = f"{name}, {router}{', compiled' if compiled else ''}"
                results[label] = row
                print(f"{label}: {row['whole']:.1f} steps a second, steady {row['steady']:.1f}", flush=True)
    if given.out:
        write(given.out, results)


if __name__ == "__main__":
    main()

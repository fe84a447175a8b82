"""Write docs/results.md, its pictures and the numbers that other pages quote from results/.

python docs/site/results_page.py            # `make results`, after new cells or a change of claims.yaml

It writes the same bytes each time. A page quotes a number behind a comment: the router, the number, and how it is written.
Before the router stands the experiment, if it is not the first one of `QUOTED`.

    <!-- smooth clean difference -->-0.0035 (-0.0097 to +0.0027)<!-- / -->
    <!-- cifar10:smooth PGD level -->69.03<!-- / -->
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.metrics import Difference
from holdfast.metrics.paired import FEWEST_SEEDS
from holdfast.train.ledger import Experiment, read_ledger
from holdfast.train.results import Row

SITE = Path(__file__).resolve().parent
DOCS, RESULTS = SITE.parent, SITE.parent.parent / "results"
LEDGER = RESULTS / "ledger"
PICTURES = "pictures/results"  # in docs
sys.path += [str(SITE), str(DOCS / "pictures"), str(DOCS.parent / "benchmarks")]

import results_robust as robust  # noqa: E402
from results_certified import certified  # noqa: E402
from results_claims import claims, verdict  # noqa: E402
from results_missing import Asked, asked_for, missing  # noqa: E402
from results_numbers import (  # noqa: E402
    LOSS,
    ROUTING,
    columns,
    difference,
    has_enough_seeds,
    level,
    rows_of,
    shown_name,
    tables,
    training_of,
    written,
)
from results_pictures import curves, differences, half_width, loss_differences  # noqa: E402
from results_setting import setting, sorted_by_task, titles  # noqa: E402

NOTICE = "<!-- Written by docs/site/results_page.py from results and docs/site/claims.yaml: change those. -->\n"
INTRODUCTION = """# What we measured

Routers trained under equal conditions: the same batches in the same order, and the same initial weights wherever shapes
agree. Every number on this page is computed from stored results: the cells in `results/ledger`, one file for a router and a
seed, and what was measured of their models in `results/audits`, `results/certified` and `results/attacks`. A result without
a stored file is not here. To add cells, run a comparison with `--ledger results/ledger`, then `make results`.

Numbers are means over seeds. A difference is to `smoe`, paired by seed, with its 95% interval; bold where the interval
excludes 0, of bits per byte only from 0.01. With fewer than three seeds it has no interval and shows nothing. Intervals of
figures are over seeds and test examples ([how certain a difference is](comparing.md#how-certain-a-difference-is)); those of
fluctuation, consistency, load and audits are over seeds only. They are not corrected for the number of comparisons: of
twenty intervals, about one excludes 0 by chance. **Differences of less than 0.01 bits mean nothing on a GPU, whatever their
interval**: the same seed does not give the same run there ([notes](notes.md#comparisons); those runs were not stored).
"""
ROBUSTNESS = """## Where robustness shows

Apart from how well models predict. The first row has the numbers of `smoe`, every other row its difference to them. **Bold**
is what remains after Holm's correction for all numbers of robustness of this router in this experiment (5% together). A
router that runs more experts per token may owe a difference to that.
"""
RULE = """## Which router is recommended

A router is recommended as `robust` if on two data sets the upper end of the interval of its clean difference to `smoe` is
below 0.005 bits per byte (of a perplexity 0.5%, of an error 0.5 percentage points), and it is better in at least two kinds
of robustness, after Holm's correction over all numbers of this router in this experiment; in a kind where another number is
worse, it is not better. Kinds may be of routes only (steadiness, noise), which promises nothing about predictions. The seeds
must be fixed beforehand, in `benchmarks/verdicts.yaml`, and all must be there. Nothing corrects for the number of routers.
"""
BEGUN = """## Begun: too few seeds

In these experiments no router has three seeds in common with its baseline yet. The tables show what is measured. They say
nothing about routers, because seeds differ by as much.
"""
EARLIER = """## What we got wrong before

Our first verdicts were of 450 steps, and routers differ most at the start. From the cells of {}: the
difference of the training loss to `smoe` in nats, early (steps {} to {}) and at the end (the last {} steps), with its 95%
interval over seeds, bold where that excludes 0.

"""
LOADS = """## Overload and targeted attacks

`holdfast compare --routers smoe,smooth,symphony,capacity --no-match-compute`, then for each of its cells
`holdfast attack CELL overload --budget 0.03 0.1 --examples 256 --out results/attacks/ROUTER-seedN.json`: the inputs of each
layer's router are perturbed by up to this share of their length (l2), so that as many tokens as possible ask for one expert.

- *one expert*: the share of tokens that ask for the expert that is most asked for, the worst expert under attack
- *targeted*: the share that asks for a given expert when the attack pushes tokens to it, the mean over all experts
- *dropped*: the share of requests that a limit of capacity takes away, under the attack on the worst expert

Means over two layers and over seeds, in brackets the lowest and the highest seed. `smooth` uses more experts per token, so
that its shares are higher also without an attack. These are small models on one text: the table shows what the attacks
do, and does not rank routers.

| router | seeds | budget | one expert | targeted | dropped |
|---|---|---|---|---|---|
"""
EARLY, LATE = (350, 550), 500  # steps around those of our first verdicts, and before the end
FIRST = "enwik8-d186d535"  # the experiment whose first steps those verdicts are compared with
QUOTED = {"": FIRST, "cifar10": "cifar10-088dc798"}  # experiments that other pages quote
QUOTING = ("../README.md", "which-router.md", "robust-training.md")  # pages in docs that quote numbers
QUOTE = re.compile(r"(<!-- (\S+) (\S+) (\S+) -->).*?(<!-- / -->)")


def at_start_and_end(experiment: Experiment, row: Row) -> tuple[Difference, Difference] | None:
    """Return the difference of the training loss around the step of our first verdicts, and at the end."""
    if (curve := loss_differences(experiment, row)) is None or len(curve[1]) < FEWEST_SEEDS:
        return None
    steps, losses = curve
    found = []
    for some in ((steps >= EARLY[0]) & (steps <= EARLY[1]), steps > steps[-1] - LATE):
        values = losses[:, some].mean(1, keepdims=True)
        mean, half = float(values.mean()), half_width(values)
        assert half is not None
        found.append(Difference(mean, mean - float(half[0]), mean + float(half[0]), len(losses)))
    return found[0], found[1]


def earlier(experiment: Experiment) -> Iterator[str]:
    """Yield a table of the differences of the training losses at the steps of our first verdicts, and at the end."""
    yield "| router | early | at the end |"
    yield "|---|---|---|"
    for row in experiment.rows:
        if found := at_start_and_end(experiment, row):
            yield f"| `{row.router}` | {written(found[0], LOSS)} | {written(found[1], LOSS)} |"


def attacked_loads(folder: Path) -> Iterator[str]:
    """Yield a row for each router and budget of the stored attacks on loads, the smallest budget first."""
    stored = defaultdict[tuple[str, float], list[list[dict[str, Any]]]](list)  # the layers of each seed
    for path in sorted(folder.glob("*.json")):
        layers = json.loads(path.read_text(encoding="utf-8"))["summary"]["layers"]
        for budget in {layer["budget"] for layer in layers}:
            stored[path.stem.rpartition("-")[0], budget].append([one for one in layers if one["budget"] == budget])
    for (router, budget), seeds in sorted(stored.items()):
        shown = []
        for clean, attacked in (("clean_value", "value"), ("clean_load", "targeted"), ("clean_dropped", "dropped")):
            # A list has a number for each expert.
            before, after = ([float(np.mean([layer[key] for layer in seed])) for seed in seeds] for key in (clean, attacked))
            span = f" ({100 * min(after):.0f} to {100 * max(after):.0f}%)"
            shown.append(f"{100 * np.mean(before):.0f}% → {100 * np.mean(after):.0f}%{span}" if max(after) > 0 else "0%")
        yield f"| `{router}` | {len(seeds)} | {budget:g} | {' | '.join(shown)} |"


def plain_of(experiment: Experiment, row: Row) -> Row | None:
    """Return the row of the same router that is trained plainly."""
    name = row.router.partition("{")[0]
    return next((one for one in experiment.rows if (one.router, one.settings) == (name, row.settings)), None)


def of_training(experiment: Experiment) -> Iterator[str]:
    """Yield a table of what robust training changes: the difference of each router to the same one, trained plainly."""
    pairs = [(row, plain) for row in rows_of(experiment) if training_of(row) and (plain := plain_of(experiment, row))]
    numbers = [one for name, one in columns(experiment).items() if name not in ROUTING and not one.constant]
    if not pairs:
        return
    yield f"| change from plain training | {' | '.join(one.heading for one in numbers)} |\n|{'---|' * (1 + len(numbers))}"
    for row, plain in pairs:
        cells = (written(difference(experiment, row, one, plain), one) for one in numbers)
        yield f"| {shown_name(row)} | {' | '.join(cells)} |"
    yield ""


def rule(all_judged: Sequence[robust.Judged], names: Mapping[str, str]) -> Iterator[str]:
    """Yield the section about the rule of `robust`."""
    yield f"{RULE}\n{robust.recommendation(all_judged, names)}\n"
    heads = ["router", "experiment", "experts per token", "upper end, clean", "better in", "worse in", "lacks"]
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    for one in all_judged:
        cells = [
            f"`{one.row.router}`",
            names[one.experiment.name],
            f"{one.row.experts_per_token:.2f}",
            f"{one.end:+.{columns(one.experiment)['clean'].digits}f}{one.unit}",
            *(", ".join(found) or "nothing" for found in (one.better, one.worse, one.lacks)),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def quoted(experiment: Experiment, router: str, name: str, kind: str) -> str:
    """Return a number as a page quotes it: a difference, its mean, a verdict, a level, a percentage or experts per token.

    "trained" is the difference to the same router, trained plainly. The name "loss" is the difference of the training
    loss: "early" or at the "end".
    """
    row = next(row for row in experiment.rows if row.router == router)
    if name == "loss":
        losses = at_start_and_end(experiment, row)
        assert losses is not None
        return written(losses[kind == "end"], LOSS)
    number = columns(experiment)[name.replace("-", " ")]
    if kind == "experts":
        return f"{row.experts_per_token:.2f}"
    if kind in ("level", "percent"):
        mean = level(experiment, row, number)
        assert mean is not None
        times = 100 if kind == "percent" or number.percent else 1
        return f"{times * mean.mean:.0f}%" if kind == "percent" else f"{times * mean.mean:.{number.digits}f}"
    found = difference(experiment, row, number, plain_of(experiment, row) if kind == "trained" else None)
    assert found is not None and found.low is not None and found.high is not None
    if kind == "verdict":
        judged = verdict(found, "lower", number.floor)
        return {"not shown": "no difference shown", "**confirmed**": "better", "**contradicted**": "worse"}[judged]
    assert kind in ("difference", "trained", "mean"), kind
    shown = written(found, number)
    return re.sub(r" \([^)]*\)", "", shown) if kind == "mean" else shown


def with_numbers(page: str, experiments: Mapping[str, Experiment]) -> str:
    """Return a page with the numbers that it quotes from experiments of these names."""

    def number(found: re.Match[str]) -> str:
        name, _, router = found[2].rpartition(":")
        return found[1] + quoted(experiments[name], router, *found.group(3, 4)) + found[5]

    return QUOTE.sub(number, page)


def read_results(results: Path) -> list[Experiment]:
    """Return the experiments of a folder of results, with the audits of their cells, in the order of the page."""
    return sorted_by_task([robust.with_audits(one, results / "audits") for one in read_ledger(results / "ledger")])


def page(results: Path, asked: Asked) -> dict[str, str]:
    """Return results.md and its pictures, by their paths in docs."""
    stored = read_results(results)
    names = titles(stored)
    experiments = [one for one in stored if has_enough_seeds(one)]
    made, lines = {}, [NOTICE + INTRODUCTION]
    for experiment in experiments:
        lines += [f"## {names[experiment.name]}\n", setting(experiment) + "\n", *tables(experiment)]
        lines += of_training(experiment)
        for kind, draw, about in (
            ("differences", differences, "Clean differences, with 95% intervals"),
            ("curves", curves, "Losses minus that of the baseline"),
        ):
            path = f"{PICTURES}/{experiment.name}-{kind}.svg"
            if (picture := draw(experiment)) is not None:
                made[path] = picture
                lines.append(f"![{about}]({path})\n")
    shown = [one for one in experiments if robust.adds_to_tables(one)]
    for experiment in shown:
        heading = ROBUSTNESS + "\n" if experiment is shown[0] else ""
        lines += [f"{heading}### Robustness: {names[experiment.name]}\n", *robust.tables(experiment)]
    lines += rule([found for one in experiments for found in robust.judged(one, asked.seeds)], names)
    of_claims, pictures = claims(experiments, names, PICTURES)
    lines += of_claims
    made |= pictures
    clean = {(one.name, cell.router, cell.seed): cell.result["clean"]["figure"] for one in stored for cell in one.cells}
    lines += certified(results / "certified", names, clean)
    if loads := list(attacked_loads(results / "attacks")):
        lines.append(LOADS + "\n".join(loads) + "\n")
    lines += [
        EARLIER.format(names[one.name], *EARLY, LATE) + "\n".join(earlier(one)) + "\n"
        for one in experiments
        if one.name == FIRST
    ]
    begun = [one for one in stored if one not in experiments]
    for experiment in begun:
        heading = BEGUN + "\n" if experiment is begun[0] else ""
        lines += [
            f"{heading}### {names[experiment.name]}\n",
            setting(experiment) + "\n",
            *tables(experiment, differences=False),
        ]
    lines += missing(asked)
    return {"results.md": "\n".join(lines).rstrip("\n") + "\n", **made}


def files() -> dict[str, str]:
    """Return the page, its pictures and the pages that quote numbers, by their paths in docs."""
    stored = {one.name: one for one in read_results(RESULTS)}
    experiments = {name: stored[folder] for name, folder in QUOTED.items()}
    quoting = {path: with_numbers((DOCS / path).read_text(encoding="utf-8"), experiments) for path in QUOTING}
    return page(RESULTS, asked_for(RESULTS)) | quoting


def main() -> None:
    made = files()
    for path, content in made.items():
        (DOCS / path).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / path).write_bytes(content.encode())
    for stale in set((DOCS / PICTURES).iterdir()) - {DOCS / path for path in made}:
        stale.unlink()


if __name__ == "__main__":
    main()

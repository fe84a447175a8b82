"""Write docs/results.md, its pictures and the numbers that other pages quote from results/ledger and results/attacks.

python docs/site/results_page.py            # `make results`, after new cells or a change of claims.yaml

It writes the same bytes each time. A page quotes a number behind a comment: the router, the number, and how it is written.

    <!-- smooth clean difference -->-0.0035 (-0.0097 to +0.0027)<!-- / -->
"""

import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.special import stdtrit

from holdfast.metrics import Difference, difference_of, level_of
from holdfast.train.ledger import Experiment, LedgerCell, read_ledger
from holdfast.train.papers import find_preset
from holdfast.train.results import Row

SITE = Path(__file__).resolve().parent
DOCS, LEDGER = SITE.parent, SITE.parent.parent / "results" / "ledger"
ATTACKS = LEDGER.parent / "attacks"
PICTURES = "pictures/results"  # in docs
sys.path += [str(SITE), str(DOCS / "pictures")]

from charts import EDGE, WIDTH, Plot, chart, heading  # noqa: E402
from svg_parts import text  # noqa: E402
from tutorial_compare import picture as differences_picture  # noqa: E402

NOTICE = "<!-- Written by docs/site/results_page.py from results and docs/site/claims.yaml: change those. -->\n"
INTRODUCTION = """# What we measured

Routers trained under equal conditions: the same batches in the same order, and the same initial weights wherever shapes
agree. Every number on this page is computed from stored results: the cells in `results/ledger`, one file for a router and a
seed, and the attacks in `results/attacks`. A result without a stored file is not here. To add cells, run a comparison with
`--ledger results/ledger`, then `make results`.

A difference is to `smoe`, paired by seed, with its 95% interval; bold where the interval excludes 0. Intervals of figures
are over seeds and test examples ([how certain a difference is](comparing.md#how-certain-a-difference-is)); those of
fluctuation, consistency and load are over seeds only. They are not corrected for the number of comparisons: of twenty
intervals, about one excludes 0 by chance. **Differences of less than 0.01 bits mean nothing on a GPU, whatever their
interval**: the same seed does not give the same run there.

- *attacked*: words of the test text are swapped
- *cost*: by how much the attack raises the loss on untouched words, as a rise of their perplexity
- *load std*: standard deviation over experts of the percentage of tokens that each gets
- *fluctuation*: share of tokens whose experts change over the last fifth of training
- *consistency*: share of tokens whose experts stay the same under noise of 5% of each embedding's length

The last three are means over layers.
"""
CLAIMS = """## The claims

A claim is *confirmed* or *contradicted* if the interval of the difference excludes 0, otherwise *not shown*: then the
difference that would have shown stands beside it. Models are smaller than the papers', runs shorter (40,000 to 120,000 steps
there), and routers have our default options, which are not all the paper's.

*Published* is the paper's figure against that of its baseline, and the experiment that it is from: `holdfast papers NAME`
shows it with all that differs from ours, and `holdfast compare --paper NAME` runs it. A dash: the paper prints no number.

| claim | published | ours: difference to `smoe` | seeds | verdict at this scale |
|---|---|---|---|---|
"""
EARLIER = """## What we got wrong before

Our first verdicts were of 450 steps. Routers differ most at the start, so many of those did not hold. From the same cells,
the difference of the training loss to `smoe` in nats, with its 95% interval over seeds, bold where that excludes 0:

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
EARLY = 450  # steps of our first verdicts
QUOTING = ("../README.md", "which-router.md")  # pages in docs that quote numbers
QUOTE = re.compile(r"(<!-- (\S+) (\S+) (\S+) -->).*?(<!-- / -->)")
Read = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Number:
    """A column of the table: how it is read from a cell's result, and its digits after the point."""

    heading: str
    read: Read
    digits: int = 3
    percent: bool = False


def bits(place: str) -> Read:
    """Return how the bits per byte of a text are read, with those of its blocks."""

    def read(result: Mapping[str, Any]) -> Mapping[str, Any]:
        score = result[place]
        blocks, figure = score["per_example"], score["bits_per_byte"]
        scale = figure * sum(blocks["words"]) / sum(blocks["losses"])
        losses = [scale * loss for loss in blocks["losses"]]
        return {"figure": figure, "per_example": {**blocks, "losses": losses, "perplexity": False}}

    return read


def layers_mean(values: list[float | None]) -> Mapping[str, Any]:
    return {"figure": statistics.fmean(value for value in values if value is not None)}


NUMBERS = {
    "clean": Number("clean, bits per byte", bits("clean"), 4),
    "attacked": Number("attacked", bits("attacked"), 4),
    "cost": Number("cost, %", lambda result: result["attacked"]["cost"], 2, percent=True),
    "load": Number("load std, %", lambda result: {"figure": result["clean"]["routing"]["overall"]["load"]["std"]}, 1),
    "fluctuation": Number(
        "fluctuation", lambda result: layers_mean([layer["fluctuation"][-1] for layer in result["snapshots"]["layers"]]), 2
    ),
    "consistency": Number("consistency", lambda result: layers_mean(result["consistency"]["layers"])),
}


LOSS = Number("training loss", lambda result: {})


def results_of(experiment: Experiment, row: Row) -> dict[int, Mapping[str, Any]]:
    return {cell.seed: cell.result for cell in experiment.cells_of(row)}


def level(experiment: Experiment, row: Row, number: Number) -> Difference:
    found = level_of([number.read(result) for result in results_of(experiment, row).values()])
    assert found is not None
    return found


def difference(experiment: Experiment, row: Row, number: Number) -> Difference | None:
    """Return the difference to the baseline over the seeds that both have; None for the baseline."""
    mine, theirs = results_of(experiment, row), results_of(experiment, experiment.rows[0])
    if row is experiment.rows[0]:
        return None
    shared = sorted(mine.keys() & theirs.keys())
    return difference_of(*([number.read(results[seed]) for seed in shared] for results in (theirs, mine)))


def written(found: Difference | None, number: Number) -> str:
    """Return a difference with its interval; bold if that excludes 0."""
    if found is None:
        return "baseline"
    low, high = found.low, found.high
    times = 100 if number.percent else 1
    if low is None or high is None:
        return f"{times * found.mean:+.{number.digits}f}"
    shown = "{:+.{d}f} ({:+.{d}f} to {:+.{d}f})".format(times * found.mean, times * low, times * high, d=number.digits)
    return f"**{shown}**" if low > 0 or high < 0 else shown


def table(experiment: Experiment, names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table of an experiment with these numbers."""
    columns = ["router", "seeds", "experts per token"]
    for number in (NUMBERS[name] for name in names):
        columns += [number.heading, "difference"]
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in experiment.rows:
        cells = [f"`{row.router}`", str(len(row.seeds)), f"{row.experts_per_token:.2f}"]
        for number in (NUMBERS[name] for name in names):
            mean = level(experiment, row, number).mean * (100 if number.percent else 1)
            cells += [f"{mean:.{number.digits}f}", written(difference(experiment, row, number), number)]
        yield "| " + " | ".join(cells) + " |"


def setting(cells: list[LedgerCell]) -> str:
    """Return the sentences about how the cells of an experiment were trained."""
    experiment = cells[0].experiment
    config, training, sparse, data = (experiment["recipe"][part] for part in ("model", "training", "sparse", "data"))
    sizes, schedule = config["config"], training.get("schedule", "constant")
    origins = sorted({f"{cell.origin['device']}, torch {cell.origin['versions']['torch']}" for cell in cells})
    commits = sorted({str(cell.origin["commit"]) for cell in cells})
    return " ".join(
        [
            f"{config['family']} with {sizes['n_layer']} layers of width {sizes['n_embd']}, {sparse['experts']} experts,",
            f"top {sparse['k']}; {training['steps']:,} steps of {training['batch']} x {data['length']} {data['tokens']},",
            f"rate {training['learning_rate']:g}, {schedule} after {training['warmup']} warm-up steps,",
            f"{training['precision']}. Data: {experiment['data']['about']};",
            f"{experiment['attack']['realised']:.1%} of the words of the test text are swapped.",
            f"{'; '.join(origins)}; commits {', '.join(commits)}.",
        ]
    )


def differences(experiment: Experiment) -> str:
    """Return the picture of the clean differences."""
    rows = []
    for row in experiment.rows[1:]:
        found = difference(experiment, row, NUMBERS["clean"])
        if found is not None and found.low is not None:
            values = {key: getattr(found, key) for key in ("mean", "low", "high")}
            rows.append({"router": row.router, "experts_per_token": row.experts_per_token, **values})
    baseline = experiment.rows[0]
    figure = level(experiment, baseline, NUMBERS["clean"]).mean
    about = f"Difference of the bits per byte to {baseline.router} ({figure:.3f})"
    return differences_picture({"seeds": len(baseline.seeds), "title": about, "rows": rows})


def loss_differences(experiment: Experiment, row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (S,), and the training loss minus that of the baseline (seeds, S), over the seeds that both have."""
    baseline = {cell.seed: cell.curve for cell in experiment.cells_of(experiment.rows[0])}
    pairs = [(cell.curve, baseline[cell.seed]) for cell in experiment.cells_of(row) if cell.seed in baseline]
    found = [
        np.array(mine.losses, float) - np.interp(mine.steps, theirs.steps, np.array(theirs.losses, float))
        for mine, theirs in pairs
    ]
    return np.array(pairs[0][0].steps, float), np.array(found)


def half_width(values: np.ndarray) -> np.ndarray:
    """Return half the width of the 95% interval of the mean over seeds of `values (seeds, S)`: Student's t."""
    seeds = values.shape[0]
    return stdtrit(seeds - 1, 0.975) * values.std(0, ddof=1) / math.sqrt(seeds)


def curves(experiment: Experiment) -> str:
    """Return the picture of the training losses minus those of the baseline: one panel for each router."""
    panels = [(row.router, *loss_differences(experiment, row)) for row in experiment.rows[1:]]
    late = [np.abs(losses.mean(0)) + half_width(losses) for _, _, losses in panels]
    reach = math.ceil(20 * max(values[len(values) // 2 :].max() for values in late)) / 20
    parts = heading(
        f"Training loss minus that of {experiment.rows[0].router}, in nats",
        "Mean over seeds, 95% interval; below 0 is better; cut off at the edge",
    )
    height, gap = 96, 74
    for place, (router, steps, losses) in enumerate(panels):
        left = 70 + (place % 2) * (WIDTH - EDGE - 50) / 2
        top = 92 + (place // 2) * (height + gap)
        last = float(steps[-1])
        plot = Plot((0, last), (-reach, reach), top, height, left, left + (WIDTH - EDGE - 50) / 2 - 60)
        ticks = [(value, f"{value:+.2f}" if value else "0") for value in (-reach, 0.0, reach)]
        mean, half = losses.mean(0), half_width(losses)
        middle, low, high = (
            list(zip(steps.tolist(), values.clip(-reach, reach).tolist(), strict=True))
            for values in (mean, mean - half, mean + half)
        )
        parts += [
            text(left, top - 10, router),
            *plot.axes([(0, "0"), (last, f"{last:,.0f}")], ticks, "step"),
            plot.band(low, high),
            plot.curve(middle, 1),
        ]
    rows = math.ceil(len(panels) / 2)
    return chart(92 + rows * (height + gap), "Training losses of routers minus that of the baseline", parts)


def verdict(found: Difference, better: str) -> str:
    if found.low is None or found.high is None or found.low <= 0 <= found.high:
        return "not shown"
    return "**confirmed**" if (found.mean < 0) == (better == "lower") else "**contradicted**"


def claims(experiments: list[Experiment]) -> Iterator[str]:
    """Yield a row for each claim and experiment that has its router."""
    for claim in yaml.safe_load((SITE / "claims.yaml").read_text(encoding="utf-8")):
        number = NUMBERS[claim["number"]]
        for experiment in experiments:
            row = next((row for row in experiment.rows if row.router == claim["router"]), None)
            found = None if row is None else difference(experiment, row, number)
            if found is None or row is None:
                continue
            judged = verdict(found, claim["better"])
            would = ""
            if judged == "not shown" and found.low is not None:
                shows = (100 if number.percent else 1) * found.shows
                would = f"; above {shows:.{number.digits}f} would have shown"
            more = f", with {row.experts_per_token:.2f} experts per token" if row.uses_more_compute else ""
            about = f"{claim['paper']}: {claim['claim']} (`{row.router}`, {data_name(experiment)})"
            ours = f"{number.heading}: {written(found, number)}{would}"
            yield f"| {about} | {published(claim)} | {ours} | {shared_seeds(experiment, row)} | {judged}{more} |"


def published(claim: Mapping[str, Any]) -> str:
    """Return the paper's figure against its baseline's, and where it is; a dash if the paper prints no number."""
    if "figure" not in claim:
        return "-"
    preset, column, theirs = claim["figure"]
    rows = find_preset(preset).published.rows
    baseline, mine = rows[0], next(row for row in rows if row["name"] == theirs)
    return f"{mine[column]} against {baseline[column]} (`{preset}`)"


def shared_seeds(experiment: Experiment, row: Row) -> int:
    return len(results_of(experiment, row).keys() & results_of(experiment, experiment.rows[0]).keys())


def earlier(experiment: Experiment) -> Iterator[str]:
    """Yield a table of the differences of the training losses at the step of our first verdicts, and at the end."""
    yield f"| router | around step {EARLY} | at the end |"
    yield "|---|---|---|"
    for row in experiment.rows[1:]:
        steps, losses = loss_differences(experiment, row)
        early = int(np.abs(steps - EARLY).argmin())
        found = zip(losses.mean(0).tolist(), half_width(losses).tolist(), strict=True)
        shown = [written(Difference(mean, mean - half, mean + half, len(losses)), LOSS) for mean, half in found]
        yield f"| `{row.router}` | {shown[early]} | {shown[-1]} |"


def attacked_loads() -> Iterator[str]:
    """Yield a row for each router and budget of the stored attacks on loads, the smallest budget first."""
    stored = defaultdict[tuple[str, float], list[list[dict[str, Any]]]](list)  # the layers of each seed
    for path in sorted(ATTACKS.glob("*.json")):
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


def data_name(experiment: Experiment) -> str:
    return str(experiment.cells[0].experiment["data"]["name"])


def quoted(experiment: Experiment, router: str, name: str, kind: str) -> str:
    """Return a number as a page quotes it: a difference, its mean, a verdict, a level, a percentage or experts per token."""
    row, number = next(row for row in experiment.rows if row.router == router), NUMBERS[name]
    if kind == "experts":
        return f"{row.experts_per_token:.2f}"
    if kind in ("level", "percent"):
        mean = level(experiment, row, number).mean
        return f"{100 * mean:.0f}%" if kind == "percent" else f"{mean * (100 if number.percent else 1):.{number.digits}f}"
    found = difference(experiment, row, number)
    assert found is not None and found.low is not None and found.high is not None
    if kind == "verdict":
        return "better" if found.high < 0 else "worse" if found.low > 0 else "no difference shown"
    assert kind in ("difference", "mean"), kind
    shown = written(found, number)
    return shown if kind == "difference" else re.sub(r" \([^)]*\)", "", shown)


def with_numbers(page: str, experiment: Experiment) -> str:
    """Return a page with the numbers that it quotes."""
    return QUOTE.sub(lambda found: found[1] + quoted(experiment, *found.group(2, 3, 4)) + found[5], page)


def files() -> dict[str, str]:
    """Return the page, its pictures and the pages that quote numbers, by their paths in docs."""
    experiments = read_ledger(LEDGER)
    made, lines = {}, [NOTICE + INTRODUCTION]
    for experiment in experiments:
        name = data_name(experiment)
        steps = experiment.cells[0].experiment["recipe"]["training"]["steps"]
        lines += [f"## {name}, {steps:,} steps\n", setting(experiment.cells) + "\n"]
        lines += [*table(experiment, ("clean", "attacked", "cost")), ""]
        lines += [*table(experiment, ("load", "fluctuation", "consistency")), ""]
        for kind, draw, about in (
            ("differences", differences, "Differences of the bits per byte, with 95% intervals"),
            ("curves", curves, "Training losses minus that of the baseline"),
        ):
            path = f"{PICTURES}/{experiment.name}-{kind}.svg"
            made[path] = draw(experiment)
            lines.append(f"![{about}]({path})\n")
    lines.append(CLAIMS + "\n".join(claims(experiments)) + "\n")
    lines.append(LOADS + "\n".join(attacked_loads()) + "\n")
    lines.append(EARLIER + "\n".join(earlier(experiments[0])))
    made |= {path: with_numbers((DOCS / path).read_text(encoding="utf-8"), experiments[0]) for path in QUOTING}
    return {"results.md": "\n".join(lines) + "\n", **made}


def main() -> None:
    for path, content in files().items():
        (DOCS / path).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / path).write_bytes(content.encode())


if __name__ == "__main__":
    main()

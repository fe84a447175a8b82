"""Write docs/results.md, its pictures and the numbers that other pages quote from results/.

python docs/site/results_page.py            # `make results`, after new cells or a change of claims.yaml

It writes the same bytes each time. A page quotes a number behind a comment: the router, the number, and how it is written.

    <!-- smooth clean difference -->-0.0035 (-0.0097 to +0.0027)<!-- / -->
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from holdfast.metrics import Difference
from holdfast.train.ledger import Experiment, read_ledger
from holdfast.train.papers import find_preset

SITE = Path(__file__).resolve().parent
DOCS, RESULTS = SITE.parent, SITE.parent.parent / "results"
LEDGER = RESULTS / "ledger"
PICTURES = "pictures/results"  # in docs
sys.path += [str(SITE), str(DOCS / "pictures"), str(DOCS.parent / "benchmarks")]

import results_robust as robust  # noqa: E402
from results_certified import certified  # noqa: E402
from results_missing import Asked, asked_for, missing  # noqa: E402
from results_numbers import (  # noqa: E402
    LOSS,
    columns,
    data_name,
    difference,
    level,
    tables,
    task_of,
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
excludes 0. With fewer than three seeds it has no interval and shows nothing. Intervals of figures
are over seeds and test examples ([how certain a difference is](comparing.md#how-certain-a-difference-is)); those of
fluctuation, consistency, load and audits are over seeds only. They are not corrected for the number of comparisons: of
twenty intervals, about one excludes 0 by chance. **Differences of less than 0.01 bits mean nothing on a GPU, whatever their
interval**: the same seed does not give the same run there.
"""
ROBUSTNESS = """## Where robustness shows

Apart from how well models predict. The first row has the numbers of `smoe`, every other row its difference to them. **Bold**
is what remains after Holm's correction for all numbers of robustness of this router in this experiment (5% together). A
router that runs more experts per token may owe a difference to that. Attacks on images, on labelled texts and on pictures
with questions stand in the tables of those experiments; the next section corrects them in the same way.
"""
RULE = """## Which router is recommended

A router is recommended as `robust` if on two data sets the upper end of the interval of its clean difference to `smoe` is
below 0.005 bits per byte (of a perplexity 0.5%, of an error 0.5 percentage points), and it is better in at least two kinds
of robustness, after Holm's correction over all numbers of this router in this experiment; in a kind where another number is
worse, it is not better. Kinds may be of routes only (steadiness, noise), which promises nothing about predictions. The seeds
must be fixed beforehand, in `benchmarks/verdicts.yaml`, and all must be there. Nothing corrects for the number of routers.
"""
CLAIMS = """## The claims

A claim is *confirmed* or *contradicted* if the interval of the difference excludes 0, and a difference in bits is at least
0.01, because smaller ones mean nothing on a GPU. Otherwise it is *not shown*: then the difference that would have shown
stands beside it. Models are smaller than the papers', runs shorter (40,000 to 120,000 steps there), and routers have our
default options, which are not all the paper's.

*Published* is the paper's figure against that of its baseline, and the experiment that it is from: `holdfast papers NAME`
shows it with all that differs from ours, and `holdfast compare --paper NAME` runs it. A dash: the paper prints no number.

| claim | published | ours: difference to `smoe` | seeds | verdict at this scale |
|---|---|---|---|---|
"""
EARLIER = """## What we got wrong before

Our first verdicts were of 450 steps, and routers differ most at the start. From the cells of
{}, the difference of the training loss to `smoe` in nats, with its 95% interval over seeds, bold where
that excludes 0:

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
FIRST = "enwik8-d186d535"  # the experiment that other pages quote, and whose first steps those verdicts are compared with
QUOTING = ("../README.md", "which-router.md")  # pages in docs that quote numbers
QUOTE = re.compile(r"(<!-- (\S+) (\S+) (\S+) -->).*?(<!-- / -->)")


def claims(experiments: Sequence[Experiment], names: Mapping[str, str]) -> Iterator[str]:
    """Yield a row for each claim and experiment of its task that has its router."""
    for claim in yaml.safe_load((SITE / "claims.yaml").read_text(encoding="utf-8")):
        for experiment in experiments:
            number = columns(experiment).get(claim["number"])
            row = next((row for row in experiment.rows if row.router == claim["router"]), None)
            of = task_of(experiment), claim.get("data") and data_name(experiment)
            if of != (claim.get("task", "text"), claim.get("data")) or number is None or row is None:
                continue
            against = next((one for one in experiment.rows if one.router == claim.get("against")), None)
            if "against" in claim and against is None:
                continue
            found = difference(experiment, row, number, against)
            if found is None:
                continue
            judged = verdict(found, claim.get("better", number.better), number.floor)
            would = ""
            if judged == "not shown" and found.low is not None:
                shows = (100 if number.percent else 1) * max(found.shows, number.floor)
                would = f"; above {shows:.{number.digits}f} would have shown"
            more = f", with {row.experts_per_token:.2f} experts per token" if row.uses_more_compute else ""
            about = f"{claim['paper']}: {claim['claim']} (`{row.router}`, {names[experiment.name]})"
            to = f", to `{claim['against']}`" if "against" in claim else ""
            ours = f"{number.heading}{to}: {written(found, number)}{would}"
            yield f"| {about} | {published(claim)} | {ours} | {found.seeds} | {judged}{more} |"


def verdict(found: Difference, better: str, floor: float) -> str:
    if found.low is None or found.high is None or found.low <= 0 <= found.high or abs(found.mean) < floor:
        return "not shown"
    return "**confirmed**" if (found.mean < 0) == (better == "lower") else "**contradicted**"


def published(claim: Mapping[str, Any]) -> str:
    """Return the paper's figure against its baseline's, and where it is; a dash if the paper prints no number."""
    if "figure" not in claim:
        return "-"
    preset, column, theirs = claim["figure"]
    rows = find_preset(preset).published.rows
    baseline, mine = rows[0], next(row for row in rows if row["name"] == theirs)
    unit = f"{claim['unit']}: " if "unit" in claim else ""
    return f"{unit}{mine[column]} against {baseline[column]} (`{preset}`)"


def claim_names(experiments: Sequence[Experiment], names: Mapping[str, str]) -> dict[str, str]:
    """Return what claims call an experiment: its data, and more where several have the same data."""
    data = [data_name(one) for one in experiments]
    return {one.name: names[one.name] if data.count(name) > 1 else name for one, name in zip(experiments, data, strict=True)}


def earlier(experiment: Experiment) -> Iterator[str]:
    """Yield a table of the differences of the training losses at the step of our first verdicts, and at the end."""
    yield f"| router | around step {EARLY} | at the end |"
    yield "|---|---|---|"
    for row in experiment.rows:
        if (curve := loss_differences(experiment, row)) is None or (half := half_width(curve[1])) is None:
            continue
        steps, losses = curve
        early = int(np.abs(steps - EARLY).argmin())
        found = zip(losses.mean(0).tolist(), half.tolist(), strict=True)
        shown = [written(Difference(mean, mean - half, mean + half, len(losses)), LOSS) for mean, half in found]
        yield f"| `{row.router}` | {shown[early]} | {shown[-1]} |"


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
    """Return a number as a page quotes it: a difference, its mean, a verdict, a level, a percentage or experts per token."""
    row, number = next(row for row in experiment.rows if row.router == router), columns(experiment)[name]
    if kind == "experts":
        return f"{row.experts_per_token:.2f}"
    if kind in ("level", "percent"):
        mean = level(experiment, row, number)
        assert mean is not None
        times = 100 if kind == "percent" or number.percent else 1
        return f"{times * mean.mean:.0f}%" if kind == "percent" else f"{times * mean.mean:.{number.digits}f}"
    found = difference(experiment, row, number)
    assert found is not None and found.low is not None and found.high is not None
    if kind == "verdict":
        judged = verdict(found, "lower", number.floor)
        return {"not shown": "no difference shown", "**confirmed**": "better", "**contradicted**": "worse"}[judged]
    assert kind in ("difference", "mean"), kind
    shown = written(found, number)
    return shown if kind == "difference" else re.sub(r" \([^)]*\)", "", shown)


def with_numbers(page: str, experiment: Experiment) -> str:
    """Return a page with the numbers that it quotes."""
    return QUOTE.sub(lambda found: found[1] + quoted(experiment, *found.group(2, 3, 4)) + found[5], page)


def read_results(results: Path) -> list[Experiment]:
    """Return the experiments of a folder of results, with the audits of their cells, in the order of the page."""
    return sorted_by_task([robust.with_audits(one, results / "audits") for one in read_ledger(results / "ledger")])


def page(results: Path, asked: Asked) -> dict[str, str]:
    """Return results.md and its pictures, by their paths in docs."""
    experiments = read_results(results)
    made, lines, names = {}, [NOTICE + INTRODUCTION], titles(experiments)
    for experiment in experiments:
        lines += [f"## {names[experiment.name]}\n", setting(experiment) + "\n", *tables(experiment)]
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
    if found := list(claims(experiments, claim_names(experiments, names))):
        lines.append(CLAIMS + "\n".join(found) + "\n")
    clean = {(one.name, cell.router, cell.seed): cell.result["clean"]["figure"] for one in experiments for cell in one.cells}
    lines += certified(results / "certified", names, clean)
    if loads := list(attacked_loads(results / "attacks")):
        lines.append(LOADS + "\n".join(loads) + "\n")
    lines += [EARLIER.format(names[one.name]) + "\n".join(earlier(one)) + "\n" for one in experiments if one.name == FIRST]
    lines += missing(asked)
    return {"results.md": "\n".join(lines).rstrip("\n") + "\n", **made}


def files() -> dict[str, str]:
    """Return the page, its pictures and the pages that quote numbers, by their paths in docs."""
    (first,) = (one for one in read_results(RESULTS) if one.name == FIRST)
    quoting = {path: with_numbers((DOCS / path).read_text(encoding="utf-8"), first) for path in QUOTING}
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

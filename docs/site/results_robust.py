"""Where robustness shows: numbers of cells and of results/audits, Holm's correction, and the rule of `robust`.

p of a difference is that of Student's t whose 95% interval is the one shown: with h the distance from the mean m to the end
towards 0, t = t_(n-1, 0.975) |m| / h, and p = 2 P(T_(n-1) > t), n seeds. So p < 0.05 where the interval excludes 0.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from results_numbers import (
    Number,
    Read,
    at,
    baseline_of,
    columns,
    data_name,
    difference,
    is_baseline,
    level,
    of_bytes,
    rows_of,
    shared_seeds,
    shown_name,
    task_of,
    training_of,
    written,
    written_level,
)
from scipy.special import stdtr

from holdfast.metrics import Difference
from holdfast.metrics.paired import t_quantile
from holdfast.train.ledger import Experiment
from holdfast.train.results import Row

ALPHA = 0.05
MOST_BITS, MOST_SHARE = 0.005, 0.005  # the upper end of the clean difference: bits per byte, or relative to the baseline
FEWEST_KINDS, FEWEST_DATA = 2, 2
IN_TABLE = 4  # numbers beside each other


def audited(*names: str) -> Read:
    """Return how the first of these numbers that an audit has is read."""

    def read(result: Mapping[str, Any]) -> Mapping[str, Any]:
        if not (found := at(result, "audit", "overall")):
            return {}
        return {"figure": next((found[name] for name in names if found.get(name) is not None), None)}

    return read


def _certified(result: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"figure": at(result, "audit", "certified").get("0.01")} if "audit" in result else {}


AUDITED = {
    "rounding": Number(
        "predictions, bf16, %",
        audited("prediction_flips.model.bf16", "prediction_flips.model.fp32"),
        2,
        True,
        "predictions that change when the model runs in bf16 in place of float32",
        kind="rounding",
    ),
    "rounding flips": Number(
        "flips, bf16, %",
        audited("flips.model.bf16", "flips.model.fp32"),
        2,
        True,
        "tokens whose k best experts change when the model runs in bf16, mean over layers",
        kind="rounding",
    ),
    "batch": Number(
        "alone or in a batch, %",
        audited("prediction_flips.batch.alone"),
        2,
        True,
        "predictions that change when each sequence runs alone in place of in a batch, in float32",
        kind="batch",
    ),
    **{
        f"{name} {level}": Number(
            f"{name}, noise {level}, %",
            audited(key),
            1,
            True,
            about.format(level),
            kind="noise",
        )
        for level, share in (("1%", "0.01"), ("5%", "0.05"))
        for name, key, about in (
            (
                "flips",
                f"flips.noise.{share}",
                "tokens whose k best experts change under noise of {} of each router input's length",
            ),
            (
                "output",
                f"output.noise.{share}.total",
                "change of a layer's output under noise of {} of its router input's length, over the output's length",
            ),
        )
    },
    "certified": Number(
        "certified, %",
        _certified,
        1,
        True,
        "tokens whose k best experts no change of the router's input by 1% of its length can change; at least so many",
        "higher",
        "certificate",
    ),
    "lost": Number(
        "lost expert, nats",
        audited("loss_change.lost-expert"),
        4,
        about="rise of the loss when the most used expert of each layer is lost",
        kind="lost expert",
    ),
    "attack": Number(
        "attack on routes, %",
        audited("flips.attack"),
        1,
        True,
        "tokens whose k best experts a search changes by changing the router's input; it may not find all",
        kind="routing attack",
    ),
}


def with_audits(experiment: Experiment, folder: Path) -> Experiment:
    """Return an experiment whose results have the audits of their cells."""
    audits = {}
    clean = {(cell.router, cell.seed): cell.result["clean"]["figure"] for cell in experiment.cells}
    for path in sorted((folder / experiment.name).glob("*.json")):
        audit = json.loads(path.read_text(encoding="utf-8"))
        key = audit["router"], audit["seed"]
        if key in clean and math.isclose(audit["clean"], clean[key], rel_tol=1e-6):  # not of another training of the cell
            audits[key] = audit
    cells = [
        replace(cell, result={**cell.result, "audit": audits[cell.router, cell.seed]})
        if (cell.router, cell.seed) in audits
        else cell
        for cell in experiment.cells
    ]
    return Experiment(experiment.name, cells)


def robustness(experiment: Experiment) -> dict[str, Number]:
    """Return the numbers of robustness that an experiment has."""
    found = {name: number for name, number in columns(experiment).items() if number.kind}
    results = [cell.result for cell in experiment.cells]
    has = {name: one for name, one in AUDITED.items() if any(one.read(each).get("figure") is not None for each in results)}
    return found | has


def p_value(found: Difference | None) -> float | None:
    """Return p of a difference, None if it has no interval."""
    if found is None or found.low is None or found.high is None:
        return None
    half = found.mean - found.low if found.mean > 0 else found.high - found.mean
    if half == 0:
        return float(found.mean == 0)
    freedom = found.seeds - 1
    return float(2 * stdtr(freedom, -t_quantile(freedom) * abs(found.mean) / half))


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """Return p values corrected for their number (Holm 1979): the i-th smallest of m times m - i, none below the last."""
    corrected, largest = {}, 0.0
    for place, name in enumerate(sorted(values, key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - place) * values[name]))
        corrected[name] = largest
    return corrected


def shown_differences(experiment: Experiment, row: Row) -> dict[str, str]:
    """Return in which numbers of robustness a row differs from its baseline, corrected: "better" or "worse", by name."""
    numbers = robustness(experiment)
    differences = {name: difference(experiment, row, number) for name, number in numbers.items()}
    corrected = holm({name: p for name, found in differences.items() if (p := p_value(found)) is not None})
    found = {name: differences[name] for name, p in corrected.items() if p < ALPHA}
    return {
        name: "better" if (one.mean < 0) == (numbers[name].better == "lower") else "worse"
        for name, one in found.items()
        if one is not None
    }


def kinds(experiment: Experiment, row: Row) -> tuple[list[str], list[str]]:
    """Return the kinds of robustness in which a row is better, and those in which it is worse in a number."""
    shown, numbers = shown_differences(experiment, row), robustness(experiment)
    verdicts: dict[str, set[str]] = {}
    for name, one in shown.items():
        verdicts.setdefault(numbers[name].kind, set()).add(one)
    worse = [kind for kind, found in verdicts.items() if "worse" in found]
    return [kind for kind in verdicts if kind not in worse], worse


def adds_to_tables(experiment: Experiment) -> bool:
    """Return whether an experiment has numbers of robustness that its own tables lack."""
    return task_of(experiment) == "text" or any("audit" in cell.result for cell in experiment.cells)


def tables(experiment: Experiment) -> Iterator[str]:
    """Yield the tables of robustness of an experiment: numbers of the baseline, and differences to it."""
    numbers = robustness(experiment)
    rows = [(row, shown_differences(experiment, row)) for row in rows_of(experiment)]
    names = list(numbers)
    for some in (names[start : start + IN_TABLE] for start in range(0, len(names), IN_TABLE)):
        yield "| " + " | ".join(["router", "experts per token", *(numbers[name].heading for name in some)]) + " |"
        yield "|" + "---|" * (2 + len(some))
        for row, shown in rows:
            cells = [shown_name(row), f"{row.experts_per_token:.2f}"]
            for name in some:
                number = numbers[name]
                text = written_level(experiment, row, number)
                if not is_baseline(experiment, row):
                    text = written(difference(experiment, row, number), number, bold=name in shown, missing="-")
                cells.append(text)
            yield "| " + " | ".join(cells) + " |"
        yield ""
        yield from (f"- *{numbers[name].heading}* ({numbers[name].kind}): {numbers[name].about}" for name in some)
        yield ""
    audits = [cell.result["audit"] for cell in experiment.cells if "audit" in cell.result]
    if audits:
        seeds = ", ".join(map(str, sorted({audit["seed"] for audit in audits})))
        yield (
            f"Audits: seeds {seeds}, {audits[0]['tokens']:,} tokens; the attack on routes changes a router's input by "
            f"at most {audits[0]['settings']['budget']:.1%} of its length.\n"
        )


# The rule of `robust`


@dataclass(frozen=True)
class Judged:
    """What the rule says of a router in an experiment."""

    experiment: Experiment
    row: Row
    end: float  # the upper end of the clean difference; of a measure where higher is better, of minus it
    limit: float
    unit: str
    better: list[str]  # kinds of robustness
    worse: list[str]
    fixed: bool  # all seeds that were asked for beforehand are there

    @property
    def lacks(self) -> list[str]:
        """What it does not meet of the rule."""
        kinds = FEWEST_KINDS - len(self.better)
        return [
            *([f"an upper end below {self.limit:.3g}{self.unit}"] if self.end >= self.limit else []),
            *([f"{kinds} more kind{'s' if kinds > 1 else ''} of robustness"] if kinds > 0 else []),
            *([] if self.fixed else ["new cells with seeds fixed beforehand"]),
        ]


def judged(experiment: Experiment, asked: Mapping[tuple[str, str], Sequence[int]]) -> Iterator[Judged]:
    """Yield what the rule says of each router that has seeds enough and is trained plainly, apart from baselines.

    asked    the seeds that were asked for beforehand, by the experiment's name and the router
    """
    number = columns(experiment).get("clean")
    for row in experiment.rows:
        baseline = baseline_of(experiment, row)
        if number is None or baseline is None or training_of(row) or row.settings:
            continue
        wanted = asked.get((experiment.name, row.router), ())
        shared = set(shared_seeds(experiment, row, baseline))
        fixed = bool(wanted) and {*wanted} <= shared
        found = difference(experiment, row, number, seeds=wanted if fixed else None)  # no seed that was added later
        mean = level(experiment, baseline, number)
        if found is None or found.high is None or mean is None or row.is_baseline_with_other_k(baseline.router):
            continue
        end = (-found if number.better == "higher" else found).high
        assert end is not None
        yield Judged(experiment, row, end, *_limit(experiment, mean.mean), *kinds(experiment, row), fixed)


def _limit(experiment: Experiment, level: float) -> tuple[float, str]:
    """Return how much worse a clean figure may be, and its unit."""
    if of_bytes(experiment):
        return MOST_BITS, " bits"
    is_error = "%" in experiment.cells[0].measure.name
    return (100 * MOST_SHARE, " points") if is_error else (abs(MOST_SHARE * level), "")


def recommendation(all_judged: Sequence[Judged], titles: Mapping[str, str]) -> str:
    """Return the sentences that say which routers the rule recommends, or what the closest ones lack."""
    met: dict[str, dict[str, Judged]] = {}
    for one in all_judged:
        if not one.lacks:
            met.setdefault(one.row.router, {})[data_name(one.experiment)] = one
    enough = {router: found for router, found in met.items() if len(found) >= FEWEST_DATA}
    if enough:
        return " ".join(
            f"**`{router}` is recommended**: it meets the rule on {' and '.join(found)}, at the cost of "
            f"{' and '.join(f'{one.row.experts_per_token:.2f}' for one in found.values())} experts per token."
            for router, found in enough.items()
        )
    if met:
        once = ", ".join(f"`{router}` ({' and '.join(found)})" for router, found in met.items())
        return f"**None is recommended yet.** On one data set the rule is met, and on a second it is not: {once}."
    text = "**None is recommended yet**: the rule is met on no data set."
    fewest = min((len(one.lacks) for one in all_judged), default=0)
    closest = [
        f"`{one.row.router}` on {titles[one.experiment.name]}, which lacks {' and '.join(one.lacks)}"
        for one in all_judged
        if len(one.lacks) == fewest
    ]
    return f"{text} Closest: {'; '.join(closest)}." if closest else text

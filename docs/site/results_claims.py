"""The section of docs/results.md on the papers' claims: a row and a picture for each claim and each experiment of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from charts import DARK, STYLE, segment
from results_numbers import (
    Number,
    baseline_of,
    columns,
    data_name,
    difference,
    level,
    results_of,
    shared_seeds,
    task_of,
    written,
)
from svg_parts import page, text

from holdfast.metrics import Difference
from holdfast.train.ledger import Experiment
from holdfast.train.papers import find_preset
from holdfast.train.results import Row

FILE = Path(__file__).with_name("claims.yaml")
SECTION = """## The claims

A claim is *confirmed* or *contradicted* if the interval of the difference excludes 0, and a difference in bits is at least
0.01, because smaller ones mean nothing on a GPU. Otherwise it is *not shown*: then the difference that would have shown
stands beside it. Models are smaller than the papers', runs shorter (40,000 to 120,000 steps there), and routers have our
default options, which are not all the paper's.

*Published* is the paper's figure against that of its baseline, and the experiment that it is from: `holdfast papers NAME`
shows it with all that differs from ours, and `holdfast compare --paper NAME` runs it. A dash: the paper prints no number.
The pictures have the claimed direction to the right of 0, in percent of the baseline's number: small dots are seeds, below
them their mean with its 95% interval, and the diamond is what the paper prints, whose measure may be another one.

| claim | published | ours: difference to `smoe` | picture | seeds | verdict at this scale |
|---|---|---|---|---|---|
"""
WIDTH, HEIGHT, EDGE = 300, 74, 22


@dataclass(frozen=True)
class Claim:
    """A claim of `claims.yaml`, judged by the cells of an experiment.

    place       of the claim in the file, from 1
    against     the row that the router's is compared with
    """

    place: int
    stated: Mapping[str, Any]
    experiment: Experiment
    row: Row
    against: Row
    number: Number
    found: Difference

    @property
    def sign(self) -> int:
        """1 if the claim is that the number is higher, -1 if lower."""
        return 1 if self.stated.get("better", self.number.better) == "higher" else -1

    @property
    def verdict(self) -> str:
        return verdict(self.found, "higher" if self.sign > 0 else "lower", self.number.floor)

    @property
    def picture_name(self) -> str:
        return f"claim-{self.place:02d}-{self.experiment.name}.svg"

    def cells(self, name: str, pictures: str) -> Iterator[str]:
        """Yield the cells of its row; `name` is that of the experiment, `pictures` their folder."""
        number, found = self.number, self.found
        to = f", to `{self.stated['against']}`" if "against" in self.stated else ""
        would = ""
        if self.verdict == "not shown" and found.low is not None:
            shows = (100 if number.percent else 1) * max(found.shows, number.floor)
            would = f"; above {shows:.{number.digits}f} would have shown"
        compute = f", with {self.row.experts_per_token:.2f} experts per token" if self.row.uses_more_compute else ""
        unit = f"{self.stated['unit']}: " if "unit" in self.stated else ""
        yield f"{self.stated['paper']}: {self.stated['claim']} (`{self.row.router}`, {name})"
        printed = published(self.stated)
        yield ("-" if printed is None else f"{unit}{printed[0]} against {printed[1]} (`{self.stated['figure'][0]}`)")
        yield f"{number.heading}{to}: {written(found, number)}{would}"
        yield f"![{self.verdict.strip('*')}]({pictures}/{self.picture_name})"
        yield f"{found.seeds}"
        yield f"{self.verdict}{compute}"

    def picture(self) -> str:
        """Return the SVG of the change in percent of the baseline's number, the claimed direction to the right."""
        baseline = level(self.experiment, self.against, self.number)
        assert baseline is not None
        times = 100 * self.sign / abs(baseline.mean)
        mine, theirs = (results_of(self.experiment, row) for row in (self.row, self.against))
        seeds = shared_seeds(self.experiment, self.row, self.against)
        pairs = [(self.number.read(mine[seed]), self.number.read(theirs[seed])) for seed in seeds]
        dots = [times * (one["figure"] - other["figure"]) for one, other in pairs if one and other]
        ends = [] if self.found.low is None or self.found.high is None else [times * self.found.low, times * self.found.high]
        paper = []
        if (printed := published(self.stated)) is not None:
            figure, before = (float(number.split("±")[0]) for number in printed)
            paper = [100 * abs(figure - before) / before]
        reach = 1.1 * max(map(abs, [*dots, *ends, *paper, times * self.found.mean, 0.1]))

        def at(value: float) -> float:
            return WIDTH / 2 + value / reach * (WIDTH / 2 - EDGE)

        y = 26.0
        parts = [segment(WIDTH / 2, 10, WIDTH / 2, 48, "axis"), segment(EDGE, 48, WIDTH - EDGE, 48, "grid")]
        parts += [text(at(end), 65, f"{end:+.1f}%", "small mid") for end in (-0.85 * reach, 0.85 * reach)]
        parts.append(text(WIDTH / 2, 65, "0", "small mid"))
        if ends:
            parts.append(segment(at(min(ends)), y, at(max(ends)), y, "line1"))
        parts += [f'<circle class="shade1" cx="{at(dot):.1f}" cy="{y - 11:.1f}" r="3"/>' for dot in dots]
        parts.append(f'<circle class="fill1" cx="{at(times * self.found.mean):.1f}" cy="{y:.1f}" r="5"/>')
        for value in paper:
            x = at(value)
            parts.append(f'<path class="fill0" d="M{x:.1f} 34 l5 6 l-5 6 l-5 -6 z"/>')
        about = f"{self.stated['paper']}: {self.stated['claim']}: {self.verdict.strip('*')}"
        return page(HEIGHT, about, parts, STYLE, DARK, WIDTH)


def published(stated: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the paper's figure as it is printed, and that of its baseline; None if it prints no number."""
    if "figure" not in stated:
        return None
    preset, column, theirs = stated["figure"]
    rows = find_preset(preset).published.rows
    return str(next(row for row in rows if row["name"] == theirs)[column]), str(rows[0][column])


def verdict(found: Difference, better: str, floor: float) -> str:
    if found.low is None or found.high is None or found.low <= 0 <= found.high or abs(found.mean) < floor:
        return "not shown"
    return "**confirmed**" if (found.mean < 0) == (better == "lower") else "**contradicted**"


def judged(experiments: Sequence[Experiment]) -> Iterator[Claim]:
    """Yield each claim with each experiment of its task and data that has its router and the one it is compared with."""
    for place, stated in enumerate(yaml.safe_load(FILE.read_text(encoding="utf-8")), start=1):
        for experiment in experiments:
            rows = {row.router: row for row in reversed(experiment.rows)}
            number, row = columns(experiment).get(stated["number"]), rows.get(stated["router"])
            of = task_of(experiment), stated.get("data") and data_name(experiment)
            if of != (stated.get("task", "text"), stated.get("data")) or number is None or row is None:
                continue
            against = rows.get(stated["against"]) if "against" in stated else baseline_of(experiment, row)
            found = None if against is None else difference(experiment, row, number, against)
            if against is not None and found is not None:
                yield Claim(place, stated, experiment, row, against, number, found)


def claims(experiments: Sequence[Experiment], titles: Mapping[str, str], folder: str) -> tuple[list[str], dict[str, str]]:
    """Return the lines of the section, and its pictures by their paths; `folder` is that of the pictures."""
    found = list(judged(experiments))
    data = [data_name(one) for one in experiments]
    # An experiment is called by its data, and by more where several have the same data.
    names = {
        one.name: titles[one.name] if data.count(name) > 1 else name for one, name in zip(experiments, data, strict=True)
    }
    rows = [f"| {' | '.join(one.cells(names[one.experiment.name], folder))} |" for one in found]
    return [SECTION + "\n".join(rows) + "\n"] if rows else [], {
        f"{folder}/{one.picture_name}": one.picture() for one in found
    }

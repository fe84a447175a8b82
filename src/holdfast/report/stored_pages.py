"""Pages of stored reports, whichever kind a folder has: as HTML, or as files with their numbers and pictures.

Several comparisons and audits share one page, and so does the leaderboard of a ledger. A comparison, or an experiment of a
ledger, is a section with its sentence, its threat model and its verdict strip. Audits share one table.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

from holdfast.auditing import AuditReport, GeometryReport, diagnose
from holdfast.mismatch import MismatchReport
from holdfast.report.export import Page, strip_table
from holdfast.report.page_shell import as_texts, decimal, drawing, listed, number, percent, signed
from holdfast.report.strip import Chip, Strip, column, figure_aspect, headline, strip
from holdfast.report.svg import first_screen_svgs, has_svg, plot_svg
from holdfast.report.tables import Cell, Table
from holdfast.routing.presets import REGISTRY
from holdfast.stored import ShownRecord, late
from holdfast.train.ledger import Experiment
from holdfast.train.prediction_report import PredictionReport
from holdfast.train.results import Results, Row

Groups = dict[str, dict[str, str]]  # texts by heading and name
# The name of the page without its ending, by kind of report.
PAGES: dict[type[ShownRecord], str] = {
    Results: "report",
    AuditReport: "audit",
    GeometryReport: "geometry",
    MismatchReport: "mismatch",
    PredictionReport: "predictions",
}
LONGEST = 40  # letters of the name of a picture
KINDS = {kind.file_name: kind for kind in PAGES}


@dataclass(frozen=True)
class Section:
    """A comparison on a page of several."""

    name: str
    title: str
    sentence: str
    threat: str
    strip: Strip
    about: Groups = field(default_factory=dict)  # what all its rows share
    cards: dict[str, Groups] = field(default_factory=dict)  # of a leaderboard: by row
    order: str = ""  # of a leaderboard: by what its rows are sorted

    @property
    def tables(self) -> Iterator[Table]:
        """What the section shows as texts and bars."""
        yield strip_table(
            f"{self.name}: {self.title}", self.strip, f"{self.sentence} Threat model: {self.threat}. {self.order}".strip()
        )
        for heading, groups in {"experiment": self.about, **self.cards}.items():
            for title, group in groups.items():
                yield Table(f"{self.name}, {heading}: {title}", ["", "value"], list(group.items()))


def runs_page(reports: Mapping[str, ShownRecord]) -> Page:
    """Return the page of several comparisons and audits, by name."""
    audits = {name: report for name, report in reports.items() if isinstance(report, AuditReport)}
    sections = [section(name, report) for name, report in reports.items() if isinstance(report, Results)]
    kinds = {"comparison": len(sections), "audit": len(audits)}
    counts = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items() if count]
    return _page("several runs", listed(counts), sections, audits)


def board_page(experiments: Sequence[Experiment]) -> Page:
    """Return the leaderboard of a ledger: a section for each experiment; the best figure under attack comes first."""
    sections = [_board_section(experiment) for experiment in experiments]
    routers = {row.router for experiment in experiments for row in experiment.rows}
    seeds = sum(len(experiment.cells) for experiment in experiments)
    few = "experiment" if len(experiments) == 1 else "experiments"
    return _page("leaderboard", f"{len(routers)} routers, {seeds} models, {len(experiments)} {few}", sections, {})


def _page(kind: str, title: str, sections: Sequence[Section], audits: Mapping[str, AuditReport]) -> Page:
    tables = list(audit_tables(audits)) if audits else []
    shown = [table for one in sections for table in one.tables]
    return Page(
        "runs.html",
        [],
        brief=[*shown, *tables][0],
        sentences=[f"{one.name}: {one.sentence}" for one in sections],
        kind=kind,
        title=title,
        sections=sections,
        audits=tables,
        exported=shown,
    )


def section(name: str, results: Results) -> Section:
    return Section(name, results.title, headline(results), results.run.measure.attack, strip(results))


def _board_section(experiment: Experiment) -> Section:
    """Return a section with the model card of every row, sorted by the figure under attack."""
    results = experiment.results
    run, data = results.run, results.run.data.get("name", "data")
    sign = -1 if run.measure.better == "higher" else 1

    def rank(row: Row) -> tuple[bool, float]:
        figure = row.clean if row.attacked is None else row.attacked
        return figure is None, 0.0 if figure is None else sign * figure

    found, order = _with_attacked(results), sorted(range(len(results.rows)), key=lambda at: rank(results.rows[at]))
    rows = [replace(found.rows[at], chips=[*found.rows[at].chips, *_size(results.rows[at])]) for at in order]
    columns = [
        replace(one, bars=[one.bars[at] for at in order], best=None if one.best is None else order.index(one.best))
        for one in found.columns
    ]
    steps = run.recipe.get("training", {}).get("steps")
    family = run.recipe.get("model", {}).get("family")
    trained = f"{steps:,} steps" if isinstance(steps, int) else ""
    about = {"Recipe": as_texts(run.recipe), "Data": as_texts(run.data), "Threat model": as_texts(run.attack)}
    return Section(
        experiment.name,
        ", ".join(str(part) for part in (data, family, trained) if part),
        headline(results),
        run.measure.attack,
        replace(found, rows=rows, columns=columns),
        {heading: group for heading, group in about.items() if group},
        {results.rows[at].label: card(experiment, results.rows[at]) for at in order},
        f"In the order of the {run.measure.noun} under attack; between rows without a difference, the order is chance.",
    )


def _with_attacked(results: Results) -> Strip:
    """Return the strip with the figure under attack, by which a leaderboard is sorted, if it has only the attack's cost."""
    found = strip(results)
    if not any(row.cost for row in results.rows):
        return found
    attacked = figure_aspect(results, f"Attacked {results.run.measure.noun}", "attacked")
    return replace(found, columns=[found.columns[0], column(results, results.rows, attacked), *found.columns[1:]])


def _size(row: Row) -> Iterator[Chip]:
    """Yield the size of the models of a row, and how many it is the mean of."""
    yield Chip("weights", f"{row.parameters / 1e6:.1f} M", "parameters of the model", row.parameters)
    yield Chip("seeds", str(len(row.seeds)), "models that were trained", len(row.seeds))


def card(experiment: Experiment, row: Row) -> Groups:
    """Return the model card of a row: what the router is, and where its models come from."""
    cells = experiment.cells_of(row)
    options = as_texts(cells[0].cell.get("options") or {})
    try:
        presets = REGISTRY.parse(cells[0].cell.get("router") or row.router)
    except ValueError:  # of a plugin that is not loaded
        presets = []
    ideas = {preset.name: f"{preset.about} ({preset.paper})" for preset in presets}

    def texts(key: str) -> str:
        return ", ".join(dict.fromkeys(str(cell.origin[key]) for cell in cells if cell.origin.get(key) is not None))

    origin = {
        "seeds": ", ".join(str(cell.seed) for cell in cells),
        **{key: texts(key) for key in ("device", "commit", "finished")},
        **{f"version of {name}": text for name, text in as_texts(cells[0].origin.get("versions", {})).items()},
    }
    return {
        "Router": {"name": row.router, **ideas, **options},
        "Origin": {name: text for name, text in origin.items() if text},
    }


def audit_tables(audits: Mapping[str, AuditReport]) -> Iterator[Table]:
    """Yield a table with a row for each audit, and one with a row for each perturbation."""
    rows = []
    for name, report in audits.items():
        overall, findings = report.overall, Counter(finding.severity for finding in diagnose(report))
        row: dict[str, object] = {
            "audit": name,
            "model": report.model.name,
            "tokens": f"{report.data.tokens:,}",
            "experts per token": decimal(overall.experts_per_token),
            "perplexity": number(overall.perplexity, 4),
            "predictions that change, at most": _worst(report, "prediction_flips"),
            "rise of the loss, at most": _worst(report, "loss_change"),
            "tokens that flip, at most": _worst(report, "flips"),
        }
        row |= {f"undecided in {dtype}": percent(share) for dtype, share in overall.undecided.items()}
        row["dead experts"] = str(sum(len(layer.load.dead) for layer in report.layers))
        row["findings"] = listed([f"{count} {severity}" for severity, count in findings.items()]) if findings else "none"
        rows.append(row)
    note = "At most: under the perturbation in brackets, of all that were run. Loss in nats per token."
    if len({report.data.checksum for report in audits.values()}) > 1:
        note += " The audits used different data: differences may come from the data, not from the models."
    yield Table.of("Audits side by side", rows, note)
    changes: dict[str, dict[str, str]] = {}
    for audit, report in audits.items():
        for name, perturbed in report.perturbations.items():
            row_of_name = changes.setdefault(name, {"perturbation": name, **dict.fromkeys(audits, decimal(None))})
            row_of_name[audit] = percent(perturbed.overall.prediction_flips)
    yield Table.of("Predictions that each perturbation changes", changes.values())


def _worst(report: AuditReport, key: str) -> Cell:
    """Return the largest change of an audit, with the name of its perturbation."""
    changes = ((getattr(one.overall, key), name) for name, one in report.perturbations.items())
    worst, name = max((each for each in changes if each[0] is not None), key=itemgetter(0), default=(None, ""))
    shown = signed(worst, ".4f") if key == "loss_change" else percent(worst)
    return Cell(f"{shown} ({name})", shown.value) if name else shown


def find_stored(place: Path) -> Path:
    """Return the stored report in a folder, or the file itself; the first name that a report may have if there is none."""
    files = [place] if place.name in KINDS else [place / name for name in KINDS]
    return next((file for file in files if file.exists()), files[0])


def page_name(stored: Path) -> Path:
    """Return where the page of a stored report is by default, without an ending."""
    return stored.with_name(PAGES[KINDS[stored.name]])


def read_page(*stored: Path) -> Page:
    """Return the page of a stored report, or one page of several; raise ValueError if a report is damaged."""
    tails = Counter(path.resolve().parent.name for path in stored)
    names = [tail if tails[tail := path.resolve().parent.name] == 1 else str(path) for path in stored]
    reports = {name: KINDS[path.name].load(path) for name, path in zip(names, stored, strict=True)}
    if len(reports) < len(stored):
        raise ValueError("a folder is named twice; name each folder only once.")
    for name, report in reports.items() if len(reports) > 1 else ():
        if not isinstance(report, Results | AuditReport):
            raise ValueError(f"{name} is {report.kind}; only comparisons and audits can be put on one page.")
    for path, (name, report) in zip(stored, reports.items(), strict=True):
        with drawing(path, type(report)):  # each on its own, so that an error names its file
            page: Page = late(report.page)(report) if len(reports) == 1 else runs_page({name: report})
    return runs_page(reports) if len(reports) > 1 else page


def exports(page: Page, base: Path, *, csv: bool, latex: bool, svg: bool) -> dict[Path, str]:
    """Return the files to write, with their content."""
    files = {base.with_name(f"{base.name}.csv"): page.csv()} if csv else {}
    files |= {base.with_name(f"{base.name}.tex"): page.latex()} if latex else {}
    if svg:
        pictures = {plot.name: plot_svg(plot) for plot in page.plots if has_svg(plot)}
        for title, picture in first_screen_svgs(page.exported):
            pictures[re.sub(r"\W+", "-", title).lower()[:LONGEST].strip("-")] = picture
        if not pictures:
            raise ValueError("this report has no picture that can be saved as SVG; leave out --svg.")
        files |= {base.with_name(f"{base.name}-{name}.svg"): picture for name, picture in pictures.items()}
    return files

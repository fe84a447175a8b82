"""The table of a paper's published figures, beside those of a comparison that ran the same experiment."""

from collections.abc import Iterator
from dataclasses import replace

from holdfast.report.page_shell import decimal
from holdfast.report.tables import Table
from holdfast.train.papers import Column, Published
from holdfast.train.results import Results, Row


def published_table(published: Published, results: Results | None = None) -> Table:
    """Return the rows of the paper's table, and after each figure ours, if there are results; then the routers it lacks."""
    title, note = "Published figures", ""
    if results is not None and (paper := results.paper) is not None:
        title = f"{paper.name} ({', '.join(paper.covers)}): published figures, and ours"
        note = f"The page lists {len(paper.deviations)} deviations from the paper's experiment."
    rows = {}
    if results is not None and (results.domains or not results.swept):  # of a sweep, the paper's setting is not known
        rows = {row.router: row for row in results.rows}
    listed = [*published.rows, *({"name": "", "router": name} for name in _unlisted(published, rows))]

    def cells(printed: dict[str, object]) -> Iterator[tuple[str, str]]:
        yield "in the paper", str(printed["name"])
        yield "router", str(printed.get("router", ""))
        for key, column in published.columns.items():
            yield column.heading, str(printed.get(key, ""))
            if results is not None and column.ours is not None:
                row = rows.get(str(printed.get("router")))
                yield f"{column.heading}, here", "" if row is None else our_figure(_over_domains(row, results), column)

    return Table.of(title, (dict(cells(row)) for row in listed), note)


def _over_domains(row: Row, results: Results) -> Row:
    """Return a row with the mean error over held-out domains, if several were held out."""
    means = {one.router: one.mean.mean for one in results.domains}
    return replace(row, clean=100 - means[row.router]) if row.router in means else row


def _unlisted(published: Published, rows: dict[str, Row]) -> list[str]:
    printed = {row.get("router") for row in published.rows}
    return [name for name in rows if name not in printed]


def our_figure(row: Row, column: Column) -> str:
    """Return our number for a published column, as text; empty if the row has none."""
    assert column.ours is not None
    name = column.ours.removeprefix("100 - ").removeprefix("100 * ")
    if name == "parameters":
        return f"{row.parameters / 1e6:.0f} M"
    kind, _, test = name.partition(":")
    if kind == "shift":
        value = row.shifts[test].figure if test in row.shifts else None
    elif kind == "attack":
        value = row.scores[test].mean if test in row.scores else None
    else:
        value = {"clean": row.clean, "attacked": row.attacked, "bits": row.clean_bits_per_byte}[name]
    if value is None:
        return ""
    if column.ours.startswith("100 - "):
        value = 100 - value
    return decimal(100 * value if column.ours.startswith("100 * ") else value)

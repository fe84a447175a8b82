"""What a page shows of shifted test sets: a table of each router's results, and a sentence about their differences."""

from collections.abc import Iterator

from holdfast.report.page_shell import decimal, listed
from holdfast.report.stored_comparison import Results

MOST_NAMED = 6  # differences that the sentence names
NONE = "\u2013"


def shifts_table(results: Results) -> Iterator[dict[str, str]]:
    """Yield for each router its results on shifted test sets; yield nothing if there are none."""
    tests = {name: one.measure for row in results.rows for name, one in row.shifts.items()}
    for row in results.rows if tests else []:
        columns = {}
        for name, measure in tests.items():
            found = row.shifts.get(name)
            difference = None if found is None else found.difference
            columns[f"{name}, {measure}"] = decimal(None if found is None else found.figure)
            columns[f"{name}, difference"] = (
                "baseline" if results.is_baseline(row) else difference.words if difference else NONE
            )
        yield columns


def shifts_caption(results: Results) -> str:
    """Return the caption of the table of shifted test sets."""
    better = {one.measure: one.better for row in results.rows for one in row.shifts.values()}
    each = " ".join(f"{measure.partition(',')[0]}: {which} is better." for measure, which in better.items())
    return f"{each} Means over seeds; differences to {results.rows[0].router}, paired by seed."


def shift_sentences(results: Results) -> tuple[str, ...]:
    """Return which routers differ from the baseline on which shifted test sets; empty if nothing can be compared."""
    judged, found = False, []
    for row in results.rows:
        for name, one in row.shifts.items():
            if one.difference is None or one.difference.kind == "unknown":
                continue
            judged = True
            if one.difference.kind != "same":
                verb, size = one.difference.change(" percentage points")
                found.append(f"{row.label} {verb} the {one.measure.partition(',')[0]} on {name} by {size}")
    if not judged:
        return ()
    tests = list(dict.fromkeys(name for row in results.rows for name in row.shifts))
    where = f"On the shifted test set{'s' if len(tests) > 1 else ''} {listed(tests)}"
    if not found:
        return (f"{where}, no router made a difference to {results.rows[0].router} that its seeds can show.",)
    named, left = found[:MOST_NAMED], len(found) - MOST_NAMED
    end = f"the table has {left} more" if left > 0 else "no other difference can be shown"
    return (f"{where}, {'; '.join(named)}; {end}.",)

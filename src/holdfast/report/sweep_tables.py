"""What a page shows of a sweep: its verdict over all settings, and a table with the settings side by side."""

from collections.abc import Iterator

from holdfast.report.domain_tables import HELD_OUT
from holdfast.report.page_shell import decimal, listed
from holdfast.report.stored_comparison import Difference, Results, Row


def sweep_verdict(results: Results) -> tuple[str, ...]:
    """Return a sweep in a few sentences: in how many settings each router differs from the baseline of the same setting."""
    measure, baseline = results.run.measure, results.rows[0].router
    others = results.others
    keys = listed(results.swept)
    found = [f"{len(results.settings)} settings of {keys} were trained; each router is compared within equal settings."]
    if not others:
        found.append(f"Only {baseline} was trained, so there is no other router to compare it with.")
    elif reason := results.no_claim([one for row in others for one in (row.clean_difference, row.attacked_difference)]):
        found += reason
    else:
        for where, attacked in (("On clean data", False), ("Under attack", True)):
            counts = "; ".join(_counts(router, results, attacked) for router in dict.fromkeys(row.router for row in others))
            found.append(f"{where}, against {baseline}: {counts}.")
        differences = [one for row in others for one in (row.clean_difference, row.attacked_difference)]
        count = sum(_kind(one) != "unknown" for one in differences)
        found.append(f"Without any difference, about {0.05 * count:.2g} of these {count} intervals would miss 0 by chance.")
    known = [row for row in results.rows if row.clean is not None and row.apart is None]
    if known:
        best = (min if measure.better == "lower" else max)(known, key=lambda row: row.clean or 0.0)
        word = "lowest" if measure.better == "lower" else "highest"
        found.append(f"The {word} clean {measure.noun}, {decimal(best.clean, measure.digits)}, has {best.label}.")
    return tuple(found)


def _counts(router: str, results: Results, attacked: bool) -> str:
    """Return in how many settings a router is better, worse, not different, or cannot be judged."""
    noun = results.run.measure.noun
    words = {
        "lower": f"lowered the {noun} in {{}}",
        "higher": "raised it in {}",
        "same": "made no difference that its seeds can show in {}",
        "unknown": "cannot be judged in {}",
    }
    rows = [row for row in results.rows if row.router == router]
    kinds = [_kind(row.attacked_difference if attacked else row.clean_difference) for row in rows]
    if "lower" not in kinds:
        words["higher"] = f"raised the {noun} in {{}}"
    parts = [text.format(kinds.count(kind)) for kind, text in words.items() if kind in kinds]
    return f"{router} {listed(parts)} of {len(rows)} setting{'s' if len(rows) > 1 else ''}"


def _kind(difference: Difference | None) -> str:
    return "unknown" if difference is None else difference.kind


def side_by_side(results: Results) -> tuple[list[str], list[dict[str, str]]]:
    """Return the labels of the settings, and for each a row with the clean and the attacked result of every router.

    Both are empty without a sweep, and if only the held-out domain differs: `domain_table` compares domains.
    """
    if not results.swept or (results.domains and results.swept == [HELD_OUT]):
        return [], []
    routers = list(dict.fromkeys(row.router for row in results.rows))
    found = {(row.router, row.setting_label): row for row in results.rows}
    return results.settings, [
        dict(_columns(label, routers, found, results.run.measure.digits)) for label in results.settings
    ]


def _columns(label: str, routers: list[str], found: dict[tuple[str, str], Row], digits: int) -> Iterator[tuple[str, str]]:
    for router in routers:
        row = found.get((router, label))
        name = next(one.name for one in found.values() if one.router == router)
        some = any(one.attacks_some for one in found.values())
        clean = None if row is None else row.clean_beside_attacked if some else row.clean
        yield f"{name}, clean{', attacked examples' if some else ''}", decimal(clean, digits)
        yield f"{name}, attacked", decimal(row.attacked if row else None, digits)

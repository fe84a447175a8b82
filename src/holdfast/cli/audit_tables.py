"""An audit as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from holdfast.cli.terminal import show, slim_table

if TYPE_CHECKING:
    from rich.table import Table

    from holdfast.auditing import AuditReport

SHOWN_FINDINGS, SHOWN_TOKENS = 10, 5


def print_report(report: AuditReport) -> None:
    show(_layers(report))
    show(_perturbations(report))
    _print_skipped(report)
    _print_tokens(report)
    _print_findings(report)
    if report.status == "interrupted":
        print(f"Interrupted: these are the figures of the {report.data['batches']} batches that were finished.")


def print_what_if(found: dict[str, Any]) -> None:
    shown = slim_table(f"With {found['router']} instead, untrained", "", "as it is", f"with {found['router']}")
    for name, pair in found["cost"].items():
        shown.add_row(name.replace("_", " "), _number(pair["before"]), _number(pair["after"]))
    for name, pair in found["flip_output"].items():
        shown.add_row(f"output change by flips, {name}", _number(pair["before"]), _number(pair["after"]))
    show(shown)


def print_differences(before: AuditReport, after: AuditReport) -> None:
    from holdfast.auditing import differences

    found = differences(before, after)
    if before.data.get("checksum") != after.data.get("checksum"):
        print("The two audits are of different data: what differs need not be the model's.")
    names = " and ".join(str(report.model.get("name") or "a model") for report in (before, after))
    shown = slim_table("", "number", "first", "second")
    shown.title = _plain(names)
    for name, one, two in found:
        shown.add_row(_plain(name), _number(one), _number(two))
    if found:
        show(shown)
    else:
        print("The overall numbers are the same.")


def _layers(report: AuditReport) -> Table:
    title = (
        f"{report.model['name']}: {report.overall['tokens']} tokens, {report.overall['experts_per_token']:.2f} experts each"
    )
    columns = ("layer", "entropy", "load CV", "dead", "near ties", "undecided", "radius", "< 0.001")
    shown = slim_table(
        title,
        *columns,
        caption="Entropy: of log E. Near ties: within 0.01. Undecided: in bf16. Radius: median, of a token's length.",
    )
    for layer in report.layers:
        ties = next((strip["share"] for strip in layer["near_ties"]["strips"] if strip["width"] == 0.01), None)
        shown.add_row(
            str(layer["layer"]),
            _share(layer["entropy_share"]),
            _number(layer["load"]["cv"]),
            str(len(layer["load"]["dead"])),
            _share(ties),
            _share(layer["undecided"].get("bf16", {}).get("share")),
            _number(layer["radius"].get("median")),
            _share(layer["radius"].get("below_0.001")),
        )
    return shown


def _perturbations(report: AuditReport) -> Table:
    columns = ("", "sets", "first", "weights", "output", "by flips", "predicted", "loss")
    caption = (
        "Sets, first experts and predictions that change; change of gate weights (L1), of layers' outputs, of the loss."
    )
    shown = slim_table("What changes", *columns, caption=caption)
    for name, one in report.perturbations.items():
        if one["skipped"] is None:
            found = one["overall"]
            shown.add_row(
                name,
                _share(found["flips"]),
                _share(found["first_flips"]),
                _number(found["weight_change"]),
                _share(found["output"]["total"]),
                _share(found["output"]["flip"]),
                _share(found["prediction_flips"]),
                "" if found["loss"] is None else _signed(found["loss"]["change"]),
            )
    return shown


def _print_skipped(report: AuditReport) -> None:
    for name, one in report.perturbations.items():
        if one["skipped"] is not None:
            print(f"{name} was skipped: {one['skipped']}")


def _print_tokens(report: AuditReport) -> None:
    known = [entry for entry in report.at_risk if entry["text"] is not None][:SHOWN_TOKENS]
    if not known:
        return
    shown = slim_table("Tokens most at risk", "token", "in", "layer", "radius", "from", "to")
    for entry in known:
        # Written as Python writes it, and not as markup: a text may hold anything.
        cells = (repr(entry["text"]), repr(entry["context"]), entry["layer"], _number(entry["relative"]))
        shown.add_row(*(_plain(cell) for cell in (*cells, entry["leaves"], entry["enters"])))
    show(shown)


def _print_findings(report: AuditReport) -> None:
    from holdfast.auditing import diagnose

    found = diagnose(report)
    print("Findings, the most harmful first:" if found else "Nothing to complain about.")
    alike = Counter((finding.kind, finding.severity) for finding in found)
    worst = {(finding.kind, finding.severity): finding for finding in reversed(found)}  # the first of each kind
    shown = [finding for finding in found if finding is worst[finding.kind, finding.severity]][:SHOWN_FINDINGS]
    for number, finding in enumerate(shown, 1):
        more = alike[finding.kind, finding.severity] - 1
        others = f" {more} more {'layer' if more == 1 else 'layers'} likewise." if more else ""
        print(f"{number:3}. {finding.severity}: {finding}.{others}")
    if len(alike) > len(shown):
        print(f"     and {len(alike) - len(shown)} more kinds.")


def _plain(cell: object) -> Any:
    from rich.text import Text

    return Text(str(cell))


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _signed(value: float | None) -> str:
    return "broke" if value is None else f"{value:+.2g}"  # a perturbed model's numbers may be NaN or infinite


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"

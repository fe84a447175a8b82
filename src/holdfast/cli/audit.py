"""`holdfast audit`: measure how much of a saved model depends on near-ties, and print the result as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from holdfast.cli.common import ConditionHolds, MeasuredData, free_files, show, token_row, write_report_files

if TYPE_CHECKING:
    from holdfast.auditing import AuditReport, Finding, Settings

SHOWN_FINDINGS, SHOWN_TOKENS = 10, 5


def print_report(report: AuditReport) -> None:
    """Print the tables, then what a reader looks for, where it stays in view: the findings and the answer of a what-if.

    Findings have the order and the headings of the page, and the same rows are left out of tables.
    """
    from holdfast.auditing import diagnose
    from holdfast.report.audit_page import layers_table, perturbations_table, severities, triggers_table
    from holdfast.report.page_shell import number
    from holdfast.report.tables import Table

    print(f"{report.model.name}: {report.overall.tokens} tokens, {report.overall.experts_per_token or 0:.2f} experts each")
    layers = layers_table(report)
    others = (name for name in layers.columns if name.startswith("near-ties") and name != "near-ties (0.01)")
    show(layers.without("experts", "entropy, nats", *others, "undecided in fp16", "why no certificate"))
    if report.perturbations:
        show(perturbations_table(report).without("what it does", "output, other"))
    for name, skipped in report.skipped.items():
        print(f"{name} was skipped: {skipped.reason}")
    if report.triggers is not None and report.triggers.skipped is not None:
        print(f"triggers were not searched for: {report.triggers.skipped}")
    elif report.triggers is not None:
        show(triggers_table(report))
    known = (entry for entry in report.at_risk if entry.text is not None)
    if rows := [token_row(entry, entry.layer, {"radius": number(entry.relative)}) for entry in known]:
        show(Table.of("Tokens most at risk", rows[:SHOWN_TOKENS]))
    findings = diagnose(report)
    print(f"Findings: {severities(report, findings)}.")
    _print_findings(findings)
    if report.status == "interrupted":
        print(f"Interrupted: these are the results of the {report.data.batches} finished batches.")
    print_what_if(report)


def print_what_if(report: AuditReport) -> None:
    """Print what each perturbation changes before and after another router was put in, the answer, and its price."""
    from holdfast.auditing.findings import answer
    from holdfast.report.audit_page import what_if_tables
    from holdfast.report.first_screen import answer_words, price

    tables, found = what_if_tables(report), answer(report)
    if report.what_if is None or tables is None or found is None:
        return
    show(tables[0].without("tokens that flip", "change of the loss"))
    print(*answer_words(found), sep="\n")
    tiles = (f"{tile.name} {tile.value}{f' ({tile.note})' if tile.note else ''}" for tile in price(report.what_if.cost))
    print(f"Price: {'; '.join(tiles)}.")


def print_differences(before: AuditReport, after: AuditReport) -> None:
    """Print the overall numbers in which two audits differ."""
    from holdfast.auditing import differences
    from holdfast.report.page_shell import number
    from holdfast.report.tables import Table

    if before.data.checksum != after.data.checksum:
        print("The two audits used different data: differences may come from the data, not from the model.")
    rows = [[name, number(one), number(two)] for name, one, two in differences(before, after)]
    if rows:
        show(Table(f"{before.model.name} and {after.model.name}", ["number", "first", "second"], rows))
    else:
        print("The overall numbers are the same.")


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print the worst finding of each kind, below the headings of what findings are about."""
    from holdfast.report.audit_page import by_consequence

    for heading, some in by_consequence(findings):
        print(f"  {heading}:")
        alike = Counter((finding.kind, finding.severity) for finding in some)
        worst = {(finding.kind, finding.severity): finding for finding in reversed(some)}  # the first of each kind
        shown = [finding for finding in some if finding is worst[finding.kind, finding.severity]][:SHOWN_FINDINGS]
        for finding in shown:
            more = alike[finding.kind, finding.severity] - 1
            others = f" {more} more {'layer' if more == 1 else 'layers'} with the same finding." if more else ""
            print(f"  - {finding.severity}: {finding}.{others}")
        if len(alike) > len(shown):
            print(f"    and {len(alike) - len(shown)} more kinds.")


@dataclass(frozen=True)
class Audit(MeasuredData):
    """Measure how much of a model depends on near-ties: metrics of its routing, and what changes under each perturbation.

    Examples: `holdfast audit comparison/cells/smoe-seed0`, `holdfast audit path/to/olmoe --out audits/olmoe`,
    `holdfast audit path/to/olmoe --triggers 3`, `holdfast audit path/to/olmoe --what-if smooth`,
    `holdfast audit path/to/olmoe --fail-if "undecided.bf16>0.05"`,
    `holdfast audit --compare before/audit.json after/audit.json`
    """

    model: Positional[str | None] = None
    """A folder that `holdfast train` or `compare` wrote, or any Hugging Face folder or name."""
    perturb: str | None = None
    """Perturbations, joined by commas: none, noise, routing, model, batch, backend, words, typos, attack; by default all of
    these. lost-expert takes the most used expert out of each layer. An attack on texts of a plugin may be named too."""
    noise: tuple[float, ...] = (0.01, 0.05)
    """Levels of noise, as shares of each router input's norm."""
    triggers: int = 0
    """Search in each layer for so many tokens that, put before any text, send its tokens to one expert."""
    what_if: str | None = None
    """Repeat the audit with this router, without training; layers may follow it: ac@1,3. The saved model is not changed."""
    out: Path | None = None
    """Write audit.json and audit.html to this folder."""
    fail_if: tuple[str, ...] = ()
    """Conditions on the overall numbers; the exit code is 1 if one of them is true."""
    compare: Annotated[tuple[Path, Path] | None, arg(metavar="PATH PATH")] = None
    """Two files audit.json, or their folders: print the overall numbers that differ, and audit nothing."""

    def run(self) -> None:
        from holdfast.routing.presets import resolve_layers

        if self.what_if is not None:
            resolve_layers(self.what_if, native=True)  # a mistake in it is reported before the other imports
        from holdfast.auditing import PERTURBATIONS, AuditReport, audit_settings, parse_condition
        from holdfast.report import write_audit

        if self.compare is not None:
            if self.model is not None:
                raise ValueError("--compare reads two finished audits; it takes no model.")
            print_differences(*map(AuditReport.load, self.compare))
            return
        if self.model is None:
            raise ValueError("state which model to audit: a folder or a name on the Hugging Face hub.")
        names = PERTURBATIONS if self.perturb is None else (name.strip() for name in self.perturb.split(","))
        given = {name: getattr(self, name) for name in ("seed", "batch", "length", "tokens", "triggers")}
        settings = audit_settings(names, self.noise, **given)
        conditions = [parse_condition(written) for written in self.fail_if]
        for condition in conditions:
            condition.check(settings)
        files = free_files(self.out, "audit.json", "audit.html", force=self.force)
        report = self._audit(self.model, settings)
        print_report(report)
        write_report_files(report, files, write_audit)
        met = [(condition, value) for condition in conditions for holds, value in [condition.holds(report)] if holds]
        if met:
            reasons = (f"condition {condition} is true: the value is {value:.4g}" for condition, value in met)
            raise ConditionHolds("; ".join(reasons))

    def _audit(self, name: str, settings: Settings) -> AuditReport:
        from holdfast.auditing import audit, what_if
        from holdfast.hub.convert import routers_in_parts
        from holdfast.hub.layers import moe_layers
        from holdfast.routing.presets import resolve_layers

        model, material = self.read_model(name)
        if self.what_if is not None:  # a layer that the model does not have must not cost an audit
            routers_in_parts(resolve_layers(self.what_if, native=True), moe_layers(model))
        given: dict[str, Any] = {**vars(settings), "tokenizer": material.tokenizer, "name": name}
        report = audit(model, material, **given)
        report = replace(report, data=replace(report.data, source=material.source))
        if self.what_if is None or report.status == "interrupted":
            return report
        return replace(report, what_if=what_if(model, material, self.what_if, before=report, **given))

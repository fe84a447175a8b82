"""`holdfast audit`: measure how much of a saved model depends on near-ties, and print the result as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from holdfast.cli.common import Loading, PluginFiles, bar, plain_text, require_free, show, slim_table

if TYPE_CHECKING:
    from rich.table import Table

    from holdfast.auditing import AuditReport


SHOWN_FINDINGS, SHOWN_TOKENS = 10, 5


def print_report(report: AuditReport) -> None:
    """Print the tables, the skipped perturbations, the tokens most at risk and the findings of an audit."""
    show(_layers(report))
    show(_perturbations(report))
    _print_skipped(report)
    _print_tokens(report)
    _print_findings(report)
    if report.status == "interrupted":
        print(f"Interrupted: these are the results of the {report.data['batches']} finished batches.")


def print_what_if(found: dict[str, Any]) -> None:
    """Print what each perturbation changes before and after another router was put in, and what that router costs."""
    from holdfast.report.page_shell import short_share

    columns = ("flip_output", "output", "prediction_flips")
    headings = ("output change\nby flips", "total output\nchange", "predictions\nthat change")
    shown = slim_table(
        "",
        "before -> after",
        *headings,
        caption="before: the model's own router. Output changes: of layers, relative to the output's norm. The part that "
        "flips cause can fall while the total or the changed predictions rise: compare all columns.",
    )
    shown.title = plain_text(f"What if: {found['router']} instead, without training")  # options are in brackets
    for name in found["flip_output"]:
        shown.add_row(plain_text(name), *(_before_and_after(found[key][name], short_share) for key in columns))
    show(shown)
    for name, pair in found["cost"].items():
        if pair["before"] is not None or pair["after"] is not None:  # without labels there is no loss
            print(f"Cost: {name.replace('_', ' ')} {_before_and_after(pair, _cost)}")


def _before_and_after(pair: dict[str, float | None], written: Callable[[float | None], str]) -> str:
    return f"{written(pair['before'])} -> {written(pair['after'])}"


def print_differences(before: AuditReport, after: AuditReport) -> None:
    """Print the overall numbers in which two audits differ."""
    from holdfast.auditing import differences

    found = differences(before, after)
    if before.data.get("checksum") != after.data.get("checksum"):
        print("The two audits used different data: differences may come from the data, not from the model.")
    names = " and ".join(str(report.model.get("name") or "a model") for report in (before, after))
    shown = slim_table("", "number", "first", "second")
    shown.title = plain_text(names)
    for name, one, two in found:
        shown.add_row(plain_text(name), _number(one), _number(two))
    if found:
        show(shown)
    else:
        print("The overall numbers are the same.")


def _layers(report: AuditReport) -> Table:
    title = (
        f"{report.model['name']}: {report.overall['tokens']} tokens, {report.overall['experts_per_token']:.2f} experts each"
    )
    limited = any("dropped" in layer for layer in report.layers)
    columns = ["layer", "entropy", "load unevenness", "dead", "near-ties", "undecided", "radius", "< 0.001"]
    columns += ["dropped"] if limited else []
    shown = slim_table(
        title,
        *columns,
        caption="entropy: share of log E. load unevenness: CV. dead: dead experts. near-ties: within 0.01. undecided: in "
        "bf16. radius: median, relative to a token's norm. < 0.001: share of tokens with a smaller radius."
        + (" dropped: share of the experts that tokens lose to a limit." if limited else ""),
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
            *([_share(layer["dropped"]["share"] if "dropped" in layer else None)] if limited else []),
        )
    return shown


def _perturbations(report: AuditReport) -> Table:
    columns = ("", "flips", "first expert", "weights", "output", "by flips", "predictions", "loss")
    caption = (
        "flips, first expert, predictions: share of tokens that change. weights: L1 change of gate weights. output: change "
        "of layers' outputs. by flips: the part of it that flips cause. loss: change."
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
        # As Python writes strings, and not as markup: a text may contain anything.
        cells = (repr(entry["text"]), repr(entry["context"]), entry["layer"], _number(entry["relative"]))
        shown.add_row(*(plain_text(cell) for cell in (*cells, entry["leaves"], entry["enters"])))
    show(shown)


def _print_findings(report: AuditReport) -> None:
    from holdfast.auditing import diagnose

    found = diagnose(report)
    print("Findings, the most harmful first:" if found else "No findings.")
    alike = Counter((finding.kind, finding.severity) for finding in found)
    worst = {(finding.kind, finding.severity): finding for finding in reversed(found)}  # the first of each kind
    shown = [finding for finding in found if finding is worst[finding.kind, finding.severity]][:SHOWN_FINDINGS]
    for number, finding in enumerate(shown, 1):
        more = alike[finding.kind, finding.severity] - 1
        others = f" {more} more {'layer' if more == 1 else 'layers'} with the same finding." if more else ""
        print(f"{number:3}. {finding.severity}: {finding}.{others}")
    if len(alike) > len(shown):
        print(f"     and {len(alike) - len(shown)} more kinds.")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _signed(value: float | None) -> str:
    return "NaN" if value is None else f"{value:+.2g}"  # a perturbed model's numbers may be NaN or infinite


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _cost(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.4g}"


NAME = "audit.json"


class ConditionHolds(Exception):
    """A condition of --fail-if is true: not a user's mistake, so it has an exit code of its own."""


@dataclass(frozen=True)
class Audit:
    """Measure how much of a model depends on near-ties: metrics of its routing, and what changes under each perturbation.

    Examples: `holdfast audit comparison/cells/smoe-seed0`, `holdfast audit path/to/olmoe --out audits/olmoe`,
    `holdfast audit path/to/olmoe --what-if smooth`, `holdfast audit path/to/olmoe --fail-if "undecided.bf16>0.05"`,
    `holdfast audit --compare before/audit.json after/audit.json`
    """

    model: Positional[str | None] = None
    """A folder that `holdfast train` or `compare` wrote, or any Hugging Face folder or name."""
    source: str | None = None
    """Use this text or image set instead of the one the model was trained on: a name or a path."""
    data: Path | None = None
    """The folder with named sources; without it they are downloaded."""
    class_index: Path | None = None
    """For folders of images that are named by WordNet id, if the model's classes have names: ImageNet's folder of class
    folders, LOC_synset_mapping.txt or imagenet_class_index.json."""
    tokens: int = 4096
    """How many tokens of the text to read, rounded to whole batches."""
    length: int = 128
    """Tokens per sequence."""
    batch: int = 8
    """Sequences per batch."""
    perturb: str | None = None
    """Perturbations, joined by commas: none, noise, routing, model, batch, backend, words, typos, attack; by default all of
    these. An attack on texts of a plugin may be named too."""
    noise: tuple[float, ...] = (0.01, 0.05)
    """Levels of noise, as shares of each router input's norm."""
    seed: int = 0
    """Seed of all random numbers."""
    what_if: str | None = None
    """Repeat the audit with this router, without training; layers may follow it: ac@1,3. The saved model is not changed."""
    out: Path | None = None
    """Write audit.json and audit.html to this folder."""
    force: bool = False
    """Overwrite these files if they exist."""
    fail_if: tuple[str, ...] = ()
    """Conditions on the overall numbers; the exit code is 1 if one of them is true."""
    compare: tuple[Path, Path] | None = None
    """Two files audit.json, or their folders: print the overall numbers that differ, and audit nothing."""
    loading: Annotated[Loading, arg(name="")] = field(default_factory=Loading)
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.auditing import AuditReport, Settings, parse_condition
        from holdfast.report import stored_audit, write_audit

        self.plugins.load()
        if self.compare is not None:
            if self.model is not None:
                raise ValueError("--compare reads two finished audits; it takes no model.")
            stored = [path / NAME if path.is_dir() else path for path in self.compare]
            for path in stored:
                stored_audit.Audit.read(path)  # checks the whole file, not only the overall numbers
            print_differences(*map(AuditReport.load, stored))
            return
        conditions = [parse_condition(written) for written in self.fail_if]
        for condition in conditions:
            condition.check(Settings(self._perturbations(), self.noise))
        target = None if self.out is None else self.out / NAME
        page = None if target is None else target.with_suffix(".html")
        for file in (target, page):
            require_free(file, self.force)
        report = self._audit()
        print_report(report)
        if report.what_if is not None:
            print_what_if(report.what_if)
        if target is not None and page is not None:
            print(f"All numbers: {report.save(target)}")
            print(f"Report: {write_audit(target, page, force=True)}")
        if report.status == "interrupted":
            raise KeyboardInterrupt
        met = [(condition, value) for condition in conditions for holds, value in [condition.holds(report)] if holds]
        if met:
            reasons = (f"condition {condition} is true: the value is {value:.4g}" for condition, value in met)
            raise ConditionHolds("; ".join(reasons))

    def _perturbations(self) -> tuple[str, ...]:
        from holdfast.auditing import PERTURBATIONS

        return tuple(PERTURBATIONS) if self.perturb is None else tuple(name.strip() for name in self.perturb.split(","))

    def _audit(self) -> AuditReport:
        from holdfast.auditing import audit, what_if
        from holdfast.hub.layers import moe_layers
        from holdfast.hub.tracing import require_positions
        from holdfast.routing.layer_names import resolve_layers, routers_by_layer
        from holdfast.train.saved_model import AuditData, load_model_and_task
        from holdfast.train.training import quiet

        if self.model is None:
            raise ValueError("state which model to audit: a folder or a name on the Hugging Face hub.")
        quiet()
        where: dict[str, Any] = {"source": self.source, "data": self.data, "class_index": self.class_index}
        model, task = load_model_and_task(self.model, **where, loading=self.loading.options())
        if self.what_if is not None:  # a mistake in the name must not cost an audit
            routers_by_layer(resolve_layers(self.what_if, native=True), len(moe_layers(model)))
        material = AuditData(task, self.tokens)
        if material.tokenizer is not None:
            require_positions(model, self.length)
        settings: dict[str, Any] = {
            "tokenizer": material.tokenizer,
            "perturb": self._perturbations(),
            "noise": self.noise,
            "name": self.model,
            "seed": self.seed,
            "batch": self.batch,
            "length": self.length,
            "tokens": self.tokens,
        }
        total = self.tokens if material.tokenizer is not None else None
        with bar(total, leave=False) as tell:
            report = audit(model, material, progress=lambda done, what: tell(done, f"{self.model}: {what}"), **settings)
        report = replace(report, data={**report.data, "source": material.source})
        if self.what_if is None or report.status == "interrupted":
            return report
        with bar(total, leave=False) as tell:
            settings["progress"] = lambda done, what: tell(done, f"{self.model} with {self.what_if}: {what}")
            found = what_if(model, material, self.what_if, before=report, **settings).summary()
        return replace(report, what_if=found)

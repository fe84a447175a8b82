"""`holdfast audit`: the routing health of a model that is there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from holdfast.cli.audit_tables import print_differences, print_report, print_what_if
from holdfast.cli.files import check_files, require_free
from holdfast.cli.loading import Loading
from holdfast.cli.plugins import PluginFiles
from holdfast.cli.terminal import bar

if TYPE_CHECKING:
    from holdfast.auditing import AuditReport

NAME = "audit.json"


class ConditionHolds(Exception):
    """A condition of --fail-if: no mistake of the user's, but an exit code of its own."""


@dataclass(frozen=True)
class Audit:
    """See how much of a model hangs on near-ties: its routers as they are, and what changes under each perturbation.

    Examples: `holdfast audit comparison/cells/smoe-seed0`, `holdfast audit path/to/olmoe --out audits/olmoe`,
    `holdfast audit path/to/olmoe --what-if smooth`, `holdfast audit path/to/olmoe --fail-if "undecided.bf16>0.05"`,
    `holdfast audit --compare before/audit.json after/audit.json`
    """

    model: Positional[str | None] = None
    """What `holdfast train` or `compare` left, or any Hugging Face folder or name."""
    source: str | None = None
    """Another text or set of pictures than the model was trained on: a name or a path."""
    data: Path | None = None
    """Where named sources lie, if they are not to be fetched."""
    tokens: int = 4096
    """About how much of a text is read: it ends with a whole batch."""
    length: int = 128
    """Tokens of a sequence."""
    batch: int = 8
    """Sequences of a batch."""
    perturb: str | None = None
    """Names joined by commas, of none, noise, routing, model, batch, backend, words, typos, attack; by default all."""
    noise: tuple[float, ...] = (0.01, 0.05)
    """Levels of noise, as shares of each router input's length."""
    seed: int = 0
    """Of everything random."""
    what_if: str | None = None
    """Another router: the same audit with it in place, without training. The saved model is not changed."""
    out: Path | None = None
    """A folder for audit.json and audit.html."""
    force: bool = False
    """Overwrite these files if they are there."""
    fail_if: tuple[str, ...] = ()
    """Conditions on the overall numbers; exit code 1 where one holds."""
    compare: tuple[Path, Path] | None = None
    """Two files audit.json, or their folders: show in which overall numbers they differ, audit nothing."""
    loading: Annotated[Loading, arg(name="")] = field(default_factory=Loading)
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.auditing import AuditReport, Settings, parse
        from holdfast.report import write_audit
        from holdfast.report.audits import read_audit

        self.plugins.load()
        if self.compare is not None:
            if self.model is not None:
                raise ValueError("--compare reads two audits that are there; it takes no model.")
            stored = [path / NAME if path.is_dir() else path for path in self.compare]
            for path in stored:
                read_audit(path)  # checks more than the overall numbers: all that the page of an audit needs
            print_differences(*map(AuditReport.load, stored))
            return
        conditions = [parse(written) for written in self.fail_if]
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
            check_files()
            print(f"All figures: {report.save(target)}")
            print(f"Report: {write_audit(target, page, force=True)}")
        if report.status == "interrupted":
            raise KeyboardInterrupt
        met = [(condition, value) for condition in conditions for holds, value in [condition.holds(report)] if holds]
        if met:
            raise ConditionHolds("; ".join(f"{condition} holds: it is {value:.4g}" for condition, value in met))

    def _perturbations(self) -> tuple[str, ...]:
        from holdfast.auditing import PERTURBATIONS

        return tuple(PERTURBATIONS) if self.perturb is None else tuple(name.strip() for name in self.perturb.split(","))

    def _audit(self) -> AuditReport:
        from holdfast.auditing import audit, what_if
        from holdfast.auditing.tasks import Material
        from holdfast.hub.usable import require_room
        from holdfast.train.quiet import quiet
        from holdfast.train.subject import subject

        if self.model is None:
            raise ValueError("say which model to audit: a folder or a name on the hub.")
        quiet()
        model, task = subject(self.model, source=self.source, data=self.data, loading=self.loading.options())
        material = Material(task, self.tokens)
        if material.tokenizer is not None:
            require_room(model, self.length)
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

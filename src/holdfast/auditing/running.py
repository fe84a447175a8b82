"""`audit`: a model, perturbed in every way that applies, batch by batch."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, final

from holdfast.auditing.baseline import Baseline
from holdfast.auditing.comparing import Tally
from holdfast.auditing.observing import observe
from holdfast.auditing.offloading import resident
from holdfast.auditing.overall import overall
from holdfast.auditing.perturbation import Perturbation
from holdfast.auditing.report import AuditReport
from holdfast.auditing.samples import Checksum, Reader, Sample, samples
from holdfast.auditing.subject import Audited, evaluating
from holdfast.auditing.table import PERTURBATIONS, Settings, perturbations
from holdfast.hub.usable import require_finite
from holdfast.metrics.report import plain
from holdfast.suggest import unknown
from holdfast.version import versions

Progress = Callable[[int, str], None]  # (tokens seen so far, what is being done)


def audit(
    model: Any,
    texts_or_inputs: Iterable[Any],
    *,
    tokenizer: Any = None,
    perturb: Sequence[str] = tuple(PERTURBATIONS),
    noise: Sequence[float] = (0.01, 0.05),
    name: str | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> AuditReport:
    """How much of a model hangs on near-ties: its routing as it is, and what changes under each perturbation.

    model            of any MoE family, rerouted or not, or sparsified; it is left exactly as it was
    texts_or_inputs  strings, with the model's `tokenizer`; or batches, dicts for its forward. Read once, one batch at a time
    perturb          names of `holdfast.auditing.PERTURBATIONS`; what cannot be run says why in the report
    noise            levels, as shares of each router input's length
    name             of the model, in the report
    progress         called with the tokens seen so far and what is being done
    settings         seed, batch, length, tokens, rate, budget, attack_tokens, at_risk: those of `Settings`

    Interrupted (Ctrl-C), it reports on the batches that were finished, and says so.

    Example:
        report = holdfast.audit(model, ["The quick brown fox jumps over the lazy dog."], tokenizer=tokenizer)
        print(report.overall["flips"])
    """
    chosen = (perturb,) if isinstance(perturb, str) else tuple(perturb)
    audited = Audited(model)
    require_finite(model)
    how = _settings(perturb=chosen, noise=tuple(noise), **settings)
    reader = None if tokenizer is None else Reader(tokenizer, audited.pad)
    run = _Run(audited, how, reader, progress)
    started = time.monotonic()
    with evaluating(model), resident(audited.scorers()):
        found = samples(texts_or_inputs, audited, reader, batch=how.batch, length=how.length, tokens=how.tokens)
        interrupted = run.consume(found)
    return run.report(name, interrupted, time.monotonic() - started)


def _settings(**given: Any) -> Settings:
    known = [entry.name for entry in fields(Settings)]
    for name in given:
        if name not in known:
            raise ValueError(unknown("setting of an audit", name, known))
    return Settings(**given)


@final
class _Run:
    """What has been seen so far. A batch enters whole, when all is done with it, or not at all."""

    def __init__(self, audited: Audited, settings: Settings, reader: Reader | None, progress: Progress | None) -> None:
        self.audited, self.settings, self.reader, self.progress = audited, settings, reader, progress
        self.perturbations = perturbations(settings, audited, reader)
        self.baseline = Baseline(audited, settings.at_risk)
        self.tallies = {one.name: Tally(audited) for one in self.perturbations}
        self.skipped: dict[str, str] = {}
        self.checksum = Checksum()
        self.batches = self.sequences = self.tokens = 0
        self.kind = "inputs"

    def consume(self, found: Iterator[Sample]) -> bool:
        """All samples; True where the user interrupted. Before the first batch is done there is nothing to report."""
        try:
            for sample in found:
                self._take(sample)
        except KeyboardInterrupt:
            if not self.batches:
                raise
            return True
        return False

    def _take(self, sample: Sample) -> None:
        self._tell("the model as it is")
        clean = observe(self.audited, sample)
        clean.require_finite()
        baseline = Baseline(self.audited, self.settings.at_risk)
        baseline.update(clean, sample, self.reader)
        tallies: dict[str, Tally] = {}
        skipped: dict[str, str] = {}
        for one in self.perturbations:
            if one.name in self.skipped:
                continue
            reason = one.unavailable(self.audited, sample)
            if reason is None:
                self._tell(one.about)
                tallies[one.name] = Tally(self.audited)
                reason = self._run(one, sample, clean, tallies[one.name])
            if reason is not None:
                skipped[one.name] = reason
        self.baseline.merge(baseline)
        for name, tally in tallies.items():
            self.tallies[name].merge(tally)
        self._skip(skipped)
        self.checksum.add(sample)
        self.batches, self.sequences = self.batches + 1, self.sequences + sample.size
        self.tokens += sample.tokens
        self.kind = "inputs" if sample.texts is None else "texts"

    def _run(self, one: Perturbation, sample: Sample, clean: Any, into: Tally) -> str | None:
        """None, or why it cannot be run: a backend may not exist on this device, a dtype not be known to a kernel."""
        try:
            one.run(self.audited, sample, clean, into)
        except (ValueError, RuntimeError, NotImplementedError, TypeError, AttributeError) as problem:
            lines = str(problem).strip().splitlines()
            return f"it failed: {lines[0] if lines else type(problem).__name__}"
        return None

    def _skip(self, reasons: dict[str, str]) -> None:
        """A later batch that a perturbation does not apply to (the last may be one sequence) leaves what it found before."""
        for name, reason in reasons.items():
            if reason.startswith("it failed") or not self.tallies[name].tokens:
                self.skipped[name] = reason

    def _tell(self, what: str) -> None:
        if self.progress is not None:
            self.progress(self.tokens, what)

    def report(self, name: str | None, interrupted: bool, seconds: float) -> AuditReport:
        baseline = self.baseline.result()
        perturbed = {one.name: self._perturbed(one) for one in self.perturbations}
        data = {"kind": self.kind, "checksum": str(self.checksum), "batches": self.batches, "sequences": self.sequences}
        return AuditReport(
            status="interrupted" if interrupted else "complete",
            model=self.audited.describe(name),
            data={**data, "tokens": self.tokens},
            settings=self.settings.describe(),
            versions=versions(),
            seconds=round(seconds, 3),
            overall=plain(overall(baseline, perturbed)),
            layers=plain(baseline["layers"]),
            perturbations=plain(perturbed),
            at_risk=plain(self.baseline.at_risk),
            view=None if self.baseline.view is None else self.baseline.view.result(),
        )

    def _perturbed(self, one: Perturbation) -> dict[str, Any]:
        tally = self.tallies[one.name]
        about = {"about": one.about, "harmless": one.harmless}
        if one.name in self.skipped or not tally.tokens:
            return {**about, "skipped": self.skipped.get(one.name, "it left no token to compare.")}
        return {**about, "skipped": None, **tally.result()}

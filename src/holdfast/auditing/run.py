"""The perturbations by name, and what each name stands for.

`audit`: a model, perturbed in every way that applies, batch by batch.

What another router would change, without training: the same audit before and after.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, final

from holdfast.attacks.threat import check_budget, check_rate, check_seed
from holdfast.auditing.baseline import Baseline
from holdfast.auditing.differences import Tally
from holdfast.auditing.layer_certificates import DTYPES
from holdfast.auditing.observation import observe
from holdfast.auditing.perturbations import (
    Again,
    Alone,
    Attack,
    Backend,
    ModelDtype,
    Noise,
    Padded,
    Perturbation,
    RoutingDtype,
    Words,
)
from holdfast.auditing.report import AuditReport, overall
from holdfast.auditing.subject import Audited, Checksum, Reader, Sample, check_size, evaluating, resident, samples
from holdfast.errors import unknown
from holdfast.hub import reroute, restore
from holdfast.hub.replacements import ReroutedGate
from holdfast.hub.tracing import require_finite
from holdfast.metrics.report import plain
from holdfast.version import versions

PERTURBATIONS = {
    "none": "the same forward twice: nothing may change",
    "noise": "noise at every router's input, at each of the levels",
    "routing": "router inputs and weights rounded to bf16 and to fp16",
    "model": "the whole model in bf16, or in fp32 where it is short already",
    "batch": "each sequence alone; padding on the left; on the right",
    "backend": "the experts by another of transformers' functions",
    "words": "words swapped; compares the tokens left alone",
    "typos": "words misspelt; compares the tokens left alone",
    "attack": "router inputs of a few tokens moved so that they change experts, at worst",
}
MOST_LEVELS = 8  # of noise: each is a forward of everything


@final
@dataclass(frozen=True)
class Settings:
    """Everything that decides what an audit does, beside the model and its inputs."""

    perturb: tuple[str, ...]
    noise: tuple[float, ...]
    seed: int = 0
    batch: int = 8  # sequences, of texts
    length: int = 128  # tokens of a sequence, of texts
    tokens: int | None = None  # stop after so many
    rate: float = 0.1  # of words swapped or misspelt
    budget: float = 0.01  # of the routing attack, as a share of a token's length
    attack_tokens: int = 64
    at_risk: int = 20

    def __post_init__(self) -> None:
        for name in self.perturb:
            if name not in PERTURBATIONS:
                raise ValueError(unknown("perturbation", name, PERTURBATIONS))
        if len(self.noise) > MOST_LEVELS:
            raise ValueError(f"there are {len(self.noise)} noise levels; {MOST_LEVELS} at most, each runs the whole data.")
        for level in self.noise:
            if not isinstance(level, int | float) or not 0 < level <= 1:
                raise ValueError(f"a noise level is {level!r}; expected a share of each token's length, above 0, at most 1.")
        check_size("attack_tokens", self.attack_tokens)
        check_size("at_risk", self.at_risk)
        check_seed(self.seed)
        check_rate(self.rate)
        check_budget(self.budget)

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "perturb": list(self.perturb), "noise": list(self.noise)}


def names_of(settings: Settings) -> list[str]:
    """What is run is called so in the report; of a model's two other dtypes, both, because no model is there yet."""
    several = {
        "noise": [f"noise.{level:g}" for level in settings.noise],
        "routing": [f"routing.{dtype}" for dtype in DTYPES],
        "model": ["model.bf16", "model.fp32"],
        "batch": ["batch.alone", "batch.left", "batch.right"],
    }
    return [name for one in PERTURBATIONS if one in settings.perturb for name in several.get(one, [one])]


def perturbations(settings: Settings, audited: Audited, reader: Reader | None) -> list[Perturbation]:
    """In the order of the table, whatever the order of the names."""
    makers: dict[str, Sequence[Perturbation]] = {
        "none": [Again()],
        "noise": [Noise(level, settings.seed) for level in dict.fromkeys(settings.noise)],
        "routing": [RoutingDtype(name) for name in DTYPES],
        "model": [ModelDtype(audited)],
        "batch": [Alone(), Padded("left"), Padded("right")],
        "backend": [Backend(audited)],
        "words": [Words("words", reader, settings.rate, settings.seed, settings.length)],
        "typos": [Words("typos", reader, settings.rate, settings.seed, settings.length)],
        "attack": [Attack(settings.budget, settings.attack_tokens, settings.seed)],
    }
    return [one for name, made in makers.items() if name in settings.perturb for one in made]


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


@final
@dataclass(frozen=True)
class WhatIf:
    """Two audits of one model on the same data: as it is, and with another router."""

    router: str
    before: AuditReport
    after: AuditReport

    def summary(self) -> dict[str, Any]:
        """What it costs, and what it does to flips and to the change of output that they cause."""
        one, two = self.before.overall, self.after.overall
        names = [name for name in one["flips"] if name in two["flips"]]
        return {
            "router": self.router,
            "cost": {name: _pair(one[name], two[name]) for name in ("loss", "perplexity", "experts_per_token")},
            "flips": {name: _pair(one["flips"][name], two["flips"][name]) for name in names},
            "flip_output": {name: _pair(one["output"][name]["flip"], two["output"][name]["flip"]) for name in names},
            "output": {name: _pair(one["output"][name]["total"], two["output"][name]["total"]) for name in names},
            "prediction_flips": {
                name: _pair(one["prediction_flips"][name], two["prediction_flips"][name]) for name in names
            },
            "overall": two,
        }


def what_if(
    model: Any,
    texts_or_inputs: Iterable[Any],
    router: str = "smooth",
    *,
    before: AuditReport | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> WhatIf:
    """Audit the model as it is, reroute it, audit it again, and restore it, also where something fails.

    before    the first audit, where it has been made already with the same inputs and settings
    options   of the router
    settings  those of `audit`
    """
    audited = Audited(model)
    if any(site.family is not None and isinstance(site.gate, ReroutedGate) for site in audited.sites) or any(
        site.family is None and site.block.__dict__.get("former") is not None for site in audited.sites
    ):
        raise ValueError("this model was rerouted already, and could not be put back as it is; restore it first.")
    inputs = list(texts_or_inputs) if isinstance(texts_or_inputs, Iterator) else texts_or_inputs  # read twice
    before = audit(model, inputs, **settings) if before is None else before
    with resident(audited.scorers()):  # a new router may take the weights of the old one
        reroute(model, router, **(options or {}))
        try:
            after = audit(model, inputs, **settings)
        finally:
            restore(model)
    if before.data["checksum"] != after.data["checksum"]:
        raise ValueError("the two audits saw different data: the first one was interrupted, or is of other inputs.")
    return WhatIf(router, before, after)


def _pair(before: Any, after: Any) -> dict[str, Any]:
    return {"before": before, "after": after}

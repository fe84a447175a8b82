"""`audit`: run a model under every perturbation that applies, batch by batch. `what_if`: audit it with another router too.

`what_if` needs no training: it audits the model, reroutes it, audits it again and restores it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, final

from holdfast.attacks import ATTACKS
from holdfast.attacks.threat import check_budget, check_rate, check_seed
from holdfast.auditing.baseline import Baseline
from holdfast.auditing.batches import audit_batches
from holdfast.auditing.forwards import ForwardComparison, observe
from holdfast.auditing.layer_certificates import DTYPES
from holdfast.auditing.model_and_data import (
    AuditBatch,
    AuditedModel,
    Checksum,
    TextEncoder,
    check_size,
    evaluation_mode,
    resident,
)
from holdfast.auditing.perturbations import (
    Attack,
    Backend,
    ExtraPadding,
    ModelDtype,
    Noise,
    Perturbation,
    Repeat,
    RoutingDtype,
    SingleSequence,
    WordChanges,
)
from holdfast.auditing.report import AuditReport, overall
from holdfast.errors import unknown_name
from holdfast.hub import reroute, restore
from holdfast.hub.layers import MoELayerRef
from holdfast.hub.replacements import ReroutedGate
from holdfast.hub.tracing import require_finite
from holdfast.routing.layer_names import resolve_layers, routers_by_layer
from holdfast.stored import without_nan
from holdfast.version import versions

PERTURBATIONS = {
    "none": "the same forward twice: nothing may change",
    "noise": "noise at every router's input, at each of the levels",
    "routing": "router inputs and weights rounded to bf16 and to fp16",
    "model": "the whole model in bf16, or in fp32 if it has a shorter dtype",
    "batch": "each sequence alone; padding on the left; on the right",
    "backend": "the experts computed by another function of transformers",
    "words": "words swapped; compares the untouched tokens",
    "typos": "words misspelt; compares the untouched tokens",
    "attack": "router inputs of a few tokens perturbed so that as many as possible flip",
}
MOST_LEVELS = 8  # of noise: each is a forward of all data


@final
@dataclass(frozen=True)
class Settings:
    """Everything that determines an audit, apart from the model and its inputs."""

    perturb: tuple[str, ...]
    noise: tuple[float, ...]
    seed: int = 0
    batch: int = 8  # sequences per batch, for texts
    length: int = 128  # tokens per sequence, for texts
    tokens: int | None = None  # stop after this number of tokens, rounded up to whole batches
    rate: float = 0.1  # share of words swapped or misspelt
    budget: float = 0.01  # of the routing attack, as a share of a token's length
    attack_tokens: int = 64
    at_risk: int = 20

    def __post_init__(self) -> None:
        for name in self.perturb:
            if name not in PERTURBATIONS and name not in text_attacks():
                raise ValueError(unknown_name("perturbation", name, [*PERTURBATIONS, *text_attacks()]))
        if len(self.noise) > MOST_LEVELS:
            raise ValueError(
                f"there are {len(self.noise)} noise levels; give at most {MOST_LEVELS}, because each runs all data."
            )
        for level in self.noise:
            if not isinstance(level, int | float) or not 0 < level <= 1:
                raise ValueError(
                    f"a noise level is {level!r}; expected a share of each token's length, above 0 and at most 1."
                )
        check_size("attack_tokens", self.attack_tokens)
        check_size("at_risk", self.at_risk)
        check_seed(self.seed)
        check_rate(self.rate)
        check_budget(self.budget)

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "perturb": list(self.perturb), "noise": list(self.noise)}


def perturbation_names(settings: Settings) -> list[str]:
    """Return the names of perturbations in the report; for "model" both dtypes, because the model is not known yet."""
    several = {
        "noise": [f"noise.{level:g}" for level in settings.noise],
        "routing": [f"routing.{dtype}" for dtype in DTYPES],
        "model": ["model.bf16", "model.fp32"],
        "batch": ["batch.alone", "batch.left", "batch.right"],
    }
    return [name for one in _in_order(settings) for name in several.get(one, [one])]


def text_attacks() -> list[str]:
    """Return the attacks on texts that an audit does not run by default: those of plugins, and `generic`."""
    return [attack.name for attack in ATTACKS if attack.task == "text" and attack.name not in PERTURBATIONS]


def _in_order(settings: Settings) -> list[str]:
    """Return the perturbations in the order of `PERTURBATIONS`, then the other attacks on texts as they were given."""
    own = [name for name in PERTURBATIONS if name in settings.perturb]
    return own + [name for name in dict.fromkeys(settings.perturb) if name not in PERTURBATIONS]


def perturbations(settings: Settings, audited: AuditedModel, encoder: TextEncoder | None) -> list[Perturbation]:
    """Return the perturbations to run, in the order of `PERTURBATIONS`."""
    by_name: dict[str, Sequence[Perturbation]] = {
        "none": [Repeat()],
        "noise": [Noise(level, settings.seed) for level in dict.fromkeys(settings.noise)],
        "routing": [RoutingDtype(name) for name in DTYPES],
        "model": [ModelDtype(audited)],
        "batch": [SingleSequence(), ExtraPadding("left"), ExtraPadding("right")],
        "backend": [Backend(audited)],
        "words": [WordChanges("words", encoder, settings.rate, settings.seed, settings.length)],
        "typos": [WordChanges("typos", encoder, settings.rate, settings.seed, settings.length)],
        "attack": [Attack(settings.budget, settings.attack_tokens, settings.seed)],
    }
    for name in text_attacks():
        by_name[name] = [WordChanges(name, encoder, settings.rate, settings.seed, settings.length)]
    return [one for name in _in_order(settings) for one in by_name[name]]


Progress = Callable[[int, str], None]  # (tokens done, what is being done)


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
    """Measure how much of a model depends on near-ties: its unperturbed routing, and what changes under each perturbation.

    model            of any MoE family, rerouted or not, or sparsified; it is not changed
    texts_or_inputs  strings, with the model's `tokenizer`; `holdfast.data.LabelledText` (text, label, pair), if it
                     classifies texts; or batches, dicts for its forward. Read once, one batch at a time
    perturb          names of `holdfast.auditing.PERTURBATIONS`; the report gives the reason for each that cannot be run
    noise            levels, as shares of each router input's length
    name             of the model in the report
    progress         called with the number of tokens done and a description of the current work
    settings         seed, batch, length, tokens, rate, budget, attack_tokens, at_risk: those of `Settings`

    After Ctrl-C it reports on the finished batches, with the status "interrupted".

    Example:
        report = holdfast.audit(model, ["The quick brown fox jumps over the lazy dog."], tokenizer=tokenizer)
        print(report.overall["flips"])
    """
    chosen = (perturb,) if isinstance(perturb, str) else tuple(perturb)
    audited = AuditedModel(model)
    require_finite(model)
    checked = _settings(perturb=chosen, noise=tuple(noise), **settings)
    encoder = None if tokenizer is None else TextEncoder(tokenizer, audited.pad)
    run = _Run(audited, checked, encoder, progress)
    started = time.monotonic()
    with evaluation_mode(model), resident(audited.scorers()):
        batches = audit_batches(
            texts_or_inputs, audited, encoder, batch=checked.batch, length=checked.length, tokens=checked.tokens
        )
        interrupted = run.consume(batches)
    return run.report(name, interrupted, time.monotonic() - started)


def _settings(**given: Any) -> Settings:
    known = [entry.name for entry in fields(Settings)]
    for name in given:
        if name not in known:
            raise ValueError(unknown_name("setting of an audit", name, known))
    return Settings(**given)


@final
class _Run:
    """The sums of an audit in progress. A batch is added when all perturbations have been run on it."""

    def __init__(
        self, audited: AuditedModel, settings: Settings, encoder: TextEncoder | None, progress: Progress | None
    ) -> None:
        self.audited, self.settings, self.encoder, self.progress = audited, settings, encoder, progress
        self.perturbations = perturbations(settings, audited, encoder)
        self.baseline = Baseline(audited, settings.at_risk)
        self.comparisons = {one.name: ForwardComparison(audited) for one in self.perturbations}
        self.skipped: dict[str, str] = {}
        self.checksum = Checksum()
        self.batches = self.sequences = self.tokens = 0
        self.kind = "inputs"

    def consume(self, batches: Iterator[AuditBatch]) -> bool:
        """Process all batches; return whether the user interrupted. Raise KeyboardInterrupt if no batch was finished."""
        try:
            for batch in batches:
                self._consume_batch(batch)
        except KeyboardInterrupt:
            if not self.batches:
                raise
            return True
        return False

    def _consume_batch(self, batch: AuditBatch) -> None:
        self._report_progress("the unperturbed model")
        clean = observe(self.audited, batch)
        clean.require_finite()
        baseline = Baseline(self.audited, self.settings.at_risk)
        baseline.update(clean, batch, self.encoder)
        comparisons: dict[str, ForwardComparison] = {}
        skipped: dict[str, str] = {}
        for one in self.perturbations:
            if one.name in self.skipped:
                continue
            reason = one.unavailable(self.audited, batch)
            if reason is None:
                self._report_progress(one.about)
                comparisons[one.name] = ForwardComparison(self.audited)
                reason = self._run_perturbation(one, batch, clean, comparisons[one.name])
            if reason is not None:
                skipped[one.name] = reason
        self.baseline.merge(baseline)
        for name, comparison in comparisons.items():
            self.comparisons[name].merge(comparison)
        self._skip(skipped)
        self.checksum.add(batch)
        self.batches, self.sequences = self.batches + 1, self.sequences + batch.size
        self.tokens += batch.tokens
        self.kind = "inputs" if batch.texts is None else "texts"

    def _run_perturbation(
        self, one: Perturbation, batch: AuditBatch, clean: Any, comparison: ForwardComparison
    ) -> str | None:
        """Return None, or why it failed: a device may not have the backend, or a kernel may not support the dtype."""
        try:
            one.run(self.audited, batch, clean, comparison)
        except (ValueError, RuntimeError, NotImplementedError, TypeError, AttributeError) as problem:
            lines = str(problem).strip().splitlines()
            return f"it failed: {lines[0] if lines else type(problem).__name__}"
        return None

    def _skip(self, reasons: dict[str, str]) -> None:
        """Store why perturbations were skipped. One that only does not apply to this batch keeps its earlier results."""
        for name, reason in reasons.items():
            if reason.startswith("it failed") or not self.comparisons[name].tokens:
                self.skipped[name] = reason

    def _report_progress(self, what: str) -> None:
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
            overall=without_nan(overall(baseline, perturbed)),
            layers=without_nan(baseline["layers"]),
            perturbations=without_nan(perturbed),
            at_risk=without_nan(self.baseline.at_risk),
            view=None if self.baseline.view is None else self.baseline.view.result(),
        )

    def _perturbed(self, one: Perturbation) -> dict[str, Any]:
        comparison = self.comparisons[one.name]
        about = {"about": one.about, "harmless": one.harmless}
        if one.name in self.skipped or not comparison.tokens:
            return {**about, "skipped": self.skipped.get(one.name, "it left no tokens to compare.")}
        return {**about, "skipped": None, **comparison.result()}


@final
@dataclass(frozen=True)
class WhatIf:
    """Two audits of one model on the same data: before and after it was rerouted."""

    router: str
    before: AuditReport
    after: AuditReport

    def summary(self) -> dict[str, Any]:
        """Return before and after: the cost, the flips, output changes by flips and in all, changed predictions."""
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
    """Audit the model, reroute it, audit it again, and restore it, also after an error.

    before    the first audit, if there is one with the same inputs and settings
    options   of the router
    settings  those of `audit`
    """
    audited = AuditedModel(model)
    require_not_rerouted(audited)
    routers_by_layer(resolve_layers(router, options, native=True), len(audited.moe_layers))  # a mistake ends it here
    inputs = list(texts_or_inputs) if isinstance(texts_or_inputs, Iterator) else texts_or_inputs  # read twice
    before = audit(model, inputs, **settings) if before is None else before
    with resident(audited.scorers()):  # a new router may take the weights of the old one
        reroute(model, router, **(options or {}))
        try:
            after = audit(model, inputs, **settings)
        finally:
            restore(model)
    if before.data["checksum"] != after.data["checksum"]:
        raise ValueError("the two audits used different data: the first was interrupted, or used other inputs.")
    return WhatIf(router, before, after)


def require_not_rerouted(audited: AuditedModel) -> None:
    """Raise ValueError if the model is rerouted: it could not be restored to its present state after a what-if."""
    if is_rerouted(audited.moe_layers):
        raise ValueError(
            "this model is already rerouted, and a what-if could not put its routers back; leave the what-if out, or call "
            "holdfast.restore(model) first."
        )


def is_rerouted(moe_layers: Sequence[MoELayerRef]) -> bool:
    """Return whether the routers of these layers have replaced others."""
    return any(
        isinstance(site.gate, ReroutedGate) if site.family is not None else site.block.__dict__.get("former") is not None
        for site in moe_layers
    )


def _pair(before: Any, after: Any) -> dict[str, Any]:
    return {"before": before, "after": after}

"""`audit`: run a model under every perturbation that applies, batch by batch. `what_if`: audit it with another router too.

`what_if` needs no training: it audits the model, reroutes it, audits it again and restores it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from holdfast.attacks import ATTACKS
from holdfast.auditing.baseline import Baseline, shown_tokens
from holdfast.auditing.forwards import ForwardComparison, observe
from holdfast.auditing.model_and_data import (
    AuditBatch,
    AuditedModel,
    Measurement,
    Progress,
    TextEncoder,
    evaluation_mode,
    resident,
)
from holdfast.auditing.perturbations import (
    Attack,
    Backend,
    ExtraPadding,
    LostExpert,
    ModelDtype,
    Noise,
    Perturbation,
    Repeat,
    RoutingDtype,
    SingleSequence,
    WordChanges,
)
from holdfast.auditing.reports import (
    DTYPES,
    AuditedLayer,
    AuditReport,
    Overall,
    Pair,
    Perturbed,
    Settings,
    SkippedPerturbation,
    Triggers,
    WhatIf,
    known_mean,
)
from holdfast.auditing.triggers import TEXTS, find_triggers, unsearchable
from holdfast.checked import from_mapping
from holdfast.errors import unknown_name
from holdfast.hub import reroute, restore
from holdfast.hub.convert import routers_in_parts
from holdfast.hub.layers import MoELayerRef
from holdfast.hub.replacements import ReroutedGate
from holdfast.metrics.token_routes import Routes, View
from holdfast.routing.presets import resolve_layers

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
ON_REQUEST = {"lost-expert": "the most used expert of each layer is lost; the next best take its tokens"}  # not small
MOST_LEVELS = 8  # of noise: each is a forward of all data


def audit_settings(perturb: Iterable[str], noise: Iterable[float], **given: Any) -> Settings:
    """Return the settings of an audit; raise ValueError for a wrong name or value."""
    settings: Settings = from_mapping(Settings, {"perturb": list(perturb), "noise": list(noise), **given})
    for name in settings.perturb:
        if name not in (known := [*PERTURBATIONS, *ON_REQUEST, *text_attacks()]):
            raise ValueError(unknown_name("perturbation", name, known))
    levels = len(settings.noise)
    if levels > MOST_LEVELS:
        raise ValueError(f"there are {levels} noise levels; give at most {MOST_LEVELS}, because each runs all data.")
    return settings


def perturbation_names(settings: Settings) -> list[str]:
    """Return the names of perturbations in the report; for "model" both dtypes, because the model is not known yet."""
    several = {
        "noise": [f"noise.{level:g}" for level in settings.noise],
        "routing": [f"routing.{dtype}" for dtype in DTYPES],
        "model": ["model.bf16", "model.fp32"],
        "batch": ["batch.alone", "batch.left", "batch.right"],
    }
    return [name for kind in _in_order(settings) for name in several.get(kind, [kind])]


def text_attacks() -> list[str]:
    """Return the attacks on texts that an audit does not run by default: those of plugins, and `generic`."""
    texts = (attack for attack in ATTACKS if attack.task == "text" and not attack.reads_model)
    return [attack.name for attack in texts if attack.name not in PERTURBATIONS]


def _in_order(settings: Settings) -> list[str]:
    """Return the perturbations in the order of `PERTURBATIONS`, then the others as they were given."""
    ours = [name for name in PERTURBATIONS if name in settings.perturb]
    return ours + [name for name in dict.fromkeys(settings.perturb) if name not in PERTURBATIONS]


def perturbations(settings: Settings, audited: AuditedModel, encoder: TextEncoder | None) -> list[Perturbation]:
    """Return the perturbations to run, in the order of `PERTURBATIONS`."""
    by_name: dict[str, Sequence[Perturbation]] = {
        "none": [Repeat()],
        "noise": [Noise(level, settings.seed) for level in dict.fromkeys(settings.noise)],
        "routing": [RoutingDtype(name) for name in DTYPES],
        "model": [ModelDtype(audited)],
        "batch": [SingleSequence(), ExtraPadding("left"), ExtraPadding("right")],
        "backend": [Backend(audited)],
        "attack": [Attack(settings.budget, settings.attack_tokens, settings.seed)],
        "lost-expert": [LostExpert()],
    }
    for name in ("words", "typos", *text_attacks()):
        by_name[name] = [WordChanges(name, encoder, settings.rate, settings.seed, settings.length)]
    return [perturbation for name in _in_order(settings) for perturbation in by_name[name]]


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
    perturb          names of `holdfast.auditing.PERTURBATIONS`, which run by default, or "lost-expert"; the report gives the
                     reason for each that cannot be run
    noise            levels, as shares of each router input's length
    name             of the model in the report
    progress         called with the number of tokens done and a description of the current work; by default a bar shows
                     them, or lines on stderr where there is no terminal
    settings         seed, batch, length, tokens, rate, budget, attack_tokens, at_risk, triggers: those of `Settings`

    After Ctrl-C it reports on the finished batches, with the status "interrupted".

    Example:
        report = holdfast.audit(model, ["The quick brown fox jumps over the lazy dog."], tokenizer=tokenizer)
        print(report.overall.flips)
    """
    checked = audit_settings((perturb,) if isinstance(perturb, str) else perturb, noise, **settings)
    run = _Audit(model, tokenizer, checked, progress)
    with run.showing(name):
        run.run(texts_or_inputs)
        run.search()
    return run.report(name)


@final
class _Audit(Measurement):
    """An audit in progress. A batch counts when all perturbations have been run on it."""

    def __init__(self, model: Any, tokenizer: Any, settings: Settings, progress: Progress | None) -> None:
        super().__init__(model, tokenizer, settings, progress)
        self.audited.require_texts()
        self.perturbations = perturbations(settings, self.audited, self.encoder)
        self.baseline = Baseline(self.audited, settings.at_risk)
        self.comparisons = {one.name: ForwardComparison(self.audited) for one in self.perturbations}
        self.skipped: dict[str, str] = {}
        self.first: list[AuditBatch] = []  # batches, for the search for triggers
        self.triggers: Triggers | None = None

    def add(self, batch: AuditBatch) -> None:
        self.tell(self.tokens, "the unperturbed model")
        clean = observe(self.audited, batch)
        clean.require_finite()
        baseline = Baseline(self.audited, self.settings.at_risk)
        shown = shown_tokens(self.audited, clean, batch, self.encoder) if batch.number == 0 else None
        baseline.update(clean, batch, self.encoder, shown)
        comparisons: dict[str, ForwardComparison] = {}
        reasons: dict[str, str] = {}
        for number, perturbation in enumerate(self.perturbations, 1):
            name = perturbation.name
            if name in self.skipped:
                continue
            reason = perturbation.unavailable(self.audited, batch)
            if reason is None:
                self.tell(self.tokens + batch.tokens * number // (len(self.perturbations) + 1), perturbation.about)
                comparisons[name] = ForwardComparison(self.audited, None if shown is None else shown.rows)
                try:
                    perturbation.run(self.audited, batch, clean, comparisons[name])
                # A device may not have the backend, or a kernel may not support the dtype.
                except (ValueError, RuntimeError, NotImplementedError, TypeError, AttributeError) as problem:
                    reason = f"it failed: {next(iter(str(problem).strip().splitlines()), type(problem).__name__)}"
            if reason is not None:
                reasons[name] = reason
        self.baseline.merge(baseline)
        for name, comparison in comparisons.items():
            self.comparisons[name].merge(comparison)
        for name, reason in reasons.items():
            # One that only does not apply to this batch keeps its earlier results.
            if reason.startswith("it failed") or not self.comparisons[name].tokens:
                self.skipped[name] = reason
        self.count(batch, batch.tokens)
        if self.settings.triggers and sum(one.size for one in self.first) < TEXTS:
            self.first.append(batch)

    def search(self) -> None:
        """Search for triggers if the settings ask for them; after Ctrl-C, keep those of the finished layers."""
        tokens, audited = self.settings.triggers, self.audited
        if not tokens or self.interrupted:
            return
        reason = unsearchable(audited, self.first, tokens)
        if reason is not None:
            self.triggers = Triggers(tokens=tokens, found=[], skipped=reason)
            return
        tell = partial(self.tell, self.tokens)
        with evaluation_mode(audited.model), resident(audited.scorers()):
            try:
                for found in find_triggers(audited, self.first, self.encoder, tokens, self.settings.seed, tell):
                    self.triggers = found
            except KeyboardInterrupt:
                self.interrupted = True
            except (RuntimeError, NotImplementedError) as problem:  # out of memory, or embeddings of an unknown form
                finished = [] if self.triggers is None else self.triggers.found
                self.triggers = Triggers(tokens=tokens, found=finished, skipped=f"it failed: {problem}")

    def report(self, name: str | None) -> AuditReport:
        perturbed: dict[str, Perturbed] = {}
        skipped: dict[str, SkippedPerturbation] = {}
        for one in self.perturbations:
            if one.name in self.skipped or not self.comparisons[one.name].tokens:
                reason = self.skipped.get(one.name, "it left no tokens to compare.")
                skipped[one.name] = SkippedPerturbation(one.about, reason)
            else:
                perturbed[one.name] = self.comparisons[one.name].result(one.about, one.harmless)
        layers = self.baseline.layers()
        return AuditReport(
            **self.about(name),
            overall=overall(layers, self.baseline.loss.result(), perturbed),
            layers=layers,
            perturbations=perturbed,
            skipped=skipped,
            at_risk=self.baseline.at_risk,
            triggers=self.triggers,
            view=self._view(perturbed),
        ).as_stored()

    def _view(self, perturbed: Mapping[str, Perturbed]) -> View | None:
        """Return the tokens that a page shows, with the changes of the perturbations that were run on them."""
        if not self.baseline.examples:
            return None
        changes = {name: self.comparisons[name].shown.result(one.about) for name, one in perturbed.items()}
        known = {name: one for name, one in changes.items() if one.compared}
        return View(self.baseline.examples, Routes(self.baseline.routes, known))


def overall(layers: list[AuditedLayer], loss: float | None, perturbed: dict[str, Perturbed]) -> Overall:
    """Return the numbers of the whole model: means over layers, except where the name says otherwise."""
    certified = [layer for layer in layers if layer.radius is not None]
    dropped = [layer.dropped for layer in layers if layer.dropped is not None]
    strips = zip(*(layer.near_ties.strips for layer in layers), strict=True)
    medians = [math.inf if layer.radius.median is None else layer.radius.median for layer in certified if layer.radius]
    changes = {name: one.overall for name, one in perturbed.items()}
    groups = ("flips", "first_flips", "weight_change", "output", "prediction_flips", "loss_change")
    changed: dict[str, Any] = {group: {name: getattr(one, group) for name, one in changes.items()} for group in groups}
    undecided = {name: [layer.undecided[name].share for layer in certified] for name in DTYPES} if certified else {}
    return Overall(
        layers=len(layers),
        tokens=max(layer.tokens for layer in layers),
        experts_per_token=known_mean(layer.experts_per_token.mean for layer in layers),
        loss=loss,
        perplexity=perplexity_of(loss),
        entropy=known_mean(layer.entropy for layer in layers),
        entropy_share=known_mean(layer.entropy_share for layer in layers),
        instability=known_mean(layer.instability for layer in layers),
        load={
            "std": known_mean(layer.load.std for layer in layers),
            "cv": known_mean(layer.load.cv for layer in layers),
            "dead": sum(len(layer.load.dead) for layer in layers),
        },
        dropped={name: known_mean(one[name] for one in dropped) for name in ("share", "tokens")} if dropped else {},
        near_ties={f"{same[0].width:g}": known_mean(strip.share for strip in same) for same in strips},
        undecided={name: known_mean(shares) for name, shares in undecided.items()},
        undecided_worst={name: max(shares) for name, shares in undecided.items()},
        # The smallest median: a model is as robust as its weakest layer.
        radius={"median_worst": min(medians), "low": known_mean(layer.radius.low for layer in certified if layer.radius)}
        if certified
        else {},
        co_selection={
            "spectral_gap": known_mean(layer.co_selection.spectral_gap for layer in layers),
            "groups": max(layer.co_selection.groups for layer in layers),
        },
        **changed,
    )


def perplexity_of(loss: float | None) -> float | None:
    return None if loss is None else math.exp(loss) if loss < 700 else math.inf


def what_if(
    model: Any,
    texts_or_inputs: Iterable[Any],
    router: str = "smooth",
    *,
    before: AuditReport | None = None,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> WhatIf:
    """Return what another router changes: audit the model, reroute it, audit it again, and restore it, also after an error.

    before    the first audit, if there is one with the same inputs and settings
    options   of the router
    settings  those of `audit`
    """
    audited = AuditedModel(model)
    require_not_rerouted(audited)
    routers_in_parts(resolve_layers(router, options, native=True), audited.moe_layers)  # a mistake ends it here
    inputs = list(texts_or_inputs) if isinstance(texts_or_inputs, Iterator) else texts_or_inputs  # read twice
    before = audit(model, inputs, **settings) if before is None else before
    with rerouted(audited, router, **(options or {})):
        again = {**settings, "triggers": 0}  # a trigger is searched for in the model as it is
        after = audit(model, inputs, **{**again, "name": f"{settings.get('name') or 'the model'} with {router}"})
    if before.data.checksum != after.data.checksum:
        raise ValueError("the two audits used different data: the first was interrupted, or used other inputs.")
    one, two = before.overall, after.overall
    both = [name for name in one.flips if name in two.flips]
    return WhatIf(
        router,
        cost={name: Pair(getattr(one, name), getattr(two, name)) for name in ("loss", "perplexity", "experts_per_token")},
        flips={name: Pair(one.flips[name], two.flips[name]) for name in both},
        flip_output={name: Pair(one.output[name].flip, two.output[name].flip) for name in both},
        output={name: Pair(one.output[name].total, two.output[name].total) for name in both},
        prediction_flips={name: Pair(one.prediction_flips[name], two.prediction_flips[name]) for name in both},
        overall=two,
        routes=None if after.view is None else after.view.routes,
    )


@contextmanager
def rerouted(audited: AuditedModel, router: str, **options: Any) -> Iterator[None]:
    """Give the model another router inside the `with`; restore it afterwards, also after an error."""
    with resident(audited.scorers()):  # a new router may take the weights of the old one
        reroute(audited.model, router, **options)
        try:
            yield
        finally:
            restore(audited.model)


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

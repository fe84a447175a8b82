"""What an audit says, in words and in conditions.

    diagnose          what is wrong with the model
    answer            what another router changes, by perturbation: whether fewer or more predictions change, what flips do
    parse_condition   a condition on an audit, for scripts: the name of an overall number, a sign and a number,
                      "undecided.bf16>0.05"

An answer compares two shares of the same n predictions by McNemar's test with the correction of Edwards. How many
predictions change with one router only is not stored; it is at most the sum of both counts, so

    (|after - before| - 1) / sqrt(after + before) > 1.96      counts of predictions that change

calls a difference clear less often than the test itself would. It counts predictions as independent.
"""

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, final

from holdfast.auditing.reports import AuditedLayer, AuditReport, Changes, Pair, Perturbed, Settings, names_of_numbers
from holdfast.auditing.run import ON_REQUEST, PERTURBATIONS, perturbation_names
from holdfast.errors import unknown_name

Severity = Literal["severe", "serious", "minor"]
RANKS: dict[Severity, int] = {"severe": 0, "serious": 1, "minor": 2}
Consequence = Literal["audit", "predictions", "loss", "experts"]
# What findings are about, the gravest first, with headings for pages and for the terminal.
CONSEQUENCES: dict[Consequence, str] = {
    "audit": "The audit itself",
    "predictions": "Predictions that change",
    "loss": "The loss",
    "experts": "The selection of experts",
}

# A finding is a number beyond one of these thresholds.
NOTICEABLE = {**dict.fromkeys(("noise", "routing", "model", "batch", "backend"), 0.01), "attack": 0.1}
NOTICEABLE_OF_TEXTS = 0.2  # share of changed predictions, or change of the loss in nats; an attack of a plugin is on texts
SEVERE = 10  # times as much as is noticeable
UNDECIDED, UNDECIDED_SEVERE = 0.02, 0.25
NEAR_TIES, NEAR_TIE_WIDTH = 0.05, 0.01
LOW_RADII = 0.02
UNEVEN = 1.0
COLLAPSED, UNIFORM = 0.02, 0.98  # entropy as a share of log E
FLIPS_PER_NOISE = 5.0  # times the noise level; at most half of the tokens
FLIPS = {"routing": 0.01, "model": 0.05, "backend": 0.0, "words": 0.2, "typos": 0.2, "attack": 0.5}
WHY = {  # a change under a perturbation does harm
    "batch": "a token's result depends on the other sequences in the batch or on padding, so it is not reproducible",
    "backend": "results depend on the kernel",
    "routing": "the routers of this model must run in float32",
    "model": "the model that is served is not the one that was trained",
    "noise": "training and quantisation change activations by as much",
    "attack": "an attacker can choose the experts",
}
FORCED_BY_TRIGGER = 0.8  # share of the tokens that a trigger sends to one expert
LEAST_EXPECTED = 30  # tokens per expert if load were even: with fewer data, an unused expert may not be dead
SIGNS: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_WRITTEN = re.compile(r"\s*([\w.]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
Direction = Literal["fewer", "more", "same"]
BEYOND_CHANCE = 1.96
LEAST_OUTPUT = 1e-5  # a change of outputs below this share of their norm is rounding
LEAST_LOSS = 5e-5  # nats; a smaller change is written as 0.0000


@final
@dataclass(frozen=True)
class Finding:
    """One problem of a model: `number` is beyond `threshold`."""

    kind: str
    consequence: Consequence
    layer: int | None  # where it is worst
    severity: Severity
    number: float
    threshold: float
    text: str
    why: str
    harm: float  # ranks findings of the same consequence and severity

    def __str__(self) -> str:
        return f"{self.text}; {self.why}"


def diagnose(report: AuditReport) -> list[Finding]:
    """Return the findings, ranked by consequence (predictions, loss, then experts), by severity and then by harm.

    A change under no perturbation comes first, because then no other number can be trusted. What a finding about experts
    does to predictions and to the loss decides how severe it is, if the audit measured that.
    """
    found = [finding for layer in report.layers for finding in _layer_findings(layer, report)]
    for name, one in report.perturbations.items():
        found += _perturbation_findings(name, one)
    found += _trigger_findings(report)
    order = list(CONSEQUENCES)
    return sorted(found, key=lambda one: (order.index(one.consequence), RANKS[one.severity], -one.harm, one.layer or 0))


def most_severe(findings: Iterable[Finding]) -> Finding | None:
    """Return the main finding: the first of the most severe ones."""
    return min(findings, key=lambda finding: RANKS[finding.severity], default=None)


def _layer_findings(entry: AuditedLayer, report: AuditReport) -> Iterator[Finding]:
    def finding(kind: str, severity: Severity, number: float, threshold: float, text: str, why: str, harm: float) -> Finding:
        said = f"layer {entry.layer}: {text}"
        return Finding(kind, "experts", entry.layer, severity, number, threshold, said, why, harm)

    rounding = "routing.bf16" if report.model.dtype != "bfloat16" else "model.fp32"
    noise = f"noise.{min(report.settings.noise, default=0.0):g}"
    rounded = entry.undecided.get("bf16")
    if rounded is not None and rounded.share > UNDECIDED:
        severity: Severity = "severe" if rounded.share > UNDECIDED_SEVERE else "serious"
        text = f"{rounded.share:.1%} of tokens are undecided in bf16"
        severity, why = _measured(report, rounding, severity, "training and serving may select different experts for them")
        yield finding("undecided", severity, rounded.share, UNDECIDED, text, why, rounded.share)
    if rounded is not None and rounded.decided_that_flip:
        text = f"{rounded.decided_that_flip} tokens certified as decided in bf16 do flip"
        why, count = "a certificate is wrong: please report this", rounded.decided_that_flip
        yield replace(finding("unsound", "severe", count, 0, text, why, 2.0), consequence="audit")
    for strip in entry.near_ties.strips:
        if strip.width == NEAR_TIE_WIDTH and strip.share > NEAR_TIES:
            text = f"{strip.share:.1%} of tokens are near-ties (within {NEAR_TIE_WIDTH:g})"
            severity, why = _measured(report, noise, "serious", "a very small change of their scores flips them")
            yield finding("near-ties", severity, strip.share, NEAR_TIES, text, why, strip.share / 2)
    if entry.radius is not None and entry.radius.low > LOW_RADII:
        text = f"{entry.radius.low:.1%} of tokens are not certified beyond 0.001 of their length"
        severity, why = _measured(report, noise, "serious", "a change too small to notice may flip them")
        yield finding("low radii", severity, entry.radius.low, LOW_RADII, text, why, entry.radius.low / 2)
    has_data = entry.tokens * entry.experts_per_token.mean / entry.experts >= LEAST_EXPECTED
    dead, cv, groups = len(entry.load.dead), entry.load.cv, entry.co_selection.groups
    if has_data and dead:
        text, why = f"{dead} of {entry.experts} experts are dead", "their weights cost memory and are never used"
        yield finding("dead experts", "serious", dead, 0, text, why, dead / entry.experts)
    if has_data and cv > UNEVEN:
        text, why = f"load unevenness (CV) is {cv:.2f}", "a few experts do most of the work"
        yield finding("uneven load", "minor", cv, UNEVEN, text, why, min(1.0, cv / 4))
    share = entry.entropy_share  # None: the router's scores are not finite
    if share is not None and entry.experts > 1 and share < COLLAPSED:
        text = f"the router has collapsed: its entropy is {share:.1%} of the maximum"
        yield finding("collapsed", "serious", share, COLLAPSED, text, "other experts get almost no gradient", 1 - share)
    if share is not None and share > UNIFORM:
        text = f"the router is nearly uniform: its entropy is {share:.1%} of the maximum"
        yield finding("uniform", "serious", share, UNIFORM, text, "rounding decides the selection", share / 4)
    if has_data and groups > 1 and entry.experts_per_token.mean > 1:
        text, why = f"experts form {groups} groups that no token connects", "symphony cannot share information between them"
        yield finding("disconnected", "minor", groups, 1, text, why, 0.1)


def _perturbation_findings(name: str, one: Perturbed) -> Iterator[Finding]:
    """Yield at most one finding: about predictions, else about the loss, else about the layer where most tokens flip."""
    worst = max(one.layers, key=_harm)
    flips, (kind, _, level) = worst.flips, name.partition(".")
    if name == "none":
        if flips or worst.weight_change or worst.output.total:
            text = (
                f"layer {worst.layer} gives different results when the same forward runs twice; {flips:.1%} of tokens flip"
            )
            why = "no number of this audit can be trusted"
            yield Finding("evaluation", "audit", worst.layer, "severe", flips, 0, text, why, 3.0)
        return
    why, severity = WHY.get(kind, "one word changes the experts of other words"), _severity(kind, one.overall)
    predictions, loss, noticeable = one.overall.prediction_flips, one.overall.loss_change, noticeable_change(kind)
    least = 0.0 if one.harmless else noticeable
    # The share of flips from which a perturbation is a finding. An attack of a plugin is one on texts.
    threshold = min(0.5, FLIPS_PER_NOISE * float(level)) if kind == "noise" else FLIPS.get(kind, FLIPS["words"])
    threshold = 0.0 if one.harmless else threshold
    flipped = f"{flips:.1%} of tokens flip in layer {worst.layer}"
    where = f" ({one.about}){f'; {flipped}' if flips else ''}"
    moved = ""
    if loss is not None and abs(loss) >= LEAST_LOSS:
        moved = f"the loss {'falls' if loss < 0 else 'rises'} by {abs(loss):.4f} nats"
    if predictions is not None and severity is not None and predictions > least:
        changed = " and ".join(filter(None, [f"{100 * predictions:.3g}% of predictions change", moved]))
        text, about = f"{changed}{where}", f"predictions: {name}"
        yield Finding(about, "predictions", worst.layer, severity, predictions, least, text, why, predictions)
    elif loss is not None and severity is not None and abs(loss) > noticeable:
        text = f"{moved}{where}"
        yield Finding(f"loss: {name}", "loss", worst.layer, severity, abs(loss), noticeable, text, why, abs(loss))
    elif flips > threshold:
        if severity is None:  # neither predictions nor a loss are known
            severity = "severe" if one.harmless else "minor" if kind == "attack" else "serious"
        else:
            why = f"this changes {_said(one.overall)}"
        text = f"{flipped} ({one.about})"
        yield Finding(f"flips: {name}", "experts", worst.layer, severity, flips, threshold, text, why, flips / 2)


def _trigger_findings(report: AuditReport) -> Iterator[Finding]:
    """Yield a finding for each layer in which a trigger forces most tokens, and random sequences do not."""
    for one in report.triggers.found if report.triggers is not None else ():
        if one.share < FORCED_BY_TRIGGER or one.random_most > one.share / 2:
            continue
        shown = repr(one.text) if one.text is not None else f"the tokens {one.tokens}"
        text = f"layer {one.layer}: {shown} before a text sends {one.share:.1%} of its tokens to expert {one.expert}"
        why = f"random sequences send at most {one.random_most:.1%} there; backdoors in MoE models use such triggers"
        yield Finding("trigger", "experts", one.layer, "serious", one.share, FORCED_BY_TRIGGER, text, why, one.share)


def noticeable_change(kind: str) -> float:
    """Return the share of changed predictions, and the change of the loss in nats, above which a perturbation matters."""
    return NOTICEABLE.get(kind, NOTICEABLE_OF_TEXTS)


def _severity(kind: str, changes: Changes) -> Severity | None:
    """Return how severe the change of predictions and loss is; None if neither is known."""
    known = [abs(value) for value in (changes.prediction_flips, changes.loss_change) if value is not None]
    if not known:
        return None
    times = max(known) / noticeable_change(kind)
    return "severe" if times > SEVERE else "serious" if times > 1 else "minor"


def _measured(report: AuditReport, name: str, severity: Severity, why: str) -> tuple[Severity, str]:
    """Return the severity of a finding about experts and why it matters: what perturbation `name` does, if it was run."""
    changes = report.perturbations[name].overall if name in report.perturbations else None
    found = _severity(name.partition(".")[0], changes) if changes is not None else None
    if changes is None or found is None:
        return severity, why
    return found, f"{why}; {name} changes {_said(changes)}"


def _said(changes: Changes) -> str:
    """Return the measured consequences as text."""
    predictions, loss = changes.prediction_flips, changes.loss_change
    said = [] if predictions is None else [f"{100 * predictions:.3g}% of the predictions"]
    said += [] if loss is None else [f"the loss by {loss:+.4f} nats"]
    return " and ".join(said)


def _harm(entry: Changes) -> tuple[float, ...]:
    values = (entry.flips, entry.weight_change, entry.output.total)
    return tuple(math.inf if value is None else value for value in values)  # None stands for a value that is not finite


@final
@dataclass(frozen=True)
class Condition:
    """A condition on one overall number of an audit."""

    name: str
    sign: str
    number: float

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.number:g}"

    def check(self, settings: Settings) -> None:
        """Raise ValueError if an audit with these settings has no such number."""
        if self.name in names_of_numbers(perturbation_names(settings)):
            return
        known = names_of_numbers(perturbation_names(replace(settings, perturb=[*PERTURBATIONS, *ON_REQUEST])))
        if self.name in known:
            raise ValueError(f"{self.name} is not measured by this audit: add its perturbation to those that are run.")
        raise ValueError(unknown_name("number of the audit", self.name, known))

    def holds(self, report: AuditReport) -> tuple[bool, float]:
        """Return whether the condition is true, and the value of its number; raise ValueError if the report has none."""
        numbers = report.numbers()
        if self.name not in numbers:
            raise ValueError(unknown_name("number of the audit", self.name, numbers))
        value = numbers[self.name]
        if value is None:
            raise ValueError(f"{self.name} was not measured in this audit; there is nothing to compare.")
        return SIGNS[self.sign](value, self.number), value


def parse_condition(written: str) -> Condition:
    """Return the condition that `written` describes, like "undecided.bf16>0.05"."""
    found = _WRITTEN.fullmatch(written)
    if found is None:
        raise ValueError(
            f"{written!r} is not a condition; write a name, one of > >= < <=, and a number: undecided.bf16>0.05."
        )
    return Condition(found[1], found[2], float(found[3]))


@final
@dataclass(frozen=True)
class Answer:
    """What a what-if answers, by perturbation; only those under which something changes.

    predictions    whether fewer or more predictions change with the other router; empty if the model has no predictions
    flip_outputs   the output change by flips, after divided by before, where flips changed it before
    """

    router: str
    predictions: dict[str, Direction]
    flip_outputs: dict[str, float]

    def count(self, direction: Direction) -> int:
        """Return under how many perturbations predictions change less often, more often or about as often."""
        return sum(found == direction for found in self.predictions.values())


def answer(report: AuditReport) -> Answer | None:
    """Return the answer of an audit's what-if; None if it has none."""
    found = report.what_if
    if found is None:
        return None
    folded, predictions, outputs = unchanged(report), dict[str, Direction](), dict[str, float]()
    for name in (name for name in found.flips if name not in folded):
        flips, output = found.prediction_flips[name], found.flip_output[name]
        if flips.before is not None:
            predictions[name] = direction(flips, report.perturbations[name].overall.predictions)
        if output.before and output.after is not None:
            outputs[name] = output.after / output.before
    return Answer(found.router, predictions, outputs)


def direction(pair: Pair, count: int) -> Direction:
    """Return whether a share of `count` predictions is clearly smaller or larger after than before."""
    if pair.before is None or pair.after is None:
        return "same"
    before, after = count * pair.before, count * pair.after
    if abs(after - before) - 1 <= BEYOND_CHANCE * math.sqrt(after + before):
        return "same"
    return "fewer" if after < before else "more"


def unchanged(report: AuditReport) -> list[str]:
    """Return the perturbations under which nothing changes, with the other router too: their numbers are 0 or rounding."""
    return [name for name in report.perturbations if _changes_nothing(report, name)]


def _changes_nothing(report: AuditReport, name: str) -> bool:
    changes, other = report.perturbations[name].overall, report.what_if
    counts = [changes.flips, changes.first_flips, changes.prediction_flips]
    outputs = [changes.output.total]
    losses = [] if changes.loss is None else [changes.loss.change]
    if other is not None and name in other.flips:
        counts += [other.flips[name].after, other.prediction_flips[name].after]
        outputs += [other.output[name].after]
        losses += [other.overall.loss_change.get(name, 0.0)] if losses else []
    if any(counts) or None in outputs or None in losses:  # an output or a loss that is not finite is None
        return False
    return all((value or 0) < LEAST_OUTPUT for value in outputs) and all(abs(value or 0) < LEAST_LOSS for value in losses)

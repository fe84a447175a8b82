"""`diagnose`: what is wrong with a model, from its audit. `parse_condition`: conditions on an audit, for scripts.

A condition is the name of an overall number, a sign and a number: "undecided.bf16>0.05".
"""

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, final

from holdfast.auditing.reports import AuditedLayer, AuditReport, Changes, Perturbed, Settings, names_of_numbers
from holdfast.auditing.run import PERTURBATIONS, perturbation_names
from holdfast.errors import unknown_name

Severity = Literal["severe", "serious", "minor"]
RANKS: dict[Severity, int] = {"severe": 0, "serious": 1, "minor": 2}

# A finding is a number beyond one of these thresholds.
UNDECIDED, UNDECIDED_SEVERE = 0.02, 0.25
NEAR_TIES, NEAR_TIE_WIDTH = 0.05, 0.01
LOW_RADII = 0.02
UNEVEN = 1.0
COLLAPSED, UNIFORM = 0.02, 0.98  # entropy as a share of log E
FLIPS_PER_NOISE = 5.0  # times the noise level; at most half of the tokens
FLIPS = {"routing": 0.01, "model": 0.05, "backend": 0.0, "words": 0.2, "typos": 0.2, "attack": 0.5}
WHY = {  # flips under a perturbation do harm
    "batch": "a token's result depends on the other sequences in the batch or on padding, so it is not reproducible",
    "backend": "results depend on the kernel",
    "routing": "the routers of this model must run in float32",
    "model": "the model that is served is not the one that was trained",
    "noise": "training and quantisation change activations by as much",
    "attack": "an attacker can choose the experts",
}
LEAST_EXPECTED = 30  # tokens per expert if load were even: with fewer data, an unused expert may not be dead


@final
@dataclass(frozen=True)
class Finding:
    """One problem of a model: `number` is beyond `threshold`."""

    kind: str
    layer: int | None  # None: of the whole model
    severity: Severity
    number: float
    threshold: float
    text: str
    why: str
    harm: float  # ranks findings of the same severity

    def __str__(self) -> str:
        return f"{self.text}; {self.why}"


def diagnose(report: AuditReport) -> list[Finding]:
    """Return the findings, ranked by severity and then by harm.

    A change under no perturbation comes first, because then no other number can be trusted.
    """
    found = [finding for layer in report.layers for finding in _layer_findings(layer)]
    for name, one in report.perturbations.items():
        found += _perturbation_findings(name, one)
    return sorted(found, key=lambda finding: (RANKS[finding.severity], -finding.harm, finding.layer or 0))


def _layer_findings(entry: AuditedLayer) -> Iterator[Finding]:
    def finding(kind: str, severity: Severity, number: float, threshold: float, text: str, why: str, harm: float) -> Finding:
        return Finding(kind, entry.layer, severity, number, threshold, f"layer {entry.layer}: {text}", why, harm)

    rounded = entry.undecided.get("bf16")
    if rounded is not None and rounded.share > UNDECIDED:
        severity: Severity = "severe" if rounded.share > UNDECIDED_SEVERE else "serious"
        text = f"{rounded.share:.1%} of tokens are undecided in bf16"
        why = "training and serving may select different experts for them"
        yield finding("undecided", severity, rounded.share, UNDECIDED, text, why, rounded.share)
    if rounded is not None and rounded.decided_that_flip:
        text = f"{rounded.decided_that_flip} tokens certified as decided in bf16 do flip"
        why = "a certificate is wrong: please report this"
        yield finding("unsound", "severe", rounded.decided_that_flip, 0, text, why, 2.0)
    for strip in entry.near_ties.strips:
        if strip.width == NEAR_TIE_WIDTH and strip.share > NEAR_TIES:
            text = f"{strip.share:.1%} of tokens are near-ties (within {NEAR_TIE_WIDTH:g})"
            why = "a very small change of their scores flips them"
            yield finding("near-ties", "serious", strip.share, NEAR_TIES, text, why, strip.share / 2)
    if entry.radius is not None and entry.radius.low > LOW_RADII:
        text = f"{entry.radius.low:.1%} of tokens are not certified beyond 0.001 of their length"
        why = "a change too small to notice may flip them"
        yield finding("low radii", "serious", entry.radius.low, LOW_RADII, text, why, entry.radius.low / 2)
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
    """Yield at most one finding, about the layer where the perturbation is worst."""
    worst = max(one.layers, key=_harm)
    flips, (kind, _, level) = worst.flips, name.partition(".")
    # The share of flips from which a perturbation is a finding. An attack of a plugin is one on texts.
    threshold = min(0.5, FLIPS_PER_NOISE * float(level)) if kind == "noise" else FLIPS.get(kind, FLIPS["words"])
    threshold = 0.0 if one.harmless else threshold
    if name == "none" and (flips or worst.weight_change or worst.output.total):
        text = f"layer {worst.layer} gives different results when the same forward runs twice; {flips:.1%} of tokens flip"
        yield Finding("evaluation", worst.layer, "severe", flips, 0, text, "no number of this audit can be trusted", 3.0)
    elif flips > threshold and name != "none":
        severity: Severity = "severe" if one.harmless else "serious" if kind != "attack" else "minor"
        text = f"layer {worst.layer}: {flips:.1%} of tokens flip with {one.about}"
        why = WHY.get(kind, "one word changes the experts of other words")
        yield Finding(f"flips: {name}", worst.layer, severity, flips, threshold, text, why, flips / 2)


def _harm(entry: Changes) -> tuple[float, ...]:
    values = (entry.flips, entry.weight_change, entry.output.total)
    return tuple(math.inf if value is None else value for value in values)  # None stands for a value that is not finite


SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_WRITTEN = re.compile(r"\s*([\w.]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


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
        known = names_of_numbers(perturbation_names(replace(settings, perturb=list(PERTURBATIONS))))
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

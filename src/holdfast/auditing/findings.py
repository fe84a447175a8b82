"""`diagnose`: what is wrong with a model, from its audit. `parse_condition`: conditions on an audit, for scripts.

A condition is the name of an overall number, a sign and a number: "undecided.bf16>0.05".
"""

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from holdfast.auditing.report import AuditReport, names
from holdfast.auditing.run import PERTURBATIONS, Settings, perturbation_names
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
        if one["skipped"] is None:
            found += _perturbation_findings(name, one, _threshold(name, one, report.settings))
    return sorted(found, key=lambda finding: (RANKS[finding.severity], -finding.harm, finding.layer or 0))


def _layer_findings(layer: dict[str, Any]) -> Iterator[Finding]:
    yield from _undecided(layer)
    yield from _ties(layer)
    yield from _radii(layer)
    yield from _load(layer)
    yield from _entropy(layer)
    yield from _graph(layer)


def _undecided(layer: dict[str, Any]) -> Iterator[Finding]:
    share = layer["undecided"].get("bf16", {}).get("share")
    if share is not None and share > UNDECIDED:
        severity: Severity = "severe" if share > UNDECIDED_SEVERE else "serious"
        text = f"layer {layer['layer']}: {share:.1%} of tokens are undecided in bf16"
        why = "training and serving may select different experts for them"
        yield Finding("undecided", layer["layer"], severity, share, UNDECIDED, text, why, share)
    wrong = layer["undecided"].get("bf16", {}).get("decided_that_flip")
    if wrong:
        text = f"layer {layer['layer']}: {wrong} tokens certified as decided in bf16 do flip"
        yield Finding("unsound", layer["layer"], "severe", wrong, 0, text, "a certificate is wrong: please report this", 2.0)


def _ties(layer: dict[str, Any]) -> Iterator[Finding]:
    for strip in layer["near_ties"]["strips"]:
        if strip["width"] == NEAR_TIE_WIDTH and strip["share"] > NEAR_TIES:
            text = f"layer {layer['layer']}: {strip['share']:.1%} of tokens are near-ties (within {NEAR_TIE_WIDTH:g})"
            why = "a very small change of their scores flips them"
            share = strip["share"]
            yield Finding("near-ties", layer["layer"], "serious", share, NEAR_TIES, text, why, share / 2)


def _radii(layer: dict[str, Any]) -> Iterator[Finding]:
    share = layer["radius"].get("below_0.001")
    if share is not None and share > LOW_RADII:
        text = f"layer {layer['layer']}: {share:.1%} of tokens are not certified beyond 0.001 of their length"
        why = "a change too small to notice may flip them"
        yield Finding("low radii", layer["layer"], "serious", share, LOW_RADII, text, why, share / 2)


def _load(layer: dict[str, Any]) -> Iterator[Finding]:
    expected = layer["tokens"] * layer["experts_per_token"]["mean"] / layer["experts"]
    if expected < LEAST_EXPECTED:
        return
    dead, cv = layer["load"]["dead"], layer["load"]["cv"]
    if dead:
        share = len(dead) / layer["experts"]
        text = f"layer {layer['layer']}: {len(dead)} of {layer['experts']} experts are dead"
        why = "their weights cost memory and are never used"
        yield Finding("dead experts", layer["layer"], "serious", len(dead), 0, text, why, share)
    if cv > UNEVEN:
        text = f"layer {layer['layer']}: load unevenness (CV) is {cv:.2f}"
        why = "a few experts do most of the work"
        yield Finding("uneven load", layer["layer"], "minor", cv, UNEVEN, text, why, min(1.0, cv / 4))


def _entropy(layer: dict[str, Any]) -> Iterator[Finding]:
    share = layer["entropy_share"]
    if share is None:  # the router's scores are not finite
        return
    if layer["experts"] > 1 and share < COLLAPSED:
        text = f"layer {layer['layer']}: the router has collapsed: its entropy is {share:.1%} of the maximum"
        why = "other experts get almost no gradient"
        yield Finding("collapsed", layer["layer"], "serious", share, COLLAPSED, text, why, 1 - share)
    if share > UNIFORM:
        text = f"layer {layer['layer']}: the router is nearly uniform: its entropy is {share:.1%} of the maximum"
        why = "rounding decides the selection"
        yield Finding("uniform", layer["layer"], "serious", share, UNIFORM, text, why, share / 4)


def _graph(layer: dict[str, Any]) -> Iterator[Finding]:
    groups = layer["co_selection"]["groups"]
    expected = layer["tokens"] * layer["experts_per_token"]["mean"] / layer["experts"]
    if groups > 1 and layer["experts_per_token"]["mean"] > 1 and expected >= LEAST_EXPECTED:
        text = f"layer {layer['layer']}: experts form {groups} groups that no token connects"
        why = "symphony cannot share information between them"
        yield Finding("disconnected", layer["layer"], "minor", groups, 1, text, why, 0.1)


def _perturbation_findings(name: str, one: dict[str, Any], threshold: float) -> Iterator[Finding]:
    """Yield at most one finding, about the layer where the perturbation is worst."""
    worst = max(one["layers"], key=_harm)
    flips = float(worst["flips"])
    is_repeat = name == "none"
    if is_repeat and (flips or worst["weight_change"] or worst["output"]["total"]):
        text = f"layer {worst['layer']} gives different results when the same forward runs twice; {flips:.1%} of tokens flip"
        yield Finding("evaluation", worst["layer"], "severe", flips, 0, text, "no number of this audit can be trusted", 3.0)
    elif flips > threshold and not is_repeat:
        severity: Severity = "severe" if one["harmless"] else "serious" if name.split(".")[0] != "attack" else "minor"
        text = f"layer {worst['layer']}: {flips:.1%} of tokens flip with {one['about']}"
        yield Finding(f"flips: {name}", worst["layer"], severity, flips, threshold, text, _why(name), flips / 2)


def _harm(layer: dict[str, Any]) -> tuple[float, ...]:
    values = (layer["flips"], layer["weight_change"], layer["output"]["total"])
    return tuple(math.inf if value is None else value for value in values)  # None stands for a value that is not finite


def _threshold(name: str, one: dict[str, Any], settings: dict[str, Any]) -> float:
    """Return the share of flips from which a perturbation is a finding; raise KeyError if the audit did not ask for it."""
    kind, _, level = name.partition(".")
    if one["harmless"]:
        return 0.0
    if kind not in FLIPS and kind in settings["perturb"] and kind != "noise":
        return FLIPS["words"]  # an attack of a plugin, also on texts
    return min(0.5, FLIPS_PER_NOISE * float(level)) if kind == "noise" else FLIPS[kind]


def _why(name: str) -> str:
    return {
        "batch": "a token's result depends on the other sequences in the batch or on padding, so it is not reproducible",
        "backend": "results depend on the kernel",
        "routing": "the routers of this model must run in float32",
        "model": "the model that is served is not the one that was trained",
        "noise": "training and quantisation change activations by as much",
        "attack": "an attacker can choose the experts",
    }.get(name.split(".")[0], "one word changes the experts of other words")


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
        if self.name in names(perturbation_names(settings)):
            return
        known = names(perturbation_names(replace(settings, perturb=tuple(PERTURBATIONS))))
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

"""What is wrong with a model, from its audit: findings, the most harmful first.

Conditions on a report, for scripts: "undecided.bf16>0.05". A name of its overall numbers, a sign, a number.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from holdfast.auditing.report import AuditReport, names
from holdfast.auditing.run import PERTURBATIONS, Settings, names_of
from holdfast.errors import unknown

Severity = Literal["severe", "serious", "minor"]
RANKS: dict[Severity, int] = {"severe": 0, "serious": 1, "minor": 2}

UNDECIDED, UNDECIDED_SEVERE = 0.02, 0.25
NEAR_TIES, NEAR_TIE_WIDTH = 0.05, 0.01
LOW_RADII = 0.02
UNEVEN = 1.0
COLLAPSED, WITHOUT_OPINION = 0.02, 0.98  # of log E
FLIPS_OF_NOISE = 5.0  # times the level; and never more than half of the tokens
FLIPS = {"routing": 0.01, "model": 0.05, "backend": 0.0, "words": 0.2, "typos": 0.2, "attack": 0.5}
EXPECTED = 30  # tokens an expert would have if load were even: with fewer, nobody knows that it is dead


@final
@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `number` is beyond `threshold`."""

    kind: str
    layer: int | None  # None: of the whole model
    severity: Severity
    number: float
    threshold: float
    text: str
    why: str
    harm: float  # by which findings of one severity are ranked

    def __str__(self) -> str:
        return f"{self.text}; {self.why}"


def diagnose(report: AuditReport) -> list[Finding]:
    """Ranked by severity, then by harm. A change where nothing was changed comes first: it makes all else doubtful."""
    found = [finding for layer in report.layers for finding in _of_layer(layer)]
    for name, one in report.perturbations.items():
        if one["skipped"] is None:
            found += _of_perturbation(name, one)
    return sorted(found, key=lambda finding: (RANKS[finding.severity], -finding.harm, finding.layer or 0))


def _of_layer(layer: dict[str, Any]) -> Iterator[Finding]:
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
        why = "training and serving will disagree there"
        yield Finding("undecided", layer["layer"], severity, share, UNDECIDED, text, why, share)
    wrong = layer["undecided"].get("bf16", {}).get("decided_that_flip")
    if wrong:
        text = f"layer {layer['layer']}: {wrong} tokens called decided in bf16 flip in it"
        yield Finding("unsound", layer["layer"], "severe", wrong, 0, text, "a certificate is wrong: please report this", 2.0)


def _ties(layer: dict[str, Any]) -> Iterator[Finding]:
    for strip in layer["near_ties"]["strips"]:
        if strip["width"] == NEAR_TIE_WIDTH and strip["share"] > NEAR_TIES:
            text = f"layer {layer['layer']}: {strip['share']:.1%} of tokens are within {NEAR_TIE_WIDTH:g} of a tie"
            why = "the least change of their scores sends them to other experts"
            share = strip["share"]
            yield Finding("near-ties", layer["layer"], "serious", share, NEAR_TIES, text, why, share / 2)


def _radii(layer: dict[str, Any]) -> Iterator[Finding]:
    share = layer["radius"].get("below_0.001")
    if share is not None and share > LOW_RADII:
        text = f"layer {layer['layer']}: {share:.1%} of tokens are not certified beyond 0.001 of their length"
        why = "a change nobody would notice may reroute them"
        yield Finding("low radii", layer["layer"], "serious", share, LOW_RADII, text, why, share / 2)


def _load(layer: dict[str, Any]) -> Iterator[Finding]:
    expected = layer["tokens"] * layer["experts_per_token"]["mean"] / layer["experts"]
    if expected < EXPECTED:
        return
    dead, cv = layer["load"]["dead"], layer["load"]["cv"]
    if dead:
        share = len(dead) / layer["experts"]
        text = f"layer {layer['layer']}: {len(dead)} of {layer['experts']} experts are dead"
        why = "their weights are paid for and never used"
        yield Finding("dead experts", layer["layer"], "serious", len(dead), 0, text, why, share)
    if cv > UNEVEN:
        text = f"layer {layer['layer']}: load is uneven, its CV is {cv:.2f}"
        why = "a few experts do most of the work, and wait for nobody"
        yield Finding("uneven load", layer["layer"], "minor", cv, UNEVEN, text, why, min(1.0, cv / 4))


def _entropy(layer: dict[str, Any]) -> Iterator[Finding]:
    share = layer["entropy_share"]
    if share is None:  # it broke: the router's scores are not finite
        return
    if layer["experts"] > 1 and share < COLLAPSED:
        text = f"layer {layer['layer']}: the router has collapsed, its entropy is {share:.1%} of the most there can be"
        why = "it leaves no gradient to learn another choice from"
        yield Finding("collapsed", layer["layer"], "serious", share, COLLAPSED, text, why, 1 - share)
    if share > WITHOUT_OPINION:
        text = f"layer {layer['layer']}: the router has no opinion, its entropy is {share:.1%} of the most there can be"
        why = "tokens go where rounding sends them"
        yield Finding("no opinion", layer["layer"], "serious", share, WITHOUT_OPINION, text, why, share / 4)


def _graph(layer: dict[str, Any]) -> Iterator[Finding]:
    groups = layer["co_selection"]["groups"]
    expected = layer["tokens"] * layer["experts_per_token"]["mean"] / layer["experts"]
    if groups > 1 and layer["experts_per_token"]["mean"] > 1 and expected >= EXPECTED:
        text = f"layer {layer['layer']}: experts fall into {groups} groups that no token joins"
        why = "informing experts by each other (symphony) has nothing to work with there"
        yield Finding("disconnected", layer["layer"], "minor", groups, 1, text, why, 0.1)


def _of_perturbation(name: str, one: dict[str, Any]) -> Iterator[Finding]:
    """One finding for each perturbation, about the layer where it is worst."""
    worst = max(one["layers"], key=_harm)
    flips, threshold = float(worst["flips"]), _threshold(name, one)
    again = name == "none"
    if again and (flips or worst["weight_change"] or worst["output"]["total"]):
        text = f"layer {worst['layer']} changes when the same forward is run twice, {flips:.1%} of tokens their experts"
        yield Finding("evaluation", worst["layer"], "severe", flips, 0, text, "nothing measured here can be trusted", 3.0)
    elif flips > threshold and not again:
        severity: Severity = "severe" if one["harmless"] else "serious" if name.split(".")[0] != "attack" else "minor"
        text = f"layer {worst['layer']}: {flips:.1%} of tokens change experts with {one['about']}"
        yield Finding(f"flips: {name}", worst["layer"], severity, flips, threshold, text, _why(name), flips / 2)


def _harm(layer: dict[str, Any]) -> tuple[float, ...]:
    figures = (layer["flips"], layer["weight_change"], layer["output"]["total"])
    return tuple(math.inf if figure is None else figure for figure in figures)  # None stands for what is not finite


def _threshold(name: str, one: dict[str, Any]) -> float:
    kind, _, level = name.partition(".")
    if one["harmless"]:
        return 0.0
    return min(0.5, FLIPS_OF_NOISE * float(level)) if kind == "noise" else FLIPS[kind]


def _why(name: str) -> str:
    return {
        "batch": "a token's result depends on its company, and nothing is reproducible",
        "backend": "another kernel is another model",
        "routing": "routers must run in float32 here",
        "model": "the model that is served is not the one that was trained",
        "noise": "routes do not survive what training and quantisation do to activations",
        "attack": "an adversary chooses the experts",
    }.get(name.split(".")[0], "one word decides where others go")


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
    name: str
    sign: str
    number: float

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.number:g}"

    def check(self, settings: Settings) -> None:
        """A `ValueError` where an audit so made has no such number: better before it than after."""
        if self.name in names(names_of(settings)):
            return
        known = names(names_of(replace(settings, perturb=tuple(PERTURBATIONS))))
        if self.name in known:
            raise ValueError(f"{self.name} is not measured by this audit: its perturbation is not among those that are run.")
        raise ValueError(unknown("number of the audit", self.name, known))

    def holds(self, report: AuditReport) -> tuple[bool, float]:
        """Whether it does, and the number it is about; a `ValueError` where the report has none of that name."""
        numbers = report.numbers()
        if self.name not in numbers:
            raise ValueError(unknown("number of the audit", self.name, numbers))
        value = numbers[self.name]
        if value is None:
            raise ValueError(f"{self.name} was not measured in this audit; there is nothing to compare.")
        return SIGNS[self.sign](value, self.number), value


def parse(written: str) -> Condition:
    found = _WRITTEN.fullmatch(written)
    if found is None:
        raise ValueError(f"{written!r} is no condition; write a name, one of > >= < <=, and a number: undecided.bf16>0.05.")
    return Condition(found[1], found[2], float(found[3]))

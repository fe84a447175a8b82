"""Conditions on a report, for scripts: "undecided.bf16>0.05". A name of its overall numbers, a sign, a number."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from holdfast.auditing.overall import names
from holdfast.auditing.report import AuditReport
from holdfast.auditing.table import PERTURBATIONS, Settings, names_of
from holdfast.suggest import unknown

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

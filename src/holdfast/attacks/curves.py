"""The error against the budget: one attack on the same inputs, at several budgets.

An input within a small ball is also within every larger one. So what an attack has found at a smaller budget counts at the
larger ones too: the error never falls with the budget, as for the best attacker, which attacks alone need not do.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from holdfast.attacks.inputs import AttackedInputs, per_row
from holdfast.attacks.threat import check_budget


def attack_curve(attack: Callable[[float], AttackedInputs], budgets: Sequence[float]) -> list[AttackedInputs]:
    """Return the results of `attack(budget)` for all budgets, the smallest first, each with what smaller budgets found.

    `attack` attacks the same inputs each time. A budget of 0 is the clean error.
    """
    points: list[AttackedInputs] = []
    for budget in ascending(budgets):
        found = attack(budget)
        points.append(_with_smaller(found, points[-1]) if points else found)
    return points


def ascending(budgets: Sequence[float]) -> list[float]:
    """Return the budgets sorted, each once. Raise ValueError if there are none, or if one is not a budget."""
    for budget in budgets:
        check_budget(budget)
    if not budgets:
        raise ValueError("there are no budgets; a curve needs at least one.")
    return sorted(set(budgets))


def _with_smaller(found: AttackedInputs, smaller: AttackedInputs) -> AttackedInputs:
    """Return a result in which inputs that only the smaller budget got misclassified are those of the smaller budget."""
    if found.inputs.shape != smaller.inputs.shape or (found.norm, found.bounds) != (smaller.norm, smaller.bounds):
        raise ValueError(f"{found.attack} did not attack the same inputs in the same norm at every budget.")
    kept = smaller.success & ~found.success
    both = found.ranks is not None and smaller.ranks is not None
    return replace(
        found,
        inputs=torch.where(per_row(kept, found.inputs), smaller.inputs, found.inputs),
        success=found.success | smaller.success,
        distances=torch.where(kept, smaller.distances, found.distances),
        ranks=torch.maximum(found.ranks, smaller.ranks) if both else None,  # type: ignore[arg-type]
        flags=tuple(dict.fromkeys((*smaller.flags, *found.flags))),
    )

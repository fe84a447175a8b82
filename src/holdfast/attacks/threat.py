"""What an attacker may do: budgets and norms, checked. A missing budget is an error: without one a number means nothing."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from holdfast.suggest import unknown

Norm = Literal["linf", "l2"]
NORMS: tuple[Norm, ...] = get_args(Norm)
Json = str | int | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None  # lists and dictionaries, in fact


def check_norm(norm: str) -> None:
    if norm not in NORMS:
        raise ValueError(unknown("norm", norm, NORMS))


def check_rate(rate: float) -> None:
    if not _is_number(rate) or not 0 <= rate <= 1:
        raise ValueError(f"rate is {rate!r}; state the share of words to attack, from 0 to 1.")


def check_budget(budget: float) -> None:
    if not _is_number(budget) or not 0 <= budget < math.inf:
        raise ValueError(f"budget is {budget!r}; state how far the attack may move an input, a number that is not negative.")


def check_count(count: int, name: str, least: int = 1) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(f"{name} is {count!r}; it must be a whole number, at least {least}.")


def row_norms(rows: Tensor, norm: Norm) -> Tensor:
    """(R,) float64: the length of each of `rows (R, ...)`."""
    flat = rows.detach().flatten(1).double()
    return flat.abs().amax(1) if norm == "linf" else flat.norm(dim=1)


def distances(moved: Tensor, centre: Tensor, norm: Norm) -> Tensor:
    """(R,) float64: how far each row was moved, without rounding the difference first."""
    return row_norms(moved.detach().double() - centre.detach().double(), norm)


def direction(gradient: Tensor, norm: Norm) -> Tensor:
    """The step of length 1 that climbs fastest, for each row (R, ...); 0 where there is no gradient."""
    gradient = torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
    if norm == "linf":
        return gradient.sign()
    # Scaled first: a gradient of 1e-30 has a square of 0.
    flat = gradient.flatten(1)
    flat = flat / flat.abs().amax(1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    flat = flat / flat.norm(dim=1, keepdim=True).clamp_min(torch.finfo(flat.dtype).tiny)
    return flat.view_as(gradient)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

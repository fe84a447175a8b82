"""`Certificates`: the radii of some tokens, with everything that a result needs to be understood."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from holdfast.routing.bounds import Norm

Kind = Literal["exact", "lower bound", "probabilistic"]
Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class TokenRecord:
    """A dataclass with numbers of tokens (abstract). `tensors` are its fields whose first dimensions are those of tokens."""

    tensors: ClassVar[tuple[str, ...]]
    real: Tensor

    def rows(self, index: Tensor, **others: Any) -> Self:
        """Return some tokens, given by their numbers (T,), as rows on the CPU; `others` are further fields that change."""
        lead = self.real.dim() - 1
        chosen: dict[str, Any] = {name: getattr(self, name).flatten(0, lead)[index].cpu() for name in self.tensors}
        return replace(self, **chosen, **others)  # type: ignore[type-var]

    @classmethod
    def joined(cls, parts: "Sequence[Self]", **others: Any) -> Self:
        """Return the rows of several batches as one."""
        tensors: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in cls.tensors}
        return replace(parts[0], **tensors, **others)  # type: ignore[type-var]


@dataclass(frozen=True)
class Certificates(TokenRecord):
    """For each token, up to which perturbation it keeps its selected set. Leading dimensions (...) are those of the tokens.

    `radius` is valid for the router as it computes: within it no perturbed token flips, rounding included. `distance` is the
    same in real numbers. If the kind is "exact", it is the distance to the nearest decision boundary, and the radius is
    smaller by the largest rounding errors; if it is "lower bound", the boundary may be farther away.
    """

    tensors = ("radius", "distance", "lengths", "margin", "pair", "real")
    radius: Tensor  # (...) float64; infinite if no perturbation flips the token; 0 for padding, and if nothing is certified
    distance: Tensor  # (...) float64, at least the radius
    lengths: Tensor  # (...) float64: norms of the tokens, in the norm of the radii
    margin: Tensor  # (...) float64: the difference of the pair in what the router compares (logits, gates, ...)
    pair: Tensor  # (...,2) int64: the expert that would leave, the one that would enter; E is the threshold
    real: Tensor  # (...) bool: False for padding
    kind: Kind
    norm: Norm  # of perturbations: "l2", or "linf", the largest change of any feature
    about: str  # which set is certified
    bounds: Mapping[str, Tensor] = field(default_factory=dict)  # other known lower bounds, in real numbers
    confidence: float | None = None  # of each token's certificate, if probabilistic
    arithmetic: str = "real numbers"

    @property
    def relative(self) -> Tensor:
        """Return the radius divided by the token's norm, (...): |x|_2 for "l2", the largest |x_q| for "linf"."""
        return (self.radius / self.lengths).nan_to_num(nan=0.0, posinf=torch.inf)

    def share(self, radius: float, *, relative: bool = False) -> float:
        """Return the share of real tokens that are certified against every perturbation up to `radius`."""
        certified = self.relative if relative else self.radius
        return float((certified >= radius)[self.real].double().mean()) if self.real.any() else 0.0

    def summary(self) -> dict[str, Json]:
        """Return what to store with a result, as plain data."""
        stated = {name: getattr(self, name) for name in ("kind", "norm", "about", "arithmetic", "confidence")}
        return {
            **stated,
            "tokens": int(self.real.sum()),
            "certified": float((self.radius > 0)[self.real].double().mean()) if self.real.any() else 0.0,
            "radius": self._quantiles(self.radius),
            "relative": self._quantiles(self.relative),
            "bounds": {name: self._quantiles(values) for name, values in self.bounds.items()},
        }

    def _quantiles(self, values: Tensor) -> dict[str, Json]:
        """Return quantiles over real tokens by name; None instead of infinity, which JSON does not have."""
        real = values[self.real].flatten().sort().values
        if not len(real):
            return {}
        chosen = {share: float(real[round(share * (len(real) - 1))]) for share in QUANTILES}
        return {f"{share:.0%}": value if value < float("inf") else None for share, value in chosen.items()}

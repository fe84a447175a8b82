"""`Certificates`: what was certified, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from holdfast.routing.bounds import Norm

Kind = Literal["exact", "lower bound", "probabilistic"]
Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Certificates:
    """For each token, how far it may be moved and keep its set. Leading dimensions (...) are those of the tokens.

    `radius` holds for the router as it computes: within it, no perturbed token is sent to another set, rounding included.
    `distance` is the same in real numbers. Of kind "exact" it is the distance to the nearest switching plane, and
    the radius is less by what rounding can do; of kind "lower bound" the plane may be further away.
    """

    radius: Tensor  # (...) float64; infinite where nothing can change the set; 0 for padding and where none is certain
    distance: Tensor  # (...) float64, at least the radius
    lengths: Tensor  # (...) float64: of the tokens, in the same norm as the radii
    margin: Tensor  # (...) float64: by how much the pair is apart, in what the router compares (logits, gates, ...)
    pair: Tensor  # (...,2) int64: the expert that would leave, the one that would enter; E is a threshold
    real: Tensor  # (...) bool: tokens that are no padding
    kind: Kind
    norm: Norm  # of perturbations: "l2", or "linf", the largest change of any feature
    about: str  # whose set it is
    bounds: Mapping[str, Tensor] = field(default_factory=dict)  # other known lower bounds, in real numbers
    confidence: float | None = None  # of each token's certificate, where probabilistic
    arithmetic: str = "real numbers"

    @property
    def relative(self) -> Tensor:
        """(...): radius over the token's own length, |x|_2 for "l2" and its largest feature for "linf"."""
        return (self.radius / self.lengths).nan_to_num(nan=0.0, posinf=torch.inf)

    def share(self, radius: float, *, relative: bool = False) -> float:
        """The share of real tokens that are certified to keep their set under every perturbation up to `radius`."""
        certified = self.relative if relative else self.radius
        return float((certified >= radius)[self.real].double().mean()) if self.real.any() else 0.0

    def summary(self) -> dict[str, Json]:
        """What to store with a result."""
        return {
            "kind": self.kind,
            "norm": self.norm,
            "about": self.about,
            "arithmetic": self.arithmetic,
            "confidence": self.confidence,
            "tokens": int(self.real.sum()),
            "certified": float((self.radius > 0)[self.real].double().mean()) if self.real.any() else 0.0,
            "radius": self._quantiles(self.radius),
            "relative": self._quantiles(self.relative),
            "bounds": {name: self._quantiles(values) for name, values in self.bounds.items()},
        }

    def _quantiles(self, values: Tensor) -> dict[str, Json]:
        """By name; None where infinite, which JSON has no number for."""
        real = values[self.real].flatten().sort().values
        if not len(real):
            return {}
        chosen = [float(real[round(share * (len(real) - 1))]) for share in QUANTILES]
        return {
            f"{share:.0%}": value if value < float("inf") else None for share, value in zip(QUANTILES, chosen, strict=True)
        }

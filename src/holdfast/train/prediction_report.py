"""`PredictionReport`: the certified predictions of models, and attacks on their votes. docs/certificates.md explains them.

    CertifiedModel      a model, with each of its examples
    CertifiedExample    its class, its radius, and the votes at the attacked inputs
    AttackedVote        the vote at the input that an attack at one radius found

A violation is a vote that a certificate excludes: at an input that is at most the certified radius away, the chance of the
class is below 1/2. That chance is estimated too, so a vote counts only if the upper Clopper-Pearson bound of the chance is
below 1/2, at the level alpha / (attacks on the example). Then both the certificate and this test are wrong with probability
at most alpha, and at most 2 alpha of the certified examples are violations by chance.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, final

import torch

from holdfast.certificates.voting import certified_radius, lowest_chance
from holdfast.checked import Limits
from holdfast.errors import require_extra
from holdfast.metrics import Difference, level_of
from holdfast.routing.grammar import written_pairs
from holdfast.stored import ShownRecord
from holdfast.train.image_attacks import error_of, per_image

Positive = Annotated[int, Limits(1, math.inf, "a whole number, at least 1")]
Natural = Annotated[int, Limits(0, math.inf, "a whole number, at least 0")]
Size = Annotated[float, Limits(1e-300, math.inf, "a positive number")]
Share = Annotated[float, Limits(1e-12, 0.5, "a number above 0 and at most 0.5")]
SHARES_OF_SIGMA = (0.5, 1.0, 1.5, 2.0)  # the attacked radii by default
SURE = 0.999  # by chance there are at most so many violations with this probability


@final
@dataclass(frozen=True, kw_only=True)
class PredictionSettings:
    """Everything that determines a report, apart from the models and their data. Radii have the unit of sigma."""

    sigma: Size
    samples: Positive = 1000
    selection: Positive = 100
    alpha: Share = 0.001
    examples: Positive = 100  # test examples, evenly spaced
    seed: int = 0
    radii: list[Size] = field(default_factory=list)  # at which the vote is attacked; ascending
    steps: Natural = 20  # of the attack; 0 for no attack
    draws: Positive = 32  # noisy copies in a step
    votes: Positive = 1000  # draws of the vote at an attacked input

    def __post_init__(self) -> None:
        if not self.radii and self.steps:
            object.__setattr__(self, "radii", [share * self.sigma for share in SHARES_OF_SIGMA])
        if self.alpha ** (1 / self.samples) <= 0.5:
            raise ValueError(
                f"with {self.samples} samples and alpha {self.alpha:g} no prediction can be certified; draw more."
            )
        if self.radii != sorted(set(self.radii)):
            raise ValueError(f"the radii are {self.radii}; name each once, the smallest first.")

    @property
    def largest_radius(self) -> float:
        """The radius of an example if all draws agree."""
        return float(certified_radius(lowest_chance(torch.tensor(self.samples), self.samples, self.alpha), self.sigma))


@final
@dataclass(frozen=True)
class AttackedVote:
    radius: float  # of the attack
    hits: int  # draws that still gave the class
    stays: bool  # no other class has more


@final
@dataclass(frozen=True)
class CertifiedExample:
    number: int  # in the test set
    label: int
    chosen: int  # the class of the vote
    hits: int  # draws of the samples that gave it
    radius: float  # 0: it abstains
    # At each radius of the settings, and at the certified one if there is one; empty if it is wrong and abstains.
    attacked: list[AttackedVote]

    @property
    def is_right(self) -> bool:
        return self.chosen == self.label

    def certified(self, radius: float) -> bool:
        """Whether the class is right, and certified for all inputs that are at most `radius` away."""
        return self.is_right and self.radius > radius

    def survives(self, radius: float) -> bool:
        """Whether no attack up to `radius` got another class; a wrong example never survives."""
        return self.is_right and all(vote.stays for vote in self.attacked if vote.radius <= radius)

    def is_violated(self, settings: PredictionSettings) -> bool:
        """Whether a vote inside the certified radius leaves the class, as far as its draws can show."""
        inside = [vote.hits for vote in self.attacked if vote.radius <= self.radius]
        if not inside:
            return False
        misses = settings.votes - torch.tensor(inside)
        chance_of_others = lowest_chance(misses, settings.votes, settings.alpha / len(self.attacked))
        return bool((chance_of_others > 0.5).any())


@dataclass(frozen=True)
class NamedModel:
    """A model to certify: its path, and the router, seed and setting that rows of a report are named by."""

    path: str
    router: str
    seed: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of a sweep

    @property
    def label(self) -> str:
        return f"{self.router}, {written_pairs(self.settings)}" if self.settings else self.router


@final
@dataclass(frozen=True, kw_only=True)
class CertifiedModel(NamedModel):
    examples: list[CertifiedExample]

    @property
    def abstained(self) -> float:
        """The share of examples without a certificate."""
        return sum(one.radius == 0 for one in self.examples) / len(self.examples)


@final
@dataclass(frozen=True)
class Violations:
    """How many certified examples an attack refuted, and how many are expected at most by chance."""

    count: int
    certified: int  # examples that were certified and attacked
    expected: float
    allowed: int  # more are a mistake, not chance

    @property
    def words(self) -> str:
        found = f"{self.count} {'violation' if self.count == 1 else 'violations'} in {self.certified:,} certified examples"
        return f"{found}; by chance at most {self.expected:.2g} expected"


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class PredictionReport(ShownRecord):
    """The certified predictions of one or several models, and attacks on their votes."""

    file_name: ClassVar[str] = "predictions.json"
    kind: ClassVar[str] = "a report of certified predictions"
    remedy: ClassVar[str] = "run `holdfast certify --predictions` again"
    page: ClassVar[str] = "holdfast.report.prediction_page:prediction_page"

    settings: PredictionSettings
    unit: str  # of sigma and all radii
    data: dict[str, Any]
    models: list[CertifiedModel]
    skipped: dict[str, str]  # from the path of a model to why it has no certificates
    versions: dict[str, str]

    @property
    def labels(self) -> list[str]:
        """The rows: routers, each in one setting of a sweep."""
        return list(dict.fromkeys(model.label for model in self.models))

    def models_of(self, label: str) -> list[CertifiedModel]:
        return [model for model in self.models if model.label == label]

    def accuracy(self, label: str, radius: float, *, attacked: bool = False) -> Difference:
        """Return the certified accuracy of a row in percent, with its interval; or that of its votes under attack."""
        scores = []
        for model in self.models_of(label):
            kept = [one.survives(radius) if attacked else one.certified(radius) for one in model.examples]
            scores.append({"figure": error_of(~torch.tensor(kept)), "per_example": per_image(~torch.tensor(kept))})
        found = level_of(scores)
        assert found is not None
        low, high = (None if end is None else 100 - end for end in (found.high, found.low))
        return Difference(100 - found.mean, low, high, found.seeds, found.over)

    def violations(self, label: str | None = None) -> Violations:
        """Return the violations of a row, or of all."""
        require_extra("counting violations", "scipy")
        from scipy.stats import binom

        models = self.models if label is None else self.models_of(label)
        examples = [one for model in models for one in model.examples if one.radius > 0 and one.attacked]
        by_chance = 2 * self.settings.alpha
        return Violations(
            count=sum(one.is_violated(self.settings) for one in examples),
            certified=len(examples),
            expected=by_chance * len(examples),
            allowed=int(binom.ppf(SURE, len(examples), by_chance)) if examples else 0,
        )

"""Read and check what `holdfast audit` stored. docs/audit.md explains every key."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import (
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    model_validator,
)

from holdfast.report.page_shell import AUDIT
from holdfast.report.stored_geometry import Slice
from holdfast.report.stored_reports import Number, Pair, ReportFile, StoredModel

if TYPE_CHECKING:
    from holdfast.auditing import Finding


class Skipped(StoredModel):
    skipped: str


def _kind(found: Any) -> str:
    """Return whether an entry was skipped or found, so that an error message is about the right kind."""
    return "skipped" if isinstance(found, Skipped) or (isinstance(found, dict) and "skipped" in found) else "found"


_IfSkipped = Annotated[Skipped, Tag("skipped")]


class Radii(StoredModel):
    """A histogram of radii: `counts` has the tokens below all edges, between neighbouring edges, and above all."""

    kind: str
    median: Number
    below: float = Field(alias="below_0.001")
    edges: list[float] = Field(min_length=2)
    counts: list[NonNegativeInt]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.counts) != len(self.edges) + 1:
            raise ValueError(f"needs {len(self.edges) + 1} counts for its {len(self.edges)} edges, has {len(self.counts)}")
        if self.edges[0] <= 0 or any(high <= low for low, high in pairwise(self.edges)):
            raise ValueError("needs increasing edges above 0")
        return self


class Undecided(StoredModel):
    share: float
    decided_that_flip: int


class Load(StoredModel):
    percent: list[float] = Field(min_length=1)
    cv: float
    dead: list[int]


class Dropped(StoredModel):
    share: float
    tokens: float


class Strip(StoredModel):
    width: float
    share: float


class NearTies(StoredModel):
    strips: list[Strip]


class Usage(StoredModel):
    mean: float


class CoSelection(StoredModel):
    groups: int


class NearOrder(StoredModel):
    order: PositiveInt
    shares: list[float]


class Boundaries(StoredModel):
    """How many of some tokens are near ties, and for one layer a slice."""

    tokens: PositiveInt
    widths: list[float] = Field(min_length=1)
    orders: list[NearOrder]
    slice: Slice | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if any(len(order.shares) != len(self.widths) for order in self.orders):
            raise ValueError("needs a share for each width in every order")
        return self


class Layer(StoredModel):
    layer: NonNegativeInt
    tokens: int
    experts: PositiveInt
    entropy: Number
    entropy_share: float
    load: Load
    near_ties: NearTies
    experts_per_token: Usage
    co_selection: CoSelection
    dropped: Dropped | None = None  # None: experts are not limited
    radius: Annotated[_IfSkipped | Annotated[Radii, Tag("found")], Discriminator(_kind)]
    undecided: Annotated[_IfSkipped | Annotated[dict[str, Undecided], Tag("found")], Discriminator(_kind)]
    boundaries: Annotated[_IfSkipped | Annotated[Boundaries, Tag("found")], Discriminator(_kind)] | None = None


class Output(StoredModel):
    total: Number
    flip: Number
    rest: Number


class Loss(StoredModel):
    change: Number


class Changes(StoredModel):
    flips: float
    first_flips: Number
    output: Output
    prediction_flips: Number
    loss: Loss | None


class LayerChanges(StoredModel):
    layer: NonNegativeInt
    flips: float
    weight_change: Number


class Perturbed(StoredModel):
    about: str
    harmless: bool
    skipped: str | None
    layers: list[LayerChanges] = Field(default_factory=list)
    overall: Changes | None = None

    @model_validator(mode="after")
    def _ran(self) -> Self:
        if self.skipped is None and (self.overall is None or not self.layers):
            raise ValueError("was not skipped, and needs layers and overall")
        return self


class AtRisk(StoredModel):
    batch: int
    layer: int
    place: int
    sequence: int | None
    position: int | None
    token: int | None
    text: str | None
    context: str | None
    before: str | None = None
    after: str | None = None
    relative: Number
    leaves: int
    enters: int


class WhatIf(StoredModel):
    router: str
    cost: dict[str, Pair]
    flips: dict[str, Pair]
    flip_output: dict[str, Pair]
    output: dict[str, Pair]
    prediction_flips: dict[str, Pair]


class View(StoredModel):
    """The tokens of a text, and by layer the relative radius of each; None if it is infinite."""

    pieces: list[str]
    layers: dict[str, list[Number]]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if any(len(radii) != len(self.pieces) for radii in self.layers.values()):
            raise ValueError("needs a radius for each piece in every layer")
        return self


class Audit(ReportFile):
    """Numbers that findings need must be present; others may be None, where a model's numbers were NaN."""

    file_name: ClassVar[str] = AUDIT
    kind: ClassVar[str] = "an audit"
    remedy: ClassVar[str] = "audit the model again"

    overall: dict[str, Any]
    layers: list[Layer] = Field(min_length=1)
    perturbations: dict[str, Perturbed]
    at_risk: list[AtRisk]
    what_if: WhatIf | None
    view: View | None = None

    @model_validator(mode="after")
    def _same_edges(self) -> Self:
        if len({tuple(layer.radius.edges) for layer in self.layers if isinstance(layer.radius, Radii)}) > 1:
            raise ValueError("needs the same edges of radii in all layers")
        return self

    @property
    def ran(self) -> dict[str, tuple[Perturbed, Changes]]:
        return {
            name: (one, one.overall)
            for name, one in self.perturbations.items()
            if one.skipped is None and one.overall is not None
        }


def findings(stored: Mapping[str, Any], source: str = AUDIT) -> "list[Finding]":
    """Return the findings of a stored audit, the most harmful first."""
    from holdfast.auditing import AuditReport, diagnose

    names = AuditReport.__dataclass_fields__
    try:
        return diagnose(AuditReport(**{name: value for name, value in stored.items() if name in names}))
    except (KeyError, TypeError, ValueError) as problem:  # for example a perturbation of another version
        raise ValueError(
            f"{source} has an entry that this version cannot read ({problem}); audit the model again."
        ) from None

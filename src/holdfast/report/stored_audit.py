"""Read and check what `holdfast audit` stored. docs/audit.md explains every key."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    ValidationError,
    model_validator,
)

from holdfast.files import LARGEST, read_bytes
from holdfast.report.page_shell import AUDIT
from holdfast.report.stored_comparison import Number
from holdfast.report.stored_geometry import Slice

if TYPE_CHECKING:
    from holdfast.auditing import Finding


class _StoredModel(BaseModel):
    """Numbers that findings need must be present; others may be None, where a model's numbers were NaN."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Skipped(_StoredModel):
    skipped: str


def _kind(found: Any) -> str:
    """Return whether an entry was skipped or found, so that an error message is about the right kind."""
    return "skipped" if isinstance(found, Skipped) or (isinstance(found, dict) and "skipped" in found) else "found"


_IfSkipped = Annotated[Skipped, Tag("skipped")]


class Radii(_StoredModel):
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


class Undecided(_StoredModel):
    share: float
    decided_that_flip: int


class Load(_StoredModel):
    percent: list[float] = Field(min_length=1)
    cv: float
    dead: list[int]


class Dropped(_StoredModel):
    share: float
    tokens: float


class Strip(_StoredModel):
    width: float
    share: float


class NearTies(_StoredModel):
    strips: list[Strip]


class Usage(_StoredModel):
    mean: float


class CoSelection(_StoredModel):
    groups: int


class NearOrder(_StoredModel):
    order: PositiveInt
    shares: list[float]


class Boundaries(_StoredModel):
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


class Layer(_StoredModel):
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


class Output(_StoredModel):
    total: Number
    flip: Number
    rest: Number


class Loss(_StoredModel):
    change: Number


class Changes(_StoredModel):
    flips: float
    first_flips: Number
    output: Output
    prediction_flips: Number
    loss: Loss | None


class LayerChanges(_StoredModel):
    layer: NonNegativeInt
    flips: float
    weight_change: Number


class Perturbed(_StoredModel):
    about: str
    harmless: bool
    skipped: str | None
    layers: list[LayerChanges] = []
    overall: Changes | None = None

    @model_validator(mode="after")
    def _ran(self) -> Self:
        if self.skipped is None and (self.overall is None or not self.layers):
            raise ValueError("was not skipped, and needs layers and overall")
        return self


class AtRisk(_StoredModel):
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


class Pair(_StoredModel):
    before: Number
    after: Number


class WhatIf(_StoredModel):
    router: str
    cost: dict[str, Pair]
    flips: dict[str, Pair]
    flip_output: dict[str, Pair]
    prediction_flips: dict[str, Pair]


class View(_StoredModel):
    """The tokens of a text, and by layer the relative radius of each; None if it is infinite."""

    pieces: list[str]
    layers: dict[str, list[Number]]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if any(len(radii) != len(self.pieces) for radii in self.layers.values()):
            raise ValueError("needs a radius for each piece in every layer")
        return self


class Audit(_StoredModel):
    status: str
    model: dict[str, Any]
    data: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    seconds: Number
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
    def title(self) -> str:
        return str(self.model.get("name") or self.model.get("class") or "a model")

    @property
    def ran(self) -> dict[str, tuple[Perturbed, Changes]]:
        return {
            name: (one, one.overall)
            for name, one in self.perturbations.items()
            if one.skipped is None and one.overall is not None
        }


def read_audit(path: Path) -> dict[str, Any]:
    """Return the audit stored in a file, or in a folder that `holdfast audit` wrote to."""
    path = path / AUDIT if path.is_dir() else path
    try:
        stored = json.loads(read_bytes(path, limit=LARGEST))
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror or problem}.") from None
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is damaged: it is not JSON ({problem}); audit the model again.") from None
    return checked(stored, str(path))


def checked(stored: Any, source: str = AUDIT) -> dict[str, Any]:
    """Return `stored`. Raise ValueError with a one-line error about the first problem; `source` is its name there."""
    from holdfast.auditing.stored_report import SCHEMA

    if not isinstance(stored, Mapping) or stored.get("schema") != SCHEMA:
        found = stored.get("schema") if isinstance(stored, Mapping) else None
        raise ValueError(f"{source} is not an audit of schema {SCHEMA} (it says {found!r}); audit the model again.")
    parse_audit(stored, source)
    return dict(stored)


def parse_audit(stored: Mapping[str, Any], source: str = AUDIT) -> Audit:
    """Return the stored audit as typed data. Raise ValueError with a one-line error about the first problem."""
    try:
        return Audit.model_validate(stored)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its top level"
        raise ValueError(f"{source} is damaged at {place}: {first['msg'].lower()}; audit the model again.") from None


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

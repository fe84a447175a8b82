"""Read and check what `holdfast geometry` stored. docs/geometry-pages.md explains every key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, NonNegativeInt, PositiveInt, Tag, ValidationError
from pydantic import model_validator as validator

from holdfast.files import LARGEST, read_bytes
from holdfast.report.page_shell import GEOMETRY
from holdfast.report.stored_comparison import Number

SCHEMA = 1
LARGEST_GRID = 512  # points on each side of a slice


class _StoredModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Order(_StoredModel):
    order: PositiveInt
    shares: list[float]
    median: Number
    law: list[Number] | None = None  # the share of a ball within each width


class Ties(_StoredModel):
    widths: list[Annotated[float, Field(gt=0)]] = Field(min_length=1)
    exact: bool
    orders: list[Order]

    @validator(mode="after")
    def _fits(self) -> Self:
        if any(len(order.shares) != len(self.widths) for order in self.orders):
            raise ValueError("needs a share for each width in every order")
        if any(order.law is not None and len(order.law) != len(self.widths) for order in self.orders):
            raise ValueError("needs a number for each width in every law")
        return self


class Hitting(_StoredModel):
    times: list[Annotated[float, Field(gt=0)]] = Field(min_length=1)
    lower: list[float]
    upper: list[float]
    simulated: list[float]
    tokens: PositiveInt
    walks: PositiveInt
    exits_of_order_1: Number

    @validator(mode="after")
    def _fits(self) -> Self:
        if any(len(each) != len(self.times) for each in (self.lower, self.upper, self.simulated)):
            raise ValueError("needs a number for each time")
        return self


class JumpSizes(_StoredModel):
    mean: Number
    median: Number
    largest: Number


class Jump(_StoredModel):
    batch: int
    place: int
    sequence: int | None
    position: int | None
    text: str | None
    before: str | None
    after: str | None
    size: Number
    size_with_what_if: Number
    distance: Number
    leaves: int
    enters: int


class Jumps(_StoredModel):
    routers: list[JumpSizes] = Field(min_length=1, max_length=2)
    largest: list[Jump]


class Mark(_StoredModel):
    x: float
    y: float
    text: str | None


class Panel(_StoredModel):
    extra: list[list[NonNegativeInt]] | None


class Slice(_StoredModel):
    """A square of a plane: `cells` has an index into `sets` for each grid point, rows from low to high."""

    kind: str
    unit: float
    low: tuple[float, float]
    high: tuple[float, float]
    sets: list[list[NonNegativeInt]] = Field(min_length=1)
    cells: list[list[NonNegativeInt]] = Field(min_length=1, max_length=LARGEST_GRID)
    lines: list[tuple[float, float, float, float, int, int]]
    points: list[tuple[float, float, int, int, int]]
    disagree: int
    panels: list[Panel] = Field(min_length=1, max_length=2)
    tokens: list[Mark] = Field(min_length=1)

    @validator(mode="after")
    def _fits(self) -> Self:
        grids = [self.cells, *(panel.extra for panel in self.panels if panel.extra is not None)]
        if any(len(row) != len(self.cells) for each in grids for row in each) or any(
            len(each) != len(self.cells) for each in grids
        ):
            raise ValueError("needs square grids of the same size")
        if max(max(row) for row in self.cells) >= len(self.sets):
            raise ValueError("has a cell without a set")
        return self


class Normal(_StoredModel):
    distance: float
    leaves: int
    enters: int
    positions: list[float]
    change: list[list[Number]] = Field(min_length=1, max_length=2)
    steps: list[Annotated[float, Field(gt=0)]]
    largest: list[list[Number]] = Field(min_length=1, max_length=2)

    @validator(mode="after")
    def _fits(self) -> Self:
        if any(len(curve) != len(self.positions) for curve in self.change):
            raise ValueError("needs a change for each position")
        if any(len(curve) != len(self.steps) for curve in self.largest):
            raise ValueError("needs a difference for each step")
        return self


class PictureToken(_StoredModel):
    text: str | None
    before: str | None
    after: str | None
    distance: float


class Pictures(_StoredModel):
    token: PictureToken
    slices: list[Slice]
    normal: Normal


class Extra(_StoredModel):
    extra: list[float] = Field(min_length=3, max_length=3)
    extra_law: list[Number] | None = None


class Skipped(_StoredModel):
    skipped: str


class GraphPrecision(_StoredModel):
    half_width: Number
    alpha: float
    noise: list[float] = Field(min_length=1)
    mean: list[Number] = Field(min_length=1)
    largest: list[Number] = Field(min_length=1)
    beyond: list[Number] = Field(min_length=1)


class Entropies(_StoredModel):
    own: Number
    informed: Number
    bound: Number


class Space(_StoredModel):
    distance: Number
    predicted: Number
    measured: Number
    condition: Number


class Clusters(_StoredModel):
    clusters: int
    noise: float
    plain: Space
    scaled: Space


class Slope(_StoredModel):
    at_token: Number
    jump: Number
    largest: Number


class Slopes(_StoredModel):
    strip: float
    softmax: Slope
    top_k: Slope = Field(alias="top-k")
    smooth: Slope


class Tsne(_StoredModel):
    x: list[float]
    y: list[float]
    experts: list[NonNegativeInt]

    @validator(mode="after")
    def _fits(self) -> Self:
        if not len(self.x) == len(self.y) == len(self.experts):
            raise ValueError("needs two coordinates and an expert for each token")
        return self


def _is_skipped(found: Any) -> str:
    return "skipped" if isinstance(found, Skipped) or (isinstance(found, dict) and "skipped" in found) else "found"


_IfSkipped = Annotated[Skipped, Tag("skipped")]


class Theory(_StoredModel):
    """Statements of the papers beside measurement, each with the reason if it does not apply."""

    co_selection: Annotated[_IfSkipped | Annotated[GraphPrecision, Tag("found")], Discriminator(_is_skipped)]
    entropy: Annotated[_IfSkipped | Annotated[Entropies, Tag("found")], Discriminator(_is_skipped)]
    clusters: Annotated[_IfSkipped | Annotated[Clusters, Tag("found")], Discriminator(_is_skipped)]
    slopes: Annotated[_IfSkipped | Annotated[Slopes, Tag("found")], Discriminator(_is_skipped)]
    tsne: Annotated[_IfSkipped | Annotated[Tsne, Tag("found")], Discriminator(_is_skipped)]


class Norms(_StoredModel):
    mean: float
    std: float


class Measured(_StoredModel):
    layer: NonNegativeInt
    name: str
    router: str
    skipped: None
    width: PositiveInt
    experts: PositiveInt
    k: PositiveInt
    tokens: PositiveInt
    norm: Norms
    ties: Ties
    hitting: Hitting | None
    jumps: Jumps
    pictures: Pictures | None
    theory: Theory | None = None
    what_if: Extra | None = None

    @validator(mode="before")
    @classmethod
    def _without_pictures(cls, stored: Any) -> Any:
        """A layer that was left out of the pictures has empty entries."""
        if not isinstance(stored, dict):
            return stored
        return {**stored, "pictures": stored.get("pictures") or None, "theory": stored.get("theory") or None}


class Refused(_StoredModel):
    layer: NonNegativeInt
    name: str
    router: str
    skipped: str


def _kind(found: Any) -> str:
    """Return which of the two a layer is, so that an error message is about the right one."""
    skipped = found.get("skipped") if isinstance(found, dict) else getattr(found, "skipped", None)
    return "measured" if skipped is None else "refused"


Layer = Annotated[Annotated[Measured, Tag("measured")] | Annotated[Refused, Tag("refused")], Discriminator(_kind)]


class Pair(_StoredModel):
    before: Number
    after: Number


class WhatIf(_StoredModel):
    router: str
    cost: dict[str, Pair]
    jump: Pair


class Geometry(_StoredModel):
    status: str
    model: dict[str, Any]
    data: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    seconds: Number
    layers: list[Layer] = Field(min_length=1)
    what_if: WhatIf | None

    @property
    def title(self) -> str:
        return str(self.model.get("name") or self.model.get("class") or "a model")

    @property
    def measured(self) -> list[Measured]:
        return [layer for layer in self.layers if isinstance(layer, Measured)]

    @property
    def refused(self) -> list[Refused]:
        return [layer for layer in self.layers if isinstance(layer, Refused)]


def read_geometry(path: Path) -> dict[str, Any]:
    """Return the report stored in a file, or in a folder that `holdfast geometry` wrote to."""
    path = path / GEOMETRY if path.is_dir() else path
    try:
        stored = json.loads(read_bytes(path, limit=LARGEST))
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror or problem}.") from None
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is damaged: it is not JSON ({problem}); measure the model again.") from None
    parse_geometry(stored, str(path))
    return dict(stored)


def parse_geometry(stored: Any, source: str = GEOMETRY) -> Geometry:
    """Return a stored report as typed data. Raise ValueError with a one-line error about the first problem."""
    if not isinstance(stored, Mapping) or stored.get("schema") != SCHEMA:
        found = stored.get("schema") if isinstance(stored, Mapping) else None
        raise ValueError(
            f"{source} is not a geometry report of schema {SCHEMA} (it says {found!r}); measure the model again."
        )
    try:
        return Geometry.model_validate(stored)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "its top level"
        raise ValueError(f"{source} is damaged at {place}: {first['msg'].lower()}; measure the model again.") from None

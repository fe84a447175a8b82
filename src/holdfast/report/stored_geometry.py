"""Read and check what `holdfast geometry` stored. docs/geometry-pages.md explains every key."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Discriminator, Field, NonNegativeInt, PositiveInt, Tag
from pydantic import model_validator as validator

from holdfast.report.page_shell import GEOMETRY
from holdfast.report.stored_reports import Number, Pair, ReportFile, StoredModel

LARGEST_GRID = 512  # points on each side of a slice


class Order(StoredModel):
    order: PositiveInt
    shares: list[float]
    median: Number
    law: list[Number] | None = None  # the share of a ball within each width


class Ties(StoredModel):
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


class Hitting(StoredModel):
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


class JumpSizes(StoredModel):
    mean: Number
    median: Number
    largest: Number


class Jump(StoredModel):
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


class Jumps(StoredModel):
    routers: list[JumpSizes] = Field(min_length=1, max_length=2)
    largest: list[Jump]


class Mark(StoredModel):
    x: float
    y: float
    text: str | None


class Panel(StoredModel):
    extra: list[list[NonNegativeInt]] | None


class Slice(StoredModel):
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


class Normal(StoredModel):
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


class PictureToken(StoredModel):
    text: str | None
    before: str | None
    after: str | None
    distance: float


class Pictures(StoredModel):
    token: PictureToken
    slices: list[Slice]
    normal: Normal


class Extra(StoredModel):
    extra: list[float] = Field(min_length=3, max_length=3)
    extra_law: list[Number] | None = None


class Skipped(StoredModel):
    skipped: str


class GraphPrecision(StoredModel):
    half_width: Number
    alpha: float
    noise: list[float] = Field(min_length=1)
    mean: list[Number] = Field(min_length=1)
    largest: list[Number] = Field(min_length=1)
    beyond: list[Number] = Field(min_length=1)


class Entropies(StoredModel):
    own: Number
    informed: Number
    bound: Number


class Space(StoredModel):
    distance: Number
    predicted: Number
    measured: Number
    condition: Number


class Clusters(StoredModel):
    clusters: int
    noise: float
    plain: Space
    scaled: Space


class Slope(StoredModel):
    at_token: Number
    jump: Number
    largest: Number


class Slopes(StoredModel):
    strip: float
    softmax: Slope
    top_k: Slope = Field(alias="top-k")
    smooth: Slope


class Tsne(StoredModel):
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


class Theory(StoredModel):
    """Statements of the papers beside measurement, each with the reason if it does not apply."""

    co_selection: Annotated[_IfSkipped | Annotated[GraphPrecision, Tag("found")], Discriminator(_is_skipped)]
    entropy: Annotated[_IfSkipped | Annotated[Entropies, Tag("found")], Discriminator(_is_skipped)]
    clusters: Annotated[_IfSkipped | Annotated[Clusters, Tag("found")], Discriminator(_is_skipped)]
    slopes: Annotated[_IfSkipped | Annotated[Slopes, Tag("found")], Discriminator(_is_skipped)]
    tsne: Annotated[_IfSkipped | Annotated[Tsne, Tag("found")], Discriminator(_is_skipped)]


class Norms(StoredModel):
    mean: float
    std: float


class Measured(StoredModel):
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


class Refused(StoredModel):
    layer: NonNegativeInt
    name: str
    router: str
    skipped: str


def _kind(found: Any) -> str:
    """Return which of the two a layer is, so that an error message is about the right one."""
    skipped = found.get("skipped") if isinstance(found, dict) else getattr(found, "skipped", None)
    return "measured" if skipped is None else "refused"


Layer = Annotated[Annotated[Measured, Tag("measured")] | Annotated[Refused, Tag("refused")], Discriminator(_kind)]


class WhatIf(StoredModel):
    router: str
    cost: dict[str, Pair]
    jump: Pair


class Geometry(ReportFile):
    file_name: ClassVar[str] = GEOMETRY
    kind: ClassVar[str] = "a geometry report"
    remedy: ClassVar[str] = "measure the model again"

    layers: list[Layer] = Field(min_length=1)
    what_if: WhatIf | None

    @property
    def measured(self) -> list[Measured]:
        return [layer for layer in self.layers if isinstance(layer, Measured)]

    @property
    def refused(self) -> list[Refused]:
        return [layer for layer in self.layers if isinstance(layer, Refused)]

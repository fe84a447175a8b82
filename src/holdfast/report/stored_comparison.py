"""What `holdfast compare` stored, read back and checked. Keys that the report does not show are passed over."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from holdfast.files import LARGEST, read_bytes

NAME = "results.json"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]  # None where a run broke: JSON knows no NaN


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Difference(_Part):
    mean: Number
    low: Number
    high: Number
    seeds: int
    words: str


class Cost(_Part):
    """On the words that the attack left alone, the rise of the loss in nats a word; `words` says it as perplexity."""

    mean: Number
    low: Number
    high: Number
    words: str

    @property
    def certain(self) -> bool:
        """Whether the interval lies above 0."""
        return self.low is not None and self.low > 0


class EqualCompute(Difference):
    """The difference to the baseline with more experts a token."""

    router: str


class Row(_Part):
    router: str
    seeds: list[int]
    parameters: int
    experts_per_token: Number
    clean: Number
    attacked: Number
    clean_difference: Difference | None = Field(None, alias="clean, difference")
    attacked_difference: Difference | None = Field(None, alias="attacked, difference")
    cost: Cost | None = None
    cost_difference: Difference | None = Field(None, alias="cost, difference")
    equal_compute: EqualCompute | None = Field(None, alias="equal compute")


class Load(_Part):
    percent: list[float]
    cv: Number
    dead: list[int]


class Strip(_Part):
    width: float
    share: Number


class NearTies(_Part):
    strips: list[Strip]


class Layer(_Part):
    layer: int
    experts: int
    entropy: Number
    load: Load
    near_ties: NearTies
    instability: Number = None


class Routing(_Part):
    layers: list[Layer]


class Score(_Part):
    """`figure` is what routers are compared by; results from before there were pictures call it `perplexity`."""

    figure: Number = Field(validation_alias=AliasChoices("figure", "perplexity"))
    figure_of_kept: Number = Field(  # over the targets that the attack left alone
        None, validation_alias=AliasChoices("figure_of_kept", "perplexity_of_clean_targets")
    )
    routing: Routing


class Trial(_Part):
    figure: Number
    cost: Cost | None = None


class LayerSnapshots(_Part):
    layer: int
    fluctuation: list[Number]  # between each snapshot and the next
    graphs: list[list[list[Number]]] = []  # of each snapshot, experts x experts


class Snapshots(_Part):
    steps: list[int]
    graph: Literal["learned", "co-selection"] = "co-selection"
    layers: list[LayerSnapshots]

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        for layer in self.layers:
            if len(layer.fluctuation) != max(0, len(self.steps) - 1):
                raise ValueError(
                    f"layer {layer.layer} needs a fluctuation between each of {len(self.steps)} steps and the next"
                )
            if layer.graphs and len(layer.graphs) != len(self.steps):
                raise ValueError(f"layer {layer.layer} needs a graph for each of {len(self.steps)} steps")
            if any(len(row) != len(graph) for graph in layer.graphs for row in graph):
                raise ValueError(f"layer {layer.layer} has a graph that is not square")
        return self


class Consistency(_Part):
    what: str
    layers: list[Number]


class TextView(_Part):
    kind: Literal["text"]
    pieces: list[str]
    experts: list[list[NonNegativeInt]]  # the first expert of each piece, for each layer

    @model_validator(mode="after")
    def _every_piece_has_an_expert(self) -> Self:
        if any(len(layer) != len(self.pieces) for layer in self.experts):
            raise ValueError("each layer needs one expert for each piece")
        return self


class Picture(_Part):
    label: str
    said: str
    pixels: list[Annotated[list[float], Field(min_length=1)]] = Field(min_length=1)  # grey, 0 is black and 1 white
    grid: tuple[PositiveInt, PositiveInt]  # patches down and across
    experts: list[list[NonNegativeInt]]  # the first expert of each patch, row by row, for each layer

    @model_validator(mode="after")
    def _every_patch_has_an_expert(self) -> Self:
        if any(len(layer) != self.grid[0] * self.grid[1] for layer in self.experts):
            raise ValueError("each layer needs one expert for each patch of the grid")
        if any(len(row) != len(self.pixels[0]) for row in self.pixels):
            raise ValueError("the rows of pixels differ in length")
        return self


class PicturesView(_Part):
    kind: Literal["pictures"]
    pictures: list[Picture]


class Entry(_Part):
    step: int
    loss: Number = None


class Cell(_Part):
    router: str
    seed: int
    first_batch: str = ""
    last_batch: str = ""
    log: list[Entry]
    clean: Score
    attacked: Score
    trials: dict[str, Trial] = {}
    snapshots: Snapshots | None = None
    consistency: Consistency | None = None
    view: Annotated[TextView | PicturesView, Field(discriminator="kind")] | None = None


class Measure(_Part):
    """What `figure` is; lower is better. A name such as "error, %" says its unit behind the comma."""

    name: str = "perplexity"
    long: str = "perplexity a token"
    attack: str = "a swap of some of the words"

    @property
    def noun(self) -> str:
        return self.name.partition(",")[0].strip()

    @property
    def unit(self) -> str:
        return self.name.partition(",")[2].strip()

    @property
    def sentence(self) -> str:
        return f"{self.long[:1].upper()}{self.long[1:]}; lower is better."


class Run(_Part):
    holdfast: str
    recipe: dict[str, Any]
    data: dict[str, Any] = Field(validation_alias=AliasChoices("data", "text"))
    attack: dict[str, Any]
    measure: Measure = Measure()


class Results(_Part):
    """A comparison. The first row is the baseline's."""

    run: Run
    versions: dict[str, str] = {}
    rows: list[Row] = Field(min_length=1)
    cells: list[Cell]
    checksum: str = ""  # of the file, where it was read from one

    def cells_of(self, router: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.router == router]

    def first_seed_of(self, router: str, has: Callable[[Cell], bool]) -> Cell | None:
        """For what is shown of one run only."""
        return min(filter(has, self.cells_of(router)), key=lambda cell: cell.seed, default=None)

    @property
    def title(self) -> str:
        """What was trained, on which data."""
        about, name = str(self.run.recipe.get("about") or "A comparison of routers"), self.run.data.get("name")
        return f"{about}, on {name}" if name else about

    @property
    def targets_are_attacked(self) -> bool:
        """Whether the attack changes what is to be predicted too, and clean and attacked figures are not of one task."""
        return any(cell.attacked.figure_of_kept is not None for cell in self.cells)


def read_results(folder: Path) -> Results:
    """The results of a comparison in its folder."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the folder of a comparison, which holds {NAME}.")
    path = folder / NAME
    if not path.is_file():
        raise ValueError(f"{folder} holds no {NAME}; give the folder that a finished `holdfast compare` wrote to.")
    content = read_bytes(path, limit=LARGEST)
    try:
        stored = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged and no JSON ({error}); run the same `holdfast compare` again.") from None
    if isinstance(stored, dict):
        stored["checksum"] = hashlib.sha256(content).hexdigest()
    return parse(stored, str(path))


def parse(stored: Any, source: str = NAME) -> Results:
    """Checked, with one sentence about the first thing that is wrong. `source` is what the sentence calls it."""
    try:
        return Results.model_validate(stored)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ValueError(
            f"{source} is damaged or of another version, at {place}: {first['msg'].lower()}; "
            "run the same `holdfast compare` again."
        ) from None

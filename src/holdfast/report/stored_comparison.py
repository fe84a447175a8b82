"""Read and check what `holdfast compare` stored. Keys that the report does not show are skipped."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from holdfast.files import LARGEST, read_bytes
from holdfast.metrics.paired import FEWEST_SEEDS
from holdfast.report.stored_reports import Number, StoredModel, first_problem
from holdfast.routing.grammar import short_keys, written_pairs

NAME = "results.json"


Over = Literal["seeds and examples", "these models only", "these examples only"]
EVERYTHING: Over = "seeds and examples"  # the only interval from which something may be claimed


class OverSeeds(StoredModel):
    """A mean over seeds with its 95% interval; `over` is what the interval covers."""

    mean: Number = None
    low: Number = None
    high: Number = None
    over: Over | None = None


class Difference(OverSeeds):
    seeds: int
    words: str

    @property
    def kind(self) -> Literal["lower", "higher", "same", "unknown"]:
        """What may be claimed: "unknown" unless there is an interval over seeds and examples."""
        if self.mean is None or self.low is None or self.high is None or self.over != EVERYTHING:
            return "unknown"
        return "lower" if self.high < 0 else "higher" if self.low > 0 else "same"

    @property
    def shows(self) -> float:
        """Half the width of the interval: a difference above it would have been shown."""
        assert self.low is not None and self.high is not None
        return (self.high - self.low) / 2

    def change(self, unit: str) -> tuple[str, str]:
        """Return the verb, and the size with its interval, of a difference that may be claimed."""
        assert self.mean is not None and self.low is not None and self.high is not None
        verb, low, high = ("lowered", -self.high, -self.low) if self.mean < 0 else ("raised", self.low, self.high)
        return verb, f"{abs(self.mean):.3g}{unit} (95% interval {low:.3g} to {high:.3g})"


class Cost(OverSeeds):
    """The rise of the loss on untouched words, in nats per word; `words` is the rise of the perplexity as text."""

    words: str

    @property
    def certain(self) -> bool:
        """Whether it may be claimed that the loss rises."""
        return self.low is not None and self.low > 0 and self.over == EVERYTHING


class EqualCompute(Difference):
    """The difference to the baseline with more experts per token."""

    router: str


class MetricRow(StoredModel):
    """A further metric of a router."""

    clean: Number = None
    attacked: Number = None
    attacked_clean: Number = Field(None, alias="attacked, clean")  # of the attacked examples, without the attack
    clean_difference: Difference | None = Field(None, alias="clean, difference")
    attacked_difference: Difference | None = Field(None, alias="attacked, difference")


class ShiftRow(StoredModel):
    """A router's result on a shifted test set."""

    measure: str
    better: Literal["higher", "lower"] = "lower"
    figure: Number = None
    difference: Difference | None = None


class ScoreRow(OverSeeds):
    """The figure of a router on clean data or under one attack; `clean` is that of the attacked examples without it."""

    difference: Difference | None = None
    clean: Number = None


class CurveRow(StoredModel):
    """The errors of a router against the budget of one attack."""

    budgets: list[float] = Field(min_length=1)
    examples: int
    figure: list[OverSeeds]
    top5: list[OverSeeds]

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if not len(self.budgets) == len(self.figure) == len(self.top5):
            raise ValueError("a curve needs one error and one top-5 error for each budget")
        return self


class Row(StoredModel):
    router: str
    seeds: list[int]
    parameters: int
    experts_per_token: Number
    clean: Number
    attacked: Number
    attacked_clean: Number = Field(None, alias="attacked, clean")  # of the attacked examples, without the attack
    examples: dict[str, int | None] = Field(default_factory=dict)  # of images and labelled texts: "clean", "attacked"
    apart: str | None = None  # why its figures cannot be compared with those of the other rows
    clean_difference: Difference | None = Field(None, alias="clean, difference")
    attacked_difference: Difference | None = Field(None, alias="attacked, difference")
    cost: Cost | None = None
    cost_difference: Difference | None = Field(None, alias="cost, difference")
    equal_compute: EqualCompute | None = Field(None, alias="equal compute")
    changed: Number = Field(None, alias="predictions changed")  # share of predictions that the attack changes
    metrics: dict[str, MetricRow] = Field(default_factory=dict)
    shifts: dict[str, ShiftRow] = Field(default_factory=dict)
    scores: dict[str, ScoreRow] = Field(default_factory=dict)  # "clean", and the names of attacks
    curves: dict[str, CurveRow] = Field(default_factory=dict)  # by the name of the attack
    settings: dict[str, Any] = Field(default_factory=dict)  # of a sweep: keys of the recipe and their values

    @property
    def setting_label(self) -> str:
        return written_pairs(dict(zip(short_keys(list(self.settings)), self.settings.values(), strict=True)))

    @property
    def label(self) -> str:
        """The router and its setting, unique among the rows."""
        return ", ".join(filter(None, [self.name, self.setting_label]))

    @property
    def name(self) -> str:
        """The router, and why it stands apart, if it does."""
        return f"{self.router} ({self.apart})" if self.apart else self.router

    @property
    def clean_beside_attacked(self) -> Number:
        """The clean figure of the attacked examples: they may be fewer than all test examples."""
        return self.clean if self.attacked_clean is None else self.attacked_clean

    @property
    def attacks_some(self) -> bool:
        """Whether not all test examples were attacked."""
        return self.attacked_clean is not None and self.examples.get("clean") != self.examples.get("attacked")


class DomainRow(StoredModel):
    """The accuracies of a router over held-out domains, in percent; in a sweep, in one setting of it."""

    router: str
    seeds: list[int]
    settings: dict[str, Any] = Field(default_factory=dict)  # without the held-out domain
    accuracy: dict[str, OverSeeds]  # by held-out domain
    mean: OverSeeds
    worst: OverSeeds
    mean_difference: Difference | None = Field(None, alias="mean, difference")
    worst_difference: Difference | None = Field(None, alias="worst, difference")


class Load(StoredModel):
    percent: list[float]
    cv: Number
    dead: list[int]


class Dropped(StoredModel):
    share: float
    tokens: float


class Strip(StoredModel):
    width: float
    share: Number


class NearTies(StoredModel):
    strips: list[Strip]


class Layer(StoredModel):
    layer: int
    experts: int
    entropy: Number
    load: Load
    near_ties: NearTies
    instability: Number = None
    dropped: Dropped | None = None  # None: experts are not limited


class Routing(StoredModel):
    layers: list[Layer]


class Score(StoredModel):
    """`figure` is the number that routers are compared by; old results call it `perplexity`."""

    figure: Number = Field(validation_alias=AliasChoices("figure", "perplexity"))
    figure_of_kept: Number = Field(  # over the untouched targets
        None, validation_alias=AliasChoices("figure_of_kept", "perplexity_of_clean_targets")
    )
    clean: Number = None  # of attacked images: their figure without the attack
    examples: int | None = None  # of images and labelled texts
    routing: Routing


class AttackResult(StoredModel):
    figure: Number
    examples: int | None = None
    cost: Cost | None = None
    changed: Number = Field(None, alias="predictions_changed")  # share of predictions


class LayerSnapshots(StoredModel):
    layer: int
    fluctuation: list[Number]  # between each snapshot and the next
    graphs: list[list[list[Number]]] = Field(default_factory=list)  # of each snapshot, experts x experts


class Snapshots(StoredModel):
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


class Consistency(StoredModel):
    what: str
    layers: list[Number]


class TextView(StoredModel):
    kind: Literal["text"]
    pieces: list[str]
    experts: list[list[NonNegativeInt]]  # the first expert of each piece, for each layer

    @model_validator(mode="after")
    def _every_piece_has_an_expert(self) -> Self:
        if any(len(layer) != len(self.pieces) for layer in self.experts):
            raise ValueError("each layer needs one expert for each piece")
        return self


class ShownImage(StoredModel):
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


class ImagesView(StoredModel):
    kind: Literal["images"]
    images: list[ShownImage]


class Entry(StoredModel):
    step: int
    loss: Number = None


class Cell(StoredModel):
    router: str
    seed: int
    settings: dict[str, Any] = Field(default_factory=dict)
    first_batch: str = ""
    last_batch: str = ""
    log: list[Entry]
    clean: Score
    attacked: Score
    trials: dict[str, AttackResult] = Field(default_factory=dict)
    snapshots: Snapshots | None = None
    consistency: Consistency | None = None
    view: Annotated[TextView | ImagesView, Field(discriminator="kind")] | None = None


class Measure(StoredModel):
    """What `figure` measures. In a name such as "error, %" the unit follows the comma."""

    name: str = "perplexity"
    long: str = "perplexity per token"
    attack: str = "a swap of some of the words"
    better: Literal["lower", "higher"] = "lower"

    @property
    def noun(self) -> str:
        return self.name.partition(",")[0].strip()

    @property
    def unit(self) -> str:
        return self.name.partition(",")[2].strip()

    @property
    def points(self) -> str:
        """The unit of a difference: "by 3%" could be read as 3% of the old value."""
        return {"": "", "%": " percentage points"}.get(self.unit, f" {self.unit}")

    @property
    def digits(self) -> int:
        """How many decimals to show: F1 and correlations are at most 1, errors and perplexities are not."""
        return 2 if self.better == "lower" else 4

    @property
    def sentence(self) -> str:
        return f"{self.long[:1].upper()}{self.long[1:]}; {self.better} is better."


class Metric(StoredModel):
    """A further metric, beside the main measure."""

    name: str
    about: str
    better: Literal["higher", "lower"] = "higher"


class Run(StoredModel):
    holdfast: str
    recipe: dict[str, Any]
    data: dict[str, Any] = Field(validation_alias=AliasChoices("data", "text"))
    attack: dict[str, Any]
    measure: Measure = Measure()
    metrics: list[Metric] = Field(default_factory=list)
    plugins: list[dict[str, Any]] = Field(default_factory=list)


class Results(StoredModel):
    """A comparison. The first row is the baseline; in a sweep, its router is the baseline of each setting."""

    run: Run
    versions: dict[str, str] = Field(default_factory=dict)
    rows: list[Row] = Field(min_length=1)
    cells: list[Cell]
    domains: list[DomainRow] = Field(default_factory=list)  # if several domains were held out
    checksum: str = ""  # of the file, if it was read from one

    def cells_of(self, row: Row) -> list[Cell]:
        return [cell for cell in self.cells if (cell.router, cell.settings) == (row.router, row.settings)]

    def first_seed_of(self, row: Row, has: Callable[[Cell], bool]) -> Cell | None:
        """Return the row's cell of the lowest seed for which `has` is true."""
        return min(filter(has, self.cells_of(row)), key=lambda cell: cell.seed, default=None)

    def is_baseline(self, row: Row) -> bool:
        return row.router == self.rows[0].router

    @property
    def others(self) -> list[Row]:
        """The rows that are compared with a baseline: not those that stand apart."""
        return [row for row in self.rows if not self.is_baseline(row) and row.apart is None]

    def no_claim(self, differences: Sequence[Difference | None]) -> tuple[str, ...]:
        """Return why none of these differences may be claimed, in a sentence or two; empty if one may."""
        if any(one is not None and one.kind != "unknown" for one in differences):
            return ()
        if any(one is not None and one.over == "these examples only" for one in differences):
            return (
                "The results of single test examples are not stored with these cells, so no difference can be judged; train "
                "them again in a new folder.",
            )
        if any(len(row.seeds) >= FEWEST_SEEDS for row in self.others):
            return (
                f"The {self.run.measure.noun} is not defined in enough runs to compare routers with {self.rows[0].router}.",
                "A correlation with constant predictions, for example, is not defined.",
            )
        return (
            f"Fewer than {FEWEST_SEEDS} seeds cannot show whether a router differs from {self.rows[0].router}.",
            f"The intervals are for these models only; train with {FEWEST_SEEDS} seeds or more to compare routers.",
        )

    @property
    def swept(self) -> list[str]:
        """The keys of the sweep; none without one."""
        return list(dict.fromkeys(key for row in self.rows for key in row.settings))

    @property
    def settings(self) -> list[str]:
        """The labels of all settings, in order."""
        return list(dict.fromkeys(row.setting_label for row in self.rows))

    @property
    def title(self) -> str:
        """What was trained, and on which data."""
        about, name = str(self.run.recipe.get("about") or "A comparison of routers"), self.run.data.get("name")
        if name and self.run.recipe.get("task") in ("images", "labels") and (data := self.run.data.get("about")):
            name = f"{name} ({str(data).partition(';')[0]})"
        return f"{about}, on {name}" if name else about

    @property
    def targets_are_attacked(self) -> bool:
        """Whether the attack also changes the targets, so that clean and attacked numbers cannot be compared directly."""
        return any(cell.attacked.figure_of_kept is not None for cell in self.cells)


def read_results(folder: Path) -> Results:
    """Return the results of a comparison from its folder."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the folder of a comparison, which contains {NAME}.")
    path = folder / NAME
    if not path.is_file():
        raise ValueError(f"{folder} has no {NAME}; give the folder that a finished `holdfast compare` wrote to.")
    content = read_bytes(path, limit=LARGEST)
    try:
        stored = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({error}); run the same `holdfast compare` again.") from None
    if isinstance(stored, dict):
        stored["checksum"] = hashlib.sha256(content).hexdigest()
    return parse(stored, str(path))


def parse(stored: Any, source: str = NAME) -> Results:
    """Return the results as typed data. Raise ValueError with a one-line error about the first problem in `source`."""
    try:
        return Results.model_validate(stored)
    except ValidationError as error:
        raise ValueError(
            f"{source} is damaged or of another version, at {first_problem(error)}; run the same `holdfast compare` again."
        ) from None

"""The results of a comparison: what `holdfast.compare` returns, and its dump, `results.json`.

    Results       how it was run, the rows that compare routers, and the cells
    Row           a router, in one setting of a sweep: means over seeds, and differences to the baseline
    DomainRow     a router over held-out domains
    CellResult    a router with one seed: what a page draws of it; the `result.json` of its cell has everything

Differences and means over seeds are `metrics.Difference`: each has a 95% interval.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from holdfast.checked import from_mapping
from holdfast.metrics import Cost, Difference
from holdfast.metrics.token_routes import View
from holdfast.routing.grammar import short_keys, split_options, written_pairs
from holdfast.stored import ShownRecord
from holdfast.train.papers import PaperRun
from holdfast.train.task import Measure

COMPUTE_TOLERANCE = 0.005  # relative to the baseline's experts per token; a smaller difference does not count
POINTS = 200  # points of a training curve at most; longer curves are averaged

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class RowCost(Difference):
    """The rise of the loss on untouched words under the attack, in nats per word."""

    @property
    def words(self) -> str:
        """The rise of the perplexity as text: `+2.1% (95% interval +1.9% to +2.4%)`."""
        return Cost(self.mean, self.low, self.high, self.over).words


@dataclass(frozen=True)
class EqualCompute:
    """The clean difference to the baseline with more experts per token."""

    router: str
    difference: Difference


@dataclass(frozen=True)
class MetricRow:
    """A further metric of a router."""

    clean: float | None = None
    attacked: float | None = None
    attacked_clean: float | None = None  # of the attacked examples without the attack, if those are not all
    clean_difference: Difference | None = None
    attacked_difference: Difference | None = None


@dataclass(frozen=True)
class ShiftRow:
    """A router's result on a shifted test set."""

    measure: str
    better: Better
    figure: float | None
    difference: Difference | None = None


@dataclass(frozen=True)
class ScoreRow:
    """The figure of a router on clean data or under one attack."""

    level: Difference | None  # None: a seed has no figure
    difference: Difference | None = None
    clean: float | None = None  # of the attacked examples without the attack

    @property
    def mean(self) -> float | None:
        return None if self.level is None else self.level.mean


@dataclass(frozen=True)
class CurveRow:
    """The errors of a router against the budget of one attack."""

    budgets: list[float]
    examples: int
    figure: list[Difference | None]
    top5: list[Difference | None]

    def __post_init__(self) -> None:
        if not len(self.budgets) == len(self.figure) == len(self.top5):
            raise ValueError("a curve needs one error and one top-5 error for each budget")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A router, in one setting of a sweep. Figures are means over seeds; None if a seed has none."""

    router: str
    settings: dict[str, Any] = field(default_factory=dict)  # of a sweep: keys of the recipe and their values
    seeds: list[int]
    parameters: int
    apart: str | None = None  # why its figures cannot be compared with those of the other rows
    experts_per_token: float
    more_compute: float = 0.0  # experts per token relative to the baseline, minus 1
    examples: dict[str, int | None] = field(default_factory=dict)  # of images and labelled texts: "clean", "attacked"
    clean: float | None
    clean_difference: Difference | None = None
    attacked: float | None
    attacked_difference: Difference | None = None
    attacked_clean: float | None = None  # of the attacked examples, without the attack
    clean_kept: float | None = None  # of the untouched words
    attacked_kept: float | None = None
    clean_bits_per_byte: float | None = None
    attacked_bits_per_byte: float | None = None
    predictions_changed: float | None = None  # share of predictions that the attack changes
    cost: RowCost | None = None
    cost_difference: Difference | None = None
    equal_compute: EqualCompute | None = None
    consistency: Difference | None = None  # share of tokens that keep their experts under noise, over all layers
    consistency_difference: Difference | None = None
    step_seconds: float | None = None  # of a training step
    flops: float | None = None  # of a forward, per token of a text or per image
    peak_bytes: float | None = None  # of GPU memory in training
    metrics: dict[str, MetricRow] = field(default_factory=dict)
    shifts: dict[str, ShiftRow] = field(default_factory=dict)
    scores: dict[str, ScoreRow] = field(default_factory=dict)  # "clean", and the names of attacks
    curves: dict[str, CurveRow] = field(default_factory=dict)  # by the name of the attack

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
    def clean_beside_attacked(self) -> float | None:
        """The clean figure of the attacked examples: they may be fewer than all test examples."""
        return self.clean if self.attacked_clean is None else self.attacked_clean

    @property
    def attacks_some(self) -> bool:
        """Whether not all test examples were attacked."""
        return self.attacked_clean is not None and self.examples.get("clean") != self.examples.get("attacked")

    @property
    def uses_more_compute(self) -> bool:
        """Whether the router uses more experts per token than the baseline."""
        return self.more_compute > COMPUTE_TOLERANCE

    @property
    def training(self) -> str:
        """What the braces of its name say: how it is trained, if not plainly."""
        return self.router.partition("{")[2]

    def is_baseline_with_other_k(self, baseline: str) -> bool:
        """Return whether this is the baseline with another number of experts: `smoe[k=3]`, or a `matched_name`."""
        if self.router.startswith(matched_name(baseline, 0)[:-1]):
            return True
        names = [name.partition("{")[0] for name in (self.router, baseline)]
        try:
            mine, theirs = map(split_options, names)
        except ValueError:  # names with layers
            return False
        for _, options in (mine, theirs):
            options.pop("k", None)
        return bool(names[0] != names[1] and mine == theirs)


def matched_name(baseline: str, k: int) -> str:
    """Return the name of the baseline with k experts per token, the equal-compute baseline of routers that use more."""
    return f"{baseline}, top {k}"


@dataclass(frozen=True, kw_only=True)
class DomainRow:
    """The accuracies of a router over held-out domains, in percent; in a sweep, in one setting of it."""

    router: str
    settings: dict[str, Any] = field(default_factory=dict)  # without the held-out domain
    seeds: list[int]
    accuracy: dict[str, Difference]  # by held-out domain
    mean: Difference
    mean_difference: Difference | None = None
    worst: Difference
    worst_difference: Difference | None = None


@dataclass(frozen=True)
class Load:
    percent: list[float]
    cv: float | None
    dead: list[int]


@dataclass(frozen=True)
class Dropped:
    share: float


@dataclass(frozen=True)
class Strip:
    width: float
    share: float | None  # of tokens with an expert in the strip that is not among their k best
    experts: float | None = None  # such experts per token


@dataclass(frozen=True)
class NearTies:
    strips: list[Strip]


@dataclass(frozen=True)
class Layer:
    layer: int
    experts: int
    entropy: float | None
    load: Load
    near_ties: NearTies
    instability: float | None = None
    dropped: Dropped | None = None  # None: experts are not limited


@dataclass(frozen=True)
class ExpertsPerToken:
    mean: float


@dataclass(frozen=True, kw_only=True)
class LayerState(Layer):
    """The routing of a layer at one snapshot."""

    experts_per_token: ExpertsPerToken
    sparsity: float | None  # of its expert graph: the share of the pairs of experts whose entry is 0
    width: float | None = None  # of the strip of a smooth router in training
    interference: float | None = None  # of the gradients of its experts; None: not measured


@dataclass(frozen=True)
class Routing:
    layers: list[Layer]


@dataclass(frozen=True)
class ModalityLayer:
    """How a layer routes tokens of images and of texts; shares, None where it has no such tokens."""

    name: str
    overlap: float | None = None  # of the loads of both
    one_modality: float | None = None  # of experts that serve one modality only
    image_corrupted: float | None = None  # of image tokens that flip when the picture is corrupted
    text_corrupted: float | None = None
    image_reworded: float | None = None  # when the question is reworded
    text_reworded: float | None = None


@dataclass(frozen=True)
class CleanScore:
    figure: float | None
    routing: Routing
    examples: int | None = None  # of images and labelled texts
    modalities: list[ModalityLayer] = field(default_factory=list)  # of vision-language models


@dataclass(frozen=True)
class CellCost:
    mean: float | None


@dataclass(frozen=True)
class AttackScore:
    """The figure under an attack."""

    figure: float | None
    clean: float | None = None  # of attacked images: their figure without the attack
    examples: int | None = None
    cost: CellCost | None = None
    predictions_changed: float | None = None  # share of predictions


@dataclass(frozen=True)
class TrainingCurve:
    """The training loss: means over `width` steps each."""

    steps: list[float]
    losses: list[float | None]
    width: int

    @classmethod
    def of(cls, log: Sequence[Mapping[str, Any]], points: int = POINTS) -> Self:
        """Return at most this many points of a log."""
        entries = [entry for entry in log if "loss" in entry]
        width = max(1, math.ceil(len(entries) / points))
        parts = [entries[start : start + width] for start in range(0, len(entries), width)]
        known = [[entry["loss"] for entry in part if entry["loss"] is not None] for part in parts]
        steps = [statistics.fmean(entry["step"] for entry in part) for part in parts]
        return cls(steps, [statistics.fmean(losses) if losses else None for losses in known], width)


@dataclass(frozen=True)
class ValidationCurve:
    """What was logged on held-out data (`training.validate_every`)."""

    steps: list[int]
    losses: list[float | None]
    figures: list[float | None]  # the error of the task; empty if it follows from the loss

    @classmethod
    def of(cls, log: Sequence[Mapping[str, Any]]) -> Self:
        lines = [line for line in log if "eval_loss" in line]
        figures = [line["eval_figure"] for line in lines if "eval_figure" in line]
        return cls([int(line["step"]) for line in lines], [line["eval_loss"] for line in lines], figures)


@dataclass(frozen=True)
class LayerSnapshots:
    layer: int
    fluctuation: list[float | None]  # between each snapshot and the next
    graphs: list[list[list[float | None]]]  # of each snapshot, experts x experts
    states: list[LayerState]  # of each snapshot


@dataclass(frozen=True)
class Snapshots:
    steps: list[int]
    graph: Literal["learned", "co-selection"]
    layers: list[LayerSnapshots]

    def __post_init__(self) -> None:
        for layer in self.layers:
            if len(layer.fluctuation) != max(0, len(self.steps) - 1):
                raise ValueError(
                    f"layer {layer.layer} needs a fluctuation between each of {len(self.steps)} steps and the next"
                )
            if not len(layer.graphs) == len(layer.states) == len(self.steps):
                raise ValueError(f"layer {layer.layer} needs a graph and a state for each of {len(self.steps)} steps")
            if any(len(row) != len(graph) for graph in layer.graphs for row in graph):
                raise ValueError(f"layer {layer.layer} has a graph that is not square")


@dataclass(frozen=True)
class Consistency:
    what: str
    layers: list[float | None]


@dataclass(frozen=True)
class Origin:
    """Where and when a cell was trained."""

    device: str | None = None
    finished: str | None = None  # in UTC
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """A router with one seed, in one setting of a sweep."""

    router: str
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    plugins: list[dict[str, Any]] = field(default_factory=list)
    first_batch: str  # hashes
    last_batch: str
    curve: TrainingCurve
    validation: ValidationCurve
    clean: CleanScore
    attacked: AttackScore
    trials: dict[str, AttackScore] = field(default_factory=dict)  # by the name of the attack
    snapshots: Snapshots
    consistency: Consistency
    view: View
    origin: Origin = field(default_factory=Origin)

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Self:
        """Return what is kept of the content of a `result.json`."""
        where = f"the result of {result['router']}, seed {result['seed']}"
        curves = {"curve": TrainingCurve.of(result["log"]), "validation": ValidationCurve.of(result["log"])}
        return from_mapping(cls, {**result, **curves}, where, skip_unknown=True)


@dataclass(frozen=True)
class Metric:
    """A further metric, beside the main measure."""

    name: str
    about: str
    better: Better


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the cells have in common: the identity of the comparison, and what is measured."""

    holdfast: str
    recipe: dict[str, Any]
    checkpoint: str | None = None  # checksum
    data: dict[str, Any]
    attack: dict[str, Any]
    shifts: list[dict[str, Any]] = field(default_factory=list)
    plugins: list[dict[str, Any]] = field(default_factory=list)
    sweep: list[str] = field(default_factory=list)  # keys of the recipe
    measure: Measure
    metrics: list[Metric] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, repr=False)
class Results(ShownRecord):
    """A comparison. The first row is the baseline; in a sweep, its router is the baseline of each setting."""

    file_name = "results.json"
    kind = "a comparison"
    page = "holdfast.report.comparison_page:comparison_page"
    remedy = "run the same `holdfast compare` again"

    run: Run
    versions: dict[str, str]
    rows: list[Row]
    domains: list[DomainRow] = field(default_factory=list)  # if several domains were held out
    cells: list[CellResult]
    paper: PaperRun | None = None  # the experiment of a paper that it ran
    command: str | None = None  # the last one that trained or added cells; None: Python did

    def __post_init__(self) -> None:
        if not self.rows or not all(map(self.cells_of, self.rows)):
            raise ValueError("rows is empty, or a row has no cells")

    def cells_of(self, row: Row) -> list[CellResult]:
        return [cell for cell in self.cells if (cell.router, cell.settings) == (row.router, row.settings)]

    def first_cell(self, row: Row) -> CellResult:
        """Return the row's cell of the lowest seed."""
        return min(self.cells_of(row), key=lambda cell: cell.seed)

    @property
    def baseline(self) -> Row:
        return self.rows[0]

    def is_baseline(self, row: Row | DomainRow) -> bool:
        return row.router == self.baseline.router

    @property
    def others(self) -> list[Row]:
        """The rows that are compared with a baseline: not those that stand apart."""
        return [row for row in self.rows if not self.is_baseline(row) and row.apart is None]

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
        return any(row.attacked_kept is not None for row in self.rows)

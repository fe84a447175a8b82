"""The records of audits and of geometry: what `audit` and `measure_geometry` return, store as JSON, and pages show.

docs/audit.md and docs/geometry-pages.md explain every attribute. A number is None where it was NaN or infinite, which JSON
cannot store. Two reports of the same model, data and settings differ only in `seconds`.
"""

import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch

from holdfast.checked import Limits
from holdfast.metrics import CoSelectionGraph, ExpertCount, Load, NearTieMass
from holdfast.metrics.selection import WIDTHS
from holdfast.metrics.token_routes import Routes, View
from holdfast.stored import ShownRecord

Numbers = dict[str, float | None]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # to which routers are rounded

# Types of settings, with their limits.
Positive = Annotated[int, Limits(1, math.inf, "a whole number, at least 1")]
Length = Annotated[int, Limits(2, math.inf, "a whole number, at least 2")]  # one token has no next one
Natural = Annotated[int, Limits(0, math.inf, "a whole number, at least 0")]
Drift = Annotated[float, Limits(0, 1, "a share of each token's length, from 0 to 1")]
Noise = Annotated[float, Limits(sys.float_info.min, 1, "a share of each token's length, above 0 and at most 1")]
Share = Annotated[float, Limits(0, 1, "a share from 0 to 1")]
Size = Annotated[float, Limits(0, math.inf, "a number that is not negative")]


def known_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


@dataclass(frozen=True)
class ModelDescription:
    """A model, with the names, the numbers of experts and the routers of its MoE layers."""

    name: str
    type: str
    architecture: str
    dtype: str
    parameters: int
    layers: list[str]
    experts: list[int]
    routers: list[str]


@dataclass(frozen=True, kw_only=True)
class DataDescription:
    """The data that a model was measured on."""

    kind: str  # texts, inputs, or rollout
    checksum: str  # SHA-256 of all inputs
    sequences: int
    tokens: int
    batches: int | None = None  # that were finished
    source: dict[str, Any] | None = None  # from the command line
    engine: str | None = None  # of a recorded rollout
    logprobs: bool | None = None  # whether a recorded rollout has any
    file: str | None = None  # of a recorded rollout


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(ShownRecord):
    """What the reports of audits, geometry and mismatch have in common, beside their settings (abstract)."""

    remedy: ClassVar[str] = "measure the model again"

    status: Literal["complete", "interrupted"]
    model: ModelDescription
    data: DataDescription
    versions: dict[str, str]
    seconds: float


@dataclass(frozen=True)
class Pair:
    """A number before a change of router and after it."""

    before: float | None
    after: float | None


@dataclass(frozen=True, kw_only=True)
class TokenPlace:
    """A token of the data, with the text around it if there is a tokenizer."""

    batch: int
    place: int  # row in the batch
    sequence: int | None = None
    position: int | None = None
    token: int | None = None
    text: str | None = None
    before: str | None = None
    after: str | None = None
    context: str | None = None  # decoded together, because tokens may share a character


@dataclass(frozen=True)
class TieOrder:
    """The share of tokens within each width of a tie of order m, and what a ball of inputs would have."""

    order: int
    shares: list[float]
    median: float | None = None
    law: list[float | None] | None = None
    asymptotic: list[float | None] | None = None


@dataclass(frozen=True)
class Mark:
    """A token in a slice."""

    token: int
    x: float
    y: float
    text: str | None


@dataclass(frozen=True)
class Slice:
    """A square of a plane through token space. Coordinates are divided by `unit`, the norm of a token."""

    kind: Literal["boundaries", "tokens"]
    unit: float
    low: list[float]
    high: list[float]
    keys: list[list[float]]  # slope, slope and offset of each expert's key in the plane
    sets: list[list[int]]
    cells: list[list[int]]  # for each grid point an index into `sets`, rows from low to high
    lines: list[list[float]]  # both ends and the two experts that tie
    points: list[list[float]]  # a place and the three experts that tie
    disagree: int  # grid points that the router itself sends to other experts
    extra: list[list[list[int]] | None]  # for each router, the experts beyond k at each grid point; None: never any
    tokens: list[Mark]


@dataclass(frozen=True)
class Boundaries:
    """How many of some tokens of the first batch are near ties, or why this is not known. One layer has a slice."""

    skipped: str | None = None
    tokens: int = 0
    widths: list[float] = field(default_factory=list)
    exact: bool = True
    orders: list[TieOrder] = field(default_factory=list)
    slice: Slice | None = None


@dataclass(frozen=True)
class Radii:
    """Relative certified radii. `counts` has the tokens below all edges, between neighbouring edges, and above all."""

    kind: str
    median: float | None  # None: above all edges
    low: float  # share of tokens below 0.001
    none: float  # share of tokens without any
    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class UndecidedTokens:
    """The tokens that rounding to a dtype may flip."""

    share: float
    of_undecided_flip: float | None  # share of them that it does flip
    decided_that_flip: int  # must be 0


@dataclass(frozen=True)
class CoSelected(CoSelectionGraph):
    """Which experts are selected together."""

    groups: int  # of experts that no token connects


@dataclass(frozen=True, kw_only=True)
class AuditedLayer:
    """One layer of the unperturbed model. Without a certificate, `radius` is None and `undecided` empty."""

    layer: int
    name: str
    tokens: int
    experts: int
    entropy: float | None
    entropy_share: float | None  # of log E
    load: Load
    experts_per_token: ExpertCount
    weight_sum: Numbers
    near_ties: NearTieMass
    instability: float | None
    co_selection: CoSelected
    dropped: Numbers | None = None  # None: experts are not limited
    no_certificate: str | None = None  # why there is none
    radius: Radii | None = None
    undecided: dict[str, UndecidedTokens] = field(default_factory=dict)  # by dtype
    boundaries: Boundaries


@dataclass(frozen=True)
class Outputs:
    """Mean over tokens of the norm of each part of the change, divided by |y|. These norms do not add up to the total."""

    total: float | None
    flip: float | None
    rest: float | None
    flip_share: float | None  # sum <flip, total> / sum |total|^2; it and that of the rest sum to 1; 0 without a change


@dataclass(frozen=True)
class LossChange:
    """The loss per token in nats: before, after, the mean of its change, and the mean of the change's magnitude."""

    before: float | None
    after: float | None
    change: float | None
    size: float | None


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a perturbation changes in a layer, or on average over layers and in the predictions (layer None)."""

    layer: int | None = None
    tokens: int
    flips: float
    first_flips: float | None
    weight_change: float | None
    output: Outputs
    predictions: int = 0  # that were compared
    prediction_flips: float | None = None
    loss: LossChange | None = None

    @property
    def loss_change(self) -> float | None:
        return None if self.loss is None else self.loss.change


@dataclass(frozen=True)
class Perturbed:
    """What one perturbation changes; `details` depend on the perturbation."""

    about: str
    harmless: bool  # in exact arithmetic nothing may change
    layers: list[Changes]
    overall: Changes
    details: list[dict[str, Any]]


@dataclass(frozen=True)
class SkippedPerturbation:
    """A perturbation that could not be run."""

    about: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class AtRisk(TokenPlace):
    """A token with a small radius, and the experts that would change places: E is the threshold of routers with one."""

    layer: int
    relative: float | None
    radius: float | None
    leaves: int
    enters: int


@dataclass(frozen=True, kw_only=True)
class Overall:
    """The numbers of the whole model: means over layers, except where the name says otherwise. Conditions read these.

    A group has its numbers by name; by width, dtype or perturbation if there is one of each.
    """

    layers: int
    tokens: int
    experts_per_token: float | None
    loss: float | None
    perplexity: float | None
    entropy: float | None
    entropy_share: float | None
    instability: float | None
    load: Numbers
    dropped: Numbers
    near_ties: Numbers
    undecided: Numbers
    undecided_worst: Numbers
    radius: Numbers
    co_selection: Numbers
    flips: Numbers
    first_flips: Numbers
    weight_change: Numbers
    output: dict[str, Outputs]
    prediction_flips: Numbers
    loss_change: Numbers


# The names in the groups of `Overall`, known before an audit, so that conditions can be checked.
PLAIN = ("layers", "tokens", "experts_per_token", "loss", "perplexity", "entropy", "entropy_share", "instability")
GROUPS: dict[str, Iterable[str]] = {
    "load": ("std", "cv", "dead"),
    "dropped": ("share", "tokens"),
    "near_ties": [f"{width:g}" for width in WIDTHS],
    "undecided": DTYPES,
    "undecided_worst": DTYPES,
    "radius": ("median_worst", "low"),
    "co_selection": ("spectral_gap", "groups"),
}
PERTURBED = ("flips", "first_flips", "weight_change", "prediction_flips", "loss_change")


def names_of_numbers(perturbations: Iterable[str]) -> list[str]:
    """Return the dotted names of all overall numbers that an audit with these perturbations may have."""
    ran = list(perturbations)
    grouped = [f"{group}.{name}" for group, names in GROUPS.items() for name in names]
    changes = [f"{group}.{name}" for group in PERTURBED for name in ran]
    return [*PLAIN, *grouped, *changes, *(f"output.{name}.{part}" for name in ran for part in Outputs.__annotations__)]


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """Tokens that, put before texts, send their tokens to one expert. Shares are of texts that the search has not seen."""

    layer: int
    expert: int
    tokens: list[int]
    text: str | None
    share: float  # of the tokens that select the expert after the trigger
    without: float  # before the texts have the trigger
    random: float  # the mean over random sequences of the same length
    random_most: float  # with the best of these
    texts: float  # share of the texts of which at least 90% of the tokens select the expert
    flags: list[str]


@dataclass(frozen=True, kw_only=True)
class Triggers:
    """The strongest trigger of each layer, or why none was searched for."""

    tokens: int  # of a trigger
    searched: int = 0  # texts that the search saw
    held_out: int = 0  # texts that the shares are measured on
    random: int = 0  # random sequences
    found: list[Trigger]
    skipped: str | None = None


@dataclass(frozen=True)
class WhatIf:
    """What another router changes, without training: before and after, by perturbation; `overall` with that router."""

    router: str
    cost: dict[str, Pair]  # loss, perplexity, experts_per_token
    flips: dict[str, Pair]
    flip_output: dict[str, Pair]
    output: dict[str, Pair]
    prediction_flips: dict[str, Pair]
    overall: Overall
    routes: Routes | None = None  # of the tokens of the audit's view


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """How the data of a report are read, and the seed of its random numbers."""

    seed: int = 0
    batch: Positive = 8  # sequences per batch, for texts
    length: Length = 128  # tokens per sequence, for texts
    tokens: Positive | None = None  # stop after this number of tokens, rounded up to whole batches


@dataclass(frozen=True, kw_only=True)
class Settings(DataSettings):
    """Everything that determines an audit, apart from the model and its inputs."""

    perturb: list[str]
    noise: list[Noise]
    rate: Share = 0.1  # of the words that are swapped or misspelt
    budget: Size = 0.01  # of the routing attack, as a share of a token's length
    attack_tokens: Positive = 64
    at_risk: Positive = 20
    triggers: Natural = 0  # tokens of the triggers that are searched for; 0: none


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Report):
    """The results of an audit."""

    file_name: ClassVar[str] = "audit.json"
    kind: ClassVar[str] = "an audit"
    page: ClassVar[str] = "holdfast.report.audit_page:audit_page"
    remedy: ClassVar[str] = "audit the model again"

    settings: Settings
    overall: Overall
    layers: list[AuditedLayer]  # the unperturbed model
    perturbations: dict[str, Perturbed]
    skipped: dict[str, SkippedPerturbation]
    at_risk: list[AtRisk]  # the tokens with the smallest relative radii
    what_if: WhatIf | None = None
    triggers: Triggers | None = None  # None: not asked for
    view: View | None = None  # the first texts or pictures, and the routes of their tokens

    def numbers(self) -> Numbers:
        """Return the numbers of `overall` by dotted name: "undecided.bf16", "flips.noise.0.01"."""
        return dict(flattened(asdict(self.overall)))


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of a nested mapping with dotted names."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def differences(before: AuditReport, after: AuditReport) -> list[tuple[str, float | None, float | None]]:
    """Return the overall numbers in which two audits differ, or which only one of them has: (name, before, after)."""
    one, two = before.numbers(), after.numbers()
    return [(name, one.get(name), two.get(name)) for name in {**one, **two} if one.get(name) != two.get(name)]


@dataclass(frozen=True)
class Ties:
    """Tokens near ties; `exact` is False if some distances are upper bounds."""

    widths: list[float]
    exact: bool
    orders: list[TieOrder]


@dataclass(frozen=True)
class Hitting:
    """The share of random walks that have reached a tie before each time, with a lower and an upper bound."""

    times: list[float]
    lower: list[float]
    upper: list[float]
    simulated: list[float]
    tokens: int
    walks: int
    exits_of_order_1: float | None


@dataclass(frozen=True)
class JumpSizes:
    mean: float | None
    median: float | None
    largest: float | None


@dataclass(frozen=True, kw_only=True)
class Jump(TokenPlace):
    """The jump at the nearest boundary of one token."""

    size: float | None
    size_with_what_if: float | None
    distance: float | None
    leaves: int
    enters: int


@dataclass(frozen=True)
class Jumps:
    """Jumps of the output, relative to its norm: of the model's own router, then of the what-if's."""

    routers: list[JumpSizes]
    largest: list[Jump]


@dataclass(frozen=True)
class Normal:
    """The output on the normal through the nearest boundary of a token: `change` and `largest` of each router."""

    token: int
    distance: float
    leaves: int
    enters: int
    positions: list[float]
    change: list[list[float | None]]
    steps: list[float]
    largest: list[list[float | None]]


@dataclass(frozen=True)
class Pictures:
    token: TokenPlace
    slices: list[Slice]
    normal: Normal


@dataclass(frozen=True)
class GraphPrecision:
    """How precisely a batch estimates Symphony's expert graph, and how far each noise moves it."""

    half_width: float | None
    alpha: float
    noise: list[float]
    mean: list[float | None]
    largest: list[float | None]
    beyond: list[float | None]
    joint: list[float | None]  # the largest change of the share of tokens that two experts have in common
    joint_bound: list[float | None]  # what no noise of that size can exceed
    regularity: float | None  # rho of the thinnest region of the sets that are selected most; None: scipy is missing


@dataclass(frozen=True)
class Entropies:
    own: float | None
    informed: float | None
    bound: float | None
    mixing: float | None


@dataclass(frozen=True)
class ClusterSpace:
    distance: float | None
    predicted: float | None
    measured: float | None
    condition: float | None


@dataclass(frozen=True)
class Clusters:
    clusters: int
    noise: float
    plain: ClusterSpace
    scaled: ClusterSpace


@dataclass(frozen=True)
class Slope:
    at_token: float | None
    jump: float | None
    largest: float | None  # None: the weights jump


@dataclass(frozen=True)
class Slopes:
    strip: float
    softmax: Slope
    top_k: Slope
    smooth: Slope


@dataclass(frozen=True)
class Tsne:
    x: list[float]
    y: list[float]
    experts: list[int]


@dataclass(frozen=True, kw_only=True)
class Theory:
    """Statements of the papers beside measurement; `skipped` has the reason for each that does not apply."""

    co_selection: GraphPrecision | None = None
    entropy: Entropies | None = None
    clusters: Clusters | None = None
    slopes: Slopes | None = None
    tsne: Tsne | None = None
    skipped: dict[str, str]


@dataclass(frozen=True)
class ExtraExperts:
    """Shares of tokens with at least 1, 2 and 3 experts beyond k, and the law of a ball."""

    extra: list[float]
    extra_law: list[float | None] | None


@dataclass(frozen=True, kw_only=True)
class MeasuredLayer:
    """The geometry of one layer; only some layers have pictures and theory."""

    layer: int
    name: str
    router: str
    width: int
    experts: int
    k: int
    tokens: int
    norm: Numbers  # mean and std
    ties: Ties
    hitting: Hitting | None
    jumps: Jumps
    pictures: Pictures | None
    theory: Theory | None
    what_if: ExtraExperts | None


@dataclass(frozen=True)
class RefusedLayer:
    """A layer whose ties are not flats."""

    layer: int
    name: str
    router: str
    reason: str


@dataclass(frozen=True)
class GeometryWhatIf:
    router: str
    cost: dict[str, Pair]  # loss, perplexity, experts_per_token
    jump: Pair


@dataclass(frozen=True, kw_only=True)
class GeometrySettings(DataSettings):
    """Everything that determines a report, apart from the model and its inputs."""

    what_if: str | None = "smooth"
    noise: Noise = 0.05  # of the random walks at time 1
    drift: Drift = 0.0  # of the random walks straight towards the nearest boundary, until time 1
    walks: Positive = 4  # of each token that walks
    walking: Positive = 512  # tokens of a layer that walk
    pictures: Natural = 8  # layers with pictures at most, evenly spaced


@dataclass(frozen=True, kw_only=True, repr=False)
class GeometryReport(Report):
    """The geometry of routing on a model's own tokens."""

    file_name: ClassVar[str] = "geometry.json"
    kind: ClassVar[str] = "a geometry report"
    page: ClassVar[str] = "holdfast.report.geometry_page:geometry_page"

    settings: GeometrySettings
    layers: list[MeasuredLayer]
    refused: list[RefusedLayer]  # layers without affine keys
    what_if: GeometryWhatIf | None = None

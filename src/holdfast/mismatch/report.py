"""`MismatchReport`: the results of `measure_mismatch`, and the estimates in it. docs/mismatch.md explains every attribute.

Numbers about differences between a rollout and a training forward have 95% intervals by resampling sequences: tokens of one
sequence depend on each other and sequences do not, so sequences are drawn, with replacement. All remedies get the same
draws: differences between two of them are paired.

    log ratio      log p(token; training) - log p(token; rollout)
    quantile q     the smallest value that at least a share q of the tokens does not exceed

B sequences, N tokens, L layers, R draws, n scored tokens
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, final

import torch
from torch import Tensor

from holdfast.auditing.reports import DataSettings, Positive, Report
from holdfast.checked import Limits

PERMILLES = {"50": 500, "90": 900, "99": 990, "99.9": 999}  # quantiles by name, in thousandths
TAIL = [10 ** (step / 8) for step in range(-48, 9)]  # sizes of |log ratio| from 1e-6 to 10, for plots
LOW, HIGH = 0.025, 0.975
AT_ONCE = 64  # draws whose token weights are in memory at the same time
RolloutKind = Literal["recorded", "simulated"]


@final
@dataclass(frozen=True, kw_only=True)
class MismatchSettings(DataSettings):
    """Everything that determines a report, apart from the model and its sequences.

    `seed` is that of the draws and of new weights of `router`, and `batch` that of the training forward.
    """

    rollout_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # of weights and activations, if simulated
    rollout_batch: Positive = 1  # sequences per batch of a simulated rollout
    rollout_decode: bool = False  # one token at a time, with a KV cache
    simulate: bool = True  # False: only what can be compared with a recorded rollout
    router: str = "smooth"  # the remedy `smooth`: this router on both sides
    clip: list[float] = field(default_factory=lambda: [0.8, 1.2])  # ratios outside of it are counted
    draws: Annotated[int, Limits(100, math.inf, "a whole number, at least 100")] = 1000  # of sequences, for intervals
    tail: list[float] = field(default_factory=lambda: list(TAIL))  # sizes of the gap whose shares are reported

    def __post_init__(self) -> None:
        low, high = self.clip if len(self.clip) == 2 else (0.0, 0.0)
        if not 0 <= low < 1 < high < math.inf:
            raise ValueError(f"clip is {low:g} to {high:g}; expected a range of ratios around 1, such as 0.8 to 1.2.")


@final
@dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval; no interval for one sequence."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class LayerSets:
    layer: int
    routers_differ: Estimate
    tokens_differ_so_far: Estimate  # in this layer or an earlier one


@dataclass(frozen=True)
class Sets:
    """The shares of routing decisions and of tokens whose sets of experts differ."""

    tokens: int
    routers_differ: Estimate
    tokens_differ: Estimate
    layers: list[LayerSets]


@dataclass(frozen=True)
class Change:
    """The mean gap and the share outside the clip range, minus those of the live router on the same tokens."""

    mean: Estimate
    outside: Estimate


@dataclass(frozen=True)
class Logprobs:
    """Mean and tail of the gap |log ratio|, and the ratio itself."""

    tokens: int
    mean: Estimate
    std: float | None
    quantiles: dict[str, Estimate]
    largest: float | None
    ratio: Estimate
    outside: Estimate
    tail: list[float]
    change: Change | None


@dataclass(frozen=True)
class Row:
    """One remedy against one kind of rollout."""

    remedy: str
    rollout: RolloutKind
    router: str
    sets: Sets
    logprobs: Logprobs | None  # None: the rollout has none
    loss: float | None
    experts_per_token: float | None

    @property
    def label(self) -> str:
        return self.router if self.remedy == "smooth" else self.remedy


@dataclass(frozen=True)
class SkippedRow:
    """A remedy that the model cannot have."""

    remedy: str
    rollout: RolloutKind
    reason: str


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class MismatchReport(Report):
    """How far a training forward is from a rollout."""

    file_name: ClassVar[str] = "mismatch.json"
    kind: ClassVar[str] = "a mismatch report"
    page: ClassVar[str] = "holdfast.report.mismatch_page:mismatch_page"

    settings: MismatchSettings
    rows: list[Row]
    skipped: list[SkippedRow]

    def row(self, remedy: str, rollout: str = "simulated") -> Row:
        """Return the row of a remedy: live, replay, smooth or float32, against the simulated or the recorded rollout."""
        for row in self.rows:
            if (row.remedy, row.rollout) == (remedy, rollout):
                return row
        known = ", ".join(f"{row.remedy} ({row.rollout})" for row in self.rows)
        raise ValueError(f"there is no row of {remedy} against a {rollout} rollout; there are {known}.")

    @property
    def rollouts(self) -> list[RolloutKind]:
        """The kinds of rollout that there are rows for, in their order."""
        return list(dict.fromkeys(row.rollout for row in self.rows))


@final
class Resampling:
    """R draws of B sequences with replacement, as numbers of times that each sequence is drawn."""

    def __init__(self, sequences: int, draws: int, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        drawn = torch.randint(sequences, (draws, sequences), generator=source)
        self.counts = torch.zeros(draws, sequences, dtype=torch.int64).scatter_add_(1, drawn, torch.ones_like(drawn))

    @property
    def has_intervals(self) -> bool:
        return self.counts.shape[1] > 1

    def estimate(self, value: float, draws: Tensor) -> Estimate:
        """Return a value with the interval of its values (R,) in the draws; a draw without tokens is NaN and left out."""
        draws = draws[draws.isfinite()]
        if not self.has_intervals or not len(draws) or not math.isfinite(value):
            return Estimate(value)
        low, high = draws.double().quantile(torch.tensor([LOW, HIGH], dtype=torch.float64)).tolist()
        return Estimate(value, low, high)

    def mean(self, sums: Tensor, totals: Tensor) -> Estimate:
        """Return the sum of `sums (B,)` over the sum of `totals (B,)`."""
        counts, sums, totals = self.counts.double(), sums.double(), totals.double()
        return self.estimate(float(sums.sum() / totals.sum()), (counts @ sums) / (counts @ totals))

    def quantiles(self, values: Tensor, rows: Tensor) -> dict[str, Estimate]:
        """Return the quantiles of `values (n,)`, token by token, where token i is of sequence `rows[i]`."""
        ordered, order = values.sort()
        rows = rows[order]
        in_draws: dict[str, list[Tensor]] = {name: [torch.empty(0, dtype=ordered.dtype)] for name in PERMILLES}
        for counts in self.counts.split(AT_ONCE) if self.has_intervals else ():
            for name, places in _places(counts[:, rows]).items():
                in_draws[name].append(ordered[places.clamp_max(len(ordered) - 1)].where(places < len(ordered), torch.nan))
        places_of_all = _places(torch.ones(1, len(ordered), dtype=torch.int64))
        return {
            name: self.estimate(float(ordered[places[0]]), torch.cat(in_draws[name]))
            for name, places in places_of_all.items()
        }


def _places(weights: Tensor) -> dict[str, Tensor]:
    """Return, for each quantile, the first place (R,) at which the sum of `weights (R,n)` reaches it; n if there is none."""
    sums = weights.cumsum(-1)
    totals = sums[:, -1:]
    # Whole numbers, because a share of a sum of floats is rounded.
    least = {name: ((permille * totals + 999) // 1000).clamp_min(1) for name, permille in PERMILLES.items()}
    return {name: torch.searchsorted(sums, share).squeeze(-1) for name, share in least.items()}


def set_numbers(differs: Tensor, compared: Tensor, resampling: Resampling) -> Sets:
    """Return the shares of routers and tokens whose sets of experts differ, over all layers and by layer.

    differs    (B,N,L) bool: another set in this layer
    compared   (B,N) bool: tokens that have a record on both sides
    """
    differs = differs & compared.unsqueeze(-1)
    layers = differs.shape[-1]
    tokens = compared.sum(-1)
    so_far = differs.to(torch.uint8).cummax(-1).values.bool()  # in this layer or an earlier one
    here, by_now = ([resampling.mean(one.sum(-1), tokens) for one in each.unbind(-1)] for each in (differs, so_far))
    return Sets(
        tokens=int(tokens.sum()),
        routers_differ=resampling.mean(differs.sum((1, 2)), tokens * layers),
        tokens_differ=by_now[-1],
        layers=[LayerSets(layer, *both) for layer, both in enumerate(zip(here, by_now, strict=True))],
    )


def ratio_numbers(log_ratio: Tensor, clip: list[float], resampling: Resampling, live: Tensor | None = None) -> Logprobs:
    """Return mean and tail of the log ratio (B,N), NaN where a token is not scored.

    clip   the ratios outside of this range are counted, as a clipped loss would cut them off
    live   the log ratio of the live router on the same tokens: the change from it is reported too
    """
    scored = ~log_ratio.isnan()
    rows, totals = scored.nonzero()[:, 0], scored.sum(-1)
    values = log_ratio[scored].double()
    size, ratios = values.abs(), values.exp()

    def mean(of_tokens: Tensor) -> Estimate:
        """Return the mean of one number (n,) for each scored token."""
        by_sequence = torch.zeros(len(totals), dtype=torch.float64).index_add_(0, rows, of_tokens)
        return resampling.mean(by_sequence, totals)

    outside, change = _outside(ratios, clip), None
    if live is not None:
        before = live[scored].double()
        change = Change(mean(size - before.abs()), mean(outside - _outside(before.exp(), clip)))
    return Logprobs(
        tokens=len(values),
        mean=mean(size),
        std=float(size.std(correction=0)),
        quantiles=resampling.quantiles(size, rows),
        largest=float(size.max()),
        ratio=mean(ratios),
        outside=mean(outside),
        tail=tail_shares(size),
        change=change,
    )


def _outside(ratios: Tensor, clip: list[float]) -> Tensor:
    return ((ratios < clip[0]) | (ratios > clip[1])).double()


def tail_shares(size: Tensor) -> list[float]:
    """Return the share of `size (n,)` above each size of TAIL."""
    ordered = size.sort().values
    below = torch.searchsorted(ordered, torch.tensor(TAIL, dtype=ordered.dtype), right=True)
    return ((len(ordered) - below) / len(ordered)).tolist()  # type: ignore[no-any-return]

"""Numbers about differences between a rollout and a training forward, with 95% intervals by resampling sequences.

Tokens of one sequence depend on each other and sequences do not, so sequences are drawn, with replacement. All remedies get
the same draws: differences between two of them are paired.

    log ratio      log p(token; training) - log p(token; rollout)
    quantile q     the smallest value that at least a share q of the tokens does not exceed

B sequences, N tokens, L layers, R draws, n scored tokens
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor

PERMILLES = {"50": 500, "90": 900, "99": 990, "99.9": 999}  # quantiles by name, in thousandths
TAIL = [10 ** (step / 8) for step in range(-48, 9)]  # sizes of |log ratio| from 1e-6 to 10, for plots
LOW, HIGH = 0.025, 0.975
AT_ONCE = 64  # draws whose token weights are in memory at the same time


@final
@dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval; no interval for one sequence."""

    value: float
    low: float | None = None
    high: float | None = None


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

    def means(self, sums: Tensor, totals: Tensor) -> Tensor:
        """Return (R,): sum over total of each draw, from sums and totals (B,) of the sequences."""
        counts = self.counts.double()
        return (counts @ sums.double()) / (counts @ totals.double())

    def mean(self, sums: Tensor, totals: Tensor) -> Estimate:
        """Return the sum of `sums (B,)` over the sum of `totals (B,)`."""
        return self.estimate(float(sums.double().sum() / totals.double().sum()), self.means(sums, totals))

    def quantiles(self, values: Tensor, rows: Tensor) -> dict[str, Estimate]:
        """Return the quantiles of `values (n,)`, token by token, where token i is of sequence `rows[i]`."""
        ordered, order = values.sort()
        rows = rows[order]
        found = {name: [] for name in PERMILLES}  # type: dict[str, list[Tensor]]
        for counts in self.counts.split(AT_ONCE) if self.has_intervals else ():
            for name, places in _places(counts[:, rows]).items():
                found[name].append(ordered[places.clamp_max(len(ordered) - 1)].where(places < len(ordered), torch.nan))
        own = _places(torch.ones(1, len(ordered), dtype=torch.int64))
        nothing = torch.empty(0)
        return {
            name: self.estimate(float(ordered[own[name][0]]), torch.cat(found[name]) if found[name] else nothing)
            for name in PERMILLES
        }


def _places(weights: Tensor) -> dict[str, Tensor]:
    """Return, for each quantile, the first place (R,) at which the sum of `weights (R,n)` reaches it; n if there is none."""
    sums = weights.cumsum(-1)
    totals = sums[:, -1:]
    found = {}
    for name, permille in PERMILLES.items():
        least = (permille * totals + 999) // 1000  # whole numbers, because a share of a sum of floats is rounded
        places = torch.searchsorted(sums, least.clamp_min(1)).squeeze(-1)
        found[name] = places
    return found


def set_numbers(differs: Tensor, compared: Tensor, resampling: Resampling) -> dict[str, Any]:
    """Return the shares of routers and tokens whose sets of experts differ, over all layers and by layer.

    differs    (B,N,L) bool: another set in this layer
    compared   (B,N) bool: tokens that have a record on both sides
    """
    differs = differs & compared.unsqueeze(-1)
    layers = differs.shape[-1]
    tokens = compared.sum(-1)
    so_far = differs.to(torch.uint8).cummax(-1).values.bool()  # in this layer or an earlier one
    return {
        "tokens": int(tokens.sum()),
        "routers_differ": asdict(resampling.mean(differs.sum((1, 2)), tokens * layers)),
        "tokens_differ": asdict(resampling.mean(so_far[..., -1].sum(-1), tokens)),
        "layers": [
            {
                "layer": layer,
                "routers_differ": asdict(resampling.mean(differs[..., layer].sum(-1), tokens)),
                "tokens_differ_so_far": asdict(resampling.mean(so_far[..., layer].sum(-1), tokens)),
            }
            for layer in range(layers)
        ],
    }


def ratio_numbers(
    log_ratio: Tensor, clip: tuple[float, float], resampling: Resampling, live: Tensor | None = None
) -> dict[str, Any]:
    """Return mean and tail of the log ratio (B,N), NaN where a token is not scored.

    clip   the ratios outside of this range are counted, as a clipped loss would cut them off
    live   the log ratio of the live router on the same tokens: the change from it is reported too
    """
    scored = ~log_ratio.isnan()
    rows, totals = scored.nonzero()[:, 0], scored.sum(-1)
    values = log_ratio[scored].double()
    size = values.abs()
    ratios = values.exp()
    numbers: dict[str, Any] = {
        "tokens": len(values),
        "mean": asdict(resampling.mean(_by_row(size, rows, totals), totals)),
        "std": float(size.std(correction=0)),
        "quantiles": {name: asdict(found) for name, found in resampling.quantiles(size, rows).items()},
        "largest": float(size.max()),
        "ratio": asdict(resampling.mean(_by_row(ratios, rows, totals), totals)),
        "outside": asdict(resampling.mean(_by_row(_outside(ratios, clip), rows, totals), totals)),
        "tail": tail_shares(size),
        "change": None,
    }
    if live is not None:
        before = live[scored].double()
        for_each = {"mean": (size, before.abs()), "outside": (_outside(ratios, clip), _outside(before.exp(), clip))}
        numbers["change"] = {
            name: asdict(resampling.mean(_by_row(after - own, rows, totals), totals))
            for name, (after, own) in for_each.items()
        }
    return numbers


def _outside(ratios: Tensor, clip: tuple[float, float]) -> Tensor:
    return ((ratios < clip[0]) | (ratios > clip[1])).double()


def _by_row(values: Tensor, rows: Tensor, totals: Tensor) -> Tensor:
    """Return (B,): the sums of `values (n,)` over the tokens of each sequence."""
    return torch.zeros(len(totals), dtype=torch.float64).index_add_(0, rows, values)


def tail_shares(size: Tensor) -> list[float]:
    """Return the share of `size (n,)` above each size of TAIL."""
    ordered = size.sort().values
    below = torch.searchsorted(ordered, torch.tensor(TAIL, dtype=ordered.dtype), right=True)
    return ((len(ordered) - below) / len(ordered)).tolist()  # type: ignore[no-any-return]

"""Shares, quantiles and intervals of a mismatch: against loops over tokens and over draws."""

import math
import statistics
from dataclasses import asdict

import pytest
import torch

from holdfast.mismatch.report import PERMILLES, TAIL, Estimate, Resampling, ratio_numbers, set_numbers, tail_shares

LENGTHS = [7, 1, 12, 5]
SEQUENCES, LONGEST, LAYERS = len(LENGTHS), max(LENGTHS), 3


def random_ratio(seed: int = 0) -> torch.Tensor:
    """Return a log ratio (B,N) with heavy tails: NaN for the first token and for padding."""
    source = torch.Generator().manual_seed(seed)
    found = torch.randn(SEQUENCES, LONGEST, generator=source, dtype=torch.float64) ** 3 / 10
    for row, length in enumerate(LENGTHS):
        found[row, 0], found[row, length:] = torch.nan, torch.nan
    return found


def drawn_sequences(resampling: Resampling) -> list[list[int]]:
    """Return the sequences of each draw as a list."""
    return [[row for row, count in enumerate(counts) for _ in range(count)] for counts in resampling.counts.tolist()]


def tokens_of(ratio: torch.Tensor, rows: list[int]) -> list[float]:
    return [value for row in rows for value in ratio[row].tolist() if not math.isnan(value)]


def naive_quantile(values: list[float], permille: int) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    for value in sorted(values):
        if 1000 * sum(other <= value for other in values) >= permille * len(values):
            return value
    raise AssertionError


def naive_interval(values: list[float]) -> tuple[float, float]:
    """The 2.5% and 97.5% points, with linear interpolation between the two nearest values."""
    ordered, ends = sorted(values), []
    for share in (0.025, 0.975):
        place = share * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        ends.append(ordered[below] + (place - below) * (ordered[above] - ordered[below]))
    return ends[0], ends[1]


def test_draws_are_of_all_sequences_with_replacement_and_repeatable() -> None:
    counts = Resampling(SEQUENCES, 200, 3).counts
    assert counts.shape == (200, SEQUENCES) and counts.sum(-1).tolist() == [SEQUENCES] * 200
    assert int(counts.max()) > 1 and int(counts.min()) == 0
    assert torch.equal(counts, Resampling(SEQUENCES, 200, 3).counts)
    assert not torch.equal(counts, Resampling(SEQUENCES, 200, 4).counts)


def test_numbers_of_the_ratio_are_those_of_a_loop() -> None:
    ratio, live, clip = random_ratio(), random_ratio(1), [0.8, 1.2]
    resampling = Resampling(SEQUENCES, 150, 0)
    found = ratio_numbers(ratio, clip, resampling, live)
    everything = tokens_of(ratio, list(range(SEQUENCES)))
    sizes = [abs(value) for value in everything]

    def outside(values: list[float]) -> float:
        return statistics.fmean(not clip[0] <= math.exp(value) <= clip[1] for value in values)

    assert found.tokens == len(everything) == sum(LENGTHS) - SEQUENCES
    assert found.std == pytest.approx(statistics.pstdev(sizes), rel=1e-12)
    assert found.largest == max(sizes)
    named = {
        "mean": lambda values: statistics.fmean(map(abs, values)),
        "ratio": lambda values: statistics.fmean(map(math.exp, values)),
        "outside": outside,
    }
    draws = [tokens_of(ratio, rows) for rows in drawn_sequences(resampling)]
    for name, number in named.items():
        low, high = naive_interval([number(values) for values in draws if values])
        expected = {"value": number(everything), "low": low, "high": high}
        assert asdict(getattr(found, name)) == pytest.approx(expected, rel=1e-9), name
    for name, permille in PERMILLES.items():
        values = [naive_quantile([abs(value) for value in each], permille) for each in draws if each]
        low, high = naive_interval(values)
        expected = {"value": naive_quantile(sizes, permille), "low": low, "high": high}
        assert asdict(found.quantiles[name]) == pytest.approx(expected, rel=1e-9), name
    before = [tokens_of(live, rows) for rows in drawn_sequences(resampling)]
    change = [named["mean"](two) - named["mean"](one) for one, two in zip(before, draws, strict=True) if two]
    low, high = naive_interval(change)
    value = named["mean"](everything) - named["mean"](tokens_of(live, list(range(SEQUENCES))))
    assert found.change is not None and asdict(found.change.mean) == pytest.approx(
        {"value": value, "low": low, "high": high}, rel=1e-9
    )


def test_the_tail_is_the_share_above_each_size() -> None:
    size = random_ratio().abs().flatten()
    size = torch.cat([size[~size.isnan()], torch.tensor([TAIL[20], 0.0, 1e9], dtype=torch.float64)])  # one on an edge
    expected = [statistics.fmean(value > edge for value in size.tolist()) for edge in TAIL]
    assert tail_shares(size) == pytest.approx(expected) and expected[0] < 1 and expected[-1] > 0
    assert pytest.approx(1e-6) == TAIL[0] and pytest.approx(10) == TAIL[-1]


def test_shares_of_sets_are_those_of_a_loop() -> None:
    source = torch.Generator().manual_seed(5)
    differs = torch.rand(SEQUENCES, LONGEST, LAYERS, generator=source) < 0.3
    compared = torch.tensor([[place < length - 1 for place in range(LONGEST)] for length in LENGTHS])
    resampling = Resampling(SEQUENCES, 600, 1)
    found = set_numbers(differs, compared, resampling)

    def numbers(rows: list[int]) -> dict[str, float] | None:
        tokens = [differs[row, place].tolist() for row in rows for place in range(LONGEST) if compared[row, place]]
        if not tokens:
            return None
        shares = {"routers": statistics.fmean(each for token in tokens for each in token)}
        shares["tokens"] = statistics.fmean(any(token) for token in tokens)
        for layer in range(LAYERS):
            shares[f"router {layer}"] = statistics.fmean(token[layer] for token in tokens)
            shares[f"so far {layer}"] = statistics.fmean(any(token[: layer + 1]) for token in tokens)
        return shares

    own = numbers(list(range(SEQUENCES)))
    draws = [each for each in map(numbers, drawn_sequences(resampling)) if each is not None]
    flat = {"routers": found.routers_differ, "tokens": found.tokens_differ}
    for layer in found.layers:
        flat[f"router {layer.layer}"] = layer.routers_differ
        flat[f"so far {layer.layer}"] = layer.tokens_differ_so_far
    assert own is not None and flat.keys() == own.keys() and len(draws) < 600  # some draws have only the shortest sequence
    for name, value in own.items():
        low, high = naive_interval([each[name] for each in draws])
        assert asdict(flat[name]) == pytest.approx({"value": value, "low": low, "high": high}), name
    assert found.tokens == sum(LENGTHS) - SEQUENCES


def test_one_sequence_has_no_interval() -> None:
    ratio = random_ratio()[2:3]
    found = ratio_numbers(ratio, [0.8, 1.2], Resampling(1, 100, 0))
    assert found.mean.low is found.mean.high is found.quantiles["99"].low is None
    assert found.quantiles["50"].value == naive_quantile([abs(value) for value in tokens_of(ratio, [0])], 500)


def test_a_ratio_that_overflows_has_no_interval_and_does_not_raise() -> None:
    ratio = random_ratio()
    ratio[0, 2] = 1000.0
    found = ratio_numbers(ratio, [0.8, 1.2], Resampling(SEQUENCES, 100, 0))
    assert found.ratio == Estimate(math.inf) and found.largest == 1000.0

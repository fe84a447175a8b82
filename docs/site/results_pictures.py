"""The pictures of docs/results.md: clean differences with intervals, and differences of losses over steps."""

import math
from collections.abc import Sequence

import numpy as np
from charts import EDGE, WIDTH, Plot, chart, heading
from results_numbers import baseline_name, baseline_of, columns, difference, level, of_bytes
from scipy.special import stdtrit
from svg_parts import text
from tutorial_compare import picture as differences_picture

from holdfast.metrics.paired import FEWEST_SEEDS
from holdfast.train.ledger import Experiment, LedgerCell
from holdfast.train.results import Row

Curve = tuple[np.ndarray, np.ndarray]  # steps (S,), and differences (seeds, S)


def differences(experiment: Experiment) -> str | None:
    """Return the picture of the clean differences to the first baseline; None if no difference has an interval."""
    rows, number, baseline = [], columns(experiment)["clean"], experiment.rows[0]
    for row in experiment.rows[1:]:
        found = difference(experiment, row, number) if baseline_of(experiment, row) is baseline else None
        if found is not None and found.low is not None:
            values = {key: getattr(found, key) for key in ("mean", "low", "high")}
            rows.append({"router": row.router, "experts_per_token": row.experts_per_token, **values})
    figure = level(experiment, baseline, number)
    if not rows or figure is None:
        return None
    measure = "bits per byte" if of_bytes(experiment) else experiment.cells[0].measure.noun
    about = f"Difference of the {measure} to {baseline.router} ({figure.mean:.3f})"
    return differences_picture({"seeds": len(baseline.seeds), "title": about, "rows": rows, "better": number.better})


def has_held_out(experiment: Experiment) -> bool:
    """Return whether all cells have a curve of the loss on held-out data."""
    return all(len(cell.validation.steps) > 1 and None not in cell.validation.losses for cell in experiment.cells)


def loss_differences(experiment: Experiment, row: Row, *, held_out: bool = False) -> Curve | None:
    """Return the loss minus that of the row that this one is compared with, over the seeds that both have; None for none."""
    other = baseline_of(experiment, row)
    if other is None or row.apart or other.apart:
        return None

    def curve(cell: LedgerCell) -> tuple[np.ndarray, np.ndarray]:
        found = cell.validation if held_out else cell.curve
        return np.array(found.steps, float), np.array(found.losses, float)

    baseline = {cell.seed: curve(cell) for cell in experiment.cells_of(other)}
    pairs = [(curve(cell), baseline[cell.seed]) for cell in experiment.cells_of(row) if cell.seed in baseline]
    if not pairs:
        return None
    steps = pairs[0][0][0]  # of the first seed; others may have points between them
    return steps, np.array([np.interp(steps, *mine) - np.interp(steps, *theirs) for mine, theirs in pairs])


def half_width(values: np.ndarray) -> np.ndarray | None:
    """Return half the width of the 95% interval of the mean over seeds of `values (seeds, S)`: Student's t."""
    seeds = values.shape[0]
    return None if seeds < FEWEST_SEEDS else stdtrit(seeds - 1, 0.975) * values.std(0, ddof=1) / math.sqrt(seeds)


def curves(experiment: Experiment) -> str | None:
    """Return the picture of the losses minus those of the baseline, a panel for each router; None if there are no steps."""
    held_out = has_held_out(experiment)
    found = [(row.router, loss_differences(experiment, row, held_out=held_out)) for row in experiment.rows]
    panels = [(router, *one) for router, one in found if one is not None and len(one[0]) > 1 and np.isfinite(one[1]).all()]
    if not panels:
        return None
    reach = math.ceil(20 * max(map(_reach, (losses for _, _, losses in panels)))) / 20 or 0.05
    kind = "Held-out" if held_out else "Training"
    parts = heading(
        f"{kind} loss minus that of {baseline_name(experiment)}, in nats",
        f"Mean over seeds{_interval(panels)}; below 0 is better; cut off at the edge",
    )
    trained = any("{" in router for router, _, _ in panels)  # braces have a line of their own
    height, gap = 96, 92 if trained else 74
    for place, (router, steps, losses) in enumerate(panels):
        left = 70 + (place % 2) * (WIDTH - EDGE - 50) / 2
        top = gap + 18 + (place // 2) * (height + gap)
        name, _, training = router.partition("{")
        last = float(steps[-1])
        plot = Plot((0, last), (-reach, reach), top, height, left, left + (WIDTH - EDGE - 50) / 2 - 60)
        ticks = [(value, f"{value:+.2f}" if value else "0") for value in (-reach, 0.0, reach)]
        mean, half = losses.mean(0), half_width(losses)

        def points(values: np.ndarray, steps: np.ndarray = steps) -> list[tuple[float, float]]:
            return list(zip(steps.tolist(), values.clip(-reach, reach).tolist(), strict=True))

        band = [] if half is None else [plot.band(points(mean - half), points(mean + half))]
        parts += [
            text(left, top - (28 if trained else 10), name),
            *([text(left, top - 10, training.removesuffix("}").removeprefix("method="), "small")] if training else []),
            *plot.axes([(0, "0"), (last, f"{last:,.0f}")], ticks, "step"),
            *band,
            plot.curve(points(mean), 1),
        ]
    rows = math.ceil(len(panels) / 2)
    return chart(gap + 18 + rows * (height + gap), f"{kind} losses of routers minus that of the baseline", parts)


def _reach(losses: np.ndarray) -> float:
    """Return the largest end of an interval in the second half of training: the first steps differ most."""
    half = half_width(losses)
    values = np.abs(losses.mean(0)) + (0 if half is None else half)
    return float(values[len(values) // 2 :].max())


def _interval(panels: Sequence[tuple[str, np.ndarray, np.ndarray]]) -> str:
    return ", 95% interval" if any(len(losses) >= FEWEST_SEEDS for _, _, losses in panels) else ""

"""Mean corruption error: errors under common corruptions, relative to those of a baseline."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.accuracy import hits
from holdfast.suggest import unknown

# AlexNet's top-1 errors on ImageNet-C in per cent, means over the five severities (Hendrycks & Dietterich 2019). They are
# divisors for ImageNet-C only: on other data, divide by the errors of a baseline that was run on that data.
ALEXNET_ERRORS: Mapping[str, float] = {
    "gaussian_noise": 88.6,
    "shot_noise": 89.4,
    "impulse_noise": 92.3,
    "defocus_blur": 82.0,
    "glass_blur": 82.6,
    "motion_blur": 78.6,
    "zoom_blur": 79.8,
    "snow": 86.7,
    "frost": 82.7,
    "fog": 81.9,
    "brightness": 56.5,
    "contrast": 85.3,
    "elastic_transform": 64.6,
    "pixelate": 71.8,
    "jpeg_compression": 60.7,
}


class MeanCorruptionError(Accumulator[float]):
    """mCE = 100 * mean_c ( mean_s error_cs / baseline_c ), in per cent as published; lower is better, the baseline has 100.

    `baseline` has the baseline's error on each corruption in per cent, averaged over severities: `ALEXNET_ERRORS` for
    ImageNet-C, another run's `errors()` for other data. A mean over fewer corruptions or severities than the baseline's is
    another metric, so `result()` wants them all.
    """

    def __init__(self, baseline: Mapping[str, float], *, severities: Iterable[int] = (1, 2, 3, 4, 5)) -> None:
        super().__init__()
        self.baseline, self.severities = dict(baseline), tuple(severities)
        if not self.baseline or not self.severities:
            raise ValueError("mCE needs a baseline error for at least one corruption, and at least one severity.")
        for corruption, error in self.baseline.items():
            if not 0 < error <= 100:
                raise ValueError(
                    f"the baseline's error on {corruption} is {error}; it is a divisor in per cent, above 0 and up to 100."
                )

    @property
    def settings(self) -> tuple[object, ...]:
        return (tuple(sorted(self.baseline.items())), self.severities)

    def update(
        self, corruption: str, severity: int, logits: Tensor, targets: Tensor, token_mask: Tensor | None = None
    ) -> None:
        """`logits (...,C)` of corrupted images and their `targets (...)`."""
        if corruption not in self.baseline:
            raise ValueError(unknown("corruption", corruption, self.baseline))
        if severity not in self.severities:
            raise ValueError(f"severity is {severity}; this mCE is over severities {_listed(self.severities)}.")
        right = hits(logits, targets, token_mask=token_mask)
        wrong = right.numel() - int(right.sum())
        self._add(**{f"wrong {corruption} {severity}": wrong, f"images {corruption} {severity}": right.numel()})

    def errors(self) -> dict[str, float]:
        """The error on each corruption in per cent, the mean over severities."""
        cells = [(corruption, severity) for corruption in self.baseline for severity in self.severities]
        missing = [f"{c} {s}" for c, s in cells if float(self._sums.get(f"images {c} {s}", 0)) == 0]
        if missing:
            raise ValueError(
                f"mCE has seen no images of {_listed(missing[:5])} ({len(missing)} of {len(cells)} are missing)."
            )
        rates = {(c, s): 100 * float(self._sums[f"wrong {c} {s}"]) / float(self._sums[f"images {c} {s}"]) for c, s in cells}
        return {c: sum(rates[c, s] for s in self.severities) / len(self.severities) for c in self.baseline}

    def result(self) -> float:
        errors = self.errors()
        return 100 * sum(error / self.baseline[corruption] for corruption, error in errors.items()) / len(errors)


def _listed(things: Iterable[object]) -> str:
    return ", ".join(map(str, things))

"""The registry of metrics: what a recipe's `metrics` and `holdfast evaluate --metrics` may name.

They are shown beside the main measure of a task, for clean and for attacked data.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, final, get_args

import torch
from torch import Tensor

from holdfast.errors import require_known
from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.tasks import Perplexity, in_top_k, token_nll
from holdfast.plugins import Registry, check_name, takes, watch

Of = Literal["logits", "losses"]
Better = Literal["higher", "lower"]
Function = TypeVar("Function", bound=Callable[..., Any])


@final
@dataclass(frozen=True)
class Metric:
    """A named metric. `measured` is a function of a batch, or a class; see `register_metric`."""

    name: str
    about: str
    of: Of
    better: Better
    measured: Callable[..., Any]

    def __post_init__(self) -> None:
        check_name(self.name, "a metric")
        require_known(f"input of metric {self.name!r}:", self.of, get_args(Of))
        require_known(f"direction of metric {self.name!r}:", self.better, get_args(Better))

    def start(self) -> Any:
        """Return an object with `update` and `result`, without data."""
        return self.measured() if inspect.isclass(self.measured) else RowMean(self)


METRICS: Registry[Metric] = Registry("metric")
watch(METRICS)


def register_metric(name: str, *, of: Of, about: str, better: Better = "higher") -> Callable[[Function], Function]:
    """Return a decorator that makes a function or a class a metric: `metrics` in recipes, `holdfast evaluate --metrics`.

    of="logits"   measured(logits (n,C), labels (n,)): of tokens to predict, or of images or texts to classify
    of="losses"   measured(losses (n,)): the negative log-likelihood of each label, in nats

    A function is called for each batch and returns n numbers, one for each row; the metric is their mean over all rows. A
    class has `update`, which is called with the same arguments, and `result()`, which returns the number.

    about    one line of help
    better   "higher" or "lower"

    Example:
        @holdfast.register_metric("surprises", of="losses", about="share of labels with less than 1%", better="lower")
        def surprises(losses):
            return losses > math.log(100)
    """

    def add(measured: Function) -> Function:
        metric = Metric(name, about, of, better, measured)
        inputs = ("logits", "labels") if of == "logits" else ("losses",)
        is_class, called = inspect.isclass(measured), measured
        if is_class:
            if not all(callable(getattr(measured, method, None)) for method in ("update", "result")):
                raise ValueError(f"metric {name!r}: the class {measured.__name__} needs the methods update and result.")
            if not takes(measured, 0):
                raise ValueError(f"metric {name!r}: the class {measured.__name__} must need no arguments.")
            called = measured.update  # type: ignore[attr-defined]
        if not takes(called, len(inputs) + is_class):  # a method also takes its object
            raise ValueError(f"metric {name!r}: it is called with {' and '.join(inputs)}, which it does not take.")
        METRICS.register(metric)
        return measured

    return add


class RowMean(Accumulator[float]):
    """The mean over rows of what the function of a metric returns."""

    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric

    def update(self, *batch: Tensor) -> None:
        values = self.metric.measured(*batch)
        rows = batch[0].shape[0]
        if not isinstance(values, Tensor) or values.shape != (rows,):
            found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"metric {self.metric.name!r} returned {found} for a batch of {rows} rows; expected a tensor of {rows} "
                "numbers. A metric that is no mean over rows is a class with update and result."
            )
        self._add(total=values.double().sum(), rows=rows)

    def result(self) -> float:
        return self._mean("total", "rows")


@final
class ChosenMetrics:
    """The metrics of some names, measured together on one set of data."""

    def __init__(self, names: Sequence[str]) -> None:
        self.metrics = [METRICS[name] for name in names]
        if len(set(names)) < len(names):
            raise ValueError(f"metrics are {', '.join(names)}; name each only once.")
        self._started = [metric.start() for metric in self.metrics]

    def __bool__(self) -> bool:
        return bool(self.metrics)

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add `logits (n,C)` and `labels (n,)`."""
        if not self.metrics or not len(labels):
            return
        losses = token_nll(logits, labels)
        for metric, started in zip(self.metrics, self._started, strict=True):
            started.update(*((logits, labels) if metric.of == "logits" else (losses,)))

    def result(self) -> dict[str, Any]:
        """Return {"metrics": {name: number}} to store with a score; empty if no metrics were chosen."""
        found = {}
        for metric, started in zip(self.metrics, self._started, strict=True):
            value = started.result()
            try:
                found[metric.name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(f"metric {metric.name!r} has the result {value!r}; expected a number.") from None
        return {"metrics": found} if found else {}


def describe_metrics(names: Sequence[str]) -> list[dict[str, str]]:
    """Return the names, descriptions and directions of metrics, to store with results."""
    return [{key: getattr(METRICS[name], key) for key in ("name", "about", "better")} for name in names]


for _metric in (
    Metric("accuracy", "share of labels with the largest logit", "logits", "higher", in_top_k),
    Metric("top5-accuracy", "share of labels among the five largest logits", "logits", "higher", partial(in_top_k, k=5)),
    Metric("perplexity", "exp of the mean loss", "losses", "lower", Perplexity),
):
    METRICS.add(_metric)

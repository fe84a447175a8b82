"""Score an image classifier on shifted test sets: error on other images of its classes, detection of outliers, corruptions.

    classes       error, %: ImageNet-A, ImageNet-R, or any folder with class folders
    outliers      AUPR, %: how well a low confidence tells outliers (ImageNet-O) from test images; higher is better
    corrupted     mCE, % for all of ImageNet-C, else the mean error, %
    corruptions   a name, not a folder: the corruptions of `holdfast.attacks` that need no files, applied to the model's own
                  test images at all severities

If a folder has only some of the model's classes, only their logits are compared, as in the code that its authors published
(https://github.com/hendrycks/natural-adv-examples, https://github.com/hendrycks/imagenet-r).
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from holdfast.attacks import CORRUPTIONS, corrupt
from holdfast.data import Images
from holdfast.data.images import Prepare
from holdfast.data.shifted_images import (
    ClassIndex,
    ShiftedFolder,
    are_wordnet_ids,
    counted,
    outputs_of,
    published_set,
    recognise,
)
from holdfast.metrics import Shares
from holdfast.metrics.tasks import (
    ALEXNET_CLEAN_ERROR,
    ALEXNET_ERRORS,
    Accuracy,
    AnomalyPrecision,
    in_top_k,
    mean_corruption_error,
)

MADE = "corruptions"  # the name of the corruptions that are made here
SEED = 0  # of the corruptions that are made here
SEVERITIES = (1, 2, 3, 4, 5)
BATCH = 64  # images in a forward
THREADS = 4  # that decode images while the model runs

Classify = Callable[[Tensor], Tensor]  # pixels between 0 and 1 to logits
Consume = Callable[[Tensor, Tensor], None]  # logits of a batch, and the outputs that are right


@final
@dataclass(frozen=True)
class CleanImages:
    """The model's own test images: outliers are told from them, and corruptions are applied to them."""

    images: Images
    outputs: Tensor  # (N,) int64: the right output of each image


def recognise_all(written: Sequence[str]) -> list[ShiftedFolder | None]:
    """Return the layouts of the folders, None for `corruptions`; raise ValueError for one without a known layout."""
    if repeated := next((one for place, one in enumerate(written) if one in written[:place]), None):
        raise ValueError(f"{repeated} is given twice as a shifted test set.")
    return [None if one == MADE else recognise(one) for one in written]


def require_no_clean_images(found: Sequence[ShiftedFolder | None]) -> None:
    """Raise ValueError if one of the tests needs the model's own test images, for a model that has none."""
    for one in found:
        if one is None or one.kind == "outliers":
            what = MADE if one is None else f"{one.folder} ({one.layout})"
            raise ValueError(f"{what} needs test images of the model's own classes too: add --source with a folder of them.")


@final
class ShiftedTests:
    """The shifted test sets for one list of classes. Everything that can be wrong with them raises ValueError here.

    found       what `recognise_all` returned
    classes     the model's classes, in the order of its outputs
    shape       (channels, height, width) that the model reads
    clean       its own test images; None: there are none, and tests that need them raise ValueError
    prepare     resizes and crops image files; by default the shorter side is scaled, and the central square is used
    index       for folders that name classes by WordNet id, if the model's classes have names
    made        numbers of the test images that `corruptions` are applied to
    """

    def __init__(
        self,
        found: Sequence[ShiftedFolder | None],
        classes: Sequence[str],
        shape: tuple[int, int, int],
        *,
        clean: CleanImages | None = None,
        prepare: Prepare | None = None,
        index: ClassIndex | None = None,
        made: Sequence[int] = (),
    ) -> None:
        channels, height, width = shape
        self.classes, self.size, self.prepare, self.clean = list(classes), height, prepare, clean
        self.made = list(made) if None in found else []
        self.folders: dict[str, ShiftedFolder] = {}
        self.columns: dict[str, list[int] | None] = {}  # the outputs that are compared; None: all
        if clean is None:
            require_no_clean_images(found)
        for one in found:
            if one is None:
                continue
            if channels != 3 or height != width:
                raise ValueError(
                    f"{one.folder} has colour images, and the model reads {channels} channels of {height} x {width} pixels."
                )
            name = one.name if one.name not in self.folders else str(one.folder)
            if name in self.folders or name == MADE:
                raise ValueError(f"two shifted test sets are called {name}; rename one of the folders.")
            self.folders[name], self.columns[name] = one, self._columns_of(one, index)
            if one.kind == "outliers" and not self._has_inliers(name):
                raise ValueError(f"the test images have none of the classes of {one.folder}, so nothing is told apart.")

    def _columns_of(self, one: ShiftedFolder, index: ClassIndex | None) -> list[int] | None:
        if one.kind == "outliers" and one.layout != "ImageNet-O" and not set(one.classes) & set(self.classes):
            return None  # these are told from images of all classes
        if one.layout == "ImageNet-O" and are_wordnet_ids(self.classes) and not set(one.classes) & set(self.classes):
            raise ValueError(
                f"{one.folder} (ImageNet-O) has no class in common with the model; to tell its images from those of all the "
                f"model's classes, write outliers={one.folder}."
            )
        columns = outputs_of(one.folder, one.classes, self.classes, index)
        if len(columns) < 2 and one.kind == "classes":
            raise ValueError(f"{one.folder} has one class only; a model that may answer only this class is always right.")
        return columns

    def _has_inliers(self, name: str) -> bool:
        columns = self.columns[name]
        assert self.clean is not None
        return columns is None or bool(torch.isin(self.clean.outputs, torch.tensor(columns)).any())

    def describe(self) -> list[dict[str, Any]]:
        """Return what a result records of these tests, as a part of a run's identity."""
        found: list[dict[str, Any]] = [
            {"name": name, "layout": one.layout, "examples": len(one), "checksum": one.checksum}
            for name, one in self.folders.items()
        ]
        return found + ([{"name": MADE, "layout": MADE, "examples": len(self.made), "seed": SEED}] if self.made else [])

    def inputs_to_score(self, *, with_clean: bool = False) -> int:
        """Return how many images the model is run on."""
        clean = len(self.clean.images) if self.clean is not None and (with_clean or self._needs_clean()) else 0
        made = len(self.made) * (1 + len(SEVERITIES) * len(_makeable()))  # clean too
        return clean + made + sum(map(len, self.folders.values()))

    def _needs_clean(self) -> bool:
        return any(one.kind == "outliers" or self._has_mce(one) for one in self.folders.values())

    @torch.no_grad()
    def score(self, classify: Classify, device: Any, *, with_clean: bool = False) -> dict[str, dict[str, Any]]:
        """Return for each test its "figure", the "measure" that this is, which is "better", and the numbers behind it.

        with_clean      add the error on the model's own test images, as "clean"
        """
        tests = {name: self._test(one, self.columns[name]) for name, one in self.folders.items()}
        clean = _ClassesTest(None, len(self.classes))
        if self.clean is not None and (with_clean or self._needs_clean()):
            consumers: list[Consume] = [clean.add, *(test.add_clean for test in tests.values())]
            _forward(classify, device, self.clean.images, self.clean.outputs, consumers)
        for name, one in self.folders.items():
            outputs = self.columns[name] or [0] * len(one.classes)  # outliers have no right output
            labels = dict(zip(one.classes, outputs, strict=True))
            for part in one.parts:
                # Corrupted images are published at the size that models read, and are not resized again.
                images = one.images(part, labels, self.size, None if one.kind == "corrupted" else self.prepare)
                add = tests[name].adder(part.corruption, part.severity)
                _forward(classify, device, images, images.labels, [add])
        found = {name: {"kind": self.folders[name].kind, **test.result()} for name, test in tests.items()}
        if self.made:
            found[MADE] = {"kind": MADE, **self._score_made(classify, device)}
        return {**({"clean": {"kind": "clean", **clean.result()}} if with_clean and self.clean else {}), **found}

    def _test(self, one: ShiftedFolder, columns: list[int] | None) -> "_ClassesTest | _OutliersTest | _CorruptedTest":
        if one.kind == "outliers":
            return _OutliersTest(columns, len(self.classes if columns is None else columns))
        if one.kind == "corrupted":
            return _CorruptedTest(columns, len(one.classes), self._has_mce(one), _note(one))
        return _ClassesTest(columns, len(one.classes))

    def _has_mce(self, one: ShiftedFolder) -> bool:
        """Return whether mCE is defined: all published corruptions and severities, for classes of ImageNet."""
        return one.kind == "corrupted" and are_wordnet_ids(one.classes) and not _missing_corruptions(one)

    def _score_made(self, classify: Classify, device: Any) -> dict[str, Any]:
        """Return the mean error over corruptions and severities, and each of them."""
        assert self.clean is not None
        kinds = _makeable()
        scores = {(kind, severity): Accuracy() for kind in kinds for severity in SEVERITIES}
        clean, wrong = Accuracy(), torch.zeros(len(self.made), dtype=torch.float64)
        for start, pixels, count in _batches(self.clean.images, self.made):
            right = self.clean.outputs[self.made[start : start + count]]
            clean.update(classify(pixels.to(device)).cpu(), right)
            for (kind, severity), accuracy in scores.items():
                made = corrupt(pixels, kind, severity=severity, seed=SEED, first=start).images
                logits = classify(made.to(device)).cpu()
                accuracy.update(logits, right)
                wrong[start : start + count] += ~in_top_k(logits, right)
        errors = {kind: {s: _error(scores[kind, s]) for s in SEVERITIES} for kind in kinds}
        found = {**_error_row(_mean_error(errors)), "clean_same": _error(clean), "examples": len(self.made), "seed": SEED}
        each = Shares((wrong / len(scores)).numpy()).stored()
        return {**found, "errors": _as_json(errors), "per_example": each}


def _makeable() -> list[str]:
    """Return the corruptions that need no files."""
    return [name for name, corruption in CORRUPTIONS.items() if not corruption.files]


class _Selected:
    """The logits of some outputs, and which of them is right."""

    def __init__(self, columns: Sequence[int] | None) -> None:
        self.columns = None if columns is None else torch.tensor(sorted(columns))

    def known(self, outputs: Tensor) -> Tensor:
        """Return (N,) bool: whether the right output is one of those that are compared."""
        return torch.ones_like(outputs, dtype=torch.bool) if self.columns is None else torch.isin(outputs, self.columns)

    def logits(self, logits: Tensor) -> Tensor:
        return logits if self.columns is None else logits[:, self.columns]

    def targets(self, outputs: Tensor) -> Tensor:
        return outputs if self.columns is None else torch.searchsorted(self.columns, outputs)


class _ClassesTest:
    """The error on images of the model's classes."""

    def __init__(self, columns: Sequence[int] | None, classes: int) -> None:
        self.selected, self.classes = _Selected(columns), classes
        self.first, self.first_five, self.examples = Accuracy(), Accuracy(5), 0
        self.wrong: list[Tensor] = []

    def adder(self, corruption: str, severity: int) -> Consume:
        return self.add

    def add(self, logits: Tensor, outputs: Tensor) -> None:
        logits, targets = self.selected.logits(logits), self.selected.targets(outputs)
        self.first.update(logits, targets)
        self.first_five.update(logits, targets)
        self.wrong.append(~in_top_k(logits, targets))
        self.examples += len(targets)

    def add_clean(self, logits: Tensor, outputs: Tensor) -> None:
        """Ignore the model's own test images."""

    def result(self) -> dict[str, Any]:
        if not self.examples:
            return {}
        top5 = {"top5": _error(self.first_five)} if self.classes > 5 else {}  # else 0
        row = {**_error_row(_error(self.first)), "accuracy": self.first.result(), **top5}
        each = Shares(torch.cat(self.wrong).double().numpy()).stored()
        return {**row, "examples": self.examples, "classes": self.classes, "per_example": each}


class _OutliersTest:
    """How well a low confidence tells outliers from test images of the same outputs."""

    def __init__(self, columns: Sequence[int] | None, classes: int) -> None:
        self.selected, self.classes, self.precision = _Selected(columns), classes, AnomalyPrecision()
        self.outliers = self.inliers = 0
        self.problem = ""

    def adder(self, corruption: str, severity: int) -> Consume:
        return self.add

    def add(self, logits: Tensor, outputs: Tensor) -> None:
        self._update(self.selected.logits(logits), True)
        self.outliers += len(outputs)

    def add_clean(self, logits: Tensor, outputs: Tensor) -> None:
        known = self.selected.known(outputs)
        self._update(self.selected.logits(logits[known]), False)
        self.inliers += int(known.sum())

    def _update(self, logits: Tensor, is_outlier: bool) -> None:
        try:
            self.precision.update(logits, is_outlier)
        except ValueError as problem:  # NaN: the result of a long training must not be lost for it
            self.problem = str(problem)

    def result(self) -> dict[str, Any]:
        figure = math.nan if self.problem else 100 * self.precision.result()
        counts: dict[str, float] = {"examples": self.outliers, "in_distribution": self.inliers, "classes": self.classes}
        counts["chance"] = 100 * self.outliers / (self.outliers + self.inliers)
        problem = {"undefined": self.problem} if self.problem else {}
        return {"figure": figure, "measure": "AUPR, %", "better": "higher", **counts, **problem}


class _CorruptedTest:
    """The error on each corruption at each severity, and mCE if all published ones are there."""

    def __init__(self, columns: Sequence[int] | None, classes: int, has_mce: bool, note: str | None) -> None:
        self.selected, self.classes, self.note, self.examples = _Selected(columns), classes, note, 0
        self.scores: dict[tuple[str, int], Accuracy] = {}
        self.has_mce, self.clean = has_mce, Accuracy()

    def adder(self, corruption: str, severity: int) -> Consume:
        accuracy = self.scores.setdefault((corruption, severity), Accuracy())

        def add(logits: Tensor, outputs: Tensor) -> None:
            logits, targets = self.selected.logits(logits), self.selected.targets(outputs)
            accuracy.update(logits, targets)
            self.examples += len(targets)

        return add

    def add_clean(self, logits: Tensor, outputs: Tensor) -> None:
        known = self.selected.known(outputs)
        if bool(known.any()):
            self.clean.update(self.selected.logits(logits[known]), self.selected.targets(outputs[known]))

    def result(self) -> dict[str, Any]:
        errors: dict[str, dict[int, float]] = {}
        for (corruption, severity), accuracy in self.scores.items():
            errors.setdefault(corruption, {})[severity] = _error(accuracy)
        mean = _mean_error(errors)
        found: dict[str, Any] = {"examples": self.examples, "classes": self.classes, "errors": _as_json(errors)}
        found |= {} if self.note is None else {"note": self.note}
        if not self.has_mce:
            return {**_error_row(mean), **found}
        means = {corruption: sum(each.values()) / len(each) for corruption, each in errors.items()}
        try:
            clean = _error(self.clean)
            relative = {"clean": clean, "baseline_clean": ALEXNET_CLEAN_ERROR}
            found |= {"clean": clean, "relative_mce": mean_corruption_error(means, ALEXNET_ERRORS, **relative)}
        except ValueError:  # there are no clean images of these classes
            pass
        return {
            "figure": mean_corruption_error(means, ALEXNET_ERRORS),
            "measure": "mCE, %",
            "better": "lower",
            "mean_error": mean,
            **found,
        }


def _missing_corruptions(one: ShiftedFolder) -> list[str]:
    """Return the corruptions and severities of ImageNet-C that a folder does not have."""
    cells = {(part.corruption, part.severity) for part in one.parts}
    return [f"{kind}/{severity}" for kind in ALEXNET_ERRORS for severity in SEVERITIES if (kind, severity) not in cells]


def _note(one: ShiftedFolder) -> str | None:
    """Return why the figure of a folder with the classes of ImageNet is not the published mCE; None if it is."""
    if not are_wordnet_ids(one.classes):
        return None
    if missing := _missing_corruptions(one):
        return f"mCE needs all 15 corruptions at 5 severities; {len(missing)} of 75 are missing, such as {missing[0]}."
    if published_set(one.classes) != "ImageNet":
        classes = counted(len(one.classes), "class", "classes")
        return f"mCE over {classes} cannot be compared with numbers that are published for ImageNet-C."
    return None


def _forward(classify: Classify, device: Any, images: Images, outputs: Tensor, consumers: Sequence[Consume]) -> None:
    """Run the model on all images, and give the logits of each batch to every consumer."""
    for start, pixels, count in _batches(images, range(len(images))):
        logits = classify(pixels.to(device)).float().cpu()
        for consume in consumers:
            consume(logits, outputs[start : start + count])


def _batches(images: Images, numbers: Sequence[int]) -> Iterator[tuple[int, Tensor, int]]:
    """Yield the start, the pixels and the size of each batch; some threads decode the batches that follow."""
    starts = range(0, len(numbers), BATCH)
    with ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[tuple[int, Future[Tensor]]] = deque()
        try:
            for start in starts:
                waiting.append((start, pool.submit(images.pixels, list(numbers[start : start + BATCH]))))
                if len(waiting) > THREADS:
                    first, pixels = waiting.popleft()
                    yield first, pixels.result(), len(pixels.result())
            while waiting:
                first, pixels = waiting.popleft()
                yield first, pixels.result(), len(pixels.result())
        finally:
            for _, pixels in waiting:
                pixels.cancel()


def _error(accuracy: Accuracy) -> float:
    return 100 * (1 - accuracy.result())


def _error_row(error: float) -> dict[str, Any]:
    return {"figure": error, "measure": "error, %", "better": "lower"}


def _mean_error(errors: dict[str, dict[int, float]]) -> float:
    """Return the mean over corruptions of the mean over severities."""
    means = [sum(each.values()) / len(each) for each in errors.values()]
    return sum(means) / len(means)


def _as_json(errors: dict[str, dict[int, float]]) -> dict[str, dict[str, float]]:
    return {corruption: {str(severity): error for severity, error in each.items()} for corruption, each in errors.items()}

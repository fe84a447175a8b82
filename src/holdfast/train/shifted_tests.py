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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from holdfast.attacks import corrupt
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
from holdfast.metrics.tasks import (
    ALEXNET_CLEAN_ERROR,
    ALEXNET_ERRORS,
    AnomalyPrecision,
    in_top_k,
    mean_corruption_error,
)
from holdfast.train.image_attacks import Classify, error_of, made_corruptions, per_image

MADE = "corruptions"  # the name of the corruptions that are made here
SEED = 0  # of the corruptions that are made here
SEVERITIES = (1, 2, 3, 4, 5)
BATCH = 64  # images in a forward
THREADS = 4  # that decode images while the model runs

Cell = tuple[str, int]  # a corruption and a severity
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
        made = len(self.made) * (1 + len(SEVERITIES) * len(made_corruptions()))  # clean too
        return clean + made + sum(map(len, self.folders.values()))

    def _needs_clean(self) -> bool:
        return any(one.kind == "outliers" or self._has_mce(one) for one in self.folders.values())

    @torch.no_grad()
    def score(self, classify: Classify, device: Any, *, with_clean: bool = False) -> dict[str, dict[str, Any]]:
        """Return for each test its "figure", the "measure" that this is, which is "better", and the numbers behind it.

        with_clean      add the error on the model's own test images, as "clean"
        """
        tests = {name: self._test(name) for name in self.folders}
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
                add = partial(tests[name].add, cell=(part.corruption, part.severity))
                _forward(classify, device, images, images.labels, [add])
        found = {name: {"kind": self.folders[name].kind, **test.result()} for name, test in tests.items()}
        if self.made:
            found[MADE] = {"kind": MADE, **self._score_made(classify, device)}
        return {**({"clean": {"kind": "clean", **clean.result()}} if with_clean and self.clean else {}), **found}

    def _test(self, name: str) -> "_Test":
        one, columns = self.folders[name], self.columns[name]
        if one.kind == "corrupted":
            return _CorruptedTest(columns, len(one.classes), has_mce=self._has_mce(one), note=_note(one))
        if one.kind == "outliers":
            return _OutliersTest(columns, len(self.classes if columns is None else columns))
        return _ClassesTest(columns, len(one.classes))

    def _has_mce(self, one: ShiftedFolder) -> bool:
        """Return whether mCE is defined: all published corruptions and severities, for classes of ImageNet."""
        return one.kind == "corrupted" and are_wordnet_ids(one.classes) and not _missing_corruptions(one)

    def _score_made(self, classify: Classify, device: Any) -> dict[str, Any]:
        """Return the mean error over corruptions and severities, and each of them."""
        assert self.clean is not None
        kinds = made_corruptions()
        clean = list[Tensor]()
        wrong: dict[Cell, list[Tensor]] = {(kind, severity): [] for kind in kinds for severity in SEVERITIES}
        for start, pixels in _batches(self.clean.images, self.made):
            right = self.clean.outputs[self.made[start : start + len(pixels)]]
            clean.append(~in_top_k(classify(pixels.to(device)).cpu(), right))
            for (kind, severity), of_cell in wrong.items():
                images = corrupt(pixels, kind, severity=severity, seed=SEED, first=start).images
                of_cell.append(~in_top_k(classify(images.to(device)).cpu(), right))
        errors, mean = _errors(wrong)
        counted = {"clean_same": error_of(torch.cat(clean)), "examples": len(self.made), "seed": SEED}
        every = torch.stack([torch.cat(of_cell) for of_cell in wrong.values()]).double().mean(0)
        return {**_error_row(mean), **counted, "errors": errors, "per_example": per_image(every)}


class _Test(ABC):
    """The results on one shifted test set (abstract).

    columns   the outputs that are compared; None: all
    classes   how many classes it has
    """

    def __init__(self, columns: Sequence[int] | None, classes: int) -> None:
        self.columns = None if columns is None else torch.tensor(sorted(columns))
        self.classes, self.examples = classes, 0

    def compared(self, logits: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the compared logits and which is right, of the images whose right output is one of them."""
        if self.columns is None:
            return logits, outputs
        known = torch.isin(outputs, self.columns)
        return logits[known][:, self.columns], torch.searchsorted(self.columns, outputs[known])

    @abstractmethod
    def add(self, logits: Tensor, outputs: Tensor, cell: Cell = ("", 0)) -> None:
        """Add images of the test set; `cell` is their corruption and its severity, if it has corruptions."""

    def add_clean(self, logits: Tensor, outputs: Tensor) -> None:
        """Add the model's own test images, for tests that use them."""
        return

    @abstractmethod
    def result(self) -> dict[str, Any]: ...


class _ClassesTest(_Test):
    """The error on images of the model's classes."""

    def __init__(self, columns: Sequence[int] | None, classes: int) -> None:
        super().__init__(columns, classes)
        self.wrong, self.wrong_of_five = list[Tensor](), list[Tensor]()

    def add(self, logits: Tensor, outputs: Tensor, cell: Cell = ("", 0)) -> None:
        logits, targets = self.compared(logits, outputs)
        self.wrong.append(~in_top_k(logits, targets))
        self.wrong_of_five.append(~in_top_k(logits, targets, 5))

    def result(self) -> dict[str, Any]:
        if not self.wrong:
            return {}
        wrong = torch.cat(self.wrong)
        top5 = {"top5": error_of(torch.cat(self.wrong_of_five))} if self.classes > 5 else {}  # else 0
        row = {**_error_row(error_of(wrong)), "accuracy": int((~wrong).sum()) / len(wrong), **top5}
        return {**row, "examples": len(wrong), "classes": self.classes, "per_example": per_image(wrong)}


class _OutliersTest(_Test):
    """How well a low confidence tells outliers from test images of the same outputs."""

    def __init__(self, columns: Sequence[int] | None, classes: int) -> None:
        super().__init__(columns, classes)
        self.precision, self.inliers, self.problem = AnomalyPrecision(), 0, ""

    def add(self, logits: Tensor, outputs: Tensor, cell: Cell = ("", 0)) -> None:
        self.examples += self._add(logits, outputs, is_outlier=True)

    def add_clean(self, logits: Tensor, outputs: Tensor) -> None:
        self.inliers += self._add(logits, outputs, is_outlier=False)

    def _add(self, logits: Tensor, outputs: Tensor, *, is_outlier: bool) -> int:
        logits, targets = self.compared(logits, outputs)
        try:
            self.precision.update(logits, is_outlier)
        except ValueError as problem:  # NaN: the result of a long training must not be lost for it
            self.problem = str(problem)
        return len(targets)

    def result(self) -> dict[str, Any]:
        figure = math.nan if self.problem else 100 * self.precision.result()
        counts: dict[str, float] = {"examples": self.examples, "in_distribution": self.inliers, "classes": self.classes}
        counts["chance"] = 100 * self.examples / (self.examples + self.inliers)
        problem = {"undefined": self.problem} if self.problem else {}
        return {"figure": figure, "measure": "AUPR, %", "better": "higher", **counts, **problem}


class _CorruptedTest(_Test):
    """The error on each corruption at each severity, and mCE if all published ones are there."""

    def __init__(self, columns: Sequence[int] | None, classes: int, *, has_mce: bool, note: str | None) -> None:
        super().__init__(columns, classes)
        self.note, self.has_mce = note, has_mce
        self.wrong, self.clean = dict[Cell, list[Tensor]](), list[Tensor]()

    def add(self, logits: Tensor, outputs: Tensor, cell: Cell = ("", 0)) -> None:
        logits, targets = self.compared(logits, outputs)
        self.wrong.setdefault(cell, []).append(~in_top_k(logits, targets))
        self.examples += len(targets)

    def add_clean(self, logits: Tensor, outputs: Tensor) -> None:
        self.clean.append(~in_top_k(*self.compared(logits, outputs)))

    def result(self) -> dict[str, Any]:
        errors, mean = _errors(self.wrong)
        found: dict[str, Any] = {"examples": self.examples, "classes": self.classes, "errors": errors}
        found |= {} if self.note is None else {"note": self.note}
        if not self.has_mce:
            return {**_error_row(mean), **found}
        means = {corruption: sum(each.values()) / len(each) for corruption, each in errors.items()}
        if any(map(len, self.clean)):  # there are clean images of these classes
            clean = error_of(torch.cat(self.clean))
            relative = {"clean": clean, "baseline_clean": ALEXNET_CLEAN_ERROR}
            found |= {"clean": clean, "relative_mce": mean_corruption_error(means, ALEXNET_ERRORS, **relative)}
        mce = mean_corruption_error(means, ALEXNET_ERRORS)
        return {"figure": mce, "measure": "mCE, %", "better": "lower", "mean_error": mean, **found}


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
    for start, pixels in _batches(images, range(len(images))):
        logits = classify(pixels.to(device)).float().cpu()
        for consume in consumers:
            consume(logits, outputs[start : start + len(pixels)])


def _batches(images: Images, numbers: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield the start and the pixels of each batch; some threads decode the batches that follow."""
    with ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[tuple[int, Future[Tensor]]] = deque()
        try:
            for start in range(0, len(numbers), BATCH):
                waiting.append((start, pool.submit(images.pixels, list(numbers[start : start + BATCH]))))
                if len(waiting) > THREADS:
                    first, pixels = waiting.popleft()
                    yield first, pixels.result()
            while waiting:
                first, pixels = waiting.popleft()
                yield first, pixels.result()
        finally:
            for _, pixels in waiting:
                pixels.cancel()


def _error_row(error: float) -> dict[str, Any]:
    return {"figure": error, "measure": "error, %", "better": "lower"}


def _errors(wrong: Mapping[Cell, list[Tensor]]) -> tuple[dict[str, dict[str, float]], float]:
    """Return the error by corruption and severity, and the mean over corruptions of the mean over severities."""
    errors: dict[str, dict[str, float]] = {}
    for (corruption, severity), of_cell in wrong.items():
        errors.setdefault(corruption, {})[str(severity)] = error_of(torch.cat(of_cell))
    means = [sum(each.values()) / len(each) for each in errors.values()]
    return errors, sum(means) / len(means)

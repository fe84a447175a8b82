"""Score an image classifier on shifted test sets: error on other images of its classes, detection of outliers, corruptions.

    classes       error, %: ImageNet-A, ImageNet-R, or any folder with class folders
    outliers      AUPR, %: how well a low confidence tells outliers (ImageNet-O) from test images; higher is better
    corrupted     mCE, % for all of ImageNet-C, else the mean error, %
    corruptions   a name, not a folder: the corruptions of `holdfast.attacks`, applied to the model's own test images at all
                  severities; for classes of ImageNet also mCE

If a folder has only some of the model's classes, only their logits are compared, as in the code that its authors published
(https://github.com/hendrycks/natural-adv-examples, https://github.com/hendrycks/imagenet-r).
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor

from holdfast.attacks import CORRUPTIONS
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
from holdfast.train.image_attacks import FROST, Classify, Corrupted, error_of, per_image

MADE = "corruptions"  # the name of the corruptions that are made here
SEED = 0  # of the corruptions that are made here
SEVERITIES = (1, 2, 3, 4, 5)
BATCH = 64  # images in a forward
THREADS = 4  # that decode images while the model runs

Cell = tuple[str, int]  # a corruption and a severity
Consume = Callable[[Tensor, Tensor], None]  # logits of a batch, and the outputs that are right


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
    clean       its own test images, whose labels are the right outputs: outliers are told from them, and corruptions are
                applied to them; None: there are none, and tests that need them raise ValueError
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
        clean: Images | None = None,
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
            columns = self.columns[name]
            inliers = clean is None or columns is None or torch.isin(clean.labels, torch.tensor(columns)).any()
            if one.kind == "outliers" and not inliers:
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

    def describe(self) -> list[dict[str, Any]]:
        """Return what a result records of these tests, as a part of a run's identity."""
        found: list[dict[str, Any]] = [
            {"name": name, "layout": one.layout, "examples": len(one), "checksum": one.checksum}
            for name, one in self.folders.items()
        ]
        return found + ([{"name": MADE, "layout": MADE, "examples": len(self.made), "seed": SEED}] if self.made else [])

    def inputs_to_score(self, *, with_clean: bool = False) -> int:
        """Return how many images the model is run on."""
        clean = len(self.clean) if self.clean is not None and (with_clean or self._needs_clean()) else 0
        made = len(self.made) * (1 + len(SEVERITIES) * len(CORRUPTIONS))  # clean too
        return clean + made + sum(map(len, self.folders.values()))

    def _needs_clean(self) -> bool:
        return any(one.kind == "outliers" or _has_mce(one) for one in self.folders.values())

    @torch.no_grad()
    def score(self, classify: Classify, device: Any, *, with_clean: bool = False) -> dict[str, dict[str, Any]]:
        """Return for each test its "figure", the "measure" that this is, which is "better", and the numbers behind it.

        with_clean      add the error on the model's own test images, as "clean"
        """
        kinds: dict[str, type[_Test]] = {"classes": _ClassesTest, "outliers": _OutliersTest, "corrupted": _CorruptedTest}
        tests = {name: kinds[one.kind](one, self.columns[name], len(self.classes)) for name, one in self.folders.items()}
        clean = _ClassesTest(None, None, len(self.classes))
        if self.clean is not None and (with_clean or self._needs_clean()):
            consumers: list[Consume] = [clean.add, *(test.add_clean for test in tests.values())]
            _forward(classify, device, self.clean, consumers)
        for name, one in self.folders.items():
            outputs = self.columns[name] or [0] * len(one.classes)  # outliers have no right output
            labels = dict(zip(one.classes, outputs, strict=True))
            for part in one.parts:
                # Corrupted images are published at the size that models read, and are not resized again.
                images = one.images(part, labels, self.size, None if one.kind == "corrupted" else self.prepare)
                add = partial(tests[name].add, cell=(part.corruption, part.severity))
                _forward(classify, device, images, [add])
        found = {name: {"kind": self.folders[name].kind, **test.result()} for name, test in tests.items()}
        if self.made and self.clean is not None:
            made = Corrupted(self.clean.pixels(self.made), SEED)
            right = self.clean.labels[self.made].to(device)
            each, every = made.errors(classify, right, SEVERITIES)
            errors = {kind: {str(severity): by[kind] for severity, by in each.items()} for kind in CORRUPTIONS}
            means = {kind: fmean(by_severity.values()) for kind, by_severity in errors.items()}
            row = {**_error_row(fmean(means.values())), "clean_same": made.clean_error(classify, right)}
            counts: dict[str, Any] = {"examples": len(self.made), "seed": SEED}
            if are_wordnet_ids(self.classes):
                counts["mce"] = mean_corruption_error(means, ALEXNET_ERRORS)
            counts["note"] = f"{FROST}; published figures are of other images."
            found[MADE] = {"kind": MADE, **row, **counts, "errors": errors, "per_example": per_image(every)}
        return {**({"clean": {"kind": "clean", **clean.result()}} if with_clean and self.clean else {}), **found}


class _Test(ABC):
    """The results on one shifted test set (abstract).

    folder    None: the model's own test images
    columns   the outputs that are compared; None: all
    outputs   how many outputs the model has
    """

    def __init__(self, folder: ShiftedFolder | None, columns: Sequence[int] | None, outputs: int) -> None:
        self.folder, self.columns = folder, None if columns is None else torch.tensor(sorted(columns))
        self.classes, self.examples = outputs if columns is None else len(columns), 0
        self.wrong, self.wrong_of_five, self.clean = dict[Cell, list[Tensor]](), list[Tensor](), list[Tensor]()
        self.precision, self.inliers, self.problem = AnomalyPrecision(), 0, ""

    def compared(self, logits: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the compared logits and which is right, of the images whose right output is one of them."""
        if self.columns is None:
            return logits, outputs
        known = torch.isin(outputs, self.columns)
        return logits[known][:, self.columns], torch.searchsorted(self.columns, outputs[known])

    def add(self, logits: Tensor, outputs: Tensor, cell: Cell = ("", 0)) -> None:
        """Add images of the test set; `cell` is their corruption and its severity, if it has corruptions."""
        logits, targets = self.compared(logits, outputs)
        self.wrong.setdefault(cell, []).append(~in_top_k(logits, targets))
        self.wrong_of_five.append(~in_top_k(logits, targets, 5))
        self.examples += len(targets)

    def add_clean(self, logits: Tensor, outputs: Tensor) -> None:
        """Add the model's own test images, for tests that use them."""
        self.clean.append(~in_top_k(*self.compared(logits, outputs)))

    @abstractmethod
    def result(self) -> dict[str, Any]: ...


@final
class _ClassesTest(_Test):
    """The error on images of the model's classes."""

    def result(self) -> dict[str, Any]:
        if not self.wrong:
            return {}
        wrong = torch.cat(self.wrong["", 0])
        top5 = {"top5": error_of(torch.cat(self.wrong_of_five))} if self.classes > 5 else {}  # else 0
        row = {**_error_row(error_of(wrong)), "accuracy": int((~wrong).sum()) / len(wrong), **top5}
        return {**row, "examples": len(wrong), "classes": self.classes, "per_example": per_image(wrong)}


@final
class _OutliersTest(_Test):
    """How well a low confidence tells outliers from test images of the same outputs."""

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


@final
class _CorruptedTest(_Test):
    """The error on each corruption at each severity, and mCE if all published ones are there."""

    def result(self) -> dict[str, Any]:
        assert self.folder is not None
        errors: dict[str, dict[str, float]] = {}
        for (corruption, severity), of_cell in self.wrong.items():
            errors.setdefault(corruption, {})[str(severity)] = error_of(torch.cat(of_cell))
        means = {corruption: fmean(each.values()) for corruption, each in errors.items()}
        found: dict[str, Any] = {"examples": self.examples, "classes": self.classes, "errors": errors}
        if are_wordnet_ids(self.folder.classes):  # say why the figure is not the published mCE
            if missing := _missing_corruptions(self.folder):
                found["note"] = (
                    f"mCE needs all 15 corruptions at 5 severities; {len(missing)} of 75 are missing, such as {missing[0]}."
                )
            elif published_set(self.folder.classes) != "ImageNet":
                classes = counted(self.classes, "class", "classes")
                found["note"] = f"mCE over {classes} cannot be compared with numbers that are published for ImageNet-C."
        if not _has_mce(self.folder):
            return {**_error_row(fmean(means.values())), **found}
        if any(map(len, self.clean)):  # there are clean images of these classes
            clean = error_of(torch.cat(self.clean))
            relative = {"clean": clean, "baseline_clean": ALEXNET_CLEAN_ERROR}
            found |= {"clean": clean, "relative_mce": mean_corruption_error(means, ALEXNET_ERRORS, **relative)}
        mce = mean_corruption_error(means, ALEXNET_ERRORS)
        return {"figure": mce, "measure": "mCE, %", "better": "lower", "mean_error": fmean(means.values()), **found}


def _has_mce(one: ShiftedFolder) -> bool:
    """Return whether mCE is defined: all published corruptions and severities, for classes of ImageNet."""
    return one.kind == "corrupted" and are_wordnet_ids(one.classes) and not _missing_corruptions(one)


def _missing_corruptions(one: ShiftedFolder) -> list[str]:
    """Return the corruptions and severities of ImageNet-C that a folder does not have."""
    cells = {(part.corruption, part.severity) for part in one.parts}
    return [f"{kind}/{severity}" for kind in ALEXNET_ERRORS for severity in SEVERITIES if (kind, severity) not in cells]


def _forward(classify: Classify, device: Any, images: Images, consumers: Sequence[Consume]) -> None:
    """Run the model on all images, and give the logits of each batch to every consumer; threads decode the next batches."""
    batches = [range(start, min(start + BATCH, len(images))) for start in range(0, len(images), BATCH)]
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = deque(pool.submit(images.pixels, numbers) for numbers in batches[:THREADS])
        for place, numbers in enumerate(batches):
            waiting.extend(pool.submit(images.pixels, later) for later in batches[place + THREADS : place + THREADS + 1])
            logits = classify(waiting.popleft().result().to(device)).float().cpu()
            for consume in consumers:
                consume(logits, images.labels[numbers.start : numbers.stop])


def _error_row(error: float) -> dict[str, Any]:
    return {"figure": error, "measure": "error, %", "better": "lower"}

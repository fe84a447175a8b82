"""Images to classify: examples for training, validation and testing, clean and attacked.

The metric is the error in percent: 100 (1 - correct / count). Pixels are between 0 and 1 here, and attacks have their budget
in this range; a model reads them scaled to [-1, 1], or as the image processor of its checkpoint says (`PixelScaling`).

`DomainTask` has images of several domains: train on all but one, select the checkpoint on these, and test on the one that is
held out.

    train       four fifths of each training domain; a batch has as many images of each
    validation  the other fifth of each, pooled: with `training.keep: best` and `best_by: figure`, it selects the checkpoint
    test        the whole held-out domain, which neither training nor selection reads

The split is drawn by the seed of the run, so intervals over seeds include it. The metric is the same error; 100 minus it is
the accuracy that `domain_summary` compares.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from holdfast.data import DomainSet, ExampleOrder, Images, ImageSet, Order, PixelScaling, domain_set, image_set
from holdfast.metrics import ChosenMetrics
from holdfast.metrics.tasks import in_top_k
from holdfast.metrics.token_routes import Example, View, patch_rows, picture, tokens_to_show
from holdfast.train.augmentation import AugmentedImages, PlainImages
from holdfast.train.image_attacks import (
    Classifier,
    Classify,
    Corrupted,
    attack_all,
    attack_name,
    attack_options,
    batch_size,
    error_of,
    per_image,
)
from holdfast.train.image_reading import require_patches, scale_warning, size_line, written_processor
from holdfast.train.recipe import Recipe
from holdfast.train.shifted_tests import ShiftedTests, recognise_all
from holdfast.train.snapshots import record_routes, shown_routes
from holdfast.train.start import start_model, start_scaling
from holdfast.train.task import (
    Examples,
    Fetch,
    HeldOut,
    Inputs,
    Measure,
    NoisyExample,
    Task,
    evaluating,
    evenly_spaced,
    routing_metrics,
)

PROBE_IMAGES = 64
VIEW_IMAGES = 8
AUDIT_IMAGES, AUDIT_BATCH = 64, 16
HELD_OUT = "data.held_out"  # the key of the recipe


class ImageTask(Task):
    """The images of a recipe. `DomainTask` derives from it, with other splits.

    folder    where named sources are searched for
    scaling   how the model reads pixels; by default that of the recipe's checkpoint
    tested    test images that a trained model is evaluated on, in place of the recipe's source
    """

    scaling: PixelScaling
    noise_unit = "pixels between 0 and 1"
    validation_images: ClassVar[int] = 2048  # at most
    faster = (
        "To make it shorter, set training.steps, training.batch or data.size to less, or model.config.patch_size to more."
    )

    def __init__(
        self,
        recipe: Recipe,
        folder: Path | None = None,
        *,
        scaling: PixelScaling | None = None,
        tested: ImageSet | None = None,
    ) -> None:
        self.recipe = recipe
        self.source = self.image_set = self._read_images(folder) if tested is None else tested
        self.scaling = start_scaling(recipe.model) if scaling is None else scaling
        self.corrupted_count = recipe.attack.corrupted_examples or recipe.attack.examples
        self._corrupted_images: tuple[Images, Corrupted] | None = None  # and the test images that they are made of
        self.shifts: ShiftedTests | None = None
        if recipe.data.shifts:
            test = self.image_set.images("test")
            found, made = recognise_all(recipe.data.shifts), evenly_spaced(len(test), self.corrupted_count)
            self.shifts = ShiftedTests(found, self.image_set.classes, test.shape, clean=test, made=made)

    def _read_images(self, folder: Path | None) -> ImageSet:
        return image_set(self.recipe.data.source, folder=folder, size=self.recipe.data.size)

    def _order(self, size: int, seed: int) -> ExampleOrder:
        """Return the order of the training images in batches of this size."""
        return Order(len(self.image_set.images("train")), size, seed)

    @property
    def measure(self) -> Measure:
        attack = self.recipe.attack
        long = "share of test images that are classified wrongly, in percent"
        return Measure("error, %", long, f"{attack_name(attack)}, l_inf {attack.budget:.3g}, {attack.steps} steps")

    def describe(self) -> dict[str, Any]:
        attack, count = self.recipe.attack, len(self.image_set.images("test"))
        how: dict[str, Any] = {"attack": attack_name(attack), "norm": "linf", "budget": attack.budget}
        how |= {"budgets": attack.all_budgets()} if attack.budgets else {}
        how |= attack_options(attack)
        numbers = {"spsa_examples": attack.spsa_examples, "corrupted_examples": attack.corrupted_examples}
        how |= {name: min(count, number) for name, number in numbers.items() if number is not None}
        how |= {"severities": attack.severities, "examples": min(count, attack.examples)}
        shifts = {} if self.shifts is None else {"shifts": self.shifts.describe()}
        return {"data": self.image_set.describe(), "attack": how, **shifts}

    def state(self) -> dict[str, Any]:
        scaling = {} if self.scaling == PixelScaling() else {"scaling": asdict(self.scaling)}
        return {"classes": list(self.image_set.classes), "checksum": self.image_set.checksum, **scaling}

    def preprocessor(self) -> Any:
        return written_processor(self.scaling, self.image_set.images("train").shape)

    def initial_model(self) -> Any:
        channels, height, width = self.image_set.images("train").shape
        if height != width:
            raise ValueError(f"{self.image_set.name} has images of {height} x {width} pixels; a model needs square images.")
        given = {"image_size": height, "num_channels": channels, "id2label": dict(enumerate(self.image_set.classes))}
        model = start_model(self.recipe.model, "images", **given)
        require_patches(model.config, self.image_set.images("train"), is_new=self.recipe.model.checkpoint is None)
        return model

    def size_line(self, model: Any) -> str | None:
        return size_line(model.config)

    def size_warning(self, model: Any) -> str | None:
        is_new = self.recipe.model.checkpoint is None  # a checkpoint decides on its own size
        return scale_warning(model.config, self.image_set.images("train")) if is_new else None

    def examples(self, seed: int) -> Examples:
        images, training = self.image_set.images("train"), self.recipe.training
        order = self._order(training.batch * training.accumulate, seed)

        fetch: Fetch = PlainImages(images, self.scaling)
        if training.augment.in_use:
            fetch = AugmentedImages(images, self.scaling, training.augment, batch=training.batch, seed=seed)
        return Examples(order, fetch, training.step_count(len(images)))

    def validation(self) -> Dataset[Inputs]:
        images = self.image_set.images("valid")
        numbers = evenly_spaced(len(images), self.validation_images)
        return HeldOut(numbers, PlainImages(images, self.scaling).inputs)

    @torch.no_grad()
    def held_out_figure(self, model: Any) -> float:
        images, classify = self.image_set.images("valid"), self.classifier(model)
        numbers = evenly_spaced(len(images), self.validation_images)
        batches = image_batches(images, numbers, batch_size(images.shape[-1], model.device))
        wrong = [~in_top_k(classify(pixels.to(model.device)).cpu(), labels) for pixels, labels in batches]
        return error_of(torch.cat(wrong))

    def classifier(self, model: Any) -> Classify:
        """Return the function from pixels between 0 and 1 to the logits of this task's classes."""
        return Classifier(model, self.scaling, self.image_set.outputs)

    def require_classifier(self, model: Any) -> None:
        """Every model of this task classifies."""

    def noisy_examples(self, model: Any, count: int) -> tuple[list[int], Callable[[int], NoisyExample]]:
        images, classify = self.image_set.images("test"), self.classifier(model)
        size = batch_size(images.shape[-1], model.device)

        def example(number: int) -> NoisyExample:
            (pixels,) = images.pixels([number]).to(model.device)
            return NoisyExample(number, int(images.labels[number]), pixels, classify, size)

        return evenly_spaced(len(images), count), example

    def score(self, model: Any) -> dict[str, Any]:
        part, classify, few = self.recipe.attack, self.classifier(model), partial(self.test_images, device=model.device)
        test = self.image_set.images("test")
        batch = batch_size(test.shape[-1], model.device)
        with evaluating(model, routing=False):
            clean = self._measured(model, image_batches(test, range(len(test)), batch))
            results, curves, main = attack_all(classify, few, part)
            # Corrupted images are the same for all models; a copy of this task may hold out another domain.
            if self._corrupted_images is None or self._corrupted_images[0] is not test:
                pixels, _ = self.test_images(self.corrupted_count, torch.device("cpu"))
                self._corrupted_images = test, Corrupted(pixels)
            results["corruptions"] = self._corrupted_images[1].score(classify, few(self.corrupted_count)[1], part.severities)
            pixels, right = (some.split(batch) for some in few(len(main.inputs)))
            under_attack = self._measured(model, zip(main.inputs.split(batch), right, strict=True))
            further_metrics = {key: value for key, value in under_attack.items() if key in ("metrics", "routing")}
            attacked = {**results[attack_name(part)], **further_metrics}
            if self.recipe.metrics:
                attacked["clean_metrics"] = self._measured(model, zip(pixels, right, strict=True))["metrics"]
            further = {"curves": curves} if curves else {}
            if self.shifts is not None:
                further["shifts"] = self.shifts.score(classify, model.device)
        return {"clean": clean, "attacked": attacked, "trials": results, **further}

    def audit_inputs(self, tokens: int) -> Iterator[Inputs]:
        images = self.image_set.images("test")
        for pixels, labels in image_batches(images, evenly_spaced(len(images), AUDIT_IMAGES), AUDIT_BATCH):
            if self.image_set.outputs is not None:  # the classes of the images may be some of the model's
                labels = torch.tensor(self.image_set.outputs)[labels]
            yield {"pixel_values": self.scaling(pixels), "labels": labels}

    def probe(self) -> Inputs:
        images = self.image_set.images("test")
        return {"pixel_values": self.scaling(images.pixels(evenly_spaced(len(images), PROBE_IMAGES)))}

    def view(self, model: Any) -> View:
        images = self.image_set.images("test")
        numbers = evenly_spaced(len(images), VIEW_IMAGES)
        pixels = images.pixels(numbers)
        inputs = {"pixel_values": self.scaling(pixels)}
        recorded, names = record_routes(model, inputs), self.image_set.classes
        predicted = recorded.logits.argmax(-1).tolist()
        lengths = [len(routing.experts) // len(numbers) for routing in recorded.routings]
        count = min(len(numbers), max(1, tokens_to_show(len(lengths)) // max(lengths)))
        side, rows = patch_rows(lengths, count)
        examples = [
            Example(picture=picture(pixels[place], names[int(images.labels[number])], names[predicted[place]], side))
            for place, number in enumerate(numbers[:count])
        ]
        return View(examples, shown_routes(model, inputs, recorded, rows))

    def test_images(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the pixels and labels of so many test images, evenly spaced."""
        images = self.image_set.images("test")
        some = evenly_spaced(len(images), count)
        return images.pixels(some).to(device), images.labels[some].to(device)

    @torch.no_grad()
    def _measured(self, model: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """Return the errors on batches of pixels and labels, the recipe's further metrics and the metrics of the routing."""
        classify, chosen = self.classifier(model), ChosenMetrics(self.recipe.metrics)
        wrong, wrong_of_five = list[Tensor](), list[Tensor]()
        with routing_metrics(model) as routing:
            for pixels, labels in batches:
                logits, right = classify(pixels.to(model.device)).cpu(), labels.cpu()
                wrong.append(~in_top_k(logits, right))
                wrong_of_five.append(~in_top_k(logits, right, 5))
                chosen.update(logits, right)
        every = torch.cat(wrong)
        errors = {"figure": error_of(every), "top5": error_of(torch.cat(wrong_of_five)), "examples": len(every)}
        return {**errors, "per_example": per_image(every), **chosen.result(), **routing}


@final
class DomainTask(ImageTask):
    """The domains of a recipe. If `data.held_out` has no value, the held-out domain is a further axis of a comparison."""

    domain_set: DomainSet
    split_seed: int = 0
    validation_images = sys.maxsize  # all of them, as DomainBed does

    def _read_images(self, folder: Path | None) -> ImageSet:
        self.domain_set = domain_set(self.recipe.data.source, size=self.recipe.data.size)
        return self._split()

    def _split(self) -> ImageSet:
        """Return the images as they are split; while no domain is held out, there are no splits."""
        held_out, images = self.recipe.data.held_out, self.domain_set
        if held_out is None:
            return ImageSet(images.name, images.about, images.classes, {}, images.checksum)
        return images.leave_out(held_out, self.split_seed)

    def open_choices(self) -> dict[str, list[Any]]:
        return {HELD_OUT: list(self.domain_set.domains)} if self.recipe.data.held_out is None else {}

    def with_recipe(self, recipe: Recipe) -> Self:
        other = super().with_recipe(recipe)
        other.source = other.image_set = other._split()
        return other

    def for_seed(self, seed: int) -> Self:
        other = copy.copy(self)
        other.split_seed = seed
        return other.with_recipe(self.recipe)

    @property
    def measure(self) -> Measure:
        long = "share of the images of the held-out domain that are classified wrongly, in percent"
        return replace(super().measure, long=long)

    def describe(self) -> dict[str, Any]:
        """Describe all domains: the data of a comparison are the same, whichever domain is held out."""
        some = self
        if not self.image_set.splits:
            data = replace(self.recipe.data, held_out=next(iter(self.domain_set.domains)))
            some = self.with_recipe(replace(self.recipe, data=data))
        described = super(DomainTask, some).describe()
        attack = {**described["attack"], "examples": self.recipe.attack.examples}  # at most
        return {**described, "data": self.domain_set.describe(), "attack": attack}

    def examples(self, seed: int) -> Examples:
        """Return the training examples. All domains are read first: an unreadable image is found before training."""
        batch, domains = self.recipe.training.batch, len(self.domain_set.domains) - 1
        if batch % domains:
            raise ValueError(
                f"training.batch is {batch}; a batch has as many images of each of the {domains} training domains: use a "
                f"multiple of {domains}."
            )
        self.domain_set.read()
        return super().examples(seed)

    def _order(self, size: int, seed: int) -> ExampleOrder:
        assert self.recipe.data.held_out is not None
        # The split that the images have, whatever seed orders them.
        return self.domain_set.order(self.recipe.data.held_out, size, seed, split_seed=self.split_seed)


def image_batches(images: Images, numbers: Sequence[int], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pixels and labels of these images, so many at a time: all of them may not fit in memory."""
    for start in range(0, len(numbers), size):
        some = list(numbers[start : start + size])
        yield images.pixels(some), images.labels[some]

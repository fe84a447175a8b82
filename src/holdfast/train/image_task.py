"""Images to classify: examples for training, validation and testing, clean and attacked.

The metric is the error in percent: 100 (1 - correct / count). Pixels are between 0 and 1 here, and attacks have their budget
in this range; a model reads them scaled to [-1, 1], or as the image processor of its checkpoint says (`PixelScaling`).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from holdfast.attacks import CORRUPTIONS, AttackedInputs, attack_pixels, corrupt, fgsm, find_attack, pgd, spsa
from holdfast.data import Images, ImageSet, Order, PixelScaling, image_set
from holdfast.hub import trace
from holdfast.metrics import ChosenMetrics
from holdfast.metrics.tasks import in_top_k
from holdfast.train.augmentation import AugmentedPictures
from holdfast.train.picture_size import require_patches, scale_warning, size_line
from holdfast.train.recipe import Recipe
from holdfast.train.start import start_model, start_scaling
from holdfast.train.task import (
    AttackTable,
    Examples,
    Inputs,
    Measure,
    Task,
    first_experts,
    routing_metrics,
    without_attack_warnings,
)

ATTACK_SEED = 0
BATCH = 64  # images in a forward
PROBE_IMAGES = 64
VIEW_IMAGES = 8
VALIDATION_IMAGES = 2048  # at most
SEVERITY = 5  # of corruptions: the worst
SPSA_SAMPLES = 16  # pairs of probes per step

Classify = Callable[[Tensor], Tensor]  # pixels between 0 and 1 to logits


@final
class ImageTask(Task):
    """The images of a recipe.

    folder    where named sources are searched for
    scaling   how the model reads pixels; by default that of the recipe's checkpoint
    """

    faster = (
        "To make it shorter, set training.steps, training.batch or data.size to less, or model.config.patch_size to more."
    )

    def __init__(self, recipe: Recipe, folder: Path | None = None, *, scaling: PixelScaling | None = None) -> None:
        self.recipe = recipe
        self.image_set: ImageSet = image_set(recipe.data.source, folder=folder, size=recipe.data.size)
        self.scaling = start_scaling(recipe.model) if scaling is None else scaling

    @property
    def measure(self) -> Measure:
        attack = self.recipe.attack
        long = "share of test images that are classified wrongly, in percent"
        return Measure("error, %", long, f"{self._attack_name}, l_inf {attack.budget:.3g}, {attack.steps} steps")

    def describe(self) -> dict[str, Any]:
        attack = self.recipe.attack
        how = {
            "attack": self._attack_name,
            "norm": "linf",
            "budget": attack.budget,
            "steps": attack.steps,
            "seed": ATTACK_SEED,
        }
        return {"data": self.image_set.describe(), "attack": {**how, "examples": len(self._attacked_numbers())}}

    def state(self) -> dict[str, Any]:
        scaling = {} if self.scaling == PixelScaling() else {"scaling": asdict(self.scaling)}
        return {"classes": list(self.image_set.classes), **scaling}

    def initial_model(self) -> Any:
        channels, height, width = self.image_set.images("train").shape
        if height != width:
            raise ValueError(f"{self.image_set.name} has images of {height} x {width} pixels; a model needs square images.")
        given = {"image_size": height, "num_channels": channels, "id2label": dict(enumerate(self.image_set.classes))}
        model = start_model(self.recipe.model, "pictures", **given)
        require_patches(model.config, self.image_set.images("train"), is_new=self.recipe.model.checkpoint is None)
        return model

    def size_line(self, model: Any) -> str | None:
        return size_line(model.config)

    def size_warning(self, model: Any) -> str | None:
        is_new = self.recipe.model.checkpoint is None  # a checkpoint decides on its own size
        return scale_warning(model.config, self.image_set.images("train")) if is_new else None

    def examples(self, seed: int) -> Examples:
        images, training = self.image_set.images("train"), self.recipe.training
        order = Order(len(images), training.batch * training.accumulate, seed)
        fetch_at = (
            AugmentedPictures(images, self.scaling, training.augment, batch=training.batch, seed=seed)
            if training.augment.in_use
            else None
        )
        return Examples(order, partial(_inputs, images, self.scaling), training.step_count(len(images)), fetch_at)

    def validation(self) -> Dataset[Inputs]:
        return _SomeImages(self.image_set.images("valid"), VALIDATION_IMAGES, self.scaling)

    @torch.no_grad()
    def held_out_figure(self, model: Any) -> float:
        held_out, classify = self.image_set.images("valid"), classifier(model, self.scaling)
        numbers = evenly_spaced(len(held_out), VALIDATION_IMAGES)
        return error_of(classify, held_out.pixels(numbers).to(model.device), held_out.labels[numbers].to(model.device))

    def score(self, model: Any) -> dict[str, Any]:
        was_training = model.training
        model.eval()
        images, budget, steps = self.image_set.images("test"), self.recipe.attack.budget, self.recipe.attack.steps
        clean = self._clean(model, images)
        some = self._attacked_numbers()
        pixels, labels = images.pixels(some).to(model.device), images.labels[some].to(model.device)
        classify = classifier(model, self.scaling)
        given: dict[str, Any] = {"budget": budget, "batch": BATCH}
        with without_attack_warnings():
            strong = pgd(classify, pixels, labels, **given, steps=steps, seed=ATTACK_SEED)
            main = strong if self._is_pgd else self._attacked_as_named(classify, pixels, labels)
            blind = spsa(classify, pixels, labels, **given, steps=steps, samples=SPSA_SAMPLES, seed=ATTACK_SEED)
            results = {
                "FGSM": _attacked(fgsm(classify, pixels, labels, **given)),
                "PGD": _attacked(strong),
                "SPSA": _attacked(blind),
                "corruptions": _corrupted(classify, pixels, labels),
                **({} if self._is_pgd else {self._attack_name: _attacked(main)}),
            }
        attacked = {**results[self._attack_name], **self._forward_attacked(model, main.inputs, labels)}
        model.train(was_training)
        return {"clean": clean, "attacked": attacked, "trials": results}

    def probe(self) -> Inputs:
        images = self.image_set.images("test")
        return {"pixel_values": self.scaling(images.pixels(evenly_spaced(len(images), PROBE_IMAGES)))}

    def view(self, model: Any) -> Mapping[str, Any]:
        images = self.image_set.images("test")
        numbers = evenly_spaced(len(images), VIEW_IMAGES)
        pixels = images.pixels(numbers)
        with torch.no_grad(), trace(model) as routes:
            predicted = model(pixel_values=self.scaling(pixels).to(model.device)).logits.argmax(-1).cpu()
        layers = [_on_grid(experts.view(len(numbers), -1)) for experts in first_experts(routes)]
        side = max(layer.shape[-1] for layer in layers)
        layers = [_enlarged(layer, side) for layer in layers]  # later layers of Swin have larger patches
        names = self.image_set.classes
        return {
            "kind": "pictures",
            "pictures": [
                {
                    "label": names[int(images.labels[number])],
                    "said": names[int(predicted[place])],
                    "pixels": [[round(value, 3) for value in row] for row in pixels[place].mean(0).tolist()],
                    "grid": [side, side],
                    "experts": [layer[place].flatten().tolist() for layer in layers],
                }
                for place, number in enumerate(numbers)
            ],
        }

    @property
    def _is_pgd(self) -> bool:
        return self.recipe.attack.name in (None, "pgd")

    @property
    def _attack_name(self) -> str:
        return "PGD" if self._is_pgd else str(self.recipe.attack.name)

    def _attacked_as_named(self, classify: Classify, pixels: Tensor, labels: Tensor) -> AttackedInputs:
        """Attack with the attack that the recipe names."""
        part = self.recipe.attack
        attack = find_attack(self._attack_name, "pictures")
        how: dict[str, Any] = {"steps": part.steps, "seed": ATTACK_SEED, "batch": BATCH}
        return attack_pixels(attack, classify, pixels, labels, budget=part.budget, **how)

    def _attacked_numbers(self) -> list[int]:
        return evenly_spaced(len(self.image_set.images("test")), self.recipe.attack.examples)

    @torch.no_grad()
    def _clean(self, model: Any, images: Images) -> dict[str, Any]:
        correct = among_five = 0
        classify = classifier(model, self.scaling)
        chosen = ChosenMetrics(self.recipe.metrics)
        with routing_metrics(model) as routing:
            for start in range(0, len(images), BATCH):
                numbers = range(start, min(start + BATCH, len(images)))
                logits, labels = classify(images.pixels(numbers).to(model.device)).cpu(), images.labels[list(numbers)]
                correct += int(in_top_k(logits, labels).sum())
                among_five += int(in_top_k(logits, labels, 5).sum())
                chosen.update(logits, labels)
        count = len(images)
        found = {"figure": error_percent(correct, count), "top5": error_percent(among_five, count), "examples": count}
        return {**found, **chosen.result(), **routing}

    @torch.no_grad()
    def _forward_attacked(self, model: Any, pixels: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return the routing metrics on attacked images, and the recipe's further metrics."""
        classify = classifier(model, self.scaling)
        chosen = ChosenMetrics(self.recipe.metrics)
        with routing_metrics(model) as routing:
            for part, own in zip(pixels.split(BATCH), labels.split(BATCH), strict=True):
                chosen.update(classify(part), own)
        return {**chosen.result(), **routing}


class _SomeImages(Dataset[Inputs]):
    """At most `limit` images of a set, evenly spaced."""

    def __init__(self, images: Images, limit: int, scaling: PixelScaling) -> None:
        self.images, self.numbers, self.scaling = images, evenly_spaced(len(images), limit), scaling

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitems__(self, places: list[int]) -> Inputs:
        return _inputs(self.images, self.scaling, torch.tensor([self.numbers[place] for place in places]))


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """Return `wanted` numbers below `count`: folders are sorted by class, so the first images would be of one class only."""
    wanted = min(wanted, count)
    return [place * count // wanted for place in range(wanted)]


def _inputs(images: Images, scaling: PixelScaling, numbers: Tensor) -> Inputs:
    return {"pixel_values": scaling(images.pixels(numbers)), "labels": images.labels[numbers]}


def classifier(model: Any, scaling: PixelScaling) -> Classify:
    """Return the function from pixels between 0 and 1 to logits that attacks need."""

    def classify(pixels: Tensor) -> Tensor:
        logits: Tensor = model(pixel_values=scaling(pixels)).logits
        return logits

    return classify


def error_percent(correct: int, count: int) -> float:
    return 100 * (1 - correct / count)


@torch.no_grad()
def error_of(classify: Classify, pixels: Tensor, labels: Tensor) -> float:
    """Return the error on these images, in percent."""
    logits = torch.cat([classify(part) for part in pixels.split(BATCH)])
    return error_percent(int(in_top_k(logits, labels).sum()), len(labels))


def attacked_error(result: AttackedInputs) -> float:
    """Return the error after an attack, from counts as every error here: shares differ in the last digit."""
    return error_percent(int((~result.success).sum()), len(result.success))


def corruption_errors(classify: Classify, pixels: Tensor, labels: Tensor, severity: int, seed: int) -> dict[str, float]:
    """Return the error under each corruption that needs no files."""
    errors = {}
    for name in (name for name, corruption in CORRUPTIONS.items() if not corruption.files):
        corrupted = corrupt(pixels.cpu(), name, severity=severity, seed=seed).images.to(pixels)
        errors[name] = error_of(classify, corrupted, labels)
    return errors


def _attacked(result: AttackedInputs) -> dict[str, Any]:
    return {"figure": attacked_error(result), **result.summary()}


def _corrupted(classify: Classify, pixels: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return the mean error over corruptions, and each of them."""
    errors = corruption_errors(classify, pixels, labels, SEVERITY, ATTACK_SEED)
    return {"figure": sum(errors.values()) / len(errors), "severity": SEVERITY, "each": errors}


def _on_grid(experts: Tensor) -> Tensor:
    """Return (B,N) as (B,side,side), without the tokens before the patches, such as a class token."""
    side = int(experts.shape[1] ** 0.5)
    return experts[:, experts.shape[1] - side * side :].view(-1, side, side)


def _enlarged(grid: Tensor, side: int) -> Tensor:
    return torch.nn.functional.interpolate(grid[:, None].float(), side, mode="nearest")[:, 0].long()


def attack_images(model: Any, task: Task, kind: str, *, budget: float, steps: int, examples: int, seed: int) -> AttackTable:
    """Attack test images within `budget` with the attack of this name, or apply the corruptions at severity `budget`."""
    if not isinstance(task, ImageTask):
        raise ValueError(f"{kind} attacks images, but this model reads texts: use words, typos or routes.")
    images = task.image_set.images("test")
    some = evenly_spaced(len(images), examples)
    if not some:
        raise ValueError(f"examples is {examples}; attack at least 1 image.")
    pixels, labels = images.pixels(some).to(model.device), images.labels[some].to(model.device)
    classify = classifier(model, task.scaling)
    if kind == "corruptions":
        return _corruption_table(classify, pixels, labels, budget, seed)
    attack = find_attack(kind, "pictures")
    how: dict[str, Any] = {"steps": steps, "seed": seed, "batch": BATCH}
    with without_attack_warnings():
        result = attack_pixels(attack, classify, pixels, labels, budget=budget, **how)
    return {
        "title": f"{result.attack}, {result.norm} {result.budget:.4g}, {len(some)} images",
        "columns": ["", "error, %"],
        "rows": [["clean", error_of(classify, pixels, labels)], [result.attack, attacked_error(result)]],
        "flags": [flag.summary() for flag in result.flags],
        "summary": result.summary(),
    }


def _corruption_table(classify: Classify, pixels: Tensor, labels: Tensor, severity: float, seed: int) -> AttackTable:
    if severity != int(severity):
        raise ValueError(f"the budget of corruptions is a severity, a whole number from 1 to 5, not {severity:g}.")
    errors = corruption_errors(classify, pixels, labels, int(severity), seed)
    rows = [["clean", error_of(classify, pixels, labels)], *([name, value] for name, value in errors.items())]
    rows.append(["mean of corruptions", sum(errors.values()) / len(errors)])
    skipped = ", ".join(name for name, corruption in CORRUPTIONS.items() if corruption.files)
    return {
        "title": f"Corruptions of severity {severity:g}, {len(labels)} images ({skipped} needs files and is skipped)",
        "columns": ["", "error, %"],
        "rows": rows,
        "flags": [],
        "summary": {"severity": int(severity), "seed": seed, "errors": errors},
    }

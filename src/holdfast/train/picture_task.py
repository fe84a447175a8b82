"""Pictures to be classified: for training and testing, clean and attacked."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from holdfast.attacks import CORRUPTIONS, AttackedInputs, AttackWarning, corrupt, fgsm, pgd, spsa
from holdfast.data import Images, ImageSet, Order, image_set
from holdfast.hub import has_routers, trace
from holdfast.metrics.tasks import hits
from holdfast.train.recipe import Recipe
from holdfast.train.task import Examples, Inputs, Measure, Task, first_experts
from holdfast.train.text_task import routing_report

ATTACK_SEED = 0
BATCH = 64  # pictures in a forward
WATCHED = 64  # pictures of the probe
SHOWN = 8  # pictures of the view
CHOSEN_BY = 2048  # pictures of the validation set at most
SEVERITY = 5
MOST_PATCHES = 4096  # of a picture that attention looks at as a whole
SPSA_SAMPLES = 16  # pairs of probes a step

Classify = Callable[[Tensor], Tensor]  # pixels between 0 and 1 to logits


@final
class PictureTask(Task):
    """The pictures of a recipe. `folder` is where named sources are looked for."""

    def __init__(self, recipe: Recipe, folder: Path | None = None) -> None:
        self.recipe = recipe
        self.pictures: ImageSet = image_set(recipe.data.source, folder=folder, size=recipe.data.size)

    @property
    def measure(self) -> Measure:
        attack = self.recipe.attack
        long = "share of test pictures that are classified wrongly, in percent"
        return Measure("error, %", long, f"PGD, l_inf {attack.budget:.3g}, {attack.steps} steps")

    def describe(self) -> dict[str, Any]:
        attack = self.recipe.attack
        how = {"attack": "PGD", "norm": "linf", "budget": attack.budget, "steps": attack.steps, "seed": ATTACK_SEED}
        return {"data": self.pictures.describe(), "attack": {**how, "examples": len(self._attacked_numbers())}}

    def state(self) -> dict[str, Any]:
        return {"classes": list(self.pictures.classes)}

    def dense(self) -> Any:
        import transformers

        part, (channels, height, width) = self.recipe.model, self.pictures.images("train").shape
        if height != width:
            raise ValueError(f"{self.pictures.name} has pictures of {height} x {width}; a model here takes squares.")
        given = {"image_size": height, "num_channels": channels, "num_labels": len(self.pictures.classes)}
        config = transformers.AutoConfig.for_model(part.family, **given, **part.config)
        self._require_few_patches(config, height)
        return transformers.AutoModelForImageClassification.from_config(config)

    def _require_few_patches(self, config: Any, pixels: int) -> None:
        """Raise where attention over all patches of a picture would take hours; windows, as Swin has, keep it small."""
        patch = getattr(config, "patch_size", None)
        if not isinstance(patch, int) or hasattr(config, "window_size") or (pixels // patch) ** 2 <= MOST_PATCHES:
            return
        raise ValueError(
            f"pictures of {pixels} pixels a side are {(pixels // patch) ** 2:,} patches of {patch}, and at most "
            f"{MOST_PATCHES:,} are learnt; set data.size to at most {patch * math.isqrt(MOST_PATCHES)}, or "
            "model.config.patch_size to more."
        )

    def examples(self, seed: int) -> Examples:
        images, training = self.pictures.images("train"), self.recipe.training
        order = Order(len(images), training.batch * training.accumulate, seed)
        return Examples(order, partial(_inputs, images), training.steps)

    def validation(self) -> Dataset[Inputs]:
        return _Pictures(self.pictures.images("valid"), CHOSEN_BY)

    def score(self, model: Any) -> dict[str, Any]:
        was_training = model.training
        model.eval()
        images, budget = self.pictures.images("test"), self.recipe.attack.budget
        clean = self._clean(model, images)
        some = self._attacked_numbers()
        pixels, labels = images.pixels(some).to(model.device), images.labels[some].to(model.device)
        classify = classifier(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttackWarning)  # they are stored with the result
            steps = self.recipe.attack.steps
            strong = pgd(classify, pixels, labels, budget=budget, steps=steps, seed=ATTACK_SEED, batch=BATCH)
            blind = spsa(
                classify, pixels, labels, budget=budget, steps=steps, samples=SPSA_SAMPLES, seed=ATTACK_SEED, batch=BATCH
            )
            trials = {
                "FGSM": _attacked(fgsm(classify, pixels, labels, budget=budget, batch=BATCH)),
                "PGD": _attacked(strong),
                "SPSA": _attacked(blind),
                "corruptions": _corrupted(classify, pixels, labels),
            }
        attacked = {**trials["PGD"], **self._routing(model, strong.inputs)}
        model.train(was_training)
        return {"clean": clean, "attacked": attacked, "trials": trials}

    def probe(self) -> Inputs:
        images = self.pictures.images("test")
        return {"pixel_values": normalised(images.pixels(spread(len(images), WATCHED)))}

    def view(self, model: Any) -> Mapping[str, Any]:
        images = self.pictures.images("test")
        numbers = spread(len(images), SHOWN)
        pixels = images.pixels(numbers)
        with torch.no_grad(), trace(model) as routes:
            said = model(pixel_values=normalised(pixels).to(model.device)).logits.argmax(-1).cpu()
        layers = [_on_grid(experts.view(len(numbers), -1)) for experts in first_experts(routes)]
        side = max(layer.shape[-1] for layer in layers)
        layers = [_enlarged(layer, side) for layer in layers]  # of Swin, later layers see larger patches
        names = self.pictures.classes
        return {
            "kind": "pictures",
            "pictures": [
                {
                    "label": names[int(images.labels[number])],
                    "said": names[int(said[place])],
                    "pixels": [[round(value, 3) for value in row] for row in pixels[place].mean(0).tolist()],
                    "grid": [side, side],
                    "experts": [layer[place].flatten().tolist() for layer in layers],
                }
                for place, number in enumerate(numbers)
            ],
        }

    def _attacked_numbers(self) -> list[int]:
        return spread(len(self.pictures.images("test")), self.recipe.attack.examples)

    @torch.no_grad()
    def _clean(self, model: Any, images: Images) -> dict[str, Any]:
        right = among_five = 0
        with _watched(model) as routing:
            for start in range(0, len(images), BATCH):
                numbers = range(start, min(start + BATCH, len(images)))
                logits, labels = _logits(model, images.pixels(numbers).to(model.device)).cpu(), images.labels[list(numbers)]
                right += int(hits(logits, labels).sum())
                among_five += int(hits(logits, labels, 5).sum())
        found = {"figure": error(right, len(images)), "top5": error(among_five, len(images)), "examples": len(images)}
        return {**found, **routing}

    @torch.no_grad()
    def _routing(self, model: Any, pixels: Tensor) -> dict[str, Any]:
        with _watched(model) as routing:
            for part in pixels.split(BATCH):
                _logits(model, part)
        return routing


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, Any]]:
    """Afterwards it holds what the routers did, under "routing"; nothing for a dense model."""
    found: dict[str, Any] = {}
    if not has_routers(model):
        yield found
        return
    report = routing_report(model)
    with trace(model, each=report.each) as routes:
        yield found
    report.names = routes.names
    found["routing"] = report.result()


class _Pictures(Dataset[Inputs]):
    """Some of a set."""

    def __init__(self, images: Images, limit: int) -> None:
        self.images, self.numbers = images, spread(len(images), limit)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitems__(self, places: list[int]) -> Inputs:
        return _inputs(self.images, torch.tensor([self.numbers[place] for place in places]))


def spread(count: int, wanted: int) -> list[int]:
    """So many of `count` pictures, evenly: in folders they are sorted by class, and the first would be of one class only."""
    wanted = min(wanted, count)
    return [place * count // wanted for place in range(wanted)]


def normalised(pixels: Tensor) -> Tensor:
    """From [0,1] to [-1,1]: what vision models in transformers are given."""
    return (pixels - 0.5) / 0.5


def error(right: int, count: int) -> float:
    """In percent."""
    return 100 * (1 - right / count)


@torch.no_grad()
def error_of(classify: Classify, pixels: Tensor, labels: Tensor) -> float:
    logits = torch.cat([classify(part) for part in pixels.split(BATCH)])
    return error(int(hits(logits, labels).sum()), len(labels))


def corruption_errors(classify: Classify, pixels: Tensor, labels: Tensor, severity: int, seed: int) -> dict[str, float]:
    """The error under each corruption that needs no files."""
    errors = {}
    for name in (name for name, corruption in CORRUPTIONS.items() if not corruption.files):
        changed = corrupt(pixels.cpu(), name, severity=severity, seed=seed).images.to(pixels)
        errors[name] = error_of(classify, changed, labels)
    return errors


def _inputs(images: Images, numbers: Tensor) -> Inputs:
    return {"pixel_values": normalised(images.pixels(numbers)), "labels": images.labels[numbers]}


def classifier(model: Any) -> Classify:
    """From pixels between 0 and 1 to logits: what attacks take."""
    return partial(_logits, model)


def _logits(model: Any, pixels: Tensor) -> Tensor:
    logits: Tensor = model(pixel_values=normalised(pixels)).logits
    return logits


def attacked_error(result: AttackedInputs) -> float:
    """From counts, as every error here: shares differ from them in the last digit."""
    return error(int((~result.success).sum()), len(result.success))


def _attacked(result: AttackedInputs) -> dict[str, Any]:
    return {"figure": attacked_error(result), **result.summary()}


def _corrupted(classify: Classify, pixels: Tensor, labels: Tensor) -> dict[str, Any]:
    """The mean over corruptions, at the worst severity."""
    errors = corruption_errors(classify, pixels, labels, SEVERITY, ATTACK_SEED)
    return {"figure": sum(errors.values()) / len(errors), "severity": SEVERITY, "each": errors}


def _enlarged(grid: Tensor, side: int) -> Tensor:
    return torch.nn.functional.interpolate(grid[:, None].float(), side, mode="nearest")[:, 0].long()


def _on_grid(experts: Tensor) -> Tensor:
    """(B,N) as (B,side,side), without what stands before the patches: a class token."""
    side = int(experts.shape[1] ** 0.5)
    return experts[:, experts.shape[1] - side * side :].view(-1, side, side)

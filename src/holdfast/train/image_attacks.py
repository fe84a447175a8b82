"""Attacks and corruptions of test images: error after each, as comparisons store it and as `holdfast attack` prints it.

The functions take a classifier, pixels between 0 and 1, and labels. `image_task` has the images. An attack at several
budgets gives a curve, the error against the budget, for the class with the largest logit (top 1) and for the five largest.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor

from holdfast.attacks import CORRUPTIONS, AttackedInputs, attack_curve, attack_pixels, corrupt, find_attack
from holdfast.attacks.inputs import ascending
from holdfast.attacks.registry import Attack, require_options
from holdfast.data import PixelScaling
from holdfast.files import MIB
from holdfast.hub.tracing import live_routings
from holdfast.metrics import Shares
from holdfast.metrics.tasks import in_top_k
from holdfast.routing import Routing
from holdfast.train.recipe import AttackPart
from holdfast.train.task import without_attack_warnings

ATTACK_SEED = 0
FROST = "frost is a texture of ours, not the published photographs"
BATCH = 64  # images in a forward, of 224 x 224 pixels or on a CPU
MOST_IN_BATCH = 1024  # smaller images on a GPU
NAMES = {"fgsm": "FGSM", "pgd": "PGD", "spsa": "SPSA"}  # of attacks that every recipe runs, as results call them
TOP = 5  # the second error: the right class is not among so many
LARGEST_CACHE = 2048 * MIB  # corrupted images that are kept for the next model of a comparison

Classify = Callable[[Tensor], Tensor]  # pixels between 0 and 1 to logits
Curve = list[AttackedInputs]  # of one attack, the smallest budget first


@final
@dataclass(frozen=True)
class Classifier:
    """The function from pixels between 0 and 1 to logits that attacks need; `outputs` are those of the classes."""

    model: Any
    scaling: PixelScaling
    outputs: Sequence[int] | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=self.scaling(pixels)).logits
        return logits if self.outputs is None else logits[:, list(self.outputs)]

    def routed(self, pixels: Tensor) -> tuple[Tensor, list[Routing]]:
        """Return the routing of each layer too, for the attacks that follow routes."""
        with live_routings(self.model) as routings:
            return self(pixels), routings


def batch_size(side: int, device: torch.device) -> int:
    """Return the number of images in a forward. On a GPU it is larger for small images, which else wait for the host."""
    return BATCH if device.type == "cpu" else max(BATCH, min(MOST_IN_BATCH, BATCH * 224**2 // side**2))


@torch.no_grad()
def clean_errors(classify: Classify, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return which images are classified wrongly, and which have the right class not among the first five."""
    logits = torch.cat([classify(part) for part in pixels.split(batch_size(pixels.shape[-1], pixels.device))])
    return ~in_top_k(logits, labels), ~in_top_k(logits, labels, TOP)


def wrong_of(classify: Classify, pixels: Tensor, labels: Tensor) -> Tensor:
    """Return (B,) bool on the CPU: which of these images are classified wrongly."""
    return clean_errors(classify, pixels, labels)[0].cpu()


def error_of(wrong: Tensor) -> float:
    """Return the share of True in percent, from counts as every error here: shares differ in the last digit."""
    return 100 * (1 - int((~wrong).sum()) / len(wrong))


def per_image(wrong: Tensor) -> dict[str, Any]:
    """Return the answers to single images as `metrics.Shares` stores them."""
    return Shares(wrong.cpu().double().numpy()).stored()


def attacked_error(result: AttackedInputs, top: int = 1) -> float | None:
    """Return the error after an attack. None: the attack does not say in which place the right class is."""
    beyond = result.beyond(top)
    return None if beyond is None else error_of(beyond)


def attacked(result: AttackedInputs) -> dict[str, Any]:
    top5 = attacked_error(result, TOP)
    found = {"figure": attacked_error(result), "clean": error_of(result.already_wrong), **result.summary()}
    return {**found, **({} if top5 is None else {"top5": top5}), "per_example": per_image(result.success)}


def attack_name(attack: AttackPart) -> str:
    """Return the name of the main attack of a recipe, as results call it."""
    return "PGD" if attack.name is None else NAMES.get(attack.name, attack.name)


def attack_options(attack: AttackPart) -> dict[str, Any]:
    """Return the options of a recipe's attacks on pixels; options without a value are left out."""
    given = {name: getattr(attack, name) for name in ("steps", "step", "restarts", "random_start", "samples")}
    return {name: value for name, value in given.items() if value is not None} | {"seed": ATTACK_SEED}


def curve_of(
    attack: Attack, classify: Classify, pixels: Tensor, labels: Tensor, budgets: Sequence[float], **options: Any
) -> Curve:
    """Return the results of an attack at every budget, the smallest first."""
    given = {"batch": batch_size(pixels.shape[-1], pixels.device), "top": TOP, **options}
    with without_attack_warnings():
        return attack_curve(lambda at: attack_pixels(attack, classify, pixels, labels, budget=at, **given), budgets)


def described_curve(points: Curve, clean: tuple[Tensor, Tensor | None]) -> dict[str, Any]:
    """Return a curve as JSON: for each budget, from 0 on, the error, the top-5 error and the largest change made."""
    rows = [(point.budget, point.success, point.beyond(TOP), point.realised) for point in points]
    rows = [*([] if points[0].budget == 0 else [(0.0, *clean, 0.0)]), *rows]
    budgets, first, five, realised = (list(column) for column in zip(*rows, strict=True))
    wrong = {"figure": first, "top5": five}
    errors = {key: [None if one is None else error_of(one) for one in each] for key, each in wrong.items()}
    single = {key: [None if one is None else per_image(one) for one in each] for key, each in wrong.items()}
    return {"examples": len(first[0]), "budgets": budgets, **errors, "realised": realised, "per_example": single}


def attack_all(
    classify: Classify, few: Callable[[int], tuple[Tensor, Tensor]], attack: AttackPart
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], AttackedInputs]:
    """Return the results of a recipe's attacks on pixels by name, their curves by name, and the main attack's images.

    few     from a number of images to their pixels and labels
    """
    main_name, options = attack_name(attack), attack_options(attack)
    kinds = NAMES if attack.name in (None, *NAMES) else {**NAMES, main_name: main_name}
    results, curves = {}, {}
    for kind, name in kinds.items():
        count = (attack.spsa_examples or attack.examples) if name == "SPSA" else attack.examples
        images = few(count)
        points = curve_of(find_attack(kind, "images"), classify, *images, attack.all_budgets(), **options)
        point = next(point for point in points if point.budget == attack.budget)
        results[name] = attacked(point)
        if len(points) > 1:
            curves[name] = described_curve(points, clean_errors(classify, *images))
        if name == main_name:
            main = point
    return results, curves, main


@final
class Corrupted:
    """The corrupted images of a test set. They are the same for every model, and are kept if they are not too large."""

    def __init__(self, pixels: Tensor, seed: int = ATTACK_SEED) -> None:
        self.pixels, self.seed = pixels.cpu(), seed
        self._kept: dict[tuple[str, int], Tensor] = {}

    def images(self, name: str, severity: int) -> Tensor:
        """Return the images under a corruption, on the CPU."""
        found = self._kept.get((name, severity))
        if found is None:
            found = corrupt(self.pixels, name, severity=severity, seed=self.seed).images
            if (len(self._kept) + 1) * found.nbytes <= LARGEST_CACHE:
                self._kept[name, severity] = found
        return found

    def errors(
        self, classify: Classify, labels: Tensor, severities: Iterable[int]
    ) -> tuple[dict[int, dict[str, float]], Tensor]:
        """Return the error by severity and corruption, and the share of corruptions under which each image is wrong.

        `labels` are on the model's device.
        """
        wrong = {
            severity: {
                name: wrong_of(classify, self.images(name, severity).to(labels.device), labels) for name in CORRUPTIONS
            }
            for severity in sorted(set(severities))
        }
        every = torch.stack([one for each in wrong.values() for one in each.values()]).double().mean(0)
        return {severity: {name: error_of(one) for name, one in each.items()} for severity, each in wrong.items()}, every

    def clean_error(self, classify: Classify, labels: Tensor) -> float:
        """Return the error without a corruption."""
        return error_of(wrong_of(classify, self.pixels.to(labels.device), labels))

    def score(self, classify: Classify, labels: Tensor, severities: Sequence[int]) -> dict[str, Any]:
        """Return the mean error over corruptions and severities, and the error by corruption and by severity."""
        found, every = self.errors(classify, labels, severities)
        each = {name: fmean(errors[name] for errors in found.values()) for name in CORRUPTIONS}
        by_severity = {str(severity): fmean(errors.values()) for severity, errors in found.items()}
        severity = {"severity": severities[0]} if len(severities) == 1 else {"severities": by_severity}
        counted = {"figure": fmean(each.values()), "clean": self.clean_error(classify, labels), "examples": len(labels)}
        return {**counted, **severity, "each": each, "per_example": per_image(every)}


def check_images_attacks(kinds: Sequence[str], budgets: Sequence[float], options: Mapping[str, Any]) -> None:
    """Raise ValueError if attacks on images do not exist, have no such options, or cannot have these budgets."""
    ascending(budgets)
    for kind in kinds:
        if kind == "corruptions":
            for severity in budgets:
                if severity not in range(1, 6):
                    raise ValueError(
                        f"the budget of corruptions is a severity, a whole number from 1 to 5, not {severity:g}."
                    )
            if options:
                raise ValueError(f"corruptions have no option {next(iter(options))}.")
        else:
            require_options(find_attack(kind, "images"), options)
    if "corruptions" in kinds and len(kinds) > 1:
        raise ValueError("the budget of corruptions is a severity; run them alone.")
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"the attacks are {', '.join(kinds)}; name each only once.")

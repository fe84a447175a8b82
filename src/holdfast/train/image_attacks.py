"""Attacks and corruptions of test images: error after each, as comparisons store it and as `holdfast attack` prints it.

The functions take a classifier, pixels between 0 and 1, and labels. `image_task` has the images.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks import CORRUPTIONS, AttackedInputs, attack_pixels, corrupt, fgsm, find_attack, pgd, spsa
from holdfast.data import PixelScaling
from holdfast.metrics.tasks import in_top_k
from holdfast.train.recipe import AttackPart
from holdfast.train.task import AttackTable, without_attack_warnings

ATTACK_SEED = 0
BATCH = 64  # images in a forward
SEVERITY = 5  # of corruptions: the worst
SPSA_SAMPLES = 16  # pairs of probes per step

Classify = Callable[[Tensor], Tensor]  # pixels between 0 and 1 to logits


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


def attack_name(attack: AttackPart) -> str:
    """Return the name of the main attack of a recipe, as results call it."""
    return "PGD" if attack.name in (None, "pgd") else attack.name


def attack_all(
    classify: Classify, pixels: Tensor, labels: Tensor, attack: AttackPart
) -> tuple[dict[str, dict[str, Any]], AttackedInputs]:
    """Return the results of every attack of a recipe by name, and the images of its main attack."""
    steps, name = attack.steps, attack_name(attack)
    given: dict[str, Any] = {"budget": attack.budget, "batch": BATCH}
    with without_attack_warnings():
        strong = pgd(classify, pixels, labels, **given, steps=steps, seed=ATTACK_SEED)
        main = strong
        if name != "PGD":
            named = find_attack(name, "pictures")
            main = attack_pixels(named, classify, pixels, labels, **given, steps=steps, seed=ATTACK_SEED)
        blind = spsa(classify, pixels, labels, **given, steps=steps, samples=SPSA_SAMPLES, seed=ATTACK_SEED)
        results = {
            "FGSM": _attacked(fgsm(classify, pixels, labels, **given)),
            "PGD": _attacked(strong),
            "SPSA": _attacked(blind),
            "corruptions": _corrupted(classify, pixels, labels),
            **({} if name == "PGD" else {name: _attacked(main)}),
        }
    return results, main


def attack_table(
    classify: Classify, pixels: Tensor, labels: Tensor, kind: str, *, budget: float, steps: int, seed: int
) -> AttackTable:
    """Attack images within `budget` with the attack of this name, or apply the corruptions at severity `budget`."""
    if kind == "corruptions":
        return _corruption_table(classify, pixels, labels, budget, seed)
    attack = find_attack(kind, "pictures")
    how: dict[str, Any] = {"steps": steps, "seed": seed, "batch": BATCH}
    with without_attack_warnings():
        result = attack_pixels(attack, classify, pixels, labels, budget=budget, **how)
    return {
        "title": f"{result.attack}, {result.norm} {result.budget:.4g}, {len(labels)} images",
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

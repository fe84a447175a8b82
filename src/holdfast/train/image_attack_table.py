"""The table of `holdfast attack` for images: the errors of a trained classifier under attacks or corruptions."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from holdfast.attacks import CORRUPTIONS, find_attack
from holdfast.train.image_attacks import (
    FROST,
    TOP,
    Classify,
    Corrupted,
    attacked,
    attacked_error,
    check_images_attacks,
    clean_errors,
    curve_of,
    described_curve,
    error_of,
)
from holdfast.train.image_task import ImageTask
from holdfast.train.question_attacks import attack_questions
from holdfast.train.task import AttackTable, Task
from holdfast.train.vision_language_task import VisionLanguageTask

CARRIED = "What an attack found at a smaller budget counts at larger ones too, so the error never falls with the budget."


def attack_images(
    model: Any,
    task: Task,
    kinds: str | Sequence[str],
    *,
    budget: float | Sequence[float],
    steps: int = 20,
    examples: int = 512,
    seed: int = 0,
    **options: Any,
) -> AttackTable:
    """Attack test images within `budget` with one attack or several, or apply the corruptions at severity `budget`.

    Of pictures with questions, the answers are attacked, by `QUESTION_ATTACKS` only.

    budget      one, or several: the table then has the error against the budget
    options     of the attacks: step, restarts, random_start, samples
    """
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    budgets = list(budget) if isinstance(budget, Sequence) else [budget]
    if isinstance(task, VisionLanguageTask) and "corruptions" not in names:
        return attack_questions(model, task, names, budget=budgets, steps=steps, examples=examples, seed=seed, **options)
    if not isinstance(task, ImageTask):
        raise ValueError(f"{names[0]} attacks images, but {task.not_images}.")
    check_images_attacks(names, budgets, options)
    if examples < 1:
        raise ValueError(f"examples is {examples}; attack at least 1 image.")
    pixels, labels = task.test_images(examples, model.device)
    classify = task.classifier(model)
    wrong = clean_errors(classify, pixels, labels)
    clean = error_of(wrong[0]), error_of(wrong[1])
    if names == ["corruptions"]:
        return _corruption_table(classify, pixels, labels, clean, [int(budget) for budget in budgets], seed)
    how = {"steps": steps, "seed": seed, **options}
    curves = [curve_of(find_attack(kind, "images"), classify, pixels, labels, budgets, **how) for kind in names]
    points = [point for curve in curves for point in curve]
    shown = f"{points[0].norm} {points[0].budget:.4g}, " if len(set(budgets)) == 1 else ""
    errors = [(attacked_error(point), attacked_error(point, TOP)) for point in points]
    rows = [
        [point.attack, point.budget, error, "" if top5 is None else top5, point.realised]
        for point, (error, top5) in zip(points, errors, strict=True)
    ]
    flags = dict.fromkeys(flag for point in points for flag in point.flags)
    summary: dict[str, Any] = attacked(points[0])
    if len(points) > 1:
        summary = {"attacks": [attacked(point) for point in points]}
    return {
        "title": f"{', '.join(dict.fromkeys(point.attack for point in points))}, {shown}{len(labels)} images",
        "columns": ["", "budget", "error, %", "top-5 error, %", "largest change"],
        "rows": [["clean", 0.0, *clean, 0.0], *rows],
        "caption": CARRIED if len(set(budgets)) > 1 else None,
        "flags": [flag.summary() for flag in flags],
        "summary": summary,
        "clean": {"figure": clean[0], "top5": clean[1], "examples": len(labels)},
        "curves": {curve[0].attack: described_curve(curve, wrong) for curve in curves},
    }


def _corruption_table(
    classify: Classify, pixels: Tensor, labels: Tensor, clean: tuple[float, float], severities: Sequence[int], seed: int
) -> AttackTable:
    found, _ = Corrupted(pixels, seed).errors(classify, labels, severities)
    severities, one = list(found), len(found) == 1
    rows = [["clean", *[clean[0]] * len(severities)]]
    rows += [[name, *(errors[name] for errors in found.values())] for name in CORRUPTIONS]
    rows.append(["mean of corruptions", *(fmean(errors.values()) for errors in found.values())])
    summary: dict[str, Any] = {"severity": severities[0], "seed": seed, "errors": found[severities[0]]}
    if not one:
        summary = {"severities": severities, "seed": seed, "errors": {str(key): errors for key, errors in found.items()}}
    which = f"severity {severities[0]}" if one else f"severities {', '.join(map(str, severities))}"
    return {
        "title": f"Corruptions of {which}, {len(labels)} images ({FROST})",
        "columns": ["", *(["error, %"] if one else [f"error, %, severity {severity}" for severity in severities])],
        "rows": rows,
        "flags": [],
        "summary": summary,
    }

"""The tables of `holdfast attack` for images: the errors of a trained classifier under attacks or corruptions.

Of pictures with questions, they are the errors of answers under attacks on the pixels. The gradient of the right answer's
likelihood reaches the pixels through the language model, the connector and the tower: an attack lowers
p(right option) = exp(l_right) / sum_o exp(l_o), with the log-likelihoods l of `question_scoring`. The words of a question do
not change. Only attacks that run all questions of a batch at once can be used, which follow gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks import CORRUPTIONS, AttackedInputs, attack_curve, attack_pixels, find_attack
from holdfast.attacks.registry import Attack
from holdfast.errors import require_known
from holdfast.train.image_attacks import (
    FROST,
    TOP,
    Classify,
    Corrupted,
    Curve,
    attacked,
    attacked_error,
    check_images_attacks,
    clean_errors,
    curve_of,
    described_curve,
    error_of,
)
from holdfast.train.image_task import ImageTask
from holdfast.train.question_scoring import option_scores, right_options
from holdfast.train.task import AttackTable, Task, without_attack_warnings
from holdfast.train.vision_language_task import VisionLanguageTask

CARRIED = "What an attack found at a smaller budget counts at larger ones too, so the error never falls with the budget."
QUESTION_ATTACKS = ("fgsm", "pgd")
BATCH = 16  # questions; a constant, because the random starts of PGD are those of places in a batch

Batches = list[tuple[Callable[[Tensor], Tensor], Tensor, Tensor]]  # scores of options, pixels, right options


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
        for name in names:
            require_known("attack on pictures with questions:", name, QUESTION_ATTACKS)
    elif not isinstance(task, ImageTask):
        raise ValueError(f"{names[0]} attacks images, but {task.not_images}.")
    check_images_attacks(names, budgets, options)
    if examples < 1:
        raise ValueError(f"examples is {examples}; attack at least 1 example.")
    how = {"steps": steps, "seed": seed, **options}
    if not isinstance(task, ImageTask):
        return _attack_questions(model, task, names, budgets, examples, how)
    pixels, labels = task.test_images(examples, model.device)
    classify = task.classifier(model)
    wrong = clean_errors(classify, pixels, labels)
    clean = error_of(wrong[0]), error_of(wrong[1])
    if names == ["corruptions"]:
        return _corruption_table(classify, pixels, labels, clean, [int(budget) for budget in budgets], seed)
    curves = [curve_of(find_attack(kind, "images"), classify, pixels, labels, budgets, **how) for kind in names]
    one = curves[0][0]
    shown = f"{one.norm} {one.budget:.4g}, " if len(set(budgets)) == 1 else ""
    return {
        "title": f"{', '.join(curve[0].attack for curve in curves)}, {shown}{len(labels)} images",
        "columns": ["", "budget", "error, %", "top-5 error, %", "largest change"],
        "caption": CARRIED if len(set(budgets)) > 1 else None,
        "clean": {"figure": clean[0], "top5": clean[1], "examples": len(labels)},
        **_described(curves, wrong, clean, lambda point: attacked_error(point, TOP)),
    }


def _described(
    curves: Sequence[Curve],
    wrong: tuple[Tensor, Tensor | None],
    clean: tuple[float, float],
    second: Callable[[AttackedInputs], float | None],
) -> AttackTable:
    """Return the rows, flags, summary and curves of attacks on pixels; `second` is the number after the error in a row."""
    points = [point for curve in curves for point in curve]
    rows = [[one.attack, one.budget, attacked_error(one), second(one), one.realised] for one in points]
    return {
        "rows": [["clean", 0.0, *clean, 0.0], *(["" if value is None else value for value in row] for row in rows)],
        "flags": [flag.summary() for flag in dict.fromkeys(flag for point in points for flag in point.flags)],
        "summary": attacked(points[0]) if len(points) == 1 else {"attacks": [attacked(point) for point in points]},
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


def _attack_questions(
    model: Any, task: VisionLanguageTask, kinds: Sequence[str], budgets: Sequence[float], examples: int, how: dict[str, Any]
) -> AttackTable:
    """Attack the pictures of test questions within each budget, with one attack or several."""
    batches = _batches(model, task, examples)
    with without_attack_warnings():
        curves = [attack_curve(partial(_attack, find_attack(kind, "images"), batches, how), budgets) for kind in kinds]
    one = curves[0][0]
    clean = error_of(one.already_wrong)
    return {
        "title": f"{', '.join(curve[0].attack for curve in curves)} on pictures, {one.examples} questions",
        "columns": ["", f"budget ({one.norm})", "error, %", "accuracy, %", "largest change"],
        "clean": {"figure": clean, "examples": one.examples},
        **_described(curves, (one.already_wrong, None), (clean, 100 - clean), lambda each: 100 - error_of(each.success)),
    }


def _batches(model: Any, task: VisionLanguageTask, examples: int) -> Batches:
    seeing, found = task.seeing(examples), []
    if not seeing:
        raise ValueError("no test question has a picture; there are no pixels to attack.")
    for numbers in (seeing[start : start + BATCH] for start in range(0, len(seeing), BATCH)):
        some = [task.asked["test"][number] for number in numbers]
        right = right_options(some).to(model.device)
        found.append((option_scores(model, some, task.scaling, task.encoder), task.pixels(numbers).to(model.device), right))
    return found


def _attack(attack: Attack, batches: Batches, how: dict[str, Any], budget: float) -> AttackedInputs:
    """Attack one batch after another, and return all as one result."""
    parts = [attack_pixels(attack, *batch, budget=budget, **how) for batch in batches]
    tensors = ("inputs", "success", "already_wrong", "distances")
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in tensors}
    flags = tuple(dict.fromkeys(flag for part in parts for flag in part.flags))
    return replace(parts[0], **joined, flags=flags, ranks=None)

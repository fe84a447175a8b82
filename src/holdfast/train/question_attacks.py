"""The table of `holdfast attack` for pictures with questions: the errors of answers under attacks on the pixels.

The gradient of the right answer's likelihood reaches the pixels through the language model, the connector and the tower:
an attack lowers p(right option) = exp(l_right) / sum_o exp(l_o), with the log-likelihoods l of `question_scoring`. The words
of a question do not change. Only attacks that run all questions of a batch at once can be used, which follow gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks import AttackedInputs, attack_curve, attack_pixels, find_attack
from holdfast.attacks.registry import Attack
from holdfast.errors import require_known
from holdfast.train.image_attacks import attacked, check_images_attacks, error_of
from holdfast.train.question_scoring import option_scores
from holdfast.train.task import AttackTable, without_attack_warnings
from holdfast.train.vision_language_task import VisionLanguageTask

QUESTION_ATTACKS = ("fgsm", "pgd")
BATCH = 16  # questions; a constant, because the random starts of PGD are those of places in a batch

Batches = list[tuple[Callable[[Tensor], Tensor], Tensor, Tensor]]  # scores of options, pixels, right options


def attack_questions(
    model: Any,
    task: VisionLanguageTask,
    kinds: Sequence[str],
    *,
    budget: Sequence[float],
    examples: int,
    **options: Any,
) -> AttackTable:
    """Attack the pictures of test questions within each budget, with one attack or several."""
    for kind in kinds:
        require_known("attack on pictures with questions:", kind, QUESTION_ATTACKS)
    check_images_attacks(kinds, budget, {name: value for name, value in options.items() if name not in ("steps", "seed")})
    if examples < 1:
        raise ValueError(f"examples is {examples}; attack at least 1 question.")
    batches = _batches(model, task, examples)
    with without_attack_warnings():
        curves = [
            attack_curve(lambda at, kind=kind: _attack(find_attack(kind, "images"), batches, at, options), budget)  # type: ignore[misc]
            for kind in kinds
        ]
    points = [point for curve in curves for point in curve]
    clean = error_of(points[0].already_wrong)
    rows = [("clean", 0.0, clean, 0.0), *((one.attack, one.budget, error_of(one.success), one.realised) for one in points)]
    return {
        "title": f"{', '.join(curve[0].attack for curve in curves)} on pictures, {points[0].examples} questions",
        "columns": ["", f"budget ({points[0].norm})", "error, %", "accuracy, %", "largest change"],
        "rows": [[name, at, error, 100 - error, change] for name, at, error, change in rows],
        "flags": [flag.summary() for flag in dict.fromkeys(flag for point in points for flag in point.flags)],
        "summary": attacked(points[0]) if len(points) == 1 else {"attacks": [attacked(point) for point in points]},
        "clean": {"figure": clean, "examples": points[0].examples},
        "curves": {curve[0].attack: _described(curve, clean) for curve in curves},
    }


def _described(curve: Sequence[AttackedInputs], clean: float) -> dict[str, Any]:
    """Return a curve as JSON: the error for each budget, from 0 on. Options are few, so there is no top-5 error."""
    points = [(one.budget, error_of(one.success), one.realised) for one in curve]
    points = points if curve[0].budget == 0 else [(0.0, clean, 0.0), *points]
    budgets, errors, realised = (list(column) for column in zip(*points, strict=True))
    found = {"examples": curve[0].examples, "budgets": budgets, "figure": errors, "top5": [None] * len(budgets)}
    return {**found, "realised": realised}


def _batches(model: Any, task: VisionLanguageTask, examples: int) -> Batches:
    asked = [task.asked["test"][number] for number in task.seeing(examples)]
    if not asked:
        raise ValueError("no test question has a picture; there are no pixels to attack.")
    pictures, found = task.question_set.tests["test"].pictures, []
    for some in (asked[start : start + BATCH] for start in range(0, len(asked), BATCH)):
        pixels = pictures.pixels([one.picture for one in some if one.picture is not None]).to(model.device)
        right = torch.tensor([one.right for one in some], device=model.device)
        found.append((option_scores(model, some, task.scaling, task.encoder), pixels, right))
    return found


def _attack(attack: Attack, batches: Batches, budget: float, options: dict[str, Any]) -> AttackedInputs:
    """Attack one batch after another, and return all as one result."""
    parts = [attack_pixels(attack, *batch, budget=budget, **options) for batch in batches]
    tensors = ("inputs", "success", "already_wrong", "distances")
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in tensors}
    flags = tuple(dict.fromkeys(flag for part in parts for flag in part.flags))
    return replace(parts[0], **joined, flags=flags, ranks=None)

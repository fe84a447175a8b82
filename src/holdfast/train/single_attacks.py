"""Single attacks on a model that is there, each as a small table with what is to be stored beside it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks import CORRUPTIONS, GENERIC, AttackedInputs, AttackWarning, attack_routes, fgsm, misspell, pgd, spsa
from holdfast.hub import calls
from holdfast.routing import Context
from holdfast.train.picture_task import (
    BATCH,
    Classify,
    PictureTask,
    attacked_error,
    classifier,
    corruption_errors,
    error_of,
    spread,
)
from holdfast.train.task import Task, forward
from holdfast.train.text_task import TextTask, cost_between, score_text

Found = dict[str, Any]  # "title", "columns", "rows" for people; "flags" and "summary" for the record


def attack_text(model: Any, task: Task, kind: str, *, rate: float, seed: int) -> Found:
    """Words swapped for others that the model knows ("words"), swapped for the papers' token ("generic"), or misspelt."""
    if not isinstance(task, TextTask):
        raise ValueError(f"{kind} attacks texts; this model classifies pictures: use fgsm, pgd, spsa or corruptions.")
    with _silently():
        if kind == "typos":
            attack = task.attacked_with(misspell, rate=rate, seed=seed)
        else:
            attack = task.swapped(GENERIC if kind == "generic" else None, rate=rate, seed=seed)
    trials = dict(zip(("clean", kind), task.trials(attack), strict=True))
    losses: dict[str, list[Tensor]] = {name: [] for name in trials}
    scores = [(name, score_text(model, trial, routing=False, losses=losses[name])) for name, trial in trials.items()]
    cost = cost_between(*((trial, losses[name]) for name, trial in trials.items()))
    rows = [[name, score["figure"], score["figure_of_kept"], score["bits_per_byte"]] for name, score in scores]
    return {
        "title": f"{attack.attack}: {attack.changed} of {sum(attack.words)} words, {attack.realised:.2%}",
        "caption": None
        if cost is None
        else f"On the words left alone, the attack changes the perplexity by {cost['words']}.",
        "columns": ["", "perplexity", "of words left alone", "bits a byte"],
        "rows": rows,
        "flags": [flag.summary() for flag in attack.flags],
        "summary": {"attack": attack.summary(), **dict(scores), "cost": cost},
    }


def attack_pictures(model: Any, task: Task, kind: str, *, budget: float, steps: int, examples: int, seed: int) -> Found:
    """FGSM, PGD, SPSA within `budget`, or the corruptions at severity `budget`."""
    if not isinstance(task, PictureTask):
        raise ValueError(f"{kind} attacks pictures; this model reads text: use words, typos or routes.")
    images = task.pictures.images("test")
    some = spread(len(images), examples)
    if not some:
        raise ValueError(f"examples is {examples}; at least 1 picture is attacked.")
    pixels, labels = images.pixels(some).to(model.device), images.labels[some].to(model.device)
    classify = classifier(model)
    if kind == "corruptions":
        return _corruptions(classify, pixels, labels, budget, seed)
    given: dict[str, Any] = {"budget": budget, "batch": BATCH}
    attacks: dict[str, Any] = {
        "fgsm": partial(fgsm, **given),
        "pgd": partial(pgd, **given, steps=steps, seed=seed),
        "spsa": partial(spsa, **given, steps=steps, seed=seed),
    }
    with _silently():
        result: AttackedInputs = attacks[kind](classify, pixels, labels)
    return {
        "title": f"{result.attack}, {result.norm} {result.budget:.4g}, {len(some)} pictures",
        "columns": ["", "error, %"],
        "rows": [["clean", error_of(classify, pixels, labels)], [result.attack, attacked_error(result)]],
        "flags": [flag.summary() for flag in result.flags],
        "summary": result.summary(),
    }


def _corruptions(classify: Classify, pixels: Tensor, labels: Tensor, severity: float, seed: int) -> Found:
    if severity != int(severity):
        raise ValueError(f"the budget of corruptions is a severity, 1 to 5, not {severity:g}.")
    errors = corruption_errors(classify, pixels, labels, int(severity), seed)
    rows = [["clean", error_of(classify, pixels, labels)], *([name, figure] for name, figure in errors.items())]
    rows.append(["mean of them", sum(errors.values()) / len(errors)])
    left_out = ", ".join(name for name, corruption in CORRUPTIONS.items() if corruption.files)
    return {
        "title": f"Corruptions of severity {severity:g}, {len(labels)} pictures ({left_out} needs files and is left out)",
        "columns": ["", "error, %"],
        "rows": rows,
        "flags": [],
        "summary": {"severity": int(severity), "seed": seed, "errors": errors},
    }


def attack_routers(model: Any, task: Task, *, budget: float, steps: int, tokens: int, seed: int) -> Found:
    """Each layer's router on its own inputs, of one sequence after the other until there are so many tokens."""
    if tokens < 1:
        raise ValueError(f"examples is {tokens}; at least 1 token is attacked.")
    probe = task.probe()
    length = next(iter(probe.values())).shape[1] if "input_ids" in probe else 1
    few = {name: tensor[: max(1, tokens // length)] for name, tensor in probe.items()}
    with torch.no_grad(), calls(model) as heard:
        forward(model, few)
    rows, summaries, flags = [], [], []
    with _silently():
        for layer, call in enumerate(heard):
            context = call.context if isinstance(call.context, Context) else None
            result = attack_routes(
                call.route, call.tokens.float(), budget=budget, relative=True, context=context, steps=steps, seed=seed
            )
            summary: dict[str, Any] = result.summary()
            rows.append([layer, summary["tokens"], result.rate, summary["smallest"] or "", summary["median"] or ""])
            summaries.append({"layer": call.name, **summary})
            flags += [flag.summary() for flag in result.flags if flag.summary() not in flags]
    return {
        "title": f"Routes: router inputs moved by up to {budget:.3g} of their length (l2)",
        "columns": ["layer", "tokens", "share that changes experts", "smallest move that does", "median of those"],
        "rows": rows,
        "flags": flags,
        "summary": {"layers": summaries},
    }


@contextmanager
def _silently() -> Iterator[None]:
    """The flags are in the record; said once more as warnings they would only scroll past."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttackWarning)
        yield

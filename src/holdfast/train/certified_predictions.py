"""`holdfast certify --predictions`: certify the predictions of trained models, attack their votes, and store every example.

    OUT/run.json            the settings and the data: another run is refused
    OUT/cells/NAME.jsonl    of each model: what was certified, then a line for each finished example
    OUT/predictions.json    `prediction_report.PredictionReport`, when all examples are finished

A stopped run goes on after its last finished example. The noise of an example depends only on the seed, its number and the
kind of device (a GPU draws other numbers than a CPU), so its line is the same whenever it is computed, and all models get
the same noise.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from holdfast.attacks import attack_smoothed
from holdfast.certificates import Smoothing, certify_predictions
from holdfast.certificates.voting import count_classes
from holdfast.checked import from_mapping
from holdfast.files import LARGEST, append, read_json, read_text, require_no_links, write_atomically
from holdfast.hub.folder_files import sha256_of
from holdfast.locking import Lock, locked, require_unlocked
from holdfast.progress import Tell
from holdfast.routing import Router
from holdfast.train.cells import merge_results, result_folder, safe_file_name
from holdfast.train.image_attacks import error_of, per_image
from holdfast.train.prediction_report import (
    AttackedVote,
    CertifiedExample,
    CertifiedModel,
    NamedModel,
    PredictionReport,
    PredictionSettings,
)
from holdfast.train.run_folder import RUN_FILE, claim, read_with_checksum, require_own
from holdfast.train.task import NoisyExample, Task, evaluating
from holdfast.train.task_record import MODEL, is_trained, read_record
from holdfast.version import VERSION, versions

Load = Callable[[str], tuple[Any, Task]]  # from the path of a model to the model and its task


class NoClassifierError(ValueError):
    """A model whose outputs for one input depend on the others of its batch."""


@final
@dataclass(frozen=True)
class Head:
    """The first line of a model's file: what its examples are of."""

    weights: dict[str, str]  # checksums by file, of the config too
    examples: int
    unit: str
    data: dict[str, Any]


def models_at(path: str) -> list[NamedModel]:
    """Return the model at a path, or all cells of a comparison in the order of its results."""
    place = Path(path)
    if is_trained(place) or not (place / "cells").is_dir():
        is_cell = (place / "result.json").exists()
        return [_named(read_with_checksum(place / "result.json"), place) if is_cell else _single(path)]
    cells = [_named(result, place / "cells" / result_folder(result)) for result in merge_results(place, [])]
    if not cells:
        raise ValueError(f"{place} has no finished cell; train them with holdfast compare.")
    return cells


def _single(path: str) -> NamedModel:
    """Return a model of `holdfast train`, with the router and seed of its run; any other model is named by its path."""
    try:
        run = read_json(Path(path, RUN_FILE))
        return NamedModel(path, str(run["router"]["name"]), int(run["seed"]))
    except (OSError, ValueError, KeyError, TypeError):
        return NamedModel(path, _name(path))


def _name(path: str) -> str:
    return Path(path).resolve().name if Path(path).exists() else path


def _named(result: dict[str, Any], folder: Path) -> NamedModel:
    return NamedModel(str(folder), str(result["router"]), int(result["seed"]), result.get("settings", {}))


def certify_models(
    models: Sequence[NamedModel], settings: PredictionSettings, out: Path, load: Load, tell: Tell, **identity: Any
) -> PredictionReport:
    """Certify each model on its test examples, or read what an earlier run stored; write and return the report.

    tell        is told the finished examples
    identity    further options that change results, such as the dtype
    """
    identity = {"holdfast": VERSION, "command": "certify --predictions", "settings": asdict(settings), **identity}
    require_own(out, identity)
    require_unlocked(out)
    if not (out / RUN_FILE).exists():
        load = _with_first(load, models, settings)  # a model that cannot be certified must not create a folder
    with locked(out, wait=False) as lock:
        claim(out, identity)
        found: list[CertifiedModel] = []
        skipped: dict[str, str] = {}
        heads: list[Head] = []
        for number, named in enumerate(models):
            note = partial(_note, tell, number * settings.examples, named.router)
            try:
                head, examples = _certify_model(named, settings, out, load, note, lock)
            except NoClassifierError as reason:
                if len(models) == 1:
                    raise
                skipped[named.path] = str(reason)
                continue
            if heads and (head.data, head.unit) != (heads[0].data, heads[0].unit):
                raise ValueError(f"{named.path} has other test data than {found[0].path}; give each an --out of its own.")
            found.append(CertifiedModel(**vars(named), examples=examples))
            heads.append(head)
        if not heads:
            raise ValueError("; ".join(dict.fromkeys(skipped.values())))
        described: dict[str, Any] = {"unit": heads[0].unit, "data": heads[0].data}
        report = PredictionReport(settings=settings, models=found, skipped=skipped, versions=versions(), **described)
        lock.require(out / report.file_name)
        report.save(out / report.file_name)
    return report


def _with_first(load: Load, models: Sequence[NamedModel], settings: PredictionSettings) -> Load:
    """Load the first model that can be certified, and return a `load` that does not load it again.

    Raise ValueError if that model does not classify, or if there is no such model.
    """
    reasons: list[str] = []
    for named in models:
        model, task = load(named.path)
        try:
            _require_classifier(model, named.router)
        except NoClassifierError as reason:
            reasons.append(str(reason))
            continue
        task.noisy_examples(model, settings.examples)
        loaded = {named.path: (model, task)}
        return lambda path: loaded.pop(path, None) or load(path)
    raise ValueError("; ".join(dict.fromkeys(reasons)))


def _certify_model(
    named: NamedModel, settings: PredictionSettings, out: Path, load: Load, tell: Callable[[int], None], lock: Lock
) -> tuple[Head, list[CertifiedExample]]:
    """Return what describes the results of a model, and its examples; continue what an earlier run stored."""
    file, weights = out / "cells" / f"{safe_file_name(_name(named.path))}.jsonl", _weights(named.path)
    require_no_links(file, out)
    head, examples = _read_lines(file)
    if head is not None and head.weights != weights:
        raise ValueError(f"{file} is of another model than {named.path} is now; remove the file, or choose another --out.")
    tell(len(examples))
    if head is not None and len(examples) == head.examples:
        return head, examples
    model, task = load(named.path)
    _require_classifier(model, named.router)
    numbers, example = task.noisy_examples(model, settings.examples)
    data = json.loads(json.dumps(task.describe()["data"]))  # as it is read again
    described = Head(weights, len(numbers), task.noise_unit, data)
    if head is not None and head != described:
        raise ValueError(
            f"{file} is of other test data than {named.path} has now; remove the file, or choose another --out."
        )
    head = described
    lock.require(file)
    # Written again: a killed process may have left half a line.
    write_atomically(file, "".join(f"{json.dumps(one)}\n" for one in (asdict(head), *map(asdict, examples))))
    for number in numbers[len(examples) :]:
        examples.append(certify_example(example(number), settings))
        lock.check()
        append(file, f"{json.dumps(asdict(examples[-1]))}\n")
        tell(len(examples))
    return head, examples


def _require_classifier(model: Any, router: str) -> None:
    """Raise NoClassifierError if the class of one copy of an example depends on the other copies in its batch."""
    if not all(part.traits.batch_invariant for part in model.modules() if isinstance(part, Router)):
        raise NoClassifierError(
            f"{router} routes the copies of a batch together, so the class of one depends on the others, and there is "
            "no classifier whose vote could be certified."
        )


def require_certifiable(model: Any, task: Task, router: str) -> None:
    """Raise ValueError if a recipe asks for certified errors (`attack.certify`) that this model cannot have."""
    part = task.recipe.attack
    if part.certify is None:
        return
    task.require_classifier(model)
    _require_classifier(model, router)
    if PredictionSettings(sigma=part.certify, samples=part.certify_samples).largest_radius <= part.certify:
        raise ValueError(f"attack.certify_samples is {part.certify_samples}: no vote of so few could be certified that far.")
    if task.measure.name != "error, %":
        raise ValueError(f"attack.certify measures errors, and the measure of this task is {task.measure.name}.")


def certified_trial(model: Any, task: Task) -> dict[str, Any]:
    """Return the certified error of a recipe's `attack.certify` as a trial of its scores, by its name; {} without it.

    The clean error beside it is that of single answers without noise, of the same examples.
    """
    part = task.recipe.attack
    if part.certify is None:
        return {}
    smoothing, wrong, clean = Smoothing(part.certify, samples=part.certify_samples), list[bool](), list[bool]()
    with evaluating(model, routing=False), torch.no_grad():
        numbers, example = task.noisy_examples(model, part.certify_examples)
        for one in map(example, numbers):
            inputs, label = one.inputs.unsqueeze(0), torch.tensor([one.label])
            found = certify_predictions(one.classify, inputs, replace(smoothing, first=one.number), batch=one.batch)
            wrong.append(found.accuracy(label, part.certify) == 0)
            clean.append(bool(one.classify(inputs).argmax(1).cpu() != label))
    every = torch.tensor(wrong)
    score = {"figure": error_of(every), "clean": error_of(torch.tensor(clean)), "examples": len(wrong)}
    return {f"certified within {part.certify:g}": {**score, "per_example": per_image(every)}}


def _note(tell: Tell, before: int, router: str, done: int) -> None:
    tell(before + done, f"certifying {router}")


def certify_example(example: NoisyExample, settings: PredictionSettings) -> CertifiedExample:
    """Certify one example, and attack its vote at every radius of the settings and at the certified one."""
    how = {name: getattr(settings, name) for name in ("sigma", "samples", "selection", "alpha", "seed")}
    found = certify_predictions(
        example.classify, example.inputs.unsqueeze(0), Smoothing(**how, first=example.number), batch=example.batch
    )
    chosen, radius = int(found.classes), float(found.radius)
    attacked = list(_attack(example, settings, chosen, radius))
    return CertifiedExample(example.number, example.label, chosen, int(found.hits), radius, attacked)


def _attack(example: NoisyExample, settings: PredictionSettings, chosen: int, certified: float) -> Iterator[AttackedVote]:
    """Yield the vote after the attack at every radius."""
    if not settings.steps or (certified == 0 and chosen != example.label):
        return
    radii = [*settings.radii, *([certified] if certified > 0 else [])]
    inputs = example.inputs.expand(len(radii), *example.inputs.shape)
    how: dict[str, Any] = {name: getattr(settings, name) for name in ("sigma", "steps", "draws", "seed")}
    how |= {"first": example.number * (len(settings.radii) + 1), "batch": example.batch}
    classes, sizes = torch.full((len(radii),), chosen), torch.tensor(radii, dtype=torch.float64)
    perturbed = attack_smoothed(example.classify, inputs, classes, radius=sizes, **how)
    for place, (radius, one) in enumerate(zip(radii, perturbed, strict=True)):
        name = (settings.seed, "attacked", example.number, place)
        counts = count_classes(example.classify, one, settings.sigma, settings.votes, *name, batch=example.batch)
        yield AttackedVote(radius, int(counts[chosen]), bool(counts[chosen] == counts.max()))


def _weights(path: str) -> dict[str, str]:
    """Return the checksums of the files of a model, with its config; none for a model on the hub."""
    folder = read_record(Path(path)).home / MODEL if is_trained(Path(path)) else Path(path)
    files = (file for kind in ("*.safetensors", "*.bin", "*.json") for file in folder.glob(kind))
    return {file.name: sha256_of(file) for file in sorted(files)}


def _read_lines(file: Path) -> tuple[Head | None, list[CertifiedExample]]:
    """Return what a run stored of a model, without a line that it could not finish; None if it stored nothing."""
    try:
        *lines, _ = read_text(file, limit=LARGEST).split("\n")
        head, *examples = map(json.loads, lines)
        return from_mapping(Head, head), [from_mapping(CertifiedExample, one) for one in examples]
    except FileNotFoundError:
        return None, []
    except ValueError as problem:
        raise ValueError(f"{file} is damaged ({problem}); remove it to certify its model again.") from None

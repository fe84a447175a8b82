"""How the cells of an experiment were trained, in sentences, and the titles and the order of experiments."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from results_numbers import baseline_name, columns, data_name, task_of, training_of

from holdfast.train.ledger import Experiment
from holdfast.train.recipe import DataPart, ModelPart, SparsePart, TrainingPart

PARTS = {"model": ModelPart, "training": TrainingPart, "sparse": SparsePart, "data": DataPart}
TASKS = ("text", "labels", "images", "domains", "vision-language")
LAYERS, WIDTHS = ("n_layer", "num_hidden_layers", "depths"), ("n_embd", "hidden_size", "embed_dim")
# What is as by default is not in the ledger.
DEFAULTS = {part: {each.name: each.default for each in fields(kind)} for part, kind in PARTS.items()}


def _part(experiment: Experiment, name: str) -> Mapping[str, Any]:
    """Return a part of the recipe, with the defaults."""
    return DEFAULTS[name] | experiment.cells[0].experiment["recipe"].get(name, {})


def duration(experiment: Experiment) -> str:
    training = _part(experiment, "training")
    steps, epochs = training["steps"], training["epochs"]
    return f"{steps:,} steps" if steps else f"{epochs:g} epochs"


def _rate(experiment: Experiment) -> str:
    schedule = _part(experiment, "training")["schedule"]
    return "" if schedule == "constant" else f"{schedule} rate"


def _experts(experiment: Experiment) -> str:
    sparse = _part(experiment, "sparse")
    return f"top {sparse['k'] or 2} of {sparse['experts']}" if sparse["experts"] else "experts of its start"


def _trainings(experiment: Experiment) -> str:
    methods = [re.search(r"method=(\w+)", training_of(row)) for row in experiment.rows]
    return f"{' and '.join(sorted({'plain' if found is None else found[1] for found in methods}))} training"


def titles(experiments: Sequence[Experiment]) -> dict[str, str]:
    """Return a title for each experiment, by its name: the data, and as much of the setting as makes it unique."""
    found = {one.name: f"{data_name(one)}, {duration(one)}" for one in experiments}
    further: list[Callable[[Experiment], str]] = [_rate, _experts, _trainings, lambda one: one.name.rpartition("-")[2]]
    for facet in further:
        counts = Counter(found.values())
        more = {one.name: facet(one) for one in experiments if counts[found[one.name]] > 1}
        # What all of them share does not tell them apart.
        found |= {
            name: f"{found[name]}, {text}"
            for name, text in more.items()
            if text and len({other for each, other in more.items() if found[each] == found[name]}) > 1
        }
    return found


def sorted_by_task(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Return the experiments by task, data and steps."""

    def order(one: Experiment) -> tuple[int, str, float, str, str]:
        training = _part(one, "training")
        length = training["steps"] or training["epochs"] or 0
        return TASKS.index(task_of(one)), data_name(one), length, _rate(one), one.name

    return sorted(experiments, key=order)


def setting(experiment: Experiment) -> str:
    """Return the sentences about how the cells of an experiment were trained."""
    shared, training = experiment.cells[0].experiment, _part(experiment, "training")
    batch = f"{training['batch']}{_examples(experiment)}"
    origins = sorted({f"{cell.origin['device']}, torch {cell.origin['versions']['torch']}" for cell in experiment.cells})
    commits = sorted({str(cell.origin["commit"]) for cell in experiment.cells})
    about = shared["data"].get("about", data_name(experiment))
    sentences = [
        f"{_model(experiment)}; {duration(experiment)} of {batch},",
        f"rate {training['learning_rate']:g}, {training['schedule']} after {training['warmup']} "
        f"warm-up steps, {training['precision']}. Data: {about};",
        f"{_attack(experiment)} {'; '.join(origins)}; commits {', '.join(commits)}.",
    ]
    if any(training_of(row) for row in experiment.rows):
        name = baseline_name(experiment)
        sentences.append(
            "Braces after a router say how it is trained ([robust training](robust-training.md)); it is compared with "
            f"`{name}` that is trained in the same way."
        )
    if apart := sorted({row.apart for row in experiment.rows if row.apart}):
        sentences.append(f"A router that {' or '.join(apart)} has an easier task: it leaks, and is not compared.")
    return " ".join(sentences)


def _model(experiment: Experiment) -> str:
    model, sparse = _part(experiment, "model"), _part(experiment, "sparse")
    config = experiment.cells[0].experiment["recipe"].get("model", {}).get("config", {})
    parts = [config[name] for name in ("vision_config", "text_config") if name in config] or [config]
    layers, widths = (
        " and ".join(str(next((part[key] for key in keys if key in part), "?")) for part in parts)
        for keys in (LAYERS, WIDTHS)
    )
    if "start" in experiment.cells[0].experiment:
        start = experiment.cells[0].experiment["start"]
        text = f"each router starts from its own cell of {start['data'].get('name', 'another experiment')}"
    elif not model["family"]:
        text = "a checkpoint"
    elif "?" in layers + widths:
        text = str(model["family"])
    else:
        text = f"{model['family']} with {layers} layers of width {widths}"
    experts = f", {sparse['experts']} experts, top {sparse['k'] or 2}" if sparse["experts"] else ""
    which = f" in layers {sparse['layers']}" if sparse["layers"] != "all" else ""
    return f"{text}{experts}{which}"


def _examples(experiment: Experiment) -> str:
    """Return what the number of a batch counts."""
    data, task = _part(experiment, "data"), task_of(experiment)
    if task == "text":
        return f" x {data['length']} {data['tokens'] or 'words'}"
    return {"labels": f" texts of at most {data['length']} tokens", "vision-language": " dialogues"}.get(task, " images")


def _attack(experiment: Experiment) -> str:
    attack = experiment.cells[0].experiment["attack"]
    if task_of(experiment) == "text" and "realised" in attack:
        token = attack.get("options", {}).get("token")
        how = "swapped" if token is None else f"swapped: replaced by the word {token}"
        return f"{attack['realised']:.1%} of the words of the test text are {how}."
    return (
        f"the attack is {experiment.cells[0].measure.attack}." if "attacked" in columns(experiment) else "attacked as below."
    )

"""Recipes and router choices: what is trained. Read them from YAML and from router names, and check every value.

A recipe says everything about a training run except its router and its seed: the dense model, its experts, data, training
and attack. It is a frozen dataclass. `from_mapping` builds it from plain values; its error gives the path of the first wrong
value (`training.steps`). An unknown key raises an error that suggests the closest one.

A router choice is one router of a comparison, written as in `smoe,similarity[causal=false,tau=2],symphony+smooth,ac@1,3`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from holdfast.attacks import find_attack
from holdfast.checked import Limits, from_mapping
from holdfast.errors import require_extra, unknown_name
from holdfast.files import MIB, depth_exceeds, read_text
from holdfast.metrics import ChosenMetrics
from holdfast.model_size import require_sane_numbers
from holdfast.plugins import plugins_of
from holdfast.routing.grammar import split_routers
from holdfast.routing.layer_names import has_layers, preset_names, resolve_layers, written_name
from holdfast.train.augmentation import AugmentPart

RECIPES = resources.files("holdfast.train") / "recipes"
LONGEST_TOKEN = 100  # most letters of the word that an attack swaps in
IMAGES = ("images", "domains")  # tasks
OF_TASKS = {  # keys that are for some tasks only: the tasks, and what these are about
    "data.pair": (("labels",), "labelled texts"),
    "data.label": (("labels",), "labelled texts"),
    "data.metric": (("labels",), "labelled texts"),
    "data.train_tokens": (("text",), "language models"),
    "data.test_bytes": (("text",), "language models"),
    "data.held_out": (("domains",), "images of several domains"),
    "data.shifts": (("images",), "images"),
    "training.augment": (IMAGES, "images"),
    "attack.budgets": (IMAGES, "images"),
}

Schedule = Callable[[int], float]  # from a number of finished steps

Count = Annotated[int, Limits(0, 10**12, "a whole number from 0 to 10^12")]
Positive = Annotated[int, Limits(1, 10**12, "a whole number from 1 to 10^12")]
Length = Annotated[int, Limits(1, 2**24, "a whole number from 1 to 16,777,216")]
Pixels = Annotated[int, Limits(1, 2**13, "a whole number from 1 to 8,192")]
Restarts = Annotated[int, Limits(1, 1000, "a whole number from 1 to 1,000")]
Samples = Annotated[int, Limits(1, 4096, "a whole number from 1 to 4,096")]
Steps = Annotated[int, Limits(1, 100_000, "a whole number from 1 to 100,000")]
Amount = Annotated[float, Limits(0, math.inf, "a number of at least 0")]
Share = Annotated[float, Limits(0, 1, "a number between 0 and 1")]
Smoothing = Annotated[float, Limits(0, 0.999, "a number of at least 0 and below 1")]
Severity = Annotated[int, Limits(1, 5, "a whole number from 1 to 5")]
Above0 = Annotated[float, Limits(1e-6, 1e12, "a number above 0 and at most 10^12")]


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """The model that routers are put into: a new one of a family, or a checkpoint. Exactly one of the two is given."""

    family: str | None = None  # a dense family that holdfast.sparsify supports; its weights are random at the start
    checkpoint: str | None = None  # the folder or hub name of a model, or the folder of a cell or of `holdfast train`
    config: dict[str, Any] = field(default_factory=dict)  # entries of the model's config, as transformers names them

    def __post_init__(self) -> None:
        if (self.family is None) == (self.checkpoint is None):
            found = "neither" if self.family is None else "both"
            raise ValueError(f"give one of model.family and model.checkpoint; this recipe has {found}.")


@dataclass(frozen=True, kw_only=True)
class SparsePart:
    """The options of `holdfast.sparsify`, which replaces feed-forward networks of a dense model with experts.

    A checkpoint that has experts keeps them: then values may be left out, and must not contradict the checkpoint.
    """

    experts: Positive | None = None
    k: Positive | None = None  # experts per token; no value: 2, or as in a checkpoint that has experts
    hidden: Positive | None = None
    shared: Positive | None = None  # shared experts, for every router of a comparison; no value: none
    layers: str | list[Count] = "all"
    init: Literal["copy", "random"] | None = None  # no value: "copy" if the dense model is a checkpoint, else "random"

    def __post_init__(self) -> None:
        if self.k is not None and self.experts is not None and self.k > self.experts:
            raise ValueError(f"k is {self.k}; it must be between 1 and the number of experts, {self.experts}.")


@dataclass(frozen=True, kw_only=True)
class LossesPart:
    """The coefficients of the losses that routers add in training (`holdfast.Losses`)."""

    balance: Amount = 0.01
    importance: Amount = 0.0
    load: Amount = 0.0
    z: Amount = 0.0
    entropy: Amount = 0.0


@dataclass(frozen=True, kw_only=True)
class DataPart:
    """The data of a run, and how a model reads them."""

    source: str = "python-docs"  # a name or a path
    # "words", "lines" (WikiText's words), "bytes", or the folder of a Hugging Face tokenizer; no value: the checkpoint's, or
    # "words" for a new model
    tokens: str | None = None
    vocabulary: Positive | None = 2000  # number of words; no value: every word
    length: Length = 64  # number of tokens in a block; for labels, texts and pairs are cut to it
    text: str | None = None  # column of the texts, if the source is a table; no value: the first with a usual name
    pair: str | None = None  # for labels: column of the second texts of pairs
    label: str | None = None  # for labels: column of the labels
    metric: str | None = None  # for labels: accuracy, f1, macro_f1, matthews, pearson, spearman; no value: the usual one
    test_bytes: Positive | None = None  # use only the first bytes of the test text
    size: Pixels | None = None  # pixels per side that images from a folder are scaled to
    train_tokens: Positive | None = None  # use only the first tokens of the training text
    held_out: str | None = None  # for domains: the one that is not trained on; no value: each in turn, in a comparison
    shifts: list[str] = field(default_factory=list)  # for images: folders of shifted test sets, and "corruptions"

    def __post_init__(self) -> None:
        for key, names in (("source", [self.source]), ("shifts", self.shifts)):
            if not all(name.strip() for name in names):
                raise ValueError(f"data.{key} has an empty name, which would be the current folder; write a name or a path.")


@dataclass(frozen=True, kw_only=True)
class TrainingPart:
    """How a model is trained; other options have the defaults of the Hugging Face Trainer. Give steps or epochs."""

    steps: Positive | None = None
    epochs: Above0 | None = None  # how often each training example is used; rounded up to whole steps
    batch: Positive
    learning_rate: Amount
    warmup: Count = 0  # steps of linear warm-up
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate after the warm-up
    floor: Share = 0.0  # the share of the learning rate at which "linear" and "cosine" end
    weight_decay: Amount = 0.0
    clip: Amount = 1.0  # gradients with a larger norm are scaled down to it
    accumulate: Positive = 1  # micro-batches per step
    precision: Literal["float32", "bf16"] = "float32"
    save_every: Positive = 100  # steps between checkpoints; an interrupted run resumes from the last one
    validate_every: Positive | None = None  # steps between evaluations on held-out data, which the log shows
    keep: Literal["last", "best"] = "last"  # "best": the best checkpoint on held-out data
    best_by: Literal["loss", "figure"] = "loss"  # what "best" compares: the loss, or the figure of the task
    label_smoothing: Smoothing = 0.0  # the share of a target that is spread over all classes
    compile: bool = False  # the step, with torch.compile, on one GPU
    augment: AugmentPart = field(default_factory=AugmentPart)  # random changes of training images

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else "both"
            raise ValueError(f"give one of training.steps and training.epochs; this recipe has {found}.")
        if self.floor and self.schedule == "constant":
            raise ValueError("training.floor is for the schedules linear and cosine; a constant learning rate has none.")

    def step_count(self, examples: int) -> int:
        """Return the number of steps with this number of training examples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return math.ceil(self.epochs * examples / (self.batch * self.accumulate))

    def rate_factor(self, steps: int) -> Schedule:
        """Return the function from the number of finished steps to the share of the learning rate of the next step.

        The warm-up grows linearly from 0. After it, "constant" stays, "linear" falls in a straight line to `floor` and
        "cosine" along half a cosine. A factor depends on the number of finished steps only, so a resumed run continues with
        the same numbers.
        """
        after_warmup = steps - self.warmup
        if self.schedule != "constant" and after_warmup <= 0:
            word = "step" if steps == 1 else "steps"
            raise ValueError(
                f"training.warmup is {self.warmup} and the run has {steps} {word}: the schedule {self.schedule} "
                f"never begins; use more epochs or steps, or a shorter warm-up, such as --set training.warmup={steps // 10}."
            )

        def factor(done: int) -> float:
            if done < self.warmup:
                return float(done) / float(self.warmup)
            if self.schedule == "constant":
                return 1.0
            progress = min(1.0, (done - self.warmup) / after_warmup)
            share = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
            return self.floor + (1.0 - self.floor) * share

        return factor

    def saves(self, step: int, steps: int) -> bool:
        """Return whether a checkpoint is written after this step."""
        return step % self.save_every == 0 or step == steps

    def validates(self, step: int, steps: int) -> bool:
        """Return whether the model is evaluated on held-out data after this step."""
        is_due = self.validate_every is not None and step % self.validate_every == 0
        return is_due or (self.keep == "best" and self.saves(step, steps))

    @property
    def needs_validation(self) -> bool:
        """Whether a run evaluates on held-out data at all."""
        return self.validate_every is not None or self.keep == "best"


@dataclass(frozen=True, kw_only=True)
class AttackPart:
    """How the trained model is attacked: texts by swapped words, images by PGD (and FGSM, SPSA and corruptions)."""

    name: str | None = None  # another attack of this task: one of `holdfast attack`, or of a plugin
    rate: Share = 0.025  # share of words that are swapped
    token: str | None = None  # the word that is swapped in (AAA in the papers); no value: words of the vocabulary
    budget: Share = 1 / 255  # largest change of a pixel value (l_inf), with values between 0 and 1
    budgets: list[Share] = field(default_factory=list)  # further budgets: results have the error against the budget
    steps: Steps = 20  # steps of PGD and SPSA
    step: Above0 | None = None  # size of a step of PGD and SPSA; no value: 2.5 budget / steps
    restarts: Restarts = 1  # of PGD
    random_start: bool = True  # of PGD; false: start at the clean image
    samples: Samples = 16  # pairs of probes in a step of SPSA
    examples: Positive = 512  # number of test images that are attacked, evenly spaced in the test set
    spsa_examples: Positive | None = None  # the same for SPSA, which is slow; no value: `examples`
    corrupted_examples: Positive | None = None  # the same for corruptions; no value: `examples`
    severities: list[Severity] = field(default_factory=lambda: [5])  # of corruptions, 5 is the worst

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) > LONGEST_TOKEN:
            raise ValueError(f"attack.token has {len(self.token):,} letters; use a word of at most {LONGEST_TOKEN}.")
        if self.token is not None and self.name is not None:
            raise ValueError(f"attack.token is for the swap of words; attack.name is {self.name!r}, so leave the token out.")
        if not self.severities or len(set(self.severities)) < len(self.severities):
            raise ValueError(f"attack.severities is {self.severities}; name at least one severity, and each only once.")

    def all_budgets(self) -> list[float]:
        """Return the budgets of the curve of errors, ascending; `budget` is one of them."""
        return sorted({self.budget, *map(float, self.budgets)})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a training run except its router and its seed."""

    about: str
    model: ModelPart
    training: TrainingPart
    sparse: SparsePart = SparsePart()
    losses: LossesPart = LossesPart()
    task: Literal["text", "labels", "images", "domains"] = "text"
    data: DataPart = DataPart()
    attack: AttackPart = AttackPart()
    metrics: list[str] = field(default_factory=list)  # further metrics beside the main one, by name

    def __post_init__(self) -> None:
        if self.model.family is not None and self.sparse.experts is None:
            raise ValueError("sparse.experts is missing.")
        for key, (tasks, what) in OF_TASKS.items():
            if self.task not in tasks and attrgetter(key)(self) not in (None, [], AugmentPart()):
                raise ValueError(f"{key} is for {what} (task: {tasks[0]}), and this task is {self.task}.")
        if self.attack.name is not None:
            find_attack(self.attack.name, "images" if self.task in IMAGES else "text")
        if self.metrics:
            ChosenMetrics(self.metrics)  # raises if a name is unknown
        require_sane_numbers({**self.model.config, "sparse.experts": self.sparse.experts}, "model.config")

    def describe(self) -> dict[str, Any]:
        """Return the values as they would be written to YAML."""
        return asdict(self)

    def plugins(self) -> list[dict[str, Any]]:
        """Return descriptions of the plugins that its data, its attack and its metrics come from."""
        attacks = [] if self.attack.name is None else [self.attack.name]
        return plugins_of(datasets=[self.data.source], attacks=attacks, metrics=self.metrics)


def recipes() -> dict[str, str]:
    """Return the names of the shipped recipes, each with one line of help."""
    return {name: load_recipe(name).about for name in _names()}


def load_recipe(name: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Return a shipped recipe by its name, or the one in a .yaml file, with `changes` such as {"training.steps": 50}."""
    path = Path(name)
    if name in _names():
        text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    elif path.suffix in (".yaml", ".yml"):
        try:
            text = read_text(path, limit=MIB)
        except FileNotFoundError:
            raise ValueError(f"there is no recipe {path}.") from None
    else:
        raise ValueError(f"{unknown_name('recipe', name, _names())} The path of a .yaml file works too.")
    values = _changed(from_yaml(text, name), changes or {})
    try:
        recipe: Recipe = from_mapping(Recipe, values)
    except ValueError as mistake:
        raise ValueError(f"recipe {name}: {mistake}") from None
    return recipe


def change_recipe(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return a recipe with `changes` such as {"training.steps": 50}, checked as `load_recipe` checks them."""
    changed: Recipe = from_mapping(Recipe, _changed(recipe.describe(), changes))
    return changed


def parse_pairs(pairs: Iterable[str], example: str, form: str = "{}") -> dict[str, Any]:
    """Return `training.steps=50` and the like as keys and values; values are read as YAML. An error shows the `example`.

    form    what is put around a value before it is read
    """
    import yaml

    found = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.strip() or not (value.strip() or form == "{}"):
            raise ValueError(f"{pair!r} sets no value; write for example {example}.")
        try:
            found[key.strip()] = yaml.safe_load(form.format(value))
        except yaml.YAMLError:
            raise ValueError(
                f"{value!r}, the value of {key}, is not YAML in UTF-8; put a text with brackets into quotes."
            ) from None
    return found


def _names() -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in RECIPES.iterdir() if file.name.endswith(".yaml"))


def from_yaml(text: str, name: str) -> dict[str, Any]:
    """Return the values of a YAML text. Aliases raise ValueError: a few of them can expand to more than fits in memory."""
    require_extra("reading a recipe", "yaml")
    import yaml

    class LoaderWithoutAliases(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                alias = self.peek_event()
                raise ValueError(f"line {alias.start_mark.line + 1} has an alias (*{alias.anchor}); write its value out")
            return super().compose_node(parent, index)

    try:
        values = yaml.load(text, LoaderWithoutAliases)  # safe: derived from SafeLoader
        is_too_deep = depth_exceeds(values, 16)
    except RecursionError:
        is_too_deep = True
    except (yaml.YAMLError, ValueError) as problem:
        raise ValueError(f"recipe {name} is not valid YAML for a recipe: {' '.join(str(problem).split())}.") from None
    if is_too_deep:
        raise ValueError(f"recipe {name} is nested too deeply.")
    if not isinstance(values, dict):
        raise ValueError(f"recipe {name} is not a mapping of keys to values.")
    return values


def _changed(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set the values at paths such as `training.steps`, in place, and return all.

    What a change replaces by its alternative is removed: a checkpoint replaces family and config, epochs replace steps.
    """
    if changes.get("model.checkpoint") is not None:
        values["model"] = {}
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if changes.get(f"training.{key}") is not None and isinstance(values.get("training"), dict):
            values["training"].pop(other, None)
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ValueError(f"{key}: {section} is not a section of a recipe.")
        place[last] = value
    return values


@dataclass(frozen=True)
class RouterChoice:
    """One router of a comparison: its name, its layers, its options and its number of experts per token.

    `router` is the name without options; for a name with layers, such as `ac[mix=2]@1,3|smooth`, all of it in one spelling.
    """

    name: str  # the router as the user wrote it; shown in tables
    router: str
    options: Mapping[str, Any] = field(default_factory=dict)
    k: int | None = None  # experts per token; None: as in the recipe

    def with_k(self, k: int, name: str) -> "RouterChoice":
        """Return the same router under another name, with k experts per token in every layer."""
        router = self.router
        if has_layers(router):
            router = written_name([replace(one, k=None) for one in resolve_layers(router)])
        return replace(self, name=name, router=router, k=k)

    def describe(self) -> dict[str, Any]:
        """Return the values that two results of the same router must share, and the checksums of its plugins if any."""
        plugins = plugins_of(routers=preset_names(self.router))
        return {**asdict(self), **({"plugins": plugins} if plugins else {})}


def parse_routers(written: str) -> list[RouterChoice]:
    """Return the routers of a comma-separated list; raise ValueError if a name or an option is wrong."""
    return [parse_router(part) for part in split_routers(written)]


def parse_router(written: str) -> RouterChoice:
    """Return the router choice for one router name, such as `similarity[tau=2]`."""
    routers = resolve_layers(written)
    if has_layers(written):
        return RouterChoice(written, written_name(routers))
    return RouterChoice(written, routers[0].router, routers[0].options, routers[0].k)

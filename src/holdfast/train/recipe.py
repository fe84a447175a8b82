"""Recipes and router choices: what is trained. Read them from YAML and from router names, and check every value.

A recipe says everything about a training run except its router and its seed: the dense model, its experts, data, training
and attack. It is a frozen dataclass. `from_mapping` builds it from plain values; its error gives the path of the first wrong
value (`training.steps`). An unknown key raises an error that suggests the closest one.

A router choice is one router of a comparison, written as in `smoe,similarity[causal=false,tau=2],symphony+smooth,ac@1,3`.
Braces after it change how this router is trained: `smooth{method=pgd,budget=0.01}` sets keys of the section `robust`, and
`smooth{losses.z=0.1}` keys of the section `losses`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from importlib import resources
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from holdfast.attacks import find_attack
from holdfast.checked import Limits, from_mapping
from holdfast.errors import require_extra, unknown_name
from holdfast.files import MIB, depth_exceeds, read_text
from holdfast.layers.losses import Amount, Losses, Share
from holdfast.metrics import ChosenMetrics
from holdfast.model_size import require_sane_numbers
from holdfast.plugins import plugins_of
from holdfast.routing.grammar import read_value, split_braces, split_routers
from holdfast.routing.presets import has_layers, preset_names, resolve_layers, written_name

RECIPES = resources.files("holdfast.train") / "recipes"
LONGEST_TOKEN = 100  # most letters of the word that an attack swaps in
IMAGES = ("images", "domains")  # tasks
OF_TASKS = {  # keys that are for some tasks only, by these tasks, with what they are about
    ("labels",): ("labelled texts", ("data.pair", "data.label", "data.metric")),
    ("text",): ("language models", ("data.train_tokens", "data.test_bytes")),
    ("domains",): ("images of several domains", ("data.held_out",)),
    ("images",): ("images", ("data.shifts",)),
    ("vision-language",): ("pictures with questions", ("data.pictures", "data.tests", "sparse.parts", "stages")),
    ("text", "labels"): ("texts", ("losses.word_noise",)),
    IMAGES: ("images", ("training.augment", "attack.budgets")),
    (*IMAGES, "labels"): ("classifiers", ("attack.certify",)),
}

TEXT_METHODS = ("words", "typos")  # of robust training
ROBUST_STEPS = 5
EXAMPLE = "smooth{method=pgd,budget=0.01}"  # of a router choice, in errors
ROBUST_KEYS = {  # keys that not every method of robust training has
    "pgd": ("steps", "step", "routing", "routing_term"),
    "fast": ("step", "routing", "routing_term"),
    "free": ("steps", "step"),
}

Schedule = Callable[[int], float]  # from a number of finished steps

Count = Annotated[int, Limits(0, 10**12, "a whole number from 0 to 10^12")]
Positive = Annotated[int, Limits(1, 10**12, "a whole number from 1 to 10^12")]
Length = Annotated[int, Limits(1, 2**24, "a whole number from 1 to 16,777,216")]
Pixels = Annotated[int, Limits(1, 2**13, "a whole number from 1 to 8,192")]
Restarts = Annotated[int, Limits(1, 1000, "a whole number from 1 to 1,000")]
Samples = Annotated[int, Limits(1, 4096, "a whole number from 1 to 4,096")]
Votes = Annotated[int, Limits(10, 10**7, "a whole number from 10 to 10,000,000")]  # fewer certify nothing
Steps = Annotated[int, Limits(1, 100_000, "a whole number from 1 to 100,000")]
Smoothing = Annotated[float, Limits(0, 0.999, "a number of at least 0 and below 1")]
Severity = Annotated[int, Limits(1, 5, "a whole number from 1 to 5")]
Above0 = Annotated[float, Limits(1e-6, 1e12, "a number above 0 and at most 10^12")]
Area = Annotated[float, Limits(0.001, 1, "a number from 0.001 to 1")]
Padding = Annotated[int, Limits(0, 1024, "a whole number from 0 to 1,024")]
Magnitude = Annotated[float, Limits(0, 10, "a number from 0 to 10")]
Operations = Annotated[int, Limits(1, 10, "a whole number from 1 to 10")]
Alpha = Annotated[float, Limits(0, 4, "a number from 0 to 4")]


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
    parts: list[Literal["vision", "connector", "language"]] | None = None  # of a vision-language model; no value: language
    init: Literal["copy", "random"] | None = None  # no value: "copy" if the dense model is a checkpoint, else "random"

    def __post_init__(self) -> None:
        if self.k is not None and self.experts is not None and self.k > self.experts:
            raise ValueError(f"k is {self.k}; it must be between 1 and the number of experts, {self.experts}.")


@dataclass(frozen=True, kw_only=True)
class LossesPart(Losses):
    """The coefficients of the losses that are added in training, and settings of two of them."""

    balance: Amount = 0.01

    def __post_init__(self) -> None:
        """Keys that belong together may be in a sweep or in braces: `Losses` checks them for each router."""


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
    score_validation: bool = False  # for texts: score the validation text too, clean and attacked
    size: Pixels | None = None  # pixels per side that images from a folder are scaled to
    train_tokens: Positive | None = None  # use only the first tokens of the training text
    held_out: str | None = None  # for domains: the one that is not trained on; no value: each in turn, in a comparison
    shifts: list[str] = field(default_factory=list)  # for images: folders of shifted test sets, and "corruptions"
    pictures: Positive | None = None  # for scenes: how many are drawn for training; no value: 8,000
    tests: list[str] = field(default_factory=list)  # for vision-language: LAYOUT=PATH of further questions to score

    def __post_init__(self) -> None:
        for key, names in (("source", [self.source]), ("shifts", self.shifts)):
            if not all(name.strip() for name in names):
                raise ValueError(f"data.{key} has an empty name, which would be the current folder; write a name or a path.")

    def columns(self) -> dict[str, Any]:
        """Return the columns of a table of labelled texts, as `data.text_set` takes them."""
        return {"text": self.text, "pair": self.pair, "label": self.label}


@dataclass(frozen=True, kw_only=True)
class AugmentPart:
    """How training images are changed at random. By default they are not."""

    crop: Area | None = None  # a random box with at least this share of the image, scaled to the image's size
    pad: Padding = 0  # black pixels around an image, of which a random part of the image's size is used
    flip: bool = False  # every other image is mirrored, left to right
    randaugment: Magnitude = 0.0  # magnitude of RandAugment's operations
    operations: Operations = 2  # how many operations RandAugment draws for an image; each is applied to every other image
    erase: Share = 0.0  # share of images in which a random box is replaced by noise
    mixup: Alpha = 0.0  # images are averaged in pairs, with a share from Beta(mixup, mixup)
    cutmix: Alpha = 0.0  # a box of an image is replaced by that of another; its area is from Beta(cutmix, cutmix)

    def __post_init__(self) -> None:
        if self.crop is not None and self.pad:
            raise ValueError("give one of training.augment.crop and training.augment.pad: both are random crops.")

    @property
    def in_use(self) -> bool:
        return self != AugmentPart(operations=self.operations)

    @property
    def only_moves_pixels(self) -> bool:
        """Whether no value of a pixel is computed: images are only shifted and mirrored."""
        return self.crop is None and not any((self.randaugment, self.erase, self.mixup, self.cutmix))


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
    validate_every: Positive | None = None  # steps between evaluations on held-out data, which log and page show
    snapshots: Positive | list[Count] = 5  # of the routing: how many, evenly spaced, or after which steps (0: at the start)
    interference: bool = False  # snapshots also have the gradient interference of experts, for a forward and a backward each
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
        if self.snapshots == []:
            raise ValueError("training.snapshots is empty; name at least one step, or give a number of snapshots.")

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

    def snapshot_steps(self, steps: int) -> list[int]:
        """Return the steps after which snapshots are taken, ascending; a number of them includes the last step."""
        if isinstance(self.snapshots, int):
            count = min(self.snapshots, steps)
            return sorted({round(steps * part / count) for part in range(1, count + 1)})
        if max(self.snapshots) > steps:
            raise ValueError(
                f"training.snapshots has step {max(self.snapshots)}, and the run ends after step {steps}; name earlier "
                "steps, or give a number of snapshots."
            )
        return sorted(set(self.snapshots))

    def validates(self, step: int, steps: int) -> bool:
        """Return whether the model is evaluated on held-out data after this step."""
        is_due = self.validate_every is not None and step % self.validate_every == 0
        return is_due or (self.keep == "best" and self.saves(step, steps))

    @property
    def needs_validation(self) -> bool:
        """Whether a run evaluates on held-out data at all."""
        return self.validate_every is not None or self.keep == "best"


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """A stage before the experts; what it leaves out is as in `training`."""

    steps: Positive
    batch: Positive
    learning_rate: Amount
    warmup: Count = 0

    def training(self, last: TrainingPart) -> TrainingPart:
        """Return how the stage is trained; `last` is how the experts are."""
        own: dict[str, Any] = {**asdict(self), "epochs": None, "accumulate": 1}
        return replace(last, **own, validate_every=None, keep="last", best_by="loss", snapshots=1, interference=False)


@dataclass(frozen=True, kw_only=True)
class StagesPart:
    """What is trained before the experts, in this order, and nothing else meanwhile (`stages`). No value: it is not."""

    vision: StagePart | None = None  # the vision tower: what is in each cell of a drawn scene
    language: StagePart | None = None  # the language model: the texts, without pictures
    captions: StagePart | None = None  # the connector and the language model: what is in each cell, in words
    connector: StagePart | None = None  # the connector: the answers


@dataclass(frozen=True, kw_only=True)
class RobustPart:
    """Robust training: a step also trains on a perturbed view of its batch (`robust_step`). By default it does not.

    The perturbation is of pixels, with l_inf and values between 0 and 1, or of the embeddings of tokens, with l2 relative to
    the length of each embedding. "words" and "typos" attack the training texts once, before the training.
    """

    method: Literal["none", "pgd", "fast", "free", "noise", "words", "typos"] = "none"
    # of a pixel or, relative, of an embedding; of "noise", its standard deviation; of words, the share that is changed
    budget: Above0 | None = None
    steps: Steps | None = None  # of "pgd"; of "free", how many steps in a row use the same batch; no value: 5
    step: Above0 | None = None  # size of a step; no value: 2.5 budget / steps, of "fast" 1.25 budget, of "free" the budget
    mix: Share = 0.5  # weight of the loss of the perturbed view; the clean batch has the rest
    routing: Amount = 0.0  # weight of the routing term that "pgd" and "fast" maximise beside the loss
    routing_term: Literal["leaving", "balance"] = "leaving"  # the gates that leave the clean experts, or the balance loss
    consistency: Amount | None = None  # weight of that loss of the gates; no value: 0.1 for words and typos, else 0

    def __post_init__(self) -> None:
        given = {field.name for field in fields(self) if getattr(self, field.name) != field.default} - {"method"}
        allowed = {"budget", "mix", "consistency", *ROBUST_KEYS.get(self.method, ())}
        if self.method == "none":
            allowed = set()
        elif self.budget is None:
            raise ValueError(f"robust.budget is missing: robust.method {self.method} needs one.")
        if wrong := sorted(given - allowed):
            raise ValueError(
                f"robust.{wrong[0]} has no effect with robust.method {self.method}; remove it, or set it to null."
            )
        if self.method != "none" and not (self.mix or self.weight_of_consistency):
            raise ValueError("robust.mix is 0, so the perturbed view changes nothing; give it a weight, or a consistency.")
        if self.method in TEXT_METHODS and self.budget is not None and self.budget > 1:
            raise ValueError(f"robust.budget is {self.budget:g}; for {self.method} it is a share of words, at most 1.")

    @property
    def replays(self) -> int:
        """How many steps in a row use the same batch."""
        return self.inner_steps if self.method == "free" else 1

    @property
    def inner_steps(self) -> int:
        return 1 if self.method == "fast" else self.steps or ROBUST_STEPS

    @property
    def relative_step(self) -> float:
        """The size of a step, as a share of the budget."""
        assert self.budget is not None
        usual = {"fast": 1.25, "free": 1.0}.get(self.method, 2.5 / self.inner_steps)
        return usual if self.step is None else self.step / self.budget

    @property
    def weight_of_consistency(self) -> float:
        return self.consistency if self.consistency is not None else 0.1 if self.method in TEXT_METHODS else 0.0

    @property
    def replaces_batch(self) -> bool:
        """Whether a step reads the noisy batch only."""
        return self.method == "noise" and self.mix == 1 and not self.weight_of_consistency

    @property
    def compares_gates(self) -> bool:
        """Whether the gates of the clean view are compared with those of the perturbed one."""
        return bool(self.weight_of_consistency or (self.routing and self.routing_term == "leaving"))


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
    # Classifiers: also the error of a majority vote under noise of this standard deviation, certified within an l2 distance
    # of the same size.
    certify: Above0 | None = None
    certify_samples: Votes = 1000  # draws of the vote
    certify_examples: Positive = 100  # number of test examples, evenly spaced

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
    robust: RobustPart = RobustPart()
    stages: StagesPart = StagesPart()
    task: Literal["text", "labels", "images", "domains", "vision-language"] = "text"
    data: DataPart = DataPart()
    attack: AttackPart = AttackPart()
    metrics: list[str] = field(default_factory=list)  # further metrics beside the main one, by name

    def __post_init__(self) -> None:
        if self.model.family is not None and self.sparse.experts is None:
            raise ValueError("sparse.experts is missing.")
        for tasks, (what, keys) in OF_TASKS.items():
            for key in keys if self.task not in tasks else ():
                if attrgetter(key)(self) not in (None, 0.0, [], AugmentPart(), StagesPart()):
                    raise ValueError(f"{key} is for {what} (task: {tasks[0]}), and this task is {self.task}.")
        if self.task in IMAGES and self.robust.method in TEXT_METHODS:
            raise ValueError(f"robust.method is {self.robust.method}, which is for texts, and this task is {self.task}.")
        if self.task == "vision-language" and self.robust.method != "none":
            raise ValueError(
                f"robust.method is {self.robust.method}, and this task is {self.task}, which has no robust training."
            )
        if self.training.compile and self.robust.method != "none":
            raise ValueError(
                f"training.compile compiles a step without robust training, and robust.method is {self.robust.method}: set "
                "one of the two to its default. A GPU replays such a step as a CUDA graph in any case."
            )
        if self.attack.name is not None and self.task == "vision-language":
            raise ValueError("attack.name: this task is vision-language, whose pictures are corrupted; leave it out.")
        if self.attack.name is not None:
            attack = find_attack(self.attack.name, "images" if self.task in IMAGES else "text")
            if attack.reads_model:
                why = "a comparison attacks the same texts for every router, and this attack makes others for every model"
                raise ValueError(f"attack.name: {why}; run `holdfast attack MODEL {attack.name}` after the training.")
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


def changed_keys(recipe: Mapping[str, Any], kind: type = Recipe) -> dict[str, Any]:
    """Return what differs from the defaults in the values of a recipe, as `Recipe.describe` returns them."""
    kinds = get_type_hints(kind)
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in fields(kind)
    }
    found: dict[str, Any] = {}
    for name, value in recipe.items():
        if is_dataclass(part := kinds.get(name)) and isinstance(value, Mapping):
            inside = changed_keys(value, part)  # type: ignore[arg-type]
            found |= {name: inside} if inside else {}
        elif name not in defaults or value != defaults[name]:
            found[name] = value
    return found


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
    values = from_yaml(text, name)
    changes, about = changes or {}, values.get("about")
    own = [f"{key}={value}" for key, value in changes.items() if key.startswith("model.") and value != value_at(values, key)]
    values = _changed(values, changes)
    if own and isinstance(about, str):  # which describes the model without the changes
        of = changes.get("model.checkpoint")
        values["about"] = f"{about}, changed by {', '.join(own)}" if of is None else f"models from {of}"
    try:
        return from_mapping(Recipe, values)
    except ValueError as mistake:
        raise ValueError(f"recipe {name}: {mistake}") from None


def change_recipe(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return a recipe with `changes` such as {"training.steps": 50}, checked as `load_recipe` checks them."""
    return from_mapping(Recipe, _changed(recipe.describe(), changes))


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


def value_at(described: Mapping[str, Any], key: str) -> Any:
    """Return the value at a path such as `training.steps`, or `layers.-1` for the last of a list; None if there is none."""
    value: Any = described
    for part in key.split("."):
        if isinstance(value, list) and value:
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


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
    """One router of a comparison: its name, its layers, its options, its number of experts per token and its training.

    `router` is the name without options; for a name with layers, such as `ac[mix=2]@1,3|smooth`, all of it in one spelling.
    """

    name: str  # the router as the user wrote it; shown in tables
    router: str
    options: Mapping[str, Any] = field(default_factory=dict)
    k: int | None = None  # experts per token; None: as in the recipe
    training: Mapping[str, Any] = field(default_factory=dict)  # changes of the recipe, such as {"robust.method": "pgd"}

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe that this router is trained with."""
        return change_recipe(recipe, self.training) if self.training else recipe

    def with_k(self, k: int, name: str) -> "RouterChoice":
        """Return the same router under another name, with k experts per token in every layer."""
        router = self.router
        if has_layers(router):
            router = written_name([replace(one, k=None) for one in resolve_layers(router)])
        return replace(self, name=name, router=router, k=k)

    def describe(self) -> dict[str, Any]:
        """Return the values that two results of the same router must share, and the checksums of its plugins if any."""
        plugins = plugins_of(routers=preset_names(self.router))
        described = {key: value for key, value in asdict(self).items() if key != "training" or value}
        return {**described, **({"plugins": plugins} if plugins else {})}


def require_different(choices: Sequence[RouterChoice], recipe: Recipe) -> None:
    """Raise ValueError if two choices are the same router, trained in the same way, in two spellings."""
    for one, other in combinations(choices, 2):
        routers = [(each.router, each.options, each.k) for each in (one, other)]
        if routers[0] == routers[1] and _same_training(one, other, recipe):
            raise ValueError(f"{one.name} and {other.name} are the same router with the same training: name one.")


def _same_training(one: RouterChoice, other: RouterChoice, recipe: Recipe) -> bool:
    try:
        return one.training == other.training or one.recipe(recipe) == other.recipe(recipe)
    except ValueError:  # a wrong training is refused with the name of its choice when its cell is checked
        return False


def parse_routers(written: str) -> list[RouterChoice]:
    """Return the routers of a comma-separated list; raise ValueError if a name or an option is wrong."""
    return [parse_router(part) for part in split_routers(written)]


def parse_router(written: str) -> RouterChoice:
    """Return the router choice for one router name, such as `similarity[tau=2]` or `smooth{method=pgd,budget=0.01}`."""
    router, braces = split_braces(written)
    training = _training_changes(braces, written) if braces else {}
    routers = resolve_layers(router)
    if has_layers(router):
        return RouterChoice(written, written_name(routers), training=training)
    return RouterChoice(written, routers[0].router, routers[0].options, routers[0].k, training)


def _training_changes(braces: str, written: str) -> dict[str, Any]:
    """Return what the braces of a router choice change in a recipe."""
    inside = braces[1:-1]
    if not braces.endswith("}") or not inside.strip() or set(inside) & set("{}"):
        raise ValueError(f"{written!r} has braces that cannot be read: write them once, at the end, as in {EXAMPLE}.")
    names = {each.name: f"robust.{each.name}" for each in fields(RobustPart)}
    names |= {f"losses.{each.name}": f"losses.{each.name}" for each in fields(LossesPart)}
    found: dict[str, Any] = {}
    for pair in inside.split(","):
        name, sign, value = (text.strip() for text in pair.partition("="))
        if not sign or not value:
            raise ValueError(f"{pair.strip()!r} in {written!r} sets no value; write key=value, as in {EXAMPLE}.")
        if name not in names:
            raise ValueError(f"{written!r}: {unknown_name('training setting', name, names)}")
        if names[name] in found:
            raise ValueError(f"{written!r} sets {name} twice.")
        found[names[name]] = value if names[name] == "robust.method" else read_value(value)
    return found

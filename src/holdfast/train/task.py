"""What a model learns and how it is evaluated: one interface for texts, labelled texts, images, and pictures with questions.

`text_task`, `label_task`, `image_task` and `vision_language_task` implement it.

An attack of `holdfast attack` returns an `AttackTable`. Attacks on routers work for every task (`route_attacks`); the others
are defined with their tasks.
"""

import copy
import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from holdfast.attacks import AttackWarning
from holdfast.data import Corpus, ExampleOrder, HubTokenizer, ImageSet, Order, PixelScaling, QuestionSet, TextSet, Tokenizer
from holdfast.hub import has_routers, trace
from holdfast.hub.tracing import require_known_tokens
from holdfast.metrics import RoutingReport, boundary_of, describe_metrics
from holdfast.metrics.token_routes import View
from holdfast.routing import Router
from holdfast.train.recipe import Recipe

Inputs = dict[str, Tensor]  # of a model's forward
ATTACKED = "attacked_"  # begins the names of the inputs of the attacked view of a batch, which only a training step reads
AttackTable = dict[str, Any]  # "title", "columns", "rows" to print; "flags" and "summary" to store


# From an order and places in it to the inputs there. It may have a method `on(device)`: the same with inputs on the device.
Fetch = Callable[[ExampleOrder, Sequence[int]], Inputs]


@final
@dataclass(frozen=True)
class Measure:
    """The metric that compares routers. In a name such as "error, %" the unit follows the comma."""

    name: str
    long: str  # the metric in a sentence
    attack: str  # the attack in the same sentence
    better: Literal["lower", "higher"] = "lower"

    @property
    def noun(self) -> str:
        return self.name.partition(",")[0].strip()

    @property
    def unit(self) -> str:
        return self.name.partition(",")[2].strip()

    @property
    def points(self) -> str:
        """The unit of a difference: "by 3%" could be read as 3% of the old value."""
        return {"": "", "%": " percentage points"}.get(self.unit, f" {self.unit}")

    @property
    def sentence(self) -> str:
        return f"{self.long[:1].upper()}{self.long[1:]}; {self.better} is better."

    @property
    def digits(self) -> int:
        """How many decimals to show: F1 and correlations are at most 1, errors and perplexities are not."""
        return 2 if self.better == "lower" else 4


@final
class Examples(Dataset[Inputs]):
    """The examples of all steps in order, the same for every router. A batch is fetched at once, as one `Inputs`."""

    def __init__(self, order: ExampleOrder, fetch: Fetch, steps: int) -> None:
        self.order, self.fetch, self.steps = order, fetch, steps

    def on(self, device: torch.device) -> "Examples":
        """Return the same examples with inputs on the device if possible, so that a step copies only their numbers."""
        move = getattr(self.fetch, "on", None)
        return self if move is None or device.type == "cpu" else Examples(self.order, move(device), self.steps)

    def __len__(self) -> int:
        return self.steps * self.order.size

    def __getitems__(self, places: Sequence[int]) -> Inputs:
        return self.fetch(self.order, places)

    def hash(self, step: int) -> str:
        """Return a hash of the examples at the place of this step: equal hashes mean equal examples."""
        digest = hashlib.sha256()
        places = range(step * self.order.size, (step + 1) * self.order.size)
        for name, tensor in sorted(clean_inputs(self.__getitems__(places)).items()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


@final
class HeldOut(Dataset[Inputs]):
    """The examples of these numbers, in order. A batch is fetched at once, as one `Inputs`."""

    def __init__(self, numbers: Sequence[int], fetch: Callable[[Tensor], Inputs]) -> None:
        self.numbers, self.fetch = numbers, fetch

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitems__(self, places: Sequence[int]) -> Inputs:
        return self.fetch(torch.tensor([self.numbers[place] for place in places]))


@final
@dataclass(frozen=True)
class NoisyExample:
    """A test example to whose numbers noise can be added: its pixels, or the embeddings of its tokens.

    classify    from copies of the inputs (n, ...) to logits (n, classes)
    batch       how many copies fit into a forward
    """

    number: int  # of the example in the test set
    label: int
    inputs: Tensor  # (...)
    classify: Callable[[Tensor], Tensor]
    batch: int


@final
@dataclass(frozen=True)
class Stage:
    """What is trained before routers are put into the model (`stages`)."""

    name: str
    task: "Task"  # whose examples and steps are those of the stage
    prepare: Callable[[Any], AbstractContextManager[None]]  # inside it, the model learns what the stage is for


class Task(ABC):
    """The data of a recipe for training and testing, and how a trained model is evaluated on them (abstract)."""

    recipe: Recipe
    source: Corpus | TextSet | ImageSet | QuestionSet  # the data of the task, in splits
    scaling: PixelScaling | None = None  # how the model reads pixels; None: it reads texts
    noise_unit: ClassVar[str] = ""  # of the numbers that noise is added to, in a sentence
    # Why attacks on the pixels of images are refused, if they are.
    not_images: ClassVar[str] = "this model reads texts: use words, typos or routes, or pgd with --on embeddings"
    not_texts: ClassVar[str] = "this model's task is images: use fgsm, pgd, spsa or corruptions"  # the same of words
    faster: ClassVar[str] = "To make it shorter, set training.steps or training.batch to less, or use a smaller model."

    @property
    @abstractmethod
    def measure(self) -> Measure:
        """Return the metric of this task and the attack it is measured under."""

    @property
    def other_metrics(self) -> list[dict[str, str]]:
        """The names, descriptions and directions of the metrics beside the measure."""
        return describe_metrics(self.recipe.metrics)

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what a result records of its data ("data") and of the attack ("attack"): part of a run's identity."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what is saved with a trained model so that it can be evaluated again, as JSON for `train.saved_model`."""

    @abstractmethod
    def initial_model(self) -> Any:
        """Return the model of the recipe with the inputs and outputs of this task, before routers are put into it.

        It is a new dense model, or the recipe's checkpoint, which may have experts (`start.start_model`).
        """

    def with_recipe(self, recipe: Recipe) -> Self:
        """Return a task with the same data and another recipe, which must have the same data and inputs."""
        other = copy.copy(self)
        other.recipe = recipe
        other.__dict__.pop("steps", None)  # computed from the recipe
        return other

    def for_seed(self, seed: int) -> Self:
        """Return the task of a run with this seed: itself, unless the splits of its data depend on the seed."""
        return self

    def open_choices(self) -> dict[str, list[Any]]:
        """Return keys that the recipe leaves open, with their possible values: a further axis of the cells of a comparison.

        One run needs a value for each of them, such as the domain that is held out.
        """
        return {}

    def stages(self) -> Sequence[Stage]:
        """Return what is trained before routers are put into the model, in order; for most tasks nothing."""
        return ()

    def starting_from(self, weights: Mapping[str, Tensor]) -> Self:
        """Return the task whose initial model has these weights, which its stages have trained."""
        other = copy.copy(self)
        other.start = weights
        return other

    start: Mapping[str, Tensor] | None = None  # weights of the initial model; None: as the recipe says

    @abstractmethod
    def examples(self, seed: int) -> Examples:
        """Return the training examples of all steps, in the order that the seed gives."""

    def _examples(
        self, count: int, seed: int, read: Callable[[Tensor], Inputs], attacked: Callable[[Tensor], Inputs] | None = None
    ) -> Examples:
        """Return `count` training examples in the order of a seed, read by their numbers, with an attacked view if given."""
        training = self.recipe.training

        def fetch(order: ExampleOrder, places: Sequence[int]) -> Inputs:
            numbers = order.at(places)
            view = {} if attacked is None else attacked(numbers)
            return {**read(numbers), **{f"{ATTACKED}{name}": value for name, value in view.items()}}

        return Examples(Order(count, training.batch * training.accumulate, seed), fetch, training.step_count(count))

    @abstractmethod
    def validation(self) -> Dataset[Inputs]:
        """Return the held-out examples that select the best checkpoint."""

    def held_out_figure(self, model: Any) -> float | None:
        """Return the error of a model in evaluation mode on the held-out examples; lower is better, whatever the measure.

        None: it follows from their loss, as the perplexity of a text.
        """
        return None

    @property
    def steps(self) -> int:
        """The number of training steps: that of the recipe, or that of its epochs of the training examples."""
        given = self.recipe.training.steps
        return self.examples(0).steps if given is None else given  # without reading the data, if possible

    def size_line(self, model: Any) -> str | None:
        """Return what decides how long a step takes, in one line that is shown before training; None for nothing."""
        return None

    def size_warning(self, model: Any) -> str | None:
        """Return a warning about the size of the inputs, with a remedy; None for nothing."""
        return None

    @abstractmethod
    def score(self, model: Any) -> dict[str, Any]:
        """Return {"clean": ..., "attacked": ..., "trials": {...}}, each with its "figure"; the first two with "routing"."""

    def inputs_to_score(self) -> int | None:
        """Return how many inputs `score` runs the model on, or None if that is not known beforehand."""
        return None

    def token_counts(self) -> Tensor | None:
        """Return (vocabulary,): how often each token id occurs in the training data; None if there are no token ids."""
        return None

    def noisy_examples(self, model: Any, count: int) -> tuple[list[int], Callable[[int], NoisyExample]]:
        """Return the numbers of so many test examples, evenly spaced, and the function from a number to the example.

        Raise ValueError if the model does not classify.
        """
        self.require_classifier(model)
        raise NotImplementedError("a task of classifiers has a function of its own.")

    def require_classifier(self, model: Any) -> None:
        """Raise ValueError if predictions of this model cannot be certified."""
        raise ValueError("this model predicts tokens; predictions are certified for models that classify images or texts.")

    tokenizer: Tokenizer | None = None

    def preprocessor(self) -> Any:
        """Return what transformers saves beside a model to read its inputs; None if it has no class for it."""
        return self.tokenizer.tokenizer if isinstance(self.tokenizer, HubTokenizer) else None

    audit_tokenizer: Any = None  # of the texts of `audit_inputs`

    @abstractmethod
    def audit_inputs(self, tokens: int) -> Iterator[Any]:
        """Yield test texts of about so many tokens, or batches of test images, for audits and certificates."""

    @abstractmethod
    def probe(self) -> Inputs:
        """Return a few test examples, the same for every router, on which snapshots of the routing are taken."""

    def interference_batch(self, seed: int) -> Inputs | None:
        """Return the first training batch, on which snapshots measure the gradient interference; None if they do not."""
        training = self.recipe.training
        return clean_inputs(self.examples(seed).__getitems__(range(training.batch))) if training.interference else None

    @abstractmethod
    def view(self, model: Any) -> View:
        """Return some test examples in readable form, with the routes of their tokens."""


def require_trainable(task: Task, seed: int) -> None:
    """Raise ValueError if the data are not sufficient for training; called before anything is written."""
    training = task.recipe.training
    if task.steps * training.batch * training.accumulate >= 2**63:
        raise ValueError(
            f"training.steps or training.epochs, with training.batch={training.batch:,} and training.accumulate="
            f"{training.accumulate:,}, are more than 2^63 examples; make them smaller."
        )
    task.examples(seed)
    task.probe()
    training.rate_factor(task.steps)
    training.snapshot_steps(task.steps)
    if training.needs_validation:
        task.validation()
    if training.label_smoothing and task.examples(seed).__getitems__([0])["labels"].is_floating_point():
        raise ValueError("label smoothing is for classes, and these labels are numbers: set training.label_smoothing to 0.")
    if training.best_by == "figure" and task.recipe.task in ("text", "vision-language"):
        raise ValueError("the figure of this task follows from its loss; leave training.best_by out.")


def evenly_spaced(count: int, wanted: int) -> list[int]:
    """Return `wanted` numbers below `count`: folders are sorted by class, so the first images would be of one class only."""
    wanted = min(wanted, count)
    return [place * count // wanted for place in range(wanted)]


def clean_inputs(batch: Inputs) -> Inputs:
    """Return the inputs of a batch without those of its attacked view."""
    return {name: value for name, value in batch.items() if not name.startswith(ATTACKED)}


def forward(model: Any, inputs: Inputs) -> Any:
    """Return the model's outputs for inputs on any device, without a KV cache."""
    options = {}
    if "input_ids" in inputs:
        require_known_tokens(model, inputs["input_ids"])
        options = {"use_cache": False}
    return model(**{name: tensor.to(model.device) for name, tensor in inputs.items()}, **options)


@contextmanager
def evaluating(model: Any, *, routing: bool = True) -> Iterator[dict[str, Any]]:
    """Inside the `with`, the model is in evaluation mode.

    Yield a dict that after the `with` has the metrics of the model's routers under "routing"; empty if it is dense, or
    without `routing`.
    """
    was_training = model.training
    model.eval()
    measuring: AbstractContextManager[dict[str, Any]] = routing_metrics(model) if routing else nullcontext({})
    with measuring as measured:
        yield measured
    model.train(was_training)


@contextmanager
def routing_metrics(model: Any) -> Iterator[dict[str, Any]]:
    """Yield a dict that after the `with` has the metrics of the model's routers under "routing"; empty if it is dense."""
    found: dict[str, Any] = {}
    if not has_routers(model):
        yield found
        return
    routers = [module for module in model.modules() if isinstance(module, Router)]
    report = RoutingReport(boundaries={layer: boundary_of(router) for layer, router in enumerate(routers)})
    with trace(model, each=report.each) as routes:
        yield found
    report.names = routes.names
    found["routing"] = report.result()


def without_attack_warnings() -> AbstractContextManager[Any]:
    """Suppress the warnings of attacks inside the `with`: the same flags are stored with the result."""
    return warnings.catch_warnings(action="ignore", category=AttackWarning)

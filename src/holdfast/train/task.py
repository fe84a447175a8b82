"""What a model is to learn, and how it is tried: one interface for texts and pictures."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from holdfast.data import Order
from holdfast.hub.tracing import require_known
from holdfast.train.recipe import Recipe

Inputs = dict[str, Tensor]  # of a model's forward


@final
@dataclass(frozen=True)
class Measure:
    """The figure by which routers are compared; lower is always better."""

    name: str
    long: str  # in a sentence
    attack: str  # what it is under, in the same sentence


@final
class Examples(Dataset[Inputs]):
    """The examples of all steps, one after the other: the same for every router. Fetched by the batch, as one `Inputs`."""

    def __init__(self, order: Order, fetch: Callable[[Tensor], Inputs], steps: int) -> None:
        self.order, self.fetch, self.steps = order, fetch, steps

    def __len__(self) -> int:
        return self.steps * self.order.size

    def __getitems__(self, places: Sequence[int]) -> Inputs:
        return self.fetch(self.order.at(places))

    def hash(self, step: int) -> str:
        """Two steps with one hash see the same examples."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.fetch(self.order.numbers(step)).items()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


class Task(ABC):
    """The data of a recipe, cut as the recipe says, and the trials that a trained model undergoes (abstract)."""

    recipe: Recipe

    @property
    @abstractmethod
    def measure(self) -> Measure: ...

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a result records of its data ("data") and of the attack on it ("attack"): part of a run's identity."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What must be kept beside a trained model so that it can be tried again: JSON for `train.trained`."""

    @abstractmethod
    def dense(self) -> Any:
        """A fresh dense model of the recipe's family, with this task's inputs and outputs."""

    @abstractmethod
    def examples(self, seed: int) -> Examples: ...

    @abstractmethod
    def validation(self) -> Dataset[Inputs]:
        """Held-out examples, by which the best of several checkpoints is chosen."""

    @abstractmethod
    def score(self, model: Any) -> dict[str, Any]:
        """{"clean": ..., "attacked": ..., "trials": {...}}, each with its "figure"; the first two with their "routing"."""

    def inputs_to_score(self) -> int | None:
        """How many inputs `score` gives the model, where that is known beforehand."""
        return None

    @abstractmethod
    def probe(self) -> Inputs:
        """A few test examples, the same for every router, on which routes are watched."""

    @abstractmethod
    def view(self, model: Any) -> Mapping[str, Any]:
        """Some of them as people see them, with the expert that each of their tokens went to first."""


def forward(model: Any, inputs: Inputs) -> Any:
    """The model's outputs for inputs from anywhere; nothing is cached."""
    options = {}
    if "input_ids" in inputs:
        require_known(model, inputs["input_ids"])
        options = {"use_cache": False}
    return model(**{name: tensor.to(model.device) for name, tensor in inputs.items()}, **options)


@torch.no_grad()
def first_experts(routes: Any) -> list[Tensor]:
    """Of each layer (T,), on the CPU: the expert with the largest weight."""
    return [routing.experts[:, 0].cpu() for routing in routes]

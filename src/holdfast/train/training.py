"""Training: one model in a folder, resumable.

    build_model   a fresh model with a router; weights that two routers share start bit-identical
    train         examples in a fixed order, a log of JSON lines, snapshots and complete checkpoints: in the training loop
                  (`loop`), or on the Hugging Face Trainer for several ranks (`trainer_loop`), with the same numbers
    SingleRun     `holdfast train`: both of them in a folder, and the trained model with its task

An interrupted run resumes from its newest complete checkpoint and gives the same numbers.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.hub.replacements import SparseLayer
from holdfast.locking import locked, require_unlocked
from holdfast.planning.planning import CONFIG_ERRORS
from holdfast.routing import Router
from holdfast.train.label_smoothing import require_classes
from holdfast.train.loop import Guard, Log, Tick, train_in_loop
from holdfast.train.pace import Pace
from holdfast.train.preflight import explain_failed_forward, preflight
from holdfast.train.put_router import put_router, starts_with_copies
from holdfast.train.recipe import Recipe, RouterChoice
from holdfast.train.run_folder import claim, prepare, require_own
from holdfast.train.saved_model import make_task, save_trained
from holdfast.train.schedule import needs_validation, rate_factor
from holdfast.train.snapshots import experts_per_token
from holdfast.train.start import checkpoint_identity
from holdfast.train.task import Task
from holdfast.train.task_record import MODEL, TASK
from holdfast.train.trainer_loop import is_first_rank, processes, train_with_trainer
from holdfast.version import VERSION


class SingleRun:
    """Train a recipe with one router and one seed in a folder; the same run there is resumed if it was interrupted."""

    def __init__(self, recipe: Recipe, choice: RouterChoice, seed: int, folder: Path, *, data: Path | None = None) -> None:
        self.recipe, self.choice, self.seed, self.folder = recipe, choice, seed, folder
        self.task = make_task(recipe, data).for_seed(seed)
        for key, values in self.task.open_choices().items():
            raise ValueError(f"{key} is missing; for one run, set it to one of {', '.join(map(str, values))}.")
        require_own(folder, self.identity())

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for the folder to be this run's."""
        router = {"router": self.choice.describe(), "seed": self.seed}
        start = checkpoint_identity(self.recipe.model)
        same = {"recipe": self.recipe.describe(), **start, "data": self.task.describe()["data"]}
        same |= {"plugins": self.recipe.plugins()}
        return {"holdfast": VERSION, **router, **{key: value for key, value in same.items() if value}}

    def run(self, tick: Tick | None = None, report_to: tuple[str, ...] = ()) -> Log:
        """Train the model, save it in the folder and return the log."""
        if is_first_rank():
            require_unlocked(self.folder)
        preflight(self.task, [self.choice])
        model = build_model(self.task, self.choice.router, self.choice.options, seed=self.seed, k=self.choice.k)
        require_trainable(self.task, self.seed)
        place = self.folder / "training"
        options: dict[str, Any] = {"seed": self.seed, "k": experts_per_token(model), "report_to": report_to}
        if not is_first_rank():  # only the first rank writes, so only it holds the lock
            return train(model, self.task, place, tick=tick, **options)
        with locked(self.folder, wait=False) as lock:
            claim(self.folder, self.identity())
            prepare(self.folder, self.folder)
            log = train(model, self.task, place, tick=tick, guard=partial(lock.require, place), **options)
            lock.require(self.folder / MODEL, self.folder / TASK)
            save_trained(model, self.task, self.folder)
        return log


def build_model(task: Task, router: str, options: Mapping[str, Any], *, seed: int, k: int | None = None) -> Any:
    """Return the recipe's model with a router. Weights that two routers have in common start bit-identical."""
    torch.manual_seed(seed)
    model = task.initial_model()
    was_dense = put_router(model, task.recipe, RouterChoice(router, router, options, k))
    _use_token_counts(model, task)
    if was_dense:
        std = float(getattr(model.config, "initializer_range", 0.02))
        _draw_shared_weights(model, seed, std, experts=not starts_with_copies(task.recipe))
    return model


def _use_token_counts(model: nn.Module, task: Task) -> None:
    """Tell the routers that ask for it (`hash[balanced=true]`) how often each token id occurs in the training data."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    routers = [router for router in routers if any(part.declares.wants_token_counts for part in router.parts)]
    counts = task.token_counts() if routers else None
    if counts is not None:
        for router in routers:
            router.use_token_counts(counts)


@torch.no_grad()
def _draw_shared_weights(model: nn.Module, seed: int, std: float, *, experts: bool) -> None:
    """Draw scores, and `experts` too, each from the seed and its own name, whatever else the router draws."""
    in_routers = {
        id(parameter) for module in model.modules() if isinstance(module, Router) for parameter in module.parameters()
    }
    in_layers = {
        id(parameter) for module in model.modules() if isinstance(module, SparseLayer) for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        common_name = name.replace(".score.base.", ".score.")  # AC wraps the score it clusters
        generator = torch.Generator().manual_seed(_seed_of(common_name, seed))
        is_expert = id(parameter) in in_layers and (".experts." in name or ".shared." in name)
        if experts and is_expert and not name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        elif id(parameter) in in_routers and common_name.endswith("router.score.weight"):
            bound = 1 / math.sqrt(parameter.shape[1])
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "big")


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
    rate_factor(training, task.steps)
    if needs_validation(training):
        task.validation()
    if training.label_smoothing:
        require_classes(task.examples(seed).fetch(torch.tensor([0]))["labels"])
    if training.best_by == "figure" and not task.has_held_out_figure:
        raise ValueError("the figure of this task follows from its loss; leave training.best_by out.")


def train(
    model: Any,
    task: Task,
    folder: Path,
    *,
    seed: int,
    k: int | Sequence[int],
    tick: Tick | None = None,
    report_to: tuple[str, ...] = (),
    guard: Guard = lambda: None,
    trainer: bool = False,
) -> Log:
    """Train `model` in place and return the log. A run that was interrupted in `folder` is resumed, to the same numbers.

    k           experts per token in the snapshots, for all layers or one number for each
    report_to   "tensorboard", "wandb": callbacks of the Trainer
    guard       called before every write; raises if the folder now belongs to another process
    trainer     use the Hugging Face Trainer also where the training loop would do; several ranks and `report_to` need it
    """
    pace = Pace(task.steps, task.size_line(model), task.faster)

    def count(finished: int) -> None:
        if is_first_rank():
            pace(finished)
        if tick is not None:
            tick(finished)

    how: dict[str, Any] = {"seed": seed, "k": k, "tick": count, "guard": guard}
    try:
        if trainer or report_to or processes() > 1:
            return train_with_trainer(model, task, folder, report_to=report_to, **how)
        return train_in_loop(model, task, folder, **how)
    except CONFIG_ERRORS as problem:
        if isinstance(problem, torch.OutOfMemoryError) or "not enough memory" in str(problem):
            raise ValueError(
                f"memory ran out in training, with training.batch={task.recipe.training.batch}: set it to less; "
                "training.accumulate adds up several batches to one step."
            ) from problem
        explain_failed_forward(task, problem)
        raise
    finally:
        pace.stop()


def quiet() -> None:
    """Turn off the messages and progress bars of transformers, which Holdfast's commands replace by their own."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

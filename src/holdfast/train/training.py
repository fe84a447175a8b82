"""Training on the Hugging Face Trainer: one model in a folder, resumable, on one rank or several.

    build_model   a fresh model with a router; weights that two routers share start bit-identical
    train         the Trainer with examples in a fixed order, a log of JSON lines, snapshots and complete checkpoints
    SingleRun     `holdfast train`: both of them in a folder, and the trained model with its task

An interrupted run resumes from its newest complete checkpoint and gives the same numbers.
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import SequentialSampler

from holdfast.files import append, remove_folder, require_no_links, require_no_links_inside, write_atomically
from holdfast.hub import sparsify, trainer_callback
from holdfast.hub.folder_files import check_folder
from holdfast.hub.replacements import SparseLayer
from holdfast.layers.losses import Losses
from holdfast.locking import locked, require_unlocked
from holdfast.routing import Router
from holdfast.train.preflight import preflight
from holdfast.train.recipe import Recipe, RouterChoice, TrainingPart
from holdfast.train.run_folder import (
    KEPT_CHECKPOINTS,
    claim,
    delete_old_checkpoints,
    newest_complete,
    prepare,
    reading_checkpoint,
    require_own,
    step_of,
    write_checkpoint_manifest,
    writing_checkpoint,
)
from holdfast.train.saved_model import MODEL, TASK, make_task, save_trained
from holdfast.train.snapshots import damaged_snapshot, experts_per_token, snapshot_steps, take_snapshot
from holdfast.train.task import Inputs, Task
from holdfast.version import VERSION

LOGGED = ("step", "loss", "eval_loss", "grad_norm", "learning_rate")  # no times, so that two runs can be compared
TRAINER_LOGGERS = ("tensorboard", "wandb")  # callbacks of the Trainer

Tick = Callable[[int], None]  # called with the number of finished steps
Guard = Callable[[], None]  # called before every write; raises if the folder now belongs to another process

logger = logging.getLogger("holdfast")


class SingleRun:
    """Train a recipe with one router and one seed in a folder; the same run there is resumed if it was interrupted."""

    def __init__(self, recipe: Recipe, choice: RouterChoice, seed: int, folder: Path, *, data: Path | None = None) -> None:
        self.recipe, self.choice, self.seed, self.folder = recipe, choice, seed, folder
        self.task = make_task(recipe, data)
        require_own(folder, self.identity())

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for the folder to be this run's."""
        router = {"router": self.choice.describe(), "seed": self.seed}
        return {"holdfast": VERSION, **router, "recipe": self.recipe.describe(), "data": self.task.describe()["data"]}

    def run(self, tick: Tick | None = None, report_to: tuple[str, ...] = ()) -> list[dict[str, float]]:
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
    """Return a fresh model with a router. Weights that two routers have in common start bit-identical."""
    import transformers

    recipe = task.recipe
    if recipe.model.family not in transformers.CONFIG_MAPPING:
        raise ValueError(f"transformers has no model family {recipe.model.family!r}.")
    torch.manual_seed(seed)
    model = task.dense()
    sparse = recipe.sparse
    sparsify(
        model,
        experts=sparse.experts,
        k=sparse.k if k is None else k,
        hidden=sparse.hidden,
        shared=sparse.shared,
        layers=sparse.layers,
        init=sparse.init,
        router=router,
        losses=Losses(balance=sparse.balance),
        router_options=options,
    )
    _use_token_counts(model, task)
    if sparse.init == "random":
        _draw_shared_weights(model, seed, float(getattr(model.config, "initializer_range", 0.02)))
    return model


def _use_token_counts(model: nn.Module, task: Task) -> None:
    """Tell the routers that ask for it (`hash[balanced=true]`) how often each token id occurs in the training data."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    routers = [router for router in routers if any(part.wants_token_counts for part in router.parts)]
    counts = task.token_counts() if routers else None
    if counts is not None:
        for router in routers:
            router.use_token_counts(counts)


@torch.no_grad()
def _draw_shared_weights(model: nn.Module, seed: int, std: float) -> None:
    """Draw experts and scores again, each from the seed and its own name, whatever else the router draws."""
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
        if is_expert and not name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        elif id(parameter) in in_routers and common_name.endswith("router.score.weight"):
            bound = 1 / math.sqrt(parameter.shape[1])
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "big")


def require_trainable(task: Task, seed: int) -> None:
    """Raise ValueError if the data are not sufficient for training; called before anything is written."""
    task.examples(seed)
    task.probe()
    if task.recipe.training.keep == "best":
        task.validation()


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
) -> list[dict[str, float]]:
    """Train `model` in place and return the log. A run that was interrupted in `folder` is resumed, to the same numbers.

    k           experts per token in the snapshots, for all layers or one number for each
    report_to   "tensorboard", "wandb": callbacks of the Trainer
    guard       called before every write; raises if the folder now belongs to another process
    """
    import transformers

    training = task.recipe.training
    require_no_links_inside(folder, folder)
    trainer = _trainer_class(folder, guard)(
        model=model,
        args=_arguments(training, folder, seed, report_to),
        train_dataset=task.examples(seed),
        eval_dataset=task.validation() if training.keep == "best" else None,
        data_collator=_identity_collator,
        callbacks=[trainer_callback(), _callback(task.probe(), k, folder, tick, guard)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    checkpoint = _resume_point(folder, training.steps)
    if checkpoint is not None:
        check_folder(checkpoint)
    trainer.accelerator.wait_for_everyone()  # all ranks have read the folder before the first one writes
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if is_first_rank():
        guard()
        best = trainer.state.best_global_step
        delete_old_checkpoints(folder, training.steps, 0 if best else 1, best)
    return _log_lines(trainer.state.log_history)


def _resume_point(folder: Path, steps: int) -> Path | None:
    """Return the checkpoint to resume from, if any; warn if a newer one is damaged."""
    due = snapshot_steps(steps)

    def find_missing_snapshot(checkpoint: Path) -> str | None:
        return damaged_snapshot(folder / "snapshots", [step for step in due if step <= step_of(checkpoint)])

    checkpoint, reasons = newest_complete(folder, find_missing_snapshot)
    if reasons and is_first_rank():
        action = f"resuming from {checkpoint.name}" if checkpoint else "starting from the first step"
        logger.warning("%s; %s.", "; ".join(reasons), action)
    return checkpoint


def _arguments(training: TrainingPart, folder: Path, seed: int, report_to: tuple[str, ...]) -> Any:
    import transformers

    per_rank, remainder = divmod(training.batch, processes())
    if remainder:
        raise ValueError(
            f"cannot split a batch of {training.batch} evenly over {processes()} ranks; set training.batch to a multiple "
            f"of {processes()}."
        )
    best: dict[str, Any] = {}
    if training.keep == "best":
        best = {"eval_strategy": "steps", "eval_steps": training.save_every, "load_best_model_at_end": True}
        best |= {"metric_for_best_model": "eval_loss", "per_device_eval_batch_size": per_rank}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=training.steps,
        per_device_train_batch_size=per_rank,
        gradient_accumulation_steps=training.accumulate,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=training.warmup,
        weight_decay=training.weight_decay,
        max_grad_norm=training.clip,
        bf16=training.precision == "bf16",
        save_steps=training.save_every,
        save_total_limit=None,  # `delete_old_checkpoints` does it once the newest checkpoint has its manifest
        logging_steps=1,  # the Trainer's means over several steps would start again where a run is resumed
        remove_unused_columns=False,
        seed=seed,
        report_to=list(report_to),
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        **best,
    )
    # On several GPUs without torchrun, DataParallel would use a batch for each GPU and lose the state of its router copies.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def _identity_collator(batch: Inputs) -> Inputs:
    """Return the batch unchanged: a dataset here returns all examples of a batch at once."""
    return batch


def _trainer_class(folder: Path, guard: Guard) -> Any:
    """Return a Trainer that keeps the order of the examples and writes checkpoints with a manifest."""
    import transformers

    class InOrderTrainer(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def _save_checkpoint(self, *given: Any) -> None:
            checkpoint = folder / f"checkpoint-{self.state.global_step}"
            require_no_links(checkpoint, folder)
            if self.args.should_save:
                guard()
                remove_folder(checkpoint, folder)  # an incomplete one: its files must not mix with the new ones
            self.accelerator.wait_for_everyone()
            with writing_checkpoint(checkpoint, guard):
                super()._save_checkpoint(*given)
                self.accelerator.wait_for_everyone()  # every rank writes its random state
                if self.args.should_save:
                    guard()
                    write_checkpoint_manifest(checkpoint)
            if self.args.should_save:
                guard()
                delete_old_checkpoints(folder, self.state.global_step, KEPT_CHECKPOINTS, self.state.best_global_step)

        def _load_from_checkpoint(self, checkpoint: Any, *given: Any, **named: Any) -> None:
            with reading_checkpoint(checkpoint):
                super()._load_from_checkpoint(checkpoint, *given, **named)

        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            with reading_checkpoint(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)

        def _load_rng_state(self, checkpoint: Any) -> None:
            with reading_checkpoint(checkpoint):
                super()._load_rng_state(checkpoint)

    return InOrderTrainer


def _callback(probe: Inputs, k: int | Sequence[int], folder: Path, tick: Tick | None, guard: Guard) -> Any:
    """Return the callback that writes the log, takes the snapshots and reports the progress."""
    from transformers import TrainerCallback

    path = folder / "log.jsonl"

    class LogAndSnapshots(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.best_global_step:  # the path in the checkpoint may be relative to another working directory
                state.best_model_checkpoint = str(folder / f"checkpoint-{state.best_global_step}")
            if state.is_world_process_zero:  # a resumed run starts with the lines before it
                guard()
                write_atomically(path, "".join(json.dumps(line) + "\n" for line in _log_lines(state.log_history)))
            self.due = set(snapshot_steps(state.max_steps))
            if tick is not None:
                tick(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                guard()
                append(path, "".join(json.dumps(line) + "\n" for line in _log_lines(state.log_history[-1:])))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step in self.due and state.is_world_process_zero:
                guard()
                require_no_links(folder / "snapshots", folder)
                take_snapshot(model, probe, k, state.global_step, folder / "snapshots")
            if tick is not None:
                tick(state.global_step)

    return LogAndSnapshots()


def _log_lines(history: list[Mapping[str, Any]]) -> list[dict[str, float]]:
    logged = (line for line in history if "loss" in line or "eval_loss" in line)
    return [{key: line[key] for key in LOGGED if key in line} for line in logged]


def quiet() -> None:
    """Turn off the messages and progress bars of transformers, which Holdfast's commands replace by their own."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def processes() -> int:
    """Return the number of ranks, as torchrun and accelerate launch set it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Return whether this is rank 0, the only one that writes files and messages."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def own_process_group() -> Iterator[None]:
    """Destroy a process group that was started inside the `with`, also after an error.

    The Trainer starts one under torchrun and accelerate launch, and never destroys it. Threads of a group that still run
    while the interpreter ends can abort the process ("terminate called without an active exception"). A group that was
    started before is not destroyed.
    """
    from torch import distributed

    existed = distributed.is_available() and distributed.is_initialized()
    try:
        yield
    finally:
        if not existed and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()

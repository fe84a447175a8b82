"""How many processes train together, as torchrun and accelerate launch tell each of them.

Training on the Hugging Face Trainer: resumable, with a log of JSON lines; one process or many.

What transformers says while it works is not for those who asked for a comparison.

The model that a run starts from: the same weights for every router, wherever shapes agree.

One model trained in a folder, on one process or on many: resumable, with what is needed to try it again.
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import SequentialSampler

from holdfast.files import append, remove_folder, require_no_links, require_no_links_inside, write_whole
from holdfast.hub import sparsify, trainer_callback
from holdfast.hub.folder_files import check_folder
from holdfast.layers.losses import Losses
from holdfast.locking import locked, require_unlocked
from holdfast.routing import Router
from holdfast.train.recipe import Contender, Recipe, TrainingPart
from holdfast.train.run_folder import KEPT, claim, last_whole, prepare, require_own, resuming, rotate, seal, step_of, writing
from holdfast.train.saved_model import MODEL, TASK, make_task, save_trained
from holdfast.train.snapshots import damaged_snapshot, snapshot_steps, take_snapshot
from holdfast.train.task import Inputs, Task
from holdfast.version import VERSION


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Of several processes, the one that writes and speaks."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def own_process_group() -> Iterator[None]:
    """At the end, destroy the process group that was started inside the `with`, also after an error.

    The Trainer starts one under torchrun and accelerate launch, and leaves it to the script. A group's threads that still
    run while the interpreter ends can abort the process ("terminate called without an active exception"). A group that was
    there before belongs to whoever started it.
    """
    from torch import distributed

    theirs = distributed.is_available() and distributed.is_initialized()
    try:
        yield
    finally:
        if not theirs and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()


LOGGED = ("step", "loss", "eval_loss", "grad_norm", "learning_rate")  # no times, so that two runs can be compared

Tick = Callable[[int], None]  # called with the number of steps done
Guard = Callable[[], None]  # called before every write; raises where the folder is another process's by now

say = logging.getLogger("holdfast")


def train(
    model: Any,
    task: Task,
    folder: Path,
    *,
    seed: int,
    k: int,
    tick: Tick | None = None,
    report_to: tuple[str, ...] = (),
    guard: Guard = lambda: None,
) -> list[dict[str, float]]:
    """Train `model` in place; returns its log. What is found in `folder` is continued, to the same numbers.

    k           experts a token, for the snapshots of its routes
    report_to   "tensorboard", "wandb": the Trainer's own callbacks
    guard       called before every write; raises where the folder is another process's by now
    """
    import transformers

    how = task.recipe.training
    require_no_links_inside(folder, folder)
    trainer = _trainer_class(folder, guard)(
        model=model,
        args=_arguments(how, folder, seed, report_to),
        train_dataset=task.examples(seed),
        eval_dataset=task.validation() if how.keep == "best" else None,
        data_collator=_as_it_is,
        callbacks=[trainer_callback(), _callback(task.probe(), k, folder, tick, guard)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    begun = _begun(folder, how.steps)
    if begun is not None:
        check_folder(begun)
    trainer.accelerator.wait_for_everyone()  # all processes have looked before the first one writes
    trainer.train(resume_from_checkpoint=None if begun is None else str(begun))
    if is_first():
        guard()
        best = trainer.state.best_global_step
        rotate(folder, how.steps, 0 if best else 1, best)
    return _lines(trainer.state.log_history)


def _begun(folder: Path, steps: int) -> Path | None:
    """Return the checkpoint to go on from, if any; say so where a newer one is damaged."""
    due = snapshot_steps(steps)

    def without_snapshots(checkpoint: Path) -> str | None:
        return damaged_snapshot(folder / "snapshots", [step for step in due if step <= step_of(checkpoint)])

    begun, reasons = last_whole(folder, without_snapshots)
    if reasons and is_first():
        say.warning("%s; %s.", "; ".join(reasons), f"going on from {begun.name}" if begun else "beginning again")
    return begun


def require_trainable(task: Task, seed: int) -> None:
    """A ValueError where the data do not do for training; asked before anything is written."""
    task.examples(seed)
    task.probe()
    if task.recipe.training.keep == "best":
        task.validation()


def _arguments(how: TrainingPart, folder: Path, seed: int, report_to: tuple[str, ...]) -> Any:
    import transformers

    share, left = divmod(how.batch, processes())
    if left:
        raise ValueError(
            f"a batch of {how.batch} does not part among {processes()} processes; set training.batch to a multiple."
        )
    best: dict[str, Any] = {}
    if how.keep == "best":
        best = {"eval_strategy": "steps", "eval_steps": how.save_every, "load_best_model_at_end": True}
        best |= {"metric_for_best_model": "eval_loss", "per_device_eval_batch_size": share}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=how.steps,
        per_device_train_batch_size=share,
        gradient_accumulation_steps=how.accumulate,
        learning_rate=how.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=how.warmup,
        weight_decay=how.weight_decay,
        max_grad_norm=how.clip,
        bf16=how.precision == "bf16",
        save_steps=how.save_every,
        save_total_limit=None,  # `rotate` deletes old checkpoints, once the newest one has its manifest
        logging_steps=1,  # the Trainer's means over more steps would begin anew where a run is resumed
        remove_unused_columns=False,
        seed=seed,
        report_to=list(report_to),
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        **best,
    )
    # On several GPUs without torchrun, DataParallel would take a batch for each and lose what routers learn on the copies.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def _as_it_is(batch: Inputs) -> Inputs:
    """Examples are fetched by the batch."""
    return batch


def _trainer_class(folder: Path, guard: Guard) -> Any:
    import transformers

    class InOrderTrainer(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def _save_checkpoint(self, *given: Any) -> None:
            checkpoint = folder / f"checkpoint-{self.state.global_step}"
            require_no_links(checkpoint, folder)
            if self.args.should_save:
                guard()
                remove_folder(checkpoint, folder)  # one that was torn: its files must not mix with these
            self.accelerator.wait_for_everyone()
            with writing(checkpoint, guard):
                super()._save_checkpoint(*given)
                self.accelerator.wait_for_everyone()  # each process writes its random state
                if self.args.should_save:
                    guard()
                    seal(checkpoint)
            if self.args.should_save:
                guard()
                rotate(folder, self.state.global_step, KEPT, self.state.best_global_step)

        def _load_from_checkpoint(self, checkpoint: Any, *given: Any, **named: Any) -> None:
            with resuming(checkpoint):
                super()._load_from_checkpoint(checkpoint, *given, **named)

        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            with resuming(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)

        def _load_rng_state(self, checkpoint: Any) -> None:
            with resuming(checkpoint):
                super()._load_rng_state(checkpoint)

    return InOrderTrainer


def _callback(probe: Inputs, k: int, folder: Path, tick: Tick | None, guard: Guard) -> Any:
    """Writes the log, takes the snapshots, tells how far training has come."""
    from transformers import TrainerCallback

    path = folder / "log.jsonl"

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.best_global_step:  # not where the checkpoint says, which may be of another working directory
                state.best_model_checkpoint = str(folder / f"checkpoint-{state.best_global_step}")
            if state.is_world_process_zero:  # of a resumed run, what came before
                guard()
                write_whole(path, "".join(json.dumps(line) + "\n" for line in _lines(state.log_history)))
            self.due = set(snapshot_steps(state.max_steps))
            if tick is not None:
                tick(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                guard()
                append(path, "".join(json.dumps(line) + "\n" for line in _lines(state.log_history[-1:])))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step in self.due and state.is_world_process_zero:
                guard()
                require_no_links(folder / "snapshots", folder)
                take_snapshot(model, probe, k, state.global_step, folder / "snapshots")
            if tick is not None:
                tick(state.global_step)

    return Watch()


def _lines(history: list[Mapping[str, Any]]) -> list[dict[str, float]]:
    logged = (line for line in history if "loss" in line or "eval_loss" in line)
    return [{key: line[key] for key in LOGGED if key in line} for line in logged]


def quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def start(task: Task, router: str, options: Mapping[str, Any], *, seed: int, k: int | None = None) -> Any:
    """A fresh model with a router. What two routers have in common starts equal, to the bit."""
    import transformers

    recipe = task.recipe
    if recipe.model.family not in transformers.CONFIG_MAPPING:
        raise ValueError(f"transformers knows no model family {recipe.model.family!r}.")
    torch.manual_seed(seed)
    model = task.dense()
    sparse = recipe.sparse
    sparsify(
        model,
        experts=sparse.experts,
        k=sparse.k if k is None else k,
        hidden=sparse.hidden,
        layers=sparse.layers,
        init=sparse.init,
        router=router,
        losses=Losses(balance=sparse.balance),
        router_options=options,
    )
    if sparse.init == "random":
        _start_equal(model, seed, float(getattr(model.config, "initializer_range", 0.02)))
    return model


@torch.no_grad()
def _start_equal(model: nn.Module, seed: int, spread: float) -> None:
    """Draw experts and scores anew, each from its own name and the seed: what else a router draws cannot shift them."""
    in_routers = {
        id(parameter) for module in model.modules() if isinstance(module, Router) for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        plain = name.replace(".score.base.", ".score.")  # AC wraps the score it clusters
        generator = torch.Generator().manual_seed(_number(plain, seed))
        if ".experts." in name and not name.endswith("_bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
        elif id(parameter) in in_routers and plain.endswith("router.score.weight"):
            bound = 1 / math.sqrt(parameter.shape[1])
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)


def _number(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "big")


LOGGERS = ("tensorboard", "wandb")


class Single:
    """A recipe, a router and a seed. Interrupted, the same run goes on where it was."""

    def __init__(self, recipe: Recipe, contender: Contender, seed: int, folder: Path, *, data: Path | None = None) -> None:
        self.recipe, self.contender, self.seed, self.folder = recipe, contender, seed, folder
        self.task = make_task(recipe, data)
        require_own(folder, self.identity())

    def identity(self) -> dict[str, Any]:
        router = {"router": self.contender.describe(), "seed": self.seed}
        return {"holdfast": VERSION, **router, "recipe": self.recipe.describe(), "data": self.task.describe()["data"]}

    def run(self, tick: Tick | None = None, report_to: tuple[str, ...] = ()) -> list[dict[str, float]]:
        """The log; the trained model is saved in the folder."""
        if is_first():
            require_unlocked(self.folder)
        k = self.contender.k or self.recipe.sparse.k
        model = start(self.task, self.contender.router, self.contender.options, seed=self.seed, k=k)
        require_trainable(self.task, self.seed)
        place = self.folder / "training"
        how: dict[str, Any] = {"seed": self.seed, "k": k, "report_to": report_to}
        if not is_first():  # the processes of one job are one writer: the first one
            return train(model, self.task, place, tick=tick, **how)
        with locked(self.folder, wait=False) as lock:
            claim(self.folder, self.identity())
            prepare(self.folder, self.folder)
            log = train(model, self.task, place, tick=tick, guard=partial(lock.require, place), **how)
            lock.require(self.folder / MODEL, self.folder / TASK)
            save_trained(model, self.task, self.folder)
        return log

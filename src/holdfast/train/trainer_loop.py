"""Training on the Hugging Face Trainer: on several ranks, and with its loggers (tensorboard, wandb).

It writes the same log and snapshots as the training loop, and trains with the same numbers. Its checkpoints have its own
format: a run that has begun with one of the two does not resume with the other.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from holdfast.files import append, remove_folder, require_no_links, require_no_links_inside, write_atomically
from holdfast.hub.folder_files import check_folder
from holdfast.train.augmentation import soft_labels
from holdfast.train.loop import LOG, Log, Tick, as_json_lines, require_finite_weights, resume_point, unchanged
from holdfast.train.recipe import TrainingPart
from holdfast.train.run_folder import (
    KEPT_CHECKPOINTS,
    TRAINER_FILES,
    Guard,
    delete_old_checkpoints,
    reading_checkpoint,
    write_checkpoint_manifest,
    writing_checkpoint,
)
from holdfast.train.snapshots import take_snapshot
from holdfast.train.task import Task

# No times, so that two runs can be compared.
LOGGED = ("step", "loss", "eval_loss", "eval_figure", "grad_norm", "learning_rate")
TRAINER_LOGGERS = ("tensorboard", "wandb")  # callbacks of the Trainer


def train_with_trainer(
    model: Any,
    task: Task,
    folder: Path,
    *,
    seed: int,
    k: int | Sequence[int],
    tick: Tick,
    guard: Guard,
    report_to: tuple[str, ...],
) -> Log:
    """Train `model` in place and return the log; the arguments are those of `training.train`."""
    import transformers

    training, steps = task.recipe.training, task.steps
    require_no_links_inside(folder, folder)
    trainer = _trainer_class(task, folder, guard)(
        model=model,
        args=_arguments(training, steps, folder, seed, report_to),
        train_dataset=task.examples(seed),
        eval_dataset=task.validation() if training.needs_validation else None,
        data_collator=unchanged,
        callbacks=[_callback(task, seed, k, folder, tick, guard)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    checkpoint = resume_point(folder, training.snapshot_steps(steps), TRAINER_FILES, warn=is_first_rank())
    if checkpoint is not None:
        check_folder(checkpoint)
    trainer.accelerator.wait_for_everyone()  # all ranks have read the folder before the first one writes
    with soft_labels(model, training.label_smoothing):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if is_first_rank():
        guard()
        best = trainer.state.best_global_step
        delete_old_checkpoints(folder, steps, 0 if best else 1, best)
    return _log_lines(trainer.state.log_history)


def _arguments(training: TrainingPart, steps: int, folder: Path, seed: int, report_to: tuple[str, ...]) -> Any:
    import transformers

    per_rank, remainder = divmod(training.batch, processes())
    if remainder:
        raise ValueError(
            f"cannot split a batch of {training.batch} evenly over {processes()} ranks; set training.batch to a multiple "
            f"of {processes()}."
        )
    best: dict[str, Any] = {"per_device_eval_batch_size": per_rank}
    if training.keep == "best":
        best |= {"eval_strategy": "steps", "eval_steps": training.save_every, "load_best_model_at_end": True}
        best |= {"metric_for_best_model": f"eval_{training.best_by}", "greater_is_better": False}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=per_rank,
        gradient_accumulation_steps=training.accumulate,
        learning_rate=training.learning_rate,
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


def _trainer_class(task: Task, folder: Path, guard: Guard) -> Any:
    """Return a Trainer with the order of examples and the learning rates of the loop, and with manifests in checkpoints."""
    import transformers

    training = task.recipe.training

    class InOrderTrainer(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            factor = training.rate_factor(num_training_steps)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
            self._created_lr_scheduler = True
            return self.lr_scheduler

        def evaluation_loop(self, *given: Any, **named: Any) -> Any:
            with torch.random.fork_rng(devices=[]):  # the data loader draws a number: training must not depend on it
                output = super().evaluation_loop(*given, **named)
                figure = task.held_out_figure(self.model)
            if figure is not None:
                output.metrics["eval_figure"] = figure
            return output

        def _determine_best_metric(self, *given: Any, **named: Any) -> Any:
            # Only a step that is saved can be the best one.
            return self.control.should_save and super()._determine_best_metric(*given, **named)

        def _save_checkpoint(self, *given: Any) -> None:
            require_finite_weights(self.model, self.state.global_step)
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


def _callback(task: Task, seed: int, k: int | Sequence[int], folder: Path, tick: Tick, guard: Guard) -> Any:
    """Return the callback that writes the log, takes the snapshots, asks for validation and reports the progress."""
    from transformers import TrainerCallback

    path, probe, training = folder / LOG, task.probe(), task.recipe.training
    due, batch = training.snapshot_steps(task.steps), task.interference_batch(seed)

    class LogAndSnapshots(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.best_global_step:  # the path in the checkpoint may be relative to another working directory
                state.best_model_checkpoint = str(folder / f"checkpoint-{state.best_global_step}")
            if state.is_world_process_zero:  # a resumed run starts with the lines before it
                guard()
                write_atomically(path, as_json_lines(_log_lines(state.log_history)))
            tick(state.global_step)
            if state.global_step == 0:
                self.take(state, model)

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                guard()
                append(path, as_json_lines(_log_lines(state.log_history[-1:])))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.take(state, model)
            control.should_evaluate = training.validates(state.global_step, state.max_steps)
            tick(state.global_step)

        def take(self, state: Any, model: Any) -> None:
            if state.global_step in due and state.is_world_process_zero:
                guard()
                require_no_links(folder / "snapshots", folder)
                take_snapshot(model, probe, k, state.global_step, folder / "snapshots", batch)

    return LogAndSnapshots()


def _log_lines(history: Sequence[Mapping[str, Any]]) -> Log:
    logged = (line for line in history if "loss" in line or "eval_loss" in line)
    return [{key: line[key] for key in LOGGED if key in line} for line in logged]


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

"""Training on the Hugging Face Trainer: resumable, with a log of JSON lines; one process or many."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler

from holdfast.hub import trainer_callback
from holdfast.hub.folder_checks import check_folder
from holdfast.train.checkpoints import last_whole, writing
from holdfast.train.processes import processes
from holdfast.train.recipe import TrainingPart
from holdfast.train.snapshots import snapshot_steps, take_snapshot
from holdfast.train.task import Inputs, Task
from holdfast.writing import write_whole

LOGGED = ("step", "loss", "eval_loss", "grad_norm", "learning_rate")  # no times, so that two runs can be compared

Tick = Callable[[int], None]  # called with the number of steps done


def train(
    model: Any,
    task: Task,
    folder: Path,
    *,
    seed: int,
    k: int,
    tick: Tick | None = None,
    report_to: tuple[str, ...] = (),
) -> list[dict[str, float]]:
    """Train `model` in place; returns its log. What is found in `folder` is continued, to the same numbers.

    k           experts a token, for the snapshots of its routes
    report_to   "tensorboard", "wandb": the Trainer's own callbacks
    """
    import transformers

    how = task.recipe.training
    trainer = _trainer_class()(
        model=model,
        args=_arguments(how, folder, seed, report_to),
        train_dataset=task.examples(seed),
        eval_dataset=task.validation() if how.keep == "best" else None,
        data_collator=_as_it_is,
        callbacks=[trainer_callback(), _callback(task.probe(), k, folder, tick)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    begun = last_whole(folder)
    if begun is not None:
        check_folder(begun)
    trainer.train(resume_from_checkpoint=None if begun is None else str(begun))
    return _lines(trainer.state.log_history)


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
        save_total_limit=1,
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


def _trainer_class() -> Any:
    import transformers

    class InOrderTrainer(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def _save_checkpoint(self, *given: Any) -> None:
            with writing(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"):
                super()._save_checkpoint(*given)

    return InOrderTrainer


def _callback(probe: Inputs, k: int, folder: Path, tick: Tick | None) -> Any:
    """Writes the log, takes the snapshots, tells how far training has come."""
    from transformers import TrainerCallback

    path = folder / "log.jsonl"

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:  # of a resumed run, what came before
                write_whole(path, "".join(json.dumps(line) + "\n" for line in _lines(state.log_history)))
            self.due = set(snapshot_steps(state.max_steps))
            if tick is not None:
                tick(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                with path.open("a", encoding="utf-8") as log:
                    log.writelines(json.dumps(line) + "\n" for line in _lines(state.log_history[-1:]))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step in self.due and state.is_world_process_zero:
                take_snapshot(model, probe, k, state.global_step, folder / "snapshots")
            if tick is not None:
                tick(state.global_step)

    return Watch()


def _lines(history: list[Mapping[str, Any]]) -> list[dict[str, float]]:
    logged = (line for line in history if "loss" in line or "eval_loss" in line)
    return [{key: line[key] for key in LOGGED if key in line} for line in logged]

"""Training on the Hugging Face Trainer: resumable, with a log of JSON lines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler

from holdfast.data import TrainingBatches
from holdfast.hub import progress_callback
from holdfast.train.recipe import TrainingPart
from holdfast.writing import write_whole

LOGGED = ("step", "loss", "grad_norm", "learning_rate")  # what a log holds: no times, so that two runs can be compared

Tick = Callable[[int], None]  # called with the number of steps done


class _InOrder(Dataset[dict[str, torch.Tensor]]):
    """The blocks of all steps, one after the other."""

    def __init__(self, batches: TrainingBatches, steps: int) -> None:
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps * self.batches.order.size

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        step, row = divmod(place, self.batches.order.size)
        block = self.batches.blocks.batch(self.batches.order.numbers(step)[row : row + 1])
        return {"input_ids": block.inputs[0], "labels": block.labels[0], "shift_labels": block.labels[0]}


def train(
    model: Any, batches: TrainingBatches, how: TrainingPart, folder: Path, *, seed: int, tick: Tick | None = None
) -> list[dict[str, float]]:
    """Train `model` in place; returns its log. What is found in `folder` is continued, to the same numbers."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=how.steps,
        per_device_train_batch_size=how.batch,
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
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = _trainer_class()(
        model=model,
        args=arguments,
        train_dataset=_InOrder(batches, how.steps),
        callbacks=[progress_callback(), _log_callback(folder / "log.jsonl", tick)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(
        resume_from_checkpoint=transformers.trainer_utils.get_last_checkpoint(str(folder)) if folder.exists() else None
    )
    return _lines(trainer.state.log_history)


def _trainer_class() -> Any:
    import transformers

    class InOrderTrainer(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    return InOrderTrainer


def _log_callback(path: Path, tick: Tick | None) -> Any:
    from transformers import TrainerCallback

    class Log(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _write(path, state.log_history)  # of a resumed run, what came before
            if tick is not None:
                tick(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _write(path, state.log_history)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if tick is not None:
                tick(state.global_step)

    return Log()


def _lines(history: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{key: line[key] for key in LOGGED if key in line} for line in history if "loss" in line]


def _write(path: Path, history: list[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(line) + "\n" for line in _lines(history)))

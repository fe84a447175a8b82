"""Six steps of transformers' Trainer on this process's share of each batch, saved and resumed; run by test_trainer.py.

python trainer_on_ranks.py FOLDER   (under torchrun; test_trainer.py calls `train_all` itself for one process)
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from test_trainer import HALF, assert_equal, contents, dataset, logits, trainer
from tiny import tiny
from tiny_dense import tiny_dense

import holdfast

BATCH = 4  # of all processes together
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sparsified": ("llama", "ac+symphony+attention+smooth", {}),
    "rerouted": ("mixtral", "symphony+smooth", {"gradient_accumulation_steps": 2}),
    "rerouted, checkpointed": ("mixtral", "ac+similarity", {"gradient_checkpointing": True}),
}


def changed(family: str, router: str, seed: int = 0) -> Any:
    """With a loss that is a mean over tokens, so that parts of a batch add up to the whole; balance is of each part."""
    if family == "mixtral":
        return holdfast.reroute(tiny(family, seed), router, losses=holdfast.Losses(z=0.1))
    return holdfast.sparsify(tiny_dense(family, seed), experts=8, k=2, router=router, noise=0.5)


def train(case: str, folder: Path, world: int) -> dict[str, Any]:
    family, router, options = CASES[case]
    # Plain descent: Adam would blow the last bit of a gradient that is nearly 0 up to a whole step.
    options = {**options, "optim": "sgd", "learning_rate": 0.1, "save_steps": HALF}
    options["per_device_train_batch_size"] = BATCH // world
    run = trainer(changed(family, router), folder, save_strategy="steps", **options)
    # Without auxiliary losses rows may differ in length: labels and tokens then need not be in one proportion.
    run.train_dataset = dataset() if family == "llama" else [dataset()[row] for row in range(0, 20, 5)] * 6
    run.train()
    straight = contents(run.model)
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    result = {"losses": losses, "contents": straight, "logits": logits(run.model)}
    if world == 1:
        return result
    resumed = trainer(changed(family, router, seed=1), folder / "resumed", **options)
    resumed.train_dataset = run.train_dataset
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}"))
    assert_equal(contents(resumed.model), straight)
    return result


def train_all(folder: Path, world: int) -> dict[str, dict[str, Any]]:
    return {case: train(case, folder / case, world) for case in CASES}


if __name__ == "__main__":
    path, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.save(train_all(path, int(os.environ["WORLD_SIZE"])), path / f"rank.{rank}.pt")
    torch.distributed.destroy_process_group()

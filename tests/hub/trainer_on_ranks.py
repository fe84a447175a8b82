"""Six steps of transformers' Trainer on this process's share of each batch, saved and resumed; run by test_trainer.py.

python trainer_on_ranks.py FOLDER   (on several processes; test_trainer.py calls `train_all` itself for one process)
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from test_trainer import HALF, STEPS, assert_equal, contents, dataset, logits, trainer
from tiny import tiny
from tiny_dense import tiny_dense
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM, MixtralForCausalLM, Trainer  # noqa: F401  (once, before the processes part)

import holdfast

BATCH = 4  # of all processes together
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sparsified": ("llama", "ac+symphony+attention+smooth", {}),
    "rerouted": ("mixtral", "symphony+smooth", {"gradient_accumulation_steps": 2}),
    "rerouted, checkpointed": ("mixtral", "ac+similarity", {"gradient_checkpointing": True}),
    "experts sharded": ("mixtral", "symphony+smooth", {"max_grad_norm": 0.5}),  # which the norm exceeds
}


def changed(family: str, router: str, seed: int = 0) -> Any:
    losses = holdfast.Losses(balance=0.1, z=0.1)
    # With this budget `smooth` has a row for every slot. Each process has its own rows, and a few tokens may need more.
    options: dict[str, Any] = {"budget": 3.0} if "smooth" in router else {}
    if family == "mixtral":
        return holdfast.reroute(tiny(family, seed), router, losses=losses, **options)
    dense = tiny_dense(family, seed)
    return holdfast.sparsify(dense, experts=8, k=2, router=router, losses=losses, noise=0.5, router_options=options)


def train(case: str, folder: Path, world: int) -> dict[str, Any]:
    family, router, options = CASES[case]
    # Plain descent: Adam would blow the last bit of a gradient that is nearly 0 up to a whole step.
    options = {**options, "optim": "sgd", "learning_rate": 0.1, "save_steps": HALF}
    options["per_device_train_batch_size"] = BATCH // world
    model, spread = changed(family, router), case == "experts sharded"
    if spread and world > 1:
        holdfast.shard_experts(model, init_device_mesh("cpu", (world,)))
    run = trainer(model, folder, save_strategy="no" if spread else "steps", **options)
    run.train_dataset = dataset()  # rows of different lengths
    run.train()
    if spread:
        model.eval()
        holdfast.save(model, folder / f"checkpoint-{STEPS}")
        model = holdfast.load(folder / f"checkpoint-{STEPS}")
        norms = [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]
        assert min(norms) > options["max_grad_norm"]
        return {"losses": _losses(run), "contents": contents(model), "logits": logits(model)}
    straight = contents(run.model)
    result = {"losses": _losses(run), "contents": straight, "logits": logits(run.model)}
    if world == 1:
        return result
    resumed = trainer(changed(family, router, seed=1), folder / "resumed", **options)
    resumed.train_dataset = run.train_dataset
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}"))
    assert_equal(contents(resumed.model), straight)
    return result


def _losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def train_all(folder: Path, world: int) -> dict[str, dict[str, Any]]:
    return {case: train(case, folder / case, world) for case in CASES}


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    path, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.save(train_all(path, int(os.environ["WORLD_SIZE"])), path / f"rank.{rank}.pt")
    torch.distributed.destroy_process_group()

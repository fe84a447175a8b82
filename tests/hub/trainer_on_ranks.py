"""Six steps of transformers' Trainer on this process's share of each batch, saved and resumed; run by test_trainer.py.

python trainer_on_ranks.py FOLDER   (on several processes; test_trainer.py calls `train_all` itself for one process)
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from changed_models import changed as with_router
from test_trainer import HALF, STEPS, assert_equal, contents, dataset, logits, trainer
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM, MixtralForCausalLM, Trainer  # noqa: F401  (once, before the processes part)

import holdfast

BATCH = 4  # of all processes together
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sparsified": ("llama", "ac+symphony+attention+smooth", {}),
    "rerouted": ("mixtral", "symphony+smooth", {"gradient_accumulation_steps": 2}),
    "rerouted, checkpointed": ("mixtral", "ac+similarity", {"gradient_checkpointing": True}),
    "experts sharded": ("mixtral", "symphony+smooth", {"max_grad_norm": 0.5}),  # which the norm exceeds
    # With momentum: torch does not load an optimizer without state under FSDP2.
    "FSDP2": ("mixtral", "ac+symphony+smooth", {"gradient_accumulation_steps": 2, "optim_args": "momentum=0.5"}),
    "FSDP2, checkpointed": ("llama", "symphony+smooth", {"gradient_checkpointing": True, "optim_args": "momentum=0.5"}),
}
FSDP2 = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def changed(family: str, router: str, seed: int = 0) -> Any:
    # With this budget `smooth` has a row for every slot. Each process has its own rows, and a few tokens may need more.
    options: dict[str, Any] = {"budget": 3.0} if "smooth" in router else {}
    losses = holdfast.Losses(balance=0.1, z=0.1, distillation=0.1)
    # A teacher that does not depend on the seed: the model that resumes has another one.
    return holdfast.set_teacher(with_router(family, router, seed, losses=losses, **options), torch.zeros_like)


@contextmanager
def fsdp_on_cpus() -> Iterator[None]:
    """Inside the `with`, accelerate runs FSDP2 if it is asked for; on CPUs it would run DDP."""
    create = Trainer.create_accelerator_and_postprocess

    def create_accelerator(run: Any) -> None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        create(run)
        assert run.accelerator.is_fsdp2

    with mock.patch.object(Trainer, "create_accelerator_and_postprocess", create_accelerator):
        yield


def train(case: str, folder: Path, world: int) -> dict[str, Any]:
    family, router, options = CASES[case]
    # Plain descent: Adam would blow the last bit of a gradient that is nearly 0 up to a whole step.
    options = {**options, "optim": "sgd", "learning_rate": 0.1, "save_steps": HALF}
    options["per_device_train_batch_size"] = BATCH // world
    model, is_fsdp = changed(family, router), case.startswith("FSDP2")
    spread = case == "experts sharded"
    if spread and world > 1:
        holdfast.shard_experts(model, init_device_mesh("cpu", (world,)))
    if is_fsdp and world > 1:
        recomputes = {"activation_checkpointing": options.pop("gradient_checkpointing", False)}  # accelerate's own
        options |= {"fsdp": True, "fsdp_config": FSDP2 | recomputes}
    with fsdp_on_cpus() if is_fsdp and world > 1 else nullcontext():
        run = trainer(model, folder, save_strategy="no" if spread else "steps", **options)
        run.train_dataset = dataset()  # rows of different lengths
        run.train()
        result: dict[str, Any] = {"losses": logged(run, "loss"), "balance": logged(run, "router/balance")}
        if spread or is_fsdp:
            model.eval()
            holdfast.save(model, folder / f"checkpoint-{STEPS}", force=True)
            model = holdfast.load(folder / f"checkpoint-{STEPS}")
        if spread:
            assert min(logged(run, "grad_norm")) > options["max_grad_norm"]
        result |= {"contents": contents(model), "logits": logits(model)}
        if world == 1 or spread:
            return result
        resumed = trainer(changed(family, router, seed=1), folder / "resumed", **options)
        resumed.train_dataset = run.train_dataset
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}"))
    again = resumed.model
    if is_fsdp:
        again.eval()
        again = holdfast.load(holdfast.save(again, folder / "resumed" / "saved"))
    assert_equal(contents(again), result["contents"])
    return result


def refusal(folder: Path) -> str:
    """Return the error where only the first rank would load weights, and accelerate sends them to the others."""
    options = {"fsdp": True, "fsdp_config": FSDP2 | {"cpu_ram_efficient_loading": True}}
    with fsdp_on_cpus():
        run = trainer(changed("mixtral", "symphony"), folder, **options)
        try:
            run.train()
        except ValueError as error:
            return str(error)
    return ""


def logged(run: Any, name: str) -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


def train_all(folder: Path, world: int) -> dict[str, dict[str, Any]]:
    return {case: train(case, folder / case, world) for case in CASES}


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    path, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.save(train_all(path, int(os.environ["WORLD_SIZE"])), path / f"rank.{rank}.pt")
    assert "cpu_ram_efficient_loading" in refusal(path / "refused")
    torch.distributed.destroy_process_group()

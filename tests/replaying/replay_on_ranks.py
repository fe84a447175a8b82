"""Two steps on this process's rows of a batch with replayed routes, under DDP, FSDP2 and expert parallelism.

python replay_on_ranks.py FOLDER   (on two processes; test_replay_on_ranks.py calls `train` itself for one process)
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines_on_ranks import engine, whole_tensor
from foreign_routes import BATCH, random_routes
from tiny import tiny

import holdfast

CASES = [("DDP", "native"), ("DDP", "ac"), ("FSDP2", "smoe"), ("FSDP2", "native"), ("experts, DDP", "symphony+smooth")]


def train(name: str, router: str, rank: int, world: int) -> dict[str, Any]:
    """Return the losses of two steps and the weights after them; the first is recomputed by checkpointing."""
    torch.manual_seed(0)
    model = holdfast.reroute(tiny("mixtral"), router, losses=holdfast.Losses(balance=0.1)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped, losses = engine(name, model, world), []
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for seed in range(2):
        share = {key: value.chunk(world)[rank] for key, value in BATCH.items()}
        items = (BATCH["labels"][:, 1:] != -100).sum()
        optimizer.zero_grad()
        routes = random_routes(3, seed=seed).chunk(world)[rank]
        loss = wrapped(**share, routed_experts=routes, num_items_in_batch=items).loss * world
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total) / world)
    return {"losses": losses, "weights": {key: whole_tensor(value) for key, value in model.named_parameters()}}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {f"{name}: {router}": train(name, router, rank, world) for name, router in CASES}
    torch.save(results, Path(sys.argv[1]) / f"{rank}.pt")
    dist.destroy_process_group()

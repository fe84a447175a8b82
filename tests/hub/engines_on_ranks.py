"""Twenty steps on this process's share of each batch under DDP, FSDP2 and expert parallelism; run by test_engines.py.

python engines_on_ranks.py FOLDER   (under torchrun; test_engines.py calls `train` itself for one process)
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast

STEPS, ROWS, LENGTH = 20, 4, 16  # rows of all processes together
LOSSES = holdfast.Losses(balance=0.1, importance=0.05, load=0.05, z=0.01, entropy=0.01)

# Engine, family, a router for each layer, recomputation. A model has three layers, so three routers are tried at a time.
CASES: dict[str, tuple[str, str, tuple[str, str, str], bool]] = {
    "ddp, smoe, symphony, ac": ("ddp", "llama", ("smoe", "symphony", "ac"), False),
    "ddp, smooth, similarity, attention": ("ddp", "llama", ("smooth", "similarity", "attention"), True),
    "ddp, top-p, remoe, xmoe": ("ddp", "llama", ("top-p", "remoe", "xmoe"), False),
    "ddp, rerouted": ("ddp", "mixtral", ("switch", "symphony+smooth", "ac+similarity"), False),
    "fsdp2": ("fsdp2", "llama", ("symphony+smooth", "ac+similarity", "smoe"), True),
    "fsdp2, rerouted": ("fsdp2", "mixtral", ("smoe", "symphony+smooth", "ac+similarity"), False),
    "experts and ddp": ("experts and ddp", "llama", ("symphony+smooth", "ac+similarity", "smoe"), True),
    "experts and ddp, rerouted": ("experts and ddp", "mixtral", ("smoe", "symphony+smooth", "ac+similarity"), False),
    "experts and fsdp2": ("experts and fsdp2", "llama", ("symphony+smooth", "ac", "similarity"), False),
    "experts and fsdp2, biases": ("experts and fsdp2", "gpt2", ("smooth", "symphony", "similarity"), True),
}
RELAY = ("symphony+smooth", "ac+similarity", "smoe")
LEG = 5  # steps of each process number in the relay: 1, 4, 2, 1


def built(family: str, routers: tuple[str, ...], seed: int = 0) -> Any:
    if family == "mixtral":
        model = tiny(family, seed)
    else:
        model = holdfast.sparsify(tiny_dense(family, seed), experts=8, k=2, noise=0.5)
    torch.manual_seed(seed)
    for layer, router in enumerate(routers):
        holdfast.reroute(model, router, layers=[layer], losses=LOSSES)
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # gpt2's: processes draw their own
            module.p = 0.0
    return model.train()


@cache
def meshes(world: int) -> DeviceMesh:
    """Of four processes two copies of the experts, each on two; of two, each expert once."""
    return init_device_mesh("cpu", (2, 2) if world == 4 else (world,), mesh_dim_names=("copies", "experts")[-1 - world // 4 :])


def engine(name: str, model: Any, world: int) -> Any:
    if world == 1:
        return model
    if name.startswith("experts"):
        holdfast.shard_experts(model, meshes(world))
    if name.endswith("ddp"):
        return DistributedDataParallel(model)
    spread = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for module in (*layers, model):
        fully_shard(module, mesh=meshes(world), ignored_params=spread)
    return model


def batch(step: int) -> dict[str, Tensor]:
    """Rows of different lengths, so that processes have different numbers of real tokens and of labels."""
    ids = torch.randint(3, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    lengths = torch.tensor([LENGTH, LENGTH - 5, 4 + step % 3, LENGTH - 1])
    real = torch.arange(LENGTH) < lengths.unsqueeze(1)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}


def descend(model: Any, optimizer: torch.optim.Optimizer, steps: range, rank: int, world: int) -> list[float]:
    """As the Trainer counts: sums over this process's labels, divided by all labels, times the processes."""
    losses = []
    for step in steps:
        whole = batch(step)
        items = (whole["labels"][:, 1:] != -100).sum()
        share = {name: value.chunk(world)[rank] for name, value in whole.items()}
        optimizer.zero_grad()
        loss = model(**share, num_items_in_batch=items).loss * world
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        if world > 1:
            dist.all_reduce(loss)
        losses.append(float(loss) / world)
    return losses


def descent(model: nn.Module) -> torch.optim.Optimizer:
    """In small steps: large ones double a difference in the last bit at each, with any engine and none."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)


def train(case: str, rank: int, world: int) -> dict[str, Any]:
    name, family, routers, recomputed = CASES[case]
    model = built(family, routers)
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = engine(name, model, world)
    losses = descend(wrapped, descent(wrapped), range(STEPS), rank, world)
    return {"losses": losses, **contents(model)}


def contents(model: Any) -> dict[str, dict[str, Tensor]]:
    model.eval()
    parameters = {name: _whole(parameter).detach() for name, parameter in model.named_parameters()}
    return {"parameters": parameters, "state": {n: v for n, v in model.named_buffers() if "staged_" not in n}}


def relay(folder: Path, start: int, rank: int, world: int) -> list[float]:
    """Take over what the processes before left at step `start`, go on, and leave it to the next."""
    model = built("llama", RELAY, seed=start)  # other weights each time: all must come from the checkpoint
    wrapped = engine("experts and fsdp2", model, world)
    optimizer = descent(wrapped)
    if start:
        weights, momenta = get_state_dict(wrapped, optimizer)
        state = {"model": weights, "optimizer": momenta}
        dcp.load(state, checkpoint_id=folder / f"step-{start}")
        set_state_dict(wrapped, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = descend(wrapped, optimizer, range(start, start + LEG), rank, world)
    weights, momenta = get_state_dict(wrapped, optimizer)
    dcp.save({"model": weights, "optimizer": momenta}, checkpoint_id=folder / f"step-{start + LEG}")
    return losses


def _whole(parameter: Any) -> Tensor:
    whole: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole


if __name__ == "__main__":
    dist.init_process_group("gloo")
    path, me, count = Path(sys.argv[1]), dist.get_rank(), dist.get_world_size()
    import time
    results = {}
    for case in CASES:
        begun = time.time()
        results[case] = train(case, me, count)
        if me == 0: print(case, time.time() - begun, flush=True)
    torch.save(results, path / f"{count}.{me}.pt")
    dist.destroy_process_group()

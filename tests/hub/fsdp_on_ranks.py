"""Five steps of plain descent with every layer sharded by FSDP2, then a folder; run by test_fsdp.py.

python fsdp_on_ranks.py FOLDER   (under torchrun; test_fsdp.py calls `train_all` itself for one process, unsharded)
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast

STEPS, ROWS = 5, 4  # rows of all processes together
CASES = {
    "sparsified": ("llama", "symphony+smooth", False),
    "sparsified, attention": ("llama", "ac+attention", True),
    "rerouted": ("mixtral", "symphony+smooth", True),
    "rerouted, similarity": ("mixtral", "ac+similarity", False),
}


def changed(family: str, router: str, seed: int = 0) -> Any:
    """With a loss that is a mean over tokens, so that parts of a batch add up to the whole; balance is of each part."""
    losses = holdfast.Losses(z=0.1)
    if family == "mixtral":
        return holdfast.reroute(tiny(family, seed), router, losses=losses)
    return holdfast.sparsify(tiny_dense(family, seed), experts=8, k=2, router=router, losses=losses, noise=0.5)


def rows(seed: int) -> Tensor:
    return torch.randint(3, 64, (ROWS, 16), generator=torch.Generator().manual_seed(seed))


def train(case: str, folder: Path, rank: int, world: int) -> dict[str, Any]:
    family, router, checkpointed = CASES[case]
    model = changed(family, router).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        ids = rows(step).chunk(world)[rank]
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(_mean(loss.detach(), world))
    model.eval()
    parameters = {name: _whole(parameter) for name, parameter in model.named_parameters()}
    state = {name: value for name, value in model.named_buffers() if "staged_" not in name}
    with torch.no_grad():
        logits = model(input_ids=rows(STEPS)).logits
    if world > 1:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # the whole is on the first process only
        whole = get_model_state_dict(model, options=options)
        model.save_pretrained(folder / case, state_dict=whole, is_main_process=rank == 0)
    return {"losses": losses, "parameters": parameters, "state": state, "logits": logits}


def train_all(folder: Path, rank: int, world: int) -> dict[str, dict[str, Any]]:
    return {case: train(case, folder, rank, world) for case in CASES}


def _mean(loss: Tensor, world: int) -> float:
    if world > 1:
        dist.all_reduce(loss)
    return float(loss) / world


def _whole(parameter: Any) -> Tensor:
    """A parameter's own values, from all its shards."""
    whole: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    path, me = Path(sys.argv[1]), dist.get_rank()
    torch.save(train_all(path, me, dist.get_world_size()), path / f"rank.{me}.pt")
    dist.destroy_process_group()

"""On two processes: a model with soft layers under DDP, and with its experts sharded. Writes what the test compares."""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engines_on_ranks import whole_tensor
from tiny_dense import inputs, tiny_dense
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import holdfast

ROUTERS = ("softmoe[slots=2]+symphony", "softmoe+ac", "smear")
STEPS = 3


def built(router: str) -> Any:
    model = tiny_dense("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return holdfast.sparsify(model, experts=4, router=router, noise=0.1).train()


def train(model: Any, batches: list[dict[str, Tensor]], wrapped: Any = None) -> dict[str, Tensor]:
    """Return all parameters and buffers after a few steps; the loss is the mean over batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = (wrapped or model)(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})
        out.logits.square().mean().backward()
        optimizer.step()
    return {name: whole_tensor(value).clone() for name, value in model.state_dict().items()}


def batches() -> list[dict[str, Tensor]]:
    """Return one batch for each rank, without labels: the mean over ranks is then the mean over the whole batch."""
    return [{name: value for name, value in inputs("bert", seed).items() if name != "labels"} for seed in (1, 2)]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), dict[str, Any]()
    for router in ROUTERS:
        model = built(router)
        found[f"DDP {router}"] = train(model, [batches()[rank]], DistributedDataParallel(model))
    model = built(ROUTERS[0])
    alone = copy.deepcopy(model)
    holdfast.shard_experts(model, init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        one, other = (each.eval()(**batches()[rank]).logits for each in (model, alone))
    found["sharded"] = float((one - other).abs().max())
    try:
        holdfast.shard_experts(built("smear"), init_device_mesh("cpu", (2,)))
    except ValueError as refusal:
        found["refused"] = str(refusal)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Twenty steps on this process's share of each batch under DDP, FSDP2 and expert parallelism; run by test_engines.py.

python engines_on_ranks.py FOLDER   (on several processes; test_engines.py calls the functions itself for one process)

`fully_shard` directly, because accelerate runs DDP where it is asked for FSDP on a CPU.
"""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import tiny, with_checkpointing
from tiny_dense import tiny_dense
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM, MixtralForCausalLM  # noqa: F401  (once, before the processes part)

import holdfast

STEPS, ROWS, LENGTH = 20, 4, 12  # rows of all processes together
LOSSES = holdfast.Losses(balance=0.1, importance=0.05, load=0.05, z=0.01, entropy=0.01)
BOUNDARY = "smooth, control=loss"
LIMITED = "capacity[factor=0.4:1:0.6:1.5:0.8:1:2:0.5]"
OPTIONS: dict[str, dict[str, Any]] = {BOUNDARY: {"control": "loss"}, "remoe": {"l1": 0.1}}  # remoe's own is too small to see

# Engine, family, a router for each of the three layers, recomputation; by the number of processes.
Case = tuple[str, str, tuple[str, str, str], bool]
CASES: dict[int, dict[str, Case]] = {
    2: {
        "DDP: smoe, symphony, ac": ("DDP", "llama", ("smoe", "xmoe+symphony", "ac+smooth"), False),
        "DDP: similarity, attention, remoe": ("DDP", "llama", ("similarity+top-p", "attention", "remoe"), True),
        "DDP: switch, smoe-dropout, boundary": ("DDP", "llama", ("switch", "smoe-dropout", BOUNDARY), False),
        "FSDP2": ("FSDP2", "llama", ("symphony+smooth", "ac+similarity", "smoe"), False),
        "experts, FSDP2: biases": ("experts, FSDP2", "gpt2", ("smooth", "ac+symphony", LIMITED), False),
    },
    4: {
        "DDP": ("DDP", "llama", ("symphony", "ac", "smooth"), False),
        "FSDP2: rerouted": ("FSDP2", "mixtral", ("smoe", "symphony+smooth", "ac+similarity"), False),
        "experts, DDP: rerouted": ("experts, DDP", "mixtral", ("symphony+smooth", "ac+similarity", "smoe"), True),
    },
}
LEG = 5  # steps of each in the relay


def built(family: str, routers: tuple[str, ...], seed: int = 0) -> Any:
    dense = family != "mixtral"
    model = holdfast.sparsify(tiny_dense(family, seed), experts=8, k=2, noise=0.5) if dense else tiny(family, seed)
    torch.manual_seed(seed)
    for layer, name in enumerate(routers):
        # With this budget `smooth` has a row for every slot. Each process has its own rows, and three tokens may need more.
        options = OPTIONS.get(name, {}) | ({"budget": 3.0} if "smooth" in name else {})
        holdfast.reroute(model, name.split(",")[0], layers=[layer], losses=LOSSES, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # gpt2's: processes draw their own
            module.p = 0.0
    return model.train()


@cache
def mesh_of(world: int) -> DeviceMesh:
    """Of four processes two copies of the experts, each on two; of two, each expert once."""
    shape, names = ((2, 2), ("copies", "experts")) if world == 4 else ((world,), ("experts",))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def engine(name: str, model: Any, world: int) -> Any:
    if world == 1:
        return model
    if name.startswith("experts"):
        holdfast.shard_experts(model, mesh_of(world))
    if name.endswith("DDP"):
        return DistributedDataParallel(model)
    spread: Any = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for module in (*layers, model):
        fully_shard(module, mesh=mesh_of(world), ignored_params=spread)
    return model


def batch(step: int) -> dict[str, Tensor]:
    """Rows of different lengths, so that processes have different numbers of real tokens and of labels."""
    ids = torch.randint(3, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    lengths = torch.tensor([LENGTH, LENGTH - 3, 3 + step % 3, LENGTH - 1])
    real = torch.arange(LENGTH) < lengths.unsqueeze(1)
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}


def descend(model: Any, optimizer: torch.optim.Optimizer, steps: range, rank: int, world: int) -> list[float]:
    """As the Trainer counts: the sum over this process's labels, over the number of all labels, times the processes."""
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
    """In small steps: large ones double a difference in the last bit at each, with any engine and with none."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)


def train(case: Case, rank: int, world: int, folder: Path | None = None) -> dict[str, Any]:
    name, family, routers, recomputed = case
    model = with_checkpointing(built(family, routers), recomputed)
    wrapped = engine(name, model, world)
    losses = descend(wrapped, descent(wrapped), range(STEPS), rank, world)
    model.eval()
    parameters = {name: whole_tensor(parameter) for name, parameter in model.named_parameters()}
    state = {name: value for name, value in model.named_buffers() if "staged_" not in name}
    if folder is not None and name != "DDP":
        holdfast.save(model, folder)
    return {"losses": losses, "parameters": parameters, "state": state}


def relay(folder: Path, start: int, rank: int, world: int) -> list[float]:
    """Take over what the processes before left at step `start`, go on, and leave it to the next."""
    model = built("llama", ("symphony+smooth", "ac+similarity", "smoe"), seed=start)  # all weights come from the checkpoint
    wrapped = engine("experts, FSDP2", model, world)
    optimizer = descent(wrapped)
    if start:
        weights, momenta = get_state_dict(wrapped, optimizer)
        state_dict_loader.load({"model": weights, "optimizer": momenta}, checkpoint_id=folder / f"step-{start}")
        set_state_dict(wrapped, optimizer, model_state_dict=weights, optim_state_dict=momenta)
    losses = descend(wrapped, optimizer, range(start, start + LEG), rank, world)
    weights, momenta = get_state_dict(wrapped, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": momenta}, checkpoint_id=folder / f"step-{start + LEG}")
    return losses


def by_hand(rank: int, world: int) -> dict[str, Tensor]:
    """Experts alone, at awkward sizes, with unused slots; the first process has all tokens, the last experts get none."""
    torch.manual_seed(0)
    layer = nn.ModuleDict({"experts": holdfast.Experts(20, 12, 8, bias=True)})
    tokens, weights = torch.randn(63, 20), torch.rand(63, 3)
    experts = torch.rand(63, 9).argsort(1)[:, :3]
    experts = experts.where(experts < 5, 8)  # many a slot is unused, of some tokens all
    count = 63 if rank == 0 else 0
    tokens, weights, experts = tokens[:count].requires_grad_(), weights[:count].requires_grad_(), experts[:count]
    if world > 1:
        holdfast.shard_experts(layer, init_device_mesh("cpu", (world,)))
    out = layer["experts"](tokens, experts, weights)
    (out.square().sum() * world).backward()
    assert tokens.grad is not None and weights.grad is not None
    gradients = {name: whole_tensor(parameter.grad) for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "tokens": tokens.grad / world, "weights": weights.grad / world, **gradients}


def second_derivatives(rank: int, world: int) -> tuple[float, str]:
    """Return how far gradients of tokens and slot weights differ from those with experts on one rank, and an error text."""
    found, said = [], ""
    for spread in (False, True):
        torch.manual_seed(0)
        layer = nn.ModuleDict({"experts": holdfast.Experts(20, 12, 8)})
        if spread:
            holdfast.shard_experts(layer, init_device_mesh("cpu", (world,)))
        torch.manual_seed(rank)
        inputs = [torch.randn(9, 20, requires_grad=True), torch.rand(9, 3, requires_grad=True)]
        total = layer["experts"](inputs[0], torch.rand(9, 8).argsort(1)[:, :3], inputs[1]).square().sum()
        slope = torch.stack([grad.pow(3).sum() for grad in torch.autograd.grad(total, inputs, create_graph=True)]).sum()
        found.append(torch.autograd.grad(slope, inputs, retain_graph=True))
        if spread:
            own = list(layer.parameters())
            grads: Any = torch.autograd.grad(total, own, create_graph=True)
            try:
                torch.autograd.grad(sum(grad.to_local().square().sum() for grad in grads), own)
            except ValueError as error:
                said = str(error)
    apart = (float((one - other).norm() / one.norm()) for one, other in zip(*found, strict=True))
    return max(apart), said


def compiled(rank: int) -> list[Tensor]:
    """How far a router compiled to one graph, its sums over processes inside, is from the same one that is not."""
    results = []
    for as_graph in (False, True):
        torch.manual_seed(0)
        router = holdfast.create_router("symphony+smooth", dim=16, experts=8, losses=LOSSES, init="identity")
        forward: Any = torch.compile(router, fullgraph=True, backend="aot_eager") if as_graph else router
        tokens = torch.randn(2, 9 + rank, 16, generator=torch.Generator().manual_seed(rank))
        loss = sum(forward(tokens).loss for _ in range(2))
        (gradient,) = torch.autograd.grad(loss, router.score.get_parameter("weight"))
        results.append((loss.detach(), gradient, *router.eval().state_dict().values()))
    return [(one.float() - other.float()).abs().max() for one, other in zip(*results, strict=True)]


def refusals(folder: Path, world: int) -> dict[str, str]:
    """Return the error messages for wrong use."""
    mesh = mesh_of(world)
    spread = holdfast.shard_experts(built("llama", ("smoe",)), mesh)
    sharded = built("llama", ("smoe",))
    fully_shard(sharded, mesh=mesh)
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "file").touch()
    calls: dict[str, Callable[[], object]] = {
        "twice": lambda: holdfast.shard_experts(spread, mesh),
        "after FSDP2": lambda: holdfast.shard_experts(sharded, mesh),
        "wrapped": lambda: holdfast.shard_experts(DistributedDataParallel(built("llama", ("smoe",))), mesh),
        "dense": lambda: holdfast.shard_experts(nn.Linear(2, 2), mesh),
        "not divisible": lambda: holdfast.shard_experts(holdfast.Experts(4, 4, 5), mesh),
        "a part of the mesh": lambda: holdfast.shard_experts(built("llama", ("smoe",)), mesh["experts"]),
        "save_pretrained": lambda: spread.save_pretrained(folder / "never"),
        "a folder that is there": lambda: holdfast.save(spread, folder / "full"),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    return said


def whole_tensor(parameter: Any) -> Tensor:
    whole: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    path, me, count = Path(sys.argv[1]), dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {name: train(case, me, count, path / f"{count} {name}") for name, case in CASES[count].items()}
    found["by hand"] = by_hand(me, count)
    found["second derivatives"] = second_derivatives(me, count)
    found["relay"] = relay(path, {4: LEG, 2: 2 * LEG}[count], me, count)
    if count == 2:
        found["compiled"] = compiled(me)
    if count == 4:
        found["refusals"] = refusals(path, count)
    torch.save(found, path / f"{count}.{me}.pt")
    dist.destroy_process_group()

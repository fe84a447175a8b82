"""One backward under DDP on this process's half of a batch, by every way to compute the loss; run by test_router_losses.py.

python router_losses_on_ranks.py FOLDER   (on several processes)
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from test_losses_in_models import gradients, rows, text
from test_router_losses import READERS, model_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM, MixtralForCausalLM  # noqa: F401  (once, before the processes part)

import holdfast

WAYS = ["outputs.loss", "logits alone", "logits, with labels", "router_loss", "aux_loss", "tuple"]
MODELS = [("mixtral", "smoe"), ("llama", "symphony+smooth")]


def batch() -> dict[str, Tensor]:
    return text(4, 12, (12, 12, 12, 12))


class Wrapped:
    """A model called through DDP, with the attributes of the one inside."""

    def __init__(self, model: Any) -> None:
        self.outer, self.inner = DistributedDataParallel(model), model

    def __call__(self, **given: Any) -> Any:
        return self.outer(**given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def backward(family: str, router: str, way: str, rank: int, world: int) -> dict[str, Tensor]:
    model = model_of(family, router)
    holdfast.router_loss_scale(model, 1.0)
    given = rows(batch(), slice(rank * 4 // world, (rank + 1) * 4 // world))
    called = Wrapped(model) if world > 1 else model  # kept: gradients are averaged only while DDP lives
    READERS[way](called, given).backward()
    return gradients(model)


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    found = {
        f"{family} {router} {way}": backward(family, router, way, rank, world) for family, router in MODELS for way in WAYS
    }
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

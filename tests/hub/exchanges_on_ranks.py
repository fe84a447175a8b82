"""Bytes of a training step that two processes exchange between their experts; run by tests/planning/test_communication.py.

The first process prints for each case, of both processes together, how many rows went to the other and what they carried.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from tiny import tiny, with_checkpointing
from tiny_dense import tiny_dense
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import (  # noqa: F401  (once, before the processes part)
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralForCausalLM,
    Qwen2MoeForCausalLM,
)

import holdfast

SIZE = (4, 64)  # of each process
CASES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "llama": ("llama", {"k": 2}),
    "llama, k 4": ("llama", {"k": 4}),
    "all slots": ("llama", {"k": 2, "router": "smooth", "eps": 100.0, "budget": 6.0}),
    "dropout": ("gpt2", {"k": 2}),
    "norm": ("bert", {"k": 2}),
    "native": ("mixtral", None),
    "shared expert": ("qwen2_moe", None),
}


def built(case: str) -> Any:
    family, options = CASES[case]
    return (tiny(family) if options is None else holdfast.sparsify(tiny_dense(family), experts=8, **options)).train()


def exchanged(model: Any) -> tuple[int, int]:
    """Rows that left this process in the forward, and bytes that did in the whole step."""
    rows, size, exchange = [], [], dist.all_to_all_single

    def counted(out: Tensor, given: Tensor, coming: Any = None, going: Any = None, **options: Any) -> Any:
        other = 1 - dist.get_rank()
        if going is None:
            rows.append(int(given[other, 0]))
        else:
            size.append(going[other] * given[0:1].nbytes)
        return exchange(out, given, coming, going, **options)

    dist.all_to_all_single = counted  # type: ignore[assignment]
    ids = torch.randint(3, 60, SIZE, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = model(input_ids=ids, labels=ids).loss
    left = sum(rows)  # before a recomputation counts them again
    loss.backward()
    dist.all_to_all_single = exchange
    return left, sum(size)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for case in CASES:
        for checkpointing in (False, True):
            model = with_checkpointing(holdfast.shard_experts(built(case), mesh), checkpointing)
            both = torch.tensor(exchanged(model))
            dist.all_reduce(both)
            found[f"{case}, checkpointed" if checkpointing else case] = both.tolist()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()

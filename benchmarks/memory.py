"""Measure what a sparsified model stores for its backward on a GPU, and compare it with `holdfast plan`: bytes and ratio.

    python benchmarks/memory.py

A Llama of 8 layers (width 1024, experts of 2816, 8 of them, k 2) in bfloat16 with SDPA attention, 2 sequences of 2048
tokens. Measured are the bytes allocated by a training forward, and at the peak of forward and backward, beyond those before.
"""

import gc
import json
import sys

import torch
import transformers

import holdfast
from holdfast.planning import planning
from holdfast.planning.model_shape import Setting, measure_shape

SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
SEQUENCE, BATCH = 2048, 2


def measure(router: str, checkpointing: bool) -> dict[str, float | str | bool]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16()
        holdfast.sparsify(model, experts=8, router=router)
        ids = torch.randint(0, SIZES["vocab_size"], (BATCH, SEQUENCE))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # gradients exist from now on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = model(input_ids=ids, labels=ids, use_cache=False)
    kept = torch.cuda.memory_allocated() - before
    output.loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    planned = planning.training_memory(measure_shape(model, Setting(SEQUENCE, 2)), BATCH * SEQUENCE, 2, checkpointing)
    del model, output
    gc.collect()
    return {
        "router": router,
        "checkpointing": checkpointing,
        "kept MiB": kept / 2**20,
        "peak MiB": peak / 2**20,
        "planned MiB": planned.activations / 2**20,
        "peak / planned": peak / planned.activations,
    }


def main() -> int:
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU.", file=sys.stderr)
        return 2
    for checkpointing in (False, True):
        for router in ("smoe", "symphony", "similarity", "similarity[of=attention]", "attention", "ac", "smooth"):
            print(json.dumps(measure(router, checkpointing)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

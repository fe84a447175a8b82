"""Profile the demo on a CPU: some training steps of the recipe `tiny`, by module and by operation.

python benchmarks/demo_profile.py [--router symphony] [--steps 20]
"""

import argparse
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from holdfast.progress import quiet
from holdfast.routing import Router
from holdfast.train.building import build_model
from holdfast.train.recipe import load_recipe
from holdfast.train.saved_model import make_task

SHOWN = 12


def kind_of(name: str, module: nn.Module) -> str | None:
    if isinstance(module, Router):
        return "routers"
    return {"experts": "experts", "self_attn": "attention", "lm_head": "output"}.get(name.rpartition(".")[2])


def watch(model: nn.Module) -> dict[str, float]:
    """Return the seconds of the forward by kind of module; hooks fill it."""
    spent: dict[str, float] = defaultdict(float)
    started: dict[nn.Module, float] = {}
    for name, module in model.named_modules():
        kind = kind_of(name, module)
        if kind is not None:
            module.register_forward_pre_hook(lambda module, _: started.__setitem__(module, time.perf_counter()))
            module.register_forward_hook(
                lambda module, _, __, kind=kind: spent.__setitem__(kind, spent[kind] + time.perf_counter() - started[module])  # type: ignore[misc]
            )
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default="smoe")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    quiet()
    task: Any = make_task(load_recipe("tiny"))
    k = task.recipe.sparse.k
    model = build_model(task, arguments.router, {}, seed=0, k=k).train()
    examples = task.examples(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = examples.__getitems__(range(task.recipe.training.batch))

    def step() -> None:
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    spent, begin = watch(model), time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(arguments.steps):
            step()
    whole = time.perf_counter() - begin
    print(f"{arguments.router}: {1e3 * whole / arguments.steps:.1f} ms per step, profiled; forwards of")
    for kind, seconds in sorted(spent.items(), key=lambda entry: -entry[1]):
        print(f"  {kind:12} {seconds / whole:6.1%}")
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print("operations, of the time on the CPU")
    for event in events[:SHOWN]:
        print(f"  {event.key:44} {event.self_cpu_time_total / total:6.1%}  {event.count // arguments.steps:5} per step")


if __name__ == "__main__":
    main()

"""`holdfast plan`: count what a model with each router would cost, from its config alone; print a column for each router."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from holdfast.cli.common import PluginFiles, router_names, show
from holdfast.progress import quiet

if TYPE_CHECKING:
    from holdfast.planning.planning import Plan as ModelPlan
    from holdfast.planning.planning import Planned

SCALES = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
LAYOUTS = {"ddp": "replicated (DDP)", "fsdp": "sharded (FSDP)", "expert": "expert parallel"}


def count(value: float) -> str:
    """Return a number with three digits and a unit prefix: 8.9 G."""
    return _scaled(value, SCALES, "")


def size(value: float) -> str:
    """Return bytes with three digits and a binary unit: 71.3 GiB."""
    return _scaled(value, BINARY, " B")


def _scaled(value: float, scales: tuple[tuple[float, str], ...], unit: str) -> str:
    for scale, name in scales:
        if value >= scale:
            share = value / scale
            return f"{share:.0f} {name}" if share >= 100 else f"{share:.3g} {name}"
    return f"{value:.0f}{unit}"


Rows = list[tuple[str, Callable[["Planned"], str]]]  # the name of a row, and its cell for a router
MODEL: Rows = [
    ("parameters", lambda c: count(c.parameters)),
    ("active per token", lambda c: count(c.active_parameters)),
    ("of routers", lambda c: count(c.router_parameters)),
    ("experts per token", lambda c: f"{c.experts_a_token:g}"),
    ("router state", lambda c: size(c.training_memory.state)),
]
FLOPS: Rows = [
    ("attention, projections", lambda c: count(c.forward.projections)),
    ("attention, mixing", lambda c: count(c.forward.mixing)),
    ("dense networks", lambda c: count(c.forward.dense)),
    ("experts", lambda c: count(c.forward.experts)),
    ("logits", lambda c: count(c.forward.head)),
]
MEMORY: Rows = [
    ("weights", lambda c: size(c.training_memory.weights)),
    ("gradients", lambda c: size(c.training_memory.gradients)),
    ("AdamW's moments", lambda c: size(c.training_memory.moments)),
    ("master weights", lambda c: size(c.training_memory.master)),
    ("activations, about", lambda c: size(c.activations["kept"])),
    ("  checkpointed", lambda c: size(c.activations["checkpointed"])),
    ("  of it routers", lambda c: size(c.training_memory.routers)),
    ("training", lambda c: size(c.training_memory.total)),
    ("KV cache", lambda c: size(c.inference_memory.cache)),
    ("routers' cache", lambda c: size(c.inference_memory.router_cache)),
    ("inference", lambda c: size(c.inference_memory.total)),
]
FLOPS_NOTE = "matrix products, a multiply-add is 2; router parts: forward only"


def print_plan(plan: ModelPlan, tokens: float | None = None) -> None:
    """Print a plan as tables; with `tokens`, also the FLOPs of a training on that many tokens."""
    from holdfast.report.tables import Table

    work, flops, spread = plan.workload, list(FLOPS), Rows()
    for part in dict.fromkeys(part for column in plan.columns for part, cost in column.training.parts.items() if cost):
        flops.append((f"router: {part}", lambda c, part=part: count(cost) if (cost := c.forward.parts.get(part)) else ""))  # type: ignore[misc]
    flops += [("forward", lambda c: count(c.forward.total)), ("training step", lambda c: count(c.training.total))]
    flops.append(("  of it routers", lambda c: f"{100 * c.training.router / c.training.total:.2g}%"))
    if tokens is not None:
        flops.append((f"training of {count(tokens)} tokens", lambda c: count(c.training.total * tokens)))
    one = work.gpus == 1
    for index, layout in enumerate(plan.columns[0].layouts[: 1 if one else None]):
        name = "whole model" if one else LAYOUTS[layout.name]
        spread += [
            (f"{name}: memory", lambda c, at=index: size(c.layouts[at].total)),  # type: ignore[misc]
            ("  fits", lambda c, key=layout.name: "yes" if c.fits(work.gpu_memory)[key] else "no"),  # type: ignore[misc]
            ("  sent per step", lambda c, at=index: size(c.layouts[at].traffic)),  # type: ignore[misc]
        ]
    spread.append(("sent by routers", lambda c: size(c.layouts[0].summed)))
    gpus = "One GPU, training" if one else f"Each of {work.gpus} GPUs, training"
    print(
        f"{plan.model} ({plan.model_type}): {plan.sparse_layers} of {plan.layers} layers with {plan.experts} experts; "
        f"{work.batch} x {plan.sequence} tokens per GPU and step, {work.gpus} GPU{'s' if work.gpus > 1 else ''} of "
        f"{work.gpu_memory:g} GiB, {work.dtype}{', checkpointed' if work.checkpointing else ''}"
    )
    tables = {"Model": MODEL, "FLOPs per token": flops, "Memory, all on one GPU": MEMORY, gpus: spread}
    for title, rows in tables.items():
        cells = [[name, *map(cell, plan.columns)] for name, cell in rows]
        show(Table(title, ["", *(column.router for column in plan.columns)], cells, FLOPS_NOTE if rows is flops else ""))
    for column in plan.columns:
        if column.about:
            print(f"{column.router}: {column.about}.")


@dataclass(frozen=True)
class Plan:
    """Count the parameters, FLOPs, memory and traffic of a model with each router, without building it. Only config.json is
    read.

    Examples: `holdfast plan llama --experts 16 --k 2 --gpus 8`, `holdfast plan path/to/olmoe --routers native,smooth`,
    `holdfast plan llama --experts 8 --set hidden_size=2048 num_hidden_layers=24 --routers smoe,similarity[rank=64]`
    """

    model: Positional[str]
    """A Hugging Face folder or name, a config.json, or a family: llama, qwen3, mixtral, deepseek_v3, ..."""
    routers: str | None = None
    """Router names, joined by commas; + joins names, options in brackets, layers after @; by default `smoe` and the five
    robust routers."""
    experts: int | None = None
    """For a dense model: the number of experts that replace each feed-forward network."""
    k: int | None = None
    """Experts per token of the routers that give none themselves (smoe[k=3]); by default as in the model, 2 if dense."""
    layers: str = "all"
    """Which layers get experts: all, alternate, last:2, or numbers joined by commas."""
    hidden: int | None = None
    """For a dense model: the width of an expert; by default that of the network it replaces."""
    shared: int | None = None
    """For a dense model: the number of shared experts, which run on every token; by default none."""
    set: tuple[str, ...] = ()
    """Sizes that replace those of the config, for example num_hidden_layers=48."""
    sequence: int | None = None
    """Tokens per sequence; by default 4096, or the model's limit if that is smaller."""
    batch: int = 1
    """Sequences per GPU and step."""
    tokens: float | None = None
    """Tokens of a whole training, to print its FLOPs too."""
    gpus: int = 1
    """Number of GPUs; layouts are DDP, FSDP and expert parallel."""
    gpu_memory: float = 80.0
    """GiB of memory per GPU."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type of weights and gradients; bf16 and fp16 add a float32 master copy."""
    checkpointing: bool = False
    """Recompute activations in the backward instead of storing them."""
    json: bool = False
    """Print everything as JSON instead of tables."""
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.planning import Workload, plan
        from holdfast.train.recipe import parse_pairs

        quiet()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each attempt to reach the hub
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            raise ValueError(f"tokens is {self.tokens:g}; give a finite number above 0.")
        steps = [step.strip() for step in self.layers.split(",")]
        are_numbers = all(step.removeprefix("-").isdigit() for step in steps)
        done = plan(
            self.model,
            router_names(self.routers),
            layers=[int(step) for step in steps] if are_numbers else self.layers,
            sizes=parse_pairs(self.set, "num_hidden_layers=48"),
            **{name: getattr(self, name) for name in ("experts", "k", "hidden", "shared")},
            workload=Workload(self.sequence, self.batch, self.gpus, self.dtype, self.checkpointing, self.gpu_memory),
        )
        if self.json:
            stored = done.to_dict()
            if self.tokens is not None:
                for entry in stored["columns"]:
                    entry["whole_training"] = entry["training"]["total"] * self.tokens
            print(json.dumps(stored, indent=2, allow_nan=False))
        else:
            print_plan(done, self.tokens)

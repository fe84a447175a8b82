"""`holdfast plan`: what a model with each router would cost, from its config alone."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from holdfast.cli.plan_tables import print_plan
from holdfast.cli.plugins import PluginFiles


@dataclass(frozen=True)
class Plan:
    """Count what a model with each router would have, do, hold and send, before there is one. Only config.json is read.

    Examples: `holdfast plan llama --experts 16 --k 2 --gpus 8`, `holdfast plan path/to/olmoe --router native smooth`,
    `holdfast plan llama --experts 8 --set hidden_size=2048 num_hidden_layers=24 --router smoe similarity[rank=64]`
    """

    model: Positional[str]
    """A Hugging Face folder or name, a config.json, or a family: llama, qwen3, mixtral, deepseek_v3, ..."""
    router: tuple[str, ...] = ()
    """Which routers, + joins names, options in brackets; by default the plain one and the five robust ones."""
    experts: int | None = None
    """Of a dense model: how many each feed-forward network becomes."""
    k: int | None = None
    """Experts a token; by default 2, and of a model with experts its own."""
    layers: str = "all"
    """Which: all, alternate, last:2, or numbers joined by commas."""
    hidden: int | None = None
    """Of a dense model: the width of an expert, if not the network's."""
    set: tuple[str, ...] = ()
    """Sizes in place of the config's, as num_hidden_layers=48."""
    sequence: int | None = None
    """Tokens of a sequence; by default 4096, or fewer where the model ends."""
    batch: int = 1
    """Sequences of a GPU's step."""
    tokens: float | None = None
    """Tokens of a whole training: its FLOPs are printed too."""
    gpus: int = 1
    """How many the model is spread over: ddp, fsdp and expert-parallel."""
    gpu_memory: float = 80.0
    """GiB of one."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of weights and gradients; shorter than fp32, there is a float32 master copy."""
    checkpointing: bool = False
    """Activations are computed again instead of being kept."""
    json: bool = False
    """Print everything as JSON instead of tables."""
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.planning import Workload, plan
        from holdfast.train.quiet import quiet

        self.plugins.load()
        quiet()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each try to reach the hub
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            raise ValueError(f"tokens is {self.tokens:g}; a training has more than 0, and a finite number of them.")
        done = plan(
            self.model,
            self.router,
            experts=self.experts,
            k=self.k,
            layers=_layers(self.layers),
            hidden=self.hidden,
            sizes=dict(_size(written) for written in self.set),
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


def _layers(written: str) -> str | list[int]:
    steps = [step.strip() for step in written.split(",")]
    numbers = all(step.removeprefix("-").isdigit() for step in steps)
    return [int(step) for step in steps] if numbers else written


def _size(written: str) -> tuple[str, Any]:
    import yaml

    name, sign, value = written.partition("=")
    if not sign or not name or not value:
        raise ValueError(f"{written!r} sets nothing; write a size of the config as num_hidden_layers=48.")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(f"{written!r} has no value that can be read.") from None

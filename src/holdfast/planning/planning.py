"""A model with each of several routers: what it has, does, holds and sends.

Symphony's overhead as its paper counts it (SymphonySMoE, appendix F.1), beside what this library runs and holds.

L MoE layers, M experts, k of them chosen, N tokens of one sequence. The paper counts

    memory     L M^2 numbers of 4 bytes at inference, L (M^2 + N C(k,2)) in training: the graph, and a list of the pairs of
               experts that each token chose, of all layers at once
    compute    L N M^2 at inference, L N (M^2 + C(k,2)) in training: a multiply-add as 1, no backward
    units      2^20 bytes as an MB, and 2^30 operations as a G

Ours keeps no list: co-selections are summed into a second M x M matrix, staged until the next step, which is a buffer at
inference too. A multiply-add counts 2, counting is a product of 0/1 matrices over all M^2 pairs, and the mix has a backward.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

from holdfast.errors import unknown
from holdfast.planning import flops, resources
from holdfast.planning.outline import Outline, Setting, outline, sequence_of
from holdfast.planning.resources import Layout, layouts
from holdfast.planning.skeleton import Change, Choice, default_routers, planned, read_config, require_own_weights

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
USUAL_SEQUENCE = 4096
GIB = 2**30
# What values of a config that do not go together raise, wherever they meet first.
UNFITTING = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)


@dataclass(frozen=True)
class Workload:
    """What is asked of the model. `batch` is one GPU's; `sequence` None is 4096, or what the model has room for."""

    sequence: int | None = None
    batch: int = 1
    gpus: int = 1
    dtype: str = "bf16"
    checkpointing: bool = False
    gpu_memory: float = 80.0  # GiB

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(unknown("dtype", self.dtype, DTYPES))
        for name in ("sequence", "batch", "gpus", "gpu_memory"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be {'finite' if value == math.inf else 'positive'}.")


@dataclass(frozen=True)
class Planned:
    """One router's column."""

    router: str
    parameters: int
    trained: int
    active_parameters: float
    router_parameters: int
    experts_a_token: float  # the mean, at inference
    about: str  # where that number is not certain, or a cost not known
    forward: flops.Flops
    training: flops.Flops
    activations: dict[str, float]  # bytes, "kept" and "checkpointed"
    training_memory: resources.Training
    inference_memory: resources.Inference
    layouts: tuple[Layout, ...]

    def fits(self, gpu_memory: float) -> dict[str, bool]:
        """Of each layout: is there room for it in so many GiB?"""
        return {layout.name: layout.total <= gpu_memory * GIB for layout in self.layouts}


@dataclass(frozen=True)
class Plan:
    model: str
    model_type: str
    sequence: int
    workload: Workload
    layers: int
    sparse_layers: int
    experts: int
    columns: tuple[Planned, ...]

    @property
    def tokens(self) -> int:
        """One GPU's, a step."""
        return self.sequence * self.workload.batch

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with the sums that people ask for."""
        plain = asdict(self)
        for entry, column in zip(plain["columns"], self.columns, strict=True):
            entry["forward"]["total"], entry["training"]["total"] = column.forward.total, column.training.total
            entry["training_memory"]["total"] = column.training_memory.total
            entry["inference_memory"]["total"] = column.inference_memory.total
            for place, layout in zip(entry["layouts"], column.layouts, strict=True):
                place |= {"total": layout.total, "traffic": layout.traffic}
            entry["fits"] = column.fits(self.workload.gpu_memory)
        return plain


def plan(
    model: str,
    routers: Sequence[str | Choice] = (),
    *,
    experts: int | None = None,
    k: int | None = None,
    layers: str | Sequence[int] = "all",
    hidden: int | None = None,
    sizes: Mapping[str, Any] | None = None,
    workload: Workload | None = None,
) -> Plan:
    """What a model would be with each router, from its config alone.

    model       a Hugging Face folder, its config.json, a name on the hub, or a family ("llama"); no weights are read
    routers     names of `holdfast.list_routers()`, also joined by + and with options in brackets, and "native" for an MoE;
                by default the plain one and the five robust ones
    sizes       fields of the config to change, {"num_hidden_layers": 48}
    experts, k, layers, hidden    as of `sparsify`; of a model that has experts, k and layers as of `reroute`

    Example:
        plan = holdfast.plan("llama", ["smoe", "similarity[rank=64]"], experts=8, k=2)
        print({column.router: column.training.total for column in plan.columns})
    """
    workload = workload or Workload()
    config = read_config(model, sizes)
    if not sizes:
        with _fitting(model):
            require_own_weights(model, config)
    sequence = _sequence(config, workload.sequence)
    setting = Setting(sequence, DTYPES[workload.dtype])
    change = Change(experts, k, layers, hidden)
    columns, shapes = [], []
    for name in routers or default_routers(config, k):
        choice = Choice.of(name) if isinstance(name, str) else name
        with _fitting(model):
            shapes.append(outline(planned(config, choice, change), setting))
        columns.append(_column(choice.label, shapes[-1], setting, workload))
    shape = shapes[0]
    return Plan(
        model=model,
        model_type=shape.model_type,
        sequence=sequence,
        workload=workload,
        layers=len(shape.layers),
        sparse_layers=len(shape.sparse),
        experts=max(sparse.experts for sparse in shape.sparse),
        columns=tuple(columns),
    )


@contextmanager
def _fitting(model: str) -> Iterator[None]:
    """Turn what values that do not go together raise into one sentence."""
    try:
        yield
    except UNFITTING as problem:
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise ValueError(f"{model} cannot be planned: its config does not fit together ({reason}).") from problem


def _sequence(config: Any, asked: int | None) -> int:
    fixed, longest = sequence_of(config)
    if fixed is not None:
        if asked not in (None, fixed):
            raise ValueError(f"sequence is {asked}, but the pictures of this model are {fixed} tokens; leave it out.")
        return fixed
    if asked is None:
        return USUAL_SEQUENCE if longest is None else min(USUAL_SEQUENCE, longest)
    if longest is not None and asked > longest:
        raise ValueError(f"sequence is {asked}, but the model's positions end at {longest} (max_position_embeddings).")
    return asked


def _column(label: str, shape: Outline, setting: Setting, workload: Workload) -> Planned:
    tokens, number = setting.sequence * workload.batch, setting.number
    training_memory = resources.training(shape, tokens, number, workload.checkpointing)
    notes = {sparse.active.about for sparse in shape.sparse} | {
        f"{part}: cost not declared, only its parameters and state are counted"
        for sparse in shape.sparse
        for part in sparse.undeclared
    }
    return Planned(
        router=label,
        parameters=shape.parameters,
        trained=shape.trained,
        active_parameters=shape.active_parameters(),
        router_parameters=shape.router_parameters,
        experts_a_token=sum(sparse.active.inference for sparse in shape.sparse) / len(shape.sparse),
        about="; ".join(sorted(notes - {""})),
        forward=flops.forward(shape, setting),
        training=flops.training(shape, setting, workload.checkpointing),
        activations={
            name: tokens * resources.activations(shape, number, checkpointed)
            for name, checkpointed in (("kept", False), ("checkpointed", True))
        },
        training_memory=training_memory,
        inference_memory=resources.inference(shape, tokens, number),
        layouts=tuple(
            layouts(
                shape,
                training_memory,
                gpus=workload.gpus,
                tokens=tokens,
                number=number,
                checkpointing=workload.checkpointing,
            )
        ),
    )


NUMBER = 4
PENDING = 1  # a flag, one byte a layer


@dataclass(frozen=True)
class Overhead:
    """Bytes and operations of all layers for one sequence."""

    inference_bytes: int
    training_bytes: int
    inference_operations: int
    training_operations: int


def symphony_by_the_paper(*, layers: int, experts: int, k: int, tokens: int) -> Overhead:
    graph, pairs = experts**2, comb(k, 2)
    return Overhead(
        inference_bytes=layers * graph * NUMBER,
        training_bytes=layers * (graph + tokens * pairs) * NUMBER,
        inference_operations=layers * tokens * graph,
        training_operations=layers * tokens * (graph + pairs),
    )


def symphony_here(*, layers: int, experts: int, tokens: int) -> Overhead:
    """State and matrix products of this library, for the same layers and tokens; whatever k is."""
    graph = experts**2
    state = layers * (2 * graph * NUMBER + PENDING)
    mix = 2 * layers * tokens * graph
    return Overhead(
        inference_bytes=state,
        training_bytes=state,
        inference_operations=mix,
        training_operations=3 * mix,  # the mix, the counts, and the mix's backward: the graph has no gradient
    )

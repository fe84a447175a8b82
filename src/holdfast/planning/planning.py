"""`plan`: what a model would cost with each of several routers, from its config alone.

Also Symphony's overhead as its paper counts it (SymphonySMoE, appendix F.1), and as this library runs it.
L MoE layers, M experts, k of them selected, N tokens of one sequence. The paper counts

    memory     L M^2 numbers of 4 bytes at inference, L (M^2 + N C(k,2)) in training: the graph, and a list of the pairs of
               experts that each token selected, of all layers at once
    compute    L N M^2 at inference, L N (M^2 + C(k,2)) in training: a multiply-add as 1, no backward
    units      2^20 bytes as an MB, and 2^30 operations as a G

Holdfast stores no list: co-selections are summed into a second M x M matrix, staged until the next step. It is a buffer, at
inference too. Here a multiply-add counts 2, counting is a product of 0/1 matrices over all M^2 pairs, and the mix has a
backward.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import unknown_name
from holdfast.planning.meta_model import Change, Choice, build_on_meta, default_routers, read_config, require_own_weights
from holdfast.planning.model_shape import ModelShape, Setting, measure_shape, sequence_lengths
from holdfast.planning.resources import (
    Flops,
    InferenceMemory,
    Layout,
    TrainingMemory,
    activation_bytes,
    forward_flops,
    inference_memory,
    layouts,
    training_flops,
    training_memory,
)

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
DEFAULT_SEQUENCE = 4096
GIB = 2**30
FLOAT_BYTES = 4
PENDING_FLAG_BYTES = 1  # per layer
# Inconsistent values of a config may raise any of these, anywhere in a model.
CONFIG_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)


@dataclass(frozen=True)
class Workload:
    """How the model is used. `batch` is per GPU; `sequence=None` is 4096, or less if the model has fewer positions."""

    sequence: int | None = None
    batch: int = 1
    gpus: int = 1
    dtype: str = "bf16"
    checkpointing: bool = False
    gpu_memory: float = 80.0  # GiB

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(unknown_name("dtype", self.dtype, DTYPES))
        for name in ("sequence", "batch", "gpus", "gpu_memory"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be {'finite' if value == math.inf else 'positive'}.")


@dataclass(frozen=True)
class Planned:
    """The costs of the model with one router: one column of the plan."""

    router: str
    parameters: int
    trained: int
    active_parameters: float
    router_parameters: int
    experts_a_token: float  # the mean, at inference
    about: str  # which of the numbers are uncertain, and which parts declare no cost
    forward: Flops
    training: Flops
    activations: dict[str, float]  # bytes, "kept" and "checkpointed"
    training_memory: TrainingMemory
    inference_memory: InferenceMemory
    layouts: tuple[Layout, ...]

    def fits(self, gpu_memory: float) -> dict[str, bool]:
        """Return, by layout, whether it fits into `gpu_memory` GiB."""
        return {layout.name: layout.total <= gpu_memory * GIB for layout in self.layouts}


@dataclass(frozen=True)
class Plan:
    """The costs of one model with each of several routers."""

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
        """Return the tokens of one GPU in a step."""
        return self.sequence * self.workload.batch

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, with totals."""
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
    shared: int | None = None,
    sizes: Mapping[str, Any] | None = None,
    workload: Workload | None = None,
) -> Plan:
    """Return what a model would cost with each router, from its config alone.

    model       a Hugging Face folder, its config.json, a name on the hub, or a family ("llama"); no weights are read
    routers     names of `holdfast.list_routers()`, also joined by + and with options in brackets, and "native" for an MoE;
                by default the plain one and the five robust ones
    sizes       fields of the config to change, {"num_hidden_layers": 48}
    experts, k, layers, hidden, shared    as for `sparsify`; for a model that has experts, k and layers as for `reroute`. `k`
                is for the routers that give none themselves ("smoe[k=3]")

    Example:
        plan = holdfast.plan("llama", ["smoe", "similarity[rank=64]"], experts=8, k=2)
        print({column.router: column.training.total for column in plan.columns})
    """
    workload = workload or Workload()
    config = read_config(model, sizes)
    if not sizes:
        with _explain_config_errors(model):
            require_own_weights(model, config)
    sequence = _sequence(config, workload.sequence)
    setting = Setting(sequence, DTYPES[workload.dtype])
    change = Change(experts, k, layers, hidden, shared=shared)
    columns, shapes = [], []
    for name in routers or default_routers(config, k):
        choice = Choice.of(name) if isinstance(name, str) else name
        with _explain_config_errors(model):
            shapes.append(measure_shape(build_on_meta(config, choice, change), setting))
        columns.append(_plan_router(choice.label, shapes[-1], setting, workload))
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
def _explain_config_errors(model: str) -> Iterator[None]:
    """Raise ValueError with a one-line message for any error that inconsistent values of a config cause."""
    try:
        yield
    except CONFIG_ERRORS as problem:
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise ValueError(f"{model} cannot be planned: its config is inconsistent ({reason}).") from problem


def _sequence(config: Any, requested: int | None) -> int:
    fixed, longest = sequence_lengths(config)
    if fixed is not None:
        if requested not in (None, fixed):
            raise ValueError(f"sequence is {requested}, but the images of this model have {fixed} tokens; leave it out.")
        return fixed
    if requested is None:
        return DEFAULT_SEQUENCE if longest is None else min(DEFAULT_SEQUENCE, longest)
    if longest is not None and requested > longest:
        raise ValueError(f"sequence is {requested}, but the model has {longest} positions (max_position_embeddings).")
    return requested


def _plan_router(label: str, shape: ModelShape, setting: Setting, workload: Workload) -> Planned:
    tokens, number_bytes, checkpointing = setting.sequence * workload.batch, setting.number_bytes, workload.checkpointing
    memory = training_memory(shape, tokens, number_bytes, checkpointing)
    notes = {note for sparse in shape.sparse for note in (sparse.active.about, *sparse.notes)}
    return Planned(
        router=label,
        parameters=shape.parameters,
        trained=shape.trained,
        active_parameters=shape.active_parameters(),
        router_parameters=shape.router_parameters,
        experts_a_token=sum(sparse.active.inference for sparse in shape.sparse) / len(shape.sparse),
        about="; ".join(sorted(notes - {""})),
        forward=forward_flops(shape, setting),
        training=training_flops(shape, setting, checkpointing),
        activations={
            name: tokens * activation_bytes(shape, number_bytes, checkpointed)
            for name, checkpointed in (("kept", False), ("checkpointed", True))
        },
        training_memory=memory,
        inference_memory=inference_memory(shape, tokens, number_bytes),
        layouts=tuple(
            layouts(
                shape,
                memory,
                gpus=workload.gpus,
                tokens=tokens,
                number_bytes=number_bytes,
                checkpointing=checkpointing,
            )
        ),
    )


@dataclass(frozen=True)
class Overhead:
    """What Symphony adds to a model: bytes and operations of all layers for one sequence."""

    inference_bytes: int
    training_bytes: int
    inference_operations: int
    training_operations: int


def symphony_by_the_paper(*, layers: int, experts: int, k: int, tokens: int) -> Overhead:
    """Return the overhead as the paper counts it."""
    graph, pairs = experts**2, math.comb(k, 2)
    return Overhead(
        inference_bytes=layers * graph * FLOAT_BYTES,
        training_bytes=layers * (graph + tokens * pairs) * FLOAT_BYTES,
        inference_operations=layers * tokens * graph,
        training_operations=layers * tokens * (graph + pairs),
    )


def symphony_here(*, layers: int, experts: int, tokens: int) -> Overhead:
    """Return the state and the matrix products of this library for the same layers and tokens; they do not depend on k."""
    graph = experts**2
    state = layers * (2 * graph * FLOAT_BYTES + PENDING_FLAG_BYTES)
    mix = 2 * layers * tokens * graph
    return Overhead(
        inference_bytes=state,
        training_bytes=state,
        inference_operations=mix,
        training_operations=3 * mix,  # the mix, the counts, and one product in the mix's backward: the graph has no gradient
    )

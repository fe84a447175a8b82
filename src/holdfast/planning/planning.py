"""`plan`: what a model would cost with each of several routers, from its config alone: FLOPs, memory and communication.

FLOPs per token: a multiply-add counts 2, only matrix products count, a backward costs twice its forward. Causal attention
counts the half that it needs. Those of routers' parts are counted, because some of them have no backward.

Memory in bytes, b bytes per number of the model:

    weights      b per parameter                       gradients    b per trained parameter
    AdamW        8 per trained parameter (two float32 moments), and 4 more for a float32 master copy if b < 4
    activations  per token and layer, in numbers of b bytes; attention in blocks (flash), which stores no N x N matrix:
                   6 d, and 8 bytes d if b < 4         two norms: their inputs (in float32 too), scaled, and their outputs
                   H (D + D_v) + H_kv (D + D_v)        queries and the mixed values, keys and values
                   4 hidden, not gated 2 hidden        a dense network: outputs of its first maps, activated, multiplied
                   Holdfast's experts   rows 3 hidden                     not gated: rows 2 hidden
                   native experts       rows (2 d + 4 hidden)             not gated: rows (2 d + 2 hidden)
                 per token outside the layers: 2 d, b per logit, and while the loss is computed 12 bytes more per logit (its
                 float32 copy, its log-probability, its gradient)
    checkpointed d per token and layer, and the activations of one layer or of the loss, whichever is larger

Activations are an estimate. A token has one row for each of its slots. A router that may use a different number of experts
for each token reserves memory for all E on a GPU, because reading the number would synchronise with the host: its slots are
E. `smooth` declares fewer rows, k + 2 budget.

Communication, bytes that each of n GPUs sends in a training step, and what it holds, for three layouts:

    ring all-reduce of S bytes 2 S (n-1)/n        all-gather or reduce-scatter of S bytes S (n-1)/n
    exchange     a token's vector is sent once to each other GPU that holds one of its experts, and back, in the forward and
                 in the backward; with it K indices of 8 bytes, sent once, and K float32 weights, sent once, with gradients
                 that come back: 4 d b + 16 K. If experts are selected uniformly, K of E per token, it is sent to
                 (e-1) (1 - C(E-E/e, K) / C(E, K)) other GPUs on average; to fewer if a family (DeepSeek) selects within
                 groups. A recomputation sends it again, d b + 12 K, and back again, d b, only if something after the
                 experts is saved for the backward: torch stops at the last tensor that it needs
    ddp          everything on every GPU; gradients are all-reduced
    fsdp         weights, gradients and optimizer in n shards; weights are gathered for the forward and again for the
                 backward, which a recomputation uses too; gradients are reduce-scattered; two layers are complete at a time,
                 the current one and the next
    expert       experts in e shards, e the greatest common divisor of n and E; the rest as ddp, and the experts' gradients
                 are all-reduced among the n / e GPUs that hold the same experts

Router statistics, float32 or int64, are all-reduced in each training forward in every layout. A recomputation updates no
state and sums only what routing and losses need.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.errors import require_known
from holdfast.planning.meta_model import build_on_meta, default_routers, read_config, require_own_weights
from holdfast.planning.model_shape import LayerShape, ModelShape, Setting, measure_shape
from holdfast.routing.declarations import FLOAT, INTEGER

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
DEFAULT_SEQUENCE = 4096
GIB = 2**30
MOMENTS = 8  # bytes per parameter of AdamW
MASTER = 4
# Inconsistent values of a config may raise any of these, anywhere in a model.
CONFIG_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)


@dataclass(frozen=True)
class Flops:
    """FLOPs per token, the mean over a sequence."""

    projections: float  # of attention
    mixing: float  # attention's scores and weighted sums
    dense: float  # feed-forward networks that every token passes
    experts: float
    head: float  # outside the layers: logits, image patches
    parts: dict[str, float] = field(default_factory=dict)  # of the routers, by part

    @property
    def router(self) -> float:
        return sum(self.parts.values())

    @property
    def total(self) -> float:
        return self.projections + self.mixing + self.dense + self.experts + self.head + self.router


def forward_flops(shape: ModelShape) -> Flops:
    """Return the FLOPs of inference: one forward over a sequence."""
    return _flops(shape, 1, 1, "inference", "forward")


def training_flops(shape: ModelShape, checkpointing: bool = False) -> Flops:
    """Return the FLOPs of a training step: forward, backward and the routers' state updates.

    Checkpointing adds a second forward of every layer, in which routers update no state.
    """
    again = ("again",) if checkpointing else ()
    return _flops(shape, 3 + len(again), 3, "training", "training", *again)


def _flops(shape: ModelShape, times: int, head_times: int, active: str, *of_parts: str) -> Flops:
    """Return the FLOPs of layers that run so many times; `of_parts` are the fields of `PartFlops` to add up."""
    parts: dict[str, float] = {}
    for sparse in shape.sparse:
        for name, flops in sparse.part_flops.items():
            parts[name] = parts.get(name, 0.0) + sum(getattr(flops, run) for run in of_parts)
    return Flops(
        projections=times * sum(layer.attention.projections for layer in shape.layers),
        mixing=times * sum(layer.attention.mixing for layer in shape.layers),
        dense=times * sum(layer.dense for layer in shape.layers),
        experts=times * sum(sparse.flops * getattr(sparse.active, active) for sparse in shape.sparse),
        head=head_times * shape.outside_flops,
        parts=parts,
    )


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one model and the tokens of a batch, on one GPU that holds all of it."""

    weights: float
    gradients: float
    moments: float
    master: float
    activations: float
    routers: float  # the part of the activations that routers save
    state: float

    @property
    def held(self) -> float:
        """Return the bytes that stay in memory between steps."""
        return self.weights + self.gradients + self.moments + self.master + self.state

    @property
    def total(self) -> float:
        return self.held + self.activations


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes while decoding, for the tokens of all sequences together."""

    weights: float
    state: float
    cache: float  # keys and values
    router_cache: float

    @property
    def total(self) -> float:
        return self.weights + self.state + self.cache + self.router_cache


def training_memory(shape: ModelShape, tokens: int, number_bytes: int, checkpointing: bool = False) -> TrainingMemory:
    """Return the memory of a training step on `tokens` tokens."""
    saved_by_routers = [sum(cost.kept for cost in sparse.costs) for sparse in shape.sparse]
    routers = max(saved_by_routers, default=0.0) if checkpointing else sum(saved_by_routers)
    return TrainingMemory(
        weights=float(number_bytes * shape.parameters),
        gradients=float(number_bytes * shape.trained),
        moments=float(MOMENTS * shape.trained),
        master=0.0 if number_bytes >= MASTER else float(MASTER * shape.trained),
        activations=tokens * activation_bytes(shape, number_bytes, checkpointing),
        routers=tokens * routers,
        state=float(shape.state),
    )


def inference_memory(shape: ModelShape, tokens: int, number_bytes: int) -> InferenceMemory:
    """Return the memory of decoding, with `tokens` tokens in the caches."""
    cache, rows = 0.0, 0.0
    if shape.decodes:
        cache = float(sum(number_bytes * layer.attention.cached for layer in shape.layers))
        rows = sum(cost.cached for sparse in shape.sparse for cost in sparse.costs)
    return InferenceMemory(float(number_bytes * shape.parameters), float(shape.state), tokens * cache, tokens * rows)


def activation_bytes(shape: ModelShape, number_bytes: int, checkpointing: bool) -> float:
    """Return the activations in bytes per token, at the peak of a training step."""
    each = [_layer_activation_bytes(layer, number_bytes) for layer in shape.layers]
    outside = number_bytes * (2 * shape.dim + shape.vocabulary)
    loss = 3.0 * FLOAT * shape.vocabulary
    if not checkpointing:
        return sum(each) + outside + loss
    inputs = sum(number_bytes * layer.dim for layer in shape.layers)
    return inputs + outside + max(*each, loss)


def _layer_activation_bytes(layer: LayerShape, number_bytes: int) -> float:
    """Return what one layer saves for its backward, in bytes per token."""
    attention = layer.attention
    width = attention.key_width + attention.value_width
    numbers = 6.0 * layer.dim + attention.key_heads * width + attention.heads * width
    numbers += 2 * max(layer.dense_widths - layer.dim, 0)
    other_bytes = float(FLOAT * attention.heads)  # the softmax's log-sums, float32 in any dtype
    if number_bytes < FLOAT:
        other_bytes += 2 * FLOAT * layer.dim
    if layer.sparse is not None:
        sparse = layer.sparse
        slot = sparse.inner + sparse.hidden if sparse.runs_holdfast else 2 * (layer.dim + sparse.inner)
        numbers += sparse.active.training_rows * slot
        other_bytes += sum(cost.kept for cost in sparse.costs)
    return number_bytes * numbers + other_bytes


@dataclass(frozen=True)
class Layout:
    """What one GPU holds, and what it sends in a step, in bytes."""

    name: str
    held: float  # weights, gradients, optimizer, state
    gathered: float  # weights of other GPUs, held temporarily
    activations: float
    sent: float  # for weights and gradients
    exchanged: float  # tokens sent to experts and back
    summed: float  # by routers, for their state and for selecting

    @property
    def total(self) -> float:
        return self.held + self.gathered + self.activations

    @property
    def traffic(self) -> float:
        return self.sent + self.exchanged + self.summed


def layouts(
    shape: ModelShape, memory: TrainingMemory, gpus: int, tokens: int, number_bytes: int, checkpointing: bool = False
) -> list[Layout]:
    """Return the layouts "ddp", "fsdp" and "expert". `tokens` is the number of tokens of one GPU."""
    costs = [cost for sparse in shape.sparse for cost in sparse.costs]
    summed = sum(cost.summed + (cost.summed_again if checkpointing else 0) for cost in costs)
    gathered = (2 if checkpointing else 1) * tokens * sum(cost.gathered for cost in costs)
    by_routers = all_reduce_bytes(float(summed), gpus) + gathered * (gpus - 1)
    sharded, activations = memory.held - memory.state, memory.activations
    ddp = Layout("ddp", memory.held, 0.0, activations, all_reduce_bytes(memory.gradients, gpus), 0.0, by_routers)

    two_layers = 2 * number_bytes * max(layer.parameters for layer in shape.layers) if gpus > 1 else 0.0
    sent = (2 * memory.weights + memory.gradients) * (gpus - 1) / gpus
    fsdp = Layout("fsdp", sharded / gpus + memory.state, two_layers, activations, sent, 0.0, by_routers)

    shards = math.gcd(gpus, *(sparse.experts for sparse in shape.sparse))
    experts = shape.expert_parameters / shape.parameters
    held = sharded * (1 - experts + experts / shards) + memory.state
    exchanged = tokens * sum(
        mean_other_ranks(sparse.experts, sparse.active.training, shards)
        * exchanged_bytes(layer, number_bytes, checkpointing)
        for layer in shape.layers
        if (sparse := layer.sparse) is not None
    )
    sent = all_reduce_bytes(memory.gradients * (1 - experts), gpus)
    sent += all_reduce_bytes(memory.gradients * experts / shards, gpus // shards)
    return [ddp, fsdp, Layout("expert", held, 0.0, activations, sent, exchanged, by_routers)]


def all_reduce_bytes(size: float, gpus: int) -> float:
    """Return the bytes that each GPU sends in a ring all-reduce of `size` bytes."""
    return 2 * size * (gpus - 1) / gpus


def mean_other_ranks(experts: int, used: float, ranks: int) -> float:
    """Return how many other ranks hold one of the `used` experts of a token, on average, if all sets are equally likely.

    If `used` is not a whole number, some tokens use the next lower number of experts and the rest the next higher one.
    """

    def mean(number: int) -> float:
        return (ranks - 1) * (1 - math.comb(experts - experts // ranks, number) / math.comb(experts, number))

    lower = math.floor(used)
    return mean(lower) if lower == used else (lower + 1 - used) * mean(lower) + (used - lower) * mean(lower + 1)


def exchanged_bytes(layer: LayerShape, number_bytes: int, checkpointing: bool = False) -> float:
    """Return the bytes that a step sends for each pair of a token and another rank that holds its experts."""
    assert layer.sparse is not None
    again = int(checkpointing)
    vectors = 4 + again * (2 if layer.continues_after_experts else 1)
    indices_and_weights = layer.sparse.active.slots * (INTEGER * (1 + again) + FLOAT * (2 + again))
    return vectors * layer.dim * number_bytes + indices_and_weights


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
        require_known("dtype", self.dtype, DTYPES)
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
            for name in ("forward", "training", "training_memory", "inference_memory"):
                entry[name]["total"] = getattr(column, name).total
            for place, layout in zip(entry["layouts"], column.layouts, strict=True):
                place |= {"total": layout.total, "traffic": layout.traffic}
            entry["fits"] = column.fits(self.workload.gpu_memory)
        return plain


def plan(
    model: str,
    routers: Sequence[str] = (),
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
    change: dict[str, Any] = {"experts": experts, "k": k, "layers": layers, "hidden": hidden, "shared": shared}
    columns, shapes = [], []
    for router in routers or default_routers(config, k):
        with _explain_config_errors(model):
            shapes.append(measure_shape(build_on_meta(config, router, **change), setting))
        columns.append(_plan_router(router, shapes[-1], setting, workload))
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
    if patch := getattr(config, "patch_size", None):
        fixed = (int(config.image_size) // int(patch)) ** 2 + 1
        if requested not in (None, fixed):
            raise ValueError(f"sequence is {requested}, but the images of this model have {fixed} tokens; leave it out.")
        return fixed
    longest = getattr(config, "max_position_embeddings", None)
    if requested is None:
        return DEFAULT_SEQUENCE if longest is None else min(DEFAULT_SEQUENCE, int(longest))
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
        forward=forward_flops(shape),
        training=training_flops(shape, checkpointing),
        activations={
            name: tokens * activation_bytes(shape, number_bytes, checkpointed)
            for name, checkpointed in (("kept", False), ("checkpointed", True))
        },
        training_memory=memory,
        inference_memory=inference_memory(shape, tokens, number_bytes),
        layouts=tuple(layouts(shape, memory, workload.gpus, tokens, number_bytes, checkpointing)),
    )

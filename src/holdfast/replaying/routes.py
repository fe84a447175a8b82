"""`Routes`: the experts of every token in every MoE layer of a model, recorded in one run to be replayed in another.

An inference engine returns the experts of a sequence as (n, L, K), where n is the number of its tokens, or one fewer:
nothing is computed for the last token. L counts the MoE layers, or all layers, and then values of dense layers mean nothing.
`Routes.from_sequences` puts such records at their places in a batch of a trainer. `RoutedModel` is what routes belong to:
the MoE layers of a model, as plain data that is saved with them.

    vLLM     `output.routed_experts`, a numpy array
    SGLang   `meta_info["routed_experts"]`, base64 of int32 numbers; with `routed_experts_start_len`, from that token on
    others   base64 of a .npy file

B rows of N tokens in the batch, S sequences
"""

import base64
import binascii
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any, final

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.checked import Limits, from_mapping
from holdfast.files import require_regular, write_atomically
from holdfast.hub.families import text_config
from holdfast.hub.forwards import require_no_copies
from holdfast.hub.install import specs_of
from holdfast.hub.layers import moe_layers
from holdfast.hub.tracing import Step, Trace, layers_of_images
from holdfast.routing import Routing
from holdfast.routing.replaying import NO_RECORD, require_values

FORMAT = "1"
LARGEST_INT8 = 127
NPY = b"\x93NUMPY"
Span = tuple[int, Tensor]  # a row of the batch, and the positions of a sequence's tokens in it
PLACES = "attention_mask, position_ids or cu_seq_lens"
MOST_LAYERS, MOST_EXPERTS = 4096, 2**15 - 1  # of routes from a file; an expert is an int16


@final
@dataclass(frozen=True)
class RoutedModel:
    """The MoE layers of a model, in its order. Routes fit every model with the same layers, whatever its weights are.

    Those of a vision-language model are the layers of its language part: the tokens of other parts are not in `input_ids`.
    """

    model_type: str
    places: list[Annotated[int, Limits(0, MOST_LAYERS, "0 or more")]]  # of the MoE layers among all layers of the model
    all_layers: int  # dense layers included
    experts: list[Annotated[int, Limits(1, MOST_EXPERTS, f"from 1 to {MOST_EXPERTS}")]]  # of each MoE layer
    k: list[int | None]  # experts of every token in each MoE layer; None: tokens may have different numbers

    def __post_init__(self) -> None:
        if not 0 < len(self.places) == len(self.experts) == len(self.k) <= MOST_LAYERS:
            raise ValueError("it has no equally long lists of layers.")

    @classmethod
    def from_model(cls, model: nn.Module) -> "RoutedModel":
        """Return the description of a model, which may be wrapped (PEFT, DDP, `torch.compile`)."""
        inner = unwrapped(model)
        found, specs, config = moe_layers(inner), specs_of(inner), text_config(inner)
        found = [layer for layer in found if not layer.of_images]
        if not found:
            raise ValueError(
                "routes are those of tokens of input_ids, and the MoE layers of this model are all of images; make its "
                "language part sparse too."
            )
        places, k = [], []
        for index, layer in enumerate(found):
            numbers = re.findall(r"(?:^|\.)(\d+)(?=\.)", f"{layer.name}.")  # the first is that of its stack of layers
            places.append(int(numbers[0]) if numbers else index)
            ragged = layer.router is not None and layer.router.select.ragged
            k.append(None if ragged else int(layer.gate.top_k if layer.router is None else specs[layer.name].k))
        count = getattr(config, "num_hidden_layers", None)
        count = count if isinstance(count, int) and count > max(places) else max(places) + 1
        return cls(str(inner.config.model_type), places, count, [layer.size[1] for layer in found], k)

    @property
    def layers(self) -> int:
        """The number of MoE layers."""
        return len(self.places)

    def layer_name(self, index: int) -> str:
        """Return the name of an MoE layer for messages."""
        return f"layer {self.places[index]}"

    def require_same(self, other: "RoutedModel") -> None:
        """Raise ValueError if `other`, the model that these routes are for, has other MoE layers."""
        for what, mine, its in (
            ("a model of type", self.model_type, other.model_type),
            ("the MoE layers", self.places, other.places),
            ("these numbers of experts:", self.experts, other.experts),
        ):
            if mine != its:
                raise ValueError(f"the routes are of another model: they are of {what} {mine}, and this one has {its}.")

    def widened(self, routes: Tensor, slots: int) -> Tensor:
        """Return `routes (...,L,K)` with unused slots added, up to `slots` of them; -1 where a token has no record."""
        unused = torch.tensor(self.experts, dtype=routes.dtype, device=routes.device).view(-1, 1)
        added = unused.expand(*routes.shape[:-1], slots - routes.shape[-1])
        return torch.cat([routes, added.where((routes >= 0).all(-1, keepdim=True), NO_RECORD)], dim=-1)

    def to_json(self) -> str:
        """Return this description as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RoutedModel":
        """Return the description that `to_json` wrote. It is untrusted: raise ValueError if a value is wrong."""
        try:
            of: RoutedModel = from_mapping(cls, json.loads(text))
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"the description of its model cannot be used: {str(problem)[:200]}") from None
        return of


@final
@dataclass(frozen=True)
class Routes:
    """Recorded experts (B,N,L,K) of B sequences of N tokens, in the L MoE layers of a model, K slots each.

    `model(..., routed_experts=routes)` and `holdfast.replay` replay them. A batch of a trainer may also have the tensor
    `routes.experts`: it can be shuffled, split and padded (with -1) like token ids.
    """

    experts: Tensor  # (B,N,L,K) int8 or int16; the layer's number of experts: unused slot; -1 in every slot: no record
    of: RoutedModel

    @classmethod
    def from_tensor(cls, experts: Tensor, model: nn.Module | RoutedModel) -> "Routes":
        """Return the routes (B,N,L,K) of a model, after checks of their shape and values."""
        of = model if isinstance(model, RoutedModel) else RoutedModel.from_model(model)
        is_integer = not (experts.is_floating_point() or experts.is_complex() or experts.dtype == torch.bool)
        if experts.dim() != 4 or not is_integer or not experts.shape[-1]:
            raise ValueError(f"routes are {experts.dtype} of shape {tuple(experts.shape)}; expected integers (B, N, L, K).")
        if experts.shape[2] != of.layers:
            raise ValueError(f"the routes have {experts.shape[2]} layers; this model has {of.layers} MoE layers.")
        for index, (count, k) in enumerate(zip(of.experts, of.k, strict=True)):
            require_values(experts[:, :, index].long(), count, k, of.layer_name(index))
        return cls(experts.to(torch.int8 if max(of.experts) <= LARGEST_INT8 else torch.int16), of)

    @classmethod
    def from_trace(cls, trace: Trace, model: nn.Module) -> "Routes":
        """Return the routes of the last forward in a `holdfast.trace` of the model. Padding gets no record."""
        if not trace.steps or trace.steps[-1].shape is None:
            raise ValueError("the trace has no forward with a known batch: call model(...) inside it, with token ids.")
        shape, of = trace.steps[-1].shape, RoutedModel.from_model(model)
        return cls.from_tensor(join_layers(routings_of_tokens(trace.steps[-1], model), shape, trace.token_mask), of)

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Any],
        model: nn.Module | RoutedModel,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens: Tensor | None = None,
        start: int | Sequence[int] = 0,
    ) -> "Routes":
        """Return the records of single sequences, as vLLM and SGLang return them, at the places that they have in a batch.

        sequences        one record for each sequence: (n, L, K) as an array, a tensor, a list, or base64 of int32 numbers or
                         of a .npy file; a list of pairs (first token, record) for several turns; None: no record
        attention_mask   (B,N): a sequence in each row, padded left or right
        position_ids     (B,N): packed rows, in which every sequence counts from 0
        cu_seq_lens      (S+1,): one packed row, sequence s from cu_seq_lens[s] to cu_seq_lens[s + 1]
        start            the token of the sequence that the first row of its record belongs to, one number or one for each
                         sequence (SGLang: `routed_experts_start_len`)

        Tokens without a record, such as the last one of each sequence, are routed live.
        """
        of = model if isinstance(model, RoutedModel) else RoutedModel.from_model(model)
        shape, spans = _spans_of(attention_mask, position_ids, cu_seq_lens)
        starts = [start] * len(spans) if isinstance(start, int) else list(start)
        return cls.from_tensor(_place_records(sequences, starts, shape, spans, of), of)

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, rows: Any) -> "Routes":
        """Return the routes of some sequences: `routes[2:5]`, `routes[permutation]`."""
        chosen = self.experts[rows]
        return replace(self, experts=chosen if chosen.dim() == 4 else chosen.unsqueeze(0))

    def to(self, device: torch.device | str) -> "Routes":
        """Return the routes on another device."""
        return replace(self, experts=self.experts.to(device))

    @property
    def recorded(self) -> Tensor:
        """(B,N) bool: the tokens that have a record in every layer."""
        return (self.experts >= 0).all(-1).all(-1)

    def to_sequences(self) -> list[Tensor]:
        """Return the record (n,L,K) of each row, from its first recorded token to its last, as `from_sequences` takes it."""
        places = [row.nonzero().flatten().tolist() for row in self.recorded]
        return [row[at[0] : at[-1] + 1] if at else row[:0] for row, at in zip(self.experts, places, strict=True)]

    def differs(self, other: "Routes") -> Tensor:
        """Return (B,N,L) bool: where two records have different sets. Tokens that lack a record in one do not count."""
        self.of.require_same(other.of)
        both = (self.experts >= 0).all(-1) & (other.experts >= 0).all(-1)
        mine, its = (routes._sets() for routes in (self, other))
        return (mine != its).any(-1) & both

    def _sets(self) -> Tensor:
        """Return (B,N,L,E) bool: the recorded sets, with E of the largest layer."""
        most = max(self.of.experts)
        unused = torch.tensor(self.of.experts, device=self.experts.device).view(-1, 1)
        slots = self.experts.long()
        slots = slots.where((slots >= 0) & (slots < unused), most)
        return torch.zeros(*slots.shape[:-1], most + 1, dtype=torch.bool, device=slots.device).scatter(-1, slots, True)[
            ..., :-1
        ]

    def require_model(self, model: nn.Module) -> None:
        """Raise ValueError if these are routes of a model with other MoE layers."""
        if not torch.compiler.is_compiling():
            self.of.require_same(RoutedModel.from_model(model))

    def save(self, path: str | Path) -> None:
        """Write the routes to a safetensors file, with the layers that they belong to."""
        from safetensors.torch import save

        tensors = {"experts": self.experts.detach().cpu().contiguous()}
        write_atomically(Path(path), save(tensors, {"holdfast_routes": FORMAT, "of": self.of.to_json()}))

    @classmethod
    def load(cls, path: str | Path) -> "Routes":
        """Read routes that `save` wrote. The file is untrusted: raise ValueError if it is anything else."""
        tensors, notes = read_tensors(Path(path))
        if list(tensors) != ["experts"] or notes.get("holdfast_routes") != FORMAT:
            raise ValueError(f"{path} has no routes that this Holdfast can read (holdfast_routes format {FORMAT}).")
        try:
            return cls.from_tensor(tensors["experts"], RoutedModel.from_json(notes.get("of", "")))
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from None


def read_tensors(path: Path, *, only_notes: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the notes of a safetensors file; raise ValueError if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        require_regular(path)
        with safe_open(str(path), framework="pt") as file:
            found = {} if only_notes else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return found, file.metadata() or {}
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; name a file of Rollout.save or Routes.save.") from None
    except (SafetensorError, OSError) as problem:
        raise ValueError(f"{path} cannot be read as safetensors: {problem}.") from None


def routings_of_tokens(step: Step, model: Any) -> list[Routing]:
    """Return the routings in a step of the MoE layers whose tokens are those of `input_ids`: not those of images."""
    others = layers_of_images(unwrapped(model))
    return [step[layer] for layer in range(len(step)) if layer not in others]


def join_layers(routings: list[Routing], shape: tuple[int, int], token_mask: Tensor | None) -> Tensor:
    """Return (B,N,L,K) int64: the experts of each layer's routing, -1 for padding, as few slots as there are in use."""
    for index, routing in enumerate(routings):
        if len(routing.experts) != shape[0] * shape[1]:
            raise ValueError(
                f"MoE layer {index} has {len(routing.experts)} tokens, but the batch has {shape[0]} x {shape[1]}: routes "
                "are recorded for models in which every layer has the tokens of the input."
            )
    slots = max(1, *(int(routing.used.sum(-1).max()) if len(routing.experts) else 1 for routing in routings))
    layers = []
    for routing in routings:
        unused, missing = routing.gates.shape[-1], slots - routing.experts.shape[-1]
        layers.append(torch.nn.functional.pad(routing.experts[:, :slots], (0, max(0, missing)), value=unused))
    first = layers[0].device
    joined = torch.stack([layer.to(first) for layer in layers], dim=1).unflatten(0, shape)
    return joined if token_mask is None else joined.where(token_mask.view(*shape, 1, 1).to(first), NO_RECORD)


def _spans_of(
    attention_mask: Tensor | None, position_ids: Tensor | None, cu_seq_lens: Tensor | None
) -> tuple[tuple[int, int], list[Span]]:
    """Return the shape (B,N) of a batch and the places of its sequences; exactly one argument must be given.

    In `position_ids`, each sequence counts from 0.
    """
    if sum(each is not None for each in (attention_mask, position_ids, cu_seq_lens)) != 1:
        raise ValueError(f"the places of the sequences in the batch are unknown: give one of {PLACES}.")
    if attention_mask is not None:
        mask = _two_dimensional(attention_mask, "attention_mask") != 0
        return (mask.shape[0], mask.shape[1]), [(row, real.nonzero().flatten()) for row, real in enumerate(mask)]
    if position_ids is not None:
        spans: list[Span] = []
        for row, positions in enumerate(_two_dimensional(position_ids, "position_ids")):
            starts = (positions == 0).nonzero().flatten().tolist()
            places = [torch.arange(first, last) for first, last in pairwise([*starts, len(positions)])]
            counted = torch.cat([torch.arange(len(each)) for each in places] or [torch.empty(0)])
            if not torch.equal(counted.long(), positions.long()):
                raise ValueError(
                    f"position_ids do not count from 0 in each sequence of row {row}; for padded rows, give attention_mask."
                )
            spans += [(row, each) for each in places]
        return (position_ids.shape[0], position_ids.shape[1]), spans
    assert cu_seq_lens is not None
    ends = torch.as_tensor(cu_seq_lens).flatten().long().cpu()
    if len(ends) < 2 or int(ends[0]) != 0 or bool((ends.diff() <= 0).any()):
        raise ValueError(f"cu_seq_lens are {ends.tolist()[:8]}; expected growing numbers from 0 to the number of tokens.")
    return (1, int(ends[-1])), [(0, torch.arange(first, last)) for first, last in pairwise(ends.tolist())]


def _two_dimensional(given: Tensor, name: str) -> Tensor:
    values = torch.as_tensor(given).cpu()
    if values.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(values.shape)}; expected (B, N).")
    return values


def _place_records(
    sequences: Sequence[Any], starts: Sequence[int], shape: tuple[int, int], spans: list[Span], of: RoutedModel
) -> Tensor:
    """Return (B,N,L,K) int64: the records of `sequences` at the places of their tokens, and -1 everywhere else."""
    if len(sequences) != len(spans) or len(starts) != len(spans):
        raise ValueError(f"there are {len(sequences)} records and {len(starts)} starts for {len(spans)} sequences.")
    pieces: list[tuple[Span, Tensor]] = []
    for number, (record, start, (row, places)) in enumerate(zip(sequences, starts, spans, strict=True)):
        taken = torch.zeros(len(places), dtype=torch.bool)
        # A list of pairs (first token, record) is that of a sequence of several turns.
        is_list = isinstance(record, list | tuple)
        whole = not (is_list and all(isinstance(piece, tuple) and len(piece) == 2 for piece in record))
        for first, piece in [(start, record)] if whole else record:
            if piece is None:
                continue
            name = f"sequence {number}"
            if type(first) is not int or not 0 <= first <= len(places):
                raise ValueError(f"{name}: its record starts at {first!r}, but it has {len(places)} tokens.")
            rows = _as_record(piece, len(places) - first, of, name)
            left = len(places) - first - len(rows)
            if left < 0 or (whole and left > 1):
                raise ValueError(
                    f"{name}: its record has {len(rows)} rows from token {first} on, but the sequence has {len(places)} "
                    "tokens; expected one row for each token, or for all but the last."
                )
            if bool(taken[first : first + len(rows)].any()):
                raise ValueError(f"{name}: two pieces of its record are of the same tokens.")
            taken[first : first + len(rows)] = True
            pieces.append(((row, places[first : first + len(rows)]), rows))
    slots = max([rows.shape[-1] for _, rows in pieces] + [max((k or 1) for k in of.k)])
    routes = torch.full((*shape, of.layers, slots), NO_RECORD)
    for (row, places), rows in pieces:
        routes[row, places] = of.widened(rows, slots)
    return routes


def _as_record(given: Any, tokens: int, of: RoutedModel, name: str) -> Tensor:
    """Return the record of one sequence as (n,L,K) int64, L the MoE layers. Raise ValueError if it does not fit."""
    values = _as_array(given, name)
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name}: its record has numbers of type {values.dtype}; expected integers.")
    if values.ndim == 1:
        values = _reshaped(values, tokens, of, name)
    if values.ndim != 3:
        raise ValueError(f"{name}: its record has shape {values.shape}; expected (tokens, layers, slots).")
    layers = values.shape[1]
    if layers not in (of.layers, of.all_layers):
        dense = f", or {of.all_layers} with the dense ones" if of.all_layers != of.layers else ""
        raise ValueError(f"{name}: its record has {layers} layers; this model has {of.layers} MoE layers{dense}.")
    if layers != of.layers:
        values = values[:, of.places]
    rows = torch.from_numpy(values.astype(np.int64))
    slots, fixed = rows.shape[-1], [k for k in of.k if k is not None]
    most = max(fixed, default=slots)
    if slots != most and (len(fixed) == len(of.k) or slots < most):
        fused = (
            ": the engine has fused the shared expert into the routed ones; switch that off (SGLang: "
            "--disable-shared-experts-fusion)"
        )
        raise ValueError(
            f"{name}: its record has {slots} slots, but this model selects k = {most} experts for each token"
            f"{fused if slots == most + 1 else ''}."
        )
    for index, (experts, k) in enumerate(zip(of.experts, of.k, strict=True)):
        require_values(rows[:, index], experts, k, f"{name}, {of.layer_name(index)}")
    return rows


def _as_array(given: Any, name: str) -> Any:
    """Return a record as a numpy array; one of base64 without a shape has one dimension."""
    if isinstance(given, Tensor):
        return given.detach().cpu().numpy()
    if isinstance(given, np.ndarray):
        return given
    if isinstance(given, str | bytes):
        try:
            data = base64.b64decode(given, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"{name}: its record is text that is not base64.") from None
        try:
            if data.startswith(NPY):
                return np.load(io.BytesIO(data), allow_pickle=False)
            return np.frombuffer(data, dtype="<i4")
        except (ValueError, EOFError, OSError):
            raise ValueError(f"{name}: its record is base64 of neither int32 numbers nor a .npy file.") from None
    try:
        return np.asarray(given)
    except ValueError:
        raise ValueError(f"{name}: its record is a list of rows of different lengths.") from None


def _reshaped(values: Any, tokens: int, of: RoutedModel, name: str) -> Any:
    """Return flat numbers as (n,L,K), for the n, L and K that they can have."""
    k = max((k for k in of.k if k is not None), default=0)
    for slots, layers, rows in product((k, k + 1), (of.layers, of.all_layers), (tokens, tokens - 1)):
        if slots and rows >= 0 and rows * layers * slots == values.size:
            return values.reshape(rows, layers, slots)
    raise ValueError(
        f"{name}: its record has {values.size} numbers, but {tokens} tokens (or one fewer) in {of.layers} MoE layers with "
        f"k = {k} have {tokens * of.layers * k}; is it of another model, or is start= missing?"
    )


def unwrapped(model: Any) -> Any:
    """Return the Hugging Face model inside wrappers: `torch.compile`, DDP and others with a `module`, PEFT."""
    while True:
        require_no_copies(model)
        inner = model._modules.get("_orig_mod") if isinstance(model, nn.Module) else None
        inner = inner or (model._modules.get("module") if not hasattr(model, "config") else None)
        if inner is None and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if inner is None or inner is model:
            return model
        model = inner

"""`Routes`: the experts of every token in every MoE layer of a model, recorded in one run to be replayed in another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.files import require_regular, write_atomically
from holdfast.hub.tracing import Trace
from holdfast.replaying.routed_model import RoutedModel
from holdfast.replaying.sequences import place_records, spans_of
from holdfast.routing import Routing
from holdfast.routing.replaying import NO_RECORD, require_values

FORMAT = "1"
LARGEST_INT8 = 127


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
        return cls.from_tensor(join_layers(list(trace), shape, trace.token_mask), of)

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
        shape, spans = spans_of(attention_mask, position_ids, cu_seq_lens)
        starts = [start] * len(spans) if isinstance(start, int) else list(start)
        return cls.from_tensor(place_records(sequences, starts, shape, spans, of), of)

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
        from safetensors import SafetensorError, safe_open

        require_regular(Path(path))
        try:
            with safe_open(str(path), framework="pt") as file:
                notes = file.metadata() or {}
                experts = file.get_tensor("experts") if list(file.keys()) == ["experts"] else None
        except (SafetensorError, OSError) as problem:
            raise ValueError(f"{path} cannot be read as safetensors: {problem}.") from None
        if experts is None or notes.get("holdfast_routes") != FORMAT:
            raise ValueError(f"{path} has no routes that this Holdfast can read (holdfast_routes format {FORMAT}).")
        try:
            return cls.from_tensor(experts, RoutedModel.from_json(notes.get("of", "")))
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from None


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

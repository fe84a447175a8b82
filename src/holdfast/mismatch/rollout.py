"""`Rollout`: sequences of token ids with what an inference engine returned for them, as one file.

An engine returns the experts of every token (vLLM and SGLang: `routed_experts`) and the log-probabilities of the tokens that
it has generated. A trainer has both, with the token ids, in its batch.

B sequences of at most N tokens, L MoE layers, K slots
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.files import write_atomically
from holdfast.replaying import RoutedModel, Routes
from holdfast.replaying.routes import read_tensors
from holdfast.routing.replaying import NO_RECORD

FORMAT = "1"
FORMAT_KEY = "holdfast_rollout"
LONGEST_NAME = 200  # characters of the engine's name
ABOVE_ONE = 1e-3  # rounding may give a log-probability slightly above 0
UNKNOWN_ENGINE = "an engine without a name"


@dataclass(frozen=True)
class Sequences:
    """Token ids (B,N), padded on the right."""

    input_ids: Tensor  # (B,N) int64
    lengths: Tensor  # (B,) int64: tokens of each sequence

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> "Sequences":
        """Return sequences (n,) of any lengths."""
        ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        return Sequences(ids, torch.tensor([len(row) for row in rows]))

    @property
    def token_mask(self) -> Tensor:
        """(B,N) bool: True where the token is real."""
        return torch.arange(self.input_ids.shape[1]) < self.lengths.unsqueeze(-1)


@final
@dataclass(frozen=True)
class Rollout(Sequences):
    """Sequences with their routes and log-probabilities. Raise ValueError if they do not fit.

    Make one with `from_sequences` or `from_batch`. `logprobs[b, n]` belongs to token n given the tokens before it.
    """

    routes: Routes  # (B,N,L,K)
    logprobs: Tensor | None = None  # (B,N) float32; NaN where the engine has none, as for the prompt
    engine: str = UNKNOWN_ENGINE

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2 or self.input_ids.is_floating_point() or not self.input_ids.numel():
            raise ValueError(f"the token ids have shape {tuple(self.input_ids.shape)}; expected integers (B, N).")
        rows, longest = self.input_ids.shape
        if self.lengths.shape != (rows,) or bool((self.lengths < 1).any()) or bool((self.lengths > longest).any()):
            raise ValueError(f"the {rows} sequences need a length each, from 1 to {longest}.")
        if self.routes.experts.shape[:2] != self.input_ids.shape:
            raise ValueError(
                f"the routes are of {' x '.join(map(str, self.routes.experts.shape[:2]))} tokens, but the token ids are of "
                f"{rows} x {longest}."
            )
        if not bool(self.recorded.any()):
            raise ValueError("the routes have no record at any token of these sequences.")
        if self.logprobs is not None:
            if self.logprobs.shape != self.input_ids.shape or not self.logprobs.is_floating_point():
                raise ValueError(
                    f"the log-probabilities are {self.logprobs.dtype} {tuple(self.logprobs.shape)}; expected floats "
                    f"{tuple(self.input_ids.shape)}."
                )
            wrong = self.logprobs[self.logprobs.isinf() | (self.logprobs > ABOVE_ONE)]
            if len(wrong):
                says = "expected finite numbers of at most 0, natural logarithms"
                raise ValueError(f"there is a log-probability {float(wrong[0]):g}; {says}.")

    @property
    def recorded(self) -> Tensor:
        """(B,N) bool: the real tokens that have a record in every layer."""
        return self.routes.recorded.cpu() & self.token_mask

    @property
    def scored(self) -> Tensor:
        """(B,N) bool: the tokens after the first one that have a log-probability."""
        if self.logprobs is None:
            return torch.zeros_like(self.token_mask)
        known = ~self.logprobs.isnan() & self.token_mask
        known[:, 0] = False
        return known

    @classmethod
    def from_sequences(
        cls,
        tokens: Sequence[Sequence[int]],
        routed_experts: Sequence[Any],
        model: nn.Module | RoutedModel,
        *,
        logprobs: Sequence[Sequence[float]] | None = None,
        start: int | Sequence[int] = 0,
        engine: str = UNKNOWN_ENGINE,
    ) -> "Rollout":
        """Return a rollout from what vLLM or SGLang returned for each sequence.

        tokens           token ids, prompt and answer
        routed_experts   the record of each sequence, in any form that `Routes.from_sequences` takes
        logprobs         log-probabilities of the last tokens of each sequence, usually those of the answer
        start            as in `Routes.from_sequences`
        """
        rows = [torch.as_tensor(row, dtype=torch.int64).flatten() for row in tokens]
        if not rows or not all(len(row) for row in rows):
            raise ValueError("there are no token ids: give at least one for each sequence.")
        given = Sequences.from_rows(rows)
        ids, lengths = given.input_ids, given.lengths
        routes = Routes.from_sequences(routed_experts, model, attention_mask=given.token_mask.long(), start=start)
        if logprobs is None:
            return cls(ids, lengths, routes, None, engine)
        if len(logprobs) != len(lengths):
            raise ValueError(f"there are log-probabilities of {len(logprobs)} sequences, but {len(lengths)} sequences.")
        at_the_end = torch.full(ids.shape, torch.nan)
        for row, (values, length) in enumerate(zip(logprobs, lengths.tolist(), strict=True)):
            if len(values) > length:
                raise ValueError(f"sequence {row} has {len(values)} log-probabilities, but {length} tokens.")
            at_the_end[row, length - len(values) : length] = torch.as_tensor(values, dtype=torch.float32)
        return cls(ids, lengths, routes, at_the_end, engine)

    @classmethod
    def from_batch(
        cls,
        input_ids: Tensor,
        routes: Routes,
        *,
        attention_mask: Tensor | None = None,
        logprobs: Tensor | None = None,
        engine: str = UNKNOWN_ENGINE,
    ) -> "Rollout":
        """Return a rollout from a batch of a trainer, padded on any side.

        logprobs   (B,N), or (B,M): those of the last M columns, as trainers keep them for the answers. NaN: none
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != input_ids.shape or input_ids.dim() != 2:
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, the token ids {tuple(input_ids.shape)}.")
        if routes.experts.shape[:2] != input_ids.shape:
            raise ValueError(f"the routes have shape {tuple(routes.experts.shape)}, the token ids {tuple(input_ids.shape)}.")
        mask = mask.cpu() != 0
        # A stable sort moves the real tokens of each row to its start.
        order = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)
        longest, lengths = max(1, int(mask.sum(-1).max())), mask.sum(-1)
        order, real = order[:, :longest], torch.arange(longest) < lengths.unsqueeze(-1)
        experts = routes.experts.cpu()
        moved = experts.gather(1, order[..., None, None].expand(-1, -1, *experts.shape[2:]))
        moved = moved.where(real[..., None, None], NO_RECORD)
        ids = input_ids.cpu().long().gather(1, order).where(real, 0)
        found = None
        if logprobs is not None:
            if logprobs.dim() != 2 or len(logprobs) != len(ids) or logprobs.shape[1] > input_ids.shape[1]:
                raise ValueError(f"log-probabilities have shape {tuple(logprobs.shape)}, the ids {tuple(input_ids.shape)}.")
            missing = input_ids.shape[1] - logprobs.shape[1]
            wide = torch.nn.functional.pad(logprobs.detach().cpu().float(), (missing, 0), value=torch.nan)
            found = wide.gather(1, order).where(real, torch.nan)
        return cls(ids, lengths, Routes.from_tensor(moved, routes.of), found, engine)

    def save(self, path: str | Path) -> None:
        """Write the rollout to a safetensors file, with the layers that its routes belong to."""
        from safetensors.torch import save

        tensors = {"input_ids": self.input_ids, "lengths": self.lengths, "experts": self.routes.experts}
        if self.logprobs is not None:
            tensors["logprobs"] = self.logprobs.float()
        notes = {FORMAT_KEY: FORMAT, "of": self.routes.of.to_json(), "engine": self.engine}
        write_atomically(Path(path), save({name: each.detach().cpu().contiguous() for name, each in tensors.items()}, notes))

    @classmethod
    def load(cls, path: str | Path) -> "Rollout":
        """Read what `save` wrote. The file is untrusted: raise ValueError if it is anything else."""
        tensors, notes = read_tensors(Path(path))
        names = {"input_ids", "lengths", "experts"}
        if notes.get(FORMAT_KEY) != FORMAT or not names <= tensors.keys() <= names | {"logprobs"}:
            raise ValueError(f"{path} has no rollout that this Holdfast can read ({FORMAT_KEY} format {FORMAT}).")
        try:
            kinds = {"input_ids": torch.int64, "lengths": torch.int64, "logprobs": torch.float32}
            for name, kind in kinds.items():
                if name in tensors and tensors[name].dtype != kind:
                    raise ValueError(f"{name} are {tensors[name].dtype}; expected {kind}.")
            routes = Routes.from_tensor(tensors["experts"], RoutedModel.from_json(notes.get("of", "")))
            engine = str(notes.get("engine", UNKNOWN_ENGINE))[:LONGEST_NAME]
            return cls(tensors["input_ids"], tensors["lengths"], routes, tensors.get("logprobs"), engine)
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from None


def read_record(path: str | Path) -> Rollout | Routes:
    """Read a file of `Rollout.save` or of `Routes.save`."""
    _, notes = read_tensors(Path(path), only_notes=True)
    return Rollout.load(path) if FORMAT_KEY in notes else Routes.load(path)


def rollout_of_lines(lines: Sequence[Sequence[int]], routes: Routes) -> Rollout:
    """Return routes without token ids as a rollout over the token ids of a text's lines, one sequence per line.

    Raise ValueError if they are of other sequences: a record must be at each token of a line, or at all but the last.
    """
    rows, places = routes.experts.shape[:2]
    if len(lines) != rows:
        raise ValueError(f"the routes are of {rows} sequences, but the text has {len(lines)} lines; expected one for each.")
    for number, (line, known) in enumerate(zip(lines, routes.recorded.cpu(), strict=True), 1):
        count = int(known.sum())
        if not line or count not in (len(line) - 1, len(line)) or not bool(known[:count].all()):
            raise ValueError(
                f"line {number} of the text has {len(line)} tokens, but the routes have a record at {count} of {places} "
                "places; expected one at each token, or at all but the last, padded on the right."
            )
    given = Sequences.from_rows([torch.tensor(line) for line in lines])
    ids = torch.nn.functional.pad(given.input_ids, (0, max(0, places - given.input_ids.shape[1])))
    # Routes of all tokens but the last may have no place for the last one.
    experts = torch.nn.functional.pad(routes.experts, (0, 0, 0, 0, 0, ids.shape[1] - places), value=NO_RECORD)
    return Rollout(ids, given.lengths, Routes.from_tensor(experts, routes.of))

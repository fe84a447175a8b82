"""`replay` recorded routes in one forward of a model, and `record` them while a model generates text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.hub.install import ModelHooks, hooks_of
from holdfast.hub.tracing import Trace, own_hooks, trace, without_compilation
from holdfast.replaying.routes import RoutedModel, Routes, join_layers, routings_of_tokens, unwrapped
from holdfast.routing.replaying import NO_RECORD


@contextmanager
def replay(model: nn.Module, routes: Routes | Tensor) -> Iterator[None]:
    """Inside the `with`, the next forward of `model` uses the recorded experts, with live weights and gradients.

    routes   a `Routes`, or its tensor (B,N,L,K), of exactly the batch of that forward

    The same as `model(..., routed_experts=routes)`, which is the better form in a training loop: what `torch.compile` has
    compiled runs uncompiled inside the `with`. The forward must be in the thread, or asyncio task, that entered the `with`
    (see `holdfast.trace`); the backward may run after it. The model must be one that `reroute`, `sparsify` or `load`
    returned; `holdfast.reroute(model, "native")` makes it so without a change of any number.
    """
    hooks = require_hooks(model)
    checked = routes if isinstance(routes, Routes) else Routes.from_tensor(routes, model)
    checked.require_model(model)
    with without_compilation(), hooks.forwards.once(checked):
        yield


def require_hooks(model: nn.Module) -> ModelHooks:
    """Return the hooks of a model, which take its routes. Raise ValueError if it has none."""
    hooks = hooks_of(unwrapped(model))
    if hooks is None:
        raise ValueError(
            'this model has no hooks that take routes: call holdfast.reroute(model, "native") once, which changes no '
            "number, or reroute it to another router."
        )
    return hooks


@final
class _Rollout:
    """The token ids and routes of a batch of sequences that grows at its end."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []  # (B,n) each
        self.routes: list[Tensor] = []  # (B,n,L,K) each

    @property
    def length(self) -> int:
        return sum(ids.shape[1] for ids in self.ids)

    @property
    def rows(self) -> int:
        return len(self.ids[0]) if self.ids else 0

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens: a cache was cropped, because guessed tokens were rejected."""
        while self.length > length:
            keep = self.ids[-1].shape[1] - (self.length - length)
            last, routes = self.ids.pop(), self.routes.pop()
            if keep > 0:
                self.ids.append(last[:, :keep])
                self.routes.append(routes[:, :keep])


@final
class Recorder:
    """The routes of every forward inside a `holdfast.record`."""

    def __init__(self, trace: Trace, of: RoutedModel, pad: int | None) -> None:
        self._trace, self._of, self._pad = trace, of, pad
        self._rollouts: list[_Rollout] = []

    def clear(self) -> None:
        """Forget all that was recorded."""
        self._rollouts.clear()

    def routes(self, sequences: Any, *, attention_mask: Tensor | None = None) -> Routes:
        """Return the routes of `sequences (B,N)`, token ids as `generate` returned them, one record at each of their tokens.

        attention_mask   (B,N): tokens where it is 0 get no record. Without it, left padding and the padding after sequences
                         that ended early get none

        The last token of a batch has no record: `generate` has not computed anything for it. Raise ValueError if these
        sequences were not recorded, row by row.
        """
        given = getattr(sequences, "sequences", sequences)
        if not isinstance(given, Tensor) or given.dim() != 2:
            raise ValueError("give the token ids (B, N) that generate returned, prompt included.")
        rollout = self._find(given)
        joined = join_pieces(rollout.routes, self._of, dim=1)[:, : given.shape[1]]
        missing = given.shape[1] - joined.shape[1]
        joined = torch.nn.functional.pad(joined, (0, 0, 0, 0, 0, missing), value=NO_RECORD)
        if attention_mask is not None:
            real = attention_mask != 0
        elif self._pad is None:
            real = torch.ones_like(given, dtype=torch.bool)
        else:  # without the run of padding tokens at the end of each row
            real = (given != self._pad).flip(-1).cumsum(-1).flip(-1) > 0
        return Routes.from_tensor(joined.where(real[..., None, None].to(joined.device), NO_RECORD), self._of)

    def _find(self, sequences: Tensor) -> _Rollout:
        """Return the last rollout of these token ids."""
        rows, length = sequences.shape
        for rollout in reversed(self._rollouts):
            if rollout.rows == rows and length - 1 <= rollout.length:
                seen = torch.cat(rollout.ids, dim=1)[:, :length]
                if torch.equal(seen, sequences[:, : seen.shape[1]].to(seen.device)):
                    return rollout
        raise ValueError(
            f"no forward over these {rows} x {length} tokens was recorded, row by row. (A beam search moves sequences "
            "between rows; continuous batching and other threads are not seen: generate by sampling or greedily, here.)"
        )

    def _add(self, model: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Add the forward that has ended to the rollout that it continues, or start one."""
        step = self._trace.steps[-1]
        if step.token_ids is None or step.shape is None:
            return
        ids, before = step.token_ids, step.before or 0
        rollout = self._rollouts[-1] if self._rollouts else _Rollout()
        if before == 0 or rollout.rows != len(ids) or rollout.length < before:
            if before != 0:  # its first tokens were computed outside of the `with`
                return
            rollout = _Rollout()
            self._rollouts.append(rollout)
        rollout.crop(before)
        rollout.ids.append(ids.detach().clone())
        routings = routings_of_tokens(step, model)
        rollout.routes.append(join_layers(routings, step.shape, step.token_mask).to(torch.int16))


@contextmanager
def record(model: nn.Module) -> Iterator[Recorder]:
    """Inside the `with`, record the routes of every forward of `model`, in `generate` too.

        with holdfast.record(model) as recorder:
            sequences = model.generate(**prompts)
        routes = recorder.routes(sequences)

    Works for every model that `holdfast.trace` supports, changed or not. Several calls of `generate` may be recorded:
    `routes` finds the one that a batch of sequences came from. What `torch.compile` has compiled runs uncompiled inside the
    `with`: the hooks that record are not part of it. Only the thread, or asyncio task, that entered the `with` is recorded
    (see `holdfast.trace`).
    """
    inner = unwrapped(model)
    generation = getattr(inner, "generation_config", None)
    pad = getattr(generation, "pad_token_id", None)
    pad = getattr(inner.config, "pad_token_id", None) if pad is None else pad
    with trace(inner) as traced, own_hooks() as hooks:
        recorder = Recorder(traced, RoutedModel.from_model(inner), pad if isinstance(pad, int) else None)
        hooks.after(inner, recorder._add)
        yield recorder


def join_pieces(pieces: Sequence[Tensor], of: RoutedModel, dim: int) -> Tensor:
    """Return experts (B,n,L,K) of several forwards as one tensor along `dim`, with as many slots as the widest has."""
    slots = max(piece.shape[-1] for piece in pieces)
    return torch.cat([of.widened(piece, slots) for piece in pieces], dim)

"""Run a model over token sequences under stated conditions, and keep each token's experts and log-probability.

The same function makes the rollout (another number format, another number of sequences in a batch, token by token with a KV
cache) and the training forward (whole sequences). Against their mismatch there are three remedies beside the live router:

live       nothing: the model's own router on both sides
replay     training uses the experts of the rollout, with live weights
smooth     both sides use `smooth`, whose output does not jump where experts change; without training, after calibration
float32    both sides compute scores in float32, with router weights that are not rounded

`replay` is a change of the trainer alone. The two others change the rollout as well, so they need a rollout of their own.

B sequences of N tokens, L MoE layers, K slots
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.auditing.model_and_data import AuditedModel, evaluation_mode, weights_in_dtype
from holdfast.auditing.run import is_rerouted
from holdfast.hub import calibrate, reroute, restore, trace
from holdfast.hub.context import NOT_CAUSAL
from holdfast.hub.forwards import ROUTED_EXPERTS
from holdfast.hub.install import hooks_of
from holdfast.hub.layers import moe_layers
from holdfast.replaying import RoutedModel, Routes
from holdfast.replaying.routes import join_layers
from holdfast.routing.replaying import NO_RECORD

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Tell = Callable[[int], None]  # called with the number of tokens that a step has finished
LIVE, REPLAY, SMOOTH, FLOAT32 = "live", "replay", "smooth", "float32"
SAME_RULE = "smoe"  # the checkpoint's scores and its rule, computed in float32


@final
@dataclass(frozen=True)
class Sequences:
    """Token ids (B,N), padded on the right."""

    input_ids: Tensor  # (B,N) int64
    lengths: Tensor  # (B,) int64

    @property
    def token_mask(self) -> Tensor:
        return torch.arange(self.input_ids.shape[1]) < self.lengths.unsqueeze(-1)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


@final
@dataclass(frozen=True)
class Forward:
    """What a model computed for every token. Padding has no record and no log-probability."""

    routes: Routes  # (B,N,L,K)
    logprobs: Tensor  # (B,N) float32: of token n given those before it; NaN for the first token of a sequence


@torch.no_grad()
def run_forwards(
    audited: AuditedModel,
    sequences: Sequences,
    *,
    batch: int,
    routes: Routes | None = None,
    decode: bool = False,
    tell: Tell | None = None,
) -> Forward:
    """Run the model over all sequences, `batch` of them at a time.

    routes   (B,N,L,K): replay these experts
    decode   one token at a time, with a KV cache, as an engine generates
    """
    mask, of = sequences.token_mask, RoutedModel.from_model(audited.model)
    pieces: list[Tensor] = []
    logprobs = torch.full(sequences.input_ids.shape, torch.nan)
    for start in range(0, len(sequences.lengths), batch):
        rows = slice(start, start + batch)
        longest = int(sequences.lengths[rows].max())
        ids, real = sequences.input_ids[rows, :longest], mask[rows, :longest]
        replayed = None if routes is None else routes.experts[rows, :longest]
        found, known = (_decoded if decode else _at_once)(audited, ids, real, replayed)
        pieces.append(found.cpu().where(real[..., None, None], NO_RECORD))
        logprobs[rows, :longest] = known.float().cpu().where(real, torch.nan)
        if tell is not None:
            tell(int(real.sum()))
    logprobs[:, 0] = torch.nan
    if bool(logprobs[:, 1:][mask[:, 1:]].isnan().any()):
        raise ValueError(
            "the model's log-probabilities are NaN: its activations overflow in this dtype; choose another one."
        )
    return Forward(Routes.from_tensor(_joined(pieces, of, sequences.input_ids.shape[1]), of), logprobs)


def _at_once(audited: AuditedModel, ids: Tensor, real: Tensor, routes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the experts (b,n,L,K) and the log-probabilities (b,n), the first column unknown, of whole sequences."""
    inputs = {"input_ids": ids, "attention_mask": real.long()}
    with trace(audited.model) as traced:
        logits = audited.forward(inputs if routes is None else {**inputs, ROUTED_EXPERTS: routes}).logits
        found = join_layers(list(traced), (ids.shape[0], ids.shape[1]), traced.token_mask)
    return found, _with_first(_log_probability(logits[:, :-1], ids[:, 1:]))


def _decoded(audited: AuditedModel, ids: Tensor, real: Tensor, routes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the same as `_at_once`, one token at a time."""
    assert routes is None, "a rollout is never replayed"
    cache: Any = None
    found, known = [], []
    device = audited.device
    with trace(audited.model) as traced:
        for place in range(ids.shape[1]):
            out = audited.model(
                input_ids=ids[:, place : place + 1].to(device),
                attention_mask=real[:, : place + 1].long().to(device),
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            found.append(join_layers(list(traced), (len(ids), 1), None))
            if place + 1 < ids.shape[1]:
                known.append(_log_probability(out.logits[:, -1:], ids[:, place + 1 : place + 2]))
    of = RoutedModel.from_model(audited.model)
    slots = max(each.shape[-1] for each in found)
    joined = torch.cat([of.widened(each.cpu(), slots) for each in found], dim=1)
    return joined, _with_first(torch.cat(known, dim=1) if known else torch.empty(len(ids), 0))


def _log_probability(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (b,n): the log-probability of `targets (b,n)` under `logits (b,n,V)`, in float32."""
    return logits.float().log_softmax(-1).gather(-1, targets.to(logits.device).unsqueeze(-1)).squeeze(-1)


def _with_first(logprobs: Tensor) -> Tensor:
    return torch.nn.functional.pad(logprobs, (1, 0), value=torch.nan)


def _joined(pieces: list[Tensor], of: RoutedModel, length: int) -> Tensor:
    """Return batches of experts (b,n,L,K) as one tensor (B,N,L,K)."""
    slots = max(piece.shape[-1] for piece in pieces)
    wide = [of.widened(piece, slots) for piece in pieces]
    padded = [torch.nn.functional.pad(each, (0, 0, 0, 0, 0, length - each.shape[1]), value=NO_RECORD) for each in wide]
    return torch.cat(padded)


@contextmanager
def weights_of_rollout(audited: AuditedModel, dtype: torch.dtype, *, float32_routers: bool = False) -> Iterator[None]:
    """Hold the weights in the rollout's number format, as `from_pretrained(dtype=...)` would; restore them afterwards.

    float32_routers   keep the weights of the routers as they are
    """
    keep = _kept_in_float32(audited.model, dtype)
    if float32_routers:
        keep += [parameter for site in audited.scorers() for parameter in site.parameters()]
    with weights_in_dtype([audited.model], dtype, keep=keep):
        yield


def _kept_in_float32(model: Any, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return the weights that the family always loads in float32, in this dtype."""
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    found = re.compile("|".join(rf"((^|\.){re.escape(name)}($|\.))" for name in sorted(names))) if names else None
    return [] if found is None else [each for name, each in model.named_parameters() if found.search(name)]


def reason_against(remedy: str, model: Any) -> str | None:
    """Return why a model cannot have a remedy; None if it can."""
    layers, hooks = moe_layers(model), hooks_of(model)
    own = [layer.router is not None for layer in layers]
    if remedy == REPLAY and hooks is not None and hooks.forwards.layers < len(layers):
        return 'some layers were not rerouted and cannot replay; holdfast.reroute(model, "native@...") makes them able to.'
    if remedy == SMOOTH and is_rerouted(layers):
        return "the model is already rerouted, and its routers could not be put back afterwards."
    if remedy == FLOAT32 and is_rerouted(layers) and not all(own):
        return "some layers are rerouted and others have the family's own gate, which computes in the model's dtype."
    return None


def require_router(model: Any, router: str, *, decode: bool) -> None:
    """Raise ValueError if the model cannot have the router of `smooth`, or cannot decode with its own router or this one."""
    _require_decoding(model, decode)
    if reason_against(SMOOTH, model) is None:
        with warnings.catch_warnings(action="ignore"), with_router(model, router):
            _require_decoding(model, decode)


def _require_decoding(model: Any, decode: bool) -> None:
    hooks = hooks_of(model)
    if decode and hooks is not None and hooks.breaks_causality:
        raise ValueError(f"{NOT_CAUSAL}; its rollout cannot be one token at a time (rollout_decode).")


@contextmanager
def with_replay(model: Any) -> Iterator[None]:
    """Give an unchanged model the hooks that take recorded routes, without a change of any number."""
    with nullcontext() if hooks_of(model) is not None else with_router(model, "native"):
        yield


@contextmanager
def with_router(model: Any, router: str, seed: int = 0) -> Iterator[None]:
    """Give the model another router on the same weights. New weights of a router are drawn from `seed`."""
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):  # the caller's random numbers stay as they are
        torch.manual_seed(seed)
        reroute(model, router)
    try:
        with evaluation_mode(model):
            yield
    finally:
        restore(model)


@contextmanager
def with_float32_routing(model: Any) -> Iterator[None]:
    """Let the model compute its own rule in float32; Holdfast's routers do so already."""
    computes = all(layer.router is not None for layer in moe_layers(model))
    with nullcontext() if computes else with_router(model, SAME_RULE):
        yield


@torch.no_grad()
def calibrate_routers(audited: AuditedModel, forwards: Callable[[], Any]) -> None:
    """Let the routers learn their state, such as the width of `smooth`, from `forwards`. The rest of the model stays in
    evaluation mode: dropout would change what routers read."""
    routers = [layer.router for layer in moe_layers(audited.model) if layer.router is not None]
    with calibrate(audited.model):
        for router in routers:
            router.train()
        try:
            forwards()
        finally:
            for router in routers:
                router.eval()  # commits what the last batch has staged

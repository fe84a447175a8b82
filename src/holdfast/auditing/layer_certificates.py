"""What shorter numbers do to routes: which tokens rounding could send elsewhere, and which of them it does.

Certificates of a model's MoE layers, for the tokens that really reach them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from holdfast.auditing.observation import Observation, observe
from holdfast.auditing.subject import Audited, Reader, evaluating, resident, samples, weights_as
from holdfast.certificates import Certificates, MajorityVote, NoBound, Norm, Smoothing, certify, undecided
from holdfast.certificates.arithmetic import Rounding
from holdfast.hub import Call
from holdfast.hub.tracing import require_finite
from holdfast.metrics import set_changes
from holdfast.metrics.accumulator import Accumulator
from holdfast.metrics.report import plain
from holdfast.routing import Router, Routing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Undecided(Accumulator[dict[str, Any]]):
    """The share of tokens that are undecided at a dtype, and of these and of the others the share that it really flips.

    The flips are of one router asked again, the same inputs and the router's weights rounded; not of a whole forward, where
    inputs change as well. No decided token may be among them.
    """

    def update(self, alarm: Tensor, flips: Tensor) -> None:
        flips = flips.to(alarm.device)
        self._add(tokens=len(alarm), alarm=alarm.sum(), among=(alarm & flips).sum(), others=(~alarm & flips).sum())

    def result(self) -> dict[str, Any]:
        alarm, tokens = float(self._sums["alarm"]), self._per("tokens")
        return {
            "share": alarm / tokens,
            "of_undecided_flip": float(self._sums["among"]) / alarm if alarm else None,
            "decided_that_flip": int(self._sums["others"]),
        }


def rounded(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    return tokens.to(dtype).to(tokens.dtype)


def ask_rounded(audited: Audited, layer: int, seen: Observation, dtype: torch.dtype) -> Tensor:
    """(T,) bool: whose set changes when this layer's router is asked again with inputs and weights rounded to `dtype`."""
    call = seen.calls[layer]
    with weights_as([audited.scorers()[layer]], dtype, only_rounded=True):
        asked = ask(call, rounded(call.tokens, dtype))
    return set_changes(seen.layers[layer].routing, asked, audited.core(layer))


def in_its_dtype(gate: Callable[[Tensor], Routing], dtype: torch.dtype, tokens: Tensor) -> Routing:
    """A family's gate asked with tokens of another dtype, as attacks and votes move them in float32."""
    return gate(tokens.to(dtype))


def ask(call: Any, tokens: Tensor) -> Routing:
    """The router of a call once more, about other tokens in the same context."""
    routing: Routing = call.route(tokens, call.context) if isinstance(call.route, Router) else call.route(tokens)
    return routing


LEVELS = (0.001, 0.01, 0.05, 0.1)  # relative radii at which shares of tokens are told


@final
@dataclass(frozen=True)
class How:
    """What kind of certificates. `smoothing` is for routers that no bound is known for."""

    norm: Norm = "l2"
    rounding: Rounding = "worst"
    smoothing: Smoothing | None = None


def certify_layer(audited: Audited, layer: int, seen: Observation, how: How | None = None) -> Certificates:
    """One layer's tokens of one forward, one certificate each, in the arithmetic its router really uses."""
    how = how or How()
    call, subject = seen.calls[layer], audited.certified(layer)
    tokens, context = _given(call)
    computed = torch.float32 if isinstance(subject, Router) or tokens.dtype == torch.float64 else tokens.dtype
    options: dict[str, Any] = {"norm": how.norm, "arithmetic": computed, "rounding": how.rounding}
    try:
        return certify(subject, tokens, context, smoothing=how.smoothing, **options)
    except NoBound:
        if how.smoothing is None or isinstance(subject, Router):
            raise
        route = partial(in_its_dtype, call.route, tokens.dtype)
        return certify(MajorityVote(route, how.smoothing, joint=False), tokens.float(), norm=how.norm)


def undecided_in(
    audited: Audited, layer: int, seen: Observation, dtype: torch.dtype, rounding: Rounding = "worst"
) -> Tensor:
    """(T,) bool: which tokens of one layer rounding to `dtype` may send elsewhere."""
    tokens, context = _given(seen.calls[layer])
    return undecided(audited.certified(layer), tokens, dtype, context, rounding=rounding).reshape(-1)


def _given(call: Call) -> tuple[Tensor, Any]:
    """A family's own gate looks at rows, and at nothing else."""
    return (call.tokens, call.context) if isinstance(call.route, Router) else (call.tokens.flatten(0, -2), None)


@final
@dataclass
class LayerCertificates:
    """What is known of one layer's tokens so far: a certificate each, or the reason why there is none."""

    layer: int
    name: str
    router: str
    experts: int
    reason: str | None = None
    found: list[Certificates] = field(default_factory=list)
    alarms: dict[str, list[Tensor]] = field(default_factory=dict)  # by dtype

    @property
    def certificates(self) -> Certificates | None:
        """All of them as rows, without padding; None where there are none."""
        return _joined(self.found) if self.found else None

    def summary(self) -> dict[str, Any]:
        """What to store."""
        about = {"layer": self.layer, "name": self.name, "router": self.router, "experts": self.experts}
        whole = self.certificates
        if whole is None:
            return {**about, "skipped": self.reason or "there were no tokens."}
        shares = {f"{level:g}": whole.share(level, relative=True) for level in LEVELS}
        alarms = {name: float(torch.cat(rows).double().mean()) for name, rows in self.alarms.items()}
        return {**about, "skipped": None, **whole.summary(), "share_at": shares, "undecided": alarms}


@final
@dataclass(frozen=True)
class ModelCertificates:
    """Every MoE layer of a model, certified on some data. `status` is "interrupted" where the user stopped it."""

    status: str
    model: dict[str, Any]
    tokens: int
    how: How
    layers: list[LayerCertificates]

    def summary(self) -> dict[str, Any]:
        about = {"schema": 1, "status": self.status, "model": self.model, "tokens": self.tokens, "how": asdict(self.how)}
        found: dict[str, Any] = plain({**about, "layers": [layer.summary() for layer in self.layers]})
        return found


def certify_model(
    model: Any,
    texts_or_inputs: Iterable[Any],
    *,
    tokenizer: Any = None,
    norm: Norm = "l2",
    rounding: Rounding = "worst",
    smoothing: Smoothing | None = None,
    batch: int = 8,
    length: int = 128,
    tokens: int | None = None,
    name: str | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> ModelCertificates:
    """For every MoE layer of a model, how far its router's inputs may move and every token keep its experts.

    texts_or_inputs  as for `audit`: strings with the model's `tokenizer`, or batches. Read one batch at a time; kept of it
                     is a radius for each token and layer
    norm, rounding   as for `certify`
    smoothing        where no bound is known for a router, certify its majority vote under this noise

    Interrupted (Ctrl-C), it tells of the batches that were finished. It is exported as `holdfast.certify`;
    `holdfast.certificates.certify` certifies one router.

    Example:
        found = holdfast.certify(model, [{"input_ids": torch.randint(100, (2, 16))}], norm="linf")
        print([layer["relative"]["50%"] for layer in found.summary()["layers"]])
    """
    audited = Audited(model)
    require_finite(model)
    reader = None if tokenizer is None else Reader(tokenizer, audited.pad)
    how = How(norm, rounding, smoothing)
    about = audited.describe(name)
    entries = zip(audited.names, about["routers"], about["experts"], strict=True)
    layers = [LayerCertificates(place, *entry) for place, entry in enumerate(entries)]
    done, status = 0, "complete"
    with evaluating(model), resident(audited.scorers()):
        try:
            for sample in samples(texts_or_inputs, audited, reader, batch=batch, length=length, tokens=tokens):
                if progress is not None:
                    progress(done, "certifying")
                seen = observe(audited, sample)
                seen.require_finite()
                news = [_layer(audited, layer, seen, _numbered(how, seen, done)) for layer in layers]
                for layer, (certificates, alarms, reason) in zip(layers, news, strict=True):
                    _take(layer, certificates, alarms, reason)
                done += len(seen.real(0))
        except KeyboardInterrupt:
            if not done:
                raise
            status = "interrupted"
    return ModelCertificates(status, about, done, how, layers)


def _numbered(how: How, seen: Observation, done: int) -> How:
    """A token's noise depends on its number, whatever the batch."""
    return how if how.smoothing is None else replace(how, smoothing=replace(how.smoothing, first=done))


def _layer(
    audited: Audited, layer: LayerCertificates, seen: Observation, how: How
) -> tuple[Certificates | None, dict[str, Tensor], str | None]:
    """Rows that are real, of one batch."""
    real = seen.real(layer.layer)
    try:
        found = _rows(certify_layer(audited, layer.layer, seen, how), real)
    except ValueError as reason:  # no bound is known for this router
        return None, {}, str(reason)
    if found.kind == "probabilistic":
        return found, {}, None
    alarms = {name: undecided_in(audited, layer.layer, seen, dtype, how.rounding)[real] for name, dtype in DTYPES.items()}
    return found, alarms, None


def _take(layer: LayerCertificates, found: Certificates | None, alarms: dict[str, Tensor], reason: str | None) -> None:
    layer.reason = reason
    if found is not None:
        layer.found.append(found)
    for name, rows in alarms.items():
        layer.alarms.setdefault(name, []).append(rows.cpu())


TENSORS = ("radius", "distance", "lengths", "margin", "real")


def _rows(found: Certificates, real: Tensor) -> Certificates:
    """Some tokens of it, as rows, on the CPU."""
    kept: dict[str, Any] = {name: getattr(found, name).reshape(-1)[real].cpu() for name in TENSORS}
    bounds = {name: values.reshape(-1)[real].cpu() for name, values in found.bounds.items()}
    return replace(found, **kept, pair=found.pair.reshape(-1, 2)[real].cpu(), bounds=bounds)


def _joined(parts: Sequence[Certificates]) -> Certificates:
    kept: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in (*TENSORS, "pair")}
    bounds = {name: torch.cat([part.bounds[name] for part in parts]) for name in parts[0].bounds}
    kinds = {part.kind for part in parts}
    kind = parts[0].kind if len(kinds) == 1 else "lower bound"
    return replace(parts[0], **kept, bounds=bounds, kind=kind)

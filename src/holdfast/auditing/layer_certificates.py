"""Certificates of a model's MoE layers, for the tokens that reach them in real forwards.

`certify_model` certifies every layer on some data, and bounds the change of its output on request. `Undecided` counts the
tokens that could flip in a shorter dtype, and how many of them do (`flips_when_rounded`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from holdfast.auditing.forwards import Observation, observe
from holdfast.auditing.model_and_data import AuditBatch, AuditedModel, Measurement, weights_in_dtype
from holdfast.auditing.reports import DTYPES, DataSettings, ModelDescription, UndecidedTokens
from holdfast.certificates import (
    Certificates,
    LayerParts,
    MajorityVote,
    NoCertificate,
    Norm,
    OutputCertificate,
    Smoothing,
    certify,
    certify_output,
    undecided,
)
from holdfast.certificates.arithmetic import Rounding
from holdfast.checked import from_mapping
from holdfast.hub import RouterCall
from holdfast.hub.output_parts import output_parts
from holdfast.metrics import set_changes
from holdfast.metrics.accumulator import Accumulator
from holdfast.routing import Router, Routing
from holdfast.stored import without_nan

LEVELS = (0.001, 0.01, 0.05, 0.1)  # relative radii at which the share of certified tokens is reported
OTHER_OUTPUT = 0.05  # a larger relative difference between the declared and the real output of a layer is not rounding


class Undecided(Accumulator[UndecidedTokens]):
    """How many tokens are undecided in a dtype, and how many undecided and decided tokens flip in it.

    Flips are those of one router that is called again with its inputs and weights rounded, not of a whole forward, where the
    inputs change as well. No decided token may flip.
    """

    def update(self, undecided: Tensor, flips: Tensor) -> None:
        flips = flips.to(undecided.device)
        both, only_flips = (undecided & flips).sum(), (~undecided & flips).sum()
        self._add(tokens=len(undecided), undecided=undecided.sum(), both=both, only_flips=only_flips)

    def result(self) -> UndecidedTokens:
        undecided = float(self._sums["undecided"])
        flips = float(self._sums["both"]) / undecided if undecided else None
        return UndecidedTokens(self._mean("undecided"), flips, int(self._sums["only_flips"]))


def rounded(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tokens rounded to `dtype`, in their own dtype."""
    return tokens.to(dtype).to(tokens.dtype)


def flips_when_rounded(audited: AuditedModel, layer: int, observed: Observation, dtype: torch.dtype) -> Tensor:
    """Return which tokens (T,) flip when this layer's router is called again with inputs and weights rounded to `dtype`."""
    call = observed.router_calls[layer]
    with weights_in_dtype([audited.scorers()[layer]], dtype, only_rounded=True):
        routing = route_again(call, rounded(call.tokens, dtype))
    return set_changes(observed.layers[layer].routing, routing, audited.core(layer))


def call_in_dtype(gate: Callable[[Tensor], Routing], dtype: torch.dtype, tokens: Tensor) -> Routing:
    """Call a native gate with tokens cast to `dtype`: attacks and majority votes perturb tokens in float32."""
    return gate(tokens.to(dtype))


def route_again(call: Any, tokens: Tensor) -> Routing:
    """Return the routing of other tokens by the router of a recorded call, in the same context."""
    routing: Routing = call.route(tokens, call.context) if isinstance(call.route, Router) else call.route(tokens)
    return routing


@final
@dataclass(frozen=True)
class CertificateOptions:
    """Options of `certify`. `smoothing` is used for routers without a known certificate.

    outputs   radii, as multiples of each token's own length, for which the change of the layer's output is bounded
    """

    norm: Norm = "l2"
    rounding: Rounding = "worst"
    smoothing: Smoothing | None = None
    outputs: tuple[float, ...] = ()


def certify_layer(audited: AuditedModel, layer: int, observed: Observation, options: CertificateOptions) -> Certificates:
    """Return a certificate for each token of one layer in one forward, in the arithmetic that its router uses."""
    call, subject = observed.router_calls[layer], audited.certified(layer)
    tokens, context = gate_inputs(call)
    computed = torch.float32 if isinstance(subject, Router) or tokens.dtype == torch.float64 else tokens.dtype
    try:
        how: dict[str, Any] = {name: getattr(options, name) for name in ("norm", "rounding", "smoothing")}
        return certify(subject, tokens, context, arithmetic=computed, **how)
    except NoCertificate:
        if options.smoothing is None or isinstance(subject, Router):
            raise
        route = partial(call_in_dtype, call.route, tokens.dtype)
        return certify(MajorityVote(route, options.smoothing, joint=False), tokens.float(), norm=options.norm)


def undecided_tokens(
    audited: AuditedModel, layer: int, observed: Observation, dtype: torch.dtype, rounding: Rounding = "worst"
) -> Tensor:
    """Return which tokens (T,) of one layer may flip when scores are computed in `dtype`."""
    tokens, context = gate_inputs(observed.router_calls[layer])
    return undecided(audited.certified(layer), tokens, dtype, context, rounding=rounding).reshape(-1)


def gate_inputs(call: RouterCall) -> tuple[Tensor, Any]:
    """Return the tokens and the context of a call; a native gate reads rows of tokens and no context."""
    return (call.tokens, call.context) if isinstance(call.route, Router) else (call.tokens.flatten(0, -2), None)


def certify_layer_output(
    parts: LayerParts, layer: int, observed: Observation, radii: tuple[float, ...]
) -> OutputCertificate:
    """Bound the change of one layer's output in one forward, at these relative radii; return rows of real tokens."""
    tokens, context = gate_inputs(observed.router_calls[layer])
    record, real = observed.layers[layer], observed.real(layer)
    rows = certify_output(parts, tokens, radii, context, relative=True).rows(real)
    lengths = record.output[real].double().norm(dim=-1).cpu()
    same_input = torch.equal(record.tokens[real], tokens.reshape(-1, tokens.shape[-1])[real].to(record.tokens))
    apart = ((rows.lengths - lengths).abs() / lengths).nan_to_num(nan=0.0)
    if not same_input or (len(apart) and bool(apart.median() > OTHER_OUTPUT)):
        computes = "its output is not that of its router, its experts and a shared expert on one input"
        raise NoCertificate(f"no bound of the output is known for {observed.router_calls[layer].name}: {computes}")
    return rows


@final
@dataclass
class LayerCertificates:
    """The certificates of one layer's tokens, or the reason why there are none."""

    layer: int
    name: str
    router: str
    experts: int
    reason: str | None = None
    found: list[Certificates] = field(default_factory=list)
    undecided: dict[str, list[Tensor]] = field(default_factory=dict)  # by dtype
    bounded: list[OutputCertificate] = field(default_factory=list)
    no_outputs: str | None = None  # why the change of the output has no known bound
    parts: LayerParts | None = None  # read once: spectral norms of all experts take long

    @property
    def outputs(self) -> OutputCertificate | None:
        """Return the bounds of the output as rows, without padding; None if there are none."""
        return OutputCertificate.joined(self.bounded) if self.bounded and self.no_outputs is None else None

    @property
    def certificates(self) -> Certificates | None:
        """Return the certificates as rows, without padding; None if there are none."""
        if not self.found:
            return None
        bounds = {name: torch.cat([part.bounds[name] for part in self.found]) for name in self.found[0].bounds}
        kind = self.found[0].kind if len({part.kind for part in self.found}) == 1 else "lower bound"
        return Certificates.joined(self.found, bounds=bounds, kind=kind)

    def add(self, audited: AuditedModel, observed: Observation, options: CertificateOptions) -> Callable[[], None]:
        """Certify one batch's real tokens, and which of them are undecided; return a function that adds the result."""
        real = observed.real(self.layer)
        bounded = self._bound_output(audited, observed, options.outputs)
        try:
            found = certify_layer(audited, self.layer, observed, options)
        except ValueError as problem:  # no certificate is known for this router
            reason = str(problem)
            return lambda: setattr(self, "reason", reason)
        bounds = {name: values.reshape(-1)[real].cpu() for name, values in found.bounds.items()}
        certificates = found.rows(real, bounds=bounds)
        dtypes = {} if certificates.kind == "probabilistic" else DTYPES
        undecided = {
            name: undecided_tokens(audited, self.layer, observed, dtype, options.rounding)[real].cpu()
            for name, dtype in dtypes.items()
        }

        def finish() -> None:
            self.found.append(certificates)
            self.bounded.extend(bounded)
            for name, rows in undecided.items():
                self.undecided.setdefault(name, []).append(rows)

        return finish

    def _bound_output(
        self, audited: AuditedModel, observed: Observation, radii: tuple[float, ...]
    ) -> list[OutputCertificate]:
        """Return the bounds of the output for one batch in a list; without one, note the reason and return no item."""
        if not radii or self.no_outputs is not None:
            return []
        try:
            if self.parts is None:
                self.parts = output_parts(audited.moe_layers[self.layer], audited.certified(self.layer))
            return [certify_layer_output(self.parts, self.layer, observed, radii)]
        except ValueError as problem:
            self.no_outputs = str(problem)
            return []

    def summary(self) -> dict[str, Any]:
        """Return what to store with a result."""
        about = {"layer": self.layer, "name": self.name, "router": self.router, "experts": self.experts}
        certificates = self.certificates
        if certificates is None:
            return {**about, "skipped": self.reason or "there were no tokens."}
        shares = {f"{level:g}": certificates.share(level, relative=True) for level in LEVELS}
        undecided = {name: float(torch.cat(rows).double().mean()) for name, rows in self.undecided.items()}
        found = {**about, "skipped": None, **certificates.summary(), "share_at": shares, "undecided": undecided}
        outputs = self.outputs
        if self.no_outputs is not None:
            found["outputs"] = {"skipped": self.no_outputs}
        elif outputs is not None:
            found["outputs"] = {"skipped": None, **outputs.summary()}
        return found


@final
@dataclass(frozen=True)
class ModelCertificates:
    """The certificates of every MoE layer of a model on some data. `status` is "complete" or "interrupted" (Ctrl-C)."""

    status: str
    model: ModelDescription
    tokens: int
    options: CertificateOptions
    layers: list[LayerCertificates]

    def summary(self) -> dict[str, Any]:
        about = {"schema": 1, "status": self.status, "model": asdict(self.model), "tokens": self.tokens}
        layers = [layer.summary() for layer in self.layers]
        return without_nan({**about, "how": asdict(self.options), "layers": layers})  # type: ignore[no-any-return]


def certify_model(
    model: Any,
    texts_or_inputs: Iterable[Any],
    *,
    tokenizer: Any = None,
    norm: Norm = "l2",
    rounding: Rounding = "worst",
    smoothing: Smoothing | None = None,
    outputs: Sequence[float] = (),
    batch: int = 8,
    length: int = 128,
    tokens: int | None = None,
    name: str | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> ModelCertificates:
    """Certify the tokens of every MoE layer: up to which perturbation of its router's input a token keeps its experts.

    texts_or_inputs  as for `audit`: strings with the model's `tokenizer`, or batches. They are read one batch at a time, and
                     a radius for each token and layer is stored
    norm, rounding   as for `certify`
    smoothing        if no certificate is known for a router, certify its majority vote under this noise
    outputs          radii, as multiples of each token's own length in l2: bound how much the output of each layer changes if
                     its input moves by up to them. It runs every expert on every token, in float64
    progress         as for `audit`

    After Ctrl-C it returns the certificates of the finished batches. It is exported as `holdfast.certify`;
    `holdfast.certificates.certify` certifies one router.

    Example:
        found = holdfast.certify(model, [{"input_ids": torch.randint(100, (2, 16))}], norm="linf")
        print([layer["relative"]["50%"] for layer in found.summary()["layers"]])
    """
    settings = from_mapping(DataSettings, {"batch": batch, "length": length, "tokens": tokens})
    radii = tuple(float(radius) for radius in outputs)
    if not all(0 <= radius < float("inf") for radius in radii):
        raise ValueError(f"outputs is {list(radii)}; expected finite radii, none of them negative.")
    options = CertificateOptions(norm, rounding, smoothing, radii)
    run = _Certification(options, model, tokenizer, settings, progress)
    with run.showing(name):
        run.run(texts_or_inputs)
    about = run.about(name)
    return ModelCertificates(about["status"], about["model"], run.tokens, options, run.layers)


@final
class _Certification(Measurement):
    """Certificates in progress. A batch counts when all layers have been certified on it."""

    def __init__(self, options: CertificateOptions, *given: Any) -> None:
        super().__init__(*given)
        self.options, about = options, self.audited.describe(None)
        entries = zip(about.layers, about.routers, about.experts, strict=True)
        self.layers = [LayerCertificates(place, *entry) for place, entry in enumerate(entries)]

    def add(self, batch: AuditBatch) -> None:
        done, options = self.tokens, self.options
        self.tell(done, "certifying")
        observed = observe(self.audited, batch)
        observed.require_finite()
        if options.smoothing is not None:  # numbered tokens, so that their noise does not depend on the batch size
            options = replace(options, smoothing=replace(options.smoothing, first=done))
        # All layers first: an interrupted batch must not be in some layers only.
        for finish in [layer.add(self.audited, observed, options) for layer in self.layers]:
            finish()
        self.count(batch, len(observed.real(0)))

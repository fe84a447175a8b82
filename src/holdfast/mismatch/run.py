"""`measure_mismatch`: how far a training forward is from a rollout of the same model, and what three remedies change.

There are two kinds of rollout. A *recorded* one comes from another engine (`Rollout`): live and replayed training forwards
are compared with it. A *simulated* one is made here: the same model in another number format and another batch, over the
same tokens. All remedies are compared with simulated rollouts, because two of them change the rollout as well, and an
engine elsewhere cannot be asked again.
"""

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from holdfast.auditing.model_and_data import AuditedModel, TextEncoder, audit_batches, evaluation_mode
from holdfast.auditing.reports import DataDescription
from holdfast.checked import from_mapping
from holdfast.hub.tracing import require_finite, require_known_tokens, require_positions
from holdfast.mismatch.forwards import (
    DTYPES,
    FLOAT32,
    LIVE,
    REPLAY,
    SMOOTH,
    Forward,
    calibrate_routers,
    reason_against,
    require_router,
    run_forwards,
    weights_of_rollout,
    with_float32_routing,
    with_replay,
    with_router,
)
from holdfast.mismatch.report import (
    MismatchReport,
    MismatchSettings,
    Resampling,
    RolloutKind,
    Row,
    SkippedRow,
    ratio_numbers,
    set_numbers,
)
from holdfast.mismatch.rollout import Rollout, Sequences
from holdfast.progress import reporting
from holdfast.replaying import Routes
from holdfast.routing.presets import resolve_layers
from holdfast.version import versions

Progress = Callable[[int, str], None]  # (tokens done, what is being done)


def measure_mismatch(
    model: Any,
    rollout_or_texts: Rollout | Iterable[Any],
    *,
    tokenizer: Any = None,
    name: str | None = None,
    progress: Progress | None = None,
    on_rollout: Callable[[Rollout], None] | None = None,
    **settings: Any,
) -> MismatchReport:
    """Measure how far a training forward of a model is from a rollout, live and with three remedies.

    model              a causal language model of any MoE family, or sparsified; it is not changed. Its own dtype is that of
                       training
    rollout_or_texts   a `Rollout` of another engine; or strings, with the model's `tokenizer`, or batches, dicts for its
                       forward: then the rollout is simulated
    name               of the model in the report
    progress           called with the number of tokens done and a description of the current work; by default a bar shows
                       them, or lines on stderr where there is no terminal
    on_rollout         called with the simulated rollout of the live router; `lambda found: found.save(path)` keeps it for
                       another machine
    settings           rollout_dtype, rollout_batch, rollout_decode, simulate, router, clip, draws, seed, batch, length,
                       tokens: those of `MismatchSettings`

    After Ctrl-C it reports on the remedies that are finished, with the status "interrupted".

    Example:
        report = holdfast.measure_mismatch(model, ["The quick brown fox jumps over the dog."], tokenizer=tokenizer)
        print(report.row("live").sets.routers_differ, report.row("replay").logprobs.mean)
    """
    checked = mismatch_settings(**settings)
    audited = AuditedModel(model)
    audited.require_texts()
    recorded = rollout_or_texts if isinstance(rollout_or_texts, Rollout) else None
    if recorded is None and not checked.simulate:
        raise ValueError("there is no recorded rollout, so simulate=False leaves nothing to compare.")
    sequences = recorded or sequences_of(audited, rollout_or_texts, tokenizer, checked)  # type: ignore[arg-type]
    require_measurable(audited, sequences, recorded)
    if checked.simulate:
        require_router(model, checked.router, decode=checked.rollout_decode)
    run = _Run(audited, checked, sequences, recorded, on_rollout)
    started = time.monotonic()
    with evaluation_mode(model), reporting(progress, run.work(), name) as run.progress:
        interrupted = run.measure()
    return run.report(name, interrupted, time.monotonic() - started)


def mismatch_settings(**given: Any) -> MismatchSettings:
    """Return settings; raise ValueError for a wrong name or value."""
    if "clip" in given:
        given["clip"] = list(given["clip"])
    settings: MismatchSettings = from_mapping(MismatchSettings, given)
    resolve_layers(settings.router, None, native=False)
    return settings


def sequences_of(audited: AuditedModel, given: Iterable[Any], tokenizer: Any, settings: MismatchSettings) -> Sequences:
    """Return the token sequences of texts or batches."""
    encoder = None if tokenizer is None else TextEncoder(tokenizer, audited.pad)
    rows: list[Tensor] = []
    for batch in audit_batches(
        given, audited, encoder, batch=settings.batch, length=settings.length, tokens=settings.tokens
    ):
        if batch.ids is None:
            raise ValueError("mismatch compares log-probabilities of tokens: give texts or batches with input_ids.")
        real = torch.ones_like(batch.ids) if batch.token_mask is None else batch.token_mask
        rows.extend(ids[keep != 0].cpu().long() for ids, keep in zip(batch.ids, real, strict=True))
    rows = [row for row in rows if len(row) > 1]  # a single token has no log-probability
    if not rows:
        raise ValueError("there are no data: no sequence has two tokens.")
    return Sequences.from_rows(rows)


def require_measurable(audited: AuditedModel, sequences: Sequences, recorded: Rollout | None) -> None:
    """Raise ValueError if the model, the sequences and the recorded rollout do not fit together."""
    model = audited.model
    if not audited.predicts_next:
        raise ValueError(f"a {type(model).__name__} predicts no next tokens; mismatch needs a causal language model.")
    require_finite(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("some weights are offloaded to a disk; a rollout in another dtype needs all of them in memory.")
    if recorded is not None:
        recorded.routes.require_model(model)
        Routes.from_tensor(recorded.routes.experts, model)  # the number of experts per token fits too
    require_known_tokens(model, sequences.input_ids)
    require_positions(model, int(sequences.lengths.max()))
    if not bool((sequences.lengths > 1).any()):
        raise ValueError("no sequence has two tokens, so there is no log-probability to compare.")


@final
@dataclass
class _Run:
    """The rows of a report in progress."""

    audited: AuditedModel
    settings: MismatchSettings
    sequences: Sequences
    recorded: Rollout | None
    on_rollout: Callable[[Rollout], None] | None
    done: int = 0
    progress: Progress = lambda done, what: None
    rows: list[Row] = field(default_factory=list)
    skipped: list[SkippedRow] = field(default_factory=list)
    live_ratio: dict[str, Tensor] = field(default_factory=dict)  # log ratio (B,N) of the live router, by kind of rollout

    def __post_init__(self) -> None:
        self.resampling = Resampling(len(self.sequences.lengths), self.settings.draws, self.settings.seed)
        self.about = self.audited.describe(None)

    def work(self) -> int:
        """Return the tokens of all forwards: live training, the replay of a record, and seven for simulated rollouts."""
        forwards = 1 + (self.recorded is not None) + 7 * self.settings.simulate
        return forwards * int(self.sequences.lengths.sum())

    def measure(self) -> bool:
        """Measure all rows; return whether the user interrupted. Raise KeyboardInterrupt if no row was finished."""
        try:
            live = self._forwards("training, live")
            if self.recorded is not None:
                self._live_and_replay("recorded", self.recorded, live)
            if self.settings.simulate:
                self._simulated_rows(live)
        except KeyboardInterrupt:
            if not self.rows:
                raise
            return True
        return False

    def _live_and_replay(self, kind: RolloutKind, rollout: Forward | Rollout, live: Forward) -> None:
        self._add(LIVE, kind, rollout, live)
        if self._possible(REPLAY, kind):
            with with_replay(self.audited.model):
                trained = self._forwards(f"training, replay of the {kind} rollout", routes=rollout.routes)
                self._add(REPLAY, kind, rollout, trained)

    def _simulated_rows(self, live: Forward) -> None:
        rollout, chosen = self._roll_out("simulated rollout, live"), self.settings
        if self.on_rollout is not None:
            way = "token by token" if chosen.rollout_decode else "whole sequences"
            engine = f"Holdfast, {chosen.rollout_dtype}, batches of {chosen.rollout_batch}, {way}"
            ids, lengths = self.sequences.input_ids, self.sequences.lengths
            self.on_rollout(Rollout(ids, lengths, rollout.routes, rollout.logprobs, engine))
        self._live_and_replay("simulated", rollout, live)
        model, router = self.audited.model, chosen.router
        if self._possible(SMOOTH, "simulated"):
            with with_router(model, router, self.settings.seed):
                calibrate_routers(self.audited, lambda: self._forwards(f"calibration of {router}"))
                rollout = self._roll_out(f"simulated rollout, {router}")
                self._add(SMOOTH, "simulated", rollout, self._forwards(f"training, {router}"))
        if self._possible(FLOAT32, "simulated"):
            with with_float32_routing(model):
                rollout = self._roll_out("simulated rollout, float32 routing", float32_routers=True)
                self._add(FLOAT32, "simulated", rollout, self._forwards("training, float32 routing"))

    def _possible(self, remedy: str, kind: RolloutKind) -> bool:
        reason = reason_against(remedy, self.audited.model)
        if reason is not None:
            self.skipped.append(SkippedRow(remedy, kind, reason))
        return reason is None

    def _forwards(self, what: str, **conditions: Any) -> Forward:
        """Run the model over all sequences, in batches of the training forward unless `conditions` say otherwise."""
        self._tell(0, what)
        options = {"batch": self.settings.batch, **conditions}
        return run_forwards(self.audited, self.sequences, tell=lambda tokens: self._tell(tokens, what), **options)

    def _roll_out(self, what: str, *, float32_routers: bool = False) -> Forward:
        chosen = self.settings
        with weights_of_rollout(self.audited, DTYPES[chosen.rollout_dtype], float32_routers=float32_routers):
            return self._forwards(what, batch=chosen.rollout_batch, decode=chosen.rollout_decode)

    def _tell(self, tokens: int, what: str) -> None:
        self.done += tokens
        self.progress(self.done, what)

    def _add(self, remedy: str, kind: RolloutKind, rollout: Forward | Rollout, trained: Forward) -> None:
        """Add the row of a remedy: the rollout's routes and log-probabilities against those of the training forward."""
        routes, recorded = rollout.routes.to("cpu"), self.recorded
        sets = set_numbers(routes.differs(trained.routes), routes.recorded & trained.routes.recorded, self.resampling)
        # The tokens whose log-probabilities are compared: those of a record where it has some.
        has_scores = recorded is not None and bool(recorded.scored.any())
        compared = recorded.scored if recorded is not None and has_scores else self.sequences.token_mask
        scored = trained.logprobs.where(compared, torch.nan)
        known = scored[~scored.isnan()].double()
        numbers = None
        if rollout.logprobs is not None:
            ratio = scored.double() - rollout.logprobs.cpu().double()
            if not bool(ratio.isnan().all()):
                numbers = ratio_numbers(ratio, self.settings.clip, self.resampling, self.live_ratio.get(kind))
                if remedy == LIVE:
                    self.live_ratio[kind] = ratio
        loss = float(-known.mean()) if len(known) else None
        name = self.settings.router if remedy == SMOOTH else ", ".join(dict.fromkeys(self.about.routers))
        experts, unused = trained.routes.experts.long(), torch.tensor(trained.routes.of.experts).view(-1, 1)
        used = ((experts >= 0) & (experts < unused)).sum(-1)[(experts >= 0).all(-1)].double()
        self.rows.append(Row(remedy, kind, name, sets, numbers, loss, float(used.mean())))

    def report(self, name: str | None, interrupted: bool, seconds: float) -> MismatchReport:
        digest = hashlib.sha256(self.sequences.input_ids.contiguous().numpy().tobytes())
        digest.update(self.sequences.lengths.contiguous().numpy().tobytes())
        recorded = self.recorded
        data = DataDescription(
            kind="texts" if recorded is None else "rollout",
            checksum=digest.hexdigest(),
            sequences=len(self.sequences.lengths),
            tokens=int(self.sequences.lengths.sum()),
            engine=None if recorded is None else recorded.engine,
            logprobs=None if recorded is None else bool(recorded.scored.any()),
        )
        return MismatchReport(
            status="interrupted" if interrupted else "complete",
            model=replace(self.about, name=name or self.about.name),
            data=data,
            settings=self.settings,
            versions=versions(),
            seconds=round(seconds, 3),
            rows=self.rows,
            skipped=self.skipped,
        ).as_stored()

"""`measure_mismatch`: how far a training forward is from a rollout of the same model, and what three remedies change.

There are two kinds of rollout. A *recorded* one comes from another engine (`Rollout`): live and replayed training forwards
are compared with it. A *simulated* one is made here: the same model in another number format and another batch, over the
same tokens. All remedies are compared with simulated rollouts, because two of them change the rollout as well, and an
engine elsewhere cannot be asked again.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, final

import torch
from torch import Tensor

from holdfast.attacks.threat import check_seed
from holdfast.auditing.batches import audit_batches
from holdfast.auditing.model_and_data import AuditedModel, TextEncoder, check_size, evaluation_mode
from holdfast.errors import unknown_name
from holdfast.hub.tracing import require_finite, require_known_tokens, require_positions
from holdfast.mismatch import remedies
from holdfast.mismatch.estimates import TAIL, Resampling, ratio_numbers, set_numbers
from holdfast.mismatch.forwards import DTYPES, Forward, Sequences, run_forwards, weights_of_rollout
from holdfast.mismatch.report import MismatchReport
from holdfast.mismatch.rollout import Rollout
from holdfast.replaying import Routes
from holdfast.routing.layer_names import resolve_layers
from holdfast.stored import without_nan
from holdfast.version import versions

Progress = Callable[[int, str], None]  # (tokens done, what is being done)
RECORDED, SIMULATED = "recorded", "simulated"


@final
@dataclass(frozen=True)
class MismatchSettings:
    """Everything that determines a report, apart from the model and its sequences."""

    rollout_dtype: str = "bfloat16"  # of the weights and activations of a simulated rollout
    rollout_batch: int = 1  # sequences per batch of a simulated rollout
    rollout_decode: bool = False  # one token at a time, with a KV cache
    simulate: bool = True  # False: only what can be compared with a recorded rollout
    router: str = "smooth"  # the remedy `smooth`: this router on both sides
    clip: tuple[float, float] = (0.8, 1.2)  # ratios outside of it are counted
    draws: int = 1000  # of sequences, for intervals
    seed: int = 0  # of these draws, and of new weights of `router`
    batch: int = 8  # sequences per batch of the training forward
    length: int = 128  # tokens per sequence, for texts
    tokens: int | None = None  # stop after this number of tokens, rounded up to whole batches

    def __post_init__(self) -> None:
        if self.rollout_dtype not in DTYPES:
            raise ValueError(unknown_name("rollout_dtype", self.rollout_dtype, DTYPES))
        low, high = self.clip
        if not 0 <= low < 1 < high < math.inf:
            raise ValueError(f"clip is {low:g} to {high:g}; expected a range of ratios around 1, such as 0.8 to 1.2.")
        for name, least in (("rollout_batch", 1), ("batch", 1), ("length", 2), ("draws", 100), ("tokens", 1)):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name), least)
        check_seed(self.seed)
        resolve_layers(self.router, None, native=False)


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
    progress           called with the number of tokens done and a description of the current work
    on_rollout         called with the simulated rollout of the live router; `lambda found: found.save(path)` keeps it for
                       another machine
    settings           rollout_dtype, rollout_batch, rollout_decode, simulate, router, clip, draws, seed, batch, length,
                       tokens: those of `MismatchSettings`

    After Ctrl-C it reports on the remedies that are finished, with the status "interrupted".

    Example:
        report = holdfast.measure_mismatch(model, ["The quick brown fox jumps over the dog."], tokenizer=tokenizer)
        print(report.row("live")["sets"]["routers_differ"], report.row("replay")["logprobs"]["mean"])
    """
    checked = mismatch_settings(**settings)
    audited, recorded = AuditedModel(model), None
    if isinstance(rollout_or_texts, Rollout):
        recorded = rollout_or_texts
        sequences = Sequences(recorded.input_ids, recorded.lengths)
    else:
        if not checked.simulate:
            raise ValueError("there is no recorded rollout, so simulate=False leaves nothing to compare.")
        sequences = sequences_of(audited, rollout_or_texts, tokenizer, checked)
    require_measurable(audited, sequences, recorded)
    if checked.simulate:
        remedies.require_router(model, checked.router, decode=checked.rollout_decode)
    run = _Run(audited, checked, sequences, recorded, progress)
    run.on_rollout = on_rollout
    started = time.monotonic()
    with evaluation_mode(model):
        interrupted = run.measure()
    return run.report(name, interrupted, time.monotonic() - started)


def mismatch_settings(**given: Any) -> MismatchSettings:
    """Return settings; raise ValueError for a wrong name or value."""
    known = [entry.name for entry in fields(MismatchSettings)]
    for name in given:
        if name not in known:
            raise ValueError(unknown_name("setting of a mismatch report", name, known))
    return MismatchSettings(**given)


def sequences_of(audited: AuditedModel, given: Iterable[Any], tokenizer: Any, settings: MismatchSettings) -> Sequences:
    """Return the token sequences of texts or batches."""
    encoder = None if tokenizer is None else TextEncoder(tokenizer, audited.pad)
    rows: list[Tensor] = []
    for batch in audit_batches(
        given, audited, encoder, batch=settings.batch, length=settings.length, tokens=settings.tokens
    ):
        if batch.ids is None:
            raise ValueError("mismatch compares log-probabilities of tokens: give texts or batches with input_ids.")
        mask = batch.inputs.get("attention_mask")
        real = torch.ones_like(batch.ids) if mask is None else mask
        rows.extend(ids[keep != 0].cpu().long() for ids, keep in zip(batch.ids, real, strict=True))
    rows = [row for row in rows if len(row) > 1]  # a single token has no log-probability
    if not rows:
        raise ValueError("there are no data: no sequence has two tokens.")
    lengths = torch.tensor([len(row) for row in rows])
    return Sequences(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths)


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
class _Run:
    """The rows of a report in progress."""

    def __init__(
        self,
        audited: AuditedModel,
        settings: MismatchSettings,
        sequences: Sequences,
        recorded: Rollout | None,
        progress: Progress | None,
    ) -> None:
        self.audited, self.settings, self.sequences, self.recorded = audited, settings, sequences, recorded
        self.progress, self.done = progress, 0
        self.resampling = Resampling(len(sequences.lengths), settings.draws, settings.seed)
        self.about = audited.describe(None)
        self.rows: list[dict[str, Any]] = []
        self.on_rollout: Callable[[Rollout], None] | None = None
        self.live_ratio: dict[str, Tensor] = {}  # log ratio (B,N) of the live router, by kind of rollout

    def measure(self) -> bool:
        """Measure all rows; return whether the user interrupted. Raise KeyboardInterrupt if no row was finished."""
        try:
            live = self._train("training, live")
            if self.recorded is not None:
                self._recorded_rows(self.recorded, live)
            if self.settings.simulate:
                self._simulated_rows(live)
        except KeyboardInterrupt:
            if not self.rows:
                raise
            return True
        return False

    def _recorded_rows(self, recorded: Rollout, live: Forward) -> None:
        self._add(remedies.LIVE, RECORDED, recorded.routes, recorded.logprobs, live)
        self._replay(RECORDED, recorded.routes, recorded.logprobs)

    def _simulated_rows(self, live: Forward) -> None:
        rollout = self._roll_out("simulated rollout, live")
        if self.on_rollout is not None:
            ids, lengths = self.sequences.input_ids, self.sequences.lengths
            self.on_rollout(Rollout(ids, lengths, rollout.routes, rollout.logprobs, self._engine()))
        self._add(remedies.LIVE, SIMULATED, rollout.routes, rollout.logprobs, live)
        self._replay(SIMULATED, rollout.routes, rollout.logprobs)
        model, router = self.audited.model, self.settings.router
        if self._possible(remedies.SMOOTH):
            with remedies.with_router(model, router, self.settings.seed):
                self._calibrate(router)
                rollout = self._roll_out(f"simulated rollout, {router}")
                self._add(
                    remedies.SMOOTH, SIMULATED, rollout.routes, rollout.logprobs, self._train(f"training, {router}"), router
                )
        if self._possible(remedies.FLOAT32):
            with remedies.with_float32_routing(model):
                rollout = self._roll_out("simulated rollout, float32 routing", float32_routers=True)
                trained = self._train("training, float32 routing")
                self._add(remedies.FLOAT32, SIMULATED, rollout.routes, rollout.logprobs, trained)

    def _possible(self, remedy: str, kind: str = SIMULATED) -> bool:
        reason = remedies.reason_against(remedy, self.audited.model)
        if reason is not None:
            self.rows.append({**self._heading(remedy, kind), "skipped": reason})
        return reason is None

    def _replay(self, kind: str, routes: Routes, logprobs: Tensor | None) -> None:
        if self._possible(remedies.REPLAY, kind):
            with remedies.with_replay(self.audited.model):
                trained = self._train(f"training, replay of the {kind} rollout", routes)
                self._add(remedies.REPLAY, kind, routes, logprobs, trained)

    def _calibrate(self, router: str) -> None:
        what = f"calibration of {router}"
        remedies.calibrate_routers(
            self.audited,
            lambda: run_forwards(
                self.audited, self.sequences, batch=self.settings.batch, tell=lambda n: self._tell(n, what)
            ),
        )

    def _train(self, what: str, routes: Routes | None = None) -> Forward:
        self._tell(0, what)
        return run_forwards(
            self.audited, self.sequences, batch=self.settings.batch, routes=routes, tell=lambda n: self._tell(n, what)
        )

    def _roll_out(self, what: str, *, float32_routers: bool = False) -> Forward:
        self._tell(0, what)
        dtype, chosen = DTYPES[self.settings.rollout_dtype], self.settings
        with weights_of_rollout(self.audited, dtype, float32_routers=float32_routers):
            return run_forwards(
                self.audited,
                self.sequences,
                batch=chosen.rollout_batch,
                decode=chosen.rollout_decode,
                tell=lambda n: self._tell(n, what),
            )

    def _engine(self) -> str:
        chosen = self.settings
        way = "token by token" if chosen.rollout_decode else "whole sequences"
        return f"Holdfast, {chosen.rollout_dtype}, batches of {chosen.rollout_batch}, {way}"

    def _tell(self, tokens: int, what: str) -> None:
        self.done += tokens
        if self.progress is not None:
            self.progress(self.done, what)

    def _heading(self, remedy: str, kind: str, router: str | None = None) -> dict[str, Any]:
        own = ", ".join(dict.fromkeys(self.about["routers"]))
        return {"remedy": remedy, "rollout": kind, "router": own if router is None else router, "skipped": None}

    def _add(
        self,
        remedy: str,
        kind: str,
        routes: Routes,
        logprobs: Tensor | None,
        trained: Forward,
        router: str | None = None,
    ) -> None:
        """Add the row of a remedy: the rollout's routes and log-probabilities against those of the training forward."""
        compared = routes.recorded.cpu() & trained.routes.recorded
        sets = set_numbers(routes.to("cpu").differs(trained.routes), compared, self.resampling)
        scored = trained.logprobs.where(self._scored(), torch.nan)
        ratio = None if logprobs is None else scored.double() - logprobs.cpu().double()
        found = None
        if ratio is not None and not bool(ratio.isnan().all()):
            live = self.live_ratio.get(kind)
            found = ratio_numbers(ratio, self.settings.clip, self.resampling, live)
            if remedy == remedies.LIVE:
                self.live_ratio[kind] = ratio
        self.rows.append(
            {
                **self._heading(remedy, kind, router),
                "sets": sets,
                "logprobs": found,
                "loss": float(-scored[~scored.isnan()].double().mean()) if not bool(scored.isnan().all()) else None,
                "experts_per_token": _experts_per_token(trained.routes),
            }
        )

    def _scored(self) -> Tensor:
        """Return (B,N) bool: the tokens whose log-probabilities are compared, those of a record where it has some."""
        if self.recorded is None or not bool(self.recorded.scored.any()):
            return self.sequences.token_mask
        return self.recorded.scored

    def report(self, name: str | None, interrupted: bool, seconds: float) -> MismatchReport:
        digest = hashlib.sha256(self.sequences.input_ids.contiguous().numpy().tobytes())
        digest.update(self.sequences.lengths.contiguous().numpy().tobytes())
        data: dict[str, Any] = {
            "kind": "rollout" if self.recorded is not None else "texts",
            "checksum": digest.hexdigest(),
            "sequences": len(self.sequences.lengths),
            "tokens": self.sequences.tokens,
        }
        if self.recorded is not None:
            data |= {"engine": self.recorded.engine, "logprobs": bool(self.recorded.scored.any())}
        status: Literal["complete", "interrupted"] = "interrupted" if interrupted else "complete"
        return MismatchReport(
            status=status,
            model={**self.about, "name": name or self.about["name"]},
            data=data,
            settings={**asdict(self.settings), "clip": list(self.settings.clip), "tail": TAIL},
            versions=versions(),
            seconds=round(seconds, 3),
            rows=without_nan(self.rows),
        )


def _experts_per_token(routes: Routes) -> float:
    """Return the mean number of experts of a token in a layer."""
    experts, unused = routes.experts.long(), torch.tensor(routes.of.experts).view(-1, 1)
    used = ((experts >= 0) & (experts < unused)).sum(-1)
    recorded = (experts >= 0).all(-1)
    return float(used[recorded].double().mean())

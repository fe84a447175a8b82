"""`holdfast mismatch`: measure how far a training forward is from a rollout, with three remedies beside the live router."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from holdfast.cli.common import MeasuredText, free_files, show, write_report_files
from holdfast.progress import quiet

if TYPE_CHECKING:
    from holdfast.mismatch import MismatchReport, Rollout
    from holdfast.replaying import Routes

SHOWN_LAYERS = 12


@dataclass(frozen=True)
class Mismatch(MeasuredText):
    """Measure how far a training forward is from a rollout of the same model: how often routers select different
    experts, and what this does to log-probabilities. Compare the live router, replay, smooth and float32 routing.

    The model is the trainer's, in --dtype. The rollout is a file of `holdfast.Rollout.save` with the tokens, routes and
    log-probabilities of vLLM, SGLang or another engine; a file of `Routes.save`, with its text in --text, one sequence per
    line; or none: then the rollout is simulated with the same model in --rollout-dtype, in batches of --rollout-batch.

    Examples: `holdfast mismatch path/to/olmoe rollout.safetensors --dtype float32 --out mismatch`,
    `holdfast mismatch path/to/olmoe --text my.txt --rollout-dtype bfloat16 --rollout-batch 1`,
    `holdfast mismatch comparison/cells/smoe-seed0 --rollout-decode --tokens 1000`
    """

    model: Positional[str]
    """A folder that `holdfast train` or `compare` wrote, or any Hugging Face folder or name."""
    routes: Positional[Path | None] = None
    """What another engine recorded: a file of `holdfast.Rollout.save`, or of `Routes.save` for the text in --text."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the simulated rollout."""
    rollout_batch: int = 1
    """Sequences per batch of the simulated rollout."""
    rollout_decode: bool = False
    """Simulate the rollout one token at a time, with a KV cache. This takes longer."""
    simulate: bool = True
    """Simulate rollouts, which smooth and float32 routing need, also where another engine's rollout is given."""
    router: str = "smooth"
    """The router of the remedy smooth, put into the model without training; with options: smooth[budget=0.25]."""
    clip: tuple[float, float] = (0.8, 1.2)
    """Count the tokens whose ratio of probabilities is outside of this range."""
    draws: int = 1000
    """How many times sequences are drawn for the intervals."""
    out: Path | None = None
    """Write mismatch.json and mismatch.html to this folder; without another engine's rollout also the simulated one,
    rollout.safetensors, which can be compared on another machine."""

    def run(self) -> None:
        from holdfast.report import write_mismatch

        names = ["mismatch.json", "mismatch.html", *(["rollout.safetensors"] if self.routes is None else [])]
        files = free_files(self.out, *names, force=self.force)
        rollouts: list[Rollout] = []
        report = self._measure(rollouts)
        print_mismatch(report)
        for kept, rollout in zip(files[2:], rollouts, strict=False):
            rollout.save(kept)
            print(f"Simulated rollout: {kept}")
        write_report_files(report, files, write_mismatch)

    def _measure(self, rollouts: list[Rollout]) -> MismatchReport:
        from holdfast.mismatch import measure_mismatch
        from holdfast.mismatch.rollout import Rollout, read_record
        from holdfast.mismatch.run import mismatch_settings

        names = ("rollout_dtype", "rollout_batch", "rollout_decode", "simulate", "router", "clip", "draws", "seed", "batch")
        settings: dict[str, Any] = {name: getattr(self, name) for name in (*names, "length", "tokens")}
        mismatch_settings(**settings)  # a mistake must not cost the time to load a model
        record = None if self.routes is None else read_record(self.routes)
        if record is None and not self.simulate:
            raise ValueError("--no-simulate needs the rollout of another engine: name its file after the model.")
        if record is not None and not isinstance(record, Rollout) and self.source is None:
            raise ValueError(f"{self.routes} has routes and no token ids: name their text with --text.")
        if isinstance(record, Rollout) and self.source is not None:
            raise ValueError(f"{self.routes} has the token ids of its rollout; leave --text out.")
        model, given, tokenizer, source = self._model_and_data(record)
        settings |= {"tokenizer": tokenizer, "name": self.model, "on_rollout": rollouts.append}
        report = measure_mismatch(model, given, **settings)
        file = None if self.routes is None else str(self.routes)
        return replace(report, data=replace(report.data, source=source, file=file))

    def _model_and_data(self, record: Rollout | Routes | None) -> tuple[Any, Any, Any, dict[str, Any] | None]:
        """Return the model, its rollout or texts, and the tokenizer and the source of texts."""
        from holdfast.auditing.model_and_data import TextEncoder
        from holdfast.files import LARGE, read_text
        from holdfast.mismatch.rollout import Rollout, rollout_of_lines
        from holdfast.train.saved_model import load_model

        if isinstance(record, Rollout):
            quiet()
            return load_model(self.model, self.loading.options()), record, None, None
        lines: list[str] = []
        if record is not None:  # its sequences: the lines that are not empty
            try:
                lines = [line for line in read_text(Path(str(self.source)), limit=LARGE).splitlines() if line.strip()]
            except FileNotFoundError:
                raise ValueError(
                    f"{self.source} does not exist; name the text of the routes, a file with one sequence per line."
                ) from None
            if not lines:
                raise ValueError(f"{self.source} has no text; expected one sequence per line.")
        where = {} if record is None else {"source": "python-docs"}  # a small text of the package, for the tokenizer
        model, material = self.read_model(self.model, **where)
        if material.tokenizer is None:
            raise ValueError(f"{self.model} reads no text; mismatch needs a causal language model.")
        if record is not None:
            encoder = TextEncoder(material.tokenizer)
            return model, rollout_of_lines([encoder.encode(line)[0] for line in lines], record), None, None
        return model, material, material.tokenizer, material.source


def print_mismatch(report: MismatchReport) -> None:
    """Print the remedies side by side, the layers, and why rows are missing."""
    from holdfast.auditing.geometry_run import spread
    from holdfast.report.mismatch_page import changes_table, remedies_table, summary, verdict
    from holdfast.report.page_shell import percent
    from holdfast.report.tables import Table

    print(f"{report.model.name}, {report.model.dtype}")
    for kind in report.rollouts:
        show(remedies_table(report, kind).turned())
        changes = changes_table(report, kind)
        if changes.rows:
            show(changes)
    if report.rows:  # the shares of routing decisions that differ, for some layers evenly spaced
        rows = [row for row in report.rows if row.rollout == report.rollouts[0]]
        places = spread(len(rows[0].sets.layers), SHOWN_LAYERS)
        columns = ["", *(str(rows[0].sets.layers[place].layer) for place in places)]
        cells = [[row.label, *(percent(row.sets.layers[place].routers_differ.value) for place in places)] for row in rows]
        show(Table("Routing decisions with different experts, by layer", columns, cells))
    for skipped in report.skipped:
        print(f"{skipped.remedy} was skipped: {skipped.reason}")
    if report.data.logprobs is False:
        print("The file has no log-probabilities: only its sets of experts were compared.")
    if report.rows:
        print(" ".join([*summary(report), verdict(report)]))
    if report.status == "interrupted":
        print("Interrupted: these are the finished rows.")

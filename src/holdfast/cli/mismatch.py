"""`holdfast mismatch`: measure how far a training forward is from a rollout, with three remedies beside the live router."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from holdfast.cli.common import Loading, PluginFiles, Tell, bar, plain_text, require_free, show, slim_table

if TYPE_CHECKING:
    from holdfast.mismatch import MismatchReport, Rollout
    from holdfast.replaying import Routes

NAME, ROLLOUT = "mismatch.json", "rollout.safetensors"
PASSES = {"recorded": 2, "simulated": 8}  # forwards over all sequences, with and without simulated rollouts
SHOWN_LAYERS = 12


@dataclass(frozen=True)
class Mismatch:
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
    source: Annotated[str | None, arg(aliases=["--text"])] = None
    """Use this text instead of the one the model was trained on: a name or a path."""
    data: Path | None = None
    """The folder with named sources; without it they are downloaded."""
    tokens: int = 4096
    """How many tokens of the text to read, rounded to whole batches."""
    length: int = 128
    """Tokens per sequence of the text."""
    batch: int = 8
    """Sequences per batch of the training forward."""
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
    seed: int = 0
    """Seed of these draws, and of new weights that --router may need."""
    out: Path | None = None
    """Write mismatch.json and mismatch.html to this folder; without another engine's rollout also the simulated one,
    rollout.safetensors, which can be compared on another machine."""
    force: bool = False
    """Overwrite these files if they exist."""
    loading: Annotated[Loading, arg(name="")] = field(default_factory=Loading)
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.report import write_mismatch

        self.plugins.load()
        target = None if self.out is None else self.out / NAME
        page = None if target is None else target.with_suffix(".html")
        kept = None if target is None or self.routes is not None else target.with_name(ROLLOUT)
        for file in (target, page, kept):
            require_free(file, self.force)
        rollouts: list[Rollout] = []
        report = self._measure(rollouts)
        print_mismatch(report)
        if target is not None and page is not None:
            print(f"All numbers: {report.save(target)}")
            if kept is not None and rollouts:
                rollouts[0].save(kept)
                print(f"Simulated rollout: {kept}")
            print(f"Report: {write_mismatch(target, page, force=True)}")
        if report.status == "interrupted":
            raise KeyboardInterrupt

    def _measure(self, rollouts: list[Rollout]) -> MismatchReport:
        from holdfast.mismatch import measure_mismatch
        from holdfast.mismatch.rollout import Rollout, read_record
        from holdfast.mismatch.run import mismatch_settings
        from holdfast.train.training import quiet

        names = ("rollout_dtype", "rollout_batch", "rollout_decode", "simulate", "router", "clip", "draws", "seed", "batch")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        settings |= {"length": self.length, "tokens": self.tokens}
        mismatch_settings(**settings)  # a mistake must not cost the time to load a model
        record = None if self.routes is None else read_record(self.routes)
        if record is None and not self.simulate:
            raise ValueError("--no-simulate needs the rollout of another engine: name its file after the model.")
        if record is not None and not isinstance(record, Rollout) and self.source is None:
            raise ValueError(f"{self.routes} has routes and no token ids: name their text with --text.")
        if isinstance(record, Rollout) and self.source is not None:
            raise ValueError(f"{self.routes} has the token ids of its rollout; leave --text out.")
        quiet()
        model, given, tokenizer, about = self._model_and_data(record)
        passes = PASSES["simulated"] * self.simulate + (PASSES["recorded"] - self.simulate) * (record is not None)
        total = int(given.lengths.sum()) if isinstance(given, Rollout) else self.tokens
        with ExitStack() as stack:
            bars: list[Tell] = []

            def progress(done: int, what: str) -> None:
                if not bars:  # opened late, because a closed bar leaves an empty line before an error message
                    bars.append(stack.enter_context(bar(passes * total, leave=False)))
                bars[0](done, f"{self.model}: {what}")

            measured = partial(measure_mismatch, model, given, tokenizer=tokenizer, name=self.model, **settings)
            report = measured(progress=progress, on_rollout=rollouts.append)
        return replace(report, data={**report.data, **about})

    def _model_and_data(self, record: Rollout | Routes | None) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Return the model, its rollout or texts, the tokenizer of texts, and what the report says about the data."""
        from holdfast.hub.tracing import require_positions
        from holdfast.mismatch.rollout import Rollout, rollout_of_lines
        from holdfast.train.saved_model import AuditData, load_model, load_model_and_task

        about = {} if self.routes is None else {"file": str(self.routes)}
        if isinstance(record, Rollout):
            return load_model(self.model, self.loading.options()), record, None, about
        lines = [] if record is None else _lines(Path(str(self.source)))
        source = self.source if record is None else "python-docs"  # a small text of the package, for the tokenizer
        model, task = load_model_and_task(self.model, source=source, data=self.data, loading=self.loading.options())
        material = AuditData(task, self.tokens)
        if material.tokenizer is None:
            raise ValueError(f"{self.model} reads no text; mismatch needs a causal language model.")
        if record is not None:
            return model, rollout_of_lines(_encoded(lines, material.tokenizer), record), None, about
        require_positions(model, self.length)
        return model, material, material.tokenizer, {**about, "source": material.source}


def _lines(path: Path) -> list[str]:
    """Return the lines of a text file that are not empty: the sequences of routes that have no token ids."""
    from holdfast.files import LARGE, read_text

    try:
        lines = [line for line in read_text(path, limit=LARGE).splitlines() if line.strip()]
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; name the text of the routes, a file with one sequence per line.") from None
    if not lines:
        raise ValueError(f"{path} has no text; expected one sequence per line.")
    return lines


def _encoded(lines: list[str], tokenizer: Any) -> list[list[int]]:
    from holdfast.auditing.model_and_data import TextEncoder

    encoder = TextEncoder(tokenizer)
    return [encoder.encode(line)[0] for line in lines]


def print_mismatch(report: MismatchReport) -> None:
    """Print the remedies side by side, the layers, and why rows are missing."""
    rows = [row for row in report.rows if row["skipped"] is None]
    for kind in dict.fromkeys(row["rollout"] for row in rows):
        _print_remedies(report, [row for row in rows if row["rollout"] == kind], kind)
    if rows:
        _print_layers([row for row in rows if row["rollout"] == rows[0]["rollout"]])
    for row in report.rows:
        if row["skipped"] is not None:
            print(f"{row['remedy']} was skipped: {row['skipped']}")
    if report.data.get("logprobs") is False:
        print("The file has no log-probabilities: only its sets of experts were compared.")
    if rows:
        print(" ".join(_summary(report)))
    if report.status == "interrupted":
        print("Interrupted: these are the finished rows.")


def _summary(report: MismatchReport) -> list[str]:
    """Return the sentences at the top of the report's page."""
    import json

    from holdfast.report.mismatch_page import summary
    from holdfast.report.stored_mismatch import Mismatch

    return summary(Mismatch.parse(json.loads(report.to_json())))


def _print_remedies(report: MismatchReport, rows: list[dict[str, Any]], kind: str) -> None:
    chosen = report.settings
    low, high = chosen["clip"]
    what = (
        f"rollout of {report.data['engine']}"
        if kind == "recorded"
        else f"simulated rollout, {chosen['rollout_dtype']}, batches of {chosen['rollout_batch']}"
    )
    shown = slim_table(
        "",
        *("", "decisions", "tokens", "mean gap", "largest", "outside", "loss", "experts"),
        caption="decisions: share of the routing decisions (one token in one layer) with different experts than in the "
        "rollout. tokens: share of the tokens with different experts in at least one layer. gap: |log ratio| of a token's "
        "probability in training and rollout. outside: share of tokens with a ratio outside "
        f"{low:g} to {high:g}. loss, experts per token: of the training forward. 95% intervals below.",
    )
    shown.title = plain_text(f"{report.model['name']}, {report.model['dtype']}, against a {what}")
    for row in rows:
        found = row["logprobs"]
        cells = [_share(row["sets"]["routers_differ"]["value"]), _share(row["sets"]["tokens_differ"]["value"])]
        numbers = ["", "", ""]
        if found is not None:
            numbers = [_number(found["mean"]["value"]), _number(found["largest"]), _share(found["outside"]["value"])]
        last = [_number(row["loss"], 4), _number(row["experts_per_token"])]
        shown.add_row(plain_text(_name(row)), *cells, *numbers, *last)
    show(shown)
    for row in rows:
        print(f"{_name(row)}: {_intervals(row)}")
    _print_gaps([row for row in rows if row["logprobs"] is not None])


def _print_gaps(rows: list[dict[str, Any]]) -> None:
    """Print the quantiles of the gap, in a table of their own: one with all columns does not fit a terminal."""
    if not rows:
        return
    quantiles = [f"{name}% below" for name in rows[0]["logprobs"]["quantiles"]]
    shown = slim_table("The gap, and the mean ratio", "", *quantiles, "std", "ratio")
    for row in rows:
        found = row["logprobs"]
        cells = [_number(one["value"]) for one in found["quantiles"].values()]
        shown.add_row(plain_text(_name(row)), *cells, _number(found["std"]), _number(found["ratio"]["value"], 5))
    show(shown)


def _intervals(row: dict[str, Any]) -> str:
    parts = [f"decisions {_range(row['sets']['routers_differ'], _share)}"]
    found = row["logprobs"]
    if found is not None:
        for key, name, shown in (("mean", "mean gap", _number), ("outside", "outside", _share)):
            change = "" if found["change"] is None else f", minus live {_range(found['change'][key], shown)}"
            parts.append(f"{name} {_range(found[key], shown)}{change}")
    return "; ".join(parts)


def _range(found: dict[str, Any], shown: Any) -> str:
    if found["low"] is None:
        return f"{shown(found['value'])} (one sequence, no interval)"
    return f"{shown(found['value'])} ({shown(found['low'])} to {shown(found['high'])})"


def _print_layers(rows: list[dict[str, Any]]) -> None:
    """Print the shares of routing decisions that differ, for some layers evenly spaced."""
    from holdfast.auditing.geometry_run import spread

    layers = rows[0]["sets"]["layers"]
    chosen = spread(len(layers), SHOWN_LAYERS)
    numbers = [str(layers[place]["layer"]) for place in chosen]
    shown = slim_table("Routing decisions with different experts, by layer", "", *numbers)
    for row in rows:
        found = row["sets"]["layers"]
        shown.add_row(plain_text(_name(row)), *(_share(found[place]["routers_differ"]["value"]) for place in chosen))
    show(shown)


def _name(row: dict[str, Any]) -> str:
    return str(row["router"] if row["remedy"] == "smooth" else row["remedy"])


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"

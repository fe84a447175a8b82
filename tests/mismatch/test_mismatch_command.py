"""`holdfast mismatch`: what it prints, writes and refuses."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from auditing.audited_models import texts, tokenizer
from commands import Command
from tiny import tiny
from wording import mentions

import holdfast
from holdfast.cli.mismatch import print_mismatch
from holdfast.mismatch import MismatchReport, Rollout
from holdfast_command import main

QUICK = ["--tokens", "96", "--length", "16", "--batch", "4", "--draws", "100"]


@pytest.fixture(scope="module")
def measured(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure the model on the text, with a simulated rollout."""
    out = tmp_path_factory.mktemp("measured")
    assert main(["mismatch", str(folder), "--text", str(text), *QUICK, "--out", str(out)]) == 0
    return out


def test_four_remedies_are_measured_and_the_page_is_rendered_again(
    folder: Path, text: Path, measured: Path, tmp_path: Path, command: Command
) -> None:
    report: Any = MismatchReport.load(measured / "mismatch.json")
    assert [row.remedy for row in report.rows] == ["live", "replay", "smooth", "float32"]
    assert report.model.name == str(folder) and report.data.tokens >= 96 and report.data.source
    page = (measured / "mismatch.html").read_text(encoding="utf-8")
    for name in ("mismatch.json", "mismatch.html", "rollout.safetensors"):  # none of them is overwritten
        (tmp_path / name).write_bytes((measured / name).read_bytes())
        assert mentions(command.refused("mismatch", folder, "--text", text, *QUICK, "--out", tmp_path), name, "--force")
        (tmp_path / name).unlink()
    command.printed("report", measured, "--out", tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_the_table_has_every_remedy_with_intervals(folder: Path, text: Path, command: Command) -> None:
    shown = command.printed("mismatch", folder, "--text", text, *QUICK, "--router", "smooth[budget=0.25]")
    for part in ("live", "replay", "smooth[budget=0.25]", "float32", "99.9%", "outside", "by layer", "intervals"):
        assert part in shown, part
    assert "All numbers" not in shown and "batches of 1" in " ".join(shown.split())  # lines break


def test_the_terminal_has_the_numbers_and_sentences_of_the_page(
    measured: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, experts per token and the share outside the clip range too, in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    report: Any = MismatchReport.load(measured / "mismatch.json")
    print_mismatch(report)
    shown = capsys.readouterr().out
    page = (measured / "mismatch.html").read_text(encoding="utf-8")
    (verdict,) = re.findall(r'<p id="verdict">(.*?)</p>', page, flags=re.DOTALL)
    (summary,) = re.findall(r'<p class="summary">(.*?)</p>', page, flags=re.DOTALL)
    assert f"{summary} {verdict}" in shown
    assert "% of the tokens have a ratio of probabilities outside 0.8 to 1.2" in summary
    lines = [line.split() for line in shown.splitlines()]
    assert ["remedy", "live", "replay", "smooth", "float32"] in lines
    assert ["loss", *(f"{row.loss:.4g}" for row in report.rows)] in lines
    assert ["experts", "per", "token", *(f"{row.experts_per_token:.3g}" for row in report.rows)] in lines
    outside = next(line for line in lines if line[:3] == ["outside", "the", "clip"])
    assert {f"{row.logprobs.outside.value:.2%}" for row in report.rows if row.logprobs} <= set(outside)
    smooth, live = report.row("smooth"), report.row("live")
    assert f"smooth changes the model: its loss is {smooth.loss:.4g} (live {live.loss:.4g})" in shown
    without = replace(report, rows=[replace(row, logprobs=None) for row in report.rows[:2]])  # no log-probabilities
    print_mismatch(without)
    shown = capsys.readouterr().out
    assert "different experts in at least one layer" in shown and "log-probability" not in shown and "99.9%" not in shown


def test_a_rollout_from_a_file_is_compared_and_not_overwritten(
    folder: Path, measured: Path, tmp_path: Path, command: Command
) -> None:
    """The rollout of one machine is read on another one: here, in the other direction of dtypes."""
    kept = tmp_path / "rollout.safetensors"
    kept.write_bytes((measured / "rollout.safetensors").read_bytes())
    before = kept.read_bytes()
    given = ["mismatch", folder, kept, "--draws", "100", "--dtype", "bfloat16", "--out", tmp_path]
    words = " ".join(command.printed(*given, "--no-simulate").split())  # a long title is wrapped
    assert "Recorded rollout: Holdfast, bfloat16, batches of 1, whole sequences" in words and "smooth" not in words
    report: Any = MismatchReport.load(tmp_path / "mismatch.json")
    assert [(row.remedy, row.rollout) for row in report.rows] == [("live", "recorded"), ("replay", "recorded")]
    assert report.model.dtype == "bfloat16" and report.data.file == str(kept) and kept.read_bytes() == before
    first: Any = MismatchReport.load(measured / "mismatch.json")
    assert report.data.checksum == first.data.checksum and report.data.tokens == first.data.tokens
    replayed = report.row("replay", "recorded").logprobs.mean.value
    assert replayed < first.row("replay").logprobs.mean.value  # the same dtype leaves a smaller gap


@pytest.mark.slow
def test_routes_without_token_ids_are_placed_on_the_lines_of_a_text(folder: Path, tmp_path: Path, command: Command) -> None:
    model, lines = tiny("mixtral"), [*texts(3), "the cat sat"]
    batch = tokenizer()(lines, return_tensors="pt", padding=True, padding_side="right")
    with holdfast.trace(model) as traced, torch.no_grad():
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    holdfast.Routes.from_trace(traced, model).save(tmp_path / "routes.safetensors")
    text = tmp_path / "lines.txt"
    text.write_text("\n\n".join(lines) + "\n")
    given = ["mismatch", folder, tmp_path / "routes.safetensors", "--no-simulate", "--draws", "100"]
    assert "no log-probabilities" in command.printed(*given, "--text", text, "--out", tmp_path / "out")
    report: Any = MismatchReport.load(tmp_path / "out" / "mismatch.json")
    for row in report.rows:  # both sides are float32
        assert row.sets.routers_differ.value == 0 and row.sets.tokens == int(batch["attention_mask"].sum())

    assert "name their text with --text" in command.refused(*given)
    assert "does not exist" in command.refused(*given, "--text", tmp_path / "nowhere.txt")
    for content, says in (
        (lines[:3], "of 4 sequences, but the text has 3 lines"),
        ([*lines[:3], "the cat sat on mat"], "line 4 of the text has 5 tokens"),
        ([" ", ""], "has no text"),
    ):
        text.write_text("\n".join(content))
        assert says in command.refused(*given, "--text", text)


def test_the_bar_is_full_at_the_end(folder: Path, measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, float]] = []

    def bar(total: float, *, leave: bool) -> Any:
        return nullcontext(lambda done, what: seen.append((done, total)))

    monkeypatch.setattr("holdfast.progress.bar", bar)
    rollout = str(measured / "rollout.safetensors")
    for options in ([], ["--no-simulate"]):
        seen.clear()
        assert main(["mismatch", str(folder), rollout, "--draws", "100", *options]) == 0
        assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--clip", "1.2", "0.8"], "clip is 1.2 to 0.8"),
        (["--no-simulate"], "--no-simulate needs the rollout of another engine"),
        (["nowhere.safetensors"], "does not exist"),
    ],
)
def test_a_mistake_gets_one_sentence_before_a_model_is_loaded(
    arguments: list[str], says: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.train import saved_model

    monkeypatch.setattr(saved_model, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert says in command.refused("mismatch", "no-such-folder", *arguments)


def test_a_rollout_that_does_not_fit_gets_one_sentence(
    folder: Path, measured: Path, text: Path, tmp_path: Path, command: Command
) -> None:
    file = measured / "rollout.safetensors"
    assert "leave --text out" in command.refused("mismatch", folder, file, "--text", text)
    tiny("mixtral", num_experts_per_tok=1).save_pretrained(tmp_path / "k")
    assert "k = 1" in command.refused("mismatch", tmp_path / "k", file)
    (tmp_path / "other.safetensors").write_bytes(b"{}")
    assert "cannot be read as safetensors" in command.refused("mismatch", folder, tmp_path / "other.safetensors")


def test_control_characters_of_a_file_do_not_reach_the_terminal(
    folder: Path, measured: Path, tmp_path: Path, command: Command
) -> None:
    own = Rollout.load(measured / "rollout.safetensors")
    Rollout(own.input_ids, own.lengths, own.routes, own.logprobs, "\x1b]0;a\x07[red]<b>").save(tmp_path / "evil.safetensors")
    given = ["mismatch", folder, tmp_path / "evil.safetensors", "--no-simulate", "--draws", "100"]
    shown = command.printed(*given, "--out", tmp_path)
    assert "\x1b" not in shown and r"\x1b]0;a\x07[red]<b>" in shown
    page = (tmp_path / "mismatch.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;" in page and "[red]<b>" not in page


def test_a_model_of_the_library_with_its_own_text_is_measured(text: Path, tmp_path: Path, command: Command) -> None:
    """A rerouted model that `holdfast.save` wrote: smooth is skipped with the reason, the others are measured."""
    model = holdfast.reroute(tiny("mixtral"), "smoe")
    holdfast.save(model, tmp_path / "model", tokenizer=tokenizer())
    shown = command.printed("mismatch", tmp_path / "model", "--text", text, *QUICK, "--out", tmp_path / "out")
    assert "smooth was skipped: the model is already rerouted" in shown
    stored = json.loads((tmp_path / "out" / "mismatch.json").read_text())
    assert [row["remedy"] for row in stored["rows"]] == ["live", "replay", "float32"]
    assert [row["remedy"] for row in stored["skipped"]] == ["smooth"]

"""`holdfast audit`: what it prints, writes and returns."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import SMALL
from commands import Command
from report.audited import pair, report_of, stored_audit
from safetensors.torch import load_file, save_file
from tiers import quick_or_slow
from tiny import tiny
from tiny_dense import tiny_dense
from wording import mentions

from holdfast.auditing import PERTURBATIONS, AuditReport, Settings, parse_condition
from holdfast.cli.audit import print_report, print_what_if
from holdfast.report import render_audit
from holdfast_command import main

MISTAKEN = ("DENSE", "BROKEN", "SILENT", "WORDLESS", "FOREIGN", "NAN", "EMPTY")
QUICK = ["--tokens", "96", "--length", "16", "--batch", "4"]


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    assert (
        main(
            [
                "train",
                "tiny",
                "--router",
                "smoe",
                "--out",
                str(out),
                "--set",
                f"data.source={text}",
                "training.steps=8",
                *SMALL,
            ]
        )
        == 0
    )
    return out


def test_a_folder_is_audited_and_its_reports_are_written(folder: Path, text: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    given = ["audit", folder, "--source", text, *QUICK, "--out", out]
    shown = command.printed(*given)
    assert "Findings" in shown and "noise.0.05" in shown and "at risk" in shown
    report = AuditReport.load(out / "audit.json")
    assert report.data.source and report.model.name == str(folder) and report.data.tokens >= 96
    assert report.skipped == {}
    for name in report.numbers():  # any of them may be asked for before an audit
        parse_condition(f"{name}>0").check(Settings(perturb=list(PERTURBATIONS), noise=[0.01, 0.05]))
    assert "--force" in command.refused(*given)
    (out / "audit.json").unlink()
    assert "audit.html" in command.refused(*given)  # the page alone is not overwritten either
    command.printed(*given, "--force", "--perturb", "none,noise", "--noise", "0.2")
    assert list(AuditReport.load(out / "audit.json").perturbations) == ["none", "noise.0.2"]


def test_a_model_trained_here_is_audited_on_its_own_text_with_another_router(
    trained: Path, text: Path, tmp_path: Path, command: Command
) -> None:
    given = ["audit", trained, "--source", text, *QUICK, "--out", tmp_path]
    shown = command.printed(*given, "--perturb", "none,noise,words", "--what-if", "smooth")
    assert mentions(shown, "What if: the router smooth", "Price: experts per token 2 → ", "; loss, unperturbed ")
    stored = json.loads((tmp_path / "audit.json").read_text())
    assert stored["what_if"]["router"] == "smooth" and stored["what_if"]["cost"]["experts_per_token"]["after"] > 2
    flips = stored["what_if"]["flip_output"]["noise.0.01"]
    assert flips["after"] < flips["before"]
    assert "words" in stored["perturbations"] and stored["at_risk"][0]["context"]


def test_a_what_if_prints_its_table_within_80_columns_then_the_answer_and_its_price(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stored = stored_audit()
    stored["what_if"]["router"] = "smooth[eps=0.1]@1,3"
    stored["what_if"]["cost"] |= {"loss": pair(None, None), "perplexity": pair(None, None)}
    print_what_if(report_of(stored))
    *lines, answer, more, price = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "smooth[eps=0.1]@1,3" in lines[0]  # options in brackets are not markup
    rows = [line.split() for line in lines if line.startswith(("noise.0.01", "none"))]
    assert rows == [["noise.0.01", "3.1%", "→", "\u2013", "7.0%", "→", "8.1%", "6.2%", "→", "0.30%"]]
    heading = " ".join(lines[1:4])
    assert all(word in heading for word in ("predictions", "total", "flips"))
    assert "Nothing changes under none." in " ".join(" ".join(lines).split())
    assert mentions(answer, "With smooth[eps=0.1]@1,3, predictions change") and mentions(more, "1 of 1", "95%")
    assert price == "Price: experts per token 2 → 3.5 (+75%)."


def test_findings_are_printed_below_the_headings_of_the_page(capsys: Any) -> None:
    report = report_of(stored_audit())
    print_report(report)
    shown = capsys.readouterr().out
    assert mentions(
        shown, "Findings: 2 severe and 1 serious; none about the loss.", "Predictions that change:", "- severe: 3.1% of",
        "The selection of experts:", "- severe: layer 1", "- serious: layer 0", "What if: the router smooth", "Price: ",
    )  # fmt: skip
    assert mentions(render_audit(report), "Predictions that change", "The selection of experts")


def test_conditions_decide_the_exit_code(folder: Path, text: Path, command: Command) -> None:
    given = ["audit", folder, "--source", text, *QUICK, "--perturb", "none"]
    command.printed(*given, "--fail-if", "undecided.bf16>0.99", "flips.none>0")
    done = command(*given, "--fail-if", "undecided.bf16>0.99", "entropy>0.001")
    assert done.returncode == 1 and "undecided.bf16" not in done.stderr
    assert "entropy > 0.001 is true" in done.stderr and "Traceback" not in done.stderr


def test_two_audits_are_compared_without_a_model(folder: Path, text: Path, tmp_path: Path, command: Command) -> None:
    for seed in ("0", "1"):
        given = ["audit", folder, "--source", text, *QUICK, "--perturb", "noise", "--seed", seed]
        command.printed(*given, "--out", tmp_path / seed)
    files = [tmp_path / seed / "audit.json" for seed in ("0", "1")]
    shown = command.printed("audit", "--compare", *files)
    assert "weight_change.noise.0.01" in shown and "entropy" not in shown
    assert "the same" in command.printed("audit", "--compare", files[0], files[0])


STOPPED: dict[str, tuple[Callable[[float, str], bool], list[str]]] = {
    "audit": (lambda done, what: done >= 64, ["--perturb", "none"]),
    "geometry": (lambda done, what: done > 0, ["--walking", "16", "--walks", "1", "--pictures", "1"]),
    "mismatch": (lambda done, what: "calibration" in what, ["--draws", "100"]),
}


@pytest.mark.parametrize("name", quick_or_slow(list(STOPPED), ["audit", "mismatch"]))
def test_an_interrupted_command_writes_what_was_finished(
    name: str, folder: Path, text: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_enough, options = STOPPED[name]

    def stop(done: float, what: str) -> None:
        if is_enough(done, what):
            raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.progress.bar", lambda *_, **__: nullcontext(stop))
    done = command(name, folder, "--text", text, *QUICK, *options, "--out", tmp_path)
    assert done.returncode == 130 and "Interrupted" in done.stdout
    assert json.loads((tmp_path / f"{name}.json").read_text())["status"] == "interrupted"
    assert "nterrupted" in (tmp_path / f"{name}.html").read_text(encoding="utf-8")


MISTAKES = [
    ("audit MODEL --perturb nois", "'noise'"),
    ("audit not/loaded --fail-if undecided.bf61>0", "'undecided.bf16'"),
    ("audit not/loaded --fail-if flips.words>0 --perturb none", "flips.words"),
    ("audit not/loaded --what-if smooth[budgets=2]", "'budget'"),
    ("audit MODEL --source EMPTY", "no text"),
    ("audit DENSE", "sparsify"),
    ("audit BROKEN", "cannot be loaded"),
    ("audit SILENT", "tokeniser"),
    ("audit WORDLESS", "tokeniser"),
    ("audit FOREIGN", "tokeniser"),
    ("audit NAN", "model.norm.weight: "),
    ("audit nowhere/at-all/here", "nowhere"),
    ("audit", "which model"),
    ("audit MODEL --compare a.json b.json", "--compare"),
    ("audit --compare a.json b.json", "a.json"),
    ("geometry not/loaded --noise 0", "noise is 0"),
    ("geometry MODEL --what-if smooth@7", "7"),
    ("geometry MODEL --length 100000", "positions"),
    ("geometry MODEL --out EMPTY", "not a folder"),
    ("certify MODEL --sigma 0", "sigma is 0"),
    ("certify MODEL --length 1", "at least 2"),
    ("certify MODEL --device-map nowhere", "nowhere"),
]


@pytest.mark.parametrize(("line", "says"), quick_or_slow(MISTAKES, [MISTAKES[place] for place in (0, 3, 15, 19)]))
@pytest.mark.every_combination
def test_a_mistake_prints_a_one_line_error(
    line: str, says: str, folder: Path, text: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name, *words = line.split()
    places = {word: _make(word, tmp_path / word.lower(), folder) for word in words if word in MISTAKEN}
    options = ["--source", text, *QUICK] if words and words[0] != "--compare" else []
    done = command(name, *options, *({"MODEL": folder, **places}.get(word, word) for word in words))
    told = done.stderr.splitlines()[-1]  # below what transformers logs
    assert done.returncode == 2 and says in told and told.startswith("holdfast: ") and "Traceback" not in done.stderr


def _make(kind: str, path: Path, folder: Path) -> Path:
    """Return a path of the kind, each a mistake that users make."""
    if kind == "EMPTY":
        path.with_suffix(".txt").write_text("")
        return path.with_suffix(".txt")
    shutil.copytree(folder, path)
    if kind == "DENSE":
        tiny_dense("llama").save_pretrained(path)
    elif kind == "FOREIGN":
        tiny("mixtral", vocab_size=8).save_pretrained(path)
    elif kind == "NAN":
        tensors = load_file(path / "model.safetensors")
        tensors["model.norm.weight"][0] = torch.nan
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    elif kind == "BROKEN":
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        for file in path.glob("tokenizer*"):
            file.unlink()
    if kind == "WORDLESS":  # of this family transformers makes a tokeniser out of nothing
        tiny("olmoe").save_pretrained(path)
    return path


def test_an_image_model_is_audited(tmp_path: Path, command: Command) -> None:
    torch.manual_seed(0)
    out = tmp_path / "images"
    small = ["training.steps=2", "training.batch=8", "model.config.hidden_size=32", "sparse.hidden=32"]
    command.printed("train", "vmoe-tiny", "--router", "smoe", "--out", out, "--set", *small)
    command.printed("audit", out, "--perturb", "none,noise,batch", "--out", tmp_path / "audit")
    report = AuditReport.load(tmp_path / "audit" / "audit.json")
    assert report.overall.loss and report.overall.loss > 0 and report.skipped["batch.left"].reason.startswith("images ")
    assert report.perturbations["batch.alone"].overall.flips == 0

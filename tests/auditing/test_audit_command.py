"""`holdfast audit`: what it prints, writes and returns."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from auditing.audited_models import batches
from safetensors.torch import load_file, save_file
from tiny import tiny

from holdfast.auditing import PERTURBATIONS, AuditReport, Settings, WhatIf, audit, parse_condition
from holdfast.auditing.reports import Pair
from holdfast.cli.audit import print_what_if
from holdfast_command import main

MISTAKEN = ("DENSE", "STRANGE", "BROKEN", "SILENT", "WORDLESS", "FOREIGN", "NAN", "EMPTY")
QUICK = ["--tokens", "96", "--length", "16", "--batch", "4"]
SMALL = ["training.steps=8", "training.batch=4", "data.length=16", "data.vocabulary=200", "model.config.hidden_size=32"]
SMALL += ["model.config.intermediate_size=32", "sparse.hidden=16"]


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    assert main(["train", "tiny", "--router", "smoe", "--out", str(out), "--set", f"data.source={text}", *SMALL]) == 0
    return out


def test_a_folder_is_audited_and_its_reports_are_written(folder: Path, text: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    given = ["audit", str(folder), "--source", str(text), *QUICK, "--out", str(out)]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "Findings" in shown and "noise.0.05" in shown and "at risk" in shown
    report = AuditReport.load(out / "audit.json")
    assert report.data.source and report.model.name == str(folder) and report.data.tokens >= 96
    assert report.skipped == {}
    for name in report.numbers():  # any of them may be asked for before an audit
        parse_condition(f"{name}>0").check(Settings(list(PERTURBATIONS), [0.01, 0.05]))
    assert main(given) == 2 and "--force" in capsys.readouterr().err
    (out / "audit.json").rename(tmp_path / "kept.json")  # the page alone is not overwritten either
    assert main(given) == 2 and "audit.html" in capsys.readouterr().err
    (tmp_path / "kept.json").rename(out / "audit.json")
    before = (out / "audit.json").read_text()
    assert main([*given, "--force", "--perturb", "none,noise", "--noise", "0.2"]) == 0
    assert (out / "audit.json").read_text() != before
    assert list(AuditReport.load(out / "audit.json").perturbations) == ["none", "noise.0.2"]


def test_a_model_trained_here_is_audited_on_its_own_text_with_another_router(
    trained: Path, text: Path, tmp_path: Path, capsys: Any
) -> None:
    given = [
        "audit",
        str(trained),
        "--source",
        str(text),
        *QUICK,
        "--perturb",
        "none,noise,words",
        "--what-if",
        "smooth",
        "--out",
        str(tmp_path),
    ]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "What if: the router smooth" in shown and "experts per token  2 → " in shown and "\nloss " in shown
    stored = json.loads((tmp_path / "audit.json").read_text())
    assert stored["what_if"]["router"] == "smooth" and stored["what_if"]["cost"]["experts_per_token"]["after"] > 2
    flips = stored["what_if"]["flip_output"]["noise.0.01"]
    assert flips["after"] < flips["before"]
    assert "words" in stored["perturbations"] and stored["at_risk"][0]["context"]


def test_a_what_if_prints_the_part_of_flips_the_total_and_the_predictions_within_80_columns(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pairs(before: float, after: float) -> dict[str, Pair]:
        return {name: Pair(before, after) for name in ("noise.0.01", "routing.bf16")}

    monkeypatch.setenv("COLUMNS", "80")
    cost = {"loss": Pair(None, None), "experts_per_token": Pair(2.0, 2.5)}
    changes = (pairs(0.0057, 0.0017), pairs(0.0083, 0.0099), pairs(0.0013, 0.0024))
    overall = audit(tiny("mixtral"), batches(1), perturb=["none"]).overall
    print_what_if(WhatIf("smooth[eps=0.1]@1,3", cost, pairs(0.1, 0.1), *changes, overall))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "smooth[eps=0.1]@1,3" in lines[0]  # options in brackets are not markup
    rows = [line.split() for line in lines if line.startswith(("noise.0.01", "routing.bf16"))]
    assert [row[1:] for row in rows] == [["0.57%", "→", "0.17%", "0.83%", "→", "0.99%", "0.13%", "→", "0.24%"]] * 2
    heading = " ".join(lines[1:4])
    assert all(word in heading for word in ("flips", "total", "predictions"))
    assert lines[-1].split() == ["experts", "per", "token", "2", "→", "2.5"] and not any("loss" in line for line in lines)


def test_conditions_decide_the_exit_code(folder: Path, text: Path, capsys: Any) -> None:
    given = ["audit", str(folder), "--source", str(text), *QUICK, "--perturb", "none"]
    assert main([*given, "--fail-if", "undecided.bf16>0.99", "flips.none>0"]) == 0
    assert main([*given, "--fail-if", "undecided.bf16>0.99", "entropy>0.001"]) == 1
    told = capsys.readouterr().err
    assert "entropy > 0.001 is true" in told and "undecided.bf16" not in told and "Traceback" not in told


def test_two_audits_are_compared_without_a_model(folder: Path, text: Path, tmp_path: Path, capsys: Any) -> None:
    for seed in ("0", "1"):
        given = ["audit", str(folder), "--source", str(text), *QUICK, "--perturb", "noise", "--seed", seed]
        assert main([*given, "--out", str(tmp_path / seed)]) == 0
    capsys.readouterr()
    files = [str(tmp_path / seed / "audit.json") for seed in ("0", "1")]
    assert main(["audit", "--compare", *files]) == 0
    shown = capsys.readouterr().out
    assert "weight_change.noise.0.01" in shown and "entropy" not in shown
    assert main(["audit", "--compare", files[0], files[0]]) == 0
    assert "the same" in capsys.readouterr().out


def test_an_interrupted_command_writes_the_finished_batches(
    folder: Path, text: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.cli import common

    def stop(done: float, what: str) -> None:
        if done >= 64:
            raise KeyboardInterrupt

    monkeypatch.setattr(common, "bar", lambda *_, **__: nullcontext(stop))
    given = ["audit", str(folder), "--source", str(text), *QUICK, "--perturb", "none", "--out", str(tmp_path)]
    assert main(given) == 130
    assert "Interrupted" in capsys.readouterr().out
    assert AuditReport.load(tmp_path / "audit.json").status == "interrupted"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["MODEL", "--perturb", "nois"], "'noise'"),
        (["MODEL", "--noise", *(["0.1"] * 9)], "9 "),
        (["MODEL", "--fail-if", "entropy=3"], "entropy=3"),
        (["not/loaded", "--fail-if", "undecided.bf61>0"], "'undecided.bf16'"),
        (["not/loaded", "--fail-if", "flips.words>0", "--perturb", "none"], "flips.words"),
        (["MODEL", "--what-if", "smoth", "--perturb", "none"], "smooth"),
        (["MODEL", "--source", "EMPTY"], "no text"),
        (["DENSE"], "sparsify"),
        (["STRANGE"], "family"),
        (["BROKEN"], "cannot be loaded"),
        (["SILENT"], "tokeniser"),
        (["WORDLESS"], "tokeniser"),
        (["FOREIGN"], "tokeniser"),
        (["NAN"], "model.norm.weight: "),
        (["nowhere/at-all/here"], "nowhere"),
        ([], "which model"),
        (["MODEL", "--compare", "a.json", "b.json"], "--compare"),
        (["--compare", "a.json", "b.json"], "a.json"),
    ],
)
def test_a_mistake_prints_a_one_line_error(
    arguments: list[str], says: str, folder: Path, text: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    places = {name: tmp_path / name.lower() for name in MISTAKEN}
    made = {name: _make(name, path, folder) for name, path in places.items() if name in arguments}
    source = [] if "--source" in arguments or not made else ["--source", str(text)]
    words = [str(made.get(word, folder if word == "MODEL" else word)) for word in arguments]
    quick = QUICK if arguments and "--compare" not in arguments else []
    given = ["--source", str(text)] if "MODEL" in arguments and not source and "--source" not in arguments else source
    capsys.readouterr()
    assert main(["audit", *words, *quick, *given]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in told and told.startswith("holdfast: ") and "Traceback" not in told


def _make(kind: str, path: Path, folder: Path) -> Path:
    """Return a path of the kind, each a mistake that users make."""
    if kind == "EMPTY":
        path.with_suffix(".txt").write_text("")
        return path.with_suffix(".txt")
    shutil.copytree(folder, path)
    if kind == "DENSE":
        sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
        config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    elif kind == "STRANGE":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64, "num_attention_heads": 2}
        config = transformers.GPTNeoXConfig(**sizes, intermediate_size=16)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
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


def test_an_image_model_is_audited(tmp_path: Path) -> None:
    torch.manual_seed(0)
    out = tmp_path / "images"
    small = ["training.steps=2", "training.batch=8", "model.config.hidden_size=32", "sparse.hidden=32"]
    assert main(["train", "vmoe-tiny", "--router", "smoe", "--out", str(out), "--set", *small]) == 0
    assert main(["audit", str(out), "--perturb", "none,noise,batch", "--out", str(tmp_path / "audit")]) == 0
    report = AuditReport.load(tmp_path / "audit" / "audit.json")
    assert report.overall.loss and report.overall.loss > 0 and report.skipped["batch.left"].reason.startswith("images ")
    assert report.perturbations["batch.alone"].overall.flips == 0

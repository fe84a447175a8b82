"""`holdfast geometry`: what it prints, writes and refuses."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from auditing.audited_models import tokenizer
from tiny import tiny

from holdfast.auditing import GeometryReport
from holdfast_command import main

QUICK = ["--tokens", "96", "--length", "16", "--batch", "4", "--walking", "16", "--walks", "1", "--pictures", "1"]


def test_a_folder_is_measured_and_its_page_is_written_and_rendered_again(
    folder: Path, text: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    given = ["geometry", str(folder), "--text", str(text), *QUICK, "--out", str(out)]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "flipped" in shown and "order" in shown and "Largest jumps" in shown and "What if: the router smooth" in shown
    report: Any = GeometryReport.load(out / "geometry.json")
    assert report.data.source and report.model.name == str(folder) and report.data.tokens >= 96
    assert report.settings.what_if == "smooth" and report.layers[0].pictures.slices
    page = (out / "geometry.html").read_text(encoding="utf-8")
    assert main(given) == 2 and "--force" in capsys.readouterr().err
    (out / "geometry.json").rename(tmp_path / "kept.json")  # the page alone is not overwritten either
    assert main(given) == 2 and "geometry.html" in capsys.readouterr().err
    (tmp_path / "kept.json").rename(out / "geometry.json")
    assert main(["report", str(out), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page
    assert main(["report", str(out)]) == 2 and "--force" in capsys.readouterr().err
    assert main(["report", str(out / "geometry.json"), "--force"]) == 0


@pytest.mark.slow
def test_without_a_what_if_only_the_own_router_is_measured(folder: Path, text: Path, capsys: Any) -> None:
    assert main(["geometry", str(folder), "--source", str(text), *QUICK, "--what-if", "none"]) == 0
    shown = capsys.readouterr().out
    assert "smooth" not in shown and "All numbers" not in shown


@pytest.mark.slow
def test_an_interrupted_command_writes_the_finished_batches(
    folder: Path, text: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.cli import common

    def stop(done: float, what: str) -> None:
        if done > 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(common, "bar", lambda *_, **__: nullcontext(stop))
    assert main(["geometry", str(folder), "--source", str(text), *QUICK, "--out", str(tmp_path)]) == 130
    assert "Interrupted" in capsys.readouterr().out
    assert GeometryReport.load(tmp_path / "geometry.json").status == "interrupted"
    assert "Interrupted" in (tmp_path / "geometry.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["not/loaded", "--noise", "0"], "noise is 0"),
        (["not/loaded", "--walks", "0"], "walks is 0"),
        (["not/loaded", "--pictures", "-1"], "pictures is -1"),
        (["not/loaded", "--batch", "0"], "batch is 0"),
        (["not/loaded", "--what-if", "smoth"], "smooth"),
        (["MODEL", "--what-if", "similarity"], "one token at a time"),
        (["MODEL", "--what-if", "smooth@7"], "7"),
        (["MODEL", "--length", "100000"], "positions"),
        (["MODEL", "--source", "nowhere.txt"], "nowhere.txt"),
        (["MODEL", "--out", "FILE"], "not a folder"),
        (["nowhere/at-all/here"], "nowhere"),
    ],
)
def test_a_mistake_prints_a_one_line_error(
    arguments: list[str], says: str, folder: Path, text: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "file").write_text("")
    words = [str({"MODEL": folder, "FILE": tmp_path / "file"}.get(word, word)) for word in arguments]
    source = [] if "--source" in arguments else ["--source", str(text)]
    quick = [] if "--length" in arguments else ["--length", "16"]
    capsys.readouterr()
    assert main(["geometry", *words, *source, *quick, "--tokens", "96"]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in told and told.startswith("holdfast: ") and "Traceback" not in told


def test_help_has_examples(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["geometry", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "holdfast geometry comparison/cells/smoe-seed0" in shown and "--what-if" in shown and "--text" in shown


def test_a_model_without_a_known_geometry_has_a_page_with_the_reasons(tmp_path: Path, text: Path, capsys: Any) -> None:
    """DeepSeek's rule has groups and a bias: its ties are not those of a top-k."""
    folder = tmp_path / "model"
    tiny("deepseek_v3").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    out = tmp_path / "out"
    assert main(["geometry", str(folder), "--source", str(text), *QUICK, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "is not measured: " in shown
    stored = json.loads((out / "geometry.json").read_text())
    assert stored["layers"] == [] and all(layer["reason"] for layer in stored["refused"])
    assert "No layer of this model has a known geometry" in (out / "geometry.html").read_text(encoding="utf-8")

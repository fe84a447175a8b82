"""`holdfast geometry`: what it prints, writes and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from auditing.audited_models import tokenizer
from commands import Command
from tiny import tiny

from holdfast.auditing import GeometryReport

QUICK = ["--tokens", "96", "--length", "16", "--batch", "4", "--walking", "16", "--walks", "1", "--pictures", "1"]


def test_a_folder_is_measured_and_its_page_is_written_and_rendered_again(
    folder: Path, text: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "out"
    given = ["geometry", folder, "--text", text, *QUICK, "--out", out]
    shown = command.printed(*given)
    assert "flipped" in shown and "order" in shown and "Largest jumps" in shown and "What if: the router smooth" in shown
    report: Any = GeometryReport.load(out / "geometry.json")
    assert report.data.source and report.model.name == str(folder) and report.data.tokens >= 96
    assert report.settings.what_if == "smooth" and report.layers[0].pictures.slices
    page = (out / "geometry.html").read_text(encoding="utf-8")
    assert "--force" in command.refused(*given)
    command.printed("report", out / "geometry.json", "--force")
    assert (out / "geometry.html").read_text(encoding="utf-8") == page
    (out / "geometry.json").unlink()
    assert "geometry.html" in command.refused(*given)  # the page alone is not overwritten either


@pytest.mark.slow
def test_without_a_what_if_only_the_own_router_is_measured(folder: Path, text: Path, command: Command) -> None:
    shown = command.printed("geometry", folder, "--source", text, *QUICK, "--what-if", "none")
    assert "smooth" not in shown and "All numbers" not in shown


def test_a_model_without_a_known_geometry_has_a_page_with_the_reasons(tmp_path: Path, text: Path, command: Command) -> None:
    """DeepSeek's rule has groups and a bias: its ties are not those of a top-k."""
    folder = tmp_path / "model"
    tiny("deepseek_v3").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    out = tmp_path / "out"
    assert "is not measured: " in command.printed("geometry", folder, "--source", text, *QUICK, "--out", out)
    stored = json.loads((out / "geometry.json").read_text())
    assert stored["layers"] == [] and all(layer["reason"] for layer in stored["refused"])
    assert "No layer of this model has a known geometry" in (out / "geometry.html").read_text(encoding="utf-8")

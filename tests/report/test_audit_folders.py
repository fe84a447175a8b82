"""`holdfast audit` of whole folders, and its page in a real browser."""

from pathlib import Path
from typing import Any

import pytest
from auditing.audited_models import texts, tokenizer
from report.browsing import show_explorer, visit
from tiny import tiny

from holdfast.auditing import AuditReport
from holdfast_command import main

pytestmark = pytest.mark.slow  # starts a browser

FAMILIES = ["mixtral", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_folder_is_audited_and_its_page_opens_quietly(model_type: str, tmp_path: Path, chromium: Any) -> None:
    folder, text = tmp_path / "model", tmp_path / "some.txt"
    tiny(model_type).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    text.write_text("\n".join(texts(200)))
    quick = ["--tokens", "256", "--length", "32", "--what-if", "smooth"]
    assert main(["audit", str(folder), "--source", str(text), *quick, "--out", str(tmp_path / "out")]) == 0
    report = AuditReport.load(tmp_path / "out" / "audit.json")
    assert report.skipped == {}
    assert report.perturbations["attack"].overall.loss is not None
    assert report.view is not None and report.what_if is not None and report.what_if.routes is not None
    assert len(report.view.routes.layers) == len(report.what_if.routes.layers) == len(report.layers)
    assert set(report.view.routes.perturbed) == set(report.perturbations)
    visit(chromium, tmp_path / "out" / "audit.html")
    show_explorer(chromium)
    assert len(chromium.find_elements("css selector", ".x-token")) == report.view.examples[0].tokens
    assert chromium.get_log("browser") == []

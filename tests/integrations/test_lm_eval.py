"""lm-eval's own way to a model, `--model hf --model_args pretrained=FOLDER`: scores are those of the loaded model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from changed_models import words
from tiny import tiny

import holdfast

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")

ROWS = [{"text": "w5 w9 w13", "end": "w7 w3"}, {"text": "w4 w8", "end": "w15"}, {"text": "w20", "end": "w21 w22 w23"}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = holdfast.reroute(tiny("mixtral"), "symphony+smooth")
    with torch.no_grad():  # a graph that moves routes
        for name, value in model.named_buffers():
            if name.endswith(".graph"):
                value.copy_(torch.softmax(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), -1))
    return holdfast.save(model.eval(), tmp_path_factory.mktemp("lm_eval") / "out", tokenizer=words())


def task(folder: Path) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return {
        "task": "ends",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": " {{end}}",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
    }


@torch.no_grad()
def likelihoods(model: Any) -> list[float]:
    """Of each row's end after its text."""
    found = []
    for row in ROWS:
        text, end = ([int(word[1:]) for word in row[part].split()] for part in ("text", "end"))
        scores = model(input_ids=torch.tensor([text + end])).logits[0].log_softmax(-1)
        places = range(len(text) - 1, len(text) + len(end) - 1)
        found.append(sum(float(scores[place, token]) for place, token in zip(places, end, strict=True)))
    return found


def perplexity(values: list[float]) -> float:
    return float(torch.tensor(values).mean().neg().exp())


@pytest.mark.slow
def test_scores_are_those_of_the_loaded_model(saved: Path, tmp_path: Path) -> None:
    results = lm_eval.simple_evaluate(
        model="hf", model_args=f"pretrained={saved}", tasks=[task(tmp_path)], device="cpu", batch_size=2, log_samples=True
    )
    found = [sample["filtered_resps"][0][0] for sample in sorted(results["samples"]["ends"], key=lambda one: one["doc_id"])]
    model = holdfast.load(saved)
    expected = likelihoods(model)
    assert found == pytest.approx(expected, abs=1e-4)
    assert found != pytest.approx(likelihoods(holdfast.restore(model)), abs=1e-2)  # the routers count


@pytest.mark.slow
def test_the_command_line_opens_the_folder_through_holdfast_run(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "ends.yaml").write_text(yaml.safe_dump(task(tmp_path)))
    line = ["--model", "hf", "--model_args", f"pretrained={saved}", "--tasks", "ends", "--include_path", str(tmp_path)]
    line += ["--device", "cpu", "--output_path", str(tmp_path / "scores.json")]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "--", "lm_eval", *line],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    scores = json.loads(next(tmp_path.rglob("scores*.json")).read_text())
    expected = perplexity(likelihoods(holdfast.load(saved)))
    assert scores["results"]["ends"]["perplexity,none"] == pytest.approx(expected, rel=1e-4)

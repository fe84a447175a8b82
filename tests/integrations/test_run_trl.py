"""`holdfast run -- trl sft`: TRL's command line, which starts processes of its own, trains a folder that Holdfast saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny
from trained_by_others import tokenizer

import holdfast

pytest.importorskip("trl", reason="trl is not installed")


@pytest.mark.slow
def test_the_command_line_of_trl_trains_a_saved_folder(tmp_path: Path) -> None:
    model = holdfast.reroute(tiny("mixtral"), "symphony+smooth")
    holdfast.save(model, tmp_path / "saved", tokenizer=tokenizer())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join([json.dumps({"text": "w5 w6 w7 w8 w9"})] * 8))
    line = ["--model_name_or_path", "saved", "--dataset_name", "data", "--output_dir", "trained", "--max_steps", "1"]
    line += ["--report_to", "none", "--use_cpu", "true", "--bf16", "false", "--learning_rate", "0.01"]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "run", "--", "trl", "sft", *line],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    trained = holdfast.load(tmp_path / "trained")
    routers = [module for module in trained.modules() if isinstance(module, holdfast.Router)]
    assert len(routers) == 3
    moved = [name for name, value in model.state_dict().items() if not torch.equal(value, trained.state_dict()[name])]
    assert any(name.endswith(".graph") for name in moved) and any(name.endswith("gate.weight") for name in moved)

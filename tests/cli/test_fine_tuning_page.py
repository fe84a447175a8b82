"""The two commands of docs/fine-tuning.md, as a user types them, with fewer and smaller steps."""

import json
import re
import shlex
from pathlib import Path

import pytest
from commands import Command

PAGE = Path(__file__).parent.parent.parent / "docs" / "fine-tuning.md"
SMALL = ["data.length=16", "data.test_bytes=2000", "training.batch=16", "training.warmup=1", "data.train_tokens=1300"]
FIRST = ["training.steps=4", "model.config.hidden_size=32", "model.config.intermediate_size=32", "data.vocabulary=200"]


@pytest.mark.slow
def test_pretraining_and_fine_tuning_are_two_commands(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    pretrain, fine_tune = (shlex.split(line) for line in block.splitlines())
    monkeypatch.chdir(tmp_path)
    done = command(*pretrain[1:], *SMALL, *FIRST)
    assert done.returncode == 0, done.stderr
    done = command(*fine_tune[1:], *SMALL, "training.epochs=1", "training.validate_every=6")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^symphony +\d", done.stdout, flags=re.MULTILINE) and Path("fine-tuned/report.html").exists()
    first = json.loads(Path("pretrained/training/log.jsonl").read_text().splitlines()[0])
    log = [json.loads(line) for line in Path("fine-tuned/cells/symphony-seed0/training/log.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in log if "loss" in line]
    assert rates[1:] == sorted(rates[1:], reverse=True) and len(set(rates)) > 3
    assert log[0]["loss"] < first["loss"] and any("eval_loss" in line for line in log)

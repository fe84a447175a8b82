"""`holdfast plan` as a user runs it, with its mistakes."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command

SCALING = Path(__file__).parent.parent.parent / "docs" / "scaling.md"
SIZES = ("hidden_size=64", "intermediate_size=128", "num_hidden_layers=2", "num_attention_heads=4", "vocab_size=100")
SMALL = ("--set", *SIZES)


def test_a_table_has_a_column_for_each_router(command: Command) -> None:
    done = command("plan", "llama", "--experts", "8", "--gpus", "8", "--tokens", "1e9", *SMALL, columns=120)
    assert done.returncode == 0, done.stderr
    for name in ("smoe", "symphony", "similarity", "attention", "ac", "smooth", "training of 1 G tokens", "expert parallel"):
        assert name in done.stdout


def test_json_holds_every_number(command: Command) -> None:
    done = command("plan", "llama", "--experts", "8", "--json", "--routers", "smoe,similarity[rank=4,causal=false]", *SMALL)
    stored = json.loads(done.stdout)
    assert [column["router"] for column in stored["columns"]] == ["smoe", "similarity[rank=4,causal=false]"]
    plain, ranked = (column["parameters"] for column in stored["columns"])
    assert ranked - plain == 2 * 4 * 64
    assert stored["columns"][0]["fits"] == {"ddp": True, "fsdp": True, "expert": True}


def test_a_folder_with_nothing_but_a_config(command: Command, tmp_path: Path) -> None:
    config = {"model_type": "olmoe", "num_hidden_layers": 2, "auto_map": {"AutoModel": "evil--code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = command("plan", str(tmp_path), "--routers", "native", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sparse_layers"] == 2


@pytest.mark.slow
def test_a_name_that_the_hub_does_not_know_is_one_sentence_too() -> None:
    """In a process of its own: whether to ask the hub is decided on import."""
    command = [sys.executable, "-m", "holdfast", "plan", "nobody/nothing-of-that-name"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("holdfast: ")


def test_what_the_page_prints_is_what_the_command_prints(command: Command) -> None:
    shown = re.findall(r"```sh\nholdfast (plan [^\n]*)\n```\n\n```text\n(.*?)```", SCALING.read_text(), flags=re.DOTALL)
    assert shown
    for line, text in shown:
        printed = command(*shlex.split(line), columns=120).stdout
        assert [line.rstrip() for line in text.splitlines()] == [line.rstrip() for line in printed.splitlines()]

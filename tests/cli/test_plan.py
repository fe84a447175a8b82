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

from holdfast_command import main

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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/no/such/folder"], "/no/such/folder"),
        (["lama"], "'llama'"),
        (["{tmp}"], "config.json"),
        (["{tmp}/broken/config.json"], "JSON"),
        (["{tmp}/other"], "lama"),
        (["{tmp}/nameless"], "model_type"),
        (["llama"], "llama is dense"),
        (["llama", "--experts", "4", "--k", "5"], "k is 5"),
        (["llama", "--experts", "4", "--routers", "smo"], "'smoe'"),
        (["llama", "--experts", "4", "--routers", "native"], "native"),
        (["llama", "--experts", "4", "--routers", ","], "at least one"),
        (["llama", "--experts", "4", "--routers", "smoe,ac@1,3,smoe"], "--routers has 'smoe' twice"),
        (["llama", "--experts", "4", "--hidden", "0"], "hidden is 0"),
        (["llama", "--experts", "4", "--set", "num_hidden_layers=0"], "feed-forward"),
        (["llama", "--experts", "4", "--set", "num_hiden_layers=3"], "'num_hidden_layers'"),
        (["llama", "--experts", "4", "--set", "hidden_size=33"], "attention heads"),
        (["llama", "--experts", "4", "--set", "hidden_size"], "hidden_size"),
        (["llama", "--experts", "4", "--layers", "last:40"], "last:1 to last:32"),
        (["llama", "--experts", "4", "--sequence", "4096"], "2048"),
        (["llama", "--experts", "4", "--gpus", "0"], "gpus is 0"),
        (["llama", "--experts", "4", "--gpu-memory", "inf"], "gpu_memory is inf"),
        (["llama", "--experts", "4", "--tokens", "0"], "tokens is 0"),
        (
            ["llama", "--experts", "4", "--tokens", "inf", "--json"],
            "tokens is inf",
        ),
        (["llama", "--experts", "4", "--tokens", "1e308", "--json"], "not JSON compliant"),
        (["gpt_oss", "--set", "num_local_experts=0"], "layers.0.mlp.router.weight would be 0 x 2880"),
        (["deepseek_v3", "--set", "num_attention_heads=0", "num_hidden_layers=4"], " 0 "),
        (["mixtral", "--set", "num_experts_per_tok=9"], "num_experts_per_tok is 9"),
        (["mixtral", "--experts", "4"], "already"),
        (["swin", "--experts", "4"], "tokens"),
        (["vit", "--experts", "4", "--sequence", "7"], "197 tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_no_traceback(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"broken": "{", "other": '{"model_type": "lama"}', "nameless": "{}"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    code = main(["plan", *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments)])
    said = capsys.readouterr().err
    assert code == 2
    assert says in said
    assert said.count("\n") == 1 and said.startswith("holdfast: ")


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

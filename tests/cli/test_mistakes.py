"""Mistakes in a command line: each is one sentence and no traceback, and nothing is written."""

import shlex
from pathlib import Path

import pytest
from commands import Command

MISTAKES = {
    "plan": [
        ("/no/such/folder", "/no/such/folder"),
        ("lama", "'llama'"),
        (".", "config.json"),
        ("broken/config.json", "JSON"),
        ("other", "lama"),
        ("nameless", "model_type"),
        ("llama", "llama is dense"),
        ("llama --experts 4 --k 5", "k is 5"),
        ("llama --experts 4 --routers smo", "'smoe'"),
        ("llama --experts 4 --routers native", "native"),
        ("llama --experts 4 --routers ,", "at least one"),
        ("llama --experts 4 --routers smoe,ac@1,3,smoe", "--routers has 'smoe' twice"),
        ("llama --experts 4 --hidden 0", "hidden is 0"),
        ("llama --experts 4 --set num_hidden_layers=0", "feed-forward"),
        ("llama --experts 4 --set num_hiden_layers=3", "'num_hidden_layers'"),
        ("llama --experts 4 --set hidden_size=33", "attention heads"),
        ("llama --experts 4 --set hidden_size", "hidden_size"),
        ("llama --experts 4 --layers last:40", "last:1 to last:32"),
        ("llama --experts 4 --sequence 4096", "2048"),
        ("llama --experts 4 --gpus 0", "gpus is 0"),
        ("llama --experts 4 --gpu-memory inf", "gpu_memory is inf"),
        ("llama --experts 4 --tokens 0", "tokens is 0"),
        ("llama --experts 4 --tokens inf --json", "tokens is inf"),
        ("llama --experts 4 --tokens 1e308 --json", "not JSON compliant"),
        ("gpt_oss --set num_local_experts=0", "layers.0.mlp.router.weight would be 0 x 2880"),
        ("deepseek_v3 --set num_attention_heads=0 num_hidden_layers=4", " 0 "),
        ("mixtral --set num_experts_per_tok=9", "num_experts_per_tok is 9"),
        ("mixtral --experts 4", "already"),
        ("swin --experts 4", "tokens"),
        ("vit --experts 4 --sequence 7", "197 tokens"),
    ],
    "routers": [
        ("--routers smo", "'smoe'"),
        ("--routers ,", "at least one"),
        ("--route --routers top-p+remoe", "'top-p' and 'remoe'"),
        ("--routers ac@1", "'ac@1' names layers of a model"),
        ('--route --routers "ac@1|smoe"', "'ac@1|smoe' names layers of a model"),
        ('--route --routers "smoe[k=3]" --k 2', "the option k is given twice"),
        ("--route --k 40", "k is 40"),
        ("--route --experts 0", "experts is 0"),
        ("--route --dim 0", "divisible by 4"),
        ("--route --sequences 1000000", "the text"),
    ],
    "recipes": [("tinny", "did you mean 'tiny'?")],
    "run": [
        ("-- no-such-program --help", "'no-such-program'"),
        ("no-such-file.py", "no-such-file.py"),
        ("--plugin=nowhere.py -- python -c \"print('started')\"", "the plugin nowhere.py cannot be read"),
    ],
    "compare": [
        ("--recipe tinny", "'tiny'"),
        ("--routers smoe,smoth", "'smooth'"),
        ("--routers ,", "at least one"),
        ("--seeds 0", "seeds is 0"),
        ("--set training.stpes=3", "'steps'"),
        ("--set training.steps", "sets no value"),
        ("--set training.steps=0", "training.steps"),
        ('--set "training.steps=[1"', "YAML"),
        ("--set data.source=nothing.txt", "nothing.txt"),
        ("--set sparse.k=99", "k is 99"),
        ("--set model.family=mamba", "feed-forward networks of mamba"),
    ],
}


@pytest.mark.parametrize(
    ("line", "says"), [(f"{name} {line}", says) for name, cases in MISTAKES.items() for line, says in cases]
)
def test_a_mistake_is_one_sentence_and_no_traceback(
    line: str, says: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"broken": "{", "other": '{"model_type": "lama"}', "nameless": "{}"}.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(text)
    assert says in command.refused(*shlex.split(line))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "nameless", "other"]

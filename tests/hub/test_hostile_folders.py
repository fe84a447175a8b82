"""Folders made to harm: each is refused by every command, in one sentence and in no time, and nothing outside is touched."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from audit.subjects import texts, tokenizer
from safetensors.torch import load_file, save_file
from tiny import tiny

import holdfast
from holdfast.cli.main import main
from holdfast.hub.manifest import write_manifest
from holdfast.reading import DEEPEST

SMALL = ["training.steps=4", "training.batch=4", "training.save_every=2", "data.length=16", "data.vocabulary=200"]
SMALL += ["model.config.hidden_size=32", "model.config.intermediate_size=32", "sparse.hidden=16", "sparse.experts=4"]
TRYING: dict[str, list[str]] = {
    "audit": ["--tokens", "32", "--length", "16", "--batch", "2"],
    "certify": ["--tokens", "32", "--length", "16", "--batch", "2"],
    "attack": ["routes", "--budget", "0.1", "--examples", "8", "--steps", "1"],
    "evaluate": [],
}
SECONDS = 20  # far more than a refusal takes on a busy machine, far less than any of these folders would
Edit = Callable[[Path], object]
CANARY = "canary_of_hostile_folders"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain Hugging Face folder, a changed one, the folder of a finished training, and a text."""
    place = tmp_path_factory.mktemp("made")
    tiny("mixtral").save_pretrained(place / "plain")
    holdfast.save(holdfast.reroute(tiny("mixtral"), "symphony+smooth"), place / "changed")
    for folder in ("plain", "changed"):
        tokenizer().save_pretrained(place / folder)
    (place / "text.txt").write_text("\n".join(texts(200)))
    assert main(_training(place / "trained", place / "text.txt")) == 0
    return {name: place / name for name in ("plain", "changed", "trained", "text.txt")}


def _training(out: Path, text: Path) -> list[str]:
    return ["train", "tiny", "--router", "smoe", "--out", str(out), "--set", f"data.source={text}", *SMALL]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder beside the hostile one: nothing in it is changed, and no code runs that would say so."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "secret.txt").write_text("a secret that no report may quote\n" * 300)
    (place / f"{CANARY}.py").write_text("raise SystemExit('code of a folder was run')\n")
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in place.iterdir()}
    yield place
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in place.iterdir()} == before
    assert CANARY not in sys.modules


def config(**values: Any) -> Edit:
    """Other values in the family's config, in a changed folder too."""

    def edit(folder: Path) -> None:
        file = folder / "config.json"
        content = json.loads(file.read_text())
        content.get("model_config", content).update(values)
        file.write_text(json.dumps(content))

    return edit


def layer(**values: Any) -> Edit:
    """Another description of every changed layer, with the checksum that belongs to it."""

    def edit(folder: Path) -> None:
        file = folder / "config.json"
        content = json.loads(file.read_text())
        for spec in content["model_config"]["holdfast"]["layers"].values():
            spec.update(values)
        file.write_text(json.dumps(content))
        write_manifest(folder)

    return edit


def content(name: str, text: str | Callable[[], str]) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text if isinstance(text, str) else text())

    return edit


def pipe(name: str) -> Edit:
    """A named pipe without a writer: whoever opens it waits for ever."""

    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return edit


def link(name: str, target: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return edit


def folder_named(name: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return edit


def index(*values: Any) -> Edit:
    return content("model.safetensors.index.json", json.dumps({"weight_map": {f"w{i}": v for i, v in enumerate(values)}}))


def header(length: int) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
        _renew_manifest(folder)

    return edit


def sparse_file(folder: Path) -> None:
    """Weights of a terabyte that take no room on the disk: to read or to sum them takes hours."""
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2**40)


def gates(value: float) -> Edit:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if "gate.weight" in name:
                tensors[name] = torch.full_like(tensor, value)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        _renew_manifest(folder)

    return edit


def _renew_manifest(folder: Path) -> None:
    if (folder / "holdfast.json").exists():
        write_manifest(folder)


def code(folder: Path) -> None:
    """Code of the folder's own, a kernel of a hub, and a class that is none."""
    shutil.copy(folder.parent / "outside" / f"{CANARY}.py", folder)
    own = {"AutoConfig": f"{CANARY}.Config", "AutoModelForCausalLM": f"{CANARY}.Model"}
    config(auto_map=own, attn_implementation="evil/kernel", architectures=[CANARY])(folder)


NESTED = "[" * 200_000 + "]" * 200_000
HUGE = f'{{"a": "{"x" * (100 << 20)}"}}'
EVERY = ("load", "plan", "train", *TRYING)
OPENED = ("load", *TRYING)  # commands that read weights
BUILT = ("load", "plan", *TRYING)  # commands that build the model of the config
ON_TRAINING = ("load", "train", *TRYING)  # a checkpoint's weights are read too

# What is done to a folder, the commands that meet it, and a part of the sentence that each of them says.
HOSTILE: dict[str, tuple[Edit, tuple[str, ...], str]] = {
    "a vocabulary of 10^8": (config(vocab_size=10**8), BUILT, "they do not belong together"),
    "a million experts": (config(num_local_experts=10**6), BUILT, "at most 65,536"),
    "10^5 layers": (config(num_hidden_layers=10**5), EVERY, "num_hidden_layers is 100,000"),
    "10^5 layers in a part": (config(text_config={"num_hidden_layers": 10**5}), EVERY, "num_hidden_layers is 100,000"),
    "10^9 labels": (config(num_labels=10**9), EVERY, "num_labels is"),
    "a width of 10^9": (config(intermediate_size=10**9), BUILT, "config"),
    "a number of 100 digits": (config(vocab_size=10**99), EVERY, "larger than 2^63"),
    "no expert chosen": (config(num_experts_per_tok=0), BUILT, "between 1 and its 8 experts"),
    "800 experts chosen": (config(num_experts_per_tok=800), BUILT, "between 1 and its 8 experts"),
    "a number for a class": (config(architectures=[5]), BUILT, "names no model class"),
    "code": (code, OPENED, "names no model class"),
    "a pipe for a config": (pipe("config.json"), EVERY, "a named pipe, not a regular file"),
    "a device for a config": (link("config.json", "/dev/zero"), EVERY, "a device, not a regular file"),
    "a folder for a config": (folder_named("config.json"), EVERY, "a folder, not a regular file"),
    "a link to itself": (link("config.json", "config.json"), EVERY, "config.json"),
    "a config outside": (link("config.json", "../outside/secret.txt"), ON_TRAINING, "outside of its folder"),
    "100 MB of config": (content("config.json", HUGE), EVERY, "larger than 16 MiB"),
    "a deep config": (content("config.json", NESTED), EVERY, "levels deep"),
    "a deeper config than needed": (content("config.json", "[" * 99 + "]" * 99), EVERY, f"more than {DEEPEST} levels deep"),
    "no JSON": (content("config.json", "\x1b[31m\nnone"), EVERY, "cannot be read as JSON"),
    "a list for a config": (content("config.json", "[]"), EVERY, "not"),
    "a pipe for weights": (pipe("model.safetensors"), ON_TRAINING, "a named pipe, not a regular file"),
    "a device for weights": (link("model.safetensors", "/dev/zero"), ON_TRAINING, "a device, not a regular file"),
    "weights outside": (link("model.safetensors", "../outside/secret.txt"), ON_TRAINING, "outside of its folder"),
    "a header of 10^12 bytes": (header(10**12), OPENED, "cannot be loaded"),
    "a terabyte of nothing": (sparse_file, OPENED, "of memory, and this machine has"),
    "shards that are no names": (index(5, [], None), ON_TRAINING, "which file holds each weight"),
    "shards outside": (index("../outside/secret.txt"), ON_TRAINING, "no safetensors file of this folder"),
    "a deep index": (content("model.safetensors.index.json", NESTED), ON_TRAINING, "levels deep"),
    "a pipe for generation": (pipe("generation_config.json"), ON_TRAINING, "a named pipe"),
    "a pipe for a chat": (pipe("chat_template.jinja"), ON_TRAINING, "a named pipe"),
    "gates of NaN": (gates(float("nan")), tuple(TRYING), "NaN or infinity"),
    "gates of infinity": (gates(float("inf")), tuple(TRYING), "NaN or infinity"),
}
CASES = [(kind, command) for kind, (_, commands, _) in HOSTILE.items() for command in commands]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The one sentence that a command says on a folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(command: str, folder: Path, *more: str) -> str:
        capsys.readouterr()
        started = time.monotonic()
        if command == "load":
            with pytest.raises(ValueError, match=r"\S") as caught:
                holdfast.load(folder)
            told = f"holdfast: {caught.value}"
        else:
            assert main([command, str(folder), *TRYING.get(command, []), *more]) == 2
            said = capsys.readouterr()
            told = said.err.strip().splitlines()[-1]
            assert "Traceback" not in said.err + said.out and "a secret" not in said.err + said.out
        assert time.monotonic() - started < SECONDS
        assert told.startswith("holdfast: ") and len(told.splitlines()) == 1 and told.isprintable()
        return told

    return run


@pytest.mark.parametrize(("kind", "command"), CASES)
def test_a_hostile_folder_is_refused(
    kind: str, command: str, made: dict[str, Path], tmp_path: Path, outside: Path, refused: Callable[..., str], capsys: Any
) -> None:
    edit, _, says = HOSTILE[kind]
    if command == "train":
        assert says in _resumed(edit, made, tmp_path, capsys)
        return
    for base in ("plain", "changed") if command == "load" else ("plain",):
        folder = tmp_path / base
        shutil.copytree(made[base], folder)
        edit(folder)
        source = [] if command in ("load", "plan") else ["--source", str(made["text.txt"])]
        assert says in refused(command, folder, *source)


def _resumed(edit: Edit, made: dict[str, Path], tmp_path: Path, capsys: Any) -> str:
    """What a training says that is to go on from a hostile checkpoint: it is refused, or passed over by name."""
    out = tmp_path / "trained"
    shutil.copytree(made["trained"], out)
    checkpoint = max((out / "training").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if checkpoint.name == "checkpoint-4":
        shutil.rmtree(out / "model")
    (tmp_path / "trained" / "training" / "outside").symlink_to(tmp_path / "outside")
    edit(checkpoint)
    capsys.readouterr()
    code = main(_training(out, made["text.txt"]))
    told: str = capsys.readouterr().err
    assert code == 2 and "Traceback" not in told and len(told.strip().splitlines()) == 1
    return told

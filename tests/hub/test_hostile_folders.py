"""Folders made to harm: each is refused by every command, in one sentence and in no time, and nothing outside is touched."""

import contextlib
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
import transformers
from auditing.audited_models import texts, tokenizer
from changed_models import edit_config
from safetensors.torch import load_file, save_file
from tiers import quick_or_slow
from tiny import tiny
from wording import assert_refused

import holdfast
from holdfast.files import DEEPEST
from holdfast.hub.folder_files import write_manifest
from holdfast.train.run_folder import write_checkpoint_manifest
from holdfast_command import main

SMALL = ["training.steps=4", "training.batch=4", "training.save_every=2", "data.length=16", "data.vocabulary=200"]
SMALL += ["model.config.hidden_size=32", "model.config.intermediate_size=32", "sparse.hidden=16", "sparse.experts=4"]
TRYING: dict[str, list[str]] = {
    "audit": ["--tokens", "32", "--length", "16", "--batch", "2"],
    "certify": ["--tokens", "32", "--length", "16", "--batch", "2"],
    "attack": ["routes", "--budget", "0.1", "--examples", "8", "--steps", "1"],
    "evaluate": [],
}
SECONDS = 20  # of processor time: far more than a refusal takes, far less than any of these folders would
Edit = Callable[[Path], object]
CANARY = "canary_of_hostile_folders"


@pytest.fixture(scope="module", autouse=True)
def verbosity() -> Iterator[None]:
    """Commands silence transformers; tests of other files listen to it."""
    before = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(before)


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
    return lambda folder: edit_config(folder, lambda config: config.update(values))


def layer(**values: Any) -> Edit:
    """Another description of every changed layer, with the checksum that belongs to it."""

    def update(config: dict[str, Any]) -> None:
        for spec in config["holdfast"]["layers"].values():
            spec.update(values)

    def edit(folder: Path) -> None:
        edit_config(folder, update)
        write_manifest(folder)

    return edit


def replaced(name: str, make: Callable[[Path], object]) -> Edit:
    """What `make` makes, in the place of a file."""

    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return edit


def content(name: str, text: str) -> Edit:
    return replaced(name, lambda file: file.write_text(text))


def large(name: str) -> Edit:
    """100 MB; they are not read, so it does not matter of what."""

    def make(file: Path) -> None:
        with file.open("w") as stream:
            stream.truncate(100 << 20)

    return replaced(name, make)


def pipe(name: str) -> Edit:
    """A named pipe without a writer: whoever opens it waits for ever."""
    return replaced(name, os.mkfifo)


def link(name: str, target: str) -> Edit:
    return replaced(name, lambda file: file.symlink_to(target))


def in_json(name: str, change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(folder: Path) -> None:
        stored = json.loads((folder / name).read_text())
        change(stored)
        (folder / name).write_text(json.dumps(stored))

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
EVERY = ("load", "plan", "train", *TRYING)
OPENED = ("load", *TRYING)  # commands that read weights
BUILT = ("load", "plan", *TRYING)  # commands that build the model of the config
ON_TRAINING = ("load", "train", *TRYING)  # a checkpoint's weights are read too

# What is done to a folder, the commands that meet it, and a part of the sentence that each of them says.
HOSTILE: dict[str, tuple[Edit, tuple[str, ...], str]] = {
    "a vocabulary of 10^8": (config(vocab_size=10**8), BUILT, "together"),
    "a million experts": (config(num_local_experts=10**6), BUILT, "at most 65,536"),
    "10^5 layers": (config(num_hidden_layers=10**5), EVERY, "num_hidden_layers is 100,000"),
    "10^5 layers in a part": (config(text_config={"num_hidden_layers": 10**5}), EVERY, "num_hidden_layers is 100,000"),
    "10^9 labels": (config(num_labels=10**9), EVERY, "num_labels is"),
    "a width of 10^9": (config(intermediate_size=10**9), BUILT, "together"),
    "a number of 100 digits": (config(vocab_size=10**99), EVERY, "larger than 2^63"),
    "infinity": (config(rms_norm_eps=float("inf")), EVERY, "rms_norm_eps is inf"),
    "no expert chosen": (config(num_experts_per_tok=0), BUILT, " 8 experts"),
    "800 experts chosen": (config(num_experts_per_tok=800), BUILT, " 8 experts"),
    "a number for a class": (config(architectures=[5]), BUILT, "model class"),
    "code": (code, OPENED, "model class"),
    "a pipe for a config": (pipe("config.json"), EVERY, "a named pipe"),
    "a device for a config": (link("config.json", "/dev/zero"), EVERY, "a device"),
    "a folder for a config": (replaced("config.json", Path.mkdir), EVERY, "a folder"),
    "a link to itself": (link("config.json", "config.json"), EVERY, "config.json"),
    "a config outside": (link("config.json", "../outside/secret.txt"), EVERY, "outside"),
    "100 MB of config": (large("config.json"), EVERY, "larger than 16 MiB"),
    "a deep config": (content("config.json", NESTED), EVERY, " levels "),
    "a deeper config than needed": (content("config.json", "[" * 99 + "]" * 99), EVERY, f" {DEEPEST} levels"),
    "no JSON": (content("config.json", "\x1b[31m\nnone"), EVERY, "JSON"),
    "a list for a config": (content("config.json", "[]"), EVERY, "config.json"),
    "a pipe for weights": (pipe("model.safetensors"), ON_TRAINING, "a named pipe"),
    "a device for weights": (link("model.safetensors", "/dev/zero"), ON_TRAINING, "a device"),
    "weights outside": (link("model.safetensors", "../outside/secret.txt"), ON_TRAINING, "outside"),
    "a header of 10^12 bytes": (header(10**12), OPENED, "cannot be loaded"),
    "a terabyte of nothing": (sparse_file, OPENED, "memory"),
    "shards that are no names": (index(5, [], None), ON_TRAINING, "weight"),
    "shards outside": (index("../outside/secret.txt"), ON_TRAINING, "safetensors"),
    "a shard with a name of 5,000 letters": (index(f"{'x' * 5000}.safetensors"), ON_TRAINING, "xxx', which is not a safet"),
    "a deep index": (content("model.safetensors.index.json", NESTED), ON_TRAINING, " levels "),
    "a pipe for generation": (pipe("generation_config.json"), ON_TRAINING, "a named pipe"),
    "a pipe for a chat": (pipe("chat_template.jinja"), ON_TRAINING, "a named pipe"),
    "gates of NaN": (gates(float("nan")), tuple(TRYING), "NaN"),
    "gates of infinity": (gates(float("inf")), tuple(TRYING), "NaN"),
}
CASES = [(kind, command) for kind, (_, commands, _) in HOSTILE.items() for command in commands]
# Two commands for each folder, in turn: all read it with the same functions.
QUICK = {
    (kind, commands[place % len(commands)])
    for number, (kind, (_, commands, _)) in enumerate(HOSTILE.items())
    for place in (number, number + 1)
}


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The one sentence that a command says on a folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(command: str, folder: Path, *more: str) -> str:
        capsys.readouterr()
        started = time.process_time()
        if command == "load":
            with pytest.raises(ValueError, match=r"\S") as caught:
                holdfast.load(folder)
            told = f"holdfast: {caught.value}"
        else:
            assert main([command, str(folder), *TRYING.get(command, []), *more]) == 2
            said = capsys.readouterr()
            told = said.err.strip().splitlines()[-1]
            assert "Traceback" not in said.err + said.out and "a secret" not in said.err + said.out
        assert time.process_time() - started < SECONDS
        assert told.startswith("holdfast: ") and len(told.splitlines()) == 1 and told.isprintable()
        return told

    return run


@pytest.mark.parametrize(("kind", "command"), quick_or_slow(CASES, QUICK))
def test_a_hostile_folder_is_refused(
    kind: str, command: str, made: dict[str, Path], tmp_path: Path, outside: Path, refused: Callable[..., str], capsys: Any
) -> None:
    edit, _, says = HOSTILE[kind]
    if command == "train":
        told, is_link = _resumed(edit, made, tmp_path, capsys)
        assert ("symbolic link" if is_link else says) in told  # links are refused before any file is looked at
        return
    for base in ("plain", "changed") if command == "load" else ("plain",):
        folder = Path(shutil.copytree(made[base], tmp_path / base))
        edit(folder)
        source = [] if command in ("load", "plan") else ["--source", str(made["text.txt"])]
        assert says in refused(command, folder, *source)


def _resumed(edit: Edit, made: dict[str, Path], tmp_path: Path, capsys: Any) -> tuple[str, bool]:
    """What a training says that is to go on from a hostile checkpoint, and whether that holds a link.

    Its manifest is forged to agree with it.
    """
    out = tmp_path / "trained"
    shutil.copytree(made["trained"], out)
    checkpoint = max((out / "training").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    shutil.copytree(tmp_path / "outside", out / "training" / "outside")
    edit(checkpoint)
    with contextlib.suppress(OSError):  # a link to itself has no size
        write_checkpoint_manifest(checkpoint)
    capsys.readouterr()
    code = main(_training(out, made["text.txt"]))
    told: str = capsys.readouterr().err
    assert code == 2 and "Traceback" not in told and len(told.strip().splitlines()) == 1
    return told, any(path.is_symlink() for path in checkpoint.iterdir())


DEEP_REGEX = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


# A pattern that backtracks until its library gives up, which ends in a panic of Rust.
regex = in_json("tokenizer.json", lambda stored: stored.update(pre_tokenizer=DEEP_REGEX))


def tokenizer_config(**values: Any) -> Edit:
    return in_json("tokenizer_config.json", lambda stored: stored.update(values))


TOKENIZERS: dict[str, tuple[Edit, str]] = {
    "a regex that panics": (regex, "text"),
    "a pipe": (pipe("tokenizer.json"), "a named pipe"),
    "a device": (link("tokenizer.json", "/dev/zero"), "a device"),
    "a link out": (link("tokenizer.json", "../outside/secret.txt"), "outside"),
    "deep JSON": (content("tokenizer.json", NESTED), "tokeniser"),
    "deep settings": (content("tokenizer_config.json", NESTED), "tokeniser"),
    "large settings": (large("tokenizer_config.json"), "larger than 16 MiB"),
    "a pipe for special tokens": (pipe("special_tokens_map.json"), "a named pipe"),
    "strange settings": (tokenizer_config(model_max_length=[], unk_token=5, added_tokens_decoder=3), "tokeniser"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_hostile_tokeniser_is_refused(
    kind: str, made: dict[str, Path], tmp_path: Path, outside: Path, refused: Callable[..., str]
) -> None:
    edit, says = TOKENIZERS[kind]
    folder = Path(shutil.copytree(made["plain"], tmp_path / "plain"))
    edit(folder)
    text = tmp_path / "text.txt"
    text.write_text("a" * 60 + "! is the cat\n" + "the cat is on the mat\n" * 90 + ("a" * 60 + "! b\n") * 90)
    for command in TRYING:
        if kind != "a regex that panics" or command in ("audit", "evaluate"):
            assert says in refused(command, folder, "--source", str(text))


def test_code_of_a_tokeniser_is_not_run(made: dict[str, Path], tmp_path: Path, outside: Path, capsys: Any) -> None:
    folder = Path(shutil.copytree(made["plain"], tmp_path / "plain"))
    shutil.copy(outside / f"{CANARY}.py", folder)
    tokenizer_config(tokenizer_class="Own", auto_map={"AutoTokenizer": [f"{CANARY}.Own", None]})(folder)
    assert main(["audit", str(folder), *TRYING["audit"], "--perturb", "none", "--source", str(made["text.txt"])]) == 0


def task(section: str | None = None, /, **values: Any) -> Edit:
    """Other values in task.json: in a section of its recipe, or beside the recipe."""
    return in_json("task.json", lambda stored: (stored["recipe"][section] if section else stored).update(values))


def poisoned_data(folder: Path) -> None:
    """A text in the folder that is a link out of it."""
    (folder / "texts").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "texts" / f"{split}.txt").symlink_to("../../outside/secret.txt")
    task("data", source="texts")(folder)


def packed_data(folder: Path) -> None:
    import gzip

    (folder / "text.txt.gz").write_bytes(gzip.compress(b"\n" * (65 << 20), compresslevel=1))
    task("data", source="text.txt.gz")(folder)


HUB = {"kind": "hub", "place": "evil/tokeniser", "checksum": "0"}
TASKS: dict[str, tuple[Edit, str]] = {
    "a file of the machine": (task("data", source="/etc/passwd"), "--source /etc/passwd"),
    "a file beside it": (task("data", source="../outside/secret.txt"), " in it"),
    "a link out": (poisoned_data, " in it"),
    "a device": (task("data", source="/dev/zero"), " in it"),
    "a fetched text": (task("data", source="wikitext-2"), "--source wikitext-2"),
    "text that unpacks for ever": (packed_data, "unpacks to"),
    "a tokeniser of a hub": (task(tokenizer=HUB), "tokeniser"),
    "words that are none": (task(tokenizer={"kind": "words", "words": ["<unk>", "<eos>", 5]}), "damaged"),
    "10^9 tokens a block": (task("data", length=10**9), "data.length is 1000000000"),
    "10^12 steps": (task("attack", steps=10**12), "attack.steps"),
    "10^9 pixels": (task("data", size=10**9), "data.size"),
    "a long word": (task("attack", token="A" * 10**6), "at most 100"),
    "10^5 layers": (task("model", config={"num_hidden_layers": 10**5}), "num_hidden_layers is 100,000"),
    "a pipe": (pipe("task.json"), "a named pipe"),
    "a device for a task": (link("task.json", "/dev/zero"), "a device"),
    "deep JSON": (content("task.json", NESTED), " levels "),
    "a control character": (task("data", source="\x1b[2J\n\nholdfast: all is well"), " in it"),
}


TASK_COMMANDS = {kind: ["audit"] if kind == "text that unpacks for ever" else [*TRYING] for kind in TASKS}
TASK_CASES = [(kind, command) for kind, commands in TASK_COMMANDS.items() for command in commands]
QUICK_TASKS = {(kind, names[number % len(names)]) for number, (kind, names) in enumerate(TASK_COMMANDS.items())}


@pytest.mark.parametrize(("kind", "command"), quick_or_slow(TASK_CASES, QUICK_TASKS))
def test_what_a_task_names_is_read_from_its_folder_only(
    kind: str, command: str, made: dict[str, Path], tmp_path: Path, outside: Path, refused: Callable[..., str]
) -> None:
    edit, says = TASKS[kind]
    folder = Path(shutil.copytree(made["trained"], tmp_path / "trained"))
    if kind not in ("a file of the machine", "a file beside it", "a device", "a fetched text", "a control character"):
        shutil.copy(made["text.txt"], folder / "own.txt")
        task("data", source="own.txt")(folder)
    edit(folder)
    assert says in refused(command, folder)


def test_a_text_inside_the_folder_and_one_that_the_user_names_are_read(
    made: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    folder = Path(shutil.copytree(made["trained"], tmp_path / "trained"))
    assert main(["audit", str(folder), *TRYING["audit"], "--perturb", "none", "--source", str(made["text.txt"])]) == 0
    shutil.copy(made["text.txt"], folder / "own.txt")
    task("data", source="own.txt")(folder)
    assert main(["audit", str(folder), *TRYING["audit"], "--perturb", "none"]) == 0


def test_a_training_with_a_tokeniser_of_a_hub_keeps_it_in_its_folder(
    made: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    """The place it was read from may be gone, or another's, when the model is tried."""
    out = tmp_path / "out"
    shutil.copytree(made["plain"], tmp_path / "place")
    given = [*_training(out, made["text.txt"]), f"data.tokens={tmp_path / 'place'}", "data.vocabulary=null"]
    assert main(given) == 0
    shutil.rmtree(tmp_path / "place")
    assert main(["evaluate", str(out), "--source", str(made["text.txt"])]) == 0


SPECS: dict[str, tuple[Edit, str]] = {
    "a negative loss": (layer(losses={"balance": -1.0}), "-1.0"),
    "a loss of NaN": (layer(losses={"balance": float("nan")}), "balance is nan"),
    "a true loss": (layer(losses={"balance": True}), "losses.balance is True"),
    "no expert": (layer(k=0), "k is 0"),
    "800 experts": (layer(k=800), "k is 800"),
    "a list for a router": (layer(router=["smoe"]), "router is ['smoe']"),
    "an unknown field": (layer(more=1), "more"),
    "an option of a wrong type": (layer(options={"beta": {"a": []}}), "the option beta"),
    "a million experts": (layer(experts=10**6), "at most 65,536"),
    "a width of 10^15": (layer(hidden=10**15, experts=8), "cannot be loaded"),
}


@pytest.mark.parametrize("kind", SPECS)
def test_a_hostile_description_of_routers_is_refused(
    kind: str, made: dict[str, Path], tmp_path: Path, refused: Callable[..., str]
) -> None:
    edit, says = SPECS[kind]
    folder = Path(shutil.copytree(made["changed"], tmp_path / "changed"))
    edit(folder)
    assert says in refused("load", folder)
    refused("plan", folder)


LAUGHS = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
RECIPES: dict[str, tuple[Edit, str]] = {
    "a billion laughs": (content("r.yaml", LAUGHS), "*a0"),
    "a pipe": (pipe("r.yaml"), "a named pipe"),
    "a device": (link("r.yaml", "/dev/zero"), "a device"),
    "100 MB": (large("r.yaml"), "larger than 1 MiB"),
    "deep YAML": (content("r.yaml", "[" * 1500 + "]" * 1500), "nested too deeply"),
    "a date that is none": (content("r.yaml", "about: 2001-99-99"), "recipe"),
    "an object": (content("r.yaml", "about: !!python/object/apply:os.system [ls]"), "recipe"),
}


@pytest.mark.parametrize("kind", RECIPES)
def test_a_hostile_recipe_is_refused(kind: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    edit, says = RECIPES[kind]
    edit(tmp_path)
    assert says in refused("train", tmp_path / "r.yaml", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_device_or_a_pipe_is_no_text(tmp_path: Path, refused: Callable[..., str]) -> None:
    pipe("pipe.txt")(tmp_path)
    for source, kind in (("/dev/zero", "a device"), (str(tmp_path / "pipe.txt"), "a named pipe")):
        arguments = ("--out", str(tmp_path / "out"), "--set", f"data.source={source}")
        assert kind in refused("train", Path("tiny"), *arguments)


def test_auto_classes_refuse_bombs_too(made: dict[str, Path], tmp_path: Path) -> None:
    for number, (values, says) in enumerate([({"num_labels": 10**9}, "num_labels is"), ({"vocab_size": 10**8}, "together")]):
        folder = Path(shutil.copytree(made["changed"], tmp_path / str(number)))
        config(**values)(folder)
        assert_refused(says, transformers.AutoModelForCausalLM.from_pretrained, folder)


def test_a_model_folder_that_is_a_link_out_is_refused(
    made: dict[str, Path], tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = Path(shutil.copytree(made["trained"], tmp_path / "trained"))
    (folder / "model").rename(tmp_path / "elsewhere")
    (folder / "model").symlink_to("../elsewhere")
    assert "outside" in refused("evaluate", folder, "--source", str(made["text.txt"]))


def test_a_page_is_not_made_of_a_pipe_or_of_deep_results(tmp_path: Path, refused: Callable[..., str]) -> None:
    content("results.json", NESTED)(tmp_path)
    assert "damaged" in refused("report", tmp_path)
    pipe("results.json")(tmp_path)
    assert "results.json" in refused("report", tmp_path)


def test_labels_and_other_json_of_a_folder_may_be_many(made: dict[str, Path], tmp_path: Path) -> None:
    """A label may have the name of a config field, and a folder may contain files that no library reads."""
    folder = Path(shutil.copytree(made["plain"], tmp_path / "plain"))
    config(label2id={"layers": 5000, "stack": 5001}, id2label={"5000": "layers", "5001": "stack"})(folder)
    large("predictions.json")(folder)
    assert holdfast.load(folder).config.label2id["layers"] == 5000


def test_gates_of_1e30_are_audited(made: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    """They are finite, and in float32 so is all that follows; in float16 nothing is, and that is said."""
    folder = Path(shutil.copytree(made["plain"], tmp_path / "plain"))
    gates(1e30)(folder)
    for command in ("audit", "certify"):
        assert main([command, str(folder), *TRYING[command], "--source", str(made["text.txt"])]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_the_hubs_own_cache_is_read_through_its_links(made: dict[str, Path], tmp_path: Path) -> None:
    """There every file is a link to a blob, outside of the folder but of the same repository."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(made["changed"].iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert holdfast.load(snapshot).config.model_type == "mixtral"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_the_largest_models_there_are_can_be_planned(family: str, refused: Callable[..., str], capsys: Any) -> None:
    sizes = {"deepseek_v3": ["num_hidden_layers=61", "n_routed_experts=384"], "qwen3_moe": ["num_experts=512"]}
    assert main(["plan", family, "--routers", "native", "--set", *sizes[family]]) == 0

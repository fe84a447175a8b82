"""Datasets, attacks and metrics of the user's own: the examples of the contributing page, and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli import conftest
from commands import Command
from test_docs import ROOT, blocks
from wording import assert_refused

import holdfast
from holdfast import plugins
from holdfast.attacks import ATTACKS, AttackedText, Threat, attack_pixels, attack_texts, change_words, find_attack
from holdfast.data import corpora, corpus, image_set, image_sets
from holdfast.metrics import METRICS, ChosenMetrics

EXAMPLES = blocks(ROOT / "CONTRIBUTING.md", "python")[1:]
SMALL = [*conftest.SMALL, "training.steps=2"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the options that load the examples of the contributing page, each from a file of its own."""
    monkeypatch.chdir(tmp_path)
    given = []
    for number, example in enumerate(EXAMPLES):
        Path(f"example{number}.py").write_text(example)
        given += ["--plugin", f"example{number}.py"]
    return given


def test_the_examples_are_short() -> None:
    assert len(EXAMPLES) == 3
    for example in EXAMPLES:
        for function in example.split("@holdfast.")[1:]:
            assert len([line for line in function.splitlines() if line.strip()]) <= 10


def test_the_examples_work_in_every_command(files: list[str], command: Command) -> None:
    used = ["data.source=sums", "attack.name=backwards", "metrics=[surprises,accuracy]"]
    shown = command.printed("compare", "--routers", "smoe", "--seeds=1", "--out", "compared", *files, "--set", *SMALL, *used)
    assert "backwards: " in shown and "surprises" in shown and "on sums" in shown
    stored = json.loads(Path("compared/results.json").read_text())
    assert stored["run"]["data"]["name"] == "sums" and stored["run"]["attack"]["attack"] == "backwards"
    assert [metric["name"] for metric in stored["run"]["metrics"]] == ["surprises", "accuracy"]
    assert {kind for plugin in stored["run"]["plugins"] for kind in plugin} == {"name", "checksum", *KINDS}
    (row,), cell = stored["rows"], json.loads(Path("compared/cells/smoe-seed0/result.json").read_text())
    assert row["metrics"]["surprises"]["attacked"] == cell["attacked"]["metrics"]["surprises"]
    page = Path("compared/report.html").read_text()
    assert "Other metrics" in page and "share of labels with a probability below 1%; lower is better" in page
    home = "compared/cells/smoe-seed0"
    assert "surprises" in command.printed("evaluate", home, *files, "--out", "scores.json")
    scores = json.loads(Path("scores.json").read_text())
    assert scores["clean"]["metrics"] == pytest.approx(cell["clean"]["metrics"])
    attacked = command.printed("attack", home, "backwards", "--rate", "0.3", *files)
    assert "backwards: " in attacked and "On untouched words" in attacked
    audited = command.printed("audit", home, "--perturb", "backwards,words", "--tokens=64", "--length=16", *files)
    assert re.search(r"^backwards +\S+%", audited, flags=re.MULTILINE)


KINDS = ("datasets", "attacks", "metrics")


def test_a_run_without_its_plugin_or_with_another_version_is_one_sentence(
    files: list[str], command: Command, known_names: dict[str, set[str]], caplog: pytest.LogCaptureFixture
) -> None:
    given = ["compare", "--routers", "smoe", "--seeds=1", "--out", "compared", "--set", *SMALL, "data.source=sums"]
    command.printed(*given, *files)
    home = "compared/cells/smoe-seed0"
    conftest.forget(known_names)
    assert "needs dataset 'sums' of the plugin example0.py" in command.refused("evaluate", home)
    Path("own.txt").write_text("\n\n".join(f"line {n} of a text of one's own." for n in range(400)))
    command.printed("evaluate", home, "--source", "own.txt")  # other data need no plugin
    assert "unknown dataset 'sums'" in command.refused(*given)
    assert "another version" not in caplog.text
    Path("example0.py").write_text(EXAMPLES[0] + "# changed\n")
    command.printed("evaluate", home, *files)
    assert caplog.text.count("another version of the plugin example0.py") == 1
    assert "other plugins, or another version of one" in command.refused(*given, *files)


FAILING = {  # what it registers, its arguments and what it returns; how it is used, and its error
    "dataset": ("task='text'", "folder", "{}['x']", "data.source=bad", "KeyError: 'x'"),
    "attack": ("task='text'", "texts, *, rate", "texts.x", "attack.name=bad", "AttributeError: "),
    "metric": ("of='logits'", "logits, labels", "logits[9**9]", "metrics=[bad]", "IndexError: "),
}


@pytest.mark.parametrize(("kind", "jobs"), [*((kind, 1) for kind in FAILING), ("metric", 2)])
def test_an_error_inside_a_plugin_names_it_and_its_line(
    kind: str, jobs: int, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it comes from a worker, which is a process of its own."""
    monkeypatch.chdir(tmp_path)
    of, arguments, returned, used, error = FAILING[kind]
    register = f"@holdfast.register_{kind}('bad', {of}, about='')"
    Path("bad.py").write_text(f"import holdfast\n{register}\ndef bad({arguments}):\n    return {returned}\n")
    Path("own.txt").write_text("\n\n".join(f"line {n} of a text of one's own." for n in range(400)))
    routers = ["--routers=smoe,switch" if jobs > 1 else "--routers=smoe", f"--jobs={jobs}"]
    given = [*routers, "--seeds=1", "--plugin=bad.py", "--set", *SMALL, "data.source=own.txt", used]
    assert f"holdfast: the plugin bad.py failed at line 4: {error}" in command.refused("compare", *given)


def test_an_attack_on_pixels_and_images_of_a_plugin_are_used(files: list[str], command: Command) -> None:
    Path("bars.py").write_text(
        "import holdfast, torch\n"
        "@holdfast.register_dataset('bars', task='images', about='a bright row or column')\n"
        "def bars(folder):\n"
        "    labels = torch.arange(40) % 2\n"
        "    pixels = torch.zeros(40, 1, 8, 8)\n"
        "    pixels[labels == 0, :, 3] = 1.0\n"
        "    pixels[labels == 1, :, :, 3] = 1.0\n"
        "    return {split: (pixels, labels) for split in ('train', 'valid', 'test')}\n"
    )
    small = [part for part in SMALL if not part.startswith("data.")] + ["model.config.num_hidden_layers=2"]
    used = ["data.source=bars", "attack.name=brightness", "attack.steps=2", "metrics=[accuracy]"]
    given = [*files, "--plugin", "bars.py"]
    command.printed("compare", "--recipe=vmoe-tiny", "--routers=smoe", "--seeds=1", *given, "--set", *small, *used)
    cell = json.loads(Path("comparison/cells/smoe-seed0/result.json").read_text())
    assert cell["attacked"]["attack"] == "brightness" and cell["attacked"]["realised"] <= 0.1
    assert cell["clean"]["metrics"]["accuracy"] == pytest.approx(1 - cell["clean"]["figure"] / 100)
    assert cell["attacked"]["metrics"]["accuracy"] == pytest.approx(1 - cell["attacked"]["figure"] / 100)
    assert "brightness" in cell["trials"]
    home = "comparison/cells/smoe-seed0"
    assert "brightness" in command.printed("attack", home, "brightness", "--budget=0.2", *given)
    told = command.refused("attack", home, "backwards", "--rate=0.2", *given)
    assert "attacks texts" in told
    told = command.refused("evaluate", home, "--source=sums", *given)
    assert "sums is a text (task: text); this needs a set of images (task: images)" in told


def no_folder() -> dict[str, Any]:
    return {}


Register = Callable[..., Callable[[Any], Any]]


class NeedsAnArgument:
    def __init__(self, size: int) -> None: ...

    def update(self, losses: Any) -> None: ...

    def result(self) -> None: ...


@pytest.mark.parametrize(
    ("register", "options", "function", "sentence"),
    [
        (holdfast.register_dataset, {"task": "text"}, no_folder, "must take one argument"),
        (holdfast.register_dataset, {"task": "txt"}, lambda folder: {}, "did you mean 'text'?"),
        (holdfast.register_attack, {"task": "text"}, lambda texts: None, "no parameter rate"),
        (holdfast.register_attack, {"task": "images"}, lambda model, pixels, labels, rate: None, "no parameter budget"),
        (holdfast.register_attack, {"task": "audio"}, lambda texts, rate: None, "unknown task 'audio'"),
        (holdfast.register_metric, {"of": "logit"}, lambda logits, labels: None, "did you mean 'logits'?"),
        (holdfast.register_metric, {"of": "logits", "better": "smaller"}, lambda logits, labels: None, "unknown direction"),
        (holdfast.register_metric, {"of": "logits"}, int, "needs the methods update and result"),
        (holdfast.register_metric, {"of": "losses"}, lambda logits, labels: None, "it is called with losses"),
        (holdfast.register_metric, {"of": "logits"}, lambda losses: None, "it is called with logits and labels"),
        (holdfast.register_metric, {"of": "losses"}, NeedsAnArgument, "NeedsAnArgument must need no arguments"),
    ],
)
def test_a_wrong_registration_is_one_sentence(
    register: Register, options: dict[str, Any], function: Any, sentence: str
) -> None:
    assert_refused(re.escape(sentence), register("own", about="", **options), function)
    assert "own" not in (*plugins._registries["routers"].names(), *ATTACKS.names(), *METRICS.names(), *corpora())


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../x", "a,b", "a=b", "a.b", None])
def test_a_name_must_fit_on_a_command_line_and_in_a_file_name(name: Any) -> None:
    assert_refused("cannot be the name of", holdfast.register_metric(name, of="losses", about=""), lambda losses: losses)


def test_names_clash_with_those_of_the_package() -> None:
    with pytest.raises(ValueError, match="already a dataset named 'digits'"):
        holdfast.register_dataset("digits", task="text", about="")(lambda folder: {})
    for name in ("pgd", "routes", "corruptions"):
        with pytest.raises(ValueError, match=f"already an attack named '{name}'"):
            holdfast.register_attack(name, task="text", about="")(lambda texts, rate: None)
    with pytest.raises(ValueError, match="already a metric named 'accuracy'"):
        holdfast.register_metric("accuracy", of="losses", about="")(lambda losses: losses)


def test_a_misspelt_name_gets_the_nearest_one(command: Command) -> None:
    for names, sentence in (
        (["data.source=python-dcs"], "did you mean 'python-docs'?"),
        (["attack.name=typo"], "did you mean 'typos'?"),
        (["attack.name=pgd"], "pgd is an attack for the task images, but this task is text: use words, generic, typos,"),
        (["attack.name=words", "attack.token=AAA"], "leave the token out"),
        (["metrics=[acuracy]"], "did you mean 'accuracy'?"),
        (["metrics=[accuracy,accuracy]"], "name each only once"),
        (["data.source=digits"], "digits is a set of images (task: images); this needs a text (task: text)"),
    ):
        assert sentence in command.refused("compare", "--routers=smoe", "--out=nowhere", "--set", *names)
    assert not Path("nowhere").exists()


def texts(**splits: Any) -> dict[str, Any]:
    return {"train": ["a"], "valid": ["b"], "test": ["c"], **splits}


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "returned NoneType; expected train, valid, test, each with texts"),
        ({"train": ["a"]}, "returned the splits train; expected"),
        (texts(test="one string"), "no text in its split test: it is one string, so put it into a list"),
        (texts(valid=[]), "no text in its split valid"),
        (texts(valid=[" ", ""]), "no text in its split valid"),
        (texts(train=["a", 3]), "train: text 1 is int; expected a string"),
        (texts(train=["\ud800"]), "train: text 0 is not valid Unicode"),
    ],
)
def test_texts_that_are_not_what_a_dataset_returns(returned: Any, sentence: str) -> None:
    holdfast.register_dataset("own", task="text", about="mine")(lambda folder: returned)
    assert_refused(re.escape(sentence), corpus, "own")


def test_texts_of_a_dataset_are_documents_with_a_checksum(tmp_path: Path) -> None:
    asked = []

    @holdfast.register_dataset("own", task="text", about="mine")
    def own(folder: Path | None) -> dict[str, Any]:
        asked.append(folder)
        return texts()

    found = corpus("own", folder=tmp_path)
    assert asked == [tmp_path] and "own" in corpora() and "own" not in image_sets()
    assert [(one.title, one.text) for one in found.documents("test")] == [("own/test/0", "c")]
    assert found.describe() == {"name": "own", "about": "mine", "checksum": found.checksum}


PIXELS, LABELS = np.zeros((4, 1, 2, 2), dtype=np.uint8), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        (3, "train is int; expected (pixels, labels)"),
        ((PIXELS[0], LABELS), "expected (N,C,H,W) and (N,)"),
        ((PIXELS, LABELS[:2]), "expected (N,C,H,W) and (N,)"),
        ((PIXELS[:0], LABELS[:0]), "with N above 0"),
        ((PIXELS, LABELS * 1.0), "labels that are not class numbers"),
        ((PIXELS, LABELS - 1), "labels that are not class numbers"),
        ((PIXELS, LABELS * 0), "one class only"),
        ((PIXELS + 1.5, LABELS), "pixels that are not between 0 and 1"),
        ((PIXELS.astype(np.int64), LABELS), "pixels of type torch.int64"),
    ],
)
def test_images_that_are_not_what_a_dataset_returns(pair: Any, sentence: str) -> None:
    holdfast.register_dataset("own", task="images", about="mine")(lambda folder: dict.fromkeys(SPLITS, pair))
    assert_refused(re.escape(sentence), image_set, "own")


SPLITS = ("train", "valid", "test")


def test_a_class_that_is_only_in_the_test_images_is_refused() -> None:
    splits = {**dict.fromkeys(SPLITS, (PIXELS, LABELS)), "test": (PIXELS, LABELS + 1)}
    holdfast.register_dataset("own", task="images", about="mine")(lambda folder: splits)
    assert_refused("test has a class that is not in the training images", image_set, "own")


def test_pixels_between_0_and_1_are_kept_to_the_precision_of_a_byte() -> None:
    values = torch.rand(4, 1, 2, 2)
    holdfast.register_dataset("own", task="images", about="")(lambda folder: dict.fromkeys(SPLITS, (values, LABELS)))
    assert torch.allclose(image_set("own").images("test").pixels(range(4)), values, atol=0.5 / 255 + 1e-6)


def test_an_attack_that_changes_more_than_it_says_is_refused() -> None:
    def silent(texts: list[str], *, rate: float) -> AttackedText:
        return AttackedText("silent", tuple(text.upper() for text in texts), ((),) * len(texts), (1,) * len(texts), rate, 0)

    def short(texts: list[str], *, rate: float) -> AttackedText:
        return change_words(texts[1:], "short", lambda word, random: None, rate=rate, seed=0)

    for name, function, sentence in (
        ("silent", silent, "changed text 0 in places that are not in its list"),
        ("short", short, "returned 1 texts for 2"),
        ("none", lambda texts, rate: None, "returned NoneType; expected an AttackedText"),
    ):
        holdfast.register_attack(name, task="text", about="")(function)
        assert_refused(sentence, attack_texts, find_attack(name), ["some words", "more words"], rate=0.5, seed=0)


def test_an_attack_beyond_its_budget_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)).eval()
    pixels, labels = torch.full((3, 1, 2, 2), 0.5), torch.tensor([0, 1, 0])

    def greedy(model: Any, pixels: torch.Tensor, labels: torch.Tensor, *, budget: float) -> Any:
        def attack(search: Any, first: int) -> None:
            search.try_inputs(search.projected(search.clean + 2 * budget))
            search.try_inputs(search.projected(search.clean - 2 * budget))

        return Threat(2 * budget, check=False).run(attack, model, pixels, labels, name="greedy")

    holdfast.register_attack("greedy", task="images", about="")(greedy)
    with pytest.raises(ValueError, match=r"changed an image by 0\.2 \(linf\); its budget is 0\.1"):
        attack_pixels(find_attack("greedy"), model, pixels, labels, budget=0.1)


def test_shipped_attacks_give_what_their_functions_give() -> None:
    from holdfast.attacks import misspell, pgd, swap_words

    documents = ["the quick brown foxes jump over lazy dogs", "lazy foxes sleep all morning"]
    words = ["brown", "foxes", "lazy"]
    found = attack_texts(find_attack("words"), documents, rate=0.7, seed=3, words=words, pieces=None)
    assert found == swap_words(documents, rate=0.7, seed=3, words=words)
    assert attack_texts(find_attack("typos"), documents, rate=0.7, seed=3) == misspell(documents, rate=0.7, seed=3)
    generic = attack_texts(find_attack("generic"), documents, rate=0.7, seed=3, words=words)
    assert generic == swap_words(documents, rate=0.7, seed=3)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)).eval()
    pixels, labels = torch.rand(5, 1, 2, 2), torch.tensor([0, 1, 0, 1, 1])
    one = attack_pixels(find_attack("pgd"), model, pixels, labels, budget=0.1, steps=3, seed=1, batch=2)
    assert torch.equal(one.inputs, pgd(model, pixels, labels, budget=0.1, steps=3, seed=1, batch=2).inputs)


class Spread:
    """The standard deviation of the losses: no mean over rows, so it is a class."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def update(self, losses: torch.Tensor) -> None:
        self.seen.append(losses)

    def result(self) -> torch.Tensor:
        return torch.cat(self.seen).std()


def test_metrics_over_batches_equal_those_of_all_rows() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(23, 7), torch.randint(7, (23,))
    holdfast.register_metric("spread", of="losses", about="")(Spread)
    holdfast.register_metric("margin", of="logits", about="")(lambda logits, labels: logits.max(-1).values)
    chosen = ChosenMetrics(["spread", "margin", "accuracy", "top5-accuracy", "perplexity"])
    for start in range(0, 23, 5):
        chosen.update(logits[start : start + 5], labels[start : start + 5])
    losses = torch.stack([-row.log_softmax(0)[label] for row, label in zip(logits, labels, strict=True)])
    five = [int(label) in row.topk(5).indices.tolist() for row, label in zip(logits, labels, strict=True)]
    assert chosen.result() == {
        "metrics": {
            "spread": pytest.approx(float(losses.std())),
            "margin": pytest.approx(float(logits.max(-1).values.mean())),
            "accuracy": pytest.approx(float((logits.argmax(-1) == labels).float().mean())),
            "top5-accuracy": pytest.approx(sum(five) / 23),
            "perplexity": pytest.approx(float(losses.mean().exp())),
        }
    }


@pytest.mark.parametrize(
    ("value", "sentence"),
    [(1.0, "returned float for a batch of 3 rows"), (torch.ones(2), r"returned shape \(2,\) for a batch of 3 rows")],
)
def test_a_metric_with_a_wrong_result_is_one_sentence(value: Any, sentence: str) -> None:
    holdfast.register_metric("own", of="losses", about="")(lambda losses: value)
    assert_refused(sentence, ChosenMetrics(["own"]).update, torch.randn(3, 4), torch.tensor([0, 1, 2]))


def test_a_folder_may_name_a_dataset_only_if_the_user_has_named_its_file(files: list[str], tmp_path: Path) -> None:
    """A folder may come from anyone: it must not make an installed package read or fetch something."""
    from holdfast.train import load_recipe
    from holdfast.train.task_record import TaskRecord

    holdfast.register_dataset("own", task="text", about="as of an installed package")(lambda folder: texts())
    record = TaskRecord(tmp_path, load_recipe("tiny", {"data.source": "own"}), {})
    assert_refused("add --source own", record.source)
    assert record.source("own") == "own"
    holdfast.load_plugin("example0.py")
    assert TaskRecord(tmp_path, load_recipe("tiny", {"data.source": "sums"}), {}).source() == "sums"

"""What guides attacks on words: losses of models against single forwards, near words, similar sentences; and the command."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pretrained
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from wording import assert_refused

from holdfast.attacks import STOP_WORDS, Version, words_in
from holdfast.cli.main import main
from holdfast.data import Bytes, Vocabulary
from holdfast.train import load_recipe, make_task
from holdfast.train.building import build_model
from holdfast.train.label_task import LabelTask
from holdfast.train.text_guides import embedding_neighbours, language_score, sentence_similarity
from holdfast.train.text_task import TextTask

LINES = [
    "the cat sat on the old mat",
    "a dog ran over the green river",
    "my friend wrote a long letter",
    "the garden sleeps",
]
SMALL = ["training.steps=8", "training.batch=4", "training.warmup=2", "data.length=16", "data.vocabulary=200"]
SMALL += ["model.config.hidden_size=32", "model.config.intermediate_size=32", "sparse.hidden=16", "sparse.experts=4"]


def task_and_model(recipe: str, source: Path) -> tuple[Any, Any]:
    changes: dict[str, Any] = {name: int(value) for name, value in (one.split("=") for one in SMALL)}
    task = make_task(load_recipe(recipe, {**changes, "data.source": str(source)}))
    torch.manual_seed(0)
    model = build_model(task, "smoe", {}, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return task, model.eval()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text("\n".join(LINES * 80))
    return path


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    rows = [(LINES[number % 4], ("good", "bad")[number % 2]) for number in range(160)]
    path.write_text("text,label\n" + "".join(f"{text} {number},{label}\n" for number, (text, label) in enumerate(rows)))
    return path


def test_the_score_of_a_language_model_is_the_loss_of_the_words_that_are_the_same(text: Path) -> None:
    task, model = task_and_model("tiny", text)
    assert isinstance(task, TextTask) and isinstance(task.tokenizer, Vocabulary)
    versions = [
        Version("the cat sat on the old mat", ()),
        Version("the cat sat on the old mat", ((4, 7),)),  # cat
        Version("the dog sat", ((4, 7),)),
        Version("cat", ()),
    ]
    skipped = [set[int](), {1}, {1}, set[int]()]  # the tokens of changed words
    expected = []
    for version, words in zip(versions, skipped, strict=True):
        ids = torch.tensor(task.tokenizer.ids(version.text))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        nll = F.cross_entropy(logits[:-1].float(), ids[1:], reduction="none")
        expected.append(sum(float(nll[place - 1]) for place in range(1, len(ids)) if place not in words))
    for tokens in (1, 64):  # one text in a batch, and all
        found = language_score(model, task.tokenizer, tokens)(0, versions)
        torch.testing.assert_close(found.loss, torch.tensor(expected).double(), atol=1e-4, rtol=1e-4)
        assert not found.succeeded.any()


def test_passages_of_a_text_cover_it_and_have_the_length_of_a_block(text: Path) -> None:
    task, _ = task_and_model("tiny", text)
    for document, cuts in zip(task.test_texts()[0], task.passages(), strict=True):
        assert "".join(document[start:end] for start, end in cuts) == document and len(cuts) > 2
        counts = [len(document[start:end].split()) for start, end in cuts]
        assert set(counts[:-1]) == {task.recipe.data.length}


def test_the_score_of_a_classifier_is_its_cross_entropy(reviews: Path) -> None:
    task, model = task_and_model("labels-tiny", reviews)
    assert isinstance(task, LabelTask)
    rows, score = task.text_set.texts("test"), task._score(model)
    for number in (0, 1):
        versions = [Version(rows[number].text, ()), Version("a green dog", ()), Version(rows[number].text, ())]
        found = score(number, versions)
        for place, version in enumerate(versions):
            with torch.no_grad():
                logits: Tensor = model(**task.encoder.encode([version.text]).batch([0])).logits[0].double()
            label = int(rows[number].label)
            assert float(found.loss[place]) == pytest.approx(float(-logits.log_softmax(0)[label]), abs=1e-5)
            assert bool(found.succeeded[place]) == (int(logits.argmax()) != label)


def test_a_pair_keeps_its_other_text(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(
        "sentence1\tsentence2\tlabel\n" + "".join(f"{LINES[n % 4]}\t{LINES[n % 3]}\t{n % 2}\n" for n in range(80))
    )
    task, model = task_and_model("labels-tiny", path)
    rows, score = task.text_set.texts("test"), task._score(model)
    first, second = score(0, [Version(rows[0].text, ())]), score(len(rows), [Version(str(rows[0].pair), ())])
    assert first.loss.equal(second.loss)  # both are the clean pair
    assert not score(len(rows), [Version("other words", ())]).loss.equal(first.loss)


def test_near_words_are_near_in_the_embedding_of_the_model(text: Path) -> None:
    task, model = task_and_model("tiny", text)
    find, known = embedding_neighbours(model, task.tokenizer), task.tokenizer.words
    table = model.get_input_embeddings().weight.detach()
    for word in ("cat", "letter"):
        cosines = torch.cosine_similarity(table, table[known.index(word)][None], dim=-1)
        ranked = [known[n] for n in cosines.argsort(descending=True).tolist()]
        possible = [one for one in ranked if one != word and len(one) > 1 and one.isalpha() and one not in STOP_WORDS]
        assert find(word) == possible[:20]
    assert_refused("no words as tokens", embedding_neighbours, model, Bytes())


@pytest.mark.parametrize("recipe", ["tiny", "labels-tiny"])
def test_the_command_attacks_with_synonyms_within_the_rate(
    recipe: str, text: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, table = str(tmp_path / "model"), tmp_path / "table.json"
    source = text if recipe == "tiny" else reviews
    assert main(["train", recipe, "--out", home, "--router", "smoe", "--set", f"data.source={source}", *SMALL]) == 0
    words = words_in(LINES)
    table.write_text(json.dumps({word: [other for other in words if other != word] for word in words}))
    clean = set()
    for name, options in (("synonyms", []), ("synonyms", ["--synonyms", str(table)]), ("guided-typos", [])):
        out = tmp_path / f"{name}{len(options)}.json"
        assert main(["attack", home, name, "--rate", "0.5", "--out", str(out), "--source", str(source), *options]) == 0
        summary = json.loads(out.read_text())["summary"]
        attack = summary["attack"]
        assert 0 < attack["realised"] <= 0.5 and summary["attack"]["rate"] == 0.5
        clean.add(summary["clean"]["figure"])
        if recipe == "tiny":  # the losses that the attack raises are those of untouched words
            assert summary[name]["nll"] > 0 and summary["cost"] is not None
        else:
            assert summary[name]["figure"] >= summary["clean"]["figure"]  # errors
    assert len(clean) == 1
    printed = capsys.readouterr()
    assert "guided typos: " in printed.out and "Warning" not in printed.out
    wrong: dict[str, Sequence[str]] = {
        "for attacks on text": ["routes", "--budget", "0.1", "--synonyms", str(table)],
        "takes no similarity": ["words", "--rate", "0.1", "--encoder", str(tmp_path)],
        "did you mean": ["synonyms", "--rate", "0.1", "--synonyms", str(tmp_path / "tabel.json")],
    }
    for said, arguments in wrong.items():
        assert main(["attack", home, "--source", str(source), *arguments]) == 2
        assert said in capsys.readouterr().err


def test_a_sentence_encoder_knows_which_word_keeps_the_meaning() -> None:
    pretrained.minilm()  # skips where it is not there
    similarity = sentence_similarity(pretrained.MINILM, "cpu")
    text = "the movie was good and the music was loud"
    same, near, far = similarity(text, [text, text.replace("movie", "film"), text.replace("movie", "tractor")]).tolist()
    assert same == pytest.approx(1) and near > 0.9 > far

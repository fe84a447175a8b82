"""Classifiers of texts: training, scores, attacks, saved models, and models that Holdfast did not train."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from wording import assert_refused

import holdfast
from holdfast.attacks import swap_words
from holdfast.auditing.suffixes import attack_suffix
from holdfast.cli.evaluate import against_majority
from holdfast.cli.main import main
from holdfast.data import Bytes, LabelledText, Vocabulary
from holdfast.data.encoded_texts import PairEncoder
from holdfast.train import Recipe, load_recipe, load_trained, make_task, recipes, save_trained
from holdfast.train.building import build_model, preflight
from holdfast.train.embedding_attacks import attack_embeddings
from holdfast.train.label_task import LabelTask, predict
from holdfast.train.recipe import parse_router
from holdfast.train.route_attacks import attack_routers
from holdfast.train.saved_model import AuditData, load_model_and_task
from holdfast.train.task import Measure, require_trainable, routing_metrics
from holdfast.train.text_task import attack_words
from holdfast.train.training import SingleRun

SMALL = {
    "training.steps": 12,
    "training.batch": 8,
    "training.warmup": 2,
    "training.save_every": 6,
    "data.length": 24,
    "data.vocabulary": 200,
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 16,
    "sparse.hidden": 16,
    "sparse.experts": 4,
}
GOOD, BAD = ("fine", "great", "lovely", "superb"), ("awful", "boring", "dreadful", "poor")


def review(number: int) -> tuple[str, str]:
    """Return a text that is easy to classify, and its label."""
    words, label = (GOOD, "good") if number % 2 else (BAD, "bad")
    return (
        f"film {number} was {words[number // 2 % 4]} and its music was {words[number // 3 % 4]}{' indeed' * (number % 3)}",
        label,
    )


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reviews") / "reviews.csv"
    path.write_text("text,label\n" + "".join(",".join(review(number)) + "\n" for number in range(160)))
    return path


def tiny(source: Path | str, **changes: Any) -> Recipe:
    return load_recipe("labels-tiny", {**SMALL, "data.source": str(source), **changes})


def task_of(source: Path | str, **changes: Any) -> LabelTask:
    task = make_task(tiny(source, **changes))
    assert isinstance(task, LabelTask)
    return task


@pytest.fixture(scope="module")
def trained(reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    changes = {"training.steps": 60, "training.learning_rate": 0.01, "training.keep": "best", "training.best_by": "figure"}
    SingleRun(tiny(reviews, **changes), parse_router("smoe"), 0, folder).run()
    return folder


def test_a_small_model_learns_easy_reviews_and_is_scored(trained: Path, reviews: Path) -> None:
    found = load_trained(trained)
    task = found.task(source=str(reviews))
    assert isinstance(task, LabelTask) and task.text_set.classes == ("bad", "good")
    assert found.model.config.id2label == {0: "bad", 1: "good"}
    score = task.score(found.model)
    clean = score["clean"]
    assert clean["figure"] <= 20 and clean["figure"] == pytest.approx(100 * (1 - clean["accuracy"]))
    assert clean["majority"]["figure"] >= 30 and clean["majority"]["difference"]["high"] < 0
    assert clean["interval"]["low"] <= clean["figure"] <= clean["interval"]["high"]
    assert 0 <= score["attacked"]["predictions_changed"] <= 1 and "typos" in score["trials"]
    assert score["attacked"]["paired"]["mean"] == pytest.approx(score["attacked"]["figure"] - clean["figure"])
    log = [json.loads(line) for line in (trained / "training" / "log.jsonl").read_text().splitlines()]
    assert any("eval_figure" in line for line in log)


def test_padding_counts_in_no_routing_metric(reviews: Path) -> None:
    """The same texts with more padding have the same metrics of routing and the same predictions."""
    task = task_of(reviews)
    model = build_model(task, "smoe", {}, seed=0).eval()
    encoded = task.encoded(task.text_set.texts("test"))
    found = []
    for width in (None, int(encoded.lengths.max()) + 9):
        with torch.no_grad(), routing_metrics(model) as measured:
            logits = model(**encoded.batch(range(len(encoded)), width)).logits
        found.append((logits, measured["routing"]["layers"]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    for one, two in zip(found[0][1], found[1][1], strict=True):
        assert one["load"] == two["load"] and one["entropy"] == pytest.approx(two["entropy"], rel=1e-4)
        assert one["near_ties"] == two["near_ties"]


def test_predictions_do_not_depend_on_the_order_of_texts(reviews: Path) -> None:
    task = task_of(reviews)
    model = build_model(task, "smoe", {}, seed=0).eval()
    rows = task.text_set.texts("test")
    forwards, *_ = predict(model, task.encoded(rows))
    backwards, *_ = predict(model, task.encoded(rows[::-1]))
    assert forwards.tolist() == backwards[::-1].tolist()
    with torch.no_grad():
        alone = [int(model(**task.encoded([row]).batch([0])).logits.argmax()) for row in rows]
    assert forwards.tolist() == alone


def test_a_length_that_cuts_most_texts_is_warned_about(reviews: Path, caplog: pytest.LogCaptureFixture) -> None:
    for tokens, length, is_short in (("bytes", 32, True), ("words", 32, False)):
        caplog.clear()
        preflight(task_of(reviews, **{"data.tokens": tokens, "data.length": length}), [parse_router("smoe")])
        assert ("100% of the training texts have 32 tokens" in caplog.text) is is_short


def test_batches_of_training_have_one_shape_and_their_labels(reviews: Path) -> None:
    task = task_of(reviews)
    examples = task.examples(0)
    batch = examples.__getitems__(range(8))
    assert batch["input_ids"].shape == (8, task.width) and task.width % 8 == 0
    assert {inputs["input_ids"].shape for inputs in (batch, examples.__getitems__(range(40, 48)))} == {(8, task.width)}
    numbers = examples.order.at(range(8)).tolist()
    rows = [task.text_set.texts("train")[number] for number in numbers]
    assert batch["labels"].tolist() == [row.label for row in rows]
    for place, row in enumerate(rows):
        real = batch["input_ids"][place][batch["attention_mask"][place].bool()]
        assert torch.equal(real, task.tokenizer.encode(row.text)[: task.width])


def test_no_attacked_and_no_held_out_text_is_cut_where_the_training_texts_end(tmp_path: Path) -> None:
    """With bytes as tokens a swapped word may be longer; only data.length cuts a text."""
    held_out = "unquestionably bad and very long"
    for split, texts in (("train", ["good new fun", "bad unpleasantly"]), ("valid", [held_out]), ("test", ["good", "bad"])):
        rows = [f"{text},{'bad' if 'bad' in text else 'good'}\n" for text in texts * 8]
        (tmp_path / f"{split}.csv").write_text("text,label\n" + "".join(rows))
    robust = {"robust.method": "words", "robust.budget": 1.0}
    plain, task = (task_of(tmp_path, **{"data.tokens": "bytes", "data.length": 64}, **each) for each in ({}, robust))
    assert plain.width == 16 and int(plain.validation().__getitems__([0])["attention_mask"].sum()) == len(held_out)
    batch, attacked = task.examples(0).__getitems__(range(16)), task._attacked_training
    assert attacked is not None and int(attacked.lengths.max()) > plain.width
    assert int(batch["attacked_attention_mask"].sum()) == int(attacked.lengths.sum())
    assert batch["input_ids"].shape == batch["attacked_input_ids"].shape


def test_accumulated_micro_batches_have_the_loss_of_one_batch(reviews: Path) -> None:
    from holdfast.train.step import TrainingStep, accepts_label_count, adamw

    losses = []
    for accumulate in (1, 2):
        task = task_of(reviews, **{"training.batch": 8 // accumulate, "training.accumulate": accumulate})
        model = build_model(task, "smoe", {}, seed=0)
        assert not accepts_label_count(model)
        training = replace(task.recipe.training, learning_rate=0.0, clip=0.0)
        step = TrainingStep(model, adamw(model, training), training, 1)
        examples = task.examples(0)
        size = training.batch
        inputs = [examples.__getitems__(range(part * size, (part + 1) * size)) for part in range(accumulate)]
        losses.append(float(step(inputs).loss))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)  # the balance loss of a batch is not the mean of its halves'


def pairs(path: Path, label: Callable[[int], str] = lambda number: str(number % 2)) -> Path:
    rows = "".join(f"one {n} two{' more' * (n % 4)}\tthree {n}\t{label(n)}\n" for n in range(60))
    path.write_text("sentence1\tsentence2\tlabel\n" + rows)
    return path


def test_pairs_are_joined_and_cut_from_the_longer_text() -> None:
    vocabulary = Vocabulary(["a b c d e f"])
    names = dict(enumerate(vocabulary.words))

    def words(encoder: PairEncoder, text: str, pair: str | None) -> str:
        found = encoder.encode([text], None if pair is None else [pair])
        assert encoder(text, pair)["input_ids"] == found.tokens.tolist()
        return " ".join(names[token] for token in found.tokens.tolist())

    assert words(PairEncoder(vocabulary, 9, pad=1), "a b c", "d e") == "a b c <eos> d e"
    assert words(PairEncoder(vocabulary, 5, pad=1), "a b c d", "e f") == "a b <eos> e f"
    assert words(PairEncoder(vocabulary, 4, pad=1), "a b", "c d e f") == "a b <eos> c"
    assert words(PairEncoder(vocabulary, 2, pad=1), "a b c", None) == "a b"
    joined = PairEncoder(Bytes(), 9, pad=0).encode(["ab"], ["cd"])
    assert bytes(joined.tokens.tolist()) == b"ab\ncd"
    called = PairEncoder(vocabulary, 5, pad=1)("a b c d", "e f")
    assert called["offset_mapping"] == [(0, 1), (2, 3), (0, 0), (0, 1), (2, 3)]  # of each text's own characters
    assert called["sequence_ids"] == [0, 0, None, 1, 1]


def test_pairs_and_numbers_to_predict_are_trained_and_scored(tmp_path: Path) -> None:
    source = pairs(tmp_path / "pairs.tsv", lambda number: str(number / 7))
    task = task_of(source, **{"training.steps": 2})
    assert task.text_set.is_regression and task.metric == "pearson" and task.measure.name == "Pearson"
    with pytest.raises(ValueError, match="label smoothing is for classes"):
        require_trainable(task_of(source, **{"training.steps": 2, "training.label_smoothing": 0.1}), 0)
    SingleRun(task.recipe, parse_router("smoe"), 0, tmp_path / "out").run()
    loaded = load_trained(tmp_path / "out")
    assert loaded.model.config.num_labels == 1
    again = loaded.task(source=str(source))
    score = again.score(loaded.model)
    assert task.measure.better == "higher" and [one["name"] for one in task.other_metrics] == ["Spearman"]
    for one in (score["clean"], score["attacked"], score["trials"]["typos"]):
        assert one["figure"] == one["pearson"] and one["metrics"] == {"Spearman": one["spearman"]}
    paired = score["attacked"]["paired"]
    assert paired["mean"] == pytest.approx(score["attacked"]["pearson"] - score["clean"]["pearson"])
    assert "mean_change" in score["attacked"] and -2 <= paired["low"] <= paired["mean"] <= paired["high"] <= 2
    with torch.no_grad():
        for parameter in loaded.model.classifier.parameters():
            parameter.zero_()
    constant = again.score(loaded.model)["clean"]
    assert math.isnan(constant["figure"]) and "not defined" in constant["undefined"]
    report = holdfast.audit(loaded.model, AuditData(again, 256), tokenizer=AuditData(again, 256).tokenizer, tokens=256)
    assert report.overall.loss is None  # a number has no cross entropy


def test_mnli_is_scored_on_both_of_its_test_files(tmp_path: Path) -> None:
    (tmp_path / "MNLI").mkdir()
    for name, count in (("train", 30), ("dev_matched", 6), ("dev_mismatched", 5)):
        labels = ("contradiction", "entailment", "neutral")
        rows = "".join(f"one {n}\ttwo {n}\t{labels[n % 3]}\n" for n in range(count))
        (tmp_path / "MNLI" / f"{name}.tsv").write_text("sentence1\tsentence2\tgold_label\n" + rows)
    task = make_task(tiny("mnli"), tmp_path)
    model = build_model(task, "smoe", {}, seed=0)
    clean = task.score(model)["clean"]
    assert clean["examples"] == 6 and clean["other_tests"]["mismatched"]["examples"] == 5
    assert task.inputs_to_score() == 3 * 6 + 5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data.metric": "f2"}, "unknown metric of labels 'f2'"),
        ({"data.metric": "pearson"}, "'(good|bad)', which is not a number"),
        ({"data.text": "body"}, "none is called body"),
        ({"data.label": "stars"}, "none is called stars"),
        ({"data.pair": "other"}, r"name the first in data\.text"),
    ],
)
def test_a_wrong_recipe_is_one_sentence_before_training(changes: dict[str, Any], says: str, reviews: Path) -> None:
    assert_refused(says, task_of, reviews, **changes)


def test_f1_is_for_two_classes(tmp_path: Path) -> None:
    source = pairs(tmp_path / "a.tsv", lambda number: str(number % 3))
    assert_refused(r"for two classes, and a\.tsv has 3", task_of, source, **{"data.metric": "f1"})
    assert task_of(source, **{"data.metric": "macro_f1"}).metric == "macro_f1"


def test_an_unknown_label_in_test_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(",".join(review(n)) + "\n" for n in range(20)))
    (tmp_path / "test.csv").write_text("text,label\na film,odd\n")
    assert_refused("test has the label 'odd', which is not in train", task_of, tmp_path)
    assert main(["train", "labels-tiny", "--out", str(tmp_path / "out"), "--set", f"data.source={tmp_path}"]) == 2
    assert not (tmp_path / "out").exists()


def test_a_saved_model_is_tested_on_all_rows_of_another_file(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("text,label\n" + "".join(",".join(review(number)) + "\n" for number in range(5)))
    model, task = load_model_and_task(str(trained), source=str(other))
    assert isinstance(task, LabelTask) and len(task.text_set.texts("test")) == 5
    assert task.score(model)["clean"]["examples"] == 5
    other.write_text("text,label\na,bad\nb,ugly\n")
    assert_refused(r"'ugly'.*\(bad, good\)", load_model_and_task, str(trained), source=str(other))


def test_attacks_report_the_share_of_predictions_that_change(trained: Path, reviews: Path) -> None:
    model, task = load_model_and_task(str(trained), source=str(reviews))
    for kind in ("words", "generic", "typos"):
        found = attack_words(model, task, kind, [0.9], seed=0)
        clean, attacked = (dict(zip(found["columns"], row, strict=True)) for row in found["rows"])
        summary = found["summary"]
        assert clean["error, %"] == summary["clean"]["figure"] and attacked["error, %"] == summary[kind]["figure"]
        assert attacked["share of predictions that change"] == summary[kind]["predictions_changed"]
    assert found["summary"]["attack"]["changed"] > 0
    nothing = attack_words(model, task, "words", [0.0], seed=0)["summary"]["words"]
    assert nothing["predictions_changed"] == 0 and nothing["paired"]["mean"] == 0


def test_the_attack_on_routes_skips_padding(trained: Path, reviews: Path) -> None:
    model, task = load_model_and_task(str(trained), source=str(reviews))
    probe = task.probe()
    width = probe["input_ids"].shape[1]
    found = attack_routers(model, task, budget=0.1, steps=2, tokens=4 * width, seed=0)
    real = int(probe["attention_mask"][:4].sum())
    assert real < 4 * width and [row[1] for row in found["rows"]] == [real] * len(found["rows"])


@pytest.mark.parametrize("on", ["embeddings", "inputs"])
def test_flips_within_a_smaller_budget_count_at_larger_ones(on: Any, trained: Path, reviews: Path) -> None:
    """Perturbed together, tokens are shortened in even steps of the budget: alone, a large one misses the nearest flips."""
    model, task = load_model_and_task(str(trained), source=str(reviews))
    rows = attack_routers(model, task, budget=[0.02, 0.2, 20.0], steps=2, tokens=8, seed=0, on=on)["rows"]
    for layer in {row[0] for row in rows}:
        found = [row[3:5] for row in rows if row[0] == layer]  # the share that flips, and the smallest perturbation
        assert len(found) == 3 and [share for share, _ in found] == sorted(share for share, _ in found)
        nearest = [smallest or math.inf for _, smallest in found]
        assert nearest == sorted(nearest, reverse=True) and math.isfinite(nearest[-1])


def test_a_warning_of_an_attack_names_its_layers(trained: Path, reviews: Path) -> None:
    _, task = load_model_and_task(str(trained), source=str(reviews))
    model = build_model(task, "top-p", {"p": 0.25}, seed=0)
    flags = attack_routers(model, task, "imbalance", budget=[0.1, 0.2], steps=2, tokens=8, seed=0)["flags"]
    (detail,) = (flag["detail"] for flag in flags if flag["kind"] == "lower bound")
    assert detail.startswith("layers 0, 1: the number of experts of a token varies"), flags


@pytest.mark.parametrize(("router", "k"), [("smear", None), ("smoe", 4)])
def test_the_attack_on_routes_is_refused_where_all_experts_run(
    router: str, k: int | None, trained: Path, reviews: Path
) -> None:
    _, task = load_model_and_task(str(trained), source=str(reviews))
    model = build_model(task, router, {"causal": False} if router == "smear" else {}, seed=0, k=k)
    how: dict[str, Any] = {"budget": 0.1, "steps": 2, "tokens": 8, "seed": 0}
    assert_refused("all experts of its layers", attack_routers, model, task, **how)
    if router == "smear":  # with another layer, only that one is attacked
        mixed = build_model(task, "smear[causal=false]@0|smoe", {}, seed=0)
        for kind in ("imbalance", "expert", "routes"):
            found = attack_routers(mixed, task, kind, **(how | ({"expert": 1} if kind == "expert" else {})))
            assert [row[0] for row in found["rows"]] == [1] and "are left out" in found["caption"]
        fewer = build_model(task, "top-p", {}, seed=0)  # asks for all experts, and may ask for fewer
        assert max(row[3] for row in attack_routers(fewer, task, **{**how, "budget": 5.0})["rows"]) > 0
        assert_refused("all experts of its layers", attack_routers, fewer, task, "imbalance", **how)


def test_embeddings_and_suffixes_of_labelled_texts_are_attacked(trained: Path, reviews: Path) -> None:
    model, task = load_model_and_task(str(trained), source=str(reviews))
    assert isinstance(task, LabelTask)
    found = attack_embeddings(
        model, task, ["pgd", "adaptive"], budget=[0.1, 1.0], steps=3, tokens=100_000, seed=0
    )  # all texts
    summaries = {(one["attack"], one["budget"]): one for one in found["summary"]["attacks"]}
    clean, worst = summaries["clean", 0.0], summaries["adaptive", 1.0]
    predicted = predict(model, task.encoded(task.text_set.texts("test")))[0]
    assert clean["texts"] == len(predicted)
    assert clean["figure"] == pytest.approx(100 * float((predicted != task.labels("test").numpy()).mean()))
    assert worst["figure"] >= summaries["adaptive", 0.1]["figure"] >= clean["figure"] and worst["loss"] > clean["loss"]
    assert all(one["realised"] <= one["budget"] * (1 + 1e-6) for one in summaries.values())
    suffixes = attack_suffix(model, task, expert=1, budget=1, steps=2, tokens=64, seed=0)
    assert all(0 <= row[3] <= 1 and row[2] == 1 for row in suffixes["rows"])


@pytest.mark.slow
def test_every_command_works_on_a_comparison_of_classifiers(reviews: Path, tmp_path: Path) -> None:
    out, cell = tmp_path / "out", str(tmp_path / "out" / "cells" / "smoe-seed0")
    small = [f"{name}={value}" for name, value in SMALL.items()]
    compare = ["compare", "--recipe", "labels-tiny", "--routers", "smoe,smooth", "--seeds", "2", "--out", str(out)]
    assert main([*compare, "--set", *small, f"data.source={reviews}"]) == 0
    page = (out / "report.html").read_text()
    assert "predictions that the attack changes" in page and "classified wrongly" in page
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert all(row["predictions_changed"] is not None and row["cost"] is None for row in rows)
    where = ["--source", str(reviews)]
    assert main(["evaluate", cell, *where, "--out", str(tmp_path / "scores.json")]) == 0
    assert json.loads((tmp_path / "scores.json").read_text())["measure"]["name"] == "error, %"
    assert main(["attack", cell, "typos", "--rate", "0.3", *where]) == 0
    assert main(["attack", cell, "routes", "--budget", "0.1", "--steps", "2", "--examples", "64", *where]) == 0
    assert main(["audit", cell, "--tokens", "200", "--out", str(tmp_path / "audit"), *where]) == 0
    assert main(["certify", cell, "--tokens", "200", *where]) == 0
    assert main(["attack", cell, "pgd", "--budget", "0.1", *where]) == 2


@pytest.mark.parametrize(
    ("change", "better", "says"),
    [
        ((-12.3, -14.5, -10.0), "lower", "better by 12.30 points (95% interval +10.00 to +14.50, 277 examples)."),
        ((8.0, 7.0, 9.0), "lower", "worse by 8.00 points (95% interval +7.00 to +9.00, 277 examples)."),
        ((0.0, -1.0, 1.0), "lower", "as good (95% interval -1.00 to +1.00, 277 examples, no clear difference)."),
        ((2.0, None, None), "lower", "worse by 2.00 points (no interval)."),
        ((0.21, 0.11, 0.31), "higher", "better by 0.2100 (95% interval +0.1100 to +0.3100, 277 examples)."),
    ],
)
def test_a_model_below_the_most_frequent_class_is_called_worse(
    change: tuple[float, ...], better: Literal["lower", "higher"], says: str
) -> None:
    found = dict(zip(("mean", "low", "high"), change, strict=True)) | {"examples": 277}
    figure, shown = (47.291, "47.29") if better == "lower" else (0.0123, "0.0123")
    said = against_majority({"figure": figure, "difference": found}, Measure("error", "", "", better))
    assert said == f"Always predicting the most frequent class has {shown}; the model is {says}"


@pytest.mark.slow
def test_the_shipped_tiny_recipe_beats_the_most_frequent_class(tmp_path: Path) -> None:
    recipe = load_recipe("labels-tiny")
    SingleRun(recipe, parse_router("smoe"), 0, tmp_path).run()
    model, task = load_model_and_task(str(tmp_path))
    clean = task.score(model)["clean"]
    assert clean["majority"]["difference"]["high"] < 0


ENTRIES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
BIG: dict[str, tuple[str, tuple[int, ...]]] = {  # the families and configs of the checkpoints, as published
    "glue-bert": ("bert", (30522, 1024, 4096, 24, 16)),
    "glue-phi3": ("phi3", (32064, 3072, 8192, 32, 32)),
}
MINILM = ("bert", (30522, 384, 1536, 6, 12))
PARAMETERS = {"glue-bert": 0.46e9, "glue-phi3": 7.4e9}
PARAMETERS |= dict.fromkeys(("glue-minilm", "sst2", "sst5", "banking77"), 0.072e9)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_big_recipe_is_built_on_meta_with_its_published_sizes(name: str) -> None:
    assert name in recipes()
    family, sizes = BIG.get(name, MINILM)
    config = {**dict(zip(ENTRIES, sizes, strict=True)), **({"pad_token_id": 32000} if family == "phi3" else {})}
    changes = {"model": {"family": family, "config": config}, "data.source": "python-topics", "data.tokens": "words"}
    task = make_task(load_recipe(name, changes))
    with torch.device("meta"):
        model = build_model(task, "smoe", {}, seed=0)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(PARAMETERS[name], rel=0.02)
    sparse = len([layer for layer in model.modules() if type(layer).__name__ == "Router"])
    assert sparse == {"glue-bert": 1, "glue-phi3": 16}.get(name, 6)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dense BERT that classifies, with its tokeniser and names of classes, as transformers saves one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp("foreign")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "film", "was", "and", "its", "music", *GOOD, *BAD]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        id2label={0: "BAD", 1: "GOOD"},
        label2id={"BAD": 0, "GOOD": 1},
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def expected_predictions(folder: Path, texts: list[str]) -> list[int]:
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [int(model(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text in texts]


def test_a_dense_classifier_that_transformers_saved_is_evaluated(foreign: Path, reviews: Path, tmp_path: Path) -> None:
    model, task = load_model_and_task(str(foreign), source=str(reviews))
    assert isinstance(task, LabelTask) and len(task.text_set.texts("test")) == 160
    rows = task.text_set.texts("test")
    predicted, *_ = predict(model, task.encoded(rows))
    assert predicted.tolist() == expected_predictions(foreign, [row.text for row in rows])
    right = np.mean(predicted == np.array([row.label for row in rows]))
    assert task.score(model)["clean"]["accuracy"] == pytest.approx(right)
    out = tmp_path / "scores.json"
    assert main(["evaluate", str(foreign), "--source", str(reviews), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["clean"]["accuracy"] == pytest.approx(right)
    assert main(["attack", str(foreign), "words", "--rate", "0.3", "--source", str(reviews)]) == 0


@pytest.mark.slow
def test_a_sparsified_classifier_is_evaluated_attacked_and_audited(
    foreign: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(foreign)
    tokenizer = transformers.AutoTokenizer.from_pretrained(foreign)
    holdfast.sparsify(model, experts=4, k=2, init="copy", router="smooth")
    holdfast.save(model, tmp_path / "sparse", tokenizer=tokenizer)
    where = ["--source", str(reviews)]
    assert main(["evaluate", str(tmp_path / "sparse"), *where]) == 0
    assert "Routing on the clean data" in capsys.readouterr().out
    assert main(["audit", str(tmp_path / "sparse"), *where, "--tokens", "300", "--perturb", "none,words,batch"]) == 0
    assert main(["attack", str(tmp_path / "sparse"), "routes", "--budget", "0.1", "--steps", "2", *where]) == 0


def test_audit_of_a_classifier_in_python_scores_its_labels_and_pairs(foreign: Path) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(foreign)
    tokenizer = transformers.AutoTokenizer.from_pretrained(foreign)
    holdfast.sparsify(model, experts=4, k=2, init="copy", router="smoe")
    texts = [LabelledText(review(n)[0], n % 2, "its music was " + GOOD[n % 4] if n % 3 else "film") for n in range(12)]
    report = holdfast.audit(model, texts, tokenizer=tokenizer, perturb=["none", "words", "typos", "batch"], rate=0.5)
    assert report.perturbations["none"].overall.prediction_flips == 0
    words = report.perturbations["words"]
    assert words.overall.tokens > 0
    flat = [*(one.text for one in texts), *(one.pair or "" for one in texts)]
    assert sum(batch["words"] for batch in words.details) == sum(swap_words(flat, rate=0.5, seed=0).words)  # of both texts
    inner = model.eval()
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                inner(**tokenizer(one.text, one.pair, return_tensors="pt")).logits, torch.tensor([int(one.label)])
            )
            for one in texts
        ]
    assert report.overall.loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
    plain = holdfast.audit(model, [one.text for one in texts], tokenizer=tokenizer, perturb=["none"])
    assert plain.overall.loss is None


def test_what_a_classifier_cannot_be_tested_on_is_one_sentence(
    foreign: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused("classifies texts; add --source with labelled texts", load_model_and_task, str(foreign))
    other = tmp_path / "a.csv"
    other.write_text("text,label\na,happy\n")
    assert_refused(r"'happy'.*\(BAD, GOOD\)", load_model_and_task, str(foreign), source=str(other))
    (tmp_path / "STS-B").mkdir()
    for name in ("train", "dev"):
        (tmp_path / "STS-B" / f"{name}.tsv").write_text("sentence1\tsentence2\tscore\n" + "a\tb\t1.5\n" * 4)
    with pytest.raises(ValueError, match="numbers to predict, and the model has 2 classes"):
        load_model_and_task(str(foreign), source="stsb", data=tmp_path)
    assert main(["audit", str(foreign), "--source", str(reviews)]) == 2
    assert main(["attack", str(foreign), "routes", "--budget", "0.1", "--source", str(reviews)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_saved_classifier_keeps_its_tokeniser_and_classes(foreign: Path, reviews: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        "labels-tiny",
        {"model": {"checkpoint": str(foreign)}, "data.source": str(reviews), "data.tokens": None, "sparse.hidden": None},
    )
    task = make_task(recipe)
    model = build_model(task, "smoe", {}, seed=0)
    save_trained(model, task, tmp_path / "saved")
    loaded = load_trained(tmp_path / "saved")
    again = loaded.task(source=str(reviews))
    assert isinstance(task, LabelTask) and isinstance(again, LabelTask)
    assert torch.equal(task.training.tokens, again.training.tokens)
    rows = again.text_set.texts("test")
    assert predict(model.eval(), task.encoded(rows))[0].tolist() == predict(loaded.model, again.encoded(rows))[0].tolist()


def test_a_model_is_not_scored_on_the_rows_that_it_was_trained_on(
    trained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the file is now and however it is written; all rows of another file are the test."""
    copied = tmp_path / "copied.csv"
    copied.write_bytes(reviews.read_bytes())
    monkeypatch.chdir(reviews.parent)
    found = load_trained(trained)
    for source in (str(reviews), reviews.name, str(copied)):
        task = found.task(source=source)
        assert isinstance(task, LabelTask) and len(task.text_set.texts("test")) < 80
    copied.write_text(reviews.read_text() + "another film was fine,good\n")
    task = found.task(source=str(copied))
    assert isinstance(task, LabelTask) and len(task.text_set.texts("test")) == 161


def test_a_length_beyond_the_positions_of_a_classifier_is_one_sentence(trained: Path, reviews: Path) -> None:
    with pytest.raises(ValueError, match="length is 4096, but the model's positions end at"):
        load_model_and_task(str(trained), source=str(reviews), length=4096)

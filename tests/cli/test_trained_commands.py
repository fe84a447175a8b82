"""`holdfast train`, `evaluate` and `attack`: a model trained from a recipe, scored and attacked again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli import conftest
from commands import Command
from tiers import quick_or_slow

from holdfast_command import main

SMALL = [*conftest.SMALL, "training.steps=8", "training.save_every=4", "attack.rate=0.2"]
IMAGES = ["training.steps=4", "training.batch=16", "model.config.hidden_size=32", "sparse.hidden=32", "attack.examples=16"]


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    given = ["train", "tiny", "--router", "symphony+smooth", "--out", str(out), "--set", f"data.source={text}", *SMALL]
    assert main(given) == 0
    return out


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("images") / "out"
    assert main(["train", "vmoe-tiny", "--router", "ac", "--out", str(out), "--set", *IMAGES]) == 0
    return out


def test_training_leaves_a_model_a_log_and_what_is_needed_to_try_it(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "training" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9)) and all(line["loss"] > 0 for line in lines)
    assert (trained / "model" / "model.safetensors").is_file() and (trained / "task.json").is_file()
    assert not [file.name for file in (trained / "model").iterdir() if file.suffix not in (".json", ".safetensors", ".md")]


def test_a_finished_training_goes_on_to_the_same_model_and_another_one_is_refused(
    trained: Path, text: Path, command: Command
) -> None:
    before = (trained / "model" / "model.safetensors").read_bytes()
    given = ["train", "tiny", "--out", trained, "--set", f"data.source={text}", *SMALL]
    command.printed(*given, "--router", "symphony+smooth")
    assert (trained / "model" / "model.safetensors").read_bytes() == before
    assert "symphony+smooth" in command.refused(*given, "--router", "smoe")


def test_evaluating_a_trained_model_says_what_its_own_task_says(
    trained: Path, text: Path, tmp_path: Path, command: Command
) -> None:
    from holdfast.train import load_trained

    out = tmp_path / "scores.json"
    shown = command.printed("evaluate", trained / "model", "--source", text, "--out", out)
    stored = json.loads(out.read_text())
    known = load_trained(trained)
    score = known.task(source=str(text)).score(known.model.eval())
    assert stored["clean"]["nll"] == score["clean"]["nll"] and stored["attacked"]["nll"] == score["attacked"]["nll"]
    assert f"{score['clean']['figure']:.4f}" in shown and "entropy" in shown
    assert stored["measure"]["name"] == "perplexity" and stored["versions"]["torch"] == torch.__version__
    assert "--force" in command.refused("evaluate", trained, "--out", out)
    out.write_text("mine")
    command.printed("evaluate", trained, "--source", text, "--out", out, "--force")
    assert json.loads(out.read_text())["clean"]["nll"] == stored["clean"]["nll"]


def test_any_hugging_face_folder_is_evaluated_with_its_own_tokenizer(tmp_path: Path, command: Command) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<unk>", "the", "of", "a", "is", "cat"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>").save_pretrained(tmp_path / "model")
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    shared = {**sizes, "vocab_size": 6, "num_key_value_heads": 2, "max_position_embeddings": 32}
    text = tmp_path / "text.txt"
    text.write_text("the cat is a cat of the cat\n" * 200)
    for config in (
        transformers.MixtralConfig(**shared, num_local_experts=4, num_experts_per_tok=2),
        transformers.LlamaConfig(**shared),
    ):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
        shown = command.printed("evaluate", tmp_path / "model", "--source", text)
        assert "perplexity" in shown
        assert ("entropy" in shown) == (config.model_type == "mixtral")
        assert ("is dense" in shown) == (config.model_type == "llama")
    assert "word swap" in command.printed("attack", tmp_path / "model", "words", "--rate", "0.5", "--source", text)


def test_attacks_on_text_say_their_realised_rate_and_rate_zero_is_clean(
    trained: Path, text: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "attack.json"
    given = ["--source", text, "--out", out, "--force"]
    for kind in ("words", "generic", "typos"):
        command.printed("attack", trained, kind, "--rate", "0.5", *given)
        found = json.loads(out.read_text())["summary"]
        assert 0 < found["attack"]["realised"] <= 0.5
        assert found[kind]["nll"] != found["clean"]["nll"]
        assert "95% interval" in found["cost"]["words"]
        assert found["attack"]["options"].get("token") == ("AAA" if kind == "generic" else None)
    command.printed("attack", trained, "words", "--rate", "0", *given)
    found = json.loads(out.read_text())["summary"]
    assert found["words"]["nll"] == found["clean"]["nll"]


@pytest.mark.slow
def test_attacked_routes_are_reported_by_layer(trained: Path, text: Path, tmp_path: Path, command: Command) -> None:
    shares = []
    for budget in ("0", "0.5"):
        out = tmp_path / f"{budget}.json"
        given = ["attack", trained, "routes", "--budget", budget, "--examples", "32", "--steps", "4", "--out", out]
        command.printed(*given, "--source", text)
        layers = json.loads(out.read_text())["summary"]["layers"]
        assert len(layers) == 2 and all(layer["tokens"] == 32 for layer in layers)
        shares.append(sum(layer["rate"] for layer in layers))
    assert shares[0] == 0 < shares[1]


KINDS = ("expert --expert 1 --on embeddings", "overload", "imbalance --on embeddings", "universal-routes")


@pytest.mark.parametrize("line", quick_or_slow(KINDS, [KINDS[1]]))
def test_attacks_on_routers_have_a_row_for_each_layer_and_budget_and_a_page(
    line: str, trained: Path, text: Path, tmp_path: Path, command: Command
) -> None:
    out, page = tmp_path / "attack.json", tmp_path / "attack.html"
    few = ["--examples", "32", "--steps", "2", "--source", text, "--out", out, "--page", page]
    kind, *more = line.split()
    command.printed("attack", trained, kind, "--budget", "0.3", "0", "0.3", *more, *few)
    stored = json.loads(out.read_text())
    assert [row[:3] for row in stored["rows"]] == [[layer, 32, budget] for layer in (0, 1) for budget in (0.0, 0.3)]
    curves = stored["lines"]["curves"]
    assert all(curve["budgets"] == [0.0, 0.3] and curve["figure"][1] >= curve["figure"][0] for curve in curves.values())
    assert all(one["relative"] and one["seed"] == 0 for one in stored["summary"]["layers"])
    assert stored["lines"]["y"] in page.read_text()


def test_several_rates_of_a_text_attack_give_one_table_and_a_curve(
    trained: Path, text: Path, tmp_path: Path, command: Command
) -> None:
    out, page = tmp_path / "rates.json", tmp_path / "rates.html"
    given = ["--source", text, "--out", out, "--page", page, "--force"]
    command.printed("attack", trained, "words", "--rate", "0.5", "0.2", *given)
    both = json.loads(out.read_text())
    command.printed("attack", trained, "words", "--rate", "0.5", *given)
    one = json.loads(out.read_text())
    assert [row[:2] for row in both["rows"]] == [["clean", 0.2], ["words", 0.2], ["clean", 0.5], ["words", 0.5]]
    assert [row[2:] for row in both["rows"][2:]] == [row[1:] for row in one["rows"]]  # of the words untouched at 0.5
    assert both["summary"]["attacks"][1] == one["summary"]
    curve = both["lines"]["curves"]["words"]
    assert curve["figure"] == [both["rows"][row][2] for row in (0, 1, 3)] and "perplexity" in page.read_text()


def test_attacks_on_images_grow_with_their_budget(images: Path, tmp_path: Path, command: Command) -> None:
    errors = {}
    for kind, budget in (("pgd", "0"), ("pgd", "0.3"), ("fgsm", "0.3"), ("corruptions", "5")):
        out = tmp_path / f"{kind}{budget}.json"
        command.printed("attack", images, kind, "--budget", budget, "--examples", "32", "--steps", "5", "--out", out)
        rows = json.loads(out.read_text())["rows"]
        errors[kind, budget] = {row[0]: row[1] if kind == "corruptions" else row[2] for row in rows}
    clean = errors["pgd", "0"]["clean"]
    assert errors["pgd", "0"]["PGD"] == clean == errors["corruptions", "5"]["clean"]
    assert errors["pgd", "0.3"]["PGD"] >= errors["fgsm", "0.3"]["FGSM"] >= clean
    assert len(errors["corruptions", "5"]) == 17  # clean, fifteen kinds, their mean


@pytest.mark.slow
def test_scores_of_images_have_no_column_that_only_attacks_fill(images: Path, command: Command) -> None:
    shown = command.printed("evaluate", images)
    assert "top-5 error, %" in shown and "accuracy" not in shown


def test_several_budgets_in_one_call_give_a_curve_and_a_page(images: Path, tmp_path: Path, command: Command) -> None:
    out, page = tmp_path / "curve.json", tmp_path / "curve.html"
    budgets = ["--budget", "0", "8/255", "0.2", "2e-3"]
    few = ["--examples", "24", "--steps", "3", "--samples", "2", "--seed", "1", "--step", "4/255"]
    assert "SPSA" in command.printed("attack", images, "spsa", *budgets, *few, "--out", out, "--page", page)
    stored = json.loads(out.read_text())
    curve = stored["curves"]["SPSA"]
    assert curve["budgets"] == [0, 2e-3, 8 / 255, 0.2] and curve["examples"] == 24
    for key in ("figure", "top5"):
        assert curve[key] == sorted(curve[key]) and curve[key][0] == stored["clean"][key]
    assert all(made <= budget for made, budget in zip(curve["realised"], curve["budgets"], strict=True))
    assert [one["options"]["step"] for one in stored["summary"]["attacks"]] == [4 / 255] * 4
    html = page.read_text()
    assert "Error against budget" in html and f"{curve['figure'][-1]:.4g}" in html
    assert "--force" in command.refused("attack", images, "spsa", *budgets, *few, "--page", page)
    both = ["attack", images, "fgsm,pgd", "--budget", "8/255", "--examples", "24", "--steps", "3", "--force"]
    command.printed(*both, "--out", out, "--page", page)
    assert list(json.loads(out.read_text())["curves"]) == ["FGSM", "PGD"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "tiny", "--log", "tensorbord"], "tensorboard"),
        (["evaluate", "TRAINED", "--length", "0"], "length is 0"),
        (["evaluate", "TRAINED", "--length", "9999"], "128"),
        (["certify", "TRAINED", "--length", "9999"], "128"),
        (["attack", "TRAINED", "words"], "--rate"),
        (["attack", "TRAINED", "words", "--budget", "1", "--rate", "0.1"], "--rate"),
        (["attack", "TRAINED", "words", "--rate", "2"], "rate is 2"),
        (["attack", "TRAINED", "pgd", "--budget", "0.1"], "text"),
        (["attack", "TRAINED", "routes", "--budget", "-1"], "budget"),
        (["attack", "IMAGES", "words", "--rate", "0.1"], "task is images"),
        (["attack", "IMAGES", "corruptions", "--budget", "0.5"], "severity"),
        (["attack", "IMAGES", "corruptions", "--budget", "5", "--page", "page.html"], "no curve"),
        (["attack", "IMAGES", "corruptions,pgd", "--budget", "5"], "alone"),
        (["attack", "IMAGES", "pgd"], "--budget"),
        (["attack", "IMAGES", "pgd", "--budget", "1/0"], "'1/0' is not a number"),
        (["attack", "IMAGES", "pgd", "--budget", "1/255", "-1/255"], "budget is -0.0039"),
        (["attack", "IMAGES", "pgd,pgd", "--budget", "1/255"], "only once"),
        (["attack", "IMAGES", "pgd,words", "--budget", "1/255"], "together"),
        (["attack", "IMAGES", "fgsm", "--budget", "1/255", "--restarts", "2"], "fgsm has no option restarts"),
        (["attack", "IMAGES", "pgd", "--budget", "1/255", "--step", "big"], "'big' is not a number"),
        (["attack", "IMAGES", "pgd", "--budget", "1/255", "--examples", "0"], "examples is 0"),
        (["attack", "IMAGES", "pgd", "--budget", "1/255", "--class-index", "none.txt"], "none.txt"),
        (["attack", "TRAINED", "routes", "--budget", "0.1", "--restarts", "2"], "restarts is for attacks on pixels"),
        (["attack", "TRAINED", "expert", "--budget", "0.1"], "--expert"),
        (["attack", "TRAINED", "overload", "--budget", "0.1", "--expert", "1"], "--expert"),
        (["attack", "TRAINED", "expert", "--budget", "0.1", "--expert", "99"], "experts 0 to"),
        (["attack", "TRAINED", "routes,overload", "--budget", "0.1"], "together"),
        (["attack", "TRAINED", "words", "--rate", "0.1", "--on", "embeddings"], "--on embeddings is for attacks on routers"),
        (["attack", "TRAINED", "suffix", "--budget", "2"], "--expert"),
        (["attack", "TRAINED", "suffix", "--budget", "0.5", "--expert", "1"], "a number of tokens, a whole number"),
        (["attack", "TRAINED", "suffix", "--budget", "2", "--expert", "99"], "numbers 0 to"),
        (["attack", "IMAGES", "suffix", "--budget", "2", "--expert", "1"], "suffix puts tokens into texts"),
        (["attack", "TRAINED", "suffix", "--budget", "2", "--expert", "1", "--on", "embeddings"], "suffix is none"),
        (["attack", "TRAINED", "fgsm", "--budget", "0.1", "--on", "embeddings"], "fgsm is none"),
        (["attack", "TRAINED", "pgd,pgd", "--budget", "0.1", "--on", "embeddings"], "name each only once"),
        (["attack", "TRAINED", "pgd", "--budget", "0.1", "--on", "embeddings", "--samples", "3"], "no option samples"),
        (["attack", "IMAGES", "pgd", "--budget", "0.1", "--on", "embeddings"], "embeddings are those of texts"),
        (["attack", "IMAGES", "overload", "--budget", "0.1", "--on", "embeddings"], "router inputs"),
        (["train", "tiny", "--set", "attack.name=overload"], "overload"),
        (["audit", "TRAINED", "--perturb", "overload"], "overload"),
    ],
)
def test_a_mistake_gets_one_sentence(
    arguments: list[str],
    says: str,
    trained: Path,
    images: Path,
    text: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    named = ["--source", text] if "TRAINED" in arguments else []
    assert says in command.refused(*({"TRAINED": trained, "IMAGES": images}.get(word, word) for word in arguments), *named)
    assert not list(tmp_path.iterdir())


def test_a_folder_around_models_is_told_which_are_inside(trained: Path, tmp_path: Path, command: Command) -> None:
    cell = tmp_path / "run" / "cells" / "smoe-seed0"
    cell.parent.mkdir(parents=True)
    cell.symlink_to(trained)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model").symlink_to(trained / "model")
    for folder, inside in (("run", cell), ("run/cells", cell), ("bare", tmp_path / "bare" / "model")):
        assert f"{inside} " in command.refused("evaluate", tmp_path / folder)


def test_training_logs_to_tensorboard_where_it_is_installed(text: Path, tmp_path: Path, command: Command) -> None:
    pytest.importorskip("tensorboardX")
    command.printed("train", "tiny", "--out", tmp_path, "--log", "tensorboard", "--set", f"data.source={text}", *SMALL)
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.slow
def test_two_processes_train_one_model(text: Path, trained: Path, tmp_path: Path) -> None:
    """By accelerate's launcher; torchrun starts those of tests/train."""
    # It has no flag for several processes on one CPU; this one only says that there are several.
    start = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    out = tmp_path / "out"
    given = ["-m", "holdfast", "train", "tiny", "--router", "symphony+smooth", "--out", str(out)]
    command = [sys.executable, "-m", *start, *given, "--set", f"data.source={text}", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = [[json.loads(line) for line in (run / "training" / "log.jsonl").open()] for run in (trained, out)]
    assert len(logs[0]) == len(logs[1]) == 8
    for one, two in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
    assert "2 ranks" in done.stdout


@pytest.mark.slow
def test_predictions_are_certified_attacked_and_shown_and_a_second_run_reads_them(
    images: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "predictions"
    given = ["certify", images, "--predictions", "--sigma", "0.25", "--samples", "60", "--examples", "3", "--out", out]
    said = command.printed(*given, "--steps", "2", "--radii", "0.1", "0.2")
    assert "certified at 0.1" in said and "under attack at 0.2" in said and "violations" in said
    stored = json.loads((out / "predictions.json").read_text())
    assert [len(model["examples"]) for model in stored["models"]] == [3] and stored["models"][0]["router"] == "ac"
    assert stored["settings"]["radii"] == [0.1, 0.2] and stored["unit"] == "pixels between 0 and 1"
    page = (out / "predictions.html").read_text(encoding="utf-8")
    assert "Certified accuracy against radius" in page
    before = (out / "predictions.json").read_bytes()
    command.printed(*given, "--steps", "2", "--radii", "0.1", "0.2")
    assert (out / "predictions.json").read_bytes() == before
    assert "another settings" in command.refused(*given, "--steps", "2", "--radii", "0.1", "0.3")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--predictions"], "needs --sigma"),
        (["--sigma", "0.1", "--selection", "7"], "add --predictions"),
        (["--predictions", "--sigma", "0.1", "--norm", "linf"], "--norm is for routes"),
        (["--predictions", "--sigma", "0"], "sigma is 0"),
        (["--predictions", "--sigma", "0.1", "--alpha", "0.7"], "alpha is 0.7"),
        (["--predictions", "--sigma", "0.1", "--radii", "0.2", "0.1"], "smallest first"),
    ],
)
def test_wrong_options_of_certified_predictions_are_one_sentence(
    options: list[str], says: str, images: Path, tmp_path: Path, command: Command
) -> None:
    assert says in command.refused("certify", images, *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""Vision-language models: their inputs, their stages, their scores beside naive loops, and runs from end to end."""

import json
from collections.abc import Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interrupting import Interrupted
from PIL import Image
from test_docs import QUESTIONS, blocks
from torch.nn.functional import cross_entropy
from wording import assert_refused

from holdfast.data import Bytes, Question, Vocabulary
from holdfast.data.encoded_texts import QuestionEncoder
from holdfast.data.questions import Dialogue, cell_targets, prior_error
from holdfast.data.scenes import scene
from holdfast.hub import trace
from holdfast.hub.layers import moe_layers
from holdfast.train import Recipe, build_model, load_recipe, make_task, parse_routers, save_trained
from holdfast.train.building import preflight
from holdfast.train.modality_routes import common_tokens
from holdfast.train.question_scoring import (
    chosen_option,
    encode,
    generate,
    log_likelihoods,
    option_scores,
    wrong_by_likelihood,
)
from holdfast.train.stages import after_stages
from holdfast.train.vision_language_task import BLIND, GENERATED, PRIOR, VIEWED, VisionLanguageTask, reword, seeing_cells

NARROW = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL: dict[str, Any] = {
    **{f"model.config.{part}.{key}": value for part in ("vision_config", "text_config") for key, value in NARROW.items()},
    "model.config.text_config.num_key_value_heads": 2,
    "data.pictures": 60,
    **{f"stages.{stage}.steps": 4 for stage in ("vision", "language", "captions", "connector")},
    **{f"stages.{stage}.warmup": 0 for stage in ("vision", "language", "captions", "connector")},
    "training.steps": 6,
    "training.batch": 8,
    "training.warmup": 0,
    "attack.examples": 12,
}
PARTS = ["vision", "connector", "language"]
RUN = {"holdfast": "a version"}


@pytest.fixture(scope="module", autouse=True)
def few_test_questions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.data.scenes.TEST", 204)
        patch.setattr("holdfast.data.scenes.VALIDATION", 24)
        yield


def small(**changes: Any) -> Recipe:
    return load_recipe("llava-tiny", {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}})


@pytest.fixture(scope="module")
def task(few_test_questions: None) -> VisionLanguageTask:
    found = make_task(small())
    assert isinstance(found, VisionLanguageTask)
    return found


@pytest.fixture(scope="module")
def model(task: VisionLanguageTask) -> Any:
    """A model of which every part is sparse, with weights that are large enough for answers to differ."""
    sparse = task.with_recipe(small(sparse__parts=PARTS))
    found = build_model(sparse, "smoe", {}, seed=0).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return found


def written_out(task: VisionLanguageTask, question: Question, number: int) -> list[int]:
    """Return the token ids of a question, from its words alone."""
    from holdfast.data.questions import put

    words = put(question, number).text.removeprefix("<image>\n")
    ids = task.tokenizer.ids
    return [*ids("USER:"), *[len(task.tokenizer)] * 9, *ids(words), *ids("ASSISTANT:")]


def log_likelihood(model: Any, ids: list[int], pixels: torch.Tensor, option: list[int]) -> float:
    """Return the log-likelihood of an option, token by token, each with a forward of its own."""
    total = 0.0
    for token in option:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels, use_cache=False).logits
        total += float(logits[0, -1].double().log_softmax(-1)[token])
        ids = [*ids, token]
    return total


def likelihoods_by_hand(task: VisionLanguageTask, model: Any, question: Question, number: int, pixels: Any) -> list[float]:
    """Return the log-likelihood of each option as it is shown, on pixels between -1 and 1."""
    ids = written_out(task, question, number)
    shown = list("ABCD") if question.lettered else list(question.options)
    return [log_likelihood(model, ids, pixels, task.tokenizer.ids(option)) for option in shown]


@pytest.mark.slow
def test_scores_equal_a_loop_of_our_own_on_200_questions(task: VisionLanguageTask, model: Any) -> None:
    test, asked = task.question_set.tests["test"], task.asked["test"][:200]
    assert len({one.kind for one in test.questions[:200]}) == 6
    found = log_likelihoods(model, asked, task._read(test.pictures), task.encoder)
    wrong = 0
    for number, question in enumerate(test.questions[:200]):
        naive = likelihoods_by_hand(task, model, question, number, 2 * test.pictures.pixels([number]) - 1)
        assert found[number].tolist() == pytest.approx(naive, abs=1e-4)
        wrong += naive.index(max(naive)) != asked[number].right
    assert int(wrong_by_likelihood(found, asked).sum()) == wrong
    assert 0 < wrong < 200


def test_generated_answers_are_those_of_transformers(task: VisionLanguageTask, model: Any) -> None:
    test, asked = task.question_set.tests["test"], task.asked["test"][:12]
    found = generate(model, asked, task._read(test.pictures), task.encoder)
    for number, one in enumerate(asked):
        ids = torch.tensor([written_out(task, test.questions[number], number)])
        most = 1 + max(map(len, one.options))
        how = {"max_new_tokens": most, "do_sample": False, "eos_token_id": task.encoder.end, "pad_token_id": 0}
        said = model.generate(input_ids=ids, pixel_values=2 * test.pictures.pixels([number]) - 1, **how)[0, ids.shape[1] :]
        assert found[number] == [token for token in said.tolist() if token != task.encoder.end]


@pytest.mark.parametrize("tokens", ["words", "lines", "bytes"])
def test_a_saved_processor_reads_pictures_and_questions_as_the_task_does(tokens: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    task = make_task(small(data__tokens=tokens))
    assert isinstance(task, VisionLanguageTask)
    save_trained(build_model(task, "smoe", {}, seed=0), task, tmp_path)
    folder, test = tmp_path / "model", task.question_set.tests["test"]
    if tokens == "bytes":  # transformers has no such tokeniser
        assert not list(folder.glob("*processor*"))
        return
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    answers = generate(model, task.asked["test"][:12], task._read(test.pictures), task.encoder)
    for number, (one, answer) in enumerate(zip(task.asked["test"], answers, strict=False)):
        pixels = test.pictures.pixels([number])
        picture = Image.fromarray((255 * pixels[0]).round().byte().permute(1, 2, 0).numpy())
        inputs = processor(images=picture, text=f"USER: {one.put.text}\nASSISTANT:", return_tensors="pt")
        assert inputs["input_ids"].tolist() == task.encoder.batch([one.row])["input_ids"].tolist()
        assert torch.allclose(inputs["pixel_values"], task.scaling(pixels), atol=1e-5)
        most = 1 + max(map(len, one.options))
        said = model.generate(**inputs, max_new_tokens=most, do_sample=False, suppress_tokens=[task.encoder.picture])
        said = said[0, inputs["input_ids"].shape[1] :].tolist()
        assert [token for token in said if token != processor.tokenizer.eos_token_id] == answer


def test_an_answer_is_the_longest_option_that_a_text_begins_with() -> None:
    options = ("no", "top", "top left", "A", "B")
    cases = {"Top left.": 2, "top": 1, "No, there is none": 0, "nothing": None, "A. a cat": 3, "The B": None, "": None}
    assert {text: chosen_option(text, options) for text in cases} == cases


@pytest.mark.slow
def test_the_score_has_the_prior_the_error_without_pictures_and_the_shift(task: VisionLanguageTask, model: Any) -> None:
    found = task.score(model)
    test, shift = task.question_set.tests["test"], task.question_set.tests["held-out combinations"]
    wrong = wrong_by_likelihood(
        log_likelihoods(model, task.asked["test"], task._read(test.pictures), task.encoder), task.asked["test"]
    )
    assert found["clean"]["figure"] == pytest.approx(100 * wrong.double().mean()) and found["clean"]["examples"] == 204
    kinds = found["clean"]["kinds"]
    assert np.mean(list(kinds.values())) == pytest.approx(found["clean"]["figure"])  # 34 questions of each kind
    blind = 0
    for number, question in enumerate(test.questions):
        naive = likelihoods_by_hand(task, model, question, number, torch.zeros(1, 3, 36, 36))
        blind += naive.index(max(naive)) != task.asked["test"][number].right
    metrics = found["clean"]["metrics"]
    assert metrics[BLIND] == pytest.approx(100 * blind / 204) and set(metrics) == {PRIOR, BLIND, GENERATED}
    assert metrics[PRIOR] == prior_error(test.questions)
    assert found["shifts"]["held-out combinations"]["examples"] == len(shift.questions) == 204
    trial = found["trials"]["corruptions"]
    assert trial["figure"] == pytest.approx(np.mean(list(trial["each"].values()))) and len(trial["each"]) == 15
    assert set(found["trials"]) == {"corruptions", "reworded questions"} and 0 <= trial["predictions_changed"] <= 1
    assert found["attacked"]["figure"] == trial["figure"] and "routing" in found["attacked"] and "routing" in found["clean"]


@pytest.mark.slow
def test_corrupted_pictures_are_those_of_the_questions_they_are_asked_with(task: VisionLanguageTask, model: Any) -> None:
    from holdfast.attacks import corrupt

    test, some = task.question_set.tests["test"], [place * 204 // 12 for place in range(12)]
    pixels = corrupt(test.pictures.pixels(some), "fog", severity=3).images
    wrong = 0
    for at, number in enumerate(some):
        naive = likelihoods_by_hand(task, model, test.questions[number], number, 2 * pixels[at : at + 1] - 1)
        wrong += naive.index(max(naive)) != task.asked["test"][number].right
    assert task._corruptions(model)["each"]["fog"] == pytest.approx(100 * wrong / 12)


@pytest.mark.parametrize("name", ["words", "bytes"])
def test_only_answers_and_the_ends_after_them_are_learned(name: str) -> None:
    said = "USER: ASSISTANT: what is it ? a cat and now still"
    tokens = Bytes() if name == "bytes" else Vocabulary([said])
    encoder = QuestionEncoder(tokens, end=0 if name == "bytes" else 1, picture=300, patches=4, pad=0)
    dialogue = Dialogue(0, (("<image>\nwhat is it ?", "a cat"), ("and now ?", "still")))
    row, learned = encoder.dialogue(dialogue)
    inputs = encoder.batch([row, row[:8]], 100, [learned, learned[:8]])
    ids, labels = inputs["input_ids"][0], inputs["labels"][0]
    assert int((ids == 300).sum()) == 4 and inputs["attention_mask"].sum(1).tolist() == [len(row) + 3, 11]
    ends = (labels == encoder.end).nonzero().flatten().tolist()
    first, second = labels[: ends[0]], labels[ends[0] + 1 : ends[1]]
    assert [tokens.decode(one[one >= 0]).strip() for one in (first, second)] == ["a cat", "still"]
    assert bool((labels[labels >= 0] == ids[labels >= 0]).all()) and bool((inputs["labels"][1] < 0).all())
    text = tokens.decode([token for token in row if token not in (300, encoder.end)])
    assert "".join(text.split()).lower() == "user:whatisit?assistant:acatuser:andnow?assistant:still"


def test_answers_before_the_picture_are_learned_at_their_own_places() -> None:
    encoder = QuestionEncoder(Vocabulary(["USER: ASSISTANT: hello there a cat"]), end=1, picture=300, patches=4, pad=0)
    row, learned = encoder.dialogue(Dialogue(0, (("hello", "there"), ("<image> and ?", "a cat"))))
    inputs = encoder.batch([row], 40, [learned])
    labels = inputs["labels"][0]
    assert encoder.decode(labels[labels >= 0].tolist()).split() == ["there", "a", "cat"]
    assert torch.equal(labels[labels >= 0], inputs["input_ids"][0][labels >= 0])


def test_texts_make_no_token_of_a_picture() -> None:
    encoder = QuestionEncoder(Bytes(), end=0, picture=ord("#"), patches=4, pad=0)
    assert encoder.question("<image>\nwhat # is it").count(ord("#")) == 1 and ord("#") not in encoder.answer("# 3")


def test_an_option_that_begins_with_another_is_compared_with_its_end() -> None:
    encoder = QuestionEncoder(Vocabulary(["USER: ASSISTANT: top left right where"]), end=1, picture=300, patches=4, pad=0)
    plain, longer = (
        encode([Question(None, "where", options[0], options)], encoder)[0].options
        for options in (("top left", "right"), ("top", "top left", "right"))
    )
    assert plain == [encoder.answer("top left"), encoder.answer("right")]
    assert longer == [[*encoder.answer(one), 1] for one in ("top", "top left", "right")]


def test_options_of_the_same_tokens_are_refused() -> None:
    encoder = QuestionEncoder(Vocabulary(["USER: ASSISTANT: where"]), end=1, picture=300, patches=4, pad=0)
    assert_refused("same tokens of the options 'A' and 'B'", encode, [Question(None, "where", "A", ("A", "B"))], encoder)


# Stages


@pytest.mark.slow
def test_a_stage_trains_its_part_only_and_the_next_starts_where_it_ended(
    task: VisionLanguageTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.train.loop import TrainingLoop

    seen: dict[str, list[str]] = {}
    run = TrainingLoop.run

    def watched(loop: TrainingLoop) -> Any:
        before = {name: value.clone() for name, value in loop.model.state_dict().items()}
        log, after = run(loop), loop.model.state_dict()
        seen[loop.folder.name] = [name for name in before if not torch.equal(before[name], after[name])]
        return log

    monkeypatch.setattr(TrainingLoop, "run", watched)
    started = after_stages(task, tmp_path, 0, RUN)
    places = {
        "vision": ("vision_tower", "scene_heads"),
        "language": ("language_model", "lm_head"),
        "captions": ("projector", "language_model", "lm_head"),
        "connector": ("projector",),
    }
    assert list(seen) == list(places)
    for name, own in places.items():
        assert seen[name] and all(any(place in changed for place in own) for changed in seen[name]), name
    new, trained = task.initial_model().state_dict(), started.initial_model().state_dict()
    assert new.keys() == trained.keys() and not any("scene_heads" in name for name in trained)
    assert not torch.equal(new["lm_head.weight"], trained["lm_head.weight"])
    first, again = (build_model(started, name, {}, seed=0) for name in ("smoe", "symphony"))
    for name, value in first.state_dict().items():  # both routers start from the same weights
        if "router" not in name:
            assert torch.equal(value, again.state_dict()[name]), name


def test_label_smoothing_is_refused() -> None:
    """It would smooth the token before each one that is learned: the labels of this task are not shifted."""
    assert_refused("label_smoothing is for classes", make_task, small(training__label_smoothing=0.1))


def test_stages_of_another_training_are_not_taken(task: VisionLanguageTask, tmp_path: Path) -> None:
    """A sweep over `training` has all its settings in one folder, and stages take from it what they leave out."""
    only = {f"stages__{name}": None for name in ("vision", "captions", "connector")}
    for decay in (0.0, 0.5, 0.5):
        after_stages(task.with_recipe(small(**only, training__weight_decay=decay)), tmp_path, 0, RUN)
    assert len(list((tmp_path / "stages").iterdir())) == 2


@pytest.mark.slow
def test_an_interrupted_stage_resumes_to_the_same_weights(
    task: VisionLanguageTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.train import loop
    from holdfast.train.run_folder import write_checkpoint

    often = task.with_recipe(small(training__save_every=2))
    whole = after_stages(often, tmp_path / "whole", 0, RUN).start
    calls: list[Path] = []

    def stop(*given: Any) -> None:
        write_checkpoint(*given)
        calls.append(given[0])
        if len(calls) == 3:  # in the middle of the stage of the language model
            raise Interrupted

    monkeypatch.setattr(loop, "write_checkpoint", stop)
    with pytest.raises(Interrupted):
        after_stages(often, tmp_path / "part", 0, RUN)
    assert calls[-1].name == "language"
    resumed = after_stages(often, tmp_path / "part", 0, RUN).start
    assert len(calls) == 8  # two of each stage; none is trained again
    assert whole is not None and resumed is not None
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    other = after_stages(often.with_recipe(small(training__save_every=2)), tmp_path / "part", 1, RUN)
    assert not torch.equal(other.start["lm_head.weight"], resumed["lm_head.weight"])  # type: ignore[index]
    assert len(list((tmp_path / "part" / "stages").glob("*-seed*"))) == 2


def test_the_loss_of_the_tower_is_that_of_shapes_and_colours_of_the_cells(task: VisionLanguageTask) -> None:
    model = task.initial_model()
    batch = task.stages()[0].task.examples(0).__getitems__(range(3))
    scenes = task.question_set.dialogues("train")
    with seeing_cells(model):
        found = model(**batch)["loss"]
        states = model.model.vision_tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-1]
        scores = model.scene_heads(states)
        order = task.examples(0).order.at(range(3)).tolist()
        naive = 0.0
        for place, number in enumerate(order):
            for patch in range(9):
                shape, colour = scenes.cells[number, patch // 3, patch % 3].tolist()  # type: ignore[index]
                naive += float(cross_entropy(scores[place, patch, :5], torch.tensor(shape)))
                naive += float(cross_entropy(scores[place, patch, 5:], torch.tensor(colour)))
    assert float(found) == pytest.approx(naive / 27, rel=1e-5)
    assert torch.equal(batch["labels"], cell_targets(scenes.cells[order], 3))  # type: ignore[index]
    assert not hasattr(model, "scene_heads") and "forward" not in vars(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_texts_of_the_language_stage_have_no_picture_and_are_learned_whole(task: VisionLanguageTask) -> None:
    stage = next(stage for stage in task.stages() if stage.name == "language")
    batch = stage.task.examples(0).__getitems__(range(5))
    assert "pixel_values" not in batch and not bool((batch["input_ids"] == len(task.tokenizer)).any())
    real = batch["attention_mask"].bool()
    assert torch.equal(batch["labels"][real], batch["input_ids"][real]) and bool((batch["labels"][~real] == -100).all())


def test_a_caption_names_what_is_in_each_cell(task: VisionLanguageTask) -> None:
    stage = next(stage for stage in task.stages() if stage.name == "captions")
    part, numbers = task.question_set.dialogues("train"), stage.task.examples(0).order.at(range(4)).tolist()
    batch = stage.task.examples(0).__getitems__(range(4))
    assert torch.equal(batch["pixel_values"], 2 * part.pictures.pixels(numbers) - 1)
    for place, number in enumerate(numbers):
        things, _ = scene(0, 0, number)
        there = {(one.row, one.column): f"{one.colour} {one.shape}" for one in things}
        wanted = [there.get((row, column), "no object") for row in range(3) for column in range(3)]
        learned = batch["labels"][place]
        assert task.tokenizer.decode(learned[learned >= 0].tolist()).split() == " ".join(wanted).split()


# Recipes and runs


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model__family": "vit"}, "model.family is vit"),
    "unknown entry": ({"model__config__text_config__hiden_size": 3}, "text_config.hiden_size: .*did you mean 'hidden_size'"),
    "no tower": ({"model__config__vision_config": {}}, "vision_config.model_type is missing"),
    "short texts": ({"data__length": 3}, "no dialogue has an answer"),
    "metrics": ({"metrics": ["accuracy"]}, "metrics: accuracy"),
    "robust training": ({"robust__method": "noise", "robust__budget": 0.1}, "has no robust training"),
    "attack": ({"attack__name": "pgd"}, "attack.name: this task is vision-language"),
    "augmentation": ({"training__augment__flip": True}, "training.augment is for images"),
    "layout": ({"data__tests": ["pop=x"]}, "did you mean 'pope'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_recipe_is_refused_with_one_sentence(mistake: str) -> None:
    changes, sentence = MISTAKES[mistake]

    def build() -> None:
        task = make_task(small(**changes))
        preflight(task, parse_routers("smoe"))
        task.examples(0).__getitems__([0])

    assert_refused(sentence, build)


def test_stages_and_parts_are_for_this_task_only() -> None:
    assert_refused(
        "stages is for pictures with questions",
        load_recipe,
        "tiny",
        {"stages.language": {"steps": 1, "batch": 1, "learning_rate": 1}},
    )
    assert_refused("sparse.parts is for pictures with questions", load_recipe, "vmoe-tiny", {"sparse.parts": ["vision"]})


@pytest.mark.parametrize("router", ["symphony+smooth", "modality"])
@pytest.mark.slow
def test_routers_train_in_all_parts_and_know_the_modality(task: VisionLanguageTask, router: str) -> None:
    sparse = task.with_recipe(small(sparse__parts=PARTS))
    preflight(sparse, parse_routers(router))
    model = build_model(sparse, router, {}, seed=0)
    assert {layer.part for layer in moe_layers(model)} == set(PARTS)
    batch = sparse.examples(0).__getitems__(range(4))
    with trace(model) as routes:
        model(**batch)["loss"].backward()
    assert len(routes) == 3
    assert all(
        bool(one.grad.abs().sum()) for name, one in model.named_parameters() if "score" in name and one.grad is not None
    )


@pytest.fixture
def dialogues(tmp_path: Path) -> Path:
    """A folder in LLaVA's layout, with a dialogue of texts only, and questions in POPE's."""
    folder, entries, lines = tmp_path / "llava", [], []
    folder.mkdir()
    for number in range(9):
        Image.fromarray(np.full((20, 20, 3), 25 * number, dtype=np.uint8)).save(folder / f"{number}.png")
        said = ["<image>\nIs there a dog in the image?", ("no", "yes")[number % 2], "Sure?", "yes"]
        turns = [{"from": ("human", "gpt")[place % 2], "value": one} for place, one in enumerate(said)]
        entries.append({"id": number, "image": f"{number}.png", "conversations": turns})
        lines.append({"question_id": number, "image": f"{number}.png", "text": said[0][8:], "label": said[1]})
    entries.append({"id": 9, "conversations": [{"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "yes"}]})
    (folder / "dialogues.json").write_text(json.dumps(entries))
    (tmp_path / "pope").mkdir()
    (tmp_path / "pope" / "images").mkdir()
    for number in range(9):
        (folder / f"{number}.png").rename(tmp_path / "pope" / "images" / f"{number}.png")
        Image.fromarray(np.full((20, 20, 3), 25 * number, dtype=np.uint8)).save(folder / f"{number}.png")
    (tmp_path / "pope" / "pope.json").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


@pytest.mark.slow
def test_a_folder_of_dialogues_is_trained_on_and_a_set_of_questions_is_scored(dialogues: Path) -> None:
    from holdfast.train.training import train
    from holdfast_command import main

    folder, test = dialogues / "llava", f"pope={dialogues / 'pope' / 'pope.json'}"
    changes = {"data__source": str(folder), "data__pictures": None, "data__size": 36}
    changes |= {"stages__vision": None, "stages__captions": None}
    assert_refused("has dialogues and no questions to score", make_task, small(**changes))
    recipe = small(**changes, data__tests=[test])
    task: Any = make_task(recipe)
    batch = task.examples(0).__getitems__(range(10))  # with the dialogue of texts, if it is not held out
    assert len(batch["pixel_values"]) == int((batch["input_ids"] == len(task.tokenizer)).any(1).sum())
    assert_refused(
        "which dialogues does not say",
        lambda: make_task(
            small(**{**changes, "data__tests": [test], "stages__vision": {"steps": 1, "batch": 1, "learning_rate": 0.1}})
        ).stages(),
    )
    model = build_model(task, "smoe", {}, seed=0)
    log = train(model, task, dialogues / "training", seed=0, k=2)
    assert len(log) == 6 and task.score(model)["clean"]["examples"] == 9
    out = dialogues / "run"
    left_out = ("stages.vision", "stages.captions", "data.pictures")
    pairs = [f"data.source={folder}", f"data.tests=['{test}']", "data.size=36", *(f"{name}=null" for name in left_out)]
    pairs += [f"{key}={value}" for key, value in SMALL.items() if not key.startswith(left_out)]
    assert main(["train", "llava-tiny", "--router", "smoe", "--out", str(out), "--set", *pairs]) == 0
    assert main(["evaluate", str(out)]) == 2  # what a record names is not read
    assert main(["evaluate", str(out), "--source", test]) == 0


def changed(dialogues: Path, *turns: str, image: str | None = None, count: int = 30, **changes: Any) -> Any:
    """Return the task of the folder with further dialogues of these turns."""
    file = dialogues / "llava" / "dialogues.json"
    said = [{"from": ("human", "gpt")[place % 2], "value": one} for place, one in enumerate(turns)]
    more = [{"conversations": said, **({} if image is None else {"image": image})}] * count
    file.write_text(json.dumps([*json.loads(file.read_text()), *more]))
    own = {"source": str(file), "pictures": None, "size": 36, "tests": [f"pope={dialogues / 'pope' / 'pope.json'}"]}
    given = {**{f"data__{key}": value for key, value in own.items()}, "stages__vision": None, "stages__captions": None}
    return make_task(small(**given, **changes))


def test_a_text_longer_than_all_dialogues_with_pictures_is_a_batch_of_the_language_stage(dialogues: Path) -> None:
    task = changed(dialogues, "word " * 40, "yes")
    (language,) = (stage for stage in task.stages() if stage.name == "language")
    batch = language.task.examples(0).__getitems__(range(30))
    assert int(batch["attention_mask"].sum(1).max()) == batch["input_ids"].shape[1] > task.width - task.encoder.patches


def test_dialogues_without_an_answer_within_the_length_are_left_out(dialogues: Path) -> None:
    task = changed(dialogues, "word " * 100, "yes")
    batch = task.examples(0).__getitems__(range(30))
    assert bool((batch["labels"] >= 0).any(1).all())
    assert all(
        bool((task.validation().__getitems__([place])["labels"] >= 0).any()) for place in range(len(task.validation()))
    )


def test_a_picture_after_the_length_is_cut_off_with_its_token(dialogues: Path) -> None:
    task = changed(dialogues, "Sure?", "yes", "word " * 100 + "<image>", "no", image="0.png")
    batch = task.examples(0).__getitems__(range(30))
    seen = (batch["input_ids"] == task.encoder.picture).any(1)
    assert not bool(seen.all()) and len(batch["pixel_values"]) == int(seen.sum())


def test_the_connector_learns_from_dialogues_with_pictures_only(dialogues: Path) -> None:
    task = changed(dialogues, "Sure?", "yes")
    (connector,) = (stage for stage in task.stages() if stage.name == "connector")
    batch = connector.task.examples(0).__getitems__(range(30))
    assert bool((batch["input_ids"] == task.encoder.picture).any(1).all())


def test_a_task_without_pictures_is_refused(dialogues: Path) -> None:
    (dialogues / "llava" / "dialogues.json").write_text("[]")
    assert_refused("training dialogues of dialogues have no picture", changed, dialogues, "Sure?", "yes")


def test_a_test_question_longer_than_the_positions_is_refused(dialogues: Path) -> None:
    (line, *_) = (dialogues / "pope" / "pope.json").read_text().splitlines()
    (dialogues / "pope" / "pope.json").write_text(json.dumps({**json.loads(line), "text": "word " * 400}))
    task = changed(dialogues, "Sure?", "yes")
    assert "data.size" not in assert_refused("length is 4.., but the model's positions end at 256", task.initial_model)


def test_pictures_of_more_tokens_than_the_positions_are_refused() -> None:
    task = make_task(small(data__size=216))
    assert_refused("end at 256 .*; 324 of these tokens are of a picture: set data.size to less", task.initial_model)


@pytest.mark.slow
def test_a_comparison_runs_from_end_to_end_and_its_cells_are_evaluated_attacked_and_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast_command import main

    monkeypatch.chdir(tmp_path)

    pairs = [f"{key}={value}" for key, value in SMALL.items()]
    compare = ["compare", "--recipe", "llava-tiny", "--seeds", "1", "--routers", "smoe,symphony", "--out"]
    compare.append(str(tmp_path / "comparison"))
    assert main([*compare, "--steps", "4", "--set", *pairs, "sparse.parts=[vision, connector, language]"]) == 0
    said = capsys.readouterr().out
    for name in (PRIOR, BLIND, GENERATED, "held-out combinations", "experts of one modality", "Report:"):
        assert name in said
    stored = json.loads((tmp_path / "comparison" / "results.json").read_text())
    assert [cell["router"] for cell in stored["cells"]] == ["smoe", "symphony"]
    assert len(list((tmp_path / "comparison" / "stages").iterdir())) == 1  # both cells start from the same stages
    assert len({cell["first_batch"] for cell in stored["cells"]}) == 1
    cell = str(tmp_path / "comparison" / "cells" / "smoe-seed0")
    assert main(["evaluate", cell]) == 0
    said = capsys.readouterr().out
    assert "reworded questions" in said and "text tokens that flip, pictures corrupted" in said
    assert main(["attack", cell, "routes", "--budget", "0.1", "--examples", "40"]) == 0
    Image.new("RGBA", (50, 40)).save("picture.png")
    (example,) = blocks(QUESTIONS, "python")
    exec(example, {})
    assert capsys.readouterr().out.strip()
    page = tmp_path / "attack.html"
    pixels = ["fgsm,pgd", "--budget", "0", "0.1", "--steps", "2", "--examples", "20", "--page", str(page)]
    assert main(["attack", cell, *pixels]) == 0 and "accuracy, %" in capsys.readouterr().out and page.exists()
    for line in ("spsa --budget 0.1", "corruptions --budget 3", "words --rate 0.1", "routes --budget 0.1 --on embeddings"):
        capsys.readouterr()
        assert main(["attack", cell, *line.split()]) == 2
        (sentence,) = (said for said in capsys.readouterr().err.splitlines() if said.startswith("holdfast:"))
        assert any(part in sentence for part in ("fgsm", "router inputs")), sentence


def test_llava_has_the_parameters_that_the_paper_gives() -> None:
    """4.2 billion before upcycling."""
    from dataclasses import replace

    from holdfast.train.building import put_router
    from holdfast.train.start import start_model

    recipe = load_recipe("llava")
    sizes = recipe.model.config
    sizes = {**sizes, "text_config": {**sizes["text_config"], "vocab_size": 32064}}
    sizes = {**sizes, "vision_config": {**sizes["vision_config"], "image_size": 224}}
    with torch.device("meta"):
        model = start_model(replace(recipe.model, config=sizes), "vision-language", vision_feature_select_strategy="full")
        dense = sum(parameter.numel() for parameter in model.parameters())
        (choice,) = parse_routers("symphony")
        assert put_router(model, recipe, choice)
    assert {layer.part for layer in moe_layers(model)} == {"vision", "connector"}
    assert round(dense / 1e7) == 425
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e7) == 506


# Images and texts


def test_common_tokens_are_the_longest_blocks_of_both_texts() -> None:
    before, after = [1, 9, 9, 9, 4, 5, 6, 7, 0, 0], [1, 9, 9, 9, 5, 6, 8, 4, 7]
    texts = [torch.tensor([one, one]) for one in (before, after)]
    batches = [{"input_ids": ids, "attention_mask": (ids != 0).long()} for ids in texts]
    same = common_tokens(*batches)
    first, second = [0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 4, 5, 8]  # 4 is in both, in another order
    assert same[0].tolist() == [*first, *(10 + place for place in first)]
    assert same[1].tolist() == [*second, *(9 + place for place in second)]


def routes_alone(model: Any, ids: list[int], pixels: torch.Tensor) -> list[list[set[int]]]:
    """Return the two best experts of each token in each layer, of one question in a forward of its own."""
    with torch.no_grad(), trace(model) as routes:
        model(input_ids=torch.tensor([ids]), pixel_values=pixels, use_cache=False)
        return [[set(row) for row in routing.experts[:, :2].tolist()] for routing in routes]


@pytest.mark.slow
def test_routes_of_images_and_texts_equal_a_loop_over_single_questions(task: VisionLanguageTask, model: Any) -> None:
    from holdfast.attacks import CORRUPTIONS, corrupt

    test, some = task.question_set.tests["test"], [place * 204 // 12 for place in range(12)]
    clean = test.pictures.pixels(some)
    seen = {name: corrupt(clean, name, severity=3).images for name in CORRUPTIONS}
    picture, found = len(task.tokenizer), task._modalities(model)
    flips: dict[tuple[int, str], list[bool]] = {}
    loads: dict[tuple[int, bool], list[int]] = {}
    for at, number in enumerate(some):
        ids = written_out(task, test.questions[number], number)
        before = routes_alone(model, ids, 2 * clean[at : at + 1] - 1)
        for layer, own in enumerate(before):
            for place, experts in enumerate(own):
                is_image = layer < 2 or ids[place] == picture
                loads.setdefault((layer, is_image), []).extend(experts)
        for one in seen.values():
            after = routes_alone(model, ids, 2 * one[at : at + 1] - 1)
            for layer, (old, new) in enumerate(zip(before, after, strict=True)):
                for place in range(len(old)):
                    modality = "image" if layer < 2 or ids[place] == picture else "text"
                    flips.setdefault((layer, f"{modality}_corrupted"), []).append(old[place] != new[place])
        (other,) = reword([test.questions[number]])
        words = written_out(task, other, number)
        after = routes_alone(model, words, 2 * clean[at : at + 1] - 1)
        for block in SequenceMatcher(None, ids, words, autojunk=False).get_matching_blocks():
            for step in range(block.size):
                modality = "image" if ids[block.a + step] == picture else "text"
                flip = before[2][block.a + step] != after[2][block.b + step]
                flips.setdefault((2, f"{modality}_reworded"), []).append(flip)
    assert [len(own) for own in before[:2]] == [task.encoder.patches] * 2 and len(found) == 3
    for layer, stored in enumerate(found):
        for key in ("image_corrupted", "text_corrupted", "image_reworded", "text_reworded"):
            naive = flips.get((layer, key))
            assert stored[key] == (None if naive is None else pytest.approx(np.mean(naive))), (layer, key)
        assert (stored["overlap"] is None) == (layer < 2)
    assert all(one["image_corrupted"] > 0 for one in found) and found[2]["text_corrupted"] > 0
    assert found[2]["image_reworded"] == 0 < found[2]["text_reworded"]  # images come first, and nothing reads later tokens
    image, text = ([loads[2, modality].count(expert) for expert in range(4)] for modality in (True, False))
    overlap = sum(min(one / sum(image), other / sum(text)) for one, other in zip(image, text, strict=True))
    assert found[2]["overlap"] == pytest.approx(overlap)


@pytest.mark.slow
def test_answers_to_reworded_questions_equal_a_loop_over_single_questions(task: VisionLanguageTask, model: Any) -> None:
    test, wrong, changed = task.question_set.tests["test"], [], []
    for number in (place * 204 // 12 for place in range(12)):
        question, pixels = test.questions[number], 2 * test.pictures.pixels([number]) - 1
        chosen = []
        for words in (question, replace(question, text=question.reworded)):
            naive = likelihoods_by_hand(task, model, words, number, pixels)
            chosen.append(naive.index(max(naive)))
        wrong.append(chosen[1] != task.asked["test"][number].right)
        changed.append(chosen[0] != chosen[1])
    found = task._reworded(model)
    assert found["figure"] == pytest.approx(100 * np.mean(wrong)) and found["examples"] == 12
    assert found["predictions_changed"] == pytest.approx(np.mean(changed)) and any(changed)


def test_questions_without_other_words_are_misspelt() -> None:
    known = Question(0, "is there a cat ?", "yes", ("yes", "no"), reworded="is a cat there ?")
    file = Question(0, "Is there a snowboard in the image?", "yes", ("yes", "no"))
    short = Question(0, "A dog?", "yes", ("yes", "no"))
    found = reword([known, file, short])
    assert found[0].text == "is a cat there ?" and found[2] == short
    before, after = file.text.split(), found[1].text.split()
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, True, True, False, True, True, False]
    assert replace(found[1], text=file.text) == file


# Attacks on pixels


def asked_with_pictures(task: VisionLanguageTask, count: int) -> tuple[list[int], list[Any], torch.Tensor]:
    numbers = task.seeing(count)
    test = task.question_set.tests["test"]
    pixels = test.pictures.pixels([test.questions[number].picture for number in numbers])  # type: ignore[misc]
    return numbers, [task.asked["test"][number] for number in numbers], pixels


def test_scores_of_options_for_attacks_equal_a_loop_and_others_are_far_below(task: VisionLanguageTask, model: Any) -> None:
    numbers, asked, pixels = asked_with_pictures(task, 12)
    assert len({len(one.options) for one in asked}) > 1 and any(len(row) > 1 for one in asked for row in one.options)
    with torch.no_grad():
        found = option_scores(model, asked, task.scaling, task.encoder)(pixels)
    for at, (number, one) in enumerate(zip(numbers, asked, strict=True)):
        ids = written_out(task, task.question_set.tests["test"].questions[number], number)
        naive = [log_likelihood(model, ids, 2 * pixels[at : at + 1] - 1, option) for option in one.options]
        assert found[at, : len(naive)].tolist() == pytest.approx(naive, abs=1e-4)
        assert found[at, len(naive) :].tolist() == pytest.approx([min(naive) - 50] * (found.shape[1] - len(naive)), abs=1e-4)


def naive_loss(task: VisionLanguageTask, model: Any, number: int, pixels: torch.Tensor) -> torch.Tensor:
    """Return -log of the right option's share of the likelihoods, with its gradient; each token has a forward of its own."""
    one, question = task.asked["test"][number], task.question_set.tests["test"].questions[number]
    scores = []
    for option in one.options:
        ids, total = written_out(task, question, number), torch.zeros(())
        for token in option:
            logits = model(input_ids=torch.tensor([ids]), pixel_values=2 * pixels - 1, use_cache=False).logits
            total, ids = total + logits[0, -1].log_softmax(-1)[token], [*ids, token]
        scores.append(total)
    return -torch.stack(scores).log_softmax(0)[one.right]


@pytest.mark.slow
def test_fgsm_on_pixels_equals_a_step_by_hand_for_each_question(task: VisionLanguageTask, model: Any) -> None:
    from holdfast.train import attack_images

    numbers, asked, pixels = asked_with_pictures(task, 20)  # more than a batch
    wrong = {"clean": 0, "attacked": 0}
    for at, number in enumerate(numbers):
        clean = pixels[at : at + 1].clone().requires_grad_()
        naive_loss(task, model, number, clean).backward()
        assert clean.grad is not None and bool(clean.grad.abs().sum() > 0)
        step = (clean + 0.4 * clean.grad.sign()).clamp(0, 1).detach()
        answers = []
        for shown in (clean.detach(), step):
            ids = written_out(task, task.question_set.tests["test"].questions[number], number)
            naive = [log_likelihood(model, ids, 2 * shown - 1, option) for option in asked[at].options]
            answers.append(naive.index(max(naive)) != asked[at].right)
        wrong["clean"] += answers[0]
        wrong["attacked"] += any(answers)  # an attack leaves a picture as it is where it would only help
    found = attack_images(model, task, "fgsm", budget=0.4, examples=20)
    assert [row[2] for row in found["rows"]] == [pytest.approx(5 * count) for count in wrong.values()]
    assert wrong["clean"] < wrong["attacked"] and found["summary"]["accuracy"] == 1 - wrong["attacked"] / 20
    assert found["rows"][1][4] <= 0.4 and not found["flags"]


@pytest.mark.slow
def test_pgd_on_pixels_finds_more_at_larger_budgets_and_repeats_itself(task: VisionLanguageTask, model: Any) -> None:
    from holdfast.train import attack_images

    found, again = (attack_images(model, task, ["pgd"], budget=[0.02, 0.1], steps=4, examples=20) for _ in range(2))
    assert found == again
    errors = found["curves"]["PGD"]["figure"]
    assert errors == sorted(errors) and errors[0] < errors[-1] and found["curves"]["PGD"]["budgets"] == [0, 0.02, 0.1]
    assert found["rows"][-1][4] <= 0.1


def test_attacks_that_ask_some_questions_only_are_refused(task: VisionLanguageTask, model: Any) -> None:
    from holdfast.train import attack_images

    assert_refused("attack on pictures with questions: .*spsa", attack_images, model, task, "spsa", budget=0.1)
    assert_refused("attack at least 1 example", attack_images, model, task, "pgd", budget=0.1, examples=0)
    assert_refused("use fgsm, pgd or routes", attack_images, model, task, "corruptions", budget=3)
    assert_refused("fgsm has no option restarts", attack_images, model, task, "fgsm", budget=0.1, restarts=2)


def test_the_explorer_shows_patches_beside_words_and_what_a_corruption_changes(task: VisionLanguageTask, model: Any) -> None:
    from holdfast.attacks import corrupt

    view = task.view(model)
    numbers, _, pixels = asked_with_pictures(task, 4)
    test, shown, start = task.question_set.tests["test"], view.routes.perturbed["corruption"], 0
    seen = [2 * one - 1 for one in (pixels, corrupt(pixels, VIEWED, severity=3).images)]
    for at, (number, example) in enumerate(zip(numbers, view.examples, strict=True)):
        ids = written_out(task, test.questions[number], number)
        is_patch = [one == len(task.tokenizer) for one in ids]
        assert [one == "▦" for one in example.pieces] == is_patch and sum(is_patch) == task.encoder.patches
        clean, after = (routes_alone(model, ids, one[at : at + 1]) for one in seen)
        for layer in range(3):
            places = [place for place in range(len(ids)) if layer == 2 or is_patch[place]]  # the tower routes patches only
            flips = dict(zip(shown.layers[layer].tokens, shown.layers[layer].experts, strict=True))
            for place, old, new in zip(places, clean[layer], after[layer], strict=True):
                assert set(view.routes.layers[layer].experts[start + place]) == old
                assert set(flips.get(start + place, old)) == new
        start += len(ids)
    assert any(layer.tokens for layer in shown.layers)

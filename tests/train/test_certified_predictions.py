"""Certified predictions of trained models: examples of each task, what is stored, and runs that are stopped."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import Interrupted
from torch import Tensor, nn
from train.test_label_task import tiny as tiny_labels
from wording import assert_refused

from holdfast.certificates import Smoothing, certify_predictions
from holdfast.hub import trace
from holdfast.routing import create_router
from holdfast.train import Comparison, Recipe, make_task, parse_routers
from holdfast.train.building import build_model
from holdfast.train.certified_predictions import certify_example, certify_models, models_at
from holdfast.train.image_task import ImageTask
from holdfast.train.label_task import LabelTask, embedding_size
from holdfast.train.prediction_report import NamedModel, PredictionReport, PredictionSettings
from holdfast.train.recipe import change_recipe
from holdfast.train.run_folder import write_with_checksum
from holdfast.train.saved_model import load_model
from holdfast.train.task import NoisyExample

SETTINGS = PredictionSettings(
    sigma=0.5, samples=300, selection=20, alpha=0.01, examples=5, radii=[0.2, 0.9], steps=3, draws=4
)


def line(inputs: Tensor) -> Tensor:
    """Class 1 where the first number is positive: the distance to the boundary is that number."""
    return torch.stack([-inputs[:, 0], inputs[:, 0]], dim=1)


def example_at(place: float, label: int = 1, number: int = 3) -> NoisyExample:
    return NoisyExample(number, label, torch.tensor([place, 0.0]), line, batch=64)


def test_an_example_is_certified_and_attacked_at_each_radius_and_at_its_own() -> None:
    found = certify_example(example_at(0.7), SETTINGS)
    alone = certify_predictions(line, torch.tensor([[0.7, 0.0]]), Smoothing(0.5, 300, 20, 0.01, first=3))
    assert (found.hits, found.radius) == (int(alone.hits), float(alone.radius)) and 0.4 < found.radius < 0.75
    assert [vote.radius for vote in found.attacked] == [0.2, 0.9, found.radius]
    assert [vote.stays for vote in found.attacked] == [True, False, True]
    assert found.certified(0.2) and not found.certified(0.9) and found.survives(0.3) and not found.survives(0.9)
    assert not found.is_violated(SETTINGS)
    too_much = replace(found, radius=1.0)  # a certificate that is wrong: the vote at 0.9 refutes it
    assert too_much.is_violated(SETTINGS)


def test_a_wrong_example_is_attacked_only_if_it_is_certified_and_never_counts_as_right() -> None:
    certified, abstaining = (
        certify_example(example_at(0.7, label=0), SETTINGS),
        certify_example(example_at(0.05, label=1), SETTINGS),
    )
    assert certified.attacked and not certified.survives(0.0) and not certified.certified(0.0)
    assert (abstaining.chosen, abstaining.radius, abstaining.attacked) == (0, 0.0, [])
    unattacked = certify_example(example_at(0.7), replace(SETTINGS, steps=0, radii=[]))
    assert unattacked.attacked == []


class Model(nn.Module):
    """Stands for a loaded model; `part` may be a router."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part = part


class FakeTask:
    noise_unit = "numbers"

    def __init__(self, places: Sequence[float], stop: int | None = None, data: str = "toy") -> None:
        self.places, self.stop, self.data, self.made = places, stop, data, list[int]()

    def describe(self) -> dict[str, Any]:
        return {"data": {"name": self.data, "shape": (2,)}}  # JSON has no tuples

    def noisy_examples(self, model: Any, count: int) -> tuple[list[int], Callable[[int], NoisyExample]]:
        def example(number: int) -> NoisyExample:
            if number == self.stop:
                raise Interrupted
            self.made.append(number)
            return example_at(self.places[number], number=number)

        return list(range(min(count, len(self.places)))), example


def folder_of_weights(place: Path, content: bytes = b"weights") -> NamedModel:
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.safetensors").write_bytes(content)
    return NamedModel(str(place), place.name, 0)


def certify(
    models: list[NamedModel], out: Path, task: Any, settings: PredictionSettings = SETTINGS, part: Any = None
) -> PredictionReport:
    return certify_models(models, settings, out, lambda path: (Model(part), task), lambda *told: None)


PLACES = [0.7, 0.3, -0.4, 0.9, 0.05, 2.0]


def test_a_stopped_run_goes_on_to_the_same_numbers_and_a_finished_one_loads_nothing(tmp_path: Path) -> None:
    model = folder_of_weights(tmp_path / "smoe")
    whole = certify([model], tmp_path / "whole", FakeTask(PLACES))
    assert [one.number for one in whole.models[0].examples] == [0, 1, 2, 3, 4]
    with pytest.raises(Interrupted):
        certify([model], tmp_path / "parts", FakeTask(PLACES, stop=3))
    lines = tmp_path / "parts" / "cells" / "smoe.jsonl"
    assert len(lines.read_text().splitlines()) == 4 and not (tmp_path / "parts" / "predictions.json").exists()
    with lines.open("a") as file:
        file.write('{"number": 3, "lab')  # as a process that is killed while it writes
    task = FakeTask(PLACES)
    again = certify([model], tmp_path / "parts", task)
    assert task.made == [3, 4] and again == whole
    assert lines.read_bytes() == (tmp_path / "whole" / "cells" / "smoe.jsonl").read_bytes()
    assert (tmp_path / "parts" / "predictions.json").read_text() == (tmp_path / "whole" / "predictions.json").read_text()

    def fail(path: str) -> Any:
        raise AssertionError("a finished model is loaded")

    assert certify_models([model], SETTINGS, tmp_path / "parts", fail, lambda *told: None) == whole
    assert PredictionReport.load(tmp_path / "parts") == whole


def test_all_models_get_the_same_noise_and_a_further_one_can_be_added(tmp_path: Path) -> None:
    models = [folder_of_weights(tmp_path / name) for name in ("smoe", "smooth")]
    first = certify(models[:1], tmp_path / "out", FakeTask(PLACES))
    both = certify(models, tmp_path / "out", FakeTask(PLACES))
    assert both.models[0] == first.models[0] and both.labels == ["smoe", "smooth"]
    assert both.models[1].examples == both.models[0].examples


def test_accuracies_and_violations_are_those_of_a_loop(tmp_path: Path) -> None:
    report = certify([folder_of_weights(tmp_path / "smoe")], tmp_path / "out", FakeTask(PLACES))
    examples = report.models[0].examples
    for radius in (0.0, 0.2, 0.5, 0.9):
        right = sum(one.chosen == one.label and one.radius > radius for one in examples)
        assert report.accuracy("smoe", radius).mean == pytest.approx(100 * right / 5)
    survive = 0
    for one in examples:
        stays = one.chosen == one.label
        for vote in one.attacked:
            stays = stays and (vote.radius > 0.9 or vote.stays)
        survive += stays
    assert report.accuracy("smoe", 0.9, attacked=True).mean == pytest.approx(100 * survive / 5) and 0 < survive < 4
    found = report.violations()
    assert (found.count, found.certified) == (0, sum(one.radius > 0 for one in examples))
    assert found.expected == pytest.approx(0.02 * found.certified)


def test_what_does_not_belong_to_a_run_is_refused(tmp_path: Path) -> None:
    model, out = folder_of_weights(tmp_path / "smoe"), tmp_path / "out"
    certify([model], out, FakeTask(PLACES))
    assert_refused("another settings", certify, [model], out, FakeTask(PLACES), replace(SETTINGS, sigma=0.6))
    other = folder_of_weights(tmp_path / "other")
    assert_refused("other test data", certify, [model, other], out, FakeTask(PLACES, data="more"))
    folder_of_weights(tmp_path / "smoe", b"trained again")
    assert_refused("is of another model", certify, [model], out, FakeTask(PLACES))
    folder_of_weights(tmp_path / "smoe")
    (tmp_path / "smoe" / "config.json").write_text('{"k": 1}')  # the same weights, with fewer experts
    assert_refused("is of another model", certify, [model], out, FakeTask(PLACES))
    (out / "cells" / "smoe.jsonl").write_text('{"weights": 1}\n')
    assert_refused("is damaged", certify, [model], out, FakeTask(PLACES))


def test_a_stopped_run_does_not_go_on_with_other_test_data(tmp_path: Path) -> None:
    model, out = folder_of_weights(tmp_path / "smoe"), tmp_path / "out"
    with pytest.raises(Interrupted):
        certify([model], out, FakeTask(PLACES, stop=3))
    before = (out / "cells" / "smoe.jsonl").read_text()
    assert_refused("is of other test data", certify, [model], out, FakeTask(PLACES, data="more"))
    assert_refused("is of other test data", certify, [model], out, FakeTask(PLACES[:4]))
    assert (out / "cells" / "smoe.jsonl").read_text() == before


def test_a_router_that_reads_other_copies_is_refused_or_skipped_beside_others(tmp_path: Path) -> None:
    part = create_router("capacity", dim=4, experts=4, k=2).eval()
    assert not part.traits.batch_invariant
    capacity, smoe = folder_of_weights(tmp_path / "capacity"), folder_of_weights(tmp_path / "smoe")
    said = assert_refused(
        "routes the copies of a batch together", certify, [capacity], tmp_path / "a", FakeTask(PLACES), part=part
    )
    assert said.startswith("capacity") and not (tmp_path / "a").exists()

    def load(path: str) -> Any:
        return Model(part if "capacity" in path else None), FakeTask(PLACES)

    report = certify_models([capacity, smoe], SETTINGS, tmp_path / "b", load, lambda *told: None)
    assert report.labels == ["smoe"] and list(report.skipped) == [str(tmp_path / "capacity")]


def test_the_cells_of_a_comparison_come_in_the_order_of_its_results(tmp_path: Path) -> None:
    for router, seed in (("ac", 1), ("ac", 0), ("smoe", 0), ("smoe", 1)):
        result = {"router": router, "seed": seed, "settings": {"sparse.k": 2}}
        write_with_checksum(tmp_path / "cells" / f"{router}-sparse.k=2-seed{seed}" / "result.json", result)
    rows = [{"router": "smoe", "settings": {"sparse.k": 2}}, {"router": "ac", "settings": {"sparse.k": 2}}]
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows}))
    found = models_at(str(tmp_path))
    assert [(one.router, one.seed) for one in found] == [("smoe", 0), ("smoe", 1), ("ac", 0), ("ac", 1)]
    assert found[2].path == str(tmp_path / "cells" / "ac-sparse.k=2-seed0")
    assert found[0].settings == {"sparse.k": 2}
    (only,) = models_at(str(tmp_path / "cells" / "smoe-sparse.k=2-seed1"))
    assert (only.router, only.seed) == ("smoe", 1)
    (tmp_path / "empty" / "cells").mkdir(parents=True)
    assert_refused("no finished cell", models_at, str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"radii": [0.9, 0.2]}, "smallest first"),
        ({"radii": [0.2, 0.2]}, "each once"),
        ({"alpha": 0.001, "samples": 9}, "no prediction can be certified"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], says: str) -> None:
    assert_refused(says, PredictionSettings, **{**asdict(SETTINGS), **changes})


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reviews") / "reviews.csv"
    rows = [f"film {number} was {'fine' if number % 2 else 'poor'}{' indeed' * (number % 3)}" for number in range(60)]
    path.write_text("text,label\n" + "".join(f"{row},{number % 2}\n" for number, row in enumerate(rows)))
    return path


def text_model(reviews: Path, router: str) -> tuple[Any, LabelTask]:
    task = make_task(tiny_labels(reviews))
    assert isinstance(task, LabelTask)
    return build_model(task, router, {}, seed=0).eval(), task


@pytest.mark.parametrize("router", ["hash", "smooth", "similarity"])
def test_a_text_at_its_own_embeddings_has_the_logits_of_the_model(router: str, reviews: Path) -> None:
    model, task = text_model(reviews, router)
    numbers, example = task.noisy_examples(model, 4)
    assert len(numbers) == 4 and numbers == sorted(set(numbers))
    for number in numbers:
        one = example(number)
        text = task.encoded(task.text_set.texts("test")[number : number + 1]).batch([0])
        assert one.inputs.shape == (int(text["attention_mask"].sum()), 32) and one.label == int(task.labels("test")[number])
        with torch.no_grad(), trace(model) as before:
            expected = model(**text).logits
        with torch.no_grad(), trace(model) as after:
            found = one.classify(one.inputs.expand(3, -1, -1))
        torch.testing.assert_close(found, expected.expand(3, -1), atol=1e-5, rtol=1e-5)
        length = one.inputs.shape[0]
        assert all(torch.equal(a.experts[:length], b.experts) for a, b in zip(after, before, strict=True))


def test_noise_of_a_text_is_added_to_its_embeddings_in_units_of_their_size(reviews: Path) -> None:
    model, task = text_model(reviews, "smoe")
    weight = model.get_input_embeddings().weight.detach()
    scale = embedding_size(model)
    assert scale == pytest.approx(weight.double().square().mean().sqrt().item())
    (number, *_), example = task.noisy_examples(model, 2)
    one, noise = example(number), torch.randn(2, *example(number).inputs.shape)
    ids = task.encoded(task.text_set.texts("test")[number : number + 1]).batch([0])["input_ids"]
    with torch.no_grad():
        expected = model(inputs_embeds=weight[ids[0]] + scale * noise).logits
        found = one.classify(one.inputs + noise)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    point = one.inputs.unsqueeze(0).requires_grad_()
    (slope,) = torch.autograd.grad(one.classify(point)[0, 0], point)
    assert (slope != 0).any()


def test_numbers_to_predict_and_language_models_have_no_classes(tmp_path: Path, text: Path, tiny: Any) -> None:
    rows = "".join(f"film {number},{number / 7:.3f}\n" for number in range(60))
    (tmp_path / "scores.csv").write_text("text,label\n" + rows)
    scores = make_task(tiny_labels(tmp_path / "scores.csv"))
    assert_refused("numbers", scores.noisy_examples, build_model(scores, "smoe", {}, seed=0), 3)
    language = make_task(tiny())
    assert_refused("predicts tokens", language.noisy_examples, None, 3)


def test_a_model_that_cannot_be_certified_creates_no_folder(tmp_path: Path, text: Path, tiny: Any) -> None:
    models = [folder_of_weights(tmp_path / name) for name in ("smoe", "smooth")]
    certify(models[:1], tmp_path / "used", FakeTask(PLACES))
    before = sorted(tmp_path.rglob("*"))
    assert_refused("predicts tokens", certify, models, tmp_path / "out", make_task(tiny()))
    assert_refused("another settings", certify, models, tmp_path / "used", FakeTask(PLACES), replace(SETTINGS, sigma=0.6))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_new_run_loads_each_model_once(tmp_path: Path) -> None:
    models, loaded = [folder_of_weights(tmp_path / name) for name in ("smoe", "smooth")], list[str]()

    def load(path: str) -> Any:
        loaded.append(path)
        return Model(), FakeTask(PLACES)

    certify_models(models, SETTINGS, tmp_path / "out", load, lambda *told: None)
    assert loaded == [one.path for one in models]


def test_noise_of_an_image_is_added_before_the_normalisation_and_not_clipped(digits: Any) -> None:
    task = make_task(digits())
    assert isinstance(task, ImageTask)
    model = build_model(task, "smoe", {}, seed=0).eval()
    (number, *rest), example = task.noisy_examples(model, 3)
    assert len(rest) == 2
    one = example(number)
    assert one.inputs.min() >= 0 and one.inputs.max() <= 1 and one.label == int(task.image_set.images("test").labels[number])
    noise = 5 * torch.randn(4, *one.inputs.shape)
    with torch.no_grad():
        expected = model(pixel_values=task.scaling(one.inputs) + noise / 0.5).logits  # read from 0..1 to -1..1
        torch.testing.assert_close(one.classify(one.inputs + noise), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["labels", "images"])
def test_the_column_of_a_comparison_is_what_certify_finds_in_its_models(
    kind: str, reviews: Path, digits: Any, tmp_path: Path
) -> None:
    few = {"attack.certify": 0.3, "attack.certify_samples": 50, "attack.certify_examples": 12, "training.steps": 2}
    recipe: Recipe = change_recipe(tiny_labels(reviews), few) if kind == "labels" else digits({**few, "attack.steps": 1})
    comparison = Comparison(recipe, parse_routers("smoe,smooth"), 1, tmp_path / "run")
    results = comparison.run()
    settings = PredictionSettings(sigma=0.3, samples=50, examples=12, steps=0)

    def load(path: str) -> tuple[Any, Any]:
        return load_model(path).eval(), comparison.task

    report = certify_models(models_at(str(tmp_path / "run")), settings, tmp_path / "out", load, lambda *told: None)
    for result, model in zip(results, report.models, strict=True):
        score = result["trials"]["certified within 0.3"]
        right, count = sum(one.certified(0.3) for one in model.examples), len(model.examples)
        assert score["figure"] == 100 * (1 - right / count) and score["examples"] == count and 0 <= score["clean"] <= 100
    rows = comparison.finish(results).rows
    assert rows[1].scores["certified within 0.3"].difference is not None


def test_what_cannot_be_certified_is_refused_before_the_training(
    reviews: Path, digits: Any, tiny: Any, tmp_path: Path
) -> None:
    wanted = {"attack.certify": 0.3}

    def run(recipe: Recipe, router: str) -> None:
        Comparison(recipe, parse_routers(router), 1, tmp_path / "run").run()

    assert_refused("attack.certify is for classifiers", tiny, wanted)
    assert_refused("routes the copies of a batch together", run, digits(wanted), "smoe,capacity")
    scored = change_recipe(tiny_labels(reviews), {**wanted, "data.metric": "macro_f1"})
    assert_refused("the measure of this task is", run, scored, "smoe")
    assert_refused("certify_samples", digits, {**wanted, "attack.certify_samples": 9})
    assert not (tmp_path / "run").exists()


def test_the_stored_lines_are_the_examples(tmp_path: Path) -> None:
    report = certify([folder_of_weights(tmp_path / "smoe")], tmp_path / "out", FakeTask(PLACES))
    head, *lines = map(json.loads, (tmp_path / "out" / "cells" / "smoe.jsonl").read_text().splitlines())
    assert head["examples"] == 5 and head["data"] == {"name": "toy", "shape": [2]}
    assert lines == [asdict(one) for one in report.models[0].examples]

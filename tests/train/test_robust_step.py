"""Robust training: a step on perturbed views has the gradients of a naive loop, and only its clean view teaches routers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import Interrupted, stop_at
from tiers import quick_or_slow
from torch import Tensor, nn
from train.conftest import MakeRecipe
from without_times import as_text
from wording import assert_refused

import holdfast
from holdfast.routing import Routing
from holdfast.train import Comparison, Recipe, Task, build_model, load_recipe, make_task, parse_routers
from holdfast.train.cells import settings_of
from holdfast.train.ledger import read_ledger
from holdfast.train.recipe import RobustPart
from holdfast.train.robust_step import RobustLosses, leaving_weight
from holdfast.train.step import TrainingStep, adamw
from holdfast.train.task import Inputs

BUDGET = 0.1


def step_of(model: Any, task: Task, part: RobustPart | None) -> TrainingStep:
    training = task.recipe.training
    robust = None if part is None else RobustLosses(model, part, task.scaling)
    return TrainingStep(model, adamw(model, training), training, task.steps, robust)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def model_and_batch(recipe: Recipe, router: str) -> tuple[Any, Task, Inputs]:
    task = make_task(recipe)
    model = build_model(task, router, {}, seed=0).train()
    model.config.use_cache = False
    with torch.no_grad():  # larger than at the start, so that inputs matter
        for parameter in model.parameters():
            parameter.mul_(2)
    return model, task, task.examples(0).__getitems__(range(4))


def task_loss(model: Any, batch: Inputs, delta: Tensor | None = None) -> tuple[Tensor, Any]:
    """Return the loss without that of the routers, with `delta` added to pixels or embeddings, and the routers' loss."""
    inputs = dict(batch)
    if delta is not None and "pixel_values" in batch:
        inputs["pixel_values"] = ((batch["pixel_values"] * 0.5 + 0.5 + delta) - 0.5) / 0.5
    elif delta is not None:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")) + delta
    outputs = model(**inputs)
    return outputs.loss - outputs.router_loss, outputs.router_loss


def naive_delta(model: Any, batch: Inputs, part: RobustPart) -> Tensor:
    """Return what PGD finds, one token at a time, with a new copy of the model at each step: a forward teaches."""
    assert part.budget is not None
    is_images = "pixel_values" in batch
    values = batch["pixel_values"] * 0.5 + 0.5 if is_images else model.get_input_embeddings()(batch["input_ids"]).detach()
    if is_images:
        delta = (2 * torch.rand_like(values) - 1) * part.budget
        delta = (values + delta).clamp(0, 1) - values
    else:
        way = torch.randn_like(values.flatten(0, 1))
        share = torch.rand_like(way[:, :1]) ** (1 / way.shape[1])
        lengths = values.flatten(0, 1).norm(dim=1, keepdim=True)
        delta = (way / way.norm(dim=1, keepdim=True) * share * part.budget * lengths).view_as(values)
    for _ in range(part.inner_steps):
        point = delta.clone().requires_grad_()
        (slope,) = torch.autograd.grad(task_loss(copy.deepcopy(model), batch, point)[0], point)
        if is_images:
            size = part.relative_step * part.budget
            delta = (delta + size * slope.sign()).clamp(-part.budget, part.budget)
            delta = (values + delta).clamp(0, 1) - values
            continue
        moved = []
        for row, way, value in zip(delta.flatten(0, 1), slope.flatten(0, 1), values.flatten(0, 1), strict=True):
            radius = part.budget * value.norm()
            row = row + part.relative_step * radius * way / way.norm().clamp_min(1e-30)
            moved.append(row * min(1.0, float(radius / row.norm())))
        delta = torch.stack(moved).view_as(values)
    return delta


@pytest.mark.parametrize("method", quick_or_slow(["pgd", "fast"], ["pgd"]))
@pytest.mark.parametrize("kind", ["images", "text"])
@pytest.mark.parametrize("router", ["symphony+smooth", "smoe"])
def test_a_step_has_the_gradients_of_a_naive_loop(
    method: Any, kind: str, router: str, tiny: MakeRecipe, digits: MakeRecipe
) -> None:
    model, task, batch = model_and_batch(digits() if kind == "images" else tiny(), router)
    batch.pop("shift_labels", None)  # the naive forward counts no labels
    part = RobustPart(method=method, budget=BUDGET, mix=0.3)
    plain, searched, viewed = (copy.deepcopy(model) for _ in range(3))
    step = step_of(model, task, part)
    step.counts_labels = False
    torch.manual_seed(0)
    found = step.add_gradients([batch], model)

    task_part, of_routers = task_loss(plain, batch)
    ((1 - part.mix) * task_part + of_routers).backward()
    torch.manual_seed(0)
    delta = naive_delta(searched, batch, part)
    perturbed, _ = task_loss(viewed, batch, delta)
    (part.mix * perturbed).backward()
    torch.testing.assert_close(found, (1 - part.mix) * task_part + of_routers + part.mix * perturbed, rtol=1e-4, atol=1e-5)
    assert perturbed > task_part
    first, second = gradients_of(plain), gradients_of(viewed)
    for name, gradient in gradients_of(model).items():
        expected = first[name] + second.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()) + 1e-7)


PARTS: dict[str, dict[str, Any]] = {
    "pgd": {"method": "pgd", "steps": 2, "routing": 1.0, "consistency": 0.5},
    "balance": {"method": "fast", "routing": 0.5, "routing_term": "balance"},
    "free": {"method": "free"},
    "noise": {"method": "noise"},
}


ROUTERS = ("symphony+smooth", "ac", "remoe", "smoe[noise=gaussian]")
COMPARED = [(router, part) for router in ROUTERS for part in PARTS if "noise" not in router or part != "pgd"]  # refused


@pytest.mark.parametrize(("router", "part"), COMPARED)
def test_only_the_clean_view_teaches_routers_and_has_their_losses(router: str, part: str, digits: MakeRecipe) -> None:
    (choice,) = parse_routers(router)
    task = make_task(digits({"losses.z": 0.01}))
    models = [build_model(task, choice.router, choice.options, seed=0).train() for _ in range(2)]
    batch = task.examples(0).__getitems__(range(8))
    losses: tuple[list[Any], list[Any]] = [], []
    for model, own, robust in zip(models, losses, (RobustPart(**PARTS[part], budget=BUDGET), None), strict=True):
        model.register_forward_hook(lambda module, given, out, own=own: own.append(out.get("router_loss")))
        torch.manual_seed(0)
        for _ in range(2):
            step_of(model, task, robust).add_gradients([batch], model)
            torch.manual_seed(1)  # the views draw numbers too
    of_views = [loss for loss in losses[0] if loss is not None]
    assert len(losses[0]) > len(of_views) == len(losses[1]) == 2
    for found, expected in zip(of_views, losses[1], strict=True):
        assert torch.equal(found, expected)
    for (name, found), expected in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        assert torch.equal(found, expected), name


def test_a_search_has_no_dropout_and_the_views_that_train_have_it(digits: MakeRecipe) -> None:
    model, task, batch = model_and_batch(digits({"model.config.hidden_dropout_prob": 0.5}), "smoe")
    modes: list[bool] = []
    dropout = next(module for module in model.modules() if isinstance(module, nn.Dropout) and module.p == 0.5)
    dropout.register_forward_hook(lambda module, given, out: modes.append(module.training))
    step_of(model, task, RobustPart(method="pgd", budget=BUDGET, steps=3)).add_gradients([batch], model)
    assert modes == [True, False, False, False, True]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", ["images", "text"])
def test_perturbations_are_within_the_budget(kind: str, tiny: MakeRecipe, digits: MakeRecipe) -> None:
    model, task, batch = model_and_batch(digits() if kind == "images" else tiny(), "smoe")
    seen: list[Tensor] = []
    if kind == "images":
        model.register_forward_pre_hook(
            lambda module, given, options: seen.append(options["pixel_values"]), with_kwargs=True
        )
    else:  # what follows the embeddings reads them with the perturbation
        model.model.layers[0].register_forward_pre_hook(
            lambda module, given, options: seen.append(given[0]), with_kwargs=True
        )
    for method in ("pgd", "free", "free"):
        step = step_of(model, task, RobustPart(method=method, budget=BUDGET, steps=4))
        for _ in range(3):
            step.add_gradients([batch], model)
    clean, changed = seen[0], [each for each in seen if not torch.equal(each, seen[0])]
    assert len(changed) == 3 * 5 + 2 * 2  # the first delta of "free" is 0
    for each in changed:
        if kind == "images":
            pixels = each * 0.5 + 0.5
            assert float((pixels - (clean * 0.5 + 0.5)).abs().max()) <= BUDGET * (1 + 1e-5)
            assert float(pixels.min()) >= -1e-6 and float(pixels.max()) <= 1 + 1e-6
        else:
            assert float(((each - clean).norm(dim=-1) / clean.norm(dim=-1)).max()) <= BUDGET * (1 + 1e-5)


def test_a_step_of_noise_alone_is_a_plain_step_on_the_noisy_batch(digits: MakeRecipe) -> None:
    models = []
    for part in (RobustPart(method="noise", budget=0.25, mix=1.0), None):
        model, task, batch = model_and_batch(digits({"losses.z": 0.01}), "symphony+smooth")
        torch.manual_seed(0)
        if part is None:
            noise = 0.25 * torch.randn_like(batch["pixel_values"])
            batch = batch | {"pixel_values": batch["pixel_values"] + noise / 0.5}
        step_of(model, task, part).add_gradients([batch], model)
        models.append(model)
    gradients = [gradients_of(model) for model in models]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-7, msg=name)
    for (name, found), expected in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)
    assert any(float(buffer.float().abs().sum()) > 0 for name, buffer in models[0].named_buffers() if "select" in name)


def test_noise_has_the_budget_as_its_standard_deviation_and_is_not_clipped(tiny: MakeRecipe, digits: MakeRecipe) -> None:
    part = RobustPart(method="noise", budget=0.25)
    model, task, batch = model_and_batch(digits(), "smoe")
    noise = RobustLosses(model, part, task.scaling)._noise(batch)
    assert float(noise.std()) == pytest.approx(0.25, rel=0.1)
    assert float((batch["pixel_values"] * 0.5 + 0.5 + noise).min()) < 0
    model, task, batch = model_and_batch(tiny(), "smoe")
    noise = RobustLosses(model, part, None)._noise(batch)
    lengths = noise.norm(dim=-1) / model.get_input_embeddings()(batch["input_ids"]).norm(dim=-1)
    assert float(lengths.mean()) == pytest.approx(0.25, rel=0.1)


def test_the_leaving_weight_is_the_share_of_the_gates_outside_the_clean_set() -> None:
    gates = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.1]])
    clean = Routing(gates, gates, torch.tensor([[0, 1], [1, 3]]), torch.ones(2, 2))  # 3 marks an unused slot
    other = Routing(gates, gates.flip(1), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))
    assert float(leaving_weight(clean, other)) == pytest.approx((0.5 + 0.5) / 2)
    assert float(leaving_weight(clean, other, torch.tensor([[True, False]]))) == pytest.approx(0.5)


@pytest.mark.parametrize("method", ["words", "typos"])
def test_attacked_texts_are_inputs_beside_the_clean_ones(method: str, tiny: MakeRecipe) -> None:
    changes = {"robust.method": method, "robust.budget": 0.3}
    plain, task = make_task(tiny()), make_task(tiny(changes))
    clean, batch = (one.examples(0).__getitems__(range(16)) for one in (plain, task))
    attacked = batch.pop("attacked_input_ids")
    assert batch.keys() == clean.keys() and all(torch.equal(batch[name], clean[name]) for name in clean)
    share = float((attacked != batch["input_ids"]).double().mean())
    assert 0.02 < share < 0.3
    assert plain.examples(0).hash(0) == task.examples(0).hash(0)


@pytest.mark.parametrize("method", ["words", "typos"])
def test_attacked_labelled_texts_are_padded_as_the_clean_ones(method: str) -> None:
    recipe = load_recipe("labels-tiny", {"training.steps": 2, "training.batch": 4, "model.config.hidden_size": 32})
    task = make_task(recipe)
    task = task.with_recipe(parse_routers(f"smoe{{method={method},budget=0.5}}")[0].recipe(recipe))
    batch = task.examples(0).__getitems__(range(8))
    assert {name: value.shape for name, value in batch.items() if name.startswith("attacked_")} == {
        f"attacked_{name}": batch[name].shape for name in batch if not name.startswith("attacked_") and name != "labels"
    }
    model = build_model(task, "smoe", {}, seed=0).train()
    assert step_of(model, task, task.recipe.robust).add_gradients([batch], model).isfinite()


def test_consistency_pulls_the_gates_of_both_views_together(tiny: MakeRecipe) -> None:
    values = {}
    for weight in (0.0, 5.0):
        (choice,) = parse_routers(f"smoe{{method=words,budget=0.5,consistency={weight}}}")
        task = make_task(choice.recipe(tiny({"training.learning_rate": 0.01})))
        model = build_model(task, "smoe", {}, seed=0).train()
        model.config.use_cache = False
        step = step_of(model, task, task.recipe.robust)
        for start in range(0, 80, 4):
            step([task.examples(0).__getitems__(range(start % 40, start % 40 + 4))])
        batch = task.examples(0).__getitems__(range(16))
        gates = []
        for name in ("input_ids", "attacked_input_ids"):
            with torch.no_grad(), holdfast.trace(model.eval()) as routes:
                model(input_ids=batch[name])
            gates.append(torch.stack([routing.gates for routing in routes]))
        values[weight] = float((gates[0] - gates[1]).abs().mean())
    assert values[5.0] < 0.9 * values[0.0]


def test_free_training_uses_each_batch_several_times_in_a_row_and_resumes_to_the_same_numbers(
    tiny: MakeRecipe, tmp_path: Path
) -> None:
    routers = parse_routers("smooth{method=free,budget=0.05,steps=3}")
    recipe = tiny({"model.config.attention_dropout": 0.2})
    whole = as_text(Comparison(recipe, routers, 1, tmp_path / "whole").run())
    with pytest.raises(Interrupted):
        Comparison(recipe, routers, 1, tmp_path / "again").run(stop_at(10))
    assert as_text(Comparison(recipe, routers, 1, tmp_path / "again").run()) == whole


def test_router_choices_with_the_same_router_and_other_training_are_apart(tiny: MakeRecipe, tmp_path: Path) -> None:
    names = ["smoe", "smoe{method=pgd,budget=0.01,steps=1}", "smoe{method=pgd,budget=0.02,steps=1}", "smoe{losses.z=0.1}"]
    recipe = tiny({"training.steps": 4, "training.snapshots": 1})
    comparison = Comparison(recipe, parse_routers(",".join(names)), 1, tmp_path / "run")
    cells = comparison.run()
    results = comparison.finish(cells)
    assert [row.router for row in results.rows] == names
    assert len({cell.folder for cell in comparison.cells}) == len({row.clean for row in results.rows}) == 4
    assert len({cell["first_batch"] for cell in cells}) == 1
    finished: list[int] = []
    again = Comparison(recipe, parse_routers(",".join(names)), 1, tmp_path / "run")
    assert as_text(again.run(lambda cell, done: finished.append(done))) == as_text(cells)
    assert finished == [4, 4, 4, 4]  # nothing is trained again


@pytest.mark.slow
def test_compare_writes_pages_and_ledgers_of_robust_router_choices(tmp_path: Path, tiny: MakeRecipe, text: Path) -> None:
    routers = "smoe,smoe{method=pgd,budget=0.01,steps=1},smooth,smooth{method=pgd,budget=0.01,steps=1}"
    small = {"training.steps": 4, "training.batch": 4, "data.length": 16, "attack.rate": 0.2, "training.snapshots": 1}
    for out, start in (("first", None), ("second", tmp_path / "first")):
        found = holdfast.compare(
            routers,
            start=start,
            seeds=1,
            out=tmp_path / out,
            changes={"data.source": str(text), **small},
            match_compute=False,
            ledger=tmp_path / "ledger",
        )
        assert [row.router for row in found.rows] == [one.name for one in parse_routers(routers)]
        page = (tmp_path / out / "report.html").read_text(encoding="utf-8")
        assert all(row.router in page for row in found.rows)
    assert sorted(len(experiment.cells) for experiment in read_ledger(tmp_path / "ledger")) == [4, 4]


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("smoe{method=pgd}", "robust.budget is missing"),
        ("smoe{budget=0.1}", "robust.budget has no effect with robust.method none"),
        ("smoe{method=fast,budget=0.1,steps=3}", "robust.steps has no effect with robust.method fast"),
        ("smoe{method=words,budget=2}", "a share of words, at most 1"),
        ("smoe{method=pdg,budget=0.1}", "robust.method is 'pdg'"),
    ],
)
def test_wrong_settings_of_robust_training_are_refused_before_training(
    written: str, says: str, tiny: MakeRecipe, tmp_path: Path
) -> None:
    assert_refused(says, Comparison(tiny(), parse_routers(f"smoe,{written}"), 1, tmp_path / "run").run)
    assert not (tmp_path / "run").exists()


def test_robust_training_is_refused_where_it_cannot_run(
    digits: MakeRecipe, tiny: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"robust.method": "words", "robust.budget": 0.1}
    assert_refused("which is for texts", digits, words)
    assert_refused("training.compile compiles a step without", tiny, {**words, "training.compile": True})
    task = make_task(tiny({**words, "data.tokens": "bytes"}))
    assert_refused("changes the number of tokens", task.examples, 0)
    swept = settings_of(tiny(words), {"robust.budget": [0.1, 0.2]})
    choices = parse_routers("smoe,smoe{method=words,budget=0.3}")
    assert_refused("which is swept too", Comparison, tiny(words), choices, 1, tmp_path, settings=swept)
    task = make_task(tiny(words))
    model = build_model(task, "smoe", {}, seed=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_refused("runs on one rank", holdfast.train.train, model, task, tmp_path, seed=0, k=2)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["smoe", "smooth"])
def test_pgd_training_raises_the_accuracy_under_the_same_pgd(router: str, digits: MakeRecipe, tmp_path: Path) -> None:
    recipe = digits(
        {"training.steps": 150, "training.snapshots": 1, "attack.budget": BUDGET, "attack.steps": 10, "attack.examples": 90}
    )
    choices = parse_routers(f"{router},{router}{{method=pgd,budget={BUDGET},steps=3}}")
    plain, robust = Comparison(recipe, choices, 1, tmp_path / "run").run()
    assert robust["attacked"]["figure"] < plain["attacked"]["figure"] - 8  # error in percent
    assert robust["clean"]["figure"] < 50


@pytest.mark.parametrize("terms", [{"consistency": 0.1}, {"routing": 1.0}])
def test_the_second_view_of_another_loss_is_not_the_clean_view(terms: dict[str, Any], tiny: MakeRecipe) -> None:
    changes = {"losses.consistency": 0.1, "losses.word_noise": 0.1}
    model, task, batch = model_and_batch(tiny(changes), "smoe")
    part = RobustPart(method="pgd", steps=1, budget=BUDGET, **terms)
    assert step_of(model, task, part).add_gradients([batch], model).isfinite()


def test_noise_of_routers_is_refused_where_gates_are_compared(tiny: MakeRecipe, tmp_path: Path) -> None:
    written = "smoe[noise=gaussian]{method=pgd,budget=0.1},smoe[noise=gaussian]{method=pgd,budget=0.1,consistency=1}"
    comparison = Comparison(tiny(), parse_routers(written), 1, tmp_path / "run")
    assert_refused("consistency=1}' cannot be trained with this recipe: the gates of two views", comparison.run)


def test_the_losses_of_a_router_choice_are_checked_before_training(tiny: MakeRecipe, tmp_path: Path) -> None:
    written = "hash{losses.margin=0.1,losses.radius=0.02}"
    comparison = Comparison(tiny(), parse_routers(written), 1, tmp_path / "run")
    assert_refused("cannot be trained with this recipe: the margin loss", comparison.run)


def test_experts_with_scaled_gradients_have_them_in_the_perturbed_view_too(tiny: MakeRecipe) -> None:
    found = []
    for router in ("smoe", "smoe[gradient_scaling=10]"):
        model, task, batch = model_and_batch(tiny({"losses.balance": 0}), router)
        part = RobustPart(method="fast", budget=1e-6, mix=1.0)
        step_of(model, task, part).add_gradients([batch], model)
        found.append({name: value for name, value in gradients_of(model).items() if "experts" in name})
    assert all(not torch.allclose(found[0][name], found[1][name]) for name in found[0])

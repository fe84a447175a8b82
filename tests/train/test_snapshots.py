"""Snapshots: taking them does not change training, and they equal a naive recording."""

import copy
import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train.conftest import MakeRecipe
from wording import assert_refused

from holdfast.checked import from_mapping
from holdfast.hub import trace
from holdfast.layers import Experts
from holdfast.metrics import gradient_interference, graph_sparsity
from holdfast.routing import ExpertGraph, Router
from holdfast.train import Task, build_model, make_task
from holdfast.train.recipe import change_recipe
from holdfast.train.results import LayerState
from holdfast.train.snapshots import consistency, evolution, interference, learns_a_graph, routings_of, take_snapshot
from holdfast.train.task import require_trainable
from holdfast.train.training import train

Seen = dict[str, tuple[Task, list[Any], Path]]  # of each router: its task, models at each snapshot, the folder of these
STEPS = [2, 4, 6, 8, 10]  # five snapshots of ten steps


def contents(model: Any) -> dict[str, Tensor]:
    """Return parameters and buffers, without statistics that were already committed."""
    named = {**dict(model.eval().named_parameters()), **dict(model.named_buffers())}
    return {name: value.detach().clone() for name, value in named.items() if "staged_" not in name}


ALL_STATE = "ac+symphony+attention+smooth"


@pytest.mark.parametrize(
    ("router", "trainer"), [*((name, False) for name in ("smoe", "symphony", "ac", "smooth", ALL_STATE)), (ALL_STATE, True)]
)
def test_taking_snapshots_does_not_change_training(
    router: str, trainer: bool, tiny: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout is on: a snapshot must not draw random numbers in between."""
    changes = {"model.config.attention_dropout": 0.3, "training.steps": 6, "training.interference": True}
    task = make_task(tiny({**changes, "training.snapshots": [0, 1, 2, 4, 6]}))
    watched, unwatched = (build_model(task, router, {}, seed=0) for _ in range(2))
    log = train(watched, task, tmp_path / "watched", seed=0, k=2, trainer=trainer)
    monkeypatch.setattr("holdfast.train.trainer_loop.take_snapshot", lambda *_: None)
    monkeypatch.setattr("holdfast.train.loop.take_snapshot", lambda *_: None)
    assert train(unwatched, task, tmp_path / "unwatched", seed=0, k=2, trainer=trainer) == log
    assert len(list((tmp_path / "watched" / "snapshots").iterdir())) == 5
    assert not (tmp_path / "unwatched" / "snapshots").exists()
    mine, theirs = contents(watched), contents(unwatched)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.fixture(scope="module")
def seen(tiny: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Return for each router its task, the model at each snapshot, and the folder of the snapshots."""
    found = {}
    for router in ("smoe", "symphony", "smooth"):
        folder = tmp_path_factory.mktemp(router)
        task = make_task(tiny({"training.steps": 10, "training.learning_rate": 0.01, "training.warmup": 0}))
        models: list[Any] = []

        def note(model: Any, *given: Any, models: list[Any] = models) -> None:
            models.append(copy.deepcopy(model).eval())
            take_snapshot(model, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("holdfast.train.loop.take_snapshot", note)
            models.append(train(build_model(task, router, {}, seed=0), task, folder, seed=0, k=2) and None)
        found[router] = (task, [model for model in models if model is not None], folder / "snapshots")
    return found


def real_experts(model: Any, task: Task) -> list[list[list[int]]]:
    """Return for each layer the experts of every real token, the one with the largest weight first."""
    probe = task.probe()
    real = probe["attention_mask"].flatten().tolist()
    assert 0 < sum(real) < len(real)  # the last block is padded
    with torch.no_grad(), trace(model) as routes:
        model(**probe, use_cache=False)
    count = int(routes[0].gates.shape[1])
    return [
        [
            [expert for expert in row if expert < count]
            for row, is_real in zip(routing.experts.tolist(), real, strict=True)
            if is_real
        ]
        for routing in routes
    ]


@pytest.mark.parametrize("router", ["smoe", "symphony", "smooth"])
def test_fluctuation_is_the_share_of_tokens_whose_set_changed(router: str, seen: Seen) -> None:
    task, models, folder = seen[router]
    assert len(models) == len(STEPS)
    found = evolution(folder, STEPS, ["first", "second"], learned=False)
    assert found["steps"] == STEPS and [layer["name"] for layer in found["layers"]] == ["first", "second"]
    taken = [real_experts(model, task) for model in models]
    for layer in (0, 1):
        naive = []
        for before, after in pairwise(taken):
            changed = [set(old[:2]) != set(new[:2]) for old, new in zip(before[layer], after[layer], strict=True)]
            naive.append(sum(changed) / len(changed))
        assert found["layers"][layer]["fluctuation"] == naive
        assert 0 < max(naive) <= 1


@pytest.mark.parametrize("router", ["smoe", "smooth"])
def test_without_a_learned_graph_the_graph_is_the_co_selection(router: str, seen: Seen) -> None:
    task, models, folder = seen[router]
    assert not learns_a_graph(models[-1])
    found = evolution(folder, STEPS, ["first", "second"], learned=learns_a_graph(models[-1]))
    assert found["graph"] == "co-selection"
    for place, model in enumerate(models):
        for layer, chosen in enumerate(real_experts(model, task)):
            counts = [[0] * 8 for _ in range(8)]
            for experts in chosen:
                for one in experts:
                    for other in experts:
                        counts[one][other] += 1
            shares = [[count / max(1, sum(row)) for count in row] for row in counts]
            assert torch.tensor(found["layers"][layer]["graphs"][place]) == pytest.approx(torch.tensor(shares), abs=6e-4)


def test_symphonys_graph_is_the_one_it_learned(seen: Seen) -> None:
    _, models, folder = seen["symphony"]
    assert learns_a_graph(models[-1])
    found = evolution(folder, STEPS, ["first", "second"], learned=True)
    assert found["graph"] == "learned"
    for place, model in enumerate(models):
        graphs = [module.graph for module in model.modules() if isinstance(module, ExpertGraph)]
        for layer, graph in enumerate(graphs):
            assert torch.tensor(found["layers"][layer]["graphs"][place]) == pytest.approx(graph, abs=6e-4)
    first, last = (found["layers"][0]["graphs"][place] for place in (0, -1))
    assert first != last and any(value > 0 for row in last for value in row)


@pytest.mark.parametrize("router", ["smoe", "symphony", "smooth"])
def test_the_state_of_a_snapshot_is_that_of_its_model(router: str, seen: Seen) -> None:
    task, models, folder = seen[router]
    layers = evolution(folder, STEPS, ["first", "second"], learned=False)["layers"]
    real = task.probe()["attention_mask"].flatten().bool()
    for place, model in enumerate(models):
        with torch.no_grad(), trace(model) as routes:
            model(**task.probe(), use_cache=False)
        for layer, (routing, chosen) in enumerate(zip(routes, real_experts(model, task), strict=True)):
            state = from_mapping(LayerState, layers[layer]["states"][place], skip_unknown=True)
            graph = torch.tensor(layers[layer]["graphs"][place])
            gates, logits = routing.gates[real], routing.logits[real]
            shares = (gates / gates.sum(-1, keepdim=True)).clamp_min(1e-30)
            assert state.entropy == pytest.approx(float(-(shares * shares.log()).sum(-1).mean()), rel=1e-4)
            assert state.experts_per_token.mean == pytest.approx(sum(map(len, chosen)) / len(chosen))
            loads = [100 * sum(expert in experts for experts in chosen) / len(chosen) for expert in range(8)]
            assert state.load.percent == pytest.approx(loads)
            entries = [float(graph[i, j]) for i in range(8) for j in range(8) if i != j]
            assert state.sparsity == pytest.approx(sum(entry == 0 for entry in entries) / len(entries), abs=0.1)
            levels = gates.log() if router == "symphony" else logits
            best = levels.sort(-1, descending=True).values
            for strip in state.near_ties.strips:
                gaps = (best[:, 1:2] - best[:, 2:]).double()
                assert strip.share == pytest.approx(float((gaps < strip.width).any(1).double().mean()), abs=0.01)
                assert strip.experts == pytest.approx(float((gaps < strip.width).sum(1).double().mean()), abs=0.05)
            assert state.interference is None and state.dropped is None
            widths = [module.snapshot().get("width") for module in model.modules() if isinstance(module, Router)]
            expected = widths[layer]
            assert (expected is not None) == (router == "smooth")
            assert state.width == (None if expected is None else pytest.approx(float(expected)))


def test_a_limit_of_tokens_shows_what_it_drops(tiny: MakeRecipe, tmp_path: Path) -> None:
    task = make_task(tiny())
    model = build_model(task, "capacity", {"factor": 0.5}, seed=0)
    take_snapshot(model, task.probe(), 2, 1, tmp_path)
    (state, _) = (layer["states"][0] for layer in evolution(tmp_path, [1], ["first", "second"], learned=False)["layers"])
    dropped = from_mapping(LayerState, state, skip_unknown=True).dropped
    assert dropped is not None and 0.5 <= dropped.share < 1


def cosine_of_pairs(model: Any, batch: Any) -> list[float]:
    """Return the mean cosine between the gradients of two experts, pair by pair, from an ordinary backward."""
    own = copy.deepcopy(model).eval()
    own(**batch)["loss"].backward()
    found = []
    for experts in (module for module in own.modules() if isinstance(module, Experts)):
        gradients = [parameter.grad for parameter in experts.parameters() if parameter.grad is not None]
        vectors = [
            torch.cat([gradient[expert].flatten() for gradient in gradients]).double() for expert in range(experts.experts)
        ]
        used = [vector for vector in vectors if vector.any()]
        pairs = [one @ other / (one.norm() * other.norm()) for one, other in combinations(used, 2)]
        found.append(float(sum(pairs) / len(pairs)))
    return found


@pytest.mark.parametrize("router", ["smooth", "symphony", "softmoe"])
def test_interference_is_the_mean_cosine_between_gradients_of_two_experts(router: str, tiny: MakeRecipe) -> None:
    task = make_task(tiny({"training.interference": True}))
    batch = task.interference_batch(seed=1)
    assert batch is not None and torch.equal(batch["input_ids"], task.examples(1).__getitems__(range(4))["input_ids"])
    options: dict[str, dict[str, Any]] = {"symphony": {"init": "identity"}, "softmoe": {"causal": False}}
    model = build_model(task, router, options.get(router, {}), seed=0).train()
    found = interference(model, batch)
    assert found == pytest.approx(cosine_of_pairs(model, batch), abs=1e-6)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert make_task(tiny()).interference_batch(seed=1) is None


def test_interference_counts_experts_with_a_gradient_only() -> None:
    first = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0], [0.0, 2.0]])
    second = torch.tensor([[0.0], [0.0], [0.0], [0.0]])
    assert gradient_interference([first, second]) == pytest.approx(-1 / 3)
    assert gradient_interference([first, torch.tensor([[1.0], [0.0], [1.0], [0.0]])]) == pytest.approx(0.0)
    assert gradient_interference([first[:2]]) is None and gradient_interference([]) is None


def test_the_sparsity_of_a_graph_is_the_share_of_missing_pairs() -> None:
    assert graph_sparsity(torch.eye(3)) == 1 and graph_sparsity(torch.ones(3, 3)) == 0 == graph_sparsity(torch.ones(1, 1))
    assert graph_sparsity(torch.tensor([[0.0, 0.5], [0.0, 0.5]])) == 0.5


def test_consistency_is_1_without_noise_and_falls_with_more_noise(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    for task, models, _ in seen.values():
        shares = {}
        for noise in (0.0, 0.05, 3.0):
            monkeypatch.setattr("holdfast.train.snapshots.NOISE", noise)
            shares[noise] = consistency(models[-1], task.probe(), 2)["layers"]
        assert shares[0.0] == [1.0, 1.0]
        assert all(0 <= loud < soft <= 1 for loud, soft in zip(shares[3.0], shares[0.05], strict=True))
        assert min(shares[3.0]) < 0.5
        again = consistency(models[-1], task.probe(), 2)
        assert again["layers"] == shares[3.0]  # the noise is the same every time
        counts, tokens = again["per_example"], int(task.probe()["attention_mask"].sum())
        assert len(counts["words"]) == len(task.probe()["input_ids"]) and sum(counts["words"]) == 2 * tokens  # in 2 layers
        assert sum(counts["losses"]) == pytest.approx(tokens * sum(shares[3.0]))
        assert again["figure"] == pytest.approx(sum(shares[3.0]) / 2)


def test_noise_is_relative_to_each_embedding_and_is_removed_afterwards(seen: Seen) -> None:
    task, models, _ = seen["smoe"]
    model, probe = models[-1], task.probe()
    embeddings = model.get_input_embeddings()
    given: list[Tensor] = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda module, inputs, named: given.append(inputs[0] if inputs else named["hidden_states"]), with_kwargs=True
    )
    consistency(model, probe, 2)
    handle.remove()
    plain, noisy = given
    assert torch.equal(plain, embeddings(probe["input_ids"]))
    torch.testing.assert_close((noisy - plain).norm(dim=-1), 0.05 * plain.norm(dim=-1), rtol=1e-4, atol=1e-6)


def test_reading_the_routing_keeps_the_mode_of_the_model(seen: Seen) -> None:
    task, models, _ = seen["symphony"]
    for mode in (True, False):
        model = copy.deepcopy(models[-1]).train(mode)
        before = contents(copy.deepcopy(model))
        routings_of(model, task.probe())
        assert model.training is mode and all(module.training is mode for module in model.modules())
        after = contents(model)
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_snapshots_are_evenly_spaced_and_include_the_last_step(tiny: MakeRecipe) -> None:
    five, each = (tiny({"training.snapshots": count}).training.snapshot_steps for count in (5, 1000))
    assert tiny().training.snapshot_steps(60_000) == five(60_000) == [12_000, 24_000, 36_000, 48_000, 60_000]
    for steps in range(1, 40):
        found = five(steps)
        assert found == sorted(set(found)) and found[-1] == steps and found[0] >= 1 and len(found) == min(5, steps)
        assert each(steps) == list(range(1, steps + 1))


def test_snapshots_may_be_chosen_steps_of_the_run(tiny: MakeRecipe, tmp_path: Path) -> None:
    recipe = tiny({"training.snapshots": [6, 0, 5, 6], "training.steps": 6})
    task = make_task(recipe)
    train(build_model(task, "smoe", {}, seed=0), task, tmp_path, seed=0, k=2)
    assert sorted(path.stem for path in (tmp_path / "snapshots").iterdir()) == ["00000000", "00000005", "00000006"]
    assert len(evolution(tmp_path / "snapshots", [0, 5, 6], ["first", "second"], learned=False)["layers"][0]["graphs"]) == 3
    with pytest.raises(ValueError, match="has step 6, and the run ends after step 5; name earlier steps"):
        require_trainable(make_task(change_recipe(recipe, {"training.steps": 5})), seed=0)
    for wrong, reason in (([], "is empty"), (0, "whole number from 1"), ([-1], "each a whole number from 0")):
        assert_refused(reason, tiny, {"training.snapshots": wrong})


def test_a_snapshot_is_a_small_file_of_its_own(seen: Seen) -> None:
    task, _, folder = seen["smoe"]
    assert sorted(path.name for path in folder.iterdir()) == [f"{step:08d}.json" for step in (2, 4, 6, 8, 10)]
    stored = json.loads((folder / "00000004.json").read_text())
    assert stored["step"] == 4 and len(stored["layers"]) == 2
    assert len(stored["layers"][0]["sets"]) == int(task.probe()["attention_mask"].sum())

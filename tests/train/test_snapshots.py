"""Snapshots: taking them does not change training, and they equal a naive recording."""

import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.hub import trace
from holdfast.routing import ExpertGraph
from holdfast.train import Recipe, Task, build_model, make_task
from holdfast.train.snapshots import consistency, evolution, learns_a_graph, routings_of, snapshot_steps, take_snapshot
from holdfast.train.training import train


def contents(model: Any) -> dict[str, Tensor]:
    """Return parameters and buffers, without statistics that were already committed."""
    named = {**dict(model.eval().named_parameters()), **dict(model.named_buffers())}
    return {name: value.detach().clone() for name, value in named.items() if "staged_" not in name}


@pytest.mark.parametrize("router", ["smoe", "symphony", "ac", "smooth", "ac+symphony+attention+smooth"])
def test_taking_snapshots_does_not_change_training(
    router: str, tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout is on: a snapshot must not draw random numbers in between."""
    task = make_task(tiny({"model.config.attention_dropout": 0.3, "training.steps": 6}))
    watched, unwatched = (build_model(task, router, {}, seed=0) for _ in range(2))
    log = train(watched, task, tmp_path / "watched", seed=0, k=2)
    monkeypatch.setattr("holdfast.train.loop.take_snapshot", lambda *_: None)
    assert train(unwatched, task, tmp_path / "unwatched", seed=0, k=2) == log
    assert list((tmp_path / "watched" / "snapshots").iterdir()) and not (tmp_path / "unwatched" / "snapshots").exists()
    mine, theirs = contents(watched), contents(unwatched)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_dropout_is_on_in_the_test_above(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    logs = []
    for share in (0.0, 0.3):
        task = make_task(tiny({"model.config.attention_dropout": share, "training.steps": 2}))
        logs.append(train(build_model(task, "smoe", {}, seed=0), task, tmp_path / str(share), seed=0, k=2))
    assert logs[0] != logs[1]


@pytest.fixture(scope="module")
def seen(tiny: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Task, list[Any], Path]]:
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
def test_fluctuation_is_the_share_of_tokens_whose_set_changed(
    router: str, seen: dict[str, tuple[Task, list[Any], Path]]
) -> None:
    task, models, folder = seen[router]
    steps = snapshot_steps(10)
    assert steps == [2, 4, 6, 8, 10] and len(models) == 5
    found = evolution(folder, steps, ["first", "second"], learned=False)
    assert found["steps"] == steps and [layer["name"] for layer in found["layers"]] == ["first", "second"]
    taken = [real_experts(model, task) for model in models]
    for layer in (0, 1):
        naive = []
        for before, after in pairwise(taken):
            changed = [set(old[:2]) != set(new[:2]) for old, new in zip(before[layer], after[layer], strict=True)]
            naive.append(sum(changed) / len(changed))
        assert found["layers"][layer]["fluctuation"] == naive
        assert 0 < max(naive) <= 1


@pytest.mark.parametrize("router", ["smoe", "smooth"])
def test_without_a_learned_graph_the_graph_is_the_co_selection(
    router: str, seen: dict[str, tuple[Task, list[Any], Path]]
) -> None:
    task, models, folder = seen[router]
    assert not learns_a_graph(models[-1])
    found = evolution(folder, snapshot_steps(10), ["first", "second"], learned=learns_a_graph(models[-1]))
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


def test_symphonys_graph_is_the_one_it_learned(seen: dict[str, tuple[Task, list[Any], Path]]) -> None:
    _, models, folder = seen["symphony"]
    assert learns_a_graph(models[-1])
    found = evolution(folder, snapshot_steps(10), ["first", "second"], learned=True)
    assert found["graph"] == "learned"
    for place, model in enumerate(models):
        graphs = [module.graph for module in model.modules() if isinstance(module, ExpertGraph)]
        for layer, graph in enumerate(graphs):
            assert torch.tensor(found["layers"][layer]["graphs"][place]) == pytest.approx(graph, abs=6e-4)
    first, last = (found["layers"][0]["graphs"][place] for place in (0, -1))
    assert first != last and any(value > 0 for row in last for value in row)


def test_consistency_is_1_without_noise_and_falls_with_more_noise(
    seen: dict[str, tuple[Task, list[Any], Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for task, models, _ in seen.values():
        shares = {}
        for noise in (0.0, 0.05, 3.0):
            monkeypatch.setattr("holdfast.train.snapshots.NOISE", noise)
            shares[noise] = consistency(models[-1], task.probe(), 2)["layers"]
        assert shares[0.0] == [1.0, 1.0]
        assert all(0 <= loud < soft <= 1 for loud, soft in zip(shares[3.0], shares[0.05], strict=True))
        assert min(shares[3.0]) < 0.5
        assert consistency(models[-1], task.probe(), 2)["layers"] == shares[3.0]  # the noise is the same every time


def test_noise_is_relative_to_each_embedding_and_is_removed_afterwards(
    seen: dict[str, tuple[Task, list[Any], Path]],
) -> None:
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


def test_reading_the_routing_keeps_the_mode_of_the_model(seen: dict[str, tuple[Task, list[Any], Path]]) -> None:
    task, models, _ = seen["symphony"]
    for mode in (True, False):
        model = copy.deepcopy(models[-1]).train(mode)
        before = contents(copy.deepcopy(model))
        routings_of(model, task.probe())
        assert model.training is mode and all(module.training is mode for module in model.modules())
        after = contents(model)
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_snapshots_are_evenly_spaced_and_include_the_last_step() -> None:
    assert snapshot_steps(1) == [1]
    assert snapshot_steps(3) == [1, 2, 3]
    assert snapshot_steps(60_000) == [12_000, 24_000, 36_000, 48_000, 60_000]
    for steps in range(1, 40):
        found = snapshot_steps(steps)
        assert found == sorted(set(found)) and found[-1] == steps and found[0] >= 1 and len(found) == min(5, steps)


def test_a_snapshot_is_a_small_file_of_its_own(seen: dict[str, tuple[Task, list[Any], Path]]) -> None:
    task, _, folder = seen["smoe"]
    assert sorted(path.name for path in folder.iterdir()) == [f"{step:08d}.json" for step in (2, 4, 6, 8, 10)]
    stored = json.loads((folder / "00000004.json").read_text())
    assert stored["step"] == 4 and len(stored["layers"]) == 2
    assert len(stored["layers"][0]["sets"]) == int(task.probe()["attention_mask"].sum())

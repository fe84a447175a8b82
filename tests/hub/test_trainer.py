"""transformers' own Trainer around changed models: it trains, evaluates, saves, and resumes as if it had never stopped."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import changed as with_router
from changed_models import trainer_of
from ranks import on_ranks
from tiers import quick_or_slow
from tiny import tiny
from torch import Tensor

import holdfast
from holdfast import Losses

ROWS = torch.randint(3, 64, (24, 16), generator=torch.Generator().manual_seed(0))
STEPS, HALF = 6, 3
CASES: dict[str, tuple[str, str, int]] = {
    "sparsified": ("llama", "symphony+smooth", 1),
    "sparsified, accumulating": ("llama", "ac+similarity", 2),
    "rerouted": ("mixtral", "ac+similarity", 1),
    "rerouted, accumulating": ("mixtral", "symphony+smooth", 2),
    "rerouted, attention": ("mixtral", "ac+symphony+attention+smooth", 1),
}


def dataset() -> list[dict[str, Tensor]]:
    """Sequences of different lengths, padded."""
    rows = []
    for index, ids in enumerate(ROWS):
        real = torch.arange(len(ids)) < len(ids) - index % 5
        rows.append({"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)})
    return rows


def changed(family: str, router: str, seed: int = 0) -> Any:
    return with_router(family, router, seed, losses=Losses(balance=0.1, z=0.01))


def trainer(model: Any, folder: Path, **options: Any) -> Any:
    sizes = {"max_steps": STEPS, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "learning_rate": 0.01}
    settings = {**sizes, "logging_strategy": "steps", "logging_steps": 1, "seed": 3, **options}
    data = dataset()
    return trainer_of(model, folder, data[:20], data[20:], **settings)


def contents(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers, what is not saved among them; statistics that were committed are scratch."""
    model.eval()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value.detach().clone() for name, value in named.items() if "staged_" not in name}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def logits(model: Any) -> Tensor:
    batch = {name: torch.stack([row[name] for row in dataset()[:4]]) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        out: Tensor = model.eval()(**batch).logits
    return out


@pytest.mark.parametrize("case", quick_or_slow(CASES, list(CASES)[:1]))
def test_training_saves_and_resumes_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Straight through; straight through with a checkpoint on the way; and from that checkpoint on, in a fresh model."""
    family, router, accumulated = CASES[case]
    options = {"gradient_accumulation_steps": accumulated}
    straight = trainer(changed(family, router), tmp_path / "straight", **options)
    straight.train()
    expected = contents(straight.model)
    saving = trainer(changed(family, router), tmp_path / "saving", save_strategy="steps", save_steps=HALF, **options)
    saving.train()
    assert_equal(contents(saving.model), expected)
    resumed = trainer(changed(family, router, seed=1), tmp_path / "resumed", **options)
    half = tmp_path / "saving" / f"checkpoint-{HALF}"
    resumed.train(resume_from_checkpoint=str(half))
    assert_equal(contents(resumed.model), expected)
    assert resumed.state.global_step == STEPS

    before, loaded = contents(changed(family, router)), holdfast.load(half)
    midway = contents(loaded)
    learned = {"graph", "width", "spreads", "entropy"} & {name.rpartition(".")[2] for name in expected}
    for name in (name for name in expected if name.rpartition(".")[2] in learned):
        if not (name.endswith("spreads") and ".0." in name):  # the first layer has no previous one, so its clusters stay
            assert not torch.equal(before[name], midway[name]), name
            assert not torch.equal(midway[name], expected[name]), name
    final = holdfast.load(tmp_path / "saving" / f"checkpoint-{STEPS}")
    assert torch.equal(logits(final), logits(saving.model))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_trainer_logs_losses_with_the_routers_own_and_evaluates_without(family: str, tmp_path: Path) -> None:
    run = trainer(changed(family, "symphony+smooth"), tmp_path, eval_strategy="steps", eval_steps=HALF)
    run.train()
    history = run.state.log_history
    assert len([entry for entry in history if "loss" in entry]) == STEPS
    evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    before = contents(run.model)
    assert run.evaluate()["eval_loss"] == pytest.approx(evaluated[-1])
    assert_equal(contents(run.model), before)
    batch = {name: torch.stack([row[name] for row in dataset()[20:]]) for name in dataset()[0]}
    with torch.no_grad():
        assert float(run.model.eval()(**batch).loss) == pytest.approx(evaluated[-1], abs=1e-5)
    assert float(run.model.train()(**batch).loss.detach()) > evaluated[-1] + 0.1


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_trainer_logs_what_each_router_loss_adds(accumulated: int, tmp_path: Path) -> None:
    """Rows have different numbers of labels; without learning, a model without losses has the rest of the logged loss."""
    logs = []
    for losses in (Losses(balance=0.1, z=0.01), Losses()):
        model = holdfast.reroute(tiny("mixtral"), "smoe", losses=losses)
        options: dict[str, Any] = {"gradient_accumulation_steps": accumulated, "learning_rate": 0.0, "logging_steps": HALF}
        run = trainer(model, tmp_path, **options, eval_strategy="steps", eval_steps=2)
        run.train()
        logs.append([entry for entry in run.state.log_history if "loss" in entry])
    assert len(logs[0]) == len(logs[1]) == STEPS // HALF
    for entry, without in zip(*logs, strict=True):
        added = {name: value for name, value in entry.items() if name.startswith("router/")}
        assert added.keys() == {"router/balance", "router/z"} and added.keys().isdisjoint(without)
        assert sum(added.values()) == pytest.approx(entry["loss"] - without["loss"], abs=1e-5)
        assert added["router/balance"] == pytest.approx(0.1 * 3, rel=0.5)  # three layers; 1 if the load is uniform


def test_a_second_training_logs_none_of_the_steps_of_the_first_one(tmp_path: Path) -> None:
    model = holdfast.reroute(tiny("mixtral"), "smoe", losses=Losses(balance=0.1))
    run = trainer(model, tmp_path, learning_rate=0.0, max_steps=HALF + 1, logging_steps=HALF)  # the last step is not logged
    logged = []
    for _ in range(2):
        run.train()
        logged += [entry["router/balance"] for entry in run.state.log_history if "router/balance" in entry]
    assert len(logged) == 2 and logged[0] == pytest.approx(logged[1], rel=1e-6)


def test_every_trainer_has_the_callback_once() -> None:
    import transformers.trainer

    from holdfast.registration import register_on_import

    register_on_import()
    callback = holdfast.trainer_callback()
    assert transformers.trainer.DEFAULT_CALLBACKS.count(type(callback)) == 1
    assert type(pickle.loads(pickle.dumps(callback))) is type(callback)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_best_model_is_loaded_at_the_end(family: str, tmp_path: Path) -> None:
    """The second of four, as a made-up measure has it."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options.update(load_best_model_at_end=True, metric_for_best_model="worth", greater_is_better=True, max_steps=4)
    run = trainer(changed(family, "symphony+smooth"), tmp_path, **options)
    worths = iter([0.1, 0.9, 0.5, 0.3, 0.0])
    run.compute_metrics = lambda prediction: {"worth": next(worths)}
    run.train()
    losses = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert_equal(contents(run.model), contents(holdfast.load(tmp_path / "checkpoint-2")))
    last = contents(holdfast.load(tmp_path / "checkpoint-4"))
    assert not any(torch.equal(value, last[name]) for name, value in contents(run.model).items() if "graph" in name)
    assert run.evaluate()["eval_loss"] == pytest.approx(losses[1], abs=1e-6)


def test_a_trained_model_is_saved_by_the_trainer_and_loaded_by_us(tmp_path: Path) -> None:
    run = trainer(changed("mixtral", "symphony+smooth"), tmp_path / "run", max_steps=2)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    loaded = holdfast.load(tmp_path / "saved")
    assert torch.equal(logits(loaded), logits(run.model))
    assert_equal(contents(loaded), contents(run.model))


@pytest.mark.slow
def test_two_processes_train_as_one_with_the_whole_batch(tmp_path: Path) -> None:
    """DDP and FSDP2: losses, their parts of routers, parameters and state as one process has them; saved and resumed too."""
    from trainer_on_ranks import CASES, train_all

    on_ranks(Path(__file__).with_name("trainer_on_ranks.py"), str(tmp_path))
    first, second = (torch.load(tmp_path / f"rank.{rank}.pt") for rank in (0, 1))
    alone = train_all(tmp_path / "alone", 1)
    for case in CASES:
        assert_equal(first[case]["contents"], second[case]["contents"])
        assert len(alone[case]["losses"]) == STEPS
        for name in ("losses", "balance"):
            assert first[case][name] == second[case][name] == pytest.approx(alone[case][name], abs=1e-5)
        torch.testing.assert_close(first[case]["contents"], alone[case]["contents"], atol=1e-5, rtol=1e-4)
        loaded = holdfast.load(tmp_path / case / f"checkpoint-{STEPS}")
        assert torch.equal(logits(loaded), first[case]["logits"])

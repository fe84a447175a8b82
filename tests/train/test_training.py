"""Training: every option of a recipe has an effect, the best checkpoint is kept, two ranks train as one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from interrupting import Interrupted, stop_at
from ranks import on_ranks
from tiers import quick_or_slow
from torch import Tensor
from train.conftest import AUGMENT, MakeRecipe
from without_times import as_text
from wording import assert_refused

from holdfast.hub import load
from holdfast.train import Comparison, Recipe, Task, build_model, make_task, parse_routers
from holdfast.train.training import train

Log = list[dict[str, float]]


def trained(recipe: Recipe, folder: Path, router: str = "smoe") -> tuple[Any, Log]:
    task = make_task(recipe)
    model = build_model(task, router, {}, seed=0)
    return model, train(model, task, folder, seed=0, k=recipe.sparse.k or 2)


KNOBS: dict[str, Any] = {
    "training.learning_rate": 0.02,
    "training.warmup": 2,
    "training.weight_decay": 0.5,
    "training.clip": 0.01,
    "training.accumulate": 2,
    "training.batch": 8,
    "training.precision": "bf16",
    "sparse.k": 1,
    "sparse.init": "copy",
}


@pytest.mark.slow
def test_no_knob_of_training_is_inert(tiny: MakeRecipe, tmp_path: Path) -> None:
    usual = {"training.steps": 3, "training.warmup": 0, "sparse.hidden": None}
    _, plain = trained(tiny(usual), tmp_path / "plain")
    for knob, value in KNOBS.items():
        _, changed = trained(tiny({**usual, knob: value}), tmp_path / knob)
        assert [line["step"] for line in changed] == [1, 2, 3]
        assert [line["loss"] for line in changed] != [line["loss"] for line in plain], knob


@pytest.mark.parametrize("kind", ["text", "images"])
def test_training_uses_the_batches_of_the_recorded_hashes(
    kind: str, tiny: MakeRecipe, digits: MakeRecipe, tmp_path: Path
) -> None:
    """In order, each micro-batch once: the same for every router of a comparison."""
    few = {"training.steps": 4, "training.batch": 6, "training.accumulate": 2}
    task = make_task(tiny(few) if kind == "text" else digits(few))
    name = "input_ids" if kind == "text" else "pixel_values"
    model, seen = build_model(task, "smoe", {}, seed=1), list[Tensor]()

    def note(module: Any, inputs: Any, named: dict[str, Tensor]) -> None:
        if module.training:
            seen.append(named[name])

    model.register_forward_pre_hook(note, with_kwargs=True)
    train(model, task, tmp_path, seed=1, k=2)
    examples = task.examples(1)
    assert [len(batch) for batch in seen] == [6] * 8 and len(examples) == 48
    for step in range(4):
        expected = examples.__getitems__(range(12 * step, 12 * step + 12))[name]
        assert torch.equal(torch.cat(seen[2 * step : 2 * step + 2]), expected)
    assert len({examples.hash(step) for step in range(4)}) == 4


def test_micro_batches_add_up_to_the_batch(tiny: MakeRecipe, tmp_path: Path) -> None:
    """The balance loss is off, because it is computed per micro-batch."""
    few = {"training.steps": 4, "training.warmup": 0, "losses.balance": 0.0}
    _, whole = trained(tiny({**few, "training.batch": 8}), tmp_path / "whole")
    _, parts = trained(tiny({**few, "training.batch": 2, "training.accumulate": 4}), tmp_path / "parts")
    for line, twin in zip(whole, parts, strict=True):
        assert line == pytest.approx(twin, rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick_or_slow(["text", "images"], ["text"]))
def test_bf16_trains_on_a_cpu_with_finite_losses(kind: str, tiny: MakeRecipe, digits: MakeRecipe, tmp_path: Path) -> None:
    few = {"training.precision": "bf16", "training.steps": 3, "attack.examples": 4, "attack.steps": 1}
    recipe = tiny({**few, "data.test_bytes": 800}) if kind == "text" else digits(few)
    for result in Comparison(recipe, parse_routers("smoe,ac+symphony+smooth,similarity"), 1, tmp_path / "run").run():
        figures = [line[key] for line in result["log"] for key in ("loss", "grad_norm")]
        figures += [result[trial]["figure"] for trial in ("clean", "attacked")]
        assert all(math.isfinite(figure) for figure in figures)
        assert all(0 <= share <= 1 for share in result["consistency"]["layers"])


def rising(tiny: MakeRecipe, **changes: Any) -> Recipe:
    """Return a recipe whose learning rate grows until the loss rises."""
    usual = {"training.learning_rate": 3.0, "training.warmup": 12, "training.keep": "best", "training.save_every": 3}
    return tiny({**usual, **changes})


def held_out(log: Log) -> dict[int, float]:
    return {int(line["step"]): line["eval_loss"] for line in log if "eval_loss" in line}


def loss_on(task: Task, model: Any) -> float:
    """Return the loss on the held-out blocks, one by one."""
    held: Any = task.validation()
    losses = []
    with torch.no_grad():
        for place in range(len(held)):
            inputs = held.__getitems__([place])
            logits = model.eval()(input_ids=inputs["input_ids"]).logits
            losses.append(torch.nn.functional.cross_entropy(logits[0], inputs["labels"][0]))
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize("router", quick_or_slow(["smoe", "symphony+smooth"], ["smoe"]))
def test_the_checkpoint_that_does_best_on_held_out_data_is_kept(router: str, tiny: MakeRecipe, tmp_path: Path) -> None:
    recipe = rising(tiny)
    model, log = trained(recipe, tmp_path / "best", router)
    losses = held_out(log)
    assert list(losses) == [3, 6, 9, 12]
    best = min(losses, key=lambda step: losses[step])
    assert best < 12 and losses[12] > 2 * losses[best]
    assert [line["step"] for line in log if "loss" in line] == list(range(1, 13))  # and yet all of training was done
    assert loss_on(make_task(recipe), model) == pytest.approx(losses[best], rel=1e-4)
    kept, mine = load(tmp_path / "best" / f"checkpoint-{best}").state_dict(), model.eval().state_dict()
    assert kept.keys() == mine.keys()
    assert [name for name in kept if "staged_" not in name and not torch.equal(kept[name], mine[name])] == []
    last, usual = trained(rising(tiny, **{"training.keep": "last"}), tmp_path / "last", router)
    assert held_out(usual) == {}
    assert [line for line in log if "loss" in line] == usual  # looking at held-out data changes nothing
    assert loss_on(make_task(recipe), last) == pytest.approx(losses[12], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("step", quick_or_slow([7, 13], [7]))
def test_the_best_checkpoint_survives_an_interruption(step: int, tiny: MakeRecipe, tmp_path: Path) -> None:
    """Interrupt in the middle, and after all steps, when only the best checkpoint is left."""
    recipe = rising(tiny, **{"model.config.attention_dropout": 0.2})
    whole = Comparison(recipe, parse_routers("symphony+smooth"), 1, tmp_path / "whole").run()

    def stop_saving(*_: Any) -> None:
        raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.train.comparison.save_trained", stop_saving)
        with pytest.raises(Interrupted):
            Comparison(recipe, parse_routers("symphony+smooth"), 1, tmp_path / "run").run(stop_at(step))
    left = sorted(path.name for path in tmp_path.glob("run/cells/*/training/checkpoint-*"))
    assert left == (["checkpoint-3"] if step == 13 else ["checkpoint-3", "checkpoint-6"])
    again = Comparison(recipe, parse_routers("symphony+smooth"), 1, tmp_path / "run").run()
    assert as_text(again) == as_text(whole)


def test_a_batch_that_cannot_be_split_over_the_ranks_raises_an_error(
    tiny: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert_refused(r"\b4\b.*\b3\b.*training\.batch", lambda: trained(tiny(), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "images"])
def test_two_ranks_train_as_one_with_the_whole_batch(
    kind: str, tiny: MakeRecipe, digits: MakeRecipe, tmp_path: Path
) -> None:
    """Run under torchrun; logs and snapshots are written once, and augmented images are those of one rank."""
    changes = {"training.steps": 6, "training.save_every": 3, "training.warmup": 0}
    images = {"training.augment": AUGMENT, "training.batch": 8, "training.label_smoothing": 0.1}
    recipe = tiny({**changes, "training.accumulate": 2}) if kind == "text" else digits({**changes, **images})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.describe()))
    routers = ["symphony"] if kind == "text" else ["smoe"]
    given = [str(tmp_path / "recipe.yaml"), str(tmp_path / "two"), *routers]
    on_ranks(Path(__file__).with_name("on_ranks.py"), *given, torchrun=True)
    for router in routers:
        model, alone = trained(recipe, tmp_path / "one" / router, router)
        lines = [json.loads(line) for line in (tmp_path / "two" / router / "log.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone], abs=1e-4)
        both = [torch.load(tmp_path / "two" / f"{router}.{rank}.pt") for rank in (0, 1)]
        for name, value in model.eval().state_dict().items():
            assert torch.equal(both[0][name], both[1][name])
            if "staged_" not in name:
                torch.testing.assert_close(both[0][name], value, atol=2e-3, rtol=0.01, msg=f"{router}: {name}")
        for path in (tmp_path / "one" / router / "snapshots").iterdir():
            one, two = (
                json.loads((tmp_path / which / router / "snapshots" / path.name).read_text()) for which in ("one", "two")
            )
            for layer, twin in zip(one["layers"], two["layers"], strict=True):
                same = [old == new for old, new in zip(layer["sets"], twin["sets"], strict=True)]
                assert sum(same) / len(same) > 0.98

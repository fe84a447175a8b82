"""Comparisons: equal conditions, resumable, the same numbers every time."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from interrupting import Interrupted, stop_at
from train.conftest import MakeRecipe
from without_times import as_text
from wording import assert_refused

from holdfast.report.comparison_tables import main_table
from holdfast.routing.expert_graph import ExpertGraph
from holdfast.train import Comparison, RouterChoice, build_model, make_task, parse_routers
from holdfast.train.results import Results
from holdfast.train.text_task import TextTask

HOLD_LOCK = """
import sys, time
from pathlib import Path
from holdfast.locking import Lock
lock = Lock(Path(sys.argv[1]))
print(lock.attempt(), flush=True)
time.sleep(600)
"""


def test_every_test_token_is_scored_once_and_all_routers_see_the_same_batches(tiny: MakeRecipe, tmp_path: Path) -> None:
    comparison = Comparison(tiny({"training.steps": 3}), parse_routers("smoe,similarity,ac"), 1, tmp_path / "run")
    results = comparison.run()
    task = comparison.task
    assert isinstance(task, TextTask)
    tokens = sum(len(piece) for piece in task.tokenizer.pieces(task.corpus.documents("test")))
    assert {result["clean"]["tokens"] for result in results} == {tokens - 1}
    assert len({(result["first_batch"], result["last_batch"]) for result in results}) == 1
    assert results[0]["first_batch"] != results[0]["last_batch"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "images"])
def test_a_router_of_strength_zero_reproduces_the_baselines_curve_exactly(
    kind: str, tiny: MakeRecipe, digits: MakeRecipe, tmp_path: Path
) -> None:
    routers = [
        RouterChoice("smoe", "smoe"),
        RouterChoice("similarity, silent", "similarity", {"strength": 0.0}),
        RouterChoice("attention, silent", "attention", {"strength": 0.0}),
        RouterChoice("ac, skipped", "ac", {"skip": 9}),
        RouterChoice("smooth, no budget", "smooth", {"budget": 0.0}),
        RouterChoice("similarity", "similarity"),
    ]
    few = {"training.steps": 4}
    recipe = tiny(few) if kind == "text" else digits({**few, "attack.examples": 4, "attack.steps": 1})
    plain, *others, loud = Comparison(recipe, routers, 1, tmp_path / "run").run()
    for result in others:
        assert result["log"] == plain["log"], result["router"]
        assert result["clean"]["figure"] == plain["clean"]["figure"]
    assert loud["log"] != plain["log"]
    assert len({(result["first_batch"], result["last_batch"]) for result in (plain, *others, loud)}) == 1


def test_an_attack_at_rate_zero_changes_nothing(tiny: MakeRecipe, tmp_path: Path) -> None:
    few = {"training.steps": 2}
    (result,) = Comparison(tiny({"attack.rate": 0.0, **few}), parse_routers("smooth"), 1, tmp_path / "run").run()
    assert result["attacked"]["nll"] == result["clean"]["nll"]
    (attacked,) = Comparison(tiny(few), parse_routers("smooth"), 1, tmp_path / "other").run()
    assert attacked["attacked"]["nll"] != attacked["clean"]["nll"]


def test_weights_that_routers_have_in_common_start_equal(tiny: MakeRecipe) -> None:
    task = make_task(tiny())
    models = {name: build_model(task, name, {}, seed=3) for name in ("smoe", "ac", "symphony+smooth", "xmoe")}
    plain = dict(models["smoe"].named_parameters())
    for name, model in models.items():
        for key, parameter in model.named_parameters():
            twin = plain.get(key.replace(".score.base.", ".score."))
            assert twin is None or torch.equal(parameter, twin), (name, key)
    other = dict(build_model(task, "smoe", {}, seed=4).named_parameters())
    assert not torch.equal(plain["model.layers.0.mlp.experts.down_proj"], other["model.layers.0.mlp.experts.down_proj"])
    assert not torch.equal(plain["model.layers.0.mlp.router.score.weight"], other["model.layers.0.mlp.router.score.weight"])


@pytest.mark.filterwarnings("ignore:in this causal model")
def test_routers_that_see_later_tokens_stand_apart(tiny: MakeRecipe, tmp_path: Path) -> None:
    apart = "capacity,expert-choice[evaluate=same],ac[stats=batch],attention[stats=batch],similarity[causal=false]"
    routers = parse_routers(f"smoe,{apart},ac,expert-choice")  # these two see them at most in training
    comparison = Comparison(tiny({"training.steps": 1}), routers, 1, tmp_path / "run")
    results = comparison.finish(comparison.run())
    assert [row.router for row in results.rows] == ["smoe", "ac", "expert-choice", *apart.split(",")]
    for row in results.rows[1:]:
        is_apart = row.router in apart.split(",")
        assert (row.apart is not None) == is_apart and (row.equal_compute is None or not is_apart)
        for difference in (row.clean_difference, row.attacked_difference, row.scores["clean"].difference):
            assert (difference is None) == is_apart
    table = main_table(Results.load(tmp_path / "run"))
    place = table.columns.index("clean, difference")
    assert [row[place] for row in table.rows][3:] == ["sees later tokens"] * 5


def test_a_router_run_later_joins_the_finished_ones(tiny: MakeRecipe, tmp_path: Path) -> None:
    first = Comparison(tiny({"training.steps": 2}), parse_routers("smooth,smoe"), 1, tmp_path / "run")
    alone = first.finish(first.run()).rows
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("cells/*/result.json")}
    later = Comparison(tiny({"training.steps": 2}), parse_routers("ac"), 2, tmp_path / "run")
    results = later.finish(later.run())
    assert len(first.run()) == 2  # finished cells are not run again
    assert written == {path: path.stat().st_mtime_ns for path in written}
    rows = results.rows
    assert [row.router for row in rows] == ["smooth", "smoe", "ac"] and rows[:2] == alone
    assert rows[2].seeds == [0, 1] and rows[2].clean_difference is not None and rows[2].clean_difference.seeds == 1
    assert Results.load(tmp_path / "run") == results and len(results.cells) == 4
    (tmp_path / "run" / "cells" / "ac-seed1" / "result.json").write_text("{")
    assert_refused(r"ac-seed1.result\.json.*remove .*ac-seed1", lambda: first.finish(first.run()))


def begin(comparison: Comparison, steps: int) -> None:
    """Run a comparison, and interrupt it after this number of steps of its first cell."""
    with pytest.raises(Interrupted):
        comparison.run(stop_at(steps))


def test_a_run_that_has_saved_nothing_is_replaced_by_a_corrected_one(tiny: MakeRecipe, tmp_path: Path) -> None:
    folder, right = tmp_path / "run", tiny({"training.steps": 2})
    wrong = tiny({"training.steps": 9, "training.save_every": 100})
    begin(Comparison(wrong, parse_routers("symphony,smoe"), 1, folder), 7)  # a snapshot is there
    begin(Comparison(right, [RouterChoice("smoe", "smoe", k=1)], 1, folder), 1)
    found = Comparison(right, parse_routers("smoe"), 1, folder).run()  # the same name with another k
    assert as_text(found) == as_text(Comparison(right, parse_routers("smoe"), 1, tmp_path / "fresh").run())
    assert sorted(path.name for path in (folder / "cells").iterdir()) == ["smoe-seed0"]


@pytest.mark.parametrize("kept", ["checkpoint", "note", "lock"])
def test_a_run_with_anything_to_keep_is_not_replaced(kept: str, tiny: MakeRecipe, tmp_path: Path) -> None:
    folder, wrong = tmp_path / "run", tiny({"training.steps": 9, "training.save_every": 2 if kept == "checkpoint" else 100})
    begin(Comparison(wrong, parse_routers("smoe"), 1, folder), 3)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    process = None
    if kept == "note":
        (folder / "cells" / "note.txt").write_text("mine")
    elif kept == "lock":
        place = folder / "cells" / "smoe-seed0"
        process = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(place)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"None\n"
    try:
        with pytest.raises(ValueError, match=r"another run \(another recipe\); choose another folder"):
            Comparison(tiny({"training.steps": 2}), parse_routers("smoe"), 1, folder)
    finally:
        if process is not None:
            process.kill()
            process.communicate()
    assert before.items() <= {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}.items()


def test_wrong_folders_and_routers_raise_a_one_line_error(tiny: MakeRecipe, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Comparison(tiny(), parse_routers("smoe"), 1, folder).run()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    (tmp_path / "empty.txt").write_text("")
    mistakes: list[tuple[Callable[[], object], str]] = [
        (lambda: Comparison(tiny({"training.steps": 13}), parse_routers("smoe"), 1, folder), "another run"),
        (lambda: Comparison(tiny(), parse_routers("smoe"), 1, tmp_path / "full"), "full"),
        (lambda: Comparison(tiny(), parse_routers("smoe,smoe"), 1, tmp_path / "x"), "once"),
        (lambda: Comparison(tiny(), [], 1, tmp_path / "x"), "none"),
        (lambda: Comparison(tiny(), parse_routers("smoe"), 0, tmp_path / "x"), "seeds is 0"),
        (lambda: Comparison(tiny(), [RouterChoice("smoe", "smoe", k=3)], 1, folder).run(), "other options"),
        (lambda: Comparison(tiny(), [RouterChoice("smoth", "smoth")], 1, tmp_path / "x").run(), "smooth"),
        (lambda: Comparison(tiny(), parse_routers("smoe"), 1, tmp_path / "x").run(jobs=0), "jobs is 0"),
    ]
    for name in ("empty.txt", "none.txt"):
        wrong = tiny({"data.source": str(tmp_path / name)})
        mistakes.append((partial(Comparison, wrong, parse_routers("smoe"), 1, tmp_path / "x"), name))
    for mistake, sentence in mistakes:
        assert_refused(sentence, mistake)
        assert not (tmp_path / "x").exists()


def test_options_reach_the_router_even_if_sparsify_has_the_same_names(tiny: MakeRecipe) -> None:
    """`init` and `noise` are also options of sparsify."""
    task = make_task(tiny())
    graphs = {}
    for written in ("symphony", "symphony[init=identity]"):
        (entrant,) = parse_routers(written)
        model = build_model(task, entrant.router, entrant.options, seed=0)
        graphs[written] = next(module.graph for module in model.modules() if isinstance(module, ExpertGraph))
    assert torch.equal(graphs["symphony[init=identity]"], torch.eye(8)) and not graphs["symphony"].any()
    (entrant,) = parse_routers("smoe[noise=gumbel]")
    noisy = build_model(task, entrant.router, entrant.options, seed=0).train()
    ids = torch.arange(16).view(1, 16)
    assert not torch.equal(noisy(input_ids=ids).logits, noisy(input_ids=ids).logits)  # with gradients: others add no noise

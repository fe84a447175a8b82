"""Successive halving over routers and settings: what goes on to the next rung, and what is printed."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from train.conftest import TEXT, MakeRecipe
from wording import assert_refused

from holdfast.train import Comparison, parse_routers
from holdfast.train.cells import settings_of
from holdfast.train.recipe import change_recipe, load_recipe
from holdfast.train.results import ValidationCurve
from holdfast.train.search import Candidate, Search, best, front, read_limit, search

SWEEP = {"sparse.k": [1, 2]}


def candidates(numbers: Sequence[tuple[float, float | None]]) -> list[Candidate]:
    return [Candidate(router=str(place), settings={}, flops=flops, loss=loss) for place, (flops, loss) in enumerate(numbers)]


def test_the_front_has_what_nothing_beats_in_both_numbers() -> None:
    draw = random.Random(0)
    for _ in range(200):
        numbers = [(draw.randint(1, 5), draw.choice([1.0, 2.0, 3.0, 4.0, None])) for _ in range(draw.randint(1, 9))]
        known = [(flops, math.inf if loss is None else loss) for flops, loss in numbers]
        free = [
            place
            for place, (flops, loss) in enumerate(known)
            if not any(f <= flops and value <= loss and (f < flops or value < loss) for f, value in known)
        ]
        chosen = front(candidates(numbers))
        assert sorted(int(one.router) for one in chosen) == free
        assert [one.numbers[1] for one in chosen] == sorted(one.numbers[1] for one in chosen)


def test_a_rung_hands_on_its_front_and_then_the_front_of_the_others() -> None:
    numbers = [(1.0, 3.0), (2.0, 2.0), (2.0, 2.5), (3.0, 2.1), (4.0, None)]
    for count, expected in [
        (1, ["1"]),
        (2, ["1", "0"]),
        (3, ["1", "0", "3"]),
        (4, ["1", "0", "3", "2"]),
        (9, list("10324")),
    ]:
        assert [one.router for one in best(candidates(numbers), count)] == expected


@pytest.mark.parametrize(("written", "flops"), [("1.1x", 110.0), ("250", 250.0), (90, 90.0), (None, None)])
def test_a_limit_is_a_multiple_of_the_baseline_or_a_number(written: Any, flops: float | None) -> None:
    assert read_limit(written, 100.0) == (None if flops is None else pytest.approx(flops))


@pytest.mark.parametrize("written", ["x", "1.1y", "0x", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(written: str) -> None:
    assert_refused("write 1.1x for 1.1 times those of the baseline", lambda: read_limit(written, 100.0))


def test_a_multiple_without_its_x_is_refused() -> None:
    assert_refused("write 1.2x for a multiple of the baseline's", lambda: read_limit("1.2", 100.0))


@pytest.mark.slow
def test_a_search_trains_all_then_the_best_for_longer(text: Path, tiny: MakeRecipe, tmp_path: Path) -> None:
    changes = {**TEXT, "data.source": str(text)}
    how: dict[str, Any] = {"sweep": SWEEP, "rungs": 2, "keep": 2, "changes": changes}
    found = search("smoe,ac", out=tmp_path / "out", **how)
    assert found.steps == [6, 12] and len(found.candidates) == 4
    last = [one for one in found.candidates if one.rung == 2]
    assert len(last) == 2 and set(map(id, found.front)) <= set(map(id, last))
    assert all(one.figure is not None for one in last) and all(
        one.figure is None for one in found.candidates if one.rung == 1
    )

    # The first rung, by hand, with half of the steps and of the warm-up: the same losses, and its best are in the second.
    assert tiny().training.warmup == 20
    recipe = change_recipe(tiny(), {"training.steps": 6, "training.warmup": 10, "training.validate_every": 6})
    by_hand = Comparison(recipe, parse_routers("smoe,ac"), 1, tmp_path / "hand", settings=settings_of(recipe, SWEEP)).run()
    numbers = {}
    for result in by_hand:
        loss = ValidationCurve.of(result["log"]).losses[-1]
        one = Candidate(router=result["router"], settings=result["settings"], flops=result["origin"]["flops"], loss=loss)
        numbers[one.label] = one
    for one in found.candidates:
        if one.rung == 1:
            assert one.numbers == numbers[one.label].numbers
    assert {one.label for one in best(list(numbers.values()), 2)} == {one.label for one in last}

    # Again: everything is read, nothing trained; the stored search is the same.
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("rung-*/cells/*/result.json")}
    assert len(times) == 6
    assert search("smoe,ac", out=tmp_path / "out", **how) == found == Search.load(tmp_path / "out")
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_candidates_over_the_limit_are_not_trained(text: Path, tmp_path: Path) -> None:
    changes = {**TEXT, "data.source": str(text), "sparse.k": 1}
    how: dict[str, Any] = {"sweep": SWEEP, "rungs": 1, "changes": changes, "flops": "1x"}
    found = search("smoe", out=tmp_path / "out", **how)
    assert [(one.settings["sparse.k"], one.rung, one.on_front) for one in found.candidates] == [(1, 1, True), (2, 0, False)]
    assert found.limit == found.baseline_flops == found.candidates[0].flops < found.candidates[1].flops
    assert len(list((tmp_path / "out" / "rung-1" / "cells").iterdir())) == 1
    assert_refused(
        r"no candidate needs so few FLOPs: the cheapest, smoe, sparse.k=1, has 1 times those of smoe",
        lambda: search("smoe", out=tmp_path / "less", **{**how, "flops": "0.9x"}),
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rungs": 0}, "give at least 1 rung"),
        ({"keep": 1}, "keep one in 2 or more"),
        ({"rungs": 5}, "12 steps are too few for 5 rungs"),
        ({"sweep": {"training.steps": [1, 2]}}, "training.steps cannot be swept: the rungs of a search set it"),
        ({"seeds": 0}, "a comparison needs at least 1"),
        ({"routers": "smoe,sooth"}, "did you mean 'smooth'"),
        ({"routers": "smoe,smoe{method=none}"}, "smoe and smoe{method=none} are the same router"),
    ],
)
def test_a_wrong_search_is_one_sentence(given: dict[str, Any], sentence: str, text: Path, tmp_path: Path) -> None:
    routers, changes = given.get("routers", "smoe"), {**TEXT, "data.source": str(text)}
    how = {name: value for name, value in given.items() if name != "routers"}
    assert_refused(sentence, lambda: search(routers, out=tmp_path / "out", changes=changes, **how))
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_run_is_refused_and_not_written(text: Path, tmp_path: Path) -> None:
    recipe = load_recipe("tiny", {**TEXT, "data.source": str(text), "training.steps": 4})
    compared, searched = tmp_path / "compared", tmp_path / "searched"
    Comparison(recipe, parse_routers("smoe"), 1, compared).run()
    before = sorted(compared.rglob("*"))
    how: dict[str, Any] = {"rungs": 2, "keep": 4, "changes": {**TEXT, "data.source": str(text), "training.steps": 4}}
    assert_refused("belongs to another run .of another command.", lambda: search("smoe", out=compared, **how))
    assert sorted(compared.rglob("*")) == before

    search("smoe", out=searched, **how)
    assert_refused("of another command", lambda: Comparison(recipe, parse_routers("smoe"), 1, searched))
    assert_refused("another run .other rungs.", lambda: search("smoe", out=searched, **{**how, "rungs": 3, "keep": 2}))
    found = search("smoe,ac", out=searched, **how)  # the trained candidate is read, the further one is trained
    assert {one.router for one in found.candidates} == {"smoe", "ac"}


def test_the_command_prints_the_front(text: Path, tmp_path: Path, command: Command) -> None:
    changes = [f"{key}={value}" for key, value in {**TEXT, "data.source": text}.items()]
    out = tmp_path / "out"
    given = ["--routers", "smoe", "--sweep", "sparse.k=1,2", "--rungs", "1", "--steps", "4", "--out", str(out)]
    done = command("search", *given, "--set", *changes)
    assert done.returncode == 0, done.stderr
    found = Search.load(out)
    assert f"The front: {'; '.join(one.label for one in found.front)}." in done.stdout
    assert all(f"{one.loss:.4f}" in done.stdout for one in found.candidates)
    assert max(map(len, done.stdout.splitlines()[: len(found.candidates) + 4])) <= 80
    assert "rung 1 of 1, smoe-sparse.k=1, seed 0" in done.stderr
    wrong = command("search", "--flops", "cheap", "--out", str(out / "other"), "--set", *changes)
    assert wrong.returncode == 2 and "write 1.1x" in wrong.stderr

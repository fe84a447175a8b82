"""Before the first step: sizes that do not fit are refused, wasteful ones warned about, and long runs announced."""

import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from train.conftest import MakeRecipe
from wording import assert_refused

import holdfast
from holdfast.train import Comparison, build_model, load_recipe, make_task, parse_routers
from holdfast.train.building import preflight
from holdfast.train.image_task import ImageTask
from holdfast.train.training import SLOW_FIRST_STEP, Pace, train


@pytest.fixture(scope="module")
def small_images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write images of 40 x 48 pixels in three classes."""
    folder, source = tmp_path_factory.mktemp("small"), np.random.default_rng(0)
    for name in ("blue", "green", "red"):
        (folder / name).mkdir()
        for number in range(20):
            Image.fromarray(source.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(folder / name / f"{number}.png")
    return f"{folder}/"


def test_a_folder_of_40_pixel_images_is_refused_with_the_remedy_before_anything_is_trained(
    small_images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "attempt", lambda *_: pytest.fail("a cell was trained"))
    wide = Comparison(load_recipe("vmoe-tiny", {"data.source": small_images}), parse_routers("smoe,ac"), 1, tmp_path / "run")
    assert_refused(r"12,544 patches of 2, more than 4,096; .* about 40 pixels .* data.size to 40,", wide.run)
    assert not (tmp_path / "run").exists()
    task = make_task(load_recipe("vmoe-tiny", {"data.source": small_images, "data.size": 40}))
    preflight(task, parse_routers("smoe"))  # the remedy helps


@pytest.mark.parametrize("recipe", ["cifar10", "cifar10-tiny"])
def test_the_size_of_a_recipe_is_that_of_a_folder_given_in_place_of_its_source(small_images: str, recipe: str) -> None:
    task = make_task(load_recipe(recipe, {"data.source": small_images}))
    assert isinstance(task, ImageTask) and task.image_set.images("train").shape == (3, 32, 32)
    with pytest.raises(ValueError, match=r"digits has images of 8 pixels per side .*; set data.size to 8, not 32"):
        make_task(load_recipe(recipe, {"data.source": "digits"}))
    task = make_task(load_recipe(recipe, {"data.source": "digits", "data.size": 8}))
    assert isinstance(task, ImageTask) and task.image_set.images("train").shape == (1, 8, 8)


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "holdfast"]


def test_images_that_are_scaled_up_are_warned_about_before_training(
    small_images: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    for size, expected in ((96, ["INFO", "WARNING"]), (78, ["INFO"]), (40, ["INFO"])):
        caplog.clear()
        task = make_task(load_recipe("vmoe-tiny", {"data.source": small_images, "data.size": size}))
        preflight(task, parse_routers("smoe,ac"))
        found = messages(caplog)
        assert [level for level, _ in found] == expected
        assert found[0][1] == f"{(size // 2) ** 2:,} patches per image: {size} pixels per side, 2 per patch."
        if size == 96:
            assert "about 40 pixels per side and are scaled up to 96" in found[1][1]
            assert "2,304 patches; with --set data.size=40, it would have 400." in found[1][1]


@pytest.fixture(scope="module")
def small_domains(small_images: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Copy the small images to three domains."""
    folder = tmp_path_factory.mktemp("small-domains")
    for domain in ("art", "photo", "sketch"):
        shutil.copytree(small_images, folder / domain)
    return str(folder)


FEW = {"training.steps": 1, "training.batch": 4, "training.warmup": 0, "attack.examples": 2, "attack.steps": 1}


def test_domains_of_small_images_are_warned_about_and_told_their_size(
    small_domains: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast")  # an earlier test may have left another level
    task = make_task(load_recipe("gmoe-tiny", {"data.source": small_domains, "data.held_out": "art", "data.size": 96}))
    preflight(task, parse_routers("smoe"))
    assert [level for level, _ in messages(caplog)] == ["WARNING"]
    assert "about 40 pixels per side and are scaled up to 96" in messages(caplog)[0][1]
    for size, patch, sentence in ((20, 8, "or data.size to a multiple of 8"), (4, 8, "or data.size to more")):
        changes = {"data.source": small_domains, "data.held_out": "art", "data.size": size, "model.config.patch_size": patch}
        assert_refused(sentence, preflight, make_task(load_recipe("gmoe-tiny", changes)), parse_routers("smoe"))


def test_the_size_is_reported_once_for_all_held_out_domains(
    small_domains: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    monkeypatch.setattr(Comparison, "attempt", lambda *_: {})  # nothing is trained
    recipe = load_recipe("gmoe-tiny", {**FEW, "data.source": small_domains, "training.schedule": "constant"})
    comparison = Comparison(recipe, parse_routers("smoe"), 1, tmp_path / "run")
    assert len(comparison.run()) == 3
    assert [message for _, message in messages(caplog)] == ["16 patches per image: 32 pixels per side, 8 per patch."]


@pytest.mark.slow
def test_the_size_is_not_reported_again_for_the_baseline_of_equal_compute(
    digits: MakeRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    found = holdfast.compare("smoe,sparsemax", recipe="vmoe-tiny", seeds=1, out=tmp_path / "run", changes=FEW)
    assert [row.router for row in found.rows][2:] == ["smoe, top 4"]
    assert sum("patches per image" in message for _, message in messages(caplog)) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data.size": 39}, "cannot be divided into patches of 2, .* one of 1, 3, 13, 39, or data.size to"),
        ({"data.size": 40, "model.config.patch_size": 41}, "smaller than a patch of 41; .* or data.size to more"),
    ],
)
def test_sizes_that_patches_do_not_divide_are_refused(changes: dict[str, Any], sentence: str, small_images: str) -> None:
    task = make_task(load_recipe("vmoe-tiny", {"data.source": small_images, **changes}))
    assert_refused(sentence, preflight, task, parse_routers("smoe"))


def test_embedded_images_are_not_told_to_change_their_size(digits: MakeRecipe) -> None:
    with pytest.raises(ValueError, match=r"patches of 3, .* model.config.patch_size to one of 1, 2, 4, 8\.$"):
        preflight(make_task(digits({"model.config.patch_size": 3})), parse_routers("smoe"))


def test_swin_fills_up_sizes_that_patches_do_not_divide(small_images: str) -> None:
    config = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2, "patch_size": 4}
    changes = {"model": {"family": "swin", "config": config}, "data.source": small_images, "data.size": 30}
    task = make_task(load_recipe("vmoe-tiny", {**changes, "sparse": {"experts": 2, "layers": [1]}}))
    preflight(task, parse_routers("smoe"))
    build_model(task, "smoe", {}, seed=0)(**task.probe())


@pytest.mark.parametrize(("window", "fits"), [(2, True), (3, False)])
def test_a_stage_of_swin_with_fewer_patches_than_a_window_is_refused(window: int, fits: bool) -> None:
    """The model of transformers would fail in its first forward, with a message about shapes."""
    task = make_task(load_recipe("swin-moe-tiny", {"model.config.window_size": window}))
    if fits:
        preflight(task, parse_routers("smoe"))
        build_model(task, "smoe", {}, seed=0)(**task.probe())
        return
    with pytest.raises(ValueError, match=r"stage 3 .* 2 x 2 patches .* window of 3; set model.config.window_size to 2"):
        preflight(task, parse_routers("smoe"))


def run_at(seconds: list[float], steps: int, first: int = 0) -> None:
    """Call a `Pace` after each of some steps that take these times."""
    now = [0.0]
    pace = Pace(steps, "64 patches", "Set data.size to less.", clock=lambda: now[0])
    pace(first)
    for number, taken in enumerate(seconds):
        now[0] += taken
        pace(first + number + 1)
    pace.stop()


def test_a_very_long_run_is_announced_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    run_at([60.0, 2.0, 4.0, 2.0, 2.0], 100_000, first=50_000)  # the first step compiles kernels, and is not counted
    (line,) = messages(caplog)
    assert line[0] == "WARNING" and "about 42 hours: 3 seconds a step, and 49,997 steps are left." in line[1]
    assert line[1].endswith("64 patches. Set data.size to less.")


def test_a_short_run_is_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    run_at([60.0, 2.0, 4.0, 2.0], 1000)
    run_at([60.0], 100_000)
    assert messages(caplog) == []


def test_a_first_step_that_does_not_end_is_reported_while_it_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.train.training.SLOW_FIRST_STEP", 0.05)
    pace = Pace(2000, None, "Set data.size to less.")
    pace(0)
    end = time.monotonic() + 60
    while not messages(caplog) and time.monotonic() < end:
        time.sleep(0.02)
    assert "the first of 2,000 steps has taken 0 seconds so far. Set data.size to less." in messages(caplog)[0][1]
    assert SLOW_FIRST_STEP >= 10
    monkeypatch.undo()
    before = {*threading.enumerate()}
    quick = Pace(2000, None, "")
    quick(0)
    (timer,) = {*threading.enumerate()} - before
    quick(1)
    timer.join(60)
    assert not timer.is_alive() and len(messages(caplog)) == 1


def test_training_measures_its_steps(
    digits: MakeRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.train.training.VERY_LONG", 0.0)
    recipe = digits({"training.steps": 5, "training.warmup": 0})
    task = make_task(recipe)
    for trainer in (False, True):
        caplog.clear()
        train(build_model(task, "smoe", {}, seed=0), task, tmp_path / str(trainer), seed=0, k=2, trainer=trainer)
        (warning,) = [text for level, text in messages(caplog) if level == "WARNING"]
        assert "this run will take about 0 hours" in warning and "2 steps are left" in warning
        assert "16 patches per image: 8 pixels per side" in warning and "data.size" in warning

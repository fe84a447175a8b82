"""The recipe `cifar10`, and its tiny form on the real images."""

import os
from pathlib import Path

import pytest
import torch
from wording import assert_refused

from holdfast.cli.train import source_option
from holdfast.comparing import compare
from holdfast.train import load_recipe
from holdfast.train.image_attacks import BATCH, MOST_IN_BATCH, batch_size
from holdfast.train.task_record import TaskRecord

SHARED = Path(__file__).parents[3] / "shared" / "data"


def test_small_images_are_run_in_larger_batches_on_a_gpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert batch_size(32, cpu) == batch_size(224, gpu) == batch_size(512, gpu) == BATCH
    assert batch_size(32, gpu) == MOST_IN_BATCH and BATCH < batch_size(96, gpu) < MOST_IN_BATCH


def test_a_model_of_cifar10_is_told_where_to_name_its_files(tmp_path: Path) -> None:
    """Both the line after training and the error of `evaluate`: --source alone does not find the files."""
    assert source_option("cifar10", tmp_path) == f" --data {tmp_path}"
    record = TaskRecord(tmp_path, load_recipe("cifar10-tiny"), {})
    assert_refused("was trained on cifar10: add --data FOLDER", record.source)
    assert record.source(data=tmp_path) == "cifar10"


def test_a_source_outside_of_the_folder_of_a_model_is_refused_without_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = TaskRecord(tmp_path, load_recipe("tiny", {"data.source": "/"}), {})
    monkeypatch.setattr(os, "walk", lambda place: pytest.fail(f"{place} was searched"))
    assert_refused("was trained on '/', which is not in it; add --source / ", record.source)


@pytest.mark.slow
def test_cifar10_tiny_learns_and_is_attacked(tmp_path: Path) -> None:
    if not (SHARED / "cifar10").is_dir():
        pytest.skip("there is no cifar10 in ../shared/data")
    changes = {"training.steps": 120, "attack.examples": 48, "attack.spsa_examples": 8}
    results = compare("similarity", recipe="cifar10-tiny", seeds=1, out=tmp_path / "run", data=SHARED, changes=changes)
    (row,) = results.rows
    assert row.clean is not None and row.clean < 75  # by chance it is 90
    assert [len(curve.budgets) for curve in row.curves.values()] == [4, 4, 4]
    errors = [point.mean for point in row.curves["PGD"].figure if point is not None]
    assert errors == sorted(errors) and errors[0] < errors[-1]
    assert (tmp_path / "run" / "report.html").is_file()

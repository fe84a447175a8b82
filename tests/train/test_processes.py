"""The process group of a training run ends with it."""

from pathlib import Path

from torch import distributed
from wording import assert_refused

from holdfast.train.trainer_loop import own_process_group


def begin(folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)


def test_a_group_that_was_started_inside_is_destroyed(tmp_path: Path) -> None:
    with own_process_group():
        begin(tmp_path)
    assert not distributed.is_initialized()


def test_a_group_is_destroyed_after_an_error_too(tmp_path: Path) -> None:
    @own_process_group()
    def train() -> None:
        begin(tmp_path)
        raise ValueError("no data")

    assert_refused("no data", train)
    assert not distributed.is_initialized()


def test_a_group_that_was_started_before_stays(tmp_path: Path) -> None:
    begin(tmp_path)
    try:
        with own_process_group():
            pass
        assert distributed.is_initialized()
    finally:
        distributed.destroy_process_group()

"""Settings for all tests. Each worker uses one thread: tests run in parallel, and small products are faster that way."""

import gc
import os
import time

import hypothesis
import pytest
import torch
from commands import Command
from tiers import mark_combinations

hypothesis.settings.register_profile("no clocks", deadline=None)  # a slow machine is not a failure
hypothesis.settings.load_profile("no clocks")

# Compilers make many objects without reference cycles: collecting after every 700 took a tenth of the time.
gc.set_threshold(50_000, 20, 100)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start


STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stop-after",
        type=float,
        metavar="SECONDS",
        help="skip the tests that have not started by then, for a limited time",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--stop-after")
    if limit is not None and time.monotonic() - STARTED > limit:
        pytest.skip(f"the time for tests, {limit:g} s, was over")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_combinations(items)


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """Exclude imported objects from garbage collection, which accelerate starts for each training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test with the same random numbers, whichever tests ran before it in this process."""
    torch.manual_seed(0)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)

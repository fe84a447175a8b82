"""One thread a worker: the tests run side by side on few cores, and small products are faster that way."""

import gc
import os
from subprocess import CompletedProcess

import hypothesis
import pytest
import torch
from commands import Command
from tiers import mark_combinations

hypothesis.settings.register_profile("no clocks", deadline=None)  # a slow machine is not a failure
hypothesis.settings.load_profile("no clocks")

# Compilers make many objects that go by themselves: to look for circles after every 700 took a tenth of all time.
gc.set_threshold(50_000, 20, 100)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_combinations(items)


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """What is imported by now stays: the collector, which accelerate starts for each training, need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`holdfast` with these arguments, in this process: a fresh one imports for two to six seconds before it does a thing.

    That a process prints the same and ends with the same code, test_compare.py, test_plan.py and test_routers.py see.
    """
    from holdfast_command import main

    def run(*arguments: str, columns: int = 80) -> CompletedProcess[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        try:
            code: object = main(list(arguments))
        except SystemExit as end:  # help ends so
            code = end.code or 0
        said = capsys.readouterr()
        assert isinstance(code, int)
        return CompletedProcess(arguments, code, said.out, said.err)

    return run

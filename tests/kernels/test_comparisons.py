"""Every kernel equals the naive mathematics: on the GPU where there is one, and otherwise in Triton's interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiers import quick_or_slow

pytest.importorskip("triton")

from kernels.comparing_process import comparisons

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCRIPT = Path(__file__).with_name("comparing_process.py")
QUICK = [
    "balance (70, 6, 3) True",
    "finite nan at -1 of 5000",
    "dispatch (200, 3, 6)",
    "dispatch into fewer rows (200, 3, 6)",
    "strips_of_their_own 13 4 shares True 6",
    "products torch.float16 torch.float32 5 100",
    "choices 13 4 softmax False 0.3 13",
    "layer False relu True",
    "layer True silu False",
    "choices 13 4 shares True 1.5 6 (2.5, 7.0)",
    "mix: padded",
    "softmax_mix, wide vectors",
    "mix: chunks, padded",
    "heads",
    "pointers: inside",
    "pointers: a load past the end",
    "pointers: a store past the end",
    "pointers: an atomic addition past the end",
]


@pytest.fixture(scope="module")
def compare() -> Iterator[Callable[[str], str | None]]:
    """Return what makes a comparison by name and returns the traceback of its error, or None. One process makes all."""
    tests = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if DEVICE == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), DEVICE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None and answers is not None

        def ask(name: str) -> str | None:
            print(name, file=questions, flush=True)
            answer = answers.readline()
            assert answer, f"the process ended with code {process.wait()}"
            return json.loads(answer)

        yield ask
        questions.close()


@pytest.mark.parametrize("name", quick_or_slow(comparisons(DEVICE), QUICK))
def test_the_kernels_equal_the_naive_mathematics(name: str, compare: Callable[[str], str | None]) -> None:
    error = compare(name)
    assert error is None, error


def test_an_error_in_that_process_is_reported(compare: Callable[[str], str | None]) -> None:
    error = compare("no such kernel")
    assert error is not None and "KeyError" in error

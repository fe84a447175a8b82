"""The GPU kernels against the naive mathematics, in Triton's interpreter on a CPU, or on the GPU where there is one.

Triton decides at import whether to interpret, so the comparison runs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
COMPARISONS = {"compare_kernels.py": 91, "compare_routing_kernels.py": 508}  # with how many comparisons each makes


@pytest.mark.parametrize("script", COMPARISONS)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here; the interpreter test covers the arithmetic")
def test_kernels_equal_the_naive_mathematics_on_the_gpu(script: str) -> None:
    subprocess.run([sys.executable, str(HERE / script), "cuda"], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("script", COMPARISONS)
def test_kernels_equal_the_naive_mathematics_in_the_interpreter(script: str) -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, str(HERE / script), "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{COMPARISONS[script]} comparisons" in run.stdout

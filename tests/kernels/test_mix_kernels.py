"""The mixing kernels against the explicit matrix, in Triton's interpreter on a CPU, or on the GPU where there is one.

Triton decides at import whether to interpret, so the comparison runs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.kernels.attention import attention_entropy
from holdfast.kernels.token_mixing import SecondProduct, softmax_mix

COMPARISON = Path(__file__).with_name("compare_mixing.py")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here; the interpreter test covers the arithmetic")


@on_gpu
def test_kernels_equal_the_explicit_matrix_on_the_gpu() -> None:
    subprocess.run([sys.executable, str(COMPARISON), "cuda"], check=True)


@pytest.mark.slow
def test_kernels_equal_the_explicit_matrix_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, str(COMPARISON), "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "137 comparisons" in run.stdout


@on_gpu
def test_the_gpu_repeats_to_the_bit_and_in_a_captured_graph() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(2, 300, 64, device="cuda", requires_grad=True) for _ in range(2))
    value = torch.rand(2, 300, 16, device="cuda", requires_grad=True)
    other = SecondProduct(torch.randn(2, 300, 32, device="cuda"), torch.randn(2, 300, 32, device="cuda"), 0.1)
    heads = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        out = softmax_mix(query, key, value, scale=0.2, causal=True, second=other)
        entropy = attention_entropy(heads, heads, scale=0.2, causal=True)
        grads = torch.autograd.grad(out.square().sum(), [query, key, value])
        return [out.detach(), entropy, *grads]  # a graph that lived on would tie the leaves to the stream it was made on

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first, again = step(), step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    for one, two, three in zip(first, again, captured, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)

"""The mixing kernels on a GPU repeat to the bit, also in a captured graph."""

import pytest
import torch

from holdfast.kernels.attention import attention_entropy
from holdfast.kernels.token_mixing import SecondProduct, softmax_mix

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


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

"""The mixing kernels on a GPU repeat to the bit, also in a captured graph; those for wide vectors are as exact as others."""

import pytest
import torch

from holdfast.kernels.attention import attention_entropy
from holdfast.kernels.token_mixing import SecondProduct, naive, softmax_mix

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@on_gpu
@pytest.mark.parametrize("width", [64, 384])
def test_the_gpu_repeats_to_the_bit_and_in_a_captured_graph(width: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 300, width, device="cuda", requires_grad=True)
    value = torch.rand(2, 300, 16, device="cuda", requires_grad=True)
    key, other = query, None
    if width <= 256:  # the kernels take wide vectors only if keys equal queries and there is no second product
        key = torch.randn(2, 300, width, device="cuda", requires_grad=True)
        other = SecondProduct(torch.randn(2, 300, 32, device="cuda"), torch.randn(2, 300, 32, device="cuda"), 0.1)
    heads = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        out = softmax_mix(query, key, value, scale=1.6 / width**0.5, causal=True, second=other)
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


@pytest.mark.parametrize("width", [64, 384])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own keys"])
@pytest.mark.parametrize("second", [0, 32, 384])
@pytest.mark.every_combination
def test_the_kernels_take_wide_vectors_only_in_calls_that_ran_on_a_gpu(width: int, shared: bool, second: int) -> None:
    """A wide call with keys of its own and a second product ended with an illegal memory access: see `launch.supports`."""
    launch = pytest.importorskip("holdfast.kernels.token_mixing.launch")
    rows = torch.zeros(2, 20, width)
    other = torch.zeros(2, 20, second) if second else None
    is_wide = max(width, second) > 256
    supported = launch.supports(rows, rows if shared else rows.clone(), torch.zeros(2, 20, 16), other, other, shared)
    assert supported == (not is_wide or (shared and second == 0))


@pytest.mark.parametrize(("length", "supported"), [(512, True), (1024, False)])
def test_the_kernels_take_wide_vectors_only_if_all_slopes_are_held(length: int, supported: bool) -> None:
    launch = pytest.importorskip("holdfast.kernels.token_mixing.launch")
    rows, value = torch.empty(64, length, 384, device="meta"), torch.empty(64, length, 16, device="meta")
    assert launch.supports(rows, rows, value, None, None, True) == supported


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("length", [512, 500])
@pytest.mark.parametrize("width", [256, 352, 384, 512, 768, 2048])
def test_outputs_and_gradients_do_not_depend_on_the_width(width: int, length: int, dtype: torch.dtype) -> None:
    """Relative errors against float64, in the norm. Tokens of unit variance; a score of a token with itself is about 4."""
    torch.manual_seed(0)
    tokens = torch.randn(2, length, width).to(dtype)
    value, grad = torch.randn(2, length, 16).softmax(-1), torch.randn(2, length, 16)
    exact = [rows.double().requires_grad_() for rows in (tokens, value)]
    expected = naive.mixing_weights(exact[0], exact[0], 4 / width, causal=True) @ exact[1]
    wanted = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    leaves = [rows.cuda().requires_grad_() for rows in (tokens, value)]
    out = softmax_mix(leaves[0], leaves[0], leaves[1], scale=4 / width, causal=True)
    found = [out, *torch.autograd.grad(out, leaves, grad.cuda())]
    for got, right, within in zip(found, wanted, (2e-6, 1e-4 if dtype == torch.float32 else 4e-3, 1e-4), strict=True):
        error = float((got.detach().cpu().double() - right.detach()).norm() / right.detach().norm())
        assert error <= within

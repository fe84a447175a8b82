"""NaN and infinite scores are reported once, by the layer they were first seen in, however late a GPU is."""

from collections.abc import Iterator

import pytest
import torch
from wording import assert_refused

from holdfast.kernels import finite
from holdfast.kernels.finite import encode_name, require_finite, require_finite_so_far

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture
def replaying() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        for record in finite._records.values():
            record.clear()


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_cpu_reports_at_once_and_does_not_look_at_padding(bad: float) -> None:
    scores = torch.randn(2, 5, 3)
    scores[1, 4, 2] = bad
    tokens, layer = torch.randn(2, 5, 4), encode_name("layers.3")
    assert_refused(r"layers\.3: .*although its tokens are finite", require_finite, scores, tokens, layer, None)
    tokens[1, 4] = bad
    assert_refused(r"because 1 of 10 tokens", require_finite, scores, tokens, layer, None)
    real = torch.ones(2, 5, dtype=torch.bool)
    real[1, 4] = False
    assert require_finite(scores, tokens, layer, real) is scores
    require_finite_so_far()  # nothing is left to report


@needs_gpu
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gpu_reports_at_one_of_the_next_checks_and_not_before(bad: float) -> None:
    good = torch.randn(2, 300, 8, device="cuda")
    scores, layer, later = good.clone(), encode_name("layers.3").cuda(), encode_name("layers.4")
    scores[1, 299, 7] = bad
    for each in (good, scores):
        assert require_finite(each, good, layer, None) is each
    torch.cuda.synchronize()
    assert_refused(r"layers\.3: .*NaN", require_finite, good, good, later, None)
    real = torch.ones(2, 300, dtype=torch.bool, device="cuda")
    real[1, 299] = False
    for _ in range(2):  # values of padding are not checked
        require_finite(scores, good, layer, real)
        torch.cuda.synchronize()


@needs_gpu
@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("has_triton", [True, False])
def test_a_nan_in_a_replay_is_reported_with_the_first_layer(has_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "HAS_TRITON", has_triton)
    scores = torch.zeros(2, 8, 4, device="cuda")
    layers = [encode_name(f"layers.{number}").cuda() for number in range(3)]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for layer in layers:
        require_finite(scores, scores, layer, None)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        require_finite(scores, scores, layers[0], None)
        scores += 1.0
        require_finite(scores.log() * scores, scores, layers[1], None)
        require_finite(scores.log(), scores, layers[2], None)
    for _ in range(29):
        graph.replay()
        require_finite_so_far()
    torch.cuda.synchronize()
    optimizer.step()
    scores[1, 3, 2] = -2.0
    graph.replay()
    torch.cuda.synchronize()
    assert_refused(r"layers\.1: .*NaN", optimizer.step)
    scores.zero_()
    graph.replay()
    torch.cuda.synchronize()
    require_finite_so_far()  # it was reported, and the next replay is sound

"""The decoding cache: rows that follow beam search, cropping and repetition."""

from typing import Any

import pytest
import torch
from wording import assert_refused

import holdfast
from holdfast.routing import Context, RouterCache


def test_rows_accumulate_and_follow_the_sequences() -> None:
    cache = RouterCache()
    rows = torch.arange(12.0).view(2, 3, 2)
    assert torch.equal(cache.extend("p", rows[:, :2]), rows[:, :2])
    assert torch.equal(cache.extend("p", rows[:, 2:]), rows)
    assert cache.tokens == 3
    cache.reorder(torch.tensor([1, 1]))
    assert torch.equal(cache.extend("p", rows[:, :0]), rows[[1, 1]])
    cache.crop(2)
    cache.repeat(2)
    assert torch.equal(cache.extend("p", torch.zeros(4, 0, 2)), rows[[1, 1, 1, 1], :2])
    cache.reset()
    assert cache.tokens == 0


@pytest.mark.parametrize(("name", "options"), [("capacity", {}), ("softmoe", {}), ("similarity", {"causal": False})])
def test_a_router_that_cannot_decode_refuses_a_cache(name: str, options: dict[str, Any]) -> None:
    router = holdfast.create_router(name, dim=16, experts=8, **options).eval()
    assert_refused("cacheable=False", router, torch.randn(2, 3, 16), Context(causal=True, cache=RouterCache()))

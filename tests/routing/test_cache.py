"""The decoding cache: rows that follow beam search, cropping and repetition."""

import torch

from holdfast.routing import RouterCache


def test_rows_accumulate_and_follow_the_sequences() -> None:
    cache = RouterCache()
    rows = torch.arange(12.0).view(2, 3, 2)
    assert torch.equal(cache.extend("p", rows[:, :2]), rows[:, :2])
    assert torch.equal(cache.extend("p", rows[:, 2:]), rows)
    assert cache.length("p") == 3 and cache.length("q") == 0
    cache.reorder(torch.tensor([1, 1]))
    assert torch.equal(cache.extend("p", rows[:, :0]), rows[[1, 1]])
    cache.crop(2)
    cache.repeat(2)
    assert torch.equal(cache.extend("p", torch.zeros(4, 0, 2)), rows[[1, 1, 1, 1], :2])
    cache.reset()
    assert cache.length("p") == 0

"""Blocks predict every token once; the training order depends only on seed and step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wording import assert_refused

from holdfast.data import Blocks, Order
from holdfast.data.draws import shuffled


@given(st.integers(2, 70), st.integers(1, 20), st.integers(1, 5))
def test_every_token_is_predicted_once_and_read_before(count: int, length: int, size: int) -> None:
    tokens = torch.arange(100, 100 + count)
    blocks = Blocks(tokens, length)
    batches = list(blocks.batches(size))
    read = torch.cat([batch.inputs[batch.mask] for batch in batches])
    predicted = torch.cat([batch.labels[batch.mask] for batch in batches])
    assert torch.equal(predicted, tokens[1:]) and torch.equal(read, tokens[:-1])
    assert sum(int(batch.mask.sum()) for batch in batches) == blocks.scored == count - 1
    assert sum(len(batch.inputs) for batch in batches) == len(blocks)
    for batch in batches:
        assert batch.inputs.shape == batch.labels.shape == batch.mask.shape and batch.inputs.shape[1] == length
        assert bool((batch.inputs[~batch.mask] == 0).all())
        assert bool((batch.labels[~batch.mask] == -100).all())


def test_the_last_block_is_padded_and_the_others_are_whole() -> None:
    blocks = Blocks(torch.arange(1, 12), 4)
    batch = blocks.batch([0, 2])
    assert batch.inputs.tolist() == [[1, 2, 3, 4], [9, 10, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, 4, 5], [10, 11, -100, -100]]
    assert batch.mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert (len(blocks), blocks.whole, blocks.scored) == (3, 2, 10)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_tokens_may_be_small_integers_and_models_get_int64(dtype: torch.dtype) -> None:
    batch = Blocks(torch.tensor([5, 255, 6, 7], dtype=dtype), 2).batch([0, 1])
    assert batch.inputs.dtype == batch.labels.dtype == torch.int64
    assert batch.inputs.tolist() == [[5, 255], [6, 0]]


def test_one_token_has_nothing_to_predict() -> None:
    assert_refused("predict", lambda: Blocks(torch.arange(1), 2))


def batch(order: Order, step: int) -> torch.Tensor:
    return order.at(range(step * order.size, (step + 1) * order.size))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(-3, 2**65))
def test_an_epoch_shows_every_example_once_whatever_the_batch(count: int, size: int, seed: int) -> None:
    order = Order(count, size, seed)
    seen = torch.cat([batch(order, step) for step in range(-(-3 * count // size))]).tolist()
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


@given(st.integers(1, 9), st.integers(1, 5), st.lists(st.integers(0, 60), max_size=12))
def test_every_place_of_the_endless_sequence_can_be_read(count: int, size: int, places: list[int]) -> None:
    """Places may be in several epochs and in any order."""
    order = Order(count, size, seed=4)
    naive = [int(shuffled(count, seed=4, epoch=place // count)[place % count]) for place in places]
    assert order.at(places).tolist() == naive
    assert order.at(iter(places)).dtype == torch.int64


def test_the_order_is_the_same_in_every_version_of_every_library() -> None:
    """Results of old runs depend on these numbers: they must not change."""
    assert shuffled(10, seed=0, epoch=0).tolist() == [4, 8, 0, 1, 7, 6, 2, 5, 3, 9]
    assert shuffled(10, seed=1, epoch=3).tolist() == [6, 1, 2, 9, 5, 0, 4, 3, 8, 7]


def mixed(state: int) -> int:
    """Return SplitMix64 in Python's integers."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@given(st.integers(0, 60), st.integers(0, 2**64 - 1), st.integers(0, 99))
def test_the_order_is_that_of_splitmix64_keys(count: int, seed: int, epoch: int) -> None:
    assert mixed(1234567) == 6457827717110365317  # published with the generator
    start = mixed(mixed(seed) ^ epoch)
    keys = [mixed((start + number) % 2**64) for number in range(count)]
    assert shuffled(count, seed=seed, epoch=epoch).tolist() == sorted(range(count), key=keys.__getitem__)

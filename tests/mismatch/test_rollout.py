"""`Rollout`: what engines and trainers have, in one file, and what is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_routes import random_routes
from tiny import tiny
from wording import assert_refused

import holdfast
from holdfast.mismatch.rollout import read_record, rollout_of_lines

TOKENS = [[5, 9, 13, 7], [4, 8, 15, 16, 23, 42]]
NAN = float("nan")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("mixtral")


def records() -> list[Any]:
    """Return what vLLM has: one row fewer than tokens."""
    found = random_routes(3, shape=(2, 6)).numpy()
    return [found[0, :3], found[1, :5]]


def rollout(model: Any, **options: Any) -> holdfast.Rollout:
    return holdfast.Rollout.from_sequences(TOKENS, records(), model, **options)


def test_sequences_of_an_engine_are_padded_on_the_right(model: Any) -> None:
    found = rollout(model, logprobs=[[-1.0, -2.0], [-0.5]], engine="vLLM")
    assert found.input_ids.tolist() == [[5, 9, 13, 7, 0, 0], TOKENS[1]] and found.lengths.tolist() == [4, 6]
    assert found.token_mask.tolist() == [[True] * 4 + [False] * 2, [True] * 6]
    assert found.recorded.tolist() == [[True] * 3 + [False] * 3, [True] * 5 + [False]]
    assert found.routes.experts[1, :5].tolist() == records()[1].tolist()
    assert found.logprobs is not None
    expected = [[NAN, NAN, -1.0, -2.0, NAN, NAN], [NAN] * 5 + [-0.5]]
    np.testing.assert_array_equal(found.logprobs.numpy(), np.array(expected, dtype=np.float32))


def test_a_batch_padded_on_the_left_is_the_same_rollout(model: Any) -> None:
    """Prompts of 3 and 5 columns, answers in the last 2 columns, as in TRL; one answer ended early."""
    ids = torch.tensor([[0, 0, 5, 9, 13, 7, 0], [0, 4, 8, 15, 16, 23, 42]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1]])
    routes = torch.full((2, 7, 3, 2), -1)
    routes[0, 2:5], routes[1, 1:6] = torch.from_numpy(records()[0]), torch.from_numpy(records()[1])
    logprobs = torch.tensor([[-2.0, 0.0], [NAN, -0.5]])
    found = holdfast.Rollout.from_batch(
        ids, holdfast.Routes.from_tensor(routes, model), attention_mask=mask, logprobs=logprobs
    )
    same = rollout(model, logprobs=[[-2.0], [-0.5]])
    assert torch.equal(found.input_ids, same.input_ids) and torch.equal(found.lengths, same.lengths)
    assert torch.equal(found.routes.experts, same.routes.experts)
    assert found.logprobs is not None and same.logprobs is not None
    np.testing.assert_array_equal(found.logprobs.numpy(), same.logprobs.numpy())


@pytest.mark.parametrize("logprobs", [None, [[-1.0, -2.0], [-0.5]]])
def test_a_file_gives_the_rollout_back(model: Any, tmp_path: Path, logprobs: Any) -> None:
    kept = rollout(model, logprobs=logprobs, engine="SGLang")
    kept.save(tmp_path / "rollout.safetensors")
    found = read_record(tmp_path / "rollout.safetensors")
    assert isinstance(found, holdfast.Rollout) and found.engine == "SGLang" and found.routes.of == kept.routes.of
    assert torch.equal(found.input_ids, kept.input_ids) and torch.equal(found.routes.experts, kept.routes.experts)
    assert (found.logprobs is None) == (logprobs is None)
    if found.logprobs is not None and kept.logprobs is not None:
        np.testing.assert_array_equal(found.logprobs.numpy(), kept.logprobs.numpy())


def test_a_file_of_routes_alone_is_read_as_routes(model: Any, tmp_path: Path) -> None:
    rollout(model).routes.save(tmp_path / "routes.safetensors")
    assert isinstance(read_record(tmp_path / "routes.safetensors"), holdfast.Routes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logprobs": [[-1.0] * 5, [-0.5]]}, "sequence 0 has 5 log-probabilities, but 4 tokens"),
        ({"logprobs": [[-1.0]]}, "log-probabilities of 1 sequences, but 2 sequences"),
        ({"logprobs": [[0.7], [-0.5]]}, "log-probability 0.7; expected finite numbers of at most 0"),
        ({"logprobs": [[float("-inf")], [-0.5]]}, "log-probability -inf"),
        ({"tokens": []}, "there are no token ids"),
        ({"tokens": [[5], []]}, "there are no token ids"),
        ({"tokens": [TOKENS[0][:2], TOKENS[1]]}, "sequence 0: its record has 3 rows"),
        ({"routed_experts": [None, None]}, "no record at any token"),
        ({"routed_experts": [records()[0]]}, "there are 1 records and 2 starts for 2 sequences"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(model: Any, change: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"tokens": TOKENS, "routed_experts": records(), "logprobs": None, **change}
    tokens, routed, logprobs = given["tokens"], given["routed_experts"], given["logprobs"]
    assert_refused(re.escape(says), holdfast.Rollout.from_sequences, tokens, routed, model, logprobs=logprobs)


def test_routes_without_a_place_for_the_last_token_of_a_line_are_placed(model: Any) -> None:
    routes = holdfast.Routes.from_tensor(random_routes(3, shape=(2, 5)), model)
    lines = [[4, 8, 15, 16, 23, 42], [5, 9, 13, 7, 3]]
    found = rollout_of_lines(lines, routes)
    assert found.input_ids.tolist() == [lines[0], [*lines[1], 0]] and found.lengths.tolist() == [6, 5]
    assert torch.equal(found.routes.experts[:, :5], routes.experts) and not found.recorded[:, 5].any()


def test_shapes_that_do_not_fit_are_refused(model: Any) -> None:
    kept = rollout(model)
    routes = holdfast.Routes.from_tensor(kept.routes.experts[:, :5], model)
    with pytest.raises(ValueError, match="the routes are of 2 x 5 tokens, but the token ids are of 2 x 6"):
        holdfast.Rollout(kept.input_ids, kept.lengths, routes)
    assert_refused("need a length each", holdfast.Rollout, kept.input_ids, torch.tensor([4, 7]), kept.routes)
    assert_refused("expected floats", holdfast.Rollout, kept.input_ids, kept.lengths, kept.routes, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="log-probabilities have shape"):
        holdfast.Rollout.from_batch(kept.input_ids, kept.routes, logprobs=torch.zeros(2, 9))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        holdfast.Rollout.from_batch(kept.input_ids, kept.routes, attention_mask=torch.ones(2, 3))


def test_damaged_files_are_refused(model: Any, tmp_path: Path) -> None:
    from safetensors.torch import load, save

    kept, path = rollout(model, logprobs=[[-1.0], [-0.5]]), tmp_path / "rollout.safetensors"
    kept.save(path)
    tensors = load(path.read_bytes())
    notes = {"holdfast_rollout": "1", "of": kept.routes.of.to_json(), "engine": "x"}

    def refused(changed: dict[str, torch.Tensor], says: str, **others: str) -> None:
        path.write_bytes(save(changed, {**notes, **others}))
        assert_refused(says, read_record, path)

    refused(tensors, "no rollout that this Holdfast can read", holdfast_rollout="2")
    refused({"input_ids": tensors["input_ids"]}, "no rollout that this Holdfast can read")
    refused({**tensors, "extra": torch.zeros(1)}, "no rollout that this Holdfast can read")
    refused({**tensors, "input_ids": tensors["input_ids"].float()}, "input_ids are torch.float32")
    refused({**tensors, "logprobs": tensors["logprobs"].double()}, "logprobs are torch.float64")
    refused({**tensors, "lengths": torch.tensor([4, 99])}, "need a length each")
    refused({**tensors, "experts": tensors["experts"] + 90}, "names expert")
    refused({**tensors, "experts": tensors["experts"].to(torch.complex64)}, "expected integers")
    refused({**tensors, "experts": tensors["experts"][..., :0].contiguous()}, "expected integers \\(B, N, L, K\\)")
    refused(tensors, "cannot be used", of="{")
    path.write_bytes(b"not a tensor")
    assert_refused("cannot be read as safetensors", read_record, path)
    assert_refused("does not exist", read_record, tmp_path / "nothing")
    assert_refused("is a folder", read_record, tmp_path)

"""Changed models where they are served: by several threads, sent to other processes, refused where they would see ahead."""

import copy
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from changed_models import changed
from tiny import tiny, with_checkpointing
from tiny_dense import inputs, tiny_dense
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Losses

LOSSES = Losses(balance=0.1)


def ids_of(length: int, sequences: int = 2) -> Tensor:
    return torch.randint(3, 60, (sequences, length), generator=torch.Generator().manual_seed(length))


def between_attention_and_gate(model: Any, act: Callable[[], Any]) -> None:
    """Call `act` once in another thread in the next forward, when the second layer's attention has been captured."""

    def act_once(*_: Any) -> None:
        handle.remove()
        with ThreadPoolExecutor(1) as other:
            other.submit(act).result()

    handle = model.model.layers[1].mlp.register_forward_pre_hook(act_once)


@pytest.mark.parametrize("past", [0, 4])
@pytest.mark.parametrize("router", ["ac", "similarity", "attention", "hash"])
def test_threads_do_not_hear_each_other(router: str, past: int) -> None:
    model: Any = holdfast.reroute(tiny("mixtral"), router)
    mine, others = ids_of(9), ids_of(14, 3)

    @torch.no_grad()
    def run(ids: Tensor, meanwhile: Callable[[], Any] | None = None) -> Tensor:
        cache = model(input_ids=ids[:, :past], use_cache=True).past_key_values if past else None
        if meanwhile is not None:
            between_attention_and_gate(model, meanwhile)
        return model(input_ids=ids[:, past:], past_key_values=cache).logits  # type: ignore[no-any-return]

    expected, found = [run(mine), run(others)], []
    assert torch.equal(run(mine, lambda: found.append(run(others))), expected[0])
    assert torch.equal(found[0], expected[1])


def test_one_thread_at_a_time_runs_a_model_in_training_mode() -> None:
    model: Any = holdfast.reroute(tiny("mixtral"), "smoe", losses=LOSSES).train()
    ids = ids_of(9)
    right = model(input_ids=ids, labels=ids).loss

    def run_other() -> None:
        with torch.no_grad(), pytest.raises(ValueError, match="two threads"):
            model(input_ids=ids)

    between_attention_and_gate(model, run_other)
    assert torch.equal(model(input_ids=ids, labels=ids).loss, right)
    with ThreadPoolExecutor(1) as other:  # one after the other is allowed
        assert torch.equal(other.submit(lambda: model(input_ids=ids, labels=ids).loss).result(), right)


def test_calibrations_may_end_in_any_order() -> None:
    model: Any = holdfast.reroute(tiny("mixtral"), "symphony").train()
    graph = model.model.layers[0].mlp.gate.holdfast.inform[0]

    @torch.no_grad()
    def learns() -> bool:
        before = copy.deepcopy(graph.state_dict())
        model(input_ids=ids_of(9))
        return any(not torch.equal(value, before[name]) for name, value in graph.state_dict().items())

    first, second = holdfast.calibrate(model), holdfast.calibrate(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert learns()
    second.__exit__(None, None, None)
    assert not learns()


@pytest.mark.parametrize(
    ("family", "router"), [("mixtral", "attention"), ("deepseek_v3", "native"), ("llama", "ac+symphony+similarity+smooth")]
)
def test_a_pickled_model_is_the_same_model(family: str, router: str) -> None:
    model = changed(family, router, losses=LOSSES)
    other = pickle.loads(pickle.dumps(model))
    assert type(other) is type(model) and type(other.config) is type(model.config)
    batch = inputs("llama") if family == "llama" else {"input_ids": ids_of(9), "labels": ids_of(9)}
    assert torch.equal(other.eval()(**batch).logits, model.eval()(**batch).logits)
    assert torch.equal(other.train()(**batch).loss, model.train()(**batch).loss)


SEES_AHEAD = ["similarity[causal=false]", "ac[stats=batch]", "capacity[policy=next]", "smoe+capacity[factor=0.7]"]
SEES_AHEAD += ["remoe+capacity", "expert-choice[evaluate=same]"]


@pytest.mark.parametrize("router", SEES_AHEAD)
def test_a_router_that_sees_ahead_is_announced_and_does_not_generate(router: str) -> None:
    with pytest.warns(UserWarning, match="later tokens: its perplexity cannot be compared"):
        model: Any = holdfast.reroute(tiny("mixtral"), router)
    assert_refused("cannot generate", model.generate, ids_of(9), max_new_tokens=2)
    past = model(input_ids=ids_of(9)).past_key_values
    assert_refused("KV cache", model, input_ids=ids_of(1), past_key_values=past)
    model.train()(input_ids=ids_of(9), labels=ids_of(9)).loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.sparsify(tiny_dense("bert"), experts=4, router=router)
        holdfast.reroute(model.eval(), "similarity").generate(ids_of(9), max_new_tokens=2)


@pytest.mark.parametrize("router", ["ac", "attention"])
def test_a_backward_in_another_thread_recomputes_what_the_forward_saw(router: str) -> None:
    """As on a GPU, whose backward has a thread of its own, from step to step."""
    gradients = []
    for checkpointed in (False, True):
        model = with_checkpointing(holdfast.reroute(tiny("mixtral"), router).train(), checkpointed)
        with ThreadPoolExecutor(1) as backwards:
            for turn in range(3):
                ids = ids_of(12, 3).roll(turn)
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                backwards.submit(loss.backward).result()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)

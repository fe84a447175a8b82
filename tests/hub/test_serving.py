"""Changed models where they are served: by several threads, sent to other processes, refused where they would see ahead."""

import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny import tiny
from tiny_dense import inputs, tiny_dense
from torch import Tensor

import holdfast
from holdfast import Losses

LOSSES = Losses(balance=0.1)


def ids_of(length: int, sequences: int = 2) -> Tensor:
    return torch.randint(3, 60, (sequences, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("router", ["ac", "similarity", "attention"])
def test_threads_do_not_hear_each_other(router: str) -> None:
    model: Any = holdfast.reroute(tiny("mixtral"), router)
    batches = [ids_of(9), ids_of(14, 3)]
    with torch.no_grad():
        expected = [model(input_ids=ids).logits for ids in batches]
    wrong: list[object] = []

    def serve(ids: Tensor, right: Tensor) -> None:
        try:
            with torch.no_grad():
                for _ in range(40):
                    if not torch.allclose(model(input_ids=ids).logits, right, atol=1e-5):
                        wrong.append("another's logits")
        except Exception as problem:
            wrong.append(problem)

    threads = [threading.Thread(target=serve, args=each) for each in zip(batches, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("family", "router"), [("mixtral", "attention"), ("deepseek_v3", "native"), ("llama", "ac+symphony+similarity+smooth")]
)
def test_a_pickled_model_is_the_same_model(family: str, router: str) -> None:
    if family == "llama":
        model: Any = holdfast.sparsify(tiny_dense(family), experts=4, router=router, losses=LOSSES)
    else:
        model = holdfast.reroute(tiny(family), router, losses=LOSSES)
    other = pickle.loads(pickle.dumps(model))
    assert type(other) is type(model) and type(other.config) is type(model.config)
    batch = inputs("llama") if family == "llama" else {"input_ids": ids_of(9), "labels": ids_of(9)}
    assert torch.equal(other.eval()(**batch).logits, model.eval()(**batch).logits)
    assert torch.equal(other.train()(**batch).loss, model.train()(**batch).loss)


@pytest.mark.parametrize(("router", "options"), [("similarity", {"causal": False}), ("ac", {"stats": "batch"})])
def test_a_router_that_sees_ahead_is_announced_and_does_not_generate(router: str, options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="perplexity"):
        model: Any = holdfast.reroute(tiny("mixtral"), router, **options)
    with pytest.raises(ValueError, match="generate"):
        model.generate(ids_of(9), max_new_tokens=2)
    past = model(input_ids=ids_of(9)).past_key_values
    with pytest.raises(ValueError, match="KV cache"):
        model(input_ids=ids_of(1), past_key_values=past)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.sparsify(tiny_dense("bert"), experts=4, router=router, router_options=options)
        holdfast.reroute(model, router).generate(ids_of(9), max_new_tokens=2)


@pytest.mark.parametrize("router", ["ac", "attention"])
def test_a_backward_in_another_thread_recomputes_what_the_forward_saw(router: str) -> None:
    """As on a GPU, whose backward has a thread of its own, from step to step."""
    gradients = []
    for checkpointed in (False, True):
        model: Any = holdfast.reroute(tiny("mixtral"), router).train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with ThreadPoolExecutor(1) as backwards:
            for turn in range(3):
                ids = ids_of(12, 3).roll(turn)
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                backwards.submit(loss.backward).result()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    for name, theirs in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], theirs, atol=1e-6, rtol=1e-5)

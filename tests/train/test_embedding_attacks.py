"""PGD and the adaptive attack on embeddings, against forwards of one text at a time and within their budget."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train.conftest import TEXT, MakeRecipe
from wording import assert_refused

import holdfast
from holdfast.train import load_recipe
from holdfast.train.embedding_attacks import _attack, _Texts, attack_embeddings
from holdfast.train.saved_model import make_task
from holdfast.train.text_task import TextTask

BUDGET, HOW = 0.3, {"steps": 6, "tokens": 48, "seed": 0}


@pytest.fixture(scope="module")
def attacked(text: Path) -> tuple[Any, Any]:
    task = make_task(load_recipe("tiny", {**TEXT, "data.source": str(text)}))
    torch.manual_seed(0)
    model = holdfast.sparsify(task.initial_model(), experts=4, k=1, router="smoe").eval()
    with torch.no_grad():  # experts that disagree, so that routes matter
        for name, weight in model.named_parameters():
            weight += 0.3 * torch.randn_like(weight) * weight.std() if "expert" in name or "router" in name else 0
    return model, task


def texts_of(model: Any, task: Any) -> _Texts:
    batch = task.clean.blocks.batch(range(3))
    return _Texts(model, {"input_ids": batch.inputs, "attention_mask": batch.mask.long()}, batch.labels, False)


def keep_last(texts: _Texts, embeddings: Tensor, loss: Tensor, wrong: Tensor) -> None:
    texts.best = embeddings.detach()


@pytest.mark.parametrize("kind", ["pgd", "adaptive"])
def test_the_loss_is_that_of_the_perturbed_embeddings_and_they_are_within_the_budget(attacked: Any, kind: str) -> None:
    model, task = attacked
    texts = texts_of(model, task)
    _attack(texts, kind, BUDGET, 6, None, 1, 0, 0)
    clean = model.get_input_embeddings()(texts.inputs["input_ids"]).detach()
    share = (texts.best.double() - clean.double()).norm(dim=-1) / clean.double().norm(dim=-1)
    assert float(share.max()) <= BUDGET * (1 + 1e-6) and float(share.max()) > 0.9 * BUDGET
    for row in range(3):
        with torch.no_grad():
            logits = model(inputs_embeds=texts.best[row : row + 1], use_cache=False).logits[0]
        kept = texts.labels[row] != -100
        naive = torch.nn.functional.cross_entropy(logits[kept], texts.labels[row][kept])
        torch.testing.assert_close(texts.loss[row], naive, rtol=1e-5, atol=1e-5)
    assert (texts.loss > texts.clean_loss).all()


def test_following_routes_changes_more_of_them_and_the_adaptive_attack_is_no_weaker_than_pgd(attacked: Any) -> None:
    model, task = attacked
    flips = {}
    for routes in (True, False):
        texts = texts_of(model, task)
        ball = texts.ball(BUDGET)
        texts.keep_worst = partial(keep_last, texts)  # type: ignore[method-assign]
        texts.climb(ball, texts.random(ball, 0, 0, 0), 6, 2.5 / 6, routes)
        flips[routes] = sum(texts.flipped())
    assert flips[True] > flips[False] > 0
    found = attack_embeddings(model, task, ["pgd", "adaptive"], budget=[0.0, 0.1, BUDGET], **HOW)
    by_name = {(one["attack"], one["budget"]): one for one in found["summary"]["attacks"]}
    clean = by_name["clean", 0.0]
    for kind in ("pgd", "adaptive"):
        losses = [by_name[kind, budget]["loss"] for budget in (0.0, 0.1, BUDGET)]
        assert losses[0] == clean["loss"] < losses[1] < losses[2]
        assert by_name[kind, 0.0]["flipped"] == 0 and by_name[kind, BUDGET]["realised"] <= BUDGET * (1 + 1e-6)
    assert by_name["adaptive", BUDGET]["loss"] >= by_name["pgd", BUDGET]["loss"] - 1e-6
    first, second = (attack_embeddings(model, task, ["adaptive"], budget=BUDGET, **HOW)["summary"] for _ in range(2))
    assert first == second


def test_a_dense_model_and_wrong_options_are_refused(tiny: MakeRecipe, attacked: Any) -> None:
    model, task = attacked
    assert isinstance(task, TextTask)
    dense = task.initial_model().eval()
    assert_refused("no routers", attack_embeddings, dense, task, ["adaptive"], budget=0.1, **HOW)
    assert attack_embeddings(dense, task, ["pgd"], budget=0.1, **HOW)["rows"][1][4] == 0
    assert_refused("spsa", attack_embeddings, model, task, ["spsa"], budget=0.1, **HOW)
    assert_refused("steps", attack_embeddings, model, task, ["pgd"], budget=0.1, **{**HOW, "steps": 0})

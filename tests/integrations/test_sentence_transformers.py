"""sentence-transformers on a sparsified encoder: it calls the inner model's `forward`, past all hooks on the model."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_dense import tiny_dense
from trained_by_others import SETTINGS, adding_by_hand, assert_near, gradients_of, losses_by_hand, sentence, tokenizer

import holdfast

st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
datasets = pytest.importorskip("datasets")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

LOSSES = holdfast.Losses(balance=0.3, z=0.1)


def encoder(router: str, terms: holdfast.Losses | None, folder: Path) -> Any:
    """A sentence encoder around a sparsified BERT, without dropout."""
    import transformers

    dense = tiny_dense("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).bert
    assert isinstance(dense, transformers.BertModel)
    dense.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    inner = modules.Transformer(str(folder), max_seq_length=32)
    torch.manual_seed(1)
    holdfast.sparsify(inner.auto_model, experts=8, router=router, losses=terms, noise=0.5)
    return st.SentenceTransformer(modules=[inner, modules.Pooling(32, "mean")], device="cpu")


def trainer(model: Any, folder: Path, callbacks: Any, **options: Any) -> Any:
    rows = [{"anchor": sentence(seed, 5), "positive": sentence(seed + 40, 4 + seed % 4)} for seed in range(8)]
    arguments = st.SentenceTransformerTrainingArguments(output_dir=str(folder), **{**SETTINGS, **options})
    return st.SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("router", ["smoe", "symphony+smooth"])
def test_router_losses_train_as_if_added_by_hand(router: str, parts: int, tmp_path: Path) -> None:
    model = encoder(router, LOSSES, tmp_path / "model")
    run = trainer(model, tmp_path / "ours", [], gradient_accumulation_steps=parts)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the loss was computed without")
        found = gradients_of(run, model)

    bare = encoder(router, None, tmp_path / "bare")
    seen = losses_by_hand(bare[0].auto_model, LOSSES)
    run = trainer(bare, tmp_path / "by hand", [], gradient_accumulation_steps=parts)
    with adding_by_hand(run, seen, 1):  # the Trainer divides afterwards
        expected = gradients_of(run, bare)
    assert_near(found, expected, 3e-6)

    plain = encoder(router, None, tmp_path / "plain")
    without = gradients_of(trainer(plain, tmp_path / "without", [], gradient_accumulation_steps=parts), plain)
    scores = [name for name in found if "router.score" in name]
    assert scores and all(not torch.allclose(found[name], without[name], atol=1e-5) for name in scores)


@pytest.mark.parametrize("router", ["smoe", "symphony"])
def test_embedding_first_without_gradients_changes_no_gradient_and_teaches_once(router: str, tmp_path: Path) -> None:
    """GradCache embeds a batch without gradients, then again, inside the backward, with them.

    A router with state has learned from the second column by then, so its gradients are those of a state one batch newer.
    """
    found, learned = [], []
    for kind in (losses.MultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss):
        model = encoder(router, LOSSES, tmp_path / kind.__name__).train()
        holdfast.router_loss_scale(model, 1.0)
        features = [model.tokenize([sentence(first + row, 5) for row in range(4)]) for first in (0, 20)]
        kind(model)(features, torch.empty(0)).backward()
        found.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
        model.eval()
        learned.append([value for name, value in model.named_buffers() if name.endswith("graph")])
    if router == "smoe":
        assert_near(found[1], found[0], 1e-5)
    assert len(learned[0]) == (3 if router == "symphony" else 0)
    for graph, cached in zip(*learned, strict=True):
        torch.testing.assert_close(cached, graph)
        assert not torch.equal(graph, torch.eye(8))

"""`SentenceTransformer(folder)`: a sparsified encoder that Holdfast saved gives the sentence vectors of that encoder."""

from pathlib import Path

import pytest
import torch
from changed_models import words
from tiny_dense import tiny_dense

import holdfast

sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")


def test_a_saved_encoder_gives_its_own_sentence_vectors(tmp_path: Path) -> None:
    tokenizer = words()
    encoder = holdfast.sparsify(tiny_dense("bert").bert, experts=4, router="symphony+smooth", noise=0.3)
    folder = holdfast.save(encoder.eval(), tmp_path / "out", tokenizer=tokenizer)
    sentences = ["w5 w9 w13 w7", "w30 w31"]
    with torch.no_grad():
        inputs = tokenizer(sentences, padding=True, return_tensors="pt")
        hidden = encoder(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).last_hidden_state
    mask = inputs.attention_mask[..., None].float()
    expected = (hidden * mask).sum(1) / mask.sum(1)  # the mean of real tokens

    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    assert any(isinstance(module, holdfast.Router) for module in model.modules())
    torch.testing.assert_close(torch.as_tensor(model.encode(sentences)), expected, atol=1e-5, rtol=1e-5)

    model.save(str(tmp_path / "again"))  # as its trainer does
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "again"), device="cpu")
    assert any(isinstance(module, holdfast.Router) for module in again.modules())
    torch.testing.assert_close(torch.as_tensor(again.encode(sentences)), expected, atol=1e-5, rtol=1e-5)

"""Tiny models, inputs and a tokenizer for audits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor

import holdfast

SENTENCE = "the of a is to cat sat on mat dog ran over river green house small window friend letter garden winter apple"
WORDS = SENTENCE.split()
ALL = ("none", "noise", "routing", "model", "batch", "backend", "words", "typos", "attack")


def batches(count: int = 2, *, vocabulary: int = 64, seed: int = 1) -> Iterator[dict[str, Tensor]]:
    """Return batches of three sequences, one of them padded."""
    source = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(3, vocabulary, (3, 17), generator=source)
        mask = torch.ones_like(ids)
        mask[1, 11:] = 0
        yield {"input_ids": ids, "attention_mask": mask}


def texts(count: int = 6, *, words: int = 14, seed: int = 3) -> list[str]:
    source = torch.Generator().manual_seed(seed)
    return [" ".join(WORDS[int(n)] for n in torch.randint(len(WORDS), (words,), generator=source)) for _ in range(count)]


def tokenizer() -> Any:
    """Return a tokenizer with one token per word; a typo is an unknown word."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = ["<pad>", "<unk>", "</s>", *WORDS, "AAA"]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", pad_token="<pad>")


def constant() -> Any:
    """Return a gpt_oss model whose routers select the same experts for every token, with clear margins."""
    model = tiny("gpt_oss")
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "top_k") and hasattr(module, "bias"):
                module.weight.zero_()
                module.bias.copy_(torch.linspace(4, 0, 8)[torch.randperm(8, generator=torch.Generator().manual_seed(0))])
    return model


def sparse(router: str = "smoe", **options: Any) -> Any:
    """Return a sparsified llama with different experts."""
    model = holdfast.sparsify(tiny_dense("llama"), experts=8, router=router, **options)
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "router" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def state(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a text of words that the tokenizer knows."""
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("\n".join(texts(400)))
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("folder") / "model"
    tiny("mixtral").save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path

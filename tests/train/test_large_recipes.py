"""The recipes that are too large to train in a test: built without values, and with less data."""

import gzip
import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from holdfast.train import load_recipe, make_task, parse_routers
from holdfast.train.building import preflight, put_router
from holdfast.train.start import start_model


def test_switch_large_has_the_parameters_that_the_paper_gives() -> None:
    recipe = load_recipe("switch-large")
    with torch.device("meta"):
        model = start_model(recipe.model, "text", vocab_size=recipe.data.vocabulary)
        (choice,) = parse_routers("similarity[tau=1]")
        assert put_router(model, recipe, choice)
    assert len(model.transformer.h) == 12
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == 388


def tokenizer(folder: Path) -> str:
    """Save a tokeniser with as many tokens as GPT-2's, and return its folder."""
    vocabulary = {"<|endoftext|>": 0, "[UNK]": 1, **{f"w{number}": number for number in range(2, 50_257)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="<|endoftext|>")
    saved.save_pretrained(folder)
    return str(folder)


def test_c4_is_read_once_in_steps_that_follow_from_its_tokens(tmp_path: Path) -> None:
    """With the recipe's own model on `meta`, and fewer tokens."""
    for split, documents in (("train", 200), ("validation", 8)):
        with gzip.open(tmp_path / f"c4-{split}.00000-of-00001.json.gz", "wt") as file:
            for number in range(documents):
                text = " ".join(f"w{2 + (number * place) % 5000}" for place in range(300))
                file.write(json.dumps({"text": text}) + "\n")
    recipe = load_recipe("c4")
    assert (recipe.training.epochs, recipe.training.keep, recipe.data.train_tokens) == (1.0, "best", 8 * 10**9)
    assert recipe.training.step_count(8 * 10**9 // 512) == 325_521
    few = {"data.tokens": tokenizer(tmp_path / "tokeniser"), "data.train_tokens": 512 * 100 + 1, "training.warmup": 1}
    task: Any = make_task(load_recipe("c4", few), tmp_path)
    assert task.steps == 3 and len(task.validation()) == 2  # 100 blocks in batches of 48
    preflight(task, parse_routers("smoe,symphony"))

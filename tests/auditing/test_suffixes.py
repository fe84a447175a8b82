"""The attack `suffix` against all suffixes of one token, measured by a forward of each."""

from typing import Any

import pytest
import torch
from tiny import tiny
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.auditing.suffixes import attack_suffix
from holdfast.train.text_task import TextsTask

EXPERT, WORDS = 2, 40


class Texts(TextsTask):
    """A task with random texts of different lengths, and no tokeniser."""

    tokenizer = None  # type: ignore[assignment]

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, WORDS, (3, 12), generator=random)
        self.mask = torch.ones_like(self.ids)
        self.mask[1, 9:] = 0

    def probe(self) -> dict[str, Tensor]:
        return {"input_ids": self.ids, "attention_mask": self.mask}


Texts.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # only the probe is asked for


def share_after(model: Any, row: Tensor, suffix: list[int], layer: int) -> float:
    half = len(row) // 2
    ids = torch.cat([row[:half], torch.tensor(suffix, dtype=torch.int64), row[half:]])
    with torch.no_grad(), holdfast.trace(model) as routes:
        model(input_ids=ids[None], use_cache=False)
    return float(routes[layer].chosen[half + len(suffix) :, EXPERT].double().mean())


@pytest.mark.slow
def test_the_suffix_of_one_token_is_the_best_of_all_and_of_several_no_worse() -> None:
    torch.manual_seed(0)
    model, task = tiny("olmoe"), Texts()  # type: ignore[abstract]
    vocabulary = model.get_input_embeddings().num_embeddings
    found = attack_suffix(model, task, expert=EXPERT, budget=[2, 1], steps=10, tokens=1000, seed=0)
    rows = [row[mask.bool()] for row, mask in zip(task.ids, task.mask, strict=True)]
    counts = [len(row) - len(row) // 2 for row in rows]
    for one, shown in zip(found["summary"]["layers"], found["rows"], strict=True):
        own = [share_after(model, row, suffix, one["layer"]) for row, suffix in zip(rows, one["suffixes"], strict=True)]
        mean = sum(share * count for share, count in zip(own, counts, strict=True)) / sum(counts)
        assert abs(mean - one["share"]) < 1e-9 and shown[:4] == [one["layer"], sum(counts), one["budget"], one["share"]]
        assert all(len(suffix) == one["budget"] for suffix in one["suffixes"])
        if one["budget"] == 1:
            for row, share in zip(rows, own, strict=True):
                best = max(share_after(model, row, [token], one["layer"]) for token in range(vocabulary))
                assert share == best
    assert [one["budget"] for one in found["summary"]["layers"]][:2] == [1, 2]
    again = attack_suffix(model, task, expert=EXPERT, budget=[1, 2], steps=10, tokens=1000, seed=0)
    assert again["summary"] == found["summary"]


def test_wrong_numbers_are_refused() -> None:
    model, task = tiny("olmoe"), Texts()  # type: ignore[abstract]
    how: dict[str, Any] = {"steps": 2, "tokens": 10, "seed": 0}
    assert_refused("numbers 0 to", attack_suffix, model, task, expert=99, budget=1, **how)
    assert_refused("whole number from 1 on", attack_suffix, model, task, expert=0, budget=0.5, **how)
    assert_refused("examples", attack_suffix, model, task, expert=0, budget=1, **{**how, "tokens": 0})

"""The attack `holdfast attack MODEL suffix`: a few tokens in the middle of a text that send those after them to one expert.

Each text and each layer has a suffix of its own, found by greedy coordinate gradient (`attacks.token_search`); a trigger
(`triggers`) is one for all texts. The budget is the number of its tokens. It stands after the first half of the text, and
the second half is counted: in a causal model nothing else can change.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks import random_tokens, search_tokens
from holdfast.attacks.flags import Flag, black_box_flag, flags_of_layers
from holdfast.attacks.inputs import ascending
from holdfast.attacks.threat import derived_seed
from holdfast.auditing.triggers import InsertedTokens, allowed_tokens
from holdfast.hub.tracing import longest_sequence
from holdfast.train.task import AttackTable, Task, forward
from holdfast.train.text_task import TextsTask

LENGTH = 32  # tokens of a text, at most
RANDOM = 16  # random suffixes to compare with; the search starts from the best of them
COLUMNS = ["share that selects the expert", "without the suffix", "random suffixes, mean", "expert"]


def attack_suffix(
    model: Any, task: Task, *, expert: int, budget: float | Sequence[float], steps: int, tokens: int, seed: int
) -> AttackTable:
    """Search for suffixes that send the tokens after them to an expert, in each layer, for texts of about `tokens` tokens.

    budget    the tokens of a suffix, or several numbers of them
    """
    budgets = ascending(list(budget) if isinstance(budget, Sequence) else [budget])
    for one in budgets:
        if one != int(one) or one < 1:
            raise ValueError(f"the budget of suffix is a number of tokens, a whole number from 1 on, not {one:g}.")
    sizes = [int(one) for one in budgets]
    texts = _texts(model, task, tokens, sizes[-1])
    allowed, _ = allowed_tokens(model, task.tokenizer)  # type: ignore[attr-defined]  # `_texts` requires a task of texts
    with torch.no_grad():
        without = [text.shares(torch.empty(1, 0, dtype=torch.int64)) for text in texts]
    experts = min(layer.chosen.shape[-1] for layer in without[0])
    if not 0 <= expert < experts:
        raise ValueError(f"expert is {expert}; the experts have the numbers 0 to {experts - 1}.")
    weights = torch.tensor([float(text.counted.sum()) for text in texts]).double()
    rows, summaries, curves, flags = [], [], dict[str, dict[str, list[float]]](), list[tuple[int, Flag]]()
    for layer in range(len(without[0])):
        before = torch.stack([each[layer].chosen[0, 0, expert].double() for each in without])
        best: list[Tensor] = [torch.empty(0, dtype=torch.int64) for _ in texts]
        for size in sizes:
            found = [
                _search(text, layer, expert, allowed, size, best[number], steps, derived_seed(seed, layer, number, size))
                for number, text in enumerate(texts)
            ]
            best = [one[0] for one in found]
            after, random = (torch.tensor([one[place] for one in found], dtype=torch.float64) for place in (1, 2))
            share, clean, drawn = (float((values * weights).sum() / weights.sum()) for values in (after, before, random))
            rows.append([layer, int(weights.sum()), size, share, clean, drawn, expert])
            summary = {"layer": layer, "budget": size, "share": share, "clean": clean, "random": drawn}
            summaries.append({**summary, "suffixes": [one.tolist() for one in best], "steps": steps, "seed": seed})
            flags += [(layer, flag) for one in found for flag in one[3]]
            curve = curves.setdefault(f"layer {layer}", {"budgets": [0], "figure": [clean]})
            curve["budgets"].append(size)
            curve["figure"].append(share)
    return {
        "title": f"Suffixes towards one expert, {len(texts)} texts",
        "caption": "A budget is the number of tokens put after the first half of a text; the second half is counted. "
        "Each text and layer has its own suffix; a search may miss a better one.",
        "columns": ["layer", "tokens", "budget", *COLUMNS],
        "rows": rows,
        "flags": flags_of_layers(flags),
        "summary": {"attack": "suffix", "expert": expert, "layers": summaries},
        "lines": {"x": "budget, tokens of the suffix", "y": COLUMNS[0], "curves": curves},
    }


def _search(
    text: InsertedTokens, layer: int, expert: int, allowed: Tensor, size: int, shorter: Tensor, steps: int, seed: int
) -> tuple[Tensor, float, float, tuple[Flag, ...]]:
    """Return the best suffix, the share that it sends to the expert, the mean of random ones, and flags."""

    def value(tokens: Tensor) -> Tensor:
        return text.values(tokens)[layer][:, expert]

    drawn = random_tokens(allowed, RANDOM, size, seed)
    values = value(drawn)
    starts = drawn[values.argmax()][None]
    if len(shorter):  # a longer suffix begins with the best shorter one
        starts = torch.cat([starts, torch.cat([shorter, drawn[0, : size - len(shorter)]])[None]])
    slopes = partial(text.slopes, layer=layer, expert=expert, allowed=allowed)
    found = search_tokens(value, slopes, allowed, starts, most=1.0, steps=steps, seed=seed)
    tokens = torch.tensor(found.tokens)
    share = float(text.share(text.shares(tokens[None])[layer])[0, expert])
    random = text.share(text.shares(drawn)[layer])[:, expert]
    misled = black_box_flag(torch.tensor([False]), random.max()[None] > share, "a random suffix")
    return tokens, share, float(random.mean()), (*found.flags, *misled)


def _texts(model: Any, task: Task, tokens: int, longest: int) -> list[InsertedTokens]:
    """Return the first texts of the probe, each alone and cut. Raise ValueError if nothing can be put into them."""
    if tokens < 1:
        raise ValueError(f"examples is {tokens}; attack at least 1 token.")
    if not isinstance(task, TextsTask):
        raise ValueError(f"suffix puts tokens into texts, but {task.not_texts}.")
    probe = task.probe()
    if getattr(model.config, "is_encoder_decoder", False) or probe.keys() - {"input_ids", "attention_mask"}:
        raise ValueError(
            "this model reads more than one sequence of tokens and its mask, and nothing can be inserted there."
        )
    places = longest_sequence(model)
    room = LENGTH if places is None else min(LENGTH, places - longest)
    if room < 2:
        raise ValueError(f"the model's positions end at {places}: there is no room for {longest} more tokens.")
    rows = [row[mask.bool()][:room] for row, mask in zip(probe["input_ids"], probe["attention_mask"], strict=True)]
    rows = [row for row in rows if len(row) > 1][: max(1, tokens // room)]
    if not rows:
        raise ValueError("the texts are shorter than two tokens: there is no place inside them.")
    run = partial(forward, model)
    return [InsertedTokens(model, run, row[None], torch.ones_like(row[None]), len(row) // 2) for row in rows]

"""Search for triggers: a few tokens that, put before any text, send its tokens to one expert.

Backdoors in MoE models use such a sequence to reach the experts that carry them (BadSwitch, 2025). For each layer, the
search (greedy coordinate gradient, `attacks.token_search`) is for every expert, and longest for the experts where it gains
most over random sequences of the same length. It sees one half of some texts; what a trigger does is measured on the other
half, as are the random sequences.

`InsertedTokens` has texts with a few tokens inserted into them, and the experts of the tokens that follow.

S sequences of L tokens, n inserted tokens, C sequences of inserted tokens that are tried, A allowed tokens, E experts
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from holdfast.attacks.flags import Flag, black_box_flag
from holdfast.attacks.threat import derived_seed, gradient
from holdfast.attacks.token_search import STEPS, random_tokens, search_tokens
from holdfast.auditing.model_and_data import AuditBatch, AuditedModel, TextEncoder
from holdfast.auditing.reports import Trigger, Triggers
from holdfast.data import Vocabulary
from holdfast.hub.families import routing_from_gate
from holdfast.hub.tracing import longest_sequence, own_hooks, routing_modules, trace
from holdfast.routing import Router, Routing
from holdfast.routing.rules import Rule

SEQUENCES_PER_BATCH = 64
TINY = torch.finfo(torch.float32).tiny


class Shares(NamedTuple):
    """Of one layer (C,S,E): for each tried sequence, means over the counted tokens of each text."""

    chosen: Tensor  # the share of them that select the expert
    gates: Tensor  # the gate of the expert


@final
class InsertedTokens:
    """Texts as `ids` and `mask` (S,L), padded on the right, with tokens inserted before position `place`.

    Counted are the real tokens from that position on, whose experts the inserted tokens may change.

    forward     runs the model with its inputs
    """

    def __init__(
        self, model: Any, forward: Callable[[dict[str, Tensor]], Any], ids: Tensor, mask: Tensor, place: int
    ) -> None:
        self.model, self.forward = model, forward
        self.ids, self.mask, self.place = ids, mask.long(), place
        self.counted = mask.bool()[:, place:]
        routers = [module for _, module, _ in routing_modules(model) if isinstance(module, Router)]
        # A router that reads the whole batch must not see other candidates.
        self.together = all(router.traits.batch_invariant for router in routers)

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs with each of `tokens` (C,n) in each text: C S rows."""
        count, texts = len(tokens), len(self.ids)
        inserted = tokens.to(self.ids.device).repeat_interleave(texts, 0)
        ids, mask = self.ids.repeat(count, 1), self.mask.repeat(count, 1)
        return {
            "input_ids": torch.cat([ids[:, : self.place], inserted, ids[:, self.place :]], 1),
            "attention_mask": torch.cat([mask[:, : self.place], torch.ones_like(inserted), mask[:, self.place :]], 1),
        }

    @torch.no_grad()
    def shares(self, tokens: Tensor) -> list[Shares]:
        """Return the `Shares` of each layer for `tokens` (C,n); n may be 0."""
        size = max(1, SEQUENCES_PER_BATCH // len(self.ids)) if self.together else 1
        parts = [self._shares(some) for some in tokens.split(size)]
        return [Shares(*map(torch.cat, zip(*layers, strict=True))) for layers in zip(*parts, strict=True)]

    def _shares(self, tokens: Tensor) -> list[Shares]:
        found: dict[int, Shares] = {}

        def add(layer: int, routing: Routing, token_mask: Tensor | None) -> None:
            found[layer] = Shares(
                *(self._mean(each, len(tokens)).cpu() for each in (routing.chosen.double(), routing.gates))
            )

        with trace(self.model, each=add):
            self.forward(self.inputs(tokens))
        return [found[layer] for layer in range(len(found))]

    def _mean(self, rows: Tensor, count: int) -> Tensor:
        """Return (C,S,E): the means of `rows` (C S (L + n), E) over the counted tokens of each text."""
        texts, following = self.counted.shape
        of_tokens = rows.view(count, texts, -1, rows.shape[-1])[:, :, -following:]
        counted = self.counted.to(rows.device).unsqueeze(-1)
        return (of_tokens * counted).sum(2) / counted.sum(1).clamp_min(1)

    def values(self, tokens: Tensor) -> list[Tensor]:
        """Return (C,E) of each layer: shares; of equal ones, that with larger gates is higher, by less than one token."""
        less = 2 * int(self.counted.sum())
        return [self.share(one) + self._over_texts(one.gates).clamp(0, 1) / less for one in self.shares(tokens)]

    def share(self, shares: Shares) -> Tensor:
        """Return (C,E): the share of all counted tokens that select each expert."""
        return self._over_texts(shares.chosen)

    def _over_texts(self, values: Tensor) -> Tensor:
        """Return (C,E): the mean over tokens of `values` (C,S,E), which are means over the tokens of each text."""
        counts = self.counted.sum(1).double().cpu()
        return (values.double() * counts[:, None]).sum(1) / counts.sum()

    def slopes(self, tokens: Tensor, layer: int, expert: int, allowed: Tensor) -> Tensor:
        """Return (n,A): the gradient of an expert's mean log gate with respect to one-hot inserted tokens, at `tokens` (n,).

        That of a one-hot token is the product of its embedding and the gradient at the output of the embedding.
        """
        embedding, (_, module, rule) = self.model.get_input_embeddings(), routing_modules(self.model)[layer]
        seen: dict[str, Any] = {}

        def embed(module: nn.Module, given: Any, output: Tensor) -> Tensor:
            seen["embedded"] = output.detach().requires_grad_()
            return seen["embedded"]  # type: ignore[no-any-return]

        def route(rule: Rule | None, module: nn.Module, given: Any, output: Any) -> None:
            seen["routing"] = output if rule is None else routing_from_gate(output, rule)

        with torch.enable_grad(), own_hooks() as hooks:
            hooks.after(embedding, embed)
            hooks.after(module, partial(route, rule))
            self.forward(self.inputs(tokens.unsqueeze(0)))
            value = self._mean(seen["routing"].gates[:, expert, None].clamp_min(TINY).log(), 1).mean()
            slope = gradient(value, seen["embedded"])[:, self.place : self.place + len(tokens)].sum(0)
        with torch.no_grad():
            table = embedding(allowed.to(slope.device))
        return (slope.float() @ table.float().T).cpu()


TEXTS, LENGTH = 16, 32  # at most so many texts, half of them for the search, each cut after so many tokens
RANDOM = 32  # random sequences to compare with
ROUND_STEPS = 2  # of the search for each expert before half of the experts are left out
FORCED = 0.9  # a text is forced if so many of its tokens select the expert


def trigger_texts(batches: Sequence[AuditBatch]) -> list[Tensor]:
    """Return the token ids of the first texts of these batches, cut."""
    rows = []
    for batch in batches:
        assert batch.ids is not None
        masks = torch.ones_like(batch.ids) if batch.token_mask is None else batch.token_mask
        rows += [row[mask.bool()][:LENGTH] for row, mask in zip(batch.ids.cpu(), masks.cpu(), strict=True)]
    return rows[:TEXTS]


def unsearchable(audited: AuditedModel, batches: Sequence[AuditBatch], tokens: int) -> str | None:
    """Return why triggers cannot be searched for; None if they can."""
    if any(batch.ids is None for batch in batches):
        return "the inputs are not tokens."
    if any(batch.inputs.keys() - {"input_ids", "attention_mask"} for batch in batches):
        return "the inputs contain more than tokens and their mask, and nothing can be inserted into the others."
    longest = longest_sequence(audited.model)
    if longest is not None and longest < LENGTH + tokens:
        return f"the model's positions end at {longest}: there is no room for {tokens} tokens before a text of {LENGTH}."
    return (
        None if len(trigger_texts(batches)) > 1 else "two texts are needed: one for the search and one for the measurement."
    )


def find_triggers(
    audited: AuditedModel,
    batches: Sequence[AuditBatch],
    encoder: TextEncoder | None,
    tokens: int,
    seed: int,
    tell: Callable[[str], None],
) -> Iterator[Triggers]:
    """Yield the triggers found so far, once for each layer, and before the first."""
    rows = trigger_texts(batches)
    allowed, special = allowed_tokens(audited.model, None if encoder is None else encoder.tokenizer)
    place = _leading(rows, special)
    searched, held_out = (_inserted(audited, rows[start::2], place) for start in (0, 1))
    drawn = random_tokens(allowed, RANDOM, tokens, seed)
    tell("triggers: random sequences")
    search = _Search(searched, allowed, drawn, seed)
    others, without = held_out.shares(drawn), held_out.shares(drawn[:1, :0])

    def measured(layer: int) -> Trigger:
        """Return the trigger of a layer, measured on the texts that were held out."""
        expert, found = search.best(layer)
        after = held_out.shares(found[None])[layer]
        share, shares = float(held_out.share(after)[0, expert]), held_out.share(others[layer])[:, expert]
        # Random sequences use no gradients: if they do better, the search has failed.
        flags = [
            *search.flags[layer],
            *black_box_flag(torch.tensor([False]), shares.max()[None] > share, "a random sequence"),
        ]
        return Trigger(
            layer=layer,
            expert=expert,
            tokens=found.tolist(),
            text=None if encoder is None else encoder.decode(found.tolist()),
            share=share,
            without=float(held_out.share(without[layer])[0, expert]),
            random=float(shares.mean()),
            random_most=float(shares.max()),
            texts=float((after.chosen[0, :, expert] >= FORCED).double().mean()),
            flags=[str(flag) for flag in flags],
        )

    sizes: dict[str, Any] = {"searched": len(searched.ids), "held_out": len(held_out.ids), "random": RANDOM}
    yield Triggers(tokens=tokens, **sizes, found=[])
    for layer in range(len(others)):
        tell(f"triggers: layer {layer + 1} of {len(others)}")
        search.run(layer)
        # The search of one layer may find tokens that are better in another one, so all are measured again.
        yield Triggers(tokens=tokens, **sizes, found=[measured(done) for done in range(layer + 1)])


class _Search:
    """The searches of all layers. What one tries is measured in all layers, and the best tokens for each expert are kept."""

    def __init__(self, inserted: InsertedTokens, allowed: Tensor, drawn: Tensor, seed: int) -> None:
        self.inserted, self.allowed, self.seed = inserted, allowed, seed
        self.flags: dict[int, tuple[Flag, ...]] = {}
        first = inserted.values(drawn)
        self.random = [values.amax(0) for values in first]  # (E,) of each layer
        self.highest = [values.clone() for values in self.random]
        self.tokens = [drawn[values.argmax(0)] for values in first]  # (E,n) of each layer

    def best(self, layer: int) -> tuple[int, Tensor]:
        """Return the expert and the tokens with the largest gain over the random sequences."""
        expert = int((self.highest[layer] - self.random[layer]).argmax())
        return expert, self.tokens[layer][expert]

    def run(self, layer: int) -> None:
        """Search for every expert of a layer, by successive halving: a few steps each, then for the better half of them."""
        experts = list(range(len(self.random[layer])))
        while True:
            for expert in experts:
                found = search_tokens(
                    partial(self._value, layer, expert),
                    partial(self.inserted.slopes, layer=layer, expert=expert, allowed=self.allowed),
                    self.allowed,
                    self.tokens[layer][expert][None],
                    most=1.0,
                    steps=ROUND_STEPS if len(experts) > 1 else STEPS,
                    seed=derived_seed(self.seed, layer, expert, len(experts)),
                )
            if len(experts) == 1:
                break
            gains = (self.highest[layer] - self.random[layer]).tolist()
            experts = sorted(experts, key=lambda expert: -gains[expert])[: len(experts) // 2]
        self.flags[layer] = found.flags if self.best(layer)[1].tolist() == list(found.tokens) else ()

    def _value(self, layer: int, expert: int, tokens: Tensor) -> Tensor:
        values = self.inserted.values(tokens)
        for place, of_layer in enumerate(values):
            highest, best = of_layer.max(0)
            better = highest > self.highest[place]
            self.highest[place] = highest.where(better, self.highest[place])
            self.tokens[place] = tokens[best].where(better[:, None], self.tokens[place])
        return values[layer][:, expert]


def _inserted(audited: AuditedModel, rows: list[Tensor], place: int) -> InsertedTokens:
    ids = pad_sequence(rows, batch_first=True, padding_value=audited.pad)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return InsertedTokens(audited.model, audited.forward, ids, mask, place)


def allowed_tokens(model: Any, tokenizer: Any) -> tuple[Tensor, set[int]]:
    """Return the tokens that may be inserted, and those that no text has: of padding, ends and unknown words."""
    known = int(model.get_input_embeddings().num_embeddings)
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    special = {0, 1} if isinstance(inner, Vocabulary) else set(getattr(inner, "all_special_ids", ()))
    count = known if tokenizer is None else min(known, len(tokenizer))
    return torch.tensor([number for number in range(count) if number not in special]), special


def _leading(rows: list[Tensor], special: set[int]) -> int:
    """Return how many special tokens all texts begin with, such as one of the beginning: a trigger comes after them."""
    place = 0
    while all(len(row) > place + 1 and int(row[place]) in special for row in rows):
        place += 1
    return place

"""Decoding in models: the cached, the padded, the cropped and the reordered result is that of one full forward."""

import copy
import itertools
import pickle
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from router_names import IN_TEXT_MODELS
from tiers import quick_or_slow
from tiny import EXTRA, MOE_LAYERS, tiny
from tiny_dense import tiny_dense
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from wording import assert_refused

import holdfast
from holdfast.routing import RouterCache, Routing
from holdfast.routing.cache import ROUTER_NUMBERS
from holdfast.testing.router_under_test import STEEP

# Every sequence-aware router at least once, alone and with everything else a router can have.
GENERATING = [name for name in IN_TEXT_MODELS if name != "capacity"]  # where other tokens of the batch matter, too
AWARE = ("similarity", "attention")
VARIANTS = (*AWARE, "similarity[of=attention]", "similarity[from=confident]", "attention[heads=all]")
COMBINED = ("symphony+similarity", "ac+symphony+attention+smooth", "xmoe+ac+similarity+top-p")
# Seeds of the weights and of the prompts with which no step of any router is a near-tie.
SEEDS = {"llama": (1, 3), "mixtral": (0, 1)}
LENGTHS, PROMPT, STEPS = (9, 7, 5, 2), 9, 24
WINDOW = 6  # shorter than the prompt


def learned(model: Any) -> Any:
    """After a few training forwards: state that still stands at its start would hide mistakes."""
    torch.manual_seed(5)
    model.train()
    for _ in range(3):
        model(input_ids=torch.randint(3, 64, (4, 12)))
    model.generation_config.eos_token_id = None  # as many tokens as asked for
    model.generation_config.pad_token_id = 0
    return model.eval()


@cache
def changed(kind: str, router: str, attention: str = "sdpa") -> Any:
    """A tiny language model with this router: sparsified if dense, rerouted if not; "sliding" is Mixtral with a window."""
    if kind in EXTRA or kind == "sliding":
        model = sliding("mixtral") if kind == "sliding" else sliding(kind) if kind == "gpt_oss" else tiny(kind, _seed(kind))
        model = holdfast.reroute(model, router)
    else:
        model = tiny_dense(kind, _seed(kind))
        torch.manual_seed(_seed(kind))
        model = holdfast.sparsify(model, experts=8, router=router, noise=0.5)
    if kind != "gpt_oss":
        model.set_attn_implementation(attention)
    return learned(model)


def _seed(kind: str) -> int:
    return SEEDS.get(kind, (0, 0))[0]


def sliding(model_type: str) -> Any:
    """All layers of Mixtral and every second of GPT-OSS look back over this many tokens only."""
    return tiny(model_type, sliding_window=WINDOW)


def prompts(kind: str) -> tuple[Tensor, Tensor]:
    """Four of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(SEEDS.get(kind, (0, 1))[1])
    mask = torch.stack([torch.arange(PROMPT) >= PROMPT - length for length in LENGTHS]).long()
    return torch.randint(3, 64, (4, PROMPT), generator=generator) * mask, mask


def generate(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Any:
    torch.manual_seed(0)
    chosen = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, **options}
    return model.generate(input_ids=ids, attention_mask=mask, **chosen)


def _skip_unless_the_untouched_model_can(kind: str) -> None:
    """Take back an assistant's guesses: transformers 5.17 itself cannot, where a window slides."""
    if kind not in ("sliding", "gpt_oss"):
        return
    model, (ids, mask) = sliding("mixtral" if kind == "sliding" else kind), prompts(kind)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.add_(torch.randn_like(other.lm_head.weight), alpha=0.05)
    try:
        generate(model, ids[:1], mask[:1], max_new_tokens=30, assistant_model=other)
    except RuntimeError:
        pytest.skip("this version of transformers cannot take guesses back in a sliding window")


def joined(steps: list[Routing], sequences: int) -> Routing:
    """Of several forwards, each of the next tokens of the same sequences."""

    def rows(name: str) -> Tensor:
        columns = [getattr(step, name).unflatten(0, (sequences, -1)) for step in steps]
        return torch.cat(columns, dim=1).flatten(0, 1)

    return Routing(rows("logits"), rows("gates"), rows("experts"), rows("weights"))


def part(routing: Routing, rows: Tensor) -> Routing:
    """Of the tokens that `rows` marks."""
    return routing.map_tokens(lambda values: values[rows.flatten()])


def traced(model: Any, forward: Any, sequences: int) -> tuple[Any, list[Routing]]:
    """What `forward()` returns, and every layer's routes over all its steps."""
    steps: dict[int, list[Routing]] = {}
    with holdfast.trace(model, each=lambda layer, routing, _: steps.setdefault(layer, []).append(routing)), torch.no_grad():
        result = forward()
    return result, [joined(steps[layer], sequences) for layer in sorted(steps)]


def assert_same_routes(first: list[Routing], second: list[Routing]) -> None:
    """Weights may differ by more than gates: a smooth strip is steep."""
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one.gates, other.gates, rtol=0, atol=1e-4)
        torch.testing.assert_close(one.dense_weights, other.dense_weights, rtol=0, atol=STEEP)


def full_forward(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, list[Routing]]:
    """Logits and routes of one forward without a cache."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    options = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
    return traced(model, lambda: model(**options).logits, len(ids))


@pytest.mark.parametrize("router", quick_or_slow([*GENERATING, *COMBINED], ["smoe", *AWARE, COMBINED[1]]))
@pytest.mark.parametrize("kind", quick_or_slow(SEEDS, ["mixtral"]))
def test_cached_generation_equals_uncached(kind: str, router: str) -> None:
    model, (ids, mask) = changed(kind, router), prompts(kind)
    options = {"max_new_tokens": STEPS, "output_logits": True}
    cached, routes = traced(model, lambda: generate(model, ids, mask, **options), 4)
    uncached = generate(model, ids, mask, use_cache=False, **options)
    logits, expected = torch.stack(cached.logits, 1), torch.stack(uncached.logits, 1)
    best, second = expected.topk(2).values.unbind(-1)
    apart = (logits - expected).abs().amax(-1)
    assert torch.equal(cached.sequences, uncached.sequences)
    assert apart.max() < 1e-3 and (best - second > 10 * apart).all()  # or else a near-tie chose: take other seeds
    new = cached.sequences[:, PROMPT:]
    assert all(len(set(tokens.tolist())) > 1 for tokens in new) and len(new.unique()) > 3

    written = cached.sequences[:, :-1]  # the last token is not an input of any forward
    whole = torch.cat([mask, mask.new_ones(4, STEPS - 1)], dim=1)
    in_one, full = full_forward(model, written, whole)
    torch.testing.assert_close(logits, in_one[:, PROMPT - 1 :], rtol=0, atol=1e-3)
    assert_same_routes([part(layer, whole.bool()) for layer in routes], [part(layer, whole.bool()) for layer in full])


@pytest.mark.parametrize(
    ("kind", "router"),
    quick_or_slow(
        [("llama", "similarity"), ("mixtral", "attention"), *((kind, router) for kind in SEEDS for router in COMBINED)]
        + [(kind, router) for kind in ("sliding", "gpt_oss") for router in AWARE],
        [("llama", "similarity"), ("sliding", "attention")],
    ),
)
def test_a_padded_sequence_gets_the_tokens_and_routes_that_it_gets_alone(kind: str, router: str) -> None:
    model, (ids, mask) = changed(kind, router), prompts(kind)
    together, routes = traced(model, lambda: generate(model, ids, mask), 4)
    for row, length in enumerate(LENGTHS):
        own = ids[row : row + 1, -length:]
        alone, own_routes = traced(model, lambda own=own: generate(model, own, torch.ones_like(own)), 1)  # type: ignore[misc]
        assert torch.equal(together.sequences[row, PROMPT - length :], alone.sequences[0])
        rows = torch.zeros(4, PROMPT + 19, dtype=torch.bool)
        rows[row, PROMPT - length :] = True
        assert_same_routes([part(layer, rows) for layer in routes], own_routes)
    unmasked = generate(model, ids, torch.ones_like(mask))
    assert torch.equal(unmasked.sequences[0], together.sequences[0])  # the longest has no padding
    assert not torch.equal(unmasked.sequences[1:], together.sequences[1:])


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often rows changed places, and how many were cropped away."""
    counts = {"reorder": 0, "crop": 0}
    reorder, crop = RouterCache.reorder, RouterCache.crop

    def count_reorder(self: RouterCache, sequences: Tensor) -> None:
        counts["reorder"] += int(not torch.equal(sequences, torch.arange(len(sequences))))
        reorder(self, sequences)

    def count_crop(self: RouterCache, length: int) -> None:
        counts["crop"] += self.tokens - length
        crop(self, length)

    monkeypatch.setattr(RouterCache, "reorder", count_reorder)
    monkeypatch.setattr(RouterCache, "crop", count_crop)
    return counts


MODES = [("llama", "sdpa"), ("sliding", "sdpa"), ("gpt_oss", "eager")]


@pytest.mark.parametrize("router", quick_or_slow(AWARE, ["attention"]))
@pytest.mark.parametrize(("kind", "attention"), quick_or_slow(MODES, MODES[-1:]))
class TestEveryWayToGenerate:
    def test_beams_that_swap_places(self, kind: str, attention: str, router: str, moved: dict[str, int]) -> None:
        model, (ids, mask) = changed(kind, router, attention), prompts(kind)
        options = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
        cached = generate(model, ids, mask, **options)
        uncached = generate(model, ids, mask, use_cache=False, **options)
        assert torch.equal(cached.sequences, uncached.sequences)
        torch.testing.assert_close(cached.sequences_scores, uncached.sequences_scores, rtol=0, atol=1e-4)
        assert moved["reorder"] > 0

    def test_sampling(self, kind: str, attention: str, router: str) -> None:
        model, (ids, mask) = changed(kind, router, attention), prompts(kind)
        options = {"do_sample": True, "num_return_sequences": 2}
        cached = generate(model, ids, mask, **options)
        assert torch.equal(cached.sequences, generate(model, ids, mask, use_cache=False, **options).sequences)
        assert not torch.equal(cached.sequences[0], cached.sequences[1])

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
    def test_guesses_that_are_taken_back(
        self, kind: str, attention: str, router: str, how: str, moved: dict[str, int]
    ) -> None:
        """The guesser's own cache is cropped too where it is a model."""
        model, (ids, mask) = changed(kind, router, attention), prompts(kind)
        plain = generate(model, ids[:1], mask[:1], use_cache=False, max_new_tokens=30)
        helper = {"prompt_lookup_num_tokens": 3}
        if how == "assistant":
            other = copy.deepcopy(model)
            with torch.no_grad():  # right often, not always
                other.lm_head.weight.add_(torch.randn_like(other.lm_head.weight), alpha=0.05)
            helper = {"assistant_model": other}
            _skip_unless_the_untouched_model_can(kind)
        guessed = generate(model, ids[:1], mask[:1], max_new_tokens=30, **helper)
        assert torch.equal(guessed.sequences, plain.sequences)
        assert moved["crop"] > 0

    def test_a_static_cache_twice(self, kind: str, attention: str, router: str) -> None:
        """The second time it is the same cache, reset."""
        model, (ids, mask) = changed(kind, router, attention), prompts(kind)
        plain = generate(model, ids, mask, use_cache=False)
        for _ in range(2):
            fixed = generate(model, ids, mask, cache_implementation="static")
            assert isinstance(fixed.past_key_values, transformers.StaticCache)
            assert torch.equal(fixed.sequences, plain.sequences)

    def test_a_prompt_in_pieces(self, kind: str, attention: str, router: str) -> None:
        model, (ids, mask) = changed(kind, router, attention), prompts(kind)
        sizes: list[int] = []
        with holdfast.trace(model, each=lambda layer, routing, _: sizes.append(len(routing.experts) // 4)) as routes:
            pieces = generate(model, ids, mask, prefill_chunk_size=4)
        assert sizes[:: len(routes)][:4] == [4, 4, 1, 1]
        assert torch.equal(pieces.sequences, generate(model, ids, mask, use_cache=False).sequences)

    @torch.no_grad()
    def test_two_forwards_with_one_cache(self, kind: str, attention: str, router: str) -> None:
        model, (ids, mask) = changed(kind, router, attention), prompts(kind)
        logits, routes = full_forward(model, ids, mask)
        positions = (mask.cumsum(1) - 1).clamp_min(0)

        def halves() -> Tensor:
            first = model(input_ids=ids[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8], use_cache=True)
            past = first.past_key_values
            rest = model(input_ids=ids[:, 8:], attention_mask=mask, position_ids=positions[:, 8:], past_key_values=past)
            return torch.cat([first.logits, rest.logits], dim=1)

        got, own = traced(model, halves, 4)
        real = mask.bool()
        torch.testing.assert_close(got[real], logits[real], rtol=0, atol=1e-4)
        assert_same_routes([part(layer, real) for layer in own], [part(layer, real) for layer in routes])


@pytest.mark.parametrize("router", VARIANTS)
@torch.no_grad()
def test_a_window_shorter_than_the_sequence_hides_what_is_outside_it(router: str) -> None:
    """In each of three layers attention looks back over a window, and so does the router: no change reaches further."""
    ids = torch.randint(3, 64, (1, 48), generator=torch.Generator().manual_seed(2))
    other = torch.cat([66 - ids[:, :1], ids[:, 1:]], dim=1)
    change = {
        kind: (changed(kind, router)(input_ids=ids).logits - changed(kind, router)(input_ids=other).logits)[0].abs().amax(-1)
        for kind in ("sliding", "mixtral")
    }
    reach = 3 * 2 * (WINDOW - 1)
    assert (change["sliding"][: 2 * WINDOW] > 1e-3).all() and (change["sliding"][reach + 1 :] < 1e-5).all()
    assert (change["mixtral"] > 1e-3).all()  # the same weights without a window


def kernel(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    """As flash attention is called: padding as a 2-D mask, the window as a number, causal by itself."""
    places = torch.arange(key.shape[2])
    back, window = places[-query.shape[2] :].unsqueeze(1) - places, options.pop("sliding_window", None)
    allowed = ((back >= 0) & (back < (window or len(places)))).expand(len(query), 1, -1, -1)
    if attention_mask is not None:
        allowed = allowed & attention_mask.bool()[:, None, None] | (back == 0)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, allowed, **{**options, "is_causal": False})


@pytest.mark.slow
@pytest.mark.parametrize("router", [*AWARE, "ac+symphony+attention+smooth"])
@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_attention_that_takes_no_mask_but_padding_and_a_window_gives_the_same_tokens(kind: str, router: str) -> None:
    ALL_ATTENTION_FUNCTIONS.register("kernel", kernel)
    ALL_MASK_ATTENTION_FUNCTIONS.register("kernel", flash_attention_mask)
    model, (ids, mask) = copy.deepcopy(changed(kind, router)), prompts(kind)
    expected = generate(model, ids, mask, use_cache=False, output_logits=True)
    model.set_attn_implementation("kernel")
    for cached in (True, False):
        got = generate(model, ids, mask, use_cache=cached, output_logits=True)
        assert torch.equal(got.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=1e-3)


@pytest.mark.parametrize("router", VARIANTS)
@pytest.mark.parametrize(("kind", "attention"), [("llama", "eager"), ("mixtral", "sdpa"), ("sliding", "sdpa")])
@torch.no_grad()
def test_sequences_packed_into_one_row_do_not_see_each_other(kind: str, attention: str, router: str) -> None:
    """Positions that start anew say where the next one begins."""
    model = changed(kind, router, attention)
    ids = torch.randint(3, 64, (1, 17), generator=torch.Generator().manual_seed(6))
    positions = torch.cat([torch.arange(10), torch.arange(7)]).unsqueeze(0)
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(input_ids=ids[:, :10]).logits, model(input_ids=ids[:, 10:]).logits], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-4)
    assert (model(input_ids=ids).logits[:, 10:] - alone[:, 10:]).abs().amax(-1).min() > 1e-2


FAMILIES = [case for case in itertools.product(EXTRA, ("eager", "sdpa")) if case != ("gpt_oss", "sdpa")]
DENSE = [("llama", "eager"), ("qwen3", "sdpa"), ("phi3", "sdpa"), ("gpt2", "eager"), ("gpt2", "sdpa")]


@pytest.mark.parametrize("router", AWARE)
@pytest.mark.parametrize(
    ("model_type", "attention"),
    quick_or_slow(
        [*FAMILIES, *DENSE],
        [case for case in (*FAMILIES, *DENSE) if case[1] == "sdpa" or case[0] in ("mixtral", "gpt_oss", "llama")],
    ),
)
@torch.no_grad()
def test_every_family_knows_its_padding_and_its_past(model_type: str, attention: str, router: str) -> None:
    """Padded on either side as each sequence alone, and eight tokens one by one as all at once."""
    model, length = changed(model_type, router, attention), 20
    numbers = torch.randint(3, 64, (3, length), generator=torch.Generator().manual_seed(3))
    for side in ("right", "left"):
        places = torch.arange(length) if side == "right" else torch.arange(length).flip(0)
        real = torch.stack([places < count for count in (20, 15, 9)])
        ids, mask = numbers * real, real.long()
        logits, routes = full_forward(model, ids, mask)
        assert len(routes) == MOE_LAYERS.get(model_type, 3)
        for row, own in enumerate(real):
            alone, own_routes = full_forward(model, ids[row : row + 1, own], mask[row : row + 1, own])
            torch.testing.assert_close(logits[row, own], alone[0], rtol=0, atol=1e-4)
            rows = torch.zeros_like(real)
            rows[row] = own
            assert_same_routes([part(layer, rows) for layer in routes], own_routes)

    positions = (mask.cumsum(1) - 1).clamp_min(0)

    def one_by_one() -> Tensor:
        past, start, pieces = None, 0, []
        for end in (12, *range(13, length + 1)):
            given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end], "past_key_values": past}
            out = model(input_ids=ids[:, start:end], use_cache=True, **given)
            past, start = out.past_key_values, end
            pieces.append(out.logits)
        return torch.cat(pieces, dim=1)

    stepwise, own_routes = traced(model, one_by_one, 3)
    torch.testing.assert_close(stepwise[real], logits[real], rtol=0, atol=1e-4)
    assert_same_routes([part(layer, real) for layer in own_routes], [part(layer, real) for layer in routes])


IDS = torch.tensor([[5, 9, 13, 7, 3, 22, 31, 40]])


def filled(model: Any) -> Any:
    return model(input_ids=IDS[:, :6], use_cache=True).past_key_values


@pytest.mark.parametrize(("before", "router"), [("similarity", "attention"), ("attention", "similarity")])
@torch.no_grad()
def test_a_cache_that_another_filled_is_refused(before: str, router: str) -> None:
    model, elsewhere = changed("mixtral", router), changed("mixtral", before)
    twin = copy.deepcopy(elsewhere)
    holdfast.reroute(twin, router)
    foreign = [filled(tiny("mixtral")), filled(elsewhere), filled(twin), filled(changed("llama", router))]
    for past in foreign:
        with pytest.raises(ValueError, match=r"\b6 tokens.*\b0\b") as refusal:
            model(input_ids=IDS[:, 6:7], past_key_values=past)
        assert "\n" not in str(refusal.value) and "cache" in str(refusal.value)


@pytest.mark.parametrize("router", AWARE)
@torch.no_grad()
def test_a_cache_from_before_rerouting_is_refused(router: str) -> None:
    model = tiny("mixtral")
    for name in (router, "symphony+similarity"):
        past = filled(model)
        holdfast.reroute(model, name)
        assert_refused("rows for 0", model, input_ids=IDS[:, 6:7], past_key_values=past)
    past = filled(model)
    holdfast.restore(model)(input_ids=IDS[:, 6:7], past_key_values=past)  # the family's own rule needs no rows


@torch.no_grad()
def test_a_cache_that_misses_a_token_is_refused() -> None:
    model = changed("mixtral", "similarity")
    past = filled(model)
    tiny("mixtral")(input_ids=IDS[:, 6:7], past_key_values=past)
    assert_refused(r"\b7 tokens.*\b6\b", model, input_ids=IDS[:, 7:8], past_key_values=past)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("router", AWARE)
@torch.no_grad()
def test_a_copied_cache_continues_a_prompt_more_than_once(router: str, static: bool) -> None:
    model = changed("mixtral", router)
    full = model(input_ids=IDS).logits[:, 6:]
    past = transformers.StaticCache(config=model.config, max_cache_len=12) if static else transformers.DynamicCache()
    model(input_ids=IDS[:, :6], past_key_values=past)
    for again in (copy.deepcopy(past), pickle.loads(pickle.dumps(past)), past):
        torch.testing.assert_close(model(input_ids=IDS[:, 6:], past_key_values=again).logits, full, rtol=0, atol=1e-4)
    past.reset()  # and what is emptied can be filled anew
    if int(past.get_seq_length()):
        pytest.skip("this version of transformers zeroes a cache without emptying it")
    torch.testing.assert_close(model(input_ids=IDS, past_key_values=past).logits[:, 6:], full, rtol=0, atol=1e-4)


IN_ANOTHER_PROCESS = """
import pickle, sys, torch
from holdfast.routing.cache import ROUTER_NUMBERS
model, past, ids, full = pickle.load(sys.stdin.buffer)
with torch.no_grad():
    torch.testing.assert_close(model(input_ids=ids, past_key_values=past).logits, full, rtol=0, atol=1e-4)
print(next(ROUTER_NUMBERS))
"""


@pytest.mark.slow  # starts a process
@torch.no_grad()
def test_another_process_continues_a_pickled_cache_with_the_pickled_model() -> None:
    model = changed("mixtral", "similarity+top-p")  # with Holdfast's functions for attention and for experts
    given = pickle.dumps((model, filled(model), IDS[:, 6:], model(input_ids=IDS).logits[:, 6:]))
    done = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS], input=given, stdout=subprocess.PIPE, check=True)
    # A router that the other process makes itself is not taken for one of this process.
    assert abs(int(done.stdout) - next(ROUTER_NUMBERS)) > 10**5


@torch.no_grad()
def test_a_cache_can_be_repeated_and_a_part_of_its_batch_selected() -> None:
    model = changed("llama", "similarity")
    ids = torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(4))
    full = model(input_ids=ids).logits[:, 6:]
    past = model(input_ids=ids[:, :6], use_cache=True).past_key_values
    past.batch_repeat_interleave(2)
    past.batch_select_indices(torch.tensor([3, 0]))
    again = model(input_ids=ids[[1, 0], 6:], past_key_values=past).logits
    torch.testing.assert_close(again, full[[1, 0]], rtol=0, atol=1e-4)
    past.crop(-4)
    past.batch_select_indices(torch.tensor([True, False]))
    again = model(input_ids=ids[1:, 6:], past_key_values=past).logits
    torch.testing.assert_close(again, full[1:], rtol=0, atol=1e-4)


def test_continuous_batching_runs_token_wise_routers_and_refuses_the_others() -> None:
    """It lays tokens of several sequences side by side; a router that reads a sequence would mix them without a word."""
    config = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = transformers.ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32)
    settings: dict[str, Any] = {"generation_config": config, "continuous_batching_config": blocks}
    asked = [[5, 9, 13, 7], [3, 22]]
    model = changed("mixtral", "symphony")
    answers = list(model.generate_batch(inputs=asked, **settings).values())
    for prompt, answer in zip(asked, answers, strict=True):
        ids = torch.tensor([prompt])
        alone = generate(model, ids, torch.ones_like(ids), max_new_tokens=6).sequences[0, len(prompt) :]
        assert answer.generated_tokens == alone.tolist()
    for router in AWARE:
        for answer in changed("mixtral", router).generate_batch(inputs=asked, **settings).values():
            assert not answer.generated_tokens
            assert "continuous batching" in answer.error and "use generate" in answer.error


def test_packed_sequences_without_a_mask_are_refused_by_routers_that_look_at_other_tokens() -> None:
    """Flash attention packs by `cu_seq_lens`, and there is no 4-D mask that tells the sequences apart."""
    packed = {"cu_seq_lens_q": torch.tensor([0, 4, 12], dtype=torch.int32)}
    ids = torch.arange(3, 15).view(1, 12)
    assert_refused("packed", holdfast.reroute(tiny("mixtral"), "similarity"), input_ids=ids, use_cache=False, **packed)
    holdfast.reroute(tiny("mixtral"), "smooth")(input_ids=ids, use_cache=False, **packed)

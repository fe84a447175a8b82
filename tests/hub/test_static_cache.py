"""Decoding with a static KV cache: one compiled graph for all tokens, and the result of growing rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tiers import quick_or_slow
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor
from torch._dynamo.utils import counters
from wording import assert_refused

import holdfast
from holdfast.hub.context import token_mask_of, window_mask
from holdfast.hub.install import install_hooks
from holdfast.hub.layers import moe_layers
from holdfast.routing import RouterCache
from holdfast.routing.cache import StaticRouterCache

LAYERS = {"num_hidden_layers": 2}  # each layer more is traced once more
AWARE = ["similarity", "attention"]
VARIANTS = [
    *AWARE,
    "similarity[from=confident]",
    "similarity[of=attention]",
    "attention[heads=all]",
    "symphony+similarity",
    "ac+attention+smooth",
]
IDS = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.stack([torch.arange(9) >= 9 - length for length in (9, 6, 3)]).long()  # padded on the left


def build(router: str, kind: str = "mixtral", attention: str = "sdpa") -> Any:
    torch.manual_seed(1)
    if kind == "mixtral":
        model = holdfast.reroute(tiny("mixtral", **LAYERS), router)
    else:
        model = holdfast.sparsify(tiny_dense(kind, **LAYERS), experts=8, router=router, noise=0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.set_attn_implementation(attention)
    return model.eval()


def static_cache(model: Any, length: int = 24) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=length)


def generate(model: Any, tokens: int, **options: Any) -> Any:
    asked = {"max_new_tokens": tokens, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(IDS, attention_mask=MASK, **asked, **options)


def compiled(backend: str = "eager") -> dict[str, Any]:
    """Return the options with which `generate` compiles the step of a token, as it does by itself on a GPU."""
    config = transformers.CompileConfig(backend=backend, mode=None, fullgraph=True)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment]
    return {"cache_implementation": "static", "compile_config": config}


@pytest.fixture
def no_recompilation() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("router", "tokens"),
    [
        pytest.param("similarity", 8, marks=pytest.mark.slow),
        *(pytest.param(name, 256, marks=pytest.mark.slow) for name in AWARE),
        *(pytest.param(name, 12, marks=pytest.mark.slow) for name in ["smoe", "symphony", "ac", "smooth", *VARIANTS[2:]]),
    ],
)
def test_a_step_is_one_graph_that_is_compiled_once(router: str, tokens: int, no_recompilation: None) -> None:
    """Also in the next `generate`, which has a new cache."""
    model = build(router)
    expected = generate(model, tokens)
    for _ in range(2):
        got = generate(model, tokens, **compiled())
        assert isinstance(got.past_key_values, transformers.StaticCache)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        assert torch.equal(got.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("router", AWARE)
def test_the_default_backend_decodes_the_same_tokens(router: str, no_recompilation: None) -> None:
    model = build(router)
    got, expected = generate(model, 8, **compiled("inductor")), generate(model, 8)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", quick_or_slow(["mixtral", "llama"], ["mixtral"]))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("router", quick_or_slow(VARIANTS, AWARE))
@torch.no_grad()
def test_rows_of_the_full_length_give_the_logits_of_growing_rows_and_of_no_cache(
    kind: str, attention: str, router: str
) -> None:
    """In steps of several tokens and of one, with padding."""
    model = build(router, kind, attention)
    ids, mask = torch.cat([IDS, IDS[:, :5]], 1), torch.cat([MASK, torch.ones(3, 5, dtype=torch.long)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)

    def decoded(cache: Any) -> Tensor:
        pieces = []
        for start, end in ((0, 9), (9, 12), (12, 13), (13, 14)):
            given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            pieces.append(model(input_ids=ids[:, start:end], past_key_values=cache, **given).logits)
        return torch.cat(pieces, 1)[mask.bool()]

    fixed, growing = static_cache(model), static_cache(model)
    got = decoded(fixed)
    whole = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-4)
    for capture in model._holdfast.captures:
        capture.static_rows = False
    torch.testing.assert_close(got, decoded(growing), rtol=0, atol=1e-4)
    assert all(isinstance(layer.router_rows, StaticRouterCache) for layer in fixed.layers)
    assert all(isinstance(layer.router_rows, RouterCache) for layer in growing.layers)


@pytest.mark.parametrize("router", AWARE)
@torch.no_grad()
def test_a_reset_cache_starts_again_in_the_same_memory(router: str) -> None:
    model, other = build(router), IDS.flip(1)
    cache = static_cache(model)
    model(input_ids=IDS, past_key_values=cache)
    rows = {name: each.data_ptr() for name, each in cache.layers[1].router_rows._rows.items()}
    cache.reset()
    first = model(input_ids=other[:, :5], past_key_values=cache).logits
    rest = model(input_ids=other[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), model(input_ids=other).logits, rtol=0, atol=1e-4)
    assert rows and rows == {name: each.data_ptr() for name, each in cache.layers[1].router_rows._rows.items()}


@torch.no_grad()
def test_beams_that_swap_places_move_the_rows_of_a_static_cache() -> None:
    model = build("similarity")
    cache, order = static_cache(model), torch.tensor([2, 2, 0])
    model(input_ids=IDS[:, :6], past_key_values=cache)
    cache.reorder_cache(order)
    ids = torch.cat([IDS[order, :6], IDS[:, 6:]], 1)
    got = model(input_ids=ids[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(got, model(input_ids=ids).logits[:, 6:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("router", AWARE)
@torch.no_grad()
def test_a_static_cache_with_tokens_of_another_model_is_refused(router: str) -> None:
    model, plain = build(router), tiny("mixtral", **LAYERS)
    cache = static_cache(model)
    plain(input_ids=IDS[:, :6], past_key_values=cache)
    assert_refused(r"\b6 tokens.*rows for 0\b", model, input_ids=IDS[:, 6:7], past_key_values=cache)
    cache = static_cache(model)
    model(input_ids=IDS[:, :6], past_key_values=cache)
    plain(input_ids=IDS[:, 6:7], past_key_values=cache)
    assert_refused(r"\b7 tokens.*rows for 6\b", model, input_ids=IDS[:, 7:8], past_key_values=cache)
    cache = static_cache(model)
    build(router)(input_ids=IDS[:, :6], past_key_values=cache)
    assert_refused(r"\b6 tokens.*rows for 0\b", model, input_ids=IDS[:, 6:7], past_key_values=cache)
    cache.reset()
    model(input_ids=IDS, past_key_values=cache)  # what is emptied can be filled by any router


def test_a_part_that_does_not_declare_static_rows_gets_rows_that_grow() -> None:
    model = build("similarity")
    assert all(capture.static_rows for capture in model._holdfast.captures)

    class Grows(type(model._holdfast.captures[0].router.inform[0])):  # type: ignore[misc]
        @property
        def declares(self) -> Any:
            return replace(super().declares, static_rows=False)

    for layer in model.model.layers:
        layer.mlp.gate.holdfast.inform[0].__class__ = Grows
    install_hooks(model, moe_layers(model), model._holdfast.specs)
    with torch.no_grad():
        cache = static_cache(model)
        model(input_ids=IDS[:, :6], past_key_values=cache)
        got = model(input_ids=IDS[:, 6:], past_key_values=cache).logits
        torch.testing.assert_close(got, model(input_ids=IDS).logits[:, 6:], rtol=0, atol=1e-4)
    assert [layer.router_rows.tokens for layer in cache.layers] == [9, 9]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("length", [1, 3])
def test_padding_is_read_at_positions_as_after_a_number_of_tokens(dtype: torch.dtype, length: int) -> None:
    allowed = torch.rand(2, 1, length, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = allowed if dtype == torch.bool else torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(dtype).min)
    flat = allowed[:, 0, 0].long()
    for past in (0, 4, 12 - length, 11):  # 11: a mask with fewer columns than the cache has positions
        positions = torch.arange(length) + past
        for each in (mask, flat):
            got, expected = token_mask_of(each, 2, length, None, positions), token_mask_of(each, 2, length, past)
            assert got is not None and expected is not None and torch.equal(got, expected)


def test_a_mask_made_from_positions_hides_later_tokens_and_those_outside_a_window() -> None:
    positions = torch.tensor([4, 5])
    rows = [[4 - window < j <= 4 for j in range(8)] for window in (8, 3)]
    assert window_mask(2, 8, None, torch.device("cpu"), positions)[0, 0, 0].tolist() == rows[0]
    assert window_mask(2, 8, 3, torch.device("cpu"), positions)[0, 0, 0].tolist() == rows[1]

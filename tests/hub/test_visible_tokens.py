"""Which tokens may inform each other in a Hugging Face model: what its own attention mask allows, captured for nothing."""

from typing import Any

import pytest
import torch
import transformers
from tiny import tiny

import holdfast
from holdfast.hub.replacements import ConfigView
from holdfast.routing import Attention, VisibleTokens

ROUTERS = ["similarity", "similarity[of=attention]", "similarity[from=confident]", "attention[heads=all]"]


def modules(model: Any) -> tuple[Any, Any]:
    """The attention of the first layer, and its output projection."""
    attention = model.model.layers[0].self_attn
    return attention, attention.o_proj


@pytest.mark.parametrize(
    ("router", "hooks", "view"),
    [
        ("similarity", 0, True),
        ("similarity[causal=false]", 0, False),
        ("similarity[of=attention]", 1, True),
        ("attention", 1, True),
        ("smooth", 0, False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*depend on later tokens.*")
def test_a_router_captures_only_what_it_reads(router: str, hooks: int, view: bool) -> None:
    model = holdfast.reroute(tiny("mixtral"), router)
    attention, projection = modules(model)
    assert len(projection._forward_hooks) == hooks
    assert isinstance(attention.config, ConfigView) == view
    holdfast.restore(model)
    assert not projection._forward_hooks and not isinstance(attention.config, ConfigView)


def test_similarity_of_tokens_gets_the_mask_and_no_attention() -> None:
    model = holdfast.reroute(tiny("mixtral"), "similarity").eval()
    seen: list[Any] = []
    router = next(module for module in model.modules() if isinstance(module, holdfast.Router))
    router.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    model(input_ids=torch.randint(3, 60, (2, 9)), attention_mask=mask)
    assert seen[0].attention is None and isinstance(seen[0].visible, VisibleTokens)
    visible = seen[0].visible
    assert visible.keys == 9 and visible.mask is not None and visible.mask.shape[-2:] == (9, 9)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_documents_are_routed_as_if_they_were_alone(router: str, implementation: str) -> None:
    """Positions that start again at 0 mark a new document; its tokens must not be informed by the one before."""
    model: Any = tiny("mixtral")
    model.set_attn_implementation(implementation)
    holdfast.reroute(model, router).eval()
    ids = torch.randint(3, 60, (1, 13), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(5), torch.arange(8)]).unsqueeze(0)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = model(input_ids=ids[:, 5:], use_cache=False).logits
        mixed = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(packed[:, 5:], alone, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(mixed[:, 5:], alone, atol=1e-3)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_sliding_window_limits_what_informs_a_token(router: str) -> None:
    """In one layer with a window of 4, attention passes a token on by 3 places, and the router by 3 more, not further."""
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        sliding_window=4,
    )
    torch.manual_seed(0)
    model: Any = holdfast.reroute(transformers.MixtralForCausalLM(config), router, strength=0.5).eval()
    ids = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, 2] = 61
    with torch.no_grad(), holdfast.trace(model) as routes:
        model(input_ids=ids, use_cache=False)
        first = routes[0].gates
    with torch.no_grad(), holdfast.trace(model) as routes:
        model(input_ids=changed, use_cache=False)
        second = routes[0].gates
    moved = (first != second).any(-1)
    assert moved[2] and moved[6:9].any()
    assert not moved[:2].any() and not moved[9:].any()


def test_attention_is_still_a_whole_record() -> None:
    model = holdfast.reroute(tiny("mixtral"), "similarity[of=attention]").eval()
    seen: list[Any] = []
    router = next(module for module in model.modules() if isinstance(module, holdfast.Router))
    router.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    model(input_ids=torch.randint(3, 60, (2, 9)))
    assert isinstance(seen[0].attention, Attention) and seen[0].attention.key.shape[2] == 9


def test_the_option_from_is_saved_and_loaded(tmp_path: Any) -> None:
    model = holdfast.reroute(tiny("mixtral"), "similarity[from=confident,strength=learned,rank=4]").eval()
    by_keyword = holdfast.reroute(tiny("mixtral"), "similarity", from_="confident", strength="learned", rank=4)
    holdfast.save(model, tmp_path / "model")
    loaded = holdfast.load(tmp_path / "model").eval()
    ids = torch.randint(3, 60, (2, 9))
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    for found in (loaded, by_keyword):
        for router in (module for module in found.modules() if isinstance(module, holdfast.Router)):
            assert router.informers[0].from_ == "confident"  # type: ignore[attr-defined]

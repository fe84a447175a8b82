"""Which tokens may inform each other in a Hugging Face model: what its own attention mask allows, captured for nothing."""

from typing import Any

import pytest
import torch
from tiny import tiny

import holdfast
from holdfast.hub.replacements import ConfigView
from holdfast.hub.tracing import router_calls
from holdfast.routing import VisibleTokens


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
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    with router_calls(model) as calls:
        model(input_ids=torch.randint(3, 60, (2, 9)), attention_mask=mask)
    assert calls[0].context is not None and calls[0].context.attention is None
    visible = calls[0].context.visible
    assert (
        isinstance(visible, VisibleTokens)
        and visible.keys == 9
        and visible.mask is not None
        and visible.mask.shape[-2:] == (9, 9)
    )


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

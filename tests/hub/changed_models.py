"""Tiny models with routers of ours, and what tests compare of them."""

from typing import Any

import torch
from tiny import EXTRA, tiny
from tiny_dense import inputs, outputs, tiny_dense
from torch import Tensor

import holdfast

IDS = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(0))
TWO_ROWS = torch.tensor([[5, 9, 13, 7, 3, 22], [4, 8, 15, 16, 23, 42]])


def changed(model_type: str, router: str, seed: int = 0, **options: Any) -> Any:
    """A rerouted model of an MoE family, or a sparsified one of a dense family."""
    if model_type in EXTRA:
        return holdfast.reroute(tiny(model_type, seed), router, **options)
    dense = tiny_dense(model_type, seed)
    torch.manual_seed(1)
    return holdfast.sparsify(dense, experts=8, router=router, noise=0.5, **options)


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(input_ids=IDS, **options).logits
    return out


def batch_of(model_type: str) -> dict[str, Any]:
    return {"input_ids": TWO_ROWS} if model_type in EXTRA else inputs(model_type)


@torch.no_grad()
def said(model: Any, model_type: str) -> Tensor:
    return outputs(model, batch_of(model_type))


def learned(model_type: str, router: str = "symphony+smooth", model: Any = None) -> Any:
    """A tiny model with this router, whose state has moved from where it started."""
    if model_type in EXTRA:
        model = holdfast.reroute(model or tiny(model_type), router)
    else:
        model = holdfast.sparsify(model or tiny_dense(model_type), experts=4, router=router, noise=0.3)
    torch.manual_seed(3)
    model.train()
    for _ in range(2):
        model(**batch_of(model_type))
    return model.eval()


def assert_same(model: Any, other: Any, skip: tuple[str, ...] = ()) -> None:
    """Parameters and buffers, saved or not, bit for bit and of the same dtype; not what was measured in the last batch."""
    for kind in ("named_parameters", "named_buffers"):
        expected, got = dict(getattr(model, kind)()), dict(getattr(other, kind)())
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            if not name.endswith((".staged_overflow", *skip)):
                assert value.dtype == got[name].dtype and torch.equal(value, got[name]), name

"""Every combination that the papers report exists and trains, with a shared expert and with 32 experts, top 4, too."""

from typing import Any

import pytest
import torch
from combinations import COMBINATIONS, context_for
from tiers import quick_or_slow

import holdfast
from holdfast import Experts, FeedForward, MoE

VARIANTS: dict[str, dict[str, Any]] = {
    "8 experts": {},
    "shared expert": {"shared": True},
    "32 experts, top 4": {"experts": 32, "k": 4},
}


@pytest.mark.parametrize("variant", quick_or_slow(VARIANTS, ["shared expert"]))
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_the_combination_trains(combination: str, variant: str) -> None:
    """Thirty steps of Adam on a small regression more than halve the error, with all that a router brings switched on."""
    name, options = COMBINATIONS[combination]
    sizes = {"experts": 8, "k": 2, **VARIANTS[variant]}
    shared = FeedForward(16, 16) if sizes.pop("shared", False) else None
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=16, **sizes, **options, losses=holdfast.Losses(balance=0.01))
    layer = MoE(router, Experts(16, 16, sizes["experts"]), shared)
    optimizer = torch.optim.Adam(layer.parameters(), lr=2e-2)
    tokens, errors = torch.randn(8, 32, 16), []
    target = torch.tanh(tokens @ torch.randn(16, 16) / 4)
    context = context_for(tokens, sizes["experts"])
    for step in range(30):
        router.progress(step / 30)
        out, routing = layer(tokens, context)
        error = (out - target).square().mean()
        optimizer.zero_grad()
        (error + routing.loss).backward()
        optimizer.step()
        errors.append(float(error.detach()))
    assert errors[-1] < 0.5 * errors[0]

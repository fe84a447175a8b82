"""Expert dropout and gradient scaling inside Hugging Face models: native experts, checkpointing, saving and loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny, with_checkpointing
from tiny_dense import tiny_dense
from torch import Tensor

import holdfast

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_put((torch.tensor([1]), torch.tensor([0])), torch.tensor(0))


def changed(family: str, router: str) -> Any:
    if family == "llama":
        torch.manual_seed(0)
        return holdfast.sparsify(tiny_dense("llama"), experts=8, k=2, router=router, noise=0.5).train()
    return holdfast.reroute(tiny(family), router).train()


def gradients(model: Any) -> tuple[dict[str, Tensor], list[holdfast.Routing]]:
    with holdfast.trace(model) as routes:
        model(input_ids=IDS, attention_mask=MASK, labels=IDS.where(MASK.bool(), -100)).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found, list(routes)


@pytest.mark.parametrize("recomputes", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", ["mixtral", "llama", "gpt_oss"])
def test_gradients_of_experts_are_scaled_by_the_load_of_real_tokens(family: str, recomputes: bool) -> None:
    plain, _ = gradients(with_checkpointing(changed(family, "smoe"), recomputes))
    found, routes = gradients(with_checkpointing(changed(family, "smoe[gradient_scaling=1.5]"), recomputes))
    assert plain.keys() == found.keys()
    layer = -1
    for name, gradient in plain.items():
        expected = gradient
        if ".experts." in name:
            layer = int(name.split(".layers.")[1].split(".")[0])
            loads = (routes[layer].chosen & MASK.bool().view(-1, 1)).sum(0).float()
            factors = (loads.mean() / loads.clamp_min(1)).clamp(1 / 1.5, 1.5)
            assert bool((factors != 1).any())
            expected = gradient * factors.view(-1, *[1] * (gradient.dim() - 1))
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)
    assert layer >= 0


def test_expert_dropout_is_saved_counts_once_under_checkpointing_and_differs_between_layers(tmp_path: Path) -> None:
    plain, checkpointed = (with_checkpointing(changed("mixtral", "smoe[drop=0.4]"), enabled) for enabled in (False, True))
    for _ in range(3):
        (one, routes), (two, _) = gradients(plain), gradients(checkpointed)
        assert all(torch.equal(one[name], two[name]) for name in one)
        gone = [(layer.gates == 0).all(0) for layer in routes]
        assert all(torch.equal((layer.gates == 0).any(0), lost) for layer, lost in zip(routes, gone, strict=True))
    assert len({tuple(lost.tolist()) for lost in gone}) > 1
    holdfast.save(plain, tmp_path / "saved")
    loaded: Any = holdfast.load(tmp_path / "saved").train()
    again = [gradients(model)[1][0].gates == 0 for model in (plain, loaded)]
    assert torch.equal(*again) and bool(again[0].any())

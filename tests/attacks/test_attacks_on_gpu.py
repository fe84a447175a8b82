"""The attacks on a GPU: the same random numbers as on a CPU, the same guarantees."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.attacks import CORRUPTIONS, AttackedInputs, attack_routes, corrupt, fgsm, pgd, spsa
from holdfast.routing import create_router

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
Digits = tuple[nn.Module, Tensor, Tensor]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(("attack", "options"), [(fgsm, {}), (pgd, {}), (spsa, {"steps": 4, "samples": 16})])
def test_attacked_inputs_stay_in_the_ball_on_a_gpu(
    attack: Callable[..., AttackedInputs], options: dict[str, Any], norm: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).cuda().to(dtype).eval()
    images = torch.rand(32, 1, 8, 8, device="cuda").to(dtype)
    labels = model(images).argmax(-1)
    budget = 0.1 if norm == "linf" else 0.5  # within 0.1 in l2 hardly any of these is wrong
    result = attack(model, images, labels, budget=budget, norm=norm, **options)
    assert result.inputs.is_cuda and result.inputs.dtype == dtype and result.realised <= budget and result.rate > 0
    assert (result.inputs >= 0).all() and (result.inputs <= 1).all()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_gpu_corrupts_as_a_cpu_does(name: str) -> None:
    images = torch.rand(3, 3, 40, 36, generator=torch.Generator().manual_seed(0))
    here, there = (corrupt(x, name, severity=3, seed=1).images.cpu() for x in (images, images.cuda()))
    assert float((here - there).abs().mean()) < 1e-3


@pytest.mark.parametrize("name", ["smoe", "symphony", "similarity", "smooth"])
def test_a_gpu_flips_the_routes_that_a_cpu_flips(name: str) -> None:
    torch.manual_seed(0)
    made, tokens = create_router(name, dim=16, experts=6, k=2), torch.randn(2, 9, 16)
    made.train()(torch.randn(4, 16, 16))
    made.eval()
    here = attack_routes(made, tokens, budget=0.3, steps=6, rounds=1)
    there = attack_routes(made.cuda(), tokens.cuda(), budget=0.3, steps=6, rounds=1)
    assert there.inputs.is_cuda and there.realised <= 0.3
    assert int((here.flipped != there.flipped.cpu()).sum()) <= 1

"""State that learns in a compiled model on a GPU, also where its kernels are captured as CUDA graphs and replayed."""

from typing import Any

import pytest
import torch
from tiny import with_checkpointing
from tiny_dense import tiny_dense
from torch import Tensor

import holdfast
from holdfast.routing import Router
from holdfast.routing.state import StatefulPart

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

STEPS = 30
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "symphony": ("symphony", {}),
    "smooth": ("smooth", {}),
    "smooth, annealed": ("smooth", {"anneal": True}),
    "smooth, by its loss": ("smooth", {"control": "loss"}),
    "ac": ("ac", {}),
    "attention": ("attention", {}),
    "remoe": ("remoe", {}),
    "symphony+smooth": ("symphony+smooth", {}),
}


def build(kind: str, checkpointed: bool = False) -> Any:
    name, options = ROUTERS[kind]
    dense = tiny_dense("gpt2", n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    losses = holdfast.Losses(balance=0.01)
    model = holdfast.sparsify(dense, experts=8, router=name, init="random", losses=losses, **options)
    return with_checkpointing(model.train(), checkpointed)


def batches(steps: int, sequences: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Tokens and the mask of their padding, which attention hands to routers as the diagonal of a 4-D mask."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        ids = torch.randint(3, 96, (sequences, 64), generator=generator)
        length = torch.randint(40, 65, (sequences, 1), generator=generator)
        found.append((ids, (torch.arange(64) < length).long()))
    return found


def train(model: Any, call: Any, *, device: str, steps: int, autocast: bool = False, sequences: int = 8) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if autocast else 1e-2)
    losses = []
    for step, (ids, mask) in enumerate(batches(steps, sequences)):
        for module in model.modules():
            if isinstance(module, Router):
                module.progress(step / steps)
        ids, mask = ids.to(device), mask.to(device)
        labels = ids.where(mask == 1, -100)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = call(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def state(model: Any) -> dict[str, Tensor]:
    model.eval()
    return {
        f"{name}.{key}": value.float().cpu()
        for name, part in model.named_modules()
        if isinstance(part, StatefulPart)
        for key, value in part.named_buffers(recurse=False)
    }


def agrees(found: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> None:
    assert found.keys() == expected.keys() and expected
    for name, value in expected.items():
        off = (found[name] - value).abs().max()
        assert off <= within * value.abs().max() + 1e-6, f"{name}: {found[name].flatten()[:4]} for {value.flatten()[:4]}"


@pytest.mark.parametrize("sequences", [8, 1])
@pytest.mark.parametrize("kind", ROUTERS)
def test_padded_batches_teach_a_gpu_what_they_teach_a_cpu(kind: str, sequences: int) -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = build(kind).to(device)
        train(model, model, device=device, steps=3, sequences=sequences)
        results.append(state(model))
    agrees(results[1], results[0], within=1e-3)


def compare(kind: str, mode: str, *, checkpointed: bool = False, autocast: bool = False) -> None:
    results = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = build(kind, checkpointed).cuda()
        call = torch.compile(model, mode=mode) if compiled else model
        losses = train(model, call, device="cuda", steps=STEPS, autocast=autocast)
        results.append((torch.tensor(losses), state(model)))
    (eager_losses, expected), (compiled_losses, found) = results
    agrees(found, expected, within=2e-2 if autocast else 2e-3)
    torch.testing.assert_close(compiled_losses, eager_losses, atol=2e-2 if autocast else 1e-3, rtol=0)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("kind", ROUTERS)
def test_a_compiled_model_learns_the_state_that_it_learns_otherwise(kind: str, mode: str) -> None:
    compare(kind, mode)


@pytest.mark.parametrize("kind", ["symphony+smooth", "ac", "attention", "remoe"])
def test_captured_recomputation_teaches_nothing_twice(kind: str) -> None:
    compare(kind, "reduce-overhead", checkpointed=True)


@pytest.mark.parametrize("kind", ["symphony+smooth", "ac", "attention", "remoe"])
def test_a_captured_model_learns_the_same_state_under_autocast(kind: str) -> None:
    compare(kind, "reduce-overhead", autocast=True)

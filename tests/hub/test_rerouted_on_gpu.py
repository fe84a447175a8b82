"""Rerouted models on a GPU: what a CPU computes, outputs and gradients."""

import copy

import pytest
import torch
from tiny import tiny

import holdfast

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("router", ["smooth", "ac", "symphony+smooth"])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])  # silu(gate) * up, which the kernels know, and a gate of its own
def test_a_rerouted_model_computes_on_a_gpu_what_it_does_on_a_cpu(family: str, router: str) -> None:
    model = holdfast.reroute(tiny(family), router)
    on_gpu = copy.deepcopy(model).cuda()
    ids = torch.randint(1, 60, (2, 12))
    found = []
    for one, batch in ((model, ids), (on_gpu, ids.cuda())):
        one.train()
        out = one(input_ids=batch, labels=batch)
        out.loss.backward()
        grads = {name: each.grad.cpu() for name, each in one.named_parameters() if each.grad is not None}
        found.append((out.logits.detach().cpu(), grads))
    (logits, grads), (logits_there, grads_there) = found
    torch.testing.assert_close(logits_there, logits, atol=1e-4, rtol=1e-3)
    assert grads.keys() == grads_there.keys()
    for name, grad in grads.items():
        assert (grads_there[name] - grad).norm() <= 1e-3 * grad.norm() + 1e-7, name

"""Every combination on a GPU: the routes of a CPU, and no step that waits for the host."""

import pytest
import torch
from test_training import COMBINATIONS, context_for

import holdfast
from holdfast import Context, MoE
from holdfast.routing import Attention, Previous, Routing
from holdfast.testing.subject import STEEP, differing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def to_gpu(context: Context) -> Context:
    attention, previous = context.attention, context.previous
    assert attention is not None and isinstance(attention.projection, torch.nn.Linear) and previous is not None
    moved = Attention(
        attention.query.cuda(),
        attention.key.cuda(),
        attention.value.cuda(),
        attention.projection.cuda(),
        attention.output.cuda(),
    )
    routing = previous.routing
    record = Routing(routing.logits.cuda(), routing.gates.cuda(), routing.experts.cuda(), routing.weights.cuda())
    return Context(causal=True, attention=moved, previous=Previous(previous.tokens.cuda(), record))


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_gpu_routes_as_a_cpu_does_and_does_not_wait(combination: str) -> None:
    name, options = COMBINATIONS[combination]
    torch.manual_seed(0)
    router = holdfast.router(name, dim=16, experts=8, **options)
    batches = [torch.randn(4, 32, 16) for _ in range(3)]
    on_gpu = holdfast.router(name, dim=16, experts=8, **options).cuda()
    on_gpu.load_state_dict(router.state_dict())
    layer = MoE(on_gpu, holdfast.Experts(16, 16, 8).cuda())
    for index, tokens in enumerate(batches):
        router(tokens, context_for(tokens, 8))
        x, context = tokens.cuda().requires_grad_(), to_gpu(context_for(tokens, 8))
        torch.cuda.set_sync_debug_mode("error" if index > 0 else "default")
        try:
            out, routing = layer(x, context)
            (out.square().mean() + routing.loss).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    tokens = batches[0]
    expected = router.eval()(tokens, context_for(tokens, 8))
    got = layer.eval().router(tokens.cuda(), to_gpu(context_for(tokens, 8)))
    back = Routing(got.logits.cpu(), got.gates.cpu(), got.experts.cpu(), got.weights.cpu())
    assert not differing(back, expected, weights_within=STEEP).any()
    for key, value in router.state_dict().items():
        torch.testing.assert_close(on_gpu.state_dict()[key].cpu(), value, atol=1e-5, rtol=1e-4)

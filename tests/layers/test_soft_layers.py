"""SoftMoE and SMEAR layers against loops over sequences, slots and experts, their identities, padding and refusals."""

import copy
from typing import Any

import pytest
import soft_references
import torch
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast import Context, Experts, Routing
from holdfast.layers import LAYERS
from holdfast.layers.moe import RoutedLayer
from holdfast.routing import Previous

DIM, EXPERTS, HIDDEN = 10, 5, 7

ROUTERS = {
    "softmoe": "softmoe",
    "softmoe, three slots": "softmoe[slots=3]",
    "softmoe+symphony": "softmoe[slots=2]+symphony",
    "softmoe+ac": "softmoe[slots=2]+ac",
    "softmoe+ac, one cluster": "softmoe+ac[mix=1]",
    "softmoe+ac+symphony": "softmoe[slots=2]+ac+symphony",
    "smear": "smear",
    "smear, mean of gates": "smear[average=gates]",
}
EXPERT_KINDS: dict[str, dict[str, Any]] = {
    "gated": {"gated": True},
    "plain, biases": {"gated": False, "bias": True, "activation": "gelu"},
}


def build(name: str, **options: Any) -> RoutedLayer:
    torch.manual_seed(0)
    router = holdfast.create_router(name, dim=DIM, experts=EXPERTS)
    experts = Experts(DIM, HIDDEN, EXPERTS, **options)
    layer = LAYERS[router.select.layer_kind](router, experts)
    for seed in range(3):  # state at its start, such as a graph of zeros, could hide mistakes
        x = draw(seed)
        layer(x, context_for(x))
    layer.eval()
    if "ac" in name:
        layer.router.score.get_buffer("spreads").uniform_(0.3, 2.0)
    return layer


def draw(seed: int = 0, sequences: int = 3, length: int = 7) -> Tensor:
    return torch.randn(sequences, length, DIM, generator=torch.Generator().manual_seed(seed))


def context_for(x: Tensor, token_mask: Tensor | None = None) -> Context:
    """Return a context with a previous layer, whose tokens and gates follow from x."""
    generator = torch.Generator().manual_seed(5)
    earlier = x.detach().nan_to_num() @ torch.randn(DIM, DIM, generator=generator)
    logits = (earlier @ torch.randn(DIM, EXPERTS, generator=generator)).flatten(0, 1)
    weights, chosen = logits.softmax(-1).topk(2)
    return Context(token_mask=token_mask, previous=Previous(earlier, Routing(logits, logits.softmax(-1), chosen, weights)))


def padding() -> Tensor:
    """Return a mask with a full sequence, one with padding at its end, and one with padding at its start."""
    return torch.tensor([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 5]).bool()


@pytest.mark.parametrize("masked", [False, True], ids=["no padding", "padding"])
@pytest.mark.parametrize("kind", EXPERT_KINDS)
@pytest.mark.parametrize("router", ROUTERS)
def test_layers_equal_loops_in_outputs_and_all_gradients(router: str, kind: str, masked: bool) -> None:
    layer = build(ROUTERS[router], **EXPERT_KINDS[kind])
    real = padding() if masked else None
    keep = torch.ones(3, 7).bool() if real is None else real
    tilt = draw(9).where(keep.unsqueeze(-1), 0.0)
    results = []
    for naive in (False, True):
        x = draw(8).requires_grad_()
        context = context_for(x, real)
        out = soft_references.layer(layer.router, layer.experts, x, context) if naive else layer(x, context)[0]
        names = ["tokens", *(name for name, _ in layer.named_parameters())]
        grads = torch.autograd.grad((out * tilt).sum(), [x, *layer.parameters()])
        results.append((out.float(), dict(zip(names, grads, strict=True))))
    (got, got_grads), (expected, expected_grads) = results
    torch.testing.assert_close(got[keep], expected[keep], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_grads, expected_grads, rtol=1e-3, atol=2e-5)


def test_softmoe_with_any_scale_and_one_expert_gives_all_tokens_the_output_of_one_weighted_mean() -> None:
    layer = holdfast.SoftMoE(holdfast.create_router("softmoe", dim=DIM, experts=1), Experts(DIM, HIDDEN, 1))
    out, routing = layer(draw())
    assert routing.dispatch is not None
    torch.testing.assert_close(routing.dispatch.view(3, 7).sum(1), torch.ones(3))
    mean = torch.einsum("bn,bnd->bd", routing.dispatch.view(3, 7), draw())
    expected = layer.experts(mean, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    torch.testing.assert_close(out, expected.unsqueeze(1).expand_as(out))


def test_smear_with_equal_experts_is_the_dense_expert() -> None:
    layer = build("smear", bias=True)
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter).clone())
    zero = torch.zeros(21, 1, dtype=torch.int64)
    expected = layer.experts(draw().flatten(0, 1), zero, torch.ones(21, 1)).view(3, 7, DIM)
    torch.testing.assert_close(layer(draw())[0], expected)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_sequence_without_a_real_token_disturbs_nothing(router: str) -> None:
    layer = build(ROUTERS[router], bias=True)
    real = padding()
    real[1] = False
    x = draw().requires_grad_()
    out, routing = layer(x, context_for(x, real))
    if routing.dispatch is not None:
        assert bool((out[1] == 0).all())
    elif "mean" not in router:
        torch.testing.assert_close(routing.gates.view(3, 7, -1)[1], torch.full((7, EXPERTS), 1 / EXPERTS))
    alone = layer(draw()[[0, 2]], context_for(draw()[[0, 2]], real[[0, 2]]))[0]
    torch.testing.assert_close(out[[0, 2]], alone)
    out.where(real.unsqueeze(-1), 0.0).sum().backward()
    assert x.grad is not None and bool((x.grad[1] == 0).all()) and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("name", ["softmoe", "smear"])
def test_a_causal_context_is_refused_unless_it_is_asked_for(name: str) -> None:
    layer = build(name)
    assert_refused("causal=False", layer, draw(), Context(causal=True))
    build(f"{name}[causal=false]")(draw(), Context(causal=True))


def test_a_router_of_another_kind_of_layer_is_refused_by_name() -> None:
    experts = Experts(DIM, HIDDEN, EXPERTS)
    with pytest.raises(ValueError, match=r"use holdfast\.SoftMoE instead of MoE"):
        holdfast.MoE(holdfast.create_router("softmoe", dim=DIM, experts=EXPERTS), experts)
    with pytest.raises(ValueError, match=r"use holdfast\.MoE instead of SMEAR"):
        holdfast.SMEAR(holdfast.create_router("smoe", dim=DIM, experts=EXPERTS), experts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("softmoe+smooth", "both replace the stage 'select'"),
        ("softmoe+xmoe", "both replace the stage 'score'"),
        ("softmoe+smear", "both replace the stage 'score'"),
        ("smear+ac", "subclasses LinearScore; SequenceScore does not"),
        ("smear+similarity", "the same scores, so Similarity would change nothing"),
        ("smear+attention[heads=2]", "the same scores, so [A-Za-z]+ would change nothing"),
        ("softmoe[slots=0]", "at least 1"),
        ("smear[average=median]", "average"),
    ],
)
def test_what_cannot_be_combined_is_refused(name: str, message: str) -> None:
    assert_refused(message, holdfast.create_router, name, dim=DIM, experts=EXPERTS)


@pytest.mark.parametrize("k", [None, 1, 5])
def test_the_graph_counts_the_two_largest_gates_whatever_k_is(k: int | None) -> None:
    router = holdfast.create_router("softmoe+symphony", dim=DIM, experts=EXPERTS, k=k)
    routing = router(draw())
    pairs = torch.zeros(EXPERTS, EXPERTS)
    for best in routing.logits.softmax(-1).topk(2).indices.tolist():
        for i in best:
            for j in best:
                pairs[i, j] += 1
    torch.testing.assert_close(router.informers[0].get_buffer("staged_together"), pairs)


def test_ac_mixes_eight_clusters_by_default_or_all_of_fewer() -> None:
    for experts, expected in ((12, 8), (5, 5)):
        router = holdfast.create_router("softmoe+ac", dim=DIM, experts=experts)
        assert router.score.mix == expected  # type: ignore[union-attr]
    assert holdfast.create_router("ac", dim=DIM, experts=5).score.mix == 1  # type: ignore[union-attr]


def test_ac_changes_logits_but_not_what_slots_are_made_of() -> None:
    layer = build("softmoe+ac")
    routing = layer(draw(), context_for(draw()))[1]
    plain = copy.deepcopy(layer)
    plain.router.score = plain.router.score.base  # type: ignore[union-attr, assignment]
    assert not torch.allclose(plain(draw())[1].logits, routing.logits, atol=1e-4)
    assert routing.dispatch is not None and routing.shares is not None
    held = holdfast.SoftMoE.run(layer.experts, draw(), routing, routing.weights, None)
    torch.testing.assert_close(held, layer(draw(), context_for(draw()))[0])


@pytest.mark.parametrize("router", ["softmoe[slots=2]+symphony", "smear"])
def test_a_bfloat16_layer_is_close_to_the_float32_one(router: str) -> None:
    layer = build(router, bias=True)
    expected = layer(draw())[0]
    low = copy.deepcopy(layer).to(torch.bfloat16)(draw().to(torch.bfloat16))[0]
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected, rtol=0.05, atol=0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(draw())[0].float(), expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("router", ["softmoe[slots=2]", "smear"])
def test_shared_experts_are_added(router: str) -> None:
    layer = build(router)
    shared = holdfast.FeedForward(DIM, 4)
    with_shared = type(layer)(layer.router, layer.experts, shared).eval()
    torch.testing.assert_close(with_shared(draw())[0], layer(draw())[0] + shared(draw()))


@pytest.mark.parametrize("router", ROUTERS)
def test_an_empty_batch_gives_an_empty_output(router: str) -> None:
    layer = build(ROUTERS[router])
    assert layer(draw(0, 0, 7))[0].shape == (0, 7, DIM)
    assert layer(draw(0, 3, 0))[0].shape == (3, 0, DIM)


@pytest.mark.slow
@pytest.mark.parametrize("router", ["softmoe[slots=2]+symphony", "smear"])
def test_a_compiled_layer_is_one_graph_with_the_same_output_and_gradients(router: str) -> None:
    layer = build(router)
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        x = draw().requires_grad_()
        out = run(x)[0]
        results.append((out, torch.autograd.grad(out.square().sum(), x)[0]))
    torch.testing.assert_close(*results)


def test_the_mean_of_gates_reads_gates_that_tokens_inform() -> None:
    """With `average="gates"`, a token-side informer is not inert, and is accepted."""
    tokens = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
    informed = holdfast.create_router("smear[average=gates]+similarity", dim=8, experts=4).eval()
    plain = holdfast.create_router("smear[average=gates]", dim=8, experts=4).eval()
    plain.load_state_dict({name: value for name, value in informed.state_dict().items() if name in plain.state_dict()})
    assert (informed(tokens).gates - plain(tokens).gates).abs().max() > 1e-3

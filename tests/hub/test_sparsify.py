"""Dense models of every family, made sparse."""

from pathlib import Path
from typing import Any

import family_models
import pytest
import torch
from step_zero import assert_step_0, needs_mkl, with_biases
from tiers import quick_or_slow
from tiny_dense import CONFIGS, LAYERS, inputs, outputs, tiny_dense
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.hub.layers import moe_layers
from holdfast.hub.replacements import SparseLayer
from holdfast.hub.tracing import router_calls
from holdfast.planning.meta_model import build_on_meta
from holdfast.routing.declarations import LayerSizes
from holdfast.routing.presets import REGISTRY

FAMILIES = sorted(CONFIGS)
SUMMING_TO_ONE = ["smoe", "smooth", "symphony", "similarity", "top-p", "symphony+similarity+smooth"]


@pytest.mark.parametrize("router", SUMMING_TO_ONE)
@pytest.mark.parametrize("family", FAMILIES)
def test_copied_experts_compute_what_the_dense_model_did(family: str, router: str) -> None:
    model, batch = tiny_dense(family), inputs(family)
    with torch.no_grad():
        before = outputs(model, batch)
        holdfast.sparsify(model, experts=4, router=router)
        with holdfast.trace(model) as routes:
            after = outputs(model, batch)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    assert len(routes) == LAYERS.get(family, 3)
    assert all(routing.gates.shape[1] == 4 for routing in routes)
    if "smooth" in router:
        assert any((routing.used.sum(1) > 2).any() for routing in routes)  # the strip is open


@needs_mkl
@pytest.mark.every_combination
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"intermediate_size": 64}),
        ("phi", {"intermediate_size": 64}),
        ("gpt2", {"n_positions": 512}),
        ("gpt2", {"n_positions": 512, "n_embd": 256}),  # long sums, whose parts are rounded
        ("t5", {"d_ff": 64, "feed_forward_proj": "gated-gelu"}),  # that is gelu_new
    ],
    ids=str,
)
def test_copied_experts_return_the_outputs_of_the_dense_network(family: str, changes: dict[str, Any], k: int) -> None:
    ids = torch.randint(3, 96, (2, 320), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, **({"decoder_input_ids": ids} if family == "t5" else {})}
    positions = {"max_position_embeddings": 512} if family in ("llama", "phi") else {}
    assert_step_0(with_biases(family_models.tiny_dense(family, **changes, **positions)), given, k)


@pytest.mark.parametrize("router", ["attention", "ac", "ac+symphony+attention+smooth"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "swin"])
def test_routers_that_read_their_context_start_from_the_dense_model_too(family: str, router: str) -> None:
    model, batch = tiny_dense(family), inputs(family)
    with torch.no_grad():
        before = outputs(model, batch)
        after = outputs(holdfast.sparsify(model, experts=4, router=router), batch)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_experts_and_a_router(family: str) -> None:
    model = tiny_dense(family)
    before = sum(parameter.numel() for parameter in model.parameters())
    holdfast.sparsify(model, experts=4)
    blocks = [module for module in model.modules() if isinstance(module, SparseLayer)]
    one_expert = sum(parameter[0].numel() for block in blocks for parameter in block.experts.parameters())
    routers = sum(4 * block.experts.dim for block in blocks)
    assert sum(parameter.numel() for parameter in model.parameters()) == before + 3 * one_expert + routers


@pytest.mark.parametrize("init", ["copy", "random"])
@pytest.mark.parametrize("family", quick_or_slow(FAMILIES, FAMILIES[:3]))
def test_a_few_steps_reduce_the_loss(family: str, init: Any) -> None:
    model, batch = tiny_dense(family), inputs(family)
    holdfast.sparsify(model, experts=4, router="symphony+smooth", init=init, losses=holdfast.Losses(balance=0.01))
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_random_experts_start_like_the_models_own_weights_and_a_graph_at_zero() -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=4, router="symphony", init="random", hidden=20)
    block: Any = model.model.layers[0].mlp
    assert block.experts.gate_up_proj.shape == (4, 40, 32)
    assert float(block.experts.gate_up_proj.detach().std()) == pytest.approx(model.config.initializer_range, rel=0.1)
    assert not torch.equal(block.experts.down_proj[0], block.experts.down_proj[1])
    assert not block.router.inform[0].graph.any()  # as in the paper: there is nothing yet to keep alive


def test_noise_makes_copies_differ() -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=4, noise=0.1)
    weight = model.model.layers[0].mlp.experts.down_proj
    difference = (weight[0] - weight[1]).std() / (2**0.5 * tiny_dense("llama").model.layers[0].mlp.down_proj.weight.std())
    assert float(difference.detach()) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("layers", "changed"), [("all", [0, 1, 2]), ("alternate", [1]), ("last:2", [1, 2]), ([0, -1], [0, 2])], ids=str
)
def test_only_the_chosen_layers_change(layers: Any, changed: list[int]) -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=4, layers=layers)
    sparse = [index for index, layer in enumerate(model.model.layers) if isinstance(layer.mlp, SparseLayer)]
    assert sparse == changed


@pytest.mark.parametrize("family", ["bert", "vit", "siglip"])
def test_an_encoder_informs_in_both_directions(family: str) -> None:
    """The first token's route depends on the last token, where attention does."""
    model, batch = holdfast.sparsify(tiny_dense(family), experts=4, router="similarity", tau=100.0), inputs(family)
    with torch.no_grad(), holdfast.trace(model) as routes:
        outputs(model, batch)
        first = routes[0].gates[0].clone()
        key = "input_ids" if "input_ids" in batch else "pixel_values"
        changed = {**batch, key: batch[key].clone()}
        changed[key][0].flatten()[-1] += 1
        outputs(model, changed)
        assert not torch.equal(routes[0].gates[0], first)


def test_the_attention_router_hears_what_attention_did() -> None:
    """The captured q, k, v and output reproduce the attention of the layer before, for every family that has one."""
    import torch.nn.functional as F

    for family in ("llama", "qwen3", "phi3", "gpt2", "bert", "vit", "siglip"):
        model, batch = holdfast.sparsify(tiny_dense(family), experts=4, router="attention"), inputs(family)
        with torch.no_grad(), router_calls(model) as calls:
            outputs(model, batch)
        seen: list[Any] = [call.context for call in calls]
        for context in seen:
            attention = context.attention
            groups = attention.query.shape[1] // attention.key.shape[1]
            key, value = (part.repeat_interleave(groups, dim=1) for part in (attention.key, attention.value))
            causal = context.causal and attention.mask is None
            mixed = F.scaled_dot_product_attention(
                attention.query, key, value, attn_mask=attention.mask, is_causal=causal, scale=attention.scale
            )
            out = F.linear(mixed.transpose(1, 2).flatten(2), attention.projection.weight, attention.projection.bias)
            real = torch.ones(out.shape[:2], dtype=torch.bool) if context.token_mask is None else context.token_mask
            torch.testing.assert_close(out[real], attention.output[real], atol=1e-5, rtol=1e-5)
        assert any(context.token_mask is not None and not context.token_mask.all() for context in seen) == (
            "attention_mask" in batch
        )


def test_nothing_of_a_forward_is_kept_in_evaluation() -> None:
    for router in ("attention", "ac"):
        model, batch = holdfast.sparsify(tiny_dense("llama"), experts=4, router=router), inputs("llama")
        outputs(model, batch)
        for moe_layer in moe_layers(model):
            capture: Any = moe_layer.block.context_capture
            captured = capture._thread.current.attention
            assert captured.query is None and captured.output is None and capture.routed is None
            assert capture.forwards.forward.token_ids is None


def test_windowed_attention_raises_a_one_line_error() -> None:
    assert_refused(r"windows.*similarity", holdfast.sparsify, tiny_dense("swin"), experts=4, router="attention")


@pytest.mark.parametrize("router", ["ac", "ac[spread=iqr, scales=exact]+symphony", "ac[features=random]"])
def test_ac_is_plain_after_a_change_of_width(router: str, tmp_path: Path) -> None:
    """Swin's stages have the widths 16, 16, 32, 32: the second layer of each is clustered, the first is not."""
    model = holdfast.sparsify(tiny_dense("swin"), experts=4, router=router, losses=holdfast.Losses(balance=0.1))
    routers: list[Any] = [layer.router for layer in moe_layers(model)]
    assert [router.dim for router in routers] == [16, 16, 32, 32]
    assert [bool(router.reads) for router in routers] == [False, True, False, True]
    batch = inputs("swin")
    model.train()
    for _ in range(2):
        model(**batch).loss.backward()
    assert all(router.score.base.weight.grad.abs().sum() > 0 for router in routers)
    if "random" not in router:
        model.eval()
        changed = [bool((router.score.spreads != 1).any()) for router in routers]
        assert changed == [False, True, False, True]
    before = outputs(model.eval(), batch)
    loaded = holdfast.load(holdfast.save(model, tmp_path / "model"))
    assert torch.equal(outputs(loaded.eval(), batch), before)
    assert [bool(layer.router.reads) for layer in moe_layers(loaded)] == [False, True, False, True]  # type: ignore[union-attr]


def test_a_plan_builds_ac_where_widths_differ() -> None:
    model = build_on_meta(tiny_dense("swin").config, "ac", experts=4)
    scores: list[Any] = [layer.router.score for layer in moe_layers(model) if layer.router is not None]
    sizes = LayerSizes(dim=16, experts=4, length=64, heads=2, key_width=8, value_width=8, number=2)
    assert [score.declares.cost(sizes).kept > 0 for score in scores] == [False, True, False, True]


def test_a_model_can_be_rerouted_to_ac_where_widths_differ() -> None:
    model, batch = holdfast.sparsify(tiny_dense("swin"), experts=4), inputs("swin")
    with torch.no_grad():
        before = outputs(model, batch)
        after = outputs(holdfast.reroute(model, "ac"), batch)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_routers_that_need_equal_widths_name_the_layers() -> None:
    """A part of a plugin that reads the previous layer and does not know of widths."""

    class Reading(holdfast.routing.Linear):
        reads = ("previous",)

    holdfast.register("reads-previous", stage="score", about="a test", paper="none")(Reading)
    try:
        with pytest.raises(ValueError, match=r"width 16, this one 32; router 'reads-previous'.*layers of one width"):
            holdfast.sparsify(tiny_dense("swin"), experts=4, router="reads-previous")
        model = holdfast.sparsify(tiny_dense("swin"), experts=4, router="reads-previous", layers=[0, 1])
        assert outputs(model, inputs("swin")).isfinite().all()
    finally:
        REGISTRY.remove("reads-previous")


def test_the_layers_of_a_model_share_one_coefficient() -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=4, router="remoe[coefficient=model, penalty=load, l1=0.1]")
    selectors: list[Any] = [layer.router.select for layer in moe_layers(model) if layer.router is not None]
    with torch.no_grad():
        selectors[0].l1.fill_(0.3)
    model.train()(**inputs("llama"))
    model.eval()
    values = {round(float(select.l1), 5) for select in selectors}
    assert len(values) == 1 and values != {0.1}


def test_mistakes_raise_a_one_line_error_and_change_nothing() -> None:
    model = tiny_dense("llama")
    names = sorted(model.state_dict())
    chunked = tiny_dense("bert")
    chunked.config.chunk_size_feed_forward = 4
    broken = tiny_dense("llama")
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    import transformers

    mistakes: list[tuple[Any, str]] = [
        (lambda: holdfast.sparsify(model, experts=4, router="smoth"), "smooth"),
        (lambda: holdfast.sparsify(model, experts=4, k=5), "k is 5"),
        (lambda: holdfast.sparsify(model, experts=0), "experts is 0"),
        (lambda: holdfast.sparsify(model, experts=4, hidden=7), 'init="random"'),
        (lambda: holdfast.sparsify(model, experts=4, hidden=0, init="random"), "hidden is 0"),
        (lambda: holdfast.sparsify(model, experts=4, init="kopy"), "copy"),  # type: ignore[arg-type]
        (lambda: holdfast.sparsify(model, experts=4, noise=-1), "noise"),
        (lambda: holdfast.sparsify(model, experts=4, layers="odd"), "layers"),
        (lambda: holdfast.sparsify(model, experts=4, router="native"), "native"),
        (lambda: holdfast.sparsify(model, experts=4, temperature=2), "option"),
        (lambda: holdfast.sparsify(model, experts=4, losses=lambda *_: {}), "holdfast.Losses"),  # type: ignore[arg-type, return-value]
        (lambda: holdfast.sparsify(chunked, experts=4), "chunk_size_feed_forward"),
        (lambda: holdfast.sparsify(broken, experts=4), r"layers\.1.*NaN"),
        (lambda: holdfast.sparsify(transformers.ResNetModel(transformers.ResNetConfig()), experts=4), "resnet"),
        (lambda: holdfast.sparsify(torch.nn.Linear(2, 2), experts=4), "Hugging Face"),
    ]
    for mistake, sentence in mistakes:
        assert_refused(sentence, mistake)
    assert sorted(model.state_dict()) == names
    assert_refused("already", holdfast.sparsify, holdfast.sparsify(model, experts=4), experts=4)


def test_a_router_that_asks_for_token_ids_gets_them() -> None:
    """A hash router in a few lines: the expert is the token's number modulo 4, whatever the token looks like."""
    from holdfast.routing import Context, Score
    from holdfast.routing.presets import REGISTRY

    @holdfast.register("by-number", stage="score", about="the token's number modulo the experts", paper="a test")
    class ByNumber(Score):
        reads = ("token_ids",)

        def __init__(self, dim: int, experts: int) -> None:
            super().__init__()
            self.dim, self.experts = dim, experts

        def forward(self, tokens: Tensor, context: Context) -> Tensor:
            assert context.token_ids is not None
            return 9.0 * torch.nn.functional.one_hot(context.token_ids % self.experts, self.experts).float()

    try:
        model = holdfast.sparsify(tiny_dense("llama"), experts=4, k=1, router="by-number")
        ids = inputs("llama")["input_ids"]
        with holdfast.trace(model) as routes:
            model(input_ids=ids)
            assert torch.equal(routes[2].experts[:, 0], ids.flatten() % 4)
            tokens = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
            assert torch.equal(routes[2].experts[:, 0], tokens[:, -2] % 4)
    finally:
        REGISTRY.remove("by-number")


@pytest.mark.parametrize(("first", "weights"), [("symphony", "switch"), ("smoe", "softmax"), ("top-p", "softmax")])
def test_experts_keep_their_weights_convention_through_rerouting_and_loading(
    first: str, weights: str, tmp_path: Path
) -> None:
    """Random experts trained under Symphony's raw gates expect raw gates of the next router too, after loading as well."""
    model, batch = holdfast.sparsify(tiny_dense("llama"), experts=4, router=first, init="random"), inputs("llama")
    model.train()(**batch)
    holdfast.reroute(model.eval(), "smooth")
    with torch.no_grad(), holdfast.trace(model) as routes:
        before = outputs(model, batch)
    sums = routes[0].weights.sum(1)
    assert (sums < 0.99).any() if weights == "switch" else torch.allclose(sums, torch.ones_like(sums))
    loaded = holdfast.load(holdfast.save(model, tmp_path / "saved")).eval()
    with torch.no_grad():
        assert torch.equal(outputs(loaded, batch), before)

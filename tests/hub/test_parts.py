"""`sparsify(parts=...)` and `reroute(parts=...)`: which layers of a vision-language model change, and what they compute."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from step_zero import assert_step_0, needs_mkl, with_biases
from tiers import quick_or_slow
from tiny_dense import tiny_dense
from tiny_vlm import IMAGE, PARTS, batch, llava, qwen, smolvlm, with_weights
from torch import Tensor
from wording import assert_refused

import holdfast
from holdfast.hub import part_of
from holdfast.hub.layers import moe_layers
from holdfast.hub.tracing import router_calls

LLAVAS = [(tower, text) for tower in ("siglip", "clip") for text in ("llama", "qwen2", "phi3", "phi")]
STEP_0 = [("siglip", text) for text in ("llama", "qwen2", "phi3", "phi", "mistral")] + [
    ("clip", "llama"),
    ("dinov2", "llama"),
]
OTHERS = {"qwen": (qwen, PARTS), "smolvlm": (smolvlm, ("vision", "language"))}
CONNECTOR = "model.multi_modal_projector"


@torch.no_grad()
def logits(model: Any, given: dict[str, Any]) -> Tensor:
    """Of real tokens."""
    found: Tensor = model(**given).logits[given["attention_mask"].bool()]
    return found


def names(model: Any) -> list[str]:
    return [layer.name.removeprefix("model.") for layer in moe_layers(model)]


def numbers(model: Any, part: str) -> list[int]:
    """The numbers of the MoE layers in a part."""
    found = (layer.name.split(".") for layer in moe_layers(model) if layer.part == part)
    return [int(step) for steps in found for step in steps if step.isdigit()]


def routers(model: Any, part: str) -> list[str]:
    specs = model.config.holdfast["layers"]
    prefix = "model."
    return [specs[layer.name.removeprefix(prefix)]["router"] for layer in moe_layers(model) if layer.part == part]


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Within 1e-6 of the largest output: products of other shapes are rounded in another way."""
    assert float((found - expected).abs().max()) < 1e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("k", [2, 1])
@pytest.mark.parametrize("parts", [PARTS, "vision", "connector", "language"], ids=str)
@pytest.mark.parametrize(("tower", "text"), quick_or_slow(LLAVAS, LLAVAS[:1]))
def test_copied_experts_of_llava_compute_what_the_dense_parts_did(tower: str, text: str, parts: Any, k: int) -> None:
    model, given = llava(tower, text), batch()
    before = logits(model, given)
    holdfast.sparsify(model, experts=4, k=k, parts=parts)
    assert_near(logits(model, given), before)
    wanted = {"vision": 3, "connector": 1, "language": 2}
    assert len(names(model)) == sum(wanted[part] for part in ([parts] if isinstance(parts, str) else parts))


@pytest.mark.parametrize("k", [2, 1])
@pytest.mark.parametrize(("family", "parts"), [(name, part) for name, (_, own) in OTHERS.items() for part in (own, *own)])
def test_copied_experts_of_other_models_with_images_of_several_sizes_do_too(family: str, parts: Any, k: int) -> None:
    model, given = OTHERS[family][0](), batch(family)
    before = logits(model, given)
    assert_near(logits(holdfast.sparsify(model, experts=4, k=k, parts=parts), given), before)


@pytest.mark.parametrize(("tower", "text"), [("vit", "mistral"), ("dinov2", "gemma2")])
def test_towers_and_language_models_of_other_dense_families_work_too(tower: str, text: str) -> None:
    model, given = llava(tower, text), batch()
    before = logits(model, given)
    holdfast.sparsify(model, experts=4, parts=PARTS)
    assert len(names(model)) == 6
    assert_near(logits(model, given), before)
    unknown = llava("pixtral", "llama")
    says = "does not know where the feed-forward networks of pixtral are, the part 'vision' of this llava model"
    assert_refused(says, holdfast.sparsify, unknown, experts=4, parts="vision")


@needs_mkl
@pytest.mark.every_combination
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(("tower", "text"), quick_or_slow(STEP_0, [("siglip", "llama"), ("siglip", "phi")]))
def test_every_layer_of_llava_starts_with_the_outputs_of_the_dense_one(tower: str, text: str, k: int) -> None:
    """With widths of 32 and 64, for which torch activates whole vectors, and many tokens for each expert."""
    config = llava(tower, text).config
    config.vision_config.update({"hidden_size": 32, "intermediate_size": 64, "image_size": 64})
    config.text_config.update({"intermediate_size": 64})
    model = with_biases(with_weights(transformers.LlavaForConditionalGeneration, config, 0))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 80, (2, 320), generator=generator)
    ids[:, 30:286] = IMAGE
    given = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 64, 64, generator=generator)}
    assert_step_0(model, given, k, parts=PARTS)


@pytest.mark.parametrize("k", [1, 2])
def test_weights_are_copied_bit_for_bit_and_those_of_one_expert_are_1(k: int) -> None:
    """What is left of a difference is rounding: of experts with few tokens, and of the ends of rows (docs/notes.md)."""
    dense, model = llava(), holdfast.sparsify(llava(), experts=4, k=k, parts=PARTS)
    with torch.no_grad(), holdfast.trace(model) as routes:
        model(**batch())
    for routing in routes:
        assert torch.equal(routing.weights.sum(1), torch.ones(len(routing.weights))) or k > 1
        torch.testing.assert_close(routing.weights.sum(1), torch.ones(len(routing.weights)), atol=2e-7, rtol=0)
    kept = {"fc1": "up_proj", "fc2": "down_proj", "linear_1": "up_proj", "linear_2": "down_proj", "down_proj": "down_proj"}
    for layer in moe_layers(model):
        for name, parameter in dense.get_submodule(layer.name).named_parameters():
            place, _, kind = name.rpartition(".")
            if place in kept:
                copies = layer.experts.get_parameter(kept[place] + ("_bias" if kind == "bias" else ""))
                assert torch.equal(copies, parameter.expand_as(copies))
            else:  # gate and up are stacked
                rows = layer.experts.gate_up_proj.chunk(2, dim=1)[int(place == "up_proj")]
                assert torch.equal(rows, parameter.expand_as(rows))


def test_a_sparse_connector_is_a_weighted_sum_of_networks_of_another_output_width() -> None:
    model, given = holdfast.sparsify(llava(), experts=4, parts="connector", noise=1.0, shared=1), batch()
    block: Any = model.get_submodule(CONNECTOR)
    seen: list[Tensor] = []
    block.register_forward_hook(lambda module, inputs, output: seen.extend([inputs[0], output]))
    with torch.no_grad(), holdfast.trace(model) as routes:
        model(**given)
    (tokens, out), own = seen, block.experts
    assert tokens.shape == (2, 16, 24) and out.shape == (2, 16, 32)
    for row, (token, expected) in enumerate(zip(tokens.flatten(0, 1), out.flatten(0, 1), strict=True)):
        total = block.shared(token)
        for expert, weight in zip(routes[0].experts[row], routes[0].weights[row], strict=True):
            hidden = F.gelu(F.linear(token, own.up_proj[expert], own.up_proj_bias[expert]))
            total = total + weight * F.linear(hidden, own.down_proj[expert], own.down_proj_bias[expert])
        torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)


def test_soft_layers_keep_the_output_width_of_a_connector() -> None:
    for options in ({"layer": "soft", "slots": 2}, {"layer": "smear"}):
        model = holdfast.sparsify(llava(), experts=4, parts=("vision", "connector"), **options)
        assert logits(model, batch()).isfinite().all()


def test_all_three_parts_train() -> None:
    losses = holdfast.Losses(balance=0.1, z=0.1, diversity=0.1, distillation=0.1)
    model, given = holdfast.sparsify(llava(), experts=4, parts=PARTS, noise=0.3, losses=losses).train(), batch()
    out = model(**given, labels=given["input_ids"])
    out.loss.backward()
    assert out.router_loss > 0
    for layer in moe_layers(model):
        for name, parameter in layer.block.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), (
                layer.name,
                name,
            )


def test_layers_are_counted_in_each_part() -> None:
    for layers, vision, language in (
        ("last:1", [2], [1]),
        ("alternate", [1], [1]),
        ([0], [0], [0]),
        ("all", [0, 1, 2], [0, 1]),
    ):
        model = holdfast.sparsify(llava(), experts=4, parts=PARTS, layers=layers)
        assert (numbers(model, "vision"), numbers(model, "language")) == (vision, language)
        assert "multi_modal_projector" in names(model)
    says = "there is no layer 2: its part 'language' has 2"
    assert_refused(says, holdfast.sparsify, llava(), experts=4, parts=("vision", "language"), layers=[2])
    says = "its part 'language' has 2, so it must be last:1 to last:2"
    assert_refused(says, holdfast.sparsify, llava(), experts=4, parts=PARTS, layers="last:3")


def test_routers_of_layers_are_counted_in_each_part_and_a_connector_gets_the_one_for_all() -> None:
    model = holdfast.sparsify(llava(), experts=4, parts=PARTS, router="symphony@0|smooth")
    assert routers(model, "vision") == ["symphony", "smooth", "smooth"]
    assert routers(model, "connector") == ["smooth"] and routers(model, "language") == ["symphony", "smooth"]
    holdfast.reroute(model, "similarity@1")
    assert routers(model, "vision") == ["symphony", "similarity", "smooth"]
    assert routers(model, "connector") == ["smooth"] and routers(model, "language") == ["symphony", "similarity"]
    says = "part 'language': .*there is no layer 2"
    assert_refused(says, holdfast.sparsify, llava(), experts=4, parts=PARTS, router="smoe@2")


def test_reroute_changes_the_parts_that_are_named() -> None:
    model = holdfast.sparsify(llava(), experts=4, parts=PARTS)
    holdfast.reroute(model, "symphony", parts=["connector", "vision"])
    assert routers(model, "vision") == ["symphony"] * 3 and routers(model, "connector") == ["symphony"]
    assert routers(model, "language") == ["smoe"] * 2
    holdfast.reroute(model, "attention", parts="language", layers="last:1")
    assert routers(model, "language") == ["smoe", "attention"]
    holdfast.restore(model)
    assert routers(model, "vision") == ["smoe"] * 3 and routers(model, "language") == ["smoe"] * 2
    one = holdfast.sparsify(llava(), experts=4, parts="vision")
    assert_refused("part 'language' has no MoE layer", holdfast.reroute, one, "symphony", parts="language")
    for options in ({"layers": "last:1"}, {"router": "smooth@0"}):
        given = {"router": "smooth", "parts": "connector", **options}
        assert_refused("a connector is one layer, which `parts` chooses", holdfast.reroute, model, **given)


def test_a_part_that_is_still_dense_can_be_made_sparse_later() -> None:
    model, given = llava(), batch()
    before = logits(model, given)
    holdfast.sparsify(model, experts=4, layers="last:1")
    holdfast.sparsify(model, experts=2, k=1, parts=("connector", "vision"), router="symphony")
    assert_near(logits(model, given), before)
    assert [(layer.part, layer.size[1]) for layer in moe_layers(model)] == [
        *[("vision", 2)] * 3,
        ("connector", 2),
        ("language", 4),
    ]
    assert list(model.config.holdfast["layers"]) == names(model)
    says = "the part 'language' of this model is already sparse .*no part is dense"
    assert_refused(says, holdfast.sparsify, model, experts=4)
    one = holdfast.sparsify(llava(), experts=4, parts="vision")
    says = "the part 'vision' of this model is already sparse .*parts='connector', 'language'"
    assert_refused(says, holdfast.sparsify, one, experts=4, parts=PARTS)


def test_layers_whose_output_the_language_model_does_not_read_stay_dense() -> None:
    for chosen, read in ((-2, [0, 1]), (2, [0, 1]), ([1, -1], [0, 1, 2]), ([1, -3], [0])):
        model, given = llava(vision_feature_layer=chosen), batch()
        before = logits(model, given)
        assert numbers(holdfast.sparsify(model, experts=4, parts=("vision", "connector")), "vision") == read
        assert_near(logits(model, given), before)
    model = holdfast.sparsify(llava(vision_feature_layer=-2), experts=4, parts="vision", layers="last:1")
    assert numbers(model, "vision") == [1]


def test_wrong_parts_are_refused_before_the_model_changes() -> None:
    moe = llava("siglip", "mixtral")
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (tiny_dense("llama"), "parts is 'vision', and a llama model has no parts", {"parts": "vision"}),
        (tiny_dense("siglip"), "a siglip model has no parts", {"parts": ["language"]}),
        (llava(), "unknown part 'visoin'.*vision", {"parts": "visoin"}),
        (llava(), "parts is empty", {"parts": []}),
        (llava(), "a connector is one layer, which `parts` chooses", {"parts": "connector", "layers": "last:1"}),
        (llava(), "a connector is one layer, which `parts` chooses", {"parts": "connector", "router": "smoe@0"}),
        (llava(), "a connector has none; use 'similarity'", {"parts": PARTS, "router": "attention"}),
        (llava(), "this part of the model reads none", {"parts": "vision", "router": "hash"}),
        (llava(), "computes a token from the whole sequence", {"parts": PARTS, "layer": "smear"}),
        (smolvlm(), "the connector of smolvlm is one linear map", {"parts": PARTS}),
        (qwen(), "cannot separate the images", {"parts": "vision", "router": "similarity"}),
        (qwen(), "cannot separate the images", {"parts": "connector", "layer": "smear"}),
        (moe, "this llava model has experts of its own", {"parts": "vision"}),
    ]
    for model, says, options in cases:
        before = sorted(model.state_dict())
        assert_refused(says, holdfast.sparsify, model, experts=4, **options)
        assert sorted(model.state_dict()) == before
    part = llava()
    holdfast.sparsify(part.model.vision_tower, experts=4)
    assert_refused("made sparse by itself", holdfast.sparsify, part, experts=4, parts="language")


def test_parts_have_names() -> None:
    assert part_of(llava(), "model.vision_tower.encoder.layers.0.mlp") == "vision"
    assert part_of(llava().model, "multi_modal_projector") == "connector"
    assert part_of(llava(), "lm_head") is None
    assert part_of(qwen(), "model.visual.merger.mlp") == "connector"
    assert part_of(tiny_dense("llama"), "model.layers.0.mlp") is None


def contexts(model: Any, given: dict[str, Any]) -> dict[str, list[Any]]:
    """What routers were given, by part."""
    with torch.no_grad(), router_calls(model) as calls:
        model(**given)
    found: dict[str, list[Any]] = {}
    for layer, call in zip(moe_layers(model), calls, strict=True):
        found.setdefault(str(layer.part), []).append((call.tokens, call.context))
    return found


@pytest.mark.parametrize("family", ["llava", "qwen", "smolvlm"])
def test_image_tokens_and_all_tokens_of_images_have_the_modality_1(family: str) -> None:
    make, parts = {"llava": (llava, PARTS), **OTHERS}[family]
    model, given = holdfast.sparsify(make(), experts=4, parts=parts, router="modality", noise=0.5), batch(family)
    found = contexts(model, given)
    assert sorted(found) == sorted(parts)
    for part, seen in found.items():
        for tokens, context in seen:
            expected = (given["input_ids"] == IMAGE).long() if part == "language" else torch.ones(tokens.shape[:-1]).long()
            assert torch.equal(context.modality, expected)


@pytest.mark.parametrize("family", ["llava", "smolvlm"])
def test_towers_are_not_causal_and_padding_of_the_text_is_not_theirs(family: str) -> None:
    make, parts = {"llava": (llava, PARTS), **OTHERS}[family]
    model, given = holdfast.sparsify(make(), experts=4, parts=parts, router="similarity").train(), batch(family)
    found = contexts(model, given)
    for _, context in found["language"]:
        assert context.causal and torch.equal(context.token_mask, given["attention_mask"].bool())
    for _, context in found["vision"]:
        assert not context.causal
        if family == "llava":
            assert context.token_mask is None
        else:  # the padding of a smaller image: 2 x 3 patches of 4 x 4 are real
            assert context.token_mask.sum(1).tolist() == [16, 6]
    for _, context in found.get("connector", []):
        assert not context.causal and context.token_mask is None


@pytest.mark.parametrize(("tower", "text"), quick_or_slow(LLAVAS, [("siglip", "phi3")]))
def test_captured_attention_of_both_towers_is_what_attention_computed(tower: str, text: str) -> None:
    model, given = (
        holdfast.sparsify(llava(tower, text), experts=4, parts=("vision", "language"), router="attention"),
        batch(),
    )
    for seen in contexts(model, given).values():
        for _, context in seen:
            attention = context.attention
            groups = attention.query.shape[1] // attention.key.shape[1]
            key, value = (each.repeat_interleave(groups, dim=1) for each in (attention.key, attention.value))
            causal = context.causal and attention.mask is None
            kind: dict[str, Any] = {"attn_mask": attention.mask, "is_causal": causal, "scale": attention.scale}
            mixed = F.scaled_dot_product_attention(attention.query, key, value, **kind)
            out = F.linear(mixed.transpose(1, 2).flatten(2), attention.projection.weight, attention.projection.bias)
            real = torch.ones(out.shape[:2], dtype=torch.bool) if context.token_mask is None else context.token_mask
            torch.testing.assert_close(out[real], attention.output[real], atol=1e-5, rtol=1e-5)


def test_a_later_patch_changes_the_route_of_an_earlier_one_and_a_later_word_does_not() -> None:
    router: dict[str, Any] = {"router": "similarity", "tau": 100.0, "noise": 0.5}
    model, given = holdfast.sparsify(llava(), experts=4, parts=("vision", "language"), **router), batch()
    other = {**given, "pixel_values": given["pixel_values"].clone(), "input_ids": given["input_ids"].clone()}
    other["pixel_values"][1, :, -1, -1] += 1
    other["input_ids"][0, -1] = 5
    with torch.no_grad(), holdfast.trace(model) as routes:
        model(**given)
        before = [routing.gates for routing in routes]
        model(**other)
        after = [routing.gates for routing in routes]
    assert not torch.equal(after[1][16], before[1][16])  # the first patch of the second image
    assert torch.equal(after[0][:16], before[0][:16])  # the first image
    first = slice(0, 23)  # the first text without its last word
    assert torch.equal(after[3][first], before[3][first]) and not torch.equal(after[3][23], before[3][23])


@pytest.mark.parametrize("router", ["smoe", "symphony", "smooth", "ac", "modality", "top-p"])
def test_routers_of_single_tokens_work_on_packed_patches(router: str) -> None:
    model, given = holdfast.sparsify(qwen(), experts=4, parts=PARTS, router=router, noise=0.3).train(), batch("qwen")
    out = model(**given, labels=given["input_ids"])
    out.loss.backward()
    assert out.loss.isfinite()
    alone = {name: tensor[1:] for name, tensor in given.items() if name != "pixel_values"}
    model.eval()
    with torch.no_grad():
        together = model(**given).logits[1]
        by_itself = model(**alone, pixel_values=given["pixel_values"][32:]).logits[0]
    torch.testing.assert_close(by_itself, together, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("router", ["expert-choice", "capacity", "sinkhorn", "remoe"])
def test_routers_of_whole_batches_work_on_packed_patches(router: str) -> None:
    model = holdfast.sparsify(qwen(), experts=4, parts=("vision", "connector"), router=router, init="random").train()
    given = batch("qwen")
    model(**given, labels=given["input_ids"]).loss.backward()
    for layer in moe_layers(model):
        assert all(
            parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.experts.parameters()
        )


@pytest.mark.parametrize("text", ["mixtral", "qwen2_moe"])
def test_a_language_model_with_experts_of_its_own_is_rerouted_bit_for_bit(text: str) -> None:
    model, given = llava("siglip", text), batch()
    before = logits(model, given)
    assert torch.equal(logits(holdfast.reroute(model, "native"), given), before)
    assert [layer.part for layer in moe_layers(model)] == ["language"] * 2
    holdfast.reroute(model, "symphony+smooth[budget=0]", parts="language")
    assert_near(logits(model, given), before)
    assert torch.equal(logits(holdfast.restore(model), given), before)
    assert_refused("part 'vision' has no MoE layer", holdfast.reroute, model, "smoe", parts="vision")

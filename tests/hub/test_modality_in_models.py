"""A vision and language model (LLaVA with a Llama): image tokens have the modality 1, text and new tokens 0."""

from pathlib import Path
from typing import Any

import torch
import transformers
from changed_models import trainer_of
from tiny import tiny, with_checkpointing
from tiny_dense import CONFIGS, tiny_dense
from torch import Tensor, nn
from wording import assert_refused

import holdfast
from holdfast import Losses
from holdfast.hub.layers import moe_layers
from holdfast.hub.tracing import router_calls

IMAGE, PARTS = 90, 4  # the id of an image token, and how many an image has


def llava(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**{**CONFIGS["llama"], "num_hidden_layers": 2}),
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=8, patch_size=4, projection_dim=16),
        vision_feature_layer=-1,
        image_seq_length=PARTS,
        **{"image_token_id": IMAGE, **changes},
    )
    model = transformers.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 80, (2, 12))
    ids[0, 2 : 2 + PARTS], ids[1, 5 : 5 + PARTS] = IMAGE, IMAGE
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8)}


def sparse(router: str = "modality", **options: Any) -> Any:
    return holdfast.sparsify(llava(), experts=6, router=router, noise=0.5, losses=Losses(balance=0.1), **options)


def seen(model: Any, run: Any) -> list[Tensor]:
    """The modality that each router was given."""
    with torch.no_grad(), router_calls(model) as calls:
        run()
    found = [call.context.modality for call in calls if call.context is not None]
    return [modality for modality in found if modality is not None]


def weights(model: Any) -> list[nn.Parameter]:
    """The weights of all scores."""
    routers = [layer.router for layer in moe_layers(model)]
    return [router.score.get_parameter("weight") for router in routers if router is not None]


def test_image_tokens_use_groups_of_their_own() -> None:
    model, given = sparse("hierarchical[groups=2,by=modality]"), batch()
    with torch.no_grad(), holdfast.trace(model) as routes:
        model(**given)
    for routing in routes:
        assert torch.equal(routing.experts // 3, (given["input_ids"] == IMAGE).long().view(-1, 1).expand(-1, 2))
    text = holdfast.sparsify(tiny_dense("llama"), experts=6, router="hierarchical[groups=2,by=modality]")
    assert_refused("needs an image token in its config", text, input_ids=given["input_ids"])


def test_image_tokens_have_the_modality_1() -> None:
    model, given = sparse(), batch()
    found = seen(model, lambda: model(**given))
    assert len(found) == 2
    for modality in found:
        assert torch.equal(modality, (given["input_ids"] == IMAGE).long())
    assert [layer.name for layer in moe_layers(model)] == [f"model.language_model.layers.{n}.mlp" for n in (0, 1)]


def test_a_model_with_copied_experts_keeps_its_outputs() -> None:
    model, given = llava(), batch()
    before = model(**given).logits
    torch.testing.assert_close(holdfast.sparsify(model, experts=4, router="modality")(**given).logits, before)


def test_new_tokens_are_text_and_cached_generation_equals_uncached() -> None:
    model, given = sparse(), batch()
    shapes: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(lambda *args: shapes.append(args[2]["input_ids"].shape), with_kwargs=True)
    asked = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    cached = model.generate(**given, **asked)
    hook.remove()
    assert shapes == [(2, 12), *[(2, 1)] * 5]
    assert torch.equal(cached, model.generate(**given, **asked, use_cache=False))


def test_it_trains_saves_and_loads(tmp_path: Path) -> None:
    model, given = sparse(), batch()
    model.train()
    out = model(**given, labels=given["input_ids"])
    out.loss.backward()
    assert out.router_loss > 0
    for weight in weights(model):
        gradient = weight.grad
        assert gradient is not None and (gradient[:6] != 0).any() and (gradient[6:] != 0).any()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    model.eval()
    loaded = holdfast.load(holdfast.save(model, tmp_path / "saved")).eval()
    assert torch.equal(loaded(**given).logits, model(**given).logits)


def test_the_trainer_trains_it(tmp_path: Path) -> None:
    model, given = sparse(), batch()
    rows = [{"input_ids": ids, "pixel_values": pixels, "labels": ids} for ids, pixels in zip(*given.values(), strict=True)]
    before = weights(model)[0].detach().clone()
    trainer_of(model, tmp_path, rows, max_steps=3).train()
    after = weights(model)[0]
    assert after.isfinite().all() and not torch.equal(after, before)


def test_activation_checkpointing_recomputes_with_the_same_modality() -> None:
    gradients = []
    for recompute in (False, True):
        model, given = with_checkpointing(sparse().train(), recompute), batch()
        model(**given, labels=given["input_ids"], use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)


def test_certificates_are_exact_given_the_modality() -> None:
    found = holdfast.certify(sparse(), [batch()])
    assert all(part.kind == "exact" and (part.radius > 0).any() for layer in found.layers for part in layer.found)


def test_other_routers_work_in_it_too() -> None:
    for router in ("smoe", "hash", "similarity", "modality+smooth"):
        model = sparse(router)
        assert model(**batch()).logits.isfinite().all()


def test_a_text_model_is_refused_before_it_is_changed() -> None:
    for model, change in (
        (tiny_dense("llama"), lambda model: holdfast.sparsify(model, experts=4, router="modality")),
        (tiny("mixtral"), lambda model: holdfast.reroute(model, "modality")),
    ):
        before = sorted(model.state_dict())
        assert_refused("this model has no image token in its config", change, model)
        assert sorted(model.state_dict()) == before


def test_embeddings_in_the_place_of_ids_are_refused() -> None:
    model = sparse()
    assert_refused("the context has no modality", model, inputs_embeds=torch.randn(1, 5, 32))

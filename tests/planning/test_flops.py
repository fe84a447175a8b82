"""FLOPs, against torch's own counter on models that run."""

from typing import Any

import family_models
import pytest
import torch
from counting import products
from tiers import quick_or_slow
from tiny import EXTRA, tiny
from tiny_dense import CONFIGS, inputs, tiny_dense

import holdfast
from holdfast.planning.meta_model import RECOGNISED, UNSUPPORTED
from holdfast.planning.model_shape import Setting, measure_shape
from holdfast.planning.planning import forward_flops, training_flops

ROUTERS = ("smoe", "switch", "xmoe", "symphony", "similarity", "attention", "ac", "xmoe+ac", "symphony+similarity")
SIZE = (2, 12)


def eager(model: Any) -> Any:
    """Set eager attention, two products that the counter counts."""
    model.set_attn_implementation("eager")
    return model


def square(sequence: int = SIZE[1]) -> Setting:
    return Setting(sequence, number_bytes=4, causal_half=False)


def batch() -> dict[str, Any]:
    ids = torch.randint(3, 64, SIZE, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def count_forward(model: Any, given: dict[str, Any]) -> int:
    with torch.no_grad():
        return products(lambda: model(**given, **({"use_cache": False} if "input_ids" in given else {})))


def count_training(model: Any, given: dict[str, Any]) -> int:
    model.train()
    return products(lambda: model(**given, use_cache=False).loss.backward())


def once(model: Any, router: str) -> float:
    """Return the FLOPs that run once per forward and that a plan does not count: W^T W of the attention heads it reads."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads if "heads=all" in router else 1
    return heads * config.num_hidden_layers * 2.0 * config.hidden_size * width**2 if "attention" in router else 0.0


def check_forward(model: Any, given: dict[str, Any] | None = None, *, length: int = SIZE[1], once: float = 0.0) -> None:
    """Compare the forward of 2 sequences with its plan; `once` are FLOPs that a plan does not count."""
    expected = forward_flops(measure_shape(model, square(length))).total * 2 * length + once
    assert count_forward(model, given or batch()) == pytest.approx(expected, rel=1e-12)


def check_training(model: Any, *, once: float = 0.0) -> None:
    expected = training_flops(measure_shape(model, square())).total * 24 + 3 * once
    assert count_training(model, batch()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_forward_of_a_sparsified_llama(router: str) -> None:
    model = holdfast.sparsify(eager(tiny_dense("llama")), experts=8, router=router)
    check_forward(model, once=once(model, router))


OPTIONS = ["smoe-dropout[k_final=2]", "smoe[noise=gaussian]", "attention[heads=all]", "similarity[rank=4]"]
OPTIONS += ["similarity[strength=0.0]", "similarity[rank=4,form=bilinear,strength=learned]", "similarity[from=confident]"]


@pytest.mark.parametrize(("family", "router"), [*(("llama", router) for router in (*ROUTERS, *OPTIONS)), ("gpt2", "ac")])
def test_a_training_step_of_a_sparsified_model(family: str, router: str) -> None:
    """Learned noise is a second score in training; GPT-2 has biases."""
    model = holdfast.sparsify(eager(tiny_dense(family)), experts=8, router=router)
    check_training(model, once=once(model, router))


SOFT = ("softmoe", "softmoe[slots=3]+symphony", "softmoe[slots=2]+ac", "smear", "smear[average=gates]")


@pytest.mark.parametrize("shared", [None, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("router", SOFT)
@pytest.mark.filterwarnings("ignore:in this causal model")
def test_soft_layers_and_shared_experts(router: str, family: str, shared: int | None) -> None:
    """GPT-2 has biases, which take no products: experts add them to rows, and SMEAR merges them like weights."""
    model = eager(tiny_dense(family))
    holdfast.sparsify(model, experts=8, router=router, shared=shared, router_options={"causal": False})
    check_forward(model)
    check_training(model)


def test_checkpointing_runs_every_layer_once_more() -> None:
    model = holdfast.sparsify(eager(tiny_dense("llama")), experts=8, k=2, router="symphony")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = training_flops(measure_shape(model, square()), checkpointing=True).total * 24
    counted = count_training(model, batch())
    # A recomputation stops at the last tensor that the backward needs, so that a layer's last product is not run again.
    assert 0.9 * expected < counted <= expected


@pytest.mark.parametrize(
    ("router", "options"),
    [
        ("symphony+similarity", {}),
        ("smoe", {"noise": "gaussian"}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ROUTERS[1:-1]),
    ],
    ids=str,
)
def test_a_recomputation_updates_no_state(router: str, options: dict[str, Any]) -> None:
    """The recomputation skips the same end of a layer for every router, so what a router adds to smoe is exact."""
    counted, planned = [], []
    for name, given in (("smoe", {}), (router, options)):
        for again in (False, True):
            model = eager(tiny_dense("llama"))
            holdfast.sparsify(model, experts=8, router=name, router_options=given)
            if again:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            counted.append(count_training(model, batch()) - (3 + again) * once(model, name))
            planned.append(training_flops(measure_shape(model, square()), checkpointing=again).total * 24)
    (plain, plain_again, other, other_again), (smoe, smoe_again, its, its_again) = counted, planned
    assert other_again - other - (plain_again - plain) == pytest.approx(its_again - its - (smoe_again - smoe), abs=1e-3)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3", "phi3", "bert"])
def test_the_forward_of_dense_families(model_type: str) -> None:
    check_forward(holdfast.sparsify(eager(tiny_dense(model_type)), experts=4, k=2, router="symphony", layers="alternate"))


def test_the_forward_of_an_image_model() -> None:
    model = holdfast.sparsify(eager(tiny_dense("vit")), experts=4, k=2, router="similarity")
    check_forward(model, {"pixel_values": inputs("vit")["pixel_values"]}, length=17)


@pytest.mark.parametrize("model_type", sorted(EXTRA))
@pytest.mark.parametrize("router", ["native", "symphony"])
def test_the_forward_of_moe_families(model_type: str, router: str) -> None:
    model = eager(tiny(model_type))
    model.set_experts_implementation("eager")
    check_forward(holdfast.reroute(model, router))


@pytest.mark.parametrize("model_type", quick_or_slow(RECOGNISED, ("afmoe", "mistral4")))
def test_the_forward_of_recognised_families(model_type: str) -> None:
    folder = {family_models.model_type(name): name for name in family_models.MOE_MODELS}[model_type]
    if not family_models.is_installed(folder):
        pytest.skip("this transformers does not have it")
    model = eager(family_models.tiny_moe(folder))
    model.set_experts_implementation("eager")
    check_forward(holdfast.reroute(model, "native"), {"input_ids": batch()["input_ids"]})


OTHER_DENSE = sorted({*family_models.DENSE_MODELS} - {*UNSUPPORTED, *CONFIGS})


@pytest.mark.parametrize("model_type", quick_or_slow(OTHER_DENSE, ("gptj", "opt")))
def test_the_forward_of_other_dense_families(model_type: str) -> None:
    model = holdfast.sparsify(eager(family_models.tiny_dense(model_type)), experts=4, k=2, router="symphony")
    check_forward(model, {"input_ids": batch()["input_ids"]})


def test_smooth_uses_its_budget_on_average() -> None:
    """The only number here that depends on data: after training on a batch, the strip uses the budget on it."""
    model = holdfast.sparsify(eager(tiny_dense("llama")), experts=8, k=2, router="smooth", budget=1.0).train()
    given = batch()
    model(**given)
    expected = forward_flops(measure_shape(model, square())).total * 24
    assert count_forward(model.eval(), given) == pytest.approx(expected, rel=0.05)


def test_a_window_limits_the_attended_tokens() -> None:
    model = tiny("mixtral")
    model.config.sliding_window = 5
    seen = measure_shape(model, Setting(12)).layers[0].attention.keys
    assert seen == sum(min(token + 1, 5) for token in range(12)) / 12


def test_causal_attention_counts_the_half_it_needs() -> None:
    assert measure_shape(tiny("olmoe"), Setting(12)).layers[0].attention.keys == sum(range(1, 13)) / 12

"""Parameters and state: a plan on `meta` equals real models after `sparsify` and `reroute`."""

from typing import Any

import pytest
from router_names import BY_ID, IN_TEXT_MODELS
from tiny import EXTRA, SMALL, tiny
from tiny_dense import CLASSES, CONFIGS, tiny_dense
from torch import nn
from wording import assert_refused

import holdfast
from holdfast.hub.install import specs_of
from holdfast.hub.layers import moe_layers
from holdfast.planning.meta_model import build_on_meta, read_config
from holdfast.planning.model_shape import ModelShape, Setting, measure_shape

DENSE = ("llama", "qwen3", "phi3", "gpt2", "bert", "vit")
COMBINED = ("symphony+similarity", "xmoe+ac+smooth")


def counted(model: nn.Module) -> tuple[int, int, int]:
    """Return (parameters, trained, bytes of state) of a real model."""
    routers = [module for module in model.modules() if isinstance(module, holdfast.Router)]
    state = {name: buffer for router in routers for name, buffer in _named(router)}
    return (
        sum(parameter.numel() for parameter in model.parameters()),
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        sum(buffer.numel() * buffer.element_size() for buffer in state.values()),
    )


def _named(router: holdfast.Router) -> list[tuple[str, Any]]:
    """Return the bytes that a checkpoint stores for a router in addition to its parameters."""
    parameters = {name for name, _ in router.named_parameters()}
    return [(f"{id(router)}.{name}", value) for name, value in router.state_dict().items() if name not in parameters]


def measures(shape: ModelShape) -> tuple[int, int, int]:
    return shape.parameters, shape.trained, shape.state


@pytest.mark.parametrize("router", [*IN_TEXT_MODELS, *COMBINED])
@pytest.mark.parametrize("model_type", DENSE)
def test_a_dense_family_with_every_router(model_type: str, router: str) -> None:
    sizes = {name: size for name, size in CONFIGS[model_type].items() if size is not None}
    config = read_config(model_type, {**sizes, "architectures": [CLASSES[model_type]]})
    if model_type == "vit" and router in BY_ID:
        assert_refused("chooses experts by token id", build_on_meta, config, router, experts=8, layers="last:2")
        return
    model = holdfast.sparsify(tiny_dense(model_type), experts=8, router=router, layers="last:2")
    shape = measure_shape(build_on_meta(config, router, experts=8, k=2, layers="last:2"), Setting(16))
    assert measures(shape) == counted(model)


@pytest.mark.parametrize("router", ["native", *IN_TEXT_MODELS, *COMBINED])
@pytest.mark.parametrize("model_type", sorted(EXTRA))
def test_an_moe_family_with_every_router(model_type: str, router: str) -> None:
    config = read_config(model_type, {**SMALL, **EXTRA[model_type]})
    model = holdfast.reroute(tiny(model_type), router)
    shape = measure_shape(build_on_meta(config, router), Setting(16))
    assert measures(shape) == counted(model)
    assert len(shape.sparse) == len(moe_layers(model))


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_router_for_modalities_is_refused_for_a_text_model(model_type: str) -> None:
    sizes = {**SMALL, **EXTRA[model_type]} if model_type in EXTRA else CONFIGS[model_type]
    change: dict[str, Any] = {} if model_type in EXTRA else {"experts": 8, "k": 2}
    with pytest.raises(ValueError, match="this model has no image token in its config"):
        build_on_meta(read_config(model_type, sizes), "modality", **change)


def test_options_of_a_router_count() -> None:
    config = read_config("llama", CONFIGS["llama"])
    model = holdfast.sparsify(tiny_dense("llama"), experts=8, k=2, router="similarity", rank=4)
    shape = measure_shape(build_on_meta(config, "similarity[rank=4]", experts=8, k=2), Setting(16))
    assert measures(shape) == counted(model)
    assert shape.router_parameters == 3 * (8 * 32 + 4 * 32)


def test_a_wider_expert() -> None:
    config = read_config("llama", CONFIGS["llama"])
    model = holdfast.sparsify(tiny_dense("llama"), experts=8, k=2, router="smoe", hidden=64, init="random")
    assert measures(measure_shape(build_on_meta(config, "smoe", experts=8, hidden=64), Setting(16))) == counted(model)


def test_a_saved_holdfast_folder_is_rerouted(tmp_path: Any) -> None:
    """Its config describes how it was sparsified; only that file is read."""
    model = holdfast.sparsify(tiny_dense("llama"), experts=8, k=2, router="smoe", layers="alternate")
    holdfast.save(model, tmp_path / "saved")
    for file in (tmp_path / "saved").iterdir():
        if file.name != "config.json":
            file.unlink()
    config = read_config(str(tmp_path / "saved"))
    shape = measure_shape(build_on_meta(config, "symphony"), Setting(16))
    assert measures(shape) == counted(holdfast.reroute(model, "symphony"))


def test_active_parameters_exclude_unused_experts() -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=8, k=2, router="smoe")
    shape = measure_shape(model, Setting(16))
    one = 3 * 32 * 48
    assert shape.expert_parameters == 3 * 8 * one
    assert shape.active_parameters() == shape.parameters - 3 * 6 * one


@pytest.mark.parametrize("router", ["ac@1|xmoe", "symphony[k=3]@even", "smoe[k=3]"])
def test_routers_for_some_layers_and_with_a_k_of_their_own_are_counted(router: str) -> None:
    sizes = {name: size for name, size in CONFIGS["llama"].items() if size is not None}
    plan = holdfast.plan("llama", ["smoe", router], experts=8, k=2, sizes=sizes)
    model = holdfast.sparsify(tiny_dense("llama"), experts=8, router=router)
    ks = [spec.k for spec in specs_of(model).values()]
    assert plan.columns[0].experts_a_token == 2
    assert plan.columns[1].experts_a_token == pytest.approx(sum(ks) / len(ks))
    assert plan.columns[1].parameters == sum(parameter.numel() for parameter in model.parameters())
    moe = holdfast.reroute(tiny("mixtral"), router)
    built = build_on_meta(read_config("mixtral", {**SMALL, **EXTRA["mixtral"]}), router)
    assert measures(measure_shape(built, Setting(16))) == counted(moe)

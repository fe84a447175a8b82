"""Router state travels with PEFT's adapters, and copies that PEFT makes of gates work."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import IDS, logits, trainer_of
from tiers import quick_or_slow
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor
from trained_by_others import tokenizer
from wording import assert_refused

import holdfast
from holdfast.hub.layers import moe_layers

peft = pytest.importorskip("peft", reason="the adapters are PEFT's")

STATEFUL = "symphony+attention+smooth"


def rerouted(router: str = STATEFUL, seed: int = 1, **options: Any) -> Any:
    """Scores that start at random start by `seed`; the model is always the same."""
    model = tiny("mixtral")
    torch.manual_seed(seed)
    return holdfast.reroute(model, router, **options)


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **options}))


def train(model: Any, steps: int = 5) -> Any:
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    return model.eval()


def state(model: Any) -> dict[str, Tensor]:
    """What routers have learnt, copied."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    routers = {moe_layer.name: moe_layer.router for moe_layer in moe_layers(model) if moe_layer.router is not None}
    return {f"{name}.{key}": value.clone() for name, router in routers.items() for key, value in router.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def assert_carried(loaded: Any, model: Any) -> None:
    """The state of routers, and what the model computes with it."""
    assert_same(state(loaded), state(model))
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("router", [STATEFUL, "ac+symphony", "remoe", "top-p", "xmoe", "smoe-dropout"])
def test_an_adapter_carries_the_state_of_routers(router: str, tmp_path: Path) -> None:
    wrapped = train(adapted(rerouted(router)))
    wrapped.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "this adapter holds no state")
        loaded = peft.PeftModel.from_pretrained(rerouted(router, seed=4), tmp_path)
    assert_carried(loaded, wrapped)


def test_an_adapter_of_a_sparse_model_carries_it_to_the_saved_base(tmp_path: Path) -> None:
    model = holdfast.sparsify(tiny_dense("llama"), experts=8, k=2, router=STATEFUL, noise=0.5)
    holdfast.save(model, tmp_path / "base")
    wrapped = train(adapted(model))
    wrapped.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(holdfast.load(tmp_path / "base"), tmp_path / "adapter")
    assert_carried(loaded, wrapped)


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
        peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["gate.weight"]),
        peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        peft.LoHaConfig(r=4, target_modules=["q_proj"]),
        peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"], use_cayley_neumann=False),
    ],
    ids=["dora", "lora of the gate", "ia3", "loha", "oft"],
)
def test_adapters_of_other_kinds_carry_it_too(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(2)
    wrapped = train(peft.get_peft_model(rerouted("symphony+smooth"), config))
    wrapped.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(rerouted("symphony+smooth"), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(wrapped), atol=1e-6, rtol=1e-6)


def test_an_adapter_that_transformers_itself_put_on_carries_it(tmp_path: Path) -> None:
    model = rerouted()
    torch.manual_seed(2)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    train(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists() and not (tmp_path / "holdfast.json").exists()
    loaded = rerouted()
    loaded.load_adapter(tmp_path)
    assert_carried(loaded, model)


def test_a_checkpoint_of_the_trainer_carries_it_and_resumes(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "learning_rate": 0.01, "per_device_train_batch_size": 2, "lr_scheduler_type": "constant"}
    saved = {"save_strategy": "steps", "save_steps": 2}
    whole, resumed = (trainer_of(adapted(rerouted()), tmp_path, IDS, **settings, **saved) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(state(resumed.model), state(whole.model))
    loaded = peft.PeftModel.from_pretrained(rerouted(), tmp_path / "checkpoint-4")
    assert torch.equal(logits(loaded), logits(whole.model))


def test_a_checkpoint_of_trl_carries_it(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL trains")
    datasets = pytest.importorskip("datasets", reason="TRL takes its data so")
    settings = {"max_steps": 2, "save_steps": 2, "learning_rate": 0.01, "bf16": False, "gradient_checkpointing": False}
    arguments = trl.SFTConfig(str(tmp_path), **settings, report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = trl.SFTTrainer(
        rerouted(),
        arguments,
        train_dataset=datasets.Dataset.from_dict({"input_ids": IDS.tolist()}),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"]),
    )
    trainer.train()
    loaded = peft.PeftModel.from_pretrained(rerouted(), tmp_path / "checkpoint-2")
    assert_carried(loaded, trainer.model)


def test_without_adapters_routers_have_the_state_from_before() -> None:
    """As for a reference model: `disable_adapter` is the base, state included, and what it sees teaches nothing."""
    model = rerouted()
    train(model, steps=1)
    before, base = logits(model), state(model)
    wrapped = train(adapted(model))
    trained, after = logits(wrapped), state(wrapped)
    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped), before)
        assert_same(state(wrapped), base)
        with torch.no_grad():
            wrapped.train()(input_ids=IDS.flip(0))
    assert_same(state(wrapped), after)
    assert torch.equal(logits(wrapped), trained)
    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped), before)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_reference_forward_before_the_backward_changes_no_gradient(checkpointing: bool) -> None:
    """As DPO does. The state that a recomputation finds must be the one that its forward saw."""

    def gradients(reference: bool) -> dict[str, Tensor]:
        wrapped = train(adapted(rerouted("symphony+smooth"), init_lora_weights=False), steps=2)
        if checkpointing:
            wrapped.enable_input_require_grads()
            wrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        wrapped.train()
        loss = wrapped(input_ids=IDS, labels=IDS).loss
        if reference:
            with torch.no_grad(), wrapped.disable_adapter():
                wrapped(input_ids=IDS)
        loss.backward()
        return {name: p.grad.clone() for name, p in wrapped.named_parameters() if p.grad is not None}

    assert_same(gradients(True), gradients(False))


def test_each_adapter_has_a_state_of_its_own(tmp_path: Path) -> None:
    wrapped = adapted(rerouted("xmoe+symphony"))
    base = state(wrapped)
    train(wrapped)
    first, out = state(wrapped), logits(wrapped)
    wrapped.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    wrapped.set_adapter("second")
    assert_same(state(wrapped), base)
    train(wrapped, steps=2)
    second = state(wrapped)
    wrapped.set_adapter("default")
    assert_same(state(wrapped), first)
    assert torch.equal(logits(wrapped), out)
    wrapped.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(rerouted("xmoe+symphony", seed=9), tmp_path)
    own = state(loaded)
    loaded.load_adapter(tmp_path / "second", adapter_name="other")
    assert_same(own, first)
    loaded.set_adapter("other")
    assert_same(state(loaded), second)
    loaded.set_adapter("default")
    assert_same(state(loaded), first)
    assert torch.equal(logits(loaded), out)
    loaded.delete_adapter("other")
    assert_same(state(loaded), first)


def test_merging_keeps_the_state_and_unloading_does_not() -> None:
    model = rerouted()
    before = logits(model)
    wrapped = train(adapted(model))
    out = logits(wrapped)
    spare = copy.deepcopy(wrapped)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(logits(merged), out, atol=1e-4, rtol=1e-4)
    assert not hasattr(merged, "router_state") and not hasattr(merged, "peft_config")
    assert torch.equal(logits(spare.unload()), before)


@pytest.mark.parametrize("router", ["symphony", "attention"])
def test_rows_with_different_adapters_are_refused_where_routes_depend_on_them(router: str) -> None:
    wrapped = adapted(rerouted(router))
    wrapped.add_adapter("second", peft.LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False))
    before = logits(wrapped)
    names = ["default", "second", "__base__", "default"]
    assert_refused("batch for each adapter", wrapped, input_ids=IDS, adapter_names=names)
    assert torch.equal(logits(wrapped), before)  # nothing of the attempt is left


def test_rows_with_different_adapters_are_right_where_routes_do_not() -> None:
    wrapped = adapted(rerouted("smoe"), init_lora_weights=False)
    wrapped.add_adapter("second", peft.LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False))
    with torch.no_grad():
        mixed = wrapped.eval()(input_ids=IDS, adapter_names=["default", "second", "__base__", "default"]).logits
    for row, name in ((0, "default"), (1, "second"), (3, "default")):
        wrapped.set_adapter(name)
        torch.testing.assert_close(mixed[row], logits(wrapped)[row], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"lora_bias": True}, {"use_rslora": True}, {"target_parameters": ["o_proj.weight"]}])
def test_options_of_lora_on_the_projection_are_read(options: dict[str, Any]) -> None:
    model = tiny("gpt_oss")  # its projections have biases
    holdfast.reroute(model, "attention")
    if "target_parameters" not in options:
        options = {**options, "target_modules": ["o_proj"]}
    wrapped = adapted(model, init_lora_weights=False, **options)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name and name.endswith("bias"):
                parameter.normal_()
    unmerged = logits(wrapped)
    torch.testing.assert_close(logits(wrapped.merge_and_unload()), unmerged, atol=1e-4, rtol=1e-4)


def test_a_model_that_is_rerouted_inside_its_wrapper_carries_it_too(tmp_path: Path) -> None:
    wrapped = adapted(tiny("mixtral"))
    holdfast.reroute(wrapped.get_base_model(), "similarity")
    holdfast.reroute(wrapped.get_base_model(), "symphony")
    train(wrapped)
    wrapped.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(rerouted("symphony"), tmp_path)
    assert_same(state(loaded), state(wrapped))
    holdfast.restore(wrapped.get_base_model())
    assert not hasattr(wrapped.get_base_model(), "router_state")
    wrapped.save_pretrained(tmp_path / "plain")
    peft.PeftModel.from_pretrained(tiny("mixtral"), tmp_path / "plain")


def test_a_pickled_model_keeps_the_states_of_its_adapters(tmp_path: Path) -> None:
    wrapped = train(adapted(rerouted("symphony")))
    torch.save(wrapped, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    for model in (wrapped, again):
        with model.disable_adapter():
            logits(model)
    assert_carried(again, wrapped)


def test_prompt_tuning_warns_that_it_leaves_the_state_behind(tmp_path: Path) -> None:
    def prompted(model: Any) -> Any:
        torch.manual_seed(2)
        return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))

    wrapped = train(prompted(rerouted("symphony")), steps=2)
    with pytest.warns(UserWarning, match="prompt tuning"):
        wrapped.save_pretrained(tmp_path / "prompts")
    base = holdfast.load(holdfast.save(wrapped.base_model, tmp_path / "base"))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "prompts")
    assert torch.equal(logits(loaded), logits(wrapped))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "PEFT's prompt tuning")
        prompted(rerouted("smoe")).save_pretrained(tmp_path / "none")
        adapted(rerouted("symphony")).save_pretrained(tmp_path / "lora")


def test_an_adapter_without_state_is_warned_about(tmp_path: Path) -> None:
    adapted(tiny("mixtral")).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"adapter.*state"):
        peft.PeftModel.from_pretrained(rerouted(), tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "this adapter holds no state")
        peft.PeftModel.from_pretrained(rerouted("native"), tmp_path)  # which has none


def test_an_adapter_of_other_routers_is_refused(tmp_path: Path) -> None:
    adapted(rerouted("symphony")).save_pretrained(tmp_path)
    assert_refused("routers", peft.PeftModel.from_pretrained, rerouted("smooth"), tmp_path)
    other = holdfast.reroute(tiny("mixtral", num_local_experts=4), "symphony")
    assert_refused("routers", peft.PeftModel.from_pretrained, other, tmp_path)


@pytest.mark.parametrize("router", quick_or_slow(["native", "smoe", STATEFUL, "ac+symphony", "xmoe"], ["native", STATEFUL]))
def test_a_gate_among_the_modules_to_save_learns_is_saved_and_loaded(router: str, tmp_path: Path) -> None:
    model = rerouted(router, losses=holdfast.Losses(z=0.1))
    plain = logits(model)
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    wrapped = adapted(model, modules_to_save=["gate"])
    assert torch.equal(logits(wrapped), plain)
    assert_refused("copies", holdfast.reroute, wrapped.get_base_model(), "smooth")
    train(wrapped)
    layer = wrapped.get_base_model().model.layers[0].mlp
    for name, parameter in layer.gate.original_module.named_parameters():
        assert torch.equal(parameter, kept[f"model.layers.0.mlp.gate.{name}"]), name
    learnt = layer.gate.modules_to_save.default
    moved = {n for n, p in learnt.named_parameters() if not torch.equal(p, kept[f"model.layers.0.mlp.gate.{n}"])}
    assert moved
    out = logits(wrapped)
    assert (out - plain).abs().max() > 0.1
    wrapped.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(rerouted(router, seed=5), tmp_path / "adapter")
    assert torch.equal(logits(loaded), out)
    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped), plain)
    with holdfast.trace(wrapped.get_base_model()) as routes:
        logits(wrapped)
    assert len(routes) == 3
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(logits(merged), out, atol=1e-4, rtol=1e-4)
    again = holdfast.load(holdfast.save(merged, tmp_path / "merged"))
    assert torch.equal(logits(again), logits(merged))


def test_the_gradient_of_a_copied_gate_is_that_of_the_gate_itself() -> None:
    """Router losses included."""
    losses = holdfast.Losses(z=0.3, balance=0.1)
    model, wrapped = rerouted("smooth", losses=losses), adapted(rerouted("smooth", losses=losses), modules_to_save=["gate"])
    for subject in (model, wrapped):
        subject.train()(input_ids=IDS, labels=IDS).loss.backward()
    for layer, other in zip(model.model.layers, wrapped.get_base_model().model.layers, strict=True):
        expected = layer.mlp.gate.weight.grad
        assert expected.abs().max() > 0
        torch.testing.assert_close(other.mlp.gate.modules_to_save.default.weight.grad, expected)


def test_a_sparse_layers_router_among_the_modules_to_save_learns(tmp_path: Path) -> None:
    def made() -> Any:
        torch.manual_seed(3)
        return holdfast.sparsify(tiny_dense("llama"), experts=8, k=2, router="symphony+smooth", noise=0.5)

    wrapped = adapted(made(), modules_to_save=["router"])
    assert torch.equal(logits(wrapped), logits(made()))
    train(wrapped)
    learnt = wrapped.get_base_model().model.layers[0].mlp.router
    assert not torch.equal(learnt.modules_to_save.default.score.weight, learnt.original_module.score.weight)
    wrapped.save_pretrained(tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(made(), tmp_path)), logits(wrapped))


def test_a_copied_gate_does_not_learn_while_the_model_generates() -> None:
    wrapped = train(adapted(rerouted("symphony"), modules_to_save=["gate"]), steps=1)
    before = {name: value.clone() for name, value in wrapped.named_buffers() if "graph" in name}
    wrapped.train()
    wrapped.generate(input_ids=IDS[:, :4], max_new_tokens=3, do_sample=False)
    wrapped.eval()
    for name, value in wrapped.named_buffers():
        if "graph" in name:
            assert torch.equal(value, before[name]), name


def test_a_copy_of_an_adapted_model_is_its_own() -> None:
    """As TRL makes a reference model: training one must not move the other's state."""
    wrapped = train(adapted(rerouted()))
    twin = copy.deepcopy(wrapped)
    out, kept = logits(twin), state(twin)
    train(wrapped, steps=2)
    assert_same(state(twin), kept)
    assert torch.equal(logits(twin), out)

"""TRL's trainers on changed models: every router parameter has the gradient of a hand-written `loss + router_loss`."""

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import quick_or_slow
from tiny import tiny
from tiny_dense import tiny_dense
from torch import Tensor
from trained_by_others import (
    SETTINGS,
    adapter,
    adding_by_hand,
    assert_near,
    gradients_of,
    losses_by_hand,
    sentence,
    tokenizer,
)

import holdfast

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

LOSSES = holdfast.Losses(balance=0.3, z=0.1)
CASES = [("mixtral", "smoe"), ("deepseek_v3", "symphony+smooth"), ("llama", "smooth"), ("gpt2", "symphony")]
WAYS = {"asks for aux_loss": None, "does not ask": 0.0}  # TRL's own coefficient


def model_of(family: str, router: str, losses: holdfast.Losses | None) -> Any:
    if family in ("mixtral", "deepseek_v3"):
        return holdfast.reroute(tiny(family), router, losses=losses)
    without_dropout: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    dense = tiny_dense(family, **without_dropout)
    torch.manual_seed(1)
    return holdfast.sparsify(dense, experts=8, router=router, losses=losses, noise=0.5)


def preferences() -> Any:
    rows = [
        {
            "prompt": sentence(seed, 4),
            "chosen": " " + sentence(seed + 50, 5),
            "rejected": " " + sentence(seed + 90, 3 + seed % 4),
        }
        for seed in range(8)
    ]
    return datasets.Dataset.from_list(rows)


def sft(model: Any, folder: Path, **options: Any) -> Any:
    rows = datasets.Dataset.from_list([{"text": sentence(seed, 5 + seed % 5)} for seed in range(8)])
    arguments = trl.SFTConfig(output_dir=str(folder), **{**SETTINGS, **options})
    return trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer())


def dpo(model: Any, folder: Path, reference: Any = None, **options: Any) -> Any:
    arguments = trl.DPOConfig(output_dir=str(folder), **{**SETTINGS, **options})
    return trl.DPOTrainer(model, reference, arguments, train_dataset=preferences(), processing_class=tokenizer())


def grpo(model: Any, folder: Path, **options: Any) -> Any:
    rows = datasets.Dataset.from_list([{"prompt": sentence(seed, 4)} for seed in range(8)])
    settings = {**SETTINGS, "num_generations": 2, "max_completion_length": 6, "beta": 0.0, "temperature": 1.0, **options}
    arguments = trl.GRPOConfig(output_dir=str(folder), **settings)
    torch.manual_seed(0)
    return trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer(),
    )


TRAINERS: dict[str, Any] = {"SFT": sft, "DPO": dpo, "GRPO": grpo}


def needed(trainer: str, family: str, router: str, losses: holdfast.Losses | None = None) -> dict[str, Any]:
    """What a trainer must be given beside the model."""
    return {"reference": model_of(family, router, losses)} if trainer == "DPO" else {}


def own_gradients(trainer: str, family: str, router: str, folder: Path, parts: int) -> dict[str, Tensor]:
    """A model without losses, and a loss to which each router's own is added by hand."""
    model = model_of(family, router, None)
    seen = losses_by_hand(model, LOSSES)
    options = {"gradient_accumulation_steps": parts, **needed(trainer, family, router)}
    run = TRAINERS[trainer](model, folder, router_aux_loss_coef=0.0, **options)
    divisor = 1 if trainer == "DPO" else parts  # DPO's loss is divided by the Trainer afterwards
    with adding_by_hand(run, seen, divisor):
        return gradients_of(run, model)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "router"), quick_or_slow(CASES, CASES[:1]))
@pytest.mark.parametrize("trainer", TRAINERS)
def test_router_losses_train_as_if_added_by_hand(
    trainer: str, family: str, router: str, way: str, parts: int, tmp_path: Path
) -> None:
    model = model_of(family, router, LOSSES)
    options = {"gradient_accumulation_steps": parts, **needed(trainer, family, router)}
    run = TRAINERS[trainer](model, tmp_path / "ours", router_aux_loss_coef=WAYS[way], **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the loss was computed without")
        found = gradients_of(run, model)
    expected = own_gradients(trainer, family, router, tmp_path / "by hand", parts)
    assert_near(found, expected, 3e-6)
    plain = model_of(family, router, holdfast.Losses())
    options = {"gradient_accumulation_steps": parts, **needed(trainer, family, router)}
    without = gradients_of(TRAINERS[trainer](plain, tmp_path / "without", **options), plain)
    changed = [name for name in found if not torch.allclose(found[name], without[name], atol=1e-5)]
    assert any("gate.weight" in name or "router.score" in name for name in changed)


def never_reading(trainer: str, model: Any, folder: Path, callbacks: Any, **options: Any) -> Any:
    """One of TRL's trainers that never read the routers' losses."""
    kind, config = {
        "CPO": lambda: (experimental("cpo").CPOTrainer, experimental("cpo").CPOConfig),
        "ORPO": lambda: (experimental("orpo").ORPOTrainer, experimental("orpo").ORPOConfig),
        "Reward": lambda: (trl.RewardTrainer, trl.RewardConfig),
    }[trainer]()
    arguments = config(output_dir=str(folder), **{**SETTINGS, **options})
    rows = preferences()
    return kind(model, args=arguments, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks)


def experimental(name: str) -> Any:
    return importlib.import_module(f"trl.experimental.{name}")


def never_read(trainer: str, losses: holdfast.Losses | None) -> Any:
    """A model for `never_reading`; rewards need another head, which `sparsify` keeps."""
    if trainer != "Reward":
        return model_of("mixtral", "smoe", losses)
    import transformers

    config = tiny_dense("llama").config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(1)
    dense = transformers.LlamaForSequenceClassification(config)
    return holdfast.sparsify(dense, experts=8, k=2, router="smoe", losses=losses, noise=0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("trainer", ["CPO", "ORPO", "Reward"])
def test_trainers_that_never_read_the_losses_scale_and_log_them(trainer: str, passed: bool, tmp_path: Path) -> None:
    """Under accumulation, whether our callback is passed or not: the Trainer has it by default."""
    model, options = never_read(trainer, LOSSES), {"gradient_accumulation_steps": 2, "logging_steps": 2, "max_steps": 2}
    values: list[dict[str, Tensor]] = []
    for module in model.modules():
        if isinstance(module, holdfast.Router):
            module.register_forward_hook(lambda _, given, routing: values.append(dict(routing.losses)))
    run = never_reading(trainer, model, tmp_path / "ours", [holdfast.trainer_callback()] if passed else [], **options)
    found = gradients_of(run, model)
    bare = never_read(trainer, None)
    seen = losses_by_hand(bare, LOSSES)
    run_by_hand = never_reading(trainer, bare, tmp_path / "by hand", [], **options)
    with adding_by_hand(run_by_hand, seen, 1):  # the Trainer divides afterwards
        assert_near(found, gradients_of(run_by_hand, bare), 3e-6)
    logged = [entry for entry in run.state.log_history if "router/balance" in entry]
    assert len(logged) == 1
    for name in ("balance", "z"):  # of four batches, each the sum of all layers
        mean = torch.stack([terms[name] for terms in values if name in terms]).sum() / 4
        assert logged[0][f"router/{name}"] == pytest.approx(float(mean), rel=1e-5)
    assert model.__dict__["_holdfast"].collector.loss_scale is None


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_familys_own_balance_loss_is_absent(trainer: str, tmp_path: Path) -> None:
    """TRL asks for router logits by default, after the model was rerouted: losses of 0 stay losses of 0."""
    found = []
    for coefficient in (None, 0.0, 100.0):
        model = model_of("mixtral", "smoe", holdfast.Losses())
        options = needed(trainer, "mixtral", "smoe") | {"router_aux_loss_coef": coefficient}
        found.append(gradients_of(TRAINERS[trainer](model, tmp_path / str(coefficient), **options), model))
    assert_near(found[0], found[1], 3e-6)
    assert_near(found[2], found[1], 3e-6)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trl_logs_the_routers_loss(trainer: str, tmp_path: Path) -> None:
    model = model_of("llama", "smoe", LOSSES)
    run = TRAINERS[trainer](model, tmp_path, logging_steps=1, **needed(trainer, "llama", "smoe"))
    run.train()
    logged = [entry["aux_loss"] for entry in run.state.log_history if "aux_loss" in entry]
    assert len(logged) == 1 and logged[0] > 0.5
    added = [entry["router/balance"] + entry["router/z"] for entry in run.state.log_history if "router/z" in entry]
    assert added == pytest.approx(logged, rel=1e-5)  # a sparsified model's coefficient is 1


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_evaluation_works_under_sft(label_smoothing: float, tmp_path: Path) -> None:
    model = model_of("llama", "smooth", LOSSES)
    run = sft(model, tmp_path, label_smoothing_factor=label_smoothing)
    before = {name: value.clone() for name, value in model.named_buffers()}
    result = run.evaluate(run.train_dataset)
    assert result["eval_aux_loss"] > 0.5
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_dpo_does_not_make_its_reference_from_the_model_as_it_was(tmp_path: Path) -> None:
    """TRL loads `config._name_or_path`, which is the model before it was rerouted."""
    tiny("mixtral").save_pretrained(tmp_path / "plain")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    holdfast.reroute(model, "smooth", losses=LOSSES)
    with pytest.raises(Exception, match="Holdfast"):
        dpo(model, tmp_path / "run")
    holdfast.restore(model)
    assert model.config._name_or_path == str(tmp_path / "plain")
    dpo(model, tmp_path / "run")


def test_dpo_makes_its_reference_from_a_saved_folder(tmp_path: Path) -> None:
    holdfast.save(model_of("mixtral", "smooth", LOSSES), tmp_path / "saved", tokenizer=tokenizer())
    model = holdfast.load(tmp_path / "saved")
    run = dpo(model, tmp_path / "run")
    assert run.ref_model.config.holdfast == model.config.holdfast
    ids = torch.arange(10, 22).view(2, 6)
    with torch.no_grad():
        assert torch.equal(run.ref_model.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize(
    ("router", "losses", "adapted"),
    [("ac+symphony+smooth", LOSSES, False), ("ac+symphony+smooth", LOSSES, True), ("smoe", None, False)],
)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_gradient_checkpointing_which_is_trls_default_changes_nothing(
    trainer: str, router: str, losses: holdfast.Losses | None, adapted: bool, tmp_path: Path
) -> None:
    """TRL also asks for `aux_loss` by default, of a model without losses too."""
    found = []
    for checkpointed in (False, True):
        model = model_of("mixtral", router, losses)
        options: dict[str, Any] = {"gradient_checkpointing": checkpointed}
        if adapted:
            model = peft.get_peft_model(model, adapter())
        else:
            options |= needed(trainer, "mixtral", router)
        found.append(gradients_of(TRAINERS[trainer](model, tmp_path / str(checkpointed), **options), model))
    assert_near(found[1], found[0], 3e-6)


@pytest.mark.parametrize("trainer", ["SFT", "DPO"])
def test_adapters_train_with_the_routers_losses_and_references_teach_nothing(trainer: str, tmp_path: Path) -> None:
    """The reference is the same model with its adapters off, in training mode, without gradients."""
    model = model_of("mixtral", "symphony", LOSSES)
    seen: list[bool] = []
    for module in model.modules():
        if isinstance(module, holdfast.Router):
            module.register_forward_hook(lambda router, given, routing: seen.append(bool(routing.losses)))
    run = TRAINERS[trainer](peft.get_peft_model(model, adapter()), tmp_path, max_steps=2)
    graphs = [value.clone() for name, value in model.named_buffers() if name.endswith("graph")]
    run.train()
    model.eval()
    moved = [value for name, value in model.named_buffers() if name.endswith("graph")]
    assert all(not torch.equal(one, other) for one, other in zip(graphs, moved, strict=True))
    assert seen == ([True] * 3 + [False] * 3) * 2 if trainer == "DPO" else all(seen)


def test_the_reference_that_dpo_makes_of_a_trained_adapter_has_its_router_state(tmp_path: Path) -> None:
    """TRL adds an adapter, `ref`, and copies parameters into it; the state of routers is not among these."""
    holdfast.save(model_of("mixtral", "symphony+smooth", LOSSES), tmp_path / "base", tokenizer=tokenizer())
    config = adapter()
    model = peft.get_peft_model(holdfast.load(tmp_path / "base"), config)
    sft(model, tmp_path / "sft", max_steps=3, learning_rate=1e-3).train()
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(10, 22).view(2, 6)
    with torch.no_grad():
        expected = model.eval()(ids).logits
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", is_trainable=True)
    run = dpo(again, tmp_path / "dpo", logging_steps=1, max_steps=3, learning_rate=1e-3)
    run.train()
    margins = [entry["rewards/margins"] for entry in run.state.log_history if "rewards/margins" in entry]
    assert margins[0] == 0.0 and margins[-1] != 0.0  # the policy is its reference until the first update
    again.set_adapter("ref")
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, expected)
    again.add_adapter("fresh", config)
    again.set_adapter("fresh")
    fresh = dict(again.named_buffers())
    base = dict(peft.get_peft_model(holdfast.load(tmp_path / "base"), config).named_buffers())
    graphs = [name for name in base if name.endswith("graph")]
    assert graphs and all(torch.equal(fresh[name], base[name]) for name in graphs)


def test_dpo_does_not_make_its_reference_from_the_folder_of_a_restored_model(tmp_path: Path) -> None:
    """The folder has routers that the model has no more."""
    holdfast.save(model_of("mixtral", "smooth", LOSSES), tmp_path / "saved", tokenizer=tokenizer())
    model = holdfast.restore(holdfast.load(tmp_path / "saved"))
    with pytest.raises(Exception, match="Holdfast"):
        dpo(model, tmp_path / "run")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_model_with_its_own_router_trains_as_an_untouched_one(trainer: str, tmp_path: Path) -> None:
    """TRL asks for the balance loss by default, and its fused head computes the family's."""
    found = []
    for name, model in (("untouched", tiny("mixtral")), ("native", holdfast.reroute(tiny("mixtral"), "native"))):
        options = {"reference": tiny("mixtral")} if trainer == "DPO" else {}
        run = TRAINERS[trainer](model, tmp_path / name, logging_steps=1, router_aux_loss_coef=0.5, **options)
        found.append(gradients_of(run, model))
        assert next(entry["aux_loss"] for entry in run.state.log_history if "aux_loss" in entry) > 1.0
    assert_near(found[1], found[0], 3e-6)

"""Training steps that are replayed as CUDA graphs give the numbers of steps that are not, with every router."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from interrupting import Interrupted, stop_at
from router_names import IN_TEXT_MODELS
from torch import Tensor, nn
from wording import assert_refused

import holdfast
from holdfast.data import PixelScaling
from holdfast.hub.convert import set_losses
from holdfast.routing import Router
from holdfast.train import build_model, load_recipe, make_task
from holdfast.train import train as train_task
from holdfast.train.augmentation import soft_labels
from holdfast.train.fast_step import FIRST_STEPS, CapturedStep, compile_step
from holdfast.train.recipe import RobustPart, TrainingPart
from holdfast.train.robust_step import RobustLosses
from holdfast.train.snapshots import take_snapshot
from holdfast.train.step import TrainingStep, adamw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

STEPS = 50
LENGTH, SEQUENCES, VOCABULARY = 64, 4, 64
WAITING: dict[str, dict[str, Any]] = {
    "base": {},
    "capacity": {"policy": "next"},
}  # routers that read from the GPU in a forward
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in IN_TEXT_MODELS if name not in WAITING},
    "capacity": ("capacity", {"policy": "drop"}),
    "symphony+smooth": ("symphony+smooth", {}),
    "ac+symphony+attention": ("ac+symphony+attention", {}),
    "noise": ("smoe", {"noise": "gumbel"}),
    "expert dropout": ("symphony+smooth", {"drop": 0.3}),
    "expert dropout per token": ("smoe", {"drop": 0.3, "per": "token"}),
    "gradient scaling": ("smoe", {"gradient_scaling": 10.0}),
    "annealed": ("smooth", {"anneal": True}),
}


def build(
    router: str,
    *,
    dropout: float = 0.1,
    width: int = 8,
    layers: int = 3,
    length: int = LENGTH,
    margin: float = 0.0,
    **options: Any,
) -> Any:
    """Return a GPT-2 with 4 heads of this width, and routers with these options."""
    torch.manual_seed(0)
    sizes = {"n_positions": length, "n_embd": 4 * width, "n_layer": layers, "n_head": 4, "n_inner": 32}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes, **drops)
    dense = transformers.GPT2LMHeadModel(config)
    dense.config.use_cache = False  # as in training: then transformers looks for packed rows
    losses = holdfast.Losses(balance=0.01, margin=margin, radius=0.1 if margin else 0.0)
    holdfast.sparsify(dense, experts=8, router=router, init="random", losses=losses, router_options=options)
    return dense.cuda().train()


def batches(count: int, length: int = LENGTH) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(1, VOCABULARY, (SEQUENCES, length), generator=generator).cuda() for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in found]


def step_of(
    model: Any, robust: RobustPart | None = None, scaling: PixelScaling | None = None, **options: Any
) -> TrainingStep:
    training = TrainingPart(steps=STEPS, batch=SEQUENCES, learning_rate=1e-3, weight_decay=0.01, warmup=10, **options)
    losses = None if robust is None else RobustLosses(model, robust, scaling)
    return TrainingStep(model, adamw(model, training), training, STEPS, losses)


def train(step: Any, model: Any, data: list[Any], accumulate: int = 1) -> Tensor:
    losses = []
    torch.manual_seed(2)
    for number in range(0, len(data), accumulate):
        for module in model.modules():
            if isinstance(module, Router):
                module.progress(number / len(data))
        record = step(data[number : number + accumulate])
        losses.append(torch.stack([record.loss, record.grad_norm]).clone())
    torch.cuda.synchronize()
    return torch.stack(losses).cpu()


def replayed(data: list[Any], plain: Any, model: Any, *, atol: float = 1e-5, **options: Any) -> CapturedStep:
    """Train both models, the second with a captured step, which is returned; both must have the same losses."""
    accumulate = options.get("accumulate", 1)
    expected = train(step_of(plain, **options), plain, data, accumulate)
    step = CapturedStep(step_of(model, **options))
    torch.testing.assert_close(train(step, model, data, accumulate), expected, atol=atol, rtol=0)
    return step


def differences(model: nn.Module, other: nn.Module) -> list[str]:
    found, expected = (dict(each.state_dict()) for each in (model, other))
    return [name for name, value in expected.items() if not torch.equal(value, found[name])]


@pytest.mark.parametrize("kind", ROUTERS)
def test_fifty_replayed_steps_are_fifty_steps(kind: str) -> None:
    router, options = ROUTERS[kind]
    plain, model = build(router, **options), build(router, **options)
    assert replayed(batches(STEPS), plain, model).is_captured
    assert differences(model, plain) == []


@pytest.mark.parametrize("router", ["smoe", "xmoe", "ac", "symphony", "smooth", "xmoe+symphony+ac"])
def test_steps_with_a_margin_loss_are_replayed(router: str) -> None:
    plain, model, without = build(router, margin=0.1), build(router, margin=0.1), build(router)
    assert replayed(batches(STEPS), plain, model).is_captured
    assert differences(model, plain) == []
    train(step_of(without), without, batches(STEPS))
    assert differences(without, plain) != []


@pytest.mark.parametrize("router", ["smoe", "symphony+smooth"])
def test_steps_with_losses_of_outputs_and_of_a_second_forward_are_replayed(router: str) -> None:
    losses = holdfast.Losses(balance=0.01, diversity=0.1, distillation=0.1, consistency=0.1, word_noise=0.1)
    plain, model = (holdfast.set_teacher(set_losses(build(router), losses), torch.zeros_like) for _ in range(2))
    assert replayed(batches(STEPS), plain, model).is_captured
    assert differences(model, plain) == []


@pytest.mark.parametrize("router", ["smoe", "symphony", "ac", "similarity", "attention", "smooth"])
def test_steps_on_images_that_are_on_the_gpu_are_replayed(router: str) -> None:
    recipe = load_recipe("vmoe-tiny", {"training.steps": 20, "training.batch": 32, "training.precision": "bf16"})
    task = make_task(recipe)
    examples = task.examples(0)
    there = examples.on(torch.device("cuda"))
    places = [range(32 * step, 32 * step + 32) for step in range(20)]
    data = [there.__getitems__(each) for each in places]
    for each, batch in zip(places, data, strict=True):
        for name, value in examples.__getitems__(each).items():
            torch.testing.assert_close(batch[name].cpu(), value)
    plain, model = (build_model(task, router, {}, seed=0).cuda().train() for _ in range(2))
    assert replayed(data, plain, model, precision="bf16").is_captured
    assert differences(model, plain) == []


ROBUST: dict[str, dict[str, Any]] = {
    "pgd": {"method": "pgd", "steps": 3},
    "pgd, routing": {"method": "pgd", "steps": 2, "routing": 1.0, "consistency": 0.1},
    "pgd, balance": {"method": "pgd", "steps": 2, "routing": 0.5, "routing_term": "balance"},
    "fast": {"method": "fast"},
    "free": {"method": "free"},
    "noise": {"method": "noise"},
}


@pytest.mark.parametrize("part", ROBUST)
@pytest.mark.parametrize("router", ["smoe", "symphony+smooth", "ac"])
def test_robust_steps_on_texts_are_replayed(router: str, part: str) -> None:
    plain, model = build(router), build(router)
    robust = RobustPart(**ROBUST[part], budget=0.05)
    assert replayed(batches(20), plain, model, robust=robust, atol=1e-4).is_captured
    assert differences(model, plain) == []


@pytest.mark.parametrize("part", ROBUST)
def test_robust_steps_on_images_are_replayed(part: str) -> None:
    recipe = load_recipe("vmoe-tiny", {"training.steps": 20, "training.batch": 32})
    task = make_task(recipe)
    there = task.examples(0).on(torch.device("cuda"))
    data = [there.__getitems__(range(32 * step, 32 * step + 32)) for step in range(20)]
    plain, model = (build_model(task, "smooth", {}, seed=0).cuda().train() for _ in range(2))
    robust = RobustPart(**ROBUST[part], budget=0.1)
    options: dict[str, Any] = {"robust": robust, "scaling": task.scaling, "precision": "bf16"}
    assert replayed(data, plain, model, **options, atol=1e-4).is_captured
    assert differences(model, plain) == []


def test_an_attacked_view_of_texts_is_replayed() -> None:
    data = batches(12)
    for batch in data:
        batch["attacked_input_ids"] = batch["input_ids"].roll(1, 0)
    robust = RobustPart(method="words", budget=0.1)
    assert replayed(data, build("symphony"), build("symphony"), robust=robust).is_captured


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_learning_rate_that_changes_at_every_step_reaches_replayed_steps(schedule: str) -> None:
    """With smoothed labels, whose term is a part of the captured forward."""
    data = batches(STEPS)
    for batch in data:
        batch["shift_labels"] = batch["labels"].roll(-1, 1)
    plain, model, constant = build("smoe"), build("smoe"), build("smoe")
    falling = step_of(plain, schedule=schedule, floor=0.1)
    with soft_labels(plain, 0.1):
        expected = train(falling, plain, data)
    step = CapturedStep(step_of(model, schedule=schedule, floor=0.1))
    with soft_labels(model, 0.1):
        found = train(step, model, data)
    assert step.is_captured and step.step.done == STEPS
    rates = [1e-3 * falling.rate_factor(done) for done in range(STEPS)]
    assert len(set(rates[10:])) == STEPS - 10
    assert [float(group["lr"]) for group in step.step.optimizer.param_groups] == pytest.approx([rates[-1]] * 2, rel=1e-6)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert differences(model, plain) == []
    with soft_labels(constant, 0.1):
        train(CapturedStep(step_of(constant)), constant, data)
    assert differences(constant, plain) != []


@pytest.mark.parametrize("router", WAITING)
def test_a_router_that_waits_is_not_captured(router: str, caplog: pytest.LogCaptureFixture) -> None:
    step = replayed(batches(8), build(router, **WAITING[router]), build(router, **WAITING[router]))
    assert not step.is_captured and "without CUDA graphs, which is slower for small models: a step waits" in caplog.text


def test_bf16_and_accumulated_batches_are_replayed() -> None:
    plain, model = build("symphony+smooth"), build("symphony+smooth")
    assert replayed(batches(STEPS), plain, model, accumulate=2, precision="bf16").is_captured


@pytest.mark.parametrize("router", ["smoe", "symphony+smooth"])
def test_snapshots_between_replayed_steps_change_nothing(router: str, tmp_path: Path) -> None:
    data, losses = batches(12), []
    for watched in (False, True):
        model = build(router)
        step = CapturedStep(step_of(model))
        torch.manual_seed(2)
        found = []
        for number, batch in enumerate(data):
            found.append(step([batch]).loss.clone())
            if watched:
                take_snapshot(model, {"input_ids": data[0]["input_ids"]}, 2, number, tmp_path, data[1])
        assert step.is_captured
        losses.append(torch.stack(found).cpu())
    torch.testing.assert_close(*losses, atol=1e-5, rtol=0)
    assert len(list(tmp_path.iterdir())) == len(data)


def test_a_padded_batch_is_replayed() -> None:
    data = batches(STEPS)
    for number, batch in enumerate(data):
        batch["attention_mask"] = (torch.arange(LENGTH, device="cuda") < 30 + number % 30).long().expand(SEQUENCES, -1)
    assert replayed(data, build("smooth"), build("smooth"), atol=1e-4).is_captured


def test_a_nan_in_a_replay_raises_with_the_name_of_the_first_layer() -> None:
    model = build("smoe")
    step, data = CapturedStep(step_of(model)), batches(8)
    for batch in data:
        step([batch])
    with torch.no_grad():
        model.transformer.h[1].ln_2.weight.fill_(torch.nan)
    step([data[0]])
    torch.cuda.synchronize()
    assert_refused(r"transformer\.h\.1\.mlp.*NaN", step, [data[1]])


def changed_k(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Router):
            module.select.k = 3  # type: ignore[assignment]


def moved(model: Any) -> None:
    model.cpu()
    model.cuda()


def evaluated(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(**batches(1)[0])
    model.train()


def in_evaluation_mode(model: Any) -> None:
    model.transformer.h[0].eval()


def without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def unchecked(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, Router):
            module.check_finite = False


CHANGES = (changed_k, moved, evaluated, in_evaluation_mode, without_dropout, unchecked)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_steps_counts(change: Any) -> None:
    data = batches(20)
    results = []
    for captured in (False, True):
        model = build("symphony+smooth")
        step: Any = step_of(model)
        step = CapturedStep(step) if captured else step
        first = train(step, model, data)
        assert not captured or step.is_captured
        change(model)
        results.append((torch.cat([first, train(step, model, data)]), copy.deepcopy(model)))
        assert not captured or step.is_captured
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-5, rtol=0)
    assert differences(results[1][1], results[0][1]) == []


def test_inputs_of_another_shape_run_without_a_graph() -> None:
    data = [*batches(FIRST_STEPS + 3), *batches(2, LENGTH // 2), *batches(4)]
    assert replayed(data, build("ac"), build("ac")).is_captured


class Waiting(nn.Module):
    """A module that reads from the GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 if float(x.detach().sum()) < 1e9 else 0.5)


@pytest.mark.parametrize("found_out", ["in the first steps", "when capturing"])
def test_a_step_that_waits_is_not_captured_and_says_so(
    found_out: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if found_out == "when capturing":
        monkeypatch.setattr("holdfast.train.fast_step.WAITS", "no such text")
    data = batches(10)
    results = []
    for captured in (False, True):
        model = build("smoe")
        model.transformer.ln_f = nn.Sequential(model.transformer.ln_f, Waiting())
        step: Any = step_of(model)
        results.append(train(CapturedStep(step) if captured else step, model, data))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=0)
    assert "without CUDA graphs" in caplog.text


COMPILED = ["smoe", "symphony", "ac", "smooth", "similarity", "attention"]


def make_heads_differ(model: Any) -> Any:
    """Scale the queries of each head by another factor.

    `attention` reads the head with the lowest entropy. Those of new heads differ by 1e-6: rounding would select one, and a
    compiled model rounds differently.
    """
    with torch.no_grad():
        for block in model.transformer.h:
            queries, keys, _ = block.attn.c_attn.weight.chunk(3, dim=1)
            queries *= 8 * torch.arange(1, 5, device="cuda").repeat_interleave(queries.shape[1] // 4)
            keys *= 8
    return model


@pytest.mark.slow
@pytest.mark.parametrize("router", COMPILED)
def test_fifty_compiled_and_replayed_steps_are_fifty_steps(router: str) -> None:
    data = batches(STEPS)
    plain, model = (make_heads_differ(build(router, dropout=0.0, layers=2)) for _ in range(2))
    expected = train(step_of(plain), plain, data)
    step = CapturedStep(step_of(model))
    step.compile(data[:1])
    assert step.step.is_compiled
    found = train(step, model, data)
    assert step.is_captured and step.step.is_compiled
    torch.testing.assert_close(found[:, 0], expected[:, 0], atol=1e-5, rtol=0)
    expected_state, state = plain.eval().state_dict(), model.eval().state_dict()
    for name, value in expected_state.items():
        differences = (state[name].float() - value.float()).abs()
        if name.endswith("c_attn.bias"):  # that of the keys changes no softmax: Adam turns its rounding errors into steps
            differences.chunk(3)[1].zero_()
        assert (differences <= 1e-4 + 1e-2 * value.float().abs()).all(), name


@pytest.mark.slow
def test_a_compiled_step_draws_the_random_numbers_of_dropout_that_a_step_draws() -> None:
    data = batches(10)
    plain, model = build("smoe", dropout=0.3, layers=2), build("smoe", dropout=0.3, layers=2)
    expected = train(step_of(plain), plain, data)
    step = CapturedStep(step_of(model))
    step.compile(data[:1])
    assert step.step.is_compiled
    torch.testing.assert_close(train(step, model, data)[:, 0], expected[:, 0], atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("width", [44, 48])
def test_a_step_that_is_compiled_has_right_gradients_of_attention(width: int) -> None:
    """torch 2.11 compiles attention with heads of width 44 to wrong gradients: then the step must not be compiled."""
    data = batches(1, 512)
    model = build("smoe", width=width, layers=1, length=512)
    step = step_of(model, precision="bf16")
    compile_step(step, data)
    assert step.is_compiled or width == 44
    gradients = []
    for run in (model, step.compiled[0] if step.compiled else model):
        torch.manual_seed(4)
        step.add_gradients(data, run)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        step.drop_gradients()
    for name, gradient in gradients[0].items():
        if "attn" in name:
            assert (gradients[1][name] - gradient).norm() <= 0.1 * gradient.norm(), name


@pytest.mark.slow
def test_a_changed_setting_ends_compilation(caplog: pytest.LogCaptureFixture) -> None:
    data = batches(10)
    plain, model = build("smoe", dropout=0.0, layers=1), build("smoe", dropout=0.0, layers=1)
    step: Any = CapturedStep(step_of(model))
    step.compile(data[:1])
    results = []
    for each, own in ((step_of(plain), plain), (step, model)):
        first = train(each, own, data)
        changed_k(own)
        results.append(torch.cat([first, train(each, own, data)]))
    assert step.is_captured and not step.step.is_compiled
    assert "continues without torch.compile, because a setting of the model has changed" in caplog.text
    torch.testing.assert_close(results[1][:, 0], results[0][:, 0], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_compiled_run_that_is_resumed_is_compiled_and_has_the_same_log(tmp_path: Path) -> None:
    changes = {"training.steps": 8, "training.save_every": 4, "training.compile": True}
    task = make_task(load_recipe("tiny", changes))
    logs = []
    for name, stops in (("whole", False), ("resumed", True)):
        if stops:
            with pytest.raises(Interrupted):
                train_task(build_model(task, "smoe", {}, seed=0), task, tmp_path / name, seed=0, k=2, tick=stop_at(6))
        logs.append(train_task(build_model(task, "smoe", {}, seed=0), task, tmp_path / name, seed=0, k=2))
        last = json.loads((tmp_path / name / "checkpoint-8" / "training.json").read_text())
        assert last["compiled"]
    for found, expected in zip(logs[1], logs[0], strict=True):
        assert found == pytest.approx(expected, abs=1e-5)

"""A step is compiled only if its loss, gradients and router state agree with the step as it is; nothing else changes.

CUDA graphs and the default compiler are tested in test_captured_on_gpu.py: here another backend takes the place of Inductor.
"""

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from wording import assert_refused

import holdfast
from holdfast.train import build_model, fast_step, make_task, train
from holdfast.train.fast_step import compile_step
from holdfast.train.recipe import TrainingPart, load_recipe
from holdfast.train.run_folder import TrainingState
from holdfast.train.step import TrainingStep, adamw

LENGTH, VOCABULARY, WIDTH = 12, 32, 16


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build(router: str = "smoe", dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    shape = {"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_inner": WIDTH, "n_positions": LENGTH}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **shape, **drops)
    dense = transformers.GPT2LMHeadModel(config)
    dense.config.use_cache = False
    losses = holdfast.Losses(balance=0.01)
    return holdfast.sparsify(dense, experts=4, router=router, init="random", losses=losses).train()


def step_of(model: Any, precision: str = "float32") -> TrainingStep:
    training = TrainingPart(steps=10, batch=3, learning_rate=1e-2, precision=precision)  # type: ignore[arg-type]
    return TrainingStep(model, adamw(model, training), training, 10)


def batch(seed: int = 1, rows: int = 3) -> list[dict[str, Tensor]]:
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": ids, "labels": ids, "shift_labels": ids.roll(-1, 1)}]


# Trace as a compiler does, and run the operators one by one: random numbers are those of the model.
traced = partial(torch.compile, backend="eager", dynamic=False)
traced_with_backward = partial(torch.compile, backend="aot_eager", dynamic=False)  # takes longer


class WrongIfCompiled(nn.Module):
    """Change the gradient, or a state, only where a compiler traces it: as the attention of torch 2.11 does."""

    def __init__(self, factor: float, *, of_state: bool = False) -> None:
        super().__init__()
        self.factor, self.of_state = factor, of_state
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor if torch.compiler.is_compiling() else 1.0
        if self.of_state:
            self.get_buffer("seen").add_(factor)
            return x
        scaled = factor * x
        return x.detach() + scaled - scaled.detach()


@pytest.mark.slow  # traces the backward too
@pytest.mark.parametrize("router", ["smoe", "symphony+smooth"])
def test_a_compiled_step_that_agrees_is_used_and_trains_the_same(router: str, caplog: pytest.LogCaptureFixture) -> None:
    results = []
    for compiled in (False, True):
        model = build(router)
        step = step_of(model)
        torch.manual_seed(2)
        if compiled:
            compile_step(step, batch(), traced_with_backward)
            assert step.is_compiled and "without torch.compile" not in caplog.text
        records = [step(batch(seed)) for seed in range(3)]
        results.append((torch.stack([record.loss for record in records]), dict(model.state_dict())))
    (expected, state), (found, compiled_state) = results
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for name, value in state.items():
        torch.testing.assert_close(compiled_state[name].float(), value.float(), atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_the_comparison_changes_neither_weights_nor_state_nor_random_numbers() -> None:
    model = build("symphony")
    step = step_of(model)
    step(batch(5))  # staged statistics that are not committed yet
    before = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    random_before = torch.get_rng_state()
    compile_step(step, batch(), traced)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(value, before[name]), name
    assert torch.equal(torch.get_rng_state(), random_before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert step.done == 1 and model.training


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.8, pytest.param(1.2, marks=pytest.mark.slow)])
def test_wrong_gradients_are_found_and_the_step_stays_as_it_is(factor: float, caplog: pytest.LogCaptureFixture) -> None:
    """The loss of such a step is right: only its gradients show the fault."""
    model, plain = build(), build()
    for each in (model, plain):
        each.transformer.h[0].attn.c_proj = nn.Sequential(WrongIfCompiled(factor), each.transformer.h[0].attn.c_proj)
    step = step_of(model)
    compile_step(step, batch(), traced)
    assert not step.is_compiled
    warnings = [
        record.getMessage() for record in caplog.records if record.name == "holdfast" and record.levelno == logging.WARNING
    ]
    assert len(warnings) == 1 and "training runs without torch.compile: the gradient of" in warnings[0]
    assert "attn.c_attn" in warnings[0] and "differs from that of the uncompiled step by 0." in warnings[0]
    torch.manual_seed(3)
    loss = step(batch()).loss
    torch.manual_seed(3)
    assert torch.equal(loss, step_of(plain)(batch()).loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (WrongIfCompiled(3.0, of_state=True), "the router state transformer.ln_f.1.seen differs"),
        (WrongIfCompiled(float("nan")), "differs from that of the uncompiled step by nan"),
    ],
    ids=["state", "nan"],
)
def test_a_wrong_router_state_and_nan_are_found(wrong: nn.Module, says: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    model.transformer.ln_f = nn.Sequential(model.transformer.ln_f, wrong)
    step = step_of(model)
    compile_step(step, batch(), traced)
    assert not step.is_compiled and says in caplog.text


def test_a_compiler_that_fails_leaves_the_step_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def without_compiler(model: Any) -> Callable[..., Any]:
        raise FileNotFoundError("No C compiler was found.\nA traceback follows.")

    step = step_of(build())
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    compile_step(step, batch(), without_compiler)
    assert not step.is_compiled and "the compiler failed (FileNotFoundError: No C compiler was found)." in caplog.text
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    step(batch())


def failing_on_gpu(step: TrainingStep) -> Callable[[Any], Callable[..., Any]]:
    """Return a compiler whose kernels make an illegal memory access, on a step that then counts as one on a GPU."""

    def compiler(model: Any) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            step.on_gpu = True
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors ...")

        return run

    return compiler


def test_a_compiled_kernel_that_makes_the_gpu_unusable_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    step = step_of(build())
    monkeypatch.setattr("torch.cuda.synchronize", failing)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: pytest.fail("the GPU was used again"))
    with pytest.raises(fast_step.GpuLostError) as found:
        compile_step(step, batch(), failing_on_gpu(step))
    assert isinstance(found.value, ValueError)  # commands print it without a traceback
    assert str(found.value) == (
        "a compiled kernel failed, and this process cannot use the GPU any more (AcceleratorError: CUDA error: an illegal "
        "memory access was encountered): run again with training.compile=false, into a new folder."
    )


def test_an_error_that_leaves_the_gpu_usable_leaves_the_step_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = step_of(build())
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    compile_step(step, batch(), failing_on_gpu(step))
    assert not step.is_compiled and "the compiler failed (AcceleratorError: CUDA error: an illegal memory" in caplog.text


def test_a_fault_of_the_model_itself_is_raised() -> None:
    model = build()
    with torch.no_grad():
        model.transformer.h[0].ln_2.weight.fill_(torch.nan)
    step = step_of(model)
    assert_refused("NaN", lambda: compile_step(step, batch(), traced))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_inputs_of_another_shape_are_not_compiled() -> None:
    calls = []
    step = step_of(build())

    def counted(model: Any) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            calls.append(inputs["input_ids"].shape)
            return model(**inputs)

        return run

    compile_step(step, batch(), counted)
    compared = len(calls)
    step(batch())
    assert len(calls) == compared + 1
    step(batch(rows=2))
    assert len(calls) == compared + 1
    step.compiled = None
    step(batch())
    assert len(calls) == compared + 1 and not step.is_compiled


@pytest.mark.parametrize(
    ("finished", "was_compiled", "compiles"), [(0, False, True), (4, True, True), (4, False, False)], ids=str
)
def test_a_resumed_run_is_compiled_if_the_run_before_it_was(finished: int, was_compiled: bool, compiles: bool) -> None:
    assert TrainingState(global_step=finished, compiled=was_compiled).compiles(True) == compiles


@pytest.mark.slow
def test_nothing_is_compiled_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(fast_step, "compile_step", lambda *_, **named: pytest.fail("compiled"))
    task = make_task(load_recipe("tiny", {"training.steps": 2, "training.compile": True}))
    log = train(build_model(task, "smoe", {}, seed=0), task, tmp_path, seed=0, k=2)
    assert len(log) == 2
    assert json.loads((tmp_path / "checkpoint-2" / "training.json").read_text())["compiled"] is False


@pytest.mark.slow  # Inductor compiles C++ code for each kernel
def test_the_default_compiler_agrees_with_dropout_and_bf16() -> None:
    step = step_of(build("smoe", dropout=0.2), "bf16")
    compile_step(step, batch(), fast_step.with_inductor)
    assert step.is_compiled


def test_the_error_that_is_reported_is_the_first_one() -> None:
    try:
        try:
            raise RuntimeError("this waits.\nmore")
        finally:
            raise RuntimeError("the end of a capture failed")
    except RuntimeError as problem:
        assert fast_step.first_line(problem) == "this waits"
    assert fast_step.first_line(RuntimeError("")) == "no message"


def test_equal_infinities_and_nan_in_the_state_agree_and_hide_no_difference() -> None:
    inf, nan = torch.inf, torch.nan

    def trial(*state: float) -> fast_step._Trial:
        return fast_step._Trial(torch.ones(2), {"weight": torch.ones(3)}, {"bias": torch.tensor(state)})

    expected = trial(inf, -inf, nan, 1.0)
    assert fast_step.disagreement(trial(inf, -inf, nan, 1.0), expected) is None
    for wrong in ((inf, -inf, nan, 2.0), (-inf, -inf, nan, 1.0), (0.0, -inf, nan, 1.0), (inf, -inf, 0.0, 1.0)):
        assert "the router state bias" in str(fast_step.disagreement(trial(*wrong), expected))
    assert "the router state bias" in str(fast_step.disagreement(trial(inf, 1.0), trial(0.0, 1.0)))

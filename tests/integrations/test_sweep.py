"""Every router under everything that people do to a model: right, or refused in one sentence. Nothing else is possible.

condition               compared with                                                                   tolerance
plain                   the model before it was saved and loaded                                        none
device_map with disk    the model in memory                                                             1e-5
cpu_offload             the model in memory                                                             1e-5
bitsandbytes 8-bit      a float model of the same numbers, whose layers return what quantised ones do   1e-4, same routes
torchao int8            a float model of the same numbers                                               1e-4
LoRA, DoRA              the merged model                                                                1e-3
gradient checkpointing  loss and every gradient without it                                              1e-5
compile                 the model as it is                                                              1e-5
bf16                    each router in float32, on what it was given in bf16                            1e-4
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from changed_models import IDS, logits, places
from router_names import IN_TEXT_MODELS
from tiny import tiny, with_checkpointing
from torch import Tensor, nn

import holdfast
from holdfast.hub.tracing import router_calls

COMPILED_FURTHER = ("smooth", "attention")  # by AOT autograd too, which is slower
REFUSED: set[tuple[str, str]] = set()  # (router, condition)


def made(router: str, layers: int = 3) -> Any:
    """A rerouted model whose routers have learnt something; always the same one."""
    torch.manual_seed(1)
    model = tiny("mixtral", hidden_size=64, num_hidden_layers=layers)
    model = holdfast.reroute(model, router, losses=holdfast.Losses(balance=0.1))
    with torch.no_grad():
        for batch in (IDS, IDS.flip(0)):
            model.train()(input_ids=batch)
    return model.eval()


def agree(model: Any, reference: Any, tolerance: float) -> None:
    torch.testing.assert_close(
        logits(model, use_cache=False), logits(reference, use_cache=False), atol=tolerance, rtol=tolerance
    )


def plain(router: str, folder: Path) -> None:
    model = made(router)
    assert torch.equal(logits(holdfast.load(holdfast.save(model, folder / "saved"))), logits(model))


def disk(router: str, folder: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate offloads")
    holdfast.save(made(router), folder / "saved")
    away = holdfast.load(folder / "saved", device_map=places("disk"), offload_folder=folder / "offload")
    assert any(parameter.is_meta for parameter in away.parameters())
    agree(away, made(router), 1e-5)


def cpu_offload(router: str, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate offloads")
    agree(accelerate.cpu_offload(made(router)), made(router), 1e-5)


def bitsandbytes(router: str, folder: Path) -> None:
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes quantises")
    holdfast.save(made(router), folder / "saved")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = holdfast.load(folder / "saved", quantization_config=config)
    reference = made(router)
    for name, linear in reference.named_modules():
        if isinstance(linear, nn.Linear) and name != "lm_head":
            other: Any = model.get_submodule(name)
            assert other.weight.dtype == torch.int8
            with torch.no_grad():
                linear.weight.copy_(library.functional.int8_vectorwise_dequant(other.weight.data, other.weight.SCB))
            linear.forward = other.forward  # type: ignore[method-assign]
    with holdfast.trace(model) as routes, holdfast.trace(reference) as expected:
        agree(model, reference, 1e-4)
    assert all(torch.equal(one.chosen, other.chosen) for one, other in zip(routes, expected, strict=True))


def torchao(router: str, folder: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao quantises")
    model = made(router)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    reference = made(router)
    for name, parameter in reference.named_parameters():
        if type(model.get_parameter(name)) is not nn.Parameter:
            with torch.no_grad():
                parameter.copy_(model.get_parameter(name).dequantize())  # type: ignore[no-untyped-call]
    assert not torch.equal(logits(made(router)), logits(reference))
    agree(model, reference, 1e-4)


def lora(router: str, folder: Path, dora: bool = False) -> None:
    peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
    targets = ["q_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, use_dora=dora, init_lora_weights=False)
    wrapped = peft.get_peft_model(made(router), config)
    if dora:  # lengths that differ from those of the rows, as after training
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    assert not torch.equal(logits(wrapped), logits(made(router)))
    agree(wrapped, copy.deepcopy(wrapped).merge_and_unload(), 1e-3)


def checkpointing(router: str, folder: Path) -> None:
    results = []
    for checkpointed in (True, False):
        model = with_checkpointing(made(router).train(), checkpointed)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach(), **gradients, **model.eval().state_dict()})
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


def compiled(router: str, folder: Path) -> None:
    torch._dynamo.reset()
    model = made(router, layers=2)
    backend = "aot_eager" if router in COMPILED_FURTHER else "eager"
    agree(torch.compile(model, backend=backend, fullgraph=True), made(router, layers=2), 1e-5)


def as_float32(thing: Any) -> Any:
    if isinstance(thing, Tensor) and thing.dtype == torch.bfloat16:
        return thing.float()
    if isinstance(thing, nn.Linear):
        return holdfast.routing.records.Projection(thing.weight.float(), None)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(thing, **{entry.name: as_float32(getattr(thing, entry.name)) for entry in fields(thing)})
    return thing


def bf16(router: str, folder: Path) -> None:
    model = made(router).to(torch.bfloat16)
    with holdfast.trace(model) as routes, router_calls(model) as asked:
        out = logits(model)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    for routing, call in zip(routes, asked, strict=True):
        with torch.no_grad():
            expected = call.route(call.tokens.float(), as_float32(call.context))  # type: ignore[call-arg]
        torch.testing.assert_close(routing.dense_weights, expected.dense_weights, atol=1e-4, rtol=1e-4)
    # Not the same weights any more, and near-ties fall otherwise: the outputs are near, but not equal.
    assert (out.float() - logits(made(router))).norm() < 0.5 * logits(made(router)).norm()


CONDITIONS: dict[str, Callable[[str, Path], None]] = {
    "plain": plain,
    "device_map with disk": disk,
    "cpu_offload": cpu_offload,
    "bitsandbytes 8-bit": bitsandbytes,
    "torchao int8": torchao,
    "LoRA": lora,
    "DoRA": lambda router, folder: lora(router, folder, dora=True),
    "gradient checkpointing": checkpointing,
    "compile": compiled,
    "bf16": bf16,
}


def refuses(act: Callable[[], None]) -> bool:
    """Whether it ends in one sentence of ours; any other error passes through."""
    try:
        act()
    except ValueError as problem:
        sentence = str(problem)
        frame = problem.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        raised_in = "" if frame is None else frame.tb_frame.f_globals.get("__name__", "")
        if raised_in.startswith("holdfast.") and "\n" not in sentence and sentence.endswith("."):
            return True
        raise
    return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="compiling needs a C++ compiler")
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("router", IN_TEXT_MODELS)
def test_every_router_is_right_or_refused(router: str, condition: str, tmp_path: Path) -> None:
    refused = refuses(lambda: CONDITIONS[condition](router, tmp_path))
    assert refused == ((router, condition) in REFUSED)

"""The how-to pages: each refusal that a page quotes is what the library answers, in the words of the page."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from router_pages import tables
from tiers import quick_or_slow
from tiny_vlm import batch, llava, qwen, smolvlm
from torch import nn

import holdfast

ROOT = Path(__file__).parent.parent.parent
PAGES = ROOT / "docs" / "how-to"
TOKENS = torch.arange(1, 13).view(2, 6)


def mixtral(**sizes: Any) -> Any:
    small: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**small | heads | sizes))


def rerouted(router: str = "symphony", **options: Any) -> Any:
    return holdfast.reroute(mixtral(), router, **options)


def reentrant_checkpointing(folder: Path) -> None:
    model = rerouted(losses=holdfast.Losses(balance=0.01)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()


def accumulation_of_logits(folder: Path) -> None:
    model = rerouted(losses=holdfast.Losses(balance=0.01)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            model(input_ids=TOKENS).logits.sum().backward()


def two_backwards(folder: Path) -> None:
    model = rerouted(losses=holdfast.Losses(balance=0.01)).train()
    logits = model(input_ids=TOKENS).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits.sum().backward(retain_graph=True)
        logits.square().sum().backward()


def reference_of_a_changed_model(folder: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]})
    settings = trl.DPOConfig(output_dir=str(folder), report_to="none", bf16=False)
    mixtral(vocab_size=384).save_pretrained(folder / "plain")
    model = holdfast.reroute(transformers.MixtralForCausalLM.from_pretrained(folder / "plain"), "symphony")
    trl.DPOTrainer(model, args=settings, train_dataset=rows, processing_class=transformers.ByT5Tokenizer())


def adapter_of_other_routers(folder: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    peft.get_peft_model(rerouted("symphony"), config).save_pretrained(folder)
    peft.PeftModel.from_pretrained(rerouted("smooth"), folder)


def adapter_for_each_row(folder: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = peft.get_peft_model(rerouted("symphony"), peft.LoraConfig(r=4, target_modules=["q_proj"]), adapter_name="one")
    model.eval()(input_ids=TOKENS, adapter_names=["one", "__base__"])


def ia3_where_attention_reads(folder: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    config = peft.IA3Config(target_modules=["o_proj"], feedforward_modules=[])
    peft.get_peft_model(rerouted("attention"), config).eval()(input_ids=TOKENS)


@contextmanager
def ranks_that_do_not_exist(number: int) -> Iterator[Any]:
    """Yield a mesh of `number` ranks, of which only the first exists: enough for what is refused before anything is sent."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield init_device_mesh("cpu", (number,))
    finally:
        torch.distributed.destroy_process_group()


def uneven_experts(folder: Path) -> None:
    with ranks_that_do_not_exist(3) as mesh:
        holdfast.shard_experts(rerouted(), mesh)


def save_pretrained_of_a_part(folder: Path) -> None:
    with ranks_that_do_not_exist(2) as mesh:
        model = rerouted()
        holdfast.shard_experts(model, mesh)
        model.save_pretrained(folder)


def sparsify_after_quantising(folder: Path) -> None:
    quanto = pytest.importorskip("optimum.quanto", reason="quanto is not installed")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    quanto.quantize(model, weights=quanto.qint8)
    holdfast.sparsify(model, experts=4, k=2, router="smoe")


def save_after_quantising(folder: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = rerouted()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    holdfast.save(model, folder / "out")


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def onnx_of(model: Any) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    model.set_experts_implementation("batched_mm")
    torch.onnx.export(Logits(model), (TOKENS,), dynamo=True, verbose=False)


def onnx_in_training(folder: Path) -> None:
    onnx_of(rerouted("symphony").train())


def onnx_of_a_capacity_limit(folder: Path) -> None:
    onnx_of(rerouted("capacity").eval())


def jit_trace(folder: Path) -> None:
    torch.jit.trace(Logits(rerouted().eval()), (TOKENS,))


def folder_that_exists(folder: Path) -> None:
    holdfast.save(rerouted(), folder / "saved")
    holdfast.save(rerouted(), folder / "saved")


def changed_file(folder: Path) -> None:
    holdfast.save(rerouted(), folder / "saved")
    weights = folder / "saved" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    holdfast.load(folder / "saved")


def save_while_wrapped(folder: Path) -> None:
    holdfast.save(torch.nn.DataParallel(rerouted()), folder / "saved")


def save_while_offloaded(folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    holdfast.save(accelerate.cpu_offload(rerouted()), folder / "saved")


def opened_without_holdfast(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    holdfast.save(rerouted(), folder / "saved")
    line = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={folder / 'saved'}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([*line, "--tasks", "hellaswag"], capture_output=True, text=True, env=environment)
    assert run.returncode == 1
    raise OSError(next(line for line in run.stderr.splitlines() if line.startswith("ValueError")))


def part_that_is_sparse(folder: Path) -> None:
    holdfast.sparsify(holdfast.sparsify(llava(), experts=4), experts=4)


def parts_of_a_text_model(folder: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    holdfast.sparsify(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), experts=4, parts="vision")


def attention_in_a_connector(folder: Path) -> None:
    holdfast.sparsify(llava(), experts=4, parts="connector", router="attention")


def similarity_on_packed_images(folder: Path) -> None:
    holdfast.sparsify(qwen(), experts=4, parts="vision", router="similarity")


def connector_of_one_map(folder: Path) -> None:
    holdfast.sparsify(smolvlm(), experts=4, parts="connector")


def audit_of_a_tower(folder: Path) -> None:
    holdfast.audit(holdfast.sparsify(llava(), experts=4, parts="vision"), [batch()])


# The pages with all refusals that they quote, in the order of the page.
REFUSALS: dict[str, list[Callable[[Path], None]]] = {
    "trainer": [reentrant_checkpointing, accumulation_of_logits, two_backwards],
    "trl": [reference_of_a_changed_model],
    "peft": [adapter_of_other_routers, adapter_for_each_row, ia3_where_attention_reads],
    "several-gpus": [uneven_experts, save_pretrained_of_a_part],
    "quantised": [sparsify_after_quantising, save_after_quantising],
    "export": [onnx_in_training, onnx_of_a_capacity_limit, jit_trace],
    "save-and-share": [folder_that_exists, changed_file, save_while_wrapped, save_while_offloaded],
    "lm-eval": [opened_without_holdfast],
    "vision-language": [
        part_that_is_sparse,
        parts_of_a_text_model,
        attention_in_a_connector,
        similarity_on_packed_images,
        connector_of_one_map,
        audit_of_a_tower,
    ],
}
CASES = [(page, number) for page, actions in REFUSALS.items() for number in range(len(actions))]
QUICK = [("trainer", 0), ("peft", 2), ("several-gpus", 0), ("save-and-share", 2)]


def quoted(page: str) -> list[str]:
    """Return the sentences of the column "the error" of a page."""
    found = tables((PAGES / f"{page}.md").read_text(encoding="utf-8"))
    return [row[1] for table in found if table.columns == ["you do", "the error"] for row in table.rows]


def said(error: BaseException | None) -> str:
    """Return the messages of an error and of those that caused it: exporters wrap ours in their own."""
    return "" if error is None else f"{error}\n{said(error.__cause__ or error.__context__)}"


@pytest.mark.parametrize(("page", "number"), quick_or_slow(CASES, QUICK))
def test_a_refusal_on_a_page_is_what_the_library_answers(page: str, number: int, tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError, torch.onnx.errors.OnnxExporterError, RuntimeError)) as refused:
        REFUSALS[page][number](tmp_path)
    assert quoted(page)[number] in said(refused.value)


def test_every_refusal_on_a_page_is_tried() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == REFUSALS.keys()
    for page, actions in REFUSALS.items():
        assert len(quoted(page)) == len(actions), page

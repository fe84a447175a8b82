"""The scripts of examples/ run, on tiny models, and do what they say. tests/integrations has the test of grpo_replay.py."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from auditing.audited_models import folder as folder
from auditing.audited_models import text as text
from auditing.audited_models import tokenizer
from tiny_dense import tiny_dense

import holdfast

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a script of the folder in this process and return what it prints."""

    def script(name: str, *arguments: object) -> str:
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return script


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    tiny_dense("llama").save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.mark.parametrize("name", [script.stem for script in sorted(FOLDER.glob("*.py"))])
@pytest.mark.every_combination
def test_help_begins_with_what_the_script_does(name: str, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("grpo_replay", "peft_lora"):
        pytest.importorskip("trl" if name == "grpo_replay" else "peft")
    with pytest.raises(SystemExit) as end:
        run(name, "--help")
    assert end.value.code == 0
    first = (FOLDER / f"{name}.py").read_text().splitlines()[0].removeprefix('"""')
    assert first in capsys.readouterr().out


@pytest.mark.parametrize("name", ["audit_and_mend", "upcycle_and_finetune", "peft_lora"])
def test_a_missing_text_is_refused_in_one_sentence(
    name: str, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "peft_lora":
        pytest.importorskip("peft")
    with pytest.raises(SystemExit):
        run(name, "model", tmp_path / "gone.txt", "--out", tmp_path / "out")
    assert capsys.readouterr().err.endswith("gone.txt is not a file.\n")


def test_a_text_that_is_too_short_is_refused(run: Any, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(SystemExit, match="give a longer one"):
        run("upcycle_and_finetune", dense, tmp_path / "short.txt", "--out", tmp_path / "out")


def test_a_mended_model_is_saved_with_its_router(run: Any, folder: Path, text: Path, tmp_path: Path) -> None:
    options = ["--tokens", 200, "--length", 32, "--router", "smooth[eps=0.3]", "--out", tmp_path / "mended"]
    printed = run("audit_and_mend", folder, text, *options)
    assert "experts_per_token: 2 -> " in printed and "noise.0.01" in printed
    stored = json.loads((tmp_path / "mended" / "config.json").read_text())["model_config"]["holdfast"]
    assert "smooth" in json.dumps(stored)
    ids = torch.arange(8)[None] + 5
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(holdfast.load(tmp_path / "mended")(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_an_upcycled_model_learns_from_the_loss_of_the_dense_one(run: Any, dense: Path, text: Path, tmp_path: Path) -> None:
    options = ["--experts", "4", "--steps", "8", "--batch", "2", "--length", "32", "--learning-rate", "1e-2", "--out"]
    printed = run("upcycle_and_finetune", dense, text, *options, tmp_path / "out")
    losses = [float(line.rsplit(maxsplit=1)[1]) for line in printed.splitlines() if "held-out loss" in line]
    model = transformers.LlamaForCausalLM.from_pretrained(dense)
    assert losses[-1] < losses[0] and len(losses) == 5
    assert sum(p.numel() for p in holdfast.load(tmp_path / "out").parameters()) > sum(p.numel() for p in model.parameters())


def test_the_router_passes_the_suite_with_nothing_skipped(run: Any) -> None:
    assert run("write_a_router").endswith(" checks passed, 0 skipped\n")


@pytest.mark.slow
def test_a_comparison_has_a_row_for_each_router(run: Any, text: Path, tmp_path: Path) -> None:
    options = ["--routers", "smoe,symphony", "--seeds", 2, "--steps", 3, "--out", tmp_path / "out"]
    printed = run("compare_on_your_data", text, *options)
    assert [line.split()[0] for line in printed.splitlines()[-3:-1]] == ["smoe", "symphony"]
    assert (tmp_path / "out" / "report.html").is_file()


def test_an_adapter_is_trained_and_loads_on_a_model_that_is_rerouted_alike(
    run: Any, folder: Path, text: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    printed = run("peft_lora", folder, text, "--steps", 6, "--batch", 2, "--length", 32, "--out", tmp_path / "adapter")
    first, last = (float(line.rsplit(maxsplit=1)[1]) for line in printed.splitlines() if ": loss " in line)
    assert last < first
    model = holdfast.reroute(transformers.AutoModelForCausalLM.from_pretrained(folder), "smooth")
    ids = torch.arange(8)[None] + 5
    without = model.eval()(input_ids=ids).logits  # the same router: only the adapter can make a difference
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert not torch.equal(adapted(input_ids=ids).logits, without)


def test_every_generated_token_has_a_number(run: Any, folder: Path, tmp_path: Path) -> None:
    model = holdfast.reroute(transformers.AutoModelForCausalLM.from_pretrained(folder), "smooth")
    holdfast.save(model, tmp_path / "saved", tokenizer=tokenizer())
    printed = run("generate", tmp_path / "saved", "the cat", "--tokens", 4)
    rows = printed.partition("before it flips\n")[2].splitlines()
    shares = [float(row.rsplit(maxsplit=1)[1]) for row in rows]
    assert len(shares) == 2 + 4 and all(0 <= share < 10 for share in shares)


def test_the_nearest_experts_are_merged_by_their_tokens() -> None:
    experts = holdfast.Experts(8, 8, 4)
    with torch.no_grad():
        for weight in experts.parameters():
            weight[3] = weight[1] + 0.01 * weight[3]  # a near copy, with a third of the tokens
        mean = [0.75 * weight[1] + 0.25 * weight[3] for weight in experts.parameters()]
    gone, cosines = importlib.import_module("merge_experts").merge(experts, [10.0, 30.0, 10.0, 10.0], 3)
    assert gone == [3] and cosines[0] > 0.99
    for weight, expected in zip(experts.parameters(), mean, strict=True):
        torch.testing.assert_close(weight[1], expected)

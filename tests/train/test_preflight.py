"""Before anything is trained or written, every router of a run is built on `meta`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train.conftest import MakeRecipe
from wording import assert_refused

import holdfast
from holdfast.routing import Context, Informer
from holdfast.routing.presets import REGISTRY
from holdfast.train import Comparison, Recipe, build_model, load_recipe, make_task, parse_routers
from holdfast.train.building import preflight
from holdfast.train.recipe import parse_router
from holdfast.train.training import SingleRun


class Reader(Informer):
    """An informer that reads token ids, which images do not have."""

    side = "token"
    reads = ("token_ids",)

    def __init__(self) -> None:
        super().__init__()

    def forward(self, gates: Tensor, logits: Tensor, tokens: Tensor, context: Context) -> Tensor:
        return gates


@pytest.fixture
def reader() -> Iterator[str]:
    holdfast.register("reader", stage="token", about="reads ids", paper="a test")(Reader)
    yield "reader"
    REGISTRY.remove("reader")


@pytest.fixture(scope="module")
def swin(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Return the shipped recipe of Swin-MoE, for a few images in the place of ImageNet, which need no warm-up."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    for split in ("train", "val"):
        for colour in ("red", "blue"):
            (folder / split / colour).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (40, 40), colour).save(folder / split / colour / f"{number}.png")
    return load_recipe("swin-moe", {"data.source": f"{folder}/", "training.warmup": 0})


@pytest.mark.parametrize(
    ("routers", "sentence"),
    [
        ("smoe,symphony,attention", "router 'attention' cannot be trained with this recipe: .* attends within windows"),
        ("smoe,xmoe,smoe[k=17]", "router 'smoe.k=17.' cannot be trained .* k is 17; it must be between 1 and .* 16"),
        ("smoe,similarity[tau=-1]", "router 'similarity.tau=-1.' cannot be trained with this recipe: tau"),
        ("smoe,smooth@3|symphony@10", "router 'smooth@3.symphony@10' cannot be trained .* there is no layer 10"),
    ],
)
def test_a_router_that_cannot_be_built_ends_a_comparison_before_anything_is_written(
    routers: str, sentence: str, swin: Recipe, tmp_path: Path
) -> None:
    comparison = Comparison(swin, parse_routers(routers), 1, tmp_path / "run")
    start = time.process_time()
    assert_refused(sentence, comparison.run)
    assert list(tmp_path.iterdir()) == []
    assert time.process_time() - start < 120  # seconds of the processor; training the first two routers would take days


def test_a_router_without_a_trainable_margin_ends_a_comparison_before_anything_is_written(
    tiny: MakeRecipe, tmp_path: Path
) -> None:
    recipe = tiny({"losses.margin": 0.1, "losses.radius": 0.05})
    comparison = Comparison(recipe, parse_routers("smoe,symphony,similarity"), 1, tmp_path / "run")
    assert_refused("router 'similarity' cannot be trained with this recipe: the margin loss cannot train", comparison.run)
    no_radius = Comparison(tiny({"losses.margin": 0.1}), parse_routers("smoe"), 1, tmp_path / "run")
    assert_refused("margin needs a radius", no_radius.run)
    assert list(tmp_path.iterdir()) == []


def test_several_workers_start_after_the_preflight(tiny: MakeRecipe, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="router 'ac@5' cannot be trained with this recipe: 'ac@5': there is no layer 5"):
        Comparison(tiny(), parse_routers("smoe,ac@5"), 1, tmp_path / "run").run(jobs=2)
    assert list(tmp_path.iterdir()) == []


def test_a_single_run_is_tested_in_the_same_way(tiny: MakeRecipe, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"router 'smoe\[k=99\]' cannot be trained with this recipe: k is 99"):
        SingleRun(tiny(), parse_router("smoe[k=99]"), 0, tmp_path / "run").run()
    assert list(tmp_path.iterdir()) == []


GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
HOPELESS: dict[str, tuple[dict[str, Any], str]] = {  # changes of a recipe of texts, and the start of the sentence
    "not divisible": ({"model.config.hidden_size": 63}, r"model\.config\.hidden_size is 63: no llama .* heads \(4\)"),
    "width 0": ({"model.config.hidden_size": 0}, r"model\.config\.hidden_size is 0: no llama"),
    "text as width": ({"model.config.hidden_size": "1e9"}, r"model\.config\.hidden_size is '1e9': no llama .* expected int"),
    "enormous width": ({"model.config.hidden_size": 10**9}, r".* GiB; .* \(.* model\.config\.hidden_size=1,000,000,000\)"),
    "misspelt": ({"model.config.hiden_size": 8}, r"model\.config\.hiden_size: unknown entry .* did you mean 'hidden_size'"),
    "no heads": ({"model.config.num_attention_heads": 0}, r"model\.config\.num_attention_heads is 0: no llama"),
    "empty network": ({"model.config.intermediate_size": 0}, r"model\.config\.intermediate_size is 0: .* would be 0 x 32"),
    "gpt2, no heads": (
        {"model.family": "gpt2", "model.config": {**GPT2, "n_head": 0}},
        r"model\.config\.n_head is 0: no gpt2",
    ),
    "wide experts": ({"sparse.hidden": 10**9}, r".* GiB; .* \(.* sparse\.hidden=1,000,000,000\)"),
    "large batch": ({"training.batch": 10**9}, r".* GiB; .* \(.* training\.batch=1,000,000,000\)"),
    "20 digits": ({"training.steps": 10**19}, r".*training\.steps is 10+, not a whole number from 1 to 10\^12"),
    "too many examples": ({"training.steps": 10**12, "training.accumulate": 10**12}, r"training\.steps .* 2\^63 examples"),
}


@pytest.mark.parametrize("case", HOPELESS)
def test_a_recipe_that_no_model_can_have_is_one_sentence_with_its_key(case: str, tiny: MakeRecipe, tmp_path: Path) -> None:
    changes, sentence = HOPELESS[case]
    assert_refused(f"^{sentence}", lambda: SingleRun(tiny(changes), parse_router("smoe"), 0, tmp_path / "run").run())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model.config.num_key_value_heads": 3}, r"model\.config\.num_key_value_heads is 3: the model cannot run"),
        ({"model.config.vocab_size": 10}, r"model\.config\.vocab_size is 10: the model cannot run"),
    ],
)
def test_a_config_that_only_a_forward_refutes_is_one_sentence_with_its_key(
    changes: dict[str, Any], sentence: str, tiny: MakeRecipe, tmp_path: Path
) -> None:
    small = {"num_hidden_layers": 1, "intermediate_size": 32, "hidden_size": 32}  # what is left out takes the family's value
    with pytest.raises(ValueError, match=sentence):
        SingleRun(tiny({"model.config": small, **changes}), parse_router("smoe"), 0, tmp_path / "run").run()


def test_a_mistake_that_is_not_in_the_config_keeps_its_traceback(
    tiny: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr("holdfast.train.training.TrainingLoop", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        SingleRun(tiny(), parse_router("smoe"), 0, tmp_path / "run").run()


def test_memory_that_runs_out_is_one_sentence(tiny: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        return torch.empty(2**60)

    monkeypatch.setattr("holdfast.train.training.TrainingLoop", fail)
    with pytest.raises(ValueError, match=r"memory ran out in training, with training\.batch=4"):
        SingleRun(tiny(), parse_router("smoe"), 0, tmp_path / "run").run()


def test_an_input_that_the_task_does_not_have_is_found_without_a_forward(
    reader: str, digits: MakeRecipe, tiny: MakeRecipe
) -> None:
    preflight(make_task(tiny()), [parse_router(reader)])
    with pytest.raises(ValueError, match=r"router 'reader' cannot be trained .* chooses experts by token id"):
        preflight(make_task(digits()), [parse_router("smoe"), parse_router(reader)])


def test_a_preflight_leaves_no_trace_in_the_task(tiny: MakeRecipe) -> None:
    task = make_task(tiny())
    preflight(task, parse_routers("smoe,symphony@1|ac[k=1]@0"))
    assert not any(tensor.is_meta for tensor in task.probe().values())
    assert torch.get_default_device().type == "cpu"
    assert not any(parameter.is_meta for parameter in task.initial_model().parameters())


@pytest.mark.parametrize("router", [*holdfast.list_routers(), "xmoe[k=1]@0|symphony+smooth", "smoe[k=99]", "smoe@odd"])
@pytest.mark.parametrize("images", [False, True])
def test_the_preflight_accepts_what_can_be_built(images: bool, router: str, tiny: MakeRecipe, digits: MakeRecipe) -> None:
    """And only that: the model on `meta` and the real one have the same layers, or raise errors for the same reason."""
    task, choice = make_task(digits() if images else tiny()), parse_router(router)
    reasons = []
    for build in (
        lambda: preflight(task, [choice]),
        lambda: build_model(task, choice.router, choice.options, seed=0, k=choice.k),
    ):
        try:
            build()
        except ValueError as problem:
            reasons.append(str(problem).removeprefix(f"router {router!r} cannot be trained with this recipe: "))
    if reasons and "it reads" in reasons[0]:  # what only a forward of the real model would find
        reasons = reasons[1:]
    assert len(set(reasons)) == len(reasons) / 2

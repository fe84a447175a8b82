"""Before anything is trained or written, every router of a run is built on `meta`."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast.routing import Context, Informer
from holdfast.routing.presets import REGISTRY
from holdfast.train import Comparison, Recipe, build_model, load_recipe, make_task, parse_routers
from holdfast.train.preflight import preflight
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
    start = time.monotonic()
    with pytest.raises(ValueError, match=sentence) as caught:
        comparison.run()
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert time.monotonic() - start < 60  # seconds; training the first two routers would take days


def test_several_workers_start_after_the_preflight(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="router 'ac@5' cannot be trained with this recipe: 'ac@5': there is no layer 5"):
        Comparison(tiny(), parse_routers("smoe,ac@5"), 1, tmp_path / "run").run(jobs=2)
    assert list(tmp_path.iterdir()) == []


def test_a_single_run_is_tested_in_the_same_way(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"router 'smoe\[k=99\]' cannot be trained with this recipe: k is 99"):
        SingleRun(tiny(), parse_router("smoe[k=99]"), 0, tmp_path / "run").run()
    assert list(tmp_path.iterdir()) == []


def test_an_input_that_the_task_does_not_have_is_found_without_a_forward(
    reader: str, digits: Callable[..., Recipe], tiny: Callable[..., Recipe]
) -> None:
    preflight(make_task(tiny()), [parse_router(reader)])
    with pytest.raises(ValueError, match=r"router 'reader' cannot be trained .* chooses experts by token id"):
        preflight(make_task(digits()), [parse_router("smoe"), parse_router(reader)])


def test_a_preflight_leaves_no_trace_in_the_task(tiny: Callable[..., Recipe]) -> None:
    task = make_task(tiny())
    preflight(task, parse_routers("smoe,symphony@1|ac[k=1]@0"))
    assert not any(tensor.is_meta for tensor in task.probe().values())
    assert torch.get_default_device().type == "cpu"
    assert not any(parameter.is_meta for parameter in task.initial_model().parameters())


@pytest.mark.parametrize("router", [*holdfast.list_routers(), "xmoe[k=1]@0|symphony+smooth", "smoe[k=99]", "smoe@odd"])
@pytest.mark.parametrize("images", [False, True])
def test_the_preflight_accepts_what_can_be_built(
    images: bool, router: str, tiny: Callable[..., Recipe], digits: Callable[..., Recipe]
) -> None:
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

"""Audits, geometry and mismatch of a model on another device: no operation mixes devices.

The device is a stand-in (`other_device.py`), so these tests need no GPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from auditing.audited_models import ALL, batches, sparse, texts, tokenizer
from other_device import MixedDevices, other_device
from tiers import quick_or_slow
from tiny import tiny
from tiny_dense import CONFIGS, inputs, tiny_dense
from torch import Tensor

import holdfast
from holdfast.data import LabelledText

MIXED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "indices": lambda here, there: here[there.argsort(0)[:, 0]],
    "a mask": lambda here, there: here[there > 0],
    "a sum": lambda here, there: here + there,
    "a sum in place": lambda here, there: here.add_(there),
    "an element": lambda here, there: here * there.sum(),
    "an element in place": lambda here, there: here.sum().add_(there.sum()),
    "a product": lambda here, there: here @ there.t(),
    "a list": lambda here, there: torch.cat([here, there]),
    "places": lambda here, there: there.gather(1, here.argsort(1)),
    "values of indices": lambda here, there: there.index_put((torch.tensor([0]),), here[:1]),
    "random numbers": lambda here, there: torch.randn(2, generator=torch.Generator(), device=there.device),
    "numpy": lambda here, there: there.numpy(),
}


@pytest.mark.parametrize("mixed", MIXED)
def test_the_stand_in_refuses_what_a_gpu_refuses(mixed: str) -> None:
    with other_device() as device, pytest.raises(MixedDevices):
        MIXED[mixed](torch.rand(3, 3), torch.rand(3, 3).to(device))


def text_classifier(router: str = "smoe") -> Any:
    """Return a BERT with experts that classifies the words of `audited_models`."""
    config = transformers.BertConfig(**{**CONFIGS["bert"], "num_key_value_heads": 4, "num_labels": 3})
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    return holdfast.sparsify(model, experts=4, router=router).eval()


def labelled() -> list[LabelledText]:
    return [LabelledText(text, number % 3) for number, text in enumerate(texts(3, words=6))]


AUDITED: dict[str, tuple[Callable[[], Any], Callable[[], list[Any]]]] = {
    "a classifier of texts": (text_classifier, labelled),
    "a language model": (lambda: sparse("ac"), lambda: texts(2, words=7)),
    "a native language model": (lambda: tiny("mixtral"), lambda: texts(2, words=7)),
    "a model with groups": (lambda: tiny("deepseek_v3"), lambda: list(batches(1))),
    "an image model": (lambda: holdfast.sparsify(tiny_dense("vit"), experts=4, k=2), lambda: [inputs("vit")]),
    "smooth": (lambda: sparse("smooth"), lambda: list(batches(1))),
    "symphony": (lambda: sparse("symphony"), lambda: list(batches(1))),
    "similarity": (lambda: sparse("similarity"), lambda: list(batches(1))),
}
QUICK = ("a classifier of texts",)


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_or_slow(AUDITED, QUICK))
def test_an_audit_mixes_no_devices(name: str) -> None:
    make, data = AUDITED[name]
    with other_device() as device:
        found = holdfast.audit(make().eval().to(device), data(), tokenizer=tokenizer(), perturb=ALL, rate=0.5, batch=2)
    assert not [skipped for skipped in found.skipped.values() if "failed" in skipped.reason]
    assert found.overall.loss


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smoe", "ac", "smooth", "mixtral", "deepseek_v3"])
def test_geometry_mixes_no_devices(name: str) -> None:
    model = tiny(name) if name in ("mixtral", "deepseek_v3") else sparse(name)
    with other_device() as device:
        found = holdfast.measure_geometry(model.to(device), list(batches(1)), walking=8, walks=2, pictures=1)
    assert found.layers or found.refused


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smoe", "mixtral"])
def test_mismatch_mixes_no_devices(name: str) -> None:
    model = tiny(name) if name == "mixtral" else sparse(name)
    with other_device() as device:
        assert holdfast.measure_mismatch(model.to(device), list(batches(1)), draws=100).rows

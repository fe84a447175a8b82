"""Which masks transformers builds in a training step on a GPU depends on the names of the inputs, not on their values."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers.utils import import_utils

from holdfast.train.step import masks_without_waiting

LENGTH = 12


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).eval()


def inputs(*names: str) -> dict[str, Tensor]:
    ids = torch.randint(1, 32, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 9:] = 0
    packed = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1)
    return {"input_ids": ids} | {
        name: value for name, value in (("attention_mask", mask), ("position_ids", packed)) if name in names
    }


@pytest.mark.parametrize("names", [(), ("attention_mask",), ("position_ids",), ("attention_mask", "position_ids")])
def test_outputs_are_the_same_and_transformers_is_as_before(names: tuple[str, ...]) -> None:
    given, dense = inputs(*names), model()
    functions = masking_utils.find_packed_sequence_indices, import_utils.is_cuda_stream_capturing
    with torch.no_grad():
        expected = dense(**given).logits
        with masks_without_waiting([given]):
            assert (masking_utils.find_packed_sequence_indices is functions[0]) == ("position_ids" in names)
            assert import_utils.is_cuda_stream_capturing() == ("attention_mask" in names)
            found = dense(**given).logits
    torch.testing.assert_close(found, expected)
    assert (masking_utils.find_packed_sequence_indices, import_utils.is_cuda_stream_capturing) == functions


def test_no_value_is_read_without_a_mask_or_position_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> bool:
        raise AssertionError("a value was read")

    given, dense = inputs(), model()
    monkeypatch.setattr(Tensor, "__bool__", refuse)
    with torch.no_grad():
        with masks_without_waiting([given]):
            dense(**given)
        with pytest.raises(AssertionError, match="a value was read"):
            dense(**given)


def test_an_error_inside_leaves_transformers_as_before() -> None:
    before = masking_utils.find_packed_sequence_indices
    with pytest.raises(RuntimeError, match="stop"), masks_without_waiting([inputs()]):
        raise RuntimeError("stop")
    assert masking_utils.find_packed_sequence_indices is before


@pytest.mark.parametrize("names", [(), ("attention_mask",)])
def test_a_compiled_step_has_a_mask_only_if_there_is_one_without_a_compiler(names: tuple[str, ...]) -> None:
    """transformers would build one under a compiler in any case, before torch 2.14; and each step would compile again."""
    torch.compiler.reset()
    given, dense, masks = inputs(*names), model(), []

    def collect(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            if "scaled_dot_product_attention" in str(node.target):
                masks.append(node.kwargs["attn_mask"])
        return graph.forward

    compiled: Any = torch.compile(dense, backend=collect, dynamic=False)
    with torch.no_grad():
        expected = dense(**given).logits
        for _ in range(2):
            with masks_without_waiting([given]):
                torch.testing.assert_close(compiled(**given).logits, expected)
    assert [mask is not None for mask in masks] == [bool(names)]

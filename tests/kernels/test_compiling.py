"""Kernels compile for a GPU also where an integer is 1: Triton makes it a constant, and its interpreter does not."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from holdfast.kernels.balance import triton as balance_triton
from holdfast.kernels.dispatch import triton as dispatch_triton
from holdfast.kernels.dispatch import triton_rows
from holdfast.kernels.finite import triton as finite_triton
from holdfast.kernels.plain_top_k import triton as plain_triton

B16, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"
SORTED = {"slots": I64, "order": I64, "used": I32, "offsets": I32, "counts": I32, "totals": I32}
ROUTED = {"chosen": I64, "layer": "*u8", "name": "*u8", "found": I32, "tiny": "fp32", "coefficient": "fp32", "real": "*i1"}
NUMBERS = ("size", "rows", "experts", "k", "tokens", "width", "blocks", "most", "slots")

# The kernel, the types of its tensors beyond SORTED and ROUTED, and its constants.
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "route": (
        plain_triton._route,
        dict.fromkeys(("logits", "gates", "weights", "sums"), F32),
        {"CHECKED": True, "BALANCED": True, "LETTERS": 128, "ROWS": 16, "EXPERTS": 16, "CHUNK": 16, "FEW": True},
    ),
    "gradient of route": (
        plain_triton._gradient,
        {**dict.fromkeys(("logits", "of_logits", "of_weights", "of_loss", "slopes"), F32), "out": B16},
        {"HAS_LOGITS": True, "HAS_WEIGHTS": True, "HAS_LOSS": True, "PARTS": 2, "ROWS": 16, "EXPERTS": 16},
    ),
    "balance": (balance_triton._loss, dict.fromkeys(("sums", "loss", "slopes"), F32), {"R": 64, "E": 16}),
    "finite": (finite_triton._check, {"scores": F32}, {"MASKED": True, "LETTERS": 128, "BLOCK": 1024}),
    "place": (dispatch_triton._place, {"rows": I64}, {"SPAN": 4, "BINS": 16, "BLOCK": 64}),
    "gather": (
        dispatch_triton._gather,
        {"tokens": B16, "out": B16, "dots": F32, "bias": F32},
        {"DOTS": True, "K": 2, "SLOTS": 2, "FEW": True, "BLOCK": 128, "BINS": 16},
    ),
    "scale and dot": (
        triton_rows._scale_and_dot,
        {"grad": B16, "rows": B16, "weights": F32, "scaled": B16, "dots": F32},
        {"RELU": True, "ADDED": True, "BLOCK": 128},
    ),
    "add bias": (triton_rows._add_bias, {"rows": B16, "bias": F32}, {"RELU": True, "BINS": 16, "BLOCK": 128}),
}


@pytest.mark.parametrize("ones", [False, True], ids=["many", "one"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles(name: str, ones: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if torch.version.hip is not None:
        pytest.skip("compiles for Nvidia's GPUs")
    kernel, tensors, constants = KERNELS[name]
    types = {**SORTED, **ROUTED, **tensors}
    is_count = {"slots"} if name == "place" else set()  # a number there, a tensor elsewhere
    signature: dict[str, str] = {}
    fixed = dict(constants)
    for parameter in kernel.kernel.arg_names:
        is_number = parameter in NUMBERS and (parameter not in types or parameter in is_count)
        signature[parameter] = "constexpr" if parameter in constants else "i32" if is_number else types[parameter]
        if is_number and ones:
            signature[parameter], fixed[parameter] = "constexpr", 1
    source = ASTSource(kernel.kernel, signature=signature, constexprs=fixed)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]

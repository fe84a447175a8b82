"""Kernels compile for a GPU also where an integer is 1: Triton makes it a constant, and its interpreter does not."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from holdfast.kernels.balance import triton as balance_triton
from holdfast.kernels.finite import triton as finite_triton
from holdfast.kernels.grouped import triton as grouped_triton
from holdfast.kernels.operators import Kernel

B16, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"
SORTED = {"slots": I64, "order": I64, "used": I32, "offsets": I32, "counts": I32, "totals": I32, "chosen": I64}
PRODUCTS = {"weight": B16, "left": B16, "right": B16, "tile_expert": I64, "tile_row": I64, "gate_up": B16}
ROUTED = {"layer": "*u8", "name": "*u8", "found": I32, "tiny": "fp32", "real": "*i1"}
ALWAYS = {**SORTED, **PRODUCTS, **ROUTED, **dict.fromkeys(("weights", "bias", "dots", "scores", "sums", "slopes"), F32)}
NUMBERS: tuple[str, ...] = ("size", "rows", "experts", "k", "tokens", "width", "blocks", "most", "slots", "inner", "height")
NUMBERS += ("stride_expert", "stride_inner", "stride_width")
TILES = {"TILE": 64, "DEPTH": 32}
GATES, ROWS = dict.fromkeys(("grad", "gates", "out"), F32), dict.fromkeys(("grad", "rows", "out"), B16)
MOVED = {"K": 2, "SLOTS": 2, "FEW": True, "BLOCK": 128}

# The kernel, the types of its tensors beyond ALWAYS, and its constants.
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "balance": (balance_triton._loss, {"loss": F32}, {"R": 64, "E": 16}),
    "sums of balance": (balance_triton._sums, {"gates": F32}, {"K": 2, "MASKED": True, "T": 16, "E": 16}),
    "gradient of balance": (balance_triton._gradient, GATES, {"MASKED": True, "T": 16, "E": 16}),
    "finite": (finite_triton._check, {}, {"MASKED": True, "LETTERS": 128, "BLOCK": 1024}),
    "count": (grouped_triton._count, {}, {"BINS": 16, "BLOCK": 64}),
    "add up": (grouped_triton._add_up, {}, {"SPAN": 64}),
    "place after add up": (grouped_triton._place, {"rows": I64}, {"SPAN": 0, "BINS": 16, "BLOCK": 64}),
    "place": (grouped_triton._place, {"rows": I64}, {"SPAN": 4, "BINS": 16, "BLOCK": 64}),
    "gather": (grouped_triton._gather, {"tokens": B16, "out": B16}, MOVED),
    "combine": (grouped_triton._combine, {"rows": B16, "out": B16}, {"WEIGHTED": True, "BINS": 16, **MOVED}),
    "sum rows": (grouped_triton._sum_rows, {"rows": B16, "out": F32}, {"WEIGHTED": True, "ROWS": 32, "COLUMNS": 64}),
    "add bias": (grouped_triton._add_bias, {"rows": B16}, {"BINS": 16, "BLOCK": 128}),
    "add bias dots": (grouped_triton._add_bias_dots, {"grad": B16}, {"BINS": 16, "BLOCK": 128}),
    "glu": (grouped_triton._glu, {"out": B16}, {"NAME": "silu", "BLOCK": 128}),
    "backward of rows": (grouped_triton._rows_backward, ROWS, {"NAME": "", "BLOCK": 128}),
    "backward of glu": (grouped_triton._rows_backward, ROWS, {"NAME": "silu", "BLOCK": 128}),
    "product": (grouped_triton._mm, {"rows": B16, "out": B16}, TILES),
    "outer product": (grouped_triton._outer, {"out": B16}, TILES),
}


def test_every_kernel_of_a_layer_is_compiled() -> None:
    modules = balance_triton, grouped_triton, finite_triton
    found = {value for module in modules for value in vars(module).values() if isinstance(value, Kernel)}
    assert found == {kernel for kernel, _, _ in KERNELS.values()}


@pytest.mark.parametrize("ones", [False, True], ids=["many", "one"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles(name: str, ones: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if torch.version.hip is not None:
        pytest.skip("compiles for Nvidia's GPUs")
    kernel, tensors, constants = KERNELS[name]
    types = {**ALWAYS, **tensors}
    is_count = {"slots"} if kernel in (grouped_triton._place, grouped_triton._count) else set()  # elsewhere a tensor
    signature: dict[str, str] = {}
    fixed = dict(constants)
    for parameter in kernel.compiler.arg_names:
        is_number = parameter in NUMBERS and (parameter not in types or parameter in is_count)
        signature[parameter] = "constexpr" if parameter in constants else "i32" if is_number else types[parameter]
        if is_number and ones:
            signature[parameter], fixed[parameter] = "constexpr", 1
    source = ASTSource(kernel.compiler, signature=signature, constexprs=fixed)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]

"""`Experts` against the naive loop: outputs and every gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import quick_or_slow
from torch import Tensor
from wording import assert_refused

from holdfast import Experts
from holdfast.kernels.grouped import naive

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}  # four roundings: CPUs round products differently


def choose(tokens: int, experts: int, slots: int, *, unused: float = 0.0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Different experts for each token, the sentinel where there are more slots than experts and at random besides."""
    order = torch.rand(tokens, experts).argsort(-1)[:, :slots]
    chosen = torch.full((tokens, slots), experts)
    chosen[:, : order.shape[1]] = order
    weights = torch.rand(tokens, slots) + 0.1
    chosen[torch.rand(tokens, slots) < unused] = experts
    return chosen.to(device), weights.where(chosen < experts, 0.0).to(device)


def gradients(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def assert_equal_to_naive(experts: Experts, tokens: Tensor, chosen: Tensor, weights: Tensor) -> None:
    """Relative to the norm of each result; the reference runs in float32 on the same values.

    In bfloat16 a weight's gradient is a product of two rounded vectors, of which little may be left: relative to their
    lengths, then.
    """
    tokens, weights = tokens.requires_grad_(), weights.requires_grad_()
    grad = torch.randn(len(tokens), experts.out, device=tokens.device, dtype=tokens.dtype)
    fast = gradients(experts(tokens, chosen, weights), [tokens, weights, *experts.parameters()], grad)

    named = {name: p.detach().cpu().float().requires_grad_() for name, p in experts.named_parameters()}
    up = next(name for name in named if name.endswith("up_proj"))
    tokens_cpu, weights_cpu = (x.detach().cpu().float().requires_grad_() for x in (tokens, weights))
    matrices = named[up], named["down_proj"], named.get(f"{up}_bias"), named.get("down_proj_bias")
    slow_out = naive.experts(tokens_cpu, chosen.cpu(), weights_cpu, *matrices, experts.activation, experts.gated)
    slow_inputs = [tokens_cpu, weights_cpu, *named.values()]
    slow_out = slow_out + 0 * sum(x.sum() for x in slow_inputs)  # a graph even where nothing was chosen
    slow_grads = torch.autograd.grad(slow_out, slow_inputs, grad.cpu().float())
    lengths = (slow_out.detach().norm(dim=1) * grad.cpu().float().norm(dim=1)).norm()
    for index, (got, expected) in enumerate(zip(fast, [slow_out.detach(), *slow_grads], strict=True)):
        assert got.shape == expected.shape
        assert got.isfinite().all()
        error = (got.cpu().float() - expected).norm()
        cancels = index == 2 and tokens.dtype == torch.bfloat16
        size = torch.maximum(expected.norm(), lengths) if cancels else expected.norm()
        assert error <= TOLERANCE[tokens.dtype] * size, f"{error / size:.1e} off"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [0, 1, 63, 1000])
@pytest.mark.parametrize("slots", quick_or_slow([1, 2, 5], [1, 2]))
@pytest.mark.parametrize("experts", quick_or_slow([1, 2, 16, 64], [1, 2, 16]))
def test_experts_equal_the_naive_loop(experts: int, slots: int, tokens: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(experts * 1000 + slots * 100 + tokens)
    module = Experts(24, 40, experts, device=device, dtype=dtype)
    chosen, weights = choose(tokens, experts, slots, device=device)
    assert_equal_to_naive(module, torch.randn(tokens, 24, device=device, dtype=dtype), chosen, weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    "activation",
    ["silu", "gelu", "gelu_tanh", "gelu_new", "relu", "relu2", torch.sin],
    ids=lambda a: a if isinstance(a, str) else "callable",
)
def test_every_variant_equals_the_naive_loop_with_ragged_slots(
    activation: str, bias: bool, gated: bool, dtype: torch.dtype, device: str
) -> None:
    module = Experts(60, 20, 6, activation=activation, gated=gated, bias=bias, device=device, dtype=dtype)
    chosen, weights = choose(63, 6, 4, unused=0.4, device=device)
    chosen[chosen == 2] = 6  # no token selects expert 2
    weights = weights.where(chosen < 6, 0.0)
    assert_equal_to_naive(module, torch.randn(63, 60, device=device, dtype=dtype), chosen, weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dim", "hidden"), [(20, 40), (24, 36), (21, 35)])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_rows_of_any_width_are_right_in_half_precision(gated: bool, dim: int, hidden: int, device: str) -> None:
    """Torch's grouped product wants rows of whole 16 bytes, or leaves gaps between those it makes."""
    torch.manual_seed(dim)
    module = Experts(dim, hidden, 5, gated=gated, device=device, dtype=torch.bfloat16)
    chosen, weights = choose(70, 5, 2, device=device)
    assert_equal_to_naive(module, torch.randn(70, dim, device=device, dtype=torch.bfloat16), chosen, weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("out", [8, 21, 56])
@pytest.mark.parametrize(("gated", "bias"), [(False, True), (True, False)])
def test_outputs_may_have_another_width_than_tokens(
    gated: bool, bias: bool, out: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(out)
    how: dict[str, Any] = {"gated": gated, "bias": bias, "activation": "gelu", "device": device, "dtype": dtype}
    module = Experts(24, 40, 4, out=out, **how)
    assert module.down_proj.shape == (4, out, 40)
    chosen, weights = choose(63, 4, 2, unused=0.3, device=device)
    tokens = torch.randn(63, 24, device=device, dtype=dtype)
    assert_equal_to_naive(module, tokens, chosen, weights)
    gates = torch.eye(4, device=device)[[2, 0, 3]]  # one expert for each sequence
    merged = module.run_merged(tokens.detach().view(3, 21, 24), gates)
    of_each = torch.tensor([2, 0, 3], device=device).repeat_interleave(21).unsqueeze(1)
    single = module(tokens.detach(), of_each, torch.ones(63, 1, device=device)).view(3, 21, out)
    torch.testing.assert_close(merged, single, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_expert_on_a_cpu_rounds_as_linear_layers_do(dtype: torch.dtype) -> None:
    """A bias is added before a product is rounded; sums of 768 and 1024 products are made in parts, which are rounded."""
    torch.manual_seed(0)
    module, tokens = Experts(768, 1024, 2, gated=False, bias=True, activation="gelu_new", dtype=dtype), torch.randn(64, 768)
    first = {name: parameter[0] for name, parameter in module.named_parameters()}
    hidden = F.linear(tokens.to(dtype), first["up_proj"], first["up_proj_bias"])
    expected = F.linear(module.activation(hidden), first["down_proj"], first["down_proj_bias"])
    found = module(tokens.to(dtype), torch.zeros(64, 1, dtype=torch.int64), torch.ones(64, 1))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_no_slot_used_at_all_gives_zero_and_zero_gradients(bias: bool, device: str) -> None:
    module = Experts(16, 8, 4, bias=bias, device=device)
    tokens = torch.randn(5, 16, device=device, requires_grad=True)
    weights = torch.zeros(5, 3, device=device, requires_grad=True)
    out = module(tokens, torch.full((5, 3), 4, device=device), weights)
    out.sum().backward()
    for value in (out, tokens.grad, weights.grad, *(p.grad for p in module.parameters())):
        assert value is not None and torch.equal(value, torch.zeros_like(value))


@pytest.mark.parametrize("device", DEVICES)
def test_an_expert_that_no_token_selected_gets_a_zero_gradient(device: str) -> None:
    module = Experts(16, 8, 4, bias=True, device=device, dtype=torch.bfloat16)
    tokens = torch.randn(7, 16, device=device, dtype=torch.bfloat16)
    module(tokens, torch.tensor([[0, 3]] * 7, device=device), torch.ones(7, 2, device=device)).sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad[1:3], torch.zeros_like(parameter.grad[1:3]))
        assert parameter.grad[0].abs().sum() > 0 and parameter.grad[3].abs().sum() > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_of_zero_in_a_used_slot_still_gets_its_gradient(device: str) -> None:
    module = Experts(16, 8, 4, device=device)
    weights = torch.zeros(7, 2, device=device, requires_grad=True)
    module(torch.randn(7, 16, device=device), torch.tensor([[0, 3]] * 7, device=device), weights).sum().backward()
    assert weights.grad is not None and (weights.grad != 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_experts_get_no_gradient_and_the_tokens_still_do(device: str) -> None:
    module = Experts(16, 8, 4, device=device)
    chosen, weights = choose(9, 4, 2, device=device)
    tokens = torch.randn(9, 16, device=device, requires_grad=True)
    module(tokens, chosen, weights).sum().backward()
    expected = tokens.grad.clone()  # type: ignore[union-attr]
    tokens.grad = None
    module.requires_grad_(False).zero_grad()
    module(tokens, chosen, weights).sum().backward()
    assert torch.equal(tokens.grad, expected)  # type: ignore[arg-type]
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_runs_experts_in_its_dtype_and_gradients_in_theirs(device: str) -> None:
    module = Experts(16, 8, 4, bias=True, device=device)
    chosen, weights = choose(9, 4, 2, device=device)
    tokens = torch.randn(9, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = module(tokens, chosen, weights)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(tokens, chosen, weights), rtol=5e-2, atol=2e-2)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_may_name_an_expert_twice(device: str) -> None:
    chosen, weights = torch.tensor([[1, 1], [0, 3]], device=device), torch.rand(2, 2, device=device)
    assert_equal_to_naive(Experts(16, 8, 4, bias=True, device=device), torch.randn(2, 16, device=device), chosen, weights)


@pytest.mark.parametrize("device", DEVICES)
def test_an_activation_with_parameters_learns_from_used_rows_only(device: str) -> None:
    activation = torch.nn.PReLU(device=device)
    module = Experts(16, 8, 4, activation=activation, device=device)
    chosen, weights = choose(50, 4, 3, unused=0.5, device=device)
    module(torch.randn(50, 16, device=device), chosen, weights).sum().backward()
    assert activation.weight.grad is not None
    assert 0 < activation.weight.grad.abs() < 1e3


def test_parameters_have_the_hugging_face_names_and_shapes() -> None:
    gated = {name: tuple(p.shape) for name, p in Experts(6, 5, 3, bias=True).named_parameters()}
    biases = {"gate_up_proj_bias": (3, 10), "down_proj_bias": (3, 6)}
    assert gated == {"gate_up_proj": (3, 10, 6), "down_proj": (3, 6, 5), **biases}
    plain = {name: tuple(p.shape) for name, p in Experts(6, 5, 3, gated=False).named_parameters()}
    assert plain == {"up_proj": (3, 5, 6), "down_proj": (3, 6, 5)}


def test_weights_mean_what_they_mean_in_transformers() -> None:
    """Same parameters, same routes: the output of transformers' own eager experts."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    config = transformers.OlmoeConfig(hidden_size=16, intermediate_size=8, num_experts=4)
    config._experts_implementation = "eager"
    theirs, ours = OlmoeExperts(config), Experts(16, 8, 4)
    theirs.load_state_dict(ours.state_dict())
    chosen, weights = choose(9, 4, 2)
    tokens = torch.randn(9, 16)
    torch.testing.assert_close(ours(tokens, chosen, weights), theirs(tokens, chosen, weights))


def test_wrong_shapes_are_one_clear_sentence() -> None:
    wrong = (((5, 7), (5, 2), (5, 2), "7"), ((5, 8), (5, 2), (5, 3), "weights"), ((5, 8), (4, 2), (4, 2), "T = 5"))
    for tokens, chosen, weights, says in wrong:
        with pytest.raises(ValueError, match=says):
            Experts(8, 4, 3)(torch.randn(tokens), torch.zeros(chosen, dtype=torch.long), torch.rand(weights))


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_expert_that_does_not_exist_is_one_clear_sentence(wrong: int) -> None:
    assert_refused(r"0 to 2.* 3", Experts(8, 4, 3), torch.randn(1, 8), torch.tensor([[wrong]]), torch.ones(1, 1))


def test_an_unknown_activation_suggests_the_nearest() -> None:
    assert_refused(r"'sillu'.*'silu'", Experts, 8, 4, 3, activation="sillu")


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("keeps", [True, False], ids=["own parameters", "one parameter"])
def test_experts_with_biases_run_under_fsdp(gated: bool, keeps: bool, tmp_path: Path) -> None:
    """FSDP1 replaces parameters by views of one, which are tensors without the class of a parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    experts = Experts(16, 8, 4, bias=True, gated=gated, activation="relu")
    tokens, (chosen, weights) = torch.randn(9, 16, requires_grad=True), choose(9, 4, 2)
    expected = torch.autograd.grad(experts(tokens, chosen, weights).square().sum(), tokens)[0]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = FullyShardedDataParallel(experts, device_id=torch.device("cpu"), use_orig_params=keeps)
        sharded(tokens, chosen, weights).square().sum().backward()
        torch.testing.assert_close(tokens.grad, expected)
    finally:
        torch.distributed.destroy_process_group()


def test_an_activation_that_was_replaced_is_called() -> None:
    experts, (chosen, weights) = Experts(24, 40, 5, activation="relu"), choose(33, 5, 3)
    tokens = torch.randn(33, 24)
    before = experts(tokens, chosen, weights)
    experts.activation = torch.sin
    found = experts(tokens, chosen, weights)
    assert not torch.allclose(found, before)
    experts.activation = torch.nn.functional.relu
    assert torch.equal(experts(tokens, chosen, weights), before)


def test_gradients_can_be_batched() -> None:
    experts, (chosen, weights) = Experts(6, 4, 3), choose(5, 3, 2)
    tokens = torch.randn(5, 6, requires_grad=True)
    jacobians = [
        torch.autograd.functional.jacobian(lambda rows: experts(rows, chosen, weights), tokens, vectorize=vectorize)
        for vectorize in (True, False)
    ]
    torch.testing.assert_close(*jacobians)

"""The numerical certificate: against real products in short types, against products summed one by one, and by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from certificates.certified_routers import build, generator, sigmoid_gate
from certificates.probing import native, sets_of
from certificates.rounding import rounding_errors
from torch import Tensor

from holdfast.certificates import Gate, certify, undecided
from holdfast.certificates.arithmetic import likely_gamma
from holdfast.routing import Clustered, Context
from holdfast.routing.bounds import gamma, unit

SHORT = [torch.bfloat16, torch.float16]


def example(tokens: int, dim: int, experts: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    source = generator(seed)
    weight = torch.randn(experts, dim, generator=source) / math.sqrt(dim)
    return torch.randn(tokens, dim, generator=source).to(dtype), weight.to(dtype)


def summed_in(dtype: torch.dtype, tokens: Tensor, weight: Tensor, backwards: bool) -> Tensor:
    """(T,E): every product and every sum rounded to the dtype, one after another."""
    rows, columns = tokens.to(dtype), weight.to(dtype)
    total = torch.zeros(len(rows), len(columns), dtype=dtype)
    for q in range(rows.shape[1] - 1, -1, -1) if backwards else range(rows.shape[1]):
        total = total + rows[:, q : q + 1] * columns[:, q]
    return total.double()


def flips_and_alarm(gate: Gate, tokens: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return how many tokens flip between float32 and the dtype, and how many are undecided; fail if a decided one flips."""
    alarm = undecided(gate, tokens, dtype)
    flips = (native(gate)(tokens) != native(gate, dtype)(tokens)).any(1)
    assert not (flips & ~alarm).any()
    return int(flips.sum()), int(alarm.sum())


def test_units_and_gammas_by_hand() -> None:
    assert unit(torch.float32) == 2.0**-24 and unit(torch.bfloat16) == 2.0**-8 and unit(torch.float16) == 2.0**-11
    assert gamma(3, 0.1) == pytest.approx(0.3 / 0.7) and gamma(256, 2.0**-8) == math.inf and gamma(300, 2.0**-8) == math.inf
    assert likely_gamma(4096, 2.0**-24) == pytest.approx(8 * 64 * 2.0**-24, rel=1e-3)
    assert likely_gamma(4096, 2.0**-24) < gamma(4096, 2.0**-24) / 7
    assert likely_gamma(4, 2.0**-24) == gamma(4, 2.0**-24)


def test_the_error_of_the_specification_by_hand() -> None:
    """x = (1, -2, 3), w = (4, 5, 6), all bfloat16 numbers: gamma_3 (4 + 10 + 18)."""
    gate, tokens = Gate(torch.tensor([[4.0, 5.0, 6.0], [0.0, 0.0, 1.0]]), 1), torch.tensor([[1.0, -2.0, 3.0]])
    errors = rounding_errors(gate, tokens, torch.bfloat16, accumulate=torch.bfloat16)
    u = 2.0**-8
    assert errors.tolist() == [pytest.approx([3 * u / (1 - 3 * u) * 32, 3 * u / (1 - 3 * u) * 3])]
    # Summed in float32 and stored in bfloat16: half a unit of the result, 12, and next to nothing.
    errors = rounding_errors(gate, tokens, torch.bfloat16)
    assert errors.tolist() == [pytest.approx([u * 12, u * 3], rel=1e-3)]


def test_a_token_is_undecided_up_to_the_sum_of_two_errors() -> None:
    """Logits 8 and 8 - t: err is 2^-8 8 each in bfloat16, so margins of about 2^-4 and less are undecided."""
    gate = Gate(torch.tensor([[8.0, 0.0], [8.0, -1.0]]), 1)
    tokens = torch.tensor([[1.0, 1.01 * 2.0**-4], [1.0, 0.99 * 2.0**-4], [1.0, 2.0**-6], [1.0, 0.0]])
    assert undecided(gate, tokens, torch.bfloat16).tolist() == [False, True, True, True]
    assert undecided(gate, tokens, torch.float32).tolist() == [False, False, False, True]
    assert undecided(gate, tokens, torch.float64).tolist() == [False, False, False, True]


@pytest.mark.parametrize("rounding", ["worst", "likely"])
@pytest.mark.parametrize("dtype", [*SHORT, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [7, 60, 300, 1500])
def test_real_products_are_within_the_error(dim: int, dtype: torch.dtype, rounding: str) -> None:
    """torch's own product in the dtype, from float32 tokens that are rounded first, and from tokens of the dtype."""
    for given in (torch.float32, dtype):
        tokens, weight = example(80, dim, 24, dtype=given)
        errors = rounding_errors(Gate(weight, 2), tokens, dtype, rounding=rounding)  # type: ignore[arg-type]
        computed = F.linear(tokens.to(dtype), weight.to(dtype)).double()
        off = (computed - tokens.double() @ weight.double().t()).abs()
        assert (off <= errors).all()
        assert (off / errors).max() > (0.0003 if dtype == torch.float32 else 0.05)  # and not by orders of magnitude


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_products_summed_in_the_short_type_are_within_the_error_of_the_specification(
    dtype: torch.dtype, backwards: bool
) -> None:
    tokens, weight = example(80, 60, 24, seed=1)
    errors = rounding_errors(Gate(weight, 2), tokens, dtype, accumulate=dtype)
    off = (summed_in(dtype, tokens, weight, backwards) - tokens.double() @ weight.double().t()).abs()
    assert (off <= errors).all() and (off / errors).max() > 0.005  # the worst case is far from the usual one


def test_from_a_width_of_256_on_every_token_is_undecided_with_bfloat16_sums() -> None:
    for dim, vacuous in ((255, False), (256, True), (2000, True)):
        tokens, weight = example(4, dim, 6)
        gate = Gate(weight, 2)
        assert rounding_errors(gate, tokens, torch.bfloat16, accumulate=torch.bfloat16).isinf().all() == vacuous
        if vacuous:
            assert undecided(gate, tokens, torch.bfloat16, accumulate=torch.bfloat16).all()
        assert rounding_errors(gate, tokens, torch.bfloat16).isfinite().all()


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("dim", [40, 512])
def test_no_decided_token_flips_between_float32_and_a_short_type(dim: int, dtype: torch.dtype) -> None:
    """And a good share of the undecided tokens does flip."""
    flipped = called = 0
    for seed in range(4):
        tokens, weight = example(4000, dim, 32, seed)
        flips, alarm = flips_and_alarm(Gate(weight, 4), tokens, dtype)
        flipped, called = flipped + flips, called + alarm
    assert flipped / called > 0.05
    assert called < 0.12 * 4 * 4000


PLAIN = ["linear", "bias", "xmoe", "ac", "ac mixed", "symphony row", "top-p", "remoe", "smooth"]
LOOSE = ["xmoe+symphony", "attention"]  # with bounds that leave many tokens undecided


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("name", [*PLAIN, *LOOSE])
def test_no_decided_token_flips_when_a_router_scores_in_a_short_type(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product with the tokens as a kernel of the short type does it, everything after it in float32."""
    made, tokens, context = build(name, batch=128)
    alarm = undecided(made, tokens, dtype, context).flatten()
    sets = sets_of(made, context)
    clean = sets(tokens)

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return F.linear(rows.to(dtype), weight.to(dtype)).float()

    def scaled(rows: Tensor, mixture: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
        factors = mixture @ scales + (1 - mixture.sum(1, keepdim=True))
        return product(rows * factors.view_as(rows), weight)

    monkeypatch.setattr("holdfast.routing.parts.linear_float32", product)

    def grouped(score: Clustered, rows: Tensor, weight: Tensor, *_: object) -> Tensor:
        features = score.features(rows, context)
        assert features is not None
        return scaled(rows, *features, weight)

    monkeypatch.setattr("holdfast.routing.parts.scaled_linear_float32", scaled)
    monkeypatch.setattr(Clustered, "_grouped", grouped)
    flips = (clean != sets(tokens)).any(1)
    assert not (flips & ~alarm).any()
    assert alarm.float().mean() < (0.9 if name in LOOSE else 0.1)
    assert flips.any() or dtype == torch.float16


def test_padding_is_never_undecided_and_shapes_are_those_of_the_tokens() -> None:
    made, tokens, _ = build("similarity", batch=2)
    real = torch.ones(2, 16, dtype=torch.bool)
    real[0, 10:] = False
    found = undecided(made, tokens, torch.bfloat16, Context(token_mask=real))
    assert found.shape == (2, 16) and not found[~real].any()
    made, tokens, _ = build("linear")
    assert undecided(made, tokens.flatten(0, 1), torch.bfloat16).shape == (64,)
    assert undecided(made, tokens[:0], torch.bfloat16).shape == (0, 16)


def test_an_overflow_of_the_dtype_is_undecided() -> None:
    gate = Gate(torch.tensor([[1.0], [2.0]]), 1)
    assert undecided(gate, torch.tensor([[1e5], [1.0]]), torch.float16).tolist() == [True, False]
    assert undecided(gate, torch.tensor([[1e5], [1.0]]), torch.bfloat16).tolist() == [False, False]


def test_a_radius_at_a_dtype_is_zero_where_the_token_is_undecided_at_it() -> None:
    tokens, weight = example(2000, 40, 16, dtype=torch.bfloat16)
    gate = Gate(weight, 2)
    alarm = undecided(gate, tokens, torch.bfloat16)
    radius = certify(gate, tokens, arithmetic=torch.bfloat16).radius
    assert alarm.any() and (radius[alarm] == 0).all() and (radius[~alarm] > 0).float().mean() > 0.95


def test_sigmoid_gates_in_groups_are_decided_as_a_whole() -> None:
    gate, tokens = sigmoid_gate(groups=4, kept=2), 2 * torch.randn(4000, 12, generator=generator(9))
    flips, alarm = flips_and_alarm(gate, tokens, torch.bfloat16)
    assert flips > 0 and alarm < 0.3 * 4000


def test_a_bias_is_rounded_too() -> None:
    tokens, weight = example(4000, 30, 16)
    gate = Gate(weight, 2, bias=3 * torch.randn(16, generator=generator(2)))
    for dtype in SHORT:
        assert flips_and_alarm(gate, tokens, dtype)[0] > 0

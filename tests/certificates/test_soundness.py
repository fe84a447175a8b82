"""No perturbation inside a certificate changes a set: random ones, those along normals, and those that an attack finds."""

from typing import Any

import pytest
import torch
from certificates.certified_routers import EXACT, ROUTERS, SEQUENCES, build, generator, sigmoid_gate
from certificates.probing import directions, finite, native, require_sound, sets_of
from tiers import quick_or_slow
from torch import Tensor

from holdfast.attacks import attack_routes
from holdfast.certificates import NORMS, Gate, Norm, certify
from holdfast.certificates.router_conditions import native_keys
from holdfast.kernels.select import top
from holdfast.routing import Context, Router, Routing
from holdfast.routing.parts import TINY

ALONE = [name for name in ROUTERS if name not in SEQUENCES]
TRIES = 40
FEW_STEPS = {"steps": 20, "rounds": 0, "bisections": 0, "check": False}  # of an attack
SIGMOIDS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid without bias": {"spread": 0.0},
    "sigmoid in groups": {"groups": 4, "kept": 2},
    "sigmoid in small groups": {"experts": 24, "k": 3, "groups": 12, "kept": 5},
    "sigmoid in groups of one": {"experts": 8, "k": 2, "groups": 8, "kept": 3},
    "sigmoid in groups, wide bias": {"experts": 32, "k": 6, "groups": 8, "kept": 4, "spread": 1.0},
}


def keys_of(made: Router, context: Context, name: str) -> Any:
    """What margins are measured in, differentiably."""

    def keys(tokens: Tensor) -> Tensor:
        routing = made(tokens, context)
        return routing.logits if name in EXACT else routing.gates.clamp_min(TINY).log()

    return keys


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ALONE)
def test_no_perturbation_inside_the_radius_changes_a_set(name: str, norm: Norm) -> None:
    made, tokens, context = build(name)
    found = certify(made, tokens, context, norm=norm)
    # 2,500 pairs, for 23 routers in 2 norms: with the tests below far more than 100,000.
    least = 0.9 * TRIES * found.radius.numel()
    require_sound(sets_of(made, context), keys_of(made, context, name), tokens, found, TRIES, least)
    assert found.kind == ("exact" if name in EXACT else "lower bound")
    assert (found.radius > 0).float().mean() > 0.95


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", SEQUENCES)
def test_no_token_flips_when_a_whole_sequence_is_perturbed_by_the_radius(name: str, norm: Norm) -> None:
    """All tokens of a sequence are perturbed by the radius of one of them; tokens with a larger radius must not flip."""
    made, tokens, context = build(name)
    found = certify(made, tokens, context, norm=norm)
    sets, clean = sets_of(made, context), made(tokens, context).chosen
    order = found.radius.argsort(dim=1)
    tried, changed = 0, 0
    for rank in range(0, tokens.shape[1], 3):
        radius = found.radius.gather(1, order[:, rank : rank + 1])
        far = (finite(radius.expand_as(found.radius), tokens) * (1 - 1e-6)).unsqueeze(-1)
        covered = (found.radius >= radius).flatten()
        for direction in directions(tokens, norm, TRIES // 2, seed=rank):
            other = (sets((tokens.double() + direction * far).float()) != clean).any(-1)
            tried += int(covered.sum())
            changed += int((other & covered).sum())
    assert tried > 4000
    assert changed == 0


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", SIGMOIDS)
def test_no_perturbation_flips_a_sigmoid_gate_with_bias_and_groups(name: str, norm: Norm) -> None:
    gate, tokens = sigmoid_gate(**SIGMOIDS[name]), 2 * torch.randn(64, 12, generator=generator(3))
    found = certify(gate, tokens, norm=norm)

    def keys(rows: Tensor) -> Tensor:
        return torch.sigmoid(rows @ gate.weight.t())

    require_sound(native(gate), keys, tokens, found, TRIES, 0.9 * TRIES * len(tokens))
    assert found.kind == ("exact" if "without bias" in name else "lower bound")


@pytest.mark.parametrize("name", quick_or_slow([*ALONE, *SEQUENCES], [*list(ALONE)[::4], *list(SEQUENCES)[:1]]))
def test_no_attack_on_routes_succeeds_inside_the_radius(name: str) -> None:
    """PGD with restarts towards the nearest planes; where tokens inform each other, all of a sequence together."""
    made, tokens, context = build(name, batch=2)
    for norm in NORMS:
        found = certify(made, tokens, context, norm=norm)
        budget = finite(found.radius, tokens)
        if name in SEQUENCES:
            budget = budget.amin(1, keepdim=True).expand_as(budget)
        how: dict[str, Any] = {"norm": norm, "context": context, "k": made.select.declares.core, **FEW_STEPS}
        attack = attack_routes(made, tokens, budget=budget, restarts=1, pairs=1, candidates=2, tries=2, **how)
        assert attack.rate == 0
        assert attack.distances.isinf().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::holdfast.attacks.AttackWarning")  # gates without their bias are what it follows
@pytest.mark.parametrize("name", SIGMOIDS)
def test_no_attack_on_a_sigmoid_gate_succeeds_inside_the_radius(name: str) -> None:
    gate, tokens = sigmoid_gate(**SIGMOIDS[name]), 2 * torch.randn(48, 12, generator=generator(5))

    def route(rows: Tensor) -> Routing:
        logits = rows @ gate.weight.t()
        sorted_by = native_keys(gate.rule, logits) if gate.rule is not None else logits
        experts = top(sorted_by, gate.k)
        gates = torch.sigmoid(logits)
        return Routing(logits, gates, experts, gates.gather(1, experts), {})

    for norm in NORMS:
        found = certify(gate, tokens, norm=norm)
        how: dict[str, Any] = {"norm": norm, "joint": False, **FEW_STEPS}
        assert attack_routes(route, tokens, budget=finite(found.radius, tokens), **how).rate == 0
        assert attack_routes(route, tokens, budget=finite(4 * found.radius, tokens), **how).rate > 0.5


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["bias", "xmoe+ac", "symphony row", "top-p"])
def test_radii_are_sound_for_tokens_and_weights_of_every_dtype(name: str, dtype: torch.dtype) -> None:
    """Perturbed tokens are numbers of the dtype too."""
    made, tokens, context = build(name)
    made, tokens = made.to(dtype), tokens.to(dtype)
    for norm in NORMS:
        found = certify(made, tokens, context, norm=norm)
        # In bfloat16 not every token has a neighbour within its radius.
        require_sound(sets_of(made, context), keys_of(made, context, name), tokens, found, 24, 1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_radii_are_sound_for_a_gate_that_computes_in_a_short_type(dtype: torch.dtype) -> None:
    source = generator(11)
    weight, bias = torch.randn(16, 40, generator=source).to(dtype) / 8, torch.randn(16, generator=source).to(dtype)
    tokens = torch.randn(400, 40, generator=source).to(dtype)
    gate = Gate(weight, 3, bias=bias)
    for norm in NORMS:
        found = certify(gate, tokens, norm=norm, arithmetic=dtype)
        assert found.arithmetic == str(dtype).removeprefix("torch.")
        require_sound(native(gate, dtype), lambda rows: rows.float() @ weight.float().t(), tokens, found, 48, 2000)


def test_radii_are_sound_with_many_experts_and_any_k() -> None:
    """1,000 pairs each, at awkward sizes."""
    linear = (("linear", 64, 1), ("linear", 63, 31), ("linear", 7, 6))
    for name, experts, k in (*linear, ("symphony row", 64, 8), ("top-p", 40, 2)):
        made, tokens, context = build(name, dim=60, length=9, experts=experts, k=k)
        for norm in NORMS:
            found = certify(made, tokens, context, norm=norm)
            require_sound(sets_of(made, context), keys_of(made, context, name), tokens, found, 28, 900)


def test_likely_rounding_gives_larger_radii_that_are_still_sound() -> None:
    made, tokens, context = build("linear", dim=1500, batch=2)
    worst, likely = (certify(made, tokens, context, rounding=rounding) for rounding in ("worst", "likely"))
    assert (likely.radius >= worst.radius).all() and (likely.radius <= likely.distance).all()
    assert (likely.radius / likely.distance).median() > 0.99 > (worst.radius / worst.distance).median()
    require_sound(sets_of(made, context), lambda rows: made(rows, context).logits, tokens, likely, 40, 1000)

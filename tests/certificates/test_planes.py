"""Exact radii: against hand-computed cases, against loops, and just outside them."""

import math

import pytest
import torch
from certificates.certified_routers import EXACT, build, generator, linear_score
from certificates.naive import effective_weights, plane_radii, relu_radii
from certificates.probing import sets_of
from torch import Tensor

from holdfast.certificates import NORMS, Gate, Norm, certify, undecided
from holdfast.routing import Context, Router, TopK, create_router
from holdfast.routing.rules import Softmax

SWAPPING = [name for name in EXACT if "remoe" not in name]


def by_hand(weight: list[list[float]], k: int = 1, bias: list[float] | None = None) -> Router:
    return Router(linear_score(weight, bias), select=TopK(len(weight), k)).eval()


def radii_of(made: Router, tokens: Tensor, context: Context, norm: Norm) -> tuple[list[float], list[Tensor]]:
    """Return the naive distances of the tokens, and the normals of their nearest planes."""
    bias, k = getattr(made.score, "bias", None), made.select.k
    assert isinstance(k, int)
    bias = torch.zeros(made.experts) if bias is None else bias.detach()
    return plane_radii(effective_weights(made, context), bias, tokens.flatten(0, 1), k, norm)


def test_two_experts_by_hand() -> None:
    """w = (3,0) and (0,4), x = (2,1): logits 6 and 4, difference (3,-4) of length 5, or 7 in the 1-norm."""
    made, tokens = by_hand([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([[2.0, 1.0]])
    l2, linf = (certify(made, tokens, norm=norm) for norm in NORMS)
    assert l2.distance.item() == pytest.approx(2 / 5) and linf.distance.item() == pytest.approx(2 / 7)
    assert l2.radius.item() == pytest.approx(2 / 5, rel=1e-5) and l2.radius < l2.distance
    assert l2.margin.item() == 2.0 and l2.pair.tolist() == [[0, 1]] and l2.kind == "exact"
    assert l2.relative.item() == pytest.approx(2 / 5 / math.sqrt(5), rel=1e-5)
    assert linf.relative.item() == pytest.approx(2 / 7 / 2, rel=1e-5)  # over the largest feature


def test_relu_flips_where_a_logit_is_zero() -> None:
    """Experts with logits 6, -4 and 0: the third is not chosen, and any move upwards brings it in."""
    made = create_router("remoe", dim=2, experts=3, k=1).eval()
    with torch.no_grad():
        made.score.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, -4.0], [1.0, -2.0]]))  # type: ignore[union-attr, operator]
    tokens = torch.tensor([[2.0, 1.0], [2.0, -1.0], [-3.0, 3.0]])
    found = certify(made, tokens)
    assert found.distance.tolist() == pytest.approx([0.0, 1.0, 3.0])  # 0/sqrt(5); 4/4 before 6/3, 4/sqrt(5); 9/3, 12/4
    assert found.pair[1].tolist() == [1, 3]  # 3 is nobody: expert 1 would leave
    assert found.pair[2].tolist() == [3, 0]  # expert 0 would enter


@pytest.mark.parametrize("name", ["ac", "symphony row", "symphony+smooth", "xmoe+symphony", "similarity", "attention"])
def test_every_router_with_all_experts_chosen_is_certified_everywhere(name: str) -> None:
    made, tokens, context = build(name, batch=1, experts=5, k=5)
    found = certify(made, tokens, context)
    assert found.radius.isinf().all() and (found.pair == 5).all()
    assert not undecided(made, tokens, torch.bfloat16, context).any()


@pytest.mark.parametrize("name", ["linear", "symphony row", "top-p", "xmoe+top-p"])
def test_a_single_expert_is_always_chosen(name: str) -> None:
    made, tokens, context = build(name, batch=1, experts=1, k=1)
    assert (certify(made, tokens, context).relative > 0.3).all()  # cosines only up to where z could become 0


def test_equal_experts_have_no_plane_between_them() -> None:
    """The tie goes to the lower index everywhere; but where rounding could break it, nothing is certain."""
    tokens = torch.tensor([[2.0, 1.0]])
    twins = by_hand([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], k=2)
    alone = by_hand([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], k=1)
    assert certify(twins, tokens).distance.item() == pytest.approx(1 / math.sqrt(2))
    assert certify(alone, tokens).radius.item() == 0
    assert certify(alone, tokens, arithmetic=None).radius.item() == pytest.approx(1 / math.sqrt(2))
    zeros = by_hand([[0.0, 0.0], [0.0, 0.0]])  # no rounding can break this tie
    far = certify(zeros, tokens)
    assert far.distance.item() == math.inf and far.relative.item() > 1000


def test_a_tie_has_radius_zero() -> None:
    found = certify(by_hand([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 2.0], [2.0, 2.0 + 1e-7]]))
    assert found.radius.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", SWAPPING)
def test_distances_equal_the_naive_ones(name: str, norm: Norm) -> None:
    made, tokens, context = build(name, length=7)
    found = certify(made, tokens, context, norm=norm)
    radii, _ = radii_of(made, tokens, context, norm)
    torch.testing.assert_close(found.distance.flatten(), torch.tensor(radii, dtype=torch.float64), rtol=1e-6, atol=1e-9)
    assert (found.radius <= found.distance).all() and (found.radius > 0.99 * found.distance).float().mean() > 0.95


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["remoe", "xmoe+remoe"])
def test_distances_of_relu_gates_equal_the_naive_ones(name: str, norm: Norm) -> None:
    made, tokens, context = build(name)
    found = certify(made, tokens, context, norm=norm)
    radii = relu_radii(effective_weights(made, context)[0], tokens.flatten(0, 1), norm)
    torch.testing.assert_close(found.distance.flatten(), torch.tensor(radii, dtype=torch.float64), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("k", [1, 2, 5, 12, 13])
def test_every_k_equals_the_naive_one(k: int) -> None:
    made, tokens, context = build("bias", dim=7, batch=1, length=5, k=k)
    radii, _ = radii_of(made, tokens, context, "l2")
    found = certify(made, tokens, context)
    torch.testing.assert_close(found.distance.flatten(), torch.tensor(radii, dtype=torch.float64), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", SWAPPING)
def test_just_outside_an_exact_radius_every_set_changes(name: str, norm: Norm) -> None:
    """1.001 times the radius along the normal, in float32, for tokens that lose less than half of that to rounding."""
    made, tokens, context = build(name)
    found = certify(made, tokens, context, norm=norm)
    _, normals = radii_of(made, tokens, context, norm)
    towards = torch.stack(normals).view_as(tokens.double())
    towards = torch.nn.functional.normalize(towards, dim=-1) if norm == "l2" else towards.sign()
    there = tokens.double() + 1.001 * found.radius.unsqueeze(-1) * towards
    sets = sets_of(made, context)
    clear = ((found.distance - found.radius) < 4.5e-4 * found.radius).flatten()
    changed = (sets(there.float()) != sets(tokens)).any(-1)
    assert clear.float().mean() > 0.5 and changed[clear].all()


def test_just_outside_in_real_numbers_every_set_changes() -> None:
    """64 experts, every k: the same in float64, with no token left out."""
    source = generator(0)
    weight, tokens = (torch.randn(n, 60, generator=source, dtype=torch.float64) for n in (64, 63))
    for k in (1, 2, 31, 63):
        for norm in NORMS:
            found = certify(Gate(weight, k), tokens, norm=norm, arithmetic=None)
            normals = weight[found.pair[:, 1]] - weight[found.pair[:, 0]]
            towards = torch.nn.functional.normalize(normals, dim=-1) if norm == "l2" else normals.sign()
            for share, expected in ((0.999, False), (1.001, True)):
                there = tokens + share * found.distance.unsqueeze(1) * towards
                sets = [set_of(rows @ weight.t(), k) for rows in (tokens, there)]
                assert ((sets[0] != sets[1]).any(1) == expected).all()


def set_of(logits: Tensor, k: int) -> Tensor:
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(k, dim=1).indices, True)


def test_nearly_equal_experts_are_separated() -> None:
    """A distance computed from a Gram matrix would be 0."""
    weight = torch.randn(2, 50, dtype=torch.float64, generator=generator(1))
    weight[1] = weight[0] + 1e-11 * torch.randn(50, dtype=torch.float64, generator=generator(2))
    tokens = torch.randn(5, 50, dtype=torch.float64, generator=generator(3))
    expected = ((tokens * (weight[0] - weight[1])).sum(1)).abs() / (weight[0] - weight[1]).norm()
    found = certify(Gate(weight, 1), tokens, arithmetic=None)
    torch.testing.assert_close(found.distance, expected, rtol=1e-3, atol=0)


def test_a_gate_is_certified_less_where_its_gates_round_to_the_same_number() -> None:
    """Far apart in logits, but softmax gates below 1e-38 are all 0, and the native gate then sorts by index."""
    weight = torch.tensor([[100.0, 0.0], [0.0, 1.0], [0.0, 0.5]])
    tokens = torch.tensor([[2.0, 3.0], [0.02, 3.0]])
    ours = certify(by_hand(weight.tolist(), k=2), tokens)  # sorts logits
    theirs = certify(Gate(weight, 2, rule=Softmax(renormalise=True)), tokens)
    assert (ours.radius > 0).all()
    assert theirs.radius.tolist() == [0.0, pytest.approx(ours.radius[1].item(), rel=1e-3)]
    assert torch.equal(theirs.distance, ours.distance)


def test_memory_stays_small_for_many_tokens_and_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are taken a few at a time, and the result does not depend on how many."""
    made, tokens, context = build("symphony+ac mixed", length=5)
    whole = certify(made, tokens, context)
    monkeypatch.setattr("holdfast.certificates.router_conditions.MOST_ELEMENTS", 500)
    monkeypatch.setattr("holdfast.certificates.score_geometry.MOST_HELD", 1)
    parts = certify(made, tokens, context)
    torch.testing.assert_close(parts.radius, whole.radius, rtol=1e-9, atol=0)
    torch.testing.assert_close(parts.bounds["pairwise"], whole.bounds["pairwise"], rtol=1e-9, atol=0)

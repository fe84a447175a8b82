"""Losses of experts' outputs against loops, what they train, and that a layer runs its experts for them only if one asks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from wording import assert_refused

import holdfast
from holdfast import Context, Losses
from holdfast.layers.expert_losses import PROBES, distillation, diversity, probe_tokens

DIM, COUNT = 6, 4


def layer_with(losses: Losses | None, teacher: nn.Module | None = None, router: str = "smoe") -> holdfast.MoE:
    torch.manual_seed(0)
    made = holdfast.create_router(router, dim=DIM, experts=COUNT, k=2, losses=losses)
    return holdfast.MoE(made, holdfast.Experts(DIM, 5, COUNT), teacher=teacher)


def test_diversity_is_the_mean_squared_cosine_of_pairs() -> None:
    torch.manual_seed(0)
    outputs = torch.randn(COUNT, 7, DIM, requires_grad=True)
    real = torch.tensor([True] * 5 + [False] * 2)
    total, pairs = torch.zeros(()), 0
    for token in real.nonzero().flatten().tolist():
        for one in range(COUNT):
            for other in range(COUNT):
                if one != other:
                    total = total + F.cosine_similarity(outputs[one, token], outputs[other, token], dim=0).square()
                    pairs += 1
    found = diversity(outputs, real)
    torch.testing.assert_close(found, total / pairs)
    (ours,) = torch.autograd.grad(found, outputs)
    (expected,) = torch.autograd.grad(total / pairs, outputs)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(("second", "expected"), [([1.0, 0.0], 1.0), ([-2.0, 0.0], 1.0), ([0.0, 3.0], 0.0)])
def test_equal_and_opposite_outputs_have_diversity_1_and_orthogonal_ones_0(second: list[float], expected: float) -> None:
    outputs = torch.tensor([[[1.0, 0.0]], [second]])
    torch.testing.assert_close(diversity(outputs), torch.tensor(expected))


def test_one_expert_has_diversity_0() -> None:
    assert diversity(torch.randn(1, 5, DIM)) == 0


def test_distillation_is_the_weighted_distance_of_selected_experts_to_the_teacher() -> None:
    torch.manual_seed(0)
    outputs, taught = torch.randn(5, 3, DIM, requires_grad=True), torch.randn(5, DIM)
    weights = torch.rand(5, 3, requires_grad=True)
    used = weights.detach().clone()
    used[:, 2] = 0  # an unused slot
    real = torch.tensor([True, True, False, True, True])
    total = torch.zeros(())
    for token in real.nonzero().flatten().tolist():
        for slot in range(2):
            share = used[token, slot] / used[token].sum()
            total = total + share * (outputs[token, slot] - taught[token]).square().mean() / 4
    found = distillation(outputs, weights * torch.tensor([1.0, 1.0, 0.0]), taught, real)
    torch.testing.assert_close(found, total)
    ours, of_weights = torch.autograd.grad(found, [outputs, weights], allow_unused=True)
    torch.testing.assert_close(ours, torch.autograd.grad(total, outputs)[0])
    assert of_weights is None


@pytest.mark.parametrize("count", [0, 1, 20, 100])
def test_probe_tokens_are_real_and_spread(count: int) -> None:
    torch.manual_seed(0)
    tokens, real = torch.arange(100.0).unsqueeze(1), torch.zeros(100, dtype=torch.bool)
    real[torch.randperm(100)[:count]] = True
    probes, is_real = probe_tokens(tokens, real)
    assert len(probes) == PROBES and is_real.all() == (count > 0) == is_real.any()
    if count:
        assert real[probes.flatten().long()].all()
        assert len(probes.unique()) == min(count, PROBES)
    if count == 100:
        assert torch.equal(probes, probe_tokens(tokens, None)[0])


@pytest.mark.parametrize("router", ["smoe", "top-p", "smooth"])
def test_a_layer_computes_its_losses_as_a_loop_over_experts_does(router: str) -> None:
    teacher, mask = nn.Linear(DIM, DIM), torch.arange(9) < torch.tensor([[9], [4]])
    layer = layer_with(Losses(diversity=0.3, distillation=0.7), teacher, router)
    tokens = torch.randn(2, 9, DIM)
    tokens[~mask] = torch.nan  # padding counts nowhere
    _, routing = layer(tokens, Context(token_mask=mask))
    rows, real = tokens.flatten(0, 1), mask.flatten().nonzero().flatten().tolist()

    def expert(index: int, row: Tensor) -> Tensor:
        gate, up = (layer.experts.gate_up_proj[index] @ row).chunk(2)  # type: ignore[operator, index]
        return layer.experts.down_proj[index] @ (F.silu(gate) * up)

    taught = torch.zeros(())
    for token in real:
        of_token = routing.dense_weights[token].detach()
        for index in of_token.nonzero().flatten().tolist():
            share = of_token[index] / of_token.sum()
            taught = taught + share * (expert(index, rows[token]) - teacher(rows[token])).square().mean() / len(real)
    torch.testing.assert_close(routing.losses["distillation"], 0.7 * taught)
    cosines = [
        F.cosine_similarity(expert(one, rows[token]), expert(other, rows[token]), dim=0).square()
        for token in real  # fewer than the probes: each is one of them, and some are there twice
        for one in range(COUNT)
        for other in range(one)
    ]
    counts = torch.bincount(probe_places(mask), minlength=18)[real]
    expected = (torch.stack(cosines).view(len(real), -1).mean(1) * counts).sum() / counts.sum()
    torch.testing.assert_close(routing.losses["diversity"], 0.3 * expected)
    (routing.losses["diversity"] + routing.losses["distillation"]).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.experts.parameters())


def probe_places(mask: Tensor) -> Tensor:
    """The places of the probes among the tokens of a batch."""
    places = torch.arange(mask.numel()).float().unsqueeze(1)
    return probe_tokens(places, mask.flatten())[0].flatten().long()


@pytest.mark.parametrize("name", ["diversity", "distillation"])
def test_losses_of_outputs_train_experts_and_nothing_else(name: str) -> None:
    layer = layer_with(Losses(**{name: 1.0}), nn.Linear(DIM, DIM))
    tokens = torch.randn(2, 9, DIM, requires_grad=True)
    layer(tokens)[1].loss.backward()
    moved = {key for key, parameter in layer.named_parameters() if parameter.grad is not None and parameter.grad.any()}
    assert moved == {f"experts.{key}" for key, _ in layer.experts.named_parameters()}
    assert tokens.grad is None and not any("teacher" in key for key in layer.state_dict())


@pytest.mark.parametrize("name", ["diversity", "distillation"])
def test_descending_a_loss_of_outputs_lowers_it(name: str) -> None:
    layer = layer_with(Losses(**{name: 1.0}), nn.Linear(DIM, DIM))
    tokens, optimizer, values = torch.randn(4, 16, DIM), torch.optim.SGD(layer.experts.parameters(), lr=3.0), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = layer(tokens)[1].losses[name]
        values.append(loss.item())
        loss.backward()
        optimizer.step()
    assert values[-1] < 0.8 * values[0]


def test_experts_run_a_second_time_only_if_a_loss_asks() -> None:
    """Not without such a loss, not in evaluation, and not while the router computes no losses."""
    runs = []
    for losses in (None, Losses(balance=1.0), Losses(balance=1.0, diversity=1.0)):
        layer = layer_with(losses)
        rows: list[int] = []
        layer.experts.register_forward_pre_hook(lambda _, inputs, rows=rows: rows.append(len(inputs[0])))
        tokens = torch.randn(2, 40, DIM)
        layer(tokens)
        layer.router.learning = False
        layer(tokens)
        layer.eval()(tokens)
        runs.append(rows)
    assert runs == [[80, 80, 80], [80, 80, 80], [COUNT * PROBES, 80, 80, 80]]


def test_a_layer_keeps_no_more_for_its_backward_if_no_loss_asks() -> None:
    def kept(losses: Losses | None) -> int:
        layer, saved = layer_with(losses), dict[int, int]()

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = torch.randn(2, 40, DIM)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out, _ = layer(tokens)
        assert out.requires_grad
        return sum(saved.values())

    assert kept(None) == kept(Losses()) < kept(Losses(diversity=1.0))


def test_a_loss_that_a_layer_cannot_compute_is_refused() -> None:
    tokens = torch.randn(1, 5, DIM)
    assert_refused("distillation.*this layer has none", layer_with(Losses(distillation=1.0)), tokens)
    narrow = layer_with(Losses(distillation=1.0), nn.Linear(DIM, 2))
    assert_refused(r"teacher returned \(5, 2\)", narrow, tokens)
    assert_refused("consistency compares two forwards", layer_with, Losses(consistency=1.0))
    router = holdfast.create_router("softmoe", dim=DIM, experts=COUNT, slots=2, losses=Losses(distillation=1.0))
    soft = holdfast.SoftMoE(router, holdfast.Experts(DIM, 5, COUNT))
    assert_refused("SoftMoE and SMEAR", soft, tokens)
    assert_refused("word_noise is 0.1 with consistency=0", Losses, word_noise=0.1)
    assert_refused("word_noise is 2", Losses, consistency=1.0, word_noise=2.0)


def test_experts_that_run_on_slots_become_diverse_too() -> None:
    router = holdfast.create_router("softmoe", dim=DIM, experts=COUNT, slots=2, losses=Losses(diversity=1.0))
    _, routing = holdfast.SoftMoE(router, holdfast.Experts(DIM, 5, COUNT))(torch.randn(2, 5, DIM))
    assert 0 < routing.losses["diversity"] < 1

"""How images and texts share experts, against loops over tokens."""

import pytest
import torch
from metrics.routings import padded, random_routing, sets
from torch import Tensor
from wording import assert_refused

from holdfast.metrics import Modalities, ModalityUse
from holdfast.routing import Routing


def used(routing: Routing, is_image: Tensor, token_mask: Tensor | None = None) -> Modalities:
    metric = ModalityUse()
    metric.update(routing, is_image, token_mask)
    return metric.result()


def naive(routing: Routing, is_image: list[bool]) -> Modalities:
    experts = range(routing.gates.shape[1])
    counts = {modality: [0 for _ in experts] for modality in (False, True)}
    for own, modality in zip(sets(routing), is_image, strict=True):
        for expert in own:
            counts[modality][expert] += 1
    text, image = counts[False], counts[True]
    overlap = sum(min(text[e] / sum(text), image[e] / sum(image)) for e in experts)
    serving = [(text[e] > 0) + (image[e] > 0) for e in experts]
    tokens = {modality: is_image.count(modality) for modality in (False, True)}
    percent = [[100 * count / tokens[modality] for count in counts[modality]] for modality in (False, True)]
    return Modalities(overlap, serving.count(1) / sum(one > 0 for one in serving), *percent)


@pytest.mark.parametrize("ragged", [False, True])
def test_the_use_of_experts_equals_a_loop_over_tokens(ragged: bool) -> None:
    routing = random_routing(21, 17, 2, ragged=ragged)  # few tokens, so that some experts serve one modality only
    is_image = torch.rand(21, generator=torch.Generator().manual_seed(1)) < 0.6
    found, expected = used(routing, is_image), naive(routing, is_image.tolist())
    assert 0 < expected.overlap < 1 and 0 < expected.one_modality < 1
    assert found.overlap == pytest.approx(expected.overlap)
    assert found.one_modality == pytest.approx(expected.one_modality)
    assert found.text == pytest.approx(expected.text) and found.image == pytest.approx(expected.image)


def test_padding_is_neither_image_nor_text() -> None:
    routing = random_routing(21, 17, 2)
    is_image = torch.rand(21, generator=torch.Generator().manual_seed(1)) < 0.6
    strewn, real = padded(routing)
    of_all = torch.ones(real.shape, dtype=torch.bool)
    of_all[real] = is_image
    assert used(strewn, of_all, real) == used(routing, is_image)


def test_equal_loads_overlap_and_separate_experts_do_not() -> None:
    gates = torch.full((4, 4), 0.25)
    experts = torch.tensor([[0], [1], [2], [3]])
    apart = Routing(gates.log(), gates, experts, torch.ones(4, 1))
    alike = Routing(gates.log(), gates, experts % 2, torch.ones(4, 1))
    is_image = torch.tensor([True, True, False, False])
    assert (used(apart, is_image).overlap, used(apart, is_image).one_modality) == (0, 1)
    assert (used(alike, is_image).overlap, used(alike, is_image).one_modality) == (1, 0)
    assert used(alike, is_image).image == [50, 50, 0, 0]  # experts without tokens serve no modality


def test_tokens_of_one_modality_only_are_refused() -> None:
    routing = random_routing(5)
    assert_refused("there are no text tokens", used, routing, torch.ones(5, dtype=torch.bool))
    assert_refused("expected 5 bools, one for each token", used, routing, torch.ones(4, dtype=torch.bool))

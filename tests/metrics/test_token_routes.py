"""Routes of single tokens as a record: against loops over tokens and experts."""

import base64
import math

import pytest
import torch
from wording import assert_refused

import holdfast
from holdfast.metrics import Boundary, boundary_of, margins
from holdfast.metrics.token_routes import (
    MOST_TOKENS,
    ChangedRoutes,
    Example,
    LayerRoutes,
    PerturbedRoutes,
    Picture,
    RouteChanges,
    Routes,
    View,
    layer_routes,
    patch_rows,
    picture,
    runs,
    tokens_to_show,
)


def router(name: str = "smoe", seed: int = 0) -> holdfast.Router:
    torch.manual_seed(seed)
    return holdfast.create_router(name, dim=16, experts=6, k=2).eval()


@pytest.mark.parametrize("name", ["smoe", "smooth", "remoe", "similarity", "symphony"])
def test_a_route_has_the_used_slots_rounded_and_the_gap_below_the_last_expert(name: str) -> None:
    own, tokens = router(name), torch.randn(1, 40, 16)
    with torch.no_grad():
        routing = own(tokens)
    rows = torch.tensor([3, 39, 0, 7])
    boundary, radii = boundary_of(own), torch.tensor([0.123456, math.inf]).repeat(20)
    found = layer_routes(routing, rows, boundary, own.select.declares.core, radii)
    levels = boundary.levels(routing)
    for place, row in enumerate(rows.tolist()):
        used = [slot for slot in range(routing.experts.shape[1]) if routing.experts[row, slot] < 6]
        assert found.experts[place] == [int(routing.experts[row, slot]) for slot in used]
        assert found.weights[place] == [round(1000 * float(routing.weights[row, slot])) for slot in used]
        order = levels[row].sort(descending=True).values.double()
        k = boundary.k or len(used)
        gap = float(order[k - 1] - order[k]) if 0 < k < 6 else math.inf
        margin = found.margins[place]
        assert (math.inf if margin is None else margin) == pytest.approx(gap, rel=6e-3)
    assert found.radii == [None, None, 0.123, None] and found.core == own.select.declares.core


def test_a_token_without_a_next_expert_has_no_margin() -> None:
    routing = holdfast.create_router("smoe", dim=16, experts=4, k=4).eval()(torch.randn(1, 3, 16))
    assert margins(routing, Boundary()).tolist() == [math.inf] * 3
    assert layer_routes(routing, torch.arange(3), Boundary(), None).margins == [None] * 3


def test_changes_are_those_of_a_loop_over_the_compared_tokens() -> None:
    own, tokens = router(), torch.randn(1, 30, 16)
    before, after = own(tokens), own(tokens.flip(1) + torch.randn(1, 30, 16))
    shown = torch.arange(0, 30, 2)
    same = torch.tensor([0, 1, 2, 4, 5, 8, 10, 20, 22]), torch.tensor([29, 28, 27, 25, 24, 21, 19, 9, 7])
    changes = RouteChanges([shown])
    for part in (slice(0, 4), slice(4, None)):  # a batch in two parts
        changes.add(0, before, after, (same[0][part], same[1][part]))
    found = changes.result("noise")
    assert found.compared == [[0, 3], [4, 6], [10, 12]] and found.about == "noise"
    pairs = dict(zip(same[0].tolist(), same[1].tolist(), strict=True))
    wanted = []
    for token, row in enumerate(shown.tolist()):
        if row in pairs and before.experts[row].tolist() != after.experts[pairs[row]].tolist():
            now = pairs[row]
            thousandths = [round(1000 * weight) for weight in after.weights[now].tolist()]
            wanted.append((token, after.experts[now].tolist(), thousandths))
    assert len(wanted) > 2
    (layer,) = found.layers
    assert list(zip(layer.tokens, layer.experts, layer.weights, strict=True)) == wanted


def test_patches_of_every_layer_lie_on_the_finest_grid() -> None:
    side, (fine, coarse) = patch_rows([17, 4], 2)  # a class token and 16 patches; four patches
    assert side == 4
    assert fine.tolist() == [*range(1, 17), *range(18, 34)]
    assert coarse.tolist() == [
        *(0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3),
        *(4, 4, 5, 5, 4, 4, 5, 5, 6, 6, 7, 7, 6, 6, 7, 7),
    ]


def test_a_picture_is_grey_bytes_row_by_row() -> None:
    pixels = torch.zeros(3, 2, 4)
    pixels[:, 1, 3] = 1
    pixels[0, 0, 1] = 1
    found = picture(pixels, "cat", "dog", 2)
    assert (found.label, found.said, found.width, found.grid, found.size) == ("cat", "dog", 4, [2, 2], 8)
    assert base64.b64decode(found.pixels) == bytes([0, 85, 0, 0, 0, 0, 0, 255])


def test_runs_and_the_number_of_tokens() -> None:
    assert runs([]) == [] and runs([2, 3, 4, 7, 9, 10]) == [[2, 5], [7, 8], [9, 11]]
    assert [tokens_to_show(layers) for layers in (1, 16, 48, 10**6)] == [MOST_TOKENS, 500, 166, 1]


def test_a_record_whose_lists_do_not_fit_is_refused() -> None:
    layer = LayerRoutes([[0], [1]], [[1000], [1000]], [0.1, None])
    assert_refused("for each token", LayerRoutes, [[0]], [[1000], [1000]], [0.1])
    assert_refused("weight for each expert", LayerRoutes, [[0, 1]], [[1000]], [0.1])
    assert_refused("each token", ChangedRoutes, [0, 1], [[0]], [[1000]])
    assert_refused("for each layer", Routes, [layer], {"noise": PerturbedRoutes("", [], [])})
    assert_refused("each patch", View, [Example(["a"])], Routes([layer]))
    assert_refused("differ in length", Picture, "", "", 3, base64.b64encode(bytes(8)).decode(), [1, 1])
    assert_refused("two numbers", Picture, "", "", 4, base64.b64encode(bytes(8)).decode(), [1])
    assert View([Example(["a"]), Example(["b"])], Routes([layer])).tokens == 2

"""The picture of each router: what the router really does between two tokens, the same bytes on every machine, readable."""

import pytest
import router_slices
from router_pages import PICTURES, own_presets
from router_slices import VISIBLE, Slice, picture, slices
from tiers import quick_or_slow

NAMES = [preset.name for preset in own_presets()]
QUICK = ["smoe", "smooth", "hash"]


@pytest.mark.parametrize("name", quick_or_slow(NAMES, QUICK))
def test_the_stored_picture_is_what_the_script_draws(name: str) -> None:
    """If this fails, run `python docs/site/router_pages.py` and look at the difference."""
    assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == picture(name, slices(name))


def test_every_router_has_a_picture_and_no_other_is_stored() -> None:
    assert sorted(file.stem for file in PICTURES.glob("*.svg")) == sorted(NAMES)


def changes_of(found: Slice) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(before.chosen, after.chosen) for before, after in found.changes]


def test_top_k_changes_one_expert_at_a_time_and_jumps_as_computed_by_hand() -> None:
    (found,) = slices("smoe")
    numbers = router_slices._numbers()
    first, last = numbers["ends"]
    assert len(found.changes) == 3 and found.largest_jump > 0.3
    for before, after in found.changes:
        logits = numbers["vectors"] @ (first + before.at * (last - first))
        order = sorted(range(len(logits)), key=lambda expert: -logits[expert])
        assert set(order[1:3]) == set(before.chosen) ^ set(after.chosen)  # the second and the third are tied there
        assert abs(logits[order[1]] - logits[order[2]]) < 1e-4


@pytest.mark.slow
def test_smooth_changes_sets_more_often_and_no_weight_jumps() -> None:
    (smooth,), (plain,) = slices("smooth"), slices("smoe")
    assert len(smooth.changes) > len(plain.changes)
    assert smooth.largest_jump < VISIBLE < plain.largest_jump


def test_a_router_by_token_id_does_not_change() -> None:
    (found,) = slices("hash")
    assert changes_of(found) == [] and len({point.weights for point in found.points}) == 1


@pytest.mark.slow
def test_a_router_that_balances_in_training_is_drawn_twice() -> None:
    assert [each.mode for each in slices("sinkhorn")] == ["evaluation", "training"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hash", "stablemoe", "softmoe", "smear"])
def test_no_weight_jumps_where_the_caption_says_so(name: str) -> None:
    (found,) = slices(name)
    steps = [router_slices._difference(one, other) for one, other in zip(found.points, found.points[1:], strict=False)]
    assert changes_of(found) == [] and max(steps) < 0.02

"""What `make test` leaves out."""

import itertools

from tiers import covering


def test_every_value_of_every_parameter_is_kept_in_few_cases() -> None:
    cases = list(itertools.product("abc", "xyzw"))
    kept = [cases[number] for number in sorted(covering(cases))]
    assert {first for first, _ in kept} == set("abc") and {second for _, second in kept} == set("xyzw")
    assert len(kept) == 4


def test_all_cases_of_one_parameter_are_kept() -> None:
    assert covering([["a"], ["b"], ["c"]]) == {0, 1, 2}

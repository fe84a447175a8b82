"""`holdfast routers` as a user runs it, with its mistakes."""

import os
import subprocess
import sys

import pytest
from commands import Command

import holdfast
from holdfast.routing.presets import REGISTRY
from holdfast.routing.registry import FAMILIES


def test_every_router_is_listed_with_its_paper(command: Command) -> None:
    out = command("routers", columns=160).stdout
    assert all(name in out for name in holdfast.list_routers())
    assert "Shazeer et al. 2017" in out


def test_routers_are_listed_by_family_in_the_same_order_always(command: Command) -> None:
    rows = [line.partition("  ")[0] for line in command("routers", columns=200).stdout.splitlines()]
    rows = [row for row in rows[3:] if row]  # below the headings
    headings = [family.upper() for family in FAMILIES]
    shown = [row for row in rows if row in headings]
    assert shown == [heading for heading in headings if heading in shown] and {"PLAIN", "ROBUST"} <= set(shown)
    below = {name: shown[sum(row in headings for row in rows[: rows.index(name)]) - 1] for name in rows if name not in shown}
    families = {preset.name: preset.family.upper() for preset in REGISTRY}
    assert {name: below[name] for name in families} == families


@pytest.mark.parametrize("routers", ["ac+xmoe", "ac,xmoe", "ac[mix=2,spread=iqr], xmoe"])
def test_names_select_what_is_listed(routers: str, command: Command) -> None:
    listed = command("routers", "--routers", routers).stdout
    rows = [line.partition("  ")[0] for line in listed.splitlines()]
    assert [row for row in rows[3:] if row] == ["PLAIN", "xmoe", "ROBUST", "ac"]


def test_several_routers_are_routed_with_options_that_contain_commas(command: Command) -> None:
    routers = "smoe[k=3],xmoe[width=16,temperature=0.5]+top-p"
    routed = command("routers", "--route", "--routers", routers, "--sequences", "2", columns=160).stdout
    assert "smoe[k=3] " in routed and "xmoe[width=16,temperature=0.5]+top-p " in routed


@pytest.mark.slow
def test_routing_the_embedded_text_gives_a_row_for_each_router(command: Command) -> None:
    done = command("routers", "--route", columns=160)
    assert done.returncode == 0, done.stderr
    rows = {cells[0]: cells for line in done.stdout.splitlines() if (cells := line.split())}
    assert set(holdfast.list_routers()) <= set(rows)
    assert float(rows["smoe"][1]) == 2.0 and float(rows["switch"][1]) == 1.0
    assert len(rows["smoe"]) == 7 and float(rows["capacity"][7]) >= 0  # only a limit drops experts
    assert 0 < float(rows["smoe"][4]) < 100  # rounding tokens to bfloat16 does move some, and not all


@pytest.mark.slow
def test_the_same_seed_prints_the_same_table(command: Command) -> None:
    """Here and in a process of its own."""
    arguments = ("routers", "--route", "--routers", "xmoe+top-p", "--seed", "3")
    there = [sys.executable, "-m", "holdfast", *arguments]
    done = subprocess.run(there, check=True, capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"})
    assert "xmoe+top-p" in done.stdout
    assert command(*arguments, columns=160).stdout == done.stdout

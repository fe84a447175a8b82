"""`holdfast board`: merge ledgers of results into a leaderboard, one page."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from holdfast.cli.common import require_free


@dataclass(frozen=True)
class Board:
    """Merge ledgers, which `holdfast compare --ledger` writes, into a leaderboard: one HTML page that works offline.

    Results of the same recipe, data and threat model are one table that can be sorted: clean data, attack, steadiness, cost,
    seeds and model cards. Routers are compared with smoe, where it was trained. Every file is checked first; a file that
    cannot be used is named.

    Examples: `holdfast board results/ledger`, `holdfast board mine theirs --out board.html --force`
    """

    ledgers: Positional[tuple[Path, ...]]
    """Folders that `holdfast compare --ledger` wrote."""
    out: Path = Path("board.html")
    """The file to write."""
    force: bool = False
    """Overwrite the file if it exists."""

    def run(self) -> None:
        from holdfast.files import write_atomically
        from holdfast.report.stored_pages import board_page
        from holdfast.train.ledger import read_ledger

        if not self.ledgers:
            raise ValueError("name at least one ledger: a folder that `holdfast compare --ledger` wrote.")
        require_free(self.out, self.force)
        experiments = read_ledger(*self.ledgers)
        if not experiments:
            raise ValueError(f"{self.ledgers[0]} has no results; enter some with `holdfast compare --ledger`.")
        write_atomically(self.out, board_page(experiments).html())
        print(f"Leaderboard: {self.out}")

"""`holdfast attack`: one attack on a saved model, with its budget, what it realised and whether to trust it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from holdfast.cli.common import Loading, PluginFiles, forwards, require_free, show, write_out


@dataclass(frozen=True)
class Attack:
    """Attack a saved model and say how much it gave way.

    words, generic, typos: a share of the words of a text, stop words excepted (--rate), swapped for other words that the
    model knows, swapped for the papers' AAA (for many models the unknown word, which is easy to predict), or misspelt.
    fgsm, pgd, spsa: pixels between 0 and 1, l_inf (--budget). corruptions: all that need no files, at a severity from 1 to
    5 (--budget). routes: the smallest moves that send tokens to other experts, by layer (--budget, as a multiple of each
    router input's length).

    Examples: `holdfast attack comparison/cells/smoe-seed0 words --rate 0.1`,
    `holdfast attack comparison/cells/smoe-seed0 routes --budget 0.05`,
    `holdfast attack runs/vmoe pgd --budget 0.03 --steps 40`
    """

    model: Positional[str]
    """What `holdfast train` or `compare` left, or any Hugging Face folder or name."""
    kind: Positional[Literal["words", "generic", "typos", "fgsm", "pgd", "spsa", "corruptions", "routes"]]
    """Which attack."""
    rate: float | None = None
    """Of words, for attacks on text: the chance of each that is no stop word. The share of all words is printed."""
    budget: float | None = None
    """How far the attack may go; there is none by default, because a figure without its budget means nothing."""
    steps: int = 20
    """Of attacks that take many."""
    examples: int = 512
    """Pictures that are attacked; of routes, tokens."""
    seed: int = 0
    """Of everything random."""
    source: str | None = None
    """Another text or set of pictures than the model was trained on: a name or a path."""
    data: Path | None = None
    """Where named sources lie, if they are not to be fetched."""
    length: int | None = None
    """Tokens of a block of text."""
    out: Path | None = None
    """A JSON file for all figures."""
    force: bool = False
    """Overwrite that file if it is there."""
    loading: Annotated[Loading, arg(name="")] = field(default_factory=Loading)
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.train.saved_model import subject
        from holdfast.train.single_attacks import attack_pictures, attack_routers, attack_text
        from holdfast.train.training import quiet
        from holdfast.version import versions

        self.plugins.load()
        amount = self._amount()
        require_free(self.out, self.force)
        quiet()
        model, task = subject(
            self.model, source=self.source, data=self.data, length=self.length, loading=self.loading.options()
        )
        with forwards(model, f"attacking {self.model}", None):
            if self.kind in ("words", "generic", "typos"):
                found = attack_text(model, task, self.kind, rate=amount, seed=self.seed)
            elif self.kind == "routes":
                found = attack_routers(model, task, budget=amount, steps=self.steps, tokens=self.examples, seed=self.seed)
            else:
                how = {"steps": self.steps, "examples": self.examples, "seed": self.seed}
                found = attack_pictures(model, task, self.kind, budget=amount, **how)
        _print(found)
        described = task.describe()["data"]
        write_out(self.out, {"model": self.model, "data": described, "versions": versions(), **found})

    def _amount(self) -> float:
        name, value = ("rate", self.rate) if self.kind in ("words", "generic", "typos") else ("budget", self.budget)
        if value is None:
            raise ValueError(f"{self.kind} needs its --{name}: a figure without it means nothing.")
        other = self.budget if name == "rate" else self.rate
        if other is not None:
            raise ValueError(f"{self.kind} takes --{name} and nothing else.")
        return value


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=found["title"], caption=found.get("caption"))
    for column in found["columns"]:
        table.add_column(column)
    for row in found["rows"]:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    show(table)
    for flag in found["flags"]:
        print(f"Do not trust this blindly: {flag['kind']}: {flag['detail']}")

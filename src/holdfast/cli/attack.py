"""`holdfast attack`: run one attack on a saved model, and print its budget, what it realised and whether to trust it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from holdfast.cli.common import Loading, PluginFiles, TestData, forwards, require_free, show, write_out


@dataclass(frozen=True)
class Attack:
    """Attack a saved model with one attack, and print how much its predictions or its routing change.

    words, generic, typos: change a share of the words of a text, except stop words (--rate): swap them for other words of
    the model's vocabulary, swap them for the papers' AAA (for many models the unknown word, which is easy to predict), or
    misspell them. fgsm, pgd, spsa: change pixels between 0 and 1, in the l_inf norm (--budget). corruptions: apply all
    common corruptions that need no files, at a severity from 1 to 5 (--budget). routes: find the smallest perturbations of
    router inputs that flip tokens, by layer (--budget, as a multiple of each router input's norm). Attacks of plugins and of
    installed packages have their own names.

    Examples: `holdfast attack comparison/cells/smoe-seed0 words --rate 0.1`,
    `holdfast attack comparison/cells/smoe-seed0 routes --budget 0.05`,
    `holdfast attack runs/vmoe pgd --budget 0.03 --steps 40`
    """

    model: Positional[str]
    """A folder that `holdfast train` or `compare` wrote, or any Hugging Face folder or name."""
    kind: Annotated[Positional[str], arg(metavar="ATTACK")]
    """The attack to run: words, generic, typos, fgsm, pgd, spsa, corruptions, routes, or one of a plugin."""
    rate: float | None = None
    """For attacks on text: the probability that a word changes, if it is no stop word. The realised share is printed."""
    budget: float | None = None
    """The largest perturbation. There is no default, because a result without its budget has no meaning."""
    steps: int = 20
    """Number of steps of an iterative attack."""
    examples: int = 512
    """How many images to attack; for routes, how many tokens."""
    seed: int = 0
    """Seed of all random numbers."""
    out: Path | None = None
    """Write all numbers to this JSON file."""
    force: bool = False
    """Overwrite that file if it exists."""
    test_data: Annotated[TestData, arg(name="")] = field(default_factory=TestData)
    loading: Annotated[Loading, arg(name="")] = field(default_factory=Loading)
    plugins: Annotated[PluginFiles, arg(name="")] = field(default_factory=PluginFiles)

    def run(self) -> None:
        from holdfast.train import attack_images, attack_routers, attack_text
        from holdfast.train.training import quiet
        from holdfast.version import versions

        self.plugins.load()
        amount = self._amount()
        require_free(self.out, self.force)
        quiet()
        model, task = self.test_data.load(self.model, self.loading)
        with forwards(model, f"attacking {self.model}", None):
            if self._takes_rate():
                found = attack_text(model, task, self.kind, rate=amount, seed=self.seed)
            elif self.kind == "routes":
                found = attack_routers(model, task, budget=amount, steps=self.steps, tokens=self.examples, seed=self.seed)
            else:
                how = {"steps": self.steps, "examples": self.examples, "seed": self.seed}
                found = attack_images(model, task, self.kind, budget=amount, **how)
        print_attack(found)
        described = task.describe()["data"]
        write_out(self.out, {"model": self.model, "data": described, "versions": versions(), **found})

    def _takes_rate(self) -> bool:
        """Return whether its budget is a share of words. Raise ValueError if there is no such attack."""
        from holdfast.attacks.registry import TABLES, find_attack

        return self.kind not in TABLES and find_attack(self.kind).budget == "rate"

    def _amount(self) -> float:
        name, value = ("rate", self.rate) if self._takes_rate() else ("budget", self.budget)
        if value is None:
            raise ValueError(f"{self.kind} needs --{name}: a result without it has no meaning.")
        other = self.budget if name == "rate" else self.rate
        if other is not None:
            unwanted = "budget" if name == "rate" else "rate"
            raise ValueError(f"{self.kind} takes --{name}, not --{unwanted}.")
        return value


def print_attack(found: dict[str, Any]) -> None:
    """Print the result of an attack as a table, and its flags."""
    from rich.table import Table

    table = Table(title=found["title"], caption=found.get("caption"))
    for column in found["columns"]:
        table.add_column(column)
    for row in found["rows"]:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    show(table)
    for flag in found["flags"]:
        print(f"Warning, this result may be wrong: {flag['kind']}: {flag['detail']}")

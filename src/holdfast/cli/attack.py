"""`holdfast attack`: run one attack on a saved model, and print its budget, what it realised and whether to trust it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from holdfast.cli.common import TestedModel, forwards, require_free, show, write_out


@dataclass(frozen=True)
class Attack(TestedModel):
    """Attack a saved model with one attack, and print how much its predictions or its routing change.

    words, generic, typos: change a share of the words of a text, except stop words (--rate): swap them for other words of
    the model's vocabulary, swap them for the papers' AAA (for many models the unknown word, which is easy to predict), or
    misspell them. fgsm, pgd, spsa: change pixels between 0 and 1, in the l_inf norm (--budget); with several budgets, the
    result is a curve. corruptions: apply all common corruptions that need no files, at severities from 1 to 5 (--budget).
    routes: find the smallest perturbations of
    router inputs that flip tokens, by layer (--budget, as a multiple of each router input's norm). Attacks of plugins and of
    installed packages have their own names.

    Examples: `holdfast attack comparison/cells/smoe-seed0 words --rate 0.1`,
    `holdfast attack comparison/cells/smoe-seed0 routes --budget 0.05`,
    `holdfast attack runs/vmoe pgd --budget 0.03 --steps 40`,
    `holdfast attack runs/vmoe pgd,fgsm,spsa --budget 0.5/255 1/255 2/255 --page curve.html`
    """

    model: Positional[str]
    """A folder that `holdfast train` or `compare` wrote, or any Hugging Face folder or name."""
    kind: Annotated[Positional[str], arg(metavar="ATTACK")]
    """The attack to run: words, generic, typos, fgsm, pgd, spsa, corruptions, routes, or one of a plugin. Attacks on pixels
    can be joined by commas."""
    rate: float | None = None
    """For attacks on text: the probability that a word changes, if it is no stop word. The realised share is printed."""
    budget: tuple[str, ...] = ()
    """The largest perturbation, 0.03 or 1/255; for attacks on pixels and for corruptions, several are possible. There is no
    default, because a result without its budget has no meaning."""
    steps: int = 20
    """Number of steps of an iterative attack."""
    step: str | None = None
    """pgd, spsa: the size of a step, 0.01 or 0.5/255; by default 2.5 budget / steps."""
    restarts: int | None = None
    """pgd: how many times to start, each time at another random point; by default once."""
    random_start: bool | None = None
    """pgd: start at a random point of the allowed ball, which is the default, or at the clean image."""
    samples: int | None = None
    """spsa: pairs of probes in a step; by default 64."""
    examples: int = 512
    """How many images to attack; for routes, how many tokens."""
    seed: int = 0
    """Seed of all random numbers."""
    page: Path | None = None
    """For attacks on pixels: write an HTML page with the curves of the error against the budget."""

    def run(self) -> None:
        from holdfast.train import attack_images, attack_routers
        from holdfast.train.training import quiet
        from holdfast.version import versions

        self.plugins.load()
        kinds = [name.strip() for name in self.kind.split(",")]
        budgets, options = self._budgets(kinds), self._options(kinds)
        for path in (self.out, self.page):
            require_free(path, self.force)
        quiet()
        model, task = self.test_data.load(self.model, self.loading)
        with forwards(model, f"attacking {self.model}", None):
            how: dict[str, Any] = {"steps": self.steps, "seed": self.seed}
            if self.rate is not None:
                found = task.attack_words(model, self.kind, rate=self.rate, seed=self.seed)
            elif self.kind == "routes":
                found = attack_routers(model, task, budget=budgets[0], tokens=self.examples, **how)
            else:
                found = attack_images(model, task, kinds, budget=budgets, examples=self.examples, **how, **options)
        from holdfast.report.attack_page import attack_table, render_attack
        from holdfast.report.page_shell import write_page

        show(attack_table(found))
        for flag in found["flags"]:
            print(f"Warning, this result may be wrong: {flag['kind']}: {flag['detail']}")
        stored = {"model": self.model, "data": task.describe()["data"], "versions": versions(), **found}
        write_out(self.out, stored)
        if self.page is not None:
            write_page(self.page, lambda: render_attack(stored), force=True)
            print(f"Page: {self.page}")

    def _budgets(self, kinds: list[str]) -> list[float]:
        """Return the budgets; none for attacks on texts, which need --rate. Raise ValueError for a wrong one or none."""
        from holdfast.attacks.registry import TABLES, find_attack
        from holdfast.checked import read_number

        takes = ["budget" if kind in TABLES else find_attack(kind).budget for kind in kinds]
        if len(kinds) > 1 and ("rate" in takes or "routes" in kinds):
            raise ValueError(f"{', '.join(kinds)} cannot be run together; only attacks on pixels can.")
        given = {"rate": self.rate is not None, "budget": bool(self.budget)}
        wanted, other = ("rate", "budget") if takes[0] == "rate" else ("budget", "rate")
        if given[other]:
            raise ValueError(f"{self.kind} takes --{wanted}, not --{other}.")
        if not given[wanted]:
            raise ValueError(f"{self.kind} needs --{wanted}: a result without it has no meaning.")
        if "routes" in kinds and len(self.budget) > 1:
            raise ValueError("routes takes one --budget.")
        return [read_number(budget) for budget in self.budget]

    def _options(self, kinds: list[str]) -> dict[str, Any]:
        """Return the further options of attacks on pixels. Raise ValueError if the attacks do not have them."""
        from holdfast.checked import read_number
        from holdfast.train.image_attacks import check_images_attacks

        step = None if self.step is None else read_number(self.step)
        given = {"step": step, "restarts": self.restarts, "random_start": self.random_start, "samples": self.samples}
        options = {name: value for name, value in given.items() if value is not None}
        if self.rate is not None or kinds == ["routes"]:
            if options or self.page is not None:
                raise ValueError(f"{next(iter(options), 'page')} is for attacks on pixels, and {self.kind} is none.")
        else:
            check_images_attacks(kinds, self._budgets(kinds), options)
            if self.page is not None and kinds == ["corruptions"]:
                raise ValueError("corruptions have no curve; write their numbers with --out.")
        return options

"""`holdfast attack`: run one attack on a saved model, and print its budget, what it realised and whether to trust it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from holdfast.cli.common import TestedModel, forwards, require_free, show, write_out
from holdfast.files import no_such_path
from holdfast.progress import quiet


@dataclass(frozen=True)
class Attack(TestedModel):
    """Attack a saved model with one attack, and print how much its predictions or its routing change.

    words, generic, typos: change a share of the words of a text, except stop words (--rate): swap them for other words of
    the model's vocabulary, swap them for the papers' AAA (for many models the unknown word, which is easy to predict), or
    misspell them. synonyms, guided-typos: the same share, but the words and their replacements that raise the loss of the
    model most: words that are near in the model's embeddings or in a table, or typos. fgsm, pgd, spsa: change pixels between
    0 and 1, in the l_inf norm (--budget); of pictures with questions, fgsm and pgd only. adaptive: follow the routes beside
    the loss; universal: one perturbation for all images. corruptions: apply all fifteen common corruptions, at severities
    from 1 to 5 (--budget).
    routes: find the smallest perturbations of router inputs that flip tokens, by layer (--budget, as a multiple of each
    router input's norm). In the same way, universal-routes looks for one perturbation that flips as many tokens as possible,
    expert pushes all tokens to one expert (--expert), overload gives one expert as many tokens as possible, and imbalance
    makes the loads as uneven as possible. pgd and adaptive with --on embeddings: raise the loss of a model of texts
    by perturbing the embeddings of its tokens. suffix: find tokens (--budget, how many) that, put into a text, send those
    after them to one expert. All are searches: the worst case may be worse. Attacks of plugins and of installed packages
    have their own names.

    Several rates or budgets make a curve.

    Examples: `holdfast attack comparison/cells/smoe-seed0 words --rate 0.1`,
    `holdfast attack comparison/cells/smoe-seed0 synonyms --rate 0.1 --synonyms table.tsv`,
    `holdfast attack comparison/cells/smoe-seed0 routes --budget 0.01 0.03 0.1 --page curve.html`,
    `holdfast attack comparison/cells/smoe-seed0 overload --budget 0.1 --on embeddings`,
    `holdfast attack comparison/cells/smoe-seed0 suffix --budget 1 3 --expert 2`,
    `holdfast attack comparison/cells/smoe-seed0 pgd,adaptive --budget 0.1 --on embeddings`,
    `holdfast attack runs/vmoe pgd --budget 0.03 --steps 40`,
    `holdfast attack runs/vmoe pgd,fgsm,spsa --budget 0.5/255 1/255 2/255 --page curve.html`
    """

    kind: Annotated[Positional[str], arg(metavar="ATTACK")]
    """The attack to run: words, generic, typos, synonyms, guided-typos, fgsm, pgd, spsa, adaptive, universal, corruptions,
    routes, universal-routes, expert, overload, imbalance, suffix, or one of a plugin. Attacks on pixels can be joined by
    commas."""
    rate: tuple[float, ...] = ()
    """For attacks on text: the probability that a word changes, if it is no stop word. The realised share is printed."""
    synonyms: Path | None = None
    """synonyms: take the replacements of words from this file, and not from the model's embeddings: a JSON object from words
    to lists of words, or lines of a word and its synonyms, separated by tabs."""
    encoder: Path | None = None
    """synonyms: a folder with a sentence encoder; replacements must keep the cosine of a text and its original at 0.8."""
    budget: tuple[str, ...] = ()
    """The largest perturbation, 0.03 or 1/255; of suffix, how many tokens. There is no default, because a result without its
    budget has no meaning."""
    expert: int | None = None
    """expert, suffix: the number of the expert that tokens are sent to, from 0 on."""
    on: Literal["inputs", "embeddings"] = "inputs"
    """For attacks on routers: perturb the inputs of each router, or the embeddings of a text's tokens. pgd and adaptive
    attack a text with embeddings."""
    steps: int = 20
    """Number of steps of an iterative attack."""
    step: str | None = None
    """pgd, spsa, adaptive, universal: the size of a step, 0.01 or 0.5/255; by default 2.5 budget / steps."""
    restarts: int | None = None
    """pgd, adaptive, universal: how many times to start, each time at another random point; by default once."""
    random_start: bool | None = None
    """pgd: start at a random point of the allowed ball, which is the default, or at the clean image."""
    samples: int | None = None
    """spsa: pairs of probes in a step; by default 64."""
    examples: int = 512
    """How many images to attack; for attacks on routers or embeddings of texts, how many tokens."""
    seed: int = 0
    """Seed of all random numbers."""
    page: Path | None = None
    """Write an HTML page with the curves against the rate or the budget."""

    def run(self) -> None:
        from holdfast.auditing.suffixes import attack_suffix
        from holdfast.train import attack_images, attack_routers
        from holdfast.train.embedding_attacks import attack_embeddings
        from holdfast.train.route_attacks import ROUTE_ATTACKS
        from holdfast.train.text_task import attack_words
        from holdfast.version import versions

        kinds = [name.strip() for name in self.kind.split(",")]
        budgets = self._budgets(kinds)
        options = self._options(kinds, budgets)
        for path in (self.out, self.page):
            require_free(path, self.force)
        for path in (self.synonyms, self.encoder):
            if path is not None and not path.exists():
                raise ValueError(no_such_path(path))
        quiet()
        model, task = self.test_data.load(self.model, self.loading)
        with forwards(model, f"attacking {self.model}", None):
            how: dict[str, Any] = {"steps": self.steps, "seed": self.seed}
            if self.rate:
                files = {"synonyms": self.synonyms, "encoder": self.encoder}
                found = attack_words(model, task, self.kind, sorted(set(self.rate)), seed=self.seed, **files)
            elif self.kind == "suffix":
                found = attack_suffix(model, task, budget=budgets, tokens=self.examples, **how, **options)
            elif self.kind in ROUTE_ATTACKS:
                found = attack_routers(model, task, self.kind, budget=budgets, tokens=self.examples, **how, **options)
            elif self.on == "embeddings":
                found = attack_embeddings(model, task, kinds, budget=budgets, tokens=self.examples, **how, **options)
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
        if len(kinds) > 1 and ("rate" in takes or {*kinds} & TABLES.keys() - {"corruptions"}):
            raise ValueError(f"{', '.join(kinds)} cannot be run together; only attacks on pixels can.")
        given = {"rate": bool(self.rate), "budget": bool(self.budget)}
        wanted, other = ("rate", "budget") if takes[0] == "rate" else ("budget", "rate")
        if given[other]:
            raise ValueError(f"{self.kind} takes --{wanted}, not --{other}.")
        if not given[wanted]:
            raise ValueError(f"{self.kind} needs --{wanted}: a result without it has no meaning.")
        return [read_number(budget) for budget in self.budget]

    def _options(self, kinds: list[str], budgets: list[float]) -> dict[str, Any]:
        """Return the further options of attacks with a budget. Raise ValueError if the attacks do not have them."""
        from holdfast.attacks.registry import TABLES
        from holdfast.checked import read_number
        from holdfast.train.embedding_attacks import EMBEDDING_ATTACKS
        from holdfast.train.image_attacks import check_images_attacks

        step = None if self.step is None else read_number(self.step)
        given = {"step": step, "restarts": self.restarts, "random_start": self.random_start, "samples": self.samples}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        read = {"synonyms": self.synonyms, "encoder": self.encoder}
        if wrong := [name for name, path in read.items() if path is not None and not self.rate]:
            raise ValueError(f"{wrong[0]} is for attacks on text, and {self.kind} is none.")
        on_routers = kinds[0] in TABLES.keys() - {"corruptions"}
        towards = self.kind in ("expert", "suffix")
        if (self.expert is not None) != towards:
            raise ValueError("--expert is for the attacks expert and suffix, which need it: the number of the expert.")
        if self.on == "embeddings" and {*kinds} <= {*EMBEDDING_ATTACKS}:
            if wrong := [name for name in options if name not in ("step", "restarts")]:
                raise ValueError(f"{self.kind} on embeddings has no option {wrong[0]}; its options are: step, restarts.")
            return options
        if self.on != "inputs" and (not on_routers or self.kind == "suffix"):
            raise ValueError(f"--on embeddings is for attacks on routers, pgd and adaptive, and {self.kind} is none.")
        if self.rate or on_routers:
            if options:
                raise ValueError(f"{next(iter(options))} is for attacks on pixels, and {self.kind} is none.")
            options = {"on": self.on} if on_routers and self.kind != "suffix" else {}
            options |= {} if self.expert is None else {"expert": self.expert}
        else:
            check_images_attacks(kinds, budgets, options)
            if self.page is not None and kinds == ["corruptions"]:
                raise ValueError("corruptions have no curve; write their numbers with --out.")
        return options

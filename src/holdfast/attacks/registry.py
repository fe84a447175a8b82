"""The registry of attacks: what `holdfast attack MODEL NAME`, a recipe's `attack.name` and `audit --perturb` may name.

An attack is a function on texts or on pixels. It is called with those of the known keywords that it has, and always with
its budget. What it returns is checked: a text changes only where the result says so, and pixels only within the budget.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack, final, get_args, get_origin

from torch import Tensor

from holdfast.attacks.adaptive import adaptive
from holdfast.attacks.flags import Model
from holdfast.attacks.guided_words import guided_typos, synonyms
from holdfast.attacks.inputs import AttackedInputs
from holdfast.attacks.pixels import fgsm, pgd, spsa, universal
from holdfast.attacks.text import GENERIC, AttackedText, misspell, swap_words
from holdfast.attacks.threat import distances
from holdfast.errors import unknown_name
from holdfast.plugins import Registry, check_name, watch

BUDGETS = {"text": "rate", "images": "budget"}  # task: the keyword of an attack's budget, which it must have
PIXEL_OPTIONS = ("top", "step", "restarts", "random_start", "samples")  # of attacks on pixels; passed only if given
GUIDES = ("passages", "score", "neighbours", "similarity")  # of attacks that read the model; passed only if named
KEYWORDS = {
    "text": ("rate", "seed", "keys", "words", "pieces", *GUIDES),
    "images": ("budget", "steps", "seed", "batch", *PIXEL_OPTIONS),
}
TABLES = {  # `holdfast attack` runs these too; each returns a table, not one attacked text or batch
    "corruptions": "every common corruption, at one severity",
    "routes": "the smallest perturbations of router inputs that flip tokens",
    "universal-routes": "one perturbation of all router inputs that flips as many tokens as possible",
    "expert": "router inputs perturbed so that tokens ask for one expert",
    "overload": "router inputs perturbed so that one expert is asked for by as many tokens as possible",
    "imbalance": "router inputs perturbed so that the loads of experts are as uneven as possible",
    "suffix": "tokens put into a text so that those after them ask for one expert",
}
ROUNDING = 1e-6  # relative to the budget

Function = TypeVar("Function", bound=Callable[..., Any])


@final
@dataclass(frozen=True)
class Attack:
    """A named attack on texts or on pixels."""

    name: str
    about: str
    task: str  # "text" or "images"
    run: Callable[..., Any]

    def __post_init__(self) -> None:
        check_name(self.name, "an attack")
        if self.name in TABLES:
            raise ValueError(f"there is already an attack named {self.name!r}; choose another name.")
        if self.task not in BUDGETS:
            raise ValueError(f"attack {self.name!r}: {unknown_name('task', self.task, BUDGETS)}")
        if self.budget not in self.keywords:
            why = "a result without its budget has no meaning"
            raise ValueError(f"attack {self.name!r}: its function has no parameter {self.budget}; {why}.")

    @property
    def budget(self) -> str:
        """The keyword of its budget: "rate", the share of words, or "budget", the largest perturbation."""
        return BUDGETS[self.task]

    @property
    def keywords(self) -> list[str]:
        """The known keywords that its function takes."""
        parameters = inspect.signature(self.run).parameters
        others = [one.annotation for one in parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD]
        typed = [get_args(each)[0] for each in others if get_origin(each) is Unpack]
        named = {*parameters, *(name for each in typed for name in each.__annotations__)}
        takes_all = len(typed) < len(others)
        return [name for name in KEYWORDS[self.task] if name in named or (takes_all and name not in GUIDES)]

    @property
    def reads_model(self) -> bool:
        """Whether it attacks texts with the losses of a model, so that every model has attacked texts of its own."""
        score = inspect.signature(self.run).parameters.get("score")
        return self.task == "text" and score is not None and score.default is inspect.Parameter.empty


ATTACKS: Registry[Attack] = Registry("attack")
watch(ATTACKS)


def register_attack(name: str, *, task: str, about: str) -> Callable[[Function], Function]:
    """Return a decorator that makes a function an attack: `holdfast attack MODEL NAME`, `attack.name` in recipes.

    task="text"       attack(texts, *, rate, seed, keys) returns an `AttackedText`; `holdfast.attacks.change_words` makes one
                      from a function of a word. It may also have the keywords `words` (the words that the model knows) and
                      `pieces` (the spans of each document's tokens; None if the tokeniser can write every word). With the
                      required keyword `score` it attacks a model: it gets `score`, and if it has them `passages`,
                      `neighbours` and `similarity`, as `holdfast.attacks.synonyms` does
    task="images"     attack(model, pixels, labels, *, budget, steps, seed, batch) returns an `AttackedInputs`, which
                      `holdfast.attacks.Threat.run` makes; the model maps pixels between 0 and 1 to logits

    The budget (`rate` or `budget`) is required; other keywords are passed only if the function has them. Attacks on pixels
    may also have the keywords of `PIXEL_OPTIONS`, which are those of `holdfast.attacks.pgd` and `spsa`.

    about   one line of help

    Example:
        @holdfast.register_attack("shout", task="text", about="words in capital letters")
        def shout(texts, *, rate, seed, keys):
            return change_words(texts, "shout", lambda word, random: word.upper(), rate=rate, seed=seed, keys=keys)
    """

    def add(attack: Function) -> Function:
        ATTACKS.register(Attack(name, about, task, attack))
        return attack

    return add


def find_attack(name: str, task: str | None = None) -> Attack:
    """Return the attack of this name. Raise ValueError if there is none, or if it is for another task."""
    if name not in {attack.name for attack in ATTACKS}:
        known = [attack.name for attack in ATTACKS if task in (None, attack.task)]
        if name in TABLES and task is not None:
            raise ValueError(f"{name} only makes a table, `holdfast attack MODEL {name}`; use {', '.join(known)} here.")
        raise ValueError(ATTACKS.unknown(name, [*known, *(TABLES if task is None else ())]))
    found = ATTACKS[name]
    if task is not None and found.task != task:
        usable = ", ".join(attack.name for attack in ATTACKS if attack.task == task)
        raise ValueError(f"{name} is an attack for the task {found.task}, but this task is {task}: use {usable}.")
    return found


def attack_texts(
    attack: Attack, texts: Sequence[str], *, rate: float, seed: int, keys: Sequence[str] | None = None, **others: Any
) -> AttackedText:
    """Return the attacked texts; `others` are keywords of `KEYWORDS`, or functions that return their value when needed."""
    result = attack.run(texts, **_wanted(attack, {"rate": rate, "seed": seed, "keys": keys, **others}))
    if not isinstance(result, AttackedText):
        raise ValueError(f"attack {attack.name!r} returned {type(result).__name__}; expected an AttackedText.")
    if not len(result.texts) == len(result.changes) == len(result.words) == len(texts):
        raise ValueError(f"attack {attack.name!r} returned {len(result.texts)} texts for {len(texts)}.")
    for number, (before, after) in enumerate(zip(texts, result.texts, strict=True)):
        changes = result.changes[number]
        kept = _untouched(before, [change.before for change in changes])
        if kept != _untouched(after, [change.after for change in changes]):
            raise ValueError(f"attack {attack.name!r} changed text {number} in places that are not in its list of changes.")
    return result


def _untouched(text: str, changed: Sequence[tuple[int, int]]) -> list[str]:
    """Return what is between the changed spans."""
    starts, ends = [0, *(end for _, end in changed)], [*(start for start, _ in changed), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def attack_pixels(
    attack: Attack, model: Model, pixels: Tensor, labels: Tensor, *, budget: float, **others: Any
) -> AttackedInputs:
    """Return the attacked pixels; `others` are keywords of `KEYWORDS`."""
    result = attack.run(model, pixels, labels, **_wanted(attack, {"budget": budget, **others}))
    if not isinstance(result, AttackedInputs):
        raise ValueError(f"attack {attack.name!r} returned {type(result).__name__}; expected an AttackedInputs.")
    if result.inputs.shape != pixels.shape or result.success.shape != labels.shape:
        raise ValueError(f"attack {attack.name!r} returned inputs of shape {tuple(result.inputs.shape)}, not of the pixels.")
    farthest = float(distances(result.inputs, pixels, result.norm).max()) if len(pixels) else 0.0
    if not farthest <= budget * (1 + ROUNDING):
        change = f"{farthest:.4g} ({result.norm})"
        raise ValueError(f"attack {attack.name!r} changed an image by {change}; its budget is {budget:g}.")
    return result


def require_options(attack: Attack, options: Iterable[str]) -> None:
    """Raise ValueError if an attack does not have one of these options."""
    accepted = attack.keywords
    for option in options:
        if option not in accepted:
            usable = ", ".join(name for name in PIXEL_OPTIONS if name in accepted and name != "top") or "none"
            raise ValueError(f"{attack.name} has no option {option}; its options are: {usable}.")


def _wanted(attack: Attack, given: Mapping[str, Any]) -> dict[str, Any]:
    accepted = attack.keywords
    return {name: value() if callable(value) else value for name, value in given.items() if name in accepted}


def _swap_for_known_words(texts: Sequence[str], *, words: Sequence[str], pieces: Any = None, **how: Any) -> AttackedText:
    if len({word.lower() for word in words}) < 2:  # no other word can be swapped in
        return swap_words(texts, **how)
    return swap_words(texts, words=words, pieces=pieces, **how)


def _swap_for_generic(texts: Sequence[str], *, rate: float, seed: int, keys: Sequence[str] | None = None) -> AttackedText:
    return swap_words(texts, rate=rate, seed=seed, keys=keys)


for _attack in (
    Attack("words", "words swapped for others that the model knows", "text", _swap_for_known_words),
    Attack("generic", f"words swapped for the papers' token, {GENERIC}", "text", _swap_for_generic),
    Attack("typos", "words misspelt", "text", misspell),
    Attack("synonyms", "words replaced by near ones where the loss of the model rises most", "text", synonyms),
    Attack("guided-typos", "words misspelt where the loss of the model rises most", "text", guided_typos),
    Attack("fgsm", "one step along the sign of the gradient", "images", fgsm),
    Attack("pgd", "many small steps along the sign of the gradient, each followed by a projection", "images", pgd),
    Attack("spsa", "steps along a gradient that is estimated from logits only", "images", spsa),
    Attack("adaptive", "steps that raise the loss and change routes at once", "images", adaptive),
    Attack("universal", "one perturbation for all images", "images", universal),
):
    ATTACKS.add(_attack)

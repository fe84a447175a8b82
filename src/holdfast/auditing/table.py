"""The perturbations by name, and what each name stands for."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from holdfast.attacks.seeds import check_seed
from holdfast.attacks.threat import check_budget, check_rate
from holdfast.auditing.attacking import Attack
from holdfast.auditing.company import Alone, Padded
from holdfast.auditing.numeric import Again, Backend, ModelDtype, Noise, RoutingDtype
from holdfast.auditing.perturbation import Perturbation
from holdfast.auditing.rounding import DTYPES
from holdfast.auditing.samples import Reader, check_size
from holdfast.auditing.subject import Audited
from holdfast.auditing.words import Words
from holdfast.suggest import unknown

PERTURBATIONS = {
    "none": "the same forward twice: nothing may change",
    "noise": "noise at every router's input, at each of the levels",
    "routing": "router inputs and weights rounded to bf16 and to fp16",
    "model": "the whole model in bf16, or in fp32 where it is short already",
    "batch": "each sequence alone; padding on the left; on the right",
    "backend": "the experts by another of transformers' functions",
    "words": "words swapped; compares the tokens left alone",
    "typos": "words misspelt; compares the tokens left alone",
    "attack": "router inputs of a few tokens moved so that they change experts, at worst",
}
MOST_LEVELS = 8  # of noise: each is a forward of everything


@final
@dataclass(frozen=True)
class Settings:
    """Everything that decides what an audit does, beside the model and its inputs."""

    perturb: tuple[str, ...]
    noise: tuple[float, ...]
    seed: int = 0
    batch: int = 8  # sequences, of texts
    length: int = 128  # tokens of a sequence, of texts
    tokens: int | None = None  # stop after so many
    rate: float = 0.1  # of words swapped or misspelt
    budget: float = 0.01  # of the routing attack, as a share of a token's length
    attack_tokens: int = 64
    at_risk: int = 20

    def __post_init__(self) -> None:
        for name in self.perturb:
            if name not in PERTURBATIONS:
                raise ValueError(unknown("perturbation", name, PERTURBATIONS))
        if len(self.noise) > MOST_LEVELS:
            raise ValueError(f"there are {len(self.noise)} noise levels; {MOST_LEVELS} at most, each runs the whole data.")
        for level in self.noise:
            if not isinstance(level, int | float) or not 0 < level <= 1:
                raise ValueError(f"a noise level is {level!r}; expected a share of each token's length, above 0, at most 1.")
        check_size("attack_tokens", self.attack_tokens)
        check_size("at_risk", self.at_risk)
        check_seed(self.seed)
        check_rate(self.rate)
        check_budget(self.budget)

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "perturb": list(self.perturb), "noise": list(self.noise)}


def names_of(settings: Settings) -> list[str]:
    """What is run is called so in the report; of a model's two other dtypes, both, because no model is there yet."""
    several = {
        "noise": [f"noise.{level:g}" for level in settings.noise],
        "routing": [f"routing.{dtype}" for dtype in DTYPES],
        "model": ["model.bf16", "model.fp32"],
        "batch": ["batch.alone", "batch.left", "batch.right"],
    }
    return [name for one in PERTURBATIONS if one in settings.perturb for name in several.get(one, [one])]


def perturbations(settings: Settings, audited: Audited, reader: Reader | None) -> list[Perturbation]:
    """In the order of the table, whatever the order of the names."""
    makers: dict[str, Sequence[Perturbation]] = {
        "none": [Again()],
        "noise": [Noise(level, settings.seed) for level in dict.fromkeys(settings.noise)],
        "routing": [RoutingDtype(name) for name in DTYPES],
        "model": [ModelDtype(audited)],
        "batch": [Alone(), Padded("left"), Padded("right")],
        "backend": [Backend(audited)],
        "words": [Words("words", reader, settings.rate, settings.seed, settings.length)],
        "typos": [Words("typos", reader, settings.rate, settings.seed, settings.length)],
        "attack": [Attack(settings.budget, settings.attack_tokens, settings.seed)],
    }
    return [one for name, made in makers.items() if name in settings.perturb for one in made]

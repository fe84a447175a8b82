"""The routes of a few tokens through all layers, as a record that is stored and that pages show.

    View              the examples and the routes of their tokens
    Example           a text as its tokens, or a picture as its pixels and patches
    Routes            of every layer: experts, weights, margins and radii; and what each perturbation changes

Tokens are numbered through all examples. Numbers are rounded, because a page has tens of thousands of them.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, final

import torch
from torch import Tensor

from holdfast.checked import Limits
from holdfast.metrics.selection import Boundary, margins
from holdfast.routing import Routing

MOST_TOKENS = 512  # of a view
MOST_ROUTES = 8000  # tokens times layers of a view: deep models show fewer tokens
THOUSAND = 1000
Natural = Annotated[int, Limits(0, math.inf, "a whole number from 0")]
Slots = tuple[list[list[int]], list[list[int]]]  # of each token, its experts and their weights


@dataclass(frozen=True)
class Picture:
    label: str
    said: str
    width: int
    pixels: str  # base64 of a byte for each pixel, row by row; 0 is black
    grid: list[Natural]  # patches down and across

    def __post_init__(self) -> None:
        if len(self.grid) != 2:
            raise ValueError("the grid of a picture has two numbers: its patches down and across")
        if self.width < 1 or not self.size or self.size % self.width:
            raise ValueError("the rows of pixels differ in length")

    @property
    def size(self) -> int:
        """The number of pixels."""
        return len(base64.b64decode(self.pixels, validate=True))


@dataclass(frozen=True)
class Example:
    """A text, as the texts of its tokens, which joined are the text; or a picture."""

    pieces: list[str] = field(default_factory=list)
    picture: Picture | None = None

    @property
    def tokens(self) -> int:
        return len(self.pieces) if self.picture is None else math.prod(self.picture.grid)


@dataclass(frozen=True)
class LayerRoutes:
    """One layer: for each token its selected experts with their weights, its margin and its relative radius."""

    experts: list[list[Natural]]  # the largest weight first
    weights: list[list[int]]  # in thousandths
    margins: list[float | None]  # by how much the last selected expert is ahead of the next; None: infinite
    radii: list[float | None] | None = None  # as shares of the norm of the router's input; None: infinite, or not known
    core: Natural | None = None  # a token flips if the set of so many of its experts changes; None: of all of them

    def __post_init__(self) -> None:
        radii = self.experts if self.radii is None else self.radii
        if not len(self.experts) == len(self.weights) == len(self.margins) == len(radii):
            raise ValueError("a layer needs experts, weights, a margin and a radius for each token")
        if _slots_differ(self.experts, self.weights):
            raise ValueError("a layer needs a weight for each expert of a token")


@dataclass(frozen=True)
class ChangedRoutes:
    """The tokens of one layer whose experts a perturbation changes, with the experts and weights after it."""

    tokens: list[Natural]
    experts: list[list[Natural]]
    weights: list[list[int]]  # in thousandths

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.experts) or _slots_differ(self.experts, self.weights):
            raise ValueError("changed routes need experts, and a weight for each, for each token")


@dataclass(frozen=True)
class PerturbedRoutes:
    """What one perturbation changes. It may change the text, so that only some tokens can be compared."""

    about: str
    compared: list[list[Natural]]  # [first, last + 1] of each run of tokens
    layers: list[ChangedRoutes]


@dataclass(frozen=True)
class Routes:
    """The routes of some tokens by one router."""

    layers: list[LayerRoutes]
    perturbed: dict[str, PerturbedRoutes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(len(one.layers) != len(self.layers) for one in self.perturbed.values()):
            raise ValueError("a perturbation needs changed routes for each layer")


@dataclass(frozen=True)
class View:
    """A few examples, and the routes of their tokens."""

    examples: list[Example]
    routes: Routes

    def __post_init__(self) -> None:
        if any(len(layer.experts) != self.tokens for layer in self.routes.layers):
            raise ValueError("each layer needs a route for each token and each patch")

    @property
    def tokens(self) -> int:
        return sum(example.tokens for example in self.examples)


def tokens_to_show(layers: int) -> int:
    """Return how many tokens a view of a model with so many MoE layers has at most."""
    return max(1, min(MOST_TOKENS, MOST_ROUTES // max(1, layers)))


def patch_rows(lengths: Sequence[int], pictures: int) -> tuple[int, list[Tensor]]:
    """Return the side of the grid of patches, and by layer the row of each patch of the first pictures.

    lengths   by layer, the tokens of a picture: its patches in rows, after other tokens such as that of the class

    Later layers of Swin have larger patches: one patch of them is several of the finest grid.
    """
    sides = [math.isqrt(length) for length in lengths]
    finest = max(sides)
    rows = []
    for length, side in zip(lengths, sides, strict=True):
        along = torch.arange(finest) * side // finest
        within = length - side * side + (along[:, None] * side + along).flatten()
        rows.append((torch.arange(pictures)[:, None] * length + within).flatten())
    return finest, rows


def picture(pixels: Tensor, label: str, said: str, side: int) -> Picture:
    """Return a picture with a square grid of patches. `pixels (C,H,W)` from 0 to 1 are shown in grey."""
    grey = (255 * pixels.detach().float().cpu().mean(0).clamp(0, 1)).round().byte()
    return Picture(label, said, pixels.shape[-1], base64.b64encode(grey.numpy().tobytes()).decode(), [side, side])


def layer_routes(
    routing: Routing, rows: Tensor, boundary: Boundary, core: int | None, radii: Tensor | None = None
) -> LayerRoutes:
    """Return the routes of some rows of a layer; `radii (T,)` are relative, of all rows. A row of -1 has no experts."""
    here = rows >= 0
    shown = _select(routing, rows[here])
    experts, weights = slots(shown)
    known = None if radii is None else _filled(rounded(radii.reshape(-1)[rows[here].to(radii.device)]), here, None)
    own = _filled(experts, here, []), _filled(weights, here, []), _filled(rounded(margins(shown, boundary)), here, None)
    return LayerRoutes(*own, known, core)


def _filled(values: Sequence[Any], here: Tensor, absent: Any) -> list[Any]:
    """Return the values, with `absent` where a token has none."""
    each = iter(values)
    return [next(each) if one else absent for one in here.tolist()]


@final
class RouteChanges:
    """Collect what a perturbation changes in the routes of the shown tokens. Parts of a batch may be added one by one.

    rows    by layer, the rows of the shown tokens in the unperturbed forward; -1 for tokens that the layer does not have
    """

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.rows = [own.tolist() for own in rows]
        self.compared: set[int] = set()
        self.changed: list[dict[int, tuple[list[int], list[int]]]] = [{} for _ in rows]

    def add(self, layer: int, before: Routing, after: Routing, rows: tuple[Tensor, Tensor]) -> None:
        """Add one layer; `rows` are those of the same tokens in both forwards."""
        if not self.rows:
            return
        first, second = rows[0].tolist(), rows[1].tolist()
        place = dict(zip(first, second, strict=True))
        shown = [(token, row, place[row]) for token, row in enumerate(self.rows[layer]) if row in place]
        if not shown:
            return
        tokens, old, new = zip(*shown, strict=True)
        self.compared.update(tokens)
        was, now = (slots(_select(routing, torch.tensor(own))) for routing, own in ((before, old), (after, new)))
        for token, earlier, experts, weights in zip(tokens, was[0], *now, strict=True):
            if earlier != experts:
                self.changed[layer][token] = (experts, weights)

    def result(self, about: str) -> PerturbedRoutes:
        layers = []
        for changed in self.changed:
            tokens = sorted(changed)
            layers.append(ChangedRoutes(tokens, *([changed[token][part] for token in tokens] for part in (0, 1))))
        return PerturbedRoutes(about, runs(sorted(self.compared)), layers)


def slots(routing: Routing) -> Slots:
    """Return the experts in use of each token, and their weights in thousandths."""
    used, weights = routing.used, (THOUSAND * routing.weights.double()).round().long()
    counts = used.sum(1).tolist()
    experts, thousandths = ([part.tolist() for part in rows[used].split(counts)] for rows in (routing.experts, weights))
    return experts, thousandths


def rounded(values: Tensor) -> list[float | None]:
    """Return numbers with three significant digits; None where they are not finite."""
    return [float(f"{value:.3g}") if math.isfinite(value) else None for value in values.double().tolist()]


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Return ascending numbers as runs [first, last + 1]."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] = number + 1
        else:
            found.append([number, number + 1])
    return found


def _select(routing: Routing, rows: Tensor) -> Routing:
    return routing.map_tokens(lambda values: values[rows.to(values.device)])


def _slots_differ(experts: list[list[int]], weights: list[list[int]]) -> bool:
    return list(map(len, experts)) != list(map(len, weights))

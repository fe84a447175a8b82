"""The attacks of `holdfast attack --on embeddings` on the loss of a model of texts: PGD, and PGD that follows routes too.

With x the embeddings of a text, each token within budget |x_t| (l2):

    pgd         maximise loss(x')
    adaptive    maximise loss(x') + strength mean_{l,t} min(margin_lt(x'), 0), and in half of the runs loss(x')

as `attacks.adaptive` does for images. The loss of a language model is the mean over the tokens to predict, so that all
tokens of a text are perturbed together; the worst perturbation of each text is kept.

B texts of N tokens, d entries of an embedding
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.attacks.adaptive import GOAL, layer_of
from holdfast.attacks.flags import Flag, black_box_flag, randomised_flag, zero_gradient_flag
from holdfast.attacks.inputs import ascending, per_row
from holdfast.attacks.threat import (
    check_budget,
    check_count,
    check_seed,
    derived_seed,
    distances,
    gradient,
    row_norms,
)
from holdfast.errors import require_known
from holdfast.hub import has_routers
from holdfast.hub.tracing import live_routings, own_hooks
from holdfast.metrics.tasks import IGNORED
from holdfast.routing import Router
from holdfast.train.label_task import LabelTask
from holdfast.train.robust_step import Ball
from holdfast.train.route_attacks import Rounded
from holdfast.train.task import AttackTable, Inputs, Task, evenly_spaced, forward
from holdfast.train.text_task import TextTask, perplexity, scored_tokens, tokens_per_batch

EMBEDDING_ATTACKS = ("pgd", "adaptive")
STRENGTH, TRIES = 5.0, 4  # of the term of the routes; random perturbations, to see whether gradients mislead
LATE = 0.1  # of the rise of the loss in the last quarter of the steps, above which more steps would find more


@final
@dataclass
class _Texts:
    """Some texts, and the worst perturbation of each that was found so far."""

    model: Any
    inputs: Inputs
    labels: Tensor  # (B,N) the token to predict at each place, or (B,) classes
    together: bool  # a router reads the whole batch, so that its texts are kept together

    def __post_init__(self) -> None:
        self.real = self.inputs["attention_mask"].bool().to(self.model.device)
        self.labels = self.labels.to(self.model.device)
        with torch.no_grad():
            self.clean: Tensor = self.model.get_input_embeddings()(self.inputs["input_ids"].to(self.model.device))
            self.best = self.clean.float()
            self.loss, self.wrong = self.losses(self.best)
        self.clean_loss = self.loss

    def losses(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B,) the mean loss of each text, differentiable, and (B,) bool whether its class is wrong."""
        with own_hooks() as hooks:
            hooks.after(self.model.get_input_embeddings(), lambda *_: Rounded.apply(embeddings, self.clean))
            logits = forward(self.model, self.inputs).logits.float()
        if self.labels.dim() == 1:
            return F.cross_entropy(logits, self.labels, reduction="none"), logits.argmax(-1) != self.labels
        each = F.cross_entropy(logits.transpose(1, 2), self.labels, ignore_index=IGNORED, reduction="none")
        return each.sum(1) / self.weights.clamp_min(1), torch.zeros_like(each[:, 0], dtype=torch.bool)

    @property
    def weights(self) -> Tensor:
        """(B,): how many predictions each text has."""
        return torch.ones_like(self.labels) if self.labels.dim() == 1 else (self.labels != IGNORED).sum(1)

    def ball(self, budget: float) -> Ball:
        rows = self.clean.float().flatten(0, 1)
        return Ball(rows, (budget * row_norms(rows, "l2")).where(self.real.flatten(), 0.0), "l2", None)

    def random(self, ball: Ball, seed: int, *place: object) -> Tensor:
        """Return a random perturbation (B N, d)."""
        source = torch.Generator().manual_seed(derived_seed(seed, "embeddings", *place))
        normal, uniform = torch.randn(ball.centre.shape, generator=source), torch.rand(len(ball.centre), 1, generator=source)
        return ball.point(normal.to(ball.centre), uniform.to(ball.centre))

    def keep_worst(self, embeddings: Tensor, loss: Tensor, wrong: Tensor) -> None:
        """Keep texts that are worse than before: misclassified before correct, then the higher loss."""
        if self.together:
            worse = ((loss * self.weights).sum() > (self.loss * self.weights).sum()).expand(len(loss))
        else:
            worse = (wrong & ~self.wrong) | ((wrong == self.wrong) & (loss > self.loss))
        self.best = torch.where(per_row(worse, embeddings), embeddings.detach(), self.best)
        self.loss, self.wrong = torch.where(worse, loss.detach(), self.loss), torch.where(worse, wrong, self.wrong)

    def climb(self, ball: Ball, delta: Tensor, steps: int, step: float, routes: bool) -> list[float]:
        """Follow the loss, or also the routes; return the mean loss at every point on the way."""
        way = []
        with torch.no_grad():
            before = self._layers(self.clean.float())[1] if routes else []
        for number in range(steps + 1):
            point = (ball.centre + delta).view_as(self.best).requires_grad_()
            with torch.enable_grad():
                (loss, wrong), after = self._layers(point) if routes else (self.losses(point), [])
                goal = loss.sum()
                for one, other in zip(before, after, strict=True):
                    margins = GOAL.margin(other, one).clamp(max=0).view(self.real.shape) * self.real
                    goal = goal + STRENGTH * (margins.sum(1) / self.real.sum(1).clamp_min(1)).sum() / len(before)
            self.keep_worst(point, loss, wrong)
            way.append(float(loss.detach().mean()))
            if number < steps:
                delta = ball.moved(delta, gradient(goal, point).detach(), step)
        return way

    def _layers(self, point: Tensor) -> tuple[tuple[Tensor, Tensor], list[Any]]:
        with live_routings(self.model) as routings:
            found = self.losses(point)
        return found, [layer_of(routing) for routing in routings]

    @torch.no_grad()
    def flipped(self) -> list[float]:
        """Return for each layer how many real tokens have other experts than without the attack."""
        if not has_routers(self.model):
            return []
        (_, before), (_, after) = self._layers(self.clean.float()), self._layers(self.best)
        real = self.real.flatten()
        return [float((GOAL.reached(now, was) & real).sum()) for now, was in zip(after, before, strict=True)]

    @torch.no_grad()
    def realised(self) -> float:
        """Return the largest perturbation of a token as a share of the length of its embedding."""
        clean = self.clean.flatten(0, 1)
        sizes = distances(Rounded.apply(self.best, self.clean).flatten(0, 1), clean, "l2")
        return float((sizes / row_norms(clean, "l2").clamp_min(torch.finfo(torch.float64).tiny)).max())

    def flags(self, ball: Ball) -> list[Flag]:
        point = ball.centre.view_as(self.best).requires_grad_()
        with torch.enable_grad():
            loss, _ = self.losses(point)
            slope = gradient(loss.sum(), point)
        return [*randomised_flag(self.clean_loss, loss), *zero_gradient_flag(slope, what="texts")]


def attack_embeddings(
    model: Any,
    task: Task,
    kinds: Sequence[str],
    *,
    budget: float | Sequence[float],
    steps: int,
    tokens: int,
    seed: int,
    step: float | None = None,
    restarts: int = 1,
) -> AttackTable:
    """Perturb the embeddings of test texts of about `tokens` tokens so that the loss rises, with one attack or several.

    budget      one, or several: a multiple of the length of each embedding, in l2; what the attack found at a smaller
                budget counts at larger ones too
    step        in the same unit, by default 2.5 budget / steps
    restarts    random starts; `adaptive` has two runs from each
    """
    for kind in kinds:
        require_known("attack on embeddings of texts:", kind, EMBEDDING_ATTACKS)
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"the attacks are {', '.join(kinds)}; name each only once.")
    check_seed(seed)
    for name, count in (("steps", steps), ("restarts", restarts), ("examples", tokens)):
        check_count(count, name)
    if step is not None:
        check_budget(step)
    budgets = ascending(list(budget) if isinstance(budget, Sequence) else [budget])
    found: list[dict[str, Any]] = []
    flags: list[Flag] = []
    for kind in kinds:
        if kind == "adaptive" and not has_routers(model):
            raise ValueError("the model has no routers for the adaptive attack to follow; use pgd.")
        texts = _texts(model, task, tokens)
        classes = texts[0].labels.dim() == 1
        found += [] if found else [_summary("clean", 0.0, texts, classes)]
        for one in budgets:
            for number, some in enumerate(texts):
                flags += _attack(some, kind, one, steps, step, restarts, seed, number)
            found.append(_summary(kind, one, texts, classes) | {"steps": steps, "restarts": restarts, "seed": seed})
    figure = "error, %" if classes else "perplexity"

    def curve(kind: str) -> dict[str, list[float]]:
        own = [one for one in found if one["attack"] in ("clean", kind)]
        return {"budgets": [one["budget"] for one in own], "figure": [one["figure"] for one in own]}

    curves = {kind: curve(kind) for kind in kinds}
    keys = ("attack", "budget", "figure", "loss", "flipped", "realised")
    return {
        "title": f"{', '.join(kinds)} on embeddings (l2), {found[0]['texts']} texts, {found[0]['tokens']} tokens",
        "caption": "A budget is a share of the length of each token's embedding. What an attack found at a smaller budget "
        "counts at larger ones too. Each is a search: the worst case may be worse.",
        "columns": ["", "budget", figure, "loss, nats", "tokens whose experts change", "largest change"],
        "rows": [[one[key] for key in keys] for one in found],
        "flags": [flag.summary() for flag in dict.fromkeys(flags)],
        "summary": {"attacks": found, "strength": STRENGTH, "norm": "l2", "relative": True},
        "lines": {"x": "largest change, as a share of an embedding's length", "y": figure, "curves": curves},
    }


def _attack(
    texts: _Texts, kind: str, budget: float, steps: int, step: float | None, restarts: int, seed: int, number: int
) -> list[Flag]:
    """Attack some texts within a budget, and return the reasons not to trust the result."""
    ball = texts.ball(budget)
    flags = texts.flags(ball)
    size = 2.5 / steps if step is None else step / budget if budget else 0.0
    for restart in range(restarts):
        start = texts.random(ball, seed, number, restart)
        for routes in (True, False) if kind == "adaptive" else (False,):
            way = texts.climb(ball, start, steps, size, routes)
    late, gain = way[-1] - way[steps - steps // 4], way[-1] - float(texts.clean_loss.mean())
    if steps >= 4 and gain > 0 and late > LATE * gain:
        detail = f"the loss still rose in the last quarter of {steps} steps."
        flags.append(Flag("more steps help", detail))
    loss, wrong = texts.loss, texts.wrong
    for attempt in range(TRIES):
        point = (ball.centre + texts.random(ball, seed, number, "tries", attempt)).view_as(texts.best)
        with torch.no_grad():
            texts.keep_worst(point, *texts.losses(point))
    white = ~texts.wrong | wrong if texts.labels.dim() == 1 else texts.loss <= loss
    return [*flags, *black_box_flag(white, torch.ones_like(white), "random noise")]


@torch.no_grad()
def _summary(kind: str, budget: float, texts: Sequence[_Texts], classes: bool) -> dict[str, Any]:
    """Return the numbers of all texts at the perturbations that were found."""
    each = [(*some.losses(some.best), some.weights) for some in texts]
    counts = sum(int(weights.sum()) for _, _, weights in each)
    total = sum(float((loss.detach().double() * weights).sum()) for loss, _, weights in each)
    mistakes = sum(int(wrong.sum()) for _, wrong, _ in each)
    flips = [sum(layer) for layer in zip(*(some.flipped() for some in texts), strict=True)]
    tokens = sum(int(some.real.sum()) for some in texts)
    return {
        "attack": kind,
        "budget": budget,
        "figure": 100 * mistakes / counts if classes else perplexity(total, counts),
        "loss": total / counts,
        "flipped": sum(flips) / (tokens * len(flips)) if flips else 0.0,
        "flipped_by_layer": [one / tokens for one in flips],
        "realised": max(some.realised() for some in texts),
        "texts": sum(len(some.real) for some in texts),
        "tokens": tokens,
    }


def _texts(model: Any, task: Task, tokens: int) -> list[_Texts]:
    """Return test texts of about so many tokens, in batches. Raise ValueError if the task has none with a loss to raise."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError("embeddings are attacked of one sequence of tokens, not of an encoder and a decoder.")
    routers = [module for module in model.modules() if isinstance(module, Router)]
    together = not all(router.traits.batch_invariant for router in routers)
    found = []
    if isinstance(task, TextTask):
        blocks = task.clean.blocks
        size = max(1, scored_tokens(model) // blocks.length)
        count = min(len(blocks), max(1, tokens // blocks.length))
        for start in range(0, count, size):
            batch = blocks.batch(range(start, min(start + size, count)))
            inputs = {"input_ids": batch.inputs, "attention_mask": batch.mask.long()}
            found.append(_Texts(model, inputs, batch.labels, together))
        return found
    if not isinstance(task, LabelTask):
        raise ValueError(f"embeddings are those of texts, but {task.not_texts}.")
    if task.text_set.is_regression:
        raise ValueError(f"the labels of {task.text_set.name} are numbers; these attacks are for classes.")
    labels = task.labels("test")
    known = (labels != IGNORED).nonzero().flatten()
    encoded = task.encoded(task.text_set.texts("test"))
    count = max(1, tokens // int(encoded.lengths.float().mean().clamp_min(1)))
    chosen = known[evenly_spaced(len(known), count)]
    for part in chosen.split(max(1, tokens_per_batch(model) // int(encoded.lengths.max()))):
        found.append(_Texts(model, encoded.batch(part), labels[part], together))
    return found

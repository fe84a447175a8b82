"""Robust training: a step also trains on a perturbed view of its batch. `recipe.RobustPart` has the options.

    loss = (1 - mix) task(x) + mix task(x + delta) + routers' losses of x + consistency JS(gates of x, gates of x + delta)

    pgd     delta <- P(delta + step direction(gradient)), `steps` times from a random point of the ball; the gradient of
            task(x + delta) + routing * term                                                      Madry et al. 2018
    fast    one such step, longer than the ball's radius                                          Wong et al. 2020
    free    the backward that trains also gives the gradient that moves delta, from which the next step starts; several
            steps in a row use the same batch                                                     Shafahi et al. 2019
    noise   delta is Gaussian, and pixels are not clipped: randomised smoothing reads such inputs Cohen et al. 2019
            with mix = 1 the step is a plain one on x + delta, which also teaches the routers: no other input is ever read
    words, typos    x + delta is the batch from training texts that were attacked before the training

P projects onto the ball: l_inf around pixels between 0 and 1, or l2 around each embedding of a token, of `budget` times its
length. A hook adds delta to the output of the embeddings, so that the model still has its token ids.

Otherwise only the clean forward teaches: the others compute no router losses, update no router state and draw no router
noise. While delta is searched there is no dropout either; the parameters are those before the step. The gates and the sets
of the clean view are those of the clean forward. All of this stays on the device, with fixed numbers of steps, and can be
captured in a CUDA graph; the only tensors that live from step to step are the deltas of "free".
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.attacks.threat import Bounds, direction, gradient, project, row_norms
from holdfast.data import PixelScaling
from holdfast.hub.families import routing_from_gate
from holdfast.hub.forwards import SECOND_VIEW, entered_keys, share_of_batch
from holdfast.hub.install import hooks_of
from holdfast.hub.second_view import require_no_noise
from holdfast.hub.tracing import routing_modules
from holdfast.kernels.balance import means
from holdfast.layers.losses import balance, consistency
from holdfast.routing import Router, Routing
from holdfast.routing.bounds import Norm
from holdfast.routing.parts import normalise
from holdfast.train.recipe import RobustPart
from holdfast.train.task import ATTACKED, Inputs, clean_inputs


@final
@dataclass(frozen=True)
class Ball:
    """The perturbations of the rows `centre` that are allowed: |delta| <= radius, and centre + delta within `bounds`."""

    centre: Tensor  # (R, ...)
    radius: Tensor  # (R,) float64
    norm: Norm
    bounds: Bounds

    def random(self) -> Tensor:
        """Return a random point: uniform, for l2 in a random direction."""
        if self.norm == "linf":
            return self.inside(self._scaled(2 * torch.rand_like(self.centre) - 1))
        return self.point(torch.randn_like(self.centre), torch.rand_like(self.centre[:, :1]))

    def point(self, normal: Tensor, uniform: Tensor) -> Tensor:
        """Return the random point of an l2 ball that these random numbers (R,d) and (R,1) give."""
        return self.inside(self._scaled(direction(normal, "l2") * uniform ** (1 / self.centre.shape[1])))

    def moved(self, delta: Tensor, slope: Tensor, step: float) -> Tensor:
        """Return `delta` after a step of `step` times the radius along the gradient, projected."""
        return self.inside(delta + self._scaled(step * direction(slope.view_as(self.centre), self.norm)))

    def inside(self, delta: Tensor) -> Tensor:
        """Return `delta`, projected."""
        return project(self.centre + delta, self.centre, self.radius, self.norm, self.bounds) - self.centre

    def _scaled(self, rows: Tensor) -> Tensor:
        return rows * self.radius.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))


@final
class RobustLosses:
    """The losses of the steps of a model that is trained robustly.

    scaling   how the model reads pixels; None: it reads texts
    """

    def __init__(self, model: Any, part: RobustPart, scaling: PixelScaling | None) -> None:
        assert part.budget is not None
        self.model, self.part, self.budget = model, part, part.budget
        if part.compares_gates:
            require_no_noise(model)
        self.std: Tensor | None = None  # of the scaling; None: the model reads texts
        self.mean = torch.zeros(())
        if scaling is not None:
            self.mean, self.std = (
                torch.tensor(values, device=model.device).view(-1, 1, 1) for values in (scaling.mean, scaling.std)
            )
        hooks = hooks_of(model)
        self._further_view = nullcontext if hooks is None else hooks.forwards.further_view
        self._gates = [(module, rule) for _, module, rule in routing_modules(model)]
        of_routers = {id(each) for module in model.modules() if isinstance(module, Router) for each in module.modules()}
        self._with_dropout = [each for each in model.modules() if each is not model and id(each) not in of_routers]
        self.deltas: dict[str, Tensor] = {}  # of "free", by micro-batch

    def of_batch(self, batch: Inputs, number: int, count: Tensor | None) -> Iterator[Tensor]:
        """Yield the loss of the clean view, then that of the perturbed view, of micro-batch `number`; or of a noisy batch.

        The caller runs the backward of each before it takes the next, so that the graph of one is freed before the search.
        `count` is that of `loss_of`.
        """
        options: dict[str, Any] = {} if count is None else {"num_items_in_batch": count}
        clean = clean_inputs(batch)
        if self.part.replaces_batch:
            yield self._outputs(clean, self._noise(clean), options)["loss"]
            return
        with self._routings() as before:
            outputs = self.model(**clean, **options)
        yield self._clean_loss(outputs, clean, options)
        del outputs
        before = [routing.map_tokens(Tensor.detach) for routing in before]
        if self.part.method == "free":
            yield from self._free(clean, before, number, options)
            return
        delta: Tensor | None = None
        view = clean
        if self.part.method in ("pgd", "fast"):
            delta = self._worst(clean, before)
        elif self.part.method == "noise":
            delta = self._noise(clean)
        else:
            view = clean | {name.removeprefix(ATTACKED): value for name, value in batch.items() if name not in clean}
        yield self._loss_of_view(view, delta, clean, before, options)

    def _clean_loss(self, outputs: Any, clean: Inputs, options: dict[str, Any]) -> Tensor:
        """Return (1 - mix) of the task's loss, and the routers' losses in full."""
        of_routers, mix = outputs.get("router_loss"), self.part.mix
        loss: Tensor = (1 - mix) * outputs["loss"]
        return loss if of_routers is None else loss + mix * share_of_batch(self.model, clean | options) * of_routers

    def _loss_of_view(
        self, view: Inputs, delta: Tensor | None, clean: Inputs, before: list[Routing], options: dict[str, Any]
    ) -> Tensor:
        """Return mix times the task's loss of the perturbed view, and the consistency of its gates with the clean ones."""
        with self._further_view(), self._routings() as after:
            loss: Tensor = self.part.mix * self._outputs(view, delta, options)["loss"]
        weight = self.part.weight_of_consistency
        if not weight:
            return loss
        terms = [consistency(one, other, _common_tokens(view, clean, one)) for one, other in zip(before, after, strict=True)]
        return loss + weight * share_of_batch(self.model, clean | options) * torch.stack(terms).mean()

    def _worst(self, clean: Inputs, before: list[Routing]) -> Tensor:
        """Return the perturbation that PGD finds, from a random start."""
        values = self._values(clean)
        ball = self._ball(values)
        delta = ball.random()
        with self._further_view(), self._without_dropout():
            for _ in range(self.part.inner_steps):
                point = delta.view_as(values).requires_grad_()
                with self._routings() as after:
                    goal = self._outputs(clean, point, {})["loss"]
                if self.part.routing:
                    goal = goal + self.part.routing * self._routing_term(before, after, clean)
                delta = ball.moved(delta, gradient(goal, point), self.part.relative_step)
        return delta.view_as(values)

    def _free(self, clean: Inputs, before: list[Routing], number: int, options: dict[str, Any]) -> Iterator[Tensor]:
        """Yield the loss at the delta that the last step left, and move it by the gradient of the caller's backward."""
        values = self._values(clean)
        ball, name = self._ball(values), f"{number} {tuple(values.shape)}"
        if name not in self.deltas:
            self.deltas[name] = torch.zeros_like(values)
        start = ball.inside(self.deltas[name].view_as(ball.centre))  # of the ball of this batch, which may be another one
        point = start.view_as(values).requires_grad_()
        yield self._loss_of_view(clean, point, clean, before, options)
        assert point.grad is not None
        self.deltas[name].copy_(ball.moved(start, point.grad, self.part.relative_step).view_as(values))

    def _noise(self, clean: Inputs) -> Tensor:
        values = self._values(clean)
        if self.std is not None:
            return self.budget * torch.randn_like(values)
        return self.budget / values.shape[-1] ** 0.5 * values.norm(dim=-1, keepdim=True) * torch.randn_like(values)

    def _ball(self, values: Tensor) -> Ball:
        if self.std is not None:
            radius = values.new_full((len(values),), self.budget, dtype=torch.float64)
            return Ball(values.clamp(0, 1), radius, "linf", (0.0, 1.0))
        rows = values.flatten(0, 1)
        return Ball(rows, self.budget * row_norms(rows, "l2"), "l2", None)

    @torch.no_grad()
    def _values(self, clean: Inputs) -> Tensor:
        """Return what is perturbed: pixels (B,C,H,W) between 0 and 1, or embeddings (B,N,d)."""
        if self.std is not None:
            return clean["pixel_values"] * self.std + self.mean
        values: Tensor = self.model.get_input_embeddings()(clean["input_ids"])
        return values

    def _outputs(self, view: Inputs, delta: Tensor | None, options: dict[str, Any]) -> Any:
        """Return the model's outputs for a view, with `delta` added to its pixels or embeddings."""
        if delta is None:
            return self.model(**view, **options)
        if self.std is not None:
            return self.model(**view | {"pixel_values": view["pixel_values"] + delta / self.std}, **options)
        handle = self.model.get_input_embeddings().register_forward_hook(lambda module, given, output: output + delta)
        try:
            return self.model(**view, **options)
        finally:
            handle.remove()

    def _routing_term(self, before: list[Routing], after: list[Routing], clean: Inputs) -> Tensor:
        """Return the mean over layers of what PGD maximises of the routing."""
        if self.part.routing_term == "balance":
            terms = [balance(routing, _real_tokens(clean, routing)) for routing in after]
        else:
            terms = [leaving_weight(one, other, _real_tokens(clean, one)) for one, other in zip(before, after, strict=True)]
        return torch.stack(terms).mean()

    @contextmanager
    def _routings(self) -> Iterator[list[Routing]]:
        """Yield a list that gets the routing of each MoE layer in a forward inside the `with`."""
        found: list[Routing] = []

        def record(rule: Any, module: nn.Module, given: Any, output: Any) -> None:
            if SECOND_VIEW not in entered_keys():
                found.append(output if rule is None else routing_from_gate(output, rule))

        handles = [module.register_forward_hook(partial(record, rule)) for module, rule in self._gates]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """Inside the `with`, everything but the model as a whole and its routers is in evaluation mode."""
        changed = [module for module in self._with_dropout if module.training]
        for module in changed:
            module.training = False
        try:
            yield
        finally:
            for module in changed:
                module.training = True


def require_one_sequence(model: Any, part: RobustPart) -> None:
    """Raise ValueError if the model cannot be trained robustly: its embeddings run twice in a forward."""
    if part.method != "none" and getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"robust.method {part.method} is for one sequence of tokens, not for an encoder and a decoder.")


def leaving_weight(clean: Routing, other: Routing, token_mask: Tensor | None = None) -> Tensor:
    """Return the mean over tokens of 1 - (sum of g over the clean set) / (sum of g), g the gates of the other view."""
    stays = normalise(other.gates) * clean.sets_of_slots(None)
    (mean,) = means(token_mask, None, 1 - stays.sum(-1, keepdim=True))
    return mean.squeeze()


def _real_tokens(inputs: Inputs, routing: Routing) -> Tensor | None:
    """Return (B,N) bool, True where a token is real; None if all are, or if the rows of the routing are not these tokens."""
    mask = inputs.get("attention_mask")
    return None if mask is None or mask.numel() != len(routing.gates) else mask.bool()


def _common_tokens(view: Inputs, clean: Inputs, routing: Routing) -> Tensor | None:
    """Return as `_real_tokens`, without texts that may have other rows in the view: another number of tokens."""
    real = _real_tokens(clean, routing)
    if real is None or view is clean:
        return real
    counts = clean["attention_mask"].sum(1)  # texts that fill their row may have lost their ends
    return real & ((view["attention_mask"].sum(1) == counts) & (counts < real.shape[1])).unsqueeze(1)

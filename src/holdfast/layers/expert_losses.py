"""Losses of the outputs of experts: diversity and distillation, and the outputs that a layer computes for them.

    T tokens, E experts, K slots, P probe tokens, d features

A layer computes these outputs only if a coefficient is not 0, in a second run of its experts in training: on E P rows for
`diversity`, on T K rows for `distillation`. Tokens and weights are detached there, so the losses train experts, and neither
routers nor the layers before.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.balance import OverRanks, means
from holdfast.layers.losses import Losses, single_process_mean
from holdfast.routing.parts import normalise
from holdfast.routing.state import mean_over_ranks

PROBES = 32  # tokens of a rank's batch on which the outputs of all experts are compared
RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]  # (tokens (n,d), experts (n,K), weights (n,K)) -> (n,out)
Teacher = Callable[[Tensor], Tensor]  # (T,d) -> (T,out)


def diversity(outputs: Tensor, probe_mask: Tensor | None = None, over_ranks: OverRanks = single_process_mean) -> Tensor:
    """Return the mean squared cosine between two experts' outputs (E,P,d), over probe tokens and pairs; 0 for one expert.

    The survey (4.2) minimises the cosine itself, which makes two experts opposite. Between exact copies the gradient is 0:
    give `sparsify` some `noise`.
    """
    experts = outputs.shape[0]
    if experts == 1:
        return outputs.new_zeros((), dtype=torch.float32)
    directions = F.normalize(outputs.float(), dim=-1, eps=1e-6).transpose(0, 1)
    with torch.autocast(outputs.device.type, enabled=False):  # it would round cosines to 16 bits
        squares = (directions @ directions.mT).square()  # (P,E,E)
    others = squares.sum((1, 2)) - squares.diagonal(dim1=1, dim2=2).sum(-1)
    (mean,) = means(probe_mask, over_ranks, others.unsqueeze(1) / (experts * (experts - 1)))
    return mean.squeeze()


def distillation(
    outputs: Tensor,
    weights: Tensor,
    taught: Tensor,
    token_mask: Tensor | None = None,
    over_ranks: OverRanks = single_process_mean,
) -> Tensor:
    """Return 1/T sum_t sum_e w_te |f_e(x_t) - teacher(x_t)|^2, with |.|^2 the mean over features (survey 4.2).

    outputs     (T,K,out), of the experts of each token's slots
    weights     (T,K) of the slots, 0 in unused ones; they are divided by their sum and detached
    taught      (T,out), the teacher's outputs
    """
    distances = (outputs.float() - taught.detach().float().unsqueeze(1)).square().mean(-1)
    (mean,) = means(token_mask, over_ranks, (normalise(weights.detach().float()) * distances).sum(-1, keepdim=True))
    return mean.squeeze()


def of_experts(
    losses: Losses,
    run: RunExperts,
    count: int,
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    token_mask: Tensor | None,
    teacher: Teacher | None,
    layer: str,
) -> dict[str, Tensor]:
    """Return the weighted losses of a layer's experts by name, for the tokens of all ranks.

    run         the layer's experts, of which there are `count`
    tokens      (T,d), the inputs of the experts; `experts` and `weights` (T,K) are those of their slots
    layer       the name of the layer, for error messages
    """
    terms, tokens = {}, tokens.detach()
    real = None if token_mask is None else token_mask.reshape(-1)
    if real is not None:
        tokens = tokens.where(real.unsqueeze(1), 0.0)  # padding may contain NaN
    if losses.diversity:
        probes, is_real = probe_tokens(tokens, real)
        index = torch.arange(count, device=tokens.device).repeat_interleave(len(probes)).unsqueeze(1)
        outputs = run(probes.repeat(count, 1), index, torch.ones_like(index, dtype=weights.dtype))
        outputs = outputs.view(count, len(probes), -1)
        terms["diversity"] = losses.diversity * diversity(outputs, is_real, mean_over_ranks)
    if losses.distillation:
        index = experts.reshape(-1, 1)
        rows = tokens.repeat_interleave(experts.shape[1], dim=0)
        outputs = run(rows, index, torch.ones_like(index, dtype=weights.dtype)).view(*experts.shape, -1)
        taught = _taught(teacher, tokens, outputs.shape[-1], layer)
        terms["distillation"] = losses.distillation * distillation(outputs, weights, taught, real, mean_over_ranks)
    return terms


def probe_tokens(tokens: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return up to `PROBES` real tokens, evenly spaced among `tokens (T,d)`, and which of them are real.

    With `real (T,)`, a token is there more than once if there are fewer real ones; none is real if the batch has none.
    """
    rows = len(tokens)
    number = torch.arange(min(PROBES, rows), device=tokens.device)
    if real is None:
        return tokens[number * rows // max(len(number), 1)], torch.ones_like(number, dtype=torch.bool)
    position = real.cumsum(0)  # of a real token among the real ones, from 1
    count = position[-1:]  # (1,): the host does not read it
    chosen = torch.searchsorted(position, number * count // max(len(number), 1) + 1).clamp_max(max(rows - 1, 0))
    return tokens[chosen], (count > 0).expand(len(number))


@torch.no_grad()
def _taught(teacher: Teacher | None, tokens: Tensor, width: int, layer: str) -> Tensor:
    """Return the outputs (T,width) of the teacher for `tokens (T,d)`."""
    if teacher is None:
        raise ValueError(
            f"{layer}: the loss distillation compares experts with a teacher, and this layer has none; give the losses to "
            'holdfast.sparsify(init="copy"), which keeps the dense network as the teacher, or set one with '
            "holdfast.set_teacher."
        )
    taught = teacher(tokens)
    if taught.shape != (len(tokens), width):
        raise ValueError(
            f"{layer}: the teacher returned {tuple(taught.shape)} for tokens {tuple(tokens.shape)}; it must return as many "
            f"tokens, {width} wide, as the experts do."
        )
    return taught

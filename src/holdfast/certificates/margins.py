"""Distances to the nearest decision boundary that training can enlarge: `certify`'s distance, with gradients.

`certify` takes the smallest radius over all conditions of a token. The gradient of a minimum is that of the smallest, so the
conditions are searched without gradients, and only the radius of the one that is found is computed with them.
"""

import torch
from torch import Tensor

from holdfast.certificates.router_conditions import describe_parts
from holdfast.routing import Context, Router
from holdfast.routing.bounds import lengths
from holdfast.routing.declarations import NoCertificate
from holdfast.routing.parts import Part


def require_trainable(router: Router) -> None:
    """Raise NoCertificate if the router declares no distance of single tokens; some parts refuse only at their tokens."""
    if router.fixed_sets or router.select.layer_kind != "moe":
        raise _refusal(router.select, "its experts do not depend on the token")
    if router.score.declares.order is None:
        raise _refusal(router.score, "it declares no order")
    if router.select.declares.conditions is None:
        raise _refusal(router.select, "it declares no conditions")
    for informer in router.informers:
        if informer.side == "token" and not informer.inert:
            raise _refusal(informer, "tokens of a sequence share their gates")


def _refusal(part: Part, reason: str) -> NoCertificate:
    return NoCertificate(f"the margin loss cannot train {type(part).__name__}: {reason}.")


@torch.compiler.disable  # torch.compile cannot trace declarations; a compiled step calls this between two graphs
def shortfalls(router: Router, tokens: Tensor, context: Context, radius: float) -> Tensor:
    """Return relu(r0 - d/|x|) / r0 of each token (T,) in float64, with r0 = `radius` and d = `Certificates.distance` in l2.

    Tokens are `(B,N,d)` or `(T,d)`, padding is 0. The router may be in training mode: it is described as in evaluation, with
    the state it has.
    """
    require_trainable(router)
    tokens = tokens.unsqueeze(0) if tokens.dim() == 2 else tokens
    static = tokens.device.type != "cpu"
    with torch.no_grad():
        problems = describe_parts(router, tokens, context, "l2", static).problems()
        binding = [problem.nearest(None).which for _, problem in problems]
    distances = []
    for which, (_, problem) in zip(binding, describe_parts(router, tokens, context, "l2", static).problems(), strict=True):
        if problem.conditions.valid.shape[1]:
            problem = problem.at(which)
        distances.append(problem.distance(problem.nearest(None).radius))
    distance, sizes = torch.cat(distances), lengths(tokens.flatten(0, 1).double(), "l2")
    needed = radius * sizes
    short = (distance < needed) | (distance <= 0)
    # A quotient that is not used has a gradient too, which must not be NaN: leave out infinite distances and empty tokens.
    return (1 - distance.where(short, 0.0) / needed.where(sizes > 0, 1.0)).where(short, 0.0)

"""The check of second derivatives: right, or refused in words. Gradient penalties and meta-learning need them."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from holdfast.routing import Context, Router, Routing
from holdfast.testing.subject import LeftOut, Subject, objective

SILENT = ".*autograd kernel was not registered.*"  # torch's warning where an operator without a derivative is differentiated
REFERENCE_TOLERANCE, DIFFERENCE_TOLERANCE = 1e-3, 0.05
STEPS = (2e-3, 5e-4)
ATTEMPTS = 5


def right_or_refused(subject: Subject) -> str | None:
    """Require that the derivative of the gradient along a direction is right, or that an error says there is none.

    It is compared with that of the naive reference. Without one, with differences of gradients: that needs gradients that
    are the derivatives of the output, which those of a part that holds something constant on purpose are not.
    """
    router = subject.build().eval()
    tokens = subject.tokens(2, 9)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=SILENT)
            got = _derivative(router, router, tokens, subject.context(tokens), _directions(router, tokens))
    except (RuntimeError, ValueError, NotImplementedError) as refusal:
        assert "second derivative" in str(refusal), f"second derivatives fail without saying so: {refusal}"
        return f"refused: {refusal}"
    if subject.reference is None:
        _compare_with_differences(subject)
        return None
    reference, slow = subject.reference, subject.build().eval()
    naive = lambda x, context: reference(slow, x, context)  # noqa: E731
    expected = _derivative(slow, naive, tokens, subject.context(tokens), _directions(slow, tokens))
    error = _apart(got, expected)
    assert error <= REFERENCE_TOLERANCE, f"second derivatives differ from the naive reference by {error:.1%}"
    return None


def _compare_with_differences(subject: Subject) -> None:
    for attempt in range(ATTEMPTS):
        router, tokens = subject.build().eval(), subject.tokens(1, 5, seed=attempt)
        context, along = subject.context(tokens), _directions(router, tokens)
        if not _has_true_gradient(router, tokens, context, along):
            continue
        coarse, fine = (_differences(router, tokens, context, along, step) for step in STEPS)
        if _apart(coarse, fine) > DIFFERENCE_TOLERANCE / 2:
            continue  # a route changes, or a gate vanishes, within a step
        error = _apart(_derivative(router, router, tokens, context, along), fine)
        assert error <= DIFFERENCE_TOLERANCE, f"second derivatives differ from differences of gradients by {error:.1%}"
        return
    raise LeftOut("its gradient jumps, or is not the derivative of its output; give a naive reference to compare with")


def _wanted(router: Router) -> list[Tensor]:
    return [parameter for parameter in router.parameters() if parameter.requires_grad]


def _directions(router: Router, tokens: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(value.shape, generator=generator) for value in (tokens, *_wanted(router))]


def _derivative(
    router: Router, compute: Callable[..., Routing], tokens: Tensor, context: Context, along: Sequence[Tensor]
) -> list[Tensor]:
    """The derivative, along a direction, of the gradients of tokens and parameters."""
    inputs = [tokens.clone().requires_grad_(), *_wanted(router)]
    total = objective(compute(inputs[0], context))
    grads = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True, materialize_grads=True)
    slope = torch.stack([(grad * way).sum() for grad, way in zip(grads, along, strict=True)]).sum()
    if not slope.requires_grad:
        return [torch.zeros_like(value) for value in inputs]
    return list(torch.autograd.grad(slope, inputs, allow_unused=True, materialize_grads=True))


def _moved(
    router: Router, tokens: Tensor, context: Context, along: Sequence[Tensor], step: float
) -> tuple[float, list[Tensor]]:
    """The objective and its gradients, a step away."""
    wanted = _wanted(router)
    before = [parameter.detach().clone() for parameter in wanted]
    with torch.no_grad():
        for parameter, way in zip(wanted, along[1:], strict=True):
            parameter.add_(way, alpha=step)
    x = (tokens + step * along[0]).requires_grad_()
    total = objective(router(x, context))
    grads = torch.autograd.grad(total, [x, *wanted], allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        for parameter, value in zip(wanted, before, strict=True):
            parameter.copy_(value)
    return float(total.detach()), list(grads)


def _differences(router: Router, tokens: Tensor, context: Context, along: Sequence[Tensor], step: float) -> list[Tensor]:
    above, below = (_moved(router, tokens, context, along, by)[1] for by in (step, -step))
    return [(high - low) / (2 * step) for high, low in zip(above, below, strict=True)]


def _has_true_gradient(router: Router, tokens: Tensor, context: Context, along: Sequence[Tensor]) -> bool:
    """Is the gradient of each tensor the derivative of the output along its own direction?"""
    _, grads = _moved(router, tokens, context, along, 0.0)
    for place, (grad, way) in enumerate(zip(grads, along, strict=True)):
        alone = [way if place == other else torch.zeros_like(each) for other, each in enumerate(along)]
        above, below = (_moved(router, tokens, context, alone, by)[0] for by in (STEPS[0], -STEPS[0]))
        difference, slope = (above - below) / (2 * STEPS[0]), float((grad * way).sum())
        if abs(difference - slope) > 0.02 * float(grad.norm()) + 1e-3:
            return False
    return True


def _apart(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of a tensor, relative to its size or, where that is small, to a tenth of the largest one's."""
    largest = max(float(value.norm()) for value in expected)
    sizes = [max(float(value.norm()), 0.1 * largest, 1e-2) for value in expected]
    return max(float((mine - theirs).norm()) / size for mine, theirs, size in zip(got, expected, sizes, strict=True))

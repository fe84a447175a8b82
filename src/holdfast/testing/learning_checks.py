"""The checks of training: gradients, state, saving, recomputation, compilation and second derivatives.

Each check is one function, as in `checks`.
"""

import io
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holdfast.layers.losses import TERMS, Losses
from holdfast.routing import Context, Router, Routing
from holdfast.testing.router_under_test import STEEP, NotApplicable, RouterUnderTest, differing, objective, state_of

NO_DERIVATIVE = ".*autograd kernel was not registered.*"  # torch's warning when such an operator is differentiated
REFERENCE_TOLERANCE, DIFFERENCE_TOLERANCE = 1e-3, 0.05
STEPS = (2e-3, 5e-4)
COUNTING = ("balance", "load")  # losses of how many tokens an expert has
ROUNDING = 1e-6
ATTEMPTS = 5


def save_and_load(subject: RouterUnderTest) -> None:
    """Check that a router loaded from saved state returns exactly the routing of the saved one, and has the same state."""
    trained, tokens = subject.build(), subject.tokens()
    for seed in range(3):
        trained(subject.tokens(seed=seed), subject.context(subject.tokens(seed=seed)))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    loaded = subject.build()
    loaded.load_state_dict(state)
    expected = trained.eval()(tokens, subject.context(tokens))
    got = loaded.eval()(tokens, subject.context(tokens))
    assert torch.equal(got.experts, expected.experts), "the experts differ after loading"
    assert torch.equal(got.weights, expected.weights), "the weights differ after loading"
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), f"{name} differs after saving and loading"


def evaluation_keeps_state(subject: RouterUnderTest) -> None:
    """Check that forwards in evaluation change no buffer."""
    router, tokens = subject.build(), subject.tokens()
    router(tokens, subject.context(tokens))
    router.eval()
    before = state_of(router)
    for seed in (1, 2):
        router(subject.tokens(seed=seed), subject.context(subject.tokens(seed=seed)))
    for name, value in state_of(router).items():
        assert torch.equal(value, before[name]), f"evaluation changed {name}"


def no_inert_coefficient(subject: RouterUnderTest) -> None:
    """Check that every loss coefficient, of the router and of its parts, changes a gradient when it is not 0.

    If a selector declares equal loads, the losses that count tokens must not change one.
    """
    tokens = subject.tokens()
    if not subject.build()(tokens.clone().requires_grad_(), subject.context(tokens)).gates.requires_grad:
        raise NotApplicable("its routing has no gradient")

    def gradients(change: str | None) -> list[Tensor]:
        torch.manual_seed(9)
        router, x = subject.build(), tokens.clone().requires_grad_()
        router.losses = Losses(**{change: 1.0}) if change in TERMS else None
        for part in router.all_parts:
            for name in part.coefficients:
                _set_coefficient(part, name, 1.0 if name == change else 0.0)
        wanted = [x, *(p for p in router.parameters() if p.requires_grad)]
        total = objective(router(x, subject.context(tokens)))
        return list(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))

    without = gradients(None)
    # In a layer that runs every expert for every sequence, the loads are equal whatever the router does.
    select = subject.prototype.select
    inert = COUNTING if select.declares.equal_loads or select.layer_kind != "moe" else ()
    for change in [*TERMS, *(name for part in subject.prototype.all_parts for name in part.coefficients)]:
        moved = max(float((a - b).abs().max()) for a, b in zip(gradients(change), without, strict=True))
        if change in inert:
            assert moved < ROUNDING, f"it declares equal loads, but the coefficient of {change!r} changes a gradient"
        else:
            assert moved, f"the coefficient of {change!r} changes no gradient"


def _set_coefficient(part: torch.nn.Module, name: str, value: float) -> None:
    current = getattr(part, name)
    if isinstance(current, Tensor):
        current.fill_(value)
    else:
        setattr(part, name, value)


def no_inert_parameter(subject: RouterUnderTest) -> None:
    """Check that every trainable parameter gets a gradient that is not zero."""
    router, tokens = subject.build(), subject.tokens()
    if not any(parameter.requires_grad for parameter in router.parameters()):
        raise NotApplicable("it has no parameters")
    objective(router(tokens, subject.context(tokens))).backward()
    for name, parameter in router.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, f"{name} gets no gradient"


def activation_checkpointing(subject: RouterUnderTest) -> None:
    """Check that activation checkpointing gives the same gradients and the same state."""
    outcomes = []
    for recompute in (False, True):
        router = subject.build()
        router.losses = Losses(balance=0.1)
        grads = []
        for seed in range(3):
            torch.manual_seed(seed)
            x = subject.tokens(seed=seed).requires_grad_()
            context = subject.context(x.detach())
            forward = lambda y, r=router, c=context: objective(r(y, c))  # noqa: E731
            total = checkpoint(forward, x, use_reentrant=False) if recompute else forward(x)
            total.backward()
            grads.append(x.grad)
        grads += [p.grad for p in router.parameters() if p.grad is not None]
        outcomes.append((grads, state_of(router.eval())))
    (plain, plain_state), (again, again_state) = outcomes
    for first, second in zip(plain, again, strict=True):
        torch.testing.assert_close(first, second, msg="recomputation changes a gradient")
    for name, value in plain_state.items():
        assert torch.equal(value, again_state[name]), f"recomputation counted twice in {name}"


def compile_whole(subject: RouterUnderTest) -> None:
    """Check that `torch.compile` makes one graph, with the routing, losses, gradients and state of eager mode."""
    for training in (True, False):
        outcomes = []
        for compiled in (False, True):
            torch.compiler.reset()
            router = subject.build().train(training)
            forward = torch.compile(router, fullgraph=True, backend="aot_eager") if compiled else router
            for seed in range(2):
                torch.manual_seed(seed)
                tokens = subject.tokens(seed=seed).requires_grad_()
                routing = forward(tokens, subject.context(tokens.detach()))
                grads = torch.autograd.grad(objective(routing), tokens, allow_unused=True, materialize_grads=True)
            outcomes.append((routing, grads[0], state_of(router.eval())))
        (eager, eager_grad, eager_state), (graph, graph_grad, graph_state) = outcomes
        assert not differing(graph, eager, weights_within=STEEP).any(), (
            f"the compiled routing differs from the eager one (training={training})"
        )
        torch.testing.assert_close(graph.loss, eager.loss, msg="the compiled loss differs")
        torch.testing.assert_close(graph_grad, eager_grad, msg="compiled gradients differ")
        for name, value in eager_state.items():
            torch.testing.assert_close(graph_state[name], value, msg=f"compiled state {name} differs")


def second_derivatives(subject: RouterUnderTest) -> str | None:
    """Check that second derivatives are right, or raise an error that says so. Gradient penalties need them.

    The derivative of the gradient along a direction is compared with that of the naive reference; without a reference, with
    differences of gradients. Then gradients must be the derivatives of the output, which is not so if a part holds something
    constant on purpose.
    """
    router = subject.build().eval()
    tokens = subject.tokens(2, 9)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=NO_DERIVATIVE)
            got = _derivative(router, router, tokens, subject.context(tokens), _directions(router, tokens))
    except (RuntimeError, ValueError, NotImplementedError) as refusal:
        assert "second derivative" in str(refusal), f"second derivatives raise an error that does not name them: {refusal}"
        return f"refused: {refusal}"
    if subject.reference is None:
        _compare_with_differences(subject)
        return None
    reference, slow = subject.reference, subject.build().eval()
    naive = lambda x, context: reference(slow, x, context)  # noqa: E731
    expected = _derivative(slow, naive, tokens, subject.context(tokens), _directions(slow, tokens))
    error = _largest_error(got, expected)
    assert error <= REFERENCE_TOLERANCE, f"second derivatives differ from the naive reference by {error:.1%}"
    return None


def _compare_with_differences(subject: RouterUnderTest) -> None:
    for attempt in range(ATTEMPTS):
        router, tokens = subject.build().eval(), subject.tokens(1, 5, seed=attempt)
        context, along = subject.context(tokens), _directions(router, tokens)
        if not _has_true_gradient(router, tokens, context, along):
            continue
        coarse, fine = (_differences(router, tokens, context, along, step) for step in STEPS)
        if _largest_error(coarse, fine) > DIFFERENCE_TOLERANCE / 2:
            continue  # a token flips, or a gate becomes 0, within a step
        error = _largest_error(_derivative(router, router, tokens, context, along), fine)
        assert error <= DIFFERENCE_TOLERANCE, f"second derivatives differ from differences of gradients by {error:.1%}"
        return
    raise NotApplicable(
        "its gradient is not continuous, or not the derivative of its output; pass a naive reference to compare with"
    )


def _trainable(router: Router) -> list[Tensor]:
    return [parameter for parameter in router.parameters() if parameter.requires_grad]


def _directions(router: Router, tokens: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(value.shape, generator=generator) for value in (tokens, *_trainable(router))]


def _derivative(
    router: Router, compute: Callable[..., Routing], tokens: Tensor, context: Context, along: Sequence[Tensor]
) -> list[Tensor]:
    """Return the derivative, along a direction, of the gradients of tokens and parameters."""
    inputs = [tokens.clone().requires_grad_(), *_trainable(router)]
    total = objective(compute(inputs[0], context))
    grads = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True, materialize_grads=True)
    slope = torch.stack([(grad * way).sum() for grad, way in zip(grads, along, strict=True)]).sum()
    if not slope.requires_grad:
        return [torch.zeros_like(value) for value in inputs]
    return list(torch.autograd.grad(slope, inputs, allow_unused=True, materialize_grads=True))


def _after_step(
    router: Router, tokens: Tensor, context: Context, along: Sequence[Tensor], step: float
) -> tuple[float, list[Tensor]]:
    """Return the objective and its gradients after a step in a direction."""
    wanted = _trainable(router)
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
    above, below = (_after_step(router, tokens, context, along, by)[1] for by in (step, -step))
    return [(high - low) / (2 * step) for high, low in zip(above, below, strict=True)]


def _has_true_gradient(router: Router, tokens: Tensor, context: Context, along: Sequence[Tensor]) -> bool:
    """Return whether the gradient of each tensor is the derivative of the output along its own direction."""
    _, grads = _after_step(router, tokens, context, along, 0.0)
    for index, (grad, way) in enumerate(zip(grads, along, strict=True)):
        alone = [way if index == other else torch.zeros_like(each) for other, each in enumerate(along)]
        above, below = (_after_step(router, tokens, context, alone, by)[0] for by in (STEPS[0], -STEPS[0]))
        difference, slope = (above - below) / (2 * STEPS[0]), float((grad * way).sum())
        if abs(difference - slope) > 0.02 * float(grad.norm()) + 1e-3:
            return False
    return True


def _largest_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest error of a tensor, relative to its norm or, if that is small, to a tenth of the largest norm."""
    largest = max(float(value.norm()) for value in expected)
    sizes = [max(float(value.norm()), 0.1 * largest, 1e-2) for value in expected]
    return max(float((mine - theirs).norm()) / size for mine, theirs, size in zip(got, expected, sizes, strict=True))

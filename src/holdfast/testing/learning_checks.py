"""The checks about learning: gradients, state, saving, recomputation, compilation. One function each, as in `checks`."""

import io

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holdfast.losses import TERMS, Losses
from holdfast.testing.subject import STEEP, LeftOut, Subject, differing, objective, state_of


def save_and_load(subject: Subject) -> None:
    """A router loaded from the saved state of a trained one routes as it does, to the bit, and saves the same again."""
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
    assert torch.equal(got.experts, expected.experts), "other experts after loading"
    assert torch.equal(got.weights, expected.weights), "other weights after loading"
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), f"{name} did not survive saving and loading"


def evaluation_keeps_state(subject: Subject) -> None:
    """No forward in evaluation changes a buffer."""
    router, tokens = subject.build(), subject.tokens()
    router(tokens, subject.context(tokens))
    router.eval()
    before = state_of(router)
    for seed in (1, 2):
        router(subject.tokens(seed=seed), subject.context(subject.tokens(seed=seed)))
    for name, value in state_of(router).items():
        assert torch.equal(value, before[name]), f"evaluation changed {name}"


def no_inert_coefficient(subject: Subject) -> None:
    """Moving any loss coefficient from 0 changes a gradient: the router's losses and those its parts carry."""
    tokens = subject.tokens()

    def gradients(change: str | None) -> list[Tensor]:
        torch.manual_seed(9)
        router, x = subject.build(), tokens.clone().requires_grad_()
        router.losses = Losses(**{change: 1.0}) if change in TERMS else None
        for part in router.parts:
            for name in part.coefficients:
                _set_coefficient(part, name, 1.0 if name == change else 0.0)
        wanted = [x, *(p for p in router.parameters() if p.requires_grad)]
        total = objective(router(x, subject.context(tokens)))
        return list(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))

    without = gradients(None)
    for change in [*TERMS, *(name for part in subject.prototype.parts for name in part.coefficients)]:
        moved = any(not torch.equal(a, b) for a, b in zip(gradients(change), without, strict=True))
        assert moved, f"the coefficient of {change!r} changes no gradient"


def _set_coefficient(part: torch.nn.Module, name: str, value: float) -> None:
    current = getattr(part, name)
    if isinstance(current, Tensor):
        current.fill_(value)
    else:
        setattr(part, name, value)


def no_inert_parameter(subject: Subject) -> None:
    """Every parameter that asks for a gradient gets one that is not zero."""
    router, tokens = subject.build(), subject.tokens()
    if not any(parameter.requires_grad for parameter in router.parameters()):
        raise LeftOut("it has no parameters")
    objective(router(tokens, subject.context(tokens))).backward()
    for name, parameter in router.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, f"{name} gets no gradient"


def activation_checkpointing(subject: Subject) -> None:
    """Recomputation gives the same gradients and counts nothing twice."""
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


def compile_whole(subject: Subject) -> None:
    """One graph, no breaks, in training and in evaluation; the routes, losses, gradients and state of eager mode."""
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
            f"compiled routes differ from eager ones (training={training})"
        )
        torch.testing.assert_close(graph.loss, eager.loss, msg="the compiled loss differs")
        torch.testing.assert_close(graph_grad, eager_grad, msg="compiled gradients differ")
        for name, value in eager_state.items():
            torch.testing.assert_close(graph_state[name], value, msg=f"compiled state {name} differs")

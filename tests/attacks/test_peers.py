"""Agreement with other people's attacks on the same network (dev only: skipped where the peer is not installed).

torchattacks 3.5.1 and foolbox 3.3.4 pin old packages; installed with `pip install --no-deps` they work (foolbox with
eagerpy, gitpython, gitdb and smmap).
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.attacks import AttackedInputs, fgsm, pgd
from holdfast.routing.bounds import NORMS, Norm

Digits = tuple[nn.Module, Tensor, Tensor]
STEPS = 10


def agrees(ours: AttackedInputs, theirs: Tensor, model: nn.Module, labels: Tensor) -> None:
    """They return their last iterate, we our worst: at least as strong, and not by much."""
    accuracy = float((model(theirs).argmax(-1) == labels).double().mean())
    assert ours.accuracy <= accuracy + 1e-9
    assert ours.accuracy >= accuracy - 0.03
    assert ours.clean_accuracy - ours.accuracy > 0.1  # there was something to agree on


def same_step(ours: AttackedInputs, theirs: Tensor) -> None:
    """One step leaves no choice: the same images, where ours did not keep a clean one that is wrong already."""
    moved = ~ours.already_wrong & ours.success
    torch.testing.assert_close(ours.inputs[moved], theirs[moved], rtol=0, atol=2e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_torchattacks_agrees(norm: Norm, digits: Digits) -> None:
    peer: Any = pytest.importorskip("torchattacks")
    model, images, labels = digits
    budget = 0.1 if norm == "linf" else 0.6
    step = 2.5 * budget / STEPS
    if norm == "linf":
        same_step(fgsm(model, images, labels, budget=budget), peer.FGSM(model, eps=budget)(images, labels))
        attack = peer.PGD(model, eps=budget, alpha=step, steps=STEPS, random_start=False)
    else:
        attack = peer.PGDL2(model, eps=budget, alpha=step, steps=STEPS, random_start=False)
    ours = pgd(model, images, labels, budget=budget, norm=norm, steps=STEPS, random_start=False)
    agrees(ours, attack(images, labels), model, labels)


@pytest.mark.parametrize("norm", NORMS)
def test_foolbox_agrees(norm: Norm, digits: Digits) -> None:
    peer: Any = pytest.importorskip("foolbox")
    model, images, labels = digits
    budget = 0.1 if norm == "linf" else 0.6
    wrapped = peer.PyTorchModel(model, bounds=(0, 1), device="cpu")
    single, many = (
        (peer.attacks.LinfFastGradientAttack, peer.attacks.LinfProjectedGradientDescentAttack)
        if norm == "linf"
        else (peer.attacks.L2FastGradientAttack, peer.attacks.L2ProjectedGradientDescentAttack)
    )
    _, theirs, _ = single(random_start=False)(wrapped, images, labels, epsilons=budget)
    ours = fgsm(model, images, labels, budget=budget, norm=norm)
    if norm == "linf":
        same_step(ours, theirs)
    else:  # foolbox clips to [0,1] without another look at the length
        assert abs(float(model(theirs).argmax(-1).eq(labels).double().mean()) - ours.accuracy) < 0.03
    _, theirs, _ = many(rel_stepsize=2.5 / STEPS, steps=STEPS, random_start=False)(wrapped, images, labels, epsilons=budget)
    agrees(pgd(model, images, labels, budget=budget, norm=norm, steps=STEPS, random_start=False), theirs, model, labels)

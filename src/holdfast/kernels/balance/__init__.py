"""The balance loss, E sum_e f_e P_e: f the shares of selections, P the mean normalised gates.

    T tokens, E experts, K slots a token
    gates (T,E) float32, not negative; chosen (T,K), E marks an unused slot; real (T,) bool or None: all tokens are real

PyTorch takes some 30 small operations for it, forward and backward, in every layer: in a small model, as much time as the
experts. On a GPU, one kernel adds up gates and selections, a second makes the loss, and a third computes the gradient.

**Several ranks.** `over_ranks` returns the mean of a tensor over ranks. The loss is that of all ranks' tokens, and the
gradient that of this rank's tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from holdfast.kernels.operators import differentiable_gradients, has_kernels, is_differentiated, on_gpu
from holdfast.kernels.select import normalise

MOST_EXPERTS = 512  # that the kernels support: a program has the sums of all experts in registers
OverRanks = Callable[[Tensor], Tensor]
_sums, _loss, _gradient = (on_gpu(__name__, name) for name in ("sums", "loss", "gradient"))


def balance_loss(gates: Tensor, chosen: Tensor, real: Tensor | None, over_ranks: OverRanks | None) -> Tensor:
    """Return the balance loss, a scalar; 1 if routing is uniform. `over_ranks=None` means one process.

    A token counts once for an expert that it selected in several slots. Without real tokens the loss is 0.
    """
    if has_kernels(gates) and gates.shape[1] <= MOST_EXPERTS and not torch.compiler.is_compiling():
        return _Balance.apply(gates, chosen, real, over_ranks)
    return reference(gates, chosen, real, over_ranks)


def reference(gates: Tensor, chosen: Tensor, real: Tensor | None, over_ranks: OverRanks | None) -> Tensor:
    """Return the balance loss in operations that autograd can differentiate."""
    tokens, experts = gates.shape
    selected = torch.zeros(tokens, experts + 1, device=gates.device).scatter(1, chosen, 1.0)[:, :experts]
    mass, shares = means(real, over_ranks, normalise(gates), selected)
    return experts * (normalise(shares.detach()) * mass).sum()


def means(real: Tensor | None, over_ranks: OverRanks | None, *values: Tensor) -> tuple[Tensor, ...]:
    """Return the mean of each of `values (T,n)` over the real tokens of all ranks; 0 if there are none.

    Sums are divided by the mean number of tokens over ranks, so that the mean over ranks is the mean over tokens. The
    gradient is that of this rank's tokens. All sums are exchanged in one message.
    """
    rows = torch.cat([value.to(values[0].dtype) for value in values], dim=1)
    if real is None:
        total, count = rows.sum(0), rows.new_full((1,), rows.shape[0])
    else:
        real = real.reshape(-1, 1)
        total, count = rows.where(real, 0.0).sum(0), real.sum(0).to(rows.dtype)
    whole = torch.cat([total.detach(), count])
    whole = whole if over_ranks is None else over_ranks(whole)
    mean = (whole[:-1] + (total - total.detach())) / whole[-1:].where(whole[-1:] > 0, 1.0)
    return mean.split([value.shape[1] for value in values])


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gates, chosen, real, over_ranks):  # type: ignore[no-untyped-def]
        gates, chosen = gates.contiguous(), chosen.contiguous()
        sums = _sums(gates, chosen, real)
        if over_ranks is not None:
            sums = over_ranks(sums.sum(0, keepdim=True))
        loss, slopes = _loss(sums, gates.shape[1])
        ctx.save_for_backward(gates, chosen, real, slopes)
        ctx.over_ranks = over_ranks
        return loss

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        gates, chosen, real, slopes = ctx.saved_tensors
        if is_differentiated():
            function = partial(reference, chosen=chosen, real=real, over_ranks=ctx.over_ranks)
            return *differentiable_gradients(function, [gates], [True], grad), None, None, None
        return _gradient(grad, gates, real, slopes), None, None, None

"""How far the output of a feed-forward network can move when its input moves by up to r in l2.

    plain   f(x) = W2 act(W1 x + b1) + b2               M = |W2| L |W1| r
    gated   f(x) = Wd (act(Wg x + bg) * (Wu x + bu))    M = |Wd| |v|, the smaller of two bounds of |v|:

    v_q = L r |g_q| (|b_q| + r |u_q|) + |a_q| r |u_q|
    |v| <= L r |Wg| (max_q |b_q| + r max_q |u_q|) + max_q |a_q| r |Wu|

L is the steepest slope of act, |W| a spectral norm, g_q and u_q the rows of Wg and Wu, b = Wu x + bu and a = act(Wg x + bg).
Both follow from a'b' - ab = (a' - a) b' + a (b' - b). The first bounds each hidden unit by itself, the second, which is
smaller in wide networks, all of them together. A network may be multiplied by a number of its own, s = sigmoid(w x), as the
shared expert of Qwen2-MoE is: then

    M_s = min(1, s + r |w| / 4) M + r |w| / 4 |f(x)|

T tokens, E networks, d width, h hidden width. Everything is computed in float64, which holds 16-bit and float32 weights
exactly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from holdfast.routing.bounds import ABOVE


@final
@dataclass(frozen=True)
class Networks:
    """E feed-forward networks, as in `holdfast.Experts`."""

    up: Tensor  # (E,h,d); gated: (E,2h,d), the rows of Wg before those of Wu
    down: Tensor  # (E,d,h)
    activation: Callable[[Tensor], Tensor]
    slope: float  # the steepest slope of the activation
    gated: bool
    up_bias: Tensor | None = None  # (E,h) or (E,2h)
    down_bias: Tensor | None = None  # (E,d)
    switch: Tensor | None = None  # (d,), w; None: outputs are not multiplied by s

    @cached_property
    def norms(self) -> list[tuple[float, ...]]:
        """Return the spectral norms of each network: of W1 and W2, or of Wg, Wu and Wd."""
        return [
            tuple(
                float(torch.linalg.matrix_norm(matrix, ord=2)) * ABOVE
                for matrix in (*up.double().chunk(2 if self.gated else 1), down.double())
            )
            for up, down in zip(self.up.detach(), self.down.detach(), strict=True)
        ]

    @torch.no_grad()
    def at(self, tokens: Tensor) -> "NetworksAtTokens":
        """Evaluate the networks at `tokens (T,d)`, one network after the other."""
        tokens = tokens.double()
        each = [self._one(number, tokens) for number in range(len(self.up))]
        outputs, moves = (torch.stack(parts, dim=1) for parts in zip(*each, strict=True))
        if self.switch is None:
            return NetworksAtTokens(outputs, moves)
        weight = self.switch.detach().to(tokens)
        opened = torch.sigmoid(tokens @ weight).unsqueeze(1)
        return NetworksAtTokens(
            outputs * opened.unsqueeze(-1), moves, opened, float(weight.norm()) / 4, outputs.norm(dim=-1)
        )

    def _one(self, number: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs (T,d) of one network, and the coefficients (T,5) of its move: see `NetworksAtTokens`."""
        up, down = self.up[number].detach().to(tokens), self.down[number].detach().to(tokens)
        hidden = tokens @ up.t()
        hidden = hidden if self.up_bias is None else hidden + self.up_bias[number].detach().to(tokens)
        norms, zeros = self.norms[number], torch.zeros_like(tokens[:, 0])
        if not self.gated:
            outputs = self.activation(hidden) @ down.t()
            together = torch.full_like(zeros, self.slope * norms[0] * norms[1])
            coefficients = [zeros + torch.inf, zeros, zeros, together, zeros]
        else:
            (wg, wu), (before, b) = up.chunk(2), hidden.chunk(2, dim=-1)
            a = self.activation(before)
            outputs = (a * b) @ down.t()
            of_g, of_u = wg.norm(dim=1), wu.norm(dim=1)
            first, second = self.slope * of_g * b.abs() + of_u * a.abs(), self.slope * of_g * of_u
            by_unit = [first.square().sum(-1), 2 * (first * second).sum(-1), second.square().sum().expand_as(zeros)]
            largest_b, largest_a = (values.abs().amax(-1) for values in (b, a))
            together = self.slope * norms[0] * largest_b + norms[1] * largest_a
            again = (self.slope * norms[0] * of_u.max()).expand_as(zeros)
            coefficients = [norms[2] ** 2 * part for part in by_unit] + [norms[2] * together, norms[2] * again]
        outputs = outputs if self.down_bias is None else outputs + self.down_bias[number].detach().to(tokens)
        return outputs, torch.stack(coefficients, dim=-1)


@final
@dataclass(frozen=True)
class NetworksAtTokens:
    """The outputs of E networks at T tokens, and bounds of how far they move.

    outputs  (T,E,d), multiplied by s if there is one
    moves    (T,E,5): M is the smaller of r sqrt(c_0 + c_1 r + c_2 r^2) and r (c_3 + c_4 r)
    opened   (T,1): s; `speed` is |w| / 4, and `lengths (T,E)` are the norms of f(x) without s
    """

    outputs: Tensor
    moves: Tensor
    opened: Tensor | None = None
    speed: float = 0.0
    lengths: Tensor | None = None

    def move(self, radius: Tensor) -> Tensor:
        """Return an upper bound M (T,E) of the change of each output, for inputs that move by up to `radius (T,)`."""
        far = radius.unsqueeze(1)
        zero, one, two, three, four = self.moves.unbind(-1)
        alone = far * (zero + one * far + two * far.square()).sqrt()
        bound = alone.nan_to_num(nan=torch.inf).minimum(far * (three + four * far))
        if self.opened is not None and self.lengths is not None:
            turn = self.speed * far
            bound = (self.opened + turn).clamp_max(1) * bound + turn.clamp_max(1) * self.lengths
        return bound * ABOVE

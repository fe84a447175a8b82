"""Expert dropout: in training, some experts get a gate of 0 before selection, so that the next best take their tokens.

    u_e in [0, 1) a draw for each expert;   e is dropped if u_e < drop and u_e is not one of the k largest draws

So at least k experts are left. Informers run before it, on all experts, and an expert graph counts as if none were dropped.
A forward in evaluation, and one in which the model generates text, drops none. Recorded routes are replayed as they are,
with dropped experts (survey, section 4.3; there the gates that are left are divided by their sum).

    StepDropout     one draw per expert for all tokens of a forward, the same on all ranks
    TokenDropout    draws of its own for every token, from torch's generator, as noise has them
"""

import zlib
from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor

from holdfast.errors import require_known
from holdfast.kernels.operators import snapshot_for_backward
from holdfast.kernels.select import top
from holdfast.routing.declarations import Cost
from holdfast.routing.parts import Declarations, Part
from holdfast.routing.records import Context
from holdfast.routing.selection import check_k
from holdfast.routing.state import StatefulPart

BITS = 32  # of a draw


class ExpertDropout(Part):
    """Choose the experts that a training forward drops (abstract).

    drop    the probability of each expert to be dropped, before k are restored
    """

    def __init__(self, experts: int, k: int, *, drop: float) -> None:
        super().__init__()
        check_k(k, experts)
        if not 0 < drop < 1:
            raise ValueError(f"drop is {drop}; the probability to drop an expert must lie between 0 and 1.")
        self.experts, self.k, self.drop = experts, k, drop

    @property
    def declares(self) -> Declarations:
        return Declarations(cost=lambda sizes: Cost("expert dropout"))

    @abstractmethod
    def draw(self, tokens: Tensor) -> Tensor:
        """Return u, (E,) or (B,N,E), for `tokens (B,N,d)`."""

    @torch.no_grad()
    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """Return bool, (E,) or (B,N,E): the experts that this forward drops."""
        drawn = self.draw(tokens)
        kept = torch.zeros_like(drawn, dtype=torch.bool).scatter(-1, top(drawn, self.k), True)
        return (drawn < self.drop) & ~kept


class StepDropout(ExpertDropout, StatefulPart):
    """Drop the same experts for all tokens. u_e is a hash of the layer's name, the number of its forwards, and e.

    The number is state on the device: a recomputation reads the same one, a CUDA graph the next one.
    """

    forwards: Tensor  # finished training forwards

    def __init__(self, experts: int, k: int, *, drop: float, layer: str) -> None:
        super().__init__(experts, k, drop=drop)
        self.seed = zlib.crc32(layer.encode())
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def new_state(self) -> dict[str, Tensor]:
        return {"forwards": self.forwards + 1}

    def draw(self, tokens: Tensor) -> Tensor:
        forwards = snapshot_for_backward(self.forwards)
        self.stage_statistics()  # a forward was run: the next one counts it
        expert = torch.arange(1, self.experts + 1, device=forwards.device)
        return _hash(_hash(_hash(forwards) ^ self.seed) ^ _hash(expert)).float() / 2**BITS


class TokenDropout(ExpertDropout):
    """Drop other experts for each token."""

    def draw(self, tokens: Tensor) -> Tensor:
        return torch.rand(*tokens.shape[:2], self.experts, device=tokens.device)


def _hash(numbers: Tensor) -> Tensor:
    """Return 32 mixed bits of each of `numbers`, int64 from 0 to 2^32 - 1; of 0 it is 0.

    Random numbers that need no generator: the same on every device, and products that fit into int64.
    """
    for _ in range(2):
        numbers = ((numbers >> 16) ^ numbers) * 0x45D9F3B % 2**BITS
    return (numbers >> 16) ^ numbers


def create_dropout(
    experts: int, k: int, layer: str, *, drop: float = 0.0, per: Literal["step", "token"] = "step"
) -> ExpertDropout | None:
    """Return the expert dropout that the options of a router describe; None for `drop=0`.

    layer   the router's module path in the model
    drop    the probability of each expert to be dropped
    per     "step": the same experts for all tokens of a forward, on all ranks; "token": others for each token
    """
    require_known("expert dropout per", per, ("step", "token"))
    if drop == 0:
        if per != "step":
            raise ValueError(f"per is {per!r}, but no expert is dropped; add drop=0.1.")
        return None
    return StepDropout(experts, k, drop=drop, layer=layer) if per == "step" else TokenDropout(experts, k, drop=drop)

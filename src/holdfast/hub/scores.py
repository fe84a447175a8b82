"""Scores that are a checkpoint's own: read from the family's gate, which keeps its weights and their names."""

from torch import Tensor, nn

from holdfast.kernels.quantised import as_float
from holdfast.routing.declarations import Order, Values
from holdfast.routing.parts import LinearScore
from holdfast.routing.records import Context

UNREADABLE_GATE = "a router cannot score by them; leave gates out when quantising"


class GateScore(LinearScore):
    """logits = x W^T (+ b), with W and b those of a gate.

    Looked up when used, not copied: training updates the gate's own weights, `restore` has nothing to put back, and
    offloading may replace the tensors between forwards.
    """

    def __init__(self, gate: nn.Module, *, weight: str = "weight", bias: str | None = None) -> None:
        super().__init__()
        # Past nn.Module's bookkeeping: the gate holds the router, so it cannot be a part of it too.
        self.__dict__["gate"] = gate
        self.weight_name, self.bias_name = weight, bias
        self.experts, self.dim = self.matrix.shape

    @property
    def matrix(self) -> Tensor:
        # Not `get_parameter`: while an adapter (PEFT's) adds to it, it is none.
        return as_float(self.__dict__["gate"], self.weight_name, UNREADABLE_GATE)

    @property
    def bias(self) -> Tensor | None:
        return None if self.bias_name is None else getattr(self.__dict__["gate"], self.bias_name).float()

    def finish(self, projected: Tensor) -> Tensor:
        return projected if self.bias is None else projected + self.bias

    def order(self, tokens: Tensor, context: Context) -> Order:
        return Order(self.matrix, self.bias)

    def values(self, tokens: Tensor, context: Context) -> Values:
        return Values()
